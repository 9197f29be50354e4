"""Output lines have OpenAI's shape, and all their numbers are valid JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from services.backend import RequestFailed, Unavailable
from services.batch.lines import RequestReader, answered, refused
from services.launch.config import WorkerGroupConfig
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, PromptToken
from tests.batch.asking import answer_of, chat, completion, line
from tests.openai.test_reasoning import thinking


def record_of(pair, document, **changes):
    asked = line(document, 3)
    requests = RequestReader(pair, 0).build(asked)
    record = answered(asked, requests, [replace(answer_of(each), **changes) for each in requests], pair, "smc_1", 1234)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    return record


def test_a_chat(pair):
    record = record_of(pair, chat("mine"), text="2", tokens=(5, 6), cached_tokens=16)
    body = record["response"]["body"]
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("mine", None, 200)
    assert record["id"].startswith("batch_req_") and body["id"].startswith("chatcmpl-")
    assert (body["object"], body["created"], body["model"], body["system_fingerprint"]) == (
        "chat.completion",
        1234,
        "target",
        "smc_1",
    )
    choice = {"index": 0, "message": {"role": "assistant", "content": "2"}, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice | {"smc": body["choices"][0]["smc"]}]
    usage = body["usage"]
    assert usage["completion_tokens"] == 2 and usage["total_tokens"] == usage["prompt_tokens"] + 2
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert {"particles_left", "preemptions"} <= set(body["choices"][0]["smc"]["statistics"])
    assert (
        body["choices"][0]["smc"]["statistics"]["particles"] == 8
        and body["choices"][0]["smc"]["finish_reason"] == "eos"
    )


@pytest.mark.parametrize("continues", [True, False])
def test_a_continued_message_has_no_reasoning(pair, continues):
    """As over HTTP, an answer that continues a message is not divided: its reasoning would be before it."""
    changed = replace(pair, tokenizer=thinking(pair.tokenizer))
    document = chat("mine")
    if continues:
        document["body"]["messages"].append({"role": "assistant", "content": "It is"})
        document["body"]["continue_final_message"] = True
    record = record_of(changed, document, text="<think>1 + 1</think>2")
    message = record["response"]["body"]["choices"][0]["message"]
    found = (message.get("reasoning_content"), message["content"])
    assert found == ((None, "<think>1 + 1</think>2") if continues else ("1 + 1", "2"))


def test_scored_prompts(pair):
    """`prompt_logprobs` are beside the answers of a chat and in every choice of a completion, also with `max_tokens` 0.
    Only the first request of each prompt computes them."""
    scores = tuple(PromptToken(-0.5 * rank, rank, ((7, -0.1),)) for rank in range(1, 60))

    def body_of(document):
        (first, *others) = RequestReader(pair, 0).build(line(document, 3))
        assert [one.params.prompt_logprobs for one in others] == [None] * len(others)
        size = len(first.prompt) - 1
        return record_of(pair, document, prompt_logprobs=scores[:size], logprobs=(-1.0,) * 3)["response"]["body"], first

    body, request = body_of(chat("mine", n=2, prompt_logprobs=0))
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(request.prompt)
    assert [*body["prompt_logprobs"][2]] == [str(request.prompt[2])] and "prompt_logprobs" not in body["choices"][0]
    body, request = body_of(completion("mine", n=2, prompt_logprobs=1))
    for choice in body["choices"]:
        assert choice["prompt_logprobs"][1]["7"] == {
            "logprob": -0.1,
            "rank": 1,
            "decoded_token": pair.tokenizer.decode([7]),
        }
    body, request = body_of(completion("mine", echo=True, logprobs=True, max_tokens=0))
    (choice,) = body["choices"]
    assert choice["logprobs"]["token_logprobs"] == [
        None,
        *(score.logprob for score in scores[: len(request.prompt) - 1]),
    ]
    assert body["usage"]["completion_tokens"] == 0 and choice["text"] == pair.tokenizer.decode(request.prompt)


def test_a_completion(pair):
    body = record_of(pair, completion("mine", method="target"), text="2")["response"]["body"]
    assert (body["object"], body["choices"][0]["text"], body["choices"][0]["smc"]["statistics"]) == (
        "text_completion",
        "2",
        None,
    )
    exact = record_of(pair, completion("mine", method="exact"))["response"]["body"]["choices"][0]["smc"]
    assert exact["method"] == "exact" and {"accepted_per_round", "hits", "misses"} <= set(exact["statistics"])


def test_several_answers(pair):
    body = record_of(pair, completion("mine", prompt=["one", "two"], n=2, echo=True), text="!")["response"]["body"]
    assert [(each["index"], each["text"]) for each in body["choices"]] == [
        (0, "one!"),
        (1, "one!"),
        (2, "two!"),
        (3, "two!"),
    ]
    assert len({each["smc"]["seed"] for each in body["choices"]}) == 4
    each = [len(pair.tokenizer.encode(prompt)) for prompt in ("one", "two")]
    assert body["usage"]["prompt_tokens"] == sum(each)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP_TOKEN, "stop"),
        (FinishReason.STOP_STRING, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.TIME_BUDGET, "length"),
    ],
)
def test_finish_reasons(pair, reason, said):
    body = record_of(pair, chat("a"), finish_reason=reason)["response"]["body"]
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["smc"]["finish_reason"]) == (said, reason.value)


def test_log_probabilities(pair):
    tokens = tuple(pair.tokenizer.encode("12 apples"))
    values = {"tokens": tokens, "logprobs": (-0.5,) * (len(tokens) - 1) + (math.nan,), "text": "12 apples"}
    body = record_of(pair, completion("a", logprobs=True), **values)["response"]["body"]
    found = body["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == "12 apples" and found["token_logprobs"] == [-0.5] * (len(tokens) - 1) + [None]
    assert [
        ("12 apples")[offset : offset + len(token)] for offset, token in zip(found["text_offset"], found["tokens"])
    ] == found["tokens"]
    assert body["choices"][0]["smc"]["token_ids"] == list(tokens)
    content = record_of(pair, chat("a", logprobs=True), **values)["response"]["body"]["choices"][0]["logprobs"][
        "content"
    ]
    assert b"".join(bytes(each["bytes"]) for each in content) == b"12 apples" and content[0]["logprob"] == -0.5


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("n=2; allowed: 1"), "invalid", "line 3: n=2; allowed: 1"),
        (RequestFailed("NaN"), "failed", "line 3: NaN"),
        (Unavailable("gone"), "unavailable", "line 3: gone"),
        (KeyError("secret"), "internal", "line 3: internal error (KeyError); the server's log has the details"),
    ],
)
def test_why_there_is_no_answer(error, code, message):
    record = refused(line(chat("a"), 3), error)
    assert record["custom_id"] == "a" and record["response"] is None
    assert record["error"] == {"code": code, "message": message}


def test_the_fingerprint_changes_with_what_answers_depend_on():
    def of(**engine) -> str:
        return WorkerGroupConfig(engine=EngineConfig(**engine)).serving_pair().fingerprint()

    plain = of()
    assert of(max_slots=8, micro_batches=2, prefill_chunk=64, prefix_cache=False) == plain
    changed = [of(block=4), of(branches=2), of(form="lockstep"), of(max_context=100)]
    assert len({plain, *changed}) == 5
    assert WorkerGroupConfig(dtype="bfloat16").serving_pair().fingerprint() != plain
