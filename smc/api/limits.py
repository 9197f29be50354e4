"""What a request may ask for, as constants that its checks, the algorithms and their kernels share. Imports nothing, so
that a request can be refused before anything heavy is loaded."""

from __future__ import annotations

from typing import Any

MAX_PARTICLES = 64
"""Most places of one group."""
SCHEME_NAMES = ("systematic", "stratified", "residual", "multinomial", "ssp")
"""Of resampling. Where schemes are data, a scheme is its index here."""
DTYPE_NAMES = ("float32", "bfloat16", "float16", "fp8")
"""Types that models can have: `smc.model.linear.DTYPES`."""
DEFAULT_MAX_TOKENS = 256
"""Of an answer for which nothing else is said, or what the context leaves."""
MAX_STOP_IDS = 1024
"""Token ids of a request that end its answer."""
MAX_BIASES = 1024
"""Tokens of a request whose logits are changed."""
MAX_TOP_LOGPROBS = 20
"""Likeliest tokens that are reported at a position of an answer."""
MAX_STOP_BYTES = 1000
"""Of all stop strings of a request together, in UTF-8."""
UNSET: Any = None
"""The default of a field that is filled in when its object is built."""
