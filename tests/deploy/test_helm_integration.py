"""Integration of the chart into a shared cluster: queue labels, schedulers, sidecars, claims, routes, and the test that
Helm runs."""

from __future__ import annotations

import pytest
import typer

from services.cli.main import app
from tests.deploy.chart import all_of_kind, containers, of_kind, pod_specs, render, templates

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

POD = {"topology": "pod"}
TLS = {"tls": {"secret": "certificate"}}
BATCH = {"batch": {"enabled": True, "volume": {"persistentVolumeClaim": {"claimName": "data"}}}}
EVERY_OBJECT = {
    "monitoring": {
        "serviceMonitor": True,
        "ray": True,
        "rules": True,
        "dashboards": True,
        "labels": {"release": "prometheus"},
    },
    "networkPolicy": {"enabled": True},
    "ingress": {"enabled": True, "hosts": ["llm.example"]},
    "route": {"enabled": True, "parentRefs": [{"name": "edge"}]},
    "models": {
        side: {"source": {"http": {"url": "https://models.example/a", "sha256": "0" * 64}}}
        for side in ("target", "draft")
    }
    | {"volume": {"persistentVolumeClaim": {"claimName": "models"}}},
}


@pytest.mark.parametrize("layer", [BATCH, POD, POD | {"keda": {"enabled": True}}])
def test_labels_and_annotations_are_on_every_object(layer):
    """Kueue finds a job by one of the labels, Volcano a group by another."""
    layer = {**layer, "commonLabels": {"kueue.x-k8s.io/queue-name": "gpus"}, "commonAnnotations": {"owner": "a"}}
    every = {**EVERY_OBJECT, "monitoring": EVERY_OBJECT["monitoring"] | {"ray": "topology" not in layer}}
    for each in render(every, layer):
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus", each["kind"]
        assert each["metadata"]["annotations"]["owner"] == "a", each["kind"]
    assert not [
        pod
        for name, pod in templates(render(every, layer)).items()
        if name != "test" and "owner" in str(pod["metadata"])
    ]


def test_a_group_has_settings_of_its_own_beside_those_of_all():
    given = {
        "podTemplate": {
            "env": [{"name": "A", "value": "1"}],
            "nodeSelector": {"zone": "a"},
            "priorityClassName": "low",
        },
        "target": {
            "podTemplate": {
                "env": [{"name": "B", "value": "2"}],
                "nodeSelector": {"gpu": "h200"},
                "priorityClassName": "high",
            }
        },
    }
    pods = {name: template["spec"] for name, template in templates(render(given)).items()}
    assert pods["target"]["nodeSelector"] == {"zone": "a", "gpu": "h200"} and pods["draft"]["nodeSelector"] == {
        "zone": "a"
    }
    assert [pods[name]["priorityClassName"] for name in ("head", "draft", "target")] == ["low", "low", "high"]
    variables = {name: {each["name"] for each in containers(pod)[-1]["env"]} & {"A", "B"} for name, pod in pods.items()}
    assert variables == {"head": {"A"}, "draft": {"A"}, "target": {"A", "B"}, "test": {"A"}}


@pytest.mark.parametrize("layer", [BATCH | {"device": "cuda"}, POD])
def test_what_is_added_to_pods_is_in_every_container(layer):
    added = {
        "envFrom": [{"secretRef": {"name": "proxy"}}],
        "extraVolumes": [{"name": "cache", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "initContainers": [{"name": "first", "image": "busybox:1"}],
        "sidecars": [{"name": "beside", "image": "busybox:1"}],
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    }
    ends = ("submitter", "test")
    for name, template in templates(render(layer, {"podTemplate": added})).items():
        pod = template["spec"]
        assert {
            key: pod[key] for key in ("runtimeClassName", "schedulerName", "topologySpreadConstraints")
        }.items() <= added.items()
        assert added["extraVolumes"][0] in pod["volumes"]
        for container in pod["containers"]:
            if container["name"] != "beside":
                assert (
                    added["extraVolumeMounts"][0] in container["volumeMounts"]
                    and container["envFrom"] == added["envFrom"]
                )
        # A sidecar would keep a pod alive that should end.
        assert ("beside" in [each["name"] for each in pod["containers"]]) == (name not in ends)
        assert ("first" in [each["name"] for each in pod.get("initContainers", ())]) == (name not in ends)
        assert pod["containers"][0]["name"] != "beside", "KubeRay takes the first for Ray's"


def test_devices_can_be_claimed():
    group = {
        "gpuResource": "",
        "podTemplate": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}]},
        "resources": {"claims": [{"name": "gpu"}]},
    }
    pods = templates(render({"device": "cuda", "draft": group, "target": group}))
    for side in ("draft", "target"):
        (container,) = pods[side]["spec"]["containers"]
        assert pods[side]["spec"]["resourceClaims"] == group["podTemplate"]["resourceClaims"]
        assert container["resources"]["claims"] == [{"name": "gpu"}] and container["resources"]["limits"].keys() == {
            "memory"
        }
    everywhere = templates(render(BATCH, {"podTemplate": group["podTemplate"]}))
    assert {name for name, pod in everywhere.items() if "resourceClaims" not in pod["spec"]} == {"submitter", "test"}


