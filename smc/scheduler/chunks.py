"""How many tokens of prompts a step may ask for: by what chunks and rounds have been seen to take. Knows nothing about requests.

Prompts beside rounds take turns with them on the models. Rounds earn them time, `prefill_share` of what the rounds take themselves; a
chunk is asked for when what it is going to take has been earned. So a round is, in the mean, at most 1 + `prefill_share` times as long
as it would be alone, whatever chunks cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.messages import SIDES, Pending, PromptResult

LEAST = 256
"""Tokens of a chunk beside rounds, where prompts have as many left: a pass of fewer takes hardly less time, for it reads all weights."""
IN_FLIGHT = 2
"""Chunks of a model that are asked for before the one before them has been run. More would be in the way of whoever comes next."""

Spans = Mapping[str, tuple[int, int]]
"""What was done, and when it began and ended, nanoseconds; the passes of models have the names of their sides."""


class Chunks:
    """Of both models. With `prefill_share` None a step may ask for `prefill_chunk` tokens whatever runs beside them."""

    def __init__(self, config: EngineConfig) -> None:
        self._most, self._share = config.prefill_chunk, config.prefill_share
        # In look-ahead models work side by side, in lockstep one after the other.
        self._together = max if config.lookahead else sum
        self._flights: dict[str, deque[tuple[int, Pending[PromptResult[np.ndarray]]]]] = {side: deque() for side in SIDES}
        self._cost = dict.fromkeys(SIDES, 0.0)
        """Seconds of a token in the chunk that was run last, of at least `LEAST` tokens."""
        self._earned = 0.0
        """Seconds."""
        self._seen = False
        """The last step has read rounds."""

    @property
    def measures(self) -> bool:
        """What rounds take is of interest."""
        return self._share is not None

    def most(self, beside: bool) -> int:
        """Tokens of each model that may be asked for now; `beside`: groups are in rounds. Waits while too many chunks are on their way."""
        self.settle(IN_FLIGHT - 1)
        if self._share is None or not beside:
            return self._most
        cost = self._together(self._cost.values())
        if not cost or not self._seen:
            return min(self._most, LEAST)
        return min(self._most, max(LEAST, int(self._earned / cost))) if self._earned >= LEAST * cost else 0

    def settle(self, left: int = 0) -> None:
        """Wait until that many chunks of a model are on their way at most."""
        for side, flights in self._flights.items():
            while len(flights) > left:
                self._learn(side, *flights.popleft())

    def forget(self, side: str) -> None:
        """Chunks of this model that are on their way will not come."""
        self._flights[side].clear()

    def ask(self, asked: Mapping[str, Sequence[tuple[int, Pending[PromptResult[np.ndarray]]]]], beside: bool) -> None:
        """Chunks of either model that have been asked for: tokens, and what comes of them."""
        for side, chunks in asked.items():
            self._flights[side].extend(chunks)
        if beside:
            took = self._together(sum(max(tokens, LEAST) for tokens, _ in asked[side]) * self._cost[side] for side in SIDES)
            # What was asked for beyond what had been earned is owed, but for more than a chunk.
            self._earned = max(-LEAST * self._together(self._cost.values()), self._earned - took)

    def earn(self, rounds: Iterable[Spans]) -> None:
        """Rounds that a step has read; only where it is of interest what they take."""
        assert self._share is not None
        took = [self._together(_length(spans, side) for side in SIDES) for spans in rounds]
        self._seen, earned = bool(took), self._share * sum(took)
        # What is not spent pays for one chunk, or the prompts of a busy moment would stop everybody else.
        self._earned = min(self._earned, LEAST * self._together(self._cost.values())) + earned

    def _learn(self, side: str, tokens: int, pending: Pending[PromptResult[np.ndarray]]) -> None:
        pending.result()
        if self._share is not None:
            self._cost[side] = _length(pending.spans(), "prompt") / max(tokens, LEAST)


def _length(spans: Spans, name: str) -> float:
    """Seconds."""
    begin, end = spans.get(name, (0, 0))
    return 1e-9 * (end - begin)
