"""The emulated cluster of `python -m tests.deploy.emulated_cluster` restarts and ends pods in Kubernetes' order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.deploy.emulated_cluster import network
from tests.deploy.emulated_cluster.cluster import Cluster

pytestmark = pytest.mark.skipif(
    bool(why := network.available()), reason=f"pods need namespaces of Linux, and to be root: {why}"
)

OBEYS = (
    "trap 'echo told >> /tmp/said; exit 0' TERM; echo started >> /tmp/said; touch /tmp/up; while :; do sleep 0.1; done"
)
REFUSES = "trap '' TERM; while :; do sleep 0.1; done"


def deployment(script: str, grace: int) -> dict:
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    container = {
        "name": "only",
        "command": ["bash", "-c", script],
        "volumeMounts": mounts,
        "securityContext": {"readOnlyRootFilesystem": True},
        "readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/up"]}, "periodSeconds": 0.2},
        "lifecycle": {
            "preStop": {"exec": {"command": ["bash", "-c", "rm /tmp/up; sleep 0.5; echo hook >> /tmp/said"]}}
        },
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "terminationGracePeriodSeconds": grace,
    }
    template = {"metadata": {"labels": {"app": "a"}}, "spec": spec}
    return {
        "kind": "Deployment",
        "metadata": {"name": "a"},
        "spec": {"replicas": 1, "template": template, "progressDeadlineSeconds": 30},
    }


def test_a_pod_is_kept_and_ends_as_kubernetes_does_it(tmp_path):
    service = {"kind": "Service", "metadata": {"name": "s"}, "spec": {"selector": {"app": "a"}, "ports": [{"port": 1}]}}
    with Cluster.running(tmp_path, {}, print) as cluster:
        cluster.apply([deployment(OBEYS, 30), service])
        (pod,) = cluster.of("a")
        said: Path = tmp_path / pod.name / "tmp/said"
        (container,) = pod.containers
        assert cluster.endpoints("s") == [pod] and container.execute(["touch", "/etc/x"], 5) != 0
        container.send(9)
        wait_until(lambda: said.read_text() == "started\nstarted\n")
        cluster.apply([deployment(REFUSES.replace("trap", "touch /tmp/up; trap"), 2), service])
        wait_until(pod.gone.is_set)
        assert said.read_text() == "started\nstarted\nhook\ntold\n" and not pod.killed and container.exit_code == 0
        (stubborn,) = cluster.endpoints("s")
        cluster.delete()
        assert stubborn.killed == ["only"] and 2 <= stubborn.took < 10 and not cluster.endpoints("s")


def wait_until(condition, timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
