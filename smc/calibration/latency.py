"""Calibration of the latency model (`smc.scheduler.speculation`): measures the time of a draft step and of a target
pass on the devices of an engine, before it accepts requests.

Dummy rounds that draft and verify whole blocks are timed. Every dummy request reads its own pages, spread over the
pool, whatever they contain, because reading one page for all requests would take a different time. All write to the
dummy page, so that no cached keys and values change. Every size is timed after a short context, and one size after a
long context, too: the difference is the cost of reading. A real request shows the remaining time of a round.

Commands that run once keep latency models in files (`cached_latency`): the first use on a machine measures a pair of
models, later uses read the result. A file is valid for one pair, with its present files, one setting of the engine and
one machine. It is in `$XDG_CACHE_HOME/smcserve/latency`, by default `~/.cache/smcserve/latency`, and may be deleted at
any time.

Local axes: Y groups in use."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.calibration.warm_up import REPEATS, padding_plan
from smc.model.decoder import Decoder
from smc.once import warn_once
from smc.round.plan import Contexts, RoundPlan, SequenceHandoff
from smc.scheduler.engine import Engine
from smc.scheduler.methods import RULES_OF_ROUNDS
from smc.scheduler.planner import DraftSize, bucket
from smc.scheduler.round_overhead import busy_seconds
from smc.scheduler.speculation import PARTS, LatencyCurve, LatencyModel, ModelLatency
from smc.stops import START
from smc.types import Decoding, ModelRole

SHORT_CONTEXT = 64
"""Context of a timed row, in tokens, except where reading is timed; shorter if there is no room for it."""
TREE = 8
"""Maximum number of rows of a timed tree."""
LIKELY_GROWTH = 2
"""Factor by which the next size is expected to take longer than the previous one."""
ENGINE_KEY = ("form", "block", "branches", "max_slots", "numerics", "drafting", "redrafting")
"""Settings of the engine on which a latency model depends."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Effort:
    """Amount of timing. The smallest sizes are always timed."""

    seconds: float
    """Budget of timed rounds: a larger size is not begun if it is likely to exceed the budget."""
    factor: int
    """Factor between consecutive sizes."""
    repeats: int
    """Timed rounds of each size; their median counts."""
    untimed: int
    """Untimed rounds of each size before the timed ones."""
    crowd: int
    """Requests with which reading is timed, if there are enough slots: fewer requests read too little to be
    measured."""
    context: int
    """Tokens that each of these requests reads, if there is room for them."""


BRIEF = Effort(0.4, 8, 2, 0, 4, 256)
"""For engines that compile nothing and must start quickly."""
ONCE = Effort(10.0, 8, 2, 0, 4, 256)
"""For latency models that are stored. The budget allows several sizes even for a slow model: extrapolated from a single
size, its time would grow in proportion to the rows, and trees would look too expensive."""
STEADY = Effort(10.0, 2, 5, 1, 32, 1024)
"""For engines that compile nothing and have time."""
THOROUGH = Effort(20.0, 2, 5, REPEATS, 64, 1024)
"""For engines that capture graphs."""


def room_for(context: int, block: int) -> int:
    """Return the positions of a sequence that is timed after `context` tokens."""
    return context + 3 * block + 4


