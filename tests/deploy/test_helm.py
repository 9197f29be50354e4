"""The chart with every profile and option: valid for Kubernetes and each operator, secure, and consistent with the
commands."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path

import helm_python
import promql_parser
import pytest
import yaml

from services.cli import options
from services.cli.service_options import BatchOptions, ServeOptions, gateway_config, worker_group_config
from services.metrics import Metrics
from smc.scheduler.stats import EngineStats
from tests.deploy.binaries import binary
from tests.deploy.chart import (
    CHART,
    KUBERNETES,
    PROFILES,
    all_of_kind,
    check,
    config_of,
    containers,
    of_kind,
    pod_specs,
    render,
    this_chart,
    values,
)
from tests.gateway.harness import value_of

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

POD = {"topology": "pod"}
KEDA = POD | {"keda": {"enabled": True}}
TLS = {"tls": {"secret": "certificate"}}
MUTUAL = {
    "tls": {
        "secret": "certificate",
        "clientCaSecret": "clients",
        "probeSecret": "probe",
        "caSecret": "ca",
        "serverName": "llm.example",
    }
}
TOKENS = TLS | {"auth": {"tokensSecret": "tokens"}}
MODELS = {
    "models": {
        "target": {"path": "/models/t"},
        "draft": {"path": "/models/d"},
        "volume": {"hostPath": {"path": "/srv/models"}},
    }
}
DATA = {"volume": {"persistentVolumeClaim": {"claimName": "data"}}}
BATCH = {"batch": {"enabled": True, **DATA}}
MONITORED = {
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboards": True, "labels": {"release": "prometheus"}}
}
PLACE = {
    "podTemplate": {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
}
FITTED = {
    "labels": {"team": "a"},
    "annotations": {"note": "b"},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "envFrom": [{"secretRef": {"name": "proxy"}}],
    "extraVolumes": [{"name": "cache", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    "initContainers": [{"name": "first", "image": "busybox:1"}],
    "sidecars": [{"name": "beside", "image": "busybox:1"}],
}
EVERYTHING = {
    "networkPolicy": {"enabled": True, "callsFrom": [{"namespaceSelector": {}}], "metricsFrom": [{"podSelector": {}}]},
    "imagePullSecrets": [{"name": "registry"}],
    "podTemplate": FITTED,
    "commonLabels": {"kueue.x-k8s.io/queue-name": "gpus"},
    "commonAnnotations": {"owner": "a"},
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own-{{ .Release.Name }}"}, "data": {"a": "b"}}
    ],
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": ["llm.example"],
        "tlsSecret": "public",
        "annotations": {"a": "b"},
    },
    "route": {"enabled": True, "parentRefs": [{"name": "edge", "namespace": "infra"}], "hostnames": ["llm.example"]},
    "image": {"digest": f"sha256:{'0' * 64}"},
    "service": {
        "annotations": {"c": "d"},
        "labels": {"team": "a"},
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
    },
    "engine": {
        "maxChains": 0,
        "maxContext": 4194304,
        "pages": 1 << 22,
        "prefillChunk": 64,
        "prefillShare": 0.25,
        "prefixCache": False,
        "maxQueuePages": 100,
    },
    "gateway": {
        "httpPort": 8001,
        "config": {"write-timeout": 60, "served-model-name": ["a", "b"]},
        "terminationGracePeriod": 300,
        "preStopDelay": 0,
        "drainTimeout": 0.5,
    },
}
ON_NODES = {
    "draft": PLACE,
    "target": PLACE,
    "ray": {"head": PLACE, "upgradeStrategy": "Recreate", "auth": {"secret": "ray-token"}},
}
FOUR_GPUS = POD | {
    "device": "cuda",
    "target": {"tp": 3},
    "pod": {"resources": {"limits": {"memory": "240Gi"}}, "shm": "8Gi", **PLACE},
}
HUB = {"huggingFace": {"repository": "org/target", "revision": "a" * 40, "tokenSecret": "hub"}}
BUCKET = {"s3": {"uri": "s3://bucket/draft", "sha256": "b" * 64, "region": "eu-west-1", "credentialsSecret": "bucket"}}
SHARED = {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
DOWNLOADED = {"models": {"target": {"source": HUB}, "draft": {"source": BUCKET}, **SHARED}}
MOUNTED = {
    "models": {
        "target": {"source": {"persistentVolumeClaim": {"claimName": "weights", "directory": "a/target"}}},
        "draft": {"source": {"image": {"reference": "registry.example/draft@sha256:0"}}},
    }
}
CLAIMS = {
    "gpuResource": "",
    "podTemplate": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}]},
    "resources": {"claims": [{"name": "gpu"}]},
}
ROUTED = POD | {"router": {"enabled": True, "controlKeySecret": "control"}}
SHARED = POD | {"placement": "shared", "device": "cuda", "engine": {"form": "lockstep"}}
VARIANTS = {
    "defaults": [{}],
    **{name: [name] for name in PROFILES},
    "four GPUs in one pod": [FOUR_GPUS, MODELS],
    "four GPUs with both models": [SHARED, {"target": {"tp": 4}, "draft": {"tp": 4}}, MODELS],
    "everything": [EVERYTHING, ON_NODES, MODELS, TOKENS, MONITORED, BATCH],
    "everything in one pod": [EVERYTHING, {"pod": PLACE}, MODELS, MUTUAL, MONITORED, KEDA],
    "mutual TLS": [MUTUAL],
    "no token": [{"ray": {"auth": {"mode": "disabled"}}}, BATCH],
    "batch alone": [
        "values-8b",
        BATCH,
        {"serve": {"enabled": False}},
        MONITORED,
        {"monitoring": {"serviceMonitor": False}},
    ],
    "batch in an object store": [
        {
            "serve": {"enabled": False},
            "batch": {
                "enabled": True,
                "input": "s3://questions/in/?region=eu-west-1&scheme=https",
                "output": "s3://questions/out/",
                "credentialsSecret": "storage",
            },
        }
    ],
    "pod monitor": [{"monitoring": {"podMonitor": True}}],
    "bare": [
        {"serviceAccount": {"create": False}, "podDisruptionBudget": {"enabled": False}, "service": {"headless": True}}
    ],
    "lockstep over gRPC": [{"engine": {"form": "lockstep"}, "link": "grpc", "dtype": "bfloat16"}],
    "models downloaded": [
        "values-8b",
        {"models": {side: {"path": ""} for side in ("target", "draft")}},
        DOWNLOADED,
        BATCH,
    ],
    "models downloaded for one pod": [POD, DOWNLOADED],
    "models mounted": [MOUNTED, BATCH],
    "devices by claim": [{"device": "cuda", "draft": CLAIMS, "target": CLAIMS}],
    "HTTPRoute": [
        TLS,
        {
            "gateway": {"httpPort": 8443},
            "route": {"enabled": True, "kind": "HTTPRoute", "parentRefs": [{"name": "edge"}]},
            "monitoring": {"ray": True},
        },
    ],
    "replicas behind a router": [
        ROUTED,
        KEDA,
        MONITORED,
        {
            "networkPolicy": {"enabled": True},
            "podTemplate": FITTED,
            "router": {"apiKeySecret": "callers", "image": {"digest": f"sha256:{'1' * 64}"}},
        },
        {"ingress": {"enabled": True, "hosts": ["llm.example"]}},
    ],
    "closed, and scaled without KEDA": [
        ROUTED | {"hpa": {"enabled": True}},
        DOWNLOADED,
        {
            "networkPolicy": {
                "enabled": True,
                "egress": {
                    "enabled": True,
                    "models": [{"cidr": "203.0.113.0/24", "except": ["203.0.113.9/32"], "ports": [443, 8443]}],
                    "api": [{"cidr": "10.0.0.1/32", "ports": [6443]}],
                    "rules": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": 4317, "protocol": "TCP"}]}],
                },
            }
        },
    ],
    "no GPU to spare": [POD | {"pod": {"strategy": {"type": "Recreate"}}}],
    "OpenShift": [
        {"podTemplate": {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}},
        BATCH,
    ],
    "FP8": [{"device": "cuda", "target": {"dtype": "fp8"}, "draft": {"dtype": "fp8"}}],
}
MOST = (
    *PROFILES,
    "everything",
    "everything in one pod",
    "replicas behind a router",
    "closed, and scaled without KEDA",
)
"""Profiles, and variants that together contain every object of the chart. Only the whole test suite renders the
others."""
every_variant = pytest.mark.parametrize(
    "variant",
    [pytest.param(variant, marks=() if variant in MOST else pytest.mark.slow) for variant in VARIANTS],
)


@functools.cache
def rendered(variant: str) -> list[dict]:
    """Render a variant. Tests share the result and must not change it."""
    return render(*VARIANTS[variant])


def test_lint():
    """Lints the profiles, and variants that contain every object of the chart."""
    for variant in MOST:
        report = helm_python.lint(CHART, values(*VARIANTS[variant]), strict=True)
        assert not report["errors"], report
        assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


@every_variant
def test_every_object_is_valid(variant):
    """All variants are valid for the newest Kubernetes; profiles and complete variants also for an old one."""
    objects = rendered(variant)
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)
    old = variant in PROFILES or variant.startswith("everything")
    for each in objects:
        for version in KUBERNETES if old else KUBERNETES[-1:]:
            check(each, version)


@pytest.mark.parametrize(
    "field", ["spec.headGroupSpec.template.spec.containers.0.imagePullPolice", "spec.rayVersio", "metadata.lables"]
)
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
        ({"gateway": {"config": {"--write-timeout": 60}}}, "/gateway/config"),
        ({"gateway": {"config": {"max_queue": 60}}}, "gateway.config.max_queue: the chart writes this key itself"),
        ({"batch": {"config": {"block": 5}, "enabled": True}}, "batch.config.block: the chart writes this key itself"),
        ({"target": {"shm": "much"}}, "/target/shm"),
        ({"keda": {"minReplicas": 0}}, "/keda/minReplicas"),
        ({"models": {"target": {"path": "/models/t"}}}, "give both, or neither"),
        ({"serve": {"enabled": False}}, "enable one"),
        ({"batch": {"enabled": True}}, "batch.volume is empty"),
        ({"batch": {"enabled": True, "output": "s3://a/out/"}}, "batch.volume is empty"),
        ({"batch": {"enabled": True, "input": "http://a/in"}}, "/batch/input"),
        (
            {"batch": {"enabled": True, "input": "s3://a/in/", "output": "gs://a/out/", **DATA}},
            "has no effect with addresses as batch.input and batch.output",
        ),
        (
            {"batch": {"enabled": True, "credentialsSecret": "storage", **DATA}},
            'batch.credentialsSecret="storage" has no effect with files as batch.input and batch.output',
        ),
        (BATCH | POD, "use topology=cluster"),
        ({"keda": {"enabled": True}}, "use topology=pod"),
        (POD | {"keda": {"enabled": True, "minReplicas": 5}}, "at least keda.minReplicas=5"),
        ({"monitoring": {"serviceMonitor": True, "podMonitor": True}}, "choose one"),
        ({"draft": {"gpus": 1}}, "draft.gpus=1 has no effect with device=cpu"),
        ({"placement": "shared"}, "placement=shared with topology=cluster, which gives each model a pod of its own"),
        (SHARED | {"engine": {"form": "lookahead"}}, "engine.form=lookahead with placement=shared"),
        (SHARED | {"target": {"tp": 3}, "draft": {"tp": 2}}, "draft.tp=2 with placement=shared; allowed: target.tp=3"),
        (SHARED | {"draft": {"gpus": 1}}, "draft.gpus=1 has no effect with placement=shared"),
        ({"device": "cuda", "target": {"tp": 4, "gpus": 2}}, "at least target.tp=4"),
        (
            {"gateway": {"drainTimeout": 60, "terminationGracePeriod": 99}},
            "terminationGracePeriod=99; allowed: at least 100",
        ),
        ({"auth": {"tokensSecret": "t"}}, "give tls.secret too"),
        ({"tls": {"clientCaSecret": "c"}}, "tls.clientCaSecret has no effect without tls.secret"),
        ({"tls": {"secret": "s", "clientCaSecret": "c"}}, "go together"),
        ({"ray": {"auth": {"mode": "disabled", "secret": "s"}}}, "ray.auth.secret has no effect"),
        ({"engine": {"form": "lockstep", "branches": 2}}, "engine.branches=2 has no effect"),
        ({"service": {"headless": True, "type": "NodePort"}}, "only a Service of type ClusterIP"),
        (
            {"service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}},
            'service.loadBalancerSourceRanges=["10.0.0.0/8"] has no effect',
        ),
        (
            {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.1"]}},
            "/service/loadBalancerSourceRanges",
        ),
        (POD | {"pod": {"strategy": {"maxSurge": 0}}}, "are both 0; raise one"),
        (
            POD | {"pod": {"strategy": {"type": "Recreate", "maxSurge": 2}}},
            "pod.strategy.maxSurge=2 has no effect with pod.strategy.type=Recreate",
        ),
        (POD | {"pod": {"strategy": {"type": "OnDelete"}}}, "/pod/strategy/type"),
        ({"nameOverride": "a.b"}, 'the name "demo-a.b", of release "demo", is none for a Service'),
        ({"nameOverride": "A", "fullnameOverride": "a"}, 'nameOverride="A"; allowed: a-z'),
        ({"fullnameOverride": "8b"}, 'the name "8b"'),
        ({"podTemplate": {"securityContexts": {}}}, "securityContexts"),
        ({"podTemplate": {"labels": {"app.kubernetes.io/name": "x"}}}, "app.kubernetes.io/name is set by the chart"),
        (
            {"draft": {"podTemplate": {"labels": {"app.kubernetes.io/component": "x"}}}},
            "app.kubernetes.io/component is set by the chart",
        ),
        ({"ray": {"head": {"podTemplate": {"labels": {"ray.io/cluster": "x"}}}}}, "ray.io/cluster is set by the chart"),
        ({"monitoring": {"rules": True, "runbookUrl": "docs/runbook.md"}}, "/monitoring/runbookUrl"),
        ({"monitoring": {"runbookUrl": "https://docs.example"}}, "has no effect with monitoring.rules=false"),
        (POD | {"draft": {"replicas": 2}}, "draft.replicas=2 has no effect with topology=pod"),
        (POD | {"draft": PLACE}, 'draft.podTemplate={"affinity"'),
        (
            {"podTemplate": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
            "podTemplate.extraVolumes: tmp is a volume of the chart",
        ),
        (
            {"commonLabels": {"app.kubernetes.io/name": "x"}},
            "app.kubernetes.io/name is set by the chart; use another label",
        ),
        ({"extraObjects": [{"kind": "ConfigMap"}]}, "/extraObjects/0"),
        ({"ingress": {"enabled": True}}, "ingress.hosts is empty; name at least one host"),
        ({"ingress": {"hosts": ["a"]}}, "has no effect with ingress.enabled=false"),
        ({"route": {"enabled": True}}, "route.parentRefs is empty; name the Gateway"),
        ({"route": {"kind": "TCPRoute"}}, "/route/kind"),
        ({"router": {"enabled": True}}, "router.enabled=true with topology=cluster, which has one replica a release"),
        (POD | {"router": {"enabled": True}}, "router.controlKeySecret is empty"),
        (
            ROUTED | {"gateway": {"httpPort": 8001}},
            "gateway.httpPort=8001 has no effect with router.enabled=true, whose own port has OpenAI's API,",
        ),
        ({"gateway": {"httpPort": 9400}}, "gateway.metricsPort=9400 is given as gateway.httpPort as well"),
        ({"gateway": {"httpPort": -1}}, "/gateway/httpPort"),
        (
            {"serve": {"enabled": False}, **BATCH, "gateway": {"httpPort": 8001}},
            "gateway.httpPort=8001 has no effect with serve",
        ),
        (ROUTED | TLS, "smg speaks plain text to the replicas"),
        (POD | {"router": {"replicas": 3}}, "router.replicas=3 has no effect with router.enabled=false"),
        (ROUTED | {"router": {"enabled": True, "controlKeySecret": "c", "policy": "random"}}, "/router/policy"),
        (
            KEDA | {"keda": {"enabled": True, "fallbackReplicas": 9}},
            "keda.fallbackReplicas=9; allowed: at most keda.maxReplicas=4",
        ),
        (POD | {"monitoring": {"ray": True}}, "monitoring.ray=true has no effect with topology=pod"),
        (
            POD | {"target": {"resources": {"limits": {"memory": "9Gi"}}}},
            'target.resources.limits.memory="9Gi" has no effect',
        ),
        (POD | {"target": {"resources": {"limits": {"cpu": "9"}}}}, "target.resources.limits.cpu has no effect"),
        (POD | {"ray": {"auth": {"mode": "disabled"}}}, 'ray.auth.mode="disabled" has no effect with topology=pod'),
        ({"pod": {"replicas": 3}}, "pod.replicas=3 has no effect with topology=cluster"),
        (KEDA | {"pod": {"replicas": 3}}, "use keda.minReplicas"),
        (POD | {"keda": {"maxReplicas": 9}}, "keda.maxReplicas=9 has no effect with keda.enabled=false"),
        ({"batch": {"input": "/data/x"}}, 'batch.input="/data/x" has no effect with batch.enabled=false'),
        (
            {"serve": {"enabled": False}, **BATCH, **TLS},
            'tls.secret="certificate" has no effect with serve.enabled=false',
        ),
    ],
)
def test_wrong_values_are_refused(layer, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        render(layer)


@pytest.mark.parametrize(
    ("profile", "topology"), [("values-8b", "pod"), ("values-70b", "pod"), ("values-cpu", "cluster")]
)
def test_a_profile_is_refused_in_the_other_topology(profile, topology):
    with pytest.raises(ValueError, match=f"has no effect with topology={topology}"):
        render(profile, {"topology": topology})


def test_the_schema_knows_every_value():
    """An unknown value is refused only if all objects of the schema are closed, except free-form ones, and if Helm does
    not ignore the file."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def closed(part: dict, value: object) -> None:
        part = schema["definitions"][part["$ref"].split("/")[-1]] if "$ref" in part else part
        if isinstance(value, dict) and "properties" in part:
            assert part["additionalProperties"] is False
            assert not value or part["properties"].keys() - {"global", "claims"} == value.keys()
            for key, inside in value.items():
                closed(part["properties"][key], inside)

    closed(schema, yaml.safe_load((CHART / "values.yaml").read_text()))
    assert "values.schema.json" not in [
        line for line in (CHART / ".helmignore").read_text().splitlines() if not line.startswith("#")
    ]


