"""Results of requests: the outputs that a caller gets while a request runs and when it ends. The answers in them are
made by `smc.scheduler.answers`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter

from smc.api.constraint import ConstraintFailed
from smc.api.request import Answer, FinishReason, Output
from smc.constraint_masks import check_end, check_particles
from smc.constraints import Compiler
from smc.executor.messages import Worker
from smc.scheduler.answers import cut_answer, draw_answer, make_answer, numerics_of
from smc.scheduler.capacity import PageForecast
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.sequence_group import RequestState, SequenceGroup
from smc.types import ModelRole

logger = logging.getLogger(__name__)


class ResultReporter:
    """Collects outputs until they are taken."""

    def __init__(
        self,
        registry: RequestRegistry,
        prefill: PrefillManager,
        forecast: PageForecast,
        clock: Callable[[], float],
        constraints: Compiler | None,
        workers: Mapping[ModelRole, Worker],
    ) -> None:
        """`constraints`: checks the ends of answers; None: they are checked later."""
        self._constraints = constraints
        self._registry, self._prefill, self._forecast, self._clock = registry, prefill, forecast, clock
        self._slots = prefill.slots
        self._workers = workers
        self._scores = "raw_logp_SL" if prefill.config.logprobs_mode == "raw" else "logp_SL"
        """The array of `Slots` with the log-probabilities that are reported."""
        self._ready: list[tuple[int, Output]] = []
        """Outputs with the numbers of their requests."""

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> list[Output]:
        """Return the outputs since the last call, in order of submission."""
        ready, self._ready = self._ready, []
        return [output for _, output in sorted(ready, key=itemgetter(0))]

    def report_all(self) -> None:
        """Stream new tokens of every admitted request, and finish requests that have ended. An error in one request
        ends only that request."""
        for group in list(self._registry.admitted):
            try:
                self._report(group)
            except Exception as error:
                if group.error or group.id not in self._registry.groups:
                    raise
                logger.exception("request %s failed", group.id)
                group.error = f"an error of the engine ({type(error).__name__}); its log has the details"
                self.finish(group, FinishReason.ERROR)
        for group, answer in self._prefill.finish_rescoring():
            if group.error:
                self.finish(group, FinishReason.ERROR)
            else:
                self._answer(group, answer)

    def report_ended(self) -> bool:
        """Finish requests that have already ended in this step, so that they are not preempted. Return whether there
        were any."""
        ended = [group for group in self._registry.admitted if group.error or self._registry.complete(group)]
        for group in ended:
            self._report(group)
        return bool(ended)

    def finish(self, group: SequenceGroup, reason: FinishReason | None) -> None:
        """Draw the answer, report the last Output and release everything that the request holds. `reason` None: the
        answer is complete. If `top_logprobs` or `prompt_logprobs` are requested, the request is rescored first."""
        if group.state is RequestState.RESCORING:
            assert reason is not None, "a drawn answer is complete already"
            if group.error:
                self._prefill.prefixes.forget_prompt(group)
            self._answer(group, cut_answer(self._prefill.answer_of(group), group, reason))
            return
        particle, tokens = draw_answer(group, self._slots, reason)
        if reason is None and self._ends_wrongly(group, tokens):
            self.finish(group, FinishReason.ERROR)
            return
        if reason is None:
            self._prefill.prefixes.remember_answer(group, particle, tokens)
            self._forecast.learn_answer(len(tokens) / group.params.max_tokens)
        elif group.error:
            self._prefill.prefixes.forget_prompt(group)
        numerics = numerics_of(group.rules.decoding, self._workers)
        answer = make_answer(group, self._slots, reason, particle, tokens, self._scores, numerics)
        if self._constraints is not None and group.params.constraint is not None:
            answer = check_particles(self._constraints, group.params.constraint, answer)
        if tokens and group.is_rescored and reason in (None, FinishReason.TIME_BUDGET):
            self._registry.rescore(group, answer)
        else:
            self._answer(group, answer)

    def _ends_wrongly(self, group: SequenceGroup, tokens: tuple[int, ...]) -> bool:
        """Fail a request whose answer ends where its constraint does not allow an end; return whether it does."""
        constraint = group.params.constraint
        if self._constraints is None or constraint is None:
            return False
        try:
            check_end(self._constraints, constraint, tokens, group.stop_rules.why(tokens)[0])
        except ConstraintFailed as error:
            group.fail_constraint(str(error))
        return group.error is not None

    def _report(self, group: SequenceGroup) -> None:
        if group.error:
            self.finish(group, FinishReason.ERROR)
        elif self._registry.complete(group):
            self.finish(group, None)
        elif group.is_running and group.committed > group.streamed and not group.awaits_potential:
            new = tuple(self._slots.tokens_SL[group.slots[0], group.streamed : group.committed].tolist())
            logp = self._committed_logprobs(group)
            group.streamed = group.committed
            group.logprobs += logp
            self._ready.append((group.number, Output(group.id, new, group.text.push(new), logprobs=logp)))

    def _committed_logprobs(self, group: SequenceGroup) -> tuple[float, ...]:
        """Log-probabilities of the tokens that are about to be streamed, if requested. Committed tokens have been
        scored."""
        if not group.params.logprobs:
            return ()
        # A row without a particle has no scores of its own.
        scored = next(iter(group.living(self._slots)), group.slots[0])
        return tuple(getattr(self._slots, self._scores)[scored, group.streamed : group.committed].tolist())

    def _answer(self, group: SequenceGroup, answer: Answer) -> None:
        now = self._clock()
        answer = replace(answer, seconds=now - group.submitted, times=group.times(now))
        new, logp = answer.tokens[group.streamed :], (answer.logprobs or ())[group.streamed :]
        self._ready.append((group.number, Output(group.id, new, group.text.finish(answer.text), answer, logp)))
        self._registry.release(group)
