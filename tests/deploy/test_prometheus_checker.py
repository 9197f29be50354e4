"""The checker of expressions finds every mistake below; on a dashboard, each would show an empty panel without any
error."""

from __future__ import annotations

import pytest

from tests.deploy import promql

PAGE = """
# TYPE smc_requests_total counter
smc_requests_total{status="OK",finish_reason="eos"} 3
smc_requests_total{status="INTERNAL",finish_reason="none"} 0
# TYPE smc_round_seconds histogram
smc_round_seconds_bucket{le="0.5"} 1
smc_round_seconds_bucket{le="+Inf"} 2
smc_round_seconds_count 2
smc_round_seconds_sum 0.7
# TYPE smc_requests_running gauge
smc_requests_running 2
"""
KNOWN, _ = promql.with_rules(
    promql.exported(PAGE),
    [
        {
            "record": "job:smc_requests:rate5m",
            "labels": {"slo": "a"},
            "expr": "sum by (job, status) (rate(smc_requests_total[5m]))",
        }
    ],
)


@pytest.mark.parametrize(
    "expr",
    [
        'sum by (namespace, status) (rate(smc_requests_total{status=~"OK|INTERNAL", pod="x"}[5m])) > 0',
        "histogram_quantile(0.9, sum by (le) (rate(smc_round_seconds_bucket[1m])))",
        'job:smc_requests:rate5m{status="OK", slo="a"} / on (job) group_left () sum by (job) (smc_requests_running)',
        "up == 0 and on (job, instance) absent(last_over_time(smc_requests_running[6h]))",
    ],
)
def test_what_is_right_passes(expr):
    assert promql.check(expr, KNOWN).mistakes == []


@pytest.mark.parametrize(
    ("expr", "mistake"),
    [
        ("rate(smc_request_total[5m])", "no metric smc_request_total"),
        ("smc_requests_running + avg(max_over_time(smc_rounds[1m:5s]))", "no metric smc_rounds"),
        ("smc_round_seconds", "no metric smc_round_seconds"),
        ('smc_requests_total{state="OK"}', "smc_requests_total has no label state"),
        ('smc_requests_total{status="Ok"}', "smc_requests_total has no status='Ok', only INTERNAL, OK"),
        ('smc_requests_total{status=~"OK|ABORTED"}', "smc_requests_total has no status='ABORTED'"),
        ('smc_requests_total{status!~"ABORTED"}', "smc_requests_total has no status='ABORTED'"),
        ('smc_round_seconds_bucket{le="0.4"}', "smc_round_seconds_bucket has no le='0.4'"),
        ("sum by (state) (smc_requests_total)", "no label state to group or match by"),
        ("sum by (le) (sum by (job) (smc_round_seconds_bucket))", "no label le to group or match by"),
        ("smc_requests_running / on (status) smc_round_seconds_sum", "no label status to group or match by"),
        ('job:smc_requests:rate5m{finish_reason="eos"}', "job:smc_requests:rate5m has no label finish_reason"),
        ('job:smc_requests:rate5m{slo="b"}', "job:smc_requests:rate5m has no slo='b', only a"),
        ("job:smc_requests:rate1h", "no metric job:smc_requests:rate1h"),
    ],
)
def test_what_is_wrong_is_found(expr, mistake):
    (found,) = promql.check(expr, KNOWN).mistakes
    assert found.startswith(mistake)


def test_a_legend_shows_labels_that_are_there():
    labels = promql.check("sum by (status) (smc_requests_total)", KNOWN).labels
    assert promql.check_legend("{{status}} of {{instance}}", labels) == []
    assert promql.check_legend("{{finish_reason}}", labels) == ["no label finish_reason to show in '{{finish_reason}}'"]
    assert promql.check_legend("{{ $labels.group }}", labels) == ["no label group to show in '{{ $labels.group }}'"]


def test_what_is_no_promql_is_refused():
    with pytest.raises(ValueError):
        promql.check("sum by (status (smc_requests_total)", KNOWN)
