"""From the body of a line, in OpenAI's terms, to a request of the engine. Knows nothing about files or about who decodes."""

from __future__ import annotations

import hashlib
from typing import Any

from services.backend import ServingPair, check_cache_salt
from services.batch.lines import CHAT, Line
from smc.engine.request import Request, SamplingParams

DEFAULT_MAX_TOKENS = 256
ROLES = ("system", "user", "assistant")

AS_THEY_ARE = (
    *("temperature", "top_p", "seed", "top_k", "min_p", "particles", "min_particles", "population", "alpha"),
    *("ess_threshold", "resampling", "draft_temperature", "stop_token_ids", "ignore_eos", "time_budget"),
)
"""Fields that `SamplingParams` has under the same name, with the same meaning."""
TRANSLATED = ("cache_salt", "model", "max_tokens", "max_completion_tokens", "stop", "logprobs", "n", "stream", "decoding")
KINDS = {"cache_salt": str, "model": str, "resampling": str, "decoding": str, "ignore_eos": bool}
"""Types that nobody further down looks at."""


class Requests:
    """Makes requests for one pair of models."""

    def __init__(self, pair: ServingPair, seed: int) -> None:
        """`seed`: see `BatchConfig.seed`."""
        self._pair, self._seed = pair, seed

    def build(self, line: Line) -> Request:
        """Raises ValueError naming the field, the value and what is allowed."""
        if line.mistake is not None:
            raise ValueError(line.mistake)
        body = {name: value for name, value in line.body.items() if value is not None}
        settings = self._settings(line, body)
        try:
            SamplingParams(**settings)  # before the prompt: a wrong setting is found in no time, while a long text takes some to encode
            prompt = self._chat(body) if line.url == CHAT else self._prompt(body)
            room = max(1, self._pair.context - len(prompt))
            params = SamplingParams(**{"max_tokens": min(DEFAULT_MAX_TOKENS, room)} | settings)
        except ValueError as error:
            # The library's `method` is the body's `decoding`: a line has a `method` already, which is POST.
            raise ValueError(str(error).replace("method=", "decoding=")) from error
        return Request(str(line.number), prompt, params, body.get("cache_salt", ""))

    def seed_of(self, line: Line) -> int:
        """The seed of this line: its own, or else one that is the same whenever and wherever it is decoded."""
        own = line.body.get("seed")
        if own is not None:
            return own
        digest = hashlib.sha256(f"{self._seed}:{line.custom_id}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8]) >> 1

    def _settings(self, line: Line, body: dict[str, Any]) -> dict[str, Any]:
        """Settings of `SamplingParams`; those that are absent stay so."""
        prompt_field = "messages" if line.url == CHAT else "prompt"
        allowed = (prompt_field, *TRANSLATED, *AS_THEY_ARE)
        if unknown := [name for name in body if name not in allowed]:
            raise ValueError(f"{unknown[0]} is not a field of {line.url} here; allowed: {', '.join(sorted(allowed))}")
        for name, kind in KINDS.items():
            if name in body and not isinstance(body[name], kind):
                raise ValueError(f"{name}={body[name]!r}; allowed: {'a string' if kind is str else 'true, false'}")
        self._check_fixed(body)
        check_cache_salt(body.get("cache_salt", ""))
        settings = {name: body[name] for name in AS_THEY_ARE if name in body} | {"seed": self.seed_of(line)}
        if "decoding" in body:
            settings["method"] = body["decoding"]
        if "stop" in body:
            settings["stop"] = (body["stop"],) if isinstance(body["stop"], str) else body["stop"]
        if (logprobs := body.get("logprobs")) is not None:
            settings["logprobs"] = _logprobs(logprobs, line.url)
        limits = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
        if len(limits) == 2:
            raise ValueError("max_tokens and max_completion_tokens are both given; they mean the same, leave one of them out")
        if limits:
            settings["max_tokens"] = body[limits[0]]
        return settings

    def _check_fixed(self, body: dict[str, Any]) -> None:
        """Fields of which one value only is possible here."""
        for name, fixed, why in (
            ("model", self._pair.target.name, "the target that this run serves"),
            ("n", 1, "one answer a line"),
            ("stream", False, "an answer is one line"),
        ):
            value = body.get(name, fixed)
            if value != fixed or type(value) is not type(fixed):
                raise ValueError(f"{name}={value!r}; allowed: {fixed!r}, {why}; or leave it out")

    def _prompt(self, body: dict[str, Any]) -> tuple[int, ...]:
        prompt, size = body.get("prompt"), self._pair.tokenizer.size
        if isinstance(prompt, str):
            return tuple(self._pair.tokenizer.encode(prompt))
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            what = "is missing" if prompt is None else f"is a {type(prompt).__name__}" + (" of other things" if prompt else "")
            raise ValueError(f"prompt {what}; allowed: one string, or a list of token ids")
        if wrong := [token for token in prompt if not 0 <= token < size]:
            raise ValueError(f"prompt contains token id {wrong[0]}; allowed: 0..{size - 1}")
        return tuple(prompt)

    def _chat(self, body: dict[str, Any]) -> tuple[int, ...]:
        messages = body.get("messages")
        if not self._pair.tokenizer.has_chat_template:
            raise ValueError("messages is given, but the target model has no chat template; use /v1/completions with prompt")
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"messages={messages!r}; allowed: a list of at least one message")
        for index, message in enumerate(messages):
            _check_message(f"messages[{index}]", message)
        return tuple(self._pair.tokenizer.chat(messages))


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        given = ", ".join(message) if isinstance(message, dict) else type(message).__name__
        raise ValueError(f"{name} has {given or 'nothing'}; allowed: an object with role and content, and nothing else")
    if message["role"] not in ROLES:
        raise ValueError(f"{name}.role={message['role']!r}; allowed: {', '.join(ROLES)}")
    if not isinstance(message["content"], str):
        raise ValueError(f"{name}.content is a {type(message['content']).__name__}; allowed: a string")


def _logprobs(value: Any, url: str) -> bool:
    """A number asks for alternatives to each token. There are none, so only 0 of them can be asked for."""
    if isinstance(value, bool):
        return value
    if url != CHAT and value == 0 and isinstance(value, int):
        return True
    also = "" if url == CHAT else ", 0"
    raise ValueError(f"logprobs={value!r}; allowed: true, false{also} (of the answer's own tokens; alternatives are not reported)")
