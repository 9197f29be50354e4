"""Settings of the gateway, checked when built: a security setting that would have no effect stops the start. Also
checks, by binding them, that all ports are free before anything slow starts."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from services.security import HOST_NAME, AllowedHosts, TokenFile, check_tls, is_loopback
from smc.api.request import MAX_PRIORITY
from smc.api.sampling_params import Method

DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8000
"""Default HTTP port of `serve`."""
UNKNOWN_FIELDS = ("refuse", "ignore")
LOG_FORMATS = ("text", "json")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
"""Origin of a web page, as browsers write it, or `*` for any origin."""
MESSAGE_BYTES, TOKEN_BYTES, MOST_BYTES = 64 << 10, 16, 4 << 20
"""Size of the largest request in bytes: for everything but the prompt, for each token of the context (few texts have
more than 6 bytes a token), and at most in all."""


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of the gateway. Raises ValueError naming the field, the value and what is allowed. Times are in
    seconds."""

    host: str = "127.0.0.1"
    """Address to listen on, for calls and for metrics; 0.0.0.0 or :: for every network of the machine."""
    port: int = DEFAULT_PORT
    """Port of the gRPC server; 0 = any free one."""
    http_port: int | None = None
    """Port of OpenAI's API; 0 = any free one, None = the API is not served."""
    metrics_port: int | None = None
    """Port of the metrics for Prometheus, without TLS and token; 0 = any free one, None = no such port."""
    tls_cert: Path | None = None
    """Certificate chain of the server, PEM; with `tls_key`. Both, and `tls_client_ca`, are read again when they
    change."""
    tls_key: Path | None = None
    """Private key of `tls_cert`, PEM, not encrypted."""
    tls_client_ca: Path | None = None
    """Authorities of clients, PEM: only clients with a certificate of these may connect (mutual TLS)."""
    auth_token_file: Path | None = None
    """File of bearer tokens, one a line; read again when it changes. Callers must send one of them. None: no token is
    needed."""
    max_message_bytes: int | None = None
    """Size of the largest request in bytes; None: enough for a prompt that fills the context (`message_bytes`)."""
    max_concurrent_streams: int = 1024
    """Calls at the same time on one connection; further ones wait in the client, and some are refused with
    UNAVAILABLE."""
    max_calls: int = 1024
    """Generate calls at the same time, over all connections; further ones are refused with RESOURCE_EXHAUSTED."""
    keepalive_time: float = 60.0
    """Seconds of silence after which a client is pinged."""
    keepalive_timeout: float = 20.0
    """Seconds for a client to answer a ping; otherwise its calls are cancelled."""
    min_ping_interval: float = 10.0
    """Clients that ping more often than this are disconnected."""
    max_connection_age: float = 900.0
    """A connection older than this, give or take a tenth, gets no further calls: its client makes a new one, maybe to a
    newer replica."""
    max_connection_age_grace: float = 3600.0
    """How long calls in flight may continue on such a connection; then they end with UNAVAILABLE."""
    write_timeout: float = 30.0
    """Longest time for a request to arrive, and for a response to wait for a client that does not read; then the call
    is ended."""
    drain_timeout: float = 30.0
    """How long calls in flight may continue once the service is told to stop."""
    served_model_names: tuple[str, ...] = ()
    """Names of the target for OpenAI's and vLLM's clients; answers and metrics carry the first. Empty: the name of its
    directory."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which HTTP requests may call the service; `*`: any. If none are given, a service without tokens
    that listens on the loopback interface takes the names of that interface, any other service all names."""
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the HTTP API, such as https://app.example.com; `*`: any. Empty: none."""
    page: bool = True
    """Serve a web page for people at / of `http_port`."""
    log_format: str = "text"
    """Format of the log: `text`, or `json`, one object a line."""
    log_texts: bool = False
    """Log the prompt and the answer of every request as text; otherwise the log has no text of users."""
    unknown_fields: str = "refuse"
    """Treatment of fields of an HTTP request that the API does not have: `refuse`, or `ignore`, which logs each
    once."""
    default_method: str | None = None
    """Method of requests that name none; None: `smc`, and at temperature 0 `exact`."""

    default_max_tokens: int = 8192
    """Maximum tokens of an answer to a chat, or in vLLM's protocol, whose request gives no `max_tokens`; less if the
    context or memory leaves less. Other requests have a smaller default of their own."""
    min_priority: int = 0
    """Lowest `priority` that callers may give; a lower number is admitted first. 0: nobody passes others."""
    max_priority: int = MAX_PRIORITY
    """Highest `priority` that callers may give. With both 0, callers cannot set it."""

    def __post_init__(self) -> None:
        for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        for name in ("served_model_names", "allowed_hosts", "allow_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_numbers()
        self._check_security()
        self._check_defaults()

    @property
    def tls(self) -> tuple[Path, Path, Path | None] | None:
        """Certificate, its key, and the authorities of clients; None: no TLS."""
        return (self.tls_cert, self.tls_key, self.tls_client_ca) if self.tls_cert and self.tls_key else None

    @property
    def method(self) -> str | None:
        """Method of requests that name none; None: the library's default, which is `smc` where possible."""
        return None if self.default_method == Method.SMC else self.default_method

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

    def _check_numbers(self) -> None:
        if not self.host:
            raise ValueError(f"host={self.host!r}; allowed: an address of this machine, such as 127.0.0.1 or 0.0.0.0")
        for name, low, high in (
            ("port", 0, 65535),
            ("http_port", 0, 65535),
            ("metrics_port", 0, 65535),
            ("max_message_bytes", 1024, 2**31 - 1),
            ("max_concurrent_streams", 1, 2**31 - 1),
            ("max_calls", 1, 2**31 - 1),
            ("default_max_tokens", 1, 2**31 - 1),
            ("min_priority", -MAX_PRIORITY, 0),
            ("max_priority", 0, MAX_PRIORITY),
        ):
            value = getattr(self, name)
            if name in ("http_port", "metrics_port", "max_message_bytes") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name}={value!r}; allowed: {low}..{high}")
        ports = [("port", self.port), ("http_port", self.http_port), ("metrics_port", self.metrics_port)]
        for index, (name, value) in enumerate(ports):
            if value and (same := [other for other, before in ports[:index] if before == value]):
                raise ValueError(f"{name}={value} is given as {same[0]} as well; give another one, or 0 for any")
        for name, least in (
            ("keepalive_time", 1.0),
            ("keepalive_timeout", 1.0),
            ("min_ping_interval", 0.0),
            ("max_connection_age", 1.0),
            ("max_connection_age_grace", 1.0),
            ("write_timeout", 0.001),
            ("drain_timeout", 0.0),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < math.inf:
                raise ValueError(f"{name}={value!r}; allowed: at least {least:g} seconds")

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

    def _check_defaults(self) -> None:
        if self.default_method is not None and self.default_method not in tuple(Method):
            raise ValueError(f"default_method={self.default_method!r}; allowed: {', '.join(Method)}")
        if wrong := [name for name in self.served_model_names if not name or not name.isprintable()]:
            raise ValueError(f"served_model_names contains {wrong[0]!r}; allowed: names that can be printed")
        if wrong := [name for name in self.allowed_hosts if not HOST_NAME.fullmatch(name)]:
            raise ValueError(
                f"allowed_hosts contains {wrong[0]!r}; allowed: * or a name or address without scheme, port and path, "
                "such as llm.example.com or [2001:db8::1]"
            )
        if wrong := [origin for origin in self.allow_origins if not ORIGIN.fullmatch(origin)]:
            raise ValueError(
                f"allow_origins contains {wrong[0]!r}; allowed: * or SCHEME://HOST[:PORT], such as "
                "https://app.example.com, without a path"
            )
        if self.log_format not in LOG_FORMATS:
            raise ValueError(f"log_format={self.log_format!r}; allowed: {', '.join(LOG_FORMATS)}")
        if self.unknown_fields not in UNKNOWN_FIELDS:
            raise ValueError(f"unknown_fields={self.unknown_fields!r}; allowed: {', '.join(UNKNOWN_FIELDS)}")
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
