"""Detokenizer: finds where the text of an answer ends, and how much of it can be streamed. Works on the bytes of
tokens; knows nothing about particles.

Stop strings are matched on bytes, so a match may begin and end inside tokens. It never includes parts of the prompt.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from smc.api.limits import MAX_STOP_BYTES
from smc.api.request import FinishReason
from smc.api.sampling_params import SamplingParams
from smc.model.tokenizer import Tokenizer
from smc.stops import DONE, START, StopMachine


class StopRules:
    """The conditions that end the answer of one request."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        """Raises ValueError for tokens outside of the vocabulary, and for `min_tokens` if every token ends the
        answer."""
        beyond = [t for t in params.stop_token_ids if t >= tokenizer.size]
        if beyond:
            raise ValueError(f"stop_token_ids contains {beyond[0]}; allowed: 0..{tokenizer.size - 1}")
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(() if params.ignore_eos else tokenizer.eos_ids)
        self.token_ids = frozenset(params.stop_token_ids)
        self.strings = [(text, text.encode()) for text in params.stop]
        self.min_tokens, self.max_tokens = params.min_tokens, params.max_tokens
        self._hidden = stop_ids = self.eos_ids | self.token_ids
        self.machine = StopMachine.of(
            stop_ids,
            [pattern for _, pattern in self.strings],
            params.logit_bias,
            params.constraint,
            [word.encode() for word in params.bad_words],
            () if params.constraint is None else self.eos_ids,
        )
        """Detects the end of a growing answer."""
        if beyond := [token for token, _ in params.logit_bias if token >= tokenizer.size]:
            raise ValueError(f"logit_bias contains token {beyond[0]}; allowed: 0..{tokenizer.size - 1}")
        if params.min_tokens and len(stop_ids) >= tokenizer.size:
            raise ValueError(f"min_tokens={params.min_tokens} where every token ends the answer; allowed: 0")

    def why(self, tokens: Sequence[int]) -> tuple[FinishReason, int | str | None]:
        """Return why an ended answer ended, and what matched. A stop at the last allowed token counts as the stop."""
        last = tokens[-1]
        if last in self.eos_ids:
            return FinishReason.EOS, last
        if last in self.token_ids:
            return FinishReason.STOP_TOKEN, last
        data, begin = b"".join(map(self.tokenizer.bytes_of, tokens)), self._begin(tokens)
        found = [(at, len(pattern), text) for text, pattern in self.strings if (at := data.find(pattern, begin)) >= 0]
        if found:
            return FinishReason.STOP_STRING, min(found)[2]
        assert len(tokens) >= self.max_tokens, "an answer ended for no reason"
        return FinishReason.LENGTH, None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the whole text: without terminal tokens, and up to the first stop string."""
        data = self.visible_bytes(tokens)
        return data[: self._first_stop(data, self._begin(tokens))].decode("utf-8", errors="replace")

    def visible_bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.tokenizer.bytes_of(token) for token in tokens if token not in self._hidden])

    def final_size(self, data: bytes) -> int:
        """Return how many leading bytes are final: they belong to no stop string, nor to one that may become
        complete."""
        if not self.strings:
            return len(data)
        end = self._first_stop(data)
        if end < len(data):
            return end
        sizes = (n for _, p in self.strings for n in range(min(len(p) - 1, len(data)), 0, -1) if data.endswith(p[:n]))
        return len(data) - max(sizes, default=0)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether an answer of these tokens, at least one, has ended with the last one."""
        stop_ids = self.machine.early_ids if len(tokens) <= self.min_tokens else self._hidden
        if len(tokens) >= self.max_tokens or tokens[-1] in stop_ids:
            return True
        data = self.visible_bytes(tokens)
        return self._first_stop(data, self._begin(tokens)) < len(data)

    def state(self, tokens: Sequence[int]) -> int:
        """Return the state of the stop machine after tokens that did not end the answer."""
        if self.machine.next_YP is None:
            return START
        data = b"".join(map(self.tokenizer.bytes_of, tokens))[self._begin(tokens) :]
        state = START
        # Bytes further back than the length of all strings together do not matter to an answer that continues.
        for byte in data[-MAX_STOP_BYTES:]:
            state = int(self.machine.next_YP[state, byte])
        return state

    def _begin(self, tokens: Sequence[int]) -> int:
        """Number of leading bytes in which no effective stop string begins. A string that is complete with a token that
        cannot end the answer has no effect; effective strings begin after that token."""
        early = tokens[: self.min_tokens] if self.strings else ()
        ends = list(accumulate(len(self.visible_bytes((token,))) for token in early))
        data, begin = self.visible_bytes(early), 0
        found = {pattern: data.find(pattern) for _, pattern in self.strings}
        while complete := [at + len(pattern) for pattern, at in found.items() if at >= 0]:
            begin = ends[bisect_left(ends, min(complete))]
            found = {pattern: data.find(pattern, begin) if 0 <= at < begin else at for pattern, at in found.items()}
        return begin

    def _first_stop(self, data: bytes, begin: int = 0) -> int:
        return min((at for _, pattern in self.strings if (at := data.find(pattern, begin)) >= 0), default=len(data))


class TextStream:
    """Text of a growing committed prefix. Streamed text is never taken back: bytes that may become a stop string are
    held back."""

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept = b""
        self._sent = 0
        self._left = rules.min_tokens if rules.strings else 0
        """Number of coming tokens that cannot end the answer."""
        self._state = START
        """State of the stop machine after the tokens that could not end the answer."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these further tokens make final. A character whose bytes are incomplete is held back,
        too."""
        begin = self._read_early(tokens[: self._left])
        self._kept += self._rules.visible_bytes(tokens[self._left :])
        self._left = max(self._left - len(tokens), 0)
        size = begin + self._rules.final_size(self._kept[begin:])
        text = self._utf8.decode(self._kept[:size])
        self._kept = self._kept[size:]
        self._sent += len(text)
        return text

    def _read_early(self, tokens: Sequence[int]) -> int:
        """Append the bytes of tokens that cannot end the answer. Return the number of held bytes after which effective
        stop strings may begin."""
        begin, next_YP = 0, self._rules.machine.next_YP
        for token in tokens:
            data = self._rules.visible_bytes((token,))
            self._kept += data
            for byte in data:
                assert next_YP is not None, "nothing is early where there is no string"
                self._state = int(next_YP[self._state, byte])
            if self._state == DONE:
                self._state, begin = START, len(self._kept)
        return begin

    def finish(self, text: str) -> str:
        """Return the part of the answer's whole text that has not been sent."""
        return text[self._sent :]
