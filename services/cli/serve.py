"""`smcserve serve`: runs the whole service until a signal ends it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from services.cli import options
from services.cli.service_options import ServeOptions, divided, effective, gateway_config, placed, worker_group_config
from services.launch.config import AUTO
from smc.api.engine_config import MAX_QUEUE
from smc.terminal import err, print_error

if TYPE_CHECKING:
    from services.gateway.server import Gateway
    from services.launch.config import WorkerGroupConfig


@options.with_options(ServeOptions)
def serve(arguments: ServeOptions) -> int:
    """Serve a model pair over gRPC and over OpenAI's and Anthropic's API; stop with Ctrl-C or SIGTERM.

    --config reads options from a file, also those that have no flag; --print-config writes such a file."""
    import asyncio
    import logging

    from services.gateway.config import check_ports
    from services.launch import logs
    from services.launch.config import check_gpus

    given, division = divided({"max_queue": MAX_QUEUE} | options.values_of(arguments))
    given = placed(given)
    group, gateway = worker_group_config(given), gateway_config(given)
    if not arguments.print_config:
        check_ports(gateway)  # before `serving_pair` reads the models' files, which may take seconds
    group.serving_pair()
    if arguments.print_config:
        if division is not None:
            err.print(str(division), soft_wrap=True, markup=False)
        print(options.config_file_text(effective(group, gateway, given), ServeOptions), end="")
        return 0
    check_gpus(group, given.get("ray_address"))
    in_json = gateway.log_format == "json"
    logs.set_up(in_json)
    logger = logging.getLogger("smcserve")

    def say(text: str) -> None:
        if in_json:
            logger.info("%s", text)
        else:
            err.print(text, soft_wrap=True)

    if division is not None:
        say(str(division))
    say(f"starting Ray; then {_processes(group)}")
    begin = time.monotonic()

    def announce(served: Gateway) -> None:
        scheme = "https" if gateway.tls else "http"
        metrics = f", metrics on http://{gateway.host}:{served.metrics_port}/metrics" if served.metrics_port else ""
        http = f", OpenAI's API on {scheme}://{gateway.host}:{served.http_port}/v1" if served.http_port else ""
        where = f"{gateway.host}:{served.port}{metrics}{http}"
        say(f"serving on {where} (ready after {time.monotonic() - begin:.1f} s); Ctrl-C stops")

    from services.launch import cluster
    from services.launch.config import WorkerGroupError

    try:
        cluster.import_meanwhile("services.launch.service")
        cluster.connect(given.get("ray_address"))
        if in_json:
            logs.take_over_ray()
        from services.launch.service import serve as run

        asyncio.run(run(group, gateway, announce))
    except SystemExit as ended:  # raised by Ray's handler of SIGTERM, while Ray starts
        if ended.code != signal.SIGTERM:
            raise
        return 128 + signal.SIGTERM
    except (WorkerGroupError, ConnectionError) as error:
        if in_json:
            logger.error("%s", error)
        else:
            print_error(str(error))
        return 1
    return 0


def _processes(group: WorkerGroupConfig) -> str:
    if group.worker_groups != 1:
        number = "as many as fit" if group.worker_groups == AUTO else group.worker_groups
        return f"the worker groups ({number}): in each of them, {_of_one(group)}"
    return _of_one(group)


def _of_one(group: WorkerGroupConfig) -> str:
    if group.placement == "apart":
        return "draft, target and coordinator, each in a process of its own"
    if group.ranks == 1:
        return "the coordinator and a process with both models"
    return f"the coordinator and {group.ranks} processes with a share of both models each"
