"""openai-python, unmodified: answers, streams, errors and retries. The answers equal those over gRPC and those of an
engine in this process."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from services.client import Message
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from tests.gateway.harness import PLAIN_CONFIG, local_answer, serving
from tests.openai.asking import LONG, QUESTIONS, post, user

KINDS = [
    {"method": "smc", "particles": 8, "max_tokens": 10},
    {"method": "smc", "particles": 4, "max_tokens": 8, "ess_threshold": 1.0},
    {"method": "target", "max_tokens": 8},
    {"method": "smc", "particles": 3, "max_tokens": 12, "alpha": 1.2, "stop": ["####"]},
    {"method": "exact", "particles": 4, "max_tokens": 8, "temperature": 1.5, "top_p": 0.9},
    {"method": "draft", "max_tokens": 8},
]
ASKED = [(question, {"seed": index, **KINDS[index % len(KINDS)]}) for index, question in enumerate(QUESTIONS[:8])]


def chat_ids(pair, text: str) -> list[int]:
    return pair.tokenizer.chat(user(text))


def create(client, text: str, settings: dict, **fields):
    return client.chat.completions.create(model="demo", messages=user(text), extra_body=settings, **fields)


def joined(stream) -> tuple[str, str, dict]:
    """Return the text, the finish reason and the `smc` block of a streamed chat with one answer."""
    text, reason, ours = "", None, None
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reason, ours = choice.finish_reason or reason, (choice.model_extra or {}).get("smc") or ours
    return text, reason, ours


def test_eight_at_once_and_alone_are_the_engines_own(service, client, pair):
    """Eight requests at once, half of them streamed, get the answers of the in-process engine; alone and over gRPC the
    first gets the same."""

    def at_once(index: int) -> tuple:
        question, settings = ASKED[index]
        if index % 2:
            text, reason, ours = joined(create(client, question, settings, stream=True))
            return text, reason, ours["seed"], ours["statistics"]
        choice = create(client, question, settings).choices[0]
        return choice.message.content, choice.finish_reason, choice.smc["seed"], choice.smc["statistics"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(at_once, range(8)))
    requests = [
        Request(str(index), tuple(chat_ids(pair, question)), SamplingParams(**settings))
        for index, (question, settings) in enumerate(ASKED)
    ]
    local = {
        output.request_id: output.answer for output in local_engine(pair, PLAIN_CONFIG).run(requests) if output.answer
    }
    for index, (text, reason, seed, statistics) in enumerate(found):
        expected = local[str(index)]
        assert (text, seed) == (expected.text, index)
        assert reason == ("length" if expected.finish_reason == "length" else "stop")
        # Exponents of coupled drafting are fitted over all requests, so how often the draft is right depends on earlier
        # ones.
        if statistics is not None and ASKED[index][1]["method"] != "exact":
            assert statistics["rounds"] == expected.statistics.rounds
            assert statistics["log_z"] == pytest.approx(expected.statistics.log_z, abs=1e-3)
    with service.client() as grpc_client:
        for question, settings in ASKED[:1]:
            alone = create(client, question, settings).choices[0].message.content
            assert alone == grpc_client.generate([Message("user", question)], **settings).text


def test_exact_is_the_targets_answer(service, client):
    settings = {"seed": 7, "max_tokens": 12, "logprobs": True}
    exact, target = (
        create(client, QUESTIONS[3], {"method": method}, **settings).choices[0] for method in ("exact", "target")
    )
    assert exact.smc["token_ids"] == target.smc["token_ids"] and exact.message.content == target.message.content
    assert [each.logprob for each in exact.logprobs.content] == pytest.approx(
        [each.logprob for each in target.logprobs.content], abs=1e-4
    )


def test_the_likeliest_tokens(service, client, pair):
    """`top_logprobs` equal the in-process engine's, in a whole answer and in a stream that openai-python assembles."""
    settings = {"seed": 5, "max_tokens": 48, "temperature": 0.8, "logprobs": True, "top_logprobs": 4}
    expected = local_answer(pair, chat_ids(pair, QUESTIONS[1]), method="target", **settings)
    ours = {"method": "target"}
    choice = create(client, QUESTIONS[1], ours, **settings).choices[0]
    asked = {"messages": user(QUESTIONS[1]), "extra_body": ours, **settings}
    with client.chat.completions.stream(model="demo", **asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.content == choice.message.content == expected.text
    for found in (choice, streamed):
        assert [one.token for one in found.logprobs.content] == [
            pair.tokenizer.decode([token]) for token in expected.tokens
        ]
        for one, tops in zip(found.logprobs.content, expected.top_logprobs, strict=True):
            assert [top.logprob for top in one.top_logprobs] == pytest.approx([logp for _, logp in tops], abs=1e-3)
            assert [bytes(top.bytes) for top in one.top_logprobs[:2]] == [
                pair.tokenizer.bytes_of(token) for token, _ in tops[:2]
            ]
            near = [pytest.approx(top.logprob, abs=1e-4) for top in one.top_logprobs]
            assert one.logprob in near or one.logprob < one.top_logprobs[-1].logprob


def test_the_likeliest_tokens_of_a_completion(service, client, pair):
    asked = {"model": "demo", "prompt": "12 + 30 =", "seed": 4, "max_tokens": 10}
    found = client.completions.create(logprobs=3, **asked).choices[0].logprobs
    expected = local_answer(
        pair, pair.tokenizer.encode("12 + 30 ="), seed=4, max_tokens=10, logprobs=True, top_logprobs=3
    )
    for token, logprob, tops, theirs in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, expected.top_logprobs, strict=True
    ):
        assert tops[token] == pytest.approx(logprob, abs=1e-4) and 1 <= len(tops) <= 4
        assert max(tops.values()) == pytest.approx(theirs[0][1], abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="logprobs=21; allowed: true, false, 0"):
        client.completions.create(logprobs=21, **asked)
    with pytest.raises(openai.BadRequestError, match="they mean the same, leave one of them out"):
        client.completions.create(logprobs=2, extra_body={"top_logprobs": 2}, **asked)


