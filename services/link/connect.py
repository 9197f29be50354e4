"""Creates the ends of a link of either kind. Processes find each other through a store, under names that include the
incarnation. Also defines the ends between the two leaders: messages over any transport, or transfers from GPU to
GPU."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import SAME_VERSION, End, LinkError, PeerEnd, failure_text
from services.link.distributed import DistributedEnd, make_group
from services.link.messages import TRANSFERS, Transfer, check_incarnation
from services.link.store import GroupStore, connect_store
from services.link.streams import StreamCaller, StreamServer, proof
from smc.round.tensors import message_layouts
from smc.types import ModelRole

PEER = "target/peer"
"""Name under which the draft's leader finds the address of the target's leader."""


class MessagePeer:
    """A `services.link.base.PeerEnd` that sends each tensor as a message with incarnation, name and number."""

    def __init__(self, end: End, incarnation: int) -> None:
        self._end, self._incarnation = end, incarnation
        self._sent: Counter[str] = Counter()
        """Number of the last message of each name."""
        self._received: Counter[str] = Counter()

    def send(self, name: str, tensor: Tensor) -> None:
        data = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        self._sent[name] += 1
        self._end.send(TRANSFERS.encode(Transfer(self._incarnation, name, self._sent[name], data)))

    def receive(self, name: str, here: Tensor, timeout: float) -> None:
        self._received[name] += 1
        sequence = self._received[name]
        message = TRANSFERS.decode(self._end.receive(timeout))
        check_incarnation(message, self._incarnation)
        if (message.name, message.sequence) != (name, sequence):
            raise LinkError(f"{message.name}, number {message.sequence}, came; expected {name}, number {sequence}")
        here.copy_(torch.frombuffer(bytearray(message.data), dtype=here.dtype).view(here.shape))

    def settle(self) -> None:
        """Does nothing: messages are copies."""

    def close(self) -> None:
        self._end.close()


class DevicePeer:
    """A `services.link.base.PeerEnd` between GPUs. Tensors go from device to device in the order of the current stream,
    and the host does not wait. Names, numbers and incarnations are not checked: each communicator belongs to one
    incarnation and keeps the order. Layouts were compared before (`Rendezvous.check_layouts`)."""

    def __init__(self, there: dist.ProcessGroup, back: dist.ProcessGroup) -> None:
        """`there` carries sent tensors, `back` received ones: within one group, both sides would have to send and
        receive in one common order."""
        self._there: dist.ProcessGroup | None = there
        self._back: dist.ProcessGroup | None = back
        self._other = 1 - there.rank()
        self._sends: list[dist.Work] = []

    def send(self, name: str, tensor: Tensor) -> None:
        assert self._there is not None
        self._sends.append(self._there.send([tensor.contiguous()], self._other, 0))

    def receive(self, name: str, here: Tensor, timeout: float) -> None:
        assert self._back is not None
        self._back.recv([here], self._other, 0).wait()

    def settle(self) -> None:
        for send in self._sends:
            send.wait()
        self._sends.clear()

    def close(self) -> None:
        self._there = self._back = None
        self._sends.clear()


def progress_reporter(store: GroupStore, name: str) -> Callable[[float], None]:
    """Return a function that reports a share (0 to 1) to the supervisor, as a percentage under `name`."""
    last = -1

    def report(share: float) -> None:
        nonlocal last
        percent = int(100 * share)
        if percent > last:
            last = percent
            store.set(name, str(percent))

    return report


@dataclass(frozen=True)
class Rendezvous:
    """Store and names by which the processes of one incarnation (of the worker group, or of the draft in it) find each
    other."""

    host: str
    port: int
    """Port of the store (`services.link.store.StoreServer`)."""
    incarnation: int
    secret: str
    link: str
    """`nccl` (torch.distributed: gloo on CPUs and towards the coordinator) or `grpc`."""
    start_timeout: float
    """Seconds to wait for the other processes."""

    def store(self) -> GroupStore:
        return connect_store(self.host, self.port, self.secret, self.start_timeout)

    def name(self, what: str) -> str:
        return f"{self.incarnation}/{what}"

    def loaded(self, role: ModelRole, rank: int) -> str:
        """Return the name under which a rank reports how many percent of its weights it has loaded."""
        return self.name(f"{role}/loaded/{rank}")

    @property
    def draft_degree(self) -> str:
        """The name under which the ranks report among how many of them the draft is divided, if they choose it."""
        return self.name("draft/degree")

    @property
    def warmed(self) -> str:
        """The name under which the coordinator reports how many percent of the warm-up it has run."""
        return self.name("warmed")

    def check_layouts(self, store: GroupStore) -> None:
        """Compare the layouts of the tensors that ranks exchange as bytes with those of the rank that came first.
        Raises LinkError if they differ: the other rank would misread the tensors."""
        here = hashlib.sha256(message_layouts().encode()).hexdigest()[:16]
        first = store.compare_set(self.name("layouts"), "", here).decode()
        if first != here:
            raise LinkError(f"a rank has tensors with layouts {first}, this one has {here}; {SAME_VERSION}")

    def report_failure(self, store: GroupStore, name: str, error: Exception) -> None:
        """Record in the store why one of the ranks `name` ends. Call it before closing the links, on which messages in
        transit may be lost. A broken link is not recorded as a cause."""
        if not isinstance(error, LinkError):
            with suppress(RuntimeError):  # the store has gone with the rest of the worker group
                store.set(self.name(f"{name}/failure"), failure_text(error))

    def failure_report(self, store: GroupStore, name: str) -> str | None:
        """Return why one of the ranks `name` ended, or None if it is not recorded."""
        key = self.name(f"{name}/failure")
        return store.get(key).decode() if store.check([key]) else None


def coordinator_end(rendezvous: Rendezvous, store: GroupStore, name: str) -> End:
    """Return the coordinator's end of the link to the leader of the ranks `name`."""
    if rendezvous.link == "grpc":
        return StreamCaller(_address(rendezvous, store, name), rendezvous.secret, "Work")
    group = make_group(store, rendezvous.name(f"{name}/link"), 0, 2, rendezvous.start_timeout)
    return DistributedEnd(group)


