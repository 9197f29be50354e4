"""Anthropic's Messages API (`/v1/messages`): converts its bodies to chats, and answers to its content blocks and
events. Knows nothing about decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import Field, Tag

from services.openai.bodies import (
    KIND,
    BadRequest,
    CallFields,
    FieldNames,
    Refusal,
    Strict,
    in_form,
    joined,
    kind_of_item,
    neutral,
    refusal,
    text_or,
    tools_of,
)
from services.openai.dialects import (
    OPENAI_FINISH,
    AnswerWriter,
    ApiCall,
    Dialect,
    named_event,
    smc_block,
    written,
)
from services.openai.parts import MessagePart, PartBegins, PartEvent, PartGrows, PartKind
from services.openai.requests import BodyForm, CompletionRequest, Served, chat_request, one_constraint
from services.openai.templates import REASONING_EFFORT, chat_message, tool, tool_call, tool_use
from services.prompts import Prompt
from smc.api.request import Answer, FinishReason, Output
from smc.model.tokenizer import Tokenizer

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
ERROR_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
"""Anthropic's error types that differ from OpenAI's, by HTTP status."""
KNOWN_ERRORS = (
    *("invalid_request_error", "authentication_error", "permission_error"),
    *("rate_limit_error", "timeout_error"),
)
"""Error types that both APIs have. Others become `invalid_request_error` for a status below 500, else `api_error`."""
VERSION_HEADER = "anthropic-version"
"""Header that only clients of this API send."""
MOST_MODELS = 1000
"""Maximum number of models in a page of the list."""
THREAD_NOT_FOUND = "thread_not_found"
"""Anthropic's code for a thread that the server does not have: its clients then send the whole conversation."""
THINKING = "enable_thinking"
"""Name of the template variable that turns thinking on."""
BLOCKS = "a string, or a list of blocks"
"""What the error allows as content."""
DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}
"""Type of a part's deltas, and the name of their field, by the part's kind."""
TOOL_CHOICES = (
    '{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": "NAME"}, with '
    "disable_parallel_tool_use if you like"
)
WITHOUT = frozenset({"stop", "logprobs", "top_logprobs", "prompt_logprobs"})


class Block(Strict):
    cache_control: dict[str, Any] | None = None
    """Without effect: every prompt is cached."""


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, neutral(None, [])] = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True), text_or(list[TextBlock], BLOCKS)]


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)
    is_error: bool = False
    """Without effect: the content describes the error."""


ContentBlock = Annotated[
    Annotated[TextBlock, Tag(f"{KIND}text")]
    | Annotated[ThinkingBlock, Tag(f"{KIND}thinking")]
    | Annotated[ToolUseBlock, Tag(f"{KIND}tool_use")]
    | Annotated[ToolResultBlock, Tag(f"{KIND}tool_result")],
    kind_of_item("text"),
]


class InputMessage(Strict):
    role: Literal["user", "assistant"]
    content: Annotated[list[ContentBlock], Field(fail_fast=True), text_or(list[ContentBlock], BLOCKS)]
    """A string, or a list of blocks."""


class CustomTool(Strict):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    """Without effect: arguments are streamed in any case."""
    defer_loading: Annotated[Any, neutral(None, False)] = None
    allowed_callers: Annotated[Any, neutral(None, ["direct"])] = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None
    """Default: false, unless a call is required."""


class Thinking(Strict):
    type: Literal["adaptive", "enabled", "disabled"]
    """`enabled` is the same as `adaptive`."""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Without effect: `max_tokens` alone limits the thinking and the answer."""
    block_binding: dict[str, Any] | None = None
    display: Annotated[Any, neutral(None, "summarized", why="the thinking itself is returned")] = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: str | None = None


class Thread(Strict):
    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class MessagesBody(CallFields):
    """The fields of a body. The settings of `smc.api.sampling_params` are further fields with the same names."""

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    """If the last message is the assistant's, the answer continues it."""
    system: TextBlocks = Field(default_factory=list)
    stop_sequences: list[str] = Field(default_factory=list)
    tools: Annotated[list[CustomTool], Field(fail_fast=True), tools_of("custom")] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice | None, in_form(TOOL_CHOICES)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    thread: Thread | None = None
    """`create` has no effect, because no conversation is stored; `continue` is refused as for a lost thread, whereupon
    Anthropic's clients send the whole conversation."""

    # These concern the vendor's service and ask nothing of a model.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    billing_policy: dict[str, Any] | None = None
    fallbacks: Any = None
    fallback_credit_token: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    container: Annotated[Any, neutral(None)] = None
    mcp_servers: Annotated[Any, neutral([])] = None

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


FORM = BodyForm(MESSAGES, MessagesBody, WITHOUT)
FIELDS = FieldNames(FORM.names, "messages", {"stop": "stop_sequences"}, ".input_schema", "output_config.effort")


