"""The link's interface: what the coordinator, a worker's leader and the pair of leaders need of a transport.

Messages are those of proto/smc/v1/particles.proto, whichever transport carries them. Every wait has a deadline.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from services.pb import particles_pb2 as pb

LAYOUT_VERSION = 1
"""Of particles.proto and its arrays; raised with every change that an older peer would misread."""


class LinkError(RuntimeError):
    """The other side is gone, silent past the deadline, or of another life. The gang must start again."""


class CoordinatorEnd(Protocol):
    """The coordinator's end of the link to one leader. `send` does not wait; responses come in the order of the commands."""

    def send(self, request: pb.WorkRequest) -> None: ...

    def receive(self, timeout: float) -> pb.WorkResponse:
        """The next response. Raises LinkError after `timeout` seconds or when the leader is gone."""
        ...

    def close(self) -> None: ...


class LeaderEnd(Protocol):
    """The leader's end of the same link."""

    def receive(self, timeout: float) -> pb.WorkRequest: ...

    def send(self, response: pb.WorkResponse) -> None: ...

    def close(self) -> None: ...


class PublishEnd(Protocol):
    """The draft's end of the link between the leaders."""

    def publish(self, sequence: int, tokens_RF: Tensor) -> None:
        """Send the first tokens drawn for sample command `sequence`; does not wait for the target."""
        ...

    def close(self) -> None: ...


class TakeEnd(Protocol):
    """The target's end of the link between the leaders."""

    def take(self, sequence: int, rows: int, branches: int, timeout: float) -> np.ndarray | Tensor:
        """Tokens [R, F] of that command, in the order they were published. Raises LinkError past `timeout` seconds."""
        ...

    def close(self) -> None: ...


def check_envelope(message: pb.WorkRequest | pb.WorkResponse | pb.PublishRequest, epoch: int) -> None:
    """Refuse a message of another layout or of another life of the gang. Raises LinkError."""
    if message.version != LAYOUT_VERSION:
        raise LinkError(f"a message of layout version {message.version} arrived; this side speaks {LAYOUT_VERSION}")
    if message.epoch != epoch:
        raise LinkError(f"a message of epoch {message.epoch} arrived in epoch {epoch}")
