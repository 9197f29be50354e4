"""Ways of decoding in kernels: the values of `smc.types.Decoding`, and the sets that kernels ask for."""

from __future__ import annotations

import triton
import triton.language as tl

from smc.types import Decoding

TARGET, DRAFT = tl.constexpr(int(Decoding.TARGET)), tl.constexpr(int(Decoding.DRAFT))
WALK, REJECTION = tl.constexpr(int(Decoding.WALK)), tl.constexpr(int(Decoding.REJECTION))
INDEPENDENT, DISTINCT = tl.constexpr(int(Decoding.INDEPENDENT)), tl.constexpr(int(Decoding.DISTINCT))


@triton.jit
def is_exact(decoding):
    """Whether a way of decoding is one of `smc.types.EXACT`."""
    return (decoding == WALK) | (decoding == REJECTION)


@triton.jit
def is_separate(decoding):
    """Whether a way of decoding is one of `smc.types.SEPARATE`."""
    return (decoding == TARGET) | (decoding == DRAFT) | (decoding == INDEPENDENT)
