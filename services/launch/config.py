"""Configuration of a worker group: models, tensor-parallel degrees, link, engine, deadlines. It is checked before Ray
or a model is started; if this machine is the whole cluster, so is the number of its GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from services.link.base import LINKS, SHARED
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.limits import AUTO_DTYPE, DTYPE_NAMES, LOADS
from smc.api.settings import (
    CLUSTER,
    ENGINE,
    MODELS,
    CountOr,
    Holds,
    OneOf,
    above_zero,
    at_least,
    check_settings,
    setting,
)
from smc.model.config import GENERATION_CONFIGS, ModelConfig, sampling_defaults
from smc.types import ModelRole, Numerics

if TYPE_CHECKING:
    from services.backend import ServingPair
    from smc.model.source import SourcePair

DEVICES = {"cpu": "float32", "cuda": "bfloat16"}
"""Device -> default data type of models on it."""
RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray counts on every host. They are not allowed as custom resources: ranks request their share of them
anyway."""
RESOURCE = Holds(
    lambda name: bool(name.strip()) and name not in RAY_RESOURCES,
    f"a name of `ray start --resources`, none of {', '.join(RAY_RESOURCES)}",
)
PLACEMENTS = ("apart", "shared")
AUTO = "auto"
"""As many worker groups as the cluster has room for."""
LONGEST = 1_000_000
"""Longest deadline in seconds: torch and Ray accept neither infinity nor durations that overflow their clocks."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankGroup:
    """The processes of a worker group among which models are divided: the ranks of one model, or of both."""

    name: str
    """`draft`, `target` or `shared`."""
    degrees: Mapping[ModelRole, int]
    """Number of ranks among which each model is divided. If it is 1, every rank has the whole model."""
    resource: str | None
    """Ray resource of the hosts that may run these ranks; None: any host."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return max(self.degrees.values())


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

    PANEL: ClassVar[str] = MODELS

    target: Path = setting(
        demo.TARGET,
        None,
        "Target model: a directory, or ORG/NAME or ORG/NAME@REVISION on the Hugging Face hub; needs --draft. "
        "Default: the demo pair.",
        "MODEL",
    )
    """A directory must exist on every host under the same path. Unless `load` is `files`, the name of a published
    shape."""
    draft: Path = setting(
        demo.DRAFT,
        None,
        "Draft model: a directory or a name, like --target; needs --target. Default: the demo pair.",
        "MODEL",
    )
    load: str = setting("files", OneOf(LOADS))
    """Where weights come from. `files`: the directories; `random`: random numbers, to measure speed; `grown`: the demo
    pair, padded to published shapes."""
    target_tp: int = setting(1, None, "Number of processes, and of GPUs, that share the target.", "COUNT")
    """Each has its share of the heads. The model's shape decides which numbers are allowed."""
    draft_tp: int | None = setting(
        None,
        None,
        "Number of processes, and of GPUs, that share the draft. Default: 1; with placement shared and --target-tp "
        "above 1, 1 or as --target-tp, whichever makes a draft step faster, which is timed at the start (1 with "
        "--numerics invariant).",
        "COUNT",
    )
    """None only where it is chosen at the start."""
    placement: str = setting(
        "apart",
        OneOf(PLACEMENTS),
        "apart: each model has processes of its own. shared: every process has its share of both models, which "
        "work in turn (form lockstep). Default: apart; shared if this machine has too few GPUs for that.",
        "apart|shared",
    )
    worker_groups: int | str = setting(
        1,
        CountOr(AUTO),
        "Number of worker groups, each with both models, that share the requests. auto: as many as the cluster's "
        "free GPUs allow; on CPUs 1, in `batch` as many as fit. Default: 1; in `batch` auto if OUT is a directory.",
        "COUNT|auto",
    )
    """All other settings are those of each worker group."""
    device: str = setting(
        "cpu", OneOf(tuple(DEVICES)), "Device that runs both models; cuda: one GPU for each process.", "cpu|cuda"
    )
    dtype: str | None = setting(
        None,
        OneOf(DTYPE_NAMES),
        "Data type of both models: float32, bfloat16, float16, fp8 or int4. Default: float32 on a CPU, bfloat16 "
        "(int4 if stored so) on a GPU.",
        "TYPE",
    )
    target_dtype: str | None = setting(
        None,
        OneOf(DTYPE_NAMES),
        "Data type of the target. fp8: its matrices are FP8, with a scale for each output; int4: the matrices of "
        "its layers are int4, as stored or in groups of 128. All other weights are bfloat16. Default: as --dtype.",
        "TYPE",
    )
    draft_dtype: str | None = setting(
        None,
        OneOf((*DTYPE_NAMES, AUTO_DTYPE)),
        "Data type of the draft. auto: its stored type, fp8 or int4, chosen by the time of a step on the GPU. "
        "Default: as --dtype.",
        "TYPE",
    )
    draft_vocab: int | None = setting(
        None,
        None,
        "Draft only the N tokens that are most frequent in --draft-vocab-text, or in the text that `distill` "
        "trained the draft on. Default: all tokens.",
        "N",
    )
    draft_vocab_text: Path | None = setting(
        None,
        None,
        "UTF-8 text, similar to the expected answers, in which tokens are counted for --draft-vocab.",
        "FILE",
    )
    """It is read where the service is started."""
    generation_config: str = setting(
        "auto",
        OneOf(GENERATION_CONFIGS),
        "Source of sampling settings that a request leaves out. auto: the target's generation_config.json; ignore: "
        "the library's defaults.",
        "auto|ignore",
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    threads: int = setting(
        1, above_zero(LONGEST), "Number of CPU threads of torch in each process.", panel=ENGINE, has_flag=False
    )
    target_resource: str | None = setting(
        None, RESOURCE, "Ray resource of the hosts that may run the target. Default: any host.", "NAME", panel=CLUSTER
    )
    draft_resource: str | None = setting(
        None, RESOURCE, "Ray resource of the hosts that may run the draft. Default: any host.", "NAME", panel=CLUSTER
    )
    link: str = setting(
        "nccl",
        OneOf(LINKS),
        "Link between the models' processes. nccl: torch.distributed, with gloo on CPUs; grpc: for hosts that "
        "torch.distributed does not connect.",
        "nccl|grpc",
        panel=CLUSTER,
    )
    near_target: bool = False
    """The coordinator runs on the host of the target's first rank instead of the host of the process that starts it."""
    start_timeout: float = setting(
        600.0, above_zero(LONGEST), "Seconds within which every process must be ready.", "SECONDS", panel=CLUSTER
    )
    """A process is ready when it has loaded its weights and run its first rounds: one round, and on GPUs rounds of
    every kind."""
    link_timeout: float = setting(
        60.0,
        above_zero(LONGEST),
        "Seconds after which a process that is alive but makes no progress counts as dead.",
        panel=CLUSTER,
        has_flag=False,
    )
    """It must exceed the longest prefill chunk and the longest round. A process that answers no probes counts as dead
    sooner (`services.launch.worker_group.PROBE_SECONDS`)."""
    heartbeat: float = setting(
        2.0,
        above_zero(LONGEST),
        "Seconds between two messages by which an idle process shows that it is alive.",
        panel=CLUSTER,
        has_flag=False,
    )
    max_failed_starts: int = setting(
        5,
        at_least(1),
        "Failed restarts of the processes in a row after which the service ends, so that its process manager can act.",
        panel=CLUSTER,
        has_flag=False,
    )
    trace: Path | None = setting(
        None, None, "Write a Chrome trace of all rounds to this file at the end.", "FILE", panel=CLUSTER
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.engine.check_numerics(self.device, self.dtype)
        if self.draft_tp is None and (self.placement == "apart" or self.target_tp == 1):
            object.__setattr__(self, "draft_tp", 1)
        if self.placement == "shared":
            self._check_shared()
        if self.heartbeat >= self.link_timeout:
            raise ValueError(
                f"heartbeat={self.heartbeat:g}; allowed: below link_timeout={self.link_timeout:g}, "
                "or an idle process would count as dead"
            )
        if self.engine.max_queue is not None and self.least_groups > self.engine.max_queue:
            raise ValueError(
                f"max_queue={self.engine.max_queue} with worker_groups={self.worker_groups}; allowed: at least "
                f"{self.worker_groups}, one waiting request for each worker group"
            )
        if self.trace is not None and self.worker_groups != 1:
            raise ValueError(
                f"trace is given with worker_groups={self.worker_groups!r}; allowed: worker_groups 1, or no trace"
            )
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise ValueError(f"trace={str(self.trace)!r}: its directory does not exist")

    def _check_shared(self) -> None:
        """Raise ValueError for settings that processes with both models cannot have."""
        if self.engine.lookahead:
            raise ValueError(
                "form='lookahead' with placement='shared'; allowed: form lockstep, because one process cannot run both "
                "models at a time, or placement apart"
            )
        if self.draft_tp not in (None, 1, self.target_tp):
            raise ValueError(
                f"draft_tp={self.draft_tp} with placement='shared' and target_tp={self.target_tp}; allowed: "
                f"{self.target_tp}, or 1 (every process has the whole draft)"
            )
        if self.draft_resource is not None:
            raise ValueError(
                f"draft_resource={self.draft_resource!r} has no effect with placement='shared'; give target_resource"
            )

    def degree(self, role: ModelRole) -> int:
        """Return the number of ranks among which a model is divided; 1 for a draft if they may choose another one."""
        if role == ModelRole.TARGET:
            return self.target_tp
        return 1 if self.draft_tp is None else self.draft_tp

    @cached_property
    def may_divide_draft(self) -> bool:
        """Whether the ranks choose at the start if the draft is whole on each of them, or divided like the target. With
        `numerics` invariant it is whole: answers of SMC would depend on times, which differ from start to start."""
        from smc.model.parallel import can_be_divided

        if self.draft_tp is not None or self.engine.numerics == Numerics.INVARIANT:
            return False
        return can_be_divided(self.shape(ModelRole.DRAFT), self.target_tp)

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        """All ranks, in groups that start together."""
        draft, target = ({role: self.degree(role)} for role in ModelRole)
        if self.placement == "shared":
            return (RankGroup(SHARED, draft | target, self.target_resource),)
        return (
            RankGroup(ModelRole.DRAFT, draft, self.draft_resource),
            RankGroup(ModelRole.TARGET, target, self.target_resource),
        )

    @property
    def least_groups(self) -> int:
        """Number of worker groups; 1 if it depends on the cluster."""
        return self.worker_groups if isinstance(self.worker_groups, int) else 1

    @property
    def ranks(self) -> int:
        """Number of processes of a worker group that hold models, and of GPUs if they use GPUs."""
        return sum(group.size for group in self.rank_groups)

    def ranks_of(self, role: ModelRole) -> RankGroup:
        """Return the ranks that hold a model."""
        return next(group for group in self.rank_groups if role in group.degrees)

    @property
    def outlives_draft(self) -> bool:
        """Whether the target goes on when the draft is lost, and another draft can join it. This is not so if the lost
        processes held both models, nor with NCCL between GPUs: its kernel that waits for a dead rank never ends, and
        all later work on the stream waits behind it."""
        return self.placement == "apart" and (self.link == "grpc" or self.device == "cpu")

    @property
    def dtypes(self) -> dict[str, str]:
        """Name of each model's data type, by role; a draft's may be `auto`."""
        from smc.model.source import pair_dtypes

        directories = (self.target, self.draft)
        return pair_dtypes(self.dtype, self.target_dtype, self.draft_dtype, self.device, directories)

    @cached_property
    def sources(self) -> SourcePair:
        """The models to be loaded; nothing is loaded yet. Raises ValueError if they cannot be served."""
        from smc.model.source import SourcePair

        paths = (self.target.absolute(), self.draft.absolute()) if self.load == "files" else (self.target, self.draft)
        sources = SourcePair.of(self.load, *paths, small=(demo.TARGET, demo.DRAFT))
        return sources.with_draft_vocab(self.draft_vocab, self.draft_vocab_text)

    def shape(self, role: ModelRole) -> ModelConfig:
        """Return the shape in which the ranks hold a model. Raises ValueError if their device cannot run it."""
        return self.sources.of_role(role).config.on_device(self.device)

    def serving_pair(self) -> ServingPair:
        """Look at both models without loading them. Raises ValueError if they cannot be served this way."""
        from services.backend import CHOSEN_AT_START, Model, ServingPair
        from smc.model.parallel import Shard, local_config
        from smc.model.source import name_dtypes

        sources, models = self.sources, {}
        context = self.engine.context(sources.max_context)
        self.engine.check_pages(context)
        for role in ModelRole:
            source, degree = sources.of_role(role), self.degree(role)
            try:
                shape = self.shape(role)
            except ValueError as error:
                raise ValueError(f"{role}: {error}") from error
            try:
                local_config(shape, Shard(0, degree))
            except ValueError as error:
                raise ValueError(f"{role}_tp={degree}: {error}") from error
            is_chosen = role == ModelRole.DRAFT and self.may_divide_draft
            ranks = CHOSEN_AT_START if is_chosen else degree
            models[role] = Model(source.name, source.config, source.parameters, ranks, source.fingerprint())
        return ServingPair(
            **models,
            tokenizer=sources.target.tokenizer(),
            context=context,
            engine=self.engine.on_device(self.device),
            link=self.link,
            placement=self.placement,
            files=(files := sources.target.tokenizer_files),
            sampling=sampling_defaults(files) if files and self.generation_config == "auto" else {},
            dtypes=name_dtypes(self.dtypes),
        )


def default_placement(given: Mapping[str, Any]) -> str:
    """Return the placement for these options of a command, which name none: `shared` if this machine is the whole
    cluster and its GPUs suffice for it, but not for `apart`. Imports torch for `device=cuda` only."""
    if given.get("device") != "cuda" or given.get("form") == "lookahead" or _joins_cluster(given.get("ray_address")):
        return "apart"
    target, draft, groups = given.get("target_tp", 1), given.get("draft_tp", 1), given.get("worker_groups", 1)
    groups = int(groups) if str(groups).isdecimal() else 1
    import torch

    suffices = draft in (1, target) and groups * target <= torch.cuda.device_count() < groups * (target + draft)
    return "shared" if suffices else "apart"


def _joins_cluster(ray_address: str | None) -> bool:
    return bool(ray_address or os.environ.get("RAY_ADDRESS"))


def check_gpus(config: WorkerGroupConfig, ray_address: str | None) -> None:
    """Raise ValueError if this machine is the whole cluster and has fewer GPUs than the ranks of all worker groups
    need. Imports torch for `device=cuda` only."""
    if config.device != "cuda" or _joins_cluster(ray_address):
        return
    import torch

    if (count := torch.cuda.device_count()) < config.least_groups * config.ranks:
        why = "" if torch.version.cuda else " (this torch was built without CUDA)"
        times = "" if config.least_groups == 1 else f", for each of {config.least_groups} worker groups"
        fewer = f"; --worker-groups {count // config.ranks} fits" if count >= config.ranks else ""
        if config.placement == "apart" and config.degree(ModelRole.DRAFT) in (1, config.target_tp):
            fewer = f"; --placement shared needs {config.least_groups * config.target_tp}"
        raise ValueError(f"this machine has {_counted(count)}{why}; {_needed(config)}{times}{fewer}")


def warn_of_few_gpus(config: WorkerGroupConfig) -> None:
    """Log a warning if the cluster that Ray is connected to has too few GPUs. This is no error: hosts may still join
    the cluster, and a start waits for them."""
    if config.device != "cuda":
        return
    import ray

    if (count := int(ray.cluster_resources().get("GPU", 0))) < config.least_groups * config.ranks:
        waits = f"waiting for hosts to join, at most {config.start_timeout:g} s"
        times = "" if config.least_groups == 1 else f", for each of {config.least_groups} worker groups"
        logger.warning("the cluster has %s; %s%s; %s", _counted(count), _needed(config), times, waits)


def count_worker_groups(config: WorkerGroupConfig, on_cpus: Callable[[], int] = lambda: 1) -> int:
    """Return the number of worker groups. `auto` is as many as the free resources of the cluster that Ray is connected
    to allow, at least 1 even if that one has to wait for hosts; `on_cpus` returns the number without GPUs."""
    if isinstance(config.worker_groups, int):
        return config.worker_groups
    return on_cpus() if config.device == "cpu" else groups_that_fit(config)


def groups_that_fit(config: WorkerGroupConfig) -> int:
    """Return the number of worker groups that the free resources of the cluster allow; at least 1."""
    from services.launch import cluster

    gpus = config.device == "cuda"
    return max(1, cluster.count_that_fit([(group.size, gpus, group.resource) for group in config.rank_groups]))


def _counted(count: int) -> str:
    return f"{count or 'no'} GPU{'' if count == 1 else 's'}"


def _needed(config: WorkerGroupConfig) -> str:
    target, draft = config.target_tp, config.degree(ModelRole.DRAFT)
    if config.placement == "shared":
        return f"--device cuda with --placement shared needs {config.ranks}: --target-tp {target}, one for each process"
    return f"--device cuda needs {target + draft}: --target-tp {target} and --draft-tp {draft}, one for each process"
