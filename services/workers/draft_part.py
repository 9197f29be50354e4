"""Chooses which part of the draft the ranks that hold both models load, where two are possible: all of it, or a part as
of the target. Whole drafts need no sums over ranks; divided ones read fewer weights in a step. Before anything is
loaded, the ranks time a step with either, tell each other the times through the store, and so choose alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from services.link.base import first_line
from services.link.store import GroupStore
from services.workers.memory import is_shortage
from services.workers.spec import ModelSpec, RankSpec
from services.workers.tensor_parallel import TensorParallel, exchange
from smc.calibration.latency import draft_step_seconds
from smc.draft_step import EFFORT, ROWS, free_memory, with_step_engine
from smc.scheduler.engine import Engine
from smc.types import Numerics

NAMES = {True: "divided", False: "whole"}
logger = logging.getLogger(__name__)


def faster_part(spec: RankSpec, parts: Sequence[ModelSpec], group: TensorParallel, store: GroupStore) -> ModelSpec:
    """Return the part with the faster step, on every rank alike; the first one if they are equally fast, or cannot be
    timed. This is a collective of the ranks. The leader logs the choice."""
    seconds = [_step_seconds(spec, part, group, store) for part in parts]
    chosen = parts[seconds.index(min(seconds))]
    if spec.leads:
        shown = ", ".join(
            f"{f'{1e3 * each:.3f} ms' if each < math.inf else 'an unknown time'} {NAMES[part.shard.degree > 1]}"
            for part, each in zip(parts, seconds)
        )
        degree = chosen.shard.degree
        logger.info(
            "draft_tp=%d, the draft is %s on each of %d ranks; a step of %d rows takes %s",
            *(degree, NAMES[degree > 1], spec.place.degree, ROWS, shown),
        )
    return chosen


def _step_seconds(spec: RankSpec, part: ModelSpec, group: TensorParallel, store: GroupStore) -> float:
    """Return the seconds of a draft step at the slowest rank; infinity if it cannot be timed, because a rank has no
    memory for it, the type of weights cannot be divided so, or contexts are too short."""
    name = spec.rendezvous.name(f"{spec.name}/draft_step/{part.shard.degree}")
    place = spec.place
    began = False

    def all_are(error: str) -> bool:
        """Tell the other ranks why this one is not ready, if so. Returns whether all are."""
        errors = list(filter(None, exchange(store, f"{name}/ready", place.rank, place.degree, error)))
        if errors and spec.leads:
            logger.warning("a step of the draft %s is not timed: %s", NAMES[part.shard.degree > 1], errors[0])
        return not errors

    def timed(engine: Engine) -> float | None:
        nonlocal began
        began = True
        return draft_step_seconds(engine, EFFORT) if all_are("") else None

    try:
        own = with_step_engine(
            part.source.config,
            torch.device(spec.device),
            part.dtype,
            timed,
            part.shard,
            group if part.shard.degree > 1 else None,
            Numerics(spec.engine.numerics),
        )
    except Exception as error:
        # Once the ranks have begun, those that go on would wait for this one.
        if began or not (is_shortage(error) or isinstance(error, ValueError)):
            raise
        all_are(first_line(error))
        own = None
    if own is None:
        free_memory(torch.device(spec.device))
    return max(map(float, exchange(store, name, place.rank, place.degree, str(own or math.inf))))
