"""Converts a body of OpenAI's API (`services.openai.bodies`) to a request of the library. Knows nothing about servers,
files or decoding.

The library names and checks sampling settings; where OpenAI or vLLM have other words, this module translates them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from services.backend import check_cache_salt
from services.openai.bodies import (
    CHAT,
    COMPLETIONS,
    BadRequest,
    Body,
    CallFields,
    ChatBody,
    ChatMessage,
    CompletionBody,
    FieldNames,
    NamedTool,
    ResponseFormat,
    Tool,
    UnknownFields,
    check_model,
    given_fields,
    joined,
    validated,
)
from services.openai.parts import Reasoning
from services.openai.templates import REASONING_EFFORT, ToolUse, arguments_of, chat_message, tool, tool_call, tool_use
from services.openai.tool_calls import CallSyntax, ToolFormat, arguments_rule
from services.prompts import Prompt, of_negative
from smc.api.constraint import MAX_BYTES, Constraint, check_constraint
from smc.api.limits import MAX_TOP_LOGPROBS
from smc.api.request import MAX_PRIORITY, Request, check_guidance, check_priority
from smc.api.sampling_params import DEFAULT_METHOD, SETTINGS, SamplingParams, with_defaults
from smc.model.tokenizer import Tokenizer

MAX_ANSWERS = 128
"""Maximum number of answers of one request."""
LEAST_RULES = 64
"""Minimum bytes that the grammar of calls has for each function."""
LONGEST = 2**31 - 1
"""`max_tokens` of an answer without a limit, until the room in the context is known."""
STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""Kinds of constraints, by vLLM's names."""

B = TypeVar("B", bound=CallFields)


@dataclass(frozen=True)
class BodyForm(Generic[B]):
    """The bodies of one endpoint."""

    endpoint: str
    body: type[B]
    """Fields of a body, without the settings of `smc.api.sampling_params`, which have the same names."""
    replaced: frozenset[str] = frozenset()
    """Settings that a body does not have under their own names: other fields replace them, or the API lacks them."""

    @property
    def names(self) -> frozenset[str]:
        """All fields that a body may have."""
        return frozenset(self.body.model_fields) | SETTINGS.keys() - self.replaced

    def read(
        self, document: Any, served: Served, request_of: Callable[[B, dict[str, Any]], CompletionRequest]
    ) -> tuple[B, CompletionRequest]:
        """Read a body. Returns it, and its request. `request_of`: returns the request, from the body and its settings.
        Raises BadRequest."""
        try:
            given = given_fields(document)
            settings = {name: given.pop(name) for name in list(given) if name in SETTINGS and name not in self.replaced}
            body = validated(self.body, given, self.endpoint, self.names, served.unknown)
            return body, request_of(body, settings)
        except RecursionError as error:
            raise BadRequest("the body is nested too deeply to be read") from error


CHAT_FORM, COMPLETION_FORM = BodyForm(CHAT, ChatBody), BodyForm(COMPLETIONS, CompletionBody)
CHAT_FIELDS = FieldNames(CHAT_FORM.names, "messages")
COMPLETION_FIELDS = FieldNames(COMPLETION_FORM.names, "prompt")


