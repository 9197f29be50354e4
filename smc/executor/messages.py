"""Messages between the scheduler and the workers, except plans of rounds (`smc.executor.plan`): prompts, as a flat
batch of rows, and what the two models send to each other and to the host in a round. On the host they are NumPy arrays,
so that a link can ship the bytes; at the models they are tensors.

A worker learns nothing about requests, particles or weights from prompts.

See the package's legend for axes. In prompts: R rows, T tokens (row after row), X pages (row after row), D draws, Y
tokens that are scored, K top_logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from smc.distributions import DistributionSpec
from smc.philox import Purpose
from smc.stops import StopMachine
from smc.types import Array, ModelRole


class Stream(NamedTuple):
    """A sequence that a model runs for each row of a request, in pages of that model's pool: the row itself or, for a
    guided request, the unconditional row after the negative prompt (`smc.executor.guidance`)."""

    role: ModelRole
    unconditional: bool = False


Result = TypeVar("Result", covariant=True)


class Pending(Protocol, Generic[Result]):
    """A result that may not have arrived yet."""

    def result(self) -> Result:
        """Wait for the result and return it."""
        ...

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return when each piece of work for this result began and ended, in nanoseconds of the monotonic clock. In a
        round the pass of a model has the name of its role; the run of a prompt batch is named `prompt`. Call it after
        `result`."""
        ...


@dataclass(frozen=True)
class Draws:
    """D tokens to draw after the last token of each row, from the normalised p^alpha, with the keys of their random
    numbers (smc/philox.py)."""

    distribution: DistributionSpec[np.ndarray]
    seed_R: np.ndarray
    """int64 seed of the row's request."""
    round_R: np.ndarray
    """int64 count of rounds of the row's request."""
    stream_RD: np.ndarray
    """int64 number that distinguishes draws of the same request, round and position."""
    purpose: Purpose
    count_R: np.ndarray
    """int32 number of draws, out of D, that are wanted."""
    kind_R: np.ndarray
    """int32 `smc.algorithm.expansion.PopulationKind`; rows of kind `DISTINCT` draw without replacement."""
    biased_2Y: np.ndarray
    """int32 rows and tokens whose logits are changed; each pair occurs once."""
    bias_Y: np.ndarray
    """float32 value that is added to each of these logits."""
    unconditional_R: np.ndarray | None = None
    """int32 index of the batch's row that guides this one (`smc.executor.guidance`), or the row's own index if no row
    does. None: no row is guided."""
    scale_R: np.ndarray | None = None
    """float32 scale of guidance; 1: no guidance."""
    seen_2Z: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int32))
    """int32 rows with a repetition penalty, and tokens of their prompts; each pair occurs once."""
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
    Axis R covers the first rows of the batch, which are scored; the rows after them only guide. Axis B covers all
    rows of the batch, axis Y the scored tokens, row after row."""

    distribution: DistributionSpec[np.ndarray]
    count: int
    """K; the whole vocabulary if that has fewer tokens."""
    scored_B: np.ndarray
    """int32 number of the row's last tokens that are scored. It is the same for a row and the row that guides it."""
    least_R: np.ndarray
    """int32: the token at a position below this must not end the answer."""
    machines: tuple[StopMachine | None, ...]
    """Stop machine with each row's biases and the tokens that end its answer (`smc.executor.state`); None: nothing is
    added to the row's logits."""
    unconditional_R: np.ndarray | None = None
    """As in `Draws`."""
    scale_R: np.ndarray | None = None
    given_Y: np.ndarray | None = None
    """int64 tokens that actually follow, whose log-probabilities and ranks are reported as well; 0 where they are not
    wanted. None: they are wanted for no row."""


@dataclass(frozen=True)
class PromptBatch:
    """R rows and the T tokens to run through the model for them."""

    pages_X: np.ndarray
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


