"""The latency model decides how much is drafted: the tree policy as a pure function of made-up curves, and inside an
engine."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from smc.scheduler.planner import tree_nodes
from smc.scheduler.speculation import (
    PRIOR_MISS_RATE,
    ROWS_FALLS,
    WIDTH_GAIN,
    Acceptance,
    LatencyCurve,
    LatencyModel,
    Miss,
    MissRates,
    ModelLatency,
    tokens_a_round,
)
from smc.scheduler.tree_policy import (
    FADE,
    MARGIN,
    SURE,
    LatencyTreePolicy,
    OtherLoad,
    ThroughputForecast,
    TreeController,
    TreeRequest,
)
from smc.types import Decoding
from tests.pairwise import one_of
from tests.scheduler.harness import answers, assert_empty, running
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import pair
from tests.scheduler.test_acceptance import ranked

EASY, HARD, HOPELESS = 0.021, 0.07, 8.0
"""Miss rates: of the shipped pair at temperatures 1 and 2, and of a draft that is never right."""
CONFIGS = [EngineConfig(block=8, max_slots=4096), EngineConfig(form="lockstep", block=8, max_slots=4096)]
FLAT, FAR = 64, 1 << 14


def rising(floor: float, slope: float, read: float = 0.0) -> ModelLatency:
    """A curve that is flat up to 64 rows or positions (the time to read the weights) and rises by `slope` for each one
    beyond."""
    return ModelLatency(LatencyCurve(((FLAT, floor), (FAR, floor + slope * (FAR - FLAT)))), read)


def made(
    draft: tuple[float, float] = (0.9e-3, 4e-6),
    target: tuple[float, float] = (4.2e-3, 35e-6),
    round_overhead: float = 0.6e-3,
) -> LatencyModel:
    """A latency model, by default of about an 8B target and a 1B draft on a large GPU each. Reading the context costs
    nothing."""
    return LatencyModel(rising(*draft), rising(*target), rising(*target), round_overhead)


MADE, NOBODY, SHORT = made(), OtherLoad(), 100


def through(read: float, **milliseconds: float) -> ModelLatency:
    """A curve through measured points: `at_64=5.0` means 5 ms for size 64."""
    return ModelLatency(
        LatencyCurve(tuple((int(size.removeprefix("at_")), 1e-3 * each) for size, each in milliseconds.items())), read
    )


H200 = LatencyModel(
    through(8e-9, at_1=0.85, at_32=0.95, at_128=1.3, at_512=2.8, at_2048=9.7),
    through(27e-9, at_5=4.5, at_40=4.7, at_160=5.8, at_400=9.5, at_1600=35.0),
    through(75e-9, at_1=4.2, at_64=5.0, at_128=5.2, at_256=5.8),
    0.6e-3,
)
"""An 8B target and a 1B draft on a GPU each (docs/performance.md). A pass of 256 sequences of the target alone took 7.7
ms with contexts of 100 tokens each, 10.7 ms with 256."""
ONE_H200 = LatencyModel(
    through(8e-9, at_1=0.85, at_64=1.13, at_128=1.41, at_256=1.89, at_512=3.19),
    through(37e-9, at_6=4.04, at_96=5.0, at_384=9.1, at_768=15.73, at_1536=29.95, at_3072=61.38),
    through(28e-9, at_1=3.98, at_64=4.88, at_128=5.52, at_256=7.32),
    0.03e-3,
)
"""The same pair on a single GPU."""


def rates(*token: float, gain: float = WIDTH_GAIN) -> MissRates:
    """Rates of a draft that misses outcomes as often as tokens, and begins again after every missing token."""
    return MissRates(token, restart=token[0], whole=token[-1], part=1.0, gain=gain)


def tree(miss_rate: float, rows: int = 0, context: int = SHORT, most: int = 8) -> TreeRequest:
    return TreeRequest(most, rates(miss_rate), context, rows)


def settled(
    config: EngineConfig,
    hazards: list[float],
    beside: OtherLoad = NOBODY,
    latency: LatencyModel = MADE,
    rows: int = 8,
    context: int = SHORT,
) -> list[int]:
    """The number of rows of each request once the policy stops changing them; all begin with `rows`."""
    policy, now = LatencyTreePolicy(config), [rows] * len(hazards)
    for _ in range(3):
        changed = policy.change(
            [tree(miss_rate, count, context) for miss_rate, count in zip(hazards, now)], [], beside, latency
        )
        if changed is None:
            return now
        now = list(changed)
    raise AssertionError("it does not settle")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.form)
def test_one_request_has_the_whole_tree_and_a_crowd_none(config):
    found = [settled(config, [EASY] * count) for count in (1, 2, 4, 8, 16, 64, 256)]
    totals = [sum(rows) / len(rows) for rows in found]
    assert totals[0] == 8 and totals[-1] == 0 and totals == sorted(totals, reverse=True)
    assert any(0 < rows < 8 for rows in totals)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.form)
def test_what_is_hard_to_guess_is_given_up_earlier(config):
    def last(miss_rate: float) -> int:
        return max(
            (count for count in (1, 2, 4, 8, 16, 32, 64, 128) if any(settled(config, [miss_rate] * count))), default=0
        )

    assert last(EASY) > last(HARD) > last(HOPELESS) == 0


def test_rows_go_to_those_who_make_most_of_them():
    rows = settled(CONFIGS[0], [EASY] * 3 + [4 * HARD] * 3)
    assert 0 < max(rows[:3]) < min(rows[3:])


def test_a_draft_that_costs_more_than_it_brings_is_not_asked():
    slow = made(draft=(9e-3, 0.0))
    assert settled(CONFIGS[0], [EASY], latency=slow) == [0] and settled(CONFIGS[0], [EASY], latency=slow, rows=0) == [0]


@pytest.mark.parametrize("rows", [0, 1, 8])
def test_a_crowd_is_decoded_alone_as_long_as_little_is_read(rows):
    """Every pass of the target alone reads all contexts, for one token each, so drafting pays only with long contexts.
    When contexts of 100 tokens were taken for 256, the policy drafted for 256 requests, at 0.86 of the speed of plain
    decoding."""

    def drafted(requests: int, context: int) -> bool:
        return any(
            settled(EngineConfig(block=5, max_slots=2048), [HARD] * requests, latency=H200, rows=rows, context=context)
        )

    assert not drafted(256, 30) and not drafted(256, 60)
    assert drafted(256, 256) and drafted(256, 2000)
    assert all(drafted(requests, context) for requests in (1, 16, 64) for context in (100, 2000))


@pytest.mark.parametrize("rows", [0, 1])
def test_unknown_drafts_are_tried(rows):
    """An unknown draft is tried, as nothing can be learnt from a draft that never runs. When it was assumed to miss one
    token in ten, 128 requests were decoded without it for good, at 165 tokens a second each, though the pair makes a
    third more."""
    config, unknown = EngineConfig(form="lockstep", block=8, max_slots=256), PRIOR_MISS_RATE
    assert all(settled(config, [unknown] * 128, latency=ONE_H200, rows=rows))
    assert all(settled(config, [EASY] * 128, latency=ONE_H200, rows=rows))
    assert not any(settled(config, [12 * HARD] * 128, latency=ONE_H200, rows=rows))


def test_a_crowd_that_comes_and_goes_settles():
    """Every eight steps one in twenty of 256 requests is replaced, contexts have all lengths, and the miss rates
    vary."""
    rng, policy = random.Random(5), LatencyTreePolicy(EngineConfig(block=5, max_slots=2048, redrafting="never"))

    def another(others: list[TreeRequest]) -> TreeRequest:
        new = tree(2 * HARD * rng.uniform(0.8, 1.4), context=rng.randint(10, 190))
        return replace(new, rows=policy.begin(new, others, NOBODY, H200))

    crowd = []
    for _ in range(256):
        crowd.append(another(crowd))
    assert crowd[0].rows > 1
    for question in range(12):
        rows = policy.change(crowd, [], NOBODY, H200)
        assert question == 0 or rows is None
        crowd = [replace(each, rows=count) for each, count in zip(crowd, rows or [each.rows for each in crowd])]
        assert not any(each.rows for each in crowd)
        crowd = [another(crowd) if rng.random() < 0.05 else each for each in crowd]


@pytest.mark.parametrize(
    ("promise", "goes_on", "begins"), [(SURE - 0.01, 0, 0), (SURE + 0.01, 1, 0), (MARGIN + 0.01, 1, 1)]
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.form)
def test_trees_must_be_sure_to_be_faster_than_plain_decoding(config, promise, goes_on, begins):
    """A running tree must promise `SURE` times plain decoding or it is abandoned; a tree that was abandoned must
    promise `MARGIN` times to return."""
    once = ThroughputForecast(config, MADE).speed([tree(EASY, 1)], [1], NOBODY)
    latency, policy = replace(MADE, alone=ModelLatency(LatencyCurve(((1, promise / once),)))), LatencyTreePolicy(config)
    for rows, wanted in ((1, goes_on), (0, begins)):
        assert policy.change([tree(EASY, rows, most=1)], [], NOBODY, latency) == (None if rows == wanted else [wanted])
    assert policy.begin(tree(EASY, most=1), [], NOBODY, latency) == goes_on


def test_beside_rounds_of_the_target_alone_nothing_is_drafted():
    """Rounds of the target alone run anyway: one more row in them costs nothing and brings as many tokens."""
    assert settled(CONFIGS[0], [EASY] * 2) == [8, 8]
    assert settled(CONFIGS[0], [EASY] * 2, OtherLoad(target=4)) == [0, 0]
    assert settled(CONFIGS[0], [EASY] * 2, OtherLoad(pair=2, pair_rows=16)) != [0, 0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.form)
def test_no_choice_is_slower_than_plain_decoding_and_none_is_flapping(config):
    """By the policy's own forecast, over random requests. It settles even if miss rates vary by a few per cent."""
    rng = random.Random(0)
    forecast = ThroughputForecast(config, MADE)
    for _ in range(15):
        hazards = [
            rng.choice((EASY, HARD, HOPELESS)) * rng.uniform(0.5, 2) for _ in range(rng.choice((1, 3, 10, 50, 200)))
        ]
        beside = OtherLoad(pair=(extra := rng.choice((0, 0, 3))), pair_rows=8 * extra, target=rng.choice((0, 0, 2)))
        rows, trees = settled(config, hazards, beside), [tree(miss_rate) for miss_rate in hazards]
        speed = forecast.speed(trees, rows, beside)
        assert speed >= forecast.speed(trees, [0] * len(trees), beside)
        assert MARGIN * max(speed, 1e-9) >= forecast.speed(trees, [rng.randint(1, 8) for _ in trees], beside)
        policy, changes = LatencyTreePolicy(config), 0
        for _ in range(20):
            wavering = [tree(miss_rate * rng.uniform(0.97, 1.03), count) for miss_rate, count in zip(hazards, rows)]
            if (changed := policy.change(wavering, [], beside, MADE)) is not None:
                rows, changes = list(changed), changes + 1
        assert changes <= 1


