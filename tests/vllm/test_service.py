"""vLLM's engine protocol with its own stubs: answers, limits and ends of calls are those of `smc.v1`."""

from __future__ import annotations

import hashlib
import io
import math
import random
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from services.client import Client
from services.gateway.status import ServiceStatus, WorkerGroupStatus
from services.protobuf import RETRY_TRAILER
from smc import demo
from smc.demo.problems import generate
from smc.model.tokenizer import Tokenizer
from smc.scheduler.stats import EngineStats
from tests.gateway.harness import Service, local_answer, serving, until
from tests.pairwise import one_of

QUESTION = generate(1, 1, "test")[0].question
STREAMED = {"temperature": 0.0, "max_tokens": 20}


@contextmanager
def engine(service: Service) -> Iterator[pb_grpc.VllmEngineStub]:
    """The protocol's own stub, on a separate connection."""
    with grpc.insecure_channel(service.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield pb_grpc.VllmEngineStub(channel)


def asked(ids: list[int], *, stream: bool = False, request_id: str = "", **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=ids, original_text="what a router was asked"),
        stream=stream,
        sampling_params=pb.SamplingParams(**sampling),
    )


@contextmanager
def refused(code: grpc.StatusCode, message: str) -> Iterator[pytest.ExceptionInfo]:
    with pytest.raises(grpc.RpcError) as caught:
        yield caught
    assert caught.value.code() is code, caught.value.details()
    assert re.search(message, caught.value.details()), caught.value.details()


@pytest.fixture(scope="module")
def prompt(pair) -> list[int]:
    return pair.tokenizer.chat([{"role": "user", "content": QUESTION}])


def test_an_answer_is_the_targets_own(service, pair, prompt):
    """Answers equal the target's own: with a seed, at temperature 0 without one, whole, streamed, and for a text
    prompt."""
    text = pair.tokenizer.encode("Mia has 12 apples.")
    with engine(service) as stub:
        (drawn,) = stub.Generate(asked(prompt, temperature=1.5, seed=7, max_tokens=16))
        *chunks, end = stub.Generate(asked(prompt, stream=True, **STREAMED))
        (of_text,) = stub.Generate(
            pb.GenerateRequest(text="Mia has 12 apples.", sampling_params=pb.SamplingParams(seed=3, max_tokens=9))
        )
    expected = local_answer(pair, prompt, method="target", temperature=1.5, seed=7, max_tokens=16)
    assert tuple(drawn.complete.output_ids) == expected.tokens
    assert (drawn.complete.prompt_tokens, drawn.complete.completion_tokens) == (len(prompt), len(expected.tokens))
    greedy = local_answer(pair, prompt, method="target", **STREAMED)
    assert tuple(token for response in chunks for token in response.chunk.token_ids) == greedy.tokens
    assert len(chunks) > 3 and sum(response.chunk.completion_tokens for response in chunks) == len(greedy.tokens)
    assert tuple(end.complete.output_ids) == greedy.tokens and end.complete.finish_reason == "length"
    assert tuple(of_text.complete.output_ids) == local_answer(pair, text, method="target", seed=3, max_tokens=9).tokens


def test_why_answers_end(service, pair, prompt):
    """Finish reasons and matched stops: at the context's end, at a stop string, at a stop token and at the end
    token."""
    greedy = local_answer(pair, prompt, method="target", temperature=0, max_tokens=4)
    third = greedy.tokens[2]
    with engine(service) as stub:
        (full,) = stub.Generate(asked([5] * 500, ignore_eos=True, temperature=0.0))
        (stopped,) = stub.Generate(asked(prompt, temperature=0.0, stop=["####"]))
        (by_token,) = stub.Generate(asked(prompt, temperature=0.0, stop_token_ids=[third]))
        (ended,) = stub.Generate(asked(prompt, temperature=0.0))
    assert (full.complete.finish_reason, len(full.complete.output_ids)) == ("length", 12), "all that the context leaves"
    assert (stopped.complete.finish_reason, stopped.complete.matched_stop_str) == ("stop", "####")
    assert (by_token.complete.finish_reason, by_token.complete.matched_token_id) == ("stop", third)
    assert ended.complete.finish_reason == "stop" and ended.complete.WhichOneof("matched_stop") is None


