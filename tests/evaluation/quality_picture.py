"""docs/quality.png from docs/quality.json: `python -m tests.evaluation.quality_picture docs/quality.png`.

All that was timed at the large size at temperature 1: look-ahead and the target alone on two GPUs, lockstep on one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from smc.evaluation.picture import draw
from smc.evaluation.quality import Row
from smc.evaluation.record import Record

RECORDS = Path(__file__).parents[2] / "docs" / "quality.json"


def timed_rows() -> tuple[list[Row], str]:
    """And what they were measured with, in words."""
    records = [
        one
        for one in json.loads(RECORDS.read_text())
        if (one["conditions"]["load"], one["conditions"]["temperature"]) == ("grown", 1)
    ]
    records.sort(key=lambda one: -one["conditions"]["gpus"])
    rows: dict[str, Row] = {}
    with TemporaryDirectory() as directory:
        for number, one in enumerate(records):
            path = Path(directory) / f"{number}.json"
            path.write_text(json.dumps(one))
            rows |= {
                name: row
                for name, row in Record.open(path, one["conditions"], resume=True).rows.items()
                if name not in rows
            }
    how = records[0]["conditions"]
    return [*rows.values()], (
        f"{how['problems']:,} held-out problems, temperature {how['temperature']:g}; the demo pair grown into {how['target']} and "
        f"{how['draft']}; {how['device_name']}, {how['dtype']}, torch {how['torch']}; "
        f"speeds of {how['speed_problems']} problems, one at a time"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    found, title = timed_rows()
    draw(found, parser.parse_args().path, title)
