"""The store in which the processes of a worker group find each other: torch's `TCPStore`, which asks for no credential.
So it listens on the loopback interface only. If the group may be spread over several hosts, a gate listens on the
network in its place, and passes on connections that prove that they know the group's secret. What passes through is
not encrypted.

Knows nothing about what is stored."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from datetime import timedelta

import psutil
import torch.distributed as dist

from services.link.base import LinkError, first_line, keyed_hash
from services.security import is_loopback

LOOPBACK = "127.0.0.1"
NONCE_BYTES = PROOF_BYTES = 32
PROOF_SECONDS = 10.0
"""Time for a connection to prove that it knows the secret."""
MAX_UNPROVEN = 64
"""Connections that may be about to prove it; for a further one the oldest is closed."""
ACCEPT_AGAIN_SECONDS = 0.1
"""Pause after a connection could not be accepted, because the process has as many files or threads as it may have."""
CHUNK = 1 << 16
logger = logging.getLogger(__name__)


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class GroupStore(dist.TCPStore):
    """A connection to the store of a worker group."""

    network = LOOPBACK
    """Address of the store's host on the network that connects the group's hosts; loopback: there is one host."""
    secret = ""
    """Secret of the worker group."""


class StoreServer:
    """Serves a store. `store` is this process's own connection."""

    def __init__(self, host: str, secret: str, timeout: float) -> None:
        """`host`: address of this host, by which the group's other processes reach it. `timeout`: seconds that a get
        waits for a key."""
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        # The store would listen on every network if it bound a port itself.
        self.store = GroupStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )
        self.store.network, self.store.secret = host, secret
        self._gate = None if is_loopback(host) else Gate(host, secret, port)
        self.port = port if self._gate is None else self._gate.port
        """Port for `connect_store`."""

    def close(self) -> None:
        """Accept no more connections through the gate."""
        if self._gate is not None:
            self._gate.close()


def connect_store(host: str, port: int, secret: str, timeout: float) -> GroupStore:
    """Connect to the store that a `StoreServer` serves at this address. Raises LinkError if the listener does not know
    the secret."""
    if not is_loopback(host):
        port = _tunnel(host, port, secret, timeout)
    store = GroupStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout))
    store.network, store.secret = host, secret
    return store


class Gate:
    """Listens on the network, and connects those who know the secret to a port of the loopback interface."""

    def __init__(self, host: str, secret: str, port: int) -> None:
        """`port`: where connections lead to."""
        self._secret, self._leads_to = secret, port
        self._listener = socket.create_server((host, 0), family=family_of(host))
        self.port: int = self._listener.getsockname()[1]
        self._unproven: dict[socket.socket, None] = {}
        """Connections that have proved nothing yet, the oldest first."""
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._refused = 0
        threading.Thread(target=self._accept, name="gate", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        # `close` alone would not wake the thread that waits in `accept`.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError:
                self._closed.wait(ACCEPT_AGAIN_SECONDS)
                continue
            self._make_room(connection)
            try:
                threading.Thread(target=self._admit, args=(connection, address[0]), name="gate", daemon=True).start()
            except RuntimeError:  # no further thread can be started
                self._take_out(connection)
                connection.close()
                self._closed.wait(ACCEPT_AGAIN_SECONDS)

    def _make_room(self, connection: socket.socket) -> None:
        """Add an unproven connection. If there are too many, end the oldest: a member proves at once that it knows the
        secret, so connections that say nothing keep no member out."""
        with self._guard:
            if len(self._unproven) >= MAX_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._unproven[connection] = None

    def _take_out(self, connection: socket.socket) -> None:
        with self._guard:
            self._unproven.pop(connection, None)

    def _admit(self, connection: socket.socket, address: str) -> None:
        try:
            try:
                _prove(connection, self._secret, ours="store", theirs="member", timeout=PROOF_SECONDS)
            finally:
                self._take_out(connection)
            inside = socket.create_connection((LOOPBACK, self._leads_to), PROOF_SECONDS)
        except (OSError, LinkError) as error:
            connection.close()
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # a stranger must not fill the log
                logger.warning(
                    "connections to the worker group's store refused: %d; from %s: %s", self._refused, address, error
                )
            return
        _join(connection, inside)


def _tunnel(host: str, port: int, secret: str, timeout: float) -> int:
    """Connect to a gate; return the port of the loopback interface that leads through it. It takes one connection, and
    from this process only. Raises LinkError."""
    try:
        outside = socket.create_connection((host, port), timeout)
        _prove(outside, secret, ours="member", theirs="store", timeout=min(timeout, PROOF_SECONDS))
    except OSError as error:
        raise LinkError(f"the worker group's store at {host}:{port} cannot be reached: {first_line(error)}") from error
    listener = socket.create_server((LOOPBACK, 0), backlog=1)
    listener.settimeout(timeout)
    here: int = listener.getsockname()[1]

    def accept() -> None:
        with listener:
            try:
                connection, (_, there) = listener.accept()
                while not _is_ours(there, here):
                    connection.close()
                    connection, (_, there) = listener.accept()
            except OSError:
                outside.close()
                return
        _join(connection, outside)

    threading.Thread(target=accept, name="tunnel", daemon=True).start()
    return here


def _is_ours(local: int, remote: int) -> bool:
    """Return whether this process holds a connection between these ports."""
    connections = psutil.Process().net_connections("tcp")
    return any(one.raddr and (one.laddr.port, one.raddr.port) == (local, remote) for one in connections)


def _prove(connection: socket.socket, secret: str, *, ours: str, theirs: str, timeout: float) -> None:
    """Prove to the other side that this side knows the secret, and check its proof. `ours`, `theirs`: what the sides
    are, so that neither can send back the other's proof. Raises LinkError and OSError."""
    deadline = time.monotonic() + timeout
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce)
    there = _receive(connection, NONCE_BYTES, deadline)
    if ours == "member":  # so that a stranger is told nothing that was made with the secret
        connection.sendall(_proof(secret, ours, there + nonce))
    if not hmac.compare_digest(_receive(connection, PROOF_BYTES, deadline), _proof(secret, theirs, nonce + there)):
        raise LinkError("the other side does not know the secret of this worker group")
    if ours != "member":
        connection.sendall(_proof(secret, ours, there + nonce))
    connection.settimeout(None)


def _proof(secret: str, side: str, nonces: bytes) -> bytes:
    return keyed_hash(secret, side.encode() + nonces)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := connection.recv(size - len(data))):
            raise LinkError("the other side closed the connection before it proved that it knows the secret")
        data += part
    return data


def _join(one: socket.socket, other: socket.socket) -> None:
    """Pass on everything that arrives at either socket until one side ends; then close both."""
    for connection in (one, other):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    back = threading.Thread(target=_pass_on, args=(other, one), name="tunnel", daemon=True)
    back.start()
    _pass_on(one, other)
    back.join()
    one.close()
    other.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for connection in (source, target):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
