"""Bodies of OpenAI's API: JSON parsed strictly, the fields that a body may have, and errors in OpenAI's terms. Knows
nothing about servers, files or decoding.

Sampling settings are named and checked by the library. Fields that this service does not support are refused unless set
to their no-op value: no setting is silently ignored. docs/errors.md has the table of errors for users."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.errors import TooLarge, status_of
from smc.api.constraint import ConstraintFailed, ConstraintRefused, json_float
from smc.api.limits import PromptTooLong
from smc.scheduler.admission import DuplicateRequest

MAX_NESTING = 200
"""Maximum depth of a body in levels. Functions that read or write a body may call themselves once a level, and
libraries stop at 255."""
TOO_DEEP = f"this is nested too deeply to be read; allowed: at most {MAX_NESTING} levels"
HTTP = {
    "invalid": (400, "invalid_request_error"),
    "constraint": (400, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
    "host": (403, "permission_error"),
    "slow_sender": (408, "invalid_request_error"),
    "duplicate": (409, "conflict_error"),
    "too_large": (413, "invalid_request_error"),
    "queue_full": (429, "rate_limit_error"),
    "abort": (499, "aborted_error"),
    "failed": (500, "server_error"),
    "internal": (500, "server_error"),
    "unavailable": (503, "server_error"),
    "deadline": (504, "timeout_error"),
}
"""HTTP status and OpenAI's error type, by `services.errors.Status.cause`. A caller that does not read its answer is
sent no error."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long. Clients recognise it."""
_FIRST_WORD = re.compile(r"[a-z_]+")
_OF_PROMPTS = re.compile("the prompt|chat|cannot encode|the chat template")
MOST_LOGGED, MAX_LOGGED = 256, 64
"""Maximum number of unknown fields that are logged, and of characters of a field's name in the log and in errors."""
logger = logging.getLogger(__name__)
KIND = "kind:"
"""Prefix of the tags of unions. It distinguishes tags from fields in the path of an error."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
B = TypeVar("B", bound=BaseModel)
KINDS = {
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "bool_type": "true, false",
    "int_type": "an integer",
    "float_type": "a number",
    "none_required": "null",
}
"""JSON's names of types, by pydantic's error types."""
_AROUND = re.compile(r"^(Input should be|(List|String) should have) | after validation, not \d+$")
"""Text that pydantic's messages put around the allowed values."""
TOOL_CHOICES = '\'auto\', \'none\', \'required\', or {"type": "function", "function": {"name": "NAME"}}'


def parse(data: bytes) -> Any:
    """Parse JSON strictly. Raises ValueError if it is not valid, gives a field twice, has a number that JSON does not
    know, or is nested too deeply."""
    try:
        document = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=json_float)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:  # not UTF-8, a number of thousands of digits, or what is refused below
        raise ValueError(f"this cannot be read as JSON: {error}") from error
    # The number of brackets is a cheap upper bound of the depth; some may stand in strings.
    if data.count(b"[") + data.count(b"{") > MAX_NESTING and _is_deeper(document, MAX_NESTING):
        raise ValueError(TOO_DEEP)
    return document


def _is_deeper(document: Any, most: int) -> bool:
    """Return whether lists and objects are nested in more than `most` levels."""
    level = [document]
    for _ in range(most):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for each in parts for part in each if isinstance(part, (dict, list))]
        if not level:
            return False
    return True


def kind_of(value: Any) -> str:
    """Return JSON's name for a value's type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")


def is_text(value: Any) -> bool:
    """Return whether every string in `value` has a UTF-8 form: JSON can write half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name!r} is given twice")
            seen.add(name)
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


class BadRequest(ValueError):
    """Something is wrong with the request itself."""

    def __init__(self, message: str, param: str | None = None, http_status: int = 400, code: str | None = None) -> None:
        """`param`: the wrong field; `code`: OpenAI's error code, if there is one for this error."""
        super().__init__(message)
        self.param, self.http_status, self.code = param, http_status, code


class BodyTooLarge(TooLarge):
    """The body has more bytes than a prompt that fits into the context. It is refused before it is parsed and
    tokenised."""

    http_status, code = 400, CONTEXT_LENGTH_EXCEEDED

    def __init__(self, limit: int, context: int, prompt: str) -> None:
        """`prompt`: name of the field that holds the prompt."""
        super().__init__(
            f"the body has more than {limit} bytes, too long a prompt; allowed: at most {context - 1} tokens"
        )
        self.param = prompt


