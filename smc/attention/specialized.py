"""Attention to long prefixes on Hopper GPUs, by warps of two kinds: some copy, others multiply and weigh.

Does for a tile of 64 queries what `_prefix_kernel` of `smc.attention.kernels` does for any tile. Four warps copy keys
and values to a ring in shared memory, as far ahead as it has room. Four other warps take them from the ring, and
compute no address and issue no load of keys and values (Shah et al. 2024, FlashAttention-3). So the copies of a prefix
begin before the queries have been computed. The kernel is written in Gluon, because Triton does not let the author
assign work to warps. Without Hopper's tensor cores, or in Triton's interpreter, it cannot run.

Local axes: P pieces, Y queries with their heads for one key/value head, both as in `smc.attention.kernels`, Z stages
of the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

QUERIES = 64
"""Queries of a program: as many as four warps give the tensor cores at once."""
WARPS = 4
"""Number of warps of each kind."""
REGISTERS, COPIER_REGISTERS = 96, 40
"""Registers of a thread on average, and of a copying thread; copying threads leave the rest to the others. Two programs
then fit on a multiprocessor, and with narrow heads a program of `_own_kernel` beside them."""

_QUERIES = gl.constexpr(QUERIES)
_WARPS = gl.constexpr(WARPS)
_COPIER_REGISTERS = gl.constexpr(COPIER_REGISTERS)
_LOWEST = gl.constexpr(-1e30)  # Finite: for a query that sees nothing yet, infinity would give inf - inf.
_LOG2_E = gl.constexpr(1.4426950408889634)
_LANES = gl.constexpr(16)
"""Number of partial maxima and sums of a tile's row, which are reduced last. One direct reduction would be a dependent
chain over all numbers of a row that a thread holds."""


@gluon.jit
def _copy(work, J: gl.constexpr, D: gl.constexpr, BLOCK_P: gl.constexpr, STAGES: gl.constexpr):
    """Copy keys and values to the ring. Earlier passes stored them, so the copies wait only for room. Tensor cores may
    read the copies once their barrier has completed, without a fence in between, as in Triton's own pipelines."""
    keys, values, pages, first, last, j, k_ZLD, v_ZLD, k_full, v_full, empty = work
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [_WARPS, 1], [1, 0])
    p = gl.arange(0, BLOCK_P, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    page = gl.load(pages + first + p, mask=first + p < last, other=0)
    stage, phase = 0, 1
    for p0 in range(first, last, BLOCK_P):
        at_LD = gl.expand_dims((page.to(gl.int64) * J + j) * D, 1) + gl.expand_dims(d, 0)
        page = gl.load(pages + p0 + BLOCK_P + p, mask=p0 + BLOCK_P + p < last, other=0)
        mbarrier.wait(empty.index(stage), phase)
        async_copy.async_copy_global_to_shared(k_ZLD.index(stage), keys + at_LD)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        async_copy.async_copy_global_to_shared(v_ZLD.index(stage), values + at_LD)
        async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _weigh(s_YL, m_Y, l_Y, SCALE: gl.constexpr):
    """Add one tile to the online softmax. Returns the tile's weights, the largest base-2 logit and the sum including
    the tile, and the factor for earlier sums."""
    Y: gl.constexpr = s_YL.shape[0]
    LENGTH: gl.constexpr = s_YL.shape[1] // _LANES
    OF_SCORES: gl.constexpr = m_Y.type.layout
    most_Y = gl.max(gl.max(gl.reshape(s_YL, [Y, LENGTH, _LANES]), 1), 1)
    new_Y = gl.maximum(m_Y, gl.convert_layout(most_Y, OF_SCORES, assert_trivial=True) * SCALE)
    p_YL = gl.exp2(s_YL * SCALE - gl.expand_dims(new_Y, 1))
    sum_Y = gl.sum(gl.sum(gl.reshape(p_YL, [Y, LENGTH, _LANES]), 1), 1)
    fade_Y = gl.exp2(m_Y - new_Y)
    return p_YL, new_Y, l_Y * fade_Y + gl.convert_layout(sum_Y, OF_SCORES, assert_trivial=True), fade_Y


@gluon.jit
def _attend(
    work, EACH: gl.constexpr, D: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_P: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute the online softmax of `take_in` (`smc.attention.kernels`) over the tiles in the ring."""
    q, part, lse, x0, queries, first, last, entry, j, q_stride, q_YD, k_ZLD, v_ZLD, k_full, v_full, empty = work
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [_WARPS, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_P, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, D, 16])
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = gl.arange(0, _QUERIES, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    at_Y = (x0 + i) // EACH * q_stride + (j * EACH + (x0 + i) % EACH) * D
    q_YD.store(
        gl.load(q + gl.expand_dims(at_Y, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(i < queries, 1), other=0.0)
    )
    fence_async_shared()
    m_Y = gl.full([_QUERIES], _LOWEST, gl.float32, OF_SCORES)
    l_Y = gl.full([_QUERIES], 0.0, gl.float32, OF_SCORES)
    acc_YD = gl.full([_QUERIES, D], 0.0, gl.float32, SUMS)
    none_YL = gl.full([_QUERIES, BLOCK_P], 0.0, gl.float32, SCORES)
    p = gl.arange(0, BLOCK_P, gl.SliceLayout(0, SCORES))
    stage, phase = 0, 0
    for p0 in range(first, last, BLOCK_P):
        mbarrier.wait(k_full.index(stage), phase)
        s_YL = warpgroup_mma(q_YD, k_ZLD.index(stage).permute((1, 0)), none_YL, use_acc=False, is_async=True)
        s_YL = warpgroup_mma_wait(0, deps=(s_YL,))
        if p0 + BLOCK_P > last:
            s_YL = gl.where(gl.expand_dims(p0 + p < last, 0), s_YL, -float("inf"))
        p_YL, m_Y, l_Y, fade_Y = _weigh(s_YL, m_Y, l_Y, SCALE)
        acc_YD = acc_YD * gl.expand_dims(gl.convert_layout(fade_Y, OF_SUMS), 1)
        weight_YL = gl.convert_layout(p_YL.to(q.dtype.element_ty), gl.DotOperandLayout(0, SUMS, 2))
        mbarrier.wait(v_full.index(stage), phase)
        acc_YD = warpgroup_mma(weight_YL, v_ZLD.index(stage), acc_YD, is_async=True)
        acc_YD = warpgroup_mma_wait(0, deps=(acc_YD,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    y = gl.arange(0, _QUERIES, OF_SCORES)
    x = gl.arange(0, _QUERIES, OF_SUMS)
    gl.store(lse + entry + y, m_Y + gl.log2(l_Y), mask=y < queries)
    out_YD = acc_YD / gl.expand_dims(gl.convert_layout(l_Y, OF_SUMS), 1)
    to_YD = gl.expand_dims((entry + x) * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, SUMS)), 0)
    gl.store(part + to_YD, out_YD, mask=gl.expand_dims(x < queries, 1))


@gluon.jit(do_not_specialize=["lse", "entries"])
def prefix_kernel(
    q, keys, values, table_SL, pieces, part, lse, q_stride, table_stride, entries,
    EACH: gl.constexpr, J: gl.constexpr, D: gl.constexpr, BLOCK_P: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute attention to one piece, for one key/value head."""
    DTYPE: gl.constexpr = q.dtype.element_ty
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_P, D], DTYPE)
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_QUERIES, D], DTYPE)
    SCALE: gl.constexpr = D**-0.5 * _LOG2_E
    j, w = gl.program_id(0), gl.program_id(1)
    exists = w < gl.load(pieces.count_1)
    # The numbers of a piece that does not exist are undefined: it gets no query and no position.
    x0, slot = gl.load(pieces.query_P + w), gl.where(exists, gl.load(pieces.slot_P + w), 0)
    queries = gl.where(exists, gl.load(pieces.queries_P + w), 0)
    first = gl.where(exists, gl.load(pieces.begin_P + w), 0)
    last = gl.where(exists, gl.load(pieces.end_P + w), 0)
    entry = j * entries + gl.load(pieces.entry_P + w)
    pages = table_SL + slot.to(gl.int64) * table_stride
    k_ZLD = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_P, D], KV)
    v_ZLD = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_P, D], KV)
    q_YD = gl.allocate_shared_memory(DTYPE, [_QUERIES, D], QUERY)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every copying thread signals when its own copies have arrived.
        mbarrier.init(k_full.index(stage), count=32 * _WARPS)
        mbarrier.init(v_full.index(stage), count=32 * _WARPS)
        mbarrier.init(empty.index(stage), count=1)
    attend = (q, part, lse, x0, queries, first, last, entry, j, q_stride, q_YD, k_ZLD, v_ZLD, k_full, v_full, empty)
    copy = (keys, values, pages, first, last, j, k_ZLD, v_ZLD, k_full, v_full, empty)
    # Constants remain constants only if the call itself lists them.
    gl.warp_specialize(
        [(_attend, (attend, EACH, D, SCALE, BLOCK_P, STAGES, PDL)), (_copy, (copy, J, D, BLOCK_P, STAGES))],
        [_WARPS],
        [_COPIER_REGISTERS],
    )