@dataclass(frozen=True)
class PromptResult(Generic[Array]):
    """Result of a prompt batch. Without draws, their arrays are [R, 0]; without a `TopLogprobsSpec`, the arrays of axis
    Y are empty."""

    drawn_RD: Array
    """int32 drawn tokens."""
    drawn_logp_RD: Array
    """float32 log-probability of each drawn token under p itself, for any alpha."""
    raw_logp_RD: Array
    """float32 log-probability of each drawn token under the softmax of the model's own logits; [R, 0] without
    `Draws.raw_logprobs`."""
    logw_RD: Array
    """float64 initial log-weight of the particle that begins with the token; -inf where nothing was drawn."""
    log_z_R: Array
    """float32 log normaliser of p^alpha after the last token; NaN if the model's logits were NaN."""
    top_YK: Array
    """int32 likeliest tokens after every scored token, in descending order, row after row."""
    top_logp_YK: Array
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

    def run_prompts(self, batch: PromptBatch) -> Pending[PromptResult[np.ndarray]]: ...


@dataclass(frozen=True)
class DraftedRows:
    """Message from the draft to the target: rows of K tokens, F for every batch index. The rows of each group are in
    the order of the batch indices that they continue."""

    all_WX: Tensor
    """int32, one tensor for the transfer: tokens, the bits of their log q, root, count, whether ended, cut, the bits of
    the share."""

    @staticmethod
    def width(block: int) -> int:
        """Return W: how many numbers describe a row of `block` tokens."""
        return 2 * block + 5

    @staticmethod
    def of(
        tokens_XK: Tensor,
        logq_XK: Tensor,
        root_X: Tensor,
        count_X: Tensor,
        ended_X: Tensor,
        cut_X: Tensor,
        share_X: Tensor,
    ) -> DraftedRows:
        share_1X = share_X.float().view(torch.int32)[None]
        numbers_4X = torch.stack((root_X.int(), count_X.int(), ended_X.int(), cut_X.int()))
        return DraftedRows(
            torch.cat((tokens_XK.t().int(), logq_XK.t().contiguous().view(torch.int32), numbers_4X, share_1X))
        )

    @property
    def block(self) -> int:
        """K: tokens of a row."""
        return (len(self.all_WX) - 5) // 2

    @property
    def tokens_XK(self) -> Tensor:
        """int32 token ids."""
        return self.all_WX[: self.block].t()

    @property
    def logq_XK(self) -> Tensor:
        """float32 log-probability of each token under the proposal."""
        return self.all_WX[self.block : -5].view(torch.float32).t()

    @property
    def root_X(self) -> Tensor:
        """int32 batch index whose particle the row continues."""
        return self.all_WX[-5]

    @property
    def count_X(self) -> Tensor:
        """int64 number of tokens that exist; 0 if the particle had ended."""
        return self.all_WX[-4].long()

    @property
    def ended_X(self) -> Tensor:
        """bool: the last token is terminal."""
        return self.all_WX[-3] > 0

    @property
    def cut_X(self) -> Tensor:
        """int64 number of the root's last tokens that the row rolls back; if above 0, the row begins at an inner
        node."""
        return self.all_WX[-2].long()

    @property
    def share_X(self) -> Tensor:
        """float64 log of the row's share of its root's mass, before its tokens are weighted by p^alpha / q; -inf where
        there is no row."""
        return self.all_WX[-1].view(torch.float32).double()


