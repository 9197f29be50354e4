"""The controllers' part of a release: Deployments keep and replace pods, Services know which pods are ready, and the
API informs the router.

Not implemented: scheduling, quotas, DNS changes while a pod runs, a proxy between a Service and its pods."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.chart import all_of_kind
from tests.deploy.emulated_cluster.api import PodsApi
from tests.deploy.emulated_cluster.network import Network
from tests.deploy.emulated_cluster.pod import Pod


class Cluster:
    """One namespace, `llm`, on one machine."""

    def __init__(
        self, network: Network, folder: Path, secrets: dict[str, dict[str, str]], say: Callable[[str], None]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._network, self._folder, self._secrets, self.say = network, folder, secrets, say
        self.pods: list[Pod] = []
        self.ended: list[Pod] = []
        self._services: dict[str, dict] = {}
        self._configs: dict[str, dict[str, str]] = {}
        self._deployments: dict[str, dict] = {}
        self._numbers = itertools.count(1)
        self._turns = itertools.count()
        self._guard = threading.RLock()
        self._api = PodsApi(network.host, lambda: list(self.pods))

    @classmethod
    @contextmanager
    def running(cls, folder: Path, secrets: dict[str, dict[str, str]], say: Callable[[str], None]) -> Iterator[Cluster]:
        with Network().up() as network:
            cluster = cls(network, folder, secrets, say)
            try:
                yield cluster
            finally:
                for pod in list(cluster.pods):
                    pod.clean()
                cluster._api.close()

    def apply(self, objects: list[dict]) -> None:
        """Install or upgrade a release: Deployments whose pods differ are rolled out. Returns when all pods are
        ready."""
        self._services = all_of_kind(objects, "Service")
        self._configs |= {name: each["data"] for name, each in all_of_kind(objects, "ConfigMap").items()}
        rolls: list[str] = []
        for name, wanted in all_of_kind(objects, "Deployment").items():
            before, self._deployments[name] = self._deployments.get(name), wanted
            if before is None or before["spec"]["template"] != wanted["spec"]["template"]:
                rolls.append(name)
        failures: list[Exception] = []

        def roll(name: str) -> None:
            try:
                self._roll(name)
            except Exception as failure:
                failures.append(failure)

        threads = [threading.Thread(target=roll, args=(name,), daemon=True) for name in rolls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def of(self, deployment: str) -> list[Pod]:
        """Return the pods of a Deployment that are not terminating."""
        return [pod for pod in self.pods if pod.name.startswith(f"{deployment}-rs") and not pod.deleted]

    def endpoints(self, service: str) -> list[Pod]:
        selector = self._services[service]["spec"]["selector"].items()
        return [pod for pod in self.pods if pod.ready and not pod.deleted and selector <= pod.labels.items()]

    def address(self, service: str) -> str | None:
        """Return the address of the next endpoint of a Service, in turn, as a proxy would choose it; None if there is
        none."""
        found, port = self.endpoints(service), self._services[service]["spec"]["ports"][0]["port"]
        return f"{found[next(self._turns) % len(found)].address}:{port}" if found else None

    def run(self, template: dict, timeout: float) -> Pod:
        """Run a pod that ends by itself. Raises TimeoutError."""
        pod = self._start(template["metadata"]["name"], template)
        try:
            if not pod.containers[0].wait(timeout):
                raise TimeoutError(f"pod {pod.name} has not ended within {timeout:g} s")
            return pod
        finally:
            pod.clean()
            self.pods.remove(pod)

    def delete(self) -> None:
        """Delete everything at once, like `helm uninstall`. Returns when nothing is left."""
        self._deployments.clear()
        going = list(self.pods)
        for pod in going:
            pod.delete()
        for pod in going:
            pod.gone.wait()

    def _roll(self, name: str) -> None:
        """Roll out a Deployment: start new pods as far as `maxSurge` allows, and end an old pod whenever a new one is
        ready."""
        spec = self._deployments[name]["spec"]
        surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 1)
        old, new = self.of(name), []
        deadline = time.monotonic() + spec.get("progressDeadlineSeconds", 600)
        while len(new) < spec["replicas"] or old:
            while len(new) < spec["replicas"] and (not old or len(old) + len(new) < spec["replicas"] + surge):
                new.append(self._start(f"{name}-rs{next(self._numbers)}", spec["template"]))
            while old and sum(pod.ready for pod in [*old, *new]) > spec["replicas"]:
                self.say(f"{old[0].name} is told to end")
                old.pop(0).delete()
            if time.monotonic() > deadline:
                raise TimeoutError(f"deployment {name}: not rolled out within its progressDeadlineSeconds")
            time.sleep(0.1)
        while not all(pod.ready for pod in new):
            if time.monotonic() > deadline:
                raise TimeoutError(f"deployment {name}: not ready within its progressDeadlineSeconds")
            time.sleep(0.1)

    def _start(self, name: str, template: dict) -> Pod:
        account = self._api.kubeconfig() if template["spec"].get("automountServiceAccountToken") else None
        ready = {service: self.endpoints(service) for service in self._services}
        hosts = {f"{service}.llm.svc": pods[0].address for service, pods in ready.items() if pods}
        pod = Pod(
            name,
            template,
            self._network,
            self._folder,
            self._secrets,
            self._configs,
            hosts,
            self._changed,
            self.say,
            account,
        )
        with self._guard:
            self.pods.append(pod)
        self._api.tell("ADDED", pod)
        threading.Thread(target=self._forget, args=(pod,), daemon=True).start()
        return pod

    def _changed(self, pod: Pod) -> None:
        if pod.ready and not pod.deleted:
            self.say(f"{pod.name} is ready, {time.monotonic() - pod.created:.1f} s old")
        self._api.tell("MODIFIED", pod)

    def _forget(self, pod: Pod) -> None:
        pod.gone.wait()
        with self._guard:
            if pod.deleted:
                self.pods.remove(pod)
                self.ended.append(pod)
        self._api.tell("DELETED", pod)
