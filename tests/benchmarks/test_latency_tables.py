"""Latency curves from the rounds of a benchmark, for the sizes whose work is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.backends import CpuBackend, Mode
from benchmarks.reports.speed import MeasuredLatency, curve_tables, latency_of_speeds, speed_table
from benchmarks.speed import BANDWIDTH, ModeTimer, Speed
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method
from smc.types import ModelRole

TIMES = dict.fromkeys(("per_request", "total", "round", "select", "link", "host", "idle", "floor", "memory"), 1.0)
SIZES = {
    "numerics": "fastest",
    "particles": 8,
    "branches": 1,
    "requests": 128,
    "context": 74,
    "prompts": "",
    "temperature": 1.0,
    "gpus": 1,
    "target_gpus": 1,
}
PLAIN = Speed(
    "plain",
    "target",
    **SIZES | {"particles": 1},
    block=16,
    rows=1,
    alone=0.0,
    tokens=16,
    draft=0.0,
    target=91.5,
    **TIMES,
)
ALONE = Speed("lockstep", "exact", **SIZES, block=8, rows=8, alone=1.0, tokens=8, draft=0.0, target=46.0, **TIMES)
DRAFTED = Speed("lockstep", "exact", **SIZES, block=8, rows=8, alone=0.0, tokens=8, draft=8.0, target=46.0, **TIMES)
WIDE = replace(PLAIN, mode="plain-tp", gpus=2, target_gpus=2, target=183.4)


def of(seen: list[MeasuredLatency]) -> list[tuple]:
    return [sample for each in seen for sample in each.samples()]


def test_no_curve_without_drafting():
    """If the latency model turned drafting off, the draft's time is zero, which is no point of a curve."""
    seen = latency_of_speeds([PLAIN, ALONE], "times")
    assert of(seen) == [("alone", (128, pytest.approx(91.5 / 16)))]
    assert len(curve_tables(seen)) == 1 and not curve_tables(latency_of_speeds([ALONE], "times"))


def test_a_step_is_one_of_those_that_ran():
    """Where a latency model chose fewer than K, K says nothing about a step."""
    shown = {
        column.header: list(column.cells) for column in speed_table([DRAFTED, replace(DRAFTED, steps=3.2)]).columns
    }
    assert shown["step"] == ["1.00", ""] and shown["draft"] == ["8.00"] * 2


class Weights(CpuBackend):
    """Reads a second of weights in a target pass, and a tenth in a step of the draft."""

    def __init__(self) -> None:
        """No models."""

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        return int(BANDWIDTH * (1.0 if role is ModelRole.TARGET else 0.1))


@pytest.mark.parametrize(
    ("form", "degrees", "steps", "alone", "seconds"),
    [
        ("lockstep", (0, 1), 8, 0.0, 1.8),
        ("lockstep", (0, 1), 4.0, 0.0, 1.4),
        ("lockstep", (0, 1), 4.0, 0.25, 0.75 * 1.4 + 0.25 * 8),
        ("lockstep", (0, 1), 8, 1.0, 8.0),
        ("lookahead", (1, 1), 4.0, 0.5, 0.5 * 1.0 + 0.5 * 8),
    ],
)
def test_the_floor_is_of_the_passes_that_ran(form, degrees, steps, alone, seconds):
    mode = Mode(form, Method.EXACT, EngineConfig(form=form, block=8), 8, degrees)
    assert ModeTimer(Weights())._floor(mode, steps, alone) == pytest.approx(seconds)


def test_whole_trees_are_of_a_known_size():
    assert of(latency_of_speeds([WIDE], "always")) == [("alone", (128, pytest.approx(183.4 / 16)))]
    assert of(latency_of_speeds([DRAFTED], "always")) == [("draft", (1024, 1.0)), ("target", (9216, 46.0))]
