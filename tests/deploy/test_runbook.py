"""The runbook covers exactly the alerts, and the queries, panels and options that it names exist."""

from __future__ import annotations

import re

import pytest

from services.cli.options import keys_of
from services.cli.service_options import ServeOptions
from services.metrics import Metrics
from tests.deploy import promql
from tests.deploy.sources import BOARDS_BY_TITLE, ROOT, rules

TEXT = (ROOT / "docs/runbook.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
PARTS = ("Meaning", "Users see", "Look", "Causes", "Do")


def test_every_alert_has_a_section_and_every_section_an_alert():
    assert sorted(SECTIONS) == sorted({rule["alert"] for rule in rules("alerts.yml")})


@pytest.mark.parametrize("alert", SECTIONS)
def test_a_section_answers_the_same_questions(alert):
    assert re.findall(r"^\*\*(.+?)\.\*\*", SECTIONS[alert], re.M) == list(PARTS)
    assert any(f"*{title}*" in SECTIONS[alert] for title in BOARDS_BY_TITLE), "it names no dashboard"


def test_queries_in_it_would_answer():
    metrics = Metrics()
    metrics.set_build_info(
        "1", "big", "lookahead", "grpc", 1, block=8, weights={"draft": "", "target": ""}, placement="apart"
    )
    known, _ = promql.with_rules(promql.exported(metrics.exposition().decode()), rules("rules.yml"))
    queries = re.findall(r"```promql\n(.*?)```", TEXT, re.S)
    assert len(queries) >= len(SECTIONS)
    mistakes = [mistake for query in queries for mistake in promql.check(query, known).mistakes]
    assert not mistakes, "\n".join(mistakes)


def test_panels_that_it_names_exist():
    shown = {panel["title"] for board in BOARDS_BY_TITLE.values() for panel in board["panels"]} | set(BOARDS_BY_TITLE)
    named = set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", TEXT))
    assert len(named) > 20 and named <= shown


def test_options_in_it_exist():
    """Options exist as flags or as keys of the configuration file."""
    named = {name.strip("-") for name in re.findall(r"`(--[a-z-]+)", TEXT)} - {"prometheus", "out"}
    assert len(named) > 10 and not named - {key.name for key in keys_of(ServeOptions).values()}
