"""What the engine asks of workers, and their results, as protobuf messages, and back. Layout: proto/smc/v1/particles.proto."""

from __future__ import annotations

import numpy as np

from services.pb import particles_pb2 as pb
from smc.engine.matcher import StopMatcher
from smc.engine.messages import Draws, PromptBatch, PromptResult
from smc.laws import LawSpec
from smc.philox import Purpose
from smc.resident.plan import RoundPlan, RoundResult, Start

_PLAN = {
    "slots": ("slots_A", "<i4"),
    "particle": ("particle_A", "<i4"),
    "seed": ("seed_A", "<i8"),
    "round": ("round_A", "<i4"),
    "position": ("position_A", "<i4"),
    "room": ("room_A", "<i4"),
    "alpha": ("alpha_A", "<f8"),
    "size": ("size_G", "<i4"),
    "shared": ("shared_G", "<i4"),
    "threshold": ("threshold_G", "<f8"),
    "uniforms": ("uniforms_GU", "<f8"),
    "branch_uniforms": ("branch_uniforms_GM", "<f8"),
}
"""Field -> attribute, and its type on the way."""
_WIDE = ("slots", "particle", "round", "position", "room", "size")
"""int64 where they are used."""
_RESULT = {
    "ancestor": ("ancestor_A", "<i4"),
    "grown": ("grown_AQ", "<i4"),
    "count": ("count_A", "<i4"),
    "ended": ("ended_A", "|b1"),
    "weights": ("logw_A", "<f8"),
    "logp": ("logp_AQ", "<f4"),
    "first_logp": ("first_logp_A", "<f4"),
    "log_z": ("log_z_G", "<f8"),
    "ess": ("ess_G", "<f8"),
    "resampled": ("resampled_G", "|b1"),
    "collapsed": ("collapsed_G", "|b1"),
    "draft_nan": ("draft_nan_G", "|b1"),
    "target_nan": ("target_nan_G", "|b1"),
}


def prompt_command(batch: PromptBatch) -> pb.PromptCommand:
    command = pb.PromptCommand(
        rows=_bytes(batch.rows_R, "<i4"),
        starts=_bytes(batch.starts_R, "<i4"),
        counts=_bytes(batch.counts_R, "<i4"),
        tokens=_bytes(batch.tokens_T, "<i4"),
    )
    if batch.draws is not None:
        command.draws.CopyFrom(_draws_message(batch.draws))
    return command


def to_prompt_batch(command: pb.PromptCommand) -> PromptBatch:
    return PromptBatch(
        rows_R=_array(command.rows, "<i4"),
        starts_R=_array(command.starts, "<i4"),
        counts_R=_array(command.counts, "<i4"),
        tokens_T=_array(command.tokens, "<i4").astype(np.int64),
        draws=_to_draws(command.draws) if command.HasField("draws") else None,
    )


def prompt_outcome(result: PromptResult) -> pb.PromptOutcome:
    if result.log_z_R is None:
        return pb.PromptOutcome()
    arrays = {"drawn": (result.drawn_RD, "<i4"), "drawn_logp": (result.drawn_logp_RD, "<f4"), "log_z": (result.log_z_R, "<f4")}
    return pb.PromptOutcome(**{name: _bytes(array, kind) for name, (array, kind) in arrays.items()})


def to_prompt_result(outcome: pb.PromptOutcome) -> PromptResult:
    if not outcome.HasField("log_z"):
        return PromptResult()
    log_z_R = _array(outcome.log_z, "<f4")
    drawn_RD, logp_RD = (_array(*column).reshape(len(log_z_R), -1) for column in ((outcome.drawn, "<i4"), (outcome.drawn_logp, "<f4")))
    return PromptResult(drawn_RD, logp_RD, log_z_R)


def release_command(rows_R: np.ndarray) -> pb.ReleaseCommand:
    return pb.ReleaseCommand(rows=_bytes(rows_R, "<i4"))


def to_rows(command: pb.ReleaseCommand) -> np.ndarray:
    return _array(command.rows, "<i4")


def join_command(start: Start, alone: bool) -> pb.JoinCommand:
    command = pb.JoinCommand(
        slots=_bytes(start.slots_N, "<i4"),
        prompt_row=start.prompt_row,
        prompt_size=start.prompt_size,
        max_tokens=start.max_tokens,
        first=_bytes(start.first_N, "<i4"),
        ended=_bytes(start.ended_N, "|b1"),
        weights=_bytes(start.logw_N, "<f8"),
        stop_ids=_bytes(np.array(start.stop_ids), "<i4"),
        text=_bytes(start.text_N, "<i4"),
        alone=alone,
    )
    if start.matcher is not None:
        command.kind, command.next = _bytes(start.matcher.kind_V, "<i2"), _bytes(start.matcher.next_XC, "<i2")
        command.kinds = start.matcher.next_XC.shape[1]
    return command