class MessagesDialect(Dialect):
    prompt = "messages"
    id_headers = ("x-request-id", "request-id")

    def read(self, document: Any, served: Served) -> ApiCall:
        _, completion = FORM.read(document, served, partial(_request, served))
        return ApiCall(completion, MessagesWriter)

    def refusal(self, error: Exception, request_id: str | None = None) -> Refusal:
        refused = refusal(error)
        of_openai = refused.body["error"]
        kind = ERROR_TYPES.get(refused.http_status)
        if kind is None:
            kind = of_openai["type"] if of_openai["type"] in KNOWN_ERRORS else "api_error"
            kind = "invalid_request_error" if 400 <= refused.http_status < 500 and kind == "api_error" else kind
        described = {"type": kind, "message": of_openai["message"]}
        if of_openai["code"] == THREAD_NOT_FOUND:
            described["details"] = {"error_code": THREAD_NOT_FOUND}
        body = {"type": "error", "error": described, "request_id": request_id}
        return Refusal(refused.http_status, body, refused.headers)


def _request(served: Served, body: MessagesBody, settings: dict[str, Any]) -> CompletionRequest:
    if body.thread is not None and body.thread.type == "continue":
        raise BadRequest(
            "thread.type='continue', and conversations are not stored here; send all messages, without thread or with "
            "'create'",
            "thread",
            404,
            THREAD_NOT_FOUND,
        )
    if body.stop_sequences:
        settings["stop"] = body.stop_sequences
    template_settings = _template_settings(body, served.tokenizer)
    if (config := body.output_config) is not None:
        if config.format is not None:
            given = ("output_config.format", {"json_schema": config.format.schema_})
            settings |= one_constraint([given], settings)
        if config.effort is not None:
            template_settings = template_settings | {REASONING_EFFORT: config.effort}
    choice, name, parallel = _tool_choice(body.tool_choice)
    tools = tuple(tool(one.name, one.description, one.input_schema, one.strict) for one in body.tools)
    messages = [chat_message("system", joined(body.system))] if body.system else []
    for index, message in enumerate(body.messages):
        messages += _messages(index, message)
    prompt = Prompt(
        messages=tuple(messages),
        tools=tools if choice != "none" else (),
        template_settings=template_settings,
        continues_last=body.messages[-1].role == "assistant",
    )
    return chat_request(body, settings, prompt, tool_use(tools, choice, name, parallel), FIELDS, served)


