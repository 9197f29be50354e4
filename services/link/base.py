"""The link's interface: the ends that the coordinator and the leaders of both models use, whatever the transport.

All transports carry the messages of proto/smc/internal/v1/particles.proto. Every wait has a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from services.pb import particles_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

LINKS = ("nccl", "grpc")
"""Kinds of links."""

LAYOUT_VERSION = 22
"""Version of particles.proto and its arrays; raised with every change that an older peer would misread."""
CLOSE_SECONDS = 3.0
"""Time for sent messages to be received when an end is closed."""


class LinkError(RuntimeError):
    """The other side is gone, silent past the deadline, or of another incarnation."""

    began_here = False
    """Whether a worker reports an error of its own, not a consequence of the other worker's error."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def failure_text(error: Exception) -> str:
    """Return the text by which a worker's failure is reported to the other processes."""
    return f"{type(error).__name__}: {error}"


Message = pb.WorkRequest | pb.WorkResponse | pb.ExchangeRequest | pb.ExchangeResponse
Sent = TypeVar("Sent", bound=Message, contravariant=True)
Received = TypeVar("Received", bound=Message, covariant=True)


class End(Protocol[Sent, Received]):
    """One end of a link. Messages arrive in the order in which they were sent."""

    def send(self, message: Sent) -> None:
        """Send a message; does not wait for the other side."""
        ...

    def receive(self, timeout: float) -> Received:
        """Return the next message. Raises LinkError after `timeout` seconds, or when the other side is gone."""
        ...

    def close(self) -> None: ...


CoordinatorEnd = End[pb.WorkRequest, pb.WorkResponse]
"""The coordinator's end of the link to one leader."""
LeaderEnd = End[pb.WorkResponse, pb.WorkRequest]
"""The leader's end of the same link."""


class PeerEnd(Protocol):
    """Either leader's end of the link between the leaders. Each receives tensors in the order in which the other sends
    them."""

    def send(self, name: str, tensor: Tensor) -> None:
        """Send a tensor; does not wait for the other side."""
        ...

    def receive(self, name: str, here: Tensor, timeout: float) -> None:
        """Fill `here` with the next tensor, which has been sent under this name. Raises LinkError after `timeout`
        seconds, or if another tensor arrives."""
        ...

    def settle(self) -> None:
        """Allow work submitted to the device from now on to overwrite the tensors that have been sent."""
        ...

    def close(self) -> None: ...


def check_envelope(message: Message, incarnation: int) -> None:
    """Refuse a message of another layout or of another incarnation of the worker group. Raises LinkError."""
    if message.version != LAYOUT_VERSION:
        raise LinkError(f"a message of layout version {message.version} arrived; this side speaks {LAYOUT_VERSION}")
    if message.incarnation != incarnation:
        raise LinkError(f"a message of incarnation {message.incarnation} arrived in incarnation {incarnation}")
