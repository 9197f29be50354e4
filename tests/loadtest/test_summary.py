"""Figures of hand-made records, for which every number is known."""

from __future__ import annotations

import pytest

from loadtest.slo import LatencyObjective
from loadtest.summary import LatencySpread, summarise
from smc.api.request import Statistics
from tests.loadtest.made import record

A = record(
    *(1.0, (1.2, 1.5, 2.2), (1, 3, 2), 2.2),
    index=1,
    prompt_tokens=10,
    statistics=Statistics(8, rounds=4, resamples=1, mean_ess=4.0),
)
B = record(2.0, (2.4,), (1,), 2.5, index=2, prompt_tokens=20)
REFUSED = record(2.5, code="RESOURCE_EXHAUSTED", end=2.6, index=3)
CANCELLED = record(2.0, (2.1,), (4,), 3.0, code="CANCELLED", cancelled=True, index=4)
SLOW = record(
    *(1.5, (1.6, 9.0), (1, 1), 9.0),
    pause=1.0,
    index=5,
    prompt_tokens=5,
    statistics=Statistics(4, rounds=2, mean_ess=4.0),
)
WARM_UP = record(0.0, (5.0,), (50,), 5.0, counted=False)
ALL = [A, B, REFUSED, CANCELLED, SLOW, WARM_UP]


def test_one_request():
    assert A.ttft == pytest.approx(0.2) and A.e2el == pytest.approx(1.2) and A.tokens == 6
    assert A.itls == pytest.approx([0.3, 0.7])
    assert A.tpot == pytest.approx((1.2 - 0.2) / 5)
    assert B.tpot == 0.0 and B.itls == []
    assert REFUSED.ttft is None and REFUSED.failed and not CANCELLED.failed
    assert record(3.0, late=0.25).lateness == 0.25


def test_spread():
    spread = LatencySpread.of(second / 1000 for second in range(101))
    assert (spread.count, spread.mean, spread.median) == (101, pytest.approx(50), pytest.approx(50))
    assert spread.std == pytest.approx(((101**2 - 1) / 12) ** 0.5)
    assert spread.percentiles == pytest.approx({50: 50, 90: 90, 95: 95, 99: 99})
    assert LatencySpread.of([]).percentiles[99] == 0.0


def test_counted_requests():
    """The warm-up counts nowhere, latencies only for clients that read and waited, tokens for all answers."""
    summary = summarise(ALL, None)
    assert (summary.sent, summary.completed, summary.cancelled, summary.failed, summary.ordinary) == (5, 3, 1, 1, 3)
    assert (summary.input_tokens, summary.output_tokens) == (35, 9)
    assert summary.codes == {"OK": 3, "RESOURCE_EXHAUSTED": 1, "CANCELLED": 1} and summary.finish_reasons == {"eos": 3}
    assert summary.duration == pytest.approx(8.0) and summary.sending == pytest.approx(1.5) and summary.last_send == 2.5
    assert summary.send_rate == pytest.approx(5 / 1.5)
    assert summary.request_throughput == pytest.approx(3 / 8) and summary.output_throughput == pytest.approx(9 / 8)
    assert summary.total_token_throughput == pytest.approx(44 / 8)
    assert (summary.ttft.count, summary.tpot.count, summary.itl.count, summary.e2el.count) == (2, 1, 2, 2)
    assert (
        summary.ttft.mean == pytest.approx(300)
        and summary.itl.mean == pytest.approx(500)
        and summary.tpot.mean == pytest.approx(200)
    )
    assert (summary.rounds, summary.resamples, summary.ess_share) == (3.0, 0.5, 0.75)
    assert summary.peak_concurrent == 5
    assert summary.goodput is None and summary.attainment is None and not summary.late


def test_exact_answers_do_not_count_for_smc():
    """They have statistics as well, with rounds and without an effective sample size."""
    exact = record(2.0, (2.4,), (1,), 2.5, method="exact", statistics=Statistics(8, rounds=40))
    summary = summarise([*ALL, exact], None)
    assert summary.completed == 4 and (summary.rounds, summary.resamples, summary.ess_share) == (3.0, 0.5, 0.75)


@pytest.mark.parametrize(
    ("objective", "good"),
    [("ttft:1000", 2), ("ttft:250", 1), ("ttft:250 e2el:1000", 0), ("tpot:150", 1), ("tpot:201,ttft:401,e2el:1201", 2)],
)
def test_goodput(objective, good):
    """Of three ordinary requests, one was refused and meets no objective. An answer of one token has no time per output
    token, so it cannot miss that objective."""
    summary = summarise(ALL, LatencyObjective.read(objective))
    assert summary.good == good
    assert summary.attainment == pytest.approx(good / 3) and summary.goodput == pytest.approx(good / 8)
    assert summary.good_of_sent == pytest.approx(good / 1.5)


def test_a_late_generator_is_seen():
    assert summarise([record(1.0, late=0.06)], None).late
    assert not summarise([record(1.0, late=0.04)], None).late


def test_nothing_was_sent():
    summary = summarise([WARM_UP], LatencyObjective.read("ttft:1"))
    assert (summary.sent, summary.duration, summary.send_rate, summary.goodput, summary.attainment) == (
        0,
        0.0,
        0.0,
        0.0,
        None,
    )


@pytest.mark.parametrize("words", ["", "ttft", "ttft:0", "ttft:x", "itl:5", "ttft:5 ttft:6", "e2el:inf"])
def test_objectives_that_cannot_be(words):
    with pytest.raises(ValueError, match="--goodput"):
        LatencyObjective.read(words)
