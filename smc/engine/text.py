"""Where an answer's text ends, and which of it can be shown. Works on tokens' bytes; knows nothing about particles.

Stop strings are matched on bytes, so a match may begin and end anywhere inside tokens, and never in the prompt.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from smc.engine.request import FinishReason, SamplingParams
from smc.models.tokenizer import Tokenizer
from smc.stops import StopMachine


class StopRules:
    """What ends the answer of one request."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        """Raises ValueError for stops that cannot be."""
        beyond = [t for t in params.stop_token_ids if t >= tokenizer.size]
        if beyond:
            raise ValueError(f"stop_token_ids contains {beyond[0]}; allowed: 0..{tokenizer.size - 1}")
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(() if params.ignore_eos else tokenizer.eos_ids)
        self.token_ids = frozenset(params.stop_token_ids)
        self.strings = [(text, text.encode()) for text in params.stop]
        self.machine = StopMachine.of(self.eos_ids | self.token_ids, [pattern for _, pattern in self.strings])
        """Says as an answer grows whether that was its end."""

    def why(self, tokens: Sequence[int], cap: int) -> tuple[FinishReason, int | str | None]:
        """Why an ended answer ended, and what matched. A stop that falls on the last allowed token counts as the stop."""
        last = tokens[-1]
        if last in self.eos_ids:
            return FinishReason.EOS, last
        if last in self.token_ids:
            return FinishReason.STOP_TOKEN, last
        data = b"".join(map(self.tokenizer.bytes_of, tokens))
        found = [(data.find(pattern), len(pattern), text) for text, pattern in self.strings if pattern in data]
        if found:
            return FinishReason.STOP_STRING, min(found)[2]
        assert len(tokens) >= cap, "an answer ended for no reason"
        return FinishReason.LENGTH, None

    def text(self, tokens: Sequence[int]) -> str:
        """The whole text: without terminal tokens, and up to the first stop string."""
        data = self.visible_bytes(tokens)
        return data[: self._first_stop(data)].decode("utf-8", errors="replace")

    def visible_bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.tokenizer.bytes_of(t) for t in tokens if t not in self.eos_ids and t not in self.token_ids)

    def final_size(self, data: bytes) -> int:
        """How many leading bytes are neither in a stop string nor possibly in one that is not complete yet."""
        end = self._first_stop(data)
        if end < len(data):
            return end
        sizes = (n for _, p in self.strings for n in range(min(len(p) - 1, len(data)), 0, -1) if data.endswith(p[:n]))
        return len(data) - max(sizes, default=0)

    def _first_stop(self, data: bytes) -> int:
        return min((data.find(pattern) for _, pattern in self.strings if pattern in data), default=len(data))


class TextStream:
    """Text of a growing committed prefix, never taken back: what could still turn out to be a stop string is kept."""

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept = b""
        self._sent = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these further tokens make final; a character whose bytes are incomplete is kept too."""
        self._kept += self._rules.visible_bytes(tokens)
        size = self._rules.final_size(self._kept)
        text = self._utf8.decode(self._kept[:size])
        self._kept = self._kept[size:]
        self._sent += len(text)
        return text

    def finish(self, text: str) -> str:
        """What is left to send of the answer's whole text."""
        return text[self._sent :]
