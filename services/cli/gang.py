"""The options of commands that start the gang, each defined once, and the `GangConfig` they stand for. Imports nothing
heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from services.cli.options import ENGINE, MODELS, option

if TYPE_CHECKING:
    from services.launch.config import GangConfig

CLUSTER = "Cluster"
GANG_FIELDS = (
    *("load", "target_tp", "draft_tp", "target_resource", "draft_resource", "link", "device", "threads"),
    *("dtype", "target_dtype", "draft_dtype", "draft_vocab", "draft_vocab_text"),
    *("start_timeout", "link_timeout", "heartbeat", "max_failed_starts", "trace"),
)
ENGINE_FIELDS = (
    *(
        "form",
        "block",
        "branches",
        "cohorts",
        "max_slots",
        "max_chains",
        "max_context",
        "pages",
        "prefill_chunk",
        "prefill_share",
    ),
    *("max_queue", "max_queue_pages", "drafting"),
)

TargetTp = Annotated[
    int | None,
    option(MODELS, "Processes, and GPUs, that share the target. Default: 1.", "--target-tp", metavar="COUNT"),
]
DraftTp = Annotated[
    int | None, option(MODELS, "Processes, and GPUs, that share the draft. Default: 1.", "--draft-tp", metavar="COUNT")
]

Cohorts = Annotated[
    int | None,
    option(ENGINE, "Sets of requests whose rounds alternate, 1..4. Default: 1, lockstep 2.", metavar="COUNT"),
]
MaxSlots = Annotated[
    int | None,
    option(ENGINE, "Particles of all running requests together. Default: 64.", "--max-slots", metavar="COUNT"),
]
MaxChains = Annotated[
    int | None,
    option(
        ENGINE,
        "Chains of all running requests with verification rejection; 0: none are let in. Default: as many as take 1 GiB at either model.",
        "--max-chains",
        metavar="COUNT",
    ),
]
Pages = Annotated[
    int | None,
    option(
        ENGINE,
        "Token positions in the KV pool of each model. Default: what a GPU holds; on a CPU 512 a slot.",
        metavar="COUNT",
    ),
]
PrefillChunk = Annotated[
    int | None,
    option(
        ENGINE,
        "Prompt tokens run between two rounds at most. Default: 128, on GPUs 4096.",
        "--prefill-chunk",
        metavar="TOKENS",
    ),
]
PrefillShare = Annotated[
    float | None,
    option(
        ENGINE,
        "Most time that prompts take beside rounds, as a share of the rounds'. Default: 0.4 on GPUs, on a CPU whatever they take.",
        "--prefill-share",
        metavar="SHARE",
    ),
]
Drafting = Annotated[
    str | None,
    option(
        ENGINE,
        "For exact decoding: as much as its cost pays for, or always all of the tree; answers are the same. Default: costs.",
        "--drafting",
        metavar="costs|always",
    ),
]
MaxQueuePages = Annotated[
    int | None,
    option(
        ENGINE, "KV pages that waiting requests may ask for. Default: any number.", "--max-queue-pages", metavar="COUNT"
    ),
]
Threads = Annotated[int | None, option(ENGINE, "CPU threads of torch in each process. Default: 1.", metavar="COUNT")]

RayAddress = Annotated[
    str | None,
    option(
        CLUSTER,
        "Cluster to run on. Default: the one in RAY_ADDRESS, else one started here and ended again.",
        "--ray-address",
        metavar="ADDRESS",
    ),
]
TargetResource = Annotated[
    str | None,
    option(
        CLUSTER,
        "Ray resource of the hosts that may hold the target. Default: any host.",
        "--target-resource",
        metavar="NAME",
    ),
]
DraftResource = Annotated[
    str | None,
    option(
        CLUSTER,
        "Ray resource of the hosts that may hold the draft. Default: any host.",
        "--draft-resource",
        metavar="NAME",
    ),
]
Link = Annotated[
    str | None,
    option(
        CLUSTER,
        "nccl: torch.distributed, with gloo on CPUs; grpc: for hosts that it does not connect. Default: nccl.",
        metavar="nccl|grpc",
    ),
]
StartTimeout = Annotated[
    float | None,
    option(CLUSTER, "Until every process must be ready. Default: 600.", "--start-timeout", metavar="SECONDS"),
]
LinkTimeout = Annotated[
    float | None,
    option(
        CLUSTER,
        "After which a process that lives but does no work counts as dead. Default: 60.",
        "--link-timeout",
        metavar="SECONDS",
    ),
]
Heartbeat = Annotated[
    float | None, option(CLUSTER, "Between signs of life while nothing runs. Default: 2.", metavar="SECONDS")
]
MaxFailedStarts = Annotated[
    int | None,
    option(
        CLUSTER,
        "Failed attempts in a row to start the processes again before the service ends. Default: 5.",
        metavar="COUNT",
    ),
]
Trace = Annotated[Path | None, option(CLUSTER, "Write a Chrome trace of all rounds at the end.", metavar="FILE")]


def gang_config(given: dict[str, Any]) -> GangConfig:
    """The gang that these options describe. Options of other kinds, and those that are None, are passed over.

    Only what was given is passed on: the service knows its own defaults. Raises ValueError for what cannot be.
    """
    from services.launch.config import GangConfig
    from smc.api.engine_config import GPU_PREFILL, EngineConfig
    from smc.loading import pair_places

    given = {name: value for name, value in given.items() if value is not None}
    if given.get("load") in ("random", "grown") and not (given.get("target") and given.get("draft")):
        raise ValueError(f"--load {given['load']} needs --target and --draft, each the name of a published shape")
    target, draft = pair_places(given.get("target"), given.get("draft"))
    # In lockstep one model waits for the other; two cohorts let both work. In look-ahead form both work already.
    cohorts = 2 if given.get("form") == "lockstep" else 1
    settings: dict[str, Any] = {"cohorts": cohorts, "prefix_cache": not given.get("no_prefix_cache", False)}
    if given.get("device") == "cuda":
        settings |= GPU_PREFILL
    engine = EngineConfig(**settings | {name: given[name] for name in ENGINE_FIELDS if name in given})
    return GangConfig(
        target=target, draft=draft, engine=engine, **{name: given[name] for name in GANG_FIELDS if name in given}
    )
