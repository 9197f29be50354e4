"""Behaviour of each operator and of Kubernetes with the chart's objects, beyond their schemas."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

from services.cli import options
from services.cli.service_options import BatchOptions, ServeOptions
from tests.deploy.chart import CHART, all_of_kind, config_of, containers, of_kind, pod_specs, render, templates

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

POD = {"topology": "pod"}
TLS = {"tls": {"secret": "certificate"}}
BATCH = {"batch": {"enabled": True, "volume": {"persistentVolumeClaim": {"claimName": "data"}}}}


def test_a_batch_job_has_no_upgrade_strategy_and_does_not_wait_for_ever():
    """KubeRay refuses a cluster with `upgradeStrategy` that a RayJob created, and the job would wait for it."""
    objects = render(BATCH, {"ray": {"upgradeStrategy": "Recreate"}})
    job = of_kind(objects, "RayJob")["spec"]
    assert of_kind(objects, "RayCluster")["spec"]["upgradeStrategy"] == {"type": "Recreate"}
    assert "upgradeStrategy" not in job["rayClusterSpec"]
    assert 0 < job["preRunningDeadlineSeconds"] < job["activeDeadlineSeconds"]


def test_a_batch_in_an_object_store_needs_no_volume():
    """Every pod of the batch job's cluster gets the credentials of the store, no pod of the service does. If the output
    is a file, the job also mounts the volume."""
    stored = {"enabled": True, "input": "s3://a/in/", "output": "s3://a/out/", "credentialsSecret": "storage"}
    mixed = {"output": "/data/out/", "volume": {"persistentVolumeClaim": {"claimName": "data"}}}
    for layer, has_volume in (({}, False), (mixed, True)):
        pods = templates(render({"batch": stored | layer}))
        for name in ("head", "draft", "target"):
            (own, *_), (jobs, *_) = (containers(pods[prefix + name]["spec"]) for prefix in ("", "batch-"))
            assert jobs["envFrom"] == [{"secretRef": {"name": "storage"}}] and "envFrom" not in own
        head = pods["batch-head"]["spec"]
        assert ("data" in [volume["name"] for volume in head["volumes"]]) == has_volume
        (mounts,) = [each["volumeMounts"] for each in containers(head) if each["name"] == "ray-head"]
        assert ("/data" in [mount["mountPath"] for mount in mounts]) == has_volume


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_metrics_are_not_published_beside_calls(kind):
    services = all_of_kind(render({"service": {"type": kind}}), "Service")
    published = [each["spec"] for each in services.values() if each["spec"]["type"] != "ClusterIP"]
    assert [[port["port"] for port in spec["ports"]] for spec in published] == [[50051, 8000]]
    (metrics,) = [each["spec"] for each in services.values() if each["spec"]["type"] == "ClusterIP"]
    assert [port["port"] for port in metrics["ports"]] == [9400]


def test_a_load_balancer_is_chosen_and_closed():
    given = {"loadBalancerClass": "example.com/internal", "loadBalancerSourceRanges": ["10.0.0.0/8"]}
    service = all_of_kind(render({"service": {"type": "LoadBalancer", "labels": {"team": "a"}, **given}}), "Service")[
        "demo-smcserve"
    ]
    assert given.items() <= service["spec"].items() and service["metadata"]["labels"]["team"] == "a"


@pytest.mark.parametrize(
    ("layer", "protocol"), [({}, "kubernetes.io/h2c"), (TLS, "https"), ({"service": {"appProtocol": "http2"}}, "http2")]
)
def test_a_proxy_is_told_what_the_port_speaks(layer, protocol):
    """Some proxies take `grpc` for plain text, which would fail with TLS."""
    port, _ = all_of_kind(render(layer), "Service")["demo-smcserve"]["spec"]["ports"]
    assert port["appProtocol"] == protocol


@pytest.mark.parametrize(("layer", "protocol"), [(POD, "http"), (TLS, "https")])
def test_openais_api_has_a_port_unless_it_is_turned_off(layer, protocol):
    """The network policy allows both ports, ingress and routes lead to the HTTP port, and probes stay with gRPC."""
    wanted = {"networkPolicy": {"enabled": True}}
    outside = {
        "ingress": {"enabled": True, "hosts": ["a.example"]},
        "route": {"enabled": True, "parentRefs": [{"name": "edge"}]},
    }
    objects, plain = render(layer, wanted, outside), render(layer, {"gateway": {"httpPort": 0}})
    assert "http" not in [port["name"] for port in all_of_kind(plain, "Service")["demo-smcserve"]["spec"]["ports"]]
    assert all_of_kind(objects, "Service")["demo-smcserve"]["spec"]["ports"][1:] == [
        {"name": "http", "port": 8000, "targetPort": 8000, "appProtocol": protocol}
    ]
    assert [port["port"] for port in of_kind(objects, "NetworkPolicy")["spec"]["ingress"][1]["ports"]] == [50051, 8000]
    gateway, before = (
        next(each for pod in pod_specs(some) for each in pod["containers"] if each["name"] == "gateway")
        for some in (objects, plain)
    )
    lines, plain_lines = (config_of(some, "serve").splitlines() for some in (objects, plain))
    assert [line for line in lines if line not in plain_lines] == ["http-port: 8000"]
    assert [line for line in plain_lines if line not in lines] == ["no-http: true"]
    probes = ("readinessProbe", "livenessProbe")
    assert {"name": "http", "containerPort": 8000} in gateway["ports"] and all(
        gateway[probe] == before[probe] for probe in probes
    )
    # Over HTTP in plain text the startup probe reports the progress.
    says = gateway["startupProbe"].get("exec", {}).get("command", [])[-1:] == ["8000"]
    assert says == (layer == POD) and (says or gateway["startupProbe"] == before["startupProbe"])
    (rule,) = of_kind(objects, "Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "demo-smcserve", "port": {"name": "http"}}
    assert of_kind(objects, "GRPCRoute")["spec"]["rules"][0]["backendRefs"] == [
        {"name": "demo-smcserve", "port": 50051}
    ]
    http = render(layer, wanted, {"route": {**outside["route"], "kind": "HTTPRoute"}})
    assert of_kind(http, "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [{"name": "demo-smcserve", "port": 8000}]


def clusters(objects: list[dict]) -> list[dict]:
    return [of_kind(objects, "RayCluster")["spec"], of_kind(objects, "RayJob")["spec"]["rayClusterSpec"]]


def test_workers_find_the_head_before_it_is_ready():
    """The head is ready when its gateway is, and the gateway needs the workers. So workers must resolve the head before
    it is ready, whatever the operator's settings."""
    for cluster in clusters(render(BATCH)):
        service = cluster["headGroupSpec"]["headService"]["spec"]
        assert service == {"clusterIP": "None", "publishNotReadyAddresses": True}


