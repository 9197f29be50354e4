"""Command line options for connecting to a service. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from smc.terminal import flag, option

SERVICE = "Service"
"""Title of these options' panel in `--help`."""
DEFAULT_ADDRESS = "127.0.0.1:50051"

Address = Annotated[str, option(SERVICE, "Address of the service.", "--address", "-a", metavar="HOST:PORT")]
TokenFile = Annotated[
    Path | None, option(SERVICE, "File whose first line is the bearer token to send.", metavar="FILE")
]
Tls = Annotated[bool, flag(SERVICE, "Use TLS, and trust the certificate authorities of this machine.", "--tls")]
TlsCa = Annotated[
    Path | None, option(SERVICE, "Use TLS, and trust the certificate authorities in this PEM file.", metavar="FILE")
]
TlsCert = Annotated[
    Path | None, option(SERVICE, "Client certificate (PEM) for mutual TLS; needs --tls-key.", metavar="FILE")
]
TlsKey = Annotated[Path | None, option(SERVICE, "Private key (PEM) of --tls-cert.", metavar="FILE")]
