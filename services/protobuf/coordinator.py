"""The result of one engine step, and its conversion to and from messages of the coordinator's stream:
proto/smc/internal/v1/coordinator.proto."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from services.backend import RequestFailed, Unavailable
from services.pb import coordinator_pb2 as pb
from services.protobuf.generation import data_of, from_update, to_update
from smc.api.request import Output
from smc.api.sampling_params import VERIFICATIONS
from smc.scheduler.admission import QueueFull
from smc.scheduler.stats import EngineStats, PotentialStats, RoundTimes, SpecStats
from smc.types import ModelRole

_SAMPLES = {"ess_share": "ess_shares", "committed_lag": "committed_lags", "mask_seconds": "mask_seconds"}
"""Repeated fields of `Snapshot`, and their names in `EngineStats`."""
_COUNTS = (
    *("queued", "running", "slots_free", "resamples", "collapses", "preemptions", "shrinks"),
    "spec_alone_rounds",
)
"""Further fields that both have under the same name."""


@dataclass(frozen=True)
class EngineStep:
    """The result of one step of the engine's loop."""

    outputs: list[Output] = field(default_factory=list)
    refusals: dict[str, Exception] = field(default_factory=dict)
    """Why a submission was refused (ValueError, QueueFull, RequestFailed, Unavailable) or a request cannot continue
    (Unavailable), by request id."""
    stats: EngineStats = field(default_factory=EngineStats)
    times: RoundTimes | None = None
    """Where the time of the step's rounds went; None if that is not known or no model worked."""
    lost_draft: int = 0
    """Incarnation of the draft that was lost last; 0 if none was."""


_GROUP_FIELDS = {
    **{name: f"pages_{name}" for name in ("total", "used", "cached", "leaked")},
    **{name: name for name in ("prefix_queries", "prefix_hits")},
}
"""Fields of `GroupPages`, and their names in `EngineStats`, where each is a dictionary by model role."""
_KINDS = {
    pb.REFUSAL_KIND_INVALID: ValueError,
    pb.REFUSAL_KIND_QUEUE_FULL: QueueFull,
    pb.REFUSAL_KIND_FAILED: RequestFailed,
    pb.REFUSAL_KIND_UNAVAILABLE: Unavailable,
}


def to_response(step: EngineStep) -> pb.AttachResponse:
    refusals = [
        pb.Refusal(request_id=name, kind=_kind(error), message=str(error)) for name, error in step.refusals.items()
    ]
    return pb.AttachResponse(updates=map(to_update, step.outputs), refusals=refusals, snapshot=_to_snapshot(step))


def from_response(response: pb.AttachResponse) -> EngineStep:
    snapshot = response.snapshot
    return EngineStep(
        outputs=[from_update(update) for update in response.updates],
        refusals={refusal.request_id: _KINDS[refusal.kind](refusal.message) for refusal in response.refusals},
        stats=_from_snapshot(snapshot),
        times=data_of(RoundTimes, snapshot.times) if snapshot.HasField("times") else None,
        lost_draft=snapshot.lost_draft,
    )


def _kind(error: Exception) -> pb.RefusalKind:
    return next(kind for kind, known in _KINDS.items() if isinstance(error, known))


def _to_snapshot(step: EngineStep) -> pb.Snapshot:
    stats = step.stats
    groups = {
        role: {name: getattr(stats, field).get(role) for name, field in _GROUP_FIELDS.items()} for role in ModelRole
    }
    return pb.Snapshot(
        times=None if step.times is None else pb.RoundTimes(**asdict(step.times)),
        potential_seconds=stats.potentials.seconds,
        potential_errors=stats.potentials.errors,
        potential_timeouts=stats.potentials.timeouts,
        lost_draft=step.lost_draft,
        **{name: getattr(stats, name) for name in _COUNTS},
        **{name: getattr(stats, field) for name, field in _SAMPLES.items()},
        **{name: pb.SpecCounts(**asdict(counts)) for name, counts in stats.spec.items()},
        **{f"{role}_pages": pb.GroupPages(**counts) for role, counts in groups.items()},
    )


def _from_snapshot(snapshot: pb.Snapshot) -> EngineStats:
    groups = {role: getattr(snapshot, f"{role}_pages") for role in ModelRole}
    values: dict[str, Any] = {name: getattr(snapshot, name) for name in _COUNTS}
    values |= {field: list(getattr(snapshot, name)) for name, field in _SAMPLES.items()}
    values |= {
        field: {role: getattr(group, name) for role, group in groups.items() if group.HasField(name)}
        for name, field in _GROUP_FIELDS.items()
    }
    return EngineStats(
        potentials=PotentialStats(
            list(snapshot.potential_seconds), snapshot.potential_errors, snapshot.potential_timeouts
        ),
        spec={name: _from_counts(getattr(snapshot, name)) for name in VERIFICATIONS},
        **values,
    )


def _from_counts(counts: pb.SpecCounts) -> SpecStats:
    return data_of(SpecStats, counts, accepted_by_position=list(counts.accepted_by_position))
