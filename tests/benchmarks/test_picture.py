"""Settings that are labelled in a picture of quality, and the figures in the picture of speeds."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.reports import speed_picture
from benchmarks.reports.quality import frontier, leaders, timed_rows
from benchmarks.reports.speed_picture import Bar

ROOT = Path(__file__).parents[2]


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


def _texts(picture: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_of_speeds_shows_what_is_recorded(tmp_path):
    """docs/speed.svg is what its command draws, the shipped pair comes last, and every figure stands in a table."""
    panels = speed_picture.read()
    speed_picture.draw(panels, tmp_path / "speed.svg")
    texts = _texts(ROOT / "docs/speed.svg")
    assert texts == _texts(tmp_path / "speed.svg")
    assert {line for panel in panels for bar in panel.bars for line in bar.label.split("\n")} <= set(texts)
    assert ["toy" in panel.title for panel in panels] == [False, False, True]
    pages = "".join((ROOT / page).read_text() for page in ("docs/performance.md", "benchmarks/notes/speed.md"))
    assert [bar for panel in panels for bar in panel.bars if f"{bar.speed:,.0f}" not in pages] == []


def test_a_speed_of_smc_needs_the_share_solved():
    given = {"group": "chat", "speed": 100, "plain": 50, "commit": "0000000", "by": "bench"}
    assert Bar(kind="lockstep", **given).label == "100 (2.00x)"
    assert Bar(kind="smc", solved="distinct look-ahead N=8 K=5 F=4", **given).label == "100 (2.00x)\n74.9% solved"
    with pytest.raises(ValueError, match="share solved at the same N, K and F"):
        Bar(kind="smc", **given)
    with pytest.raises(ValueError, match="kind 'fast'; allowed: plain, plain-tp, lockstep, lookahead, smc"):
        Bar(kind="fast", **given)
