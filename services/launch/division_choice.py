"""Chooses the division of GPUs that `smcserve serve --gpus` starts: from what `smcserve bench --advise` has measured
and stored for this pair on this machine, or else from an estimate by the models' shapes."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.launch.division import Degrees, DegreeTimes, Division, DivisionSpeed, LeftOut, divisions, rank_divisions
from smc.calibration.forecast import LOOKAHEAD, PLAIN, AcceptanceCurve, TreeShape, TreeShapes
from smc.types import ModelRole

if TYPE_CHECKING:
    from services.launch.config import WorkerGroupConfig

DEFAULT_ACCEPTANCE = AcceptanceCurve(0.75, 0.5)
"""Acceptance without a measurement: about that of a published pair on chats."""
DEFAULT_CONTEXT = 1024
"""Tokens of each request without a measurement."""
DEFAULT_REQUESTS = 8
"""Number of requests at a time that GPUs are divided for."""
OWN_SHAPE = {"blocks": "block", "branches": "branches"}
"""Field of `TreeShapes` -> option of `serve` that leaves one value."""
NAMED = 3
"""Maximum number of slower divisions that a message names."""
WEIGHT_SHARE = 0.8
"""Share of a GPU's memory that weights may take: KV pools and graphs need the rest."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DivisionMeasurement:
    """What `bench --advise` found for a pair on this machine."""

    times: DegreeTimes
    acceptance: AcceptanceCurve
    context: int
    """Tokens of each request in the forecasts."""
    runs: tuple[DivisionSpeed, ...] = ()
    """Divisions that ran."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "times": self.times.record(),
                "acceptance": asdict(self.acceptance),
                "context": self.context,
                "runs": [asdict(speed) for speed in self.runs],
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> DivisionMeasurement:
        """Parse the output of `to_json`. Raises ValueError, KeyError or TypeError for other text."""
        content = json.loads(text)
        runs = (
            DivisionSpeed(
                **each
                | {
                    "division": Division(**each["division"]),
                    "setting": each["setting"] and TreeShape(**each["setting"]),
                }
            )
            for each in content["runs"]
        )
        acceptance = AcceptanceCurve(**content["acceptance"])
        return DivisionMeasurement(DegreeTimes.of_record(content["times"]), acceptance, content["context"], tuple(runs))

    def applied_to(self, ranked: Sequence[DivisionSpeed]) -> list[DivisionSpeed]:
        """Return `ranked` with the speeds of the divisions that ran with as many requests; they come first, the fastest
        first. Runs that failed do not count. The target alone is as fast with the draft beside it as without."""
        known = {(run.division, run.requests): run for run in self.runs if run.measured}
        found = []
        for speed in ranked:
            alone = replace(speed.division, form=PLAIN, placement="shared", draft=0)
            runs = [known.get((speed.division, speed.requests))]
            if speed.division.placement == "shared" and (plain := known.get((alone, speed.requests))) is not None:
                runs.append(replace(plain, division=speed.division))
            found.append(max((run for run in runs if run), key=lambda run: run.per_request, default=speed))
        ran = [speed for speed in found if speed.measured is not None]
        return [*sorted(ran, key=lambda speed: -speed.per_request), *(s for s in found if s.measured is None)]


def measurement_file(config: WorkerGroupConfig) -> Path:
    """Return the file in which the measurement of a pair on this machine is stored: another one for other weights,
    types of weights or versions."""
    from smc.calibration.latency import cache_directory

    sources = config.sources
    key = {
        "version": version("smcserve"),
        "load": config.load,
        "models": [[str(each.location), each.fingerprint()] for each in (sources.target, sources.draft)],
        "dtypes": {str(role): name for role, name in config.dtypes.items()},
        "draft_columns": None if sources.draft_vocab is None else len(sources.draft_vocab.ids_M),
        "device": config.device,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / f"division-{digest[:24]}.json"


def stored_measurement(config: WorkerGroupConfig) -> DivisionMeasurement | None:
    """Return what was measured for the pair, if anything. A file that cannot be read is logged and left out."""
    path = measurement_file(config)
    if not path.is_file():
        return None
    try:
        return DivisionMeasurement.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("cannot read %s, so what `bench --advise` measured is not used: %s", path, error)
        return None


@dataclass(frozen=True)
class DivisionChoice:
    """The division to start."""

    gpus: int
    """GPUs that were to be divided."""
    best: DivisionSpeed
    beaten: tuple[DivisionSpeed, ...]
    """The next best ones, in order."""
    source: str
    """What the speeds are taken from, as text."""
    is_measured: bool
    """Whether the best tree sizes come from measured times."""

    def options(self) -> dict[str, Any]:
        """Return the options of `serve` that start the division, by name."""
        division, setting = self.best.division, self.best.setting
        found = {
            "placement": division.placement,
            "form": "lookahead" if division.form == LOOKAHEAD else "lockstep",
            "draft_tp": division.draft,
            "target_tp": division.target,
            "worker_groups": division.groups,
        }
        if setting is not None and self.is_measured:
            found["block"] = setting.block
            if division.form == LOOKAHEAD:
                found["branches"] = setting.branches
        return found

    def __str__(self) -> str:
        slower = ", ".join(f"{speed.division.name} ({speed.per_request:,.0f})" for speed in self.beaten[:NAMED])
        return (
            f"{_counted(self.gpus, 'GPU')} for {_counted(self.best.requests, 'request')} at a time: "
            f"{describe(self.best)}, "
            f"{self.best.per_request:,.0f} tokens a second of each{f', before {slower}' if slower else ''}; "
            f"{self.source}"
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def describe(speed: DivisionSpeed) -> str:
    """Return a division and its tree as text."""
    setting, form = speed.setting, speed.division.form
    if form == PLAIN:
        return speed.division.name
    if setting is None:
        return f"{speed.division.name} (target alone)"
    branches = f", F={setting.branches}" if form == LOOKAHEAD else ""
    return f"{speed.division.name} (N={setting.particles}, K={setting.block}{branches})"


def choose_division(
    config: WorkerGroupConfig,
    gpus: int,
    requests: int,
    given: Mapping[str, Any],
    gpu_bytes: int | None = None,
) -> DivisionChoice:
    """Choose the division of `gpus` GPUs that decodes `requests` requests at a time fastest. `given`: options of
    `serve`, by name, that the division must have. `gpu_bytes`: memory of a GPU; None: unknown. Raises ValueError if no
    division has these options and room for the weights."""
    groups = given.get("worker_groups")
    if groups is not None and str(groups).isdecimal() and int(groups) < 1:
        raise ValueError(f"worker_groups={groups}; allowed: 'auto', or 1 and more")
    degrees = Degrees.of(config, gpus)
    candidates = _candidates(config, degrees, gpus, given, gpu_bytes)
    own = {name: (given[key],) for name, key in OWN_SHAPE.items() if given.get(key) is not None}
    among, may_be_alone = TreeShapes(**own), given.get("drafting") != "always"
    found = stored_measurement(config)
    why, said = "as nothing is measured for this pair on this machine", ""
    if found is not None:
        left_out = {each: found.times.left_out_of(each) for each in candidates}
        said = _said_of(left_out.values())
        if not (rest := [each for each, reason in left_out.items() if reason is None]):
            why = "as no division with these options could be timed"
        elif all(map(found.times.knows, rest)):
            measured = (found.acceptance, among, found.context)
            ranked = rank_divisions(rest, found.times, requests, *measured, may_be_alone=may_be_alone)
            best, *others = found.applied_to(ranked)
            source = "as `bench --advise` measured it"
            if best.measured is None:
                source = "forecast from times that `bench --advise` measured"
            return DivisionChoice(gpus, best, tuple(others), source + said, is_measured=True)
        else:
            why = f"as not all divisions of {_counted(gpus, 'GPU')} are measured for this pair"
            candidates = rest
    times = estimated_times(config, degrees)
    assumed = (DEFAULT_ACCEPTANCE, among, DEFAULT_CONTEXT)
    best, *others = rank_divisions(candidates, times, requests, *assumed, may_be_alone=may_be_alone)
    source = (
        f"estimated from the models' shapes, {why}: `smcserve bench --advise --device cuda --gpus {gpus}` measures it"
    )
    return DivisionChoice(gpus, best, tuple(others), source + said, is_measured=False)


def _said_of(reasons: Iterable[LeftOut | None]) -> str:
    """Return the end of a message: which divisions `bench --advise` could not time, and why; empty if there are
    none."""
    found = [str(each) for each in dict.fromkeys(reasons) if each is not None]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"; it could not time: {', '.join(found[:NAMED])}{more}" if found else ""


def _candidates(
    config: WorkerGroupConfig, degrees: Degrees, gpus: int, given: Mapping[str, Any], gpu_bytes: int | None
) -> list[Division]:
    """Return the divisions that have the given options and room for the weights. Raises ValueError if there is none."""
    drafting = [each for each in divisions(gpus, degrees) if each.form != PLAIN]
    wanted = [each for each in (_with_options(each, gpus, given) for each in drafting) if each is not None]
    if not wanted:
        names = ("placement", "form", "target_tp", "draft_tp", "worker_groups")
        said = ", ".join(f"{name}={given[name]!r}" for name in names if given.get(name) is not None)
        raise ValueError(
            f"gpus={gpus} with {said or 'these models'}: no division of {gpus} GPUs; allowed: target_tp "
            f"{_listed(degrees.target)} and draft_tp {_listed(degrees.draft)}, together at most {gpus} with placement "
            "apart, where each model has GPUs of its own"
        )
    fits = weights_fit(config, gpu_bytes)
    if not (found := [each for each in wanted if fits(each)]):
        raise ValueError(
            f"gpus={gpus}: the weights take more than {WEIGHT_SHARE:.0%} of a GPU's {(gpu_bytes or 0) / 2**30:.0f} GiB "
            "in every division; give more GPUs, or lower target_dtype and draft_dtype (allowed: fp8, int4)"
        )
    return found


def _with_options(division: Division, gpus: int, given: Mapping[str, Any]) -> Division | None:
    """Return the division with the number of worker groups that is given; None if it does not have the given
    options."""
    placement, form, groups = (given.get(name) for name in ("placement", "form", "worker_groups"))
    if groups is not None and str(groups).isdecimal():
        division = replace(division, groups=int(groups))
    matches = (
        placement in (None, division.placement),
        form in (None, "lookahead" if division.form == LOOKAHEAD else "lockstep"),
        given.get("target_tp") in (None, division.target),
        given.get("draft_tp") in (None, division.draft),
        division.gpus <= gpus,
    )
    return division if all(matches) else None


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def weights_fit(config: WorkerGroupConfig, gpu_bytes: int | None) -> Callable[[Division], bool]:
    """Return a function that tells whether the weights of a division leave room on every GPU. `gpu_bytes`: memory of a
    GPU; None: every division counts as fitting."""
    if gpu_bytes is None:
        return lambda division: True
    from smc.model.parallel import Shard
    from smc.model.weight_map import PLAIN_BYTES, WEIGHT_BYTES, rank_bytes

    room = WEIGHT_SHARE * gpu_bytes

    @cache
    def held(role: ModelRole, degree: int) -> float:
        if not degree:
            return 0.0
        whole = rank_bytes(config.shape(role), Shard(0, degree), {})
        return whole / PLAIN_BYTES * WEIGHT_BYTES.get(config.dtypes[role], PLAIN_BYTES)

    def fits(division: Division) -> bool:
        draft, target = held(ModelRole.DRAFT, division.draft), held(ModelRole.TARGET, division.target)
        return draft + target <= room if division.placement == "shared" else max(draft, target) <= room

    return fits


def estimated_times(config: WorkerGroupConfig, degrees: Degrees) -> DegreeTimes:
    """Estimate the latency models of all degrees from the models' shapes."""
    from smc.calibration.estimate import LINK_SECONDS, OVERHEAD, estimate_latency, estimate_pass
    from smc.model.weight_map import PLAIN_BYTES, WEIGHT_BYTES

    draft, target = (config.shape(role) for role in ModelRole)
    sizes = [WEIGHT_BYTES.get(config.dtypes[role], PLAIN_BYTES) for role in ModelRole]
    return DegreeTimes(
        {degree: estimate_latency(target, draft, (1, degree), (sizes[0], sizes[1])) for degree in degrees.target},
        {degree: estimate_pass(draft, degree, sizes[0]) for degree in degrees.draft},
        OVERHEAD + LINK_SECONDS,
    )


def gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU of this machine, without using a GPU; None if they cannot be read."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return min(int(size) << 20 for size in found)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("nvidia-smi does not say how much memory GPUs have, so it is not looked at: %s", error)
        return None