CONFIG = "/etc/smcserve/config/"


def read_config(objects: list[dict], command: str, folder: Path) -> dict:
    """Return the configuration that the command reads from its file; an unknown key raises."""
    path = folder / f"{command}.yaml"
    path.write_text(config_of(objects, command))
    return options.read_config_file(path, {"serve": ServeOptions, "batch": BatchOptions}[command])


@every_variant
def test_the_commands_accept_their_files(variant, tmp_path):
    objects, given = rendered(variant), this_chart().merge_values(values(*VARIANTS[variant]))
    asked = []
    if given["serve"]["enabled"]:
        (container,) = [each for pod in pod_specs(objects) for each in pod["containers"] if each["name"] == "gateway"]
        assert [flag for flag in container["args"] if flag != "serve"] == [f"--config={CONFIG}serve.yaml"]
        asked.append(read_config(objects, "serve", tmp_path))
        secrets = {"tls_cert", "tls_key", "tls_client_ca", "auth_token_file"}
        gateway = gateway_config({name: value for name, value in asked[0].items() if name not in secrets})
        assert (gateway.host, gateway.port, gateway.drain_timeout) == (
            "0.0.0.0",
            50051,
            given["gateway"]["drainTimeout"],
        )
    if given["batch"]["enabled"]:
        split = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {of_kind(objects, 'RayJob')['spec']['entrypoint']}"],
            capture_output=True,
            text=True,
        )
        name, command, *arguments = split.stdout.splitlines()
        assert (name, command) == ("smcserve", "batch")
        assert arguments == [given["batch"]["input"], given["batch"]["output"], f"--config={CONFIG}batch.yaml"]
        asked.append(read_config(objects, "batch", tmp_path))
    for params in asked:
        config = worker_group_config({name: value for name, value in params.items() if name not in ("target", "draft")})
        assert bool(params.get("target")) == bool(params.get("draft")) == any(given["models"]["target"].values())
        chosen_at_start = given["placement"] == "shared" and given["target"]["tp"] > 1
        assert (config.draft_tp, config.target_tp, config.device) == (
            given["draft"].get("tp", None if chosen_at_start else 1),
            given["target"]["tp"],
            given["device"],
        )
        assert config.engine.max_context == given["engine"].get("maxContext")
        assert config.engine.prefix_cache is given["engine"]["prefixCache"]
        assert config.draft_resource == (None if given["topology"] == "pod" else "smc_draft")


