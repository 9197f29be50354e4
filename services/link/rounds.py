"""Resident rounds as protobuf messages, and back. Layout: proto/smc/v1/particles.proto."""

from __future__ import annotations

import numpy as np

from services.link.codec import law_message, to_law
from services.pb import particles_pb2 as pb
from smc.resident.plan import RoundPlan, RoundResult
from smc.resident.sides import Start

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


def join_command(start: Start, side: str, alone: bool) -> pb.JoinCommand:
    return pb.JoinCommand(
        slots=_bytes(start.slots_N, "<i4"),
        prompt_row=start.prompt_row[side],
        prompt_size=start.prompt_size,
        max_tokens=start.max_tokens,
        first=_bytes(start.first_N, "<i4"),
        ended=_bytes(start.ended_N, "|b1"),
        weights=_bytes(start.logw_N, "<f8"),
        stop_ids=_bytes(np.array(start.stop_ids), "<i4"),
        alone=alone,
    )


def to_start(command: pb.JoinCommand, side: str) -> Start:
    return Start(
        slots_N=_array(command.slots, "<i4"),
        prompt_row={side: command.prompt_row},
        prompt_size=command.prompt_size,
        max_tokens=command.max_tokens,
        first_N=_array(command.first, "<i4"),
        ended_N=_array(command.ended, "|b1"),
        logw_N=_array(command.weights, "<f8"),
        stop_ids=_array(command.stop_ids, "<i4").tolist(),
    )


def leave_command(slots_N: np.ndarray, alone: bool) -> pb.LeaveCommand:
    return pb.LeaveCommand(slots=_bytes(slots_N, "<i4"), alone=alone)


def to_slots(command: pb.LeaveCommand) -> np.ndarray:
    return _array(command.slots, "<i4")


def round_command(plan: RoundPlan, alone: bool) -> pb.RoundCommand:
    arrays = {name: _bytes(getattr(plan, attribute), kind) for name, (attribute, kind) in _PLAN.items()}
    laws = {"target_law": law_message(plan.target_law), "draft_law": law_message(plan.draft_law)}
    return pb.RoundCommand(alone=alone, short=plan.short, schemes=[scheme or "" for scheme in plan.schemes], **laws, **arrays)


def to_plan(command: pb.RoundCommand) -> RoundPlan:
    groups, arrays = len(command.schemes), {}
    for name, (attribute, kind) in _PLAN.items():
        array = _array(getattr(command, name), kind)
        array = array.astype(np.int64) if name in _WIDE else array
        arrays[attribute] = array.reshape(groups, -1) if name in ("uniforms", "branch_uniforms") else array
    laws = {"target_law": to_law(command.target_law), "draft_law": to_law(command.draft_law)}
    return RoundPlan(schemes=tuple(scheme or None for scheme in command.schemes), short=command.short, **laws, **arrays)


def round_outcome(result: RoundResult) -> pb.RoundOutcome:
    return pb.RoundOutcome(**{name: _bytes(getattr(result, attribute), kind) for name, (attribute, kind) in _RESULT.items()})


def to_result(outcome: pb.RoundOutcome) -> RoundResult:
    arrays = {attribute: _array(getattr(outcome, name), kind) for name, (attribute, kind) in _RESULT.items()}
    places = len(arrays["ancestor_A"])
    return RoundResult(**{name: array.reshape(places, -1) if name.endswith("_AQ") else array for name, array in arrays.items()})


def _bytes(array: np.ndarray, kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()


def _array(data: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(data, dtype=kind).copy()  # a view would be read-only, which torch does not take
