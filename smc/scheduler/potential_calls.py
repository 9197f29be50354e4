"""Potentials of running requests (`smc.potentials`): after each round of a request its potential is asked about all of
its particles in one call, in a thread of its own, and their weights change by what it says. Rounds of other requests go
on meanwhile; the request itself waits, as its next round depends on the weights.

An error of a potential, or one that takes too long, ends its request alone. A thread cannot be stopped: one that takes
too long runs on, and once there are many, requests with that potential fail at once. What depends on the size of a
prompt or of answers is done in the thread of the call.

Axes: N slots of a request, L answer positions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import numpy as np

from smc.potentials import Potential, Prefixes, log_values
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.scheduler.stats import MOST_SAMPLES, PotentialStats

GRACE = 0.001
"""Seconds that a step waits for the calls that it has made itself. Most calls end within this time, and their requests
take part in the next round."""
IDLE = 0.01
"""Seconds that a step waits where nothing else runs."""
MOST_REDRAWS = 8
"""Times in a row that tokens are drawn again of which a potential leaves no particle with weight."""
MOST_OVERDUE = 16
"""Calls of one potential that took too long and still run."""


@dataclass(eq=False)
class PotentialCall:
    """A question that a potential has been asked."""

    name: str
    group: SequenceGroup
    generation: int
    slots_N: np.ndarray
    tokens_NL: np.ndarray
    length_N: np.ndarray
    ended_N: np.ndarray
    began: float
    ended: float = 0.0
    """Of the monotonic clock, once there is a result."""
    logphi_N: Future[np.ndarray] = field(default_factory=Future)

    @property
    def is_current(self) -> bool:
        """Its request still waits for it."""
        return self.group.awaits_potential and self.generation == self.group.generation

    def run(self, potential: Potential) -> None:
        """Ask the potential, in a thread of the call's own."""
        try:
            logphi_N = self._ask(potential)
        except BaseException as error:  # its own, whatever it is
            self.ended = time.monotonic()
            failed = RuntimeError(f"potential {self.name!r} failed ({type(error).__name__}: {error})")
            self.logphi_N.set_exception(error if isinstance(error, ValueError) else failed)
        else:
            self.ended = time.monotonic()
            self.logphi_N.set_result(logphi_N)

    def _ask(self, potential: Potential) -> np.ndarray:
        """log phi of each slot. Raises ValueError for what is no log phi, and whatever the potential raises."""
        rows = zip(self.tokens_NL.tolist(), self.length_N.tolist(), self.ended_N.tolist())
        held = [(tuple(tokens[:length]), ended) for tokens, length, ended in rows]
        index = {one: i for i, one in enumerate(dict.fromkeys(held))}
        tokens, ended = zip(*index)
        texts = tuple(map(self.group.rules.text, tokens))
        found = potential(Prefixes(self.group.prompt_text, texts, tokens, ended))
        return np.array(log_values(self.name, found, len(texts)))[[index[one] for one in held]]


class PotentialCalls:
    """Asks the potentials of an engine's requests."""

    def __init__(self, potentials: Mapping[str, Potential], limit: float, slots: Slots) -> None:
        """`limit`: seconds that a call may take."""
        self._potentials, self._limit, self._slots = potentials, limit, slots
        self._calls: list[PotentialCall] = []
        """All that have not ended, those of requests that no longer wait for them included."""
        self._stats = PotentialStats()

    def check(self, name: str) -> None:
        """Raises ValueError for a potential that there is not."""
        if name not in self._potentials:
            allowed = ", ".join(sorted(self._potentials)) or "none, as the configuration names no potentials"
            raise ValueError(f"potential={name!r}; allowed: {allowed}")

    def take_stats(self) -> PotentialStats:
        """What has been counted since the last call."""
        stats, self._stats = self._stats, PotentialStats()
        del stats.seconds[:-MOST_SAMPLES]
        return stats

    def follow(self, admitted: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """Once a step: ask about requests whose particles have changed, and weigh those about which there is an answer.
        Waits where no request could go on otherwise. Returns requests whose last round is to be drawn again, as it has
        left no particle with weight."""
        if not self._potentials:
            return []
        groups = list(admitted)
        waiting = {call.group: call.logphi_N for call in self._calls if call.is_current}
        unasked = [group for group in groups if group.awaits_potential and group not in waiting]
        new = {call.group: call.logphi_N for group in unasked if (call := self._ask(group)) is not None}
        wait(new.values(), GRACE, ALL_COMPLETED)
        waiting |= new
        if waiting and all(group in waiting for group in groups):
            wait(waiting.values(), IDLE, FIRST_COMPLETED)
        return [call.group for call in list(self._calls) if self._finish(call)]

    def _ask(self, group: SequenceGroup) -> PotentialCall | None:
        """The call that was made, if one is needed and allowed."""
        name, slots = group.params.potential, self._slots
        assert name is not None, "of requests with a potential"
        if self._num_overdue(name) >= MOST_OVERDUE:
            group.error = f"potential {name!r} does not answer: {MOST_OVERDUE} calls of it have not ended"
            self._stats.timeouts += 1
            return None
        slots_N = group.slots[slots.logw_S[group.slots] > -np.inf]
        if not len(slots_N):
            group.end_potential()
            return None
        length_N = slots.length_S[slots_N]
        tokens_NL, ended_N = slots.tokens_SL[slots_N, : length_N.max()], slots.ended_S[slots_N]
        call = PotentialCall(
            name, group, group.generation, slots_N, tokens_NL, length_N, ended_N, began=time.monotonic()
        )
        self._calls.append(call)
        threading.Thread(target=call.run, args=(self._potentials[name],), name=f"potential {name}", daemon=True).start()
        return call

    def _num_overdue(self, name: str) -> int:
        """Calls of a potential that have not ended in the time that they had."""
        return sum(call.name == name and not call.logphi_N.done() and self._is_late(call) for call in self._calls)

    def _is_late(self, call: PotentialCall) -> bool:
        return time.monotonic() - call.began > self._limit

    def _finish(self, call: PotentialCall) -> bool:
        """Weigh what an ended call was asked about; end the request of a call that takes too long. Whether the
        request's last round is to be drawn again."""
        group, is_current = call.group, call.is_current
        if not call.logphi_N.done():
            if is_current and self._is_late(call):
                group.error = f"potential {call.name!r} took more than {self._limit:g} s, which is all that it has"
                self._stats.timeouts += 1
            return False
        self._calls.remove(call)
        self._stats.seconds.append(call.ended - call.began)
        if not is_current:
            return False
        if error := call.logphi_N.exception():
            group.error = str(error)
            self._stats.errors += 1
            return False
        return self._weigh(call, call.logphi_N.result())

    def _weigh(self, call: PotentialCall, logphi_N: np.ndarray) -> bool:
        """Weights change by the factor phi(new) / phi(old). Where all would be zero, Z-hat is 0, and the round is to be
        drawn again: returns True. Where that has been done often enough, weights stay as they are."""
        group, slots, at = call.group, self._slots, call.slots_N
        logw_N = slots.logw_S[at] + logphi_N - slots.logphi_S[at]
        if (logw_N == -np.inf).all():
            group.log_z = -np.inf
            group.counters.collapses += 1
            self._stats.collapses += 1
            if group.redraws < MOST_REDRAWS:
                return True
            slots.weighed_S[at] = call.length_N
            group.end_potential()
            return False
        slots.weighed_S[at] = call.length_N
        slots.logw_S[at], slots.logphi_S[at] = logw_N, logphi_N
        slots.vacate(at[~group.decoding.alive(logw_N)])
        group.end_potential(slots)
        return False
