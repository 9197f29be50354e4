"""The router smg in front of several replicas: the pods that it finds, its rights, and autoscaling of replicas by
load."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from services.metrics import Metrics
from tests.deploy.binaries import binary
from tests.deploy.chart import all_of_kind, of_kind, render, templates
from tests.ports import free_ports

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

ROUTER = {"topology": "pod", "router": {"enabled": True, "controlKeySecret": "control"}}
CLOSED = {"networkPolicy": {"enabled": True}}


def arguments(*layers: dict) -> list[str]:
    (container,) = templates(render(ROUTER, *layers))["router"]["spec"]["containers"]
    return container["args"]


def test_smg_understands_what_it_is_told():
    launch = pytest.importorskip("smg.launch_router", reason="smg is installed on x86-64 Linux only")
    flags = arguments({"router": {"policy": "least_load", "drainTimeout": 30, "extraArgs": ["--retry-max-retries=2"]}})
    told = launch.parse_router_args(flags)
    assert told.service_discovery and told.service_discovery_namespace == "llm"
    assert (told.backend, told.policy, told.retry_max_retries) == ("vllm", "least_load", 2)
    assert (told.port, told.prometheus_port, told.health_check_port, told.service_discovery_port) == (
        30000,
        29000,
        30001,
        50051,
    )
    assert (told.host, told.shutdown_grace_period_secs, told.worker_startup_timeout_secs) == ("0.0.0.0", 30, 600)


def test_it_finds_the_replicas_and_nothing_else():
    flags = arguments()
    begin = flags.index("--selector") + 1
    chosen = dict(flag.split("=") for flag in flags[begin : begin + 3])
    pods = {name: template["metadata"]["labels"] for name, template in templates(render(ROUTER)).items()}
    assert pods.keys() == {"replica", "router", "test"}
    assert [name for name, labels in pods.items() if chosen.items() <= labels.items()] == ["replica"]


def test_it_may_look_at_pods_and_do_nothing_else():
    objects = render(ROUTER)
    (rule,) = of_kind(objects, "Role")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    pod = templates(objects)["router"]["spec"]
    binding = of_kind(objects, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "llm"}]
    assert (
        binding["roleRef"]["name"] == of_kind(objects, "Role")["metadata"]["name"]
        and pod["automountServiceAccountToken"] is True
    )
    assert templates(objects)["replica"]["spec"]["serviceAccountName"] != pod["serviceAccountName"]


def test_its_keys_come_from_secrets():
    """They are in the environment only: arguments are in every list of processes, and in what the container runtime
    shows."""
    for layer, expected in (
        ({"apiKeySecret": ""}, {"CONTROL_KEY": "control"}),
        ({"apiKeySecret": "callers"}, {"CONTROL_KEY": "control", "API_KEY": "callers"}),
    ):
        (container,) = templates(render(ROUTER, {"router": layer}))["router"]["spec"]["containers"]
        secrets = {
            each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"] if "valueFrom" in each
        }
        assert secrets == expected
        words = " ".join([*container["command"], *container["args"]])
        assert not [name for name in ("$(CONTROL_KEY)", "$(API_KEY)") if name in words]


def test_the_router_starts_with_its_keys(tmp_path):
    """Runs the container's command: smg asks for both keys, and no process shows them among its arguments."""
    pytest.importorskip("smg.launch_router", reason="smg is installed on x86-64 Linux only")
    (container,) = templates(render(ROUTER, {"router": {"apiKeySecret": "callers"}}))["router"]["spec"]["containers"]
    tini, dashes, python, *command = container["command"]
    assert (tini, dashes, python) == ("tini", "--", "python3")
    ports = free_ports(3)
    flags = dict(zip(("--host", "--port", "--prometheus-port", "--health-check-port"), ("127.0.0.1", *ports)))
    keys = {"CONTROL_KEY": "key-of-the-control", "API_KEY": "key-of-callers"}
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--backend=vllm", *(f"{name}={value}" for name, value in flags.items())],
            env=os.environ | keys,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        shown = set()
        while status(ports[2], "/liveness", "", data=None) != 200:
            shown.add(Path(f"/proc/{process.pid}/cmdline").read_bytes())
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        shown.add(Path(f"/proc/{process.pid}/cmdline").read_bytes())
        assert not [text for text in shown for key in keys.values() if key.encode() in text]
        assert (status(ports[0], "/workers", "", None), status(ports[0], "/workers", keys["API_KEY"], None)) == (
            401,
            401,
        )
        assert status(ports[0], "/workers", keys["CONTROL_KEY"], None) == 200
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]}).encode()
        assert status(ports[0], "/v1/chat/completions", "", body) == 401
        assert status(ports[0], "/v1/chat/completions", keys["API_KEY"], body) not in (401, 403)
    finally:
        process.terminate()
        process.wait(60)
    assert not [key for key in keys.values() if key in log.read_text()]


