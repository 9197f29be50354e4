"""Whether there is a GPU for every rank, found before Ray or a model is started where this machine decides it."""

from __future__ import annotations

import logging
import os

from services.launch.config import WorkerGroupConfig

logger = logging.getLogger(__name__)


def check_gpus(config: WorkerGroupConfig, ray_address: str | None, groups: int = 1) -> None:
    """Raises ValueError if this machine is the whole cluster and has fewer GPUs than ranks of so many worker groups.
    Imports torch for `device=cuda` only."""
    if config.device != "cuda" or ray_address or os.environ.get("RAY_ADDRESS"):
        return
    import torch

    if (count := torch.cuda.device_count()) < groups * (config.target_tp + config.draft_tp):
        why = "" if torch.version.cuda else " (this torch was built without CUDA)"
        times = "" if groups == 1 else f", for each of {groups} worker groups"
        raise ValueError(f"this machine has {_counted(count)}{why}; {_needed(config)}{times}")


def warn_of_few_gpus(config: WorkerGroupConfig) -> None:
    """Of a cluster that Ray is connected to: hosts may still join it, so a start waits for them."""
    if config.device != "cuda":
        return
    import ray

    if (count := int(ray.cluster_resources().get("GPU", 0))) < config.target_tp + config.draft_tp:
        waits = f"waiting for hosts to join, at most {config.start_timeout:g} s"
        logger.warning("the cluster has %s; %s; %s", _counted(count), _needed(config), waits)


def _counted(count: int) -> str:
    return f"{count or 'no'} GPU{'' if count == 1 else 's'}"


def _needed(config: WorkerGroupConfig) -> str:
    target, draft = config.target_tp, config.draft_tp
    return f"--device cuda needs {target + draft}: --target-tp {target} and --draft-tp {draft}, one for each process"
