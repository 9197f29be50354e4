"""The options of `serve` and `batch`, each defined once: keys of the configuration file, and most of them flags, too.
Imports nothing heavy, so that `--help` is immediate.

Each field of a record below is an option. Its value goes to the field of the same name in a configuration class
(`WorkerGroupConfig`, `GatewayConfig`, `EngineConfig`), which has the default and the check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import options
from services.cli.options import ENGINE, FILE_ONLY, MODELS, option

if TYPE_CHECKING:
    from services.gateway.config import GatewayConfig
    from services.launch.config import WorkerGroupConfig

CLUSTER, LISTEN, SECURITY, BATCH = "Cluster", "Where it listens", "Security and limits", "Batch"
CONFIGURATION = "Configuration"
MAX_QUEUE = 256
"""Default number of requests that may wait in a service."""

TargetTp = Annotated[
    int | None,
    option(MODELS, "Processes, and GPUs, that share the target. Default: 1.", "--target-tp", metavar="COUNT"),
]
DraftTp = Annotated[
    int | None, option(MODELS, "Processes, and GPUs, that share the draft. Default: 1.", "--draft-tp", metavar="COUNT")
]


@dataclass(frozen=True, kw_only=True)
class WorkerGroupOptions:
    """Options of every command that starts a worker group. Options that were not given are None."""

    target: options.Target = None
    draft: options.Draft = None
    target_tp: TargetTp = None
    draft_tp: DraftTp = None
    device: Annotated[str | None, option(MODELS, "Device that runs both models. Default: cpu.", metavar="cpu|cuda")] = (
        None
    )
    dtype: options.Dtype = None
    target_dtype: options.TargetDtype = None
    draft_dtype: options.DraftDtype = None
    draft_vocab: options.DraftVocab = None
    draft_vocab_text: options.DraftVocabText = None
    generation_config: options.GenerationConfig = None

    form: options.Form = None
    block: options.Block = None
    branches: options.Branches = None
    cohorts: Annotated[
        int | None,
        option(ENGINE, "Sets of requests whose rounds alternate, 1 to 4. Default: 1, with form lockstep 2."),
        FILE_ONLY,
    ] = None
    max_slots: Annotated[
        int | None,
        option(ENGINE, "Particles of all running requests together. Default: 64.", "--max-slots", metavar="COUNT"),
    ] = None
    max_chains: Annotated[
        int | None,
        option(
            ENGINE,
            "Draft chains of all running requests with verification rejection; 0 refuses such requests. Default: as "
            "many as take 1 GiB of memory at either model.",
        ),
        FILE_ONLY,
    ] = None
    max_context: options.MaxContext = None
    pages: Annotated[
        int | None,
        option(
            ENGINE,
            "Token positions in the KV pool of each model. Default: what fits on the GPU; on a CPU 512 for each slot.",
            metavar="COUNT",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        option(ENGINE, "Prompt tokens that are run between two rounds at most. Default: 128, on GPUs 4096."),
        FILE_ONLY,
    ] = None
    prefill_share: Annotated[
        float | None,
        option(
            ENGINE,
            "Most time that prompts take beside rounds, as a share of the rounds' time. Default: 0.4 on GPUs, on a CPU "
            "no limit.",
        ),
        FILE_ONLY,
    ] = None
    drafting: Annotated[
        str | None,
        option(
            ENGINE,
            "How much is drafted for exact decoding: `costs`, as much as measured costs justify, or `always`, the "
            "whole tree that the request asks for. Answers are the same. Default: costs.",
        ),
        FILE_ONLY,
    ] = None
    no_prefix_cache: options.NoPrefixCache = None
    potentials: Annotated[
        dict[str, str] | None,
        option(ENGINE, "Callables that requests may name as their potential, as module:function by name."),
        FILE_ONLY,
    ] = None
    potential_timeout: Annotated[
        float | None,
        option(ENGINE, "Seconds that a potential may take each time it is asked about a request. Default: 10."),
        FILE_ONLY,
    ] = None
    threads: Annotated[int | None, option(ENGINE, "CPU threads of torch in each process. Default: 1."), FILE_ONLY] = (
        None
    )

    ray_address: Annotated[
        str | None,
        option(
            CLUSTER,
            "Cluster to run on. Default: the one in RAY_ADDRESS, else one started here and stopped at the end.",
            "--ray-address",
            metavar="ADDRESS",
        ),
    ] = None
    target_resource: Annotated[
        str | None,
        option(
            CLUSTER,
            "Ray resource of the hosts that may run the target. Default: any host.",
            "--target-resource",
            metavar="NAME",
        ),
    ] = None
    draft_resource: Annotated[
        str | None,
        option(
            CLUSTER,
            "Ray resource of the hosts that may run the draft. Default: any host.",
            "--draft-resource",
            metavar="NAME",
        ),
    ] = None
    link: Annotated[
        str | None,
        option(
            CLUSTER,
            "nccl: torch.distributed, with gloo on CPUs; grpc: for hosts that it does not connect. Default: nccl.",
            metavar="nccl|grpc",
        ),
    ] = None
    start_timeout: Annotated[
        float | None,
        option(
            CLUSTER, "Seconds until every process must be ready. Default: 600.", "--start-timeout", metavar="SECONDS"
        ),
    ] = None
    link_timeout: Annotated[
        float | None,
        option(
            CLUSTER,
            "Seconds after which a process that is alive but makes no progress counts as dead. Default: 60.",
        ),
        FILE_ONLY,
    ] = None
    heartbeat: Annotated[
        float | None,
        option(CLUSTER, "Seconds between two messages of an idle process that say it is alive. Default: 2."),
        FILE_ONLY,
    ] = None
    max_failed_starts: Annotated[
        int | None,
        option(CLUSTER, "Failed restarts of the processes in a row after which the service ends. Default: 5."),
        FILE_ONLY,
    ] = None
    trace: Annotated[Path | None, option(CLUSTER, "Write a Chrome trace of all rounds at the end.", metavar="FILE")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(WorkerGroupOptions):
    """Options of `smcserve serve`."""

    config: Annotated[
        Path | None,
        option(
            CONFIGURATION,
            "YAML file of options by their names; flags override it. --print-config lists all of them.",
            "--config",
            metavar="FILE",
        ),
    ] = None
    print_config: Annotated[
        bool,
        option(
            CONFIGURATION,
            "Print the configuration that would be served, as a file for --config, and exit.",
            "--print-config",
            show_default=False,
            metavar="",
        ),
    ] = False

    host: Annotated[
        str | None, option(LISTEN, "Address. Default: 127.0.0.1; 0.0.0.0 = every network.", metavar="HOST")
    ] = None
    port: Annotated[int | None, option(LISTEN, "Of gRPC. Default: 50051; 0 = any free one.", metavar="PORT")] = None
    http_port: Annotated[
        int | None,
        option(
            LISTEN, "Of OpenAI's and Anthropic's API. Default: 8000; 0 = any free one.", "--http-port", metavar="PORT"
        ),
    ] = None
    no_http: Annotated[
        bool | None,
        option(LISTEN, "Serve gRPC alone, without --http-port.", "--no-http", show_default=False, metavar=""),
    ] = None
    metrics_port: Annotated[
        int | None,
        option(LISTEN, "Of the metrics for Prometheus; 0 = any free one. Default: none.", metavar="PORT"),
    ] = None
    served_model_names: Annotated[
        list[str] | None,
        option(
            LISTEN,
            "Name of the target for clients and metrics; may be repeated. Default: the name of its directory.",
            "--served-model-name",
            metavar="NAME",
        ),
    ] = None
    allow_origins: Annotated[
        list[str] | None,
        option(
            LISTEN,
            "Origin of web pages that may use --http-port, such as https://app.example.com; * = any; may be repeated. "
            "Default: none.",
            "--allow-origin",
            metavar="ORIGIN",
        ),
    ] = None
    no_page: Annotated[
        bool | None,
        option(
            LISTEN,
            "Serve no web page at / of --http-port; otherwise people try the models there.",
            "--no-page",
            show_default=False,
            metavar="",
        ),
    ] = None
    log_texts: Annotated[
        bool | None,
        option(
            LISTEN,
            "Write prompts and answers to the log, as `smcserve distill --from-log` reads them. Default: no texts.",
            show_default=False,
            metavar="",
        ),
        FILE_ONLY,
    ] = None
    unknown_fields: Annotated[
        str | None,
        option(
            LISTEN,
            "Fields of a request to --http-port that the API does not have: refuse, or ignore, which logs each once. "
            "Default: refuse.",
            "--unknown-fields",
            metavar="WHAT",
        ),
    ] = None
    default_method: Annotated[
        str | None,
        option(
            LISTEN,
            "Method of requests that name none: smc, exact, target or draft. Default: smc, at temperature 0 exact.",
            "--default-method",
            metavar="METHOD",
        ),
    ] = None

    max_queue: Annotated[
        int | None,
        option(ENGINE, f"Requests that may wait. Default: {MAX_QUEUE}.", "--max-queue", metavar="COUNT"),
    ] = None
    max_queue_pages: Annotated[
        int | None,
        option(ENGINE, "KV pages that waiting requests may ask for together. Default: no limit."),
        FILE_ONLY,
    ] = None

    tls_cert: Annotated[Path | None, option(SECURITY, "Certificate chain, PEM; with --tls-key.", metavar="FILE")] = None
    tls_key: Annotated[Path | None, option(SECURITY, "Private key of --tls-cert, PEM.", metavar="FILE")] = None
    tls_client_ca: Annotated[
        Path | None, option(SECURITY, "Only clients with a certificate of these authorities.", metavar="FILE")
    ] = None
    auth_token_file: Annotated[
        Path | None, option(SECURITY, "Bearer tokens that callers must send one of, one a line.", metavar="FILE")
    ] = None
    max_message_bytes: Annotated[
        int | None,
        option(SECURITY, "Bytes of the largest request. Default: as the context needs, at most 4 MiB."),
        FILE_ONLY,
    ] = None
    max_concurrent_streams: Annotated[
        int | None, option(SECURITY, "Calls at a time on one connection. Default: 1024."), FILE_ONLY
    ] = None
    max_calls: Annotated[
        int | None,
        option(SECURITY, "Generate calls at a time, over all connections. Default: 1024.", metavar="COUNT"),
    ] = None
    keepalive_time: Annotated[
        float | None, option(SECURITY, "Seconds of silence after which a client is pinged. Default: 60."), FILE_ONLY
    ] = None
    keepalive_timeout: Annotated[
        float | None,
        option(SECURITY, "Seconds in which a client must answer a ping, or its calls are cancelled. Default: 20."),
        FILE_ONLY,
    ] = None
    min_ping_interval: Annotated[
        float | None,
        option(SECURITY, "Seconds between pings of a client; one that pings more often is disconnected. Default: 10."),
        FILE_ONLY,
    ] = None
    max_connection_age: Annotated[
        float | None, option(SECURITY, "Seconds after which a client has to reconnect. Default: 900."), FILE_ONLY
    ] = None
    max_connection_age_grace: Annotated[
        float | None,
        option(SECURITY, "Seconds for calls in flight on a connection of that age. Default: 3600."),
        FILE_ONLY,
    ] = None
    write_timeout: Annotated[
        float | None,
        option(SECURITY, "Seconds for a client to send its request, and to read its answer. Default: 30."),
        FILE_ONLY,
    ] = None
    drain_timeout: Annotated[
        float | None,
        option(
            SECURITY,
            "Seconds for calls in flight once the service is told to stop. Default: 30.",
            "--drain-timeout",
            metavar="SECONDS",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BatchOptions(WorkerGroupOptions):
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
            help="Answers: a file in the order of IN; or DIRECTORY/, s3://.. or gs://.., with a file for each part of "
            "IN. What is there is resumed.",
            metavar="OUT",
        ),
    ]
    config: Annotated[
        Path | None,
        option(
            CONFIGURATION,
            "YAML file of options by their names, as for `smcserve serve`; flags override it.",
            "--config",
            metavar="FILE",
        ),
    ] = None
    overwrite: Annotated[
        bool | None,
        option(BATCH, "Start from the beginning, whatever OUT holds.", "--overwrite", show_default=False, metavar=""),
    ] = None
    retry_failed: Annotated[
        bool | None,
        option(
            BATCH,
            "Decode lines again that have no answer in OUT; answers stay as they are.",
            "--retry-failed",
            show_default=False,
            metavar="",
        ),
    ] = None
    gangs: Annotated[
        int | None,
        option(
            BATCH,
            "Worker groups, each with both models. Default: 1 if OUT is a file, else as many as fit.",
            metavar="COUNT",
        ),
    ] = None
    part_lines: Annotated[
        int | None,
        option(
            BATCH,
            "Most lines of a part, the unit of resuming in a directory. Default: 1000, beyond 10,000 parts more.",
            "--part-lines",
            metavar="COUNT",
        ),
    ] = None
    output_format: Annotated[
        str | None,
        option(
            BATCH,
            "Of the files in a directory. Default: that of IN.",
            "--output-format",
            metavar="jsonl|parquet",
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        option(LISTEN, "Of the metrics for Prometheus; 0 = any free one. Default: none.", metavar="PORT"),
    ] = None
    host: Annotated[str | None, option(LISTEN, "Address of --metrics-port. Default: 127.0.0.1.", metavar="HOST")] = None
    seed: Annotated[
        int | None,
        option(
            BATCH,
            "With the custom_id, makes the seed of a line that has none of its own. Default: 0.",
            metavar="SEED",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        option(
            BATCH,
            "Requests in flight in a worker group. Default: as many as fill the slots.",
            "--concurrency",
            "-c",
            metavar="COUNT",
        ),
    ] = None


def worker_group_config(given: Mapping[str, Any]) -> WorkerGroupConfig:
    """Return the configuration of the worker group that these options describe. Ignores options of other kinds, and
    those that are None.

    Only given options are passed on: the configuration classes have the defaults. Raises ValueError for invalid ones.
    """
    from services.launch.config import WorkerGroupConfig
    from smc.api.engine_config import GPU_PREFILL, EngineConfig
    from smc.loading import pair_directories

    given = {name: value for name, value in given.items() if value is not None}
    if given.get("load") in ("random", "grown") and not (given.get("target") and given.get("draft")):
        raise ValueError(f"--load {given['load']} needs --target and --draft, each the name of a published shape")
    target, draft = pair_directories(given.get("target"), given.get("draft"))
    # In lockstep one model waits for the other; with two micro-batches both work. In look-ahead both work anyway.
    cohorts = 2 if given.get("form") == "lockstep" else 1
    settings: dict[str, Any] = {"cohorts": cohorts, "prefix_cache": not given.get("no_prefix_cache", False)}
    if given.get("device") == "cuda":
        settings |= GPU_PREFILL
    engine = EngineConfig(**settings | _fields_of(EngineConfig, given))
    if engine.potentials:
        options.load_own(engine.potentials)
    return WorkerGroupConfig(
        **_fields_of(WorkerGroupConfig, given) | {"target": target, "draft": draft, "engine": engine}
    )


def gateway_config(given: Mapping[str, Any]) -> GatewayConfig:
    """Return the configuration of the gateway that these options describe, like `worker_group_config`."""
    from services.gateway.config import DEFAULT_HTTP_PORT, GatewayConfig

    http_port = given.get("http_port")
    if given.get("no_http"):
        if http_port is not None:
            raise ValueError(f"http_port={http_port} is given with no_http; leave one out")
    elif http_port is None:
        http_port = DEFAULT_HTTP_PORT
    settings = _fields_of(GatewayConfig, given) | {"http_port": http_port}
    return GatewayConfig(page=not given.get("no_page", False), **settings)


def effective(group: WorkerGroupConfig, gateway: GatewayConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of `serve` with the value in use; None: it is decided once the models are known."""
    engine = group.engine
    values: dict[str, Any] = {"no_prefix_cache": not engine.prefix_cache, "no_page": not gateway.page}
    values["no_http"] = gateway.http_port is None
    for part in (engine, group, gateway):
        values |= {one.name: getattr(part, one.name) for one in fields(part)}
    values["potentials"] = dict(engine.potentials)
    return {name: values[name] if name in values else given.get(name) for name in options.keys_of(ServeOptions)}


def _fields_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: given[one.name] for one in fields(kind) if given.get(one.name) is not None}
