"""Process groups of torch.distributed, and the link over gloo.

Every pair of ends is a process group of two, made over a store that outlives them: when one end dies, only its groups
are lost, and the next incarnation makes new ones. A message is one frame of fixed size; if it is larger, the rest
follows in a second send.

Gloo takes any connection for a member, so the members of its groups prove to each other that they know the worker
group's secret before anything else is sent. NCCL's connections carry a random number that its members learn from the
store. Neither encrypts what it sends."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import CLOSE_SECONDS, LinkError, first_line, keyed_hash
from services.link.store import NONCE_BYTES, GroupStore, family_of
from services.security import is_loopback

FRAME = 32768
"""Bytes of a frame; the first 8 hold the message's size. A round of 128 rows fits."""
_HEAD = 8
_KEPT = 64
"""Maximum number of sends in progress, whose buffers are kept: a buffer that is released before it has been received is
lost silently."""


def make_group(
    store: GroupStore, name: str, rank: int, size: int, timeout: float, device: torch.device | str = "cpu"
) -> dist.ProcessGroup:
    """Create a separate process group: gloo on a CPU, NCCL on a GPU. It listens on the network of the store only.
    `timeout`: seconds for joining and for every collective. Raises LinkError if a member does not know the secret.

    torch's type hints cover neither the creation of these groups nor that they are ProcessGroups, hence `Any`.
    """
    prefix, limit = dist.PrefixStore(name, store), timedelta(seconds=timeout)
    if torch.device(device).type == "cpu":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # By default gloo listens at the address of the host's own name, on many machines the loopback interface.
        options._timeout, options._devices = limit, [gloo.create_device(hostname=_address_towards(store.network))]
        group = gloo(prefix, rank, size, options)
        _prove_membership(group, store.secret, name, limit)
        return group
    if is_loopback(store.network):
        # NCCL has no option for this. By default it prefers every other interface to this one.
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    return nccl(prefix, rank, size, options)


def _prove_membership(group: dist.ProcessGroup, secret: str, name: str, limit: timedelta) -> None:
    """Exchange proofs with every other member that both know the secret. Raises LinkError."""
    rank = group.rank()
    others = [other for other in range(group.size()) if other != rank]
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = _exchanged(group, dict.fromkeys(others, nonce), limit)

    def proof(sender: int, receiver: int, nonces: bytes) -> bytes:
        return keyed_hash(secret, f"{name} {sender} {receiver} ".encode() + nonces)

    proofs = _exchanged(group, {other: proof(rank, other, nonces[other] + nonce) for other in others}, limit)
    for other in others:
        if not hmac.compare_digest(proofs[other], proof(other, rank, nonce + nonces[other])):
            raise LinkError(f"member {other} of {name} does not know the secret of this worker group")


def _exchanged(group: dist.ProcessGroup, sent: dict[int, bytes], limit: timedelta) -> dict[int, bytes]:
    """Send each member its bytes; return those that the members sent, of which there are as many."""
    here = {other: torch.empty(len(data), dtype=torch.uint8) for other, data in sent.items()}
    there = {other: torch.frombuffer(bytearray(data), dtype=torch.uint8) for other, data in sent.items()}
    try:
        works = [group.recv([tensor], other, 0) for other, tensor in here.items()]
        works += [group.send([tensor], other, 0) for other, tensor in there.items()]
        for work in works:
            work.wait(limit)
    except RuntimeError as error:
        raise LinkError(f"a member of the group was lost while it joined: {first_line(error)}") from error
    return {other: tensor.numpy().tobytes() for other, tensor in here.items()}


def _address_towards(host: str) -> str:
    """Return this machine's address on the network over which it reaches `host`. Nothing is sent."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]


class DistributedEnd:
    """Either end of a link, a `services.link.base.End`.

    A receive is always posted: gloo sends nothing before the receiver has posted one, and posting it only then would
    cost a round trip that waits for a thread of a busy process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._other = 1 - group.rank()
        self._group: dist.ProcessGroup | None = group
        """None once the end is closed."""
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: tuple[dist.Work, Tensor] | None = self._post(FRAME)

    def send(self, message: bytes) -> None:
        """Send a message; waits only if the other side is more than `_KEPT` sends behind."""
        assert self._group is not None
        for frame in frames(message):
            try:
                if len(self._sends) == _KEPT:
                    self._sends.popleft()[0].wait()
                self._sends.append((self._group.send([frame], self._other, 0), frame))
            except RuntimeError as error:
                raise LinkError(f"the link broke while sending: {error}") from error

    def receive(self, timeout: float) -> bytes:
        assert self._posted is not None
        frame = self._wait(self._posted, timeout)
        data = message_in(frame, lambda size: self._wait(self._post(size), timeout))
        self._posted = self._post(FRAME)
        return data

    def close(self) -> None:
        """Close the end once sent messages have been received, or after `CLOSE_SECONDS`: the last message of a worker
        may report its failure."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with suppress(RuntimeError):
            while self._sends and (left := deadline - time.monotonic()) > 0:
                self._sends.popleft()[0].wait(timedelta(seconds=left))
        self._group = self._posted = None
        self._sends.clear()

    def _post(self, size: int) -> tuple[dist.Work, Tensor]:
        assert self._group is not None
        tensor = torch.empty(size, dtype=torch.uint8)
        try:
            return self._group.recv([tensor], self._other, 0), tensor
        except RuntimeError as error:
            raise LinkError(f"the link broke: {first_line(error)}") from error

    def _wait(self, posted: tuple[dist.Work, Tensor], timeout: float) -> Tensor:
        work, tensor = posted
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise LinkError(f"the link broke or was silent for {timeout:g} s: {first_line(error)}") from error
        return tensor


def frames(data: bytes) -> list[Tensor]:
    """Return a message as one frame, or as two if it is large."""
    room, first, whole = FRAME - _HEAD, np.empty(FRAME, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8)
    first[:_HEAD].view(np.int64)[0] = len(data)
    first[_HEAD : _HEAD + len(data)] = whole[:room]
    parts = [first] if len(data) <= room else [first, whole[room:].copy()]
    return [torch.from_numpy(part) for part in parts]


def message_in(frame: Tensor, receive: Callable[[int], Tensor]) -> bytes:
    """Return the message whose first frame has arrived. `receive` is called with the size of the second frame, if there
    is one, and returns it."""
    first, room = frame.numpy(), FRAME - _HEAD
    size = int(first[:_HEAD].view(np.int64)[0])
    if size <= room:
        return first[_HEAD : _HEAD + size].tobytes()
    return np.concatenate((first[_HEAD:], receive(size - room).numpy())).tobytes()
