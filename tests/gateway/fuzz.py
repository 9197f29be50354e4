"""Malformed and extreme requests of every kind: `python -m tests.gateway.fuzz --requests 100000 --seed 1` starts a
service, sends them, and reports how they ended, what they left behind, and how they affected another client."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc

from loadtest.monitor import RAY, ProcessTree, ProcessUsage, ServedChild, scrape, serve
from services.client import Client
from services.pb import generation_pb2 as pb

CODES = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"}
DOUBLES = (0.0, -0.0, 1e-300, 1e-6, 0.5, 1.0, 1.5, 1e6, 1e300, -1.0, float("inf"), float("-inf"), float("nan"))
INTEGERS = (0, 1, 2, 8, 64, 65, 500, 511, 512, -1, 2**31 - 1, -(2**31))
TEXTS = (
    "",
    "a",
    " ",
    "\n",
    "12",
    "#### 42",
    "é",
    "\u6f22\u5b57",
    "\U0001f600",
    "\x00",
    "<|eos|>",
    "<|user|>",
    "\u0301" * 50,
    "x" * 300,
)
MODES = (0, 1, 2, 3, 4, 5, 99)
GENERATE, ABORT = "/smc.v1.GenerationService/Generate", "/smc.v1.GenerationService/Abort"
METHODS = (*[GENERATE] * 18, ABORT, "/vllm.grpc.engine.VllmEngine/Generate")
TOGETHER = 8
"""Number of requests in flight at a time."""
BYSTANDER = {"method": "target", "max_tokens": 300, "ignore_eos": True, "seed": 1}
"""Settings of an answer that does not depend on the rest of the batch."""
WORSE = 0.25
"""Seconds by which the bystander's longest pause may exceed its longest pause without the other requests."""
MIB = 1 << 20
SERVE = ("--max-slots", "32", "--max-queue", "16")


def sampling(rng: random.Random) -> pb.SamplingParams:
    """Return random sampling settings. Most fields are absent; the others have extreme or valid values."""
    method = rng.choice((pb.METHOD_UNSPECIFIED, pb.METHOD_SMC))
    message = pb.SamplingParams(max_tokens=rng.randrange(1, 30), method=method)
    for each in pb.SamplingParams.DESCRIPTOR.fields:
        if rng.random() < 0.95:
            continue
        kind = {
            each.TYPE_DOUBLE: DOUBLES,
            each.TYPE_INT32: INTEGERS,
            each.TYPE_INT64: (*INTEGERS, 2**63 - 1, -(2**63)),
        }.get(each.type)
        kind = kind or {each.TYPE_BOOL: (True, False), each.TYPE_STRING: TEXTS}.get(each.type, MODES)
        if each.type == each.TYPE_MESSAGE:
            if each.message_type.GetOptions().map_entry:
                getattr(message, each.name).update(
                    zip(rng.choices(INTEGERS, k=rng.choice((1, 3, 12))), rng.choices(DOUBLES, k=12))
                )
            continue
        if each.is_repeated:
            getattr(message, each.name).extend(rng.choices(kind, k=rng.choice((1, 3, 64, 65))))
        else:
            setattr(message, each.name, rng.choice(kind))
    if rng.random() < 0.03:
        del message.stop[:]
        size = rng.choice((1, 15, 16, 250, 1024))
        message.stop.extend(
            "".join(rng.choices("ab\U0001f600\u6f22", k=size)) for _ in range(rng.choice((1, 4, 63, 64)))
        )
    return message


def request(rng: random.Random) -> bytes:
    message = pb.GenerateRequest(
        sampling=sampling(rng), logprobs=rng.random() < 0.2, return_particles=rng.random() < 0.2
    )
    message.top_logprobs = rng.choice((0, 0, 0, 1, 20, 21, -1)) if message.logprobs or rng.random() < 0.1 else 0
    message.request_id = rng.choice(("", "", "same", *TEXTS))
    message.cache_salt = rng.choice(("", "", *TEXTS))
    form = rng.random()
    if form < 0.4:
        message.text = "".join(rng.choices(TEXTS, k=rng.choice((1, 3, 30)))) * rng.choice((1, 1, 1, 100))
    elif form < 0.6:
        message.token_ids.ids.extend(
            rng.choices(range(512), k=rng.choice((0, 1, 5, 200, 480, 511, 600))) + rng.choices((1, 1, 1, 512, -1))
        )
    elif form < 0.9:
        for _ in range(rng.choice((0, 1, 3, 100))):
            message.chat.messages.add(
                role=rng.choice(("user", "user", "assistant", "", "robot")), content=rng.choice(TEXTS)
            )
    elif form < 0.93:  # about as large as a request may be
        message.text = rng.choice("a \u6f22") * rng.choice((20_000, 24_000, 70_000, 73_000, 200_000))
    data = bytearray(message.SerializeToString())
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def ended(channel: grpc.Channel, rng: random.Random) -> str:
    """Send one random request and return its status code; for a code outside `CODES` with the error's message."""
    send = channel.unary_stream(rng.choice(METHODS))
    call = send(request(rng), timeout=rng.choice((0.001, 0.01, 0.1, 60, 60, 60)))
    try:
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.05)
            call.cancel()
        for _ in call:
            pass
        return "OK"
    except grpc.RpcError as error:
        return f"{error.code().name}" if error.code().name in CODES else f"{error.code().name}: {error.details()}"


