"""Reads bearer tokens and certificates, and refuses unusable ones; checks the host names that callers use. Knows
nothing about requests."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import grpc

Configuration = TypeVar("Configuration")

logger = logging.getLogger(__name__)
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
HOST_NAME = re.compile(r"\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
"""Name or address of a host as URLs write it, without a port; or `*`."""
MAX_SHOWN = 64


def read_tokens(path: Path, name: str = "auth_token_file") -> tuple[str, ...]:
    """Read the tokens of a file, one a line; empty lines and lines that begin with # are skipped. `name`: the setting
    that errors name.

    Raises ValueError; its message never shows a token.
    """
    tokens = []
    for number, line in enumerate(_read(name, path).decode(errors="replace").splitlines(), 1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(f"{name}={str(path)!r}: line {number} is not a token; allowed: ASCII without spaces")
        tokens.append(token)
    if not tokens:
        raise ValueError(f"{name}={str(path)!r} holds no token; write one a line")
    return tuple(tokens)


class TokenFile:
    """Holds the tokens of a file and follows its changes. If a changed file cannot be used, the former tokens stay
    valid, and the reason is logged once. Use it in one thread."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError as `read_tokens` does."""
        self._path, self._seen = path, _stamp(path)
        self._tokens = read_tokens(path)

    def knows(self, token: str) -> bool:
        """Return whether `token` is in the file. Reads the file again if it has changed since the last call."""
        if (stamp := _stamp(self._path)) != self._seen:
            self._seen = stamp
            self._read()
        return is_known(token, self._tokens)

    def _read(self) -> None:
        try:
            self._tokens = read_tokens(self._path)
        except ValueError as error:
            logger.error("tokens have changed and cannot be used; the former ones stay: %s", error)
        else:
            logger.info("tokens have changed; there are %d", len(self._tokens))


def bearer_token(authorization: str) -> str:
    """Return the bearer token in an `authorization` header. Without an ASCII token returns "", which is never valid."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.isascii() else ""


def caller_with(token: str) -> str:
    """Return an id of the caller that sends this token: a hash, so that the token is not revealed. Empty without a
    token."""
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def is_known(token: str, tokens: Iterable[str]) -> bool:
    """Return whether `token` is one of `tokens`. The time taken does not depend on how many of its characters match."""
    matches = [hmac.compare_digest(token.encode(), known.encode()) for known in tokens]
    return any(matches)


def is_loopback(host: str) -> bool:
    """Return whether traffic to `host` never leaves this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class AllowedHosts:
    """The names by which programs may call a service over HTTP. A web page can make a browser call a service on its
    machine under a name of the page's own, whose address it changes to 127.0.0.1 (DNS rebinding). The browser then
    takes the service for a part of the page, which may read the answers."""

    def __init__(self, host: str, names: Iterable[str] = (), *, has_tokens: bool = False) -> None:
        """`host`: address at which the service listens; `names`: further names. A service on a network can be called by
        names that it does not know, and a page does not know tokens: then any name is allowed unless `names` are
        given."""
        own = LOOPBACK_NAMES if is_loopback(host) else ()
        self._names = (*own, *names)
        self._any = "*" in self._names or (not names and (has_tokens or not own))
        self._known = {name.lower().strip("[]") for name in self._names}

    def refusal(self, given: Iterable[str]) -> str | None:
        """Return why a request with these `Host` headers is refused; None: it is allowed."""
        for host in () if self._any else given:
            name = _without_port(host)
            if name not in self._known and not (is_loopback(name) and "localhost" in self._known):
                shown = host if len(host) <= MAX_SHOWN else f"{host[:MAX_SHOWN]}.."
                return (
                    f"host={shown!r} is not a name of this service; allowed: {', '.join(self._names)}; another name is "
                    "allowed by --allowed-host"
                )
        return None


def _without_port(host: str) -> str:
    """Return the name or address in a `Host` header, in the form in which names are compared."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.strip("[]").rstrip(".").lower()


def check_tls(cert: Path, key: Path, client_ca: Path | None) -> None:
    """Check certificate, key and authorities. Raises ValueError if the key does not belong to the certificate, or if a
    file is not PEM; without this check gRPC would report the error only to each client."""
    for name, path in (("tls_cert", cert), ("tls_key", key), ("tls_client_ca", client_ca)):
        if path is not None:
            _read(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # without a password, OpenSSL would ask on the terminal
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(
            f"tls_cert={str(cert)!r} with tls_key={str(key)!r}: {error}; "
            "give a PEM certificate chain and its own key, not encrypted"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ValueError(
                f"tls_client_ca={str(client_ca)!r}: {error}; give a PEM file of the authorities that sign clients"
            ) from error


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Return TLS credentials of a gRPC server; with `client_ca`, only clients with a certificate signed by it can
    connect. Changed files apply from the next connection on."""

    import grpc

    def configuration() -> grpc.ServerCertificateConfiguration:
        authority = _read("tls_client_ca", client_ca) if client_ca else None
        return grpc.ssl_server_certificate_configuration([(_read("tls_key", key), _read("tls_cert", cert))], authority)

    files = _Files(cert, key, client_ca, configuration)
    return grpc.dynamic_ssl_server_credentials(
        configuration(), files.changed, require_client_authentication=client_ca is not None
    )


def token_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the bearer token in the metadata of a gRPC call; empty if there is none."""
    for key, value in metadata:
        if key == "authorization":
            return bearer_token(str(value))
    return ""


def caller_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the id of the caller (`caller_with`) from the metadata of a gRPC call."""
    return caller_with(token_of(metadata))


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Return the TLS context of a server in Python, with the arguments and behaviour of `server_credentials`."""

    def configuration() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: "")
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    files, first = _Files(cert, key, client_ca, configuration), configuration()
    held = [first]

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Select the current context. Called in every handshake, whether the client names a host or not."""
        held[0] = files.changed() or held[0]
        connection.context = held[0]

    first.sni_callback = choose
    return first


class _Files(Generic[Configuration]):
    """Follows changes of certificate, key and authorities: certificates expire, and new files replace them."""

    def __init__(
        self, cert: Path, key: Path, client_ca: Path | None, configuration: Callable[[], Configuration]
    ) -> None:
        """`configuration`: reads the files and returns the server's configuration."""
        self._cert, self._key, self._client_ca, self._configuration = cert, key, client_ca, configuration
        self._seen = self._stamps()

    def changed(self) -> Configuration | None:
        """Return the new configuration; None if the files have not changed, or cannot be used. Called before every
        handshake, from any thread."""
        if (stamps := self._stamps()) == self._seen:
            return None
        self._seen = stamps
        try:
            check_tls(self._cert, self._key, self._client_ca)
            configuration = self._configuration()
        except (ValueError, OSError) as error:  # files are written one by one and may not match yet
            logger.warning("certificates have changed and cannot be used; the former ones stay: %s", error)
            return None
        logger.info("certificates have changed; new connections have the new ones")
        return configuration

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._cert, self._key, self._client_ca) if path is not None)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file is written or replaced; None if there is no file. The size
    distinguishes two writes within one tick of the file system's clock."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r}: {error.strerror}; give a file that can be read") from error
