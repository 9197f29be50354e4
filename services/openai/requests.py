"""A body of OpenAI's API, parsed strictly into a request of the library, and its errors in OpenAI's terms. Knows
nothing about servers, files or decoding.

Sampling settings are named and checked by the library. Fields that this service does not support are refused unless set
to their no-op value: no setting is silently ignored. docs/errors.md has the table of errors for users."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
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
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.backend import check_cache_salt
from services.errors import TooLarge, status_of
from services.openai.messages import Reasoning
from services.openai.tool_calls import ToolFormat
from services.prompts import Prompt, of_negative
from smc.api.constraint import Constraint, check_constraint
from smc.api.limits import MAX_TOP_LOGPROBS, PromptTooLong
from smc.api.request import check_guidance, check_priority
from smc.api.sampling_params import SETTINGS, SamplingParams, with_defaults
from smc.model.tokenizer import Tokenizer
from smc.scheduler.admission import DuplicateRequest


def parse(data: bytes) -> Any:
    """Raises ValueError: no JSON, a field given twice, a number that JSON does not know, or nested too deeply."""
    try:
        document = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:  # not UTF-8, a number of thousands of digits, or what is refused below
        raise ValueError(f"this cannot be read as JSON: {error}") from error
    # Brackets are a bound that costs nothing; some may stand in strings.
    if data.count(b"[") + data.count(b"{") > MAX_NESTING and _is_deeper(document, MAX_NESTING):
        raise ValueError(TOO_DEEP)
    return document


MAX_NESTING = 200
"""Levels of a body: every function that reads or writes one may call itself for each, and libraries end at 255."""
TOO_DEEP = f"this is nested too deeply to be read; allowed: at most {MAX_NESTING} levels"


def _is_deeper(document: Any, most: int) -> bool:
    """Whether lists and objects stand in each other in more than `most` levels."""
    level = [document]
    for _ in range(most):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for each in parts for part in each if isinstance(part, (dict, list))]
        if not level:
            return False
    return True


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")


def is_text(value: Any) -> bool:
    """Whether every string in `value` has a UTF-8 form: JSON can write half of a surrogate pair."""
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
    raise ValueError(f"{name} is no number of JSON")


HTTP = {
    "invalid": (400, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
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
"""Status and type, by `services.errors.Status.cause`. A caller that does not read its answer gets none."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code, which clients know, for too long a prompt."""
_FIRST_WORD = re.compile(r"[a-z_]+")
_OF_PROMPTS = re.compile("the prompt|chat|cannot encode|the chat template")


class BadRequest(ValueError):
    """Something is wrong with the request itself."""

    def __init__(self, message: str, param: str | None = None, http_status: int = 400, code: str | None = None) -> None:
        """`param`: the field; `code`: OpenAI's word for what is wrong, where it has one."""
        super().__init__(message)
        self.param, self.http_status, self.code = param, http_status, code


class BodyTooLarge(TooLarge):
    """The body has more bytes than a prompt that the context holds: its text is not read, let alone tokenised."""

    http_status, code = 400, CONTEXT_LENGTH_EXCEEDED

    def __init__(self, limit: int, context: int, prompt: str) -> None:
        """`prompt`: the field that holds it."""
        super().__init__(
            f"the body has more than {limit} bytes, too long a prompt; allowed: at most {context - 1} tokens"
        )
        self.param = prompt


@dataclass(frozen=True)
class Refusal:
    """What a caller is sent instead of an answer."""

    http_status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def refusal(error: Exception) -> Refusal:
    status = status_of(error)
    http_status, kind = HTTP[status.cause]
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    body = {"error": {"message": status.message, "type": kind, "param": param, "code": code or status.cause}}
    # OpenAI's clients retry after most errors unless told otherwise; with a hint a retry makes sense, without one it
    # does not.
    headers = {"x-should-retry": str(status.retry_after is not None).lower()}
    if status.retry_after is not None:
        headers["retry-after"] = str(math.ceil(status.retry_after))
    return Refusal(getattr(error, "http_status", http_status), body, headers)


