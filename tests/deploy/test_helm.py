"""The chart, with every profile and option: valid to Kubernetes and to each operator, safe, and in agreement with its commands."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tarfile

import helm_python
import promql_parser
import pytest
import typer
import yaml

from services.cli.gang import gang_config
from services.cli.main import app
from services.gateway.config import GatewayConfig
from services.metrics import Metrics
from smc.engine.stats import EngineStats
from tests.deploy.binaries import binary
from tests.deploy.chart import CHART, KUBERNETES, PROFILES, ROOT, chart, check, containers, of_kind, pod_specs, render, values

POD = {"topology": "pod"}
KEDA = POD | {"keda": {"enabled": True}}
TLS = {"tls": {"secret": "certificate"}}
MUTUAL = {
    "tls": {"secret": "certificate", "clientCaSecret": "clients", "probeSecret": "probe", "caSecret": "ca", "serverName": "llm.example"}
}
TOKENS = TLS | {"auth": {"tokensSecret": "tokens"}}
MODELS = {"models": {"target": "/models/t", "draft": "/models/d", "volume": {"hostPath": {"path": "/srv/models"}}}}
DATA = {"volume": {"persistentVolumeClaim": {"claimName": "data"}}}
BATCH = {"batch": {"enabled": True, **DATA}}
MONITORED = {"monitoring": {"serviceMonitor": True, "rules": True, "dashboards": True, "labels": {"release": "prometheus"}}}
PLACE = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"operator": "Exists"}], "affinity": {"nodeAffinity": {}}}
EVERYTHING = {
    "networkPolicy": {"enabled": True, "callsFrom": [{"namespaceSelector": {}}], "metricsFrom": [{"podSelector": {}}]},
    "imagePullSecrets": [{"name": "registry"}],
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "priorityClassName": "high",
    "image": {"digest": f"sha256:{'0' * 64}"},
    "service": {"annotations": {"c": "d"}, "type": "LoadBalancer"},
    "engine": {
        "maxContext": 4194304,
        "pages": 1 << 22,
        "prefillChunk": 64,
        "prefillShare": 0.25,
        "prefixCache": False,
        "maxQueuePages": 100,
    },
    "gateway": {"extraArgs": ["--write-timeout=60"], "terminationGracePeriod": 300, "preStopDelay": 0, "drainTimeout": 0.5},
}
ON_NODES = {"draft": PLACE, "target": PLACE, "ray": {"head": PLACE, "upgradeStrategy": "Recreate", "auth": {"secret": "ray-token"}}}
FOUR_GPUS = POD | {"device": "cuda", "target": {"tp": 3}, "pod": {"resources": {"limits": {"memory": "240Gi"}}, "shm": "8Gi", **PLACE}}
VARIANTS = {
    "defaults": [{}],
    **{name: [name] for name in PROFILES},
    "four GPUs in one pod": [FOUR_GPUS, MODELS],
    "everything": [EVERYTHING, ON_NODES, MODELS, TOKENS, MONITORED, BATCH],
    "everything in one pod": [EVERYTHING, {"pod": PLACE}, MODELS, MUTUAL, MONITORED, KEDA],
    "mutual TLS": [MUTUAL],
    "no token": [{"ray": {"auth": {"mode": "disabled"}}}, BATCH],
    "batch alone": ["values-8b", BATCH, {"serve": {"enabled": False}}, MONITORED, {"monitoring": {"serviceMonitor": False}}],
    "pod monitor": [{"monitoring": {"podMonitor": True}}],
    "bare": [{"serviceAccount": {"create": False}, "podDisruptionBudget": {"enabled": False}, "service": {"headless": True}}],
    "lockstep over gRPC": [{"engine": {"form": "lockstep"}, "link": "grpc", "dtype": "bfloat16"}],
    "FP8": [{"device": "cuda", "target": {"dtype": "fp8"}, "draft": {"dtype": "fp8"}}],
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@functools.cache
def rendered(variant: str) -> list[dict]:
    """Not to be changed: tests share it."""
    return render(*VARIANTS[variant])


def test_lint():
    for layers in VARIANTS.values():
        report = helm_python.lint(CHART, values(*layers), strict=True)
        assert not report["errors"], report
        assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


@every_variant
def test_every_object_is_valid(variant):
    objects = rendered(variant)
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)
    for each in objects:
        for version in KUBERNETES:
            check(each, version)


@pytest.mark.parametrize("field", ["spec.headGroupSpec.template.spec.containers.0.imagePullPolice", "spec.rayVersio", "metadata.lables"])
def test_an_unknown_field_would_be_noticed(field):
    cluster = of_kind(render({}), "RayCluster")
    *path, last = field.split(".")
    inside = cluster
    for key in path:
        inside = inside[int(key) if key.isdigit() else key]
    inside[last] = "x"
    for version in KUBERNETES:
        with pytest.raises(Exception, match=last):
            check(cluster, version)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"topolgy": "pod"}, "topolgy"),
        ({"draft": {"tp": 0}}, "/draft/tp"),
        ({"engine": {"block": "8"}}, "/engine/block"),
        ({"engine": {"prefixCache": "no"}}, "/engine/prefixCache"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"gateway": {"extraArgs": ["write-timeout"]}}, "/gateway/extraArgs"),
        ({"target": {"shm": "much"}}, "/target/shm"),
        ({"keda": {"minReplicas": 0}}, "/keda/minReplicas"),
        ({"models": {"target": "/models/t"}}, "give both, or neither"),
        ({"serve": {"enabled": False}}, "enable one"),
        ({"batch": {"enabled": True}}, "batch.volume is empty"),
        (BATCH | POD, "use topology=cluster"),
        ({"keda": {"enabled": True}}, "use topology=pod"),
        (POD | {"keda": {"enabled": True, "minReplicas": 5}}, "at least keda.minReplicas=5"),
        ({"monitoring": {"serviceMonitor": True, "podMonitor": True}}, "choose one"),
        ({"draft": {"gpus": 1}}, "draft.gpus=1 has no effect with device=cpu"),
        ({"device": "cuda", "target": {"tp": 4, "gpus": 2}}, "at least target.tp=4"),
        ({"gateway": {"drainTimeout": 60, "terminationGracePeriod": 99}}, "terminationGracePeriod=99; allowed: at least 100"),
        ({"auth": {"tokensSecret": "t"}}, "give tls.secret too"),
        ({"tls": {"clientCaSecret": "c"}}, "tls.clientCaSecret has no effect without tls.secret"),
        ({"tls": {"secret": "s", "clientCaSecret": "c"}}, "go together"),
        ({"ray": {"auth": {"mode": "disabled", "secret": "s"}}}, "ray.auth.secret has no effect"),
        ({"engine": {"form": "lockstep", "branches": 2}}, "engine.branches=2 has no effect"),
        ({"service": {"headless": True, "type": "NodePort"}}, "only ClusterIP"),
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name is set by the chart"),
        ({"podLabels": {"app.kubernetes.io/component": "x"}}, "app.kubernetes.io/component is set by the chart"),
        ({"podLabels": {"ray.io/cluster": "x"}}, "ray.io/cluster is set by the chart"),
        ({"monitoring": {"rules": True, "runbookUrl": "docs/runbook.md"}}, "/monitoring/runbookUrl"),
        ({"monitoring": {"runbookUrl": "https://docs.example"}}, "has no effect with monitoring.rules=false"),
        (POD | {"draft": {"replicas": 2}}, "draft.replicas=2 has no effect with topology=pod"),
        (POD | {"draft": {"nodeSelector": {"a": "b"}}}, 'draft.nodeSelector={"a":"b"} has no effect with topology=pod'),
        (POD | {"target": {"resources": {"limits": {"memory": "9Gi"}}}}, 'target.resources.limits.memory="9Gi" has no effect'),
        (POD | {"target": {"resources": {"limits": {"cpu": "9"}}}}, "target.resources.limits.cpu has no effect"),
        (POD | {"ray": {"auth": {"mode": "disabled"}}}, 'ray.auth.mode="disabled" has no effect with topology=pod'),
        ({"pod": {"replicas": 3}}, "pod.replicas=3 has no effect with topology=cluster"),
        (KEDA | {"pod": {"replicas": 3}}, "use keda.minReplicas"),
        (POD | {"keda": {"maxReplicas": 9}}, "keda.maxReplicas=9 has no effect with keda.enabled=false"),
        ({"batch": {"input": "/data/x"}}, 'batch.input="/data/x" has no effect with batch.enabled=false'),
        ({"serve": {"enabled": False}, **BATCH, **TLS}, 'tls.secret="certificate" has no effect with serve.enabled=false'),
    ],
)
def test_wrong_values_are_refused(layer, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        render(layer)


@pytest.mark.parametrize(("profile", "topology"), [("values-8b", "pod"), ("values-70b", "pod"), ("values-cpu", "cluster")])
def test_a_profile_is_refused_in_the_other_topology(profile, topology):
    with pytest.raises(ValueError, match=f"has no effect with topology={topology}"):
        render(profile, {"topology": topology})


def test_the_schema_knows_every_value():
    """An unknown value is refused only as long as nothing but free-form objects is open; and Helm must not be told to ignore the file."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def closed(part: dict, value: object) -> None:
        part = schema["definitions"][part["$ref"].split("/")[-1]] if "$ref" in part else part
        if isinstance(value, dict) and "properties" in part:
            assert part["additionalProperties"] is False and part["properties"].keys() - {"global"} == value.keys()
            for key, inside in value.items():
                closed(part["properties"][key], inside)

    closed(schema, yaml.safe_load((CHART / "values.yaml").read_text()))
    assert "values.schema.json" not in [line for line in (CHART / ".helmignore").read_text().splitlines() if not line.startswith("#")]


