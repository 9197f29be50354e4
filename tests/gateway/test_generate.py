"""Answers over gRPC equal those of the in-process engine, whatever the form of the prompt and the rest of the batch,
and are streamed as they become final."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from services.client import Message, ServiceError
from services.gateway.status import ServiceStatus, WorkerGroupStatus
from services.pb import generation_pb2 as pb
from smc.demo.problems import generate
from smc.scheduler.stats import EngineStats
from smc.types import ModelRole, Numerics
from tests.gateway.harness import LONG, LocalBackend, local_answer, serving

QUESTIONS = [problem.question for problem in generate(1, 8, "test")]


def chat_ids(pair, text: str) -> list[int]:
    return pair.tokenizer.chat([{"role": "user", "content": text}])


def test_an_answer_is_the_engines_own(service, pair):
    asked = {"method": "smc", "particles": 6, "seed": 11, "max_tokens": 14, "logprobs": True, "top_logprobs": 4}
    expected = local_answer(pair, chat_ids(pair, QUESTIONS[0]), **asked)
    with service.client() as client:
        found = client.generate([Message("user", QUESTIONS[0])], **asked)
    assert (found.text, found.tokens, found.seed) == (expected.text, expected.tokens, 11)
    assert (found.finish_reason, found.matched) == (expected.finish_reason, expected.matched)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (expected.prompt_tokens, len(expected.tokens))
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len(found.top_logprobs) == len(found.tokens)
    for tops, theirs in zip(found.top_logprobs, expected.top_logprobs):
        assert dict(tops) == pytest.approx(dict(theirs), abs=1e-3) and len(tops) == 4
    assert found.statistics.log_z == pytest.approx(expected.statistics.log_z, abs=1e-3)
    for name in ("particles", "rounds", "resamples", "draft_tokens", "target_tokens"):
        assert getattr(found.statistics, name) == getattr(expected.statistics, name), name


@pytest.mark.slow
def test_particles_are_the_engines_own(service, pair):
    """Returned particles equal the engine's: several distinct ones, all eight independent ones, and with other methods
    the answer alone."""
    prompt = chat_ids(pair, QUESTIONS[2])
    for settings, counts in (
        ({"method": "smc", "temperature": 2.0}, range(2, 9)),
        ({"method": "smc", "temperature": 2.0, "population": "independent"}, [8]),
        ({"method": "exact"}, [1]),
    ):
        asked = {"seed": 4, "max_tokens": 12, "return_particles": True, **settings}
        expected = local_answer(pair, prompt, **asked)
        with service.client() as client:
            found = client.generate(prompt, **asked)
        assert [(p.tokens, p.text, p.finish_reason) for p in found.particles] == [
            (p.tokens, p.text, p.finish_reason) for p in expected.particles
        ]
        weights = [p.weight for p in found.particles]
        assert weights == pytest.approx([p.weight for p in expected.particles], abs=1e-4) and sum(
            weights
        ) == pytest.approx(1)
        assert len(weights) in counts
        assert settings.get("population") == "independent" or len({p.tokens for p in found.particles}) == len(weights)
        assert found.tokens in {p.tokens for p in found.particles}


def test_exact_decoding_is_the_targets_own_answer(service, pair):
    prompt, asked = chat_ids(pair, QUESTIONS[3]), {"seed": 7, "max_tokens": 16}
    with service.client() as client:
        exact = client.generate(prompt, method="exact", particles=4, logprobs=True, **asked)
        plain = client.generate(prompt, method="target", logprobs=True, **asked)
    assert (exact.tokens, exact.finish_reason) == (plain.tokens, plain.finish_reason)
    assert exact.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    statistics = exact.statistics
    assert (
        statistics.accepted_per_round > 1
        and statistics.hits + statistics.misses == statistics.rounds - statistics.alone_rounds
    )
    assert (
        service.metric("smc_spec_decode_num_drafts_total", verification="walk")
        >= statistics.rounds - statistics.alone_rounds
    )
    assert service.metric("smc_spec_decode_num_hits_total", verification="walk") >= statistics.hits


def test_the_three_forms_of_a_prompt(service, pair):
    ids = chat_ids(pair, QUESTIONS[1])
    asked = {"seed": 5, "max_tokens": 12, "method": "target"}
    expected = local_answer(pair, ids, **asked)
    with service.client() as client:
        assert client.generate([Message("user", QUESTIONS[1])], **asked).tokens == expected.tokens
        assert client.generate(ids, **asked).tokens == expected.tokens
        text = "Mia has 12 apples."
        assert client.generate(text, **asked).tokens == local_answer(pair, pair.tokenizer.encode(text), **asked).tokens


def test_a_long_text_is_the_same_text(service, pair):
    """A long text is encoded in a thread to the same tokens. The text exceeds the context, so the refusal reports its
    number of tokens."""
    text = "apples and pears " * 350
    with (
        service.client() as client,
        pytest.raises(Exception, match=f"has {len(pair.tokenizer.encode(text))} tokens; allowed: at most 511"),
    ):
        client.generate(text)


@pytest.mark.slow
def test_batch_does_not_change_answers(service, pair):
    """Five different calls at once, each on its own connection, give the answers they would give alone."""
    settings = [{"method": "smc", "particles": 2 + i, "seed": i, "max_tokens": 10 + 2 * i} for i in range(4)] + [
        {"method": "target", "seed": 7, "max_tokens": 12}
    ]

    def call(question: str, sampling: dict) -> tuple[int, ...]:
        with service.client() as client:
            return client.generate([Message("user", question)], **sampling).tokens

    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(call, QUESTIONS[:5], settings))
    for question, sampling, tokens in zip(QUESTIONS, settings, found):
        assert tokens == local_answer(pair, chat_ids(pair, question), **sampling).tokens


@pytest.mark.slow
def test_one_connection_carries_many_calls(service, pair):
    asked = {"method": "smc", "particles": 4, "seed": 3, "max_tokens": 12}
    expected = [local_answer(pair, chat_ids(pair, q), **asked).text for q in QUESTIONS[:4]]
    with service.client() as client, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda q: client.generate([Message("user", q)], **asked).text, QUESTIONS[:4]))
    assert found == expected


def test_text_and_tokens_come_as_they_become_final(service):
    with (
        service.client() as client,
        client.stream([Message("user", QUESTIONS[2])], method="target", temperature=0, max_tokens=30) as stream,
    ):
        chunks = list(stream)
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == stream.completion.text
    assert tuple(token for chunk in chunks for token in chunk.tokens) == stream.completion.tokens


def test_only_the_last_response_has_the_end(service):
    with service.stub() as stub:
        responses = list(
            stub.Generate(pb.GenerateRequest(text="x", request_id="mine", sampling=pb.SamplingParams(max_tokens=9)))
        )
    assert {response.request_id for response in responses} == {"mine"}
    assert [response.HasField("finish") for response in responses] == [False] * (len(responses) - 1) + [True]


def test_absent_settings_have_the_librarys_defaults(service):
    """Absent settings get the library's defaults: a new request id, a random seed that is reported, and at most 256
    tokens or as many as fit into the context."""
    with service.stub() as stub:
        long = list(
            stub.Generate(
                pb.GenerateRequest(text="x", sampling=pb.SamplingParams(ignore_eos=True, method=pb.METHOD_DRAFT))
            )
        )
        full = pb.TokenIds(ids=[5] * 500)
        first = list(stub.Generate(pb.GenerateRequest(token_ids=full, sampling=pb.SamplingParams(ignore_eos=True))))
        own = {"method": pb.METHOD_EXACT, "particles": 8, "top_p": 1.0}
        spelt_out = pb.SamplingParams(ignore_eos=True, seed=first[-1].finish.seed, **own)
        again = list(stub.Generate(pb.GenerateRequest(token_ids=full, sampling=spelt_out)))
    assert len(first[0].request_id) == 32 and first[0].request_id != again[0].request_id
    assert [t for r in first for t in r.token_ids] == [t for r in again for t in r.token_ids]
    assert first[-1].finish.reason == pb.FINISH_REASON_LENGTH
    assert long[-1].finish.usage.completion_tokens == 256
    assert first[-1].finish.usage.completion_tokens == 12


def test_statistics_and_log_probabilities_only_where_they_mean_something(service):
    with service.stub() as stub:
        plain = list(
            stub.Generate(
                pb.GenerateRequest(text="x", sampling=pb.SamplingParams(method=pb.METHOD_TARGET, max_tokens=5))
            )
        )
        sampling = pb.SamplingParams(method=pb.METHOD_SMC, max_tokens=5)
        smc = list(stub.Generate(pb.GenerateRequest(text="x", sampling=sampling, logprobs=True)))
    assert not plain[-1].finish.HasField("statistics") and not plain[-1].finish.logprobs
    assert smc[-1].finish.statistics.particles == 8
    assert len(smc[-1].finish.logprobs) == smc[-1].finish.usage.completion_tokens


def test_what_ended_the_answer(service):
    with service.client() as client:
        stopped = client.generate([Message("user", QUESTIONS[0])], method="target", temperature=0, stop=["####"])
        token = stopped.tokens[3]
        by_token = client.generate(
            [Message("user", QUESTIONS[0])], method="target", temperature=0, stop_token_ids=[token]
        )
        out_of_time = client.generate("x", method="smc", particles=16, max_tokens=400, ignore_eos=True, time_budget=0.2)
    assert (stopped.finish_reason, stopped.matched) == ("stop_string", "####") and "#" not in stopped.text
    assert (by_token.finish_reason, by_token.matched) == ("stop_token", token)
    assert out_of_time.finish_reason == "time_budget" and 0 < len(out_of_time.tokens) < 400


def test_what_is_served(service, pair):
    with service.client() as client:
        models, server = client.model_info(), client.server_info()
        assert client.health() == client.health("smc.draft") == client.health("smc.target") == "SERVING"
    assert (models.target.family, models.target.parameters) == (
        "llama",
        sum(p.numel() for p in pair.target.parameters()),
    )
    assert (models.vocab_size, models.max_context, models.eos_token_ids) == (
        pair.tokenizer.size,
        512,
        pair.tokenizer.eos_ids,
    )
    assert models.has_chat_template
    assert (server.form, server.block, server.branches, server.max_slots, server.link) == (
        "lookahead",
        4,
        2,
        64,
        "local",
    )
    assert server.default_max_tokens == 8192
    assert (server.max_queue, server.max_calls, server.max_message_bytes) == (0, 1024, (64 << 10) + 16 * 512)
    assert server.serving and server.incarnation == 3 and server.uptime_seconds > 0 and server.version


def test_the_order_of_sums_is_that_of_all_models_as_they_run():
    def status(*models: tuple[Numerics, Numerics]) -> ServiceStatus:
        stats = [EngineStats(numerics=dict(zip(ModelRole, both))) for both in models]
        return ServiceStatus((WorkerGroupStatus(1), *(WorkerGroupStatus(1, one) for one in stats)))

    invariant, fastest = (Numerics.INVARIANT,) * 2, (Numerics.FASTEST, Numerics.INVARIANT)
    assert status().numerics is None, "no worker group has reported it"
    assert status(invariant, invariant).numerics is Numerics.INVARIANT
    assert status(invariant, fastest).numerics is Numerics.FASTEST


def test_among_how_many_ranks_the_draft_is_divided(pair, monkeypatch):
    """Worker groups that choose it may do so differently; GetModelInfo names the choice of the first that has."""
    groups = [WorkerGroupStatus(1)]
    monkeypatch.setattr(LocalBackend, "status", lambda self: ServiceStatus(tuple(groups)))
    with serving(pair) as service, service.client() as client:
        assert client.model_info().draft.tensor_parallel == 1
        groups += [WorkerGroupStatus(1, draft_degree=degree) for degree in (2, 1)]
        assert [group.draft_tensor_parallel for group in client.server_info().worker_groups] == [0, 2, 1]
        models = client.model_info()
    assert (models.draft.tensor_parallel, models.target.tensor_parallel) == (2, 1)


def test_an_id_is_free_again_at_once(service):
    """A request id can be reused at once: eight calls in a row have the same id."""
    with service.client() as client:
        for _ in range(8):
            client.generate("x", request_id="again", max_tokens=2, particles=1)


def test_one_connection_cannot_take_more_than_its_share(pair):
    """Beyond `max_concurrent_streams` calls on a connection, a further call waits in the client or is refused; on
    another connection it is answered."""
    with serving(pair, max_concurrent_streams=2) as service, service.client() as client, service.stub() as stub:
        streams = [client.stream("x", **LONG) for _ in range(2)]
        for stream in streams:
            next(stream)
        with pytest.raises(ServiceError) as caught:
            client.generate("x", timeout=0.2, max_tokens=2)
        assert caught.value.code.name in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
        assert service.metric("smc_requests_running") == 2
        assert list(stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=2, particles=1))))
