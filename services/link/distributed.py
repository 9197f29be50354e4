"""The link over torch.distributed: gloo for messages; between the leaders NCCL where both are on GPUs, else gloo.

Every pair of ends is a process group of two, made over a `TCPStore` that outlives them: when one end dies, only its groups do,
and the next epoch makes new ones. A message is one frame of fixed size; what does not fit follows in a second send.
"""

from __future__ import annotations

import socket
from collections import deque
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import LinkError
from services.pb import particles_pb2 as pb

FRAME = 8192
"""Bytes; the first 8 hold the message's size. A round of one request with N = 8 fits."""
_HEAD = 8
_PEER_HEAD = 16
_KEPT = 64
"""Sends that may be under way. A buffer that is let go before it has been received is lost without a word."""


def make_group(
    store: dist.TCPStore, name: str, rank: int, size: int, timeout: float, device: torch.device | str = "cpu"
) -> dist.ProcessGroup:
    """A process group of its own: gloo on a CPU, NCCL on a GPU. `timeout` in seconds, for joining and for every collective."""
    prefix, limit = dist.PrefixStore(name, store), timedelta(seconds=timeout)
    if torch.device(device).type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        # By default gloo listens where the host's own name leads, which is the loopback interface on many machines.
        options._timeout, options._devices = limit, [dist.ProcessGroupGloo.create_device(hostname=_address_towards(store.host))]
        return dist.ProcessGroupGloo(prefix, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(prefix, rank, size, options)


def _address_towards(host: str) -> str:
    """Of this machine, on the network on which it reaches `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]


class DistributedEnd:
    """Either end of a link to a leader; `receives` is the message type that arrives here."""

    def __init__(self, group: dist.ProcessGroup, rank: int, receives: type[pb.WorkRequest] | type[pb.WorkResponse]) -> None:
        self._group, self._other, self._receives = group, 1 - rank, receives
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, message: pb.WorkRequest | pb.WorkResponse) -> None:
        """Waits only if the other side is very far behind."""
        for frame in frames(message.SerializeToString()):
            try:
                if len(self._sends) == _KEPT:
                    self._sends.popleft()[0].wait()
                self._sends.append((self._group.send([frame], self._other, 0), frame))
            except RuntimeError as error:
                raise LinkError(f"the link broke while sending: {error}") from error

    def receive(self, timeout: float) -> pb.WorkRequest | pb.WorkResponse:
        frame = torch.empty(FRAME, dtype=torch.uint8)
        self._wait(frame, timeout)
        size = int(frame[:_HEAD].view(torch.int64))
        if size <= FRAME - _HEAD:
            data = frame[_HEAD : _HEAD + size]
        else:
            rest = torch.empty(size - (FRAME - _HEAD), dtype=torch.uint8)
            self._wait(rest, timeout)
            data = torch.cat((frame[_HEAD:], rest))
        return self._receives.FromString(data.numpy().tobytes())

    def close(self) -> None:
        self._group = None
        self._sends.clear()

    def _wait(self, tensor: Tensor, timeout: float) -> None:
        try:
            self._group.recv([tensor], self._other, 0).wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise LinkError(f"the link broke or was silent for {timeout:g} s: {_first_line(error)}") from error


def frames(data: bytes) -> list[Tensor]:
    """A message as one frame, or two if it is large."""
    room = FRAME - _HEAD
    first = torch.empty(FRAME, dtype=torch.uint8)
    first[:_HEAD] = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    whole = np.frombuffer(data, dtype=np.uint8)
    first.numpy()[_HEAD : _HEAD + min(len(data), room)] = whole[:room]
    return [first] if len(data) <= room else [first, torch.from_numpy(whole[room:].copy())]


class DistributedPeer:
    """Either leader's end on CPUs: `there` carries what is given, `back` what is taken. Each message names its epoch and number."""

    def __init__(self, there: dist.ProcessGroup, back: dist.ProcessGroup, rank: int, epoch: int) -> None:
        self._there, self._back, self._other, self._epoch = there, back, 1 - rank, epoch
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def give(self, name: str, sequence: int, tensor: Tensor) -> None:
        message = torch.cat((self._head(name, sequence), tensor.contiguous().view(torch.uint8).flatten()))
        try:
            if len(self._sends) == _KEPT:
                self._sends.popleft()[0].wait()
            self._sends.append((self._there.send([message], self._other, 0), message))
        except RuntimeError as error:
            raise LinkError(f"the link between the leaders broke while sending {name}: {_first_line(error)}") from error

    def take(self, name: str, sequence: int, here: Tensor, timeout: float) -> None:
        head = self._head(name, sequence)
        message = torch.empty(len(head) + here.numel() * here.element_size(), dtype=torch.uint8)
        try:
            self._back.recv([message], self._other, 0).wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise LinkError(f"{name} of the other leader did not come within {timeout:g} s: {_first_line(error)}") from error
        if not torch.equal(message[: len(head)], head):
            epoch, number = message[:_PEER_HEAD].view(torch.int64).tolist()
            raise LinkError(f"number {number} of epoch {epoch} came; expected {name}, number {sequence} of epoch {self._epoch}")
        here.copy_(message[len(head) :].clone().view(here.dtype).view(here.shape))

    def settle(self) -> None:
        """Sends keep copies of their own."""

    def close(self) -> None:
        self._there = self._back = None
        self._sends.clear()

    def _head(self, name: str, sequence: int) -> Tensor:
        numbers = torch.tensor([self._epoch, sequence], dtype=torch.int64).view(torch.uint8)
        return torch.cat((numbers, torch.frombuffer(bytearray(name.encode().ljust(_PEER_HEAD)), dtype=torch.uint8)))


class DevicePeer:
    """Either leader's end on GPUs. Tensors go from device to device in the order of the current stream, and the host waits for none:
    there is nothing to check but what the communicators, which are of one epoch, make sure of."""

    def __init__(self, there: dist.ProcessGroup, back: dist.ProcessGroup, rank: int) -> None:
        self._there, self._back, self._other = there, back, 1 - rank
        self._sends: list[dist.Work] = []

    def give(self, name: str, sequence: int, tensor: Tensor) -> None:
        self._sends.append(self._there.send([tensor.contiguous()], self._other, 0))

    def take(self, name: str, sequence: int, here: Tensor, timeout: float) -> None:
        self._back.recv([here], self._other, 0).wait()

    def settle(self) -> None:
        for send in self._sends:
            send.wait()
        self._sends.clear()

    def close(self) -> None:
        self._there = self._back = None
        self._sends.clear()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
