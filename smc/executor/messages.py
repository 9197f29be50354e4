"""Messages between the scheduler and the workers about prompts: a flat batch of rows, and its result. On the host they
are NumPy arrays, so that a link can ship the bytes; at the models they are tensors. `smc.round` has those of rounds.

A worker learns nothing about requests, particles or weights from prompts.

Local axes: P all rows of a batch, U logits that are biased, Y tokens that are scored (row after row), Z tokens of
prompts with a repetition penalty. Tokens T and pages B stand row after row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from smc.api.constraint import Constraint
from smc.distributions import DistributionSpec
from smc.philox import Purpose
from smc.stops import StopMachine
from smc.types import Array, ModelRole, Numerics

Result = TypeVar("Result", covariant=True)


class Pending(Protocol, Generic[Result]):
    """A result that may not have arrived yet."""

    def result(self) -> Result:
        """Wait for the result and return it."""
        ...

    def failures(self) -> Mapping[int, str]:
        """Return why constraints cannot be followed any further, by group of the round or by row of the prompts. Call
        it after `result`."""
        ...

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return when each piece of work for this result began and ended, in nanoseconds of the monotonic clock. In a
        round the pass of a model has the name of its role; the run of a prompt batch is named `prompt`. Call it after
        `result`."""
        ...


class Guidance(NamedTuple):
    """The rows of a batch that guide others (`smc.executor.guidance`)."""

    unconditional_R: np.ndarray
    """int32 index of the row that guides this one, or the row's own index if none does."""
    scale_R: np.ndarray
    """float32 scale of guidance; 1: no guidance."""


@dataclass(frozen=True)
class Draws:
    """F tokens to draw after the last token of each row, from the normalised p^alpha, with the keys of their random
    numbers (smc/philox.py)."""

    distribution: DistributionSpec[np.ndarray]
    seed_R: np.ndarray
    """int64 seed of the row's request."""
    round_R: np.ndarray
    """int64 count of rounds of the row's request."""
    stream_RF: np.ndarray
    """int64 number that distinguishes draws of the same request, round and position."""
    purpose: Purpose
    count_R: np.ndarray
    """int32 number of draws, out of F, that are wanted."""
    decoding_R: np.ndarray
    """int32 `smc.types.Decoding`; rows of `DISTINCT` draw without replacement."""
    biased_row_U: np.ndarray
    """int32 rows whose logits are changed."""
    biased_token_U: np.ndarray
    """int32 tokens whose logits are changed there; each pair occurs once."""
    bias_U: np.ndarray
    """float32 value that is added to each of these logits."""
    guidance: Guidance | None = None
    """None: no row is guided."""
    seen_row_Z: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """int32 rows with a repetition penalty."""
    seen_token_Z: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """int32 tokens of their prompts; each pair occurs once."""
    repetition_Z: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """float32 repetition penalty of each of these pairs."""
    machines: tuple[StopMachine | None, ...] = ()
    """Stop machine with each row's constraint and bad words; None: the row has neither. Empty: no row has any."""
    raw_logprobs: bool = False
    """Also report log-probabilities of the draws under the softmax of the model's own logits."""
    by_answer_R: np.ndarray | None = None
    """bool: the distribution is that of whole answers, given the constraint (`smc.executor.masks`)."""


@dataclass(frozen=True)
class TopLogprobsSpec:
    """Request for the likeliest tokens after each of the last tokens of rows, under the distribution of the next token.
    Axis R covers the first rows of the batch, which are scored; the rows after them only guide. Axis P covers all
    rows of the batch, axis Y the scored tokens, row after row."""

    distribution: DistributionSpec[np.ndarray]
    count: int
    """C; the whole vocabulary if that has fewer tokens."""
    scored_P: np.ndarray
    """int32 number of the row's last tokens that are scored. It is the same for a row and the row that guides it."""
    least_R: np.ndarray
    """int32: the token at a position below this must not end the answer."""
    machines: tuple[StopMachine | None, ...]
    """Stop machine with each row's biases and the tokens that end its answer (`smc.executor.logit_changes`); None:
    nothing is added to the row's logits."""
    guidance: Guidance | None = None
    """As in `Draws`."""
    given_Y: np.ndarray | None = None
    """int64 tokens that actually follow, whose log-probabilities and ranks are reported as well; 0 where they are not
    wanted. None: they are wanted for no row."""


@dataclass(frozen=True)
class PromptBatch:
    """R rows and the T tokens to run through the model for them."""

    pages_B: np.ndarray
    """int32 pages of all positions of every row, those of its new tokens last."""
    starts_R: np.ndarray
    """int32 number of leading positions whose keys and values are already stored, or will be once the rows before this
    one have been."""
    counts_R: np.ndarray
    """int32 number of new tokens of each row, at least 1."""
    tokens_T: np.ndarray
    """int64 token ids, row after row."""
    draws: Draws | None = None
    """Draws after the first rows; the rows after these only guide."""
    top_logprobs: TopLogprobsSpec | None = None
    """Replaces draws."""


class PromptResult(NamedTuple, Generic[Array]):
    """Result of a prompt batch. Without draws, their arrays are [R, 0]; without a `TopLogprobsSpec`, the arrays of axis
    Y are empty."""

    drawn_RF: Array
    """int32 drawn tokens."""
    drawn_logp_RF: Array
    """float32 log-probability of each drawn token under p itself, for any alpha."""
    raw_logp_RF: Array
    """float32 log-probability of each drawn token under the softmax of the model's own logits; [R, 0] without
    `Draws.raw_logprobs`."""
    logw_RF: Array
    """float64 initial log-weight of the particle that begins with the token; -inf where nothing was drawn."""
    log_z_R: Array
    """float32 log normaliser of p^alpha after the last token; NaN if the model's logits were NaN."""
    top_YC: Array
    """int32 likeliest tokens after every scored token, in descending order, row after row."""
    top_logp_YC: Array
    """float32 log-probabilities of these tokens: -inf outside a truncation, NaN if the model's logits were NaN."""
    given_logp_Y: Array
    """float32 log-probabilities of the tokens in `TopLogprobsSpec.given_Y`, NaN if the model's logits were NaN; [0] if
    there are none."""
    given_rank_Y: Array
    """int32 ranks of these tokens: how many tokens are at least as likely, the token itself included; [0] if there are
    none."""


class ModelLost(RuntimeError):
    """The worker of one model is gone, with its keys and values and all its queued work; the other model continues."""

    def __init__(self, role: ModelRole, why: str) -> None:
        super().__init__(f"the {role} model is lost: {why}")
        self.role, self._why = role, why

    def __reduce__(self) -> tuple[type[ModelLost], tuple[ModelRole, str]]:
        return ModelLost, (self.role, self._why)


class Worker(Protocol):
    """One model with its KV memory. Calls are carried out in order."""

    @property
    def numerics(self) -> Numerics:
        """What the bits of this model's results depend on, as it runs."""
        ...

    def run_prompts(self, batch: PromptBatch) -> Pending[PromptResult[np.ndarray]]: ...

    def compile(self, constraint: Constraint) -> int:
        """Begin to compile a constraint beside other work, so that no prompt or round has to wait for it. Returns the
        number to ask for with `has_compiled`."""
        ...

    def has_compiled(self, number: int) -> bool:
        """Whether a constraint is known to have been compiled, or refused."""
        ...

    def keep_alive(self, silence: float) -> None:
        """Let a worker that has had nothing to do for `silence` seconds report. Raises RuntimeError if it is lost."""
        ...
