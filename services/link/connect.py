"""Makes the ends of a link of either kind. All who take part meet at a `TCPStore`, under names that carry the epoch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from services.link.base import CoordinatorEnd, LeaderEnd, PeerEnd
from services.link.distributed import DevicePeer, DistributedEnd, DistributedPeer, make_group
from services.link.streams import StreamCaller, StreamCoordinatorEnd, StreamServer
from services.pb import particles_pb2 as pb

LINKS = ("nccl", "grpc")


@dataclass(frozen=True)
class Meeting:
    """Where and as what the processes of one life of the gang find each other."""

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


def coordinator_end(meeting: Meeting, store: dist.Store, side: str) -> CoordinatorEnd:
    """The coordinator's end of the link to the leader of `side`."""
    if meeting.link == "grpc":
        return StreamCoordinatorEnd(store.get(meeting.name(f"{side}/address")).decode(), meeting.secret)
    group = make_group(store, meeting.name(f"{side}/link"), 0, 2, meeting.start_timeout)
    return DistributedEnd(group, 0, pb.WorkResponse)


@dataclass(frozen=True)
class LeaderEnds:
    coordinator: LeaderEnd
    peer: PeerEnd

    def close(self) -> None:
        self.peer.close()
        self.coordinator.close()


def leader_ends(meeting: Meeting, store: dist.Store, side: str, host: str, device: torch.device, peer_device: torch.device) -> LeaderEnds:
    """The ends that the leader of `side` needs. Between the leaders NCCL is used if both are on GPUs."""
    if meeting.link == "grpc":
        server = StreamServer(host, meeting.epoch, meeting.secret)
        store.set(meeting.name(f"{side}/address"), server.address)
        if side == "target":
            return LeaderEnds(server, server.peer)
        address = store.get(meeting.name("target/address")).decode()
        return LeaderEnds(server, StreamCaller(address, meeting.epoch, meeting.secret))
    end = DistributedEnd(make_group(store, meeting.name(f"{side}/link"), 1, 2, meeting.start_timeout), 1, pb.WorkRequest)
    on_gpus = {device.type, peer_device.type} == {"cuda"}
    rank, between = (0 if side == "draft" else 1), device if on_gpus else torch.device("cpu")
    # A communicator for each direction: within one, messages would have to be sent and received in one order.
    by_sender = [make_group(store, meeting.name(f"from {name}"), rank, 2, meeting.start_timeout, between) for name in ("draft", "target")]
    there, back = by_sender[rank], by_sender[1 - rank]
    return LeaderEnds(end, DevicePeer(there, back, rank) if on_gpus else DistributedPeer(there, back, rank, meeting.epoch))
