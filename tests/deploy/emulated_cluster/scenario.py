"""The steps of the scenario, and the conditions that must hold."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai

from smc.demo import DRAFT, TARGET
from smc.model.files import fingerprint
from tests.deploy.chart import of_kind, render
from tests.deploy.emulated_cluster.cluster import Cluster
from tests.deploy.emulated_cluster.pod import Pod
from tests.scenario import Scenario
from tests.vllm.load import HANG, Load

REPLICAS, ROUTERS = "demo-smcserve", "demo-smcserve-router"
"""Names of the Deployments and of their Services."""
SECRETS = {"control": {"key": "control-key"}, "callers": {"key": "caller-key"}}
CALLERS, REST = 3, 1.0
"""Number of callers and seconds between their calls: light enough for replicas to start on a machine of two cores."""
STEADY = 20.0
"""Seconds of load without any change."""


def values(models: Path, version: str, replicas: int = 2, routers: int = 2) -> dict:
    """Return the values that are merged over values-cpu.yaml."""
    sides = {side: {"path": f"/mnt/{version}/{side}"} for side in ("target", "draft")}
    return {
        "pod": {"replicas": replicas},
        "models": {**sides, "mountPath": "/mnt", "volume": {"hostPath": {"path": str(models)}}},
        "router": {"enabled": True, "replicas": routers, "controlKeySecret": "control", "apiKeySecret": "callers"},
    }


def make_models(folder: Path) -> dict[str, str]:
    """Save two versions of the pair that differ in the numbers of the target. Returns the targets' fingerprints by
    version."""
    from safetensors.torch import load_file, save_file  # slow, because it imports torch

    for version in ("v1", "v2"):
        for side, source in (("draft", DRAFT), ("target", TARGET)):
            shutil.copytree(source, folder / version / side)
    changed = folder / "v2/target/model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(changed).items()}, changed, {"format": "pt"})
    return {version: fingerprint(folder / version / "target") for version in ("v1", "v2")}


def metrics(pod: Pod, name: str, labels: str = "") -> list[tuple[str, float]]:
    """Return (labels, value) of each series; empty if the pod does not answer."""
    try:
        with urllib.request.urlopen(f"http://{pod.address}:9400/metrics", timeout=5) as response:
            text = response.read().decode()
    except OSError:
        return []
    found = re.findall(rf"^{name}(?:{{(.*?)}})? (\S+)$", text, flags=re.MULTILINE)
    return [(has, float(value)) for has, value in found if labels in has]


def answers(pod: Pod) -> float:
    return sum(value for _, value in metrics(pod, "smc_requests_total", 'status="OK"'))


def running(pod: Pod) -> float:
    return sum(value for _, value in metrics(pod, "smc_requests_running"))


def weights(pod: Pod) -> str | None:
    """Return the fingerprint of the weights that a pod serves, according to its metrics."""
    found = [re.search(r'[{,]weights="(\w+)"', "{" + has) for has, _ in metrics(pod, "smc_build_info")]
    return found[0][1] if found and found[0] else None


@dataclass
class Row:
    """A line of the table."""

    phase: str
    seconds: float = 0.0
    load: Load | None = None
    seen: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        calls = ["", "", "", "", ""]
        if self.load is not None:
            errors = ", ".join(f"{count} {end}" for end, count in self.load.ends.most_common() if count and end != "ok")
            total = sum(self.load.ends.values())
            calls = [
                str(total),
                str(self.load.ends["ok"]),
                errors or "none",
                f"{self.load.longest:.1f}",
                f"{self.load.pause:.1f}",
            ]
        return "| " + " | ".join([self.phase, f"{self.seconds:.0f}", *calls, "; ".join(self.seen)]) + " |"


class ReleaseScenario(Scenario):
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)  # fails if an earlier run has left its files
        super().__init__(directory)
        self._rows: list[Row] = []
        self._clients: dict[str, openai.OpenAI] = {}

    def run(self) -> int:
        models = self._directory / "models"
        self._prints = make_models(models)
        objects = {version: render("values-cpu", values(models, version)) for version in self._prints}
        with ExitStack() as stack:
            self._cluster = stack.enter_context(Cluster.running(self._directory / "pods", SECRETS, self.say))
            self.install(objects["v1"])
            self.test(objects["v1"])
            self.steady()
            self.upgrade(objects["v2"])
            self.kill()
            self.drain()
        print("\n| phase | s | calls | ok | errors | longest call, s | longest pause, s | seen |")
        print("| :--- | --: | --: | --: | :--- | --: | --: | :--- |")
        print("\n".join(map(str, self._rows)))
        return self.verdict()

    def install(self, objects: list[dict]) -> None:
        with self.phase("install") as row:
            self._cluster.apply(objects)
            for name in (REPLICAS, ROUTERS):
                pods = self._cluster.of(name)
                row.seen.append(
                    f"{name}: {len(pods)} pods, ready after {', '.join(f'{pod.ready_after:.0f}' for pod in pods)} s"
                )
            self.must(
                "both replicas and both routers are ready",
                [len(self._cluster.endpoints(name)) for name in (REPLICAS, ROUTERS)] == [2, 2],
            )

    def test(self, objects: list[dict]) -> None:
        with self.phase("helm test") as row:
            pod = of_kind(objects, "Pod")
            done = self._cluster.run(pod, pod["spec"]["activeDeadlineSeconds"])
            row.seen.append(f"the pod ended with {done.containers[0].exit_code}")
            self.must("the request of `helm test` is answered", done.containers[0].exit_code == 0)

    def steady(self) -> None:
        with self.load("load") as (row, load):
            before = [answers(pod) for pod in self._cluster.of(REPLICAS)]
            time.sleep(STEADY)
            shares = [answers(pod) - had for pod, had in zip(self._cluster.of(REPLICAS), before)]
            row.seen.append(f"answers of each replica: {', '.join(f'{share:.0f}' for share in shares)}")
        self.must("nothing is lost, and both replicas answer", load.lost == 0 and min(shares) > 0)

    def upgrade(self, objects: list[dict]) -> None:
        old = self._cluster.of(REPLICAS)
        both = threading.Event()
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(1):
                if len({weights(pod) for pod in self._cluster.endpoints(REPLICAS)} - {None}) > 1:
                    both.set()

        watcher = threading.Thread(target=watch, daemon=True)
        with self.load("upgrade of the weights") as (row, load):
            watcher.start()
            self._cluster.apply(objects)
            self.until("the old replicas have ended", lambda: all(pod.gone.is_set() for pod in old), 120)
            new = self._cluster.of(REPLICAS)
            had = [answers(pod) for pod in new]
            self.until(
                "each new replica answers", lambda: all(answers(pod) > before for pod, before in zip(new, had)), 60
            )
            stop.set()
            watcher.join()
            row.seen.append(f"ready after {', '.join(f'{pod.ready_after:.0f}' for pod in new)} s")
            row.seen.append(f"old ones ended in {', '.join(f'{pod.took:.0f}' for pod in old)} s")
        self.must("nothing is lost", load.lost == 0)
        self.must(
            "every replica serves the new weights, and says so", {weights(pod) for pod in new} == {self._prints["v2"]}
        )
        self.must("old and new were served side by side meanwhile", both.is_set())
        self.ends(old)

    def kill(self) -> None:
        victim, other = self._cluster.of(REPLICAS)
        (container,) = victim.containers
        with self.load("kill -9 of a replica") as (row, load):
            self.until("both replicas answer", lambda: all(running(pod) for pod in (victim, other)), 60)
            starts = container.starts
            container.send(signal.SIGKILL)
            self.until("its container is started again", lambda: container.starts > starts, 30)
            had = answers(other)
            self.until("the other goes on", lambda: answers(other) > had + CALLERS, 60)
            back = self.until("it is ready again", lambda: not victim.ready, 30) + self.until(
                "..", lambda: victim.ready, 300
            )
            asked = self.until("and is asked again", lambda: answers(victim) > 0, 60)
            row.seen.append(f"ready again after {back:.0f} s, asked again {asked:.0f} s later")
        self.must(f"calls that ended with an error: {load.lost}, no more than were in flight", load.lost <= CALLERS)

    def drain(self) -> None:
        going = list(self._cluster.pods)
        with self.load("uninstall") as (row, load):
            time.sleep(5)
            self._cluster.delete()
            row.seen.append(f"pods ended in {', '.join(f'{pod.took:.0f}' for pod in going)} s")
        broken = sum(count for end, count in load.begun.items() if end != "ok")
        self.must(f"answers that had begun and broke off: {broken}", broken == 0)
        self.ends(going)

    def ends(self, pods: list[Pod]) -> None:
        killed = [f"{pod.name}: {name}" for pod in pods for name in pod.killed]
        self.must("every container ended within its grace period, by itself", not killed)
        codes = {each.exit_code for pod in pods for each in pod.containers}
        self.must(f"with exit code 0: {sorted(codes)}", codes == {0})

    @contextmanager
    def phase(self, name: str) -> Iterator[Row]:
        self.say(f"--- {name}")
        row, begin = Row(name), time.monotonic()
        yield row
        row.seconds = time.monotonic() - begin
        self._rows.append(row)

    @contextmanager
    def load(self, name: str) -> Iterator[tuple[Row, Load]]:
        with self.phase(name) as row, Load(self._client, "target", CALLERS, REST).running() as load:
            row.load = load
            yield row, load
        self.must("no call hung", not load.ends["hanging"] and load.longest < HANG)

    def _client(self) -> openai.OpenAI:
        """Return a client of a router that is ready, as a Service would choose it."""
        address = self._cluster.address(ROUTERS)
        if address is None:
            raise ConnectionError("no router is ready")
        if address not in self._clients:
            self._clients[address] = openai.OpenAI(
                base_url=f"http://{address}/v1", api_key="caller-key", max_retries=0, timeout=HANG
            )
        return self._clients[address]
