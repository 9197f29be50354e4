"""The Triton kernels of attention against a float64 reference of one query at a time. Without a GPU they run in
Triton's interpreter."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from smc.attention.fixed_order import FixedTiling
from smc.attention.fixed_step import step_attention_fixed
from smc.attention.kernels import SharedPrefixAttention, Tuning, floor_rows
from smc.attention.step import StepTiling, step_attention
from smc.kernels.packed_rows import CacheTensors, HeadNorms, store_kv
from smc.round.plan import SHORT, SHORT_SINGLE
from smc.round.tensors import RowSpans, RowTables
from tests.attention.packed import DEVICE, FOREIGN, PAGES, SMALL, TOLERANCE, Built, Case, error
from tests.kernels.sizes import SLOTS, possible, warm_up_sizes
from tests.pairwise import one_of

BF16 = torch.bfloat16
CASES = {
    "decode": Case([37], [[(37, 1), (40, 1), (55, 1)]], 1, (8, 2), dtype=BF16),
    "decode_fp32": Case([37], [[(37, 1), (40, 1), (55, 1)]], 1, (8, 2)),
    "one_row": Case([50], [[(50, 1)]], 1, padding=0),
    "first_token": Case([0], [[(0, 1)]], 1, padding=0),
    "no_prefix": Case([0], [[(0, 1), (3, 1), (20, 1)]], 1),
    "no_sharing": Case([50, 33], [[(50, 2)], [(33, 2)]], 2, (2, 2)),
    "target": Case([70], [[(70, 8), (71, 3), (75, 8), (70, 0)]], 8, (8, 2), 128, BF16),
    "target_fp32": Case([70], [[(70, 8), (71, 3), (75, 8), (70, 0)]], 8, (8, 2), 128),
    "wide_heads": Case([21], [[(30, 2), (21, 1)]], 2, (8, 1), 128, BF16),
    "groups": Case([5, 0, 48], [[(5, 2)], [(4, 1), (0, 2)], [(48, 2), (49, 0), (60, 1)]], 2),
    "groups_backwards": Case([5, 0, 48], [[(5, 2)], [(4, 1), (0, 2)], [(48, 2), (49, 0), (60, 1)]], 2, backwards=True),
    "empty_group": Case([9, 0], [[(9, 1)], []], 1),
    "idle_rows": Case([16, 8], [[(16, 0), (16, 0)], [(8, 2)]], 2),
    "ended_first": Case([40, 33], [[(40, 0), (41, 0), (40, 1), (50, 1)], [(33, 0), (34, 2)]], 2, tail=1),
    "nine_queries": Case([10], [[(12, 9), (10, 5)]], 9, (8, 1)),
    "step_wide": Case([150], [[(150, 1), (170, 1), (160, 0)]], 1, (20, 4), dtype=BF16),
    "step_groups": Case([5, 0, 48], [[(5, 1)], [(4, 1), (0, 1)], [(48, 1), (49, 0), (60, 1)]], 1, (8, 1), 128),
    "tails": Case([30], [[(30, 1), (36, 1), (33, 0), (35, 1)]], 1, tail=0),
    "tails_of_blocks": Case([30, 20], [[(30, 3), (36, 1)], [(20, 0), (35, 2)]], 3, tail=2),
    "tails_within_what_is_shared": Case([30], [[(30, 1), (31, 2)]], 2, tail=9),
    "tails_are_all": Case([4], [[(4, 1), (6, 1)]], 1, tail=6),
    "more_declared_than_held": Case([37, 20], [[(37, 1), (40, 1)], [(20, 1), (33, 0)]], 1, declared=[45, 90]),
    "many_tiles": Case(
        [200], [[(200, 2), (230, 1)]], 2, (8, 2), tuning={"pieces": 4, "block_p": 16, "min_tiles": 2, "block_o": 16}
    ),
    "few_splits_used": Case([40], [[(41, 1)]], 1, tuning={"pieces": 7, "block_p": 16, "min_tiles": 1, "block_s": 2}),
    "many_queries_merged": Case(
        [70, 33], [[(70, 8), (71, 3)], [(33, 5)]], 8, (8, 2), tuning=SMALL | {"own_y": 16, "block_s": 2}
    ),
    "few_queries_merged": Case(
        [70, 33], [[(70, 8), (71, 3)], [(33, 5)]], 8, (8, 2), tuning=SMALL | {"own_y": 2, "pieces": 7, "block_s": 2}
    ),
    "several_query_tiles": Case(
        [35], [[(35, 8), (36, 8), (40, 2)]], 8, (8, 2), tuning=SMALL | {"block_x": 16, "pieces": 7}
    ),
    "long_beside_short": Case(
        [300, 17, 5], [[(300, 1)] * 3, [(17, 1)] * 9, [(5, 1)]], 1, tuning=SMALL | {"block_x": 16, "pieces": 8}
    ),
    "bf16_partials": Case([70], [[(70, 2), (71, 1)]], 2, dtype=BF16, tuning={"partial": BF16, "pieces": 2}),
    "single_rows": Case(
        [450, 33, 0, 70], [[(450, 1)], [(33, 1)], [(0, 1)], [(75, 1)]], 1, (8, 2), 128, BF16, tuning={}
    ),
    "single_rows_of_blocks": Case([450, 33], [[(453, 5)], [(33, 4)]], 5, (8, 2), 128, BF16, tail=1, tuning={}),
    "default_tuning": Case([400], [[(400, 8), (403, 5)]], 8, (8, 2), dtype=BF16, tuning={}),
}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        *((name, False) for name in CASES),
        *(
            pytest.param(name, True, marks=pytest.mark.slow if i % 2 else ())
            for i, name in enumerate(name for name, case in CASES.items() if case.tuning == SMALL)
        ),
    ],
)
def test_equals_reference(name, short):
    """The kernel of short rows ignores `tuning`, which says how long rows are cut."""
    built = Built(CASES[name])
    assert_right(built, built.run(short))


@pytest.mark.parametrize(
    ("name", "block_y"),
    [
        ("target", 16),
        ("target_fp32", 32),
        ("several_query_tiles", 64),
        ("several_query_tiles", 16),
        ("tails_of_blocks", 64),
        ("groups", 32),
    ],
)
def test_short_rows_by_programs_of_few_and_of_many_queries(name, block_y):
    built = Built(CASES[name])
    assert_right(built, built.run_short(StepTiling(block_y, 32, 4, 2)))


@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((16, 4), 128), ((32, 8), 64), ((16, 8), 128)])
def test_rounds_with_companions_bring_no_kernel_that_is_not_warmed_up(heads, dim):
    @cache
    def sizes(queries: int, rows: int) -> tuple[object, ...]:
        y = queries * heads[0] // heads[1]
        step = StepTiling.choose(queries, y, heads[1] * floor_rows(rows), dim, 2)
        return step, *(Tuning.choose(rows, together, queries, heads, dim, BF16) for together in (rows, 1, 4))

    for slots, queries in product(SLOTS, (1, 2, 5, 6, 9)):
        of = partial(sizes, queries)
        assert set(map(of, possible(slots))) <= set(map(of, warm_up_sizes(slots))), (slots, queries)


@pytest.mark.parametrize(
    ("together", "queries", "dim", "sizes"),
    [(64, 5, 128, (128, 3)), (1, 5, 128, (32, 4)), (1, 1, 128, (16, 4)), (1, 1, 64, (16, 4)), (4, 1, 64, (64, 3))],
)
def test_groups_of_few_queries_have_small_tiles_and_many_loads_on_their_way(together, queries, dim, sizes):
    tuning = Tuning.choose(64, together, queries, (32, 8), dim, BF16)
    assert (tuning.block_x, tuning.stages) == sizes


@pytest.mark.parametrize(
    ("rows", "queries", "heads", "dim", "sizes"),
    [
        (1, 1, (32, 8), 128, (16, 16, 4)),  # while one program waits, no other has work
        (8, 5, (32, 8), 128, (64, 32, 4)),
        (8, 12, (64, 8), 128, (128, 16, 8)),  # smaller tiles would load the keys twelve times
        (8, 1, (32, 8), 64, (32, 32, 4)),
        (32, 1, (32, 8), 64, (64, 32, 4)),
        (8, 5, (32, 8), 256, (128, 16, 8)),  # two programs do not fit on a multiprocessor
    ],
)
def test_two_programs_share_a_multiprocessor_where_they_have_something_to_compute(rows, queries, heads, dim, sizes):
    tuning = Tuning.choose(rows, rows, queries, heads, dim, BF16)
    assert (tuning.block_x, tuning.pieces, tuning.warps) == sizes


@pytest.mark.parametrize(
    ("rows", "together", "queries", "heads", "dim", "specialized"),
    [
        (32, 32, 1, (32, 8), 64, True),
        (64, 64, 4, (32, 8), 64, True),
        (8, 8, 5, (32, 8), 128, True),
        (8, 8, 8, (32, 8), 128, True),
        (8, 8, 1, (32, 8), 64, False),  # tiles of 32
        (16, 16, 5, (32, 8), 128, False),  # five tiles
        (32, 8, 5, (32, 8), 128, False),  # several groups
        (8, 8, 12, (64, 8), 128, False),  # tiles of 128
        (8, 8, 5, (32, 8), 256, False),
        (32, 32, 1, (32, 8), 32, False),
    ],
)
def test_warp_specialised_tiles_where_faster(rows, together, queries, heads, dim, specialized):
    tuning = Tuning.choose(rows, together, queries, heads, dim, BF16)
    assert tuning.specialized == specialized
    assert not specialized or tuning.block_x == 64
    assert not Tuning.choose(rows, together, queries, heads, dim, torch.float32).specialized


@pytest.mark.parametrize(
    ("rows", "queries", "heads", "block_y"),
    [(8, 5, (32, 8), 16), (32, 5, (32, 8), 32), (8, 12, (64, 8), 64), (1, 12, (64, 8), 16), (64, 1, (32, 8), 16)],
)
def test_short_rows_are_read_by_programs_of_as_many_queries_as_leave_room_for_all(rows, queries, heads, block_y):
    assert StepTiling.choose(queries, queries * heads[0] // heads[1], heads[1] * rows, 128, 2).block_y == block_y


@pytest.mark.parametrize(("rows", "queries", "heads"), [(16, 9, (32, 8)), (4, 33, (32, 8)), (128, 5, (8, 1))])
def test_programs_of_the_widest_heads_are_of_few_queries(rows, queries, heads):
    """Programs of 64 queries would need at least 240 KiB of shared memory; a multiprocessor has 227 KiB."""
    assert StepTiling.choose(queries, queries * heads[0] // heads[1], heads[1] * rows, 256, 2).block_y <= 32


def test_several_groups_of_many_queries_have_one_program_of_128_each():
    """With four loads in flight, two programs of 64 queries do not fit on a multiprocessor."""
    assert Tuning.choose(8, 1, 12, (64, 8), 128, BF16).block_x == 128


def assert_right(built: Built, out_THD: Tensor) -> None:
    assert not out_THD[~built.exists_T].any(), "padding leaves a trace"
    assert error(out_THD, built.reference()) < TOLERANCE[built.case.dtype]


group = st.tuples(
    st.integers(0, 70), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=5)
)


@settings(max_examples=5, deadline=None)
@given(
    groups=st.lists(group, min_size=1, max_size=4),
    tail=st.none() | st.integers(0, 12),
    short=st.booleans(),
    extra=st.integers(0, 9),
    padding=st.integers(0, 2),
    pieces=st.integers(1, 9),
)
def test_ragged_groups_tails_and_padding(groups, tail, short, extra, padding, pieces):
    shared = [shared for shared, _ in groups]
    held = [[(shared + own, new) for own, new in members] for shared, members in groups]
    # One live row holds exactly its group's prefix, so that more shared positions may be declared than there are.
    held = [[(shared, members[-1][1]), *members] for shared, members in zip(shared, held)]
    declared = [shared + extra * (members[0][1] > 0) for shared, members in zip(shared, held)]
    case = Case(
        shared, held, 3, (2, 1), 16, tail=tail, declared=declared, padding=padding, tuning=SMALL | {"pieces": pieces}
    )
    built = Built(case)
    assert_right(built, built.run(short))


@pytest.mark.parametrize("shared", [15, 16, 17, 33, 47, 64, *one_of(65, 31, 32, 48, 49, 63)])
def test_prefixes_at_the_ends_of_tiles_and_splits(shared):
    built = Built(
        Case([shared, 16], [[(shared, 1), (shared + 15, 1), (shared + 16, 1)], [(16, 1), (33, 1)]], 1, (2, 1), 16)
    )
    assert_right(built, built.run())


@pytest.mark.parametrize("held", [SHORT, SHORT + 1, SHORT_SINGLE, SHORT_SINGLE + 1])
@pytest.mark.parametrize(("short", "tail"), [(False, None), (True, 1)])
def test_lengths_about_the_bound_between_short_and_long(held, short, tail):
    built = Built(Case([held - 2], [[(held - 2, 1), (held, 1)]], 1, (2, 1), 16, tail=tail, tuning={}))
    assert_right(built, built.run(short))


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("particles", [17, pytest.param(64, marks=pytest.mark.slow)])
def test_a_group_of_many_particles_with_4_branches(particles, short):
    """Branches of a particle read the same slot; every third particle has ended."""
    members = [(20 + i // 4 % 3, int(i // 4 % 3 > 0)) for i in range(4 * particles)]
    built = Built(Case([20], [members], 1, (2, 1), 16, tail=0, padding=0))
    assert_right(built, built.run(short))


def test_every_query_is_accurate():
    """The norm over all queries would hide one bad query, so each is compared; large logits would show a lost
    maximum."""
    built = Built(CASES["target_fp32"])
    built.q_THD *= 10
    assert torch.allclose(built.run().double(), built.reference(), atol=2e-4)


def test_prefix_read_through_a_live_row():
    """The table of a row that has ended names pages that now belong to other requests."""
    built = Built(Case([40], [[(40, 0), (40, 1), (41, 1)]], 1))
    assert (built.table_SL[built.slot_R[1]] > PAGES - FOREIGN).all(), "an ended row's table names pages that hold NaN"
    assert_right(built, built.run())


@pytest.mark.parametrize("first", ["few_splits_used", "long_beside_short"])
def test_a_workspace_serves_changed_lengths_and_groups(first):
    """Values that another split left in the workspace are not merged."""
    case = CASES[first]
    rows = sum(len(members) for members in case.held)
    long = Case([90, 30], [[(95, 1)] * (rows - 1), [(30, 1)]] if rows > 1 else [[(95, 1)], []], 1, tuning=case.tuning)
    one, other = Built(case), Built(long)
    attention = SharedPrefixAttention(
        9, max(one.rows, other.rows), 9, 1, case.heads, case.dim, case.dtype, DEVICE, 2000, **case.tuning
    )
    for built in (other, one, other):
        widened = _with_rows(built, attention.rows)
        assert error(widened.run(attention=attention), widened.reference()) < TOLERANCE[case.dtype]


def _with_rows(built: Built, rows: int) -> Built:
    """Add rows of padding, up to `rows`."""
    more = rows - built.rows
    for name in ("slot_R", "start_R", "count_R", "group_R", "tail_R"):
        setattr(built, name, torch.cat((getattr(built, name), torch.zeros(more, dtype=torch.int32))))
    built.q_THD, built.rows = torch.cat((built.q_THD, built.q_THD.new_zeros(more, *built.q_THD.shape[1:]))), rows
    return built


@pytest.mark.parametrize(
    ("name", "splits", "norm"),
    [
        (name, *((1, False), (2, True))[i % 2])
        for i, name in enumerate(
            name
            for name in CASES
            if name.startswith(("decode", "step", "tails")) or name in ("no_prefix", "empty_group", "target")
        )
    ],
)
def test_one_launch_does_what_storing_and_attending_do(name, splits, norm):
    built, case = Built(CASES[name]), CASES[name]
    (h, j), d, tokens, generator = case.heads, case.dim, built.rows * case.queries, torch.Generator().manual_seed(3)
    qkv = torch.randn(tokens, (h + 2 * j) * d, generator=generator).to(case.dtype)
    qkv[~built.exists_T] = torch.nan  # Values of padding rows must not matter.
    parts = qkv if splits == 1 else torch.stack((qkv.float() - 1, torch.ones_like(qkv, dtype=torch.float32)))
    norms = [torch.randn(d, generator=generator).to(case.dtype).to(DEVICE) for _ in "qk"] if norm else []
    rope, q_THD = torch.randn(300, d, generator=generator), torch.empty(tokens, h, d, dtype=case.dtype)

    def on_device(*tensors: Tensor) -> list[Tensor]:
        return [x.to(DEVICE).clone() for x in tensors]

    expected = on_device(parts, q_THD, built.keys, built.values, rope)
    head_norms = HeadNorms(*norms, 1e-6) if norm else None
    attention = built.attention()
    prepared = attention.prepare(built.tables(), built.spans(), built.groups())
    where = (expected[4], prepared.layout.position_T, prepared.layout.page_T)
    store_kv(*expected[:2], CacheTensors(*expected[2:4]), *where, (h, j), head_norms)
    out_THD = attention.run(*expected[1:4], prepared, torch.empty_like(expected[1]))

    found = on_device(parts, built.keys, built.values, rope, torch.full_like(q_THD, torch.nan))
    cache = CacheTensors(*found[1:3])
    step_attention(found[0], cache, found[3], built.tables(), built.spans(), found[4], head_norms)
    # The kernel sums a norm in two halves.
    tolerance = {"atol": 1e-5, "rtol": 8e-3} if norm else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(found[1], expected[2], **tolerance, equal_nan=True)
    torch.testing.assert_close(found[2], expected[3], atol=0, rtol=0, equal_nan=True)
    assert not found[4][~built.exists_T].any()
    assert error(found[4].cpu(), out_THD.cpu().double()) < TOLERANCE[case.dtype]


FIXED_STEP = partial(
    step_attention_fixed, tiling=FixedTiling(unit=32, block_p=16, block_x=16, pieces=1, alone=0, stages=2, warps=4)
)


@pytest.mark.parametrize("step", [step_attention, FIXED_STEP], ids=["fastest", "fixed"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["groups", "target", "nine_queries"])
def test_rows_of_one_token_read_tokens_that_other_rows_run(name, window, step):
    """Tokens of rows, each as a row of its own, in another order, with more rows of padding."""
    built, case = Built(CASES[name]), CASES[name]
    (h, j), d, q, generator = case.heads, case.dim, case.queries, torch.Generator().manual_seed(5)
    order_T = torch.randperm(built.rows * q, generator=generator)
    index_T, depth_T = order_T // q, order_T % q
    tail_RB = built.page_T.view(-1, q)[index_T]
    exists_T, node_T = built.exists_T[order_T], order_T.argsort()
    path_RB = node_T.view(-1, q)[index_T].masked_fill(torch.arange(q) > depth_T[:, None], 0)
    qkv = torch.randn(built.rows * q, (h + 2 * j) * d, generator=generator).to(case.dtype)
    qkv[~built.exists_T] = torch.nan
    rope = torch.randn(300, d, generator=generator).to(DEVICE)

    def run(qkv: Tensor, tables: RowTables, spans: RowSpans, path_RB: Tensor | None = None) -> list:
        given = [x.to(DEVICE, copy=True) for x in (qkv, built.keys, built.values)]
        out_THD = torch.full((len(qkv), h, d), torch.nan, dtype=case.dtype, device=DEVICE)
        step(given[0], CacheTensors(*given[1:]), rope, tables, spans, out_THD, window=window, path_RB=path_RB)
        return [out_THD.cpu(), *(x.cpu() for x in given[1:])]

    expected = run(qkv, built.tables(), built.spans())
    on_device = [x.to(DEVICE) for x in (built.slot_R[index_T], tail_RB, built.start_R[index_T], path_RB.int())]
    tables = RowTables(built.tables().table_SL, *on_device[:3])
    spans = RowSpans((built.start_R[index_T] + depth_T).int().to(DEVICE), exists_T.int().to(DEVICE))
    found = run(qkv[order_T], tables, spans, on_device[3])
    assert error(found[0], expected[0][order_T].double()) < TOLERANCE[case.dtype]
    if step is FIXED_STEP:
        torch.testing.assert_close(found[0], expected[0][order_T], atol=0, rtol=0)
    for stored, wanted in zip(found[1:], expected[1:]):
        torch.testing.assert_close(stored, wanted, atol=0, rtol=0, equal_nan=True)


def test_a_workspace_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="multiple of J"):
        SharedPrefixAttention(1, 2, 2, 1, (5, 2), 64, torch.float32, "cpu", 64)


def test_a_workspace_grows_with_rows_and_not_with_groups_or_context():
    def size(groups: int, rows: int, context: int) -> int:
        return SharedPrefixAttention(groups, rows, rows, 8, (32, 8), 128, BF16, "meta", context).workspace_bytes

    assert size(1, 64, 4096) == size(64, 64, 4096) == size(64, 64, 131072)
    assert size(64, 64, 4096) < 4 * size(64, 8, 4096)