@dataclass(frozen=True)
class RoundChoice:
    """Message from the target to the draft: how each batch index continues. By batch index after the choice."""

    all_9A: Tensor
    """int64, one tensor for the transfer: the properties below in their order, `mass` by its bits."""

    @staticmethod
    def of(
        ancestor_A: Tensor,
        row_A: Tensor,
        count_A: Tensor,
        cut_A: Tensor,
        bonus_A: Tensor,
        alive_A: Tensor,
        ended_A: Tensor,
        text_A: Tensor,
        mass_A: Tensor,
    ) -> RoundChoice:
        """Pack a choice. `bonus`: a token, or -1 where none is appended."""
        mass_A = mass_A.double().view(torch.int64)
        return RoundChoice(
            torch.stack(
                (
                    ancestor_A,
                    row_A,
                    count_A,
                    cut_A,
                    bonus_A.long(),
                    alive_A.long(),
                    ended_A.long(),
                    text_A.long(),
                    mass_A,
                )
            )
        )

    @property
    def ancestor_A(self) -> Tensor:
        """Batch index whose particle continues here."""
        return self.all_9A[0]

    @property
    def row_A(self) -> Tensor:
        """Index of the drafted row that it continues with."""
        return self.all_9A[1]

    @property
    def count_A(self) -> Tensor:
        """Number of tokens that it takes from that row."""
        return self.all_9A[2]

    @property
    def cut_A(self) -> Tensor:
        """Number of the ancestor's last tokens that are rolled back first."""
        return self.all_9A[3]

    @property
    def bonus_A(self) -> Tensor:
        """Token drawn by the target that is appended last; -1: none."""
        return self.all_9A[4]

    @property
    def alive_A(self) -> Tensor:
        """bool: the batch index holds a particle."""
        return self.all_9A[5] > 0

    @property
    def ended_A(self) -> Tensor:
        """bool: the particle has ended, or there is none."""
        return self.all_9A[6] > 0

    @property
    def text_A(self) -> Tensor:
        """State of the stop machine before the row's tokens (look-ahead) or before the bonus token."""
        return self.all_9A[7]

    @property
    def mass_A(self) -> Tensor:
        """float64 log mass."""
        return self.all_9A[8].view(torch.float64)


@dataclass(frozen=True)
class Lineage(Generic[Array]):
    """Pages by which particles differ from their ancestors, by batch index after the choice."""

    path_AW: Array
    """int32 new pages, in the order of positions."""
    kept_A: Array
    """int32: how many of the first of these pages hold keys and values of the particle's tokens."""
    dropped_A: Array
    """int32 number of the ancestor's last pages that are released."""


@dataclass(frozen=True)
class DraftReport(Generic[Array]):
    """The draft's report to the host about a round of both models."""

    lineage: Lineage[Array]
    """Pages at the draft."""
    observed_3A: Array
    """float32, by batch index after the choice, about the target's draw after the root of the drafted rows: its score
    and information for the exponent of coupled drafting (`smc.algorithm.coupling.DrawObservation`), and its rank, the
    number of tokens that the draft considered more likely to be drawn. NaN: no draw was seen, or the rank was not
    computed."""


@dataclass(frozen=True)
class RoundResult(Generic[Array]):
    """The report to the host about a round, from the target or from the model that decodes alone. By batch index, after
    the choice, unless stated otherwise."""

    ancestor_A: Array
    """Batch index whose particle continues here."""
    alive_A: Array
    """bool: the batch index holds a particle. One without a particle repeats another of its group and has ended."""
    cut_A: Array
    """Number of the ancestor's last tokens that were rolled back."""
    grown_AQ: Array
    """Tokens that were then appended."""
    count_A: Array
    """Number of appended tokens that exist."""
    ended_A: Array
    logw_A: Array
    """float64 log-weight."""
    logq_AQ: Array
    """float32 log q of the appended tokens."""
    logp_AQ: Array
    """float32 log p of the tokens after the first of the scored block, as far as they are kept; NaN beyond."""
    first_logp_A: Array
    """float32 log p of the token that follows the kept part of the scored block; NaN if none does."""
    raw_logp_AQ: Array
    """float32 log-probabilities, under the softmax of the target's own logits, of the tokens after the first of the
    scored block, as far as they are kept, and of the token that follows these; NaN beyond. [A, 0] without
    `RoundPlan.raw_logprobs`."""
    log_z_G: Array
    ess_G: Array
    resampled_G: Array
    collapsed_G: Array
    draft_nan_G: Array
    """bool: the draft returned NaN for tokens that exist."""
    target_nan_G: Array
    hit_G: Array
    """bool: the round was a hit; rows that were drafted ahead continue (exact decoding)."""
    lineage: Lineage[Array]
    """Pages at the target, or at the model that decodes alone."""
