"""The store of a worker group whose processes are on several hosts: it listens on the loopback interface, and the gate
on the network passes on nobody who does not know the group's secret. The same holds for members of gloo's groups."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

from services.link import store as stores
from services.link.base import LinkError
from services.link.distributed import make_group
from services.link.store import Gate, StoreServer, connect_store
from services.security import is_loopback

SECRET = "secret"


@pytest.fixture
def network() -> str:
    """An address of this machine by which other machines reach it."""
    addresses = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    outside = [address for address in addresses if not is_loopback(address)]
    if not outside:
        pytest.skip("this machine is on no network")
    return outside[0]


@pytest.fixture
def server(network) -> Iterator[StoreServer]:
    server = StoreServer(network, SECRET, 20.0)
    yield server
    server.close()


def test_only_the_gate_is_on_the_network(network):
    def ours() -> set[tuple[str, int]]:
        return {tuple(one.laddr) for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}

    before = ours()
    server = StoreServer(network, SECRET, 20.0)
    inside = {one for one in ours() - before if is_loopback(one[0])}
    assert ours() - before - inside == {(network, server.port)} and len(inside) == 1
    server.close()
    assert (network, server.port) not in ours()


def test_members_share_the_store(server, network):
    one, other = (connect_store(network, server.port, SECRET, 20.0) for _ in range(2))
    one.set("name", b"x" * 300_000)
    assert other.get("name") == server.store.get("name") == b"x" * 300_000
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.get, "later")
        time.sleep(0.2)
        assert not waiting.done()
        server.store.set("later", "now")
        assert waiting.result(20) == b"now"


def test_who_does_not_know_the_secret_reaches_nothing(server, network):
    server.store.set("name", "value")
    with pytest.raises(LinkError, match="before it proved that it knows the secret"):
        connect_store(network, server.port, "guess", 5.0)
    with pytest.raises(dist.DistError):
        dist.TCPStore(network, server.port, is_master=False, timeout=stores.timedelta(seconds=2)).get("name")
    assert connect_store(network, server.port, SECRET, 20.0).get("name") == b"value"


def test_a_listener_without_the_secret_is_noticed():
    """It learns nothing: a proof for one connection is worthless on another."""
    gate = Gate("127.0.0.1", "another", 1)
    with pytest.raises(LinkError):
        stores._tunnel("127.0.0.1", gate.port, SECRET, 5.0)
    gate.close()


@pytest.mark.slow
def test_silent_connections_keep_nobody_out(server, network, monkeypatch):
    """Of more than `MAX_UNPROVEN` the oldest is closed, so a member is let in at once; the others after a while."""
    monkeypatch.setattr(stores, "PROOF_SECONDS", 20.0)
    silent = [socket.create_connection((network, server.port), 20) for _ in range(stores.MAX_UNPROVEN + 20)]
    for _ in range(3):
        connect_store(network, server.port, SECRET, 20.0).set("name", "value")
    assert server.store.get("name") == b"value"
    for connection in silent:
        with connection:
            connection.settimeout(60)
            assert len(connection.recv(stores.NONCE_BYTES, socket.MSG_WAITALL)) in (0, stores.NONCE_BYTES)
            assert connection.recv(100) == b""


def test_the_gate_outlives_a_lack_of_descriptors(server, network):
    """The process that serves the store also holds the connections of callers, which may use up its descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early:
        free = os.dup(early.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            early.connect((network, server.port))
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connect_store(network, server.port, SECRET, 20.0).set("name", "value")
    assert server.store.get("name") == b"value"


def test_another_process_cannot_use_a_tunnel(server, network):
    """A tunnel's port of the loopback interface takes a connection of its own process only."""
    assert not stores._is_ours(1, server.port)
    port = stores._tunnel(network, server.port, SECRET, 20.0)
    knock = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(1))"
    stranger = subprocess.run([sys.executable, "-c", knock], capture_output=True, text=True, timeout=60, check=True)
    assert stranger.stdout == "b''\n", "the connection is closed"
    with socket.create_connection(("127.0.0.1", port)) as mine:
        assert stores._is_ours(mine.getsockname()[1], port)


def test_members_of_a_group_prove_themselves():
    """Gloo takes any connection for a member; a member with a wrong secret is found before a message is sent."""
    server = StoreServer("127.0.0.1", SECRET, 20.0)

    def join(rank: int, secrets: dict[int, str], name: str) -> dist.ProcessGroup:
        store = connect_store("127.0.0.1", server.port, secrets[rank], 20.0)
        return make_group(store, name, rank, 3, 20.0)

    def joined(secrets: dict[int, str], name: str) -> list:
        with ThreadPoolExecutor(3) as pool:
            return [
                each.exception(60) or each.result() for each in [pool.submit(join, r, secrets, name) for r in range(3)]
            ]

    groups = joined(dict.fromkeys(range(3), SECRET), "members")
    sums = [torch.full((4,), 10.0**rank) for rank in range(3)]
    for work in [group.allreduce([part]) for group, part in zip(groups, sums)]:
        work.wait()
    assert [part.tolist() for part in sums] == [[111.0] * 4] * 3
    errors = joined({0: SECRET, 1: "guess", 2: SECRET}, "stranger")
    assert all(isinstance(error, LinkError) for error in errors), errors
    assert "member 1 of stranger does not know the secret of this worker group" in str(errors[0])
