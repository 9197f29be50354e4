"""Tensor parallelism: the part of a model that each rank holds, with heads and inner features split over ranks.

Query, key, value, gate and up are split by rows, o and down by columns, so a layer needs two sums over the ranks: after
o and after down. All other weights are replicated.

Any number of ranks up to the number of query heads can share a model. The query heads of each key/value head are cut
into pieces, and the pieces are given to the ranks in order, as evenly as possible. A rank holds a copy of the key/value
head for each of its pieces, so a head that is cut is held several times, and so are its keys and values. The number of
pieces is chosen so that a rank reads as little as possible in a step: weights, and the keys and values of as many
tokens as there are hidden features.

All ranks have the same shape, so some of them contain padding: query heads of a piece, whole pieces or inner features.
The weights of padding are zero. Padding adds zero to both sums, because its columns of o and down are zero.

Heads may be padded as well (`ModelConfig.on_device`): a rank's tensors then have more features for each head than the
files.

Knows nothing about files, parameters or communication between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from smc.model.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INNER_BLOCKS = (64, 32, 16, 8)
"""Sizes of the blocks in which inner features are split, because kernels read weights in such blocks. The first size is
used that gives every rank a block. If 64 does not divide the number of features, they are split one by one."""


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


class AxisSpan(NamedTuple):
    """Consecutive indices of an axis that a rank holds."""

    held: range
    """Indices of the whole tensor; not empty."""
    start: int
    """Index in the rank's own tensor of the first of them."""


@dataclass(frozen=True)
class Axis:
    """One axis of a published tensor, as one rank sees it."""

    size: int
    """Size of the axis in the whole tensor."""
    spans: tuple[AxisSpan, ...]
    """Indices that the rank holds; may be empty, and may contain an index several times. The rest of its tensor is
    padding."""
    local_size: int
    """Size of the axis in the rank's own tensor."""
    step: int
    """All spans of all ranks begin and end at multiples of this, in both tensors."""
    padded_span: int | None = None
    """Number of indices of the rank's own tensor that each span takes up, padding behind it included; None: as many as
    it holds."""

    @staticmethod
    def whole(size: int) -> Axis:
        return Axis.part(size, range(size))

    @staticmethod
    def part(size: int, held: range) -> Axis:
        """An axis of the indices `held` only, without padding."""
        return Axis(size, (AxisSpan(held, 0),), len(held), math.gcd(held.start, held.stop))

    @property
    def held(self) -> range:
        """Indices of the whole tensor that an axis of one span holds."""
        (span,) = self.spans
        return span.held

    @property
    def start(self) -> int:
        """Index in the rank's own tensor at which an axis of one span begins."""
        (span,) = self.spans
        return span.start

    def split(self) -> Iterator[Axis]:
        """Yield an axis for each span."""
        return (replace(self, spans=(span,)) for span in self.spans)


