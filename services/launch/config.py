"""Configuration of a worker group: models, tensor-parallel degrees, link, engine, deadlines. It is checked before Ray
or a model is started; if this machine is the whole cluster, so is the number of its GPUs."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from services.backend import Model, ServingPair
from services.link.base import LINKS
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.limits import AUTO_DTYPE, DTYPE_NAMES
from smc.model.config import GENERATION_CONFIGS, sampling_defaults
from smc.model.parallel import Shard, local_config
from smc.model.source import LOADS, SourcePair, name_dtypes, pair_dtypes
from smc.types import ModelRole

DEVICES = {"cpu": "float32", "cuda": "bfloat16"}
"""Device -> default data type of models on it."""
RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray counts on every host. They are not allowed as custom resources: ranks request their share of them
anyway."""
LONGEST = 1_000_000
"""Longest deadline in seconds: torch and Ray accept neither infinity nor durations that overflow their clocks."""
logger = logging.getLogger(__name__)


class WorkerGroupError(RuntimeError):
    """The worker group did not start, or one of its processes has ended. The message names the process and the
    cause."""

    def __init__(self, message: str, *, fault: bool = False, draft: bool = False) -> None:
        """`fault`: a process raised an error of its own; it was neither killed nor did it merely lose another process.
        `draft`: only the draft is lost, and the other processes can go on."""
        super().__init__(message)
        self.fault, self.draft = fault, draft


