"""`/v1/messages` with Anthropic's own client: the same answers as those of a chat, as content blocks and events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jsonschema
import pytest

from services.openai.anthropic import MessagesDialect, _arguments
from services.openai.requests import Served
from smc.model.tokenizer import Tokenizer
from tests.gateway.harness import serving
from tests.openai.asking import ADD, LONG, QUESTIONS, ask, post, user

if TYPE_CHECKING:  # a slow import that every process that collects tests would make
    import anthropic

# A single process imports that client and serves tools.
pytestmark = pytest.mark.xdist_group("tools")
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": ADD}]
ASKS = {"model": "demo", "max_tokens": 12, "extra_body": {"seed": 3, "method": "exact"}}


def client_of(service, **how) -> anthropic.Anthropic:
    import anthropic

    url = service.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, **{"api_key": "none", "max_retries": 0} | how)


@pytest.fixture
def messages(service) -> Iterator[anthropic.resources.Messages]:
    with client_of(service) as client:
        yield client.messages


@pytest.fixture
def tools(tool_service) -> Iterator[anthropic.resources.Messages]:
    with client_of(tool_service) as client:
        yield client.messages
    tool_service.wait_until_free()


def test_an_answer_is_that_of_the_chat(tools, tool_service):
    said = [{"role": "system", "content": "Be brief."}, *user(QUESTIONS[0])]
    body = {"messages": said, "max_tokens": 12, **ASKS["extra_body"]}
    chat = post(tool_service, json.dumps(body).encode()).json
    answer = tools.create(messages=user(QUESTIONS[0]), system="Be brief.", **ASKS)
    (block,) = answer.content
    assert block.text == chat["choices"][0]["message"]["content"]
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == chat["usage"]["completion_tokens"] == 12
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("max_tokens", None, "demo")
    assert answer.smc["method"] == "exact"
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    counted = tools.count_tokens(model="demo", system=blocks, messages=user(QUESTIONS[0]))
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_events_come_in_the_order_of_the_official_api(messages):
    whole = messages.create(messages=user(QUESTIONS[1]), **ASKS)
    events = list(messages.create(messages=user(QUESTIONS[1]), stream=True, **ASKS))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0].message.usage.input_tokens > 0 and events[-2].usage.output_tokens == 12
    with messages.stream(messages=user(QUESTIONS[1]), **ASKS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.slow
def test_stop_sequences_and_turns(messages):
    whole = messages.create(messages=user(QUESTIONS[2]), **ASKS).content[0].text
    word = whole.split()[2]
    cut = messages.create(messages=user(QUESTIONS[2]), stop_sequences=["#never#", word], **ASKS)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert cut.content[0].text == whole[: whole.index(word)]
    ended = messages.create(messages=user(QUESTIONS[2]), **ASKS | {"max_tokens": 300})
    assert ended.stop_reason == "end_turn"
    more = [*user(QUESTIONS[2]), {"role": "assistant", "content": ended.content}, *user("Why?")]
    assert messages.create(messages=more, **ASKS).usage.input_tokens > 0


def test_the_last_message_is_continued(messages):
    """An assistant message at the end is continued: given the first half of its own greedy answer, the model writes the
    rest."""
    greedy = ASKS | {"extra_body": {"temperature": 0}}
    whole = messages.create(messages=user(QUESTIONS[3]), **greedy).content[0].text
    head = whole[: whole.index(" ", len(whole) // 2)]
    given = [*user(QUESTIONS[3]), {"role": "assistant", "content": head}]
    rest = messages.create(messages=given, **greedy).content[0].text
    assert (head + rest).startswith(whole)


@pytest.mark.slow
def test_tools_are_used_and_their_results_read(tools):
    asks = ASKS | {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 100}
    asks["extra_body"] = {"seed": 3, "method": "target"}
    answer = tools.create(messages=user("x"), **asks)
    (block,) = answer.content
    assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "add")
    jsonschema.validate(block.input, ADD)
    with tools.stream(messages=user("x"), **asks) as stream:
        final = stream.get_final_message()
    assert [one.input for one in final.content] == [block.input]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "23"}
    given = [*user("x"), {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    counts = [tools.count_tokens(model="demo", messages=part, tools=TOOLS).input_tokens for part in (given[:1], given)]
    assert counts[0] < counts[1]
    after = tools.create(messages=given, **ASKS | {"tools": TOOLS, "tool_choice": {"type": "none"}})
    assert after.content[0].type == "text"


NO_JSON = [
    "{foo}",
    '{"a": 1,}',
    "{'a': 1}",
    '{"a": "x\ny"}',
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": "\\ud800"}',
    '{"a": 1]',
]


@pytest.mark.parametrize("arguments", NO_JSON)
def test_arguments_that_are_no_json(arguments):
    assert _arguments(arguments, False) is None


@pytest.mark.slow
@pytest.mark.parametrize("arguments", NO_JSON[-1:])
def test_a_call_that_is_no_json_is_text(tools, tool_service, arguments):
    """A call whose arguments are not JSON is returned as text: the answer has been computed, and the fault is not the
    caller's."""
    text = f'so\n<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    forced = {"constraint": {"choice": [text]}, "method": "target"}
    asks = ASKS | {"tools": TOOLS, "max_tokens": 100, "extra_body": forced}
    answer = tools.create(messages=user("x"), **asks)
    assert [(block.type, block.text) for block in answer.content] == [("text", "so"), ("text", text[3:])]
    assert answer.stop_reason == "end_turn"
    body = {"messages": user("x"), "tools": TOOLS, "max_tokens": 100, **asks["extra_body"], "stream": True}
    streamed = post(tool_service, json.dumps(body).encode(), "/v1/messages").data.decode()
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")]
    given = "".join(
        event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"
    )
    assert (given, events[-1]["type"]) == (arguments, "message_stop")


