"""Waits for the compilation of constraints. A worker that compiled a constraint when its first mask is needed would
hold the prompts or rounds of all other requests meanwhile. So workers compile beside their other work, and the request
is held back in the queue until they are ready. One that returns to a draft goes on without it until then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from smc.executor.messages import Worker
from smc.scheduler.methods import DecodingRules
from smc.scheduler.queue import RequestQueue
from smc.scheduler.sequence_group import SequenceGroup
from smc.types import ModelRole

POLL_SECONDS = 0.005
"""Time between two looks at workers that have nothing else to do."""


class Preparation:
    """Lets the workers of a request compile its constraint."""

    def __init__(self, workers: Mapping[ModelRole, Worker]) -> None:
        self._workers = workers
        self._asked: WeakKeyDictionary[SequenceGroup, dict[ModelRole, tuple[Worker, int]]] = WeakKeyDictionary()
        """The workers that were asked, and the number that each has given the constraint."""

    def is_ready(self, group: SequenceGroup, rules: DecodingRules | None = None) -> bool:
        """Whether the workers of a request have compiled its constraint. Asks those that have not been asked, such as
        one that replaces a lost one. `rules`: of the decoding that they are to take part in, if not the present one."""
        return not self._awaited(group, rules or group.rules)

    def poll(self, group: SequenceGroup, rules: DecodingRules | None = None) -> bool:
        """As `is_ready`; lets idle workers report. Raises RuntimeError if one is lost."""
        awaited = self._awaited(group, rules or group.rules)
        for worker in awaited:
            worker.keep_alive(POLL_SECONDS)
        return not awaited

    def is_kept(self, group: SequenceGroup) -> bool:
        """Whether the workers of a request that is about to be admitted keep its constraint. Asks them again: while it
        waited, so many others may have been compiled that it is forgotten."""
        constraint = group.params.constraint
        if constraint is None:
            return True
        self._asked[group] = {
            role: (self._workers[role], self._workers[role].compile(constraint)) for role in group.rules.roles
        }
        return self.is_ready(group)

    def follow(self, queue: RequestQueue, *, beside: bool) -> None:
        """Release the held requests that are ready. `beside`: there are requests to go on with; otherwise waits a
        moment if none is ready."""
        for group in list(queue.held):
            if self.poll(group):
                queue.release(group)
        if queue.held and not queue.groups and not beside:
            time.sleep(POLL_SECONDS)

    def _awaited(self, group: SequenceGroup, rules: DecodingRules) -> list[Worker]:
        """Return the workers of a decoding that have not compiled the request's constraint."""
        constraint = group.params.constraint
        if constraint is None:
            return []
        asked = self._asked.setdefault(group, {})
        for role in rules.roles:
            worker = self._workers[role]
            if role not in asked or asked[role][0] is not worker:
                asked[role] = worker, worker.compile(constraint)
        return [worker for worker, number in (asked[role] for role in rules.roles) if not worker.has_compiled(number)]
