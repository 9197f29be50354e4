"""OpenAI's Responses API (`/v1/responses`): converts its bodies to chats, and answers to its output items and events.
Responses are not stored. Knows nothing about decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from services.openai.bodies import (
    KIND,
    FieldNames,
    Function,
    OpenAIFields,
    Schema,
    Strict,
    in_form,
    joined,
    kind_of_item,
    neutral,
    text_or,
    tools_of,
)
from services.openai.dialects import (
    OPENAI_FINISH,
    AnsweredCall,
    AnswerWriter,
    ApiCall,
    Dialect,
    TextLogprobs,
    chat_logprobs,
    finite,
    named_event,
    smc_block,
    usage,
    written,
)
from services.openai.parts import MessagePart, PartBegins, PartEnds, PartEvent, PartGrows, PartKind
from services.openai.requests import BodyForm, CompletionRequest, Served, chat_request, one_constraint
from services.openai.templates import REASONING_EFFORT, arguments_of, chat_message, tool, tool_call, tool_use
from services.prompts import Prompt
from smc.api.request import Answer, Output

RESPONSES = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
NOT_STORED = "responses are not stored here"
TOOL_CHOICES = '\'auto\', \'none\', \'required\', or {"type": "function", "name": "NAME"}'


def _without_nulls(value: Any) -> Any:
    """Return items without fields that are null: clients that return items of an answer write absent fields as null."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "a string, or a list of items")
    return _without_nulls(value)


class TextPart(Strict):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


TextParts = Annotated[
    list[TextPart],
    Field(fail_fast=True),
    text_or(list[TextPart], "a string, or a list of parts with text", "input_text"),
]


class Item(Strict):
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextParts
    phase: str = ""


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """The arguments as JSON in a string."""


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: TextParts


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] = Field(default_factory=list)


InputItem = Annotated[
    Annotated[MessageItem, Tag(f"{KIND}message")]
    | Annotated[FunctionCallItem, Tag(f"{KIND}function_call")]
    | Annotated[FunctionOutputItem, Tag(f"{KIND}function_call_output")]
    | Annotated[ReasoningItem, Tag(f"{KIND}reasoning")],
    kind_of_item("message"),
]


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]


class TextSettings(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[Any, neutral(None, "medium")] = None


class ReasoningSettings(Strict):
    effort: str | None = None
    summary: Annotated[Any, neutral(None, "auto", why="the reasoning itself is returned")] = None
    generate_summary: Annotated[Any, neutral(None)] = None


class ResponsesBody(OpenAIFields):
    """The fields of a body."""

    input: Annotated[
        list[InputItem],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
    ]
    """A string, or a list of items."""
    instructions: str | None = None
    max_output_tokens: Any = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), tools_of("function")] = Field(default_factory=list)
    tool_choice: Annotated[Literal["auto", "none", "required"] | NamedFunction, in_form(TOOL_CHOICES)] = "auto"
    parallel_tool_calls: bool | None = None
    """Default: true, unless `tool_choice` requires a call."""
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    store: Annotated[Any, neutral(False, why=NOT_STORED)] = False
    previous_response_id: Annotated[Any, neutral(None, why=NOT_STORED)] = None
    conversation: Annotated[Any, neutral(None, why=NOT_STORED)] = None
    background: Annotated[Any, neutral(False, why=NOT_STORED)] = False
    truncation: Annotated[Any, neutral("disabled")] = "disabled"
    max_tool_calls: Annotated[Any, neutral(None, why="the caller runs the tools")] = None


FORM = BodyForm(RESPONSES, ResponsesBody, frozenset({"max_tokens", "logprobs", "prompt_logprobs"}))
FIELDS = FieldNames(FORM.names, "input", {"max_tokens": "max_output_tokens"}, ".parameters", "reasoning.effort")


class ResponsesDialect(Dialect):
    prompt = "input"

    def read(self, document: Any, served: Served) -> ApiCall:
        body, completion = FORM.read(document, served, partial(_request, served))
        return ApiCall(completion, partial(ResponsesWriter, body))


