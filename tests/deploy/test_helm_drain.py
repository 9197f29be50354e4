"""Relations between the chart's objects: selectors, grace periods, and the scripts that wait during a drain."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from services.gateway.server import GATEWAY
from tests.deploy.chart import CHART, all_of_kind, of_kind, render, templates

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

POD = {"topology": "pod"}
MONITORED = {"monitoring": {"serviceMonitor": True}, "networkPolicy": {"enabled": True}}
DATA = {"batch": {"enabled": True, "volume": {"persistentVolumeClaim": {"claimName": "data"}}}}
SCRIPTS = CHART / "files/scripts"


def labels(component: str, template: dict, cluster: str) -> dict[str, str]:
    """Return a pod's labels, including those that KubeRay adds."""
    node = "head" if component == "head" else "worker"
    kuberay = (
        {}
        if component in ("replica", "submitter", "test", "models")
        else {"ray.io/cluster": cluster, "ray.io/node-type": node}
    )
    return template["metadata"]["labels"] | kuberay


def selected(objects: list[dict], selector: dict[str, str]) -> set[str]:
    found = {
        component: labels(component, template, "demo-smcserve") for component, template in templates(objects).items()
    }
    return {component for component, own in found.items() if selector.items() <= own.items()}


@pytest.mark.parametrize(("layer", "gateway"), [({}, "head"), (POD, "replica")])
def test_calls_and_scrapes_reach_the_gateway_alone(layer, gateway):
    objects = render(layer, MONITORED)
    services, monitor = all_of_kind(objects, "Service"), of_kind(objects, "ServiceMonitor")
    calls, metrics = services["demo-smcserve"], services["demo-smcserve-metrics"]
    assert selected(objects, calls["spec"]["selector"]) == selected(objects, metrics["spec"]["selector"]) == {gateway}
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    assert [name for name, each in services.items() if chosen <= each["metadata"]["labels"].items()] == [
        "demo-smcserve-metrics"
    ]
    ports = {port["name"]: port["targetPort"] for service in services.values() for port in service["spec"]["ports"]}
    (scrape,) = monitor["spec"]["endpoints"]
    assert scrape["port"] in ports
    (container,) = [each for each in templates(objects)[gateway]["spec"]["containers"] if each["name"] == "gateway"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    pods = of_kind(render(layer, {"monitoring": {"podMonitor": True}}), "PodMonitor")["spec"]
    assert selected(objects, pods["selector"]["matchLabels"]) == {gateway} and pods["podMetricsEndpoints"] == [scrape]


def test_the_network_policy_covers_every_pod():
    objects = render(MONITORED, DATA)
    policy = of_kind(objects, "NetworkPolicy")["spec"]
    everything = set(templates(objects))
    assert selected(objects, policy["podSelector"]["matchLabels"]) == everything == {
        *("head", "draft", "target", "batch-head", "batch-draft", "batch-target", "submitter", "test")
    }  # fmt: skip
    inside, operator, calls, metrics = policy["ingress"]
    assert selected(objects, inside["from"][0]["podSelector"]["matchLabels"]) == everything and "ports" not in inside
    assert [port["port"] for rule in (operator, calls, metrics) for port in rule["ports"]] == [8265, 50051, 8000, 9400]


def test_disruption_budgets_keep_one_pod_of_each_group_and_nothing_that_is_broken():
    """A standby pod may be evicted. No pod has two budgets, because Kubernetes would never evict it."""
    objects = render({"target": {"replicas": 2}})
    budgets = [each["spec"] for each in all_of_kind(objects, "PodDisruptionBudget").values()]
    covered = [selected(objects, budget["selector"]["matchLabels"]) for budget in budgets]
    assert sorted(map(sorted, covered)) == [["draft"], ["head"], ["target"]]
    (together,) = all_of_kind(render(POD), "PodDisruptionBudget").values()
    assert (
        selected(render(POD), together["spec"]["selector"]["matchLabels"]) == {"replica"}
        and together["spec"]["maxUnavailable"] == 1
    )
    assert all(budget["minAvailable"] == 1 and "maxUnavailable" not in budget for budget in budgets)
    assert all(budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for budget in [*budgets, together["spec"]])


@pytest.mark.parametrize("drain", [0, 30, 0.5, 3600])
@pytest.mark.parametrize("topology", ["cluster", "pod"])
def test_a_pod_may_take_as_long_to_end_as_draining_takes(drain, topology):
    objects = render({"topology": topology, "gateway": {"drainTimeout": drain, "preStopDelay": 7}})
    for component in templates(objects).keys() - {"test"}:
        pod = templates(objects)[component]["spec"]
        for container in pod["containers"]:
            *command, last = container["lifecycle"]["preStop"]["exec"]["command"]
            if command == ["sleep"]:
                waited = int(last) + drain
            else:  # Ray waits longer than the gateway takes to end
                waited = int(command[4] if "drain-head.sh" in command else last)
                assert waited >= 7 + drain + 10
            assert pod["terminationGracePeriodSeconds"] >= waited + 10


def probes(*layers: dict) -> dict[str, dict]:
    (gateway,) = [
        each for each in templates(render(*layers))["head"]["spec"]["containers"] if each["name"] == "gateway"
    ]
    return {name: gateway[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}


def test_probes():
    """Ready: it can decode. Alive: the gateway answers, whatever the state of its workers. Startup: bounded by the
    configured time."""
    plain = probes({"timeouts": {"start": 1800}})
    alone = probes({"gateway": {"httpPort": 0}})
    assert plain["readiness"]["grpc"] == alone["readiness"]["grpc"] == alone["startup"]["grpc"] == {"port": 50051}
    # Over HTTP the startup probe reports the progress.
    python, flag, _, port = plain["startup"]["exec"]["command"]
    assert (python, flag, port) == ("python", "-c", "8000")
    assert plain["startup"]["failureThreshold"] * plain["startup"]["periodSeconds"] > 1800
    assert plain["liveness"]["grpc"] == {"port": 50051, "service": GATEWAY} and "tcpSocket" not in plain["liveness"]
    tls = {"secret": "s", "clientCaSecret": "c", "probeSecret": "p", "serverName": "llm.example"}
    secure = probes({"tls": tls})
    command = secure["readiness"]["exec"]["command"]
    assert secure["startup"]["exec"] == secure["readiness"]["exec"]
    assert command[:4] == ["smcserve", "client", "health", "--address=llm.example:50051"]
    assert secure["liveness"]["tcpSocket"] == {"port": 50051} and "grpc" not in secure["liveness"]
    pod = templates(render({"tls": tls}))["head"]["spec"]
    assert pod["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": ["llm.example"]}]


def test_drain_head_waits_for_the_gateway(tmp_path):
    lock = tmp_path / "gateway.lock"
    begin = time.monotonic()
    subprocess.run(["bash", SCRIPTS / "drain-head.sh", "60", lock], check=True, timeout=30)
    assert time.monotonic() - begin < 20, "nobody holds the lock: there is no gateway"

    holder = subprocess.Popen(
        ["bash", "-c", f"exec 9> {lock}; flock 9; echo held; exec sleep 600"], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    waiting = subprocess.Popen(["bash", SCRIPTS / "drain-head.sh", "600", lock])
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.5)
    bounded = subprocess.run(
        ["bash", SCRIPTS / "drain-head.sh", "0.2", lock], check=True, capture_output=True, text=True, timeout=30
    )
    assert bounded.stdout == "the gateway did not end within 0.2 s\n"
    holder.kill()  # it may end in any way
    holder.communicate()
    assert waiting.wait(30) == 0


def test_drain_worker_waits_for_the_ranks():
    name = f"ray::probe{os.getpid()}:"
    rank = subprocess.Popen(["bash", "-c", f"exec -a {name} sleep 600"])
    waiting = None
    try:
        deadline = time.monotonic() + 30
        while (
            not Path(f"/proc/{rank.pid}/cmdline").read_bytes().startswith(name.encode())
        ):  # bash has not replaced itself yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        waiting = subprocess.Popen(["bash", SCRIPTS / "drain-worker.sh", "600", name])
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        subprocess.run(["bash", SCRIPTS / "drain-worker.sh", "1", name], check=True, timeout=30)
        rank.kill()
        rank.wait()
        assert waiting.wait(30) == 0
    finally:
        for process in filter(None, (rank, waiting)):
            process.kill()
            process.wait()


def test_drain_hook_ignores_itself(tmp_path):
    """The script is part of the hook's command line, and searches command lines for ranks: it must not find itself."""
    (worker,) = templates(render({}))["target"]["spec"]["containers"]
    *command, seconds = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert int(seconds) > 20
    looks = [part.replace("ray::smcserve:", tmp_path.name) for part in command]
    subprocess.run([*looks, seconds], check=True, timeout=20)


def test_gateway_starts_once_ray_answers(tmp_path):
    """Runs gateway.sh with fake `ray` and `smcserve` commands: what it waits for, the lock that it holds, and the
    arguments that it passes on."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    said, lock, ready = tmp_path / "said", tmp_path / "lock", tmp_path / "ready"
    for name, body in {
        "ray": f'test "$*" = "health-check --address 127.0.0.1:1" && test -e {ready}',
        "smcserve": f'echo "$*" > {said}; sleep 600',
    }.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    environment = {"PATH": f"{bin_}:/usr/bin:/bin"}
    gateway = subprocess.Popen(
        ["bash", SCRIPTS / "gateway.sh", "127.0.0.1:1", lock, "--block=8", "--target=/a b"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert gateway.stdout.readline() == "waiting for Ray at 127.0.0.1:1\n" and not said.exists()
        ready.touch()
        end = time.monotonic() + 30
        while not said.exists() or not said.read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert said.read_text() == "serve --ray-address 127.0.0.1:1 --block=8 --target=/a b\n"
        assert subprocess.run(["flock", "-n", lock, "true"]).returncode == 1, "the gateway holds the lock"
    finally:
        os.killpg(gateway.pid, signal.SIGKILL)
        gateway.wait()
        gateway.stdout.close()
    assert subprocess.run(["flock", "-w", "30", lock, "true"]).returncode == 0
