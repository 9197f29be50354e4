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
from services.cli.options import ENGINE, FILE_ONLY, MODELS, flag, option

if TYPE_CHECKING:
    from services.gateway.config import GatewayConfig
    from services.launch.config import WorkerGroupConfig

CLUSTER, LISTEN, SECURITY, BATCH = "Cluster", "Network and APIs", "Security and limits", "Batch"
CONFIGURATION = "Configuration"
MAX_QUEUE = 256
"""Default number of requests that may wait in a service."""

TargetTp = Annotated[
    int | None, option(MODELS, "Number of processes, and of GPUs, that share the target. Default: 1.", metavar="COUNT")
]
DraftTp = Annotated[
    int | None, option(MODELS, "Number of processes, and of GPUs, that share the draft. Default: 1.", metavar="COUNT")
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
        option(ENGINE, "Number of micro-batches whose rounds alternate, 1..4. Default: 1, with form lockstep 2."),
        FILE_ONLY,
    ] = None
    max_slots: Annotated[
        int | None,
        option(ENGINE, "Slots for the particles of all running requests together. Default: 64.", metavar="COUNT"),
    ] = None
    max_chains: Annotated[
        int | None,
        option(
            ENGINE,
            "Maximum number of draft chains of all running requests with verification rejection; 0 "
            "refuses such requests. Default: as many as take 1 GiB of memory at either model.",
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
        option(ENGINE, "Maximum number of prompt tokens that run between two rounds. Default: 128, on GPUs 4096."),
        FILE_ONLY,
    ] = None
    prefill_share: Annotated[
        float | None,
        option(
            ENGINE,
            "Maximum time spent on prompts, as a share of the time spent on rounds. Default: 0.4 on "
            "GPUs, no limit on a CPU.",
        ),
        FILE_ONLY,
    ] = None
    drafting: Annotated[
        str | None,
        option(
            ENGINE,
            "Tree size in exact decoding. costs: the size that pays by the measured costs; always: the "
            "size that the request asks for. Answers are the same. Default: costs.",
        ),
        FILE_ONLY,
    ] = None
    no_prefix_cache: options.NoPrefixCache = None
    logprobs_mode: Annotated[
        str | None,
        option(
            ENGINE,
            "Distribution of reported log-probabilities. raw: the softmax of the target's logits; processed: the "
            "distribution that tokens are drawn from, after temperature, truncation, biases, penalties, constraints "
            "and guidance. Answers are the same. Default: raw.",
        ),
        FILE_ONLY,
    ] = None
    potentials: Annotated[
        dict[str, str] | None,
        option(
            ENGINE,
            "Potentials that requests may name: a mapping from names to callables, each given as module:function.",
        ),
        FILE_ONLY,
    ] = None
    potential_timeout: Annotated[
        float | None,
        option(ENGINE, "Maximum seconds of one call of a potential; then its request fails. Default: 10."),
        FILE_ONLY,
    ] = None
    threads: Annotated[
        int | None, option(ENGINE, "Number of CPU threads of torch in each process. Default: 1."), FILE_ONLY
    ] = None

    ray_address: Annotated[
        str | None,
        option(
            CLUSTER,
            "Address of the Ray cluster to run on. Default: RAY_ADDRESS, otherwise a cluster that is "
            "started here and stopped at the end.",
            metavar="ADDRESS",
        ),
    ] = None
    target_resource: Annotated[
        str | None,
        option(CLUSTER, "Ray resource of the hosts that may run the target. Default: any host.", metavar="NAME"),
    ] = None
    draft_resource: Annotated[
        str | None,
        option(CLUSTER, "Ray resource of the hosts that may run the draft. Default: any host.", metavar="NAME"),
    ] = None
    link: Annotated[
        str | None,
        option(
            CLUSTER,
            "Link between the models' processes. nccl: torch.distributed, with gloo on CPUs; grpc: for "
            "hosts that torch.distributed does not connect. Default: nccl.",
            metavar="nccl|grpc",
        ),
    ] = None
    start_timeout: Annotated[
        float | None,
        option(CLUSTER, "Seconds within which every process must be ready. Default: 600.", metavar="SECONDS"),
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
        option(CLUSTER, "Seconds between two messages by which an idle process shows that it is alive. Default: 2."),
        FILE_ONLY,
    ] = None
    max_failed_starts: Annotated[
        int | None,
        option(CLUSTER, "Failed restarts of the processes in a row after which the service ends. Default: 5."),
        FILE_ONLY,
    ] = None
    trace: Annotated[
        Path | None, option(CLUSTER, "Write a Chrome trace of all rounds to this file at the end.", metavar="FILE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(WorkerGroupOptions):
    """Options of `smcserve serve`."""

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

    host: Annotated[
        str | None, option(LISTEN, "Address to listen on; 0.0.0.0 = all networks. Default: 127.0.0.1.", metavar="HOST")
    ] = None
    port: Annotated[
        int | None, option(LISTEN, "Port of the gRPC API; 0 = any free port. Default: 50051.", metavar="PORT")
    ] = None
    http_port: Annotated[
        int | None,
        option(LISTEN, "Port of the APIs of OpenAI and Anthropic; 0 = any free port. Default: 8000.", metavar="PORT"),
    ] = None
    no_http: Annotated[bool | None, flag(LISTEN, "Serve only gRPC, and no --http-port.", "--no-http")] = None
    metrics_port: Annotated[
        int | None,
        option(LISTEN, "Port of the metrics for Prometheus; 0 = any free port. Default: no such port.", metavar="PORT"),
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
    allowed_hosts: Annotated[
        list[str] | None,
        option(
            LISTEN,
            "Further host name by which HTTP requests may call the service; * = any; may be repeated. Default: without "
            "tokens on 127.0.0.1 the names of this machine's loopback interface, otherwise any.",
            "--allowed-host",
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
        bool | None, flag(LISTEN, "Do not serve the web page for trying the models at / of --http-port.", "--no-page")
    ] = None
    log_format: Annotated[
        str | None,
        option(
            LISTEN,
            "Format of the log. json: each line is an object, also of what other processes log. Default: text.",
            metavar="text|json",
        ),
    ] = None
    log_texts: Annotated[
        bool | None,
        option(
            LISTEN,
            "Write prompts and answers to the log, from which `smcserve distill --from-log` reads "
            "prompts. Default: no texts.",
            metavar="",
        ),
        FILE_ONLY,
    ] = None
    unknown_fields: Annotated[
        str | None,
        option(
            LISTEN,
            "Treatment of request fields that the HTTP API does not have. refuse: the request is "
            "refused; ignore: the field is ignored, and logged once. Default: refuse.",
            metavar="WHAT",
        ),
    ] = None
    default_method: Annotated[
        str | None,
        option(
            LISTEN,
            "Method of requests that name none: smc, exact, target or draft. Default: smc, at temperature 0 exact.",
            metavar="METHOD",
        ),
    ] = None

    default_max_tokens: Annotated[
        int | None,
        option(
            LISTEN,
            "Maximum tokens of a chat's answer if its request gives no max_tokens; also in vLLM's protocol. "
            "Default: 8192, less if the context leaves less.",
            metavar="COUNT",
        ),
    ] = None
    min_priority: Annotated[
        int | None,
        option(
            LISTEN,
            "Lowest `priority` that callers may give, -1000000..0; requests with lower numbers are admitted first. "
            "Default: 0, so that no caller passes others.",
        ),
        FILE_ONLY,
    ] = None
    max_priority: Annotated[
        int | None,
        option(
            LISTEN,
            "Highest `priority` that callers may give, 0..1000000. With min-priority and max-priority 0, callers "
            "cannot set it. Default: 1000000.",
        ),
        FILE_ONLY,
    ] = None

    max_queue: Annotated[
        int | None,
        option(
            ENGINE,
            f"Maximum number of waiting requests; further ones are refused. Default: {MAX_QUEUE}.",
            metavar="COUNT",
        ),
    ] = None
    max_queue_pages: Annotated[
        int | None,
        option(ENGINE, "Maximum number of KV pages that waiting requests may need together. Default: no limit."),
        FILE_ONLY,
    ] = None

    tls_cert: Annotated[
        Path | None,
        option(SECURITY, "Certificate chain of the service, PEM, for TLS; needs --tls-key.", metavar="FILE"),
    ] = None
    tls_key: Annotated[Path | None, option(SECURITY, "Private key of --tls-cert, PEM.", metavar="FILE")] = None
    tls_client_ca: Annotated[
        Path | None,
        option(
            SECURITY,
            "Certificate authorities, PEM: only clients with a certificate of one of them may connect.",
            metavar="FILE",
        ),
    ] = None
    auth_token_file: Annotated[
        Path | None,
        option(
            SECURITY,
            "File of bearer tokens, one a line; callers must send one of them. Default: no token is needed.",
            metavar="FILE",
        ),
    ] = None
    max_message_bytes: Annotated[
        int | None,
        option(SECURITY, "Maximum size of a request in bytes. Default: as much as the context needs, at most 4 MiB."),
        FILE_ONLY,
    ] = None
    max_concurrent_streams: Annotated[
        int | None,
        option(SECURITY, "Maximum number of calls at the same time on one connection. Default: 1024."),
        FILE_ONLY,
    ] = None
    max_calls: Annotated[
        int | None,
        option(
            SECURITY,
            "Maximum number of Generate calls at the same time over all connections. Default: 1024.",
            metavar="COUNT",
        ),
    ] = None
    keepalive_time: Annotated[
        float | None, option(SECURITY, "Seconds of silence after which a client is pinged. Default: 60."), FILE_ONLY
    ] = None
    keepalive_timeout: Annotated[
        float | None,
        option(
            SECURITY,
            "Seconds within which a client must answer a ping; otherwise its calls are cancelled. Default: 20.",
        ),
        FILE_ONLY,
    ] = None
    min_ping_interval: Annotated[
        float | None,
        option(
            SECURITY,
            "Minimum seconds between two pings of a client; clients that ping more often are "
            "disconnected. Default: 10.",
        ),
        FILE_ONLY,
    ] = None
    max_connection_age: Annotated[
        float | None, option(SECURITY, "Seconds after which a client has to reconnect. Default: 900."), FILE_ONLY
    ] = None
    max_connection_age_grace: Annotated[
        float | None,
        option(
            SECURITY,
            "Seconds that calls in flight may continue on a connection older than max-connection-age. Default: 3600.",
        ),
        FILE_ONLY,
    ] = None
    write_timeout: Annotated[
        float | None,
        option(
            SECURITY,
            "Maximum seconds for a request to arrive, and for a response to wait until the client reads "
            "it. Default: 30.",
        ),
        FILE_ONLY,
    ] = None
    drain_timeout: Annotated[
        float | None,
        option(
            SECURITY,
            "Seconds that calls in flight may continue after the service is told to stop. Default: 30.",
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
            help="Answers: a file in the order of IN; or DIRECTORY/, s3://.. or gs://.., with a file for each "
            "part of IN. If OUT exists, the run that wrote it is resumed.",
            metavar="OUT",
        ),
    ]
    config: Annotated[
        Path | None,
        option(
            CONFIGURATION,
            "YAML file whose keys are names of options, as for `smcserve serve`; flags override it.",
            metavar="FILE",
        ),
    ] = None
    overwrite: Annotated[
        bool | None, flag(BATCH, "Start from the beginning, and discard the answers that OUT holds.", "--overwrite")
    ] = None
    retry_failed: Annotated[
        bool | None, flag(BATCH, "Decode lines that failed in OUT again; existing answers are kept.", "--retry-failed")
    ] = None
    gangs: Annotated[
        int | None,
        option(
            BATCH,
            "Number of worker groups, each with both models. Default: 1 if OUT is a file, otherwise as "
            "many as fit on the cluster.",
            metavar="COUNT",
        ),
    ] = None
    part_lines: Annotated[
        int | None,
        option(
            BATCH,
            "Maximum number of lines of a part, the unit of resuming in a directory. Default: 1000, or "
            "more where that would make more than 10,000 parts.",
            metavar="COUNT",
        ),
    ] = None
    output_format: Annotated[
        str | None,
        option(BATCH, "Format of the files in an output directory. Default: that of IN.", metavar="jsonl|parquet"),
    ] = None
    metrics_port: Annotated[
        int | None,
        option(LISTEN, "Port of the metrics for Prometheus; 0 = any free port. Default: no such port.", metavar="PORT"),
    ] = None
    host: Annotated[str | None, option(LISTEN, "Address of --metrics-port. Default: 127.0.0.1.", metavar="HOST")] = None
    seed: Annotated[
        int | None,
        option(
            BATCH,
            "A line without a seed gets one that is derived from this seed and its custom_id. Default: 0.",
            metavar="SEED",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        option(
            BATCH,
            "Number of requests in flight in each worker group. Default: as many as fill the slots.",
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

    if given.get("load") in ("random", "grown") and not (given.get("target") and given.get("draft")):
        raise ValueError(f"--load {given['load']} needs --target and --draft, each the name of a published shape")
    target, draft = pair_directories(given.get("target"), given.get("draft"))
    # In lockstep one model waits for the other; with two micro-batches both work. In look-ahead both work anyway.
    cohorts = 2 if given.get("form") == "lockstep" else 1
    settings: dict[str, Any] = {"cohorts": cohorts, "prefix_cache": not given.get("no_prefix_cache", False)}
    if given.get("device") == "cuda":
        settings |= GPU_PREFILL
    engine = EngineConfig(**settings | fields_of(EngineConfig, given))
    if engine.potentials:
        options.load_own(engine.potentials)
    return WorkerGroupConfig(
        **fields_of(WorkerGroupConfig, given) | {"target": target, "draft": draft, "engine": engine}
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
    settings = fields_of(GatewayConfig, given) | {"http_port": http_port}
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


def fields_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of the fields of a configuration class; those that are None are left out."""
    return {one.name: given[one.name] for one in fields(kind) if given.get(one.name) is not None}