def test_rows_ahead_are_drafted_where_they_cost_nothing():
    """A draft that the target waits for drafts no more branches than it must; a draft that waits for the target may
    draft all."""
    config = EngineConfig(block=5, branches=4, max_slots=256)
    policy, drafts_long = LatencyTreePolicy(config), made(draft=(0.9e-3, 20e-6))

    def branches(
        batch_size: int, context: int, latency: LatencyModel | None, policy: LatencyTreePolicy = policy
    ) -> int:
        return policy.draft_size([tree(EASY, 1)] * batch_size, batch_size, context, latency).branches

    assert [branches(rows, 0, MADE) for rows in (1, 8, 64)] == [4, 4, 4]
    assert [branches(rows, 0, drafts_long) for rows in (1, 8, 32, 64)] == [4, 4, 2, 2]
    assert branches(64, 0, None) == 4
    many = LatencyTreePolicy(replace(config, branches=16))
    assert [branches(rows, 0, drafts_long, many) for rows in (1, 4, 8, 16, 64)] == [16, 16, 8, 4, 2]
    # The draft reads the context in every step, the target once: so few steps are drafted, on all branches.
    draft_reads, target_reads = (
        replace(MADE, **{name: replace(MADE.parts[name], read=1e-8)}) for name in ("draft", "target")
    )
    steps = [policy.draft_size([tree(EASY, 1)] * 64, 64, context, draft_reads).steps for context in (0, 1000, 1 << 20)]
    assert steps == [None, None, 2]
    assert [branches(64, context, replace(drafts_long, target=target_reads.target)) for context in (0, 1 << 22)] == [
        2,
        4,
    ]
    crowd = [tree(EASY, 1)] * 32
    lean, mixed = (
        ThroughputForecast(config, drafts_long).speed(crowd, [1] * 32, beside)
        for beside in (NOBODY, OtherLoad(pair=1, pair_rows=1))
    )
    assert lean > 1.1 * mixed


