"""Potentials of running requests (`smc.potentials`). After each round of a request, its potential is asked about all of
its particles in one call, in a separate thread, and the particles' weights change accordingly. Meanwhile rounds of
other requests continue; the request itself waits, because its next round depends on the weights.

If a potential fails or takes too long, only its request ends. A thread cannot be stopped: a call that takes too long
continues, and if there are many of them, requests with that potential fail at once. So does a call whose request has
ended meanwhile; if there are many of those, requests wait until one ends. Work that grows with the size of a prompt or
of answers is done in the thread of the call."""

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
from smc.scheduler.stats import PotentialStats

GRACE = 0.001
"""Seconds that a step waits for the calls that it has started. Most calls end within this time, so that their requests
take part in the next round."""
IDLE = 0.01
"""Seconds that a step waits if all requests wait for their potentials."""
MOST_REDRAWS = 8
"""Maximum number of times in a row that tokens are drawn again because a potential left no particle with weight."""
MOST_OVERDUE = 16
"""Number of overdue calls of one potential from which further requests with it fail."""
MOST_LEFT = 64
"""Number of calls of one potential that no request waits for any more, from which it is not asked again until one of
these ends: each keeps its thread until then."""


@dataclass(eq=False)
class PotentialCall:
    """One call of a potential about the particles of one request."""

    name: str
    group: SequenceGroup
    generation: int
    slots_N: np.ndarray
    tokens_NL: np.ndarray
    length_N: np.ndarray
    ended_N: np.ndarray
    began: float
    ended: float = 0.0
    """Time at which the result arrived, on the monotonic clock."""
    logphi_N: Future[np.ndarray] = field(default_factory=Future)

    @property
    def is_current(self) -> bool:
        """Whether the request still waits for this call."""
        return self.group.awaits_potential and self.generation == self.group.generation

    def run(self, potential: Potential) -> None:
        """Ask the potential, in the thread of the call."""
        try:
            logphi_N = self._ask(potential)
        except BaseException as error:  # of any type: a potential is foreign code
            self.ended = time.monotonic()
            failed = RuntimeError(f"potential {self.name!r} failed ({type(error).__name__}: {error})")
            self.logphi_N.set_exception(error if isinstance(error, ValueError) else failed)
        else:
            self.ended = time.monotonic()
            self.logphi_N.set_result(logphi_N)

    def _ask(self, potential: Potential) -> np.ndarray:
        """Return log phi of each slot. Raises ValueError for values that are no log phi, and any exception of the
        potential."""
        rows = zip(self.tokens_NL.tolist(), self.length_N.tolist(), self.ended_N.tolist())
        held = [(tuple(tokens[:length]), ended) for tokens, length, ended in rows]
        index = {one: i for i, one in enumerate(dict.fromkeys(held))}
        tokens, ended = zip(*index)
        texts = tuple(map(self.group.stop_rules.text, tokens))
        found = potential(Prefixes(self.group.prompt_text, texts, tokens, ended))
        return np.array(log_values(self.name, found, len(texts)))[[index[one] for one in held]]


class PotentialCalls:
    """Asks the potentials of an engine's requests."""

    def __init__(self, potentials: Mapping[str, Potential], limit: float, slots: Slots) -> None:
        """`limit`: maximum seconds of a call."""
        self._potentials, self._limit, self._slots = potentials, limit, slots
        self._calls: list[PotentialCall] = []
        """All calls that have not ended, including those whose requests no longer wait for them."""
        self._stats = PotentialStats()

    def check(self, name: str) -> None:
        """Raise ValueError if there is no potential of this name."""
        if name not in self._potentials:
            allowed = ", ".join(sorted(self._potentials)) or "none, as the configuration names no potentials"
            raise ValueError(f"potential={name!r}; allowed: {allowed}")

    def take_stats(self) -> PotentialStats:
        """Return the statistics since the last call."""
        stats, self._stats = self._stats, PotentialStats()
        return stats

    def follow(self, admitted: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """Once a step, start calls for requests whose particles have changed, and apply the results of calls that have
        ended. Waits if no request could continue otherwise. Returns the requests whose last round must be drawn again,
        because it left no particle with weight."""
        if not self._potentials:
            return []
        groups = list(admitted)
        waiting = {call.group: call.logphi_N for call in self._calls if call.is_current}
        unasked = [group for group in groups if group.awaits_potential and group not in waiting]
        new = {call.group: call.logphi_N for group in unasked if (call := self._ask(group)) is not None}
        wait(new.values(), GRACE, ALL_COMPLETED)
        waiting |= new
        # Those that are not asked yet wait for calls of others.
        held = {group for group in unasked if group not in new and group.awaits_potential and not group.error}
        if groups and all(group in waiting or group in held for group in groups):
            wait([call.logphi_N for call in self._calls], IDLE, FIRST_COMPLETED)
        return [call.group for call in list(self._calls) if self._finish(call)]

    def _ask(self, group: SequenceGroup) -> PotentialCall | None:
        """Start a call for a request and return it; None if it is not needed or not allowed now."""
        name, slots = group.params.potential, self._slots
        assert name is not None, "of requests with a potential"
        unfinished = [call for call in self._calls if call.name == name and not call.logphi_N.done()]
        if sum(map(self._is_late, unfinished)) >= MOST_OVERDUE:
            group.error = f"potential {name!r} does not answer: {MOST_OVERDUE} calls of it have not ended"
            self._stats.timeouts += 1
            return None
        if sum(not call.is_current for call in unfinished) >= MOST_LEFT:
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
        asks = threading.Thread(target=call.run, args=(self._potentials[name],), name=f"potential {name}", daemon=True)
        try:
            asks.start()
        except RuntimeError as error:  # the process may have no more threads
            group.error = f"potential {name!r} could not be asked: {error}"
            self._stats.errors += 1
            return None
        self._calls.append(call)
        return call

    def _is_late(self, call: PotentialCall) -> bool:
        return time.monotonic() - call.began > self._limit

    def _finish(self, call: PotentialCall) -> bool:
        """Apply the result of an ended call to the weights; fail the request of a call that takes too long. Return
        whether the request's last round must be drawn again."""
        group, is_current = call.group, call.is_current
        if not call.logphi_N.done():
            if is_current and self._is_late(call):
                group.error = f"potential {call.name!r} took more than {self._limit:g} s, its time limit"
                self._stats.timeouts += 1
            return False
        self._calls.remove(call)
        self._stats.count_call(call.ended - call.began)
        if not is_current:
            return False
        if error := call.logphi_N.exception():
            group.error = str(error)
            self._stats.errors += 1
            return False
        return self._weigh(call, call.logphi_N.result())

    def _weigh(self, call: PotentialCall, logphi_N: np.ndarray) -> bool:
        """Multiply weights by phi(new) / phi(old). If all would become zero, Z-hat is 0 and the round must be drawn
        again: return True. After `MOST_REDRAWS` such attempts the weights stay as they are."""
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
        slots.vacate(at[~group.rules.alive(logw_N)])
        group.end_potential(slots)
        return False
