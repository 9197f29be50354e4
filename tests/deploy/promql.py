"""Checks PromQL expressions against the metrics, labels and label values that a service exports. Does not know which
files the expressions are in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import promql_parser as ast
from prometheus_client.parser import text_string_to_metric_families

SCRAPER = {"job", "instance", "namespace", "pod"}
"""Labels that the scraper adds to every series."""
GIVEN = {"up": {}}
"""Metrics that Prometheus itself adds."""

Labels = dict[str, set[str]]
"""Label -> its values."""
Exported = dict[str, Labels]
"""Metric -> its labels."""


def exported(exposition: str) -> Exported:
    """Return every series of a metrics page, by the names that queries use (`.._bucket`, `.._total`)."""
    found: Exported = {name: dict(labels) for name, labels in GIVEN.items()}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@dataclass(frozen=True)
class Checked:
    """The labels and metrics of an expression, and its mistakes."""

    labels: Labels
    """Labels of the result, without those of the scraper."""
    metrics: set[str]
    mistakes: list[str]


def check(text: str, known: Exported) -> Checked:
    """Check an expression. Raises ValueError if it is not PromQL."""
    mistakes: list[str] = []
    metrics: set[str] = set()
    labels = _labels(ast.parse(text), known, metrics, mistakes)
    return Checked(labels, metrics, [f"{mistake}, in {text.strip()}" for mistake in mistakes])


def check_legend(text: str, labels: Labels) -> list[str]:
    """Check that the result has the labels of a legend `{{label}}`, or `{{ $labels.label }}` of an alert."""
    named = re.findall(r"{{(\w+)}}|\$labels\.(\w+)", text)
    return [
        f"no label {a or b} to show in {text!r}" for a, b in named if (a or b) not in labels and (a or b) not in SCRAPER
    ]


def with_rules(known: Exported, rules: Iterable[Mapping]) -> tuple[Exported, list[Checked]]:
    """Return `known` with the metrics that the recording rules add, in order, and the checks of the rules."""
    known, checked = dict(known), []
    for rule in rules:
        found = check(rule["expr"], known)
        checked.append(found)
        labels = known.setdefault(rule["record"], {})
        for label, values in (found.labels | {name: {value} for name, value in rule.get("labels", {}).items()}).items():
            labels[label] = labels.get(label, set()) | values
    return known, checked


def _labels(node: ast.Expr, known: Exported, metrics: set[str], mistakes: list[str]) -> Labels:
    if isinstance(node, ast.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, ast.VectorSelector):
        metrics.add(node.name)
        if node.name not in known:
            mistakes.append(f"no metric {node.name}")
            return {}
        mistakes += _wrong_matchers(node, known[node.name])
        return known[node.name]
    below: Labels = {}
    for child in _children(node):
        for label, values in _labels(child, known, metrics, mistakes).items():
            below[label] = below.get(label, set()) | values
    named = list(_named(node))
    mistakes += [
        f"no label {label} to group or match by" for label in named if label not in below and label not in SCRAPER
    ]
    if isinstance(node, ast.AggregateExpr):
        return {label: below[label] for label in named if label in below}
    return below


def _wrong_matchers(selector: ast.VectorSelector, labels: Labels) -> Iterator[str]:
    for matcher in selector.matchers.matchers:
        if matcher.name in SCRAPER:
            continue
        if matcher.name not in labels:
            yield f"{selector.name} has no label {matcher.name}"
            continue
        regular = matcher.op in (ast.MatchOp.Re, ast.MatchOp.NotRe)
        for value in matcher.value.split("|") if regular else [matcher.value]:
            if value not in labels[matcher.name]:
                yield f"{selector.name} has no {matcher.name}={value!r}, only {', '.join(sorted(labels[matcher.name]))}"


def _children(node: ast.Expr) -> list[ast.Expr]:
    if isinstance(node, ast.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, ast.Call):
        return node.args
    return [node.expr] if hasattr(node, "expr") else []


def _named(node: ast.Expr) -> Iterator[str]:
    """Yield the labels that a node itself names."""
    modifier = getattr(node, "modifier", None)
    if modifier is None:
        return
    if isinstance(node, ast.AggregateExpr):
        assert modifier.type is ast.AggModifierType.By, "`without` keeps labels nobody has counted; use `by`"
        yield from modifier.labels
    else:
        yield from modifier.matching.labels if modifier.matching else ()
        yield from modifier.group_labels or ()
