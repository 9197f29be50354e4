"""Every row of the table in docs/errors.md: its status code, its retry hint, and that nothing is left behind. Lost
workers: tests/service/test_faults.py."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.errors import MAX_MESSAGE, shortened
from services.pb import generation_pb2 as pb
from services.protobuf import RETRY_TRAILER
from services.protobuf.generation import sampling_message
from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair
from tests.gateway.harness import LONG, Service, serving, until

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "the header `Host`": "tests/openai/test_hosts.py",
    "the service failed while it decoded": "tests/launch/test_supervisor.py",
    "the draft was lost": "tests/service/test_faults.py",
    "a worker of the target was lost": "tests/service/test_faults.py",
    "the service shut down before": "test_endings.py",
    "the service is shutting down": "test_endings.py",
    "the caller did not read": "test_endings.py",
    "the call's own deadline": "test_endings.py",
    "the caller cancelled": "test_endings.py",
    "`Abort` named": "test_endings.py",
    "the service asks for bearer tokens": "test_security.py",
    "a name that is not served": "tests/openai/test_errors.py",
    "a method of vLLM's engine protocol": "tests/vllm/test_service.py",
}
HERE = {
    "the request cannot be read": "test_malformed_bytes",
    "the request did not arrive": "test_a_request_that_does_not_arrive",
    "a field is wrong": "test_invalid_arguments",
    "the [constraint]": "test_a_constraint_that_fails",
    "`request_id` belongs": "test_an_id_in_use",
    "the queue is full": "test_a_full_queue",
    "the request is larger": "test_a_request_too_large",
    "the service is starting": "test_before_the_workers_are_ready",
    "no server listens": "test_nobody_listens",
    "decoding this request failed": "test_a_model_that_returns_nan",
    "an error in the service itself": "test_an_error_of_our_own",
    "a health check names": "test_a_health_check_of_nothing",
    "there is no such method": "test_no_such_method",
}


def test_every_row_of_the_table_has_a_test():
    """Every row of the table, identified by its beginning, has a test. Fails when a row is added or a test removed."""
    rows = re.findall(
        r"^\| `[A-Z_]+` \| [^|]* \| (.*?) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) == len(HERE) + len(ELSEWHERE) == 26
    for row in rows:
        assert sum(row.startswith(known) for known in (*HERE, *ELSEWHERE)) == 1, row
    assert set(HERE.values()) <= set(globals())


@contextmanager
def refused(code: grpc.StatusCode, message: str, hint: bool = False) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value.details()
    assert re.search(message, caught.value.details()), caught.value.details()
    assert dict(caught.value.trailing_metadata() or ()).get(RETRY_TRAILER) == ("1000" if hint else None)


def ask(service: Service, **fields) -> None:
    with service.stub() as stub:
        list(stub.Generate(pb.GenerateRequest(**{"text": "x", **fields})))


def sampling(**fields) -> dict:
    return {"sampling": pb.SamplingParams(**fields)}


WRONG = [
    ({"text": None}, "prompt is missing; allowed: one of text, token_ids, chat"),
    ({"text": ""}, "the prompt is empty"),
    ({"token_ids": pb.TokenIds()}, "the prompt is empty"),
    ({"token_ids": pb.TokenIds(ids=[1, 512])}, r"token id 512; allowed: 0..511"),
    ({"token_ids": pb.TokenIds(ids=[-1])}, r"token id -1; allowed: 0..511"),
    ({"token_ids": pb.TokenIds(ids=[5] * 600)}, "has 600 tokens; allowed: at most 511"),
    ({"chat": pb.Chat()}, "chat.messages is empty"),
    (
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="robot")])},
        r"chat.messages\[0\].role='robot'; allowed: system, user, assistant",
    ),
    ({"request_id": "x" * 257}, "request_id has 257 characters; allowed: at most 256"),
    (sampling(particles=0), r"particles=0; allowed: 1..64"),
    (sampling(particles=65), r"particles=65; allowed: 1..64"),
    (sampling(particles=60), "particles=60; this engine has max_slots=48"),
    (sampling(method=pb.METHOD_SMC, particles=48, max_tokens=500), "KV pages of the draft model"),
    ({"cache_salt": "x" * 257}, "cache_salt has 257 characters; allowed: at most 256"),
    (sampling(method=pb.METHOD_SMC, min_particles=0), r"min_particles=0; allowed: 1..8, the particles"),
    (sampling(method=pb.METHOD_SMC, particles=4, min_particles=5), r"min_particles=5; allowed: 1..4, the particles"),
    (sampling(method=pb.METHOD_TARGET, min_particles=1), "min_particles=1 has no effect with method='target'"),
    (
        sampling(method=pb.METHOD_SMC, temperature=0.0),
        "temperature=0.0; allowed: > 0 with method='smc'; for greedy decoding, method='exact'",
    ),
    (sampling(temperature=0.0, alpha=2.0), "alpha=2.0 has no effect with method='exact'; leave it out"),
    (sampling(alpha=2.0), "alpha=2.0 has no effect with method='exact'; give method='smc', or leave it out"),
    (
        sampling(draft_temperature=0.5),
        "draft_temperature=0.5 has no effect with verification='walk'; give method='smc', or "
        "verification='rejection', or leave it out",
    ),
    (
        sampling(method=pb.METHOD_EXACT, population=pb.POPULATION_DISTINCT),
        "population='distinct' has no effect with method='exact'",
    ),
    (
        sampling(method=pb.METHOD_SMC, population=pb.POPULATION_DISTINCT, ess_threshold=0.5),
        "ess_threshold=0.5 has no effect with population='distinct'",
    ),
    (sampling(population=5), r"population=5; allowed: 1 \(distinct\), 2 \(independent\)"),
    (sampling(temperature=float("nan")), "temperature=nan; allowed"),
    (sampling(top_p=1.5), "top_p=1.5; allowed: 0 < top_p <= 1"),
    (sampling(top_k=-1), "top_k=-1; allowed: >= 0"),
    (sampling(min_p=1.0), "min_p=1.0; allowed: 0 <= min_p < 1"),
    (sampling(temperature=1e-39), "temperature=1e-39; allowed: > 0, from 1e-06 to 1e[+]06; or 0 = greedy"),
    (sampling(method=pb.METHOD_SMC, draft_temperature=1e-39), "draft_temperature=1e-39; allowed: > 0, from 1e-06"),
    (sampling(method=pb.METHOD_SMC, alpha=0.0), "alpha=0.0; allowed: > 0"),
    (sampling(method=pb.METHOD_SMC, alpha=1e39), "alpha=1e[+]39; allowed: > 0, from 1e-06"),
    (sampling(method=pb.METHOD_SMC, alpha=1e-46, top_k=5), "alpha=1e-46; allowed: > 0, from 1e-06"),
    (sampling(method=pb.METHOD_SMC, ess_threshold=2.0), "ess_threshold=2.0; allowed: 0..1"),
    (sampling(max_tokens=0), "max_tokens=0; allowed: >= 1"),
    (sampling(max_tokens=512), "max_tokens=512 after a prompt of 1 tokens exceeds the context of 512"),
    (sampling(stop=[""]), "stop contains ''; allowed: non-empty strings"),
    (sampling(stop=["ab"] * 65), "stop has 65 strings; allowed: at most 64"),
    (sampling(stop=["a" * 1001]), "stop has strings of 1001 bytes together; allowed: at most 1000"),
    (sampling(stop=["é" * 251, "ü" * 250]), "stop has strings of 1002 bytes together; allowed: at most 1000"),
    (sampling(stop_token_ids=[512]), "stop_token_ids contains 512; allowed: 0..511"),
    (sampling(time_budget=0.0), "time_budget=0.0; allowed: > 0 seconds"),
    (sampling(method=9), r"method=9; allowed: 1 \(smc\), 4 \(exact\), 2 \(target\), 3 \(draft\)"),
    (sampling(resampling=77), r"resampling=77; allowed: 1 \(systematic\)"),
    (sampling(method=pb.METHOD_TARGET, particles=4), "particles=4 has no effect with method='target'"),
    ({**sampling(method=pb.METHOD_DRAFT), "logprobs": True}, "logprobs=True has no effect with method='draft'"),
    ({"top_logprobs": 21, "logprobs": True}, r"top_logprobs=21; allowed: 0\.\.20"),
    ({"top_logprobs": 2}, "top_logprobs=2 has no effect without logprobs"),
]


@pytest.fixture(scope="module")
def small(pair):
    with serving(pair, EngineConfig(block=4, branches=2, max_slots=48, pages=8192)) as service:
        yield service


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_invalid_arguments(small, fields, message):
    """The message names the field, its value and the allowed values."""
    before = small.metric("smc_requests_rejected_total", code="INVALID_ARGUMENT", cause="invalid")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, message):
        ask(small, **fields)
    assert small.metric("smc_requests_rejected_total", code="INVALID_ARGUMENT", cause="invalid") == before + 1
    small.wait_until_free()


def test_abort_needs_an_id(small):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "request_id=''"), small.stub() as stub:
        stub.Abort(pb.AbortRequest())


def test_a_chat_without_a_template(pair):
    tokenizer = type(pair.tokenizer)(pair.tokenizer._tokenizer, pair.tokenizer.eos_ids, {}, None)
    bare = ModelPair(pair.target, pair.draft, tokenizer, pair.max_context)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    with (
        serving(bare) as service,
        refused(grpc.StatusCode.INVALID_ARGUMENT, "no chat template; allowed: a text, or token ids"),
    ):
        ask(service, chat=chat)


def test_an_id_in_use(service):
    request = pb.GenerateRequest(text="x", request_id="twice", sampling=sampling_message(LONG))
    with service.stub() as stub, service.stub() as other:
        call = stub.Generate(request)
        next(call)
        with refused(grpc.StatusCode.ALREADY_EXISTS, "request_id='twice' is already in use"):
            list(other.Generate(request))
        assert next(call).request_id == "twice"
        call.cancel()


def test_a_full_queue(pair):
    engine = EngineConfig(block=4, branches=2, max_slots=16, max_queue=1)
    long = {"text": "x", "sampling": sampling_message(LONG)}
    with serving(pair, engine) as service, service.stub() as stub:
        first = stub.Generate(pb.GenerateRequest(**long))
        until(lambda: service.metric("smc_requests_running") == 1)
        second = stub.Generate(pb.GenerateRequest(**long))
        until(lambda: service.metric("smc_requests_queued") == 1)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "1 requests are waiting; allowed: 1", hint=True):
            ask(service, **long)
        assert service.metric("smc_requests_rejected_total", code="RESOURCE_EXHAUSTED", cause="queue_full") == 1
        first.cancel()
        assert next(second).request_id
        second.cancel()
        service.wait_until_free()


def test_a_request_too_large(pair):
    with serving(pair, max_message_bytes=2000) as service:
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
            ask(service, text="x" * 2000)
        ask(service, text="x" * 100, **sampling(max_tokens=2))


def test_before_the_workers_are_ready(pair):
    with serving(pair, ready=False) as service:
        for draft, target in ((False, False), (True, False)):
            service.set_health(draft, target)
            with refused(grpc.StatusCode.UNAVAILABLE, "not ready: its workers are starting", hint=True):
                ask(service)
        with service.client() as client:
            assert not client.server_info().serving and client.model_info().max_context == 512
        assert service.metric("smc_requests_rejected_total", code="UNAVAILABLE", cause="unavailable") == 2
        for draft in (False, True):
            service.set_health(draft=draft, target=True)
            ask(service, **sampling(max_tokens=2))


def test_nobody_listens(pair):
    with serving(pair) as service:
        service.do(service.gateway.stop())
        with refused(grpc.StatusCode.UNAVAILABLE, "connect"):
            ask(service)


def test_a_constraint_that_fails(service: Service):
    """While the answer is decoded: the caller's own error, which the availability does not count."""
    grammar = "start: e\ne: " + " | ".join(" ".join(["e"] * k) for k in range(2, 40)) + " | /[0-9a-z .]/\n"
    constraint = pb.Constraint(grammar=grammar)
    for method in (pb.METHOD_SMC, pb.METHOD_EXACT, pb.METHOD_TARGET, pb.METHOD_DRAFT):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "^constraint.grammar: the grammar (allows|takes) too m"):
            ask(service, **sampling(method=method, max_tokens=100, seed=1, constraint=constraint))
    service.wait_until_free()


