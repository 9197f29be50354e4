"""Requests of every kind that nobody would send: each ends with a status that says something, and nothing of it is left behind.

As a command it sends as many as are asked for: `python -m tests.gateway.test_fuzz --requests 100000`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc

from services.pb import generation_pb2 as pb
from smc import demo
from smc.engine.local import ModelPair
from smc.runtime.config import EngineConfig
from tests.gateway.harness import Service, serving

CODES = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"}
DOUBLES = (0.0, -0.0, 1e-300, 1e-6, 0.5, 1.0, 1.5, 1e6, 1e300, -1.0, float("inf"), float("-inf"), float("nan"))
INTEGERS = (0, 1, 2, 8, 64, 65, 500, 511, 512, -1, 2**31 - 1, -(2**31))
TEXTS = ("", "a", " ", "\n", "12", "#### 42", "é", "\u6f22\u5b57", "\U0001f600", "\x00", "<|eos|>", "<|user|>", "\u0301" * 50, "x" * 300)
BESIDE = {"max_tokens": 400, "ignore_eos": True, "seed": 1}
"""An answer that does not depend on what else is decoded."""
MODES = (0, 1, 2, 3, 4, 5, 99)


def sampling(rng: random.Random) -> pb.SamplingParams:
    """Each field is absent more often than not; else as extreme as it comes, or sound."""
    message = pb.SamplingParams(max_tokens=rng.randrange(1, 30))
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if rng.random() < 0.95:
            continue
        kind = {field.TYPE_DOUBLE: DOUBLES, field.TYPE_INT32: INTEGERS, field.TYPE_INT64: (*INTEGERS, 2**63 - 1, -(2**63))}.get(field.type)
        kind = kind or {field.TYPE_BOOL: (True, False), field.TYPE_STRING: TEXTS}.get(field.type, MODES)
        if field.message_type is not None:  # a map
            getattr(message, field.name).update(zip(rng.choices(INTEGERS, k=rng.choice((1, 3, 12))), rng.choices(DOUBLES, k=12)))
        elif field.is_repeated:
            getattr(message, field.name).extend(rng.choices(kind, k=rng.choice((1, 3, 64, 65))))
        else:
            setattr(message, field.name, rng.choice(kind))
    return message


def request(rng: random.Random) -> bytes:
    message = pb.GenerateRequest(sampling=sampling(rng), logprobs=rng.random() < 0.2, return_particles=rng.random() < 0.2)
    message.request_id = rng.choice(("", "", "same", *TEXTS))
    message.cache_salt = rng.choice(("", "", *TEXTS))
    form = rng.random()
    if form < 0.4:
        message.text = "".join(rng.choices(TEXTS, k=rng.choice((1, 3, 30)))) * rng.choice((1, 1, 1, 100))
    elif form < 0.6:
        message.token_ids.ids.extend(rng.choices(range(512), k=rng.choice((0, 1, 5, 200, 480, 511, 600))) + rng.choices((1, 1, 1, 512, -1)))
    elif form < 0.9:
        for _ in range(rng.choice((0, 1, 3, 100))):
            message.chat.messages.add(role=rng.choice(("user", "user", "assistant", "", "robot")), content=rng.choice(TEXTS))
    data = bytearray(message.SerializeToString())
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def ended(send: grpc.UnaryStreamMultiCallable, rng: random.Random) -> str:
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


def fuzz(service: Service, requests: int, seed: int) -> Counter[str]:
    """How so many requests end, sent by a few threads at a time, beside two long answers."""
    with grpc.insecure_channel(service.address) as channel, ThreadPoolExecutor(8) as pool, service.client() as client:
        send = channel.unary_stream("/smc.v1.GenerationService/Generate")
        alone = client.generate("x", method="target", **BESIDE).tokens
        beside = [pool.submit(client.generate, "x", method=method, **BESIDE) for method in ("exact", "target")]
        found = Counter(pool.map(lambda number: ended(send, random.Random(f"{seed} {number}")), range(requests)))
        assert [call.result(120).tokens for call in beside] == [alone] * 2
    service.wait_until_free(30.0)
    return found


def test_whatever_is_asked_is_answered_or_refused(shared):
    found = fuzz(shared, 400, seed=1)
    assert set(found) <= CODES, found
    assert found["OK"] > 10 and found["INVALID_ARGUMENT"] > 50


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    config = EngineConfig(block=4, branches=2, max_slots=64, max_queue=64)
    with serving(ModelPair.load(demo.TARGET, demo.DRAFT), config) as under_test:
        begin = time.monotonic()
        print(fuzz(under_test, given.requests, given.seed), f"{time.monotonic() - begin:.0f} s")
