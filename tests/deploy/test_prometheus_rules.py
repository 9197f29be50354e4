"""The rule files: checked by Prometheus' own tools; every alert is explained, and tested both firing and not firing."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml

from tests.deploy.binaries import binary
from tests.deploy.sources import CASES, PROMETHEUS, rules

ALERTS = rules("alerts.yml")


def promtool(*arguments: object) -> str:
    """With the garbage collector's usual goal, promtool spends a quarter of its time on it."""
    environment = os.environ | {"GOGC": "400"}
    ran = subprocess.run([binary("promtool"), *map(str, arguments)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_promtool_accepts_rules_and_configuration():
    promtool("check", "rules", PROMETHEUS / "rules.yml", PROMETHEUS / "alerts.yml")
    assert "2 rule files found" in promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize(
    "case",
    # Cases over hours and days take several times as long as all others together.
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in ("objectives", "life", "particles") else ())
        for path in CASES
    ],
    ids=lambda path: path.stem,
)
def test_alerts_fire_when_they_should(case):
    promtool("test", "rules", case)


def test_a_case_can_fail(tmp_path):
    text = (PROMETHEUS / "tests/load.yml").read_text().replace("../", f"{PROMETHEUS}/").replace("0+1x60", "0+0x60")
    (tmp_path / "wrong.yml").write_text(text)
    with pytest.raises(AssertionError, match="SmcQueueFull"):
        promtool("test", "rules", tmp_path / "wrong.yml")


def test_every_alert_is_seen_firing_and_not_firing():
    """The severity distinguishes an alert from its slower variant of the same name."""
    firing, silent = set(), set()
    every = {(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS}
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("alert_rule_test", []):
                name = case["alertname"]
                seen = {(name, alert["exp_labels"]["severity"]) for alert in case["exp_alerts"]}
                firing |= seen
                silent |= {alert for alert in every if alert[0] == name} - seen
    assert firing == every
    assert silent == every


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_an_alert_says_what_it_must(rule):
    assert rule["labels"] == {"severity": rule["labels"]["severity"]} and rule["labels"]["severity"] in (
        "critical",
        "warning",
    )
    assert rule["for"]
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert notes["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert "$value" in notes["description"] or "$labels" in notes["description"] or rule["alert"] == "SmcMetricsAbsent"


def test_recorded_names_tell_their_level_metric_and_operation():
    for rule in rules("rules.yml"):
        level, _, _ = rule["record"].split(":")
        levels = {tuple(text.split(", ")) for text in re.findall(r"by \(([^)]*)\)", rule["expr"])}
        assert len(levels) == 1
        (labels,) = levels
        assert labels[:2] == ("namespace", "job"), "two releases would mix"
        assert level.split("_") == [*labels, *rule.get("labels", {})]
