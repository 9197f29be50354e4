"""Potentials of running requests (`smc.potentials`): after each round of a request its potential is asked about all of
its particles in one call, in a thread of its own, and their weights change by what it says. Rounds of other requests go
on meanwhile; the request itself waits, as its next round depends on the weights.

An error of a potential, or one that takes too long, ends its request alone. A thread cannot be stopped: one that takes
too long runs on, and once there are many, requests with that potential fail at once.

Axes: N slots of a request."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import numpy as np

from smc.model.tokenizer import Tokenizer
from smc.potentials import Potential, Prefixes, log_values
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots

GRACE = 0.001
"""Seconds that a step waits for potentials that it has just asked: most are that fast, and then no request waits for
one step more."""
IDLE = 0.01
"""Seconds that a step waits where nothing else runs."""
MOST_ABANDONED = 16
"""Calls of one potential that took too long and still run."""


@dataclass(eq=False)
class PotentialCall:
    """A question that a potential has been asked."""

    name: str
    group: SequenceGroup
    generation: int
    slots_N: np.ndarray
    text_N: list[int]
    """Which of the texts each slot holds."""
    began: float
    values: Future[list[float]] = field(default_factory=Future)


class PotentialCalls:
    """Asks the potentials of an engine's requests."""

    def __init__(self, potentials: Mapping[str, Potential], limit: float, slots: Slots, tokenizer: Tokenizer) -> None:
        """`limit`: seconds that a call may take."""
        self._potentials, self._limit, self._slots, self._tokenizer = potentials, limit, slots, tokenizer
        self._calls: list[PotentialCall] = []
        self._abandoned: Counter[str] = Counter()
        self._guard = threading.Lock()
        self._collapses = 0

    def check(self, name: str) -> None:
        """Raises ValueError for a potential that there is not."""
        if name not in self._potentials:
            allowed = ", ".join(sorted(self._potentials)) or "none, as the configuration names no potentials"
            raise ValueError(f"potential={name!r}; allowed: {allowed}")

    def take_collapses(self) -> int:
        """Questions since the last call after which no particle of a request would have had weight."""
        count, self._collapses = self._collapses, 0
        return count

    def follow(self, admitted: Iterable[SequenceGroup]) -> None:
        """Once a step: ask about requests whose particles have changed, and weigh those about which there is an answer.
        Waits where no request could go on otherwise."""
        groups = list(admitted)
        for group in groups:
            if group.awaits_potential and not any(self._is_current(call, group) for call in self._calls):
                self._ask(group)
        if not self._calls:
            return
        waiting, values = [call.group for call in self._calls], [call.values for call in self._calls]
        answered, _ = wait(values, GRACE, ALL_COMPLETED)
        if not answered and all(group in waiting for group in groups):
            wait(values, IDLE, FIRST_COMPLETED)
        for call in list(self._calls):
            self._finish(call)

    def _is_current(self, call: PotentialCall, group: SequenceGroup) -> bool:
        return call.group is group and call.generation == group.generation

    def _ask(self, group: SequenceGroup) -> None:
        name, slots = group.params.potential, self._slots
        assert name is not None, "of requests with a potential"
        if self._abandoned[name] >= MOST_ABANDONED:
            group.error = f"potential {name!r} does not answer: {MOST_ABANDONED} calls of it have not ended"
            return
        slots_N = group.slots[slots.logw_S[group.slots] > -np.inf]
        if not len(slots_N):
            group.end_potential()
            return
        held = [(tuple(slots.tokens_SL[s, : slots.length_S[s]].tolist()), bool(slots.ended_S[s])) for s in slots_N]
        different = list(dict.fromkeys(held))
        texts = tuple(group.rules.text(tokens) for tokens, _ in different)
        prompt = b"".join(map(self._tokenizer.bytes_of, group.request.prompt)).decode("utf-8", errors="replace")
        prefixes = Prefixes(prompt, texts, tuple(t for t, _ in different), tuple(ended for _, ended in different))
        index = {one: i for i, one in enumerate(different)}
        call = PotentialCall(name, group, group.generation, slots_N, [index[one] for one in held], time.monotonic())
        self._calls.append(call)
        threading.Thread(target=self._call, args=(call, prefixes), name=f"potential {name}", daemon=True).start()

    def _call(self, call: PotentialCall, prefixes: Prefixes) -> None:
        """In a thread of its own."""
        try:
            found = self._potentials[call.name](prefixes)
            values = log_values(call.name, found, len(prefixes.texts))
        except ValueError as error:
            outcome: list[float] | Exception = error
        except BaseException as error:  # its own, whatever it is
            outcome = RuntimeError(f"potential {call.name!r} failed ({type(error).__name__}: {error})")
        else:
            outcome = values
        with self._guard:
            if call.values.cancelled():
                self._abandoned[call.name] -= 1
            elif isinstance(outcome, Exception):
                call.values.set_exception(outcome)
            else:
                call.values.set_result(outcome)

    def _finish(self, call: PotentialCall) -> None:
        group, took = call.group, time.monotonic() - call.began
        is_over = not group.is_running or call.generation != group.generation
        with self._guard:
            if not call.values.done() and (is_over or took > self._limit):
                call.values.cancel()
                self._abandoned[call.name] += 1
        if not call.values.done():
            return
        self._calls.remove(call)
        if is_over:
            return
        if call.values.cancelled():
            group.error = f"potential {call.name!r} took more than {self._limit:g} s, which is all that it has"
        elif error := call.values.exception():
            group.error = str(error)
        else:
            self._weigh(call, np.array(call.values.result())[call.text_N])

    def _weigh(self, call: PotentialCall, logphi_N: np.ndarray) -> None:
        """Weights change by the factor phi(new) / phi(old). Where all would be zero they stay as they are, and Z-hat
        is 0."""
        group, slots, at = call.group, self._slots, call.slots_N
        logw_N = slots.logw_S[at] + logphi_N - slots.logphi_S[at]
        group.end_potential()
        if (logw_N == -np.inf).all():
            group.log_z = -np.inf
            group.counters.collapses += 1
            self._collapses += 1
            return
        slots.logw_S[at], slots.logphi_S[at] = logw_N, logphi_N
        slots.vacate(at[~group.decoding.alive(logw_N)])