def flags_of(objects: list[dict]) -> list[str]:
    """Of `smcserve serve`, as the gateway gets them."""
    (gateway,) = [each for pod in pod_specs(objects) for each in pod["containers"] if each["name"] == "gateway"]
    return [flag for flag in gateway["args"] if flag != "serve"]


def parsed(command: str, flags: list[str]) -> dict:
    """What the command line makes of them; a flag that it does not know raises."""
    return typer.main.get_command(app).commands[command].make_context(command, list(flags)).params


@every_variant
def test_the_commands_accept_their_flags(variant):
    objects, given = rendered(variant), chart().merge_values(values(*VARIANTS[variant]))
    asked = []
    if given["serve"]["enabled"]:
        asked.append(parsed("serve", flags_of(objects)))
        fields = GatewayConfig.__dataclass_fields__.keys() - {"tls_cert", "tls_key", "tls_client_ca", "auth_token_file"}
        gateway = GatewayConfig(**{name: asked[0][name] for name in fields if asked[0][name] is not None})
        assert (gateway.host, gateway.port, gateway.drain_timeout) == ("0.0.0.0", 50051, given["gateway"]["drainTimeout"])
    if given["batch"]["enabled"]:
        split = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {of_kind(objects, 'RayJob')['spec']['entrypoint']}"], capture_output=True, text=True
        )
        name, command, *flags = split.stdout.splitlines()
        assert (name, command) == ("smcserve", "batch")
        asked.append(parsed("batch", flags))
    for params in asked:
        config = gang_config({name: value for name, value in params.items() if name not in ("target", "draft")})
        assert (config.draft_tp, config.target_tp, config.device) == (given["draft"]["tp"], given["target"]["tp"], given["device"])
        assert config.engine.max_context == given["engine"].get("maxContext")
        assert config.engine.prefix_cache is given["engine"]["prefixCache"]
        assert config.resource("draft") == (None if given["topology"] == "pod" else "smc_draft")


