"""What a run says of itself where nobody watches."""

from __future__ import annotations

import io

from rich.console import Console

from services.batch import progress
from services.batch.output_file import Survey
from services.batch.progress import BatchProgress, Display

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
            tally.count(record)
            display.update(tally)
    said = console.file.getvalue().splitlines()
    assert len(said) == 2
    assert said[0] == ("240 of 1,000 lines, 1 failed, 8.0 lines/s, 2,000 tokens, 400 tok/s, about 1 min 35 s left")
    assert (
        tally.summary() == "301 of 1,000 lines done, 200 by earlier runs, 2 failed, 8.0 lines/s, 5,000 tokens, "
        "396 tok/s in 12.6 s"
    )
    assert tally.all_failed == 2
