"""Chooses the type that a draft is loaded in with `--draft-dtype auto`: its own, FP8 or int4, by the time of a draft
step in each.

On a GPU, a step is measured once with random weights of the draft's shape, and the times are cached in files
(`smc.calibration.latency`). A narrower type makes steps cheaper and proposals slightly worse; it changes no answer of
exact decoding. It is chosen if a step gains more time than the narrower type is expected to lose (`LOSS`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version

import torch

from smc.api.limits import AUTO_DTYPE
from smc.calibration.latency import cached_latency, device_name, measure_latency
from smc.draft_step import BLOCK, EFFORT, ROWS, with_step_engine
from smc.model.config import ModelConfig, default_dtype
from smc.model.linear import require_fp8
from smc.model.parallel import WHOLE, Shard, local_config
from smc.model.source import ModelSource
from smc.model.weight_map import int4_formats, weight_slices
from smc.scheduler.speculation import LatencyModel

logger = logging.getLogger(__name__)

LOSS = {"fp8": 0.05, "int4": 0.25}
"""Minimum gain, as a share of a step, for which a narrower type is chosen, because fewer drafted tokens are accepted:
the share of tokens that a lockstep round loses, divided by the share of its time that the draft's steps take, one half.
On a real pair, int4 loses an eighth of a round's tokens and FP8 about a hundredth (benchmarks/notes/drafts.md)."""


def draft_dtype(source: ModelSource, device: torch.device | str, dtype: str, shard: Shard = WHOLE) -> str:
    """Return `dtype`, or for `auto` the type chosen for a draft, or one rank's shard of it, on a device. Logs the
    choice."""
    if dtype != AUTO_DTYPE:
        return dtype
    device = torch.device(device)
    own = default_dtype(source.directory, device.type) if source.kind == "files" else default_dtype("", device.type)
    if device.type == "cpu":
        logger.info("draft-dtype auto: %s, because a CPU converts all types to it", own)
        return own
    seconds = step_seconds(source.config, device, own, shard, may_be_int4=source.kind != "grown")
    chosen = choose(own, seconds)
    shown = ", ".join(f"{1e3 * each:.3f} ms in {name}" for name, each in seconds.items()) or "unknown (no memory)"
    logger.info(
        "draft-dtype auto: %s; a step of %d rows takes %s; a narrower type must gain %s",
        chosen,
        ROWS,
        shown,
        ", ".join(f"{share:.0%} ({name})" for name, share in LOSS.items()),
    )
    return chosen


def choose(own: str, seconds: Mapping[str, float]) -> str:
    """Return the type with the cheapest step; a step in a type other than the checkpoint's own is taken to cost more by
    `LOSS`."""
    latency = {name: each / (1 - (0.0 if name == own else LOSS[name])) for name, each in seconds.items()}
    return min(latency, key=latency.__getitem__, default=own)


def step_seconds(
    config: ModelConfig, device: torch.device, own: str, shard: Shard = WHOLE, *, may_be_int4: bool = True
) -> dict[str, float]:
    """Return the seconds of a draft step in each type that the device and the shape support, the checkpoint's own
    first. Empty if there is no memory for measuring."""
    config, found = config.on_device(device), {}
    for dtype in dict.fromkeys((own, *LOSS)):
        if dtype != own and not (dtype == "fp8" or may_be_int4):
            continue
        try:
            if dtype == "fp8":
                require_fp8(device)
            elif dtype == "int4" and own != "int4":
                int4_formats(weight_slices(config, shard), shard)
        except ValueError:  # not supported
            continue
        try:
            latency = _latency(local_config(config, shard), device, dtype)
        except torch.OutOfMemoryError:
            return {}
        if latency is None:
            return {}
        found[dtype] = latency.draft.curve.at(ROWS)
    return found


def _latency(config: ModelConfig, device: torch.device, dtype: str) -> LatencyModel | None:
    """Latency model of a pair in which the draft is both models. Sums over ranks are not timed, because all types need
    them alike."""
    key = {
        "version": version("smcserve"),
        "torch": torch.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "draft": asdict(config),
        "dtype": dtype,
        "step": [ROWS, BLOCK],
    }
    return cached_latency(key, lambda: _measured(config, device, dtype))


def _measured(config: ModelConfig, device: torch.device, dtype: str) -> LatencyModel | None:
    return with_step_engine(config, device, dtype, lambda engine: measure_latency(engine, EFFORT))
