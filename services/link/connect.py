"""Makes the ends of a link of either kind. All who take part meet at a `TCPStore`, under names that carry the epoch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from services.link.base import CoordinatorEnd, LeaderEnd, PublishEnd, TakeEnd
from services.link.distributed import DistributedEnd, DistributedPublish, DistributedTake, make_group
from services.link.streams import StreamCoordinatorEnd, StreamPublish, StreamServer
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
    publish: PublishEnd | None
    """At the draft."""
    take: TakeEnd | None
    """At the target."""

    def close(self) -> None:
        for end in (self.publish, self.take, self.coordinator):
            if end is not None:
                end.close()


def leader_ends(meeting: Meeting, store: dist.Store, side: str, host: str, device: torch.device, peer_device: torch.device) -> LeaderEnds:
    """The ends that the leader of `side` needs. Between the leaders NCCL is used if both are on GPUs."""
    if meeting.link == "grpc":
        server = StreamServer(host, meeting.epoch, meeting.secret)
        store.set(meeting.name(f"{side}/address"), server.address)
        if side == "target":
            return LeaderEnds(server, None, server)
        address = store.get(meeting.name("target/address")).decode()
        return LeaderEnds(server, StreamPublish(address, meeting.epoch, meeting.secret), None)
    end = DistributedEnd(make_group(store, meeting.name(f"{side}/link"), 1, 2, meeting.start_timeout), 1, pb.WorkRequest)
    between = device if {device.type, peer_device.type} == {"cuda"} else torch.device("cpu")
    pair = make_group(store, meeting.name("pair"), 0 if side == "draft" else 1, 2, meeting.start_timeout, between)
    if side == "draft":
        return LeaderEnds(end, DistributedPublish(pair, meeting.epoch, between), None)
    return LeaderEnds(end, None, DistributedTake(pair, meeting.epoch, between))
