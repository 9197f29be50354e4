"""The warp-specialised prefix kernel against a float64 reference of one query at a time, and against the kernel for any
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smc.attention.kernels import SharedPrefixAttention, _prefix_kernel, supports_specialized
from tests.attention.packed import TOLERANCE, Built, Case, error

BF16 = torch.bfloat16
TILES = {64: {"block_p": 128, "stages": 3}, 128: {"block_p": 64, "stages": 3}}
RING = 384
"""Number of positions that a program loads ahead, with heads of 64."""
CASES = {
    "one_position": Case([1], [[(1, 1), (9, 1)]], 1, (32, 8)),
    "one_query": Case([450], [[(450, 1)]], 1, (8, 8)),
    "blocks": Case([450], [[(450, 5), (453, 2), (460, 5), (450, 0)]], 5, (32, 8)),
    "many_tiles_of_queries": Case([200], [[(200 + 3 * r, 8) for r in range(12)]], 8, (8, 1)),
    "ragged_groups": Case(
        [300, 0, 17, 700], [[(300, 2)] * 3, [(4, 1), (0, 2)], [(17, 2), (30, 0)], [(701, 1)] * 9], 2, (8, 2)
    ),
    "ended_first": Case([400, 33], [[(400, 0), (401, 0), (400, 1), (410, 1)], [(33, 0), (34, 2)]], 2, (8, 2), tail=1),
    "tails": Case([390], [[(390, 5), (396, 1), (393, 0), (395, 3)]], 5, (32, 8), tail=2),
    "nothing_shared": Case([0, 0], [[(0, 2), (3, 1)], [(40, 2)]], 2, (8, 2)),
    "seven_heads_a_key": Case([450], [[(450, 3), (453, 2)]], 3, (28, 4)),
    "more_declared_than_held": Case(
        [37, 200], [[(37, 1), (40, 1)], [(200, 1), (233, 0)]], 1, (8, 2), declared=[450, 900]
    ),
}


@pytest.fixture(autouse=True)
def on_hopper():
    if not supports_specialized("cuda"):
        pytest.skip("its kernel is written for other GPUs, or for another Triton")


def specialized(case: Case, dtype: torch.dtype = BF16, **tuning: object) -> Case:
    """Return the case with tile sizes that the kernel supports."""
    tuning = {"block_x": 64, "specialized": True, "pieces": 7, "min_tiles": 1, **TILES[case.dim]} | tuning
    return replace(case, dtype=dtype, tuning=tuning)


def assert_right(case: Case, scale: float = 1.0) -> None:
    built = Built(case)
    built.q_THD *= scale
    attention, portable = built.attention(), built.attention(specialized=False)
    assert attention.prefix_kernel is not _prefix_kernel and portable.prefix_kernel is _prefix_kernel
    out_THD = built.run(attention=attention)
    assert not out_THD[~built.exists_T].any(), "padding leaves a trace"
    assert error(out_THD, built.reference()) < TOLERANCE[BF16]
    assert error(out_THD, built.run(attention=portable).double()) < TOLERANCE[BF16]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, dim):
    assert_right(specialized(replace(CASES[name], dim=dim)))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("dtype", "partial"), [(torch.float16, torch.float32), (BF16, BF16)])
def test_other_types(dtype, partial, dim):
    assert_right(specialized(replace(CASES["blocks"], dim=dim), dtype, partial=partial))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shared", [15, 16, 17, 63, 64, 65, 127, 128, 129, RING - 1, RING, RING + 1, 2 * RING + 130])
@pytest.mark.parametrize("pieces", [1, 3])
def test_ends_of_tiles_splits_and_of_the_ring(shared, dim, pieces):
    held = [(shared, 1), (shared + 15, 1), (shared + 16, 1)]
    assert_right(specialized(Case([shared], [held], 1, (32, 8), dim), pieces=pieces))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 50.0])
def test_weights_that_are_all_alike_or_one_alone(scale, dim):
    assert_right(specialized(Case([500], [[(500, 4), (503, 2)]], 4, (8, 2), dim)), scale)


def test_one_key_of_all_is_seen():
    """All attention weight is on one position, anywhere in a prefix."""
    built = Built(specialized(Case([600], [[(600, 1), (601, 1)]], 1, (8, 2))))
    built.keys.zero_()
    built.q_THD.fill_(8.0)
    for position in (0, 127, 128, 383, 384, 599):
        page = int(built.pages[1][position])
        built.keys[page] = 8.0
        assert error(built.run(), built.reference()) < TOLERANCE[BF16]
        built.keys[page] = 0.0


@pytest.mark.parametrize(
    ("heads", "dim", "rows", "queries"), [((32, 8), 64, 32, 1), ((32, 8), 128, 8, 5), ((16, 8), 128, 16, 4)]
)
def test_real_shapes_take_it(heads, dim, rows, queries):
    made = SharedPrefixAttention(1, rows, rows, queries, heads, dim, BF16, "cuda", 4096)
    assert made.prefix_kernel is not _prefix_kernel and made.tuning.block_x == 64
