"""Latency models that commands keep in files (`smc.calibration.latency`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from smc import demo, local_engine
from smc.api.engine_config import EngineConfig
from smc.calibration.latency import ONCE, Effort, cache_directory, latency_key, measure_latency
from smc.local_engine import ModelPair, stored_latency
from smc.scheduler.engine import Engine
from smc.scheduler.speculation import LatencyModel
from smc.types import ModelRole

CONFIG = EngineConfig(block=3, branches=1, max_slots=2)
MODELS = (demo.TARGET, demo.DRAFT)


@pytest.fixture(scope="module")
def shipped() -> ModelPair:
    return ModelPair.load(*MODELS)


@pytest.fixture(scope="module")
def measurement() -> Callable[..., LatencyModel]:
    """A measurement as commands make it, done once for each configuration."""
    found: dict[EngineConfig, LatencyModel] = {}

    def measure(engine: Engine, effort: Effort) -> LatencyModel:
        if engine.config not in found:
            found[engine.config] = measure_latency(engine, effort)
        return found[engine.config]

    return measure


@pytest.fixture
def measured(monkeypatch, tmp_path, measurement) -> list:
    """A list of all measurements that were made."""
    made: list = []
    monkeypatch.setattr(local_engine, "measure_latency", lambda *given: made.append(measurement(*given)) or made[-1])
    monkeypatch.setattr(local_engine, "ONCE", replace(ONCE, seconds=0.1, crowd=1, context=40))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def test_measured_once_and_read_later(shipped, measured, tmp_path):
    first = stored_latency(shipped, MODELS, CONFIG)
    assert first is not None and len(measured) == 1
    assert stored_latency(shipped, MODELS, CONFIG) == first and len(measured) == 1
    stored_latency(shipped, MODELS, replace(CONFIG, block=4))
    assert len(measured) == 2 and len(list(cache_directory().iterdir())) == 2


def test_a_broken_file_is_replaced(shipped, measured, caplog):
    stored_latency(shipped, MODELS, CONFIG)
    (path,) = cache_directory().iterdir()
    for broken in ("", '{"latency": {"draft": 3}}', path.read_text().replace('"points"', '"spots"')):
        path.write_text(broken)
        with caplog.at_level(logging.WARNING):
            assert stored_latency(shipped, MODELS, CONFIG) == measured[-1]
        assert "are timed again" in caplog.text and json.loads(path.read_text())["latency"]
    assert len(measured) == 4


def test_a_directory_that_cannot_be_written_is_no_error(shipped, measured, tmp_path, caplog):
    (tmp_path / "smcserve").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert stored_latency(shipped, MODELS, CONFIG) == measured[0]
    assert "the latency model cannot be stored" in caplog.text


def test_other_files_and_settings_have_other_latency(shipped, tmp_path):
    models = {ModelRole.TARGET: shipped.target, ModelRole.DRAFT: shipped.draft}
    key = latency_key(models, MODELS, None, CONFIG)
    assert key == latency_key(models, MODELS, None, CONFIG) and json.loads(json.dumps(key)) == key
    (tmp_path / "config.json").write_text("{}")
    assert key != latency_key(models, (demo.TARGET, tmp_path), None, CONFIG)
    assert key != latency_key(models, MODELS, None, replace(CONFIG, form="lockstep"))
    assert key != latency_key(models, MODELS, None, replace(CONFIG, numerics="invariant"))
    assert key != latency_key(models, MODELS, 99, CONFIG)


def test_where_files_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "smcserve" / "latency"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "smcserve" / "latency"
