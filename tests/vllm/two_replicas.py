"""Two worker groups behind smg, one of which is killed: checks what docs/scale.md says, but is too heavy for the tests.

    python -m tests.vllm.two_replicas --directory /tmp/two-replicas

Prints its observations and exits with 1 if one of them contradicts docs/scale.md. Takes about two minutes and 6 GB.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import openai
import psutil

from tests.ports import free_ports
from tests.scenario import Scenario
from tests.vllm.load import CALLERS, HANG, QUESTIONS, Load, ask
from tests.vllm.smg import models, routing

FAMILIES, MEMBERS = 5, 6
"""Number of common beginnings of prompts, and number of prompts for each. With an even number of beginnings,
round-robin routing would send all prompts of a beginning to the same worker group."""


class Replica:
    """One `smcserve serve` with all processes that it starts."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._log = name, directory / f"{name}.log"
        self.port, self.metrics_port = free_ports(2)
        self._process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        smcserve = Path(sys.executable).parent / "smcserve"
        command = [smcserve, "serve", "--port", str(self.port), "--metrics-port", str(self.metrics_port), "--no-http"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def kill_a_rank(self) -> None:
        ranks = [
            process
            for process in self.processes()
            if any("smcserve: target rank" in part for part in process.cmdline())
        ]
        ranks[0].send_signal(signal.SIGKILL)

    def kill(self) -> int:
        """Kill all processes with SIGKILL and return their number."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        return len(processes)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def metric(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric over all label sets that contain `labels`; 0 while the service does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return 0.0
        found = re.findall(rf"^{name}(?:{{(.*?)}})? (\S+)$", text, flags=re.MULTILINE)
        return sum(float(value) for has, value in found if labels in has)

    @property
    def answers(self) -> float:
        return self.metric("smc_requests_total", 'status="OK"')

    @property
    def hits(self) -> float:
        return self.metric("smc_prefix_cache_hits_total", 'group="target"')

    @property
    def serving(self) -> bool:
        return self.metric("smc_serving") == 1.0


class TwoReplicas(Scenario):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.groups = [Replica("first", directory), Replica("second", directory)]

    def run(self) -> int:
        with ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.stop)
                self.start(group)
            addresses = [group.address for group in self.groups]
            with routing(addresses, self._directory / "round_robin.log", "round_robin") as url:
                _, apart = self.prefixes(url, "round robin")
            with routing(addresses, self._directory / "cache_aware.log") as url:
                alone, together = self.prefixes(url, "cache-aware")
                self.must(
                    f"cache-aware routing sends equal prefixes to one worker group: {alone} of {FAMILIES}",
                    alone == FAMILIES,
                )
                self.must(
                    f"and finds more of them computed: {together:.0f} tokens instead of {apart:.0f}", together > apart
                )
                self.lose_a_rank(url)
                self.lose_a_replica(url)
        return self.verdict()

    def start(self, group: Replica) -> None:
        group.start()
        self.until(f"the {group.name} worker group serves", lambda: group.serving or group.ended, 180)
        if group.ended:
            raise SystemExit(f"NOT: the {group.name} worker group did not start; see its log")

    def prefixes(self, url: str, salt: str) -> tuple[int, float]:
        """Send prompts of all families one after another. Returns the number of families that a single worker group
        answered, and the number of prompt tokens found in the cache."""
        hits = sum(group.hits for group in self.groups)
        owners: list[set[str]] = [set() for _ in range(FAMILIES)]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            (model,) = models(url)
            for member in range(MEMBERS):
                for family in range(FAMILIES):
                    beginning = " ".join(QUESTIONS[2 * family : 2 * family + 2])
                    before = [group.answers for group in self.groups]
                    prompt = f"{salt}: {beginning} {QUESTIONS[2 * FAMILIES + member]}"
                    chunks = list(ask(client, model, prompt, max_tokens=4, temperature=0))
                    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                    owners[family] |= {
                        group.name for group, answers in zip(self.groups, before) if group.answers > answers
                    }
        found = sum(group.hits for group in self.groups) - hits
        alone = sum(len(names) == 1 for names in owners)
        self.say(
            f"{salt}: {alone} of {FAMILIES} prefixes went to one worker group alone; {found:.0f} prompt tokens were "
            "found computed"
        )
        return alone, found

    def lose_a_rank(self, url: str) -> None:
        """Kill the process of one rank. Its worker group restarts behind its gateway, and answers that the target draws
        itself continue."""
        first, _ = self.groups
        epoch = first.metric("smc_epoch")
        with self.load(url) as load:
            self.until(
                "both worker groups answer",
                lambda: all(group.metric("smc_requests_running") > 0 for group in self.groups),
                30,
            )
            first.kill_a_rank()
            self.say("kill -9 of one rank of the first worker group")
            self.until("its worker group is gone", lambda: not first.serving, 30)
            self.until("and serves again", lambda: first.serving and first.metric("smc_epoch") > epoch, 120)
            answers = first.answers
            self.until("and answers", lambda: first.answers > answers, 60)
        self.told(load, "while a rank was lost")
        self.must(
            "no call was lost: what was in flight went on, the rest was sent to the other",
            set(load.ends) <= {"ok", "hanging"},
        )

    def lose_a_replica(self, url: str) -> None:
        """Kill all processes of a replica at once, its gateway included, and start it again."""
        first, second = self.groups
        with self.load(url) as load:
            self.until(
                "both worker groups answer",
                lambda: all(group.metric("smc_requests_running") > 0 for group in self.groups),
                60,
            )
            self.say(f"kill -9 of all {first.kill()} processes of the first worker group")
            answers = second.answers
            self.until("the second answers alone", lambda: second.answers > answers + 2 * CALLERS, 60)
            self.must(f"calls that ended with an error: {load.lost}, no more than were in flight", load.lost <= CALLERS)
            self.start(first)
            self.until("and is back in rotation", lambda: first.answers > 0, 60)
        self.told(load, "while a worker group was lost")

    @contextmanager
    def load(self, url: str) -> Iterator[Load]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG) as client:
            (model,) = models(url)
            with Load(lambda: client, model).running() as load:
                yield load

    def told(self, load: Load, when: str) -> None:
        ends = ", ".join(f"{count} {end}" for end, count in load.ends.most_common() if count)
        self.say(f"calls {when}: {ends}; the longest took {load.longest:.1f} s")
        self.must("none hung", not load.ends["hanging"] and load.longest < HANG)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where the logs go")
    return TwoReplicas(parser.parse_args().directory).run()


if __name__ == "__main__":
    sys.exit(main())
