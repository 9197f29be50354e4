"""Preparation for attention in a forward pass over packed rows. Knows nothing about how attention is computed.

`prepare`, once a pass, computes where new tokens go, and cuts the prefixes that groups share into pieces of equal work.
A piece is a tile of a group's queries and a split of its prefix. The number of pieces depends on the data, the room for
them on shapes alone, so the host reads nothing. `store_kv`, once a layer, normalises and rotates queries and keys, and
writes keys and values to their pages.

Local axes: P pieces (a tile of queries and a split of their prefix). T = R * Q tokens stand row after row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.arrays import Room
from smc.kernels.launch import launch_options, one_variant
from smc.kernels.norm import pair_sum, sum_parts
from smc.round.tensors import RowGroups, RowSpans, RowTables

FAR = tl.constexpr(2**30)  # Beyond every position and row.
BLOCK_T = 128
LANES = (64, 256, 1024)
"""Sizes of a program that handles all rows: few, since each is compiled."""


class BlockTables(NamedTuple):
    """Block tables of slots, as an argument of a kernel."""

    table_SL: Tensor
    stride: int
    width: int


class RowPages(NamedTuple):
    """The slot whose block table each row reads, and the pages that the row has for itself, as an argument of a
    kernel."""

    slot_R: Tensor
    tail_RB: Tensor | None
    tail_stride: int
    tail_width: int
    tail_R: Tensor | None


def table_arguments(rows: RowTables) -> tuple[BlockTables, RowPages]:
    """Return the tables of rows as arguments of a kernel."""
    table, tail = rows.table_SL, rows.tail_RB
    assert table.stride(1) == 1 and (tail is None or tail.stride(1) == 1), "pages of a row are contiguous"
    assert (tail is None) == (rows.tail_R is None) and rows.slot_R.is_contiguous()
    stride, width = (0, 0) if tail is None else (tail.stride(0), tail.shape[1])
    return BlockTables(table, table.stride(0), table.shape[1]), RowPages(rows.slot_R, tail, stride, width, rows.tail_R)


class CacheTensors(NamedTuple):
    """Keys and values of one layer, of B pages, the dummy page included."""

    k_BJD: Tensor
    v_BJD: Tensor


class HeadNorms(NamedTuple):
    """Weights of RMSNorm of single heads of queries and keys [D]."""

    q: Tensor
    k: Tensor
    eps: float


class PieceShape(NamedTuple):
    """Sizes of pieces, and the room that they need."""

    heads: int
    """Query heads of a key/value head."""
    block_x: int
    """Queries of a tile."""
    block_p: int
    """Prefix positions that are read at a time."""
    pieces: int
    """Target number of pieces, exceeded only if there are more tiles, or unequal prefixes."""
    min_tiles: int
    """Minimum length of a piece, in units of `block_p`."""
    longest: int
    """Maximum number of positions that a group attends to together; never more than a block table has."""

    def bound(self, groups: int, rows: int, queries: int) -> int:
        """Return the maximum number of pieces: each of T * `heads` queries is in one tile, and each group's last tile
        may be partly empty."""
        groups = min(groups, rows)
        return self.pieces + (rows * queries * self.heads - groups) // self.block_x + groups

    def entries(self, rows: int, queries: int) -> int:
        """Return the maximum of the sum over groups of queries times splits of the prefix."""
        x = rows * queries * self.heads
        return min(x + self.block_x * self.pieces, x * triton.cdiv(self.longest, self.block_p))


class RowSplits(NamedTuple):
    """The splits of every row's prefix."""

    shared_R: Tensor
    """Number of leading positions that the row's group attends to together."""
    entry_R: Tensor
    """Entry of the row's first query in the first split."""
    step_R: Tensor
    """Distance in entries from one split to the next."""
    first_R: Tensor
    """First split that has an entry: that of the sums of all splits up to it."""
    count_R: Tensor
    """Number of splits; in fixed order (`smc.attention.fixed_order`) of those that are complete."""


class Pieces(NamedTuple):
    """Pieces of prefixes; from `count` on they are undefined."""

    query_P: Tensor
    """First query among all T * `heads`."""
    queries_P: Tensor
    """Number of queries."""
    slot_P: Tensor
    """Slot whose table names the prefix."""
    begin_P: Tensor
    """First position."""
    end_P: Tensor
    entry_P: Tensor
    """Entry of the first query; in fixed order, where a piece may have several splits, that of the first split."""
    step_P: Tensor
    """Distance in entries from one split to the next."""
    count_1: Tensor
    """Number of pieces."""

    @staticmethod
    def allocate(room: Room, most: int) -> Pieces:
        query_P, queries_P, slot_P, begin_P, end_P, entry_P, step_P = (room.ints(most) for _ in range(7))
        return Pieces(query_P, queries_P, slot_P, begin_P, end_P, entry_P, step_P, room.ints(1))