def kuberay_reads(text: str) -> dict[str, float]:
    """Parse as getResourcesMap in KubeRay's pod.go does."""
    return json.loads(text.strip("'\"` "))


def test_ray_and_kuberay_read_the_resource_of_each_group():
    """KubeRay parses the value, and writes `--resources=VALUE` into a command that a shell runs."""
    for cluster in clusters(render(BATCH)):
        for group in cluster["workerGroupSpecs"]:
            given = group["rayStartParams"]["resources"]
            written = subprocess.run(["bash", "-c", f"printf %s {given}"], capture_output=True, text=True).stdout
            assert json.loads(written) == kuberay_reads(given) == {f"smc_{group['groupName']}": 1}


def test_the_head_takes_no_ranks():
    """The head declares no CPUs and GPUs, whatever its node has: Ray would otherwise count a GPU that the head pod can
    see."""
    for cluster in clusters(render("values-8b", BATCH)):
        params = cluster["headGroupSpec"]["rayStartParams"]
        assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")


def test_an_upgrade_needs_no_spare_gpus_if_asked():
    def strategy(**given: object) -> dict:
        return of_kind(render(POD, {"pod": {"strategy": given}}), "Deployment")["spec"]["strategy"]

    assert strategy() == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert strategy(maxSurge=0, maxUnavailable="25%")["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": "25%"}
    assert strategy(type="Recreate") == {"type": "Recreate"}


@pytest.mark.parametrize("layer", [BATCH, POD])
def test_openshift_may_choose_users(layer):
    own = {"runAsUser": None, "runAsGroup": None, "fsGroup": None, "supplementalGroups": [7]}
    pods = pod_specs(
        render(layer, {"podTemplate": {"securityContext": own, "containerSecurityContext": {"runAsUser": 5}}})
    )
    for pod in pods:
        assert pod["securityContext"].items() >= {"runAsNonRoot": True, "supplementalGroups": [7]}.items()
        assert not pod["securityContext"].keys() & {"runAsUser", "runAsGroup", "fsGroup"}
        assert all(
            each["securityContext"].items() >= {"runAsUser": 5, "readOnlyRootFilesystem": True}.items()
            for each in containers(pod)
        )


def test_every_container_can_be_given_a_limit_of_cpus():
    """If a quota counts CPUs, Kubernetes refuses a pod with a container without a limit."""
    own = {"resources": {"limits": {"cpu": "3"}}}
    layer = {"device": "cuda", "draft": own, "target": own, "gateway": own, "ray": {"head": own}}
    for pod in pod_specs(render(BATCH, layer)):
        assert all("cpu" in each["resources"]["limits"] for each in containers(pod))


