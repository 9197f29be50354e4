"""Which part of a model each of several ranks holds, when heads and inner features are split between them.

Query, key, value, gate and up are split by rows, o and down by columns, so that a layer needs two sums over the ranks:
after o and after down. All else is held by every rank. Every rank has room for the same number of key/value heads,
which come with their query heads, and of inner features; what the last ranks have left over is padding. Padding weights
are zero and so is what they add: values are zero whatever attention makes of zero scores, and silu(0) * 0 is zero.

Knows nothing about files, parameters or how ranks talk to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from smc.model.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INNER_BLOCK = 64
"""Inner features are dealt out in blocks of this many where they come in such blocks: kernels read weights that way."""


class Reduce(Protocol):
    """Sums over all ranks of a model."""

    def __call__(self, part_TE: Tensor, /) -> Tensor:
        """The sum, the same bits on every rank. May be made in place, and lasts until the next one is asked for."""
        ...

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor:
        """A tensor for a part, which then need not be copied to where the others read it."""
        ...


@dataclass(frozen=True)
class Shard:
    """One rank's place among those that hold a model together."""

    rank: int = 0
    """From 0 to `degree - 1`."""
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
"""The only rank of one."""


@dataclass(frozen=True)
class Axis:
    """One axis of a published tensor, as one rank sees it."""

    size: int
    """Indices of the whole tensor."""
    held: range
    """Those that the rank holds; may be empty."""
    room: int
    """Indices in the rank's own tensor: those held come first, the rest is padding."""

    @staticmethod
    def whole(size: int) -> Axis:
        return Axis(size, range(size), size)


@dataclass(frozen=True)
class Split:
    """The axes that are divided between ranks."""

    query: Axis
    """Rows of the query projection, columns of o."""
    key: Axis
    """Rows of the key projection and of the value projection."""
    inner: Axis
    """Rows of gate and of up, columns of down."""

    @staticmethod
    def of(config: ModelConfig, shard: Shard) -> Split:
        """`config` is the whole model's. Raises ValueError if there are more ranks than key/value heads."""
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
    """The shape of what one rank holds, padding included; the same for every rank. Raises ValueError if it cannot be
    split."""
    split = Split.of(config, shard)
    return replace(
        config,
        num_heads=split.query.room // config.head_dim,
        num_kv_heads=split.key.room // config.head_dim,
        intermediate_size=split.inner.room,
    )


def _divide(blocks: int, block: int, shard: Shard) -> Axis:
    """Whole blocks of `block` indices each, in the order of the ranks; the last ranks may hold fewer, or none."""
    room = -(-blocks // shard.degree)
    first, end = (min(rank * room, blocks) for rank in (shard.rank, shard.rank + 1))
    return Axis(blocks * block, range(first * block, end * block), room * block)
