"""The parts of a round computed from hand-made spans, the trace file and its picture."""

from __future__ import annotations

import json

import pytest

from smc.scheduler.stats import Timeline, overlap

MS = 1_000_000


@pytest.mark.parametrize(
    ("interval", "others", "covered"),
    [
        ((0, 10), [], 0),
        ((0, 10), [(2, 5)], 3),
        ((0, 10), [(2, 5), (4, 8)], 6),
        ((0, 10), [(-5, 3), (9, 20)], 4),
        ((0, 10), [(20, 30), (-9, -1)], 0),
        ((0, 10), [(1, 9), (2, 3)], 8),
    ],
)
def test_overlap(interval, others, covered):
    assert overlap(interval, others) == covered


def lookahead_round(timeline: Timeline, at: int) -> None:
    """A round of 20 ms: 3 ms of building batches, both models at work from 4 ms to 14 and 16 ms, 1 ms for each way over
    the link, 3 ms of selection."""
    timeline.worked("draft", "sample", at + 4 * MS, at + 14 * MS)
    timeline.worked("target", "extend", at + 4 * MS, at + 16 * MS)
    timeline.waited(at + 3 * MS, at + 17 * MS)


def test_parts_of_a_round():
    timeline = Timeline()
    lookahead_round(timeline, 0)
    times = timeline.end_step(0, 20 * MS)
    assert times.whole == pytest.approx(0.020)
    assert (times.draft, times.target) == pytest.approx((0.010, 0.012))
    assert times.link == pytest.approx(0.002) and times.coordinator == pytest.approx(0.006)
    assert (times.draft_stall, times.target_stall) == pytest.approx((0.010, 0.008))
    assert timeline.end_step(20 * MS, 21 * MS) is None, "nothing of the round before is left"
    lookahead_round(timeline, 0)
    timeline.forget()
    assert timeline.end_step(0, 20 * MS) is None


@pytest.fixture
def trace(tmp_path):
    timeline = Timeline(trace=True)
    for i in range(3):
        lookahead_round(timeline, 20 * i * MS)
        timeline.end_step(20 * i * MS, 20 * (i + 1) * MS)
    path = tmp_path / "trace.json"
    timeline.write(path)
    return path


def test_trace(trace):
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(lanes[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert len(spans) == 3 * 4
    assert ("draft", "sample", 4000, 10000) in spans and ("target", "extend", 24000, 12000) in spans
    assert ("coordinator", "work", 0, 3000) in spans and ("coordinator", "work", 57000, 3000) in spans


@pytest.mark.slow
def test_picture(trace, tmp_path, smcserve):
    picture = tmp_path / "rounds.png"
    ran = smcserve("timeline", trace, picture, "--length", 60)
    assert ran.code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert (
        "draft        busy  50.0%" in ran.out
        and "target       busy  60.0%" in ran.out
        and "coordinator  busy  30.0%" in ran.out
    )


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ((), "{}", "is not a trace of smcserve serve --trace"),
        ((), '{"traceEvents": []}', "holds no rounds"),
        (("--length", "0"), None, "--length 0; allowed: > 0"),
        (("--begin", "1000"), None, "--begin 1000: nothing was recorded there; the trace ends 57 ms after its start"),
    ],
)
def test_mistakes(trace, tmp_path, smcserve, arguments, content, message):
    if content is not None:
        trace.write_text(content)
    ran = smcserve("timeline", trace, tmp_path / "x.png", *arguments)
    assert ran.code == 2 and message in ran.err