def test_extra_objects_know_the_release():
    own = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own-{{ .Release.Name }}"}, "data": {"a": "b"}}
    assert all_of_kind(render({"extraObjects": [own]}), "ConfigMap")["own-demo"]["data"] == {"a": "b"}


def test_routes_lead_to_the_calls():
    objects = render(TLS, EVERY_OBJECT, {"ingress": {"tlsSecret": "public", "className": "nginx"}})
    calls = all_of_kind(objects, "Service")["demo-smcserve"]["spec"]["ports"]
    (rule,) = of_kind(objects, "Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": "demo-smcserve",
        "port": {"name": calls[1]["name"]},
    }
    (without,) = of_kind(render(EVERY_OBJECT, {"gateway": {"httpPort": 0}}), "Ingress")["spec"]["rules"]
    assert without["http"]["paths"][0]["backend"]["service"]["port"] == {"name": calls[0]["name"]}
    assert of_kind(objects, "Ingress")["spec"]["tls"] == [{"secretName": "public", "hosts": ["llm.example"]}]
    (route,) = of_kind(objects, "GRPCRoute")["spec"]["rules"]
    assert route["backendRefs"] == [{"name": "demo-smcserve", "port": calls[0]["port"]}]


def test_rays_own_metrics_are_scraped_from_every_node():
    objects = render({"monitoring": {"ray": True}, "networkPolicy": {"enabled": True}})
    spec = of_kind(objects, "PodMonitor")["spec"]
    (scrape,) = spec["podMetricsEndpoints"]
    for side in ("head", "draft", "target"):
        container = templates(objects)[side]["spec"]["containers"][0]
        assert 8080 in [port["containerPort"] for port in container["ports"] if port["name"] == scrape["port"]]
    assert spec["selector"]["matchExpressions"] == [
        {"key": "ray.io/node-type", "operator": "In", "values": ["head", "worker"]}
    ]
    assert [port["port"] for port in of_kind(objects, "NetworkPolicy")["spec"]["ingress"][-1]["ports"]] == [9400, 8080]


MUTUAL = {
    "tls": {"secret": "s", "clientCaSecret": "c", "probeSecret": "p", "serverName": "llm.example"},
    "auth": {"tokensSecret": "t"},
}


@pytest.mark.parametrize(
    ("layer", "address", "secrets"),
    [
        ({}, "demo-smcserve.llm.svc:50051", set()),
        (POD | TLS, "demo-smcserve.llm.svc:50051", {"tls"}),
        ({"tls": {"secret": "s", "caSecret": "a"}}, "demo-smcserve.llm.svc:50051", {"ca"}),
        (MUTUAL, "llm.example:50051", {"tls", "probe", "tokens"}),
    ],
)
def test_helm_test_asks_what_a_caller_would(layer, address, secrets):
    pod = of_kind(render(layer), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test" and pod["spec"]["restartPolicy"] == "Never"
    (container,) = pod["spec"]["containers"]
    name, command, *flags = container["args"]
    asked = typer.main.get_command(app).commands[name].commands[command].make_context(command, flags).params
    assert asked["address"] == address and asked["max_tokens"] == 8 and "Mia" in asked["prompt"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    files = [str(asked[key]) for key in ("tls_ca", "tls_cert", "tls_key", "token_file") if asked[key]]
    assert all(path.rsplit("/", 1)[0] in mounted for path in files)
    assert (
        {path.split("/")[3] for path in files}
        == secrets
        == {path.removeprefix("/etc/smcserve/") for path in mounted if "etc" in path}
    )
    assert not [
        volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls" and "items" not in volume["secret"]
    ], "nor its key"


def test_every_pod_has_the_account_and_no_token_of_it():
    objects = render(BATCH, {"serviceAccount": {"annotations": {"role": "a"}}})
    account = of_kind(objects, "ServiceAccount")
    assert account["metadata"]["annotations"] == {"role": "a"}
    assert {pod["serviceAccountName"] for pod in pod_specs(objects)} == {account["metadata"]["name"]}
