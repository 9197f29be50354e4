"""Types that users of the client meet, in requests, answers and errors. An answer's statistics, times and particles are
those of the library. Knows nothing about protobuf or connections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from smc.api.outputs import Particle, PromptToken, Statistics, Times


class ServiceError(RuntimeError):
    """A call failed. docs/errors.md says when each code is sent, and what to do."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after = retry_after
        """Seconds after which the service suggests to try again; None: it suggests nothing."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str


@dataclass(frozen=True)
class Chunk:
    """New text and tokens of an answer; they can no longer change. A chunk's text may be empty while a character is
    incomplete."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """One per token under the target's distribution, if requested."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that had been computed for an earlier request: of the model with fewer of them, where both run."""


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    """`eos`, `stop_token`, `stop_string`, `length`, `time_budget` or `queue_time`."""
    matched: int | str | None
    """The token id or string that ended the answer, where one did."""
    seed: int
    """Drawn by the service where none was given."""
    usage: Usage
    statistics: Statistics | None
    """None for plain decoding."""
    logprobs: tuple[float, ...] | None
    """One per token under the target's distribution, if requested: those of all chunks."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    """For every token the likeliest tokens at its position and their log-probabilities, likeliest first, if
    requested."""
    prompt_logprobs: tuple[PromptToken, ...] | None
    """For every token of the prompt but the first, if requested: log-probability, rank and likeliest tokens; None where
    there was no time for them."""
    particles: tuple[Particle, ...] | None
    """The particles that the answer was drawn from, if requested; of a method without particles the answer itself."""
    seconds: float
    """From the call to the end of the answer, as measured here."""
    times: Times


@dataclass(frozen=True)
class ModelDescription:
    name: str
    family: str
    """Such as `llama` or `qwen3`: the key in smc/model/families.py."""
    parameters: int
    tensor_parallel: int
    weights: str = ""
    """Identifies the weights: a hash of the files' names, sizes and headers, and of samples of what they hold."""


@dataclass(frozen=True)
class ModelInfo:
    target: ModelDescription
    draft: ModelDescription
    vocab_size: int
    max_context: int
    """Longest prompt plus answer, in tokens."""
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True)
class ServerInfo:
    version: str
    form: str
    """`lockstep` or `lookahead`."""
    block: int
    """K, tokens drafted per round."""
    branches: int
    """F, next blocks drafted per particle."""
    max_slots: int
    """Particles of all running requests together."""
    link: str
    epoch: int
    """Grows by one with every restart of the workers."""
    serving: bool
    running: int
    queued: int
    uptime_seconds: float
    max_queue: int
    """Requests that may wait; 0: any number."""
    max_calls: int
    """Calls in flight at the same time."""
    max_message_bytes: int
    """Of a request."""


Prompt = str | Sequence[int] | Sequence[Message]
"""Text (encoded as it is), token ids, or a conversation (put through the target's chat template)."""