def named(error: ValueError, names: frozenset[str], prompt: str) -> ValueError:
    """`error` with the field that its message begins with, if it is one of `names`; `prompt`: the field that holds the
    prompt."""
    if isinstance(error, (BadRequest, DuplicateRequest)):
        return error
    message = str(error)
    first = _FIRST_WORD.match(message)
    param = first[0] if first and first[0] in names else prompt if _OF_PROMPTS.match(message) else None
    return BadRequest(message, param, code=CONTEXT_LENGTH_EXCEEDED if isinstance(error, PromptTooLong) else None)


@dataclass(frozen=True)
class Neutral(AfterValidator):
    """Of a field that has no effect."""

    values: tuple[Any, ...] = ()
    """That it may have."""


def neutral(*values: Any, why: str = "there is no such setting here") -> Neutral:
    """A field that is accepted with one of these values, which change nothing."""
    written = ", ".join(json.dumps(value) for value in values)

    def check(value: Any) -> Any:
        # True == 1, which JSON keeps apart.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values):
            raise PydanticCustomError("neutral", "{allowed}", {"allowed": f"{written}, as {why}; or leave it out"})
        return value

    return Neutral(check, values)


MOST_LOGGED, MAX_LOGGED = 256, 64
"""Unknown fields, and characters of each."""
logger = logging.getLogger(__name__)
KIND = "kind:"
"""What the tags of unions begin with, which tells them from fields in the path of an error."""


def kind_of_item(default: str) -> Discriminator:
    """Items of a list are told apart by their `type`, `default` if they have none."""

    def kind(item: Any) -> str:
        given = item.get("type", default) if isinstance(item, dict) else getattr(item, "type", default)
        return f"{KIND}{given}"

    return Discriminator(kind)


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise PydanticCustomError("content", "a string, or a list of parts with text")
    return content


class UnknownFields:
    """Fields that are ignored instead of refused. Each is logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def ignore(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._logged) < MOST_LOGGED and name[:MAX_LOGGED] not in self._logged:
                self._logged.add(name[:MAX_LOGGED])
                logger.warning("the field %r of a request is unknown; it is ignored, here and later", name[:MAX_LOGGED])


class Strict(BaseModel):
    """No other fields, unless they are ignored; no other types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, data: Any, info: ValidationInfo) -> Any:
        """One field that there is not is enough to be refused for; each would cost an error of its own."""
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
    """JSON."""


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[Part], Field(fail_fast=True)] | None,
        BeforeValidator(_parts, json_schema_input_type=str | list[Part] | None),
    ] = None
    """None: of an assistant that only called tools."""
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
    include_obfuscation: Annotated[Any, neutral(False)] = False
    continuous_usage_stats: Annotated[Any, neutral(False)] = False


class Schema(Strict):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """None: any object."""
    strict: bool | None = None
    """An answer is constrained in any case."""


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Body(Strict):
    """What chats and completions have in common, but for the settings of `smc.api.sampling_params`, which have the same
    names. `null` is taken out before: it means that a field is not given."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(max_length=256, pattern="^[!-~]*$")] | None = None
    """Ours: unique among running requests of the same token; a header of the answer."""
    cache_salt: str = ""
    priority: int = 0
    """vLLM's: requests of a lower number are admitted first."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Ours: seconds from arrival, after which the call is dropped."""
    negative_prompt: Any = None
    """Ours: a string, a list of token ids, or a list of messages; with `guidance_scale`."""

    # Describes the caller, and does not concern decoding.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    best_of: Annotated[Any, neutral(1)] = 1
    service_tier: Annotated[Any, neutral("auto", "default")] = None
    store: Annotated[Any, neutral(False)] = False
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: an object with one of json, json_object, regex, grammar, choice."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    """These four are the same, by vLLM's older names."""
    skip_special_tokens: Annotated[Any, neutral(True)] = True
    spaces_between_special_tokens: Annotated[Any, neutral(True)] = True
    include_stop_str_in_output: Annotated[Any, neutral(False)] = False


class ChatBody(Body):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_completion_tokens: Any = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    """False: there is one call at most."""
    modalities: Annotated[Any, neutral(["text"])] = None
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("auto", "none")] = None
    reasoning_effort: str | None = None
    """Of a template that has it."""
    verbosity: Annotated[Any, neutral("medium")] = None
    add_generation_prompt: bool | None = None
    """Default: unless the last message is continued."""
    continue_final_message: bool = False