def test_biases_and_answers_that_must_not_end(service, pair, prompt):
    """`logit_bias` and `min_tokens` give the answer of the in-process engine: the end token, though strongly biased,
    comes only after `min_tokens` tokens."""
    greedy = {"temperature": 0.0, "max_tokens": 20}
    first, eos = local_answer(pair, prompt, method="target", **greedy).tokens[0], pair.tokenizer.eos_ids[0]
    settings = greedy | {"min_tokens": 3, "logit_bias": {eos: 100.0, first: -100.0}}
    expected = local_answer(pair, prompt, method="target", **settings).tokens
    with engine(service) as stub:
        (found,) = stub.Generate(asked(prompt, **settings))
    assert tuple(found.complete.output_ids) == expected and first not in expected
    assert expected[3:] == (eos,) and eos not in expected[:3]


@pytest.mark.parametrize("count", one_of(2, 0))
def test_log_probabilities(service, pair, prompt, count):
    """Log-probabilities of the drawn and the likeliest tokens equal the engine's. With `logprobs=0`, the drawn token
    takes the place of the likeliest."""
    expected = local_answer(pair, prompt, method="target", logprobs=True, top_logprobs=count, **STREAMED)
    with engine(service) as stub:
        *chunks, end = stub.Generate(asked(prompt, stream=True, logprobs=count, **STREAMED))
    scored = pb.OutputLogProbs()
    for response in chunks:
        assert list(response.chunk.output_logprobs.token_ids) == list(response.chunk.token_ids)
        scored.MergeFrom(response.chunk.output_logprobs)
    assert len(chunks) == 1 if count else len(chunks) > 2
    for found in (scored, end.complete.output_logprobs):
        assert tuple(found.token_ids) == expected.tokens
        assert found.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        tops = expected.top_logprobs or [((token, logp),) for token, logp in zip(expected.tokens, expected.logprobs)]
        for top, theirs in zip(found.top_logprobs, tops, strict=True):
            assert dict(zip(top.token_ids, top.values)) == pytest.approx(dict(theirs), abs=1e-3)


@pytest.mark.parametrize("count", one_of(2, 0))
def test_how_likely_a_prompt_is(service, pair, prompt, count):
    """`prompt_logprobs` equal the engine's, in the first chunk and in the last message. With 0, the prompt's own token
    takes the place of the likeliest."""
    expected = local_answer(pair, prompt, method="target", prompt_logprobs=count, **STREAMED)
    with engine(service) as stub:
        chunk, end = stub.Generate(asked(prompt, stream=True, prompt_logprobs=count, **STREAMED))
        with pytest.raises(grpc.RpcError, match=r"prompt_logprobs=-1; allowed: 0\.\.20"):
            list(stub.Generate(asked(prompt, prompt_logprobs=-1)))
    assert tuple(chunk.chunk.token_ids) == expected.tokens
    for found in (chunk.chunk.input_logprobs, end.complete.input_logprobs):
        assert list(found.token_ids) == list(prompt)
        assert not found.token_logprobs[0].HasField("value") and not found.top_logprobs[0].values
        scores = expected.prompt_logprobs
        assert [one.value for one in found.token_logprobs[1:]] == pytest.approx([s.logprob for s in scores], abs=1e-4)
        for top, token, score in zip(found.top_logprobs[1:], prompt[1:], scores, strict=True):
            theirs = score.likeliest or ((token, score.logprob),)
            assert dict(zip(top.token_ids, top.values)) == pytest.approx(dict(theirs), abs=1e-3)


