"""The link between the leaders as messages over any transport, and from GPU to GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import LAYOUT_VERSION, End, LinkError, check_envelope
from services.pb import particles_pb2 as pb

Exchange = pb.ExchangeRequest | pb.ExchangeResponse


class MessagePeer:
    """`services.link.base.PeerEnd` whose every tensor is a message with its epoch, name and number."""

    renewable = True

    def __init__(self, end: End[Exchange, Exchange], epoch: int, sends: type[Exchange]) -> None:
        self._end, self._epoch, self._sends = end, epoch, sends

    def send(self, name: str, sequence: int, tensor: Tensor) -> None:
        data = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        self._end.send(self._sends(version=LAYOUT_VERSION, epoch=self._epoch, name=name, sequence=sequence, data=data))

    def receive(self, name: str, sequence: int, here: Tensor, timeout: float) -> None:
        message = self._end.receive(timeout)
        check_envelope(message, self._epoch)
        if (message.name, message.sequence) != (name, sequence):
            raise LinkError(f"{message.name}, number {message.sequence}, came; expected {name}, number {sequence}")
        here.copy_(torch.frombuffer(bytearray(message.data), dtype=here.dtype).view(here.shape))

    def settle(self) -> None:
        """Messages are copies."""

    def close(self) -> None:
        self._end.close()


class DevicePeer:
    """On GPUs: tensors go from device to device in the order of the current stream, and the host waits for none. There
    is nothing to check but what the communicators, which are of one epoch, make sure of."""

    renewable = False
    """A kernel of NCCL that waits for a rank that has died stays on the stream, and all that is asked for later behind
    it."""

    def __init__(self, there: dist.ProcessGroup, back: dist.ProcessGroup, rank: int) -> None:
        """`there` carries what is sent, `back` what is received: within one, messages would have to be sent and
        received in one order."""
        self._there: dist.ProcessGroup | None = there
        self._back: dist.ProcessGroup | None = back
        self._other = 1 - rank
        self._sends: list[dist.Work] = []

    def send(self, name: str, sequence: int, tensor: Tensor) -> None:
        assert self._there is not None
        self._sends.append(self._there.send([tensor.contiguous()], self._other, 0))

    def receive(self, name: str, sequence: int, here: Tensor, timeout: float) -> None:
        assert self._back is not None
        self._back.recv([here], self._other, 0).wait()

    def settle(self) -> None:
        for send in self._sends:
            send.wait()
        self._sends.clear()

    def close(self) -> None:
        self._there = self._back = None
        self._sends.clear()
