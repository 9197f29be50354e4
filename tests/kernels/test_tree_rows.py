"""Selection of the rows of a draft tree to verify, against torch and against greedy selection. See
tests/kernels/rounds.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from smc.algorithm.expansion import LEAD_GAIN, CandidateTokens
from smc.executor.ops import RoundOps
from smc.executor.triton_ops import TritonOps
from smc.kernels import draft_tree
from smc.reference import heaviest_paths
from smc.round.plan import RoundPlan
from smc.round.tensors import DraftStep, GrownRows
from smc.types import OF_BOTH_MODELS, Decoding
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import assert_equal
from tests.kernels.test_draft import CPU, DraftRound

BEST = frozenset({Decoding.WALK})
in_both = pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])


def grown_tree(made: DraftRound, *, ties: bool = False) -> GrownRows:
    """K random steps: rows continue living rows of the step before in their order, some several times, with less mass.
    Some rows end and are carried on unchanged."""
    rng, rows, steps = made.rng, made.places * made.f, []
    tokens_XK, outcome_X = np.zeros((rows, made.k), np.int64), np.arange(rows)
    count_X, mass_X = np.zeros(rows, np.int64), np.zeros(rows)
    alive_X, ended_X = np.ones(rows, bool), np.zeros(rows, bool)
    for step in range(made.k):
        parent_X, fresh_X = np.arange(rows), np.ones(rows, bool)
        if step:
            for size, first in zip(made.sizes, made.plan.arrays.first_G.tolist()):
                mine = np.arange(first * made.f, (first + size) * made.f)
                living = mine[alive_X[mine]]
                fresh_X[mine] = False
                if len(living):
                    parents = []
                    for row in sorted(rng.choice(living, len(mine))):
                        if not (ended_X[row] and row in parents):
                            parents.append(row)
                    parent_X[mine], fresh_X[mine[: len(parents)]] = mine[0], True
                    parent_X[mine[: len(parents)]] = parents
        was_over_X = ended_X[parent_X]
        mass_X = mass_X[parent_X] - np.where(was_over_X, 0.0, rng.exponential(1.0, rows))
        mass_X = mass_X.round() if ties else mass_X
        alive_X = alive_X[parent_X] & fresh_X & (rng.random(rows) < 0.95)
        mass_X, count_X = np.where(alive_X, mass_X, -np.inf), count_X[parent_X] + ~was_over_X
        ended_X = was_over_X | (rng.random(rows) < 0.1)
        tokens_XK, outcome_X = tokens_XK[parent_X], outcome_X[parent_X] if step else outcome_X
        tokens_XK[:, step] = np.arange(rows)
        tree = made.tree()._replace(
            tokens_XK=made.here(tokens_XK),
            mass_X=made.here(mass_X),
            alive_X=made.here(alive_X),
            ended_X=made.here(ended_X),
            count_X=made.here(count_X),
            outcome_X=made.here(outcome_X),
        )
        none_XC = made.here(np.zeros((rows, 1), np.float32))
        steps.append(DraftStep(tree, made.here(parent_X), CandidateTokens(none_XC.long(), none_XC, none_XC)))
    return GrownRows(tree, tuple(steps))


def limited(made: DraftRound, limit: bool) -> RoundPlan:
    """Return the plan; with `limit`, each tree of it may have few nodes."""
    if not limit:
        return made.plan
    nodes_G = made.rng.integers(2, 3 + made.k * made.plan.arrays.size_G.cpu().numpy() // 2)
    return replace(
        made.plan,
        kind=replace(made.plan.kind, nodes=int(nodes_G.sum())),
        arrays=made.plan.arrays._replace(nodes_G=made.here(nodes_G, torch.int32)),
    )


with_limit = pytest.mark.parametrize("limit", [False, True], ids=["all-nodes", "few-nodes"])


@with_limit
@pytest.mark.parametrize(
    ("kinds", "lookahead"),
    [
        (BEST, True),
        (OF_BOTH_MODELS, False),
        pytest.param(OF_BOTH_MODELS, True, marks=pytest.mark.slow),
    ],
    ids=["best-ahead", "all-lockstep", "all-ahead"],
)
def test_rows_are_the_torch_ones(kinds, lookahead, limit):
    for seed in range(4):
        found = []
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = DraftRound(seed, kinds, lookahead, device, largest=40 if seed == 0 else 6)
            grown = grown_tree(made, ties=seed % 2 == 1)
            grown = ops.prune_tree(limited(made, limit), grown, lookahead)
            tree = grown.tree
            fields = ("root_X", "tokens_XK", "logq_XK", "tail_XB", "count_X", "ended_X", "before_X", "cut_X", "last_X")
            found.append((grown.leaf_X, tree.alive_X, tree.mass_X, *(getattr(tree, name) for name in fields)))
        assert_equal(found[1], found[0])


@in_both
@with_limit
def test_rows_hold_what_choosing_greedily_holds(lookahead, limit):
    """By `smc.reference`, which repeatedly takes the path whose nodes not yet held gain most; with a limit, among the
    likeliest nodes of each tree."""
    short = dropped = cut = 0
    for seed in range(12):
        made = DraftRound(seed, BEST, lookahead, CPU)
        grown = grown_tree(made)
        plan = limited(made, limit)
        chosen = RoundOps().prune_tree(plan, grown, lookahead)
        rows = made.places * made.f
        for group, (size, first) in enumerate(zip(made.sizes, made.plan.arrays.first_G.tolist())):
            begin, end = first * made.f, (first + size) * made.f
            gains, paths = tree_paths(grown, begin, end, lookahead)
            if limit:
                before = len(paths)
                paths = likeliest(grown, gains, paths, int(plan.arrays.nodes_G[group]) - 1, lookahead)
                cut += before - len(paths)
            of = zip(chosen.leaf_X[begin:end].tolist(), chosen.tree.alive_X[begin:end].tolist())
            taken = [paths[leaf] for leaf, alive in of if alive]
            most = int(made.plan.arrays.next_count_G[group]) if lookahead else end - begin
            leaves = [
                path
                for path in paths.values()
                if not any(other[: len(path)] == path != other for other in paths.values())
            ]
            expected = heaviest_paths(leaves, gains, end - begin, most)
            assert len(set(taken)) == len(taken)
            held, wanted = ({node for path in of for node in path} for of in (taken, expected))
            value = [sum(gains[node] for node in nodes) for nodes in (held, wanted)]
            assert value[0] == pytest.approx(value[1], abs=1e-5)
            short += sum(path[-1] < (made.k - 1) * rows for path in taken)
            dropped += len(paths) - len(taken)
    assert short > 20 and dropped > (20 if limit else 100) and (cut > 50) == limit, (short, dropped, cut)


def likeliest(
    grown: GrownRows, gains: dict[int, float], paths: dict[int, tuple[int, ...]], most: int, lookahead: bool
) -> dict[int, tuple[int, ...]]:
    """Return the paths to the nodes of each tree that gain most, in look-ahead of each outcome beside its first
    token."""
    rows, trees = len(grown.tree.mass_X), defaultdict(list)
    for node, path in sorted(paths.items()):
        step, row = divmod(node, rows)
        if int(grown.steps[step].tree.count_X[row]) > step and not (lookahead and step == 0):
            trees[path[0] if lookahead else 0].append(node)
    kept = {node for of in trees.values() for node in sorted(of, key=lambda node: -gains[node])[:most]}
    kept |= {node for node in paths if lookahead and node < rows}
    return {node: path for node, path in paths.items() if kept.issuperset(path)}


def tree_paths(grown: GrownRows, begin: int, end: int, lookahead: bool):
    """Return the gain of each node, and the path that leads to it."""
    rows, first = len(grown.tree.mass_X), grown.steps[0].tree
    top = max((float(first.mass_X[x]) for x in range(begin, end) if first.alive_X[x]), default=0.0)
    gains: dict[int, float] = {}
    paths: dict[int, tuple[int, ...]] = {}
    for step, of in enumerate(grown.steps):
        for x in range(begin, end):
            if not of.tree.alive_X[x]:
                continue
            node = step * rows + x
            before = paths[(step - 1) * rows + int(of.parent_X[x])] if step else ()
            counts = int(of.tree.count_X[x]) > step and not (lookahead and step == 0)
            gains[node] = math.exp(float(of.tree.mass_X[x]) - top) if counts else 0.0
            gains[node] += LEAD_GAIN * (x == begin)
            paths[node] = (*before, node)
    return gains, paths


def test_fewer_branches_need_no_kernels_of_their_own(monkeypatch):
    """Rounds that draft few tokens on few branches are not warmed up: they use what is compiled for all branches."""
    launched: list[tuple[str, dict[str, object]]] = []
    for name in ("_prune_tree", "_take_rows"):
        monkeypatch.setattr(draft_tree, name, Launches(getattr(draft_tree, name), launched))
    constants, branches = defaultdict(list), defaultdict(set)
    for seed in range(16):
        made = DraftRound(seed, BEST, True, DEVICE, largest=2)
        launched.clear()
        TritonOps().prune_tree(made.plan, grown_tree(made), True)
        alike = made.k, len(launched)
        constants[alike].append(list(launched))
        branches[alike].add(made.f)
    assert all(each == of_size[0] for of_size in constants.values() for each in of_size)
    assert any(len(numbers) > 1 for numbers in branches.values()), "no rounds differ in their branches only"


@dataclass(frozen=True)
class Launches:
    """Runs a kernel, and notes the constants by which its variants differ."""

    kernel: Any
    launched: list[tuple[str, dict[str, object]]]

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **named: object) -> None:
            self.launched.append((self.kernel.__name__, named))
            self.kernel[programs](*arguments, **named)

        return launch
