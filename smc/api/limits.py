"""Limits of requests: constants that checks, algorithms and kernels share. Imports nothing, so that a request can be
rejected before anything heavy is loaded."""

from __future__ import annotations

from typing import Any

MAX_PARTICLES = 64
"""Maximum number of particles of one request."""
SCHEME_NAMES = ("systematic", "stratified", "residual", "multinomial", "ssp")
"""Resampling schemes. Kernels know a scheme by its index here."""
DTYPE_NAMES = ("float32", "bfloat16", "float16", "fp8", "int4")
"""Numeric types of models: `smc.model.linear.DTYPES`."""
AUTO_DTYPE = "auto"
"""Type of a draft that is chosen by measured times (`smc.draft_dtype`)."""
DEFAULT_MAX_TOKENS = 256
"""Maximum tokens of an answer if the request sets no `max_tokens` and the context allows it."""
MAX_STOP_IDS = 1024
"""Maximum number of a request's token ids that end its answer."""
MAX_BIASES = 1024
"""Maximum number of tokens whose logits a request changes."""
MAX_TOP_LOGPROBS = 20
"""Maximum number of likeliest tokens that are reported at a position of an answer or a prompt."""
MAX_STOP_BYTES = 1000
"""Maximum UTF-8 bytes of all stop strings of a request together."""
MAX_BAD_BYTES = 4096
"""Maximum UTF-8 bytes of all bad words of a request together."""
LOADS = ("files", "random", "grown")
"""Where weights come from: files, random numbers, or a small model padded to a published shape."""
UNSET: Any = None
"""The default of a field that is filled in when its object is built."""


class PromptTooLong(ValueError):
    """A prompt has more tokens than are allowed; the message gives both numbers."""