@pytest.mark.slow
def test_truncated_call_keeps_partial_arguments(tools):
    """A tool call that is cut by a stop sequence or at `max_tokens` has the arguments that are complete so far."""
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": tr'
    forced = {"constraint": {"choice": [text + "ue}}\n</tool_call>"]}, "method": "target"}
    asks = ASKS | {"tools": TOOLS, "extra_body": forced}
    stop = {"stop_sequences": [": tr"], "max_tokens": 100}
    whole = tools.create(messages=user("x"), **asks | {"max_tokens": 100})
    for more, reason in ((stop, "stop_sequence"), ({"max_tokens": whole.usage.output_tokens - 20}, "max_tokens")):
        answer = tools.create(messages=user("x"), **asks | more)
        (block,) = answer.content
        assert (block.type, answer.stop_reason) == ("tool_use", reason)
        assert block.input.items() <= whole.content[0].input.items() and block.input != whole.content[0].input


def test_a_schema_constrains_the_answer(messages):
    schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 2}
    schema["x-guidance"] = {"whitespace_pattern": ""}
    form = {"type": "json_schema", "schema": schema}
    answer = messages.create(messages=user("x"), output_config={"format": form}, **ASKS)
    jsonschema.validate(json.loads(answer.content[0].text), schema)


def test_blocks_become_messages(pair):
    content = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}], "is_error": True},
        {"type": "text", "text": "and?"},
    ]
    given = [*user("x"), {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    call = MessagesDialect().read({"messages": given}, Served(("demo",), pair.tokenizer))
    first, second, tool, last = call.completion.prompts[0].messages
    assert first == {"role": "user", "content": "x"}
    assert (second["reasoning_content"], second["content"]) == ("hm", "so")
    assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "tool_call_id": "c", "content": "1"}
    assert last == {"role": "user", "content": "and?"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": None}, "messages is missing"),
        ({"max_tokens": 0}, "max_tokens=0; allowed"),
        ({"stop": ["a"]}, "stop is not a field of /v1/messages here; allowed: .*stop_sequences"),
        ({"stop_sequences": ["x" * 1001]}, "^stop_sequences"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\].role='system'; allowed: 'user' or 'ass"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type='image'; allowed: text, thinking, to"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens=0; allowed: greater than or"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "type='enabled'.*template cannot be told to think"),
        ({"thinking": {"type": "adaptive"}}, "template cannot be told to think"),
        (
            {"tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
            r"^tools\[1\].type='web_search_20250305'; allowed: 'custom', since others run at the API's vendor",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"^tools\[0\].type='bash_20250124'; allowed"),
        ({"mcp_servers": [{"type": "url"}]}, "^mcp_servers="),
        ({"tools": TOOLS}, "the model's chat template ignores it"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "'tool' without name"),
        ({"output_config": {"effort": "high"}}, "output_config.effort='high', but the model's chat template does not"),
        ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "allowed: at most"),
    ],
)
def test_what_is_wrong_is_named(service, fields, says):
    body = {"messages": user("x"), "max_tokens": 3} | fields
    said = post(service, json.dumps(body).encode(), "/v1/messages")
    assert said.status == 400 and said.json["type"] == "error", said.data
    error = said.json["error"]
    assert error["type"] == "invalid_request_error" and re.search(says, error["message"]), error


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
def test_thinking_is_that_of_the_template(pair, kind):
    """The budget has no effect."""
    template = (pair.tokenizer.chat_template or "") + "{% if enable_thinking %}a{% endif %}"
    tokenizer = Tokenizer(pair.tokenizer._tokenizer, pair.tokenizer.eos_ids, pair.tokenizer._special, template)
    thinking = {"type": kind} | ({"budget_tokens": 2048} if kind == "enabled" else {})
    body = {"messages": user("x"), "max_tokens": 3, "thinking": thinking}
    call = MessagesDialect().read(body, Served(("demo",), tokenizer))
    assert call.completion.prompts[0].template_settings == {"enable_thinking": kind != "disabled"}
    assert call.completion.settings["max_tokens"] == 3