def _request(served: Served, body: ResponsesBody, settings: dict[str, Any]) -> CompletionRequest:
    if body.max_output_tokens is not None:
        settings["max_tokens"] = body.max_output_tokens
    if LOGPROBS in body.include or settings.get("top_logprobs"):
        settings["logprobs"] = True
    form = None if body.text is None else body.text.format
    if form is not None and form.type != "text":
        is_object = form.type == "json_object" or form.schema_ is None
        constraint = {"json_object": True} if is_object else {"json_schema": form.schema_}
        settings |= one_constraint([("text.format", constraint)], settings)
    given = body.tool_choice
    choice, name = ("required", given.name) if isinstance(given, NamedFunction) else (given, None)
    tools = tuple(tool(one.name, one.description, one.parameters, one.strict) for one in body.tools)
    effort = None if body.reasoning is None else body.reasoning.effort
    prompt = Prompt(
        messages=tuple(_messages(body)),
        tools=tools if choice != "none" else (),
        template_settings=body.chat_template_kwargs | ({} if effort is None else {REASONING_EFFORT: effort}),
    )
    return chat_request(body, settings, prompt, tool_use(tools, choice, name, body.parallel_tool_calls), FIELDS, served)


def _messages(body: ResponsesBody) -> Iterator[dict[str, Any]]:
    """Yield the chat's messages. Consecutive reasoning, text and calls of the assistant become one message."""
    if body.instructions:
        yield chat_message("system", body.instructions)
    thoughts: str | None = None
    text: str | None = None
    calls: list[dict[str, Any]] = []

    def ended() -> Iterator[dict[str, Any]]:
        """Yield the assistant's message, if one has begun, and begin the next."""
        nonlocal thoughts, text, calls
        if thoughts is not None or text is not None or calls:
            yield chat_message("assistant", text or "", calls, reasoning_content=thoughts)
        thoughts, text, calls = None, None, []

    for index, item in enumerate(body.input):
        if isinstance(item, FunctionCallItem):
            arguments = arguments_of(item.arguments, "input", f"input[{index}].arguments")
            calls.append(tool_call(item.call_id, item.name, arguments))
        elif isinstance(item, ReasoningItem):
            yield from ended()  # a message has one reasoning, before all else
            thoughts = joined(item.content or item.summary)
        elif isinstance(item, FunctionOutputItem):
            yield from ended()
            yield chat_message("tool", joined(item.output), tool_call_id=item.call_id)
        elif item.role != "assistant":
            yield from ended()
            yield chat_message(item.role, joined(item.content))
        else:
            if text is not None or calls:  # a message has one text, before its calls
                yield from ended()
            text = joined(item.content)
    yield from ended()


