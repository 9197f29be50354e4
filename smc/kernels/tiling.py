"""How matrix products of few tokens are cut (`smc.kernels.linear`). Knows nothing but shapes."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from smc.kernels.hopper import MULTIPROCESSORS

MOST_TOKENS = 128
"""Of a program, in FP8."""
_PROGRAMS = 120
"""Fewest programs that occupy all multiprocessors well enough."""
_ROOM, _MODEST_ROOM, _SHARED_ROOM = 216 * 1024, 128 * 1024, 110 * 1024
"""Bytes for what is in flight: of a program that has a multiprocessor to itself, of one that leaves some to whoever
comes next, of one of two."""


@dataclass(frozen=True)
class ProductTiling:
    """How a product is cut and pipelined."""

    block_n: int
    """Outputs a program; 64 or more for Hopper's matrix instructions, 128 of a gated product in FP8."""
    block_k: int
    """Inputs a step; divides K. FP8: 32 or more."""
    splits: int
    """Parts of K."""
    warps: int
    stages: int
    """Steps whose loads are in flight or in use."""


def choose(tokens: int, outputs: int, inputs: int, gated: bool = False, fp8: bool = False) -> ProductTiling:
    """Tiling for [tokens, inputs] x [outputs, inputs]^T: the fewest splits that make enough equal programs."""
    if fp8:
        return _choose_fp8(tokens, outputs, inputs, gated)
    # Of those tried on an H200 (`python -m tests.gpu.bench_products`), as below.
    wide = outputs >= 64 * 1024 or (gated and outputs >= 24 * 1024)
    block_n = 128 if (wide and tokens <= 64) or 64 < tokens <= 256 else 64
    block_k = next(size for size in (128, 64, 32, 16) if inputs % size == 0 and size * block_n <= 8192)
    splits = 1 if gated else _splits(triton.cdiv(outputs, block_n), inputs // block_k, _PROGRAMS)
    stage_bytes = 2 * block_k * (block_n + token_block_of(tokens, fp8))
    # Two programs share a multiprocessor.
    return ProductTiling(
        block_n, block_k, splits, 8 if tokens > 64 else 4, stages=max(2, min(6, _SHARED_ROOM // stage_bytes))
    )


def _choose_fp8(tokens: int, outputs: int, inputs: int, gated: bool) -> ProductTiling:
    token_block = token_block_of(tokens, fp8=True)
    # The largest matrices have as many outputs as the machine needs programs. Of the others, programs of few tokens
    # wait more than they load, and partial sums of few tokens are soon read; of 96, programs of few outputs are better
    # if no partial sums are needed then.
    wide, many, most = gated or outputs >= 64 * 1024, token_block > 64, token_block == MOST_TOKENS
    if wide:
        block_n = 256 if most or (many and triton.cdiv(outputs, 256) >= _PROGRAMS) else 128
    else:
        block_n = 128 if most or (many and triton.cdiv(outputs, 64) < _PROGRAMS) else 64
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(tokens, token_block)
    one_each = tiles <= MULTIPROCESSORS
    if many:
        largest = 256 if block_n == 64 and one_each else 128
    else:
        largest = 128 if wide and token_block > (32 if one_each else 16) else 256
    block_k = next((size for size in (256, 128, 64) if inputs % size == 0 and size <= largest), 32)
    steps, enough = inputs // block_k, _PROGRAMS if many else 192 if token_block == 64 else 96
    splits = 1 if wide else _splits(tiles, steps, enough)
    alone = tiles * splits <= MULTIPROCESSORS or block_n == 256
    room = (_ROOM if many else _MODEST_ROOM) if alone else _SHARED_ROOM
    stages = min(room // (block_k * (block_n + token_block)), max(2, steps // splits), 6)
    return ProductTiling(block_n, block_k, splits, 8 if token_block * block_n > 16384 else 4, stages=max(2, stages))


def _splits(tiles: int, steps: int, programs: int) -> int:
    possible = [splits for splits in range(1, 17) if steps % splits == 0]
    return next((splits for splits in possible if tiles * splits >= programs), possible[-1])


def token_blocks_of(tokens: int, fp8: bool) -> tuple[int, int]:
    """Tokens of a program, padded: powers of two that are multiplied one after the other, of which the second may be 0.
    In FP8 half of the power of two that holds all, and a quarter of it, where these do."""
    block = max(16, triton.next_power_of_2(tokens))
    if not fp8:
        return block, 0
    return (
        (block // 2, block // 4)
        if 64 <= block <= MOST_TOKENS and 4 * tokens <= 3 * block
        else (min(MOST_TOKENS, block), 0)
    )


def token_block_of(tokens: int, fp8: bool) -> int:
    """Tokens of a program, padded."""
    return sum(token_blocks_of(tokens, fp8))