@every_variant
def test_pods_keep_the_restricted_standard(variant):
    """Of Kubernetes' Pod Security Standards; and no container writes to its image."""
    for pod in pod_specs(rendered(variant)):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in containers(pod):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}


@every_variant
def test_mounts_and_references_fit(variant):
    objects = rendered(variant)
    for pod in pod_specs(objects):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == volumes.keys() and len(volumes) == len(pod["volumes"])
        assert not [volume for volume in volumes.values() if "configMap" in volume], "an upgrade would change it under a running pod"
        for container in containers(pod):
            limits = container["resources"]["limits"]
            assert "memory" in limits
            for name in limits.keys() - {"cpu", "memory"}:
                assert container["resources"]["requests"][name] == limits[name], "a GPU's request is its limit"


def test_gpus():
    cluster = of_kind(render("values-70b"), "RayCluster")["spec"]
    found = {}
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        found[group["groupName"]] = (container["resources"]["limits"]["nvidia.com/gpu"], group["rayStartParams"]["num-gpus"])
    assert found == {"draft": (1, "1"), "target": (3, "3")}
    (together,) = of_kind(render(FOUR_GPUS), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert together["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_keda_asks_for_metrics_that_there_are():
    there = {line.split()[2] for line in Metrics().exposition().decode().splitlines() if line.startswith("# TYPE")}
    for trigger in of_kind(rendered("everything in one pod"), "ScaledObject")["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        promql_parser.parse(query)
        asked = set(re.findall(r"smc_\w+", query))
        assert asked and asked <= there


def test_keda_sees_no_load_where_models_are_loading(tmp_path):
    """A replica that is three quarters full, one that loads, one that has lost its gang; and a release whose name begins alike."""
    full, loading, lost = Metrics(), Metrics(), Metrics()
    for replica in (full, loading, lost):
        replica.set_build_info("1", "big", "lookahead", "grpc", 64, block=8)
    for replica in (full, lost):
        replica.observe_step(EngineStats(slots_free=16))
    full.set_health(draft=True, target=True, serving=True)
    pods = {"demo-smcserve-6d4-a": full, "demo-smcserve-6d4-b": loading, "demo-smcserve-6d4-c": lost, "demo-smcserve-b-6d4-d": full}
    series = [
        {"series": f'{name}{{namespace="llm",pod="{pod}"}}', "values": str(replica.registry.get_sample_value(name))}
        for pod, replica in pods.items()
        for name in ("smc_slots_free", "smc_slots_capacity", "smc_serving")
    ]
    _, slots = of_kind(render(KEDA), "ScaledObject")["spec"]["triggers"]
    asked = {"expr": slots["metadata"]["query"], "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": 0.75}]}
    case = tmp_path / "case.yml"
    case.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]}))
    ran = subprocess.run([binary("promtool"), "test", "rules", case], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_pager_can_open_the_runbook():
    url = "https://docs.example/runbook"
    groups = of_kind(render({"monitoring": {"rules": True, "runbookUrl": url}}), "PrometheusRule")["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts and all(rule["annotations"]["runbook_url"] == f"{url}#{rule['alert'].lower()}" for rule in alerts)


def test_readme_is_current():
    made = subprocess.run(
        [sys.executable, "-B", "-c", "import readme; print(readme.readme(), end='')"], cwd=CHART, capture_output=True, text=True
    )
    assert (CHART / "README.md").read_text() == made.stdout, "run: python deploy/helm/smcserve/readme.py"


def test_rules_and_dashboards_are_those_of_the_repository(tmp_path):
    """Also in the packaged chart, where links have become files."""
    helm_python.Chart.load(CHART).save(tmp_path)
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    packaged = helm_python.Chart.load(tmp_path / "smcserve").render(values(MONITORED), name="demo", namespace="llm")
    chart.cache_clear()
    objects = render(MONITORED)
    assert objects == [each for path, text in packaged.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text) if each]
    files = [ROOT / "deploy/prometheus/rules.yml", ROOT / "deploy/prometheus/alerts.yml"]
    assert of_kind(objects, "PrometheusRule")["spec"]["groups"] == [
        group for path in files for group in yaml.safe_load(path.read_text())["groups"]
    ]
    found = {}
    for each in objects:
        if each["metadata"]["labels"].get("grafana_dashboard") == "1":
            found |= each["data"]
    dashboards = {path.name: path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    assert dashboards and {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in dashboards.items()
    }
