"""Health of the `smcserve serve` in this container: `python3 -m services.cli.probe`, the images' HEALTHCHECK. Exit code
0 if it serves.

Reads the arguments of the running process and its configuration file, so that it knows ports, TLS and the rest. Imports
gRPC only where it must ask over it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from services.cli import options
from services.cli.service_options import ServeOptions, gateway_config
from services.gateway.config import GatewayConfig
from smc.terminal import USAGE_ERROR

TIMEOUT = 5.0
"""Seconds in which the service must answer."""
EVERY_NETWORK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address that stands for all of a machine -> one at which the service can be called."""
PROC = Path("/proc")


def main(proc: Path = PROC) -> int:
    try:
        print(health(configuration(proc)))
        return 0
    except USAGE_ERROR as error:
        print(error.format_message())
    except (ValueError, OSError, http.client.HTTPException) as error:
        print(str(error) or type(error).__name__)
    return 1


def configuration(proc: Path) -> GatewayConfig:
    """Return the configuration of the gateway of the oldest `smcserve serve`. `proc`: the file system of processes.
    Raises ValueError if there is none, or if its configuration file has become invalid."""
    for process in sorted((one for one in proc.iterdir() if one.name.isdecimal()), key=lambda one: int(one.name)):
        arguments = serve_arguments(_command_line(process))
        if arguments is not None:
            with contextlib.chdir(process / "cwd"):  # files may be given relative to its directory
                return gateway_config(options.values_of(_options(arguments)))
    raise ValueError(
        "no `smcserve serve` runs here; for a container that runs another command give --no-healthcheck to `docker run`"
    )


def _command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []


def serve_arguments(words: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of `smcserve serve` in a command line, which may begin with tini or Python; None if it is
    another command."""
    for index, (program, command) in enumerate(itertools.pairwise(words)):
        if Path(program).name == "smcserve" and command == "serve":
            return words[index + 2 :]
    return None


def _options(arguments: Sequence[str]) -> ServeOptions:
    command, found = typer.Typer(add_completion=False), list[ServeOptions]()
    command.command("serve")(options.with_options(ServeOptions)(found.append))
    command(list(arguments), standalone_mode=False)
    return found[0]


def health(config: GatewayConfig) -> str:
    """Return how the service has shown that it serves. Raises OSError, HTTPException or ValueError if it does not.

    Only the process on this machine is asked, so its certificate is not checked. With mutual TLS, or TLS without HTTP,
    no answer can be had from the APIs: the gauge of the metrics port counts, or without one that a TLS connection is
    accepted."""
    bare = config.host.strip("[]")  # a host may be given as it stands in addresses: [::1]
    host = EVERY_NETWORK.get(bare, bare)
    readable = config.tls is None or not (config.tls_client_ca or not config.http_port)
    if readable and config.http_port:
        return _ask_http(host, config.http_port, config.tls is not None)
    if readable and config.port:
        return _ask_grpc(host, config.port)
    if config.metrics_port:
        return _ask_metrics(host, config.metrics_port, config.allowed_hosts)
    if config.tls and (port := config.http_port or config.port):
        return _shake_hands(host, port)
    raise ValueError("--port 0 or --http-port 0: the port is unknown; give a number, or --metrics-port")


def _ask_http(host: str, port: int, tls: bool) -> str:
    connection = (
        http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=_unchecked())
        if tls
        else http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    )
    status, body = _get(connection, "/health")
    if status != 200:
        raise ValueError(f"/health answers {status}: {body}")
    return "/health answers 200"


def _ask_grpc(host: str, port: int) -> str:
    from services.client import Client, ServiceError

    with Client(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as service:
        try:
            state = service.health()
        except ServiceError as error:
            raise ValueError(str(error)) from error
    if state != "SERVING":
        raise ValueError(f"gRPC health is {state}")
    return "gRPC health is SERVING"


def _ask_metrics(host: str, port: int, allowed_hosts: Sequence[str]) -> str:
    """`allowed_hosts`: of the service, which answers only those if there are any."""
    headers = {"Host": allowed_hosts[0]} if allowed_hosts else {}
    status, body = _get(http.client.HTTPConnection(host, port, timeout=TIMEOUT), "/metrics", headers)
    if status != 200 or not re.search(r"^smc_serving(\{.*\})? 1(\.0)?$", body, re.MULTILINE):
        raise ValueError(f"/metrics answers {status}, and not smc_serving 1")
    return "/metrics has smc_serving 1"


def _get(connection: http.client.HTTPConnection, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()


def _shake_hands(host: str, port: int) -> str:
    with socket.create_connection((host, port), TIMEOUT) as plain, _unchecked().wrap_socket(plain):
        return f"port {port} accepts TLS"


def _unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":
    sys.exit(main())