@dataclass(frozen=True)
class Heads:
    """Distribution of a model's heads over its ranks."""

    pieces: int
    """Number of pieces into which the query heads of each key/value head are cut. Equals the number of copies of each
    key/value head."""
    piece: int
    """Number of query heads of a piece, padding included."""
    slots: int
    """Number of pieces of a rank, padding included. Equals the number of its key/value heads."""

    @staticmethod
    def of(config: ModelConfig, degree: int) -> Heads:
        """Choose the number of pieces for `degree` ranks. Raises ValueError if there are more ranks than query
        heads."""
        if degree > config.num_heads:
            raise ValueError(
                f"degree={degree} is more than the model's {config.num_heads} query heads; "
                f"allowed: 1 to {config.num_heads}"
            )
        queries = config.num_heads // config.num_kv_heads
        fewest = -(-degree // config.num_kv_heads)  # the fewest pieces that give each rank one
        found = (
            Heads(pieces, -(-queries // pieces), -(-config.num_kv_heads * pieces // degree))
            for pieces in range(fewest, queries + 1)
        )
        # What a rank reads, in units of one head's rows of a matrix (or columns of o): two for each query head (query,
        # o), two for the weights of each key/value head (key, value), and as much again for its keys and values.
        return min(found, key=lambda heads: heads.slots * (2 * heads.piece + 4))


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
        """Split the model of `config`. Raises ValueError if there are more ranks than query heads."""
        heads, dim = Heads.of(config, shard.degree), config.head_dim
        queries = config.num_heads // config.num_kv_heads
        query_ranks, key_ranks = [], []
        for units in _shares(config.num_kv_heads * heads.pieces, shard.degree):
            query, key = [], []
            for slot, unit in enumerate(units):
                head, piece = divmod(unit, heads.pieces)
                held = _shares(queries, heads.pieces)[piece]
                first = head * queries
                query.append(AxisSpan(range(first + held.start, first + held.stop), slot * heads.piece))
                key.append(AxisSpan(range(head, head + 1), slot))
            query_ranks.append(query)
            key_ranks.append(key)
        return Split(
            query=_axis(config.num_heads, query_ranks, heads.slots * heads.piece, dim, shard, config.stored_head_dim),
            key=_axis(config.num_kv_heads, key_ranks, heads.slots, dim, shard, config.stored_head_dim),
            inner=_inner(config.intermediate_size, shard),
        )


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of one rank's shard, padding included; the same for every rank. Raises ValueError if the model
    cannot be split."""
    split, copies = Split.of(config, shard), Heads.of(config, shard.degree).pieces
    return replace(
        config,
        num_heads=split.query.local_size // config.head_dim,
        num_kv_heads=split.key.local_size // config.head_dim,
        intermediate_size=split.inner.local_size,
        whole_heads=None if shard.degree == 1 else (config.num_heads, copies * config.num_kv_heads),
    )


def can_be_divided(config: ModelConfig, degree: int) -> bool:
    """Return whether `degree` ranks can share a model of this shape."""
    try:
        local_config(config, Shard(0, degree))
    except ValueError:
        return False
    return True


def held_sizes(config: ModelConfig, degree: int) -> tuple[tuple[int, int, int], ...]:
    """Return the numbers of query heads, key/value heads and inner features of each rank, without padding. Raises
    ValueError if the model cannot be split."""
    splits = [Split.of(config, Shard(rank, degree)) for rank in range(degree)]

    def size(axis: Axis, unit: int) -> int:
        return sum(len(span.held) for span in axis.spans) // unit

    dim = config.stored_head_dim
    return tuple((size(split.query, dim), size(split.key, dim), size(split.inner, 1)) for split in splits)


def _inner(size: int, shard: Shard) -> Axis:
    widths = () if size % INNER_BLOCKS[0] else INNER_BLOCKS
    width = next((width for width in widths if size // width >= shard.degree), 1)
    shares = _shares(size // width, shard.degree)
    return _axis(size // width, [[AxisSpan(held, 0)] if held else [] for held in shares], len(shares[0]), width, shard)


def _shares(count: int, parts: int) -> list[range]:
    """Divide `count` indices into `parts` ranges whose sizes differ by at most one, the largest first."""
    least, more = divmod(count, parts)
    bounds = [part * least + min(part, more) for part in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _axis(
    size: int, ranks: list[list[AxisSpan]], local_size: int, unit: int, shard: Shard, stored_unit: int | None = None
) -> Axis:
    """Build the axis of one rank. `size`, `ranks` and `local_size` are in units of `unit` indices, of which the first
    `stored_unit` (default: all) are in the whole tensor, too."""
    if stored_unit is not None and stored_unit != unit:
        padded = (
            AxisSpan(range(one * stored_unit, (one + 1) * stored_unit), (start + i) * unit)
            for held, start in ranks[shard.rank]
            for i, one in enumerate(held)
        )
        step = math.gcd(stored_unit, unit)
        return Axis(size * stored_unit, tuple(padded), local_size * unit, step, padded_span=unit)
    merged = [_merged(spans) for spans in ranks]
    bounds = [bound for spans in merged for held, start in spans for bound in (held.start, held.stop, start)]
    step = unit * math.gcd(local_size, *bounds)
    spans = (AxisSpan(range(held.start * unit, held.stop * unit), start * unit) for held, start in merged[shard.rank])
    return Axis(size * unit, tuple(spans), local_size * unit, step)


def _merged(spans: list[AxisSpan]) -> list[AxisSpan]:
    """Merge spans that continue one another in both tensors."""
    merged: list[AxisSpan] = []
    for held, start in spans:
        if merged and merged[-1].held.stop == held.start and merged[-1].start + len(merged[-1].held) == start:
            first = merged.pop()
            held, start = range(first.held.start, held.stop), first.start
        merged.append(AxisSpan(held, start))
    return merged
