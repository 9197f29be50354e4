"""Warm-up rounds cover the kinds of rounds that requests with usual settings need, down to the type of every array, and
change no state that matters."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest

from benchmarks.load import ClosedLoop
from benchmarks.policy import TreeSize, config_of
from benchmarks.traces import replay_engine, replayed_request
from smc.api.engine_config import NODES, PATHS, EngineConfig
from smc.arrays import map_tensors
from smc.calibration.warm_up import REPEATS, UsualSampling, warm_up_plans
from smc.distributions import Processors
from smc.executor.graph_runner import MOST_KEYS
from smc.executor.round_executor import RoundExecutor
from smc.local_engine import local_engine
from smc.round.plan import SHORT, SHORT_SINGLE, Contexts, RoundPlan
from smc.scheduler.planner import DraftSize, bucket
from smc.types import Decoding
from tests.benchmarks.test_policy import LATENCY, library
from tests.pairwise import one_of
from tests.scheduler.harness import answers, request
from tests.scheduler.pairs import tiny_pair

FORMS = [EngineConfig(block=5, max_slots=32), EngineConfig(form="lockstep", block=8, max_slots=24)]


def layout(plan: RoundPlan) -> list[tuple]:
    """The properties of a plan that a buffer for plans of its key depends on."""
    return map_tensors(lambda array: (array.dtype, array.shape), plan.parts)


@pytest.mark.parametrize("config", one_of(*FORMS), ids=["look-ahead", "lockstep"])
def test_usual_requests_meet_no_new_kind_of_round(config):
    engine, asked = local_engine(tiny_pair(max_context=512), config), []
    run, engine.executor.round = engine.executor.round, lambda plan: (asked.append(plan), run(plan))[1]
    for sizes in ((8,), (1, 5, 2, 9), (16, 4)):
        requests = [
            request([i % 3] * (9 + i), str(i), particles=n, max_tokens=11, seed=i, ignore_eos=True)
            for i, n in enumerate(sizes)
        ]
        plain = request([1, 2, 0], "plain", method="target", temperature=0, max_tokens=11, ignore_eos=True)
        list(engine.run([*requests, plain]))
    for law in (
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 3},
        {"top_p": 0.5, "min_p": 0.1},
    ):
        list(engine.run([request([2, 1, 0], "law", max_tokens=10, ignore_eos=True, **law)]))
    warmed_up = list(warm_up_plans(config, engine.context))
    by_key = {plan.kind: plan for plan in warmed_up}
    assert len(warmed_up) == REPEATS * len(by_key)
    assert asked and all(layout(plan) == layout(by_key[plan.kind]) for plan in asked)


@pytest.mark.parametrize("config", one_of(*FORMS[::-1]), ids=["lockstep", "look-ahead"])
@pytest.mark.parametrize("sampling", one_of({"top_k": 3, "top_p": 0.9, "repetition_penalty": 1.1}, {"min_p": 0.1}))
def test_requests_with_the_checkpoint_s_sampling_meet_no_new_kind(config, sampling):
    """Most checkpoints bring sampling settings of their own, which requests leave out."""
    engine, asked = local_engine(tiny_pair(max_context=512), config), []
    run, engine.executor.round = engine.executor.round, lambda plan: (asked.append(plan), run(plan))[1]
    for sizes in ((1, 5, 2, 9), (8,)):
        requests = [
            request([i % 3] * (9 + i), str(i), "exact", particles=n, max_tokens=11, seed=i, ignore_eos=True, **sampling)
            for i, n in enumerate(sizes)
        ]
        plain = request([1, 2, 0], "plain", method="target", max_tokens=11, ignore_eos=True, **sampling)
        list(engine.run([*requests, plain]))
    usual = UsualSampling.of(sampling)
    plans = list(warm_up_plans(config, engine.context, usual=usual))
    by_key = {plan.kind: plan for plan in plans}
    assert asked and all(layout(plan) == layout(by_key[plan.kind]) for plan in asked)
    for plan in [plan for plan in plans if plan.kind.penalised][:: 20 * REPEATS]:
        run(plan).result()


def test_usual_penalties_are_warmed_up_in_every_size():
    """Without penalties there are few sizes. The largest rounds come first: the memory of their recordings has room for
    the others."""
    config, sizes = EngineConfig(form="lockstep", block=8, max_slots=256), defaultdict(set)
    plans = warm_up_plans(config, 1024, usual=UsualSampling.of({"repetition_penalty": 1.1}))
    for plan in plans:
        if plan.kind.decodings == {Decoding.WALK} and not plan.kind.target_processors & Processors.TRUNCATION:
            sizes[plan.kind.penalised].add(plan.kind.batch_size)
    assert sizes[True] == {bucket(rows) for rows in range(1, 257)} and sizes[False] == {8}
    assert plans[0].kind.batch_size == 256 and plans[-1].kind.batch_size == 1
    assert all(plans[i] is plans[i + 1] for i in range(0, len(plans), REPEATS))


@pytest.mark.parametrize("config", one_of(*FORMS[::-1]), ids=["lockstep", "look-ahead"])
def test_warm_up_covers_long_prompts(config):
    engine, asked = local_engine(tiny_pair(max_context=SHORT_SINGLE + 60), config), []
    run, engine.executor.round = engine.executor.round, lambda plan: (asked.append(plan), run(plan))[1]
    kinds = [
        {"method": "exact", "particles": 1},
        {"method": "exact", "particles": 4},
        {"particles": 3},
        {"method": "target"},
    ]
    for kind, count in product(kinds, (1, 3)):
        list(
            engine.run(
                [request([1, 2] * (SHORT_SINGLE // 2), str(i), max_tokens=12, seed=i, **kind) for i in range(count)]
            )
        )
    by_key = {plan.kind: plan for plan in warm_up_plans(config, engine.context)}
    assert asked and all(layout(plan) == layout(by_key[plan.kind]) for plan in asked)
    assert {plan.kind.contexts for plan in asked} == {Contexts.SINGLE, Contexts.SHARED}


@pytest.mark.parametrize("context", one_of(SHORT - 14, SHORT_SINGLE - 14))
def test_warm_up_covers_contexts_just_below_a_limit(context):
    """The engine's longest context is just below a limit, and a round may reserve more positions than the context
    has."""
    config = EngineConfig(block=8, max_slots=8)
    engine, asked = local_engine(tiny_pair(max_context=context), config), []
    run, engine.executor.round = engine.executor.round, lambda plan: (asked.append(plan), run(plan))[1]
    for kind in ({"method": "exact", "particles": 4}, {"method": "exact", "particles": 1}):
        list(engine.run([request([1, 2] * (context // 2 - 10), max_tokens=20, ignore_eos=True, **kind)]))
    assert asked and {plan.kind for plan in asked} <= {plan.kind for plan in warm_up_plans(config, engine.context)}


def test_long_contexts_are_warmed_up_where_there_can_be_some():
    config = EngineConfig(block=5, max_slots=8)
    expected = {
        SHORT - 50: {Contexts.SHORT},
        SHORT + 50: {Contexts.SHORT, Contexts.SHARED},
        SHORT_SINGLE + 50: set(Contexts),
    }
    found = {context: {plan.kind.contexts for plan in warm_up_plans(config, context)} for context in expected}
    assert found == expected


@pytest.mark.parametrize("config", FORMS, ids=["look-ahead", "lockstep"])
def test_rounds_with_nodes_are_warmed_up_where_the_target_runs_nodes(config):
    """With nodes, also for every smaller number of tokens, because kernels are compiled for it."""
    nodes, paths = (
        {plan.kind for plan in warm_up_plans(replace(config, verified=verified), 512)} for verified in (NODES, PATHS)
    )
    assert paths == {kind for kind in nodes if not kind.nodes}
    assert {kind.steps for kind in nodes - paths} == {None, *config.block_levels[1:]}


def test_fewer_branches_are_warmed_up_at_few_sizes():
    """Their kernels are compiled, also for truncated distributions; rounds of other sizes are padded."""
    config, sizes = EngineConfig(block=5, branches=8, max_slots=24), defaultdict(set)
    for plan in warm_up_plans(config, 512):
        kind = plan.kind
        if kind.decodings == {Decoding.WALK} and kind.steps is None and not kind.nodes and not kind.redrafted:
            sizes[kind.branches, bool(kind.draft_processors & Processors.TRUNCATION)].add(kind.batch_size)
    whole = {*range(1, 9), 10, 12, 14, 16, 20, 24}
    assert sizes == {
        (branches, truncated): {8} if truncated else whole if branches == 8 else {1, 2, 4, 8, 12, 16, 24}
        for branches in (8, 4, 2, 1)
        for truncated in (False, True)
    }


@pytest.mark.parametrize(
    ("form", "requests"), one_of(("lookahead", 4), ("lockstep", 16), ("lookahead", 1), ("lockstep", 1))
)
def test_rounds_of_chosen_sizes_meet_no_new_kind(form, requests):
    """A new kind is compiled and recorded in the middle of answers: a service whose trees a latency model chose spent
    17% of its first seconds on that."""
    size = TreeSize(8, 8, 4 if form == "lookahead" else 1)
    config = replace(config_of(form, size, "adaptive"), max_slots=64)
    engine, asked = replay_engine(library(), config, launched_ahead), []
    engine.latency = LATENCY
    run, engine.executor.round = engine.executor.round, lambda plan: (asked.append(plan), run(plan))[1]
    loop = ClosedLoop(engine, (replayed_request(library(), n, 8) for n in range(2 * requests)), requests)
    while loop.running:
        loop.step()
    by_key = {plan.kind: plan for plan in warm_up_plans(engine.config, engine.context)}
    # Where fewer tokens are drafted than in the round before, few requests alone meet no new kind.
    asked = [plan for plan in asked if not drafts_less(plan) or plan.kind.batch_size <= 8]
    assert len({plan.kind for plan in asked}) > 2
    assert all(plan.kind in by_key and layout(plan) == layout(by_key[plan.kind]) for plan in asked)


def launched_ahead(rounds: RoundExecutor) -> RoundExecutor:
    """Let rounds be launched before the last one is read, as on GPUs."""
    rounds.pipelined = True
    return rounds


def drafts_less(plan: RoundPlan) -> bool:
    """Whether a round verifies longer blocks than it drafts."""
    return plan.kind.steps is not None and plan.kind.queries > plan.kind.steps + 1


def test_rounds_draft_less_as_soon_as_the_policy_says_so():
    """A block in flight may be longer than what a round drafts; it once made all later rounds draft as much."""
    config = EngineConfig(block=8, branches=2, max_slots=16, redrafting="never")
    engine, asked = local_engine(tiny_pair(max_context=512), config), []
    rounds = engine.rounds_of(Decoding.WALK)
    rounds.pipelined = True
    sizes = iter([DraftSize(2, None), *[DraftSize(2, 2)] * 100])
    rounds._planner._decide = lambda *_: next(sizes)
    run, engine.executor.round = engine.executor.round, lambda plan: (asked.append(plan), run(plan))[1]
    list(engine.run([request([1, 2], method="exact", particles=4, max_tokens=40, ignore_eos=True, seed=3)]))
    assert [(plan.kind.steps, plan.kind.queries) for plan in asked[:4]] == [(None, 8), (2, 8), (2, 2), (2, 2)]


@pytest.mark.parametrize("config", one_of(*FORMS), ids=["look-ahead", "lockstep"])
def test_warm_up_rounds_change_no_answer(config):
    asked = [request([1, 2], str(i), particles=n, seed=i, max_tokens=20) for i, n in enumerate((3, 8))]
    expected = answers(local_engine(tiny_pair(), config), asked)
    engine = local_engine(tiny_pair(), config)
    for plan in list(warm_up_plans(config, engine.context))[:: REPEATS * 3]:
        engine.executor.round(plan).result()
    found = answers(engine, asked)
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in expected.items()}


def test_redrafting_takes_no_rounds_of_other_methods_away():
    config = EngineConfig(block=5, max_slots=32)
    never, *others = (
        {
            plan.kind
            for plan in warm_up_plans(replace(config, redrafting=redrafting), 4096)
            if Decoding.WALK not in plan.kind.decodings
        }
        for redrafting in ("never", "adaptive", "always")
    )
    assert never and others == [never, never]


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(block=12, max_slots=256),
        EngineConfig(block=5, max_slots=512),
        EngineConfig(block=16, branches=16, max_slots=512),
        EngineConfig(block=32, branches=32, max_slots=512),
    ],
)
def test_the_kinds_of_a_warm_up_are_all_kept(config):
    """A kind that a later one displaces is recorded again when a request needs it. Requests of rare kinds and prompts
    need some more."""
    assert len({plan.kind for plan in warm_up_plans(config, 2048)}) <= MOST_KEYS - 64
