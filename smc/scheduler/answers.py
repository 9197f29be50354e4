"""What a request is answered with: the final draw among its particles, and all that is reported of it.

Looks at groups and slots, and changes neither.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from smc.algorithm.selection import final_draw, final_weights
from smc.api.outputs import Answer, FinishReason, Particle
from smc.philox import Purpose, uniforms
from smc.scheduler.sequence_group import Group
from smc.scheduler.slots import Slots


def draw_answer(group: Group, slots: Slots, reason: FinishReason | None) -> tuple[int, tuple[int, ...]]:
    """The drawn particle and its tokens. If `reason` ends it early: those that have been weighed, and whatever has been streamed."""
    if not group.has_particles:
        return 0, ()
    if reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        return 0, _tokens(group, slots, 0)[: group.streamed]
    seed_G, round_G = np.array([group.seed], dtype=np.int64), np.array([group.rounds], dtype=np.int64)
    uniform = uniforms(seed_G, round_G, np.zeros(1, dtype=np.int64), Purpose.FINAL)[0, 0]
    particle = final_draw(torch.from_numpy(_record(group, slots, "logw_S")), float(uniform))
    return particle, _weighed(group, slots, reason, particle)


def make_answer(group: Group, slots: Slots, reason: FinishReason | None, particle: int, tokens: tuple[int, ...]) -> Answer:
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


def _particles(group: Group, slots: Slots, reason: FinishReason | None, drawn: tuple[int, ...]) -> tuple[Particle, ...]:
    """What the answer `drawn` was drawn from; the answer itself where its method has no population."""
    if not drawn or reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        return ()
    if not group.decoding.records_population:
        return (_particle(group, drawn, reason, 1.0),)
    weight_N = final_weights(torch.from_numpy(_record(group, slots, "logw_S"))).tolist()
    # Of distinct particles a place without weight is without a particle, too.
    held = [n for n, weight in enumerate(weight_N[: group.count]) if weight or not group.decoding.competes]
    return tuple(_particle(group, _weighed(group, slots, reason, n), reason, weight_N[n]) for n in held)


def _particle(group: Group, tokens: tuple[int, ...], reason: FinishReason | None, weight: float) -> Particle:
    if reason is None:
        reason, _ = group.rules.why(tokens, group.params.max_tokens)
    return Particle(tokens, group.rules.text(tokens), reason, weight)


def _weighed(group: Group, slots: Slots, reason: FinishReason | None, particle: int) -> tuple[int, ...]:
    """A particle's tokens. If `reason` ends it early: those that have been weighed, and whatever has been streamed."""
    tokens = _tokens(group, slots, particle)
    if reason is None:
        return tokens
    return tokens[: max(int(_record(group, slots, "block_S")[particle]) + 1, group.streamed)]


def _tokens(group: Group, slots: Slots, particle: int) -> tuple[int, ...]:
    length = _record(group, slots, "length_S")[particle]
    return tuple(_record(group, slots, "tokens_SL")[particle, :length].tolist())


def _record(group: Group, slots: Slots, name: str) -> np.ndarray:
    """Rows of an array of `Slots` that are the group's particles, wherever they are kept."""
    return group.saved[name] if group.saved else getattr(slots, name)[group.slots]