def by_id(pair, prompt: tuple[int, ...], scores) -> list:
    """Return prompt log-probabilities in vLLM's format: for each position a dictionary by token id."""
    listed = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        ranked = {token: (score.logprob, score.rank)}
        ranked |= {one: (logprob, rank) for rank, (one, logprob) in enumerate(score.likeliest, 1)}
        listed.append(
            {
                str(one): {
                    "logprob": pytest.approx(logprob, abs=1e-4),
                    "rank": rank,
                    "decoded_token": pair.tokenizer.decode([one]),
                }
                for one, (logprob, rank) in ranked.items()
            }
        )
    return listed


def test_how_likely_prompts_are(service, client, pair):
    """`prompt_logprobs` equal the in-process engine's: beside the choices of a chat, in every choice of a completion,
    with `echo` before the answer, and over gRPC."""
    settings = {"seed": 4, "max_tokens": 6, "prompt_logprobs": 2}
    prompt = chat_ids(pair, QUESTIONS[2])
    expected = local_answer(pair, prompt, **settings)
    found = create(client, QUESTIONS[2], settings)
    assert found.choices[0].message.content == expected.text
    assert found.model_extra["prompt_logprobs"] == by_id(pair, prompt, expected.prompt_logprobs)
    with service.client() as grpc_client:
        theirs = grpc_client.generate([Message("user", QUESTIONS[2])], **settings).prompt_logprobs
    assert [score.logprob for score in theirs] == pytest.approx(
        [score.logprob for score in expected.prompt_logprobs], abs=1e-4
    )
    texts, asked = ["12 + 30 =", "7 - 2 ="], {"model": "demo", "seed": 4, "max_tokens": 3, "n": 2, "logprobs": 1}
    choices = client.completions.create(
        prompt=texts, echo=True, extra_body={"method": "target", "prompt_logprobs": 0}, **asked
    ).choices
    for index, choice in enumerate(choices):
        prompt = pair.tokenizer.encode(texts[index // 2])
        scores = local_answer(pair, prompt, method="target", prompt_logprobs=1, max_tokens=1).prompt_logprobs
        assert choice.model_extra["prompt_logprobs"] == by_id(
            pair, prompt, [one._replace(likeliest=()) for one in scores]
        )
        listed, size = choice.logprobs, len(prompt)
        assert "".join(listed.tokens) == choice.text and choice.text.startswith(texts[index // 2])
        assert listed.token_logprobs[0] is None and listed.top_logprobs[0] is None
        assert listed.token_logprobs[1:size] == pytest.approx([score.logprob for score in scores], abs=1e-4)
        assert [choice.text[at] for at in listed.text_offset[:size]] == [token[0] for token in listed.tokens[:size]]
        assert len(listed.top_logprobs) == len(listed.tokens) == size + len(choice.smc["token_ids"])
    found = client.completions.create(prompt=texts[0], echo=True, **asked | {"max_tokens": 0, "n": 1})
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, found.usage.completion_tokens) == (texts[0], "length", 0)
    assert choice.logprobs.token_logprobs == pytest.approx(
        choices[0].logprobs.token_logprobs[: len(choice.logprobs.tokens)], abs=1e-4
    )
    assert len(choice.logprobs.tokens) == len(pair.tokenizer.encode(texts[0]))
    with pytest.raises(openai.BadRequestError, match="max_tokens=0; allowed: >= 1"):
        client.completions.create(prompt=texts[0], **asked | {"max_tokens": 0})


def test_biases_and_answers_that_must_not_end(service, client, pair):
    """`logit_bias` and `min_tokens`, as OpenAI's clients send them, give the answers of gRPC and of the in-process
    engine."""
    digit, eos = pair.tokenizer.encode("7")[-1], pair.tokenizer.eos_ids[0]
    bias, settings = {str(digit): 4, str(eos): 90}, {"seed": 3, "max_tokens": 12}
    found = create(
        client,
        QUESTIONS[0],
        {"min_tokens": 6, "method": "smc", "particles": 4},
        logit_bias=bias,
        logprobs=True,
        **settings,
    ).choices[0]
    settings |= {"min_tokens": 6, "method": "smc", "particles": 4, "logit_bias": {digit: 4, eos: 90}}
    expected = local_answer(pair, chat_ids(pair, QUESTIONS[0]), **settings)
    assert found.smc["token_ids"] == list(expected.tokens) and len(expected.tokens) == 7, (
        "then the end is all but certain"
    )
    with service.client() as grpc_client:
        assert grpc_client.generate([Message("user", QUESTIONS[0])], **settings).tokens == expected.tokens
    # Nothing is said about its length.
    assert (
        create(client, QUESTIONS[0], {"min_tokens": 2, "method": "smc", "particles": 2}, seed=1).usage.completion_tokens
        > 2
    )


def test_temperature_zero_is_exact(service, client):
    greedy = create(client, QUESTIONS[0], {}, temperature=0, max_tokens=10).choices[0]
    assert greedy.smc["method"] == "exact"
    assert (
        greedy.message.content
        == create(client, QUESTIONS[0], {"method": "target"}, temperature=0, max_tokens=10).choices[0].message.content
    )


def test_a_chat_as_clients_know_it(service, client, pair):
    response = client.chat.completions.with_raw_response.create(
        model="gpt-4o",
        messages=user(QUESTIONS[0]),
        seed=5,
        max_completion_tokens=20,
        user="me",
        logprobs=True,
        top_logprobs=0,
    )
    answer = response.parse()
    assert (answer.object, answer.model) == (
        "chat.completion",
        "demo",
    ) and answer.id == f"chatcmpl-{response.headers['x-request-id']}"
    assert answer._request_id == response.headers["x-request-id"]
    (choice,) = answer.choices
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    usage = answer.usage
    assert (
        usage.completion_tokens == len(tokens) and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    )
    assert usage.prompt_tokens == len(chat_ids(pair, QUESTIONS[0]))
    assert choice.smc["statistics"]["particles"] == 8 and choice.smc["seed"] == 5


def test_a_chat_may_go_on_to_the_end_of_the_context(service, client, pair):
    answer = create(client, "plums and pears " * 110, {"ignore_eos": True, "method": "draft", "seed": 1})
    assert answer.usage.total_tokens == pair.max_context and answer.choices[0].finish_reason == "length"


def test_a_chat_is_no_longer_than_what_there_is_memory_for(pair):
    """With a small pool, a chat without `max_tokens` is limited by the memory there is. A field that a caller leaves
    out must never cause a refusal."""
    engine = EngineConfig(block=4, branches=2, max_slots=16, pages=800)
    with serving(pair, engine, http_port=0) as service, openai.OpenAI(base_url=service.url, api_key="-") as client:
        service.client().generate("x", particles=1, max_tokens=2)
        answer = client.chat.completions.create(
            model="demo-target",
            messages=user("x"),
            seed=1,
            extra_body={"method": "smc", "particles": 16, "ignore_eos": True},
        )
        assert 10 < answer.usage.completion_tokens < 800 / 16


def test_several_answers_share_their_prompt(service, client, pair):
    """The `n` answers of a request share its cached prompt and have different seeds; the first has the request's own
    seed."""
    before = service.metric("smc_prefix_cache_hits_total", group="target")
    text = "There are 17 plums in a box. " * 8
    fields = {"seed": 3, "n": 3, "max_tokens": 6, "temperature": 2.0}
    whole = create(client, text, {}, **fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.smc["seed"] for choice in whole.choices}) == 3 and whole.choices[0].smc["seed"] == 3
    for choice in whole.choices:
        expected = local_answer(pair, chat_ids(pair, text), seed=choice.smc["seed"], max_tokens=6, temperature=2.0)
        assert choice.message.content == expected.text
    shared_tokens = len(chat_ids(pair, text)) // 16 * 16
    assert service.metric("smc_prefix_cache_hits_total", group="target") >= before + 2 * shared_tokens
    assert (
        whole.usage.prompt_tokens == len(chat_ids(pair, text)) and whole.usage.prompt_tokens_details.cached_tokens == 0
    )
    texts = ["", "", ""]
    for chunk in create(client, text, {}, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_stream_with_usage(service, client):
    asked = {"messages": user(QUESTIONS[2]), "model": "demo", "seed": 2, "logprobs": True}
    asked["extra_body"] = {"method": "target"}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    whole = client.chat.completions.create(**asked)
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 4
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("logprobs", [False, True])
def test_usage_on_every_event(client, logprobs):
    """`continuous_usage_stats` of vLLM: each event counts the tokens of its own answer so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"messages": user(QUESTIONS[2]), "model": "demo", "seed": 2, "max_tokens": 20, "logprobs": logprobs}
    asked["extra_body"] = {"method": "target"}
    *chunks, last = client.chat.completions.create(**asked, n=2, stream=True, stream_options=options)
    for index in range(2):
        found = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        counts = [usage.completion_tokens for usage in found]
        assert counts == sorted(counts) and counts[0] <= 8 < counts[-1] and len(set(counts)) > 2
        assert {usage.prompt_tokens for usage in found} == {last.usage.prompt_tokens}
        assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in found)
    ends = [chunk.usage.completion_tokens for chunk in chunks if chunk.choices[0].finish_reason]
    assert sum(ends) == last.usage.completion_tokens and not last.choices
    texts = {"prompt": "x", "model": "demo", "max_tokens": 9, "stream": True, "extra_body": {"ignore_eos": True}}
    *chunks, last = client.completions.create(**texts, stream_options={"continuous_usage_stats": True})
    assert all(chunk.usage.prompt_tokens for chunk in (*chunks, last)) and last.usage.completion_tokens == 9
    plain = client.completions.create(**texts, stream_options={"continuous_usage_stats": False})
    assert all(chunk.usage is None for chunk in plain)


STREAMED = [{}, {"extra_body": {"method": "smc"}}, {"stop": "####", "extra_body": {"method": "target"}}]


@pytest.mark.parametrize("more", STREAMED, ids=str)
def test_a_stream_has_logprobs_with_their_tokens(service, client, more):
    """A stream has each log-probability of the whole answer once, together with its tokens, even while text is held
    back because a stop string may follow."""
    asked = {"messages": user(QUESTIONS[2]), "model": "demo", "seed": 2, "logprobs": True, "max_tokens": 30} | more
    scored = [c.choices[0].logprobs for c in client.chat.completions.create(**asked, stream=True)]
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    pieces = [one.content for one in scored if one is not None]
    assert len(pieces) > 4 and [t.token for piece in pieces for t in piece] == [t.token for t in whole]
    assert [t.logprob for piece in pieces for t in piece] == pytest.approx([t.logprob for t in whole], abs=1e-4)


def test_the_likeliest_tokens_come_at_the_end_of_a_stream(service, client):
    asked = {"messages": user(QUESTIONS[2]), "model": "demo", "seed": 2, "max_tokens": 20}
    chunks = list(client.chat.completions.create(logprobs=True, top_logprobs=2, stream=True, **asked))
    *early, last = [chunk.choices[0].logprobs for chunk in chunks]
    assert not any(early) and all(len(token.top_logprobs) == 2 for token in last.content)


def test_a_streamed_completion_has_logprobs_with_their_tokens(service, client):
    asked = {"model": "demo", "seed": 4, "max_tokens": 30, "prompt": "12 + 30 =", "logprobs": 0}
    whole = client.completions.create(**asked).choices[0].logprobs
    pieces = [c.choices[0].logprobs for c in client.completions.create(stream=True, **asked)]
    pieces = [piece for piece in pieces if piece is not None]
    assert len(pieces) > 2
    for name in ("tokens", "text_offset"):
        assert [one for piece in pieces for one in getattr(piece, name)] == getattr(whole, name)
    found = [value for piece in pieces for value in piece.token_logprobs]
    assert found == pytest.approx(whole.token_logprobs, abs=1e-4)


def test_completions(service, client, pair):
    asked = {"model": "demo", "seed": 4, "max_tokens": 5}
    text = "12 + 30 ="
    plain = client.completions.create(prompt=text, **asked)
    assert plain.choices[0].text == local_answer(pair, pair.tokenizer.encode(text), seed=4, max_tokens=5).text
    assert plain.object == "text_completion" and plain.id.startswith("cmpl-")
    echoed = client.completions.create(prompt=text, echo=True, **asked)
    assert echoed.choices[0].text == text + plain.choices[0].text
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(prompt=text, echo=True, stream=True, **asked)
    )
    assert streamed == echoed.choices[0].text
    several = client.completions.create(prompt=[text, "7 * 8 ="], n=2, **asked)
    assert len(several.choices) == 4 and several.choices[0].text == plain.choices[0].text
    ids = pair.tokenizer.encode(text)
    assert client.completions.create(prompt=ids, echo=True, **asked).choices[0].text == echoed.choices[0].text
    scored = client.completions.create(prompt=ids, logprobs=0, **asked).choices[0]
    assert len(scored.logprobs.tokens) == len(scored.logprobs.token_logprobs) == 5


def test_what_ended_an_answer(service, client):
    stopped = create(client, QUESTIONS[0], {"method": "target"}, temperature=0, stop="####").choices[0]
    assert (stopped.finish_reason, stopped.smc["matched"]) == ("stop", "####") and "#" not in stopped.message.content
    out_of_time = create(client, "x", {**LONG, "time_budget": 0.2}).choices[0]
    assert (out_of_time.finish_reason, out_of_time.smc["finish_reason"]) == ("length", "time_budget")


def test_all_particles(service, client, pair):
    settings = {"method": "smc", "particles": 4, "population": "independent", "seed": 2, "max_tokens": 10}
    choice = create(client, QUESTIONS[0], settings | {"return_particles": True}).choices[0]
    own = local_answer(pair, chat_ids(pair, QUESTIONS[0]), return_particles=True, **settings)
    said = [
        (one["text"], tuple(one["token_ids"]), one["finish_reason"], one["weight"]) for one in choice.smc["particles"]
    ]
    assert said == [(one.text, one.tokens, one.finish_reason.value, pytest.approx(one.weight)) for one in own.particles]
    assert choice.message.content in {one["text"] for one in choice.smc["particles"]}
    assert create(client, QUESTIONS[0], settings).choices[0].smc["particles"] is None


@pytest.mark.slow
def test_asynchronously(service, pair):
    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=service.url, api_key="-") as client:

            async def one(index: int) -> str:
                text, asked = "", {"model": "demo", "messages": user(QUESTIONS[index]), "seed": index, "max_tokens": 6}
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(one(index) for index in range(4)))

    expected = [
        local_answer(pair, chat_ids(pair, QUESTIONS[index]), seed=index, max_tokens=6).text for index in range(4)
    ]
    assert asyncio.run(work()) == expected


def test_models(service, client, pair):
    assert [model.id for model in client.models.list()] == ["demo", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").max_model_len == pair.max_context
    assert client.models.retrieve("demo").weights == "target-weights"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_client_retries_busy_service(pair):
    """The client retries when a busy service says so; an invalid request is sent once."""
    names = ("demo",)
    with (
        serving(pair, http_port=0, max_calls=1, served_model_names=names) as service,
        openai.OpenAI(base_url=service.url, api_key="-", max_retries=4) as client,
    ):
        with service.client() as other, other.stream("x", **LONG) as stream:
            next(stream)
            with pytest.raises(openai.RateLimitError) as caught:
                create(client.with_options(max_retries=0), "x", {}, max_tokens=4)
            assert caught.value.response.headers["retry-after"] == "1"
            with ThreadPoolExecutor(1) as pool:
                answered = pool.submit(create, client, "x", {}, max_tokens=4)
                stream.cancel()
                assert answered.result(30).choices
        before = service.metric("smc_requests_rejected_total", code="INVALID_ARGUMENT", cause="invalid")
        with pytest.raises(openai.BadRequestError):
            create(client, "x", {}, temperature=-1)
        assert service.metric("smc_requests_rejected_total", code="INVALID_ARGUMENT", cause="invalid") == before + 1


WARM = {"seed": 6, "max_tokens": 8, "temperature": 0.7}
BODIES = {
    "/v1/chat/completions": {"messages": user(QUESTIONS[5]), **WARM},
    "/v1/completions": {"prompt": "x", **WARM},
    "/v1/responses": {"input": QUESTIONS[5], "max_output_tokens": 8, "seed": 6, "temperature": 0.7},
    "/v1/messages": {"messages": user(QUESTIONS[5]), **WARM},
}


def methods_of_bodies(service, **more) -> set[str]:
    """The methods by which a service answers a body of each kind that names none."""
    found = [post(service, json.dumps(body | more).encode(), path).json for path, body in BODIES.items()]
    return {(one["choices"][0] if "choices" in one else one)["smc"]["method"] for one in found}


def test_without_a_method_the_answer_is_the_targets_own(service, pair):
    """At temperature 0.7 as well, over every API of HTTP, over gRPC and in the library."""
    target = local_answer(pair, chat_ids(pair, QUESTIONS[5]), method="target", **WARM)
    local = local_answer(pair, chat_ids(pair, QUESTIONS[5]), **WARM)
    assert local.tokens == target.tokens and local.statistics.accepted_per_round > 0
    assert methods_of_bodies(service) == methods_of_bodies(service, temperature=0) == {"exact"}
    with service.client() as client:
        over_grpc = client.generate([Message("user", QUESTIONS[5])], **WARM)
    assert over_grpc.tokens == target.tokens and over_grpc.statistics.accepted_per_round > 0


def test_a_service_whose_default_is_smc(pair):
    """`--default-method smc`: requests that name no method are decoded by SMC, except at temperature 0, and may give
    settings of SMC."""
    expected = local_answer(pair, chat_ids(pair, QUESTIONS[5]), method="smc", alpha=1.5, **WARM)
    with serving(pair, http_port=0, default_method="smc") as service:
        assert methods_of_bodies(service) == {"smc"} and methods_of_bodies(service, temperature=0) == {"exact"}
        with service.client() as client:
            found = client.generate([Message("user", QUESTIONS[5])], alpha=1.5, **WARM)
            greedy = client.generate([Message("user", QUESTIONS[5])], **WARM | {"temperature": 0.0})
    assert found.tokens == expected.tokens and found.statistics.log_z == pytest.approx(
        expected.statistics.log_z, abs=1e-3
    )
    assert greedy.statistics.accepted_per_round > 0


def test_default_method(pair):
    """A request that names no method uses the service's `default_method`, over HTTP and over gRPC."""
    asked = {"seed": 6, "max_tokens": 8}
    expected = local_answer(pair, chat_ids(pair, QUESTIONS[5]), method="target", **asked)
    with (
        serving(pair, http_port=0, default_method="target") as service,
        openai.OpenAI(base_url=service.url, api_key="-") as client,
    ):
        choice = client.chat.completions.create(model="demo-target", messages=user(QUESTIONS[5]), **asked).choices[0]
        assert (choice.message.content, choice.smc["method"]) == (expected.text, "target")
        with service.client() as grpc_client:
            assert grpc_client.generate([Message("user", QUESTIONS[5])], **asked).tokens == expected.tokens
        assert client.chat.completions.create(
            model="demo-target", messages=user("x"), max_tokens=4, extra_body={"method": "smc"}
        ).choices
