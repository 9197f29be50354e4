"""Quality measurements: their figures, reproducibility, and that the demo target solves more problems than the
draft."""

from __future__ import annotations

import time

import pytest

from benchmarks.load import ClosedLoop
from benchmarks.quality import DecodingSetting, Terms, grid, measure, measure_speed
from smc import demo, local_engine
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.demo.problems import Accuracy, derived_seed, generate
from smc.local_engine import ModelPair, fitted_engine
from smc.memory.kv_cache import pool_for


@pytest.fixture(scope="module")
def pair():
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def test_the_usual_grid():
    settings = grid()
    exact, rejection, smc = 2 * 3 * 4, 2 * 3, 2 * 4 * (2 + 3)
    assert len(settings) == len({setting.name for setting in settings}) == 2 + exact + rejection + smc
    assert [setting.name for setting in settings[:3]] == ["target alone", "draft alone", "exact look-ahead N=1 K=4 F=4"]
    assert (
        settings[-1] == DecodingSetting.lookahead("independent", 32, 5, 4)
        and settings[-1].name == "independent look-ahead N=32 K=5 F=4"
    )
    wide = {s.branches for s in settings if s.method == "exact" and s.particles == 16}
    assert wide == {2, None} and DecodingSetting.lockstep("distinct", 8, 8) in settings
    assert all(setting.engine.branches == setting.branches for setting in settings if setting.form == "lookahead")


def test_a_grid_of_ones_own():
    names = [setting.name for setting in grid((4,), (3, 3), (2,))]
    forms = ["lockstep N=4 K=3", "look-ahead N=4 K=3 F=2"]
    smc = [f"{population} {form}" for population in ("distinct", "independent") for form in forms]
    exact = [f"{verification} {form}" for verification in ("exact", "rejection") for form in reversed(forms)]
    assert names == ["target alone", "draft alone", *exact, *smc]


@pytest.mark.parametrize(
    ("correct", "count", "interval"),
    [(22, 100, (0.1500, 0.3107)), (0, 20, (0.0, 0.1611)), (20, 20, (0.8389, 1.0)), (5, 10, (0.2366, 0.7634))],
)
def test_wilson_interval(correct, count, interval):
    assert Accuracy(correct, count).interval == pytest.approx(interval, abs=1e-4)


@pytest.mark.slow
def test_target_beats_draft(pair):
    """The target solves all problems and the draft a quarter, so 5 problems are enough to tell them apart."""
    problems = generate(21, 5, "test")
    target, draft = (
        measure(pair, DecodingSetting.plain(method), problems, 8, Terms(0)) for method in ("target", "draft")
    )
    assert target.accuracy.share >= 0.9 > draft.accuracy.share + 0.2
    assert target.rounds is None and target.resample_rate is None and target.mean_ess_share is None
    assert target.mean_logp < 0 and draft.mean_logp is None


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.5])
def test_exact_decoding_is_the_target_in_fewer_rounds(pair, temperature):
    problems, terms = generate(24, 1, "test"), Terms(3, temperature)
    target = measure(pair, DecodingSetting.plain("target"), problems, 4, terms)
    for setting in (DecodingSetting.lookahead("exact", 4, 5, 4), DecodingSetting.lockstep("exact", 4, 5)):
        row = measure(pair, setting, problems, 4, terms)
        assert (row.accuracy, row.tokens) == (target.accuracy, target.tokens)
        assert row.mean_logp == pytest.approx(target.mean_logp, abs=1e-4)
        assert 1 <= row.tokens_a_round <= 6 and row.resample_rate is None
        assert (row.hit_share is None) == (setting.form == "lockstep")


@pytest.mark.slow
def test_answers_do_not_depend_on_what_is_in_flight(pair):
    problems = generate(22, 2, "test")
    seen = []
    for concurrency in (1, 2):
        answers = {}
        row = measure(
            pair,
            DecodingSetting.lockstep("independent", 4, 6),
            problems,
            concurrency,
            Terms(1, ess_threshold=0.75),
            on_answer=lambda problem, answer, answers=answers: answers.update({problem.question: answer.tokens}),
        )
        seen.append((row.accuracy, row.rounds, row.resamples, answers))
    assert seen[0] == seen[1]
    assert 0 < row.mean_ess_share <= 1 and 0 <= row.resample_rate <= 1 and row.rounds > 1


def test_speed_counts_answer_tokens_only(pair):
    assert min(measure_speed(pair, DecodingSetting.plain("draft"), generate(23, 2, "test"), Terms(0))) > 1


def test_making_an_engine_takes_no_time_of_its_answers(pair, monkeypatch):
    slow, make = 4.0, local_engine.fitted_engine
    monkeypatch.setattr(local_engine, "fitted_engine", lambda *given: time.sleep(slow) or make(*given))
    row = measure(pair, DecodingSetting.plain("draft"), generate(23, 1, "test"), 1, Terms(0))
    assert row.tokens / row.batch_tokens_per_second < slow


def test_seeds_are_all_different():
    seeds = {derived_seed(seed, index) for seed in range(20) for index in range(50)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)


def test_engine_fits_exactly(pair):
    """There are slots and pages for exactly `concurrency` of the largest requests, and that many run at once."""
    sizes = (3, 9, 6, 4)
    requests = [
        Request(str(n), (0, 2, 40, 3), SamplingParams(method="smc", particles=n, max_tokens=10, seed=n)) for n in sizes
    ]
    engine = fitted_engine(pair, EngineConfig(block=4, branches=3), requests, concurrency=2)
    # Prompt and answers of nine particles, and two rounds in flight, each with a token and three branches of three
    # tokens per particle.
    assert engine.config.max_slots == 18 and engine.config.pages == pool_for(2 * (4 + 9 * 10 + 2 * 9 * (1 + 3 * 3)))
    answered, running = [], []
    for output in ClosedLoop(engine, requests, 2).run():
        running.append(engine.num_running)
        answered += [output.request_id] * (output.answer is not None)
    assert sorted(answered) == sorted(map(str, sizes)) and max(running) == 2
    assert engine.take_stats().preemptions == 0
    engine.check_books()


def test_what_never_fits_is_refused_before_memory_is_taken(pair):
    with pytest.raises(ValueError, match="max_tokens=1000000000"):
        fitted_engine(pair, EngineConfig(), [Request("a", (0,), SamplingParams(method="smc", max_tokens=10**9))])
