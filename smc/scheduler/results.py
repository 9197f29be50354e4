"""Results of requests: the outputs that a caller gets while a request runs and when it ends. `ResultReporter` says
when; the functions below it make the answer: they draw among the request's particles, and say what is reported."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch

from smc.algorithm.selection import final_draw
from smc.api.constraint import ConstraintFailed
from smc.api.request import Answer, FinishReason, Output, Particle
from smc.constraint_masks import check_end, check_particles
from smc.constraints import Compiler
from smc.executor.messages import Worker
from smc.philox import Purpose, uniforms
from smc.scheduler.capacity import PageForecast
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.sequence_group import RequestState, SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import Decoding, ModelRole, Numerics

logger = logging.getLogger(__name__)

UNDRAWN = (FinishReason.ERROR, FinishReason.CANCELLED)
"""Reasons for which no answer is drawn: the answer is then the part that has been streamed."""


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


def draw_answer(group: SequenceGroup, slots: Slots, reason: FinishReason | None) -> tuple[int, tuple[int, ...]]:
    """Return the drawn particle and its tokens. If `reason` ends the request early, these are only the tokens that have
    been weighted, but at least those that have been streamed."""
    if not group.has_particles:
        return 0, ()
    if reason in UNDRAWN:
        return 0, _tokens(group, slots, 0)[: group.streamed]
    if group.params.answer == "best":
        particle = _best(group, slots, reason)
        return particle, _scored(group, slots, reason, particle)
    logw_N = group.array(slots, "logw_S")
    if len(logw_N) == 1:
        return 0, _scored(group, slots, reason, 0)
    seed_G, round_G = np.array([group.seed], dtype=np.int64), np.array([group.rounds], dtype=np.int64)
    uniform = uniforms(seed_G, round_G, np.zeros(1, dtype=np.int64), Purpose.FINAL)[0, 0]
    particle = final_draw(torch.from_numpy(logw_N), float(uniform))
    return particle, _scored(group, slots, reason, particle)


def numerics_of(decoding: Decoding, workers: Mapping[ModelRole, Worker]) -> Numerics:
    """Return what the bits of an answer depend on."""
    invariant = all(workers[role].numerics is Numerics.INVARIANT for role in decoding.deciding)
    return Numerics.INVARIANT if invariant else Numerics.FASTEST


def make_answer(
    group: SequenceGroup,
    slots: Slots,
    reason: FinishReason | None,
    particle: int,
    tokens: tuple[int, ...],
    scores: str,
    numerics: Numerics,
) -> Answer:
    """Make the answer of a particle with these tokens. Its `seconds` are set later. `scores`: the array of `Slots` with
    the log-probabilities that are reported."""
    logp, matched, log_z = None, None, group.log_z
    if group.params.logprobs:
        # Streamed log-probabilities are kept: particles are scored in different rows, and the last bits may differ.
        logp = tuple(group.logprobs)
        if tokens:
            logp += tuple(group.array(slots, scores)[particle, group.streamed : len(tokens)].tolist())
    if group.has_particles:
        log_z += group.rules.log_z(group.array(slots, "logw_S"), group.count)
    particles = _particles(group, slots, reason, tokens) if group.params.return_particles else None
    if reason is None:
        reason, matched = group.stop_rules.why(tokens)
    return Answer(
        request_id=group.id,
        tokens=tokens,
        text=group.stop_rules.text(tokens),
        finish_reason=reason,
        matched=matched,
        seed=group.seed,
        prompt_tokens=group.prompt_size,
        statistics=group.counters.statistics(log_z, group.count, group.fitted_exponent, numerics),
        seconds=math.nan,
        logprobs=logp,
        error=group.error,
        caller_error=group.caller_error,
        cached_tokens=group.cached_tokens,
        particles=particles,
        prompt_logprobs=() if group.params.prompt_logprobs is not None and group.prompt_size == 1 else None,
    )


def cut_answer(answer: Answer, group: SequenceGroup, reason: FinishReason) -> Answer:
    """Reduce a drawn answer whose rescoring failed or was cancelled to the part that has been streamed."""
    tokens = answer.tokens[: group.streamed]
    return replace(
        answer,
        tokens=tokens,
        text=group.stop_rules.text(tokens),
        finish_reason=reason,
        matched=None,
        logprobs=None if answer.logprobs is None else answer.logprobs[: len(tokens)],
        error=group.error,
        caller_error=group.caller_error,
        particles=None if answer.particles is None else (),
    )


def _particles(
    group: SequenceGroup, slots: Slots, reason: FinishReason | None, drawn: tuple[int, ...]
) -> tuple[Particle, ...]:
    """The population that the answer `drawn` was drawn from; the answer alone if its method has no population."""
    if not drawn or reason in UNDRAWN:
        return ()
    population = group.rules.population(group.array(slots, "logw_S"))
    if not population:
        return (_particle(group, drawn, reason, 1.0),)
    return tuple(
        _particle(group, _scored(group, slots, reason, n), reason, weight)
        for n, weight in population
        if n < group.count
    )


def _particle(group: SequenceGroup, tokens: tuple[int, ...], reason: FinishReason | None, weight: float) -> Particle:
    if reason is None:
        reason, _ = group.stop_rules.why(tokens)
    return Particle(tokens, group.stop_rules.text(tokens), reason, weight)


def _best(group: SequenceGroup, slots: Slots, reason: FinishReason | None) -> int:
    """Likeliest particle of those with weight, under the requested distribution; the first one of equals."""
    logw_N, logphi_N = group.array(slots, "logw_S"), group.array(slots, "logphi_S")
    sizes = [len(_scored(group, slots, reason, n)) for n in range(len(logw_N))]
    logp_N = np.array([np.nansum(row_L[:size]) for row_L, size in zip(group.array(slots, "logp_SL"), sizes)])
    score_N = (group.params.alpha or 1.0) * logp_N.astype(np.float64) + logphi_N
    weighs_N = logw_N > -np.inf if (logw_N > -np.inf).any() else np.ones(len(logw_N), dtype=bool)
    return int(np.where(weighs_N, score_N, -np.inf).argmax())


def _scored(group: SequenceGroup, slots: Slots, reason: FinishReason | None, particle: int) -> tuple[int, ...]:
    """A particle's tokens. If `reason` ends the request early: only tokens that the target has scored and the
    potential, if any, has been asked about, but at least those that have been streamed."""
    tokens = _tokens(group, slots, particle)
    if reason is None:
        return tokens
    size = int(group.array(slots, "block_S")[particle]) + 1
    if group.params.potential is not None:
        size = min(size, int(group.array(slots, "weighed_S")[particle]))
    return tokens[: max(size, group.streamed)]


def _tokens(group: SequenceGroup, slots: Slots, particle: int) -> tuple[int, ...]:
    length = group.array(slots, "length_S")[particle]
    return tuple(group.array(slots, "tokens_SL")[particle, :length].tolist())