@pytest.mark.parametrize("form", ["lockstep", "lookahead"])
def test_rounds_with_smc_draft_as_many_tokens_as_smc_does(form):
    """SMC has a K of its own, which all rows of its rounds draft."""
    both, own = EngineConfig(form=form, block=8, max_slots=256), EngineConfig(form=form, block=5, max_slots=256)
    beside = OtherLoad(pair=2, pair_rows=16, pair_decodings=frozenset({Decoding.DISTINCT}))
    trees = [tree(EASY, 1, most=8)] * 4
    forecasts = [ThroughputForecast(config, MADE) for config in (both, own)]
    mixed, expected = (each.speed(trees, [4] * 4, beside) for each in forecasts)
    assert mixed == pytest.approx(expected)
    assert forecasts[0].best(trees, beside, 64) == forecasts[1].best(trees, beside, 64)
    walks = replace(beside, pair_decodings=frozenset({Decoding.WALK}))
    assert forecasts[0].speed(trees, [4] * 4, walks) != pytest.approx(expected)


def test_a_round_in_lockstep_drafts_as_deep_as_pays():
    """A whole block where the draft is good; less where it is often wrong, or wrong further down, or expensive."""
    config = EngineConfig(form="lockstep", block=8, max_slots=256)
    policy, latency = LatencyTreePolicy(config), made(round_overhead=0.0)

    def steps(*miss_rates: float, latency: LatencyModel = latency, rows: int = 8) -> int | None:
        return policy.draft_size([TreeRequest(8, rates(*miss_rates), SHORT, rows)], rows, SHORT, latency).steps

    assert config.block_levels == (8, 6, 5, 4, 3, 2, 1)
    assert steps(EASY) is None and steps(8 * HARD) == 3 and steps(HOPELESS) == 1
    assert steps(EASY, EASY, 8 * HARD) == 4 and steps(EASY, EASY, HOPELESS) == 2
    assert steps(8 * HARD, latency=made(draft=(5e-3, 0.0))) == 1
    # Without a latency model: a whole block.
    assert policy.draft_size([tree(HOPELESS, 8)], 8, SHORT, None).steps is None
    # Requests share a round: the depth maximises the gain of all together.
    crowd = [tree(EASY / 2, 2)] * 9 + [tree(HOPELESS, 2)]
    assert policy.draft_size(crowd, 20, SHORT, latency).steps is None


