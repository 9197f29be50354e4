"""Answers: the draw among a request's particles, and what is reported of it. Knows nothing about when that happens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from smc.algorithm.selection import final_draw
from smc.api.request import Answer, FinishReason, Particle
from smc.executor.messages import Worker
from smc.philox import Purpose, uniforms
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import Decoding, ModelRole, Numerics

UNDRAWN = (FinishReason.ERROR, FinishReason.CANCELLED)
"""Reasons for which no answer is drawn: the answer is then the part that has been streamed."""


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