def to_start(command: pb.JoinCommand) -> Start:
    matcher = None
    if command.kinds:
        matcher = StopMatcher(_array(command.kind, "<i2"), _array(command.next, "<i2").reshape(-1, command.kinds))
    return Start(
        slots_N=_array(command.slots, "<i4"),
        prompt_row=command.prompt_row,
        prompt_size=command.prompt_size,
        max_tokens=command.max_tokens,
        first_N=_array(command.first, "<i4"),
        ended_N=_array(command.ended, "|b1"),
        logw_N=_array(command.weights, "<f8"),
        stop_ids=_array(command.stop_ids, "<i4").tolist(),
        matcher=matcher,
        text_N=_array(command.text, "<i4").astype(np.int64),
    )


def leave_command(slots_N: np.ndarray, alone: bool) -> pb.LeaveCommand:
    return pb.LeaveCommand(slots=_bytes(slots_N, "<i4"), alone=alone)


def to_slots(command: pb.LeaveCommand) -> np.ndarray:
    return _array(command.slots, "<i4")


def round_command(plan: RoundPlan, alone: bool) -> pb.RoundCommand:
    return pb.RoundCommand(
        alone=alone,
        short=plan.short,
        matching=plan.matching,
        schemes=[scheme or "" for scheme in plan.schemes],
        target_law=_law_message(plan.target_law),
        draft_law=_law_message(plan.draft_law),
        **{name: _bytes(getattr(plan, attribute), kind) for name, (attribute, kind) in _PLAN.items()},
    )


def to_plan(command: pb.RoundCommand) -> RoundPlan:
    groups, arrays = len(command.schemes), {}
    for name, (attribute, kind) in _PLAN.items():
        array = _array(getattr(command, name), kind)
        array = array.astype(np.int64) if name in _WIDE else array
        arrays[attribute] = array.reshape(groups, -1) if name in ("uniforms", "branch_uniforms") else array
    return RoundPlan(
        schemes=tuple(scheme or None for scheme in command.schemes),
        short=command.short,
        matching=command.matching,
        target_law=_to_law(command.target_law),
        draft_law=_to_law(command.draft_law),
        **arrays,
    )


def round_outcome(result: RoundResult) -> pb.RoundOutcome:
    return pb.RoundOutcome(**{name: _bytes(getattr(result, attribute), kind) for name, (attribute, kind) in _RESULT.items()})


def to_result(outcome: pb.RoundOutcome) -> RoundResult:
    arrays = {attribute: _array(getattr(outcome, name), kind) for name, (attribute, kind) in _RESULT.items()}
    places = len(arrays["ancestor_A"])
    return RoundResult(**{name: array.reshape(places, -1) if name.endswith("_AQ") else array for name, array in arrays.items()})


def _draws_message(draws: Draws) -> pb.Draws:
    return pb.Draws(
        law=_law_message(draws.law),
        seed=_bytes(draws.seed_R, "<i8"),
        round=_bytes(draws.round_R, "<i4"),
        stream=_bytes(draws.stream_RD, "<i4"),
        purpose=int(draws.purpose),
    )


def _to_draws(draws: pb.Draws) -> Draws:
    seed_R = _array(draws.seed, "<i8")
    round_R, stream_X = (_array(data, "<i4").astype(np.int64) for data in (draws.round, draws.stream))
    return Draws(_to_law(draws.law), seed_R, round_R, stream_X.reshape(len(seed_R), -1), Purpose(draws.purpose))


def _law_message(law: LawSpec) -> pb.Law:
    return pb.Law(
        temperature=_bytes(law.temperature_R, "<f4"),
        top_k=_bytes(law.top_k_R, "<i4"),
        top_p=_bytes(law.top_p_R, "<f4"),
        min_p=_bytes(law.min_p_R, "<f4"),
        alpha=_bytes(law.alpha_R, "<f4"),
        active=sorted(law.active),
    )


def _to_law(law: pb.Law) -> LawSpec:
    top_k_R = _array(law.top_k, "<i4").astype(np.int64)
    rest = (_array(data, "<f4") for data in (law.top_p, law.min_p, law.alpha))
    return LawSpec(_array(law.temperature, "<f4"), top_k_R, *rest, active=frozenset(law.active))


def _bytes(array: np.ndarray, kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()


def _array(data: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(data, dtype=kind).copy()  # a view would be read-only, which torch does not take
