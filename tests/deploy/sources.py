"""Loads the files of deploy/prometheus and deploy/grafana."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = ROOT / "deploy/prometheus", ROOT / "deploy/grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
CASES = sorted((PROMETHEUS / "tests").glob("*.yml"))
VARIABLES = {"$__rate_interval": "1m", "$namespace": ".*", "$job": ".*"}


def rules(file: str) -> list[dict]:
    """Return the rules of all groups of `rules.yml` or `alerts.yml`."""
    return [rule for group in yaml.safe_load((PROMETHEUS / file).read_text())["groups"] for rule in group["rules"]]


def dashboards() -> dict[str, dict]:
    """Return all dashboards by file name."""
    return {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}


def panels(dashboard: dict) -> list[dict]:
    """Return a dashboard's panels without rows, which are headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets() -> Iterator[tuple[str, dict]]:
    """Yield every query of every dashboard, with its location."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield f"{name}, {panel['title']}", target


def filled(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


BOARDS_BY_TITLE = {board["title"].removeprefix("smcserve / "): board for board in dashboards().values()}