@dataclass(frozen=True)
class CompletionRequest:
    """The request of one body."""

    body: CallFields
    """Its fields that concern the call, not the answer."""
    chat: bool
    prompts: tuple[Prompt, ...]
    settings: dict[str, Any]
    """The given settings of `SamplingParams`, by name."""
    negative: Prompt | None = None
    n: int = 1
    """Answers to each prompt."""
    include_usage: bool = False
    """A stream ends with an event of the usage."""
    continuous_usage: bool = False
    """Every event of a stream has the usage so far."""
    echo: bool = False
    tools: ToolUse | None = None
    syntax: CallSyntax | None = None
    """How the model writes calls; None: everything that it writes is text."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens to list for each token of the prompt; None: the prompt's tokens are not listed."""
    names: FieldNames = CHAT_FIELDS
    """How errors name fields."""
    only_prompts: bool = False
    """`max_tokens` is 0 with `echo`: one token is decoded and left out of the answer."""

    @property
    def may_reason(self) -> bool:
        """Whether an answer may begin with reasoning."""
        return self.chat and not self.prompts[0].continues_last

    def check_template(self, tokenizer: Tokenizer) -> None:
        """Check the template's settings. Raises BadRequest for `reasoning_effort` if the chat template does not read
        it."""
        template = tokenizer.chat_template or ""
        for prompt in self.prompts:
            effort = prompt.template_settings.get(REASONING_EFFORT, "none")
            if effort != "none" and REASONING_EFFORT not in template:
                raise BadRequest(
                    f"{self.names.effort}={effort!r}, but the model's chat template does not read it; allowed: 'none', "
                    "or leave it out",
                    self.names.effort,
                )

    def with_tool_format(self, tokenizer: Tokenizer) -> CompletionRequest:
        """Return the request with what the chat template implies for its tools: how calls are written, and a constraint
        if calls are required, limited to one, or must follow a function's schema. Raises BadRequest."""
        self.check_template(tokenizer)
        if self.tools is None:
            return self
        (prompt,) = self.prompts
        assert prompt.messages is not None, "only chats have tools"
        has_system = prompt.messages[0]["role"] == "system"
        if not tokenizer.reads_tools(has_system, prompt.template_settings):
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
        if form is None:
            return self
        names = frozenset(tool["function"]["name"] for tool in prompt.tools)
        if "constraint" in self.settings or not self.tools.limits_calls:
            return replace(self, syntax=CallSyntax(form, names))
        for name in ("top_logprobs", "ignore_eos"):
            if value := self.settings.get(name):
                raise BadRequest(
                    f"{name}={value!r} is not available where calls are constrained: by tool_choice, strict functions "
                    "or parallel_tool_calls=false; leave one of them out",
                    name,
                )
        tools, settings = self.tools, dict(self.settings)
        if tools.required:
            # A required call is completed: only the grammar and the length end it.
            for name in ("stop", "stop_token_ids"):
                settings.pop(name, None)
        # Before the grammar is written: a body may have tens of thousands of tools.
        if (least := LEAST_RULES * len(tools.functions)) > MAX_BYTES:
            raise BadRequest(
                f"tools: the rules of {len(tools.functions)} functions have {least} bytes at least; allowed: at most "
                f"{MAX_BYTES}",
                "tools",
            )
        grammar = form.grammar(tools.checked, tokenizer, parallel=tools.parallel, required=tools.required)
        if (size := len(grammar.encode())) > MAX_BYTES:
            raise BadRequest(f"tools: their schemas have {size} bytes together; allowed: at most {MAX_BYTES}", "tools")
        rules = zip(map(arguments_rule, itertools.count()), tools.places)
        fields = {rule: f"tools[{place}]{self.names.parameters}" for rule, place in rules}
        constraint = Constraint("grammar", grammar, fields={"": "tools"} | fields)
        syntax = CallSyntax(form, names, constrained=True, required=tools.required)
        return replace(self, syntax=syntax, settings=settings | {"constraint": constraint})

    def after_reasoning(self, reasoning: Reasoning | None) -> CompletionRequest:
        """Return the request with its constraint, if it has one, beginning where the reasoning ends."""
        if reasoning is None or "constraint" not in self.settings:
            return self
        constraint = check_constraint("constraint", self.settings["constraint"])
        if constraint.after is not None:
            return self
        return replace(self, settings=self.settings | {"constraint": replace(constraint, after=reasoning.end)})

    def params(self, longest: int, seed: int | None, first: bool = True) -> SamplingParams:
        """Return the settings of one answer. `longest`: maximum length if the body gives none; `first`: whether it is
        the first answer to its prompt, the only one that scores the prompt. Raises ValueError naming the field, the
        value and what is allowed."""
        settings = {"max_tokens": longest} | self.settings | {"seed": seed}
        return SamplingParams(**settings if first else settings | {"prompt_logprobs": None})

    def reasoning(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Reasoning | None:
        """Return the reasoning that answers to a prompt are expected to begin with, if any."""
        return Reasoning.of(tokenizer, prompt) if self.may_reason else None

    def requests(
        self,
        name: str,
        prompt: tuple[int, ...],
        negative: tuple[int, ...] | None,
        seeds: Iterator[int | None],
        tokenizer: Tokenizer,
        default_length: Callable[[SamplingParams, int, int], int],
    ) -> list[Request]:
        """Return one request for each answer to a prompt. `prompt` and `negative`: token ids; `seeds`: see `seeds`;
        `default_length`: returns `max_tokens` of an answer without a limit, from its settings and the numbers of tokens
        of both prompts. Raises what `params` raises."""
        completion = self.after_reasoning(self.reasoning(tokenizer, prompt))
        longest = default_length(completion.params(LONGEST, None), len(prompt), len(negative or ()))
        each = [completion.params(longest, next(seeds), first=not number) for number in range(self.n)]
        return [
            Request(name, prompt, params, self.body.cache_salt, negative_prompt=negative, priority=self.body.priority)
            for params in each
        ]

    def negative_tokens(self, tokenizer: Tokenizer, limit: int) -> tuple[int, ...] | None:
        """Return the token ids of the negative prompt; None if there is none. Raises ValueError."""
        if self.negative is None:
            return None
        with of_negative():
            return tuple(self.negative.encode(tokenizer, limit))

    def seeds(self) -> Iterator[int | None]:
        """Yield a seed for each answer, see `seeds_of`."""
        return seeds_of(self.settings.get("seed"), self.n * len(self.prompts))


def derived_seed(name: str) -> int:
    """Return a seed that depends on `name` alone."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8]) >> 1


def seeds_of(seed: int | None, count: int) -> Iterator[int | None]:
    """Yield the seeds of `count` answers: first the request's own, then seeds derived from it. None: the request gives
    none."""
    for index in range(count):
        yield seed if index == 0 or seed is None else derived_seed(f"{seed}:{index}")


@dataclass(frozen=True)
class Served:
    """What reading a body needs to know about the served model."""

    models: tuple[str, ...]
    """Names of the model."""
    tokenizer: Tokenizer
    method: str = DEFAULT_METHOD
    """Method of a body that names none; `smc` becomes `exact` at temperature 0."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of other settings that a body leaves out."""
    unknown: UnknownFields | None = None
    """Ignores unknown fields; None: they are refused."""
    priorities: tuple[int, int] = (0, MAX_PRIORITY)
    """Lowest and highest `priority` that a body may have."""


def understood(document: Any, chat: bool, served: Served) -> CompletionRequest:
    """Return the request of a body. `chat`: whether it is a chat's or a completion's. Raises BadRequest naming the
    field, the value and what is allowed."""
    form: BodyForm[Any] = CHAT_FORM if chat else COMPLETION_FORM
    _, completion = form.read(document, served, partial(_understood, served))
    return completion


def chat_request(
    body: CallFields, settings: dict[str, Any], prompt: Prompt, tools: ToolUse | None, names: FieldNames, served: Served
) -> CompletionRequest:
    """Return the request of a chat that an API has in a form of its own. `settings`: by the library's names. Raises
    BadRequest naming the field, the value and what is allowed."""
    completion = CompletionRequest(
        body,
        chat=True,
        prompts=(prompt,),
        settings=_checked(body, lambda: _without_synonyms(settings), names, served),
        tools=tools,
        names=names,
    )
    return completion.with_tool_format(served.tokenizer)


def _checked(
    body: CallFields, read: Callable[[], dict[str, Any]], names: FieldNames, served: Served, guided: bool = False
) -> dict[str, Any]:
    """Return the settings of a body with the defaults of the service. `read`: returns them in the library's terms;
    `guided`: whether there is a negative prompt. Raises BadRequest."""
    if body.model is not None:
        check_model(body.model, served.models)
    try:
        check_cache_salt(body.cache_salt)
        check_priority(body.priority, *served.priorities)
        settings = read()
        settings = with_defaults(settings, served.defaults, served.method)
        # Before the prompt: checking settings is fast, while encoding a long text takes time.
        check_guidance(SamplingParams(**{"max_tokens": LONGEST} | settings), guided)
    except ValueError as error:
        raise names.named(error) from error
    return settings


def _understood(served: Served, body: ChatBody | CompletionBody, settings: dict[str, Any]) -> CompletionRequest:
    chat, vocabulary = isinstance(body, ChatBody), served.tokenizer.size
    names = CHAT_FIELDS if chat else COMPLETION_FIELDS
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        names = replace(names, settings={"max_tokens": "max_completion_tokens"})
    only_prompts = isinstance(body, CompletionBody) and body.echo and not body.stream and _is_zero(settings)
    if only_prompts:
        settings |= {"max_tokens": 1}
    guided = body.negative_prompt is not None
    settings = _checked(body, lambda: _in_the_librarys_terms(settings, body), names, served, guided)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options has no effect without stream=true; leave it out", "stream_options")
    # One prompt more than the maximum is enough to refuse the body.
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
        body,
        chat=chat,
        prompts=prompts,
        negative=None if body.negative_prompt is None else _negative(body.negative_prompt, vocabulary),
        settings=settings,
        n=body.n,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        continuous_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        echo=echo,
        tools=_tool_use(body) if isinstance(body, ChatBody) else None,
        prompt_logprobs=listed,
        only_prompts=only_prompts,
        names=names,
    )