class ResponsesWriter(AnswerWriter):
    """Writes an answer as a response. Its events are `response.created` and `in_progress`; for each part
    `output_item.added`, `content_part.added`, deltas, the whole text or arguments, `content_part.done` and
    `output_item.done` (calls have no `content_part`); then `completed` or `incomplete`, or else `error` and
    `failed`."""

    def __init__(self, body: ResponsesBody, call: AnsweredCall) -> None:
        super().__init__(call)
        (self._request,), (self._reader,) = call.requests, self._readers
        self._items: list[dict[str, Any]] = []
        self._logprobs = TextLogprobs(self._tokenizer)
        self._part_logprobs: list[dict[str, Any]] = []
        """Log-probabilities that the events of the open text have had."""
        self._spans: list[tuple[int, int]] = []
        """Where the pieces of the open text begin and end in the answer's text."""
        self._late: list[PartEvent] = []
        """With `top_logprobs`, which are known only at the end: the end of a text, and all events after it."""
        self._sequence = 0
        self._base = self._described(body)

    def _described(self, body: ResponsesBody) -> dict[str, Any]:
        """Return the fields of a response that repeat its request."""
        params = self._request.params
        form = None if body.text is None else body.text.format
        choice = body.tool_choice
        return {
            "id": f"resp_{self._heading.id}",
            "object": "response",
            "created_at": self._heading.created,
            "model": self._heading.model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": _repeated(body.metadata or {}),
            "parallel_tool_calls": choice in ("auto", "none")
            if body.parallel_tool_calls is None
            else body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "system_fingerprint": self._heading.fingerprint,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [_repeated(tool.model_dump()) for tool in body.tools],
            "top_logprobs": params.top_logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _begin(self, index: int) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response("in_progress")) for kind in kinds)

    def _more(self, index: int, output: Output, parts: Iterable[PartEvent]) -> bytes:
        if self._request.params.top_logprobs:
            return b"".join(self._part(event) for event in parts if not self._hold_back(event))
        if output.logprobs:
            self._logprobs.add(output.tokens, chat_logprobs(output.tokens, output.logprobs, None, self._tokenizer))
        return b"".join(map(self._part, parts))

    def _hold_back(self, event: PartEvent) -> bool:
        """Return whether an event waits for the end of the answer, when likeliest tokens are known."""
        if self._late or (isinstance(event, PartEnds) and event.part.kind is PartKind.TEXT):
            self._late.append(event)
        return bool(self._late)

    def _end(self, index: int, answer: Answer, parts: Iterable[PartEvent]) -> bytes:
        if self._request.params.top_logprobs:  # they are known only at the end
            self._add_logprobs(answer)
        data = b"".join(self._part(event, _status(answer)) for event in (*self._late, *parts))
        response = self._ended(answer)
        return data + self._event(f"response.{response['status']}", response=response)

    def whole(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        self._add_logprobs(answer)
        for event in (*self._reader.push(answer.text), *self._reader.finish()):
            self._part(event, _status(answer))
        return written(self._ended(answer), depth=6).encode()

    def error(self, body: dict[str, Any]) -> bytes:
        error = body["error"]
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error["message"]}}
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **fields) + self._event("response.failed", response=failed)

    def _add_logprobs(self, answer: Answer) -> None:
        if answer.logprobs is not None:
            entries = chat_logprobs(answer.tokens, answer.logprobs, answer.top_logprobs, self._tokenizer)
            self._logprobs.add(answer.tokens, entries)

    def _response(self, status: str) -> dict[str, Any]:
        ended = {"error": None, "incomplete_details": None, "usage": None}
        return self._base | {"status": status, "output": list(self._items)} | ended

    def _ended(self, answer: Answer) -> dict[str, Any]:
        response = self._response("incomplete" if self._reader.is_cut else _status(answer))
        if response["status"] == "incomplete":
            reason = "max_output_tokens" if _status(answer) == "incomplete" else "stop"
            response["incomplete_details"] = {"reason": reason}
        counts = usage([answer], 1)
        return response | {
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(answer)},
                "total_tokens": counts["total_tokens"],
            },
            "smc": smc_block(self._request.params, answer),
        }

    def _reasoning_tokens(self, answer: Answer) -> int:
        if self._reasoning is None or self._reader.parts[0].kind is not PartKind.REASONING:
            return 0
        end = self._reasoning.end
        return answer.tokens.index(end) + 1 if end in answer.tokens else len(answer.tokens)

    def _part(self, event: PartEvent, status: str = "completed") -> bytes:
        """Update the output items. `status`: status with which the last item ends. Returns the server-sent events."""
        index = event.index
        if isinstance(event, PartBegins):
            item = self._new_item(index, event.part)
            self._items.append(item)
            data = self._event("response.output_item.added", output_index=index, item=item)
            if event.part.kind is not PartKind.CALL:
                where = {"output_index": index, "item_id": item["id"], "content_index": 0}
                part = _content(MessagePart(event.part.kind), ())
                data += self._event("response.content_part.added", **where, part=part)
            return data
        item = self._items[index]
        where = {"output_index": index, "item_id": item["id"]}
        if isinstance(event, PartGrows):
            return self._grow(event, where)
        if event.part.kind is PartKind.CALL:
            status = "incomplete" if event.is_cut else "completed"
        return self._close(event, item, where, status if event.is_last else "completed")

    def _grow(self, event: PartGrows, where: dict[str, Any]) -> bytes:
        if event.begin is not None:
            self._spans.append((event.begin, event.begin + len(event.text)))
            return self._delta(event.part, where, event.text, self._logprobs.take(*self._spans[-1]))
        return self._delta(event.part, where, event.text)

    def _delta(
        self, part: MessagePart, where: dict[str, Any], text: str, logprobs: Sequence[dict[str, Any]] = ()
    ) -> bytes:
        kind, more = EVENTS[part.kind]
        if part.kind is PartKind.TEXT:
            more = more | {"logprobs": logprobs}
            self._part_logprobs += logprobs
        return self._event(f"response.{kind}.delta", **where, **more, delta=text)

    def _rest(self, is_last: bool) -> list[dict[str, Any]]:
        """Return log-probabilities of the open text that came later than the text itself; if it ends the answer, also
        those of tokens without text, such as the one that ended it."""
        found = [entry for span in self._spans for entry in self._logprobs.take(*span)]
        if is_last:
            found += self._logprobs.take(self._spans[-1][1] if self._spans else 0, None)
        self._spans = []
        return found

    def _close(self, event: PartEnds, item: dict[str, Any], where: dict[str, Any], status: str) -> bytes:
        kind, more = EVENTS[event.part.kind]
        done: dict[str, Any] = {"status": status}
        data = b""
        if event.part.kind is PartKind.TEXT and (rest := self._rest(event.is_last)):
            data = self._delta(event.part, where, "", rest)
        if event.part.kind is PartKind.CALL:
            done["arguments"] = event.part.text
            data += self._event(f"response.{kind}.done", **where, name=event.part.name, arguments=event.part.text)
        else:
            content = _content(event.part, self._part_logprobs)
            done["content"] = [content]
            if event.part.kind is PartKind.TEXT:
                more, self._part_logprobs = more | {"logprobs": self._part_logprobs}, []
            data += self._event(f"response.{kind}.done", **where, **more, text=event.part.text)
            data += self._event("response.content_part.done", **where, content_index=0, part=content)
        self._items[event.index] = item = item | done
        return data + self._event("response.output_item.done", output_index=event.index, item=item)

    def _new_item(self, index: int, part: MessagePart) -> dict[str, Any]:
        name = f"{self._heading.id}_{index}"
        if part.kind is PartKind.CALL:
            call = {"id": f"fc_{name}", "type": "function_call", "call_id": f"call_{name}"}
            return call | {"name": part.name, "arguments": "", "status": "in_progress"}
        if part.kind is PartKind.REASONING:
            return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        message = {"id": f"msg_{name}", "type": "message", "role": "assistant"}
        return message | {"content": [], "status": "in_progress"}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_event(event)


def _repeated(value: Any) -> Any:
    """Return a value of the body as a response repeats it: null instead of a number that is beyond all floats."""
    if isinstance(value, dict):
        return {name: _repeated(one) for name, one in value.items()}
    return [_repeated(one) for one in value] if isinstance(value, list) else finite(value)


def _status(answer: Answer) -> str:
    """Return the status of a response and of its last item, if that is no call."""
    return "incomplete" if OPENAI_FINISH[answer.finish_reason] == "length" else "completed"


EVENTS: dict[PartKind, tuple[str, dict[str, Any]]] = {
    PartKind.TEXT: ("output_text", {"content_index": 0, "logprobs": []}),
    PartKind.REASONING: ("reasoning_text", {"content_index": 0}),
    PartKind.CALL: ("function_call_arguments", {}),
}
"""Name and further fields of a part's events, by the part's kind."""


def _content(part: MessagePart, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": list(logprobs)}
