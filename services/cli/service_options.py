"""The options of `serve` and `batch`: keys of the configuration file, and most of them flags, too. Imports nothing
heavy, so that `--help` is immediate.

The fields of the configuration classes (`WorkerGroupConfig`, `EngineConfig`, `GatewayConfig`, `BatchConfig`) declare
nearly all of them, with default, check and help; the records below add what belongs to a command alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.batch.config import BatchConfig
from services.cli import options
from services.cli.options import flag, option
from services.gateway.config import DEFAULT_HTTP_PORT, GatewayConfig
from services.launch.config import WorkerGroupConfig
from smc.api.engine_config import GPU_PREFILL, EngineConfig
from smc.api.settings import CLUSTER, LISTEN, MODELS

if TYPE_CHECKING:
    from services.launch.division_choice import DivisionChoice

CONFIGURATION = "Configuration"
DIVIDED = (
    *("placement", "form", "draft_tp", "target_tp", "worker_groups", "block", "smc_block", "branches", "trace"),
    "max_queue",
)
"""Options that have no effect on the weights that are divided among GPUs, and whose checks need a division."""

RayAddress = Annotated[
    str | None,
    option(
        CLUSTER,
        "Address of the Ray cluster to run on. Default: RAY_ADDRESS, otherwise a cluster that is started here and "
        "stopped at the end.",
        metavar="ADDRESS",
    ),
]
Gpus = Annotated[
    int | None,
    option(
        MODELS,
        "Divide this many GPUs of one machine so that --concurrency requests are decoded fastest: as `bench --advise` "
        "measured it, or else by the models' shapes. Chooses --placement, --form, --draft-tp, --target-tp and "
        "--worker-groups, and when measured --block and --branches; those that are given are kept.",
        metavar="COUNT",
    ),
]
Concurrency = Annotated[
    int | None,
    option(MODELS, "Number of concurrent requests for which --gpus are divided. Default: 8.", metavar="COUNT"),
]


@options.with_fields_of(WorkerGroupConfig, EngineConfig, GatewayConfig)
@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `smcserve serve`."""

    gpus: Gpus = None
    concurrency: Concurrency = None
    ray_address: RayAddress = None
    no_http: Annotated[bool | None, flag(LISTEN, "Serve only gRPC, and no --http-port.", "--no-http")] = None
    config: Annotated[
        Path | None,
        option(
            CONFIGURATION,
            "YAML file whose keys are names of options; flags override it. --print-config lists all options.",
            metavar="FILE",
        ),
    ] = None
    print_config: Annotated[
        bool,
        flag(
            CONFIGURATION,
            "Print the configuration that would be served, as a file for --config, and exit.",
            "--print-config",
        ),
    ] = False


@options.with_fields_of(WorkerGroupConfig, EngineConfig, BatchConfig)
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of `smcserve batch`."""

    input: Annotated[
        str,
        typer.Argument(
            help="Requests in the shape of OpenAI's batches: a JSONL file; or a directory, s3://.. or gs://.. of JSONL "
            "or Parquet files.",
            metavar="IN",
        ),
    ]
    output: Annotated[
        str,
        typer.Argument(
            help="Answers: a file in the order of IN; or DIRECTORY/, s3://.. or gs://.., with a file for each "
            "part of IN. If OUT exists, the run that wrote it is resumed.",
            metavar="OUT",
        ),
    ]
    ray_address: RayAddress = None
    config: Annotated[
        Path | None,
        option(
            CONFIGURATION,
            "YAML file whose keys are names of options, as for `smcserve serve`; flags override it.",
            metavar="FILE",
        ),
    ] = None


def worker_group_config(given: Mapping[str, Any]) -> WorkerGroupConfig:
    """Return the configuration of the worker group that these options describe. Ignores options of other kinds, and
    those that are None.

    Only given options are passed on: the configuration classes have the defaults. Raises ValueError for invalid ones.
    """
    from smc.loading import pair_directories

    if given.get("load") in ("random", "grown") and not (given.get("target") and given.get("draft")):
        raise ValueError(f"--load {given['load']} needs --target and --draft, each the name of a published shape")
    target, draft = pair_directories(given.get("target"), given.get("draft"))
    is_shared = given.get("placement") == "shared"
    # In lockstep one model waits for the other; with two micro-batches both work. In look-ahead both work anyway, and
    # in one process only one does.
    micro_batches = 2 if given.get("form") == "lockstep" and not is_shared else 1
    settings: dict[str, Any] = {"micro_batches": micro_batches}
    if is_shared:
        settings["form"] = "lockstep"
    if given.get("device") == "cuda":
        settings |= GPU_PREFILL
    engine = EngineConfig(**settings | fields_of(EngineConfig, given))
    if engine.potentials:
        options.load_own(engine.potentials)
    return WorkerGroupConfig(
        **fields_of(WorkerGroupConfig, given) | {"target": target, "draft": draft, "engine": engine}
    )


def divided(given: Mapping[str, Any]) -> tuple[dict[str, Any], DivisionChoice | None]:
    """Return the given options of `serve` with those of the division of `gpus`, and the division; without `gpus` only
    the options. Raises ValueError for options that contradict each other."""
    gpus, requests = given.get("gpus"), given.get("concurrency")
    if gpus is None:
        if requests is not None:
            raise ValueError(f"concurrency={requests} has no effect without gpus; leave it out")
        return {**given}, None
    for name, value in (("gpus", gpus), ("concurrency", requests)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}; allowed: >= 1")
    if given.get("device") != "cuda":
        raise ValueError(f"gpus={gpus} has no effect with device={given.get('device') or 'cpu'!r}; give device='cuda'")
    from services.launch.config import AUTO
    from services.launch.division_choice import DEFAULT_REQUESTS, choose_division, gpu_memory

    pair = worker_group_config({name: value for name, value in given.items() if name not in DIVIDED})
    if given.get("trace") is not None:
        given = {"worker_groups": 1, **given}
    choice = choose_division(pair, gpus, requests or DEFAULT_REQUESTS, given, gpu_memory())
    chosen = {name: value for name, value in choice.options().items() if given.get(name) in (None, AUTO)}
    return {**given, **chosen, "gpus": None, "concurrency": None}, choice


def placed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options of `serve` or `batch`, with the placement that is used if none is given."""
    from services.launch.config import default_placement

    return {**given, "placement": given.get("placement") or default_placement(given)}


def gateway_config(given: Mapping[str, Any]) -> GatewayConfig:
    """Return the configuration of the gateway that these options describe, like `worker_group_config`."""
    http_port = given.get("http_port")
    if given.get("no_http"):
        if http_port is not None:
            raise ValueError(f"http_port={http_port} is given with no_http; leave one out")
    elif http_port is None:
        http_port = DEFAULT_HTTP_PORT
    return GatewayConfig(**fields_of(GatewayConfig, given) | {"http_port": http_port})


def effective(group: WorkerGroupConfig, gateway: GatewayConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of `serve` with the value in use; None: it is decided once the models are known."""
    values: dict[str, Any] = {"no_http": gateway.http_port is None}
    for part in (group.engine, group, gateway):
        for one in fields(part):
            name, value = options.option_name(type(part), one.name), getattr(part, one.name)
            values[name] = value if name == one.name else not value
    values["potentials"] = dict(group.engine.potentials)
    return {name: values[name] if name in values else given.get(name) for name in options.keys_of(ServeOptions)}


def fields_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of the fields of a configuration class; those that are None are left out."""
    found = {}
    for one in fields(kind):
        name = options.option_name(kind, one.name)
        if given.get(name) is not None:
            found[one.name] = given[name] if name == one.name else not given[name]
    return found