def test_a_model_that_returns_nan(pair):
    """The embedding of one token is NaN: only the request that contains this token fails."""
    broken = type(pair.draft)(pair.draft.config)
    broken.load_state_dict({name: value.clone() for name, value in pair.draft.state_dict().items()})
    broken.requires_grad_(False).eval()
    broken.embed.weight[5] = float("nan")
    with serving(ModelPair(pair.target, broken, pair.tokenizer, pair.max_context)) as service:
        with refused(grpc.StatusCode.INTERNAL, "draft model returned NaN"):
            ask(service, token_ids=pb.TokenIds(ids=[6, 5, 7]), **sampling(method=pb.METHOD_SMC))
        ask(service, token_ids=pb.TokenIds(ids=[6, 7]), **sampling(method=pb.METHOD_TARGET, max_tokens=4))
        assert service.metric("smc_requests_total", status="INTERNAL", finish_reason="none") == 1
        service.wait_until_free()


class Failing:
    async def generate(self, request):
        raise KeyError("a secret of ours")
        yield

    async def abort(self, request_id):
        raise KeyError("a secret of ours")


def test_an_error_of_our_own(pair, caplog):
    """The caller learns the type of the error only; the log has its message and traceback."""
    caplog.set_level(logging.ERROR, "services.gateway")
    said = r"^internal error \(KeyError\); the server's log has the details$"
    with serving(pair, wrap=lambda _: Failing()) as service, refused(grpc.StatusCode.INTERNAL, said):
        ask(service)
    assert "a secret of ours" in caplog.text and "Traceback" in caplog.text


