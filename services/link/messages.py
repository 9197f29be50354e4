"""Messages on the links between the coordinator and the leaders of both models, and between the leaders. The content of
prompts, joins and rounds is the library's own (`smc.executor`). Encoded by `services.link.codec`."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.link.base import LinkError
from services.link.codec import Codec
from smc.api.constraint import Constraint
from smc.executor.messages import PromptBatch, PromptResult
from smc.round.plan import RoundPlan, SequenceHandoff
from smc.round.tensors import DraftReport, RoundResult
from smc.types import ModelRole


@dataclass(frozen=True)
class Ping:
    """Asks for a sign of life."""


@dataclass(frozen=True)
class MemoryQuery:
    """Asks what memory is in use."""


@dataclass(frozen=True)
class Stop:
    """Ends the worker."""


@dataclass(frozen=True)
class Reconnect:
    """Makes the leader open a link to another leader of the other model, beside its other work. Sent again, it asks
    whether that link is up."""

    incarnation: int
    """Of the other model, and of the link."""
    seconds: float
    """Time limit until the other leader has connected."""


@dataclass(frozen=True)
class Compile:
    """Makes the leader compile a constraint beside its other work. Responses say how many it has compiled."""

    constraint: Constraint


Command = Ping | MemoryQuery | Stop | Reconnect | Compile | PromptBatch | SequenceHandoff | RoundPlan
SILENT = (SequenceHandoff, Compile, Stop)
"""Commands that have no response."""


@dataclass(frozen=True)
class WorkRequest:
    """From the coordinator to a leader. Commands are carried out in order, and each has one response, in the same
    order, except those of a `SILENT` type."""

    incarnation: int
    """Incarnation of the worker group, or of its draft; messages of another one are refused."""
    sequence: int
    """Counts up by one."""
    command: Command
    role: ModelRole | None = None
    """The model that a `PromptBatch` or a `SequenceHandoff` is for; None for other commands. All models of the rank
    that a round needs take part in it."""


@dataclass(frozen=True)
class Pong:
    """Answers a ping."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory that a worker uses."""

    device_bytes: int
    """Maximum bytes of the device's memory that were in use; 0 on a CPU."""


@dataclass(frozen=True)
class ReconnectResult:
    error: str = ""
    """Why there will be no link; empty if there is one, or may be."""
    connected: bool = False
    """The link is up, and everything that is requested from now on uses it."""


@dataclass(frozen=True)
class Failure:
    """The worker could not carry out a command, and has stopped."""

    message: str


@dataclass(frozen=True)
class ModelResult:
    """What one model did for a prompt batch or a round."""

    result: PromptResult | RoundResult | DraftReport
    work: dict[str, tuple[int, int]] = field(default_factory=dict)
    """When the model, and what follows its pass, began and ended to work, by the worker's monotonic clock, without
    waits for the other model. See `smc.executor.messages.Pending.spans`."""
    failures: dict[int, str] = field(default_factory=dict)
    """Why constraints cannot be followed any further, see `smc.executor.messages.Pending.failures`."""


@dataclass(frozen=True)
class ModelResults:
    """Results of all models of the worker that took part."""

    by_role: dict[ModelRole, ModelResult]


Result = Pong | MemoryUse | ReconnectResult | Failure | ModelResults


@dataclass(frozen=True)
class WorkResponse:
    """From a leader to the coordinator."""

    incarnation: int
    sequence: int
    """That of the command."""
    result: Result
    begin_ns: int = 0
    """When the worker began a command that it carries out at once, by its own monotonic clock."""
    end_ns: int = 0
    compiled: int = 0
    """Number of `Compile` commands that have been carried out so far."""


@dataclass(frozen=True)
class Transfer:
    """A tensor from one leader to the other."""

    incarnation: int
    name: str
    sequence: int
    """Counts the messages of this name."""
    data: bytes


REQUESTS = Codec[WorkRequest](WorkRequest)
RESPONSES = Codec[WorkResponse](WorkResponse)
TRANSFERS = Codec[Transfer](Transfer)


def check_incarnation(message: WorkRequest | WorkResponse | Transfer, incarnation: int) -> None:
    """Refuse a message of another incarnation of the worker group. Raises LinkError."""
    if message.incarnation != incarnation:
        raise LinkError(f"a message of incarnation {message.incarnation} arrived in incarnation {incarnation}")
