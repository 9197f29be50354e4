"""The number of prompt tokens that run beside each round: on average prompts take no more than their share of the time,
and every prompt makes progress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import pytest

from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from smc.scheduler import prefill_budget
from smc.scheduler.decode import RoundScheduler
from smc.scheduler.engine import COMPANY
from smc.scheduler.prefill_budget import IN_FLIGHT, LEAST, LEFT_SECONDS, LEFT_STEPS, PrefillBudget
from smc.types import ModelRole
from tests.pairwise import one_of
from tests.scheduler.harness import PaddingOps, answers, assert_empty, request
from tests.scheduler.random_histories import assert_same, pair

AHEAD, LOCKSTEP = (
    EngineConfig(prefill_chunk=4096, prefill_share=0.5),
    EngineConfig(form="lockstep", prefill_chunk=4096, prefill_share=0.5),
)
ROUND = {"draft": 0.005, "target": 0.004}
"""Seconds of a round at each model."""


@dataclass
class Ran:
    """The result of a chunk that takes the given number of seconds."""

    seconds: float

    def result(self) -> None:
        return None

    def spans(self) -> dict[str, tuple[int, int]]:
        return {"prompt": (10, 10 + round(1e9 * self.seconds))}


@dataclass
class Round:
    times: dict

    def spans(self) -> dict:
        return self.times


class Simulation:
    """Steps of an engine whose models take `floor` seconds for a chunk of up to 200 tokens, and proportionally more for
    a larger one."""

    def __init__(self, config: EngineConfig, floors: dict[str, float]) -> None:
        self.config, self.floors, self.chunks = config, floors, PrefillBudget(config)
        self.asked: list[int] = []
        self.took = dict.fromkeys(ModelRole, 0.0)

    def step(
        self,
        left: int = 1 << 30,
        round_seconds: dict[str, float] | None = ROUND,
        running: int = 1,
        prompts: int = 1,
        new: int = 0,
    ) -> int:
        """Run one step; return the number of prompt tokens it ran. `left`: remaining tokens of so many prompts, `new`
        of which have just come. `round_seconds` None: no request is in rounds."""
        self.chunks.begin_step(new)
        tokens = min(left, self.chunks.most(0 if round_seconds is None else running, prompts, left))
        seconds = {side: floor * max(tokens, 200) / 200 for side, floor in self.floors.items()}
        self.chunks.spend(
            {side: [(tokens, Ran(seconds[side]))] if tokens else [] for side in ModelRole}, round_seconds is not None
        )
        for side in ModelRole:
            self.took[side] += seconds[side] if tokens else 0.0
        self.chunks.accrue(
            []
            if round_seconds is None
            else [Round({side: (0, round(1e9 * round_seconds[side])) for side in ModelRole})]
        )
        self.asked.append(tokens)
        return tokens


@pytest.mark.parametrize("config", [AHEAD, LOCKSTEP], ids=lambda config: config.form)
@pytest.mark.parametrize(
    "floors",
    [{"draft": 0.001, "target": 0.0047}, {"draft": 0.0001, "target": 0.0003}, {"draft": 0.05, "target": 0.1}],
    ids=str,
)
def test_prompts_take_their_share_of_the_time(config, floors):
    """With a share of 0.5, steps take on average at most 1.5 times as long as rounds alone, and little less, whatever a
    chunk costs relative to a round."""
    simulation, steps = Simulation(config, floors), 3000
    for _ in range(steps):
        simulation.step()
    together = max if config.lookahead else sum
    rounds, prompts = steps * together(ROUND.values()), together(simulation.took.values())
    # The first chunks are sized before any has been timed.
    assert prompts <= 0.5 * rounds + 4 * together(floors.values()) * LEAST / 200
    assert prompts >= 0.45 * rounds
    assert all(tokens == 0 or tokens >= LEAST for tokens in simulation.asked)


def test_without_rounds_a_chunk_is_as_large_as_it_may_be():
    simulation = Simulation(AHEAD, {"draft": 0.001, "target": 0.0047})
    assert [simulation.step(round_seconds=None) for _ in range(5)] == [4096] * 5


def test_a_prompt_after_quiet_rounds_starts_at_once():
    """Rounds without prompts save up time for one chunk at most."""
    simulation = Simulation(AHEAD, {"draft": 0.001, "target": 0.0047})
    for _ in range(50):
        simulation.step()
    for _ in range(100):
        simulation.step(left=0)
    assert simulation.step(left=60) == 60
    assert [simulation.step(left=60) for _ in range(3)] == [0, 60, 0]


@pytest.mark.parametrize("outliers", [1, 2])
def test_a_chunk_that_was_held_up_blocks_no_others(outliers):
    """Chunks of 60 ms take 3 s in a row; those after them wait hardly longer than before."""
    simulation = Simulation(AHEAD, {"draft": 0.01, "target": 0.047})
    for _ in range(200):
        simulation.step(left=60)
    usual = _longest_wait(simulation.asked)
    held_up, simulation.floors = simulation.floors, {"draft": 0.01, "target": 3.0}
    while outliers:
        outliers -= simulation.step(left=60) > 0
    simulation.floors = held_up
    begin = len(simulation.asked)
    for _ in range(400):
        simulation.step(left=60)
    assert _longest_wait(simulation.asked[begin:]) <= 6 * usual


def test_a_lasting_change_is_learnt():
    """Chunks take 16 times as long from now on: after a few of them, prompts take their share of the time again."""
    simulation = Simulation(AHEAD, {"draft": 0.001, "target": 0.0047})
    for _ in range(200):
        simulation.step(left=60)
    simulation.floors = {"draft": 0.016, "target": 0.0752}
    for _ in range(100):
        simulation.step(left=60)
    simulation.took = dict.fromkeys(ModelRole, 0.0)
    for _ in range(1000):
        simulation.step(left=60)
    assert 0.45 <= max(simulation.took.values()) / (1000 * max(ROUND.values())) <= 0.55


def _longest_wait(asked: list[int]) -> int:
    """The longest run of steps that scheduled nothing."""
    return max(len(list(run)) for tokens, run in groupby(asked) if not tokens)


def passes_beside(running: int, arrivals: int, steps: int = 400) -> tuple[list[int], list[int]]:
    """Let a prompt of 50 tokens arrive every so many steps. Return how many prompts each pass took, and how many steps
    each prompt waited."""
    simulation, taken, waited = Simulation(LOCKSTEP, {"draft": 0.001, "target": 0.0047}), [], []
    begun: list[int] = []
    for _ in range(20):
        simulation.step()
    for step in range(steps):
        new = step % arrivals == 0
        if new:
            begun.append(step)
        if not begun:
            simulation.chunks.begin_step(0)
            simulation.chunks.rest()
            simulation.chunks.accrue([Round({side: (0, round(1e9 * ROUND[side])) for side in ModelRole})])
            continue
        if simulation.step(50 * len(begun), running=running, prompts=len(begun), new=new):
            taken.append(len(begun))
            waited += [step - at for at in begun]
            begun = []
    return taken, waited


def test_prompts_wait_for_each_other_beside_many_requests():
    """A pass takes 7 ms and a round 9: beside 64 requests, three or four prompts share a pass. Beside 4, and where few
    prompts come, none waits longer than its share of the time demands."""
    taken, waited = passes_beside(64, arrivals=1)
    assert 3 <= sum(taken) / len(taken) <= 5
    assert max(waited) <= 5
    for running, arrivals in ((64, 10), (4, 1), (4, 2), (4, 10)):
        _, waited = passes_beside(running, arrivals)
        assert max(waited) <= 1
    # Two prompts of that size fill no pass, six do.
    simulation = Simulation(LOCKSTEP, {"draft": 0.001, "target": 0.0047})
    for _ in range(20):
        simulation.step()
    for _ in range(20):
        simulation.step(left=0, new=1)
    assert simulation.step(100, running=64, prompts=2) == 0
    assert simulation.step(300, running=64, prompts=6) >= LEAST


def test_chunks_of_one_prompt_do_not_wait_for_each_other():
    """Of a long prompt beside 64 requests, every chunk is scheduled as soon as its time has accrued, the last one, too;
    nor does the next short prompt wait, since prompts hardly ever come."""
    passes = Simulation(LOCKSTEP, {"draft": 0.001, "target": 0.0047})
    slow = {"draft": 0.01, "target": 0.008}
    for _ in range(3):
        passes.step(4096, slow, running=64)
    found = []
    for step in range(20):
        found.append(passes.step(4096, slow, running=64, new=step == 0))
    assert 0 not in found
    assert passes.step(60, slow, running=64) == 60


@pytest.mark.parametrize("length", [600, 4196])
def test_a_prompt_is_counted_once(length):
    """However many chunks it takes. None of them, not even the last, is taken for a prompt that may wait for others."""
    engine = local_engine(pair(8192), EngineConfig(block=2, prefill_chunk=256, max_slots=8, max_context=8192))
    come: list[int] = []
    asked: list[int] = []
    begin, most = engine.prefill.budget.begin_step, engine.prefill.budget.most
    engine.prefill.budget.begin_step = lambda new: come.append(new) or begin(new)
    engine.prefill.budget.most = lambda *given: asked.append(given[2]) or most(*given)
    engine.submit(request([1, 2] * (length // 2), "long", particles=2, seed=1, max_tokens=2, ignore_eos=True))
    while not engine.idle:
        engine.step()
    assert come[0] == 1 and not any(come[1:])
    assert all(tokens >= LEAST for tokens in asked)
    assert len(asked) == -(-length // 256)


def test_requests_that_switch_do_not_count_as_prompts():
    """The target has run all tokens of a request that it decodes alone from now on."""
    engine, come = local_engine(pair(512), EngineConfig(form="lockstep", block=2, max_slots=8)), []
    begin = engine.prefill.budget.begin_step
    engine.prefill.budget.begin_step = lambda new: come.append(new) or begin(new)
    for n in range(3):
        engine.submit(request([n, 1, 2], str(n), method="exact", particles=2, seed=n, max_tokens=30, ignore_eos=True))
    while engine.num_running < 3:
        engine.step()
    for group in list(engine.registry.groups.values()):
        engine.fallback.fall_back(group)
    while not engine.idle:
        engine.step()
    assert sum(come) == 3


def test_rounds_that_bring_nothing_keep_no_prompt_from_going_on():
    """Prompts advance even if no round completes: running groups may be waiting for pages that a starting one holds."""
    simulation = Simulation(AHEAD, {"draft": 0.05, "target": 0.1})
    for _ in range(20):
        simulation.step()
    simulation.chunks.accrue([])
    assert simulation.chunks.most(running=1) == LEAST
    assert simulation.chunks.most(running=64, prompts=3, tokens=60) == LEAST


@pytest.mark.parametrize("share", [None, 0.5])
def test_no_more_than_two_chunks_are_on_their_way(share):
    read = []

    class Slow(Ran):
        def result(self) -> None:
            read.append(self)

    chunks = PrefillBudget(replace(AHEAD, prefill_share=share))
    for i in range(10):
        chunks.most(running=0)
        assert len(read) == 2 * max(0, i + 1 - IN_FLIGHT)
        chunks.spend({side: [(1, Slow(0.1))] for side in ModelRole}, beside=False)


def test_the_last_chunk_of_a_model_is_read(monkeypatch):
    """Even if every step has chunks of the other model, or prompts whose first tokens have not been read yet. Many
    short steps do not wait for one that may still run."""
    read, now = [], [0.0]
    monkeypatch.setattr(prefill_budget.time, "monotonic", lambda: now[0])

    class Noted(Ran):
        def result(self) -> None:
            read.append(self)

    chunks, last = PrefillBudget(AHEAD), Noted(0.1)
    chunks.begin_step(1)
    chunks.spend({ModelRole.DRAFT: [(1, last)], ModelRole.TARGET: []}, beside=True)
    for _ in range(LEFT_STEPS):
        chunks.begin_step(1)
        chunks.most(running=1)
        chunks.spend({ModelRole.DRAFT: [], ModelRole.TARGET: [(1, Ran(0.1))]}, beside=True)
        assert not read
    chunks.begin_step(0)
    assert not read
    now[0] += 1.1 * LEFT_SECONDS
    chunks.begin_step(0)
    assert read == [last]


@pytest.mark.parametrize("form", one_of("lockstep", "lookahead"))
def test_answers_do_not_depend_on_the_share(form):
    asked = [
        request([i % 3, 1, 2] * (5 + 100 * (i % 2)), str(i), particles=2, seed=i, max_tokens=12, ignore_eos=True)
        for i in range(4)
    ]
    config = EngineConfig(form=form, block=2, prefill_chunk=100)
    expected = answers(local_engine(pair(512), config), asked)
    found = answers(local_engine(pair(512), replace(config, prefill_share=0.01)), asked)
    for name, answer in expected.items():
        assert_same(found[name], answer)


def test_a_prompt_is_not_forgotten_beside_rounds():
    """However small its share, and however long these models take, a prompt starts before the running requests end."""
    engine = local_engine(pair(512), EngineConfig(block=2, prefill_chunk=300, prefill_share=0.2, max_slots=8))
    engine.submit(request([1], "running", particles=2, seed=1, max_tokens=400, ignore_eos=True))
    while not engine.num_running:
        engine.step()
    engine.submit(request([0, 1, 2, 2] * 100, "long", particles=2, seed=2, max_tokens=4, ignore_eos=True))
    long, rounds = engine.registry.groups["long"], engine.registry.groups["running"]
    while not long.is_running:
        before = rounds.launched
        engine.step()
        assert rounds.launched == before + 1
    engine.abort("running")
    engine.abort("long")
    engine.step()
    assert_empty(engine)


@pytest.mark.parametrize("share", [0, -1.0, 101.0])
def test_shares_that_cannot_be(share):
    with pytest.raises(ValueError, match="prefill_share="):
        EngineConfig(prefill_share=share)


@pytest.mark.parametrize("running", [0, COMPANY - 1, COMPANY])
def test_requests_are_taken_in_while_rounds_of_many_requests_run(running, monkeypatch):
    """Beside few requests at the beginning of a step, so that the prompt runs in it. The answer is the same."""
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    config = EngineConfig(form="lockstep", block=2, max_slots=32)
    engine, events = local_engine(pair(512), config), []
    for n in range(running):
        engine.submit(request([n % 3, 1], str(n), method="target", seed=n, max_tokens=200, ignore_eos=True))
    while engine.num_running < running:
        engine.step()
    engine.step()
    new = request([2, 1], "new", method="target", seed=9, max_tokens=4, ignore_eos=True)
    launch, read = RoundScheduler._launch, RoundScheduler._read
    monkeypatch.setattr(RoundScheduler, "_launch", lambda *given: events.append("launch") or launch(*given))
    monkeypatch.setattr(RoundScheduler, "_read", lambda *given: events.append("read") or read(*given))
    run = engine.workers[ModelRole.TARGET].run_prompts
    monkeypatch.setattr(
        engine.workers[ModelRole.TARGET], "run_prompts", lambda batch: events.append("prompt") or run(batch)
    )
    found = engine.step(lambda: events.append("submit") or engine.submit(new))
    assert events.count("submit") == 1
    if running < COMPANY:
        assert events[:2] == ["submit", "prompt"]
    else:
        assert events.index("launch") < events.index("submit") < events.index("read") and "prompt" not in events
    while "new" in engine.registry.groups:
        found += engine.step()
    (answer,) = (one.answer for one in found if one.request_id == "new" and one.answer)
    monkeypatch.undo()
    assert_same(answer, answers(local_engine(pair(512), config), [new])["new"])


@pytest.mark.parametrize(("running", "steps"), [(COMPANY - 1, 1), (COMPANY, 2)])
def test_first_tokens_are_read_a_step_later_beside_many_requests(running, steps, monkeypatch):
    """Beside few requests a step waits for them, so that the request takes part in the next round."""
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    config = EngineConfig(form="lockstep", block=2, max_slots=32)
    engine = local_engine(pair(512), config)
    for n in range(running):
        engine.submit(request([n % 3, 1], str(n), method="target", seed=n, max_tokens=200, ignore_eos=True))
    while engine.num_running < running:
        engine.step()
    new = request([2, 1], "new", method="target", seed=9, max_tokens=4, ignore_eos=True)
    engine.submit(new)
    found, waited = engine.step(), 1
    while not engine.registry.groups["new"].is_running:
        found, waited = found + engine.step(), waited + 1
    assert waited == steps
    while "new" in engine.registry.groups:
        found += engine.step()
    (answer,) = (one.answer for one in found if one.request_id == "new" and one.answer)
    monkeypatch.undo()
    assert_same(answer, answers(local_engine(pair(512), config), [new])["new"])
