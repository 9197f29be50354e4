"""Settings of the gateway, checked when built: a security setting that would have no effect stops the start. Also
checks, by binding them, that all ports are free before anything slow starts."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from services.security import HOST_NAME, AllowedHosts, TokenFile, check_tls, is_loopback
from smc.api.request import MAX_PRIORITY
from smc.api.sampling_params import DEFAULT_METHOD, Method
from smc.api.settings import (
    LISTEN,
    SECURITY,
    Holds,
    Items,
    OneOf,
    check_settings,
    flag,
    seconds,
    setting,
    within,
)

DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8000
"""Default HTTP port of `serve`."""
LOG_FORMATS = ("text", "json")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
"""Origin of a web page, as browsers write it, or `*` for any origin."""
PORT = within(0, 65535)
MESSAGE_BYTES, TOKEN_BYTES, MOST_BYTES = 64 << 10, 16, 4 << 20
"""Size of the largest request in bytes: for everything but the prompt, for each token of the context (few texts have
more than 6 bytes a token), and at most in all."""


def as_path(name: str, value: str | Path) -> Path:
    """Convert the value of a field to a path."""
    return Path(value)


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of the gateway. Raises ValueError naming the field, the value and what is allowed. Times are in
    seconds."""

    PANEL: ClassVar[str] = LISTEN

    host: str = setting(
        "127.0.0.1",
        Holds(bool, "an address of this machine, such as 127.0.0.1 or 0.0.0.0"),
        "Address to listen on; 0.0.0.0 or :: = all networks.",
        "HOST",
    )
    port: int = setting(DEFAULT_PORT, PORT, "Port of the gRPC API; 0 = any free port.", "PORT")
    http_port: int | None = setting(
        None,
        PORT,
        f"Port of the APIs of OpenAI and Anthropic; 0 = any free port. Default: {DEFAULT_HTTP_PORT}.",
        "PORT",
    )
    """None: these APIs are not served."""
    metrics_port: int | None = setting(
        None,
        PORT,
        "Port of the metrics for Prometheus, without TLS and token; 0 = any free port. Default: no such port.",
        "PORT",
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        Items(lambda name: isinstance(name, str) and name.isprintable() and name != "", "names that can be printed"),
        "Name of the target for clients and metrics; may be repeated, answers carry the first. Default: the name "
        "of its directory.",
        "NAME",
        names=("--served-model-name",),
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        Items(
            lambda name: isinstance(name, str) and HOST_NAME.fullmatch(name) is not None,
            "* or a name or address without scheme, port and path, such as llm.example.com or [2001:db8::1]",
        ),
        "Further host name by which HTTP requests may call the service; * = any; may be repeated. Default: without "
        "tokens on 127.0.0.1 the names of this machine's loopback interface, otherwise any.",
        "NAME",
        names=("--allowed-host",),
    )
    allow_origins: tuple[str, ...] = setting(
        (),
        Items(
            lambda origin: isinstance(origin, str) and ORIGIN.fullmatch(origin) is not None,
            "* or SCHEME://HOST[:PORT], such as https://app.example.com, without a path",
        ),
        "Origin of web pages that may use --http-port, such as https://app.example.com; * = any; may be repeated. "
        "Default: none.",
        "ORIGIN",
        names=("--allow-origin",),
    )
    page: bool = setting(True, flag(), "Do not serve the web page for trying the models at / of --http-port.")
    log_format: str = setting(
        "text",
        OneOf(LOG_FORMATS),
        "Format of the log. json: each line is an object, also of what other processes log.",
        "text|json",
    )
    log_texts: bool = setting(
        False,
        flag(),
        "Write prompts and answers to the log, from which `smcserve distill --from-log` reads prompts.",
        has_flag=False,
    )
    """Otherwise the log has no text of users."""
    unknown_fields: str = setting(
        "refuse",
        OneOf(("refuse", "ignore")),
        "Treatment of request fields that the HTTP API does not have. refuse: the request is refused; ignore: the "
        "field is ignored, and logged once.",
        "WHAT",
    )
    default_method: str = setting(
        DEFAULT_METHOD.value,
        OneOf(tuple(method.value for method in Method)),
        "Method of requests that name none: exact, smc (but exact at temperature 0), target or draft.",
        "METHOD",
    )
    default_max_tokens: int = setting(
        8192,
        within(1, 2**31 - 1),
        "Maximum tokens of a chat's answer if its request gives no max_tokens; also in vLLM's protocol. Default: "
        "8192, less if the context or memory leaves less.",
        "COUNT",
    )
    """Other requests have a smaller default of their own."""
    min_priority: int = setting(
        0,
        within(-MAX_PRIORITY, 0),
        f"Lowest `priority` that callers may give, -{MAX_PRIORITY}..0; requests with lower numbers are admitted "
        "first. Default: 0, so that no caller passes others.",
        has_flag=False,
    )
    max_priority: int = setting(
        MAX_PRIORITY,
        within(0, MAX_PRIORITY),
        f"Highest `priority` that callers may give, 0..{MAX_PRIORITY}. With min-priority and max-priority 0, "
        "callers cannot set it.",
        has_flag=False,
    )
    tls_cert: Path | None = setting(
        None, as_path, "Certificate chain of the service, PEM, for TLS; needs --tls-key.", "FILE", panel=SECURITY
    )
    """It, `tls_key` and `tls_client_ca` are read again when they change."""
    tls_key: Path | None = setting(
        None, as_path, "Private key of --tls-cert, PEM, not encrypted.", "FILE", panel=SECURITY
    )
    tls_client_ca: Path | None = setting(
        None,
        as_path,
        "Certificate authorities, PEM: only clients with a certificate of one of them may connect.",
        "FILE",
        panel=SECURITY,
    )
    auth_token_file: Path | None = setting(
        None,
        as_path,
        "File of bearer tokens, one a line; callers must send one of them. It is read again when it changes. "
        "Default: no token is needed.",
        "FILE",
        panel=SECURITY,
    )
    max_message_bytes: int | None = setting(
        None,
        within(1024, 2**31 - 1),
        "Maximum size of a request in bytes. Default: as much as the context needs, at most 4 MiB.",
        panel=SECURITY,
        has_flag=False,
    )
    max_concurrent_streams: int = setting(
        1024,
        within(1, 2**31 - 1),
        "Maximum number of calls at the same time on one connection; further ones wait in the client.",
        panel=SECURITY,
        has_flag=False,
    )
    max_calls: int = setting(
        1024,
        within(1, 2**31 - 1),
        "Maximum number of Generate calls at the same time over all connections; further ones are refused.",
        "COUNT",
        panel=SECURITY,
    )
    keepalive_time: float = setting(
        60.0, seconds(1.0), "Seconds of silence after which a client is pinged.", panel=SECURITY, has_flag=False
    )
    keepalive_timeout: float = setting(
        20.0,
        seconds(1.0),
        "Seconds within which a client must answer a ping; otherwise its calls are cancelled.",
        panel=SECURITY,
        has_flag=False,
    )
    min_ping_interval: float = setting(
        10.0,
        seconds(0.0),
        "Minimum seconds between two pings of a client; clients that ping more often are disconnected.",
        panel=SECURITY,
        has_flag=False,
    )
    max_connection_age: float = setting(
        900.0,
        seconds(1.0),
        "Seconds, give or take a tenth, after which a client has to reconnect, maybe to a newer replica.",
        panel=SECURITY,
        has_flag=False,
    )
    max_connection_age_grace: float = setting(
        3600.0,
        seconds(1.0),
        "Seconds that calls in flight may continue on a connection older than max-connection-age.",
        panel=SECURITY,
        has_flag=False,
    )
    write_timeout: float = setting(
        30.0,
        seconds(0.001),
        "Maximum seconds for a request to arrive, and for a response to wait until the client reads it.",
        panel=SECURITY,
        has_flag=False,
    )
    drain_timeout: float = setting(
        30.0,
        seconds(0.0),
        "Seconds that calls in flight may continue after the service is told to stop.",
        "SECONDS",
        panel=SECURITY,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_ports()
        self._check_security()
        self._check_http()

    @property
    def tls(self) -> tuple[Path, Path, Path | None] | None:
        """Certificate, its key, and the authorities of clients; None: no TLS."""
        return (self.tls_cert, self.tls_key, self.tls_client_ca) if self.tls_cert and self.tls_key else None

    @property
    def priorities(self) -> tuple[int, int]:
        """Lowest and highest `priority` that callers may give."""
        return self.min_priority, self.max_priority

    def name_of(self, target: str) -> str:
        """Return the name under which the pair is served. `target`: name of its target model."""
        return self.served_model_names[0] if self.served_model_names else target

    def message_bytes(self, context: int) -> int:
        """Return the size in bytes of the largest request to a model pair with this context."""
        if self.max_message_bytes is not None:
            return self.max_message_bytes
        return min(MESSAGE_BYTES + TOKEN_BYTES * context, MOST_BYTES)

    def hosts(self) -> AllowedHosts:
        """Return the names by which HTTP requests may call the service."""
        return AllowedHosts(self.host, self.allowed_hosts, has_tokens=self.auth_token_file is not None)

    def token_file(self) -> TokenFile | None:
        """Read `auth_token_file` and return its tokens; None: no token is needed."""
        return TokenFile(self.auth_token_file) if self.auth_token_file else None

    def _check_ports(self) -> None:
        ports = [("port", self.port), ("http_port", self.http_port), ("metrics_port", self.metrics_port)]
        for index, (name, value) in enumerate(ports):
            if value and (same := [other for other, before in ports[:index] if before == value]):
                raise ValueError(f"{name}={value} is given as {same[0]} as well; give another one, or 0 for any")

    def _check_security(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{given} is given without {missing}; give both for TLS, or neither")
        if self.tls_client_ca is not None and not self.tls:
            raise ValueError("tls_client_ca has no effect without TLS; give tls_cert and tls_key too, or leave it out")
        if self.tls is not None:
            check_tls(*self.tls)
        if self.auth_token_file is not None:
            self.token_file()
            if not self.tls and not is_loopback(self.host):
                raise ValueError(
                    f"auth_token_file over plain text on host={self.host!r}: the tokens could be read in transit; "
                    "give tls_cert and tls_key (--tls-cert, --tls-key), or listen on 127.0.0.1 only"
                )

    def _check_http(self) -> None:
        if self.allowed_hosts and self.http_port is None and self.metrics_port is None:
            raise ValueError("allowed_hosts has no effect without http_port; leave out no_http or allowed_hosts")
        if self.allow_origins and self.http_port is None:
            raise ValueError("allow_origins has no effect without http_port; leave out no_http or allow_origins")
        if not self.page and self.http_port is None:
            raise ValueError("no_page has no effect without http_port; leave out no_http or no_page")


def check_ports(config: GatewayConfig) -> None:
    """Check that all ports are free. Raises OSError naming the first one that is not, and its option."""
    host = config.host.strip("[]")
    for name, port in (("port", config.port), ("http_port", config.http_port), ("metrics_port", config.metrics_port)):
        if port is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                _bind(socket.socket(family, kind, protocol), address)
        except OSError as error:
            hint = f"give another {flag}, or 0 for any free one" if port else "give another --host"
            raise OSError(f"cannot listen on {host}:{port} ({flag}): {error.strerror}; {hint}") from error


def _bind(listener: socket.socket, address: tuple) -> None:
    with listener:
        # As servers do, so that a port whose last connections are closing counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
