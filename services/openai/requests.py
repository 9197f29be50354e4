"""From a body to what is asked of the library. Knows nothing about servers, files or about who decodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import ValidationError

from services.backend import check_cache_salt
from services.openai.bodies import Body, ChatBody, CompletionBody, Message, Tool, ToolCall
from services.openai.document import is_text
from services.openai.errors import BadRequest, named
from services.prompt import Prompt, of_negative
from smc.api.limits import MAX_TOP_LOGPROBS
from smc.api.request import check_guidance
from smc.api.sampling_params import SETTINGS, SamplingParams
from smc.model.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ANSWERS = 128
"""Of one request."""
LONGEST = 2**31 - 1
"""Of an answer about whose length nothing is said, until what the context leaves is known."""
AnyBody = ChatBody | CompletionBody
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
"""Types as JSON calls them, by the errors of whoever checks them."""
NAMES = {chat: frozenset(body.model_fields) | SETTINGS.keys() for chat, body in BODIES.items()}
"""Of fields: what the library calls a setting has the same name, and the same meaning, in a body."""


@dataclass(frozen=True)
class Asked:
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
    request_id: str | None
    timeout: float | None
    """Seconds."""

    def named(self, error: ValueError) -> ValueError:
        """With the field that it is about, if it is about one."""
        return named(error, NAMES[self.chat], "messages" if self.chat else "prompt")

    def params(self, longest: int, seed: int | None) -> SamplingParams:
        """Of one answer, of `longest` tokens at most if nothing is said. Raises ValueError naming field, value and what
        is allowed."""
        return SamplingParams(**{"max_tokens": longest} | self.settings | {"seed": seed})

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
    """The same whenever and wherever it is asked for."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8]) >> 1


def understood(document: Any, chat: bool, models: tuple[str, ...], vocabulary: int, method: str | None = None) -> Asked:
    """`models`: names of the model that is served; `vocabulary`: its tokens; `method`: of a body that says nothing.

    Raises BadRequest naming the field, the value and what is allowed.
    """
    try:
        given = _given(document)
        body = _body({name: value for name, value in given.items() if name not in SETTINGS}, chat)
        settings = {name: value for name, value in given.items() if name in SETTINGS}
        return _understood(body, settings, models, vocabulary, method)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply to be read") from error


def _understood(
    body: AnyBody, settings: dict[str, Any], models: tuple[str, ...], vocabulary: int, method: str | None
) -> Asked:
    chat = isinstance(body, ChatBody)
    if body.model is not None and body.model not in models:
        raise BadRequest(
            f"model={body.model!r}; allowed: {', '.join(map(repr, models))}", "model", 404, "model_not_found"
        )
    try:
        check_cache_salt(body.cache_salt)
        settings = _in_the_librarys_terms(settings, body)
        if method is not None:
            settings.setdefault("method", method)
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
    if echo and settings.get("logprobs"):
        raise BadRequest("echo=true; allowed: false with logprobs, which are of the answer alone", "echo")
    return Asked(
        chat=chat,
        prompts=prompts,
        negative=None if body.negative_prompt is None else _negative(body.negative_prompt, vocabulary),
        settings=settings,
        n=body.n,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        echo=echo,
        cache_salt=body.cache_salt,
        request_id=body.request_id,
        timeout=body.timeout,
    )


def _given(document: Any) -> dict[str, Any]:
    """Fields that are given."""
    if not isinstance(document, dict):
        raise BadRequest("the body is no JSON object; allowed: an object with the request")
    given = {name: value for name, value in document.items() if value is not None}
    for name, value in given.items():
        if not is_text(name) or not is_text(value):
            raise BadRequest(
                f"{name!r} holds half of a surrogate pair; allowed: valid Unicode text", name if is_text(name) else None
            )
    return given


def _body(given: dict[str, Any], chat: bool) -> AnyBody:
    try:
        return BODIES[chat].model_validate(given)
    except ValidationError as error:
        raise _in_our_words(error, chat) from error


def _in_our_words(error: ValidationError, chat: bool) -> BadRequest:
    """The first of what is wrong."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        allowed = f"; allowed: {', '.join(sorted(NAMES[chat]))}" if len(first["loc"]) == 1 else "; leave it out"
        return BadRequest(f"{place} is not a field of {CHAT if chat else COMPLETIONS} here{allowed}", place)
    if first["type"] == "missing":
        return BadRequest(f"{place} is missing", param)
    allowed = KINDS.get(first["type"]) or first["msg"].removeprefix("Input should be ")
    return BadRequest(f"{place}={first['input']!r}; allowed: {allowed}", place)


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
    if "logprobs" in settings:
        settings |= _logprobs(settings, isinstance(body, ChatBody))
    return settings


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
        messages = [Message.model_validate(item) for item in prompt]
    except ValidationError as error:
        place = error.errors(include_url=False)[0]["loc"]
        raise BadRequest(
            f"{name} holds a message that is none, for its {place[0]!r}; allowed: messages as of a chat", name
        ) from error
    return Prompt(messages=tuple(_message(index, message) for index, message in enumerate(messages)))


def _chat(body: ChatBody) -> Prompt:
    tools = body.tools if body.tools and body.tool_choice != "none" else ()
    return Prompt(
        messages=tuple(_message(index, message) for index, message in enumerate(body.messages)),
        tools=tuple(_tool(tool) for tool in tools),
        template_settings=body.chat_template_kwargs,
    )


def _tool(tool: Tool) -> dict[str, Any]:
    function = {name: value for name, value in dict(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


def _message(index: int, message: Message) -> dict[str, Any]:
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


def _text(message: Message) -> str:
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