def _is_zero(settings: Mapping[str, Any]) -> bool:
    return type(given := settings.get("max_tokens")) is int and given == 0


def _without_synonyms(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, translated where OpenAI or vLLM have other values than the library."""
    if settings.get("top_k") == -1:  # vLLM's value for all tokens
        settings["top_k"] = 0
    if isinstance(stop := settings.get("stop", []), str):
        settings["stop"] = (stop,)
    elif not isinstance(stop, list):
        raise BadRequest(f"stop={stop!r}; allowed: a string, or a list of strings, which are not empty", "stop")
    return settings


def _in_the_librarys_terms(settings: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return the settings, translated where OpenAI or vLLM have other words than the library."""
    settings = _without_synonyms(settings)
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


def _constraint(settings: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return the setting of the constraint that the body gives in one of several fields; nothing if it gives none."""
    given: list[tuple[str, dict[str, Any]]] = []
    if body.response_format is not None and (constraint := _format(body.response_format)):
        given.append(("response_format", constraint))
    if body.structured_outputs is not None:
        name, constraint = _structured(body.structured_outputs)
        given.append((f"structured_outputs.{name}", constraint))
    for name in ("guided_json", "guided_regex", "guided_grammar", "guided_choice"):
        if (value := getattr(body, name)) is not None:
            given.append((name, {STRUCTURED[name.removeprefix("guided_")]: value}))
    return one_constraint(given, settings)


def one_constraint(given: Sequence[tuple[str, dict[str, Any]]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of the constraint that a body gives; nothing if it gives none. `given`: its fields, and the
    constraints that they hold. Raises BadRequest if there are several."""
    names = [name for name, _ in given] + ["constraint"] * ("constraint" in settings)
    if len(names) > 1:
        raise BadRequest(f"{' and '.join(names)} are given; allowed: one of them", names[0])
    if not given:
        return {}
    ((name, constraint),) = given
    return {"constraint": Constraint.of(constraint, name)}


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


def _structured(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key that is given, and its constraint."""
    given = {name: value for name, value in values.items() if value not in (None, False)}
    if len(given) != 1 or not given.keys() <= STRUCTURED.keys():
        raise BadRequest(
            f"structured_outputs has {', '.join(given) or 'nothing'}; allowed: one of {', '.join(STRUCTURED)}",
            "structured_outputs",
        )
    ((name, value),) = given.items()
    return name, {STRUCTURED[name]: value}


def _logprobs(settings: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Return the settings that `logprobs` stands for. In a completion, a number also asks for that many likeliest
    tokens."""
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
    """Yield the prompts: one, or several in a list."""
    several = isinstance(prompt, list) and bool(prompt) and all(isinstance(each, (str, list)) for each in prompt)
    for each in prompt if several else [prompt]:
        if isinstance(each, str):
            yield Prompt(text=each)
            continue
        if not isinstance(each, list) or not all(type(token) is int for token in each):
            raise BadRequest(
                "prompt is neither text nor token ids; allowed: one string or list of token ids, or a list of these",
                "prompt",
            )
        yield _of_tokens(each, vocabulary, "prompt")


def _of_tokens(tokens: list[int], vocabulary: int, name: str) -> Prompt:
    if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
        raise BadRequest(f"{name} contains token id {wrong[0]}; allowed: 0..{vocabulary - 1}", name)
    return Prompt(token_ids=tuple(tokens))


def _negative(prompt: Any, vocabulary: int) -> Prompt:
    """Return the negative prompt: a string as it is, token ids, or messages for the chat template."""
    name = "negative_prompt"
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return _of_tokens(prompt, vocabulary, name)
    if not isinstance(prompt, list) or not all(isinstance(item, dict) for item in prompt):
        raise BadRequest(
            f"{name} is neither text, token ids nor messages; allowed: a string, a list of token ids, or a list of "
            "messages",
            name,
        )
    return Prompt(
        messages=tuple(_negative_message(f"{name}[{index}]", name, item) for index, item in enumerate(prompt))
    )


def _negative_message(place: str, name: str, item: dict[str, Any]) -> dict[str, Any]:
    try:
        message = ChatMessage.model_validate(item)
    except ValidationError as error:
        path = error.errors(include_url=False)[0]["loc"]
        raise BadRequest(
            f"{place} is not a valid message, because of its {path[0]!r}; allowed: messages as in a chat", name
        ) from error
    return _message(place, name, message)


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
    return Prompt(
        messages=tuple(
            _message(f"messages[{index}]", "messages", message) for index, message in enumerate(body.messages)
        ),
        tools=tuple(map(_tool, body.tools or ())) if body.tool_choice != "none" else (),
        template_settings=settings,
        begins_message=body.add_generation_prompt is not False,
        continues_last=body.continue_final_message,
    )


def _tool_use(body: ChatBody) -> ToolUse | None:
    tools, choice = tuple(map(_tool, body.tools or ())), body.tool_choice
    if isinstance(choice, NamedTool):
        return tool_use(tools, "required", choice.function.name, body.parallel_tool_calls)
    return tool_use(tools, choice or "auto", None, body.parallel_tool_calls)


def _tool(one: Tool) -> dict[str, Any]:
    return tool(**dict(one.function))


def _message(place: str, field: str, message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that chat templates read. `place`: where the body has it, within `field`. Raises
    BadRequest."""
    if message.content is None and not message.tool_calls:
        raise BadRequest(f"{place}.content is missing; allowed: a string, or a list of parts with text", field)
    if message.tool_calls and message.role != "assistant":
        raise BadRequest(f"{place}.tool_calls; allowed: with role 'assistant'", field)
    calls = []
    for number, call in enumerate(message.tool_calls or ()):
        arguments = arguments_of(call.function.arguments, field, f"{place}.tool_calls[{number}].function.arguments")
        calls.append(tool_call(call.id, call.function.name, arguments))
    more = {name: getattr(message, name) for name in ("name", "tool_call_id", "reasoning_content")}
    return chat_message(message.role, joined(message.content or ()), calls, **more)
