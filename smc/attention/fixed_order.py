"""Attention in which the sums of a query have one order, whatever stands beside it: the same bits for a row alone, in a
tree, in a batch, and for a token of a prompt, with and without a shared prefix.

Positions are cut into splits whose borders are the same for every query (`split_begin`), and splits into tiles. A tile
is taken into the split's softmax, a split into the query's, both in the order of positions. How many programs share
this work depends on the load, but not its order: a program may stop at the end of any tile, and the next one continues
from the sums that it stored. These kernels share `walk`:

- `_prefix_kernel` reads the prefix that a group's rows share, up to its last whole tile, for a tile of their queries.
  The program of the first splits adds them up; the others store the sums of each split.
- `_own_kernel` adds up these sums and continues with the remaining positions of one row.
- `_whole_kernel` reads all positions for a tile of a prompt's queries. The kernel of `smc.attention.fixed_step` does so
  for the rows of short contexts.

Positions that a query does not see have weight 0, which changes no sum. The sum of a tile's weights is a tree of pairs,
so that the threads that hold them do not matter; sums of products are those of the tensor cores; no compiler fuses
multiplications and additions.

Local axes: P pieces, U entries of the workspace (a query and a split), Z tiles of a prompt's queries, Y queries with
their heads for one key/value head. T = R * Q tokens stand row after row. EACH = H // J."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.arrays import offsets, to_device
from smc.attention.backend import AttentionBackend, AttentionPass, ForwardBatch
from smc.attention.kernels import LOG2_E, LOWEST, check_heads, floor_rows
from smc.kernels.launch import MULTIPROCESSORS, launch_options, one_variant
from smc.kernels.norm import pair_sum
from smc.kernels.packed_rows import (
    FAR,
    CacheTensors,
    PieceShape,
    Prepared,
    launch_prepare,
    page_at,
    place_tokens,
    row_tables,
    shared_by_groups,
    table_arguments,
)
from smc.memory.kv_cache import KVPool
from smc.round.tensors import RowGroups, RowSpans, RowTables

UNIT = 256
"""Positions of the first splits. Later splits are longer, so that long contexts have few."""
DOUBLINGS = tl.constexpr(8)
LEAST_Y = 16
"""Minimum number of queries of a program: what tensor cores take."""


@dataclass(frozen=True)
class FixedTiling:
    """Sizes of attention. Those above the line decide the order of sums; they depend on the model alone."""

    unit: int
    """Positions of the first splits."""
    block_p: int
    """Positions of a tile."""

    block_x: int
    """Queries of a program that reads a prefix."""
    pieces: int
    """Target number of pieces (tile of queries, run of splits) of a key/value head."""
    alone: int
    """Number of positions of an unfinished split up to which each row reads them by itself, so that few rows need not
    wait for them."""
    stages: int
    """Number of tiles whose loads are in flight or in use."""
    warps: int

    @staticmethod
    def choose(
        rows: int, together: int, queries: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
    ) -> FixedTiling:
        """`together`: number of rows of a group, at most or typically."""
        (h, j), wide = heads, dtype.itemsize == 4
        x, programs = together * queries * h // j, rows * j * triton.cdiv(queries * h // j, LEAST_Y)
        return FixedTiling(
            unit=UNIT,
            block_p=32 if wide else 64,
            block_x=min(32 if wide or head_dim > 128 else 64, max(LEAST_Y, triton.next_power_of_2(x))),
            pieces=2 * max(1, MULTIPROCESSORS // j),
            alone=UNIT if programs <= 2 * MULTIPROCESSORS else 0,
            stages=1 if wide else 2 if head_dim > 128 else 4 if x <= LEAST_Y else 3,
            warps=4,
        )


class FixedCut(NamedTuple):
    """How prefixes are cut into pieces, and the room for their sums."""

    shape: PieceShape
    entries: int
    """Maximum number of entries; two a query are always enough."""
    alone: int


@triton.jit
def split_size(p, UNIT: tl.constexpr):
    """Return the length of the split that holds position `p`: a unit, twice as much from 8 units on, four times from
    32 on, eight times from 128 on."""
    return UNIT * tl.where(p < 8 * UNIT, 1, tl.where(p < 32 * UNIT, 2, tl.where(p < 128 * UNIT, 4, 8)))


@triton.jit
def split_begin(i, UNIT: tl.constexpr):
    """Return the first position of split `i`."""
    units = tl.where(i < 8, i, tl.where(i < 20, 2 * i - 8, tl.where(i < 44, 4 * i - 48, 8 * i - 224)))
    return units * UNIT


@triton.jit
def splits_within(p, UNIT: tl.constexpr):
    """Return the number of whole splits among the first `p` positions."""
    u = p // UNIT
    return tl.where(u < 8, u, tl.where(u < 32, 8 + (u - 8) // 2, tl.where(u < 128, 20 + (u - 32) // 4, 28 + u // 8)))


@one_variant()
def _prepare(
    tables, pages, spans, groups, out, sizes, cut, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    if tl.program_id(0) == 0:
        _cut_prefixes(tables, pages, spans, groups, out, sizes, cut, BLOCK_R, UNIT)
    place_tokens(tables, pages, spans, out, sizes, BLOCK_T)


@triton.jit
def _cut_prefixes(tables, pages, spans, groups, out, sizes, cut, BLOCK_R: tl.constexpr, UNIT: tl.constexpr):
    """Cut prefixes into pieces, with one lane for each row, as `smc.kernels.packed_rows` does; a piece is a run of
    splits."""
    rows, each, block_x = sizes.rows, sizes.queries * cut.shape.heads, cut.shape.block_x
    r = tl.arange(0, BLOCK_R)
    inside = r < rows
    slot = tl.load(pages.slot_R + r, mask=inside, other=0)
    first, size, shared, lead, live = shared_by_groups(
        r, inside, tables, pages, spans, groups, cut.shape.longest, BLOCK_R
    )
    # Few rows read the last split by themselves, if it is short: then they need not wait for it.
    within = splits_within(shared, UNIT)
    alone = shared - split_begin(within, UNIT) <= cut.alone
    shared = tl.where(alone, split_begin(within, UNIT), shared // cut.shape.block_p * cut.shape.block_p)
    x = tl.where(lead < FAR, (first + size - lead) * each, 0)
    whole = splits_within(shared, UNIT)
    reads = whole + (shared > split_begin(whole, UNIT)).to(tl.int32)
    tiles = tl.where(shared > 0, tl.cdiv(x, block_x), 0)
    speaks = live & (r == lead)
    chunk = tl.maximum(tl.cdiv(tl.sum(tl.where(speaks, tiles * reads, 0), 0), cut.shape.pieces), 1)
    # A longer first piece stores fewer sums.
    for _ in range(DOUBLINGS):
        stored = tl.sum(_stored(speaks, x, reads, whole, chunk), 0)
        chunk = tl.where(stored > cut.entries, 2 * chunk, chunk)
    stored = tl.sum(_stored(speaks, x, reads, whole, chunk), 0)
    chunk = tl.where(stored > cut.entries, FAR // 2, chunk)
    runs, merged = tl.cdiv(reads, chunk), tl.minimum(chunk, tl.maximum(whole, 1)) - 1
    kept = _stored(r >= 0, x, reads, whole, chunk)
    pieces = tl.where(speaks, tiles * runs, 0)
    entry = tl.cumsum(tl.where(speaks, kept, 0), 0) - kept - merged * x
    tl.store(out.splits.shared_R + r, shared, mask=inside)
    tl.store(out.splits.entry_R + r, entry + (r - lead) * each, mask=inside)
    tl.store(out.splits.step_R + r, x, mask=inside)
    tl.store(out.splits.first_R + r, merged, mask=inside)
    tl.store(out.splits.count_R + r, tl.where(live, whole, 0), mask=inside)
    tl.store(out.pieces.count_1, tl.sum(pieces, 0))
    begin = tl.cumsum(pieces, 0) - pieces
    for k in tl.range(0, tl.max(pieces, 0)):
        # Tiles of one run are adjacent, since they read the same keys.
        run, done = k // tl.maximum(tiles, 1), k % tl.maximum(tiles, 1) * block_x
        at, mine = begin + k, k < pieces
        last = tl.minimum(run * chunk + chunk, reads)
        tl.store(out.pieces.query_P + at, lead * each + done, mask=mine)
        tl.store(out.pieces.queries_P + at, tl.minimum(x - done, block_x), mask=mine)
        tl.store(out.pieces.slot_P + at, slot, mask=mine)
        tl.store(out.pieces.begin_P + at, split_begin(run * chunk, UNIT), mask=mine)
        tl.store(out.pieces.end_P + at, tl.minimum(split_begin(last, UNIT), shared), mask=mine)
        tl.store(out.pieces.entry_P + at, entry + done, mask=mine)
        tl.store(out.pieces.step_P + at, x, mask=mine)


@triton.jit
def _stored(speaks, x, reads, whole, chunk):
    """Return the number of entries of each group: the splits of the first piece that are merged have one together."""
    return tl.where(speaks & (reads > 0), x * (reads - tl.minimum(chunk, tl.maximum(whole, 1)) + 1), 0)


@triton.jit
def take_in(q_YD, k_LD, v_LD, visible_YL, masked, m_Y, l_Y, acc_YD, SCALE: tl.constexpr):
    """Add one tile to the sums of a softmax: m is the largest base-2 logit, l the sum of weights and acc that of the
    weighted values."""
    s_YL = tl.dot(q_YD, tl.trans(k_LD), input_precision="ieee")
    if masked:
        s_YL = tl.where(visible_YL, s_YL, -float("inf"))
    new_Y = tl.maximum(m_Y, tl.max(s_YL, 1) * SCALE)
    p_YL = tl.exp2(s_YL * SCALE - new_Y[:, None])
    fade_Y = tl.exp2(m_Y - new_Y)
    acc_YD = tl.dot(p_YL.to(v_LD.dtype), v_LD, acc_YD * fade_Y[:, None], input_precision="ieee")
    return new_Y, l_Y * fade_Y + pair_sum(p_YL), acc_YD


@triton.jit
def merge(query, part):
    """Add the sums of a split to those of a query (`take_in`)."""
    most_Y, sum_Y, total_YD = query
    m_Y, l_Y, acc_YD = part
    new_Y = tl.maximum(most_Y, m_Y)
    fade_Y, weight_Y = tl.exp2(most_Y - new_Y), tl.exp2(m_Y - new_Y)
    total_YD = total_YD * fade_Y[:, None] + acc_YD * weight_Y[:, None]
    return new_Y, sum_Y * fade_Y + l_Y * weight_Y, total_YD


@triton.jit
def nothing(Y: tl.constexpr, D: tl.constexpr):
    """Return the sums of no position."""
    return tl.full([Y], LOWEST, tl.float32), tl.zeros([Y], tl.float32), tl.zeros([Y, D], tl.float32)


@triton.jit
def walk(
    q_YD, position_Y, part, query, begin, end, unmasked, cache, table, tail, tail_start, tables, pages, j,
    J: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """Take the positions from `begin`, where a tile begins, to `end` into the sums of the split that holds `begin`
    (`part`), and with MERGES whole splits into those of the query (`query`). Tiles that end by `unmasked` are seen by
    all queries."""
    Y: tl.constexpr = q_YD.shape[0]
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    m_Y, l_Y, acc_YD = part
    most_Y, sum_Y, total_YD = query
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, D)[None, :]
    page = page_at(begin + p, begin + p < end, table, tail, tail_start, tables, pages)
    for p0 in tl.range(begin, end, BLOCK_P, num_stages=STAGES):
        at_LD = (page.to(tl.int64) * J + j)[:, None] * D + d
        k_LD, v_LD = tl.load(cache.k_BJD + at_LD), tl.load(cache.v_BJD + at_LD)
        # Pages are loaded one tile ahead: otherwise the pipeline would spend its depth on this load before it could
        # start the loads of keys and values.
        after = p0 + BLOCK_P
        page = page_at(after + p, after + p < end, table, tail, tail_start, tables, pages)
        visible_YL = (p0 + p)[None, :] <= position_Y[:, None]
        if WINDOW:
            visible_YL &= (p0 + p)[None, :] > position_Y[:, None] - WINDOW
            m_Y, l_Y, acc_YD = take_in(q_YD, k_LD, v_LD, visible_YL, True, m_Y, l_Y, acc_YD, SCALE)
        else:
            m_Y, l_Y, acc_YD = take_in(q_YD, k_LD, v_LD, visible_YL, after > unmasked, m_Y, l_Y, acc_YD, SCALE)
        if MERGES:  # noqa: SIM102 (a constant, and a condition of the device)
            # Lengths of splits are powers of two.
            if (after & (split_size(p0, UNIT) - 1)) == 0:
                most_Y, sum_Y, total_YD = merge((most_Y, sum_Y, total_YD), (m_Y, l_Y, acc_YD))
                m_Y, l_Y, acc_YD = nothing(Y, D)
    return (m_Y, l_Y, acc_YD), (most_Y, sum_Y, total_YD)


@triton.jit
def first_tile(position, BLOCK_P: tl.constexpr, WINDOW: tl.constexpr):
    """Return the position at which the first tile begins that a query at `position` sees."""
    if WINDOW:
        return tl.maximum(0, position - (WINDOW - 1)) // BLOCK_P * BLOCK_P
    else:
        return position * 0


@triton.jit
def store_sums(at_Y, real_Y, sums, work, D: tl.constexpr):
    m_Y, l_Y, acc_YD = sums
    tl.store(work.most_JU + at_Y, m_Y, mask=real_Y)
    tl.store(work.sum_JU + at_Y, l_Y, mask=real_Y)
    tl.store(work.total_JUD + at_Y[:, None] * D + tl.arange(0, D)[None, :], acc_YD, mask=real_Y[:, None])


@triton.jit
def load_sums(at_Y, real_Y, work, D: tl.constexpr):
    m_Y = tl.load(work.most_JU + at_Y, mask=real_Y, other=LOWEST)
    l_Y = tl.load(work.sum_JU + at_Y, mask=real_Y, other=0.0)
    at_YD = at_Y[:, None] * D + tl.arange(0, D)[None, :]
    return m_Y, l_Y, tl.load(work.total_JUD + at_YD, mask=real_Y[:, None], other=0.0)


class Workspace(NamedTuple):
    """Sums of entries: those of a split, or of all splits up to it."""

    most_JU: Tensor
    sum_JU: Tensor
    total_JUD: Tensor
    entries: int

    @staticmethod
    def allocate(heads: int, entries: int, head_dim: int, device: torch.device | str) -> Workspace:
        most, sums = (torch.empty(heads, entries, dtype=torch.float32, device=device) for _ in range(2))
        totals = torch.empty(heads, entries, head_dim, dtype=torch.float32, device=device)
        return Workspace(most, sums, totals, entries)

    @property
    def nbytes(self) -> int:
        return self.most_JU.nbytes + self.sum_JU.nbytes + self.total_JUD.nbytes


@one_variant("q", "cache", "tables", "work", "q_stride")
def _prefix_kernel(
    q, cache, tables, pages, pieces, work, q_stride, position_T,
    EACH: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one piece, for one key/value head: of all its splits together if it is the first, otherwise
    of each. The last split may be unfinished."""
    j, w = tl.program_id(0), tl.program_id(1)
    x0, queries, slot = tl.load(pieces.query_P + w), tl.load(pieces.queries_P + w), tl.load(pieces.slot_P + w)
    first, last = tl.load(pieces.begin_P + w), tl.load(pieces.end_P + w)
    entry, step = tl.load(pieces.entry_P + w), tl.load(pieces.step_P + w)
    if w >= tl.load(pieces.count_1):
        if PDL:
            gdc_wait()
        return
    i, d = tl.arange(0, BLOCK_X), tl.arange(0, D)[None, :]
    real_Y, token, head = i < queries, (x0 + i) // EACH, j * EACH + (x0 + i) % EACH
    table = tables.table_SL + slot.to(tl.int64) * tables.stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position_Y = tl.load(position_T + token, mask=real_Y, other=FAR)
    q_YD = tl.load(q + token[:, None] * q_stride + head[:, None] * D + d, mask=real_Y[:, None], other=0.0)
    at_Y = j * work.entries + entry + i
    if first == 0:
        begin = tl.minimum(first_tile(tl.min(position_Y, 0), BLOCK_P, WINDOW), last)
        part, query = walk(
            q_YD, position_Y, nothing(BLOCK_X, D), nothing(BLOCK_X, D), begin, last, last, cache,
            table, table, FAR, tables, pages, j, J, D, BLOCK_P, UNIT, STAGES, WINDOW, True,
        )  # fmt: skip
        whole = splits_within(last, UNIT)
        if whole > 0:
            store_sums(at_Y + (whole - 1) * step, real_Y, query, work, D)
        if split_begin(whole, UNIT) < last:
            store_sums(at_Y + whole * step, real_Y, part, work, D)
    else:
        begin = first
        for split in range(splits_within(first, UNIT), splits_within(last - 1, UNIT) + 1):
            end = tl.minimum(split_begin(split + 1, UNIT), last)
            seen = tl.maximum(begin, tl.minimum(first_tile(tl.min(position_Y, 0), BLOCK_P, WINDOW), end))
            # A whole split is taken into sums of nothing, which changes no bit.
            part, query = walk(
                q_YD, position_Y, nothing(BLOCK_X, D), nothing(BLOCK_X, D), seen, end, end, cache,
                table, table, FAR, tables, pages, j, J, D, BLOCK_P, UNIT, STAGES, WINDOW, True,
            )  # fmt: skip
            if end == split_begin(split + 1, UNIT):
                store_sums(at_Y + split * step, real_Y, query, work, D)
            else:
                store_sums(at_Y + split * step, real_Y, part, work, D)
            begin = end