def test_a_round_in_look_ahead_drafts_as_deep_as_the_draft_keeps_pace():
    """As many tokens as the draft grows while the target works, if it is good; fewer if it is slow or often wrong."""
    config = EngineConfig(block=12, max_slots=256, redrafting="never")
    assert config.block_levels == (12, 8, 6, 5, 4, 3, 2) and EngineConfig(block=1).block_levels == (1,)
    policy = LatencyTreePolicy(config)

    def steps(miss_rate: float, draft: float) -> int | None:
        latency = made(draft=(draft, 0.0), target=(4e-3, 0.0))
        return policy.draft_size([tree(miss_rate, 8)], 8, SHORT, latency).steps

    assert [steps(EASY, each) for each in (0.3e-3, 0.8e-3, 1.4e-3)] == [None, 6, 5]
    assert [steps(4 * HARD, each) for each in (0.3e-3, 0.5e-3, 1.4e-3, 2e-3)] == [None, 8, 3, 2]
    assert [steps(HOPELESS, each) for each in (0.3e-3, 0.5e-3, 1e-3, 1.4e-3)] == [None, 8, 4, 2]


H200_CHAT = LatencyModel(
    through(4e-9, at_1=0.40, at_16=0.42, at_32=0.44, at_64=0.54, at_128=0.68, at_256=0.96),
    through(36e-9, at_6=4.05, at_24=4.23, at_48=4.55, at_96=5.08, at_192=6.03, at_384=9.18, at_768=15.84),
    through(29e-9, at_1=3.99, at_16=4.24, at_32=4.39, at_64=4.92),
    0.05e-3,
)
"""An 8B target and a draft of four of its layers on one H200 (benchmarks/notes/real-pair.md)."""


def test_where_rows_bring_little_many_requests_have_few():
    """A chat model at temperature 0.7: of the first tokens of blocks, eight rows miss .27, and one row .57. With a gain
    of 1, one row would seem to miss everything. Rows are cheaper as tokens that they have in common run once: else 16
    requests would have two rows, and 64 one."""
    config = EngineConfig(form="lockstep", block=5, max_slots=512)
    forecast = ThroughputForecast(config, H200_CHAT)

    def best(count: int, gain: float) -> tuple[list[int], float]:
        trees = [TreeRequest(8, rates(0.27 * 8 ** (ROWS_FALLS.rows * gain), gain=gain), SHORT, 8)] * count
        rows = forecast.best(trees, NOBODY, 512)
        return rows, forecast.speed(trees, rows, NOBODY) / forecast.speed(trees, [0] * count, NOBODY)

    gain = ranked(0.57, 0.27).gain()
    alone, faster = best(1, gain)
    assert alone == [8] and faster > 1.5
    rows, faster = best(16, gain)
    assert max(rows) <= 4 and 1.35 < faster < 1.65
    rows, faster = best(64, gain)
    assert max(rows) <= 2 and 1.15 < faster < 1.45
    assert best(64, 1.0)[1] < faster


