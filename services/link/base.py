"""The link's interface: what the coordinator, a worker's leader and the pair of leaders need of a transport.

Messages are those of proto/smc/internal/v1/particles.proto, whichever transport carries them. Every wait has a
deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from services.pb import particles_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

LINKS = ("nccl", "grpc")
"""Kinds of it."""

LAYOUT_VERSION = 22
"""Of particles.proto and its arrays; raised with every change that an older peer would misread."""
CLOSE_SECONDS = 3.0
"""Seconds for sent messages to be received when an end is closed."""


class LinkError(RuntimeError):
    """The other side is gone, silent past the deadline, or of another incarnation."""

    began_here = False
    """A worker reports its own error, not a consequence of the other's."""


def failure_text(error: Exception) -> str:
    """How a worker's failure is reported to the other processes."""
    return f"{type(error).__name__}: {error}"


Message = pb.WorkRequest | pb.WorkResponse | pb.ExchangeRequest | pb.ExchangeResponse
Sent = TypeVar("Sent", bound=Message, contravariant=True)
Received = TypeVar("Received", bound=Message, covariant=True)


class End(Protocol[Sent, Received]):
    """One end of a link. Messages arrive in the order in which they were sent."""

    def send(self, message: Sent) -> None:
        """Does not wait for the other side."""
        ...

    def receive(self, timeout: float) -> Received:
        """The next message. Raises LinkError after `timeout` seconds or when the other side is gone."""
        ...

    def close(self) -> None: ...


CoordinatorEnd = End[pb.WorkRequest, pb.WorkResponse]
"""The coordinator's end of the link to one leader."""
LeaderEnd = End[pb.WorkResponse, pb.WorkRequest]
"""The leader's end of the same link."""


class PeerEnd(Protocol):
    """Either leader's end of the link between them. What one sends, the other receives in the same order."""

    renewable: bool
    """If the other side is lost, waiting callers get an error and no work on the device waits for ever: another end can
    replace this one."""

    def send(self, name: str, sequence: int, tensor: Tensor) -> None:
        """Send it; does not wait for the other side."""
        ...

    def receive(self, name: str, sequence: int, here: Tensor, timeout: float) -> None:
        """Fill a tensor with what was sent by this name and number. Raises LinkError past `timeout` seconds, or if
        another comes."""
        ...

    def settle(self) -> None:
        """Buffers that have been sent may be overwritten by work submitted to the device from now on."""
        ...

    def close(self) -> None: ...


def is_renewable(link: str, device: str) -> bool:
    """Whether ends of the link between the leaders are renewable (`PeerEnd`)."""
    return link == "grpc" or device == "cpu"


def check_envelope(message: Message, incarnation: int) -> None:
    """Refuse a message of another layout or of another incarnation of the worker group. Raises LinkError."""
    if message.version != LAYOUT_VERSION:
        raise LinkError(f"a message of layout version {message.version} arrived; this side speaks {LAYOUT_VERSION}")
    if message.incarnation != incarnation:
        raise LinkError(f"a message of incarnation {message.incarnation} arrived in incarnation {incarnation}")