@dataclass
class Bystander:
    """A client that streams one answer after another. It runs in a process of its own, so that the clients that send
    the other requests do not slow down its Python."""

    address: str
    longest: float = 0.0
    """Longest time in seconds between two messages of an answer."""
    answers: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @contextmanager
    def watching(self) -> Iterator[None]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        here, there = context.Pipe()
        process = context.Process(target=_watch, args=(self.address, there), daemon=True)
        process.start()
        here.recv()
        try:
            yield
        finally:
            here.send("enough")
            self.longest, answers = here.recv()
            self.answers += answers
            process.join()


def _watch(address: str, pipe: Connection) -> None:
    longest, answers = 0.0, Counter()
    with Client(address) as client:
        pipe.send("ready")
        while not pipe.poll():
            tokens: list[int] = []
            with client.stream("x", **BYSTANDER) as stream:
                last = None
                for chunk in stream:
                    now = time.monotonic()
                    longest = max(longest, now - (now if last is None else last))
                    tokens += chunk.tokens
                    last = now
            answers[tuple(tokens)] += 1
    pipe.send((longest, answers))


def fuzz(address: str, numbers: range, seed: int) -> Counter[str]:
    """Send the requests of these numbers and count how they end."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel, ThreadPoolExecutor(TOGETHER) as pool:
        return Counter(pool.map(lambda number: ended(channel, random.Random(f"{seed} {number}")), numbers))


@dataclass(frozen=True)
class Look:
    """State of a service without requests."""

    incarnation: int
    pids: dict[str, set[int]]
    held: dict[str, ProcessUsage]
    busy: dict[str, float]
    """Numbers that must be 0."""

    @classmethod
    def at(cls, served: ServedChild, tree: ProcessTree) -> Look:
        with Client(served.address) as client:
            end = time.monotonic() + 30
            while (info := client.server_info()).running or info.queued:
                assert time.monotonic() < end, "requests of callers who are gone still run"
                time.sleep(0.1)
        time.sleep(5.0)  # it checks its page accounting and returns memory
        metrics = scrape(served.metrics)
        busy = {
            name: value
            for name, value in metrics.items()
            if name.startswith(("smc_kv_pages_leaked", "smc_requests_running"))
        }
        for group in ("draft", "target"):
            used, cached = (metrics[f'smc_kv_pages_{what}{{group="{group}"}}'] for what in ("used", "cached"))
            busy[f"pages of the {group} that requests hold"] = max(0.0, used - cached)
        return cls(info.incarnation, tree.pids(), tree.held(), busy)


def faults(found: Counter[str], before: Look, after: Look, alone: float, beside: float, answers: int) -> list[str]:
    """Compare the states before and after the requests and return a sentence for each fault."""
    wrong = [f"{count} ended with {code}" for code, count in found.items() if code not in CODES]
    if (before.incarnation, before.pids) != (after.incarnation, after.pids):
        wrong.append(
            f"processes were started again: incarnation {before.incarnation} and {after.incarnation}, "
            f"{before.pids} and {after.pids}"
        )
    wrong += [f"{name} is {value:g}" for name, value in after.busy.items() if value]
    for name, now in after.held.items():
        then = before.held[name]
        grown = now.resident - then.resident
        if name == RAY:
            continue
        if grown > max(16 * MIB, 0.05 * then.resident) or now.threads > then.threads + 4 or now.files > then.files + 4:
            wrong.append(f"{name} held {then}, and now {now}")
    if beside > alone + WORSE:
        wrong.append(f"the bystander's longest pause was {beside:.3f} s, without the others {alone:.3f} s")
    if answers != 1:
        wrong.append(f"the bystander got {answers} different answers to the same question")
    return wrong


def run(served: ServedChild, requests: int, seed: int, warm_up: int) -> int:
    tree, bystander = ProcessTree(served.pid), Bystander(served.address)
    fuzz(served.address, range(-warm_up, 0), seed)
    before = Look.at(served, tree)
    with bystander.watching():
        begin = time.monotonic()
        found = fuzz(served.address, range(requests), seed)
        seconds = time.monotonic() - begin
    beside = bystander.longest
    after = Look.at(served, tree)
    with bystander.watching():
        time.sleep(seconds)  # as long as before: more pauses have a longer maximum
    alone = bystander.longest
    print(
        f"{requests} requests in {seconds:.0f} s: "
        + ", ".join(f"{count} {code}" for code, count in found.most_common())
    )
    kinds = len(bystander.answers)
    answers = f"{sum(bystander.answers.values())} answers, {'all alike' if kinds == 1 else f'of {kinds} kinds'}"
    print(f"the bystander's longest pause: {alone:.3f} s alone, {beside:.3f} s beside them; {answers}")
    for name, now in sorted(after.held.items()):
        then = before.held[name]
        memory = f"{then.resident / MIB:.1f} -> {now.resident / MIB:.1f} MiB"
        print(f"{name}: {memory}, {then.threads} -> {now.threads} threads, {then.files} -> {now.files} open files")
    wrong = faults(found, before, after, alone, beside, kinds)
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--warm-up", type=int, default=5000, help="requests before that, in which buffers find their size"
    )
    given = parser.parse_args()
    with serve(SERVE) as started:
        sys.exit(run(started, given.requests, given.seed, given.warm_up))
