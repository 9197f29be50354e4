"""What requests are told: news while they run, and how they end. Knows nothing about when that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter

from smc.api.outputs import Answer, FinishReason, Output
from smc.scheduler.answers import draw_answer, make_answer
from smc.scheduler.checkpoint import particle_of
from smc.scheduler.page_forecast import Expectation
from smc.scheduler.prefix_reuse import Prefixes
from smc.scheduler.registry import Registry
from smc.scheduler.sequence_group import Group, Phase

logger = logging.getLogger(__name__)


class Reports:
    """Outputs, until they are taken."""

    def __init__(self, registry: Registry, expectation: Expectation, prefixes: Prefixes, clock: Callable[[], float]) -> None:
        self._registry, self._expectation, self._prefixes, self._clock = registry, expectation, prefixes, clock
        self._slots = expectation.slots
        self._ready: list[tuple[int, Output]] = []
        """With the numbers of their groups."""

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> list[Output]:
        """Those since the last call, in order of submission."""
        ready, self._ready = self._ready, []
        return [output for _, output in sorted(ready, key=itemgetter(0))]

    def report_all(self) -> None:
        """Of every group that holds slots. An error in what is one request's alone ends this request alone."""
        for group in list(self._registry.admitted):
            try:
                self._report(group)
            except Exception as error:
                if group.error or group.id not in self._registry.groups:
                    raise
                logger.exception("request %s failed", group.id)
                group.error = f"an error of the engine ({type(error).__name__}); its log has the details"
                self.finish(group, FinishReason.ERROR)

    def report_ended(self) -> bool:
        """Finish what has ended in this step already, lest it is made to give way. True if anything has."""
        admitted, complete = self._registry.admitted, self._registry.complete
        ended = [group for group in admitted if group.error or (group.phase is Phase.RUNNING and complete(group))]
        for group in ended:
            self._report(group)
        return bool(ended)

    def finish(self, group: Group, reason: FinishReason | None) -> None:
        """The final draw, the last Output, and everything the group held given back. `reason` None: it is complete. An answer that is asked
        for with what else could have stood there is rescored first."""
        particle, tokens = draw_answer(group, self._slots, reason)
        if reason is None:
            self._prefixes.remember_answer(group, particle, tokens)
            self._expectation.learn_answer(len(tokens) / group.params.max_tokens)
        elif group.error:
            self._prefixes.forget_prompt(group)
        answer = make_answer(group, self._slots, reason, particle, tokens)
        if tokens and group.params.top_logprobs and reason in (None, FinishReason.TIME_BUDGET):
            record = particle_of(group, self._slots, particle, len(tokens))
            self._registry.withdraw(group)
            group.rescore(answer, record)
            self._registry.queue.push(group)
        else:
            self._answer(group, answer)

    def _report(self, group: Group) -> None:
        """Stream what became common to all particles; finish what is complete or failed."""
        if group.error:
            self.finish(group, FinishReason.ERROR)
        elif group.answer is not None and group.top_logprobs is not None:
            self._answer(group, replace(group.answer, top_logprobs=group.top_logprobs))
        elif group.phase is Phase.RUNNING and self._registry.complete(group):
            self.finish(group, None)
        elif group.phase is Phase.RUNNING and group.committed > group.streamed:
            new = tuple(self._slots.tokens_SL[group.slots[0], group.streamed : group.committed].tolist())
            group.streamed = group.committed
            self._ready.append((group.number, Output(group.id, new, group.stream.push(new))))

    def _answer(self, group: Group, answer: Answer) -> None:
        now = self._clock()
        answer = replace(answer, seconds=now - group.submitted, times=group.times(now))
        self._ready.append((group.number, Output(group.id, answer.tokens[group.streamed :], group.stream.finish(answer.text), answer)))
        self._registry.release(group)