@dataclass(frozen=True)
class WorkerGroupConfig:
    """Configuration of the processes that decode. Raises ValueError naming the field, the value and what is allowed."""

    target: Path = demo.TARGET
    """Directory of the target model, which must exist on every host under the same path. Unless `load` is `files`, the
    name of a published shape."""
    draft: Path = demo.DRAFT
    load: str = "files"
    """Where weights come from. `files`: the directories; `random`: random numbers, to measure speed; `grown`: the demo
    pair, padded to published shapes."""
    target_tp: int = 1
    """Tensor-parallel degree of the target: the number of its processes, each with its share of the heads."""
    draft_tp: int = 1
    target_resource: str | None = None
    """Custom Ray resource of the hosts that the target's ranks may run on (`ray start --resources`); None: any host."""
    draft_resource: str | None = None
    """Custom Ray resource of the hosts that the draft's ranks may run on; None: any host."""
    link: str = "nccl"
    """`nccl`: torch.distributed (NCCL between GPUs, gloo elsewhere); `grpc`: gRPC streams, for hosts that gloo does not
    reach."""
    device: str = "cpu"
    """`cpu`, or `cuda`: one GPU for each rank."""
    dtype: str | None = None
    """Data type of both models, one of `smc.api.limits.DTYPE_NAMES`. Default: float32 on a CPU; on a GPU int4 for a
    model that is stored in int4, otherwise bfloat16."""
    target_dtype: str | None = None
    """Data type of the target, if it differs from `dtype`."""
    draft_dtype: str | None = None
    """Data type of the draft, if it differs from `dtype`; `auto`: its own type, fp8 or int4, by measured costs
    (`smc.draft_dtype`)."""
    draft_vocab: int | None = None
    """Number of tokens that the draft proposes by likelihood (`smc.model.draft_vocab`). Default: all."""
    draft_vocab_text: Path | None = None
    """A text in UTF-8 whose most frequent tokens the draft proposes; read where the service is started."""
    generation_config: str = "auto"
    """Defaults of sampling settings that a request leaves out. `auto`: those in the target's generation_config.json;
    `ignore`: those of this library."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    threads: int = 1
    """CPU threads of torch in each rank."""
    near_target: bool = False
    """The coordinator runs on the host of the target's first rank instead of the host of the process that starts it."""
    start_timeout: float = 600.0
    """Seconds within which every rank must have loaded its weights and run its first rounds: one round, and on GPUs
    rounds of every kind."""
    link_timeout: float = 60.0
    """Seconds after which a process that is alive but makes no progress counts as dead; a process that answers no
    probes counts as dead sooner (`services.launch.worker_group.PROBE_SECONDS`). Must exceed the longest prefill chunk
    and the longest round."""
    heartbeat: float = 2.0
    """Seconds between heartbeats while nothing runs."""
    max_failed_starts: int = 5
    """Failed restarts in a row after which the service ends, so that its process manager can act."""
    trace: Path | None = None
    """File to which the coordinator writes a Chrome trace of all rounds when it stops."""

    def __post_init__(self) -> None:
        types: dict[str, tuple[str | None, ...]] = dict.fromkeys(("dtype", "target_dtype"), (None, *DTYPE_NAMES))
        types["draft_dtype"] = (None, *DTYPE_NAMES, AUTO_DTYPE)
        names = {"load": LOADS, "link": LINKS, "device": DEVICES, "generation_config": GENERATION_CONFIGS}
        for name, allowed in {**names, **types}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(filter(None, allowed))}")
        for name in ("threads", "start_timeout", "link_timeout", "heartbeat"):
            if not 0 < getattr(self, name) <= LONGEST:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: above 0, at most {LONGEST}")
        for name in ("target_resource", "draft_resource"):
            value = getattr(self, name)
            if value is not None and (not value.strip() or value in RAY_RESOURCES):
                raise ValueError(
                    f"{name}={value!r}; allowed: a name of `ray start --resources`, none of {', '.join(RAY_RESOURCES)}"
                )
        if not isinstance(self.max_failed_starts, int) or self.max_failed_starts < 1:
            raise ValueError(f"max_failed_starts={self.max_failed_starts!r}; allowed: >= 1")
        if self.heartbeat >= self.link_timeout:
            raise ValueError(
                f"heartbeat={self.heartbeat:g}; allowed: below link_timeout={self.link_timeout:g}, "
                "or an idle process would count as dead"
            )
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise ValueError(f"trace={str(self.trace)!r}: its directory does not exist")

    def degree(self, role: ModelRole) -> int:
        return self.draft_tp if role == ModelRole.DRAFT else self.target_tp

    @property
    def outlives_draft(self) -> bool:
        """Whether the target goes on when the draft is lost, and another draft can join it. This is not so with NCCL
        between GPUs: its kernel that waits for a dead rank never ends, and all later work on the stream waits behind
        it."""
        return self.link == "grpc" or self.device == "cpu"

    @property
    def dtypes(self) -> dict[str, str]:
        """Name of each model's data type, by role; a draft's may be `auto`."""
        directories = (self.target, self.draft)
        return pair_dtypes(self.dtype, self.target_dtype, self.draft_dtype, self.device, directories)

    def resource(self, role: ModelRole) -> str | None:
        return self.draft_resource if role == ModelRole.DRAFT else self.target_resource

    @cached_property
    def sources(self) -> SourcePair:
        """The models to be loaded; nothing is loaded yet. Raises ValueError if they cannot be served."""
        paths = (self.target.absolute(), self.draft.absolute()) if self.load == "files" else (self.target, self.draft)
        sources = SourcePair.of(self.load, *paths, small=(demo.TARGET, demo.DRAFT))
        return sources.with_draft_vocab(self.draft_vocab, self.draft_vocab_text)

    def serving_pair(self) -> ServingPair:
        """Look at both models without loading them. Raises ValueError if they cannot be served this way."""
        sources, models = self.sources, {}
        for role in ModelRole:
            source, degree = sources.of_role(role), self.degree(role)
            try:
                local_config(source.config, Shard(0, degree))
            except ValueError as error:
                raise ValueError(f"{role}_tp={degree}: {error}") from error
            models[role] = Model(source.name, source.config, source.parameters, degree, source.fingerprint())
        return ServingPair(
            **models,
            tokenizer=sources.target.tokenizer(),
            context=self.engine.context(sources.max_context),
            engine=self.engine,
            link=self.link,
            files=(files := sources.target.tokenizer_files),
            sampling=sampling_defaults(files) if files and self.generation_config == "auto" else {},
            dtypes=name_dtypes(self.dtypes),
        )


def check_gpus(config: WorkerGroupConfig, ray_address: str | None, groups: int = 1) -> None:
    """Raise ValueError if this machine is the whole cluster and has fewer GPUs than the ranks of `groups` worker groups
    need. Imports torch for `device=cuda` only."""
    if config.device != "cuda" or ray_address or os.environ.get("RAY_ADDRESS"):
        return
    import torch

    if (count := torch.cuda.device_count()) < groups * (config.target_tp + config.draft_tp):
        why = "" if torch.version.cuda else " (this torch was built without CUDA)"
        times = "" if groups == 1 else f", for each of {groups} worker groups"
        raise ValueError(f"this machine has {_counted(count)}{why}; {_needed(config)}{times}")


def warn_of_few_gpus(config: WorkerGroupConfig) -> None:
    """Log a warning if the cluster that Ray is connected to has too few GPUs. This is no error: hosts may still join
    the cluster, and a start waits for them."""
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
