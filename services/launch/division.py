"""Divisions of a machine's GPUs among draft and target, and which of them decodes a number of requests fastest.

A division has equal worker groups, as many as fit: their number never makes a request slower. In a group either both
models are divided among all GPUs (placement shared, lockstep), or each has GPUs of its own (placement apart, either
form). Every number of ranks that a model's shape allows is considered. Speeds are forecast from latency models,
and the best divisions are run briefly. Knows nothing about how the times of degrees and of runs are measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from smc.calibration.forecast import LOCKSTEP, LOOKAHEAD, PLAIN, AcceptanceCurve, TreeShape, TreeShapes, forecast_round
from smc.scheduler.speculation import LatencyModel, ModelLatency
from smc.types import ModelRole

if TYPE_CHECKING:
    from services.launch.config import WorkerGroupConfig


@dataclass(frozen=True)
class Division:
    """Equal worker groups, or for plain decoding as many targets alone."""

    form: str
    """`PLAIN`, `LOCKSTEP` or `LOOKAHEAD`."""
    placement: str
    draft: int
    """GPUs that share the draft in a group; 0: no draft is loaded."""
    target: int
    """GPUs that share the target in a group."""
    groups: int
    """Number of groups."""

    @property
    def size(self) -> int:
        """GPUs of a group."""
        return self.target if self.placement == "shared" else self.draft + self.target

    @property
    def gpus(self) -> int:
        """GPUs of all groups."""
        return self.groups * self.size

    @property
    def name(self) -> str:
        if self.placement == "apart":
            what = f"{self.form} {self.draft} + {self.target}"
        else:
            what = f"{self.form} TP {self.target}" if self.target > 1 else self.form
            what += ", draft whole" if self.form != PLAIN and self.draft != self.target else ""
        return f"{self.groups} x {what}" if self.groups > 1 else what

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a group's requests: two let both models work at a time in lockstep."""
        return 2 if self.form == LOCKSTEP and self.placement == "apart" else 1

    def requests(self, of_all: int) -> int:
        """Requests of the busiest group."""
        return math.ceil(of_all / self.groups)


@dataclass(frozen=True)
class Degrees:
    """Numbers of ranks among which each model can be divided, ascending."""

    draft: tuple[int, ...]
    target: tuple[int, ...]

    @staticmethod
    def of(config: WorkerGroupConfig, gpus: int) -> Degrees:
        """Return the degrees that the models' shapes allow, up to `gpus`."""
        from smc.model.parallel import can_be_divided

        def allowed(role: ModelRole) -> tuple[int, ...]:
            return tuple(degree for degree in range(1, gpus + 1) if can_be_divided(config.shape(role), degree))

        return Degrees(allowed(ModelRole.DRAFT), allowed(ModelRole.TARGET))