def test_a_health_check_of_nothing(service):
    known = "'', 'smc.v1.GenerationService', 'vllm.grpc.engine.VllmEngine', 'smc.draft', 'smc.target', 'smc.gateway'"
    with (
        grpc.insecure_channel(service.address) as channel,
        refused(grpc.StatusCode.NOT_FOUND, f"service='nothing'; allowed: {known}"),
    ):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nothing"))


def test_no_such_method(service):
    with grpc.insecure_channel(service.address) as channel, refused(grpc.StatusCode.UNIMPLEMENTED, ""):
        channel.unary_unary("/smc.v1.GenerationService/Guess")(b"")


@pytest.mark.parametrize("method", ["Generate", "Abort", "GetModelInfo", "GetServerInfo"])
def test_malformed_bytes(service, caplog, method):
    """Malformed bytes are refused and counted like any other invalid argument, with no name of our classes in the
    message and no traceback in the log."""
    before = service.metric("smc_requests_rejected_total", code="INVALID_ARGUMENT", cause="invalid")
    with grpc.insecure_channel(service.address) as channel:
        send = channel.unary_stream(f"/smc.v1.GenerationService/{method}")
        for data in (b"\xff", b"\x0a\xff\xff\xff\x7f", b"\x0a" * 50_000):
            with refused(
                grpc.StatusCode.INVALID_ARGUMENT, f"^the request of {len(data)} bytes is not a message of this method"
            ):
                list(send(data))
        assert service.metric("smc_requests_rejected_total", code="INVALID_ARGUMENT", cause="invalid") == before + 3
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "is not a message"):
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff")
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "is not a message"):
            list(
                channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(iter([b"\xff"]))
            )
    assert not caplog.text


