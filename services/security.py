"""Bearer tokens and certificates: reading them, and refusing what could not work. Knows nothing about requests."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import grpc

Configuration = TypeVar("Configuration")

logger = logging.getLogger(__name__)


def read_tokens(path: Path, name: str = "auth_token_file") -> tuple[str, ...]:
    """One token a line; empty lines and lines that begin with # do not count. `name`: of the setting.

    Raises ValueError, which never shows a token.
    """
    tokens = []
    for number, line in enumerate(_read(name, path).decode(errors="replace").splitlines(), 1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(f"{name}={str(path)!r}: line {number} is no token; allowed: ASCII without spaces")
        tokens.append(token)
    if not tokens:
        raise ValueError(f"{name}={str(path)!r} holds no token; write one a line")
    return tuple(tokens)


class TokenFile:
    """The tokens of a file as it is now. A file that cannot be used changes nothing: the former tokens stay, and the
    log says once why. Use it in one thread."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError as `read_tokens` does."""
        self._path, self._seen = path, _stamp(path)
        self._tokens = read_tokens(path)

    def knows(self, token: str) -> bool:
        """Whether `token` is one of them; reads the file if it has changed since the last call."""
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
    """The token in a header of that name; empty if there is none, which is no valid token. Tokens are ASCII."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.isascii() else ""


def caller_with(token: str) -> str:
    """Identifies the caller: the same for all calls with one token, different for any two tokens; a hash, so that the
    token is not revealed."""
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def is_known(token: str, tokens: Iterable[str]) -> bool:
    """Whether `token` is one of `tokens`, in a time that does not depend on how much of it is right."""
    matches = [hmac.compare_digest(token.encode(), known.encode()) for known in tokens]
    return any(matches)


def is_loopback(host: str) -> bool:
    """Whether traffic to `host` never leaves this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_tls(cert: Path, key: Path, client_ca: Path | None) -> None:
    """Raises ValueError if the key is not the certificate's, or a file is not PEM: gRPC would only say so to every
    client."""
    for name, path in (("tls_cert", cert), ("tls_key", key), ("tls_client_ca", client_ca)):
        if path is not None:
            _read(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # without it, OpenSSL would ask on the terminal
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
    """TLS; with `client_ca`, only for clients whose certificate it has signed. Files that change hold from the next
    connection on."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        authority = _read("tls_client_ca", client_ca) if client_ca else None
        return grpc.ssl_server_certificate_configuration([(_read("tls_key", key), _read("tls_cert", cert))], authority)

    files = _Files(cert, key, client_ca, configuration)
    return grpc.dynamic_ssl_server_credentials(
        configuration(), files.changed, require_client_authentication=client_ca is not None
    )


def token_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The bearer token in the metadata of a gRPC call; empty if there is none."""
    for key, value in metadata:
        if key == "authorization":
            return bearer_token(str(value))
    return ""


def caller_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Who calls, by the token in the metadata of a gRPC call."""
    return caller_with(token_of(metadata))


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """The same, for servers of Python's."""

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
        """In every handshake, whether the client names a host or not."""
        held[0] = files.changed() or held[0]
        connection.context = held[0]

    first.sni_callback = choose
    return first


class _Files(Generic[Configuration]):
    """Certificate, key and authorities as they are now: certificates expire, and are renewed by writing new files."""

    def __init__(
        self, cert: Path, key: Path, client_ca: Path | None, configuration: Callable[[], Configuration]
    ) -> None:
        """`configuration` reads them."""
        self._cert, self._key, self._client_ca, self._configuration = cert, key, client_ca, configuration
        self._seen = self._stamps()

    def changed(self) -> Configuration | None:
        """Called before every handshake, from any thread: the new configuration; None: it has not changed."""
        if (stamps := self._stamps()) == self._seen:
            return None
        self._seen = stamps
        try:
            check_tls(self._cert, self._key, self._client_ca)
            configuration = self._configuration()
        except (ValueError, OSError) as error:  # the files are written one after the other
            logger.warning("certificates have changed and cannot be used; the former ones stay: %s", error)
            return None
        logger.info("certificates have changed; new connections have the new ones")
        return configuration

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._cert, self._key, self._client_ca) if path is not None)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs once the file is written or replaced; None: there is none. The size tells two writes within one tick of
    the file system's clock apart."""
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
