"""What a request is answered with: the final draw among its particles, and all that is reported of it.

Looks at groups and slots, and changes neither.

What requests are told: news while they run, and how they end. Knows nothing about when that is asked for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch

from smc.algorithm.selection import final_draw, final_weights
from smc.api.outputs import Answer, FinishReason, Output, Particle
from smc.philox import Purpose, uniforms
from smc.scheduler.checkpoint import particle_of
from smc.scheduler.page_forecast import PageForecast
from smc.scheduler.prefix_reuse import PrefixReuse
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.sequence_group import Phase, SequenceGroup
from smc.scheduler.slots import Slots


def draw_answer(group: SequenceGroup, slots: Slots, reason: FinishReason | None) -> tuple[int, tuple[int, ...]]:
    """The drawn particle and its tokens. If `reason` ends it early: those that have been weighed, and whatever has been
    streamed."""
    if not group.has_particles:
        return 0, ()
    if reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        return 0, _tokens(group, slots, 0)[: group.streamed]
    seed_G, round_G = np.array([group.seed], dtype=np.int64), np.array([group.rounds], dtype=np.int64)
    uniform = uniforms(seed_G, round_G, np.zeros(1, dtype=np.int64), Purpose.FINAL)[0, 0]
    particle = final_draw(torch.from_numpy(_record(group, slots, "logw_S")), float(uniform))
    return particle, _weighed(group, slots, reason, particle)


def make_answer(
    group: SequenceGroup, slots: Slots, reason: FinishReason | None, particle: int, tokens: tuple[int, ...]
) -> Answer:
    """For what has been drawn. How long it took is not known yet."""
    logp, matched, log_z = None, None, group.log_z
    if group.params.logprobs:
        logp = tuple(_record(group, slots, "logp_SL")[particle, : len(tokens)].tolist()) if tokens else ()
    if group.has_particles:
        log_z += group.decoding.log_z(torch.from_numpy(_record(group, slots, "logw_S")), group.count)
    particles = _particles(group, slots, reason, tokens) if group.params.return_particles else None
    if reason is None:
        reason, matched = group.rules.why(tokens, group.params.max_tokens)
    return Answer(
        request_id=group.id,
        tokens=tokens,
        text=group.rules.text(tokens),
        finish_reason=reason,
        matched=matched,
        seed=group.seed,
        prompt_tokens=group.prompt_size,
        statistics=group.tally.statistics(log_z, group.count),
        seconds=math.nan,
        logprobs=logp,
        error=group.error,
        cached_tokens=group.cached_tokens or 0,
        particles=particles,
    )


def _particles(
    group: SequenceGroup, slots: Slots, reason: FinishReason | None, drawn: tuple[int, ...]
) -> tuple[Particle, ...]:
    """What the answer `drawn` was drawn from; the answer itself where its method has no population."""
    if not drawn or reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        return ()
    if not group.decoding.records_population:
        return (_particle(group, drawn, reason, 1.0),)
    weight_N = final_weights(torch.from_numpy(_record(group, slots, "logw_S"))).tolist()
    # Of distinct particles a place without weight is without a particle, too.
    held = [n for n, weight in enumerate(weight_N[: group.count]) if weight or not group.decoding.competes]
    return tuple(_particle(group, _weighed(group, slots, reason, n), reason, weight_N[n]) for n in held)


def _particle(group: SequenceGroup, tokens: tuple[int, ...], reason: FinishReason | None, weight: float) -> Particle:
    if reason is None:
        reason, _ = group.rules.why(tokens, group.params.max_tokens)
    return Particle(tokens, group.rules.text(tokens), reason, weight)


def _weighed(group: SequenceGroup, slots: Slots, reason: FinishReason | None, particle: int) -> tuple[int, ...]:
    """A particle's tokens. If `reason` ends it early: those that have been weighed, and whatever has been streamed."""
    tokens = _tokens(group, slots, particle)
    if reason is None:
        return tokens
    return tokens[: max(int(_record(group, slots, "block_S")[particle]) + 1, group.streamed)]


def _tokens(group: SequenceGroup, slots: Slots, particle: int) -> tuple[int, ...]:
    length = _record(group, slots, "length_S")[particle]
    return tuple(_record(group, slots, "tokens_SL")[particle, :length].tolist())


def _record(group: SequenceGroup, slots: Slots, name: str) -> np.ndarray:
    """Rows of an array of `Slots` that are the group's particles, wherever they are kept."""
    return group.saved[name] if group.saved else getattr(slots, name)[group.slots]


logger = logging.getLogger(__name__)


class ResultReporter:
    """Outputs, until they are taken."""

    def __init__(
        self, registry: RequestRegistry, expectation: PageForecast, prefixes: PrefixReuse, clock: Callable[[], float]
    ) -> None:
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

    def finish(self, group: SequenceGroup, reason: FinishReason | None) -> None:
        """The final draw, the last Output, and everything the group held given back. `reason` None: it is complete. An
        answer that is asked for with what else could have stood there is rescored first."""
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

    def _report(self, group: SequenceGroup) -> None:
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
            self._ready.append((group.number, Output(group.id, new, group.text.push(new))))

    def _answer(self, group: SequenceGroup, answer: Answer) -> None:
        now = self._clock()
        answer = replace(answer, seconds=now - group.submitted, times=group.times(now))
        self._ready.append(
            (group.number, Output(group.id, answer.tokens[group.streamed :], group.text.finish(answer.text), answer))
        )
        self._registry.release(group)
