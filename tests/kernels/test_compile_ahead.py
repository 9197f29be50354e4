"""Kernels that are compiled ahead, for an H100, on a machine without a GPU: see `tests.kernels.compile_ahead`."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

import smc.attention
import smc.kernels
from smc.api.engine_config import EngineConfig
from smc.calibration import compile_ahead as ahead
from smc.executor.dry_run import telling_layers
from smc.kernels import compile_jobs
from smc.kernels.compile_jobs import CompilePool, possible_processes
from smc.types import ModelRole
from tests.model.tiny import random_decoder, tiny_config

ROOT = Path(__file__).resolve().parents[2]
TOGETHER = pytest.mark.xdist_group("compile ahead")
"""In one process, in which `said` is made once."""


def child(*arguments: str, lines: int = 1) -> list[str]:
    """Run Python without the interpreter of kernels; return the last lines that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.splitlines()[-lines:]


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    (line,) = child("-m", "tests.kernels.compile_ahead")
    return json.loads(line)


@TOGETHER
def test_dry_runs_name_kernels_that_are_not_compiled_yet(said):
    assert said["found"] == said["missing"] > 100
    assert said["restored"]


@TOGETHER
def test_the_first_layers_have_all_kernels(said):
    assert said["layers"] == [3, 6] and not said["differ"]


@pytest.mark.parametrize(
    ("family", "fields", "wanted"),
    [("llama", {"num_layers": 9}, 2), ("llama", {"num_layers": 1}, 1),
     ("gemma3_text", {"num_layers": 9, "window_layers": (0, 1, 2, 4, 5, 6, 8)}, 5)],
)  # fmt: skip
def test_dry_runs_have_every_kind_of_layer_and_every_change_of_kind(family, fields, wanted):
    assert telling_layers(random_decoder(tiny_config(family, **fields))) == wanted


def test_dry_runs_have_every_format_of_weights():
    """Checkpoints may keep some matrices of some layers as they are."""
    model = random_decoder(tiny_config(num_layers=6))
    model.layers[4].down = model.layers[4].down.half()
    assert telling_layers(model) == 6


@TOGETHER
def test_the_pool_compiles_what_it_is_given(said):
    assert said["pool"]["kernels"] == said["chosen"] == said["cached jobs"] > 10
    assert said["cached"] == ["_add_norm", "_advance", "_begin", "_pack", "megakernel"]
    assert said["pool"]["processes"] == 2 and not said["pool"]["failed"] and said["pool"]["seconds"] > 0


@TOGETHER
def test_launches_find_what_the_pool_has_compiled(said):
    assert {"_begin", "_pack", "_advance", "_add_norm", "_lay_out"} == set(said["launched"])
    assert said["compiled at launch"] and set(said["compiled at launch"]) == {"_lay_out"}


@TOGETHER
def test_a_pool_whose_processes_end_leaves_kernels_to_their_launch(said):
    assert said["broken"]["failed"] == 5 and not said["broken"]["kernels"]
    assert "has ended" in said["broken"]["error"]
    assert said["absent"]["failed"] == 1 and "No such file" in said["absent"]["error"]


def test_names_in_the_cache_do_not_depend_on_the_order_of_launches():
    found = [
        json.loads(line)
        for line in child("-c", "import tests.kernels.test_compile_ahead as t; t.print_hashes()", lines=2)
    ]
    assert len(found[0]) > 60
    assert found[0] == found[1]


def print_hashes() -> None:
    """Print the hashes in either order. A kernel keeps its hash, so each order has a process of its own, with what this
    one has imported."""
    for is_reversed in (False, True):
        if (process := os.fork()) == 0:
            print(json.dumps(hashes(is_reversed), sort_keys=True), flush=True)
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0


def hashes(is_reversed: bool) -> dict[str, str]:
    """Return what Triton's cache knows all kernels by. They are hashed in this order."""
    from triton.runtime.jit import JITFunction

    kernels = {}
    for package in (smc.kernels, smc.attention):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, JITFunction) and value.__module__ == module.name:
                    kernels[f"{module.name}.{name}"] = value
    names = sorted(kernels, reverse=is_reversed)
    return {name: kernels[name].cache_key for name in names}


def test_a_cpu_compiles_nothing(monkeypatch):
    monkeypatch.setattr(compile_jobs.CompilePool, "submit", lambda *_: pytest.fail("submitted"))
    before = threading.active_count()
    worker = SimpleNamespace(device=torch.device("cpu"))
    ahead.compile_ahead(EngineConfig(), 64, {ModelRole.TARGET: worker})
    ahead.watch_compiler(torch.device("cpu"))()
    assert threading.active_count() == before


@pytest.mark.parametrize("interpreted", [True, False])
def test_an_interpreter_needs_no_dry_run(interpreted, monkeypatch):
    begun: list[tuple] = []
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    monkeypatch.setattr(ahead, "plans_of_all_kinds", lambda *given: begun.append(given) or [])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    worker = SimpleNamespace(device=torch.device("cuda"), vocab_size=8)
    ahead.compile_ahead(EngineConfig(), 64, {ModelRole.TARGET: worker})
    assert bool(begun) is not interpreted


def test_a_failure_is_one_sentence_of_the_log(monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("no plans")

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(ahead, "plans_of_all_kinds", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    worker = SimpleNamespace(device=torch.device("cuda"), vocab_size=8)
    with caplog.at_level(logging.INFO):
        ahead.compile_ahead(EngineConfig(), 64, {ModelRole.TARGET: worker})
    (said,) = (record.getMessage() for record in caplog.records if record.name == ahead.__name__)
    assert "no plans" in said and "first launch" in said


def test_a_pool_without_jobs_starts_no_process():
    done = CompilePool(4, ("/nonexistent",)).wait()
    assert (done.processes, done.kernels, done.failed) == (0, 0, 0)


def test_memory_bounds_the_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert 1 <= possible_processes() <= 16
    monkeypatch.setattr(compile_jobs, "_free_bytes", lambda: 6 * compile_jobs.PROCESS_BYTES)
    assert possible_processes() == 3
    monkeypatch.setattr(compile_jobs, "_free_bytes", lambda: 0)
    assert possible_processes() == 1
