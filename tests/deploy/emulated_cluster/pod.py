"""A pod and the kubelet's part in it: containers, probes, restarts, and the order of termination.

    deleted -> no longer an endpoint; for every container: its preStop hook, then SIGTERM;
    SIGKILL terminationGracePeriodSeconds after the start of the hooks

Not implemented: limits of memory and CPU, users, capabilities, seccomp, init containers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy.emulated_cluster.container import Container, environment
from tests.deploy.emulated_cluster.network import Network
from tests.deploy.emulated_cluster.probes import Watch

TURN = 0.1
_versions = itertools.count(1)


class Pod:
    """A pod, which starts when it is created. `changed` is called, from the pod's threads, when its readiness changes
    and when it is deleted. `account` says how its containers reach the API, instead of Kubernetes' service account."""

    def __init__(
        self,
        name: str,
        template: dict,
        network: Network,
        folder: Path,
        secrets: dict[str, dict[str, str]],
        configs: dict[str, dict[str, str]],
        hosts: dict[str, str],
        changed: Callable[[Pod], None],
        say: Callable[[str], None],
        account: str | None = None,
    ) -> None:
        self.name, self.template, self._changed, self._say = name, template, changed, say
        self.labels, self.spec = template["metadata"]["labels"], template["spec"]
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}  # it ends with the scenario
        self._pause = subprocess.Popen(["unshare", "-n", "-i", "-u", "cat"], start_new_session=True, **pipes)
        _wait_for_namespace(self._pause.pid)
        self.address = network.connect(self._pause.pid)
        self._tmpfs: list[Path] = []
        volumes = {each["name"]: self._volume(each, configs) for each in self.spec.get("volumes", ())}
        env = {"KUBECONFIG": "/tmp/kubeconfig"} if account else {}
        if account:
            (volumes["tmp"] / "kubeconfig").write_text(account)
        self.containers = [
            Container(
                spec, self._pause.pid, folder / f"{name}.{spec['name']}.log", environment(spec, secrets, env), volumes
            )
            for spec in self.spec["containers"]
        ]
        for container in self.containers:
            self._give_hosts(container, hosts)
        self.created = time.monotonic()
        self.ready_after: float | None = None
        self.ready, self.deleted, self.gone = False, False, threading.Event()
        self.killed: list[str] = []
        """Containers that did not end within the grace period."""
        self.took = 0.0
        """Seconds that the pod took to end."""
        self.version = next(_versions)
        self._hands_off = threading.Event()
        self._threads = [threading.Thread(target=self._keep, args=(each,), daemon=True) for each in self.containers]
        self._readiness: dict[str, bool] = {each.name: False for each in self.containers}
        for thread in self._threads:
            thread.start()

    def _volume(self, volume: dict, configs: dict[str, dict[str, str]]) -> Path:
        """Return the folder of a volume on this machine."""
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "emptyDir" not in volume and "configMap" not in volume:
            raise ValueError(
                f"volume {volume['name']!r} of pod {self.name}; the scenario has configMap, emptyDir and hostPath"
            )
        place = self._folder / volume["name"]
        place.mkdir()
        if "configMap" in volume:
            for name, text in configs[volume["configMap"]["name"]].items():
                (place / name).write_text(text)
            return place
        place.chmod(0o777)
        if volume["emptyDir"].get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
            self._tmpfs.append(place)
        return place

    def _give_hosts(self, container: Container, hosts: dict[str, str]) -> None:
        """Mount a hosts file with the names of Services, as DNS resolves them when the pod starts."""
        path = self._folder / "hosts"
        path.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in hosts.items()))
        container.mount(path, "/etc/hosts")

    def _keep(self, container: Container) -> None:
        """Keep a container running: start it, run its probes, and restart it if it has ended or is not alive."""
        restarts = 0
        while not self._hands_off.is_set():
            container.start()
            startup, ready, live = (
                Watch(container.spec.get(f"{name}Probe")) for name in ("startup", "readiness", "liveness")
            )
            while not self._hands_off.wait(TURN) and container.exit_code is None:
                startup.look(container, self.address)
                if startup.holds:
                    ready.look(container, self.address)
                    live.look(container, self.address)
                self._tell(container, startup.holds and ready.holds)
                if startup.failed or live.failed:
                    self._say(f"{self.name}: {container.name} is not alive, and is started again")
                    self._end(container, time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30))
            if self._hands_off.is_set() or self.spec.get("restartPolicy") == "Never":
                break
            self._tell(container, False)
            self._say(f"{self.name}: {container.name} has ended with {container.exit_code}, and is started again")
            self._hands_off.wait(min(10 * 2 ** (restarts - 1), 300) if restarts else 0)
            restarts += 1

    def _tell(self, container: Container, ready: bool) -> None:
        self._readiness[container.name] = ready
        whole = all(self._readiness.values())
        if whole != self.ready:
            self.ready = whole
            if whole and self.ready_after is None:
                self.ready_after = time.monotonic() - self.created
            self.version = next(_versions)
            self._changed(self)

    def _end(self, container: Container, deadline: float) -> None:
        hook = container.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook and container.exit_code is None:
            container.execute(hook["command"], max(0.0, deadline - time.monotonic()))
        container.send(signal.SIGTERM)
        if not container.wait(max(2.0, deadline - time.monotonic())):  # a kubelet allows at least two seconds
            self.killed.append(container.name)
            container.send(signal.SIGKILL)
            container.wait(30)

    def delete(self) -> None:
        """Begin to terminate the pod; `gone` is set when nothing is left."""
        if self.deleted:
            return
        self.deleted = True
        self.version = next(_versions)
        self._changed(self)
        threading.Thread(target=self._terminate, daemon=True).start()

    def _terminate(self) -> None:
        begin = time.monotonic()
        self._hands_off.set()
        for thread in self._threads:
            thread.join()
        deadline = begin + self.spec.get("terminationGracePeriodSeconds", 30)
        ends = [threading.Thread(target=self._end, args=(each, deadline)) for each in self.containers]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        self.took = time.monotonic() - begin
        self.clean()

    def clean(self) -> None:
        """Kill all containers at once and clean up."""
        self._hands_off.set()
        for container in self.containers:
            container.send(signal.SIGKILL)
            container.wait(10)
        self._pause.kill()
        self._pause.wait()
        for place in self._tmpfs:
            subprocess.run(["umount", place], check=False)
        self._tmpfs.clear()
        self.gone.set()

    def as_object(self) -> dict:
        """Return the pod as an object of Kubernetes' API."""
        metadata = {
            "name": self.name,
            "namespace": "llm",
            "uid": self.name,
            "resourceVersion": str(self.version),
            "labels": self.labels,
        }
        if self.deleted:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        conditions = [{"type": "Ready", "status": str(self.ready)}]
        status = {"phase": "Running", "podIP": self.address, "conditions": conditions}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.spec, "status": status}


def _wait_for_namespace(pid: int) -> None:
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