class CompletionBody(Body):
    prompt: Any
    """One string or list of token ids, or a list of such."""
    echo: bool = False
    suffix: Annotated[Any, neutral("")] = None
    add_special_tokens: Annotated[Any, neutral(True)] = True


REASONING_EFFORT = "reasoning_effort"
"""The variable that templates read."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ANSWERS = 128
"""Of one request."""
LONGEST = 2**31 - 1
"""Length of an answer without a limit of its own, until the room in the context is known."""
AnyBody = ChatBody | CompletionBody
B = TypeVar("B", bound=BaseModel)
BODIES: dict[bool, type[ChatBody] | type[CompletionBody]] = {True: ChatBody, False: CompletionBody}
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
"""What pydantic says around what is allowed."""
NAMES = {chat: frozenset(body.model_fields) | SETTINGS.keys() for chat, body in BODIES.items()}
"""Of fields: what the library calls a setting has the same name, and the same meaning, in a body."""


@dataclass(frozen=True)
class ToolUse:
    """Tools that a chat offers to the model."""

    functions: tuple[dict[str, Any], ...]
    """Each with `name`, and where it has any `parameters`."""
    required: bool
    """Only calls of these may be written."""
    parallel: bool
    """As many as the model likes."""

    @property
    def limits_calls(self) -> bool:
        """Not every call that the model could write is allowed."""
        return self.required or not self.parallel or any(function.get("strict") for function in self.functions)

    @property
    def checked(self) -> list[dict[str, Any]]:
        """The functions, with the schemas that their arguments are held to."""
        return [
            function if self.required or function.get("strict") else {"name": function["name"]}
            for function in self.functions
        ]


@dataclass(frozen=True)
class CompletionRequest:
    """One body, understood."""

    chat: bool
    prompts: tuple[Prompt, ...]
    negative: Prompt | None
    settings: dict[str, Any]
    """Of `SamplingParams`, those that are given."""
    n: int
    """Answers to each prompt."""
    stream: bool
    include_usage: bool
    echo: bool
    cache_salt: str
    priority: int
    request_id: str | None
    timeout: float | None
    """Seconds."""
    tools: ToolUse | None = None
    tool_format: ToolFormat | None = None
    """How the model writes calls; None: what it writes is text."""
    prompt_logprobs: int | None = None
    """As many of the likeliest tokens are listed beside each token of the prompt; None: the prompt's are not listed."""
    only_prompts: bool = False
    """`max_tokens` 0 with `echo`: one token is decoded, and left out."""

    @property
    def may_reason(self) -> bool:
        """An answer may begin with reasoning."""
        return self.chat and not self.prompts[0].continues_last

    def check_template(self, tokenizer: Tokenizer) -> None:
        """Raises BadRequest for a setting that the chat template does not read."""
        template = tokenizer.chat_template or ""
        for prompt in self.prompts:
            effort = prompt.template_settings.get(REASONING_EFFORT, "none")
            if effort != "none" and REASONING_EFFORT not in template:
                raise BadRequest(
                    f"{REASONING_EFFORT}={effort!r}, but the model's chat template does not read it; allowed: 'none', "
                    "or leave it out",
                    REASONING_EFFORT,
                )

    def with_tool_format(self, tokenizer: Tokenizer) -> CompletionRequest:
        """With what follows for its tools from the chat template: how calls are written, and the constraint where some
        are required, at most one is allowed, or those of a function are to be valid. Raises BadRequest."""
        self.check_template(tokenizer)
        if self.tools is None:
            return self
        (prompt,) = self.prompts
        assert prompt.messages is not None, "only chats have tools"
        settings = prompt.template_settings
        texts = (tokenizer.chat(prompt.messages, tools=tools, settings=settings) for tools in (prompt.tools, ()))
        if len(set(map(tuple, texts))) == 1:
            raise BadRequest("tools is given, but the model's chat template ignores it; leave it out", "tools")
        form = ToolFormat.of(tokenizer.chat_template or "")
        if form is None and self.tools.required:
            raise BadRequest(
                "tool_choice requires a call, but how the model's chat template writes calls is not known; allowed: "
                "'auto', 'none'",
                "tool_choice",
            )
        if "constraint" in self.settings and self.tools.required:
            raise BadRequest(
                "tool_choice requires a call, and another constraint is given; leave one out", "tool_choice"
            )
        if form is None or "constraint" in self.settings or not self.tools.limits_calls:
            return replace(self, tool_format=form)
        for name in ("top_logprobs", "ignore_eos"):
            if value := self.settings.get(name):
                raise BadRequest(
                    f"{name}={value!r} is not available where calls are constrained: by tool_choice, strict functions "
                    "or parallel_tool_calls=false; leave one of them out",
                    name,
                )
        tools = self.tools
        grammar = form.grammar(tools.checked, tokenizer, parallel=tools.parallel, required=tools.required)
        try:
            constraint = Constraint("grammar", grammar)
        except ValueError as error:
            raise BadRequest(f"tools: {error}", "tools") from error
        return replace(self, tool_format=form, settings=self.settings | {"constraint": constraint})

    def after_reasoning(self, reasoning: Reasoning | None) -> CompletionRequest:
        """With a constraint, if there is one, that begins where the reasoning ends."""
        if reasoning is None or "constraint" not in self.settings:
            return self
        constraint = check_constraint("constraint", self.settings["constraint"])
        if constraint.after is not None:
            return self
        return replace(self, settings=self.settings | {"constraint": replace(constraint, after=reasoning.end)})

    def named(self, error: ValueError) -> ValueError:
        """With the field that it is about, if it is about one."""
        return named(error, NAMES[self.chat], "messages" if self.chat else "prompt")

    def params(self, longest: int, seed: int | None, first: bool = True) -> SamplingParams:
        """Of one answer, of `longest` tokens at most if the body gives no length; `first`: of those to a prompt, with
        which the prompt is scored, if at all. Raises ValueError naming field, value and what is allowed."""
        settings = {"max_tokens": longest} | self.settings | {"seed": seed}
        return SamplingParams(**settings if first else settings | {"prompt_logprobs": None})

    def negative_tokens(self, tokenizer: Tokenizer, limit: int) -> tuple[int, ...] | None:
        """Of the negative prompt, if there is one. Raises ValueError."""
        if self.negative is None:
            return None
        with of_negative():
            return tuple(self.negative.encode(tokenizer, limit))

    def seeds(self) -> Iterator[int | None]:
        """One for each answer; that of the first is the request's own."""
        seed = self.settings.get("seed")
        for index in range(self.n * len(self.prompts)):
            yield seed if index == 0 or seed is None else derived_seed(f"{seed}:{index}")