def test_one_that_arrives_begins_as_suits_those_that_run():
    policy = LatencyTreePolicy(CONFIGS[0])
    assert policy.begin(tree(EASY), [], NOBODY, MADE) == 8
    assert policy.begin(tree(EASY), [tree(EASY, 0)] * 128, NOBODY, MADE) == 0
    assert policy.begin(tree(EASY), [tree(EASY, 2)] * 16, NOBODY, MADE) > 0
    assert (
        policy.begin(tree(EASY), [], NOBODY, None) is None and policy.change([tree(EASY, 0)], [], NOBODY, None) is None
    )


def test_those_that_wait_for_slots_alone_get_them():
    """Of 16 slots, two requests may use all as long as no request waits; trees shrink to admit waiting requests."""
    policy, trees, waiting = (
        LatencyTreePolicy(EngineConfig(block=8, max_slots=16)),
        [tree(EASY, 8)] * 2,
        [tree(EASY)] * 14,
    )
    assert policy.change(trees, [], NOBODY, MADE) is None
    assert policy.change(trees, waiting[:2], NOBODY, MADE) == [4, 4]
    assert policy.change(trees, waiting, NOBODY, MADE) == [1, 1]
    assert policy.change(trees, waiting, OtherLoad(target=4, slots=4), MADE) == [0, 0]


def test_a_crowd_runs_at_once_where_each_could_have_all_slots():
    """Eight slots and twelve requests of eight rows: eight requests run side by side. Without a latency model they
    would run one after another."""
    engine = local_engine(pair(), EngineConfig(block=3, max_slots=8))
    engine.latency = made(round_overhead=0.0, target=(4e-3, 5e-4))
    for i in range(12):
        engine.submit(
            Request(str(i), (0, 1, 2), SamplingParams(method="exact", seed=i, max_tokens=16, ignore_eos=True))
        )
    beside, found = [], {}
    while not engine.idle:
        found |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
        beside.append(len(running(engine)))
    assert_empty(engine)
    assert max(beside) == 8 and len(beside) < 200
    plain = [
        Request(name, (0, 1, 2), SamplingParams(method="target", seed=int(name), max_tokens=16, ignore_eos=True))
        for name in found
    ]
    assert all(found[name].tokens == one.tokens for name, one in answers(engine, plain).items())


def test_drafting_again_is_chosen_by_costs():
    """For one request, and for several if they often miss; not for many, of which some has missed in every round, nor
    where it seldom helps, or takes long even if it is not needed."""
    config = EngineConfig(block=5, branches=8, max_slots=512, redrafting="adaptive")
    often, seldom = MissRates((0.3,), 0.5, 0.5, 0.7), MissRates((0.02,), 0.03, 0.02, 0.3)
    assert config.redraft_levels == (4, 2)

    def redrafted(rates: MissRates, requests: int = 1, overhead: float = 0.0, config: EngineConfig = config) -> int:
        latency = replace(made(draft=(0.3e-3, 4e-6)), redraft_overhead=overhead)
        trees = [TreeRequest(8, rates, SHORT, 8)] * requests
        return LatencyTreePolicy(config).draft_size(trees, 8 * requests, SHORT, latency).redrafted

    assert redrafted(often) == redrafted(seldom) == redrafted(often, 4) == 4
    assert redrafted(seldom, 4) == redrafted(often, overhead=2e-3) == redrafted(replace(often, again=(30.0,))) == 0
    assert redrafted(often, config=replace(config, redrafting="never")) == 0
    assert redrafted(seldom, 4, config=replace(config, redrafting="always")) == 4


@pytest.mark.parametrize("block", [2, 5, 12])
@pytest.mark.parametrize("requests", [1, 16])
def test_a_draft_that_never_finds_what_follows_a_miss_is_left_out(block, requests):
    """Every round restarts, so none shows what the tokens of a block miss."""
    config, rows = EngineConfig(block=block, branches=4, max_slots=512, redrafting="never"), 8
    of_all, own = Acceptance(0.997), Acceptance(0.97)
    for _ in range(40):
        for counts in (*[of_all] * requests, own):
            counts.count_outcome(Miss.RESTART, True, rows, 4)
    found = own.rates_among(of_all.rates(True), True)
    trees = [TreeRequest(rows, found, SHORT, rows)] * requests
    confirmed = tokens_a_round([found], np.array([[rows]]), 4, block, True).tokens[0, 0, -1, 0]
    assert confirmed < 1.3
    assert LatencyTreePolicy(config).change(trees, [], NOBODY, H200) == [0] * requests


