"""Checks of hand-made runs: each passes good runs, fails bad ones, and says if it cannot decide."""

from __future__ import annotations

import pytest

from loadtest.checks import overwhelmed
from loadtest.monitor import ProcessUsage, ServerSample
from loadtest.report import headline
from tests.loadtest.made import QUIET, made_run, record

MIB = 1 << 20
GOOD = [record(at, (at + 0.1, at + 0.2), (1, 1)) for at in range(30)]
SLOW = [record(at, (at + 3.0,), (1,)) for at in range(30)]
REFUSED = [record(at + 0.5, code="RESOURCE_EXHAUSTED") for at in range(30)]
OVERLOAD = {"rate": 3.0, "capacity": 1.0, "goodput": "ttft:1000"}
FLAT = [
    ServerSample(
        float(at), 8, 4, {}, {"gateway": ProcessUsage(300 * MIB, 40, 60), "ray": ProcessUsage(at * 100 * MIB, at)}
    )
    for at in range(30)
]


def passed(run) -> dict[str, bool | None]:
    return {check.name: check.passed for check in run.checks}


def test_an_objective_is_met_by_enough_requests():
    assert passed(made_run(GOOD, goodput="ttft:1000"))["objective"] is True
    assert passed(made_run(GOOD + SLOW, goodput="ttft:1000"))["objective"] is False
    assert passed(made_run(GOOD + SLOW, goodput="ttft:1000", attainment=0.5))["objective"] is True
    assert "objective" not in passed(made_run(GOOD))
    assert "was met" in headline(made_run(GOOD, goodput="ttft:1000"))
    assert "no objective" in headline(made_run(GOOD))


@pytest.mark.parametrize(("code", "good"), [("INTERNAL", False), ("UNKNOWN", False), ("RESOURCE_EXHAUSTED", True)])
def test_errors_that_no_load_excuses(code, good):
    run = made_run([*GOOD, record(5.0, code=code)])
    assert run.good is good and (f"1 {code}" in headline(run)) is not good


def test_a_service_that_answers_nobody():
    assert passed(made_run(REFUSED))["errors"] is False


@pytest.mark.parametrize(
    ("after", "failing"),
    [
        (QUIET, set()),
        (ServerSample(1.0, 1, 0), {"after the run"}),
        (ServerSample(1.0, 0, 2), {"after the run"}),
        (ServerSample(1.0, error="UNAVAILABLE: gone"), {"after the run"}),
        (ServerSample(1.0, 0, 0, incarnation=2), {"no worker was lost"}),
        (ServerSample(1.0, 0, 0, {'smc_kv_pages_leaked{group="target"}': 3.0}), {"KV pages leaked"}),
    ],
)
def test_what_is_left_behind(after, failing):
    assert {name for name, good in passed(made_run(GOOD, after=after)).items() if good is False} == failing


def test_without_metrics_pages_are_not_measured():
    run = made_run(GOOD, after=ServerSample(1.0, 0, 0))
    assert passed(run)["KV pages leaked"] is None and run.good


def test_overload_that_the_service_withstands():
    run = made_run(GOOD + REFUSED, FLAT, **OVERLOAD)
    assert run.good and passed(run) == {
        "errors": True,
        "no worker was lost": True,
        "goodput under overload": True,
        "queue bounded": True,
        "answered or refused": True,
        "memory flat: gateway": True,
        "after the run": True,
        "KV pages leaked": True,
    }
    assert (
        headline(run) == "The service withstood overload: at 2.03 requests/s, 2 times its capacity of 1, "
        "1.02 requests/s met the objective."
    )


def test_overload_in_which_answers_come_too_late():
    run = made_run(GOOD[:20] + SLOW[20:] + REFUSED, FLAT, **OVERLOAD)
    assert passed(run)["goodput under overload"] is False and "at least 80% is required" in headline(run)


def test_one_straggler_changes_neither_goodput_nor_what_was_offered():
    steady = [record(at / 10, (at / 10 + 0.1,), (1,)) for at in range(600)]
    alone = made_run(steady, **OVERLOAD | {"rate": 30.0, "capacity": 10.0})
    straggler = made_run([*steady, record(59.9, (60.0,), (1,), 110.0)], **OVERLOAD | {"rate": 30.0, "capacity": 10.0})
    assert passed(alone)["goodput under overload"] is passed(straggler)["goodput under overload"] is True
    assert straggler.summary.send_rate == pytest.approx(10.0, rel=0.01)
    assert straggler.summary.goodput == pytest.approx(601 / 110)


