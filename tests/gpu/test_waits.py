"""The host waits for a GPU only where it reads results. Any other wait leaves the GPU idle: the next round is queued
after it."""

from __future__ import annotations

import warnings

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from tests.gpu.test_agreement import DEVICES, load, requests
from tests.scheduler.harness import answers

WAYS = (
    {"method": "target"},
    {"method": "exact", "particles": 4},
    {"method": "exact", "verification": "rejection"},
    {"method": "smc", "particles": 4},
    {"method": "smc", "particles": 4, "population": "independent", "top_k": 40},
)
MORE = (
    {},
    {"stop": ("7 ", "so")},
    {"logit_bias": ((5, 1.0),), "top_p": 0.9},
    {"presence_penalty": 0.5, "min_tokens": 3},
)
FORMS = {
    "lockstep": EngineConfig(form="lockstep", block=5, max_slots=32, drafting="always"),
    "look-ahead": EngineConfig(form="lookahead", block=5, branches=4, max_slots=32, drafting="always"),
}


@pytest.mark.parametrize("devices", DEVICES, ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_do_not_wait(form, devices):
    """Requests of all kinds come and go; the second time nothing is compiled or recorded any more."""
    pair = load(torch.bfloat16, devices)
    engine = local_engine(pair, FORMS[form])
    asked = [one for way in WAYS for more in MORE for one in requests(pair, 2, **way, **more)]

    def run(name: str) -> None:
        answers(engine, [one.__class__(f"{name} {n}", one.prompt, one.params) for n, one in enumerate(asked)])

    run("first")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run("second")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = {(one.filename, one.lineno) for one in caught if "called a synchronizing" in str(one.message)}
    assert not found