def divisions(gpus: int, degrees: Degrees, fits: Callable[[Division], bool] = lambda division: True) -> list[Division]:
    """Return all divisions of up to `gpus` GPUs whose models fit into memory."""
    found = []
    for target in degrees.target:
        found.append(Division(PLAIN, "shared", 0, target, gpus // target))
        whole_or_same = sorted({1, target} & {*degrees.draft})
        found += [Division(LOCKSTEP, "shared", draft, target, gpus // target) for draft in whole_or_same]
        found += [
            Division(form, "apart", draft, target, gpus // (draft + target))
            for draft in degrees.draft
            if draft + target <= gpus
            for form in (LOOKAHEAD, LOCKSTEP)
        ]
    return [division for division in found if division.groups and fits(division)]


@dataclass(frozen=True)
class LeftOut:
    """Divisions that could not be timed: those with this placement and these numbers of GPUs."""

    reason: str
    placement: str | None = None
    """None: both."""
    draft: int | None = None
    """None: any number; so for the target."""
    target: int | None = None

    def covers(self, division: Division) -> bool:
        if division.form == PLAIN and (self.placement is not None or self.draft is not None):
            return False  # it needs no draft
        given = {"placement": self.placement, "draft": self.draft, "target": self.target}
        return all(value in (None, getattr(division, name)) for name, value in given.items())

    def __str__(self) -> str:
        counts = {"draft": self.draft, "target": self.target}
        parts = [
            f"{name} on {count} GPU{'' if count == 1 else 's'}" for name, count in counts.items() if count is not None
        ]
        where = f" with placement {self.placement}" if self.placement else ""
        return f"{' and '.join(parts)}{where} ({self.reason})"


@dataclass(frozen=True)
class DegreeTimes:
    """Times of both models by their numbers of ranks."""

    of_target: Mapping[int, LatencyModel]
    """Latency models by the target's number of ranks, each with the draft that was timed beside it."""
    of_draft: Mapping[int, ModelLatency]
    """Latencies of a draft step by the draft's number of ranks."""
    apart_overhead: float
    """As `LatencyModel.round_overhead`, where each model has processes of its own."""
    left_out: tuple[LeftOut, ...] = ()
    """What could not be timed."""

    def latency(self, division: Division) -> LatencyModel:
        """Return the latency model of a group. Raises KeyError for a degree that was not timed."""
        target = self.of_target[division.target]
        draft = self.of_draft[division.draft] if division.form != PLAIN else target.draft
        overhead = self.apart_overhead if division.placement == "apart" else target.round_overhead
        return LatencyModel(draft, target.target, target.alone, overhead)

    def knows(self, division: Division) -> bool:
        """Whether the degrees of a division were timed."""
        return division.target in self.of_target and (division.form == PLAIN or division.draft in self.of_draft)

    def left_out_of(self, division: Division) -> LeftOut | None:
        """Return why a division could not be timed, the most general reason first; None if nothing is known against
        it."""
        reasons = [each for each in self.left_out if each.covers(division)]
        return min(reasons, key=lambda each: each.placement is not None, default=None)

    def record(self) -> dict[str, Any]:
        """Return the content for a JSON file."""
        return {
            "of_target": {str(degree): json.loads(each.to_json()) for degree, each in self.of_target.items()},
            "of_draft": {str(degree): each.record() for degree, each in self.of_draft.items()},
            "apart_overhead": self.apart_overhead,
            "left_out": [asdict(each) for each in self.left_out],
        }

    @staticmethod
    def of_record(content: Mapping[str, Any]) -> DegreeTimes:
        """Read the result of `record`. Raises ValueError, KeyError or TypeError for other content."""
        target = {
            int(degree): LatencyModel.from_json(json.dumps(each)) for degree, each in content["of_target"].items()
        }
        draft = {int(ranks): ModelLatency.of_record(each) for ranks, each in content["of_draft"].items()}
        return DegreeTimes(
            target, draft, content["apart_overhead"], tuple(LeftOut(**each) for each in content["left_out"])
        )


@dataclass(frozen=True)
class DivisionSpeed:
    """Speed of a division under a load."""

    division: Division
    requests: int
    """Requests of all groups."""
    setting: TreeShape | None
    """The best N, F and K; None for plain decoding."""
    tokens: float
    """Forecast tokens that a round, or in plain decoding a pass, adds to an answer."""
    seconds: float
    """Forecast seconds of that round or pass."""
    measured: float | None = None
    """Tokens a second of one request in a brief run; None: the division was not run."""

    @property
    def forecast(self) -> float:
        """Tokens a second of one request, by the latency model."""
        return self.tokens / self.seconds

    @property
    def per_request(self) -> float:
        """Tokens a second of one request: measured, or else forecast."""
        return self.forecast if self.measured is None else self.measured

    @property
    def total(self) -> float:
        """Tokens a second of all requests."""
        return self.requests * self.per_request

    @property
    def work(self) -> int:
        """Drafted tokens of a round."""
        setting = self.setting
        return 0 if setting is None else setting.particles * setting.branches * setting.block


def best_setting(
    division: Division,
    latency: LatencyModel,
    requests: int,
    acceptance: AcceptanceCurve,
    among: TreeShapes,
    context: int,
    *,
    may_be_alone: bool = False,
) -> DivisionSpeed:
    """Return the setting with the most tokens a second; among those within a thousandth of it, the one with the least
    drafted tokens. `context`: tokens of each request. `may_be_alone`: the target decodes alone where that is faster."""
    here = division.requests(requests)
    speeds = []
    for setting in (*among.of(division.form), *([None] if may_be_alone else ())):
        each = forecast_round(
            latency, division.form, setting, here, context, acceptance, micro_batches=division.micro_batches
        )
        speeds.append(DivisionSpeed(division, requests, setting, each.tokens, each.seconds))
    most = max(speed.forecast for speed in speeds)
    return min((speed for speed in speeds if speed.forecast >= 0.999 * most), key=lambda speed: speed.work)


def rank_divisions(
    found: Iterable[Division],
    times: DegreeTimes,
    requests: int,
    acceptance: AcceptanceCurve,
    among: TreeShapes,
    context: int,
    *,
    may_be_alone: bool = False,
) -> list[DivisionSpeed]:
    """Return every division with its best setting for this number of requests, the fastest forecast first; among equal
    ones that with the fewest GPUs. `may_be_alone`: see `best_setting`."""
    speeds = [
        best_setting(each, times.latency(each), requests, acceptance, among, context, may_be_alone=may_be_alone)
        for each in found
    ]
    return sorted(speeds, key=lambda speed: (-speed.forecast, speed.division.gpus))