def test_a_request_that_does_not_arrive(pair):
    with serving(pair, write_timeout=0.3) as service, grpc.insecure_channel(service.address) as channel:
        never, send = threading.Event(), channel.stream_stream("/smc.v1.GenerationService/Generate")

        def wait() -> Iterator[bytes]:
            never.wait(20)
            yield from ()

        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the request did not arrive within 0.3 s"):
            list(send(wait()))
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "the call came without a request"):
            list(send(iter(())))
        never.set()
        assert service.metric("smc_requests_rejected_total", code="RESOURCE_EXHAUSTED", cause="slow_sender") == 1


def test_long_words_are_cut_in_no_time():
    """Messages are cut in the loop that serves all callers; the mark that ends a value stays."""
    begin = time.thread_time()
    assert shortened(f"model={'a' * 999}; allowed: b").endswith("a..; allowed: b")
    assert len(shortened(f"model='a {';' * 100_000} b'; allowed: c")) < 200
    for word in ("a" * 255 + " ", "a" * 256 + " ", "a" * 2000 + "\n", "a "):
        cut = shortened(f"model={word * (2_000_000 // len(word))!r}; allowed: b")
        assert cut.startswith("model='a") and cut.endswith("; allowed: b") and len(cut) <= MAX_MESSAGE
        assert ".." in cut
    assert time.thread_time() - begin < 0.5
