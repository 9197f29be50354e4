"""Measures a service with several worker groups: tokens a second beside one worker group, and what callers notice when
one is killed.

    python -m benchmarks.worker_groups --groups 1 --groups 2 --requests 128 [--method target --method exact]
    [--prompts FILE ..] [--whole-answers] [--kill 16] -- --device cuda --placement shared --target DIR --draft DIR

For each number of worker groups it starts `smcserve serve` with the options after `--`. For each file of prompts,
number of requests and method it keeps as many requests in flight over HTTP, without streams. The prefix cache does not
find a chat that is asked again. From the service's metrics it reads the tokens of all answers, and means: the time of a
round, that in which the draft and the target work (prompts included) and the coordinator plans, the time to the first
token, and the sizes of trees. Answers go on past their end to `--max-tokens`, unless `--whole-answers` is given. With
`--kill`, so many exact streams run twice at the largest number of worker groups: undisturbed, and while a rank of
worker group 1 is killed. It prints how many finish, how many have the same text, and the longest pauses. Every result
is printed at once, all speeds once more as a table at the end. The last line is JSON."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from services.client import Client, Message
from smc.demo.problems import generate
from smc.terminal import out

COMMAND = (sys.executable, "-c", "from services.cli.main import main; main()", "serve")
CHAT = "/v1/chat/completions"
TIMED = "timed the models"
"""Part of the log's lines with the latency model."""
TOKENS = "smc_generation_tokens_total"
MILLISECONDS = {
    "round": ("smc_round_seconds", ""),
    "draft": ("smc_round_part_seconds", "draft"),
    "target": ("smc_round_part_seconds", "target"),
    "coordinator": ("smc_round_part_seconds", "coordinator"),
    "first token": ("smc_time_to_first_token_seconds", ""),
}
"""Means that are printed: the histogram, and its label `part`, empty if it has none."""
OF_TREES = {"rows": "rows", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
"""Means that are printed of the trees of exact decoding, and their metrics."""
Totals = defaultdict[tuple[str, str], float]
"""Values by name of the sample and label `part`, summed over all other labels."""
PROMPTS, PROMPT_SEED = 256, 3
LIMIT = 300.0
"""Maximum seconds of a stream, and until a killed worker group is back."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one service."""

    groups: int
    prompts: str
    """File of the prompts; empty: the demo's problems."""
    method: str
    requests: int
    tokens_a_second: float
    running: tuple[int, ...]
    """Requests that ran at each worker group at the end."""
    means: dict[str, float]
    """By the names of `MILLISECONDS` and `OF_TREES`; those of which there was nothing are left out."""

    @property
    def load(self) -> tuple[int, str, str, int]:
        return self.groups, self.prompts, self.method, self.requests


@dataclass(frozen=True)
class Kill:
    """What happened to the streams while a worker group was killed."""

    streams: int
    finished: int
    equal: int
    """Streams whose text is that of the undisturbed run."""
    moved: int
    """Streams that were at the killed worker group."""
    pauses: tuple[float, ...]
    """Longest pause of each stream in seconds, shortest first."""
    back: float
    """Seconds until the worker group was ready again."""


@dataclass(frozen=True)
class Served:
    """A running service."""

    pid: int
    address: str
    url: str
    """Of OpenAI's API, which serves metrics as well."""
    log: Path

    @property
    def latency(self) -> str:
        """What the log says of the measured times of the models. Other processes than the gateway log a moment late."""
        return "\n".join(line for line in self.log.read_text(errors="replace").splitlines() if TIMED in line)


@contextmanager
def serve(options: Sequence[str]) -> Iterator[Served]:
    """Run `smcserve serve` with these options on free ports until all worker groups serve; at the end, drain it. Raises
    RuntimeError with the end of its log if it does not start."""
    with ExitStack() as free:
        sockets = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, http_port = (one.getsockname()[1] for one in sockets)
    ports = ("--port", str(port), "--http-port", str(http_port))
    with tempfile.NamedTemporaryFile("w") as log:
        child = subprocess.Popen([*COMMAND, *ports, *options], stdout=log, stderr=log, start_new_session=True)
        try:
            while "serving on" not in (said := Path(log.name).read_text(errors="replace")):
                if child.poll() is not None:
                    raise RuntimeError(f"smcserve serve ended with exit code {child.returncode}: {said[-1000:]}")
                time.sleep(0.2)
            yield Served(child.pid, f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", Path(log.name))
        finally:
            child.terminate()
            child.wait()


def chats(path: Path | None) -> list[list[dict[str, str]]]:
    """Return the messages of each chat: those of a JSONL file, or the demo's problems."""
    if path is not None:
        return [json.loads(line)["messages"] for line in path.read_text().splitlines() if line.strip()]
    return [[{"role": "user", "content": one.question}] for one in generate(PROMPT_SEED, PROMPTS, "test")]


def bodies(
    chats: Sequence[list[dict[str, str]]], method: str, load: str, sampling: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield bodies of requests with these chats in an endless loop. Whenever a chat is asked again, in this load or in
    another one, its prompt is not in the prefix cache: no load is faster for coming later. `load`: names it."""
    for number in itertools.count():
        turn, index = divmod(number, len(chats))
        own = {"seed": number, "method": method, "cache_salt": f"load {load}, turn {turn}"}
        yield {"messages": chats[index], **own, **sampling}


async def speed(
    served: Served, requests: int, bodies: Iterator[dict[str, Any]], warm_up: float, window: float
) -> tuple[float, tuple[int, ...], dict[str, float]]:
    """Keep `requests` requests in flight for `warm_up` seconds, and measure for `window` seconds. Return tokens a
    second, the number of requests that ran at each worker group at the end, and means of rounds."""

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.post(served.url + CHAT, json=next(bodies)) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(f"the service answers {response.status}: {answer}")

    async def totals(session: aiohttp.ClientSession) -> tuple[Totals, float]:
        """Return the metrics, and when they were read, in seconds."""
        found: Totals = defaultdict(float)
        async with session.get(served.url + "/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        for sample in (each for one in families for each in one.samples):
            found[sample.name, sample.labels.get("part", "")] += sample.value
        return found, time.monotonic()

    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        asking = [asyncio.create_task(ask(session)) for _ in range(requests)]
        measuring = asyncio.create_task(_difference(lambda: totals(session), warm_up, window))
        done, _ = await asyncio.wait({*asking, measuring}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if measuring not in done:
                next(iter(done)).result()  # raises: such a task ends with an error only
            gained, seconds = measuring.result()
            async with session.get(served.url + "/load") as response:
                load = await response.json()
        finally:
            for task in (*asking, measuring):
                task.cancel()
            await asyncio.gather(*asking, measuring, return_exceptions=True)
    running = tuple(group["running"] for group in load["worker_groups"])
    return gained[TOKENS, ""] / seconds, running, _means(gained)


async def _difference(
    totals: Callable[[], Awaitable[tuple[Totals, float]]], warm_up: float, window: float
) -> tuple[Totals, float]:
    """Return what the metrics gained after the warm-up, and in how many seconds."""
    await asyncio.sleep(warm_up)
    before, begin = await totals()
    await asyncio.sleep(window)
    after, end = await totals()
    return defaultdict(float, {name: value - before[name] for name, value in after.items()}), end - begin


def _means(gained: Totals) -> dict[str, float]:
    """Return the means of what the metrics have gained."""
    sums = {
        shown: (1e3 * gained[f"{of}_sum", part], gained[f"{of}_count", part])
        for shown, (of, part) in MILLISECONDS.items()
    }
    drafts = gained["smc_spec_decode_num_drafts_total", ""]
    sums |= {shown: (gained[f"smc_spec_decode_num_{of}_total", ""], drafts) for shown, of in OF_TREES.items()}
    return {shown: total / count for shown, (total, count) in sums.items() if count}


def kill(served: Served, streams: int, prompts: Sequence[Any], sampling: dict[str, Any]) -> Kill:
    """Run streams undisturbed, then again while the first rank of worker group 1 is killed."""
    with Client(served.address) as client, ThreadPoolExecutor(streams) as pool:

        def stream(number: int) -> tuple[str, float]:
            messages = [Message(one["role"], one["content"]) for one in prompts[number % len(prompts)]]
            text, pause, last = "", 0.0, None
            for chunk in client.stream(messages, method="exact", seed=number, timeout=LIMIT, **sampling):
                now = time.monotonic()
                pause, last = max(pause, now - (last or now)), now
                text += chunk.text
                seen[number] += len(chunk.tokens)
            return text, pause

        seen = [0] * streams
        expected = [text for text, _ in pool.map(stream, range(streams))]
        # Found first: on a GPU streams end within a second.
        rank = _rank_of(served.pid, "worker group 1, ")
        seen[:] = [0] * streams
        calls = [pool.submit(stream, number) for number in range(streams)]
        while min(seen) < sampling["max_tokens"] // 4 and not any(call.done() for call in calls):
            time.sleep(0.01)
        moved = client.server_info().worker_groups[1].running
        begin = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        found = [call.result() for call in calls if call.exception() is None]
        equal = sum(call.exception() is None and call.result()[0] == text for call, text in zip(calls, expected))
        while client.health("smc.worker_group.1") != "SERVING" and time.monotonic() - begin < LIMIT:
            time.sleep(0.2)
        back = time.monotonic() - begin
    pauses = tuple(sorted(round(pause, 3) for _, pause in found))
    return Kill(streams, len(found), equal, moved, pauses, back)


def _rank_of(pid: int, name: str) -> int:
    """Return the process id of a worker group's rank with the target."""
    for process in psutil.Process(pid).children(recursive=True):
        title = " ".join(process.cmdline())
        if name in title and ("target rank 0" in title or "shared rank 0" in title):
            return process.pid
    raise RuntimeError(f"there is no rank of {name!r}")


def speed_table(speeds: Sequence[Speed]) -> Table:
    columns = ("worker groups", "prompts", "requests", "method", "tok/s", "x target", "x one", "running")
    table = Table(*columns, *(f"{name} ms" for name in MILLISECONDS), *OF_TREES, title="Tokens a second of the service")
    for one in speeds:
        target, alone = replace(one, method="target"), replace(one, groups=1)
        ratios = (_ratio(one, other, speeds) for other in (target, alone))
        running = " + ".join(map(str, one.running))
        rate = f"{one.tokens_a_second:,.0f}"
        means = (f"{one.means[name]:.1f}" if name in one.means else "" for name in (*MILLISECONDS, *OF_TREES))
        table.add_row(str(one.groups), one.prompts, str(one.requests), one.method, rate, *ratios, running, *means)
    return table


def _ratio(one: Speed, other: Speed, speeds: Sequence[Speed]) -> str:
    """Return the speed of `one` over that of the load of `other`; empty if that was not measured."""
    found = next((each for each in speeds if each.load == other.load), None)
    return "" if found is None else f"{one.tokens_a_second / found.tokens_a_second:.2f}"


def main(given: Sequence[str]) -> dict[str, Any]:
    own, options = list(given), []
    if "--" in own:
        at = own.index("--")
        own, options = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, action="append", required=True, help="number of worker groups")
    parser.add_argument("--requests", type=int, action="append", default=[], help="requests in flight")
    parser.add_argument("--method", action="append", help="method of the requests in flight; default: exact")
    parser.add_argument("--kill", type=int, default=0, help="streams under which a worker group is killed")
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL file of chats; --kill takes the first")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--whole-answers", action="store_true", help="answers end where they end")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before measuring")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of measuring")
    args = parser.parse_args(own)
    files = {"" if path is None else path.stem: path for path in args.prompts or [None]}
    if args.prompts and len(files) < len(args.prompts):
        parser.error(f"--prompts {' --prompts '.join(map(str, args.prompts))}: allowed: files of different names")
    prompts = {name: chats(path) for name, path in files.items()}
    sampling = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "ignore_eos": not args.whole_answers,
    }
    loads = list(itertools.product(prompts, args.requests, args.method or ["exact"]))
    speeds: list[Speed] = []
    killed = None
    for groups in args.groups:
        begin, told = time.monotonic(), False
        with serve([*options, "--worker-groups", str(groups)]) as served:
            out.print(f"worker groups: {groups}, ready after {time.monotonic() - begin:.0f} s")
            for name, requests, method in loads:
                asked = bodies(prompts[name], method, f"{len(speeds)}", sampling)
                found = asyncio.run(speed(served, requests, asked, args.warm_up, args.seconds))
                speeds.append(Speed(groups, name, method, requests, *found))
                what = " ".join(filter(None, (name, method)))
                means = "".join(f"; {shown} {mean:.1f}" for shown, mean in found[2].items())
                out.print(f"{requests} requests, {what}: {found[0]:,.0f} tokens a second{means}", soft_wrap=True)
                # The latency model reaches the log a moment late, and nothing is timed with drafting=always.
                if not told and (latency := served.latency):
                    told = True
                    out.print(latency, soft_wrap=True, markup=False, highlight=False)
            if args.kill and groups == max(args.groups) and groups > 1:
                killed = kill(served, args.kill, next(iter(prompts.values())), sampling)
                out.print(
                    f"worker group 1 killed under {killed.streams} streams, {killed.moved} of them its own: "
                    f"{killed.finished} finish, {killed.equal} with the text of the undisturbed run; longest pauses "
                    f"{killed.pauses} s; back after {killed.back:.1f} s"
                )
    if speeds:
        out.print(speed_table(speeds))
    results = {"speeds": [asdict(one) for one in speeds], "kill": killed and asdict(killed)}
    out.print(json.dumps(results), soft_wrap=True, markup=False, highlight=False)
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
