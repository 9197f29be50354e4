"""The search for capacity, against services whose behaviour is a function of the rate."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from loadtest import runner
from loadtest.report import capacity_sentence, capacity_warnings
from loadtest.runner import CapacityFound, CapacityProbe, UnhealthyService, search
from loadtest.settings import LoadSettings
from tests.loadtest.made import SITE, made_run, record


def find(limit: float, start: float, precision: float = 0.1) -> CapacityFound:
    async def probe(rate: float) -> CapacityProbe:
        return CapacityProbe(rate, rate <= limit, 1.0 if rate <= limit else 0.1, min(rate, limit), 1.0, 2.0, 10)

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
        "Capacity: 4 requests/s (ttft:500). Bracket: 4 requests/s meet it, 5.66 do not. "
        "At this rate: 4 good requests/s, 100.0% of the requests."
    )


def test_a_probe_that_was_late_is_made_once_more():
    """At 2/s the generator is late once, so the probe is discarded and repeated. At 4/s it is late both times, which
    the report says."""
    tried: list[float] = []

    async def probe(rate: float) -> CapacityProbe:
        tried.append(rate)
        late = (rate == 2 and tried.count(2) == 1) or rate == 4
        return CapacityProbe(rate, rate < 4 and not late, 1.0, rate, 1.0, 2.0, 10, late=late)

    found = asyncio.run(search(probe, 1.0, 1.0))
    assert tried == [1, 2, 2, 4, 4] == [each.rate for each in found.probes]
    assert (found.low, found.high) == (2, 4) and not found.best.late
    assert len(capacity_warnings(found)) == 1 and "late at 4 requests/s" in capacity_warnings(found)[0]


def test_what_was_found_before_the_service_broke():
    async def probe(rate: float) -> CapacityProbe:
        if rate > 5:
            raise UnhealthyService(f"at {rate:g} requests/s: errors: failed: 1 INTERNAL")
        return CapacityProbe(rate, True, 1.0, rate, 1.0, 2.0, 10)

    found = asyncio.run(search(probe, 1.0, 0.1))
    assert (found.low, found.high, len(found.probes)) == (4, None, 3)
    assert capacity_sentence(found, "ttft:1") == (
        "The search ended early: at 8 requests/s: errors: failed: 1 INTERNAL. "
        "Highest rate that met the objective (ttft:1): 4 requests/s."
    )


@pytest.mark.parametrize(("code", "low", "failure"), [("DEADLINE_EXCEEDED", 2.0, False), ("UNAVAILABLE", None, True)])
def test_a_search_that_starts_too_high_goes_down(monkeypatch, code, low, failure):
    """Above 3/s, no request is answered. If requests miss their deadline, the load explains it; if the service is
    unavailable, the search fails."""

    async def run_once(site, settings, watch):
        if settings.rate > 3:
            return made_run([record(at, code=code) for at in range(9)], goodput="ttft:1000", rate=settings.rate)
        return made_run([record(at, (at + 0.1,), (1,)) for at in range(9)], goodput="ttft:1000", rate=settings.rate)

    monkeypatch.setattr(runner, "run_once", run_once)
    settings = LoadSettings.of({"rate": 8.0, "duration": 1.0, "goodput": "ttft:1000"}, {})
    found, run = asyncio.run(runner.find_capacity(SITE, settings, 1.0, nullcontext, lambda probe: None))
    assert found.low == low and bool(found.failure) is failure and (run is None) is (low is None)
