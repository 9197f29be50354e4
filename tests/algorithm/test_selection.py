"""One round's selection: what is preserved in expectation, when a group resamples, and that padding has no effect.

Local axes: U uniforms, Y = N * F candidates of a group."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smc.algorithm import selection
from smc.algorithm.resampling import SCHEMES, assign_slots, normalise, offspring
from smc.algorithm.selection import BRANCH_POSITION, Selection, SelectionStatistics, draw_branch, select
from smc.api.limits import SCHEME_NAMES
from smc.philox import Purpose, uniforms
from tests.algorithm.packing import Population, pack, random_candidates
from tests.pairwise import few

examples = settings(max_examples=25, deadline=None)
log_weight = st.floats(-8, 8) | st.just(-math.inf)


def select_one(candidates_NF: Tensor, threshold: float, scheme: str = "systematic", seed: int = 0, **more) -> Selection:
    return select(**pack([Population(candidates_NF, threshold, scheme, seed, **more)]))


def branch_of(chosen: Selection, branches: int) -> Tensor:
    """Return which of its ancestor's `branches` rows each batch index continues with."""
    branch_A = chosen.particles.row_A - chosen.particles.ancestor_A * branches
    assert ((branch_A >= 0) & (branch_A < branches)).all()
    return branch_A


SIZES = {
    "same": [(1, 1, ()), (2, 2, ()), (5, 5, ()), (5, 4, (2,))],
    "fewer": [(2, 1, ()), (5, 3, ()), (6, 2, (0, 5))],
    "more": [(2, 2, (1,)), (5, 5, (0, 3)), (6, 4, (2, 3, 4))],
}
"""Groups side by side: number of indices, of draws, and indices without a particle."""
CASES = [("own branch", "same"), *((scheme, change) for scheme in SCHEMES for change in SIZES)]


@pytest.mark.parametrize(("path", "change", "branches"), few((*case, f) for case in CASES for f in (1, 2, 4)))
def test_expected_weight_of_every_candidate_is_preserved(path, change, branches, monkeypatch):
    """This property keeps Z-hat and every estimate unbiased. It holds for groups that are resampled, to as many
    particles, fewer or more, and for groups whose particles keep their own branch.

    Averaged over a grid of uniforms, which is exact to total / grid where each choice depends on one uniform. SSP needs
    independent ones: fixed random uniforms within 4.5 standard errors, false alarm 7e-6 a candidate, 9e-4 in all."""
    repeats = 2048 if path == "ssp" else 512
    if path != "ssp":
        monkeypatch.setattr(
            selection, "uniforms", lambda seed_R, _, at_N, __: ((seed_R[:, None] + 0.5) / repeats).repeat(len(at_N), 1)
        )
    threshold, scheme = (0.0, "systematic") if path == "own branch" else (2.0, path)
    groups = [
        Population(random_candidates(size, branches, 10 * size + branches), threshold, scheme, draws=draws, dead=dead)
        for size, draws, dead in SIZES[change]
    ]
    chosen = select(
        **pack([replace(group, seed=r) for group in groups for r in range(repeats)], padding=2, padding_groups=1)
    )
    assert chosen.statistics.resampled_G[:-1].all() == (path != "own branch")
    begin = 0
    for g, group in enumerate(groups):
        mean_Y = mean_on_candidates(chosen, begin, slice(g * repeats, (g + 1) * repeats), group)
        begin += repeats * group.size
        exact_Y = group.candidates_NF.exp().masked_fill(~group.alive_N[:, None], 0.0).flatten()
        total = exact_Y.sum()
        part_Y = exact_Y / total * group.draws % 1
        tolerance_Y = (
            total / group.draws * 4.5 * (part_Y * (1 - part_Y) / repeats).sqrt() if path == "ssp" else total / repeats
        )
        assert ((mean_Y * group.count - exact_Y).abs() <= tolerance_Y + 1e-9).all()