@pytest.mark.parametrize("name", ["8b", "llama-3.1", "a.b"])
def test_a_release_whose_name_no_service_may_have_is_refused(name):
    with pytest.raises(ValueError, match=rf'of release "{name}", is none for a Service or a RayCluster; allowed: a-z'):
        render({}, name=name)
    assert templates(render({"fullnameOverride": "fine"}, name=name))


ROUTED = POD | {"router": {"enabled": True, "controlKeySecret": "control"}}
DOWNLOADED = {
    "models": {
        side: {"source": {"http": {"url": f"https://models.example/{side}", "sha256": "a" * 64}}}
        for side in ("target", "draft")
    }
    | {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
}


def test_no_image_of_somebody_else_is_pulled():
    """An empty default; the same repository has both images, unless the router's is given."""
    with pytest.raises(ValueError, match=r"image\.repository is empty; .*image\.repository=registry\.example/smcserve"):
        render({"image": {"repository": ""}})
    own = {"image": {"repository": "registry.example/a"}}
    for given, router in (("", "registry.example/a:"), ("other/b", "other/b:")):
        pods = templates(render(ROUTED, own, {"router": {"image": {"repository": given}}}))
        found = {name: pods[name]["spec"]["containers"][0]["image"] for name in ("replica", "router")}
        assert found["replica"].startswith("registry.example/a:") and found["router"].startswith(router)


@pytest.mark.parametrize("layer", [BATCH | DOWNLOADED | {"device": "cuda"}, ROUTED], ids=["cluster", "pod"])
def test_what_a_pod_writes_to_its_node_is_bounded_and_requested(layer):
    """A full disk would end every pod of the node."""
    pods = templates(render(layer, {"tmp": {"size": "3Gi", "request": "500Mi"}}))
    for name, pod in pods.items():
        volumes = {volume["name"]: volume["emptyDir"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume}
        assert volumes["tmp"] == {"sizeLimit": "3Gi"} and all("sizeLimit" in each for each in volumes.values()), name
        asked = [each["resources"]["requests"].get("ephemeral-storage") for each in containers(pod["spec"])]
        assert [each for each in asked if each] == ["500Mi"], name
    own = {"resources": {"requests": {"ephemeral-storage": "9Gi"}}}
    given = {"pod": own} if layer is ROUTED else {"draft": own}
    pod = templates(render(layer, given))["replica" if layer is ROUTED else "draft"]["spec"]
    assert containers(pod)[-1]["resources"]["requests"]["ephemeral-storage"] == "9Gi"


@pytest.mark.parametrize(
    ("command", "config", "said"),
    [
        ("gateway", {"write-timeuot": 60}, "write-timeuot"),
        ("gateway", {"write-timeout": "soon"}, "/gateway/config/write-timeout"),
        ("gateway", {"max-concurrent-streams": 1.5}, "/gateway/config/max-concurrent-streams"),
        ("gateway", {"no-page": "yes"}, "/gateway/config/no-page"),
        ("gateway", {"part-lines": 8}, "part-lines"),
        ("batch", {"served-model-name": "a"}, "served-model-name"),
        ("batch", {"seed": "one"}, "/batch/config/seed"),
        ("batch", {"input": "/data/a"}, "input"),
    ],
)
def test_a_configuration_key_that_the_command_does_not_know_is_refused(command, config, said):
    with pytest.raises(ValueError, match=said):
        render(BATCH, {command: {"config": config}})


def test_every_key_of_the_commands_is_accepted(tmp_path):
    """Values of the right type, as each command writes and reads them."""
    values = {int: 1, float: 1.5, str: "a", Path: "/a", bool: True, options.COUNT_OR_WORD: "auto"}
    schema = json.loads((CHART / "values.schema.json").read_text())
    for name, record in (("serveConfig", ServeOptions), ("batchConfig", BatchOptions)):
        checker = jsonschema.Draft7Validator({"$ref": f"#/definitions/{name}", "definitions": schema["definitions"]})
        for key in options.keys_of(record).values():
            kind, container = options.value_kind(key)
            value = {list: [values[kind]], dict: {"a": "m:f"}}.get(container, values[kind])
            for written in ({key.name: value}, {key.name.replace("-", "_"): value}, {key.name: None}):
                (tmp_path / "config.yaml").write_text(json.dumps(written))
                options.read_config_file(tmp_path / "config.yaml", record)
                assert not list(checker.iter_errors(written)), written
            wrong = {key.name: {"a": 1} if container is dict else {}}
            (tmp_path / "config.yaml").write_text(json.dumps(wrong))
            with pytest.raises(ValueError):
                options.read_config_file(tmp_path / "config.yaml", record)
            assert list(checker.iter_errors(wrong)), wrong