@pytest.mark.parametrize("form", one_of("lookahead", "lockstep"))
def test_an_engine_follows_its_latency_model(form):
    """One request gets a tree. When many requests arrive, the target decodes alone; when they are gone, the draft is
    used again. Answers stay the same."""
    config = EngineConfig(form=form, block=3, max_slots=256)
    engine = local_engine(pair(), config)
    # The tiny pair is often wrong: drafting pays only where it is nearly free.
    engine.latency = made(round_overhead=0.0, draft=(1e-5, 0.0), target=(4e-3, 5e-4))
    law = {"method": "exact", "ignore_eos": True}
    crowd = [Request(str(i), (0, 1, i % 3), SamplingParams(seed=i, max_tokens=20, **law)) for i in range(40)]
    engine.submit(Request("long", (0, 1, 2), SamplingParams(seed=99, max_tokens=80, **law)))
    found, alone, step = {}, [], 0
    while not engine.idle:
        step += 1
        for one in crowd if step == 12 else ():
            engine.submit(one)
        found |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
        alone += [group.alone for group in running(engine) if group.id == "long"]
    assert_empty(engine)
    assert not alone[0] and any(alone) and not alone[-1] and sum(one != other for one, other in pairwise(alone)) == 2
    law = {"method": "target", "max_tokens": 20, "ignore_eos": True}
    plain = [replace(one, params=SamplingParams(seed=one.params.seed, **law)) for one in crowd]
    assert all(found[name].tokens == one.tokens for name, one in answers(engine, plain).items())


@pytest.mark.parametrize("form", one_of("lockstep", "lookahead"))
def test_a_draft_that_is_of_no_use_is_soon_left_out(form):
    """Its first rounds show it: the policy decides again after three steps."""
    config = EngineConfig(form=form, block=4, max_slots=64)
    engine = local_engine(tiny_pair(9, scale=1.5), config)
    engine.latency = made(round_overhead=0.0, draft=(3e-3, 0.0), target=(4e-3, 5e-4))
    law = {"method": "exact", "particles": 2, "max_tokens": 60, "ignore_eos": True}
    engine.submit(Request("one", (0, 1, 2), SamplingParams(seed=1, **law)))
    begun, alone, answer = False, [], None
    while not engine.idle:
        answer = next((output.answer for output in engine.step() if output.answer), answer)
        begun = begun or any(group.launched and not group.alone for group in running(engine))
        alone += [group.alone for group in running(engine)] if begun else []
    assert answer is not None and not alone[0] and alone.index(True) <= 6 and all(alone[6:])
    assert answer.statistics.alone_rounds >= answer.statistics.rounds - 4


def miss_always(acceptance: Acceptance, again: bool = False) -> None:
    """Count many rounds in which even large trees missed."""
    for _ in range(1500):
        acceptance.count(1, True, 64, 64, again=again)


@pytest.mark.slow
def test_a_draft_that_was_hopeless_is_tried_again(monkeypatch):
    """Acceptance counts decay while nothing is drafted (faster than usual in this test). Otherwise the draft would
    never be tried again."""
    monkeypatch.setattr("smc.scheduler.tree_policy.FADE", 0.9)
    engine = local_engine(pair(), EngineConfig(block=3, max_slots=64))
    engine.latency = made()
    acceptance, alone = engine.rounds_of(Decoding.WALK).acceptance, []
    for again in (False, True):
        miss_always(acceptance, again=again)
    for seed in range(5):
        engine.submit(
            Request("one", (0, 1, 2), SamplingParams(method="exact", seed=seed, max_tokens=50, ignore_eos=True))
        )
        while not engine.idle:
            engine.step()
            alone += [group.alone for group in running(engine)]
    assert alone[0] and sum(alone) > 25 and not all(alone)


@pytest.mark.parametrize("tokens", one_of(9, 120))
def test_acceptance_decays_per_step(tokens):
    """The decay depends on the number of steps, not on how often the policy is called: with arrivals in every step, it
    is called in every step."""

    class Never(LatencyTreePolicy):
        def begin(self, *_given):
            return 0

        def change(self, *_given):
            return None

    config = EngineConfig(block=3, max_slots=64)
    engine = local_engine(pair(), config, trees=Never(config))
    acceptance = engine.rounds_of(Decoding.WALK).acceptance
    miss_always(acceptance)
    before = acceptance.tries(Miss.TOKEN)
    for step in range(45):
        if step % 3 == 0 and len(running(engine)) < 3:
            engine.submit(
                Request(f"{step}", (0, 1), SamplingParams(method="exact", max_tokens=tokens, ignore_eos=True))
            )
        engine.step()
    assert acceptance.tries(Miss.TOKEN) == pytest.approx(before * FADE**45, rel=0.02)