def mean_on_candidates(chosen: Selection, begin: int, groups: slice, population: Population) -> Tensor:
    """Z-hat's increment times the mean over particles of the weight on each candidate [size * F], averaged over repeats
    of a population.

    `begin` is the first batch index of the repeats."""
    size, branches = population.candidates_NF.shape
    repeats = groups.stop - groups.start
    places = slice(begin, begin + repeats * size)
    ancestor_A, alive_A = chosen.particles.ancestor_A[places] - begin, chosen.particles.alive_A[places]
    assert torch.equal(ancestor_A // size, torch.arange(repeats).repeat_interleave(size))
    assert (alive_A.view(repeats, size).sum(-1) == population.draws).all()
    weight_A = (chosen.statistics.log_z_G[groups].repeat_interleave(size) + chosen.particles.logw_A[places]).exp()
    index_A = ancestor_A % size * branches + branch_of(chosen, branches)[places]
    on_Y = torch.zeros(size * branches, dtype=torch.float64).index_add(0, index_A[alive_A], weight_A[alive_A])
    return on_Y / (repeats * population.draws)


@examples
@given(
    st.lists(st.lists(log_weight, min_size=2, max_size=2), min_size=1, max_size=6).filter(
        lambda rows: max(map(max, rows)) > -math.inf
    )
)
def test_effective_sample_size_is_that_of_the_families(rows):
    family = [sum(math.exp(x) for x in row) for row in rows]
    ess = sum(family) ** 2 / sum(x * x for x in family)
    assert select_one(torch.tensor(rows, dtype=torch.float64), 0.0).statistics.ess_G.item() == pytest.approx(
        ess, rel=1e-9
    )


@examples
@given(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(0, 1000), st.floats(0, 1), st.booleans())
def test_a_group_resamples_exactly_when_its_ess_is_below_threshold(n, branches, seed, threshold, with_dead):
    """The threshold is a share of the particles that are alive."""
    candidates_NF = random_candidates(n, branches, seed)
    dead = (n,) if with_dead else ()
    padded_NF = torch.cat((candidates_NF, torch.full((len(dead), branches), 3.0, dtype=torch.float64)))
    family_N = candidates_NF.logsumexp(-1)
    chosen = select_one(padded_NF, threshold, seed=seed, dead=dead)
    alive_A = chosen.particles.alive_A
    assert chosen.statistics.resampled_G.item() == (
        chosen.statistics.ess_G.item() < threshold * n * (1 - selection.EQUAL)
    )
    assert not chosen.statistics.collapsed_G.item()
    assert alive_A.sum() == n
    if chosen.statistics.resampled_G.item():
        assert chosen.statistics.log_z_G.item() == pytest.approx(family_N.logsumexp(-1).item() - math.log(n), abs=1e-12)
        assert (chosen.particles.logw_A[alive_A] == 0).all()
    else:
        assert chosen.statistics.log_z_G.item() == 0
        assert chosen.particles.ancestor_A.tolist() == list(range(n + with_dead))
        torch.testing.assert_close(chosen.particles.logw_A[:n], family_N)
    assert (chosen.particles.logw_A[~alive_A] == -torch.inf).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_threshold_zero_never_resamples_and_one_always_does_when_uneven(scheme):
    for seed in range(20):
        candidates_NF = random_candidates(6, 2, seed, spread=5.0)
        assert not select_one(candidates_NF, 0.0, scheme, seed).statistics.resampled_G.any()
        assert select_one(candidates_NF, 1.0, scheme, seed).statistics.resampled_G.all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("draws", [1, 3, 6])
def test_another_number_of_particles_is_drawn_whatever_the_ess(scheme, draws):
    """Four even particles at six indices, threshold 0. Indices that remain without a particle keep themselves as
    ancestor, with weight zero."""
    chosen = select_one(torch.zeros(6, 2, dtype=torch.float64), 0.0, scheme, draws=draws, dead=(1, 4))
    alive_A, own_A = chosen.particles.alive_A, torch.arange(6)
    assert chosen.statistics.resampled_G.all() and alive_A.sum() == draws
    assert not torch.isin(chosen.particles.ancestor_A[alive_A], torch.tensor([1, 4])).any()
    assert torch.equal(chosen.particles.ancestor_A[~alive_A], own_A[~alive_A])
    assert (branch_of(chosen, 2)[~alive_A] == 0).all()
    assert chosen.particles.logw_A.tolist() == [0.0 if alive else -math.inf for alive in alive_A.tolist()]
    assert chosen.statistics.log_z_G.item() == pytest.approx(math.log(2))


def test_a_particle_without_weight_lives_on_where_nothing_is_drawn():
    candidates_NF = torch.zeros(3, 2, dtype=torch.float64)
    candidates_NF[1] = -torch.inf
    chosen = select_one(candidates_NF, 0.0, dead=(2,))
    assert chosen.particles.alive_A.tolist() == [True, True, False]
    assert branch_of(chosen, 2)[1:].tolist() == [0, 0]
    assert chosen.particles.logw_A.tolist() == [pytest.approx(math.log(2)), -math.inf, -math.inf]


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_zero_weight_is_never_chosen(branches):
    for seed in range(60):
        candidates_NF = random_candidates(5, branches, seed)
        groups = [Population(candidates_NF, threshold, scheme, seed) for scheme in SCHEMES for threshold in (0.0, 1.0)]
        arguments = pack(groups)
        chosen = select(**arguments)
        weight_A = arguments["candidates_AF"].flatten()[chosen.particles.row_A]
        assert (weight_A[chosen.particles.logw_A > -torch.inf] > -torch.inf).all()


@examples
@given(
    st.integers(1, 6),
    st.sampled_from([1, 3]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(1, 2**31),
    st.sampled_from(SCHEME_NAMES),
)
def test_uniforms_are_those_of_the_seed_and_round(n, branches, seed, rounds, scheme):
    """Whatever else is in the batch: positions from 0 draw candidates, those from BRANCH_POSITION pick branches."""
    candidates_NF = random_candidates(n, branches, seed % 1000)
    groups = [Population(candidates_NF, threshold, scheme, seed, round=rounds) for threshold in (2.0, 0.0)]
    other = Population(random_candidates(7, branches, 3), 2.0, "multinomial", 5)
    chosen = select(**pack([other, *groups]))
    positions = np.concatenate((np.arange(n * branches), BRANCH_POSITION + np.arange(n)))
    drawn_GU = torch.from_numpy(uniforms(np.array([seed]), np.array([rounds]), positions, Purpose.SELECTION))
    weights_GY, _ = normalise(candidates_NF.view(1, -1))
    counts_GY = offspring(
        torch.tensor([SCHEME_NAMES.index(scheme)]), weights_GY, torch.tensor([n]), n, drawn_GU[:, : n * branches]
    )
    ancestor_GN, branch_GN, _ = assign_slots(counts_GY.view(1, n, branches), torch.tensor([n]))
    assert torch.equal(chosen.particles.ancestor_A[7 : 7 + n], 7 + ancestor_GN[0])
    branch_A = branch_of(chosen, branches)
    assert torch.equal(branch_A[7 : 7 + n], branch_GN[0])
    assert torch.equal(branch_A[7 + n :], draw_branch(candidates_NF[None], drawn_GU[:, n * branches :])[0])


@st.composite
def populations(draw, branches: int) -> Population:
    size = draw(st.integers(1, 5))
    dead = tuple(n for n in range(1, size) if draw(st.integers(0, 3)) == 0)
    return Population(
        draw(
            st.just(random_candidates(size, branches, draw(st.integers(0, 1000))))
            | st.just(torch.full((size, branches), -torch.inf))
        ),
        threshold=draw(st.sampled_from([0.0, 0.5, 1.0])),
        scheme=draw(st.sampled_from(sorted(SCHEMES))),
        seed=draw(st.integers(-9, 9)),
        draws=draw(st.none() | st.integers(1, size)),
        dead=dead,
    )


@examples
@given(st.data(), st.sampled_from([1, 3]), st.integers(0, 3), st.integers(0, 3))
def test_groups_in_one_call_equal_each_group_alone(data, branches, padding, padding_groups):
    """Groups of different sizes, thresholds, schemes and numbers of draws, some collapsed, do not influence each other,
    and padding stays padding."""
    groups = data.draw(st.lists(populations(branches), min_size=1, max_size=5))
    together = select(**pack(groups, padding, padding_groups))
    begin = 0
    for g, group in enumerate(groups):
        alone, here = select(**pack([group], junk=7.0)), slice(begin, begin + group.size)
        begin += group.size
        for name in SelectionStatistics._fields:
            values = getattr(together.statistics, name)[g : g + 1]
            torch.testing.assert_close(values, getattr(alone.statistics, name))
        for name in ("logw_A", "alive_A"):
            torch.testing.assert_close(getattr(together.particles, name)[here], getattr(alone.particles, name))
        assert torch.equal(branch_of(together, branches)[here], branch_of(alone, branches))
        assert torch.equal(together.particles.ancestor_A[here], here.start + alone.particles.ancestor_A)
    assert together.particles.ancestor_A[begin:].tolist() == list(range(begin, begin + padding))
    assert (branch_of(together, branches)[begin:] == 0).all() and not together.particles.alive_A[begin:].any()
    assert (together.particles.logw_A[begin:] == -torch.inf).all()
    for name in SelectionStatistics._fields:
        assert (getattr(together.statistics, name)[len(groups) :] == 0).all()


def test_a_batch_of_padding_alone():
    chosen = select(**pack([Population(torch.zeros(0, 2, dtype=torch.float64))], padding=3))
    assert chosen.particles.ancestor_A.tolist() == [0, 1, 2]
    assert not chosen.particles.alive_A.any() and not chosen.statistics.collapsed_G.any()


@pytest.mark.parametrize(
    ("draws", "alive", "threshold", "branches"),
    few(
        (*case, threshold, f)
        for case in [(None, [0, 2, 3]), (2, [0, 2]), (4, [0, 2, 3])]
        for threshold in (0.0, 1.0)
        for f in (1, 2, 4)
    ),
)
def test_a_collapsed_group_goes_on_with_equal_weights_and_says_so(threshold, branches, draws, alive):
    """If fewer particles are to be drawn, the first ones stay; if more, all existing ones."""
    chosen = select_one(torch.full((4, branches), -torch.inf, dtype=torch.float64), threshold, dead=(1,), draws=draws)
    assert chosen.statistics.collapsed_G.tolist() == [True]
    assert chosen.statistics.resampled_G.tolist() == [False]
    assert chosen.statistics.log_z_G.tolist() == [-math.inf]
    assert chosen.statistics.ess_G.tolist() == [0]
    assert chosen.particles.logw_A.tolist() == [0.0 if n in alive else -math.inf for n in range(4)]
    assert chosen.particles.alive_A.tolist() == [n in alive for n in range(4)]
    assert chosen.particles.ancestor_A.tolist() == [0, 1, 2, 3]
    assert branch_of(chosen, branches).tolist() == [0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_group_with_nan_keeps_its_places_and_disturbs_no_other(bad):
    fine = Population(random_candidates(4, 2, 1), seed=3)
    broken_NF = random_candidates(3, 2, 2)
    broken_NF[1, 0] = bad
    chosen, alone = select(**pack([Population(broken_NF), fine])), select(**pack([fine]))
    assert chosen.particles.ancestor_A[:3].tolist() == [0, 1, 2]
    assert chosen.particles.logw_A[:3].tolist() == [0, 0, 0]
    assert chosen.statistics.collapsed_G.tolist() == [True, False]
    assert torch.equal(chosen.particles.ancestor_A[3:], 3 + alone.particles.ancestor_A)