@one_variant("q", "cache", "tables", "work", "out", "q_stride")
def _own_kernel(
    q, cache, tables, pages, spans, splits, work, out, q_stride,
    Q: tl.constexpr, EACH: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_P: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up the sums of the prefix for BLOCK_Y queries of a row and key/value head, and continue with the row's own
    positions. Those of the split in which they begin are read before the kernel waits for the prefix, unless the prefix
    ends within that split."""
    j, r, d = tl.program_id(1), tl.program_id(2), tl.arange(0, D)[None, :]
    y = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    start, count = tl.load(spans.start_R + r), tl.load(spans.count_R + r)
    shared, entry = tl.load(splits.shared_R + r), tl.load(splits.entry_R + r)
    step, merged = tl.load(splits.step_R + r), tl.load(splits.first_R + r)
    table, tail, tail_start = row_tables(r, tables, pages)
    real_Y = y // EACH < count
    position_Y = tl.where(real_Y, start + y // EACH, -1)
    q_at = q + (r * Q + y // EACH)[:, None].to(tl.int64) * q_stride + (j * EACH + y % EACH)[:, None] * D + d
    q_YD = tl.load(q_at, mask=real_Y[:, None], other=0.0)
    at_Y, whole = j * work.entries + entry + y, splits_within(shared, UNIT)
    unfinished = (shared > split_begin(whole, UNIT)) & (count > 0)
    end = tl.where(count > 0, tl.max(position_Y, 0) + 1, 0)
    begin = tl.maximum(shared, first_tile(start + tl.program_id(0) * BLOCK_Y // EACH, BLOCK_P, WINDOW))
    border = split_begin(splits_within(begin, UNIT) + 1, UNIT)
    early = tl.where(unfinished, begin, tl.minimum(end, border))
    part, query = walk(
        q_YD, position_Y, nothing(BLOCK_Y, D), nothing(BLOCK_Y, D), begin, early, 0, cache,
        table, tail, tail_start, tables, pages, j, J, D, BLOCK_P, UNIT, STAGES, WINDOW, False,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    most_Y, sum_Y, total_YD = query
    m_Y, l_Y, acc_YD = part
    last = tl.load(splits.count_R + r)
    for split in tl.range(merged, last, 4, num_stages=1):
        # Loaded together, merged one after another; the sums of no position change nothing.
        first = load_sums(at_Y + split * step, real_Y, work, D)
        second = load_sums(at_Y + (split + 1) * step, real_Y & (split + 1 < last), work, D)
        third = load_sums(at_Y + (split + 2) * step, real_Y & (split + 2 < last), work, D)
        fourth = load_sums(at_Y + (split + 3) * step, real_Y & (split + 3 < last), work, D)
        most_Y, sum_Y, total_YD = merge((most_Y, sum_Y, total_YD), first)
        most_Y, sum_Y, total_YD = merge((most_Y, sum_Y, total_YD), second)
        most_Y, sum_Y, total_YD = merge((most_Y, sum_Y, total_YD), third)
        most_Y, sum_Y, total_YD = merge((most_Y, sum_Y, total_YD), fourth)
    if unfinished:
        m_Y, l_Y, acc_YD = load_sums(at_Y + whole * step, real_Y, work, D)
    elif early == border:
        most_Y, sum_Y, total_YD = merge((most_Y, sum_Y, total_YD), (m_Y, l_Y, acc_YD))
        m_Y, l_Y, acc_YD = nothing(BLOCK_Y, D)
    part, query = walk(
        q_YD, position_Y, (m_Y, l_Y, acc_YD), (most_Y, sum_Y, total_YD), early, end, 0, cache,
        table, tail, tail_start, tables, pages, j, J, D, BLOCK_P, UNIT, STAGES, WINDOW, True,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    write_output(out, part, query, real_Y, y, r, j, Q, EACH, J, D)


@triton.jit
def write_output(
    out, part, query, real_Y, y, r, j, Q: tl.constexpr, EACH: tl.constexpr, J: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Take in the last split and store the attention; zeros where there is no token."""
    _, sum_Y, total_YD = merge(query, part)
    out_YD = tl.where(real_Y[:, None], total_YD / tl.where(real_Y, sum_Y, 1.0)[:, None], 0.0)
    at_Y = (r.to(tl.int64) * Q + y // EACH) * (J * EACH) + j * EACH + y % EACH
    at_YD = at_Y[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at_YD, out_YD.to(out.dtype.element_ty), mask=(y < Q * EACH)[:, None])


@one_variant("q", "cache", "tables", "out", "q_stride")
def _whole_kernel(
    q, cache, tables, pages, spans, tiles, first_R, out, q_stride,
    EACH: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_P: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a tile of queries of a prompt's row to all positions that they see. `first_R`: the row's
    first token among all."""
    j, w = tl.program_id(0), tl.program_id(1)
    r, first = tl.load(tiles.row_Z + w), tl.load(tiles.query_Z + w)
    start, count, begins = tl.load(spans.start_R + r), tl.load(spans.count_R + r), tl.load(first_R + r)
    y, d = first + tl.arange(0, BLOCK_Y), tl.arange(0, D)[None, :]
    real_Y = y // EACH < count
    position_Y = tl.where(real_Y, start + y // EACH, -1)
    token_Y, head_Y = begins + y // EACH, j * EACH + y % EACH
    q_at = q + token_Y[:, None].to(tl.int64) * q_stride + head_Y[:, None] * D + d
    q_YD = tl.load(q_at, mask=real_Y[:, None], other=0.0)
    table, tail, tail_start = row_tables(r, tables, pages)
    lowest = start + first // EACH
    part, query = walk(
        q_YD, position_Y, nothing(BLOCK_Y, D), nothing(BLOCK_Y, D), first_tile(lowest, BLOCK_P, WINDOW),
        tl.max(position_Y, 0) + 1, lowest + 1, cache, table, tail, tail_start, tables, pages, j,
        J, D, BLOCK_P, UNIT, STAGES, WINDOW, True,
    )  # fmt: skip
    _, sum_Y, total_YD = merge(query, part)
    out_YD = total_YD / tl.where(real_Y, sum_Y, 1.0)[:, None]
    at_Y = token_Y.to(tl.int64) * (J * EACH) + head_Y
    tl.store(out + at_Y[:, None] * D + d, out_YD.to(out.dtype.element_ty), mask=real_Y[:, None])


class FixedOrderAttention:
    """Causal attention of R rows of Q queries each, in at most G groups, for one static shape. Layers use the workspace
    of the splits one after another; two passes that may run at once need one each."""

    def __init__(
        self,
        groups: int,
        rows: int,
        together: int,
        queries: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_context: int,
        pdl: bool = False,
        spaces: dict[int, Workspace] | None = None,
        **tiling: int,
    ) -> None:
        """As `smc.attention.kernels.SharedPrefixAttention`. `spaces`: workspaces by their number of entries, for all
        shapes whose passes run one after another. `tiling` replaces fields of `FixedTiling`."""
        check_heads(heads, head_dim)
        (h, j), x = heads, rows * queries * heads[0] // heads[1]
        self.groups, self.rows, self.queries, self.heads, self.head_dim = groups, rows, queries, heads, head_dim
        chosen = FixedTiling.choose(floor_rows(rows), min(together, rows), queries, heads, head_dim, dtype)
        self.tiling = tune = replace(chosen, **tiling)
        entries = triton.next_power_of_2(2 * x + 2 * tune.block_x * tune.pieces)
        shape = PieceShape(h // j, tune.block_x, tune.block_p, tune.pieces, 1, max_context)
        self._cut = FixedCut(shape, entries, tune.alone)
        spaces = {} if spaces is None else spaces
        if entries not in spaces:
            spaces[entries] = Workspace.allocate(j, entries, head_dim, device)
        self._work = spaces[entries]
        assert self._work.total_JUD.numel() < 2**31, "the kernels address the workspace in 32 bits"
        self._sizes = {"BLOCK_P": tune.block_p, "UNIT": tune.unit, "STAGES": tune.stages}
        self._constants = {
            "EACH": h // j, "J": j, "D": head_dim, "num_warps": tune.warps, "enable_fp_fusion": False, **self._sizes,
        }  # fmt: skip
        self._launch = launch_options(pdl)

    @property
    def workspace_bytes(self) -> int:
        return self._work.nbytes

    def prepare(self, tables: RowTables, spans: RowSpans, groups: RowGroups) -> Prepared:
        """Compute everything that does not depend on the layer, in one launch. Indices are int32."""
        assert len(spans.start_R) == self.rows and len(groups.first_G) <= self.groups
        return launch_prepare(
            _prepare, tables, spans, self.queries, groups, self._cut.shape, self._cut, UNIT=self.tiling.unit
        )

    def run(
        self,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: Prepared,
        out_THD: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """Compute the attention into contiguous `out_THD` [T, H, D], as `SharedPrefixAttention.run` does."""
        (h, j), tune, cache = self.heads, self.tiling, CacheTensors(keys, values)
        assert q_THD.shape == (self.rows * self.queries, h, self.head_dim) and q_THD.stride()[1:] == (self.head_dim, 1)
        assert keys.is_contiguous() and values.is_contiguous() and out_THD.is_contiguous() and keys.shape[1] == j
        tables, pages = table_arguments(prepared.tables)
        options = {**self._constants, "WINDOW": window or 0, **self._launch}
        layout, y = prepared.layout, self.queries * h // j
        _prefix_kernel[(j, len(layout.pieces.slot_P))](
            q_THD, cache, tables, pages, layout.pieces, self._work, q_THD.stride(0), layout.position_T,
            BLOCK_X=tune.block_x, **options,
        )  # fmt: skip
        _own_kernel[(triton.cdiv(y, LEAST_Y), j, self.rows)](
            q_THD, cache, tables, pages, prepared.spans, layout.splits, self._work, out_THD, q_THD.stride(0),
            Q=self.queries, BLOCK_Y=LEAST_Y, **options | {"STAGES": min(2, tune.stages)},
        )  # fmt: skip
        return out_THD


class FixedOrderPrompts(AttentionBackend):
    """Attention of prompts. It does not use the prefixes that segments share."""

    def __init__(self, **tiling: int) -> None:
        """`tiling` replaces fields of `FixedTiling`."""
        self._tiling = tiling

    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        return _PromptPass(pool, batch, self._tiling)


class QueryTiles(NamedTuple):
    """Tiles of the queries of prompts, int32."""

    row_Z: Tensor
    query_Z: Tensor
    """First query of the tile, among the row's."""


class _PromptPass(AttentionPass):
    def __init__(self, pool: KVPool, batch: ForwardBatch, tiling: dict[str, int]) -> None:
        super().__init__(pool, batch)
        self._given, self._plans = tiling, dict[int, QueryTiles]()
        starts_R, counts_R = batch.starts_R, batch.counts_R
        device, first_R = pool.keys.device, np.cumsum(counts_R) - counts_R
        arrays = (batch.table_RL, np.arange(len(starts_R)), starts_R, counts_R, first_R)
        table_RL, slot_R, start_R, count_R, self._first_R = (
            to_device(array.astype(np.int32), device) for array in arrays
        )
        self._tables, self._spans = table_arguments(RowTables(table_RL, slot_R)), RowSpans(start_R, count_R)

    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        cache = CacheTensors(self.pool.keys[layer], self.pool.values[layer])
        (tokens, h, d), j = q_THD.shape, cache.k_BJD.shape[1]
        tune = FixedTiling.choose(tokens, tokens, 1, (h, j), d, q_THD.dtype)
        # With many queries, programs of two groups of warps load keys half as often.
        if tune.block_x == 64 and tokens * h >= 4 * 64 * MULTIPROCESSORS and d <= 128:
            tune = replace(tune, block_x=128, warps=8)
        tune = replace(tune, **self._given)
        tiles = self._tiles(h // j, tune.block_x)
        out_THD = torch.empty_like(q_THD)
        _whole_kernel[(j, len(tiles.row_Z))](
            q_THD, cache, *self._tables, self._spans, tiles, self._first_R, out_THD, q_THD.stride(0),
            EACH=h // j, J=j, D=d, BLOCK_Y=tune.block_x, BLOCK_P=tune.block_p, UNIT=tune.unit, STAGES=tune.stages,
            WINDOW=self.pool.windows[layer] or 0, num_warps=tune.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return out_THD

    def _tiles(self, each: int, size: int) -> QueryTiles:
        """Return the tiles, those that read the most positions first."""
        if size not in self._plans:
            counts_R = -(-self.batch.counts_R * each // size)
            row_Z = np.repeat(np.arange(len(counts_R)), counts_R)
            first_Z = offsets(counts_R) * size
            order_Z = np.argsort(-(self.batch.starts_R[row_Z] + first_Z // each), kind="stable")
            packed = np.stack((row_Z[order_Z], first_Z[order_Z]), dtype=np.int32)  # one copy takes both
            self._plans[size] = QueryTiles(*to_device(packed, self.pool.keys.device))
        return self._plans[size]