def test_several_answers_to_one_call(service, pair, prompt):
    """Each of `n` answers has a seed of its own, and the prompt is computed once."""
    settings = {"temperature": 1.5, "max_tokens": 10}
    with engine(service) as stub:
        responses = list(stub.Generate(asked(prompt, stream=True, n=3, seed=11, **settings)))
        whole = list(stub.Generate(asked(prompt, n=3, seed=11, **settings)))
    for index in range(3):
        expected = local_answer(pair, prompt, method="target", seed=11 + index, **settings).tokens
        assert (
            tuple(t for r in responses if r.HasField("chunk") and r.chunk.index == index for t in r.chunk.token_ids)
            == expected
        )
    for ends in ([r.complete for r in responses if r.HasField("complete")], [r.complete for r in whole]):
        assert sorted(end.index for end in ends) == [0, 1, 2]
    assert all(r.complete.cached_tokens >= len(prompt) // 16 * 16 - 16 for r in whole)


WRONG = [
    ({"frequency_penalty": 2.5}, "frequency_penalty=2.5; allowed: -2..2"),
    ({"presence_penalty": -3.0}, "presence_penalty=-3.0; allowed: -2..2"),
    ({"repetition_penalty": 200.0}, "repetition_penalty=200.0; allowed: 0.01..100"),
    ({"min_tokens": 3, "max_tokens": 2}, r"min_tokens=3; allowed: 0\.\.2, the max_tokens"),
    ({"logit_bias": {5: 101.0}}, "logit_bias contains 101.0 for token 5; allowed: -100 to 100"),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens is given"),
    ({"logprobs": 21}, r"logprobs=21; allowed: 0\.\.20"),
    ({"logprobs": -1}, r"logprobs=-1; allowed: 0\.\.20"),
    ({"n": 129}, "n=129; allowed: 1..128"),
    ({"json_schema": '{"type": "no"}'}, "json_schema: Invalid type: no"),
    ({"choice": pb.ChoiceConstraint(choices=[""])}, "a list of non-empty strings"),
    ({"structural_tag": "{}"}, "structural_tag is given; allowed: json_schema"),
    ({"temperature": -1.0}, "temperature=-1.0; allowed: > 0"),
    ({"top_p": 1.5}, "top_p=1.5; allowed: 0 < top_p <= 1"),
    ({"max_tokens": 0}, "max_tokens=0; allowed: >= 1"),
    ({"max_tokens": 2**32 - 1}, r"max_tokens=4294967295; allowed: >= 1, < 2\*\*31"),
    ({"stop": ["ab"] * 65}, "stop has 65 strings; allowed: at most 64"),
    ({"stop_token_ids": [2**32 - 1]}, "stop_token_ids contains 4294967295; allowed: token ids >= 0"),
]
WRONG_REQUESTS = [
    (pb.GenerateRequest(), "input is missing; allowed: one of tokenized, text"),
    (asked([]), "the prompt is empty"),
    (asked([5] * 600), "has 600 tokens; allowed: at most 511"),
    (asked([1, 2**32 - 1]), r"tokenized.input_ids contains 4294967295; allowed: 0..511"),
    (pb.GenerateRequest(text="x", request_id="x" * 257), "request_id has 257 characters; allowed: at most 256"),
    (pb.GenerateRequest(text="x", kv_transfer_params_json="{}"), "kv_transfer_params_json is given"),
    (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "mm_inputs is given"),
    (
        pb.GenerateRequest(text="x", extra_mm_inputs=[pb.MultimodalInputs()]),
        "extra_mm_inputs is given; this service has text only",
    ),
    (pb.GenerateRequest(text="x", data_parallel_rank=1), "data_parallel_rank=1; allowed: 0"),
]
NEUTRAL = {
    "repetition_penalty": 1.0,
    "json_object": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "top_p": 1.0,
}


def test_what_there_is_not_is_refused_by_name(service):
    """Unsupported or invalid fields are refused by name; fields with values that have no effect are accepted."""
    with engine(service) as stub:
        for sampling, message in WRONG:
            with refused(grpc.StatusCode.INVALID_ARGUMENT, message):
                list(stub.Generate(asked([5], **sampling)))
        for request, message in WRONG_REQUESTS:
            with refused(grpc.StatusCode.INVALID_ARGUMENT, message):
                list(stub.Generate(request))
        assert list(stub.Generate(asked([5], max_tokens=2, **NEUTRAL)))


@pytest.mark.slow
def test_penalties_change_answers(service):
    """Penalties change answers. A repetition penalty of 0, which clients send that do not know the field, has no
    effect."""
    with engine(service) as stub:
        plain, unset, penalised = (
            [
                token
                for one in stub.Generate(asked([5, 6, 5], max_tokens=12, temperature=0.0, ignore_eos=True, **given))
                for token in one.complete.output_ids
            ]
            for given in ({}, {"repetition_penalty": 0.0}, {"frequency_penalty": 2.0, "repetition_penalty": 20.0})
        )
    assert plain == unset != penalised


EXTREMES = {
    FieldDescriptor.TYPE_FLOAT: (math.nan, math.inf, -math.inf, -1.0, 1e-39, 0.5, 1.0, 2.0),
    FieldDescriptor.TYPE_UINT32: (1, 2, 129, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_STRING: ("", "ab", "\0", "é" * 300),
}


def extreme(rng: random.Random) -> pb.GenerateRequest:
    """Return a request for a short answer with some settings at extreme values."""
    message = asked(
        rng.choice(([5], [5], [], [2**32 - 1], [5] * 511)),
        stream=rng.random() < 0.5,
        max_tokens=rng.choice((0, 1, 3, 2**32 - 1)),
    )
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if field.type not in EXTREMES or field.name == "max_tokens" or rng.random() < 0.85:
            continue
        value = rng.choice(EXTREMES[field.type])
        if field.is_repeated:
            getattr(message.sampling_params, field.name).extend([value] * rng.choice((1, 2, 65)))
        else:
            setattr(message.sampling_params, field.name, value)
    return message


def test_extremes_are_answered_or_refused(service, caplog):
    """None of 150 requests with extreme values causes an internal error; some must be answered."""
    rng, ends = random.Random(3), set()
    with engine(service) as stub:
        for _ in range(150):
            try:
                assert list(stub.Generate(extreme(rng), timeout=30))
                ends.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                ends.add(error.code())
    assert ends == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} and "unexpected error" not in caplog.text


def test_limits_and_ends_are_those_of_every_call(pair):
    """Request ids, the limit of calls and aborts are shared with `smc.v1`. A cancelled call releases what it held."""
    with serving(pair, max_calls=2) as service, engine(service) as stub, Client(service.address) as client:
        calls = [stub.Generate(asked([5], request_id=name, stream=True, ignore_eos=True)) for name in ("one", "two")]
        for call in calls:
            next(call)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "2 calls are in flight") as caught:
            list(stub.Generate(asked([5])))
        assert dict(caught.value.trailing_metadata())[RETRY_TRAILER] == "1000"
        calls[1].cancel()
        until(lambda: service.metric("smc_requests_running") == 1)
        with refused(grpc.StatusCode.ALREADY_EXISTS, "request_id='one' is already in use"):
            list(stub.Generate(asked([5], request_id="one")))
        assert stub.GetLoads(pb.GetLoadsRequest()).loads[0].num_running_reqs == 1
        stub.Abort(pb.AbortRequest(request_ids=["one", "nobody"]))
        with refused(grpc.StatusCode.CANCELLED, "the request was aborted"):
            list(calls[0])
        assert not client.abort("one")
        service.wait_until_free()
        service.set_health(draft=False, target=False)
        assert not stub.HealthCheck(pb.HealthCheckRequest()).healthy
        with refused(grpc.StatusCode.UNAVAILABLE, "its workers are starting"):
            list(stub.Generate(asked([5])))


