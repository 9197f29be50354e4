"""Progress of a run without a terminal: log lines, a summary and metrics."""

from __future__ import annotations

import io
import re
import urllib.request

import pytest
from rich.console import Console

from services.batch import progress
from services.batch.output_file import Survey
from services.batch.progress import BatchProgress, Counts, Display

ANSWER = {"error": None, "response": {"body": {"usage": {"completion_tokens": 50}}}}
FAILED = {"error": {"code": "invalid"}}


def test_a_line_every_few_seconds_and_a_summary(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=400)
    tally, display = BatchProgress(Survey(total=1000, done=200, failed=1)), Display(console)
    tally.start()
    with display.showing(tally):
        for record in [ANSWER] * 100 + [FAILED]:
            now[0] += 0.125
            tally.add(Counts.of(record))
            display.update(tally)
    said = console.file.getvalue().splitlines()
    assert len(said) == 2
    assert said[0] == ("240 of 1,000 lines, 1 failed, 8.0 lines/s, 2,000 tokens, 400 tok/s, about 1 min 35 s left")
    assert (
        tally.summary() == "301 of 1,000 lines done, 200 by earlier runs, 2 failed, 8.0 lines/s, 5,000 tokens, "
        "396 tok/s in 12.6 s"
    )
    assert tally.all_failed == 2


def test_metrics():
    """The metrics of a run while it is in progress."""
    console = Console(file=io.StringIO(), force_terminal=False, width=400)
    run, display = BatchProgress(Survey(total=10, done=2, failed=1)), Display(console)
    with display.serving(0, "127.0.0.1"):
        port = int(re.search(r"metrics on 127.0.0.1:(\d+)", console.file.getvalue())[1])
        display.worker_groups(starting=1, ready=2)
        run.start()
        run.add(Counts(2, 1, 50))
        run.expect(Counts(1, 0, 7))
        display.update(run)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        with pytest.raises(OSError, match="give another metrics port"), Display(console).serving(port, "127.0.0.1"):
            pass
    for sample in (
        'smc_batch_lines{result="answered"} 3.0',
        'smc_batch_lines{result="failed"} 2.0',
        "smc_batch_lines_left 5.0",
        "smc_batch_generation_tokens_total 57.0",
        'smc_batch_worker_groups{state="ready"} 2.0',
        "smc_batch_left_seconds ",
    ):
        assert sample in page
    assert console.file.getvalue().count("\n") == 1
    run.expect(Counts())
    display.update(run)  # a worker group was lost: counters do not decrease


def test_copied_records_do_not_count_in_rate(monkeypatch):
    """Records copied from an earlier output count as done, but not towards the rate and the time left."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    run = BatchProgress(Survey(total=10, done=2, failed=0), is_estimate=True)
    run.start()
    now[0] += 10
    run.add(Counts.of(ANSWER), is_new=False)
    assert (run.done, run.lines_a_second, run.seconds_left) == (3, 0.0, None)
    run.add(Counts.of(ANSWER))
    assert run.lines_a_second == 0.1 and run.seconds_left == 60 and run.goal == "about 10 lines"
    run.expect(Counts(), total=3)
    assert run.goal == "about 4 lines"