def listed_models(names: Sequence[str], began: int, context: int, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the list of models: see Anthropic's `GET /v1/models`. Raises BadRequest."""
    given = query.get("limit", str(MOST_MODELS))
    if not given.isdecimal() or not 1 <= int(given) <= MOST_MODELS:
        raise BadRequest(f"limit={given!r}; allowed: 1..{MOST_MODELS}", "limit")
    limit, models = int(given), list(names)
    for name in ("after_id", "before_id"):
        if query.get(name, models[0]) not in models:
            raise BadRequest(f"{name}={query[name]!r}; allowed: {', '.join(map(repr, names))}", name)
    if "after_id" in query:
        models = models[models.index(query["after_id"]) + 1 :]
    if "before_id" in query:
        models = models[: models.index(query["before_id"])]
    page = models[-limit:] if "before_id" in query else models[:limit]
    return {
        "data": [described_model(name, began, context) for name in page],
        "has_more": len(page) < len(models),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def described_model(name: str, began: int, context: int) -> dict[str, Any]:
    """Return the description of a model under one of its names. `began`: seconds since the epoch at which the service
    was started; `context`: its longest context, tokens."""
    created = datetime.fromtimestamp(began, UTC).isoformat().replace("+00:00", "Z")
    described = {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    return described | {"max_input_tokens": context - 1, "max_tokens": context - 1}


def _tool_choice(choice: ToolChoice | None) -> tuple[str, str | None, bool | None]:
    """Return the choice, the name and whether calls may be parallel, as `tool_use` takes them."""
    if choice is None:
        return "auto", None, None
    if (choice.type == "tool") != (choice.name is not None):
        raise BadRequest(
            f"tool_choice of type {choice.type!r} {'without' if choice.name is None else 'with'} name; allowed: name "
            "with type 'tool', and only there",
            "tool_choice",
        )
    alone = choice.disable_parallel_tool_use
    kind = "required" if choice.type in ("any", "tool") else choice.type
    return kind, choice.name, None if alone is None else not alone


def _template_settings(body: MessagesBody, tokenizer: Tokenizer) -> dict[str, Any]:
    if body.thinking is None:
        return body.chat_template_kwargs
    thinks = body.thinking.type != "disabled"
    if THINKING in (tokenizer.chat_template or ""):
        return {THINKING: thinks} | body.chat_template_kwargs
    if thinks:
        raise BadRequest(
            f"thinking.type={body.thinking.type!r}, but the model's chat template cannot be told to think; leave it "
            "out",
            "thinking.type",
        )
    return body.chat_template_kwargs


def _messages(index: int, message: InputMessage) -> Iterator[dict[str, Any]]:
    """Yield the chat's messages for one message: each result of a tool becomes a separate message."""
    for number, block in enumerate(message.content):
        by = "user" if isinstance(block, ToolResultBlock) else "assistant"
        if not isinstance(block, TextBlock) and message.role != by:
            raise BadRequest(
                f"messages[{index}].content[{number}] is of type {block.type!r}; allowed: with role {by!r}", "messages"
            )
        if isinstance(block, ToolResultBlock):
            yield chat_message("tool", joined(block.content), tool_call_id=block.tool_use_id)
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [tool_call(one.id, one.name, one.input) for one in message.content if isinstance(one, ToolUseBlock)]
    if not texts and not calls and message.content and message.role == "user":
        return
    yield chat_message(message.role, joined(texts), calls, reasoning_content="\n".join(thoughts) or None)


class MessagesWriter(AnswerWriter):
    """See `AnswerWriter`. In a whole message, a call whose arguments are not JSON becomes a text. In a stream it stays
    a call, as the model wrote it, because it begins before this is known."""

    def _begin(self, index: int) -> bytes:
        counts = {"input_tokens": len(self._requests[0].prompt), "output_tokens": 0}
        return _event("message_start", message=self._message() | {"content": [], "usage": counts})

    def _more(self, index: int, output: Output, parts: Iterable[PartEvent]) -> bytes:
        return b"".join(map(self._part, parts))

    def _end(self, index: int, answer: Answer, parts: Iterable[PartEvent]) -> bytes:
        data = b"".join(map(self._part, parts))
        delta = self._stop(answer, self._readers[0].has_calls)
        block = smc_block(self._requests[0].params, answer)
        return data + _event("message_delta", delta=delta, usage=_usage(answer), smc=block) + _event("message_stop")

    def whole(self, answers: Sequence[Answer]) -> bytes:
        (answer,), (reader,) = answers, self._readers
        for _ in (*reader.push(answer.text), *reader.finish()):
            pass
        last = len(reader.parts) - 1 if reader.is_cut else None
        content = [self._block(index, part, index == last) for index, part in enumerate(reader.parts)]
        stop = self._stop(answer, last is None and any(block["type"] == "tool_use" for block in content))
        message = self._message() | {"content": content, **stop, "usage": _usage(answer)}
        return written(message | {"smc": smc_block(self._requests[0].params, answer)}).encode()

    def error(self, body: dict[str, Any]) -> bytes:
        return _event("error", **{name: value for name, value in body.items() if name != "type"})

    def _message(self) -> dict[str, Any]:
        head = {"id": f"msg_{self._heading.id}", "type": "message", "role": "assistant", "model": self._heading.model}
        return head | {"stop_reason": None, "stop_sequence": None}

    def _stop(self, answer: Answer, has_calls: bool) -> dict[str, Any]:
        """Return why the answer ended. `has_calls`: it has calls, all of them complete."""
        is_stopped = answer.finish_reason is FinishReason.STOP_STRING
        if OPENAI_FINISH[answer.finish_reason] == "length":
            reason = "max_tokens"
        elif has_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if is_stopped else "end_turn"
        return {"stop_reason": reason, "stop_sequence": answer.matched if is_stopped else None}

    def _part(self, event: PartEvent) -> bytes:
        if isinstance(event, PartBegins):
            block = self._block(event.index, MessagePart(event.part.kind, event.part.name))
            return _event("content_block_start", index=event.index, content_block=block)
        if isinstance(event, PartGrows):
            kind, name = DELTAS[event.part.kind]
            return _event("content_block_delta", index=event.index, delta={"type": kind, name: event.text})
        return _event("content_block_stop", index=event.index)

    def _block(self, index: int, part: MessagePart, is_cut: bool = False) -> dict[str, Any]:
        if part.kind is PartKind.REASONING:
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        if part.kind is PartKind.TEXT:
            return {"type": "text", "text": part.text}
        given = _arguments(part.text, is_cut)
        if given is None:
            syntax = self._completion.syntax
            assert syntax is not None, "only a request with tools has calls"
            return {"type": "text", "text": syntax.format.written(part.name, part.text)}
        return {"type": "tool_use", "id": f"toolu_{self._heading.id}_{index}", "name": part.name, "input": given}


def _arguments(text: str, is_cut: bool) -> Any:
    """Return the arguments of a call. If the answer `is_cut` inside them, they are read as far as they go. None: they
    are not JSON, or cannot be written as JSON again."""
    try:
        given = pydantic_core.from_json(text, allow_partial=is_cut, allow_inf_nan=False) if text else {}
        written(given)
    except ValueError:
        return None
    return given


def _usage(answer: Answer) -> dict[str, Any]:
    """Return the usage. Anthropic counts cached tokens separately."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": len(answer.tokens),
    }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event({"type": kind, **fields})
