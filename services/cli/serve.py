"""`smcserve serve`: the whole service, until a signal ends it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import gang, options
from smc.terminal import err, print_error

if TYPE_CHECKING:
    from services.launch.service import Ready

LISTEN, SECURITY = "Where it listens", "Security and limits"
GATEWAY_FIELDS = (
    *("host", "port", "http_port", "served_model_names", "default_method", "metrics_port"),
    *("tls_cert", "tls_key", "tls_client_ca", "auth_token_file", "max_message_bytes"),
    *("max_concurrent_streams", "max_calls", "keepalive_time", "keepalive_timeout", "min_ping_interval"),
    *("max_connection_age", "max_connection_age_grace", "write_timeout", "drain_timeout"),
)


def serve(
    ctx: typer.Context,
    target: options.Target = None,
    draft: options.Draft = None,
    target_tp: gang.TargetTp = None,
    draft_tp: gang.DraftTp = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    target_dtype: options.TargetDtype = None,
    draft_dtype: options.DraftDtype = None,
    draft_vocab: options.DraftVocab = None,
    draft_vocab_text: options.DraftVocabText = None,
    host: Annotated[
        str | None, options.option(LISTEN, "Address. Default: 127.0.0.1; 0.0.0.0 = every network.", metavar="HOST")
    ] = None,
    port: Annotated[int | None, options.option(LISTEN, "Default: 50051; 0 = any free one.", metavar="PORT")] = None,
    http_port: Annotated[
        int | None,
        options.option(LISTEN, "For OpenAI's API; 0 = any free one. Default: none.", "--http-port", metavar="PORT"),
    ] = None,
    served_model_names: Annotated[
        list[str] | None,
        options.option(
            LISTEN,
            "What clients and metrics call the target; may be repeated. Default: the name of its directory.",
            "--served-model-name",
            metavar="NAME",
        ),
    ] = None,
    default_method: Annotated[
        str | None,
        options.option(
            LISTEN,
            "Of requests that name none: smc, exact, target or draft. Default: smc, at temperature 0 exact.",
            "--default-method",
            metavar="METHOD",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        options.option(LISTEN, "For Prometheus; 0 = any free one. Default: none.", "--metrics-port", metavar="PORT"),
    ] = None,
    form: options.Form = None,
    block: options.Block = None,
    branches: options.Branches = None,
    cohorts: gang.Cohorts = None,
    max_slots: gang.MaxSlots = None,
    max_chains: gang.MaxChains = None,
    max_context: options.MaxContext = None,
    pages: gang.Pages = None,
    prefill_chunk: gang.PrefillChunk = None,
    prefill_share: gang.PrefillShare = None,
    drafting: gang.Drafting = None,
    no_prefix_cache: options.NoPrefixCache = False,
    max_queue: Annotated[
        int, options.option(options.ENGINE, "Requests that may wait.", "--max-queue", metavar="COUNT")
    ] = 256,
    max_queue_pages: gang.MaxQueuePages = None,
    threads: gang.Threads = None,
    ray_address: gang.RayAddress = None,
    target_resource: gang.TargetResource = None,
    draft_resource: gang.DraftResource = None,
    link: gang.Link = None,
    start_timeout: gang.StartTimeout = None,
    link_timeout: gang.LinkTimeout = None,
    heartbeat: gang.Heartbeat = None,
    max_failed_starts: gang.MaxFailedStarts = None,
    trace: gang.Trace = None,
    tls_cert: Annotated[
        Path | None, options.option(SECURITY, "Certificate chain, PEM; with --tls-key.", metavar="FILE")
    ] = None,
    tls_key: Annotated[Path | None, options.option(SECURITY, "Private key of --tls-cert, PEM.", metavar="FILE")] = None,
    tls_client_ca: Annotated[
        Path | None, options.option(SECURITY, "Only clients with a certificate of these authorities.", metavar="FILE")
    ] = None,
    auth_token_file: Annotated[
        Path | None, options.option(SECURITY, "Bearer tokens that let callers in, one a line.", metavar="FILE")
    ] = None,
    max_message_bytes: Annotated[
        int | None,
        options.option(SECURITY, "Largest request. Default: as the context needs, at most 4 MiB.", metavar="BYTES"),
    ] = None,
    max_concurrent_streams: Annotated[
        int | None, options.option(SECURITY, "Calls at a time on one connection. Default: 1024.", metavar="COUNT")
    ] = None,
    max_calls: Annotated[
        int | None,
        options.option(SECURITY, "Generate calls at a time, over all connections. Default: 1024.", metavar="COUNT"),
    ] = None,
    keepalive_time: Annotated[
        float | None,
        options.option(SECURITY, "Silence after which a client is pinged. Default: 60.", metavar="SECONDS"),
    ] = None,
    keepalive_timeout: Annotated[
        float | None,
        options.option(SECURITY, "To answer a ping before its calls are cancelled. Default: 20.", metavar="SECONDS"),
    ] = None,
    min_ping_interval: Annotated[
        float | None,
        options.option(SECURITY, "Clients that ping more often are disconnected. Default: 10.", metavar="SECONDS"),
    ] = None,
    max_connection_age: Annotated[
        float | None,
        options.option(SECURITY, "After which a client has to connect anew. Default: 900.", metavar="SECONDS"),
    ] = None,
    max_connection_age_grace: Annotated[
        float | None,
        options.option(SECURITY, "For calls in flight on a connection that old. Default: 3600.", metavar="SECONDS"),
    ] = None,
    write_timeout: Annotated[
        float | None,
        options.option(SECURITY, "For a client to send its request, and to read. Default: 30.", metavar="SECONDS"),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        options.option(SECURITY, "For calls in flight once it is told to stop. Default: 30.", metavar="SECONDS"),
    ] = None,
) -> int:
    """Serve a model pair over gRPC, and with --http-port over OpenAI's API; stop with Ctrl-C or SIGTERM."""
    import asyncio
    import logging

    from services.gateway.config import GatewayConfig

    config = gang.gang_config(ctx.params)
    gateway = GatewayConfig(**{name: ctx.params[name] for name in GATEWAY_FIELDS if ctx.params[name] is not None})
    config.serving_pair()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    err.print("starting Ray; then draft, target and coordinator, each in a process of its own", soft_wrap=True)
    begin = time.monotonic()

    def announce(ready: Ready) -> None:
        scheme = "https" if gateway.tls else "http"
        metrics = f", metrics on http://{gateway.host}:{ready.metrics_port}/metrics" if ready.metrics_port else ""
        http = f", OpenAI's API on {scheme}://{gateway.host}:{ready.http_port}/v1" if ready.http_port else ""
        where = f"{gateway.host}:{ready.port}{metrics}{http}"
        err.print(f"serving on {where} (ready after {time.monotonic() - begin:.1f} s); Ctrl-C stops", soft_wrap=True)

    from services.launch import cluster
    from services.launch.errors import GangError

    try:
        cluster.import_meanwhile("services.launch.service")
        cluster.connect(ray_address)
        from services.launch.service import serve as run

        asyncio.run(run(config, gateway, announce))
    except (GangError, ConnectionError) as error:
        print_error(str(error))
        return 1
    return 0