def test_an_engine_says_how_much_is_read():
    """The policy is told the contexts of the requests it decides about, and those of all others."""

    class Listens(LatencyTreePolicy):
        def change(self, trees, waiting, beside, latency):
            asked.append((trees, beside))

    asked = []
    config = EngineConfig(block=3, max_slots=64)
    engine = local_engine(pair(), config, trees=Listens(config))
    for size, method in enumerate(("exact", "smc", "target", "exact"), start=3):
        engine.submit(
            Request(f"{size}", (0, 1) * size, SamplingParams(method=method, seed=size, max_tokens=50, ignore_eos=True))
        )
    seen = 0
    for _ in range(20):
        before = [group.context for group in running(engine)]
        engine.step()
        if asked and len(before) == 4:
            (trees, beside), (one, smc, plain, other) = asked[0], before
            assert [each.context for each in trees] == [one, other]
            assert (beside.pair, beside.pair_context, beside.target, beside.target_context) == (1, smc, 1, plain)
            seen = one - 2 * 3
        asked.clear()
    assert seen > 5


def test_an_engine_drafts_where_much_is_read():
    """Alone, the target reads a context once for each token of a block; with the draft, once for all tokens of a
    round."""
    engine = local_engine(pair(), EngineConfig(block=3, max_slots=64))
    free, target = ModelLatency(LatencyCurve(((1, 1e-6), (512, 1e-6)))), LatencyCurve(((1, 4e-3), (512, 4e-3)))
    engine.latency = LatencyModel(
        free, ModelLatency(target), ModelLatency(LatencyCurve(((1, 1e-3), (512, 1e-3))), 4e-5), 0.0
    )
    for size, alone in ((1, True), (33, False)):
        engine.submit(
            Request("one", (0, 1, 2) * size, SamplingParams(method="exact", seed=9, max_tokens=10, ignore_eos=True))
        )
        while not running(engine):
            engine.step()
        assert running(engine)[0].alone is alone
        engine.abort("one")


def test_no_draft_prompts_for_requests_that_are_not_drafted(monkeypatch):
    """Forty requests arrive at once, and each that ends makes room for the next. The draft runs no prompts of requests
    that will not be drafted for."""
    engine, asked = local_engine(pair(), EngineConfig(block=3, max_slots=256, prefix_cache=False)), []
    monkeypatch.setattr(engine.workers["draft"], "run_prompts", asked.append)
    engine.latency, rng, seeds = (
        made(round_overhead=0.0, draft=(1e-5, 0.0), target=(4e-3, 2e-3)),
        random.Random(3),
        itertools.count(),
    )
    ended = count = 40
    for _ in range(25):
        for seed in itertools.islice(seeds, ended):
            prompt, params = (
                rng.choices(range(3), k=rng.randint(1, 30)),
                {"max_tokens": rng.randint(5, 40), "ignore_eos": True},
            )
            engine.submit(Request(str(seed), tuple(prompt), SamplingParams(method="exact", seed=seed, **params)))
        ended = sum(output.answer is not None for output in engine.step())
        assert all(group.alone for group in running(engine))
    assert next(seeds) > 2 * count and not asked


def test_policy_decides_at_once_for_new_requests():
    """A change made for requests that are gone does not delay the next decision."""
    engine = local_engine(pair(), EngineConfig(block=3, max_slots=256))
    engine.latency = made(round_overhead=0.0, draft=(1e-5, 0.0), target=(4e-3, 2e-3))
    for wave in range(3):
        for i in range(40):
            params = SamplingParams(method="exact", ignore_eos=True, seed=i, max_tokens=100)
            engine.submit(Request(f"{wave} {i}", (0, 1, i % 3), params))
        for _ in range(5):
            engine.step()
        assert len(running(engine)) == 40 and all(group.alone for group in running(engine)), wave
        for group in running(engine):
            engine.abort(group.id)
    engine.step()
    assert_empty(engine)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lookahead"])
