"""Dashboards, rules and alerts against a running service: every metric that they name is exported, and a real
Prometheus evaluates every query to numbers."""

from __future__ import annotations

import math
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from services.client import Client, Message, ServiceError
from smc.api.constraint import Constraint
from tests.deploy import promql
from tests.deploy.observed import Prometheus
from tests.deploy.sources import dashboards, filled, rules, targets

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]

UNUSED = {
    "process_virtual_memory_bytes": "address space that is mapped, not memory that is used",
}
"""Metrics that no dashboard, rule or alert names, each with the reason."""
PATIENCE = 120.0
"""Time limit in seconds; a few seconds are enough on an idle machine."""


@pytest.fixture(scope="module")
def exposition(group) -> str:
    """The metrics page of the service after a few calls."""
    with group.client() as client:
        ask(client, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{group.service.gateway.metrics_port}/metrics") as page:
        return page.read().decode()


@pytest.fixture(scope="module")
def known(exposition) -> tuple[promql.Exported, list[promql.Checked]]:
    """The exported metrics together with those that the recording rules derive from them, and the checked rules."""
    return promql.with_rules(promql.exported(exposition), rules("rules.yml"))


@pytest.fixture(scope="module")
def prometheus(group, tmp_path_factory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the service while a caller keeps it lightly loaded."""
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{group.service.gateway.metrics_port}")
    enough = threading.Event()

    def load() -> None:
        with group.client() as client:
            seed = 0
            while not enough.wait(0.5):
                ask(client, seed := seed + 1)

    caller = threading.Thread(target=load)
    caller.start()
    try:
        yield running
    finally:
        enough.set()
        caller.join()
        running.stop()


def ask(client: Client, seed: int) -> None:
    """Make calls of every kind: SMC, exact decoding, the target alone, with a potential, with a constraint that has not
    been compiled before, and one that is refused."""
    client.generate(
        [Message("user", "How many?")], method="smc", particles=4, population="independent", seed=seed, max_tokens=6
    )
    client.generate([Message("user", "How many?")], method="exact", particles=4, seed=seed, max_tokens=6)
    client.generate([Message("user", "How many?")], method="target", seed=seed, max_tokens=4)
    client.generate(
        [Message("user", "How many?")], method="smc", particles=2, seed=seed, max_tokens=8, potential="indifferent"
    )
    client.generate([Message("user", "How many?")], constraint=Constraint("regex", f"[0-9]{{2,4}} of {seed}"))
    with pytest.raises(ServiceError):
        client.generate("x", particles=0)


def test_every_name_is_exported(known):
    exported, checked = known
    mistakes = [mistake for found in checked for mistake in found.mistakes]
    for rule in rules("alerts.yml"):
        found = promql.check(rule["expr"], exported)
        mistakes += found.mistakes
        for note in rule["annotations"].values():
            mistakes += promql.check_legend(note, found.labels)
    for place, target in targets():
        found = promql.check(filled(target["expr"]), exported)
        mistakes += [
            f"{place}: {mistake}"
            for mistake in [*found.mistakes, *promql.check_legend(target["legendFormat"], found.labels)]
        ]
    assert not mistakes, "\n".join(mistakes)


def test_variables_of_dashboards_ask_for_what_is_exported(known):
    """Dashboard variables query exported series and labels that the scraper adds."""
    for dashboard in dashboards().values():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                series, label = variable["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
                assert not promql.check(filled(series), known[0]).mistakes
                assert label in promql.SCRAPER


def test_every_metric_is_of_use(exposition, known):
    """Every exported metric outside `UNUSED` appears in a dashboard, rule or alert, and every recorded series is read
    by one."""
    exported, checked = known
    used = {name for found in checked for name in found.metrics}
    used |= {name for rule in rules("alerts.yml") for name in promql.check(rule["expr"], exported).metrics}
    used |= {name for _, target in targets() for name in promql.check(filled(target["expr"]), exported).metrics}
    families = [line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE")]
    unused = {
        family
        for family in families
        if not any(name in used for name in (family, *(f"{family}_{s}" for s in ("bucket", "sum"))))
    }
    assert unused == set(UNUSED)
    assert {rule["record"] for rule in rules("rules.yml")} <= used, "a rule records what nobody reads"


def test_every_query_has_an_answer(prometheus):
    """One after the other: most are there when the first is."""
    deadline = time.monotonic() + PATIENCE
    for place, target in targets():
        seconds = deadline - time.monotonic()
        prometheus.until(
            lambda expr=target["expr"]: has_numbers(prometheus, expr), seconds, f"{place}: {target['expr']}"
        )


def has_numbers(prometheus: Prometheus, expr: str) -> bool:
    """Whether the query has finite values within the last 20 s, as a graph would show them."""
    now = time.time()
    expr = filled(expr.replace("$__rate_interval", "5s"))
    found = prometheus.ask("query_range", query=expr, start=now - 20, end=now, step=1)["result"]
    return any(math.isfinite(float(value)) for series in found for _, value in series["values"])


def test_the_target_is_up_and_rules_work(prometheus):
    def evaluated() -> bool:
        groups = prometheus.ask("rules")["groups"]
        never = "0001-01-01T00:00:00Z"
        return all(rule["lastEvaluation"] != never for group in groups for rule in group["rules"])

    prometheus.until(lambda: has_numbers(prometheus, "up == 1"), PATIENCE, "the service was not scraped")
    prometheus.until(evaluated, PATIENCE, "not every rule was evaluated")
    found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(rules("rules.yml")) + len(rules("alerts.yml"))
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []
    for recorded in {rule["record"] for rule in rules("rules.yml")}:
        prometheus.until(lambda name=recorded: has_numbers(prometheus, name), PATIENCE, f"{recorded} was not recorded")