def test_workers_that_were_lost_under_overload():
    lost = [record(at + 0.7, code="UNAVAILABLE") for at in range(3)]
    run = made_run(GOOD + REFUSED + lost, FLAT, ServerSample(100.0, 0, 0, incarnation=3), **OVERLOAD)
    texts = {check.name: check.text for check in run.checks}
    assert not run.good and "no worker was lost: incarnation 1 before, 3 after" in headline(run)
    assert texts["answered or refused"] == "30 answered; refused: 30 RESOURCE_EXHAUSTED, 3 UNAVAILABLE"


@pytest.mark.parametrize(
    ("codes", "load_alone"),
    [
        (["RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"], True),
        (["DEADLINE_EXCEEDED", "OK"], False),
        (["DEADLINE_EXCEEDED", "UNAVAILABLE"], False),
        (["DEADLINE_EXCEEDED", "INTERNAL"], False),
    ],
)
def test_a_load_that_nobody_gets_an_answer_under(codes, load_alone):
    assert overwhelmed(made_run([record(code=code) for code in codes]).summary) is load_alone


def test_a_request_that_is_neither_answered_nor_refused():
    assert (
        passed(made_run([*GOOD, record(5.0, code="DEADLINE_EXCEEDED")], FLAT, **OVERLOAD))["answered or refused"]
        is False
    )


def test_a_queue_that_grows():
    growing = [ServerSample(float(at), 8, 3 * at, {}, {"gateway": ProcessUsage(300 * MIB)}) for at in range(30)]
    filling = [
        ServerSample(float(at), 8, min(3 * at, 16), {}, {"gateway": ProcessUsage(300 * MIB)}) for at in range(30)
    ]
    assert passed(made_run(GOOD, growing, **OVERLOAD))["queue bounded"] is False
    assert passed(made_run(GOOD, filling, **OVERLOAD))["queue bounded"] is True
    assert passed(made_run(GOOD, growing[:5], **OVERLOAD))["queue bounded"] is None


def test_what_comes_after_the_last_send_hides_no_growth():
    """After the last request was sent the queue drains and memory is returned; the growth before must still be
    found."""
    growing = [ServerSample(float(at), 8, at, {}, {"rank 1": ProcessUsage((300 + at) * MIB)}) for at in range(30)]
    tail = [
        ServerSample(30.0 + at, 8, max(0, 30 - 3 * at), {}, {"rank 1": ProcessUsage(300 * MIB)}) for at in range(20)
    ]
    run = made_run(GOOD, growing + tail, **OVERLOAD)
    assert passed(run)["queue bounded"] is False and passed(run)["memory flat: rank 1"] is False


@pytest.mark.parametrize(("mib_a_second", "flat"), [(0.0, True), (0.3, True), (1.0, False)])
def test_memory_that_grows(mib_a_second, flat):
    """8 MiB of growth are allowed over the last two thirds of a run. If processes cannot be watched, the gateway's
    metrics are used."""
    sizes = [(300 + 100 * (at < 3) + mib_a_second * at) * MIB for at in range(30)]
    watched = [ServerSample(float(at), 0, 0, {}, {"rank 1": ProcessUsage(int(size))}) for at, size in enumerate(sizes)]
    scraped = [ServerSample(float(at), 0, 0, {"process_resident_memory_bytes": size}) for at, size in enumerate(sizes)]
    assert passed(made_run(GOOD, watched, **OVERLOAD))["memory flat: rank 1"] is flat
    assert passed(made_run(GOOD, scraped, **OVERLOAD))["memory flat: gateway"] is flat


def test_overload_that_was_not_watched():
    run = made_run(GOOD, **OVERLOAD)
    assert passed(run)["memory flat"] is None and "Not measured: queue bounded, memory flat" in headline(run)


@pytest.mark.parametrize(("threads", "files"), [(0, 0), (1, 0), (0, 1)])
def test_threads_and_files_that_grow(threads, files):
    growing = [
        ServerSample(float(at), 8, 4, {}, {"rank 1": ProcessUsage(300 * MIB, 40 + threads * at, 60 + files * at)})
        for at in range(30)
    ]
    found = passed(made_run(GOOD, growing, flat=True))
    assert (found["threads flat: rank 1"], found["files flat: rank 1"], found["memory flat: rank 1"]) == (
        not threads,
        not files,
        True,
    )


def test_processes_that_were_not_watched_and_a_run_that_is_too_short():
    unwatched = [ServerSample(float(at), 8, 4) for at in range(30)]
    failed = [ServerSample(float(at), error="UNAVAILABLE: gone") for at in range(5, 30)]
    for samples, needed, idle in (
        (unwatched, "--watch-pid", "--duration"),
        (FLAT[:5], "--duration", "--watch-pid"),
        ([*FLAT[:5], *failed], "--duration", "--watch-pid"),
    ):
        check = next(check for check in made_run(GOOD, samples, flat=True).checks if check.name.startswith("threads"))
        assert check.passed is None and needed in check.text and idle not in check.text