def derived_seed(name: str) -> int:
    """A seed that depends on `name` alone."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8]) >> 1


def understood(
    document: Any,
    chat: bool,
    models: tuple[str, ...],
    vocabulary: int,
    method: str | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    unknown: UnknownFields | None = None,
) -> CompletionRequest:
    """`models`: names of the model that is served; `vocabulary`: its tokens; `method`: of a body that names none;
    `defaults`: other settings of a body that leaves them out; `unknown`: ignores unknown fields, which are refused
    without it.

    Raises BadRequest naming the field, the value and what is allowed.
    """
    try:
        given = given_fields(document)
        body = _body({name: value for name, value in given.items() if name not in SETTINGS}, chat, unknown)
        settings = {name: value for name, value in given.items() if name in SETTINGS}
        return _understood(body, settings, models, vocabulary, method, defaults)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply to be read") from error


def _understood(
    body: AnyBody,
    settings: dict[str, Any],
    models: tuple[str, ...],
    vocabulary: int,
    method: str | None,
    defaults: Mapping[str, Any],
) -> CompletionRequest:
    chat = isinstance(body, ChatBody)
    if body.model is not None and body.model not in models:
        raise BadRequest(
            f"model={body.model!r}; allowed: {', '.join(map(repr, models))}", "model", 404, "model_not_found"
        )
    try:
        only_prompts = isinstance(body, CompletionBody) and body.echo and not body.stream and _is_zero(settings)
        if only_prompts:
            settings |= {"max_tokens": 1}
        check_cache_salt(body.cache_salt)
        check_priority(body.priority)
        settings = _in_the_librarys_terms(settings, body)
        if method is not None:
            settings.setdefault("method", method)
        settings = with_defaults(settings, defaults)
        # Before the prompt: a wrong setting is found in no time, while a long text takes some to encode.
        check_guidance(SamplingParams(**{"max_tokens": LONGEST} | settings), body.negative_prompt is not None)
    except ValueError as error:
        raise named(error, NAMES[chat], "") from error
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options has no effect without stream=true; leave it out", "stream_options")
    # One more than there can be is enough to be refused for.
    prompts = (
        (_chat(body),)
        if isinstance(body, ChatBody)
        else tuple(islice(_prompts(body.prompt, vocabulary), MAX_ANSWERS + 1))
    )
    if body.n * len(prompts) > MAX_ANSWERS:
        raise BadRequest(
            f"n={body.n} for {len(prompts)} prompts; allowed: at most {MAX_ANSWERS} answers a request", "n"
        )
    echo = isinstance(body, CompletionBody) and body.echo
    listed = settings.get("prompt_logprobs")
    if listed is not None and body.stream:
        raise BadRequest(
            f"prompt_logprobs={listed}; allowed: without stream, as they are known with the answer", "prompt_logprobs"
        )
    if echo and settings.get("logprobs"):
        if body.stream:
            raise BadRequest("echo=true with logprobs; allowed: without stream, as they are known at its end", "echo")
        settings["prompt_logprobs"] = max(listed or 0, settings.get("top_logprobs", 0))
    return CompletionRequest(
        chat=chat,
        prompts=prompts,
        negative=None if body.negative_prompt is None else _negative(body.negative_prompt, vocabulary),
        settings=settings,
        n=body.n,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        echo=echo,
        cache_salt=body.cache_salt,
        priority=body.priority,
        request_id=body.request_id,
        timeout=body.timeout,
        tools=_tool_use(body) if isinstance(body, ChatBody) else None,
        prompt_logprobs=listed,
        only_prompts=only_prompts,
    )


def _is_zero(settings: Mapping[str, Any]) -> bool:
    return type(given := settings.get("max_tokens")) is int and given == 0


def given_fields(document: Any) -> dict[str, Any]:
    """Fields that are given."""
    if not isinstance(document, dict):
        raise BadRequest("the body is no JSON object; allowed: an object with the request")
    given = {name: value for name, value in document.items() if value is not None}
    if is_text(given):  # once for all fields: a body can name many
        return given
    for name, value in given.items():
        if not is_text(name) or not is_text(value):
            raise BadRequest(
                f"{name!r} holds half of a surrogate pair; allowed: valid Unicode text", name if is_text(name) else None
            )
    return given


def _body(given: dict[str, Any], chat: bool, unknown: UnknownFields | None) -> AnyBody:
    return validated(BODIES[chat], given, CHAT if chat else COMPLETIONS, NAMES[chat], unknown)


def validated(
    model: type[B], given: dict[str, Any], endpoint: str, names: frozenset[str], unknown: UnknownFields | None
) -> B:
    """`names`: fields that a body of `endpoint` may have. Raises BadRequest."""
    try:
        return model.model_validate(given, context=unknown)
    except ValidationError as error:
        raise _in_our_words(error, endpoint, names) from error


def _in_our_words(error: ValidationError, endpoint: str, names: frozenset[str]) -> BadRequest:
    """The first of what is wrong."""
    first = error.errors(include_url=False)[0]
    # After the number of an item, a union names the kind that the item is of.
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
    allowed = KINDS.get(first["type"]) or _AROUND.sub("", first["msg"])
    return BadRequest(f"{path}={first['input']!r}; allowed: {allowed}", path)


def _is_kind(before: Any, part: Any) -> bool:
    return isinstance(before, int) and isinstance(part, str) and part.startswith(KIND)


def renamed(error: ValueError, names: Mapping[str, str]) -> ValueError:
    """`error` of a chat in the words of another API; `names`: fields that are called otherwise there."""
    if not isinstance(error, BadRequest) or error.param is None:
        return error
    first = _FIRST_WORD.match(error.param)
    if first is None or (name := names.get(first[0])) is None:
        return error
    message = re.sub(rf"^{first[0]}\b", name, str(error))
    return BadRequest(message, name, error.http_status, error.code)


def _in_the_librarys_terms(settings: dict[str, Any], body: Body) -> dict[str, Any]:
    """Settings where OpenAI or vLLM have other words than the library."""
    if settings.get("top_k") == -1:  # how vLLM says: all
        settings["top_k"] = 0
    if isinstance(stop := settings.get("stop"), str):
        settings["stop"] = (stop,)
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if "max_tokens" in settings:
            raise BadRequest(
                "max_tokens and max_completion_tokens are both given; they mean the same, leave one of them out",
                "max_tokens",
            )
        settings["max_tokens"] = body.max_completion_tokens
    settings |= _constraint(settings, body)
    if "logprobs" in settings:
        settings |= _logprobs(settings, isinstance(body, ChatBody))
    return settings


STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""Kinds of constraints, by vLLM's names."""


