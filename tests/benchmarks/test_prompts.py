"""Time to the first token: the number of operations, and that a prompt's rounds are compared with rounds without a
prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks import prompts
from benchmarks.backends import CpuBackend, Mode
from benchmarks.prompts import FirstTokenTimer, operations
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method
from smc.local_engine import ModelPair
from smc.model.presets import preset
from smc.model.weight_map import count_parameters
from smc.scheduler.engine import Engine
from smc.scheduler.stats import EngineStats
from tests.model.tiny import tiny_config
from tests.scheduler.random_histories import pair

AHEAD = Mode("lookahead", Method.SMC, EngineConfig(block=2, branches=2), 2, (1, 1))
PLAIN = Mode("plain", Method.TARGET, EngineConfig(block=4), 1, (0, 1))


def test_operations_are_those_of_the_weights_and_of_what_is_seen():
    config = tiny_config(tied_embeddings=True, num_layers=3)
    norms = (2 * config.num_layers + 1) * config.hidden_size
    weights = count_parameters(config) - norms - config.vocab_size * config.hidden_size
    head, width = 2 * config.vocab_size * config.hidden_size, config.num_heads * config.head_dim
    assert operations(config, 1, 0) == head + 2 * weights + 4 * width * config.num_layers
    # Each token attends to itself and all before it: 8 + 9 + 10.
    assert operations(config, 3, 7) == head + 6 * weights + 4 * width * config.num_layers * 27
    whole, begun = operations(config, 100, 0), operations(config, 40, 0)
    assert whole == begun + operations(config, 60, 40) - head


def test_an_8b_model_s_prompt_takes_fifteen_billion_operations_a_token():
    assert operations(preset("llama-8b"), 4096, 0) == pytest.approx(61.7e12, rel=0.1)


@pytest.mark.parametrize("mode", [AHEAD, PLAIN], ids=lambda mode: mode.name)
def test_prompts_alone_and_beside_others_new_and_cached(mode, monkeypatch):
    monkeypatch.setattr(prompts, "REPEATS", 2)
    monkeypatch.setattr(prompts, "BESIDE_ROUNDS", 8)
    told = []
    bench = FirstTokenTimer(CpuBackend(pair(256)), 4, lambda: told.append(None))
    alone, beside = (bench.run(mode, 100, count) for count in (0, 2))
    assert len(told) == 2 * 2 * (prompts.REPEATS + 1)
    for new, again in (alone, beside):
        assert (new.context, new.cached, again.cached) == (100, 0, 96)
        assert new.ttft > 0 and again.target > 0 and new.chunks == 1 and again.chunks == 1
        assert (new.draft > 0) == (mode is AHEAD) == (new.draft_peak > 0)
        assert 0 < new.target_peak < 1
    assert alone[0].round is None and alone[0].stretch is None
    for row in beside:
        assert row.beside == 2 and row.longest >= row.round_beside > 0
        assert row.stretch == pytest.approx(row.round_beside / row.round)


@pytest.mark.slow
def test_background_load_is_kept_up(monkeypatch):
    """The number of decoding requests beside the prompts never falls, although no request lasts for all prompts. On a
    busy machine a prompt spans more of their rounds."""
    monkeypatch.setattr(prompts, "BESIDE_ROUNDS", 16)
    running: list[int] = []
    timed = prompts._timed_step

    def timed_step(loop):
        running.append(loop.engine.num_running)
        return timed(loop)

    monkeypatch.setattr(prompts, "_timed_step", timed_step)
    FirstTokenTimer(CpuBackend(pair(256)), 6).run(AHEAD, 100, 4)
    assert len(running) > 30 and min(running) >= 4


class Watched(CpuBackend):
    """Keeps the statistics of its engines."""

    def __init__(self, models: ModelPair) -> None:
        super().__init__(models)
        self.seen: list[EngineStats] = []

    @contextmanager
    def engine(self, mode: Mode, config: EngineConfig) -> Iterator[Engine]:
        with super().engine(mode, config) as engine:
            yield engine
            self.seen.append(engine.take_stats())


def test_requests_beside_are_verified_as_asked(monkeypatch):
    monkeypatch.setattr(prompts, "REPEATS", 1)
    monkeypatch.setattr(prompts, "BESIDE_ROUNDS", 8)
    backend = Watched(pair(256))
    FirstTokenTimer(backend, 2).run(replace(AHEAD, method=Method.EXACT, verification="rejection"), 60, 1)
    assert backend.seen[0].exact["rejection"].rounds > 0


def test_guided_requests_beside_have_slots(monkeypatch):
    """Each of their rows needs two."""
    monkeypatch.setattr(prompts, "REPEATS", 1)
    monkeypatch.setattr(prompts, "BESIDE_ROUNDS", 8)
    models = ModelPair.load(demo.TARGET, demo.DRAFT)
    _, row = FirstTokenTimer(CpuBackend(models), 2, distribution={"guidance_scale": 1.5}).run(AHEAD, 60, 2)
    assert row.round > 0


def test_a_context_that_the_models_were_not_made_for():
    with pytest.raises(ValueError, match="--context 256; allowed: below 256"):
        FirstTokenTimer(CpuBackend(pair(256)), 4).run(AHEAD, 256, 0)
