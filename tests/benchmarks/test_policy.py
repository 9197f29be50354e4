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
    main,
    replay,
    replay_all,
    seconds_of_round,
)
from benchmarks.trace_writer import DraftReader, write_traces
from benchmarks.traces import LEAST_WIN, TraceLibrary, load, save
from smc import demo
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.speculation import LatencyModel

pytestmark = pytest.mark.xdist_group("policy")
"""Tests of one process share the models' answers."""
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
    [found] = fixed_tokens(library(), "lookahead", [size]).values()
    save(library(), file)
    read = load(file)
    assert [trace.text for trace in read.traces] == [trace.text for trace in library().traces]
    assert read.exponents == library().exponents
    for trace, other in zip(read.traces, library().traces):
        assert trace.offered.keys() == other.offered.keys()
        assert trace.children == other.children
        for node, (_, win_C) in trace.offered.items():
            likely = other.offered[node][1] > LEAST_WIN
            likely[0] = True
            assert win_C == pytest.approx(other.offered[node][1][likely], abs=0.5 / 64 + 1e-6)
    with pytest.raises(ValueError, match="give the draft"):
        fixed_tokens(read, "lookahead", [TreeSize(16, 8, 4)])
    read = load(file)
    read.offer_averages()
    [again] = fixed_tokens(read, "lookahead", [size]).values()
    assert again == pytest.approx(found, rel=0.02)


def test_a_grown_file_needs_no_draft(tmp_path, capsys):
    """Nodes that are unlikely need not be in the file."""
    size, file = TreeSize(4, 4, 2), tmp_path / "traces"
    options = f"--traces {file} --prompts {ANSWERS} --tokens {TOKENS} --temperature {TEMPERATURE} --grow"
    assert not main(options.split())
    assert f"{ANSWERS} answers, {ANSWERS * TOKENS} tokens" in capsys.readouterr().out
    read = load(file)
    read.offer_averages()
    [found] = fixed_tokens(read, "lookahead", [size]).values()
    [expected] = fixed_tokens(library(), "lookahead", [size]).values()
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("form", ["lookahead", "lockstep"])
def test_the_clock_adds_up_what_rounds_do(form):
    """Every round of a fixed size takes the same time."""
    size = TreeSize(4, 4, 2 if form == "lookahead" else 1)
    found = replay(library(), LATENCY, config_of(form, size, "always"), size.particles, 1, answers=2)
    assert set(found.sizes) == {size} and not found.alone_rounds
    assert found.seconds == pytest.approx(found.rounds * seconds_of_round(LATENCY, form, size, 1))
