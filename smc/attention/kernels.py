"""Triton kernels: attention of few rows over paged keys and values, reading a group's shared prefix once for all its
rows. Knows nothing about models or CUDA graphs, though all launches may be captured in a graph.

Attention takes two launches a layer, which overlap where kernels may start early (`smc.kernels.launch`).
`_prefix_kernel` computes the attention of a tile of a group's queries to one split of the group's prefix (flash
decoding: Dao et al. 2023; the cascade of Ye et al. 2024). It writes a normalised output and a base-2 log-sum-exp per
query and split. `_own_kernel` computes the attention of each row's queries to the row's own positions and merges the
splits into it. `smc.kernels.packed_rows` has determined the tiles and splits, once for all layers. For short contexts
`smc.attention.step` does everything in one launch, row by row: reading the prefix from the L2 cache for every row then
costs less than a second launch and a merge. On Hopper GPUs most tiles of 64 queries have a prefix kernel of their own
(`smc.attention.specialized`). Shapes are static; everything that changes between replays of a graph (groups, lengths,
pages) is read on the device. `Tuning` holds the sizes of tiles and launches; it depends on shapes alone.

Local axes: P pieces (a tile of queries and a split of their prefix), U entries of the workspace (a query and a
split), Y queries with their heads for one key/value head (row, query, head), padded for tensor cores, Z those of one
row, not padded. T = R * Q tokens stand row after row. EACH = H // J."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.kernels.launch import MULTIPROCESSORS, launch_options, one_variant
from smc.kernels.packed_rows import (
    CacheTensors,
    PieceShape,
    Prepared,
    page_at,
    prepare,
    row_tables,
    table_arguments,
)
from smc.model.config import GPU_HEAD_DIMS
from smc.round.tensors import RowGroups, RowSpans, RowTables

PAIRED = 512
"""Maximum number of queries of a group and key/value head for which programs of 64 queries, two on a multiprocessor,
read wide heads."""
FEW = 8
"""Maximum number of queries of a group and key/value head for which narrow heads use the tile sizes of several small
groups."""
SPECIALIZED = 256
"""Maximum number of queries of a group and key/value head for which warps of two kinds read wide heads; for more
queries, warps of one kind were faster."""
LOWEST = tl.constexpr(-1e30)  # Finite: for a query that sees nothing yet, infinity would give inf - inf.
LOG2_E = tl.constexpr(1.4426950408889634)
SPECIALIZED_CAPABILITY = (9, 0)
"""Compute capability with the tensor cores for which the specialised kernel is written; later GPUs have others."""
SPECIALIZED_TRITONS = ("3.6", "3.7")
"""Versions of Triton for whose Gluon the specialised kernel is written: Gluon changes between versions. With other
versions `_prefix_kernel` is used."""


def floor_rows(rows: int) -> int:
    """Return the number of rows by which sizes are chosen: the power of two at or below `rows`. Guided rounds have more
    rows than batch indices; so they add at most one size with its compiled kernels, that of the most rows, which the
    warm-up covers (`smc.calibration.warm_up`)."""
    return 1 << (rows.bit_length() - 1)


@dataclass(frozen=True)
class Tuning:
    """Sizes that change speed only. `choose` estimates them; a benchmark may find better ones."""

    block_x: int
    """Queries of a prefix program: as many as a group has, at most 64; 128 where a group has so many that loading its
    keys again would cost more than running two programs on a multiprocessor gains."""
    block_p: int
    """Prefix positions of a tile."""
    pieces: int
    """Target number of pieces (tile of queries, split of the prefix) of a key/value head: about one program for each
    multiprocessor, or two where two fit on one or there are several groups. With more splits, merging costs more than
    faster reading gains."""
    min_tiles: int
    """Minimum number of tiles of a split: merging one more split costs more than reading a few more tiles."""
    specialized: bool
    """Whether warps of two kinds read prefixes (`smc.attention.specialized`) on GPUs that support it: 64 queries, four
    warps of each kind."""
    warps: int
    """Warps of a prefix program; 4 form one tensor-core group of 64 queries (Hopper's wgmma; below 64 queries it is
    mma)."""
    stages: int
    """Depth of the prefix kernel's load pipeline."""
    own_y: int
    """Queries of a program of the own kernel: few where there are few rows, since latency, not reading, limits
    these."""
    block_o: int
    """Own positions of a tile: mostly one tile holds all of them."""
    block_s: int
    """Number of splits merged at once, limited by registers."""
    own_warps: int
    """Warps of a program of the own kernel. Where registers suffice it is one, which fits on a multiprocessor that is
    full of prefix programs."""
    partial: torch.dtype
    """Dtype of the splits' outputs in the workspace."""

    @staticmethod
    def choose(
        rows: int, together: int, queries: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
    ) -> Tuning:
        """Choose sizes. `together`: number of rows of a group, at most or typically; only the device knows how many
        groups share the rows."""
        (h, j), wide, rows = heads, dtype.itemsize == 4, floor_rows(rows)
        y = queries * h // j
        narrow = not wide and head_dim <= 64
        # If several groups have few queries each, no keys are loaded twice, and speed depends on how many loads are in
        # flight. Narrow heads with more than FEW queries are no slower in tiles of many queries.
        several = not wide and together < rows and (not narrow or together * y <= FEW)
        x = together * y if several else rows * y
        # Two programs of 64 queries on a multiprocessor overlap: one computes while the other waits. A program with the
        # queries of a single row has too little to compute for that.
        pairs = narrow or (not wide and head_dim <= 128 and not several and x <= PAIRED)
        block_x = min(32 if wide else 64 if pairs else 128, max(16, triton.next_power_of_2(x)))
        block_p = 32 if wide else 128 if narrow and not several else 64
        pieces = max(1, MULTIPROCESSORS // j) * (2 if several or (pairs and block_x > 16) else 1)
        most_y = 4 if rows * j * triton.cdiv(y, 4) <= 4 * MULTIPROCESSORS else 8
        own_y, wide_heads = min(most_y, triton.next_power_of_2(y)), head_dim > 128
        return Tuning(
            block_x=block_x,
            block_p=block_p,
            pieces=pieces,
            min_tiles=3,
            specialized=pairs and not several and block_x == 64 and head_dim >= 64 and (narrow or x <= SPECIALIZED),
            warps=8 if block_x >= 128 else 4,
            stages=1 if wide else 2 if wide_heads else 4 if several else 3,
            own_y=own_y,
            block_o=32,
            block_s=max(1, 4096 // (own_y * head_dim)),
            own_warps=4 if wide or wide_heads else 1,
            partial=torch.float32,
        )


@triton.jit
def take_in(q_YD, k_LD, v_LD, visible_YL, masked, m_Y, l_Y, acc_YD, SCALE: tl.constexpr):
    """Add one tile to the online softmax: m is the largest base-2 logit, l the sum and acc the weighted values. Unless
    `masked`, every position is visible."""
    s_YL = tl.dot(q_YD, tl.trans(k_LD), input_precision="ieee")
    if masked:
        s_YL = tl.where(visible_YL, s_YL, -float("inf"))
    new_Y = tl.maximum(m_Y, tl.max(s_YL, 1) * SCALE)
    p_YL = tl.exp2(s_YL * SCALE - new_Y[:, None])
    fade_Y = tl.exp2(m_Y - new_Y)
    acc_YD = tl.dot(p_YL.to(v_LD.dtype), v_LD, acc_YD * fade_Y[:, None], input_precision="ieee")
    return new_Y, l_Y * fade_Y + tl.sum(p_YL, 1), acc_YD


@one_variant("q", "keys", "values", "table_SL", "part", "q_stride", "table_stride")
def _prefix_kernel(
    q, keys, values, table_SL, pieces, part, lse, q_stride, table_stride, entries, position_T,
    EACH: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute attention to one piece, for one key/value head. Empty pieces come last, so that each non-empty piece gets
    a multiprocessor. With PDL, `_own_kernel` may start once every program here has waited for the queries; its programs
    run beside these, or wait for room."""
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    j, w = tl.program_id(0), tl.program_id(1)
    x0, queries, slot = tl.load(pieces.query_P + w), tl.load(pieces.queries_P + w), tl.load(pieces.slot_P + w)
    first, last, entry = tl.load(pieces.begin_P + w), tl.load(pieces.end_P + w), tl.load(pieces.entry_P + w)
    if w >= tl.load(pieces.count_1):
        if PDL:
            gdc_wait()
        return
    i, d = tl.arange(0, BLOCK_X), tl.arange(0, D)
    p = tl.arange(0, BLOCK_P)
    if WINDOW:
        # The first position that each query sees; tiles before that of the first query are skipped.
        from_Y = tl.load(position_T + (x0 + i) // EACH, mask=i < queries, other=2147483647 // 2) - (WINDOW - 1)
        first += tl.maximum(0, tl.min(from_Y, 0) - first) // BLOCK_P * BLOCK_P
    pages = table_SL + slot.to(tl.int64) * table_stride + p
    page = tl.load(pages + first, mask=first + p < last, other=0)
    real_Y, token, head = i < queries, (x0 + i) // EACH, j * EACH + (x0 + i) % EACH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_YD = tl.load(q + token[:, None] * q_stride + head[:, None] * D + d, mask=real_Y[:, None], other=0.0)
    m_Y, l_Y = tl.full([BLOCK_X], LOWEST, tl.float32), tl.zeros([BLOCK_X], tl.float32)
    acc_YD = tl.zeros([BLOCK_X, D], tl.float32)
    for p0 in tl.range(first, last, BLOCK_P, num_stages=STAGES):
        at_LD = (page.to(tl.int64) * J + j)[:, None] * D + d
        k_LD, v_LD = tl.load(keys + at_LD), tl.load(values + at_LD)
        # Pages are loaded one tile ahead: otherwise the pipeline would spend its depth on this load before it could
        # start the loads of keys and values.
        page = tl.load(pages + p0 + BLOCK_P, mask=p0 + BLOCK_P + p < last, other=0)
        if WINDOW:
            visible_YL = (p0 + p < last)[None, :] & ((p0 + p)[None, :] >= from_Y[:, None])
            m_Y, l_Y, acc_YD = take_in(q_YD, k_LD, v_LD, visible_YL, True, m_Y, l_Y, acc_YD, SCALE)
        else:
            m_Y, l_Y, acc_YD = take_in(
                q_YD, k_LD, v_LD, (p0 + p < last)[None, :], p0 + BLOCK_P > last, m_Y, l_Y, acc_YD, SCALE
            )
    at_Y = j * entries + entry + i
    if WINDOW:
        # A query whose window begins after this piece gets weight zero here, and its result must not be NaN.
        acc_YD = tl.where((l_Y > 0)[:, None], acc_YD, 0.0)
        m_Y, l_Y = tl.where(l_Y > 0, m_Y, -float("inf")), tl.where(l_Y > 0, l_Y, 1.0)
    tl.store(lse + at_Y, m_Y + tl.log2(l_Y), mask=real_Y)
    tl.store(part + at_Y[:, None] * D + d, acc_YD / l_Y[:, None], mask=real_Y[:, None])


@one_variant("q", "cache", "tables", "part", "out", "q_stride")
def _own_kernel(
    q, cache, tables, pages, spans, splits_of, part, lse, out, q_stride, entries,
    Q: tl.constexpr, EACH: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute the attention of BLOCK_M queries of a row and key/value head to the row's own positions, then wait for
    the splits of its prefix and merge them."""
    # Tensor cores take at least 16 queries; those past BLOCK_M see nothing.
    BLOCK_Y: tl.constexpr = max(16, BLOCK_M)
    PARTS: tl.constexpr = BLOCK_Y // BLOCK_M
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    j, r = tl.program_id(1), tl.program_id(2)
    start, count, shared = tl.load(spans.start_R + r), tl.load(spans.count_R + r), tl.load(splits_of.shared_R + r)
    entry, step = tl.load(splits_of.entry_R + r), tl.load(splits_of.step_R + r)
    splits = tl.load(splits_of.count_R + r)
    first, s, d = tl.program_id(0) * BLOCK_M, tl.arange(0, BLOCK_S), tl.arange(0, D)
    m, y = first + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_Y)
    real_Z, real_Y = m // EACH < count, (y // EACH < count) & (y < first + BLOCK_M)
    at_PZ = j * entries + entry + s[:, None] * step + m[None, :]
    table, tail, tail_start = row_tables(r, tables, pages)
    limit_Y = tl.where(real_Y, start - shared + y // EACH, -1)
    own = tl.where(count > 0, start - shared + count, 0)
    q_at = q + (r * Q + y // EACH)[:, None] * q_stride + (j * EACH + y % EACH)[:, None] * D + d
    q_YD = tl.load(q_at, mask=real_Y[:, None], other=0.0)
    m_Y, l_Y = tl.full([BLOCK_Y], LOWEST, tl.float32), tl.zeros([BLOCK_Y], tl.float32)
    acc_YD = tl.zeros([BLOCK_Y, D], tl.float32)
    begin = 0
    if WINDOW:
        # Positions that the program's first query does not see are seen by none of its queries.
        begin = tl.maximum(0, start - shared + first // EACH - (WINDOW - 1)) // BLOCK_O * BLOCK_O
    # Without a pipeline of loads: mostly there is one tile.
    for o0 in tl.range(begin, own, BLOCK_O, num_stages=1):
        o = o0 + tl.arange(0, BLOCK_O)
        page = page_at(shared + o, o < own, table, tail, tail_start, tables, pages)
        at_LD = (page.to(tl.int64) * J + j)[:, None] * D + d
        visible_YL = o[None, :] <= limit_Y[:, None]
        if WINDOW:
            visible_YL &= o[None, :] > limit_Y[:, None] - WINDOW
        m_Y, l_Y, acc_YD = take_in(
            q_YD, tl.load(cache.k_BJD + at_LD), tl.load(cache.v_BJD + at_LD), visible_YL, True, m_Y, l_Y, acc_YD, SCALE
        )
    # Drop the queries past BLOCK_M, whose sums are zero.
    m_Z, l_Z = tl.max(tl.reshape(m_Y, (PARTS, BLOCK_M)), 0), tl.sum(tl.reshape(l_Y, (PARTS, BLOCK_M)), 0)
    acc_ZD = tl.sum(tl.reshape(acc_YD, (PARTS, BLOCK_M, D)), 0)
    if PDL:
        gdc_wait()
    for s0 in tl.range(0, splits, BLOCK_S):
        live_PZ = (s0 + s < splits)[:, None] & real_Z[None, :]
        lse_PZ = tl.load(lse + at_PZ, mask=live_PZ, other=-float("inf"))
        part_PZD = tl.load(part + at_PZ[:, :, None] * D + d, mask=live_PZ[:, :, None], other=0.0).to(tl.float32)
        new_Z = tl.maximum(m_Z, tl.max(lse_PZ, 0))
        fade_Z, w_PZ = tl.exp2(m_Z - new_Z), tl.exp2(lse_PZ - new_Z[None, :])
        acc_ZD = acc_ZD * fade_Z[:, None] + tl.sum(part_PZD * w_PZ[:, :, None], 0)
        m_Z, l_Z = new_Z, l_Z * fade_Z + tl.sum(w_PZ, 0)
        at_PZ += BLOCK_S * step
    if PDL:
        gdc_launch_dependents()
    out_ZD = acc_ZD / tl.where(real_Z, l_Z, 1.0)[:, None]
    at_Z = (r * Q + m // EACH) * (J * EACH) + j * EACH + m % EACH
    tl.store(out + at_Z[:, None] * D + d, out_ZD, mask=(m < Q * EACH)[:, None])


def check_heads(heads: tuple[int, int], head_dim: int) -> None:
    """Check heads (H, J) and their dimension. Raises ValueError for shapes that the kernels do not support."""
    if heads[0] % heads[1] or head_dim not in GPU_HEAD_DIMS:
        raise ValueError(
            f"heads (H, J) = {heads} and dimension {head_dim}; allowed: H a multiple of J, and dimensions "
            f"{', '.join(map(str, GPU_HEAD_DIMS))}"
        )


def compiles_specialized() -> bool:
    """Return whether the kernel of `smc.attention.specialized` is written for this version of Triton."""
    return ".".join(triton.__version__.split(".")[:2]) in SPECIALIZED_TRITONS


def supports_specialized(device: torch.device | str) -> bool:
    """Return whether that kernel runs on a device."""
    device = torch.device(device)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != SPECIALIZED_CAPABILITY:
        return False
    return compiles_specialized() and not triton.knobs.runtime.interpret


class SharedPrefixAttention:
    """Causal attention of R rows of Q queries each, in at most G groups, for one static shape. Holds the workspace of
    the splits, which layers use one after another; two passes that may run at once need one each."""

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
        **tuning: Any,
    ) -> None:
        """`together`: number of rows of a group, at most or typically, which affects speed only. `heads`: (H, J).
        `max_context` bounds the positions that a group attends to together. With `pdl`, the kernels, and the kernel
        launched after them, may start before the previous kernel has ended (`smc.kernels.launch`). `tuning` replaces
        fields of Tuning."""
        check_heads(heads, head_dim)
        h, j = heads
        self.groups, self.rows, self.queries, self.heads, self.head_dim = groups, rows, queries, heads, head_dim
        self.tuning = tune = replace(Tuning.choose(rows, together, queries, heads, head_dim, dtype), **tuning)
        self.pieces = PieceShape(h // j, tune.block_x, tune.block_p, tune.pieces, tune.min_tiles, max_context)
        entries = self.pieces.entries(rows, queries)
        self.part_JUD = torch.empty(j, entries, head_dim, dtype=tune.partial, device=device)
        self.lse_JU = torch.empty(j, entries, dtype=torch.float32, device=device)
        assert self.part_JUD.numel() < 2**31, "the kernels address the workspace in 32 bits"
        self._constants = {"EACH": h // j, "J": j, "D": head_dim, **launch_options(pdl)}
        self.prefix_kernel: Any = _prefix_kernel
        self._specialized_options: dict[str, int] = {}
        if tune.specialized and supports_specialized(device):
            from smc.attention.specialized import QUERIES, REGISTERS, WARPS, prefix_kernel

            assert tune.block_x <= QUERIES, (
                f"tiles of {tune.block_x} queries; allowed: at most {QUERIES}, or specialized=False"
            )
            self.prefix_kernel, self._specialized_options = prefix_kernel, {"num_warps": WARPS, "maxnreg": REGISTERS}

    @property
    def workspace_bytes(self) -> int:
        return self.part_JUD.nbytes + self.lse_JU.nbytes

    def prepare(self, tables: RowTables, spans: RowSpans, groups: RowGroups) -> Prepared:
        """Compute everything that does not depend on the layer, in one launch. Indices are int32."""
        assert len(spans.start_R) == self.rows and len(groups.first_G) <= self.groups
        return prepare(tables, spans, self.queries, groups, self.pieces)

    def run(
        self,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: Prepared,
        out_THD: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """Compute the attention into contiguous `out_THD` [T, H, D], with zeros for padding. Launches two kernels and
        allocates nothing.

        q_THD is rotated, its tokens at any stride; keys, values [L + 1, J, D] already hold the new tokens. Query i <
        count_R of a row is at position start_R + i and sees positions 0 .. start_R + i, or the last `window` of
        them."""
        (h, j), tune, table, layout = self.heads, self.tuning, prepared.tables.table_SL, prepared.layout
        assert q_THD.shape == (self.rows * self.queries, h, self.head_dim) and q_THD.stride()[1:] == (self.head_dim, 1)
        assert keys.is_contiguous() and values.is_contiguous() and out_THD.is_contiguous() and keys.shape[1] == j
        entries, pieces = self.lse_JU.shape[1], layout.pieces
        read = (
            q_THD, keys, values, table, pieces, self.part_JUD, self.lse_JU, q_THD.stride(0), table.stride(0), entries,
        )  # fmt: skip
        grid, keywords = (j, len(pieces.slot_P)), {"BLOCK_P": tune.block_p, "STAGES": tune.stages, **self._constants}
        if self.prefix_kernel is _prefix_kernel or window is not None:
            # The kernel for Hopper does not support windows.
            _prefix_kernel[grid](
                *read, layout.position_T, BLOCK_X=tune.block_x, WINDOW=window or 0, num_warps=tune.warps, **keywords
            )
        else:
            self.prefix_kernel[grid](*read, **self._specialized_options, **keywords)
        _own_kernel[(triton.cdiv(self.queries * h // j, tune.own_y), j, self.rows)](
            q_THD, CacheTensors(keys, values), *table_arguments(prepared.tables), prepared.spans,
            layout.splits, self.part_JUD, self.lse_JU, out_THD, q_THD.stride(0), entries,
            Q=self.queries, BLOCK_M=tune.own_y, BLOCK_O=tune.block_o, BLOCK_S=tune.block_s, WINDOW=window or 0,
            num_warps=tune.own_warps, **self._constants,
        )  # fmt: skip
        return out_THD
