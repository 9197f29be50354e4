"""Long prompts beside running requests: running requests continue without waiting."""

from __future__ import annotations

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from tests.pairwise import one_of
from tests.scheduler.harness import PaddingOps, answers, assert_empty, request
from tests.scheduler.random_histories import assert_same, pair


@pytest.mark.parametrize(("form", "ahead"), one_of(("lookahead", True), ("lockstep", False)))
def test_running_requests_get_a_round_in_every_step(form, ahead, monkeypatch):
    """A prompt of 80 tokens runs in chunks of 4: running requests of every method get a round in each of the twenty
    steps."""
    if ahead:
        monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    engine = local_engine(pair(), EngineConfig(form=form, block=2, prefill_chunk=4))
    for name, law in {"smc": {"particles": 3}, "target": {"method": "target"}, "draft": {"method": "draft"}}.items():
        engine.submit(request([1], name, seed=1, max_tokens=90, ignore_eos=True, **law))
    for _ in range(4):
        engine.step()
    groups = list(engine.registry.groups.values())
    assert all(group.is_running for group in groups)
    engine.submit(request([0, 1, 2, 2] * 20, "long", particles=2, seed=2, max_tokens=4, ignore_eos=True))
    long, steps = engine.registry.groups["long"], 0
    while not long.is_running:
        before = [group.launched for group in groups]
        engine.step()
        assert [group.launched for group in groups] == [rounds + 1 for rounds in before]
        steps += 1
    assert steps == 20
    for name in list(engine.registry.groups):
        engine.abort(name)
    engine.step()
    assert_empty(engine)


def test_a_long_prompt_is_run_in_short_pieces_unless_asked_otherwise():
    """The default chunk on a CPU is 128 tokens: there the time per prompt token does not fall with larger chunks, and
    other requests would wait longer."""
    engine, sizes = local_engine(pair(512), EngineConfig(block=2)), []
    engine.submit(request([1], "beside", method="target", seed=1, max_tokens=40, ignore_eos=True))
    engine.step()
    run = engine.workers["target"].run_prompts
    engine.workers["target"].run_prompts = lambda batch: (sizes.append(len(batch.tokens_T)), run(batch))[1]
    engine.submit(request([0, 1, 2, 2] * 120, "long", method="target", seed=2, max_tokens=4, ignore_eos=True))
    while not engine.idle:
        engine.step()
    assert sizes == [128, 128, 128, 96]
    assert_empty(engine)


def test_a_short_prompt_behind_a_long_one_takes_its_turn():
    """A chunk serves the oldest prompt first, and the next prompt gets the remainder: no step runs more tokens than a
    chunk."""
    engine, most = local_engine(pair(), EngineConfig(block=2, prefill_chunk=10)), []
    for side, worker in engine.workers.items():
        run = worker.run_prompts
        worker.run_prompts = lambda batch, run=run, side=side: (most.append((side, len(batch.tokens_T))), run(batch))[1]
    for i, size in enumerate((25, 3, 9)):
        engine.submit(request([i % 3] * size, str(i), particles=2, seed=i, max_tokens=4, ignore_eos=True))
    began, counts = [], []
    while len(began) < 3:
        engine.step()
        counts.append([sum(count for side, count in most if side == name) for name in engine.workers])
        most.clear()
        began += [g.id for g in engine.registry.groups.values() if g.is_running and g.id not in began]
    assert began == ["0", "1", "2"]
    assert counts == [[10, 10], [10, 10], [10, 10], [7, 7]]


SYSTEM, ASKED = (0, 1, 2, 2, 1, 0, 0, 2) * 8, (2, 1, 0) * 5
LAWS = [{"particles": 2}, {"method": "target"}, {"method": "draft"}, {"method": "exact", "particles": 3}]


def counting(engine: Engine) -> dict[str, int]:
    """Number of prompt tokens that each model runs from now on; updated in place."""
    run = dict.fromkeys(engine.workers, 0)
    for side, worker in engine.workers.items():

        def listening(batch, ask=worker.run_prompts, side=side):
            run[side] += len(batch.tokens_T)
            return ask(batch)

        worker.run_prompts = listening
    return run


def together(
    prompts: list[tuple[int, ...]], chunk: int, laws: list[dict], **config
) -> tuple[list[Answer], dict[str, int]]:
    """Answers to requests that are submitted together, and the number of prompt tokens that each model ran for them."""
    engine = local_engine(pair(), EngineConfig(block=2, prefill_chunk=chunk, **config))
    run = counting(engine)
    asked = [
        request(prompt, str(i), seed=i, max_tokens=6, ignore_eos=True, **law)
        for i, (prompt, law) in enumerate(zip(prompts, laws))
    ]
    found = answers(engine, asked)
    return [found[one.request_id] for one in asked], run


@pytest.mark.parametrize("chunk", one_of(16, 5))
def test_equal_prompts_of_one_moment_are_computed_once(chunk):
    """Later requests wait for the pages of the first, and run only the tokens after the last whole block. Their answers
    are as without a cache."""
    prompt = (*SYSTEM, 1, 1, 2)
    found, run = together([prompt] * 3, chunk, [{"particles": 2}] * 3)
    assert run == dict.fromkeys(run, len(prompt) + 2 * 3)
    assert [answer.cached_tokens for answer in found] == [0, 64, 64]
    alone, twice = together([prompt] * 3, chunk, [{"particles": 2}] * 3, prefix_cache=False)
    assert twice == dict.fromkeys(run, 3 * len(prompt))
    for one, other in zip(found, alone):
        assert_same(one, other)


@pytest.mark.parametrize("chunk", one_of(7, 512))
def test_what_prompts_begin_with_in_common_is_computed_once(chunk):
    """Requests use shared pages as soon as they have been requested, without waiting for the rest of the earlier
    prompt. Methods share what runs on the same model."""
    prompts = [(*SYSTEM, *ASKED), SYSTEM, (*SYSTEM, *reversed(ASKED)), (*SYSTEM, *ASKED[:9]), (1, 2), (*SYSTEM, *ASKED)]
    laws = [LAWS[i % len(LAWS)] for i in range(len(prompts))]
    found, run = together(prompts, chunk, laws)
    alone, _ = together(prompts, chunk, laws, prefix_cache=False)
    for one, other in zip(found, alone):
        assert_same(one, other)
    # The target runs the first prompt, and of each other one only its own part, at least the last token.
    assert run["target"] == 79 + (64 - 48) + (73 - 64) + 2 + (79 - 64)
    assert run["draft"] == 79 + (79 - 64) + (73 - 64) + 2


@pytest.mark.parametrize("after", [0, 1, 3])
def test_waiting_prompt_continues_after_the_first_is_aborted(after):
    engine = local_engine(pair(), EngineConfig(block=2, prefill_chunk=10))
    run, prompt = counting(engine), (*SYSTEM, 1)
    for name in "ab":
        engine.submit(request(prompt, name, particles=2, seed=1, max_tokens=4, ignore_eos=True))
    for _ in range(after):
        engine.step()
    assert engine.abort("a")
    found = {}
    while not engine.idle:
        found |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
    assert len(found["b"].tokens) == 4 and found["b"].cached_tokens == 0
    assert run == dict.fromkeys(run, 10 * after + len(prompt))
    assert_empty(engine)
