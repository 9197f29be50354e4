"""`/v1/responses` with openai-python: the same answers as those of a chat, as items and events."""

from __future__ import annotations

import json
import random

import jsonschema
import openai
import pytest

from services.openai.bodies import BadRequest
from services.openai.parts import PartBegins, PartEnds, PartGrows, PartReader, Reasoning
from services.openai.requests import Served
from services.openai.responses import ResponsesDialect
from services.openai.tool_calls import CallSyntax, ToolFormat
from tests.openai.asking import ADD, LONG, QUESTIONS, post

pytestmark = pytest.mark.xdist_group("tools")
SETTINGS = {"model": "demo", "max_output_tokens": 12, "extra_body": {"seed": 3, "method": "target"}}
TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": True}]


@pytest.fixture
def tools(tool_service):
    with openai.OpenAI(base_url=tool_service.url, api_key="none", max_retries=0) as client:
        yield client
    tool_service.wait_until_free()


def test_an_answer_is_that_of_the_chat(tools):
    system = "Be brief."
    chat = tools.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": QUESTIONS[0]}],
        max_tokens=12,
        extra_body=SETTINGS["extra_body"],
    )
    said = tools.responses.create(input=QUESTIONS[0], instructions=system, metadata={"a": "b"}, **SETTINGS)
    assert said.output_text == chat.choices[0].message.content
    assert (said.usage.input_tokens, said.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert said.output[0].status == "incomplete" and said.output[0].role == "assistant"
    assert (said.instructions, said.metadata, said.store, said.model) == (system, {"a": "b"}, False, "demo")
    assert said.smc["method"] == "target" and said.smc["seed"] == 3


def test_a_stream_with_options_of_chats(client):
    """Benchmarks ask every API for the usage in the same way; the last event has it in any case."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.responses.create(input=QUESTIONS[0], stream=True, stream_options=options, **SETTINGS)
    *_, last = stream
    assert last.response.usage.output_tokens == 12


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "custom", "name": "run"}], ids=str)
def test_tools_of_other_kinds_are_refused_by_name(service, tool):
    asked = {"input": "x", "tools": [*TOOLS, tool]}
    error = post(service, json.dumps(asked).encode(), "/v1/responses").error
    assert error["message"].startswith(f"tools[1].type={tool['type']!r}; allowed: 'function'")
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    error = post(service, json.dumps(chat).encode()).error
    assert error["message"].startswith(f"tools[0].type={tool['type']!r}; allowed: 'function'")


def test_items_that_were_returned_are_input_again(service, client):
    first = client.responses.create(input=QUESTIONS[0], **SETTINGS)
    more = [{"role": "user", "content": QUESTIONS[0]}, *first.output, {"role": "user", "content": "Why?"}]
    printed = [more[0], *(item.model_dump() for item in first.output), more[2]]
    messages = [more[0], {"role": "assistant", "content": first.output_text}, more[2]]
    chat = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=12, extra_body=SETTINGS["extra_body"]
    )
    for given in (more, printed):
        assert client.responses.create(input=given, **SETTINGS).output_text == chat.choices[0].message.content


def test_events_come_in_the_order_of_the_official_api(service, client):
    whole = client.responses.create(input=QUESTIONS[1], **SETTINGS)
    events = list(client.responses.create(input=QUESTIONS[1], stream=True, **SETTINGS))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert "".join(event.delta for event in events[4 : 4 + deltas]) == whole.output_text
    last = events[-1].response
    assert events[-2].item == last.output[0] and last.output[0].status == "incomplete"
    assert last.output_text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens
    with client.responses.stream(input=QUESTIONS[1], **SETTINGS | {"max_output_tokens": 300}) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text.startswith(whole.output_text)


def test_log_probabilities(service, client):
    asks = {"input": QUESTIONS[2], "include": ["message.output_text.logprobs"], "top_logprobs": 2, **SETTINGS}
    (part,) = client.responses.create(**asks).output[0].content
    assert len(part.logprobs) == 12 and all(len(one.top_logprobs) == 2 for one in part.logprobs)
    assert "".join(one.token for one in part.logprobs) == part.text
    done = [e for e in client.responses.create(stream=True, **asks) if e.type == "response.output_text.done"]
    assert [one.logprob for one in done[0].logprobs] == [one.logprob for one in part.logprobs]


def test_log_probabilities_of_a_stream_come_with_their_tokens(service, client):
    asks = {"input": QUESTIONS[2], "include": ["message.output_text.logprobs"], **SETTINGS, "max_output_tokens": 24}
    (part,) = client.responses.create(**asks).output[0].content
    events = list(client.responses.create(stream=True, **asks))
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    (done,) = [e.logprobs for e in events if e.type == "response.output_text.done"]
    assert len([one for one in deltas if one]) > 4
    assert [(one.token, one.logprob) for delta in deltas for one in delta] == [(one.token, one.logprob) for one in done]
    assert [one.token for one in done] == [one.token for one in part.logprobs]
    assert [one.logprob for one in done] == pytest.approx([one.logprob for one in part.logprobs], abs=1e-4)


def test_a_schema_constrains_the_text(service, client):
    schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 2}
    schema["x-guidance"] = {"whitespace_pattern": ""}
    form = {"type": "json_schema", "name": "numbers", "schema": schema, "strict": True}
    answer = client.responses.create(input="x", text={"format": form}, **SETTINGS)
    jsonschema.validate(json.loads(answer.output_text), schema)
    assert answer.text.format.schema_ == schema


def test_tools_are_called_and_their_outputs_read(tools):
    asks = SETTINGS | {"tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 100}
    (call,) = tools.responses.create(input="x", **asks).output
    assert call.type == "function_call" and call.name == "add" and call.status == "completed"
    jsonschema.validate(json.loads(call.arguments), ADD)
    events = list(tools.responses.create(input="x", stream=True, **asks))
    kinds = [event.type.removeprefix("response.") for event in events]
    grows = kinds.count("function_call_arguments.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * grows,
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert "".join(event.delta for event in events[3 : 3 + grows]) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "23"}
    given = [{"role": "user", "content": "x"}, call, result]
    with_result = tools.responses.create(input=given, **SETTINGS | {"tools": TOOLS})
    without = tools.responses.create(input=given[:1], **SETTINGS | {"tools": TOOLS})
    assert with_result.usage.input_tokens > without.usage.input_tokens and with_result.output_text


def test_input_items_become_messages(pair):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        call,
        call | {"call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "developer", "content": "x"},
    ]
    served = Served(("demo",), pair.tokenizer)
    (prompt,) = ResponsesDialect().read({"input": items}, served).completion.prompts
    first, result, one, two, last = prompt.messages
    assert (first["reasoning_content"], first["content"]) == ("hm", "so")
    assert [call["id"] for call in first["tool_calls"]] == ["c", "d"]
    assert result == {"role": "tool", "tool_call_id": "c", "content": "1"}
    assert (one["content"], two["content"], last["role"]) == ("one", "two", "system")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "input is missing"),
        ({"input": 3}, "input", "input=3; allowed: a string, or a list of items"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "type='item_reference'; allowed: message, fu"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "allowed: "),
        ({"store": True}, "store", "store=True; allowed: false, as responses are not stored here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored here"),
        ({"background": True}, "background", "not stored here"),
        ({"max_output_tokens": 0}, "max_output_tokens", "^max_output_tokens=0; allowed"),
        ({"max_tokens": 3}, "max_tokens", "max_tokens is not a field of /v1/responses here; allowed: .*max_output_tok"),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "allowed: 'function'"),
        ({"tools": TOOLS}, "tools", "the model's chat template ignores it"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}}, "text.format", "text.form"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "allowed: "),
        ({"input": "word " * 100_000}, "input", "allowed: at most"),
    ],
)
def test_what_is_wrong_is_named(service, fields, param, says):
    said = post(service, json.dumps({"input": "x"} | fields).encode(), "/v1/responses")
    assert said.status == 400 and said.error["param"] == param, said.data
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(said.error["message"])


def test_unknown_model(service, client):
    with pytest.raises(openai.NotFoundError, match="allowed: 'demo', 'gpt-4o'"):
        client.responses.create(model="other", input="x")


def test_an_error_in_a_stream_is_an_event(service, client):
    slow = {"model": "demo", "extra_body": LONG | {"request_id": "slow"}}
    slow["max_output_tokens"] = slow["extra_body"].pop("max_tokens")
    events = []
    for event in client.responses.create(input=QUESTIONS[0], stream=True, **slow):
        if not events:
            with service.client(token="none") as other:  # a caller ends its own requests
                assert other.abort("slow")
        events.append(event)
    assert events[0].type == "response.created"
    error, failed = events[-2:]
    assert (error.type, error.code) == ("error", "abort") and "abort" in error.message
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.message == error.message


def test_parts_are_the_same_however_the_text_is_cut():
    text = 'a < b</think>\nLet me see.<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    dice = random.Random(1)
    for _ in range(30):
        reader, left, events = PartReader(CallSyntax(ToolFormat.HERMES), Reasoning(5, True)), text, []
        while left:
            size = dice.randint(1, 9)
            events += reader.push(left[:size])
            left = left[size:]
        events += reader.finish()
        assert [(p.kind.value, p.name, p.text) for p in reader.parts] == [
            ("reasoning", "", "a < b"),
            ("text", "", "Let me see."),
            ("call", "f", '{"a": [1]}'),
        ]
        order = [(type(event), event.index) for event in events if not isinstance(event, PartGrows)]
        assert order == [(kind, index) for index in range(3) for kind in (PartBegins, PartEnds)]
    reader = PartReader(None, None)
    assert [type(event) for event in reader.finish()] == [PartBegins, PartEnds] and not reader.parts[0].text


def test_truncated_call_names_input(pair):
    """A function call in the input whose arguments are no JSON is named by its own place in the input."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, call]
    with pytest.raises(BadRequest, match=r"^input\[2\]\.arguments is not JSON") as caught:
        ResponsesDialect().read({"instructions": "z", "input": said}, Served(("demo",), pair.tokenizer))
    assert caught.value.param == "input"