def _constraint(settings: dict[str, Any], body: Body) -> dict[str, Any]:
    """Of what the answer is to be, by whichever field it is given."""
    given: list[tuple[str, dict[str, Any]]] = []
    if body.response_format is not None and (constraint := _format(body.response_format)):
        given.append(("response_format", constraint))
    if body.structured_outputs is not None:
        given.append(("structured_outputs", _structured(body.structured_outputs)))
    for name in ("guided_json", "guided_regex", "guided_grammar", "guided_choice"):
        if (value := getattr(body, name)) is not None:
            given.append((name, {STRUCTURED[name.removeprefix("guided_")]: value}))
    names = [name for name, _ in given] + ["constraint"] * ("constraint" in settings)
    if len(names) > 1:
        raise BadRequest(f"{' and '.join(names)} are given; allowed: one of them", names[0])
    if not given:
        return {}
    ((name, constraint),) = given
    try:
        return {"constraint": Constraint.of(constraint)}
    except ValueError as error:
        raise BadRequest(f"{name}: {error}", name) from error


def _format(form: ResponseFormat) -> dict[str, Any]:
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise BadRequest(
            f"response_format of type {form.type!r} {'without' if form.json_schema is None else 'with'} json_schema; "
            "allowed: json_schema with that type, and only there",
            "response_format",
        )
    if form.json_schema is None:
        return {"json_object": True} if form.type == "json_object" else {}
    schema = form.json_schema.schema_
    return {"json_object": True} if schema is None else {"json_schema": schema}


