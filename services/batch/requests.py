"""From a line to a request of the engine. Knows nothing about files or about who decodes."""

from __future__ import annotations

from services.backend import ServingPair
from services.batch.lines import CHAT, Line
from services.openai.errors import BadRequest
from services.openai.requests import Asked, derived_seed, understood
from smc.api.limits import DEFAULT_MAX_TOKENS
from smc.api.request import Request


class Requests:
    """Makes requests for one pair of models."""

    def __init__(self, pair: ServingPair, seed: int) -> None:
        """`seed`: see `BatchConfig.seed`."""
        self._pair, self._seed = pair, seed

    def build(self, line: Line) -> Request:
        """Raises ValueError naming the field, the value and what is allowed."""
        if line.mistake is not None:
            raise ValueError(line.mistake)
        asked = understood(line.body, line.url == CHAT, (self._pair.target.name,), self._pair.tokenizer.size)
        _check_is_for_a_file(asked)
        prompt = tuple(asked.prompts[0].encode(self._pair.tokenizer, self._pair.context - 1))
        negative = asked.negative_tokens(self._pair.tokenizer, self._pair.context - 1)
        longest = min(DEFAULT_MAX_TOKENS, max(1, self._pair.context - max(len(prompt), len(negative or ()))))
        params = asked.params(longest, self.seed_of(line))
        return Request(str(line.number), prompt, params, asked.cache_salt, negative_prompt=negative)

    def seed_of(self, line: Line) -> int:
        """The seed of this line: its own, or else one that is the same whenever and wherever it is decoded."""
        own = line.body.get("seed")
        return own if own is not None else derived_seed(f"{self._seed}:{line.custom_id}")


def _check_is_for_a_file(asked: Asked) -> None:
    """Of what a service has, one value only is possible here. Raises BadRequest."""
    for name, value, fixed, why in (
        ("n", asked.n * len(asked.prompts), 1, "one answer a line"),
        ("stream", asked.stream, False, "an answer is one line"),
        ("request_id", asked.request_id, None, "a line has a custom_id"),
        ("timeout", asked.timeout, None, "nobody waits for a line"),
    ):
        if value != fixed:
            raise BadRequest(f"{name}={value!r}; allowed: {fixed!r}, {why}; or leave it out", name)
