"""Makes the ends of a link of either kind. Their rendezvous is a `TCPStore`, under names that carry the epoch."""

from __future__ import annotations

import hmac
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from services.link.base import CoordinatorEnd, LeaderEnd, LinkError, PeerEnd, failure_text
from services.link.distributed import DistributedEnd, make_group
from services.link.peer import DevicePeer, MessagePeer
from services.link.streams import StreamCaller, StreamServer, proof
from services.pb import particles_pb2 as pb
from smc.types import ModelRole

PEER = "target/peer"
"""Where the draft's leader finds the target's."""


@dataclass(frozen=True)
class Rendezvous:
    """Where and as what the processes of one life of the gang, or of the draft in it, find each other."""

    host: str
    port: int
    """Of the `TCPStore`."""
    epoch: int
    secret: str
    link: str
    """`nccl` (torch.distributed: gloo on CPUs and towards the coordinator) or `grpc`."""
    start_timeout: float
    """Seconds to wait for the others to arrive."""

    def store(self) -> dist.TCPStore:
        return dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.start_timeout))

    def name(self, what: str) -> str:
        return f"{self.epoch}/{what}"

    def report_failure(self, store: dist.TCPStore, role: ModelRole, error: Exception) -> None:
        """Write down why a rank of `side` ends, before it closes its links: those break for everybody, and what is
        under way on them may be lost. A link that broke is no reason of its own."""
        if not isinstance(error, LinkError):
            with suppress(RuntimeError):  # the store has gone with the rest of the gang
                store.set(self.name(f"{role}/failure"), failure_text(error))

    def failure_report(self, store: dist.TCPStore, role: ModelRole) -> str | None:
        """Why a rank of `side` ended, if it has said so."""
        name = self.name(f"{role}/failure")
        return store.get(name).decode() if store.check([name]) else None


def coordinator_end(rendezvous: Rendezvous, store: dist.TCPStore, role: ModelRole) -> CoordinatorEnd:
    """The coordinator's end of the link to the leader of `side`."""
    if rendezvous.link == "grpc":
        return StreamCaller(_address(rendezvous, store, role), rendezvous.secret, "Work")
    group = make_group(store, rendezvous.name(f"{role}/link"), 0, 2, rendezvous.start_timeout)
    return DistributedEnd(group, 0, pb.WorkResponse)


@dataclass(frozen=True)
class LeaderEnds:
    coordinator: LeaderEnd
    peer: PeerEnd
    server: StreamServer | None = None

    def close(self) -> None:
        """Twice is fine, for an end that another has taken the place of, too."""
        self.peer.close()
        self.coordinator.close()
        if self.server is not None:
            self.server.close()


def leader_ends(
    rendezvous: Rendezvous, store: dist.TCPStore, role: ModelRole, host: str, between: torch.device
) -> LeaderEnds:
    """The ends that the leader of `side` needs. `between`: device of what the leaders tell each other; on a GPU it goes
    over NCCL."""
    if rendezvous.link == "grpc":
        server = StreamServer(host, rendezvous.secret)
        _publish(rendezvous, store, role, server.address)
        return LeaderEnds(server.coordinator, peer_end(rendezvous, store, role, between, server), server)
    end = DistributedEnd(
        make_group(store, rendezvous.name(f"{role}/link"), 1, 2, rendezvous.start_timeout), 1, pb.WorkRequest
    )
    return LeaderEnds(end, peer_end(rendezvous, store, role, between))


def peer_end(
    rendezvous: Rendezvous,
    store: dist.TCPStore,
    role: ModelRole,
    between: torch.device,
    server: StreamServer | None = None,
) -> PeerEnd:
    """The end of the link to the other leader, once that has come. `server`: of this leader, with streams; its end for
    an earlier peer is closed."""
    if server is not None and role == ModelRole.TARGET:
        end = server.renew_peer()
        _publish(rendezvous, store, PEER, server.address)
        return MessagePeer(end, rendezvous.epoch, pb.ExchangeResponse)
    if server is not None:
        caller = StreamCaller(_address(rendezvous, store, PEER), rendezvous.secret, "Exchange")
        return MessagePeer(caller, rendezvous.epoch, pb.ExchangeRequest)
    rank = 0 if role == ModelRole.DRAFT else 1

    def group(name: str, at: torch.device | str = "cpu") -> dist.ProcessGroup:
        return make_group(store, rendezvous.name(name), rank, 2, rendezvous.start_timeout, at)

    if between.type == "cuda":
        by_sender = [group(f"from {name}", between) for name in (ModelRole.DRAFT, ModelRole.TARGET)]
        return DevicePeer(by_sender[rank], by_sender[1 - rank], rank)
    return MessagePeer(DistributedEnd(group("pair"), rank, pb.ExchangeRequest), rendezvous.epoch, pb.ExchangeRequest)


def _publish(rendezvous: Rendezvous, store: dist.TCPStore, who: str, address: str) -> None:
    """Say where `who` listens. Anybody who reaches the store can write to it, so what is said there is signed."""
    name = rendezvous.name(f"{who}/address")
    store.set(name, f"{address} {proof(rendezvous.secret, f'{name} {address}')}")


def _address(rendezvous: Rendezvous, store: dist.TCPStore, who: str) -> str:
    """Where `who` listens. Raises LinkError if somebody else says so."""
    name = rendezvous.name(f"{who}/address")
    address, _, signature = store.get(name).decode().partition(" ")
    if not hmac.compare_digest(signature, proof(rendezvous.secret, f"{name} {address}")):
        raise LinkError(
            f"the address of {who}, {address!r}, was not written by this gang; look for who else uses its store"
        )
    return address