def test_an_abort_ends_all_answers_of_a_call(service):
    ended = threading.Event()

    def call() -> None:
        with engine(service) as stub, refused(grpc.StatusCode.CANCELLED, "aborted"):
            list(stub.Generate(asked([5], request_id="many", n=4, temperature=1.0, ignore_eos=True)))
        ended.set()

    cancelled = service.metric("smc_requests_cancelled_total", by="abort")
    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: len(service.backend.dispatcher.requests) == 4)
    with engine(service) as stub:
        stub.Abort(pb.AbortRequest(request_ids=["many"]))
    caller.join(10)
    assert ended.is_set()
    service.wait_until_free()
    assert service.metric("smc_requests_cancelled_total", by="abort") == cancelled + 4


def test_what_is_served(service, pair, tmp_path):
    with engine(service) as stub:
        model, server = stub.GetModelInfo(pb.GetModelInfoRequest()), stub.GetServerInfo(pb.GetServerInfoRequest())
        health, loads = stub.HealthCheck(pb.HealthCheckRequest()), stub.GetLoads(pb.GetLoadsRequest())
        chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    assert health.healthy and (loads.dp_rank_count, len(loads.loads)) == (1, 1)
    assert (model.served_model_name, model.tokenizer_path) == ("demo-target", str(demo.TARGET))
    assert (model.max_context_length, model.vocab_size, tuple(model.eos_token_ids)) == (
        512,
        512,
        pair.tokenizer.eos_ids,
    )
    assert (model.is_generation, list(model.architectures)) == (True, ["LlamaForCausalLM"])
    assert (server.max_num_seqs, server.data_parallel_size, server.is_paused) == (8, 1, False)
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest() and not any(chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(tmp_path)
    assert (
        Tokenizer.load(tmp_path).fingerprint() == pair.tokenizer.fingerprint()
        and Tokenizer.load(tmp_path).has_chat_template
    )


def test_loads_are_those_of_worker_groups_that_serve(service, monkeypatch):
    """A lost worker group holds nothing, and has no room either."""
    pages = {"draft": 30, "target": 30}
    stats = EngineStats(running=2, queued=1, pages_used={"draft": 15, "target": 10}, pages_total=pages)
    lost = EngineStats(pages_used={"draft": 0, "target": 0}, pages_total=pages)
    groups = (WorkerGroupStatus(1, stats), WorkerGroupStatus(2, lost, has_target=False, has_draft=False))
    found = []
    for shown in (groups, groups[:1], groups[1:]):
        monkeypatch.setattr(service.gateway.handler, "status", lambda shown=shown: ServiceStatus(shown))
        with engine(service) as stub:
            (load,) = stub.GetLoads(pb.GetLoadsRequest()).loads
        found.append((load.num_total_reqs, load.token_usage, load.max_total_num_tokens, load.max_running_requests))
    assert found[0] == found[1] == (3, 0.5, 30, 8) and found[2] == (0, 0, 0, 0)


def test_unsupported_methods(service):
    """Unsupported methods of the protocol fail with UNIMPLEMENTED and name the alternative."""
    with engine(service) as stub:
        for call, message in (
            (lambda: stub.Embed(pb.EmbedRequest()), "no embeddings"),
            (lambda: list(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())), "route by prefixes"),
            (lambda: stub.FlushCache(common_pb2.FlushCacheRequest()), "--no-prefix-cache"),
            (lambda: stub.StartProfile(common_pb2.StartProfileRequest()), "--trace FILE"),
            (lambda: stub.StopProfile(common_pb2.StopProfileRequest()), "--trace FILE"),
        ):
            with refused(grpc.StatusCode.UNIMPLEMENTED, message):
                call()


def test_constrained_answers(service, pair, prompt):
    choice = pb.ChoiceConstraint(choices=["up", "down"])
    with engine(service) as stub:
        for sampling, expression in (({"choice": choice}, "up|down"), ({"regex": "[a-c]{3}"}, "[a-c]{3}")):
            (found,) = stub.Generate(asked(prompt, temperature=1.0, max_tokens=20, **sampling))
            assert re.fullmatch(expression, pair.tokenizer.decode(found.complete.output_ids))
