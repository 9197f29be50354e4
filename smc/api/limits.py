"""Limits of requests, as constants that checks, algorithms and kernels share. Imports nothing, so that a request can be
rejected before anything heavy is loaded."""

from __future__ import annotations

from typing import Any

MAX_PARTICLES = 64
"""Most particles of one request."""
SCHEME_NAMES = ("systematic", "stratified", "residual", "multinomial", "ssp")
"""Resampling schemes. Kernels know a scheme by its index here."""
DTYPE_NAMES = ("float32", "bfloat16", "float16", "fp8", "int4")
"""Numeric types of models: `smc.model.linear.DTYPES`."""
AUTO_DTYPE = "auto"
"""Of a draft: the type is chosen by measured costs (`smc.draft_dtype`)."""
DEFAULT_MAX_TOKENS = 256
"""Longest answer if the request sets no `max_tokens` and the context allows it."""
MAX_STOP_IDS = 1024
"""Most token ids of a request that end its answer."""
MAX_BIASES = 1024
"""Most tokens of a request whose logits are changed."""
MAX_TOP_LOGPROBS = 20
"""Most likeliest tokens that are reported at a position of an answer or a prompt."""
MAX_STOP_BYTES = 1000
"""Most bytes of all stop strings of a request together, in UTF-8."""
UNSET: Any = None
"""The default of a field that is filled in when its object is built."""


class PromptTooLong(ValueError):
    """A prompt has more tokens than are allowed; the message says how many it has and how many are allowed."""