def _structured(values: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in values.items() if value not in (None, False)}
    if len(given) != 1 or not given.keys() <= STRUCTURED.keys():
        raise BadRequest(
            f"structured_outputs has {', '.join(given) or 'nothing'}; allowed: one of {', '.join(STRUCTURED)}",
            "structured_outputs",
        )
    return {STRUCTURED[name]: value for name, value in given.items()}


def _logprobs(settings: dict[str, Any], chat: bool) -> dict[str, Any]:
    """A number, of a completion, asks for so many of the likeliest tokens besides."""
    value = settings["logprobs"]
    if isinstance(value, bool):
        return {}
    if chat or not isinstance(value, int) or not 0 <= value <= MAX_TOP_LOGPROBS:
        numbers = "" if chat else f", 0..{MAX_TOP_LOGPROBS}"
        raise BadRequest(f"logprobs={value!r}; allowed: true, false{numbers}", "logprobs")
    if value and settings.get("top_logprobs"):
        raise BadRequest(
            "logprobs is a number and top_logprobs is given; they mean the same, leave one of them out", "top_logprobs"
        )
    return {"logprobs": True} | ({"top_logprobs": value} if value else {})


def _prompts(prompt: Any, vocabulary: int) -> Iterator[Prompt]:
    """One prompt, or several in a list."""
    several = isinstance(prompt, list) and bool(prompt) and all(isinstance(each, (str, list)) for each in prompt)
    for each in prompt if several else [prompt]:
        if isinstance(each, str):
            yield Prompt(text=each)
            continue
        if not isinstance(each, list) or not all(type(token) is int for token in each):
            raise BadRequest(
                "prompt holds other things; allowed: one string or list of token ids, or a list of such", "prompt"
            )
        yield _of_tokens(each, vocabulary, "prompt")


