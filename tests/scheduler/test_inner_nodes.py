"""Look-ahead continues from inner nodes of a block (`smc.executor.draft`): rows drafted ahead are kept where the
target's draws leave the block, and answers do not depend on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from smc.scheduler.decode import RoundScheduler
from tests.pairwise import one_of
from tests.scheduler.harness import answers, request
from tests.scheduler.pairs import tiny_pair

BESIDE = [{}, {"population": "independent"}, {"method": "exact", "verification": "rejection"}]
TOKENS, SEEDS, SIZES = 32, range(5), (1, 4)
CONFIGS = [
    EngineConfig(block=block, branches=branches, max_slots=80, drafting="always")
    for block, branches in ((2, 8), (4, 1), (4, 4))
]


def requests(**options):
    return [
        request(
            [2, 1, 0],
            f"{options.get('method')} {n} {seed}",
            particles=n if options.get("method") == "exact" else None,
            temperature=1.3,
            seed=seed,
            max_tokens=TOKENS,
            ignore_eos=True,
            logprobs=True,
            **options,
        )
        for n in SIZES
        for seed in SEEDS
    ]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each group in each round: the number of tokens of its block that were discarded, and whether rows drafted
    ahead continue."""
    seen, record = [], RoundScheduler._record

    def watch(self, step, outcome, current_G):
        population, result = step.batch, outcome.result
        at_G = population.first_G
        seen.extend(
            zip(np.asarray(result.selection.cut_A)[at_G].tolist(), np.asarray(result.hit_G)[: len(at_G)].tolist())
        )
        record(self, step, outcome, current_G)

    monkeypatch.setattr(RoundScheduler, "_record", watch)
    return seen


@pytest.mark.parametrize(
    "config", one_of(CONFIGS[2], *CONFIGS[:2]), ids=lambda config: f"K{config.block}-F{config.branches}"
)
def test_rows_ahead_from_inner_nodes_go_on_and_answers_stay(config, monkeypatch):
    pair = tiny_pair()
    plain = answers(local_engine(pair, config), requests(method="target"))
    seen = watched(monkeypatch)
    found = answers(local_engine(pair, config), requests(method="exact"))
    assert sum(cut > 0 and hit for cut, hit in seen) > len(SIZES) * len(SEEDS)
    for n in SIZES:
        for seed in SEEDS:
            one, other = found[f"exact {n} {seed}"], plain[f"target {n} {seed}"]
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.slow
def test_fewer_rounds_miss(monkeypatch):
    """Without outcomes at inner nodes the same requests take more rounds, and a smaller share of them are hits."""
    pair, config = tiny_pair(), CONFIGS[2]
    found = answers(local_engine(pair, config), requests(method="exact"))
    with monkeypatch.context() as patch:
        patch.setattr("smc.round.tensors.KEPT_CANDIDATES", 0)
        without = answers(local_engine(pair, config), requests(method="exact"))
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in without.items()}
    rounds, hits = (
        [sum(getattr(one.statistics, name) for one in of.values()) for of in (found, without)]
        for name in ("rounds", "hits")
    )
    assert rounds[0] < 0.97 * rounds[1] and hits[0] / rounds[0] > hits[1] / rounds[1] + 0.05


@pytest.mark.slow
def test_batch_does_not_change_answers():
    """In rounds with SMC particles and chains, requests answer as they do alone."""
    pair, config = tiny_pair(), replace(CONFIGS[2], max_chains=8)
    alone = answers(local_engine(pair, config), requests(method="exact"))
    others = [
        request([1, 1], f"{options} {seed}", particles=3, seed=seed, max_tokens=TOKENS, ignore_eos=True, **options)
        for seed in range(2)
        for options in BESIDE
    ]
    together = answers(local_engine(pair, config), [*requests(method="exact"), *others])
    for name, one in alone.items():
        assert together[name].tokens == one.tokens