@dataclass(frozen=True)
class Refusal:
    """The error that a caller is sent instead of an answer."""

    http_status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def refusal(error: Exception) -> Refusal:
    status = status_of(error)
    http_status, kind = HTTP[status.cause]
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    if param is not None and len(param) > MAX_LOGGED:
        param = f"{param[:MAX_LOGGED]}.."
    body = {"error": {"message": status.message, "type": kind, "param": param, "code": code or status.cause}}
    # OpenAI's clients retry after most errors unless told otherwise. A retry makes sense only if the status has a hint.
    headers = {"x-should-retry": str(status.retry_after is not None).lower()}
    if status.retry_after is not None:
        headers["retry-after"] = str(math.ceil(status.retry_after))
    return Refusal(getattr(error, "http_status", http_status), body, headers)


@dataclass(frozen=True)
class FieldNames:
    """How an API names, in its bodies, what an error is about."""

    known: frozenset[str]
    """All fields that a body may have."""
    prompt: str
    """The field that holds the prompt."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Its names for settings, where they differ from the library's."""
    parameters: str = ".function.parameters"
    """Where a tool has its JSON schema."""
    effort: str = "reasoning_effort"

    def named(self, error: ValueError) -> ValueError:
        """Return `error` as a BadRequest that names its field: the one with which the message begins, or the field that
        holds the prompt, if the message is about it. Errors that name it already are returned as they are."""
        if isinstance(error, (BadRequest, DuplicateRequest, ConstraintFailed)):
            return error
        message = str(error)
        if isinstance(error, ConstraintRefused):
            return BadRequest(message, error.field)
        found = _FIRST_WORD.match(message)
        first = found[0] if found else ""
        param = self.settings.get(first, first if first in self.known else None)
        if param is not None:
            message = param + message.removeprefix(first)
        elif _OF_PROMPTS.match(message):
            param = self.prompt
        return BadRequest(message, param, code=CONTEXT_LENGTH_EXCEEDED if isinstance(error, PromptTooLong) else None)


@dataclass(frozen=True)
class Neutral(AfterValidator):
    """Annotation of a field that has no effect."""

    values: tuple[Any, ...] = ()
    """Values that the field may have."""


def neutral(*values: Any, why: str = "there is no such setting here") -> Neutral:
    """Return the annotation of a field that is accepted only with one of these values, which change nothing. `why`:
    reason that the error gives."""
    written = ", ".join(json.dumps(value) for value in values)

    def check(value: Any) -> Any:
        # True == 1 in Python, but they differ in JSON.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values):
            raise PydanticCustomError("neutral", "{allowed}", {"allowed": f"{written}, as {why}; or leave it out"})
        return value

    return Neutral(check, values)


def kind_of_item(default: str) -> Discriminator:
    """Return a discriminator of a list's items by their `type`; `default`: the type of items that give none."""

    def kind(item: Any) -> str:
        given = item.get("type", default) if isinstance(item, dict) else getattr(item, "type", default)
        return f"{KIND}{given}"

    return Discriminator(kind)


