"""The search for capacity, against services that are a function of the rate."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.capacity import Capacity, Probe, search
from loadtest.show import capacity_sentence


def find(limit: float, start: float, precision: float = 0.1) -> Capacity:
    async def probe(rate: float) -> Probe:
        return Probe(rate, rate <= limit, 1.0 if rate <= limit else 0.1, min(rate, limit), 1.0, 2.0, 10)

    return asyncio.run(search(probe, start, precision))


@pytest.mark.parametrize("limit", [0.3, 1.0, 4.7, 100.0])
@pytest.mark.parametrize("start", [0.5, 1.0, 64.0])
@pytest.mark.parametrize("precision", [0.02, 0.1, 1.0])
def test_the_bracket_holds_the_limit_and_is_tight(limit, start, precision):
    found = find(limit, start, precision)
    assert found.low <= limit < found.high <= found.low * (1 + precision) * (1 + 1e-12)
    assert found.best.rate == found.low and found.best.met
    assert len(found.probes) < 22


def test_doubling_then_halving():
    assert [probe.rate for probe in find(5.0, 1.0, 0.5).probes] == pytest.approx([1, 2, 4, 8, 4 * 2**0.5])
    assert [probe.rate for probe in find(5.0, 16.0, 1.0).probes] == [16, 8, 4]


def test_no_rate_is_low_enough():
    found = find(0.0, 1.0)
    assert found.low is None and found.best is None and len(found.probes) == 20
    assert "No rate meets the objective (ttft:1): the lowest tried is" in capacity_sentence(found, "ttft:1")


def test_no_rate_is_too_high():
    found = find(float("inf"), 1.0)
    assert found.high is None and found.low == 2.0**19


def test_the_answer_and_its_bracket():
    assert capacity_sentence(find(5.0, 1.0, 0.5), "ttft:500") == (
        "Capacity: 4 requests/s (ttft:500). Bracket: 4 requests/s meet it, 5.66 do not. There: 4 good requests/s, 100.0% of the requests."
    )