def test_a_crowd_that_comes_at_once_begins_with_small_trees(form):
    """A single request would get all rows. Here each begins with as many rows as suit all requests, and none skips a
    round because its tree shrinks."""
    engine, asked = local_engine(pair(), EngineConfig(form=form, block=3, max_slots=256, prefill_chunk=16)), []
    run = engine.executor.round
    engine.executor.round = lambda plan: (asked.append(int(plan.arrays.size_G.sum())), run(plan))[1]
    # More than one row for each request would take longer than it could gain.
    engine.latency = made(draft=(1e-4, 0.0), target=(4e-3, 0.0), round_overhead=0.0)
    count, most = 32, 256
    steep = ModelLatency(LatencyCurve(((1, 4e-3), (most, 4e-3), (2 * most, 1.0))))
    engine.latency = replace(engine.latency, target=steep)
    requests = [
        Request(
            str(i), (0, 1, i % 3), SamplingParams(method="exact", particles=8, seed=i, max_tokens=32, ignore_eos=True)
        )
        for i in range(count)
    ]
    for one in requests:
        engine.submit(one)
    while len(running(engine)) < count:
        engine.step()
    before = [group.launched for group in running(engine)]
    for _ in range(3):
        engine.step()
    assert [group.launched - begun for group, begun in zip(running(engine), before)] == [3] * count
    assert asked and count <= max(asked) and tree_nodes(max(asked), count, engine.config.target_tokens) <= most
    found = {output.answer.request_id: output.answer for output in engine.run(()) if output.answer}
    assert_empty(engine)
    plain = [
        replace(one, params=SamplingParams(method="target", seed=one.params.seed, max_tokens=32, ignore_eos=True))
        for one in requests
    ]
    assert {name: answer.tokens for name, answer in found.items()} == {
        name: one.tokens for name, one in answers(engine, plain).items()
    }


def test_requests_that_come_together_begin_by_few_calls_of_the_policy():
    """A request that cannot begin yet is asked about in every step; and of many that come at once, those that meet
    about as many running requests begin alike. After a call about running requests all is decided anew."""
    called = []

    class Counting(LatencyTreePolicy):
        def begin(self, tree, others, *given):
            called.append(len(others))
            return super().begin(tree, others, *given)

    engine, waiting = local_engine(pair(), EngineConfig(block=4, max_slots=64)), "64"
    law = {"method": "exact", "particles": 4, "max_tokens": 40, "ignore_eos": True}
    for number in range(16):
        engine.submit(Request(str(number), (0, 1), SamplingParams(seed=number, **law)))
    while len(groups := running(engine)) < 16:
        engine.step()
    engine.submit(Request(waiting, (0, 1), SamplingParams(seed=64, **law)))
    acceptance = engine.rounds_of(Decoding.WALK).acceptance
    controller = TreeController(Counting(engine.config), acceptance, engine.fallback, lookahead=True)
    waits = engine.registry.groups[waiting]
    for count in range(17):
        controller.begin(waits, groups[:count], 4, H200)
    assert called == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    for _ in range(3):
        controller.begin(waits, groups, 4, H200)
    assert len(called) == 13
    controller.begin(waits, groups, 4, MADE)
    controller.begin(waits, groups, 2, MADE)
    assert len(called) == 15
    controller.follow(groups, [], MADE)
    controller.begin(waits, groups, 2, MADE)
    assert len(called) == 16


@pytest.mark.parametrize(("requests", "calls"), [(1, 36), (7, 36), (8, 18), (64, 4)])
def test_many_requests_keep_how_much_they_draft_for_some_rounds(requests, calls):
    """Host time of a round hardly grows with its requests. A change of their trees or of the latency model counts at
    once."""
    called = []

    class Counting(LatencyTreePolicy):
        def draft_size(self, trees, *given):
            called.append(given)
            return super().draft_size(trees, *given)

    engine = local_engine(pair(), EngineConfig(block=4, max_slots=64))
    law = {"method": "exact", "particles": 1, "max_tokens": 4, "ignore_eos": True}
    for number in range(requests):
        engine.submit(Request(str(number), (0, 1), SamplingParams(seed=number, **law)))
    while len(groups := running(engine)) < requests:
        engine.step()
    acceptance = engine.rounds_of(Decoding.WALK).acceptance
    controller = TreeController(Counting(engine.config), acceptance, engine.fallback, lookahead=True)
    sizes = [controller.draft_size(groups, 64, 100, MADE) for _ in range(36)]
    assert len(called) == calls and len(set(sizes)) == 1
    controller.draft_size(groups, 64, 100, H200)
    controller.draft_size(groups[1:] or groups, 32, 100, H200)
    assert len(called) == calls + 2