def test_fields_of_agents_that_ask_nothing_of_a_model(service):
    asked = {"messages": user("x"), "max_tokens": 4, "seed": 1, "method": "target"}
    more = {
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "diagnostics": {"previous_message_id": None},
        "metadata": {"user_id": "a", "session": "b"},
        "service_tier": "priority",
        "thread": {"type": "create"},
        "inference_geo": "eu",
        "speed": "standard",
        "fallbacks": "default",
    }
    plain, other = (post(service, json.dumps(asked | extra).encode(), "/v1/messages") for extra in ({}, more))
    assert (plain.status, other.status) == (200, 200), other.data
    assert plain.json["content"] == other.json["content"]
    for path, prompt in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        body = {prompt: user("x"), "service_tier": "flex", "metadata": {"a": "b"}, "prompt_cache_retention": "24h"}
        assert post(service, json.dumps(body).encode(), path).status == 200


def test_the_tool_runner(tool_service):
    """Its first request asks for a stored conversation. The second, which sends only new messages, is refused as for a
    lost one, so it sends the whole conversation."""
    import anthropic

    given = []

    @anthropic.beta_tool(description="Adds.", input_schema=ADD)
    def add(a: int, b: bool = False) -> str:
        given.append((a, b))
        return "23"

    with client_of(tool_service) as client:
        runner = client.beta.messages.tool_runner(
            model="demo",
            max_tokens=100,
            messages=user("x"),
            tools=[add],
            tool_choice={"type": "tool", "name": "add"},
            max_iterations=2,
            extra_body={"seed": 3, "method": "target"},
        )
        replies = list(runner)
    assert len(replies) == 2 and given and all(a in (1, 22) for a, _ in given)
    assert [reply.stop_reason for reply in replies] == ["tool_use"] * 2
    body = {"messages": user("x"), "max_tokens": 3, "thread": {"type": "continue", "previous_message_id": "msg_1"}}
    said = post(tool_service, json.dumps(body).encode(), "/v1/messages")
    assert said.status == 404 and said.json["error"]["details"] == {"error_code": "thread_not_found"}
    assert said.headers["x-should-retry"] == "false"
    tool_service.wait_until_free()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_an_id(service, path):
    """Whether the body was read or not, and whatever went wrong."""
    bodies = (b"{", b"[]", b"{}", json.dumps({"messages": user("x"), "max_tokens": 0}).encode())
    found = [post(service, body, path) for body in bodies]
    found += [ask(service, "GET", path), post(service, b"{}", path, **{"content-type": "text/plain"})]
    ids = [said.json["request_id"] for said in found]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids) and len(set(ids)) == len(found)
    for said in found:
        assert said.status >= 400 and said.headers["request-id"] == said.json["request_id"]
        assert said.headers["x-request-id"] == said.json["request_id"]