def _of_tokens(tokens: list[int], vocabulary: int, name: str) -> Prompt:
    if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
        raise BadRequest(f"{name} contains token id {wrong[0]}; allowed: 0..{vocabulary - 1}", name)
    return Prompt(token_ids=tuple(tokens))


def _negative(prompt: Any, vocabulary: int) -> Prompt:
    """One prompt: a string as it is, token ids, or messages for the chat template."""
    name = "negative_prompt"
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return _of_tokens(prompt, vocabulary, name)
    if not isinstance(prompt, list) or not all(isinstance(item, dict) for item in prompt):
        raise BadRequest(
            f"{name} holds other things; allowed: a string, a list of token ids, or a list of messages", name
        )
    try:
        messages = [ChatMessage.model_validate(item) for item in prompt]
    except ValidationError as error:
        path = error.errors(include_url=False)[0]["loc"]
        raise BadRequest(
            f"{name} holds a message that is none, for its {path[0]!r}; allowed: messages as of a chat", name
        ) from error
    return Prompt(messages=tuple(_message(index, message) for index, message in enumerate(messages)))


def _chat(body: ChatBody) -> Prompt:
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt are both true; allowed: one of them",
                "continue_final_message",
            )
        if body.messages[-1].role != "assistant":
            raise BadRequest(
                f"continue_final_message=true, and the last message is of role {body.messages[-1].role!r}; allowed: "
                "'assistant'",
                "continue_final_message",
            )
    settings = body.chat_template_kwargs
    if body.reasoning_effort is not None:
        settings = settings | {REASONING_EFFORT: body.reasoning_effort}
    tools = body.tools if body.tools and body.tool_choice != "none" else ()
    return Prompt(
        messages=tuple(_message(index, message) for index, message in enumerate(body.messages)),
        tools=tuple(_tool(tool) for tool in tools),
        template_settings=settings,
        begins_message=body.add_generation_prompt is not False,
        continues_last=body.continue_final_message,
    )


def _tool_use(body: ChatBody) -> ToolUse | None:
    choice = body.tool_choice
    if not body.tools or choice == "none":
        if choice not in (None, "auto", "none"):
            raise BadRequest("tool_choice requires a call, and tools is missing", "tool_choice")
        return None
    functions = tuple(_tool(tool)["function"] for tool in body.tools)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        functions = tuple(function for function in functions if function["name"] == name)
        if not functions:
            names = ", ".join(repr(tool.function.name) for tool in body.tools)
            raise BadRequest(f"tool_choice names {name!r}; allowed: {names}", "tool_choice")
    is_named = isinstance(choice, NamedTool)
    return ToolUse(functions, choice == "required" or is_named, body.parallel_tool_calls and not is_named)


def _tool(tool: Tool) -> dict[str, Any]:
    function = {name: value for name, value in dict(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """As chat templates read it."""
    if message.content is None and not message.tool_calls:
        raise BadRequest(
            f"messages[{index}].content is missing; allowed: a string, or a list of parts with text", "messages"
        )
    if message.tool_calls and message.role != "assistant":
        raise BadRequest(f"messages[{index}].tool_calls; allowed: with role 'assistant'", "messages")
    # `developer` is what later models call `system`; templates know the older word.
    read: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            read[name] = value
    if message.tool_calls:
        read["tool_calls"] = [
            _tool_call(f"messages[{index}].tool_calls[{number}]", call)
            for number, call in enumerate(message.tool_calls)
        ]
    return read


def _text(message: ChatMessage) -> str:
    return "\n".join(part.text for part in message.content or ())


def _tool_call(name: str, call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            f"{name}.function.arguments is no JSON; allowed: an object, as JSON in a string", "messages"
        ) from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{name}.function.arguments is no object; allowed: an object, as JSON in a string", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