def measure_latency(engine: Engine, effort: Effort) -> LatencyModel | None:
    """Measure the latency model of an idle engine. Returns None if its contexts are too short for a timed round."""
    assert engine.idle, "requests are running"
    long = min(effort.context, engine.context - room_for(0, engine.config.block))
    if long < 2:
        return None
    timer, short = Timer(engine, effort), min(SHORT_CONTEXT, long // 2)
    samples, read = timer.samples(short), timer.reading(short, long)
    return LatencyModel(
        **{name: _cost(samples[name], read[name]) for name in PARTS},
        round_overhead=_overhead(engine, effort),
        redraft_overhead=timer.redrafting(short),
    )


def draft_step_seconds(engine: Engine, effort: Effort) -> float | None:
    """Return the seconds of a draft step of an idle engine, with as many rows as it has slots, at most `TREE`. The
    number of rounds does not depend on the time that they take: ranks that share a model run equally many. Returns None
    if contexts are too short for a timed round."""
    context = min(effort.context, engine.context - room_for(0, engine.config.block))
    return Timer(engine, effort).draft_step(context) if context > 0 else None


@dataclass(frozen=True)
class LatencySample:
    size: int
    seconds: float
    context: int
    """Context tokens that were read, summed over requests."""


def _cost(samples: list[LatencySample], read: float) -> ModelLatency:
    """Return the latency of a part, with `read` seconds per token of context. At most half of a sample's time counts as
    reading, in case something else slowed down long contexts."""
    return ModelLatency(
        LatencyCurve.through(
            (each.size, max(each.seconds - read * each.context, each.seconds / 2)) for each in samples
        ),
        read,
    )


class Timer:
    """Times rounds of an idle engine."""

    def __init__(self, engine: Engine, effort: Effort) -> None:
        self._engine, self._effort = engine, effort
        self._spent = 0.0
        """Seconds that timed rounds of the curves have taken so far."""

    def samples(self, context: int) -> dict[str, list[LatencySample]]:
        """Time every part of the latency model after `context` tokens, in all sizes for which there is time."""
        found: dict[str, list[LatencySample]] = {name: [] for name in PARTS}
        config = self._engine.config
        for count in _sizes(config.max_slots, self._effort.factor):
            before = self._spent
            for decoding in (Decoding.WALK, Decoding.TARGET, Decoding.DRAFT):
                # The draft alone is timed with one row only.
                if decoding is Decoding.DRAFT and count > 1:
                    continue
                # A model alone makes many passes in a round, so fewer rounds are timed.
                tree, repeats = (
                    (TREE, self._effort.repeats) if decoding is Decoding.WALK else (1, -(-self._effort.repeats // 2))
                )
                for role, seconds in self._time(decoding, repeats, count, context, tree).items():
                    self._spent += sum(seconds)
                    name, size = _part(decoding, ModelRole(role), config, count)
                    step = statistics.median(seconds) / _steps(name, config)
                    found[name].append(LatencySample(size, step, -(-count // tree) * context))
            if self._spent + LIKELY_GROWTH * (self._spent - before) > self._effort.seconds:
                break
        return found

    def reading(self, short: int, long: int) -> dict[str, float]:
        """Return the seconds per token of context for every part, timed with many requests of one row each."""
        if self._spent > self._effort.seconds:
            # No time is left to measure it.
            return dict.fromkeys(PARTS, 0.0)
        config = self._engine.config
        count = min(self._effort.crowd, config.max_slots)
        found: dict[str, list[float]] = {name: [] for name in PARTS}
        for decoding, context in product((Decoding.WALK, Decoding.TARGET), (short, long)):
            for role, seconds in self._time(decoding, self._effort.repeats, count, context, 1).items():
                name, _ = _part(decoding, ModelRole(role), config, count)
                # Only the difference of the two contexts counts, so outliers must not enter: the minimum is taken.
                found[name].append(min(seconds) / _steps(name, config))
        return {name: max(0.0, after - before) / (count * (long - short)) for name, (before, after) in found.items()}

    def redrafting(self, context: int) -> float:
        """Return the seconds that a round takes longer for each step that could draft again, if no request has
        missed: 0 if none ever does."""
        config = self._engine.config
        count, steps = min(TREE, config.max_slots), max(config.redraft_levels, default=0)
        # A request with one row has missed.
        if not steps or count == 1:
            return 0.0
        seconds = self._time(Decoding.WALK, self._effort.repeats, count, context, TREE, steps)["redraft"]
        return statistics.median(seconds) / steps

    def draft_step(self, context: int) -> float:
        """Return the median seconds of a draft step in rounds of one tree."""
        config, count = self._engine.config, min(TREE, self._engine.config.max_slots)
        seconds = self._time(Decoding.WALK, self._effort.repeats, count, context, TREE)[ModelRole.DRAFT]
        return statistics.median(seconds) / _steps(ModelRole.DRAFT, config)

    def _time(
        self, decoding: Decoding, repeats: int, count: int, context: int, tree: int, redrafted: int = 0
    ) -> dict[str, list[float]]:
        """Return the seconds that each model worked in each timed round; those of `redraft` with `redrafted` steps that
        may draft again."""
        engine, untimed = self._engine, self._effort.untimed
        found: dict[str, list[float]] = {role: [] for role in (*decoding.roles, *["redraft"] * (redrafted > 0))}
        plan = live_plan(decoding, engine.config, count, context, tree, redrafted)
        for number in range(untimed + repeats):
            for model, group in handoffs(decoding, engine, count, context, tree).items():
                engine.executor.join(model, group)
            pending = engine.executor.round(plan)
            pending.result()
            spans = pending.spans()
            for name in (name for name in found if number >= untimed):
                begin, end = spans[name]
                found[name].append(1e-9 * (end - begin))
        return found


def _sizes(most: int, factor: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * factor < most:
        sizes.append(sizes[-1] * factor)
    return sizes if most == 1 else [*sizes, most]


def _part(decoding: Decoding, role: ModelRole, config: EngineConfig, count: int) -> tuple[str, int]:
    """Return the part of the latency model, and its size in a round of `count` rows."""
    if decoding is Decoding.TARGET:
        return "alone", count
    if role == ModelRole.TARGET:
        return role, count * config.target_tokens
    return role, count * (config.branches if decoding is Decoding.WALK else 1)


def _steps(part: str, config: EngineConfig) -> int:
    """Return the number of steps or passes of a part in one timed round."""
    return 1 if part == "target" else config.block


def live_plan(
    decoding: Decoding, config: EngineConfig, count: int, context: int, tree: int, redrafted: int = 0
) -> RoundPlan[np.ndarray]:
    """Return the plan of a round of the first `count` slots after `context` tokens, in trees of at most `tree` rows;
    callers pass 1 where one model decodes alone. `redrafted`: number of steps that may draft again."""
    batch_size, columns = bucket(count), room_for(context, config.block)
    shape = RULES_OF_ROUNDS[decoding.roles].shape(config)
    first_Y = np.arange(0, count, tree, dtype=np.int32)
    contexts = Contexts.of(columns, count, len(first_Y))
    size = DraftSize(shape.branches, None, redrafted=redrafted)
    plan = padding_plan(frozenset({decoding}), shape, batch_size, config.max_slots, contexts, size=size)
    sizes_Y = np.minimum(tree, count - first_Y)
    index_A = np.arange(batch_size)

    def of_groups(values_Y: np.ndarray | int) -> np.ndarray:
        values_G = np.zeros(batch_size, dtype=np.int32)
        values_G[: len(first_Y)] = values_Y
        return values_G

    arrays = plan.arrays._replace(
        slot_A=np.where(index_A < count, index_A, config.max_slots),
        group_A=np.where(index_A < count, index_A // tree, batch_size - 1),
        particle_A=index_A % tree,
        seed_A=index_A // tree,
        first_G=of_groups(first_Y),
        size_G=of_groups(sizes_Y),
        count_G=of_groups(sizes_Y),
        next_count_G=of_groups(sizes_Y),
        shared_G=of_groups(context),
        decoding_G=of_groups(int(decoding)),
    )
    return replace(plan, columns=columns, arrays=arrays)


def handoffs(
    decoding: Decoding, engine: Engine, count: int, context: int, tree: int
) -> dict[ModelRole, SequenceHandoff]:
    """Return, for each model that works, the state of the first `count` slots when such a round begins: in look-ahead
    with a whole block to score."""
    config = engine.config
    block = config.block if decoding is Decoding.WALK and config.lookahead else 1
    pending = {ModelRole.DRAFT: 1, ModelRole.TARGET: block}
    tokens_NQ = np.arange(count * block, dtype=np.int32).reshape(count, block) % 2
    request_N1 = np.arange(count)[:, None] // tree
    return {
        role: SequenceHandoff(
            slots_N=np.arange(count, dtype=np.int32),
            pages_RL=_pages(request_N1, context + block - pending[role], engine.memory.capacity[role]),
            base=context,
            limit=engine.context,
            least=0,
            end_N=np.full(count, context + block, dtype=np.int32),
            pending_NQ=tokens_NQ[:, -pending[role] :],
            pending_N=np.full(count, pending[role], dtype=np.int32),
            logq_NQ=np.zeros((count, pending[role]), dtype=np.float32),
            ended_N=np.zeros(count, dtype=bool),
            alive_N=np.ones(count, dtype=bool),
            text_N=np.full(count, START, dtype=np.int32),
            logw_N=np.zeros(count),
            stops=0,
            machine=None,
        )
        for role in decoding.roles
    }


def _pages(request_N1: np.ndarray, length: int, capacity: int) -> np.ndarray:
    """Return the pages that each row's request reads, [N, length]: different pages for each request, as long as the
    pool has enough."""
    return (1 + (request_N1 * length + np.arange(length)) % capacity).astype(np.int32)


def _overhead(engine: Engine, effort: Effort) -> float:
    """Measure the seconds of a round besides the models' work (`busy_seconds`): the lower quartile over rounds of one
    request, because other work on the host can only make it longer."""
    config, rounds = engine.config, engine.rounds_of(Decoding.WALK)
    # The first round is the only one in flight, so it does not show the work that runs beside a round; it is left out.
    rounds_needed = 1 + effort.untimed + effort.repeats
    most = min((rounds_needed + 1) * config.target_tokens, engine.context - 4)
    params = SamplingParams(
        method=Method.EXACT, particles=min(2, config.max_slots), seed=0, ignore_eos=True, max_tokens=most
    )
    engine.submit(Request("timing", tuple(i % engine.tokenizer.size for i in range(4)), params))
    found: list[float] = []
    read = rounds.last
    while not engine.idle and len(found) < rounds_needed:
        begin = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begin
        if rounds.last is not None and rounds.last is not read:
            read = rounds.last
            found.append(max(0.0, whole - busy_seconds([read.spans()], together=config.lookahead)))
    engine.abort("timing")
    engine.step()
    engine.check_books()
    engine.forget()
    timed = sorted(found[1 + effort.untimed :] or found)
    return timed[len(timed) // 4]


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "smcserve" / "latency"


def cached_latency(key: Mapping[str, object], measure: Callable[[], LatencyModel | None]) -> LatencyModel | None:
    """Return the latency model of a `cost_key`: the stored one, or one that is measured now and stored. An unreadable
    file is replaced; a failure to write is logged."""
    path = cache_directory() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"
    if (stored := _stored(path)) is not None:
        return stored
    begin = time.monotonic()
    latency = measure()
    logger.info("timed the models in %.1f s: %s", time.monotonic() - begin, latency)
    if latency is not None:
        _store(path, {"key": key, "latency": json.loads(latency.to_json())})
    return latency


def _stored(path: Path) -> LatencyModel | None:
    if not path.exists():
        return None
    try:
        return LatencyModel.from_json(json.dumps(json.loads(path.read_text())["latency"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        warn_once(logger, "cannot read %s, so the models are timed again: %s", path, error)
        return None


def _store(path: Path, content: dict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process reads either the whole file or no file.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        warn_once(logger, "the latency model cannot be stored, and will be measured again at the next start: %s", error)


def latency_key(
    models: Mapping[ModelRole, Decoder], directories: Sequence[Path], draft_columns: int | None, config: EngineConfig
) -> dict[str, object]:
    """Return everything on which a latency model depends: the models, loaded from these directories, the number of
    columns of the draft's head unless it has all, and the engine that is timed."""
    weights = [models[role].embed.weight for role in ModelRole]
    return {
        "version": version("smcserve"),
        "torch": torch.__version__,
        "machine": [platform.node(), platform.processor() or platform.machine(), os.cpu_count()],
        "devices": [device_name(weight.device) for weight in weights],
        "threads": torch.get_num_threads(),
        "models": [_files(directory) for directory in directories],
        "dtypes": [sorted({str(tensor.dtype) for tensor in models[role].state_dict().values()}) for role in ModelRole],
        "draft_columns": draft_columns,
        "engine": [getattr(config, name) for name in ENGINE_KEY],
    }


def device_name(device: torch.device) -> str:
    """Return the model name of a GPU; for other devices their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _files(directory: Path) -> list[object]:
    """Return names, sizes and modification times of a model's files."""
    found = sorted(path for path in directory.resolve().iterdir() if path.is_file())
    return [str(directory.resolve()), *([path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in found)]
