"""How many prompt tokens a step may schedule beside rounds. Knows nothing about requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from smc.api.engine_config import EngineConfig
from smc.executor.messages import Pending
from smc.scheduler.prefill_batches import Chunk
from smc.types import ModelRole

LEAST = 256
"""Minimum tokens of a chunk beside rounds, if the prompts have that many left: a pass of fewer takes hardly less time,
because it reads all weights."""
IN_FLIGHT = 2
"""Maximum number of chunks in flight at a model. More would delay the next round."""
LEFT_STEPS, LEFT_SECONDS = 16, 1.0
"""Steps and seconds after which the last chunks of a model are read that has got no other since; what its worker
reports with later results would be read with them. They have usually ended by then: reading waits for them."""
GROWTH = 2.0
"""Maximum factor by which one chunk raises its model's cost. One that was held up (by a compilation, say) would block
all prompts beside rounds otherwise, for 1 / `prefill_share` of its time; a lasting change is learnt in a few chunks."""
PATIENCE = 0.25
"""How much prompts may lose by waiting for each other, as a share of what a pass of their own costs. 1 makes most
tokens a second in all: a pass stops every running request for its time, and a prompt that waits stops one. Less favours
the first token."""
FREQUENT = 0.5
"""Prompts a step from which they wait for each other. If fewer come, one would mostly wait in vain."""
LATEST = 0.1
"""Weight of the latest step in the average number of prompts a step."""


class PrefillBudget:
    """Computes how many prompt tokens a step may schedule, from measured times of chunks and rounds.

    Prompts and rounds take turns on the models. Rounds accrue a time budget: `prefill_share` of their own time. A chunk
    is scheduled once its expected time has accrued. So the average round takes at most 1 + `prefill_share` times as
    long as without prompts, unless chunks of very different costs alternate (`GROWTH`). If `prefill_share` is None,
    every step may schedule `prefill_chunk` tokens.

    Where many come, short prompts wait for each other (`PATIENCE`): a pass over several takes hardly longer than one
    over one."""

    def __init__(self, config: EngineConfig) -> None:
        self._most, self._share = config.prefill_chunk, config.prefill_share
        # In look-ahead the models work at the same time, in lockstep one after the other.
        self._together = max if config.lookahead else sum
        self._in_flight: dict[ModelRole, deque[Chunk]] = {role: deque() for role in ModelRole}
        self._since = dict.fromkeys(ModelRole, 0)
        """Number of steps since each model last got a chunk."""
        self._last = dict.fromkeys(ModelRole, 0.0)
        """When each model last got a chunk, by the monotonic clock."""
        self._cost = dict.fromkeys(ModelRole, 0.0)
        """Seconds per token of each model's last finished chunk, which is taken to have at least `LEAST` tokens. At
        most `GROWTH` times that of the one before."""
        self._accrued = 0.0
        """Accrued time budget in seconds; negative if more was spent."""
        self._saw_rounds = False
        """Whether the last step has read rounds with measured times."""
        self._round = 0.0
        """Seconds of the rounds of the last step."""
        self._held, self._waited = 0, 0.0
        """Number of prompts that the last step kept waiting, and the seconds that they have waited, added up."""
        self._new = 0.0
        """Average number of prompts that come in a step."""

    def begin_step(self, new: int) -> None:
        """Note how many prompts have come since the last step. Reads chunks that have been left for `LEFT_STEPS`
        and `LEFT_SECONDS`."""
        self._new += LATEST * (new - self._new)
        for role in ModelRole:
            self._since[role] += 1
            if self._since[role] > LEFT_STEPS and time.monotonic() - self._last[role] > LEFT_SECONDS:
                self._settle(role)

    def most(self, running: int, prompts: int = 1, tokens: int = LEAST) -> int:
        """Return how many tokens may be scheduled at each model now. `running`: number of requests in rounds;
        `prompts`, `tokens`: number of prompts that could run now, and of their tokens. Waits while too many chunks are
        in flight."""
        self.settle(IN_FLIGHT - 1)
        allowed = self._allowed(running)
        if not allowed or (running and tokens < LEAST and self._wait_for_others(running, prompts)):
            self._held = prompts
            return 0
        self._held, self._waited = 0, 0.0
        return allowed

    def _wait_for_others(self, running: int, prompts: int) -> bool:
        """Whether prompts that fill no chunk had better run together with those of later steps."""
        lost = self._waited + prompts * self._round
        return self._saw_rounds and self._new >= FREQUENT and lost < PATIENCE * running * self._least_seconds

    @property
    def _least_seconds(self) -> float:
        """Seconds of a chunk of `LEAST` tokens or fewer; 0 if none has been timed."""
        return LEAST * self._together(self._cost.values())

    def _allowed(self, running: int) -> int:
        """Return how many tokens the share of prompts allows."""
        if self._share is None or not running:
            return self._most
        least = self._least_seconds
        if not least or not self._saw_rounds:
            return min(self._most, LEAST)
        return min(self._most, max(LEAST, int(LEAST * self._accrued / least))) if self._accrued >= least else 0

    def rest(self) -> None:
        """There are no prompts in this step. Waits until no chunk is in flight."""
        self._held, self._waited = 0, 0.0
        self.settle()

    def settle(self, left: int = 0) -> None:
        """Wait until at most `left` chunks of each model are in flight."""
        for role in ModelRole:
            self._settle(role, left)

    def _settle(self, role: ModelRole, left: int = 0) -> None:
        chunks = self._in_flight[role]
        while len(chunks) > left:
            self._learn(role, chunks.popleft())

    def forget(self, role: ModelRole) -> None:
        """Drop the model's chunks in flight, whose results will not arrive."""
        self._in_flight[role].clear()

    def spend(self, scheduled: Mapping[ModelRole, Sequence[Chunk]], beside: bool) -> None:
        """Charge the chunks that have been scheduled at each model."""
        for role, chunks in scheduled.items():
            if chunks:
                self._in_flight[role].extend(chunks)
                self._since[role], self._last[role] = 0, time.monotonic()
        if beside:
            took = self._together(
                sum(max(tokens, LEAST) for tokens, _ in scheduled[role]) * self._cost[role] for role in ModelRole
            )
            # Time spent beyond the budget is owed, but at most that of one chunk.
            self._accrued = max(-self._least_seconds, self._accrued - took)

    def accrue(self, rounds: Iterable[Pending]) -> None:
        """Accrue time for the rounds that a step has read. Without a `prefill_share` their times are not used."""
        if self._share is None:
            return
        spans = [outcome.spans() for outcome in rounds]
        took = [self._together(_length(of_round, role) for role in ModelRole) for of_round in spans]
        self._saw_rounds, self._round, accrued = bool(took), sum(took), self._share * sum(took)
        self._waited += self._held * self._round
        # At most the time of one chunk is carried over; otherwise the prompts of a busy moment would block all other
        # requests.
        self._accrued = min(self._accrued, self._least_seconds) + accrued

    def _learn(self, role: ModelRole, chunk: Chunk) -> None:
        tokens, pending = chunk
        pending.result()
        if self._share is not None:
            cost, before = _length(pending.spans(), "prompt") / max(tokens, LEAST), self._cost[role]
            self._cost[role] = min(cost, GROWTH * before) if before else cost


def _length(spans: Mapping[str, tuple[int, int]], name: str) -> float:
    """Duration of a span, which is in nanoseconds, in seconds; 0 if there is none."""
    begin, end = spans.get(name, (0, 0))
    return 1e-9 * (end - begin)
