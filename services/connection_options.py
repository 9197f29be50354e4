"""Command line options for connecting to a service. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from smc.terminal import option

SERVICE = "Service"
"""Title of these options' panel in `--help`."""
DEFAULT_ADDRESS = "127.0.0.1:50051"

Address = Annotated[str, option(SERVICE, "Address of the service.", "--address", "-a", metavar="HOST:PORT")]
TokenFile = Annotated[
    Path | None, option(SERVICE, "File whose first line is the bearer token to send.", "--token-file", metavar="FILE")
]
Tls = Annotated[
    bool,
    option(
        SERVICE,
        "Use TLS, and trust the certificate authorities of this machine.",
        "--tls",
        show_default=False,
        metavar="",
    ),
]
TlsCa = Annotated[
    Path | None,
    option(SERVICE, "Use TLS, and trust the certificate authorities in this PEM file.", "--tls-ca", metavar="FILE"),
]
TlsCert = Annotated[
    Path | None,
    option(SERVICE, "Client certificate (PEM) for mutual TLS; needs --tls-key.", "--tls-cert", metavar="FILE"),
]
TlsKey = Annotated[Path | None, option(SERVICE, "Private key (PEM) of --tls-cert.", "--tls-key", metavar="FILE")]
