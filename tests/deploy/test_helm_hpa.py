"""A HorizontalPodAutoscaler without KEDA: the metrics that it requests, and the answers of prometheus-adapter."""

from __future__ import annotations

import json
import re
import subprocess

import promql_parser
import pytest
import yaml

from services.metrics import Metrics
from tests.deploy.binaries import binary
from tests.deploy.chart import KUBERNETES, all_of_kind, check, of_kind, render
from tests.deploy.sources import PROMETHEUS

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

HPA = {"topology": "pod", "hpa": {"enabled": True}}
OWN = {
    "type": "External",
    "external": {"metric": {"name": "queue"}, "target": {"type": "AverageValue", "averageValue": "3"}},
}


def hpa(**more: object) -> dict:
    return HPA | {"hpa": {"enabled": True, **more}}


def adapter() -> dict[str, dict]:
    """Return the adapter's rules by metric name."""
    rules = yaml.safe_load((PROMETHEUS / "adapter.yml").read_text())["rules"]["custom"]
    return {rule["name"]["as"]: rule for rule in rules}


def query(name: str) -> str:
    """Return a metric's query as the adapter fills it in for the pods of a release."""
    text = adapter()[name]["metricsQuery"].replace("<<.GroupBy>>", "pod")
    return text.replace("<<.LabelMatchers>>", 'namespace="llm",pod=~"demo-1-a|demo-1-b"')


def test_it_scales_the_deployment_by_two_metrics_of_its_pods():
    objects = render(hpa(minReplicas=2, maxReplicas=5, queueTime=1.5, slotShare=0.7, cooldown=300))
    scaler, deployment = of_kind(objects, "HorizontalPodAutoscaler"), of_kind(objects, "Deployment")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert "replicas" not in deployment["spec"], "an upgrade would set them back"
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 5)
    assert scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    pods = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in scaler["spec"]["metrics"]}
    assert {name: target["averageValue"] for name, target in pods.items()} == {
        "smc_queue_seconds": "1.5",
        "smc_slot_share": "0.7",
    }
    for version in KUBERNETES:
        check(scaler, version)


def test_it_is_off_by_default_and_keeps_the_number_of_pods():
    objects = render({"topology": "pod"})
    assert not all_of_kind(objects, "HorizontalPodAutoscaler")
    assert of_kind(objects, "Deployment")["spec"]["replicas"] == 1


def test_metrics_of_ones_own_replace_both():
    scaler = of_kind(render(hpa(metrics=[OWN])), "HorizontalPodAutoscaler")
    assert scaler["spec"]["metrics"] == [OWN]
    check(scaler, KUBERNETES[-1])


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (HPA | {"keda": {"enabled": True}}, "hpa.enabled and keda.enabled are both true; choose one"),
        ({"hpa": {"enabled": True}}, "hpa.enabled=true with topology=cluster"),
        (hpa(minReplicas=5), "hpa.maxReplicas=4; allowed: at least hpa.minReplicas=5"),
        (hpa(minReplicas=0), "/hpa/minReplicas"),
        (hpa(slotShare=1.5), "/hpa/slotShare"),
        (hpa(queueTime=0), "/hpa/queueTime"),
        (hpa(queue=3), "queue"),
        (hpa(metrics=[{"pods": {}}]), "/hpa/metrics"),
        (hpa(metrics=[OWN], slotShare=0.5), "hpa.slotShare=0.5 has no effect with hpa.metrics"),
        (HPA | {"pod": {"replicas": 3}}, "use hpa.minReplicas"),
        ({"topology": "pod", "hpa": {"maxReplicas": 9}}, "hpa.maxReplicas=9 has no effect with hpa.enabled=false"),
    ],
)
def test_wrong_values_are_refused(layer, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        render(layer)


def test_the_adapter_makes_the_metrics_that_it_asks_for():
    asked = {
        each["pods"]["metric"]["name"] for each in of_kind(render(HPA), "HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    assert asked == adapter().keys()
    there = {line.split()[2] for line in Metrics().exposition().decode().splitlines() if line.startswith("# TYPE")}
    for name, rule in adapter().items():
        promql_parser.parse(query(name))
        promql_parser.parse(rule["seriesQuery"])
        read = set(re.findall(r"smc_\w+", rule["metricsQuery"] + rule["seriesQuery"]))
        assert read <= there, f"{name} reads series that the service does not have"
        assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}


def test_the_adapter_answers_for_each_pod(tmp_path):
    """One pod has a queue of 3 s and three quarters of its slots in use; the other is loading its models."""
    series = []
    for pod, queued, per_minute, free, slots, serving in (
        ("demo-1-a", 6, 120, 16, 64, 1),
        ("demo-1-b", 0, 0, 0, 0, 0),
        ("demo-x-1-c", 99, 1, 0, 64, 1),
    ):
        labels = f'{{namespace="llm",pod="{pod}"}}'
        values = {
            "smc_requests_queued": f"{queued}+0x10",
            "smc_requests_total": f"0+{per_minute}x10",
            "smc_slots_free": f"{free}+0x10",
            "smc_slots_capacity": f"{slots}+0x10",
            "smc_serving": f"{serving}+0x10",
        }
        series += [{"series": name + labels, "values": value} for name, value in values.items()]
    expected = {"smc_queue_seconds": (3, 0), "smc_slot_share": (0.75, 0)}
    asked = [
        {
            "expr": query(name),
            "eval_time": "5m",
            "exp_samples": [
                {"labels": f'{{pod="demo-1-{pod}"}}', "value": value} for pod, value in zip("ab", values, strict=True)
            ],
        }
        for name, values in expected.items()
    ]
    case = tmp_path / "case.yml"
    case.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}]}))
    ran = subprocess.run([binary("promtool"), "test", "rules", case], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
