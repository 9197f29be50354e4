"""Tensor parallelism: the part of a model that each rank holds, with heads and inner features split over ranks.

Query, key, value, gate and up are split by rows, o and down by columns, so a layer needs two sums over the ranks: after
o and after down. All other weights are replicated. Each rank has the same number of key/value heads, with their query
heads, and of inner features; if they do not divide evenly, the last ranks are padded. Padding weights are zero and
contribute zero: padded values are zero whatever the attention weights, and silu(0) * 0 is zero.

Knows nothing about files, parameters or communication between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from smc.model.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INNER_BLOCK = 64
"""Inner features are split in blocks of this size if it divides their number, because kernels read weights in such
blocks."""


class Reduce(Protocol):
    """Sum over all ranks of a model."""

    def __call__(self, part_TE: Tensor, /) -> Tensor:
        """Returns the sum, with the same bits on every rank. May write in place; the result is valid until the next
        call."""
        ...

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor:
        """A buffer [tokens, features] for `part_TE` that other ranks can read directly, which saves a copy."""
        ...


@dataclass(frozen=True)
class Shard:
    """One rank of the ranks that share a model."""

    rank: int = 0
    """Index of the rank, from 0 to `degree - 1`."""
    degree: int = 1
    """Number of ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"degree={self.degree!r} is not a positive integer")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.degree:
            raise ValueError(
                f"rank={self.rank!r} is out of range; allowed for degree={self.degree}: 0 to {self.degree - 1}"
            )


WHOLE = Shard()
"""A model on a single rank."""


@dataclass(frozen=True)
class Axis:
    """One axis of a published tensor, as one rank sees it."""

    size: int
    """Size of the axis in the whole tensor."""
    held: range
    """Indices of the whole tensor that the rank holds; may be empty."""
    local_size: int
    """Size of the axis in the rank's own tensor: the held indices, then padding."""

    @staticmethod
    def whole(size: int) -> Axis:
        return Axis(size, range(size), size)


@dataclass(frozen=True)
class Split:
    """The axes that are split over ranks."""

    query: Axis
    """Rows of the query projection, columns of o."""
    key: Axis
    """Rows of the key and value projections."""
    inner: Axis
    """Rows of gate and up, columns of down."""

    @staticmethod
    def of(config: ModelConfig, shard: Shard) -> Split:
        """Split the model of `config`. Raises ValueError if there are more ranks than key/value heads."""
        heads = config.num_kv_heads
        if shard.degree > heads:
            raise ValueError(
                f"degree={shard.degree} is more than the model's {heads} key/value heads; allowed: 1 to {heads}"
            )
        queries = config.num_heads // heads
        width = 1 if config.intermediate_size % INNER_BLOCK else INNER_BLOCK
        return Split(
            query=_divide(heads, queries * config.head_dim, shard),
            key=_divide(heads, config.head_dim, shard),
            inner=_divide(config.intermediate_size // width, width, shard),
        )


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Shape of one rank's shard, padding included; the same for every rank. Raises ValueError if the model cannot be
    split."""
    split = Split.of(config, shard)
    return replace(
        config,
        num_heads=split.query.local_size // config.head_dim,
        num_kv_heads=split.key.local_size // config.head_dim,
        intermediate_size=split.inner.local_size,
        whole_heads=None if shard.degree == 1 else (config.num_heads, config.num_kv_heads),
    )


def _divide(blocks: int, block: int, shard: Shard) -> Axis:
    """Assign whole blocks of `block` indices to the ranks in order. The last ranks may hold fewer blocks, or none."""
    per_rank = -(-blocks // shard.degree)
    first, end = (min(rank * per_rank, blocks) for rank in (shard.rank, shard.rank + 1))
    return Axis(blocks * block, range(first * block, end * block), per_rank * block)