class PassLayout(NamedTuple):
    """Where the tokens of a pass go, and which prefixes their queries read together."""

    position_T: Tensor
    """Position of every token; 0 where there is no token."""
    page_T: Tensor
    """Page of every token; 0, the dummy page, where there is no token."""
    splits: RowSplits
    pieces: Pieces


@dataclass(frozen=True)
class Prepared:
    """Results of `prepare`, which hold for all layers of a pass."""

    tables: RowTables
    spans: RowSpans
    layout: PassLayout


class PassSizes(NamedTuple):
    """Sizes of a pass."""

    rows: int
    tokens: int
    queries: int


def prepare(tables: RowTables, spans: RowSpans, queries: int, groups: RowGroups, shape: PieceShape) -> Prepared:
    """Compute everything of a pass that does not depend on the layer. Indices are int32.

    `queries` is Q. Tokens of a row are at positions from `start` on; those past its `count` go to the dummy page. A
    group attends to its first min(shared, start and tail of its live rows) positions together, by the table of its
    first live row."""
    return launch_prepare(_prepare, tables, spans, queries, groups, shape, shape)


def launch_prepare(
    kernel: Any,
    tables: RowTables,
    spans: RowSpans,
    queries: int,
    groups: RowGroups,
    shape: PieceShape,
    cut: PieceShape | tuple,
    **constants: int,
) -> Prepared:
    """Allocate and compute what `prepare` returns, with a kernel like `_prepare`. `cut`: what the kernel needs to cut
    prefixes by `shape`."""
    rows, room = len(spans.start_R), Room(spans.start_R.device)
    assert all(x.is_contiguous() for x in (*spans, *groups))
    out = PassLayout(
        position_T=room.ints(rows * queries),
        page_T=room.ints(rows * queries),
        splits=RowSplits(*(room.ints(rows) for _ in RowSplits._fields)),
        pieces=Pieces.allocate(room, shape.bound(len(groups.first_G), rows, queries)),
    )
    # One program handles all rows to cut prefixes.
    block_r = next((lanes for lanes in LANES if lanes >= rows), triton.next_power_of_2(rows))
    kernel[(triton.cdiv(rows * queries, BLOCK_T) + 1,)](
        *table_arguments(tables), spans, groups, out, PassSizes(rows, rows * queries, queries), cut,
        BLOCK_T=BLOCK_T, BLOCK_R=block_r, num_warps=min(16, max(4, block_r // 128)), **constants,
    )  # fmt: skip
    return Prepared(tables, spans, out)


@triton.jit
def row_tables(r, tables, pages):
    """Return the addresses of a row's table and tail, and the tail's first position."""
    table = tables.table_SL + tl.load(pages.slot_R + r).to(tl.int64) * tables.stride
    if pages.tail_RB is not None:
        return table, pages.tail_RB + r.to(tl.int64) * pages.tail_stride, tl.load(pages.tail_R + r)
    else:
        return table, table, 0


@triton.jit
def page_at(p, exists, table, tail, tail_start, tables, pages):
    """Return the pages of a row's positions; 0 where none exists."""
    at, found = table + p, p < tables.width
    if pages.tail_RB is not None:
        # A single load, from the table or the tail: two would double the loads that precede every key.
        found = tl.where(p >= tail_start, p - tail_start < pages.tail_width, found)
        at = tl.where(p >= tail_start, tail + (p - tail_start), at)
    return tl.load(at, mask=exists & found, other=0)


@one_variant()
def _prepare(tables, pages, spans, groups, out, sizes, cut, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr):
    if tl.program_id(0) == 0:
        _cut_prefixes(tables, pages, spans, groups, out, sizes, cut, BLOCK_R)
    place_tokens(tables, pages, spans, out, sizes, BLOCK_T)


@triton.jit
def place_tokens(tables, pages, spans, out, sizes, BLOCK_T: tl.constexpr):
    """Store position and page of BLOCK_T tokens; the first program has none."""
    token = (tl.program_id(0) - 1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (token >= 0) & (token < sizes.tokens)
    r, query = tl.where(inside, token // sizes.queries, 0), token % sizes.queries
    exists = inside & (query < tl.load(spans.count_R + r))
    position = tl.where(exists, tl.load(spans.start_R + r) + query, 0)
    table, tail, tail_start = row_tables(r, tables, pages)
    page = page_at(position, exists, table, tail, tail_start, tables, pages)
    tl.store(out.position_T + token, position, mask=inside)
    tl.store(out.page_T + token, page, mask=inside)


@triton.jit
def shared_by_groups(r, inside, tables, pages, spans, groups, longest, BLOCK_R: tl.constexpr):
    """Return first row and size of each row's group, the number of leading positions that the group attends to
    together, the group's first live row as far as it is known up to this row (else FAR), and whether the row lives."""
    group, reach = tl.load(groups.group_R + r, mask=inside, other=0), tl.load(spans.start_R + r, mask=inside, other=0)
    live = tl.load(spans.count_R + r, mask=inside, other=0) > 0
    if pages.tail_RB is not None:
        reach = tl.minimum(reach, tl.load(pages.tail_R + r, mask=inside, other=0))
    first, size = tl.load(groups.first_G + group), tl.load(groups.size_G + group)
    shared = tl.load(groups.shared_G + group)
    reach, lead = tl.where(live, reach, FAR), tl.where(live, r, FAR)
    _, reach, lead = tl.associative_scan(((r == first).to(tl.int32), reach, lead), 0, _lowest)
    # A group's last row has the minimum over all its rows. Its first live row is known from that row on. Padding may
    # name any group, and is ignored.
    reach = tl.gather(reach, tl.maximum(tl.minimum(first + size, BLOCK_R) - 1, 0), 0)
    shared = tl.where(
        reach < FAR, tl.maximum(tl.minimum(tl.minimum(shared, reach), tl.minimum(longest, tables.width)), 0), 0
    )
    return first, size, shared, lead, live


@triton.jit
def _cut_prefixes(tables, pages, spans, groups, out, sizes, cut, BLOCK_R: tl.constexpr):
    """Cut prefixes into pieces, with one lane for each row of `each` queries; a group's first live row decides for the
    group."""
    rows, each = sizes.rows, sizes.queries * cut.heads
    block_x, block_p, most_pieces = cut.block_x, cut.block_p, cut.pieces
    r = tl.arange(0, BLOCK_R)
    inside = r < rows
    slot = tl.load(pages.slot_R + r, mask=inside, other=0)
    first, size, shared, lead, live = shared_by_groups(r, inside, tables, pages, spans, groups, cut.longest, BLOCK_R)
    x = tl.where(lead < FAR, (first + size - lead) * each, 0)
    tiles, reads = tl.where(shared > 0, tl.cdiv(x, block_x), 0), tl.cdiv(shared, block_p)
    speaks = live & (r == lead)
    all_tiles = tl.sum(tl.where(speaks, tiles, 0), 0)
    # If there are few tiles, the aim is a multiple of their number, so that all tiles of one group are cut alike.
    aim = tl.where(all_tiles < most_pieces, most_pieces // tl.maximum(all_tiles, 1) * all_tiles, most_pieces)
    chunk = tl.maximum(tl.cdiv(tl.sum(tl.where(speaks, tiles * reads, 0), 0), tl.maximum(aim, 1)), cut.min_tiles)
    splits = tl.cdiv(reads, chunk)
    pieces = tl.where(speaks, tiles * splits, 0)
    entry = tl.cumsum(tl.where(speaks, x * splits, 0), 0) - x * splits
    tl.store(out.splits.shared_R + r, shared, mask=inside)
    tl.store(out.splits.entry_R + r, entry + (r - lead) * each, mask=inside)
    tl.store(out.splits.step_R + r, x, mask=inside)
    tl.store(out.splits.first_R + r, 0, mask=inside)
    tl.store(out.splits.count_R + r, tl.where(live, splits, 0), mask=inside)
    tl.store(out.pieces.count_1, tl.sum(pieces, 0))
    begin, chunk = tl.cumsum(pieces, 0) - pieces, chunk * block_p
    for k in tl.range(0, tl.max(pieces, 0)):
        # Tiles of one split are adjacent, since they read the same keys.
        split, done = k // tl.maximum(tiles, 1), k % tl.maximum(tiles, 1) * block_x
        at, mine = begin + k, k < pieces
        tl.store(out.pieces.query_P + at, lead * each + done, mask=mine)
        tl.store(out.pieces.queries_P + at, tl.minimum(x - done, block_x), mask=mine)
        tl.store(out.pieces.slot_P + at, slot, mask=mine)
        tl.store(out.pieces.begin_P + at, split * chunk, mask=mine)
        tl.store(out.pieces.end_P + at, tl.minimum(split * chunk + chunk, shared), mask=mine)
        tl.store(out.pieces.entry_P + at, entry + split * x + done, mask=mine)
        tl.store(out.pieces.step_P + at, x, mask=mine)


@triton.jit
def _lowest(head, reach, lead, next_head, next_reach, next_lead):
    """Combine two parts of a scan: minima since the last head."""
    reach, lead = tl.minimum(reach, next_reach), tl.minimum(lead, next_lead)
    return head | next_head, tl.where(next_head != 0, next_reach, reach), tl.where(next_head != 0, next_lead, lead)


def store_kv(
    qkv: Tensor,
    q_out: Tensor,
    cache: CacheTensors,
    rope: Tensor,
    position_T: Tensor,
    page_T: Tensor,
    heads: tuple[int, int],
    norm: HeadNorms | None = None,
    pdl: bool = False,
) -> None:
    """Normalise and rotate queries into `q_out` [T, H, D]; write keys, likewise normalised and rotated, and values to
    their pages, but never to page 0.

    qkv [T, (H + 2J) * D], or partial sums of it [parts, T, (H + 2J) * D]; rope [positions, D] float32 as made by
    `RopeTable`; position_T, page_T int32, where padding has page 0 and any position of the table; heads (H, J). All
    arithmetic is float32, rounded once."""
    (h, j), d = heads, cache.k_BJD.shape[-1]
    assert qkv.shape[-1] == (h + 2 * j) * d and qkv.is_contiguous() and rope.shape[1] == d and rope.is_contiguous()
    assert all(each.is_contiguous() for each in (*cache, q_out)) and cache.k_BJD.shape[1] == j
    block, tokens = min(16, triton.next_power_of_2(h + 2 * j)), qkv.shape[-2]
    _store_kernel[(tokens, triton.cdiv(h + 2 * j, block))](
        qkv, q_out, cache, rope, position_T, page_T, norm, tokens * qkv.shape[-1],
        H=h, J=j, D=d, HEADS=block, SPLITS=len(qkv) if qkv.dim() == 3 else 1, num_warps=2,
        enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip


@one_variant("qkv", "q_out", "cache", "rope", "norm", "split_stride")
def _store_kernel(
    qkv, q_out, cache, rope, position_T, page_T, norm, split_stride,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one token and HEADS of its H + 2J heads, as two halves of D // 2 dimensions."""
    t = tl.program_id(0)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D // 2)[None, :]
    is_q, is_k, is_v = n < H, (n >= H) & (n < H + J), (n >= H + J) & (n < H + 2 * J)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    page, position = tl.load(page_T + t), tl.load(position_T + t)
    at = qkv + t.to(tl.int64) * ((H + 2 * J) * D) + n * D + d
    # Rounded as an unsplit product would be.
    a = sum_parts(at, split_stride, n < H + 2 * J, SPLITS).to(q_out.dtype.element_ty).to(tl.float32)
    b = sum_parts(at + D // 2, split_stride, n < H + 2 * J, SPLITS).to(q_out.dtype.element_ty).to(tl.float32)
    x, y = a, b
    if norm is not None:
        scale = tl.rsqrt(pair_sum(a * a + b * b) / D + norm.eps)[:, None]
        x *= scale * tl.where(is_q, tl.load(norm.q + d), tl.load(norm.k + d)).to(tl.float32)
        y *= scale * tl.where(is_q, tl.load(norm.q + D // 2 + d), tl.load(norm.k + D // 2 + d)).to(tl.float32)
    cos = tl.load(rope + position.to(tl.int64) * D + d)
    sin = tl.load(rope + position.to(tl.int64) * D + D // 2 + d)
    x, y = x * cos - y * sin, y * cos + x * sin
    q_at = q_out + t.to(tl.int64) * (H * D) + n * D + d
    tl.store(q_at, x, mask=is_q)
    tl.store(q_at + D // 2, y, mask=is_q)
    # The dummy page keeps its content: padding tokens may hold anything, and a masked position must not read a NaN.
    to = page.to(tl.int64) * J * D + d
    k_at, v_at = cache.k_BJD + to + (n - H) * D, cache.v_BJD + to + (n - H - J) * D
    tl.store(k_at, x, mask=is_k & (page != 0))
    tl.store(k_at + D // 2, y, mask=is_k & (page != 0))
    tl.store(v_at, a, mask=is_v & (page != 0))
    tl.store(v_at + D // 2, b, mask=is_v & (page != 0))