def test_shared_ranks_choose_how_the_draft_is_divided(tmp_path):
    """Unless the values say it."""
    for draft, given in (({}, None), ({"tp": 1}, 1), ({"tp": 2}, 2)):
        objects = render(SHARED | {"target": {"tp": 2}, "draft": draft})
        assert read_config(objects, "serve", tmp_path).get("draft_tp") == given
        (pod,) = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert pod["resources"]["limits"]["nvidia.com/gpu"] == 2


@every_variant
def test_pods_keep_the_restricted_standard(variant):
    """The `restricted` level of Kubernetes' Pod Security Standards; in addition, no container writes to its image."""
    for pod in pod_specs(rendered(variant)):
        security = pod["securityContext"]
        assert (
            security["runAsNonRoot"]
            and security.get("runAsUser") != 0
            and security["seccompProfile"] == {"type": "RuntimeDefault"}
        )
        assert pod["automountServiceAccountToken"] is (pod["containers"][0]["name"] == "router"), (
            "which looks for replicas"
        )
        for container in containers(pod):
            own = container["securityContext"]
            assert (
                own["readOnlyRootFilesystem"]
                and own["allowPrivilegeEscalation"] is False
                and own["capabilities"] == {"drop": ["ALL"]}
            )


@every_variant
def test_mounts_and_references_fit(variant):
    objects = rendered(variant)
    for pod in pod_specs(objects):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == volumes.keys() and len(volumes) == len(pod["volumes"])
        for name in [volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume]:
            config = all_of_kind(objects, "ConfigMap")[name]
            assert config["immutable"] and re.search(r"-(serve|batch)-[0-9a-f]{8}$", name), (
                "an upgrade would change it under a running pod"
            )
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
        found[group["groupName"]] = (
            container["resources"]["limits"]["nvidia.com/gpu"],
            group["rayStartParams"]["num-gpus"],
        )
    assert found == {"draft": (1, "1"), "target": (3, "3")}
    (together,) = of_kind(render(FOUR_GPUS), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert together["resources"]["limits"]["nvidia.com/gpu"] == 4
    for variant, gpus in (("values-8b-one-gpu", 1), ("values-8b-eight-gpus", 8), ("four GPUs with both models", 4)):
        (shared,) = of_kind(rendered(variant), "Deployment")["spec"]["template"]["spec"]["containers"]
        assert shared["resources"]["limits"]["nvidia.com/gpu"] == gpus


def test_each_worker_group_has_gpus():
    """In one pod, GPUs for all worker groups together; in a cluster, a pod for each."""
    (pod,) = of_kind(render(FOUR_GPUS | {"workerGroups": 2}), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == 8
    with pytest.raises(ValueError, match=re.escape("draft.replicas=1 with workerGroups=2; allowed: at least 2, a pod")):
        render("values-8b", {"workerGroups": 2})
    pods = {side: {"replicas": 2} for side in ("draft", "target")}
    groups = of_kind(render("values-8b", {"workerGroups": 2, **pods}), "RayCluster")["spec"]["workerGroupSpecs"]
    assert [group["replicas"] for group in groups] == [2, 2]


def test_keda_asks_for_metrics_that_there_are():
    there = {line.split()[2] for line in Metrics().exposition().decode().splitlines() if line.startswith("# TYPE")}
    for trigger in of_kind(rendered("everything in one pod"), "ScaledObject")["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        promql_parser.parse(query)
        asked = set(re.findall(r"smc_\w+", query))
        assert asked and asked <= there


def test_keda_sees_no_load_where_models_are_loading(tmp_path):
    """A replica with three quarters of its slots in use, one that is loading, one without workers, and another release
    whose name begins with the same letters."""
    full, loading, lost = Metrics(), Metrics(), Metrics()
    for replica in (full, loading, lost):
        replica.set_build_info(
            "1", "big", "lookahead", "grpc", 64, block=8, weights={"draft": "", "target": ""}, placement="apart"
        )
    for replica in (full, lost):
        replica.groups[0].set_health(draft=True, target=True)
        replica.groups[0].observe_step(EngineStats(slots_free=16))
    lost.groups[0].set_health(draft=False, target=False)
    full.set_serving(True)
    pods = {
        "demo-smcserve-6d4-a": full,
        "demo-smcserve-6d4-b": loading,
        "demo-smcserve-6d4-c": lost,
        "demo-smcserve-b-6d4-d": full,
    }
    series = [
        {"series": f'{name}{{namespace="llm",pod="{pod}"}}', "values": str(value_of(replica, name, {}))}
        for pod, replica in pods.items()
        for name in ("smc_slots_free", "smc_slots_capacity", "smc_serving")
    ]
    _, slots = of_kind(render(KEDA), "ScaledObject")["spec"]["triggers"]
    asked = {"expr": slots["metadata"]["query"], "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": 0.75}]}
    case = tmp_path / "case.yml"
    case.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]}))
    ran = subprocess.run([binary("promtool"), "test", "rules", case], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_alerts_link_to_runbook():
    url = "https://docs.example/runbook"
    groups = of_kind(render({"monitoring": {"rules": True, "runbookUrl": url}}), "PrometheusRule")["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts and all(rule["annotations"]["runbook_url"] == f"{url}#{rule['alert'].lower()}" for rule in alerts)