def status(port: int, path: str, key: str, data: bytes | None) -> int:
    """Return the HTTP status of a call with this key; 0 if no process listens."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError):
        return 0


def test_routers_are_spread_over_nodes():
    """Two on one node would be lost with it. A user's own constraints replace the chart's."""
    template = templates(render(ROUTER))["router"]
    (constraint,) = template["spec"]["topologySpreadConstraints"]
    assert (constraint["topologyKey"], constraint["maxSkew"]) == ("kubernetes.io/hostname", 1)
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", "a cluster of one node has both routers"
    assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    replica = templates(render(ROUTER))["replica"]["metadata"]["labels"]
    assert not constraint["labelSelector"]["matchLabels"].items() <= replica.items(), "replicas are no routers"
    own = [{"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}]
    for layer in (
        {"router": {"podTemplate": {"topologySpreadConstraints": own}}},
        {"podTemplate": {"topologySpreadConstraints": own}},
    ):
        assert templates(render(ROUTER, layer))["router"]["spec"]["topologySpreadConstraints"] == own


def test_calls_come_to_it_and_to_the_replicas_only_from_it():
    objects = render(ROUTER, CLOSED, {"ingress": {"enabled": True, "hosts": ["llm.example"]}})
    service = all_of_kind(objects, "Service")["demo-smcserve-router"]["spec"]
    labels = templates(objects)["router"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items() and [port["port"] for port in service["ports"]] == [30000]
    ports = [
        [port["port"] for port in rule.get("ports", ())]
        for rule in of_kind(objects, "NetworkPolicy")["spec"]["ingress"]
    ]
    assert ports == [[], [30000], [9400, 29000]]
    direct = render(ROUTER, CLOSED, {"route": {"enabled": True, "kind": "GRPCRoute", "parentRefs": [{"name": "edge"}]}})
    calls = of_kind(direct, "NetworkPolicy")["spec"]["ingress"][1]["ports"]
    assert [port["port"] for port in calls] == [30000, 50051]
    (rule,) = of_kind(objects, "Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "demo-smcserve-router", "port": {"name": "http"}}
    route = {"route": {"enabled": True, "parentRefs": [{"name": "edge"}]}}
    assert of_kind(render(ROUTER, route), "GRPCRoute")["spec"]["rules"][0]["backendRefs"] == [
        {"name": "demo-smcserve", "port": 50051}
    ]
    plain = render(ROUTER, {"route": route["route"] | {"kind": "HTTPRoute"}})
    assert of_kind(plain, "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [
        {"name": "demo-smcserve-router", "port": 30000}
    ]


def test_it_ends_after_the_calls_that_it_carries():
    for drain in (0, 300):
        pod = templates(render(ROUTER, {"router": {"drainTimeout": drain}, "gateway": {"preStopDelay": 7}}))["router"][
            "spec"
        ]
        assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
        assert pod["terminationGracePeriodSeconds"] >= drain + 7 + 10
    budgets = all_of_kind(render(ROUTER), "PodDisruptionBudget")
    labels = templates(render(ROUTER))["router"]["metadata"]["labels"]
    covering = [
        name for name, each in budgets.items() if each["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ]
    assert (
        covering == ["demo-smcserve-router"]
        and budgets["demo-smcserve-router"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    )


WAITS = {
    "nobody waits": ([0, 0], [60, 60], 0),
    # 6 requests wait, 2 per second are answered: 3 s, times two replicas
    "some wait": ([6, 0], [60, 60], 6),
    "nothing is answered": ([3, 0], [0, 0], 600),
}


@pytest.mark.parametrize("case", WAITS)
def test_keda_reckons_how_long_a_request_waits(case, tmp_path):
    """Computed for two replicas from their metrics over a minute; another release whose name begins with the same
    letters does not count."""
    queued, answered, expected = WAITS[case]
    assert {"smc_requests_queued", "smc_requests", "smc_serving"} <= {
        family.name for family in Metrics().page.collect()
    }
    keda = {"topology": "pod", "keda": {"enabled": True, "queueTime": 2}}
    spec = of_kind(render(keda), "ScaledObject")["spec"]
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    wait, _ = spec["triggers"]
    assert (wait["metricType"], wait["metadata"]["threshold"]) == ("AverageValue", "2")
    series = []
    for pod, waiting, rate in [
        ("demo-smcserve-1-a", queued[0], answered[0]),
        ("demo-smcserve-1-b", queued[1], answered[1]),
        ("demo-smcserve-x-1-c", 99, 1),
    ]:
        labels = f'{{namespace="llm",pod="{pod}"}}'
        series.append({"series": f"smc_requests_queued{labels}", "values": f"{waiting}+0x10"})
        series.append({"series": f"smc_serving{labels}", "values": "1+0x10"})
        series.append({"series": f"smc_requests_total{labels}", "values": f"0+{rate}x10"})
    asked = {"expr": wait["metadata"]["query"], "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": expected}]}
    path: Path = tmp_path / "case.yml"
    path.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]}))
    ran = subprocess.run([binary("promtool"), "test", "rules", path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_alerts_of_the_router(tmp_path):
    """Three replicas of which one is lost, then another; a router that has not found any replica; and a router that has
    lost its only replica."""
    groups = all_of_kind(render(ROUTER, {"monitoring": {"rules": True}}), "PrometheusRule")["demo-smcserve-router"][
        "spec"
    ]["groups"]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": groups}))
    labels = 'namespace="llm", job="demo-smcserve-router", instance="r"'
    workers = {"a": "1x60", "b": "1x10 0x50", "c": "1x30 0x30"}
    series = [
        {"series": f'smg_worker_health{{{labels}, worker="{name}"}}', "values": values}
        for name, values in workers.items()
    ]
    running = {"series": f"smg_tokio_workers{{{labels}}}", "values": "2x60"}

    def case(series: list[dict], fires: dict[str, list[str]]) -> dict:
        tests = []
        for when, names in fires.items():
            for rule in groups[0]["rules"]:
                expected = {"exp_labels": rule["labels"] | {"namespace": "llm", "job": "demo-smcserve-router"}}
                alerts = [expected | {"exp_annotations": annotations(rule, when)}] if rule["alert"] in names else []
                tests.append({"eval_time": when, "alertname": rule["alert"], "exp_alerts": alerts})
        return {"interval": "1m", "input_series": [*series, running], "alert_rule_test": tests}

    def annotations(rule: dict, when: str) -> dict:
        lost = {"25m": "1", "50m": "2"}.get(when, "")
        text = {
            "{{ $labels.job }}": "demo-smcserve-router",
            "{{ $labels.namespace }}": "llm",
            "{{ $value | humanize }}": lost,
        }
        return {
            name: functools.reduce(lambda said, pair: said.replace(*pair), text.items(), words)
            for name, words in rule["annotations"].items()
        }

    lost = {"5m": [], "25m": ["SmcRouterReplicaLost"], "50m": ["SmcRouterReplicaLost"]}
    alone = {"5m": [], "15m": ["SmcRouterWithoutReplica"]}
    tests = [case(series, lost), case([], {"1m": [], "10m": ["SmcRouterWithoutReplica"]}), case(series[1:2], alone)]
    (tmp_path / "case.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    ran = subprocess.run([binary("promtool"), "test", "rules", tmp_path / "case.yml"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
