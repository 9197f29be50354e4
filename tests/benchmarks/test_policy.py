"""Replays of recorded answers under a virtual clock: they confirm as many tokens as the models do, and the policy's
choice is nearly as fast as the best fixed size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.load import problem_prompts
from benchmarks.policy import (
    TreeSize,
    config_of,
    fixed_tokens,
    replay,
    replay_all,
    seconds_of_round,
)
from benchmarks.traces import DraftReader, TraceLibrary, load, save, write_traces
from smc import demo
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.speculation import LatencyModel

LATENCY = LatencyModel.from_json((Path(__file__).parents[2] / "benchmarks/latencies/h200_8b_0.5b.json").read_text())
TEMPERATURE, ANSWERS, TOKENS = 2.0, 5, 48


@cache
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@cache
def library() -> TraceLibrary:
    prompts = [("problem", prompt) for prompt in problem_prompts(pair().tokenizer, ANSWERS)]
    traces = write_traces(pair(), prompts, TEMPERATURE, TOKENS)
    reader = DraftReader(pair().draft, pair().tokenizer.size, max(len(trace.text) for trace in traces))
    reader.read_answers(traces, range(len(traces)))
    return TraceLibrary(traces, reader)


@pytest.mark.parametrize("size", [TreeSize(8, 5, 4), TreeSize(2, 3, 1)])
@pytest.mark.parametrize("form", ["lookahead", "lockstep"])
def test_a_replay_confirms_as_many_tokens_as_the_models(form, size):
    config = config_of(form, size, "always")
    engine = local_engine(pair(), replace(config, max_slots=ANSWERS * size.particles, max_context=256))
    params = SamplingParams(method=Method.EXACT, particles=size.particles, temperature=TEMPERATURE, max_tokens=TOKENS)
    requests = [
        Request(str(i), trace.text[: trace.answer_from], replace(params, seed=trace.seed))
        for i, trace in enumerate(library().traces)
    ]
    answers = {out.request_id: out.answer.tokens for out in engine.run(requests) if out.answer}
    assert all(answers[str(i)] == trace.answer for i, trace in enumerate(library().traces))
    real = engine.take_stats().exact["walk"].tokens_a_round
    assert replay_all(library(), config, size.particles, ANSWERS) == pytest.approx(real, rel=0.06)


def test_traces_survive_a_file(tmp_path):
    size, file = TreeSize(4, 4, 2), tmp_path / "traces"
    found = fixed_tokens(library(), "lookahead", [size])
    save(library(), file)
    read = load(file)
    assert [trace.text for trace in read.traces] == [trace.text for trace in library().traces]
    assert fixed_tokens(read, "lookahead", [size]) == found
    with pytest.raises(ValueError, match="give the draft"):
        fixed_tokens(read, "lookahead", [TreeSize(16, 8, 4)])


@pytest.mark.parametrize("form", ["lookahead", "lockstep"])
def test_the_clock_adds_up_what_rounds_do(form):
    """Every round of a fixed size takes the same time."""
    size = TreeSize(4, 4, 2 if form == "lookahead" else 1)
    found = replay(library(), LATENCY, config_of(form, size, "always"), size.particles, 1, answers=2)
    assert set(found.sizes) == {size} and not found.alone_rounds
    assert found.seconds == pytest.approx(found.rounds * seconds_of_round(LATENCY, form, size, 1))
