"""Kernels that choose continuations, roots to keep, and the block that agrees longest with the target, against
torch.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.algorithm import expansion as reference
from smc.algorithm.expansion import CANDIDATES_PER_ROW, CandidateTokens, Expansion, SourceRows
from smc.algorithm.resampling import Spans
from smc.algorithm.verification import match_samples as reference_match
from smc.api.limits import MAX_PARTICLES
from smc.arrays import map_tensors
from smc.kernels import expansion
from smc.kernels.verify import match_samples
from smc.philox import RoundKeys
from smc.types import Decoding
from tests.kernels.conftest import DEVICE

ON_GPU = DEVICE.type == "cuda"
CHUNK = 64
NO_MASS = -math.inf
examples = settings(max_examples=400 if ON_GPU else 8, deadline=None)


def bounds(sizes: list[int]) -> Spans:
    """Return groups that follow each other."""
    first = list(itertools.accumulate(sizes[:-1], initial=0))
    return Spans(torch.tensor(first, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32))


def to(device: torch.device, value: object) -> object:
    return map_tensors(lambda tensor: tensor.to(device), value)


def grouped(
    groups: list[dict], width: int, padding: int = 0, padding_groups: int = 0, least: float = 0.0, step: int = 0
) -> tuple:
    """Return the arguments of `expand`. A group is a dict: log masses and shares [R, C] of its sources, number of rows,
    the most that may continue, kind, seed, and indices of dead sources. `padding` sources and rows come last; their
    mass is large, so that a kernel that read them would choose them."""
    mass_R = torch.cat([*(group["mass_R"] for group in groups), torch.full((padding,), 1e6, dtype=torch.float64)])
    share_RC = torch.cat([*(group["share_RC"] for group in groups), torch.zeros(padding, width)])
    there_R = torch.ones(len(mass_R), dtype=torch.bool)
    sources = bounds([len(group["mass_R"]) for group in groups] + [0] * padding_groups)
    rows = bounds([group["size"] for group in groups] + [0] * padding_groups)
    for group, first in zip(groups, sources[0].tolist()):
        there_R[[first + dead for dead in group.get("dead", ())]] = False
    most_G, decoding_G = (
        torch.tensor([group[name] for group in groups] + [0] * padding_groups, dtype=torch.int32)
        for name in ("most", "kind")
    )
    seed_G = torch.tensor([group.get("seed", 0) for group in groups] + [0] * padding_groups)
    offers = CandidateTokens(torch.zeros_like(share_RC).long(), share_RC, share_RC)
    total = int(rows[1].sum()) + padding
    return (
        SourceRows(offers, mass_R, there_R, sources),
        rows,
        most_G,
        decoding_G,
        RoundKeys(seed_G, torch.full_like(seed_G, 7)),
        step,
        total,
        least,
    )


def assert_same(arguments: tuple, chunk: int | None = CHUNK) -> Expansion:
    """Compare kernel and reference, and return the kernel's expansion. Where no row of a group continues, its parents
    and candidates are not compared: they mean nothing."""
    expected, made = reference.expand(*arguments), expansion.expand(*to(DEVICE, arguments), chunk=chunk)
    made = Expansion(*(value.cpu() for value in made))
    rows, alive_X = arguments[1], expected.alive_X
    assert torch.equal(made.alive_X, alive_X) and torch.equal(made.collapsed_G, expected.collapsed_G)
    said_X = torch.ones_like(alive_X)
    for first, size in zip(*(bound.tolist() for bound in rows)):
        said_X[first : first + size] = alive_X[first : first + size].any()
    for name in ("parent_X", "candidate_X"):
        assert torch.equal(getattr(made, name)[said_X], getattr(expected, name)[said_X]), name
    # The error of a log mass is relative to its size.
    torch.testing.assert_close(made.mass_X, expected.mass_X, atol=1e-10, rtol=1e-14)
    torch.testing.assert_close(made.ess_G, expected.ess_G, atol=1e-9, rtol=1e-9)
    return made


def shares(rows: int, width: int, seed: int, spread: float, dropped: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    share_RC = (torch.randn(rows, width, generator=generator) * spread).log_softmax(-1)
    return share_RC.masked_fill(torch.rand(rows, width, generator=generator) < dropped, NO_MASS)


@st.composite
def groups(draw, width: int) -> dict:
    """Groups with masses of any spread, far from 0, partly or wholly without mass, with ties, or NaN; with fewer or
    more rows than candidates."""
    sources, seed = draw(st.integers(1, 9)), draw(st.integers(0, 10**6))
    mass_R = torch.randn(sources, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mass_R = mass_R * draw(st.sampled_from([0.01, 1.0, 20.0, 1000.0])) + draw(st.sampled_from([0.0, -700.0, -1e5, 1e5]))
    share_RC = shares(
        sources, width, seed, draw(st.sampled_from([0.01, 1.0, 8.0])), draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    )
    if draw(st.booleans()):
        mass_R, share_RC = mass_R.round(), share_RC.round()
    if draw(st.sampled_from([False] * 5 + [True])):
        mass_R[0], share_RC[-1, 0] = math.nan, math.nan
    size = draw(st.integers(1, 12))
    kind = draw(
        st.sampled_from(
            [
                Decoding.DISTINCT,
                Decoding.DISTINCT,
                Decoding.WALK,
                Decoding.WALK,
                Decoding.INDEPENDENT,
            ]
        )
    )
    dead = draw(st.sets(st.integers(0, sources - 1), max_size=sources))
    most = draw(st.integers(0, size) | st.just(size))
    return {
        "mass_R": mass_R,
        "share_RC": share_RC,
        "size": size,
        "most": most,
        "kind": kind,
        "seed": seed - 5 * 10**5,
        "dead": dead,
    }


@examples
@given(
    st.data(),
    st.sampled_from([1, 2, 9, CANDIDATES_PER_ROW + 1]),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 9),
)
def test_equals_the_torch_expansion(data, width, padding, least, step):
    made = data.draw(st.lists(groups(width), min_size=1, max_size=4))
    assert_same(grouped(made, width, padding, padding, least, step))


LARGEST = 1024


@pytest.mark.parametrize(
    ("sources", "width", "size"),
    [
        *((1, 1, 1), (1, 33, 64), (64, 1, 64), (64, 33, 64), (64, 33, LARGEST)),
        pytest.param(LARGEST, 33, LARGEST, marks=pytest.mark.slow),
    ],
)
def test_equals_the_torch_expansion_up_to_the_largest_shape(sources, width, size):
    mass_R = torch.randn(sources, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * 4 - 1e5
    same = {"mass_R": mass_R, "share_RC": shares(sources, width, size, 3.0), "size": size, "most": size}
    assert_same(
        grouped(
            [same | {"kind": kind, "seed": 3} for kind in (Decoding.WALK, Decoding.DISTINCT)],
            width,
            padding=1,
        ),
        chunk=None,
    )


@pytest.mark.parametrize("kind", [Decoding.WALK, Decoding.DISTINCT])
@pytest.mark.parametrize("masses", ["equal", "in steps of e^100", "one", "halves", "two of each"])
def test_masses_in_ties_and_in_steps(masses, kind):
    """Among equal masses the first are the best. In steps, every further candidate becomes certain in turn, some of
    them barely."""
    r = torch.arange(40, dtype=torch.float64)
    mass_R = {
        "equal": r * 0 - 3.5,
        "in steps of e^100": -100 * r.flip(0),
        "one": torch.where(r == 17, 0.0, NO_MASS),
        "halves": -math.log(2) * r,
        "two of each": -(r // 2),
    }[masses]
    given = {"mass_R": mass_R, "share_RC": torch.zeros(40, 1), "kind": kind, "size": 16}
    assert_same(grouped([given | {"most": most, "seed": most} for most in (0, 1, 2, 7, 15, 16)], 1))


def test_collapsed_group_keeps_its_candidates():
    share_RC = torch.zeros(3, 4).masked_fill(torch.eye(3, 4) > 0, NO_MASS)
    given = {
        "mass_R": torch.full((3,), NO_MASS, dtype=torch.float64),
        "share_RC": share_RC,
        "size": 4,
        "most": 4,
        "dead": (1,),
    }
    made = assert_same(
        grouped(
            [given | {"kind": kind} for kind in (Decoding.DISTINCT, Decoding.WALK)]
            + [given | {"dead": (0, 1, 2), "kind": Decoding.DISTINCT}],
            4,
        )
    )
    assert made.collapsed_G.tolist() == [True, False, True]
    assert made.alive_X.tolist() == [True] * 4 + [False] * 8
    assert (
        set(made.parent_X[:4].tolist()) <= {0, 2} and (made.parent_X[4:8] == 3).all() and (made.parent_X[8:] == 6).all()
    )


@pytest.mark.skipif(ON_GPU, reason="a compiled kernel's uniforms cannot be replaced")
@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2.0**-53])
def test_edge_points_fill_all_rows_without_zero_mass(uniform, monkeypatch):
    monkeypatch.setattr(expansion, "draw_uniforms", lambda _, position_X, __: position_X.to(tl.float64) * 0 + uniform)
    log = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64).log()
    given = {"mass_R": log, "share_RC": torch.zeros(11, 1), "size": 8, "kind": Decoding.DISTINCT}
    arguments = grouped([given | {"most": most} for most in (2, 4, 5)], 1)
    made = expansion.expand(*arguments, chunk=4)
    assert [int(made.alive_X[8 * i : 8 * i + 8].sum()) for i in range(3)] == [2, 4, 5]
    alive = made.alive_X
    assert (arguments[0].mass_R[made.parent_X[alive]] > NO_MASS).all()
    for i in range(3):
        parents = made.parent_X[8 * i : 8 * i + 8][alive[8 * i : 8 * i + 8]]
        assert (parents.diff() > 0).all()


@st.composite
def populations(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans, Spans, int]:
    """Arguments of `assign_rows`: groups in which no more rows are alive than there are batch indices."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 5, MAX_PARTICLES]), min_size=1, max_size=4))
    rows = [size and draw(st.sampled_from([1, size, 3 * size])) for size in sizes]
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    places, root, alive = bounds(sizes), [], []
    for first, size, count in zip(places[0].tolist(), sizes, rows):
        kinds = rng.integers(0, size, max(1, size // 2)) if size else []
        root += (rng.choice(kinds, count) + first).tolist() if size else []
        of_group = np.zeros(count, dtype=bool)
        of_group[rng.permutation(count)[: rng.integers(0, min(size, count) + 1) if size else 0]] = True
        alive += of_group.tolist()
    padding = draw(st.integers(0, 2))
    root_X = torch.tensor(root + [0] * padding, dtype=torch.int64)
    # Rows come from sources in any order.
    parent_X = torch.from_numpy(rng.permutation(len(root_X)))
    root_R = torch.empty_like(root_X).index_put((parent_X,), root_X)
    return (
        root_R,
        parent_X,
        torch.tensor(alive + [True] * padding, dtype=torch.bool),
        bounds(rows),
        places,
        sum(sizes) + padding,
    )


@examples
@given(populations())
def test_roots_are_kept_as_the_torch_ones(arguments):
    expected, made = reference.assign_rows(*arguments), expansion.assign_rows(*to(DEVICE, arguments))
    for wanted_A, found_A in zip(expected, made):
        assert torch.equal(found_A.cpu(), wanted_A)


@st.composite
def blocks(draw) -> tuple[torch.Tensor, ...]:
    """Arguments of `match_samples`, with only two different tokens, so that blocks agree with the draws for long."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 7, MAX_PARTICLES]), min_size=1, max_size=4))
    padding, q, rng = (
        draw(st.integers(0, 2)),
        draw(st.sampled_from([1, 2, 5, 8, 33])),
        np.random.default_rng(draw(st.integers(0, 10**6))),
    )
    places = sum(sizes) + padding
    tokens_AQ, drawn_AQ = (torch.from_numpy(rng.choice(2, (places, q), p=[0.9, 0.1])) for _ in range(2))
    alive_A = torch.from_numpy(rng.random(places) < rng.choice([0.0, 0.5, 1.0]))
    alive_A[sum(sizes) :] = False
    return tokens_AQ, torch.from_numpy(rng.integers(1, q + 1, places)), drawn_AQ, alive_A, bounds(sizes)


@examples
@given(blocks())
def test_match_samples_equals_torch(arguments):
    for wanted_A, found_A in zip(reference_match(*arguments), match_samples(*to(DEVICE, arguments))):
        assert torch.equal(found_A.cpu(), wanted_A)
