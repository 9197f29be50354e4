"""The link's interface: the ends that the coordinator and the leaders of both models use, whatever the transport.

An end carries bytes; `services.link.messages` says what they mean. Every wait has a deadline."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

LINKS = ("nccl", "grpc")
"""Kinds of links."""

SHARED = "shared"
"""Name of ranks that hold both models. Ranks that hold one have the name of its role."""

SAME_VERSION = "all processes of a service must run the same version of smcserve"
"""What to do if two processes understand messages differently."""

CLOSE_SECONDS = 3.0
"""Time for sent messages to be received when an end is closed."""


class LinkError(RuntimeError):
    """The other side is gone, silent past the deadline, of another incarnation or of another version of smcserve."""

    began_here = False
    """Whether a worker reports an error of its own, not a consequence of the other worker's error."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def failure_text(error: Exception) -> str:
    """Return the text by which a worker's failure is reported to the other processes."""
    return f"{type(error).__name__}: {error}"


def keyed_hash(secret: str, what: bytes) -> bytes:
    """Return a hash of `what` that only those who know the worker group's secret can compute."""
    return hmac.digest(secret.encode(), what, "sha256")


class End(Protocol):
    """One end of a link. Messages arrive in the order in which they were sent."""

    def send(self, message: bytes) -> None:
        """Send a message; does not wait for the other side."""
        ...

    def receive(self, timeout: float) -> bytes:
        """Return the next message. Raises LinkError after `timeout` seconds, or when the other side is gone."""
        ...

    def close(self) -> None: ...


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
