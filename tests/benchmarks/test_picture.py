"""Settings that are labelled in a picture."""

from __future__ import annotations

from benchmarks.reports.quality import frontier, leaders, timed_rows


def test_the_frontier_and_the_best_of_all_others():
    """For docs/quality.json: no row is better than one of the frontier, every other row is worse than some row of it,
    and every kind and form has a labelled row."""
    rows, _ = timed_rows()
    points = {row.setting.name: (row.tokens_per_second, row.accuracy.share) for row in rows}
    best = frontier(rows)
    names = {row.setting.name for row in best}
    beaten = {
        name
        for name, (speed, share) in points.items()
        if any(s >= speed and a >= share and (s, a) != (speed, share) for s, a in points.values())
    }
    assert len(rows) > 30 and beaten == points.keys() - names
    kinds = {(row.setting.kind, row.setting.form) for row in rows}
    assert {(row.setting.kind, row.setting.form) for row in (*best, *leaders(rows, best))} == kinds