def test_replies_have_an_id(messages):
    answer = messages.create(messages=user("x"), **ASKS)
    assert answer.id == f"msg_{answer._request_id}"


def test_models(service):
    import anthropic

    with client_of(service) as client:
        page = client.models.list()
        assert [(one.id, one.type, one.display_name) for one in page.data] == [
            ("demo", "model", "demo"),
            ("gpt-4o", "model", "gpt-4o"),
        ]
        assert page.data[0].created_at.year >= 2025 and not page.has_more
        assert (page.first_id, page.last_id) == ("demo", "gpt-4o")
        assert [one.id for one in client.models.list(limit=1)] == ["demo", "gpt-4o"]
        assert [one.id for one in client.models.list(before_id="gpt-4o").data] == ["demo"]
        assert client.models.retrieve("gpt-4o").max_input_tokens > 100
        with pytest.raises(anthropic.NotFoundError, match=r"not_found_error.*allowed: 'demo', 'gpt-4o'") as wrong:
            client.models.retrieve("other")
        assert wrong.value.request_id
        with pytest.raises(anthropic.BadRequestError, match=r"limit='0'; allowed: 1\.\.1000"):
            client.models.list(limit=0)
    assert ask(service, "GET", "/v1/models").json["object"] == "list"


def test_errors_are_those_of_the_client(pair, tmp_path, service, messages):
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match=r"not_found_error.*allowed: 'demo', 'gpt-4o'"):
        messages.create(**ASKS | {"model": "other"}, messages=user("x"))
    slow, events = {"model": "demo", "extra_body": LONG | {"request_id": "slow"}}, []
    slow["max_tokens"] = slow["extra_body"].pop("max_tokens")
    too_long = {"model": "demo", "max_tokens": 9999, "messages": user("x"), "request_id": "long"}
    assert post(service, json.dumps(too_long).encode(), "/v1/messages").json["request_id"] == "long"
    with pytest.raises(anthropic.APIStatusError, match="the request was aborted") as aborted:
        for event in messages.create(messages=user("x"), stream=True, **slow):
            if not events:
                with service.client(token="none") as other:  # a caller ends its own requests
                    assert other.abort("slow")
            events.append(event)
    assert events[0].type == "message_start" and aborted.value.body["request_id"] == "slow"
    (tmp_path / "tokens").write_text("secret\n")
    with serving(pair, http_port=0, auth_token_file=tmp_path / "tokens") as guarded:
        with client_of(guarded) as client, pytest.raises(anthropic.AuthenticationError, match="x-api-key: TOKEN"):
            client.messages.count_tokens(model="demo", messages=user("x"))
        for how in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with client_of(guarded, **how) as client:
                name = client.models.list().data[0].id
                assert client.messages.count_tokens(model=name, messages=user("x")).input_tokens > 0