@dataclass(frozen=True)
class LeaderEnds:
    """A leader's ends of its links to the coordinator and to the other leader."""

    coordinator: End
    peer: PeerEnd | None
    """None if there is no other leader: this one has both models."""
    server: StreamServer | None = None

    def close(self) -> None:
        """Close all ends. May be called twice, and after another end has replaced `peer`."""
        if self.peer is not None:
            self.peer.close()
        self.coordinator.close()
        if self.server is not None:
            self.server.close()


def leader_ends(
    rendezvous: Rendezvous, store: GroupStore, name: str, host: str, between: torch.device | None
) -> LeaderEnds:
    """Return the ends of the leader of the ranks `name`. `between`: device of the tensors between the leaders of both
    models; on a GPU they go over NCCL. None: this leader has both models."""
    server = None
    coordinator: End
    if rendezvous.link == "grpc":
        server = StreamServer(host, rendezvous.secret)
        _publish(rendezvous, store, name, server.address)
        coordinator = server.coordinator
    else:
        coordinator = DistributedEnd(make_group(store, rendezvous.name(f"{name}/link"), 1, 2, rendezvous.start_timeout))
    peer = None if between is None else peer_end(rendezvous, store, ModelRole(name), between, server)
    return LeaderEnds(coordinator, peer, server)


def peer_end(
    rendezvous: Rendezvous,
    store: GroupStore,
    role: ModelRole,
    between: torch.device,
    server: StreamServer | None = None,
) -> PeerEnd:
    """Return the end of the link to the other leader, waiting for that leader where necessary. `server`: this leader's
    server if the link uses gRPC; its end for an earlier peer is closed. Raises LinkError if the other leader is of
    another build, as far as their tensors tell."""
    rendezvous.check_layouts(store)
    if server is not None and role == ModelRole.TARGET:
        end = server.renew_peer()
        _publish(rendezvous, store, PEER, server.address)
        return MessagePeer(end, rendezvous.incarnation)
    if server is not None:
        caller = StreamCaller(_address(rendezvous, store, PEER), rendezvous.secret, "Exchange")
        return MessagePeer(caller, rendezvous.incarnation)
    rank = 0 if role == ModelRole.DRAFT else 1

    def group(name: str, at: torch.device | str = "cpu") -> dist.ProcessGroup:
        return make_group(store, rendezvous.name(name), rank, 2, rendezvous.start_timeout, at)

    if between.type == "cuda":
        by_sender = [group(f"from {name}", between) for name in (ModelRole.DRAFT, ModelRole.TARGET)]
        return DevicePeer(by_sender[rank], by_sender[1 - rank])
    return MessagePeer(DistributedEnd(group("pair")), rendezvous.incarnation)


def _publish(rendezvous: Rendezvous, store: GroupStore, who: str, address: str) -> None:
    """Publish the address where `who` listens. It is signed, since any process that reaches the store can write to
    it."""
    name = rendezvous.name(f"{who}/address")
    store.set(name, f"{address} {proof(rendezvous.secret, f'{name} {address}')}")


def _address(rendezvous: Rendezvous, store: GroupStore, who: str) -> str:
    """Return the address where `who` listens. Raises LinkError if the signature is wrong."""
    name = rendezvous.name(f"{who}/address")
    address, _, signature = store.get(name).decode().partition(" ")
    if not hmac.compare_digest(signature, proof(rendezvous.secret, f"{name} {address}")):
        raise LinkError(
            f"the address of {who}, {address!r}, was not written by this worker group; check what else uses its store"
        )
    return address