def text_or(parts: Any, allowed: str, kind: str = "text", optional: bool = False) -> BeforeValidator:
    """Return the annotation of a list that a caller may also write as a string, which stands for one part of type
    `kind`. `parts`: type of the list; `allowed`: what the error allows; `optional`: whether null is allowed."""

    def read(content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": kind, "text": content}]
        if not isinstance(content, list) and not (optional and content is None):
            raise PydanticCustomError("content", "{allowed}", {"allowed": allowed})
        return content

    return BeforeValidator(read, json_schema_input_type=str | parts)


def in_form(allowed: str) -> WrapValidator:
    """Return the annotation of a union, or of an object, of which the error offers the forms that are `allowed`."""

    def read(value: Any, read_forms: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read_forms(value)
        except ValidationError as error:
            if error.errors(include_url=False)[0]["type"] == "extra_forbidden":
                raise  # the unknown field says more
            raise PydanticCustomError("form", "{allowed}", {"allowed": allowed}) from error

    return WrapValidator(read)


def joined(parts: Iterable[Any]) -> str:
    """Return the `text` of all parts, each on a line of its own."""
    return "\n".join(part.text for part in parts)


class UnknownFields:
    """Ignores unknown fields, and tools of unknown kinds, instead of refusing them, and logs each once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def ignore(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._logged) < MOST_LOGGED and name[:MAX_LOGGED] not in self._logged:
                self._logged.add(name[:MAX_LOGGED])
                logger.warning("the field %r of a request is unknown; it is ignored, here and later", name[:MAX_LOGGED])

    def leave_out_tool(self, kind: str) -> None:
        name = f"tool {kind[:MAX_LOGGED]}"
        if len(self._logged) < MOST_LOGGED and name not in self._logged:
            self._logged.add(name)
            logger.warning("tools of type %r cannot be called here; they are left out, here and later", name[5:])


def tools_of(kind: str) -> BeforeValidator:
    """Return the annotation of a list of tools of which this service knows one `kind`. Tools of other kinds, which the
    API's vendor runs, are refused by name, or left out if unknown fields are ignored."""

    def read(tools: Any, info: ValidationInfo) -> Any:
        if not isinstance(tools, list):
            return tools
        kept = []
        for index, tool in enumerate(tools):
            given = tool.get("type") if isinstance(tool, dict) else None
            if not isinstance(given, str) or given == kind:
                kept.append(tool)
            elif isinstance(info.context, UnknownFields):
                info.context.leave_out_tool(given)
            else:
                raise PydanticCustomError("tool_kind", "", {"index": index, "given": given, "allowed": kind})
        return kept

    return BeforeValidator(read)


class Strict(BaseModel):
    """A model that converts no types and refuses unknown fields. If the validation's context is `UnknownFields`, they
    are ignored instead."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, data: Any, info: ValidationInfo) -> Any:
        """Keep only one unknown field: it is enough to refuse the body, and each would cost an error of its own. If
        unknown fields are ignored, keep none."""
        if not isinstance(data, dict):
            return data
        names = {one.alias or name for name, one in cls.model_fields.items()}
        strangers = [name for name in data if name not in names]
        if not strangers:
            return data
        known = {name: value for name, value in data.items() if name in names}
        if isinstance(info.context, UnknownFields):
            info.context.ignore(strangers)
            return known
        return known | {strangers[0]: data[strangers[0]]}


class Part(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str
    """The arguments as JSON in a string."""


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[Part], Field(fail_fast=True)] | None,
        text_or(list[Part] | None, "a string, or a list of parts with text", optional=True),
    ] = None
    """None: the assistant only called tools."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[Any, neutral(None, [])] = None


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class StreamOptions(Strict):
    include_usage: bool = False
    """A last event has the usage. Without effect on responses, whose last event always has it."""
    include_obfuscation: Annotated[Any, neutral(False)] = False
    continuous_usage_stats: bool = False
    """vLLM's: every event has the usage so far. Without effect on responses, whose events have no field for it."""


class Schema(Strict):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """None: any object."""
    strict: bool | None = None
    """Without effect: answers are constrained in any case."""


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class CallFields(Strict):
    """Fields that the bodies of all APIs have. Fields that are `null` count as not given and are removed before
    validation."""

    model: str | None = None
    stream: bool = False
    request_id: Annotated[str, Field(max_length=256, pattern="^[!-~]*$")] | None = None
    """Ours: unique among running requests of the same token; returned in the header `x-request-id`."""
    cache_salt: str = ""
    priority: int = 0
    """vLLM's: requests of a lower number are admitted first."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Ours: seconds from arrival, after which the call is dropped."""


class OpenAIFields(CallFields):
    """Fields that the bodies of OpenAI's APIs have in common. The settings of `smc.api.sampling_params` are further
    fields with the same names."""

    stream_options: StreamOptions | None = None

    # These describe the caller and do not concern decoding.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None


class Body(OpenAIFields):
    """Fields that chats and completions have in common."""

    n: Annotated[int, Field(ge=1)] = 1
    negative_prompt: Any = None
    """Ours: a string, a list of token ids, or a list of messages; with `guidance_scale`."""

    best_of: Annotated[Any, neutral(1)] = 1
    store: Annotated[Any, neutral(False)] = False
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: an object with one of json, json_object, regex, grammar, choice."""
    guided_json: Annotated[dict[str, Any] | str | None, in_form("an object, or its JSON as a string")] = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    """The four `guided_` fields are vLLM's older names for the keys of `structured_outputs`."""
    skip_special_tokens: Annotated[Any, neutral(True)] = True
    spaces_between_special_tokens: Annotated[Any, neutral(True)] = True
    include_stop_str_in_output: Annotated[Any, neutral(False)] = False


class ChatBody(Body):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[Annotated[list[Tool], Field(fail_fast=True)] | None, tools_of("function")] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_completion_tokens: Any = None
    tool_choice: Annotated[Literal["auto", "none", "required"] | NamedTool | None, in_form(TOOL_CHOICES)] = None
    parallel_tool_calls: bool | None = None
    """Whether the answer may have more than one call. Default: true, unless `tool_choice` requires a call."""
    modalities: Annotated[Any, neutral(["text"])] = None
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("auto", "none")] = None
    reasoning_effort: str | None = None
    """A variable of the chat template, if it reads one of this name."""
    verbosity: Annotated[Any, neutral("medium")] = None
    add_generation_prompt: bool | None = None
    """Default: true, unless the last message is continued."""
    continue_final_message: bool = False


class CompletionBody(Body):
    prompt: Any
    """One prompt, which is a string or a list of token ids, or a list of prompts."""
    echo: bool = False
    suffix: Annotated[Any, neutral("")] = None
    add_special_tokens: Annotated[Any, neutral(True)] = True


def given_fields(document: Any) -> dict[str, Any]:
    """Return the fields of a body that are not null. Raises BadRequest if it is not an object, or if a text is not
    valid Unicode."""
    if not isinstance(document, dict):
        raise BadRequest("the body is not a JSON object; allowed: an object with the request")
    given = {name: value for name, value in document.items() if value is not None}
    if is_text(given):  # one check for all fields: a body can have many
        return given
    for name, value in given.items():
        if not is_text(name) or not is_text(value):
            raise BadRequest(
                f"{name!r} holds half of a surrogate pair; allowed: valid Unicode text", name if is_text(name) else None
            )
    return given


def check_model(name: str, names: Sequence[str]) -> None:
    """Check the model that a caller names. `names`: names of the served model. Raises BadRequest."""
    if name not in names:
        raise BadRequest(f"model={name!r}; allowed: {', '.join(map(repr, names))}", "model", 404, "model_not_found")


def validated(
    model: type[B], given: dict[str, Any], endpoint: str, names: frozenset[str], unknown: UnknownFields | None
) -> B:
    """Return the body of these fields. `names`: all fields that a body of `endpoint` may have, for the error;
    `unknown`: ignores unknown fields, None: they are refused. Raises BadRequest."""
    try:
        return model.model_validate(given, context=unknown)
    except ValidationError as error:
        raise _in_our_words(error, endpoint, names) from error


def _in_our_words(error: ValidationError, endpoint: str, names: frozenset[str]) -> BadRequest:
    """Return the first error as a BadRequest with the field, the value and what is allowed."""
    first = error.errors(include_url=False)[0]
    # After the index of an item, the path has the tag of the union's member.
    parts = [part for before, part in zip((None, *first["loc"]), first["loc"]) if not _is_kind(before, part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        allowed = f"; allowed: {', '.join(sorted(names))}" if len(parts) == 1 else "; leave it out"
        return BadRequest(f"{path} is not a field of {endpoint} here{allowed}", path)
    if first["type"] == "missing":
        return BadRequest(f"{path} is missing", param)
    if first["type"] == "union_tag_invalid":
        kinds = first["ctx"]["expected_tags"].replace("'", "").replace(KIND, "")
        return BadRequest(f"{path}.type={first['ctx']['tag'].removeprefix(KIND)!r}; allowed: {kinds}", path)
    if first["type"] == "tool_kind":
        tool = first["ctx"]
        path = f"{path}[{tool['index']}].type"
        return BadRequest(
            f"{path}={tool['given']!r}; allowed: {tool['allowed']!r}, since others run at the API's vendor; leave such "
            "tools out",
            path,
        )
    allowed = KINDS.get(first["type"]) or _AROUND.sub("", first["msg"])
    return BadRequest(f"{path}={first['input']!r}; allowed: {allowed}", path)


def _is_kind(before: Any, part: Any) -> bool:
    return isinstance(before, int) and isinstance(part, str) and part.startswith(KIND)
