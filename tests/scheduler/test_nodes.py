"""Tokens that blocks have in common run once at the target: answers are those of plain decoding, whatever the number of
nodes."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from smc.round.plan import RoundPlan
from smc.scheduler.planner import NODE_SHARES, DraftSize, node_room, shared_nodes, tree_nodes
from smc.scheduler.tree_policy import LatencyTreePolicy
from tests.scheduler.harness import answers, assert_empty, assert_pages_follow, request
from tests.scheduler.pairs import tiny_pair

CONFIGS = [
    EngineConfig(form="lockstep", block=4, max_slots=40),
    EngineConfig(form="lookahead", block=4, branches=3, max_slots=40),
    EngineConfig(form="lookahead", block=12, branches=2, max_slots=40),
]
SETTINGS = [
    {"particles": 8, "logprobs": True},
    {"particles": 1},
    {"particles": 6, "temperature": 0.0, "logprobs": True},
    {"particles": 4, "top_p": 0.8, "stop": ("ab", "ca")},
    {"particles": 5, "presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.3, "logprobs": True},
    {"particles": 3, "logit_bias": ((1, 1.5),), "min_tokens": 6},
    {"particles": 5, "constraint": {"regex": "(ab|ce*){2,}"}, "logprobs": True},
]
in_both = pytest.mark.parametrize("config", CONFIGS, ids=[f"{config.form}-{config.block}" for config in CONFIGS])


class AnyNodes(LatencyTreePolicy):
    """Lets the target run any number of nodes, from one for each tree on."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        super().__init__(config)
        self.config, self.rng, self._again = config, random.Random(seed), random.Random(seed)

    def draft_size(self, trees, batch_size, context, latency) -> DraftSize:
        steps = self.rng.choice(self.config.block_levels)
        tokens = batch_size * self.config.scored(steps)
        nodes = self.rng.choice((0, len(list(trees)), self.rng.randint(min(20, tokens), tokens), tokens))
        redrafted = self._again.choice(range(self.config.block))
        return DraftSize(self.config.branches, None if steps == self.config.block else steps, nodes, redrafted)


def requests_of(method: str, seeds: int) -> list[Request]:
    """Requests of every setting; each has another prompt and another length."""
    found = []
    for i in range(len(SETTINGS) * seeds):
        settings = dict(SETTINGS[i % len(SETTINGS)])
        if method != "exact":
            settings.pop("particles")
        settings |= {"max_tokens": 25 + 3 * i, "ignore_eos": i % 2 == 1 and "constraint" not in settings}
        params = SamplingParams(method=method, seed=i, **settings)
        found.append(Request(str(i), tuple(n % 3 for n in range(3 + i)), params))
    return found


@in_both
def test_answers_do_not_depend_on_nodes(config):
    engine = local_engine(tiny_pair(max_context=128), config, trees=AnyNodes(config))
    plans: list[RoundPlan] = []
    launch = engine.executor.round
    engine.executor.round = lambda plan: (plans.append(plan), launch(plan))[1]
    found = answers(engine, requests_of("exact", 2))
    assert_empty(engine)
    expected = answers(local_engine(tiny_pair(max_context=128), config), requests_of("target", 2))
    for name, one in expected.items():
        assert (found[name].tokens, found[name].text, found[name].finish_reason) == (
            one.tokens,
            one.text,
            one.finish_reason,
        )
        if one.logprobs is not None:
            assert found[name].logprobs == pytest.approx(one.logprobs, abs=1e-4)
    counts = Counter(bool(plan.kind.nodes) for plan in plans)
    assert counts[True] > 10 and counts[False] > 3, counts


@in_both
def test_pages_hold_the_tokens_of_their_particles(config):
    engine = local_engine(tiny_pair(max_context=128), config, trees=AnyNodes(config, 1))
    assert_pages_follow(
        engine,
        [request([i % 3] * (5 + i), str(i), method="exact", particles=8 - i, seed=i, max_tokens=40) for i in range(3)],
    )


@pytest.mark.parametrize("queries", [1, 4, 6, 13])
def test_nodes_are_enough_and_all_given(queries):
    """Every tree gets at least what it needs, a single row all of its tokens, and together they get no more than there
    are."""
    rng, shares = np.random.default_rng(0), set()
    for _ in range(200):
        size_G = rng.integers(1, rng.integers(2, 18), rng.integers(1, 20))
        rows, groups = int(size_G.sum()), len(size_G)
        tokens = (rows + int(rng.integers(0, rows // 4 + 1))) * queries
        nodes = node_room(rows, groups, queries, tokens // queries)
        if not nodes:
            assert tree_nodes(rows, groups, queries) > int(NODE_SHARES[-1] * tokens)
            continue
        shares.add(nodes / tokens)
        nodes_G = shared_nodes(nodes, size_G, queries)
        assert nodes_G.sum() <= nodes and (nodes_G >= np.floor(tree_nodes(size_G, 1, queries))).all()
        assert (nodes_G <= size_G * queries).all() and (nodes_G[size_G == 1] == queries).all()
        assert shared_nodes(groups, size_G, queries).tolist() == [1] * groups
    assert len(shares) >= (3 if queries > 1 else 0)
