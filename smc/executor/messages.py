"""What passes between the scheduler and a worker besides plans of rounds: prompts, as a flat batch of rows, and what the two
models tell each other and the host in a round. NumPy on the host's side, so that a link can ship the bytes; tensors on
the models'.

A worker learns nothing of requests, particles or weights from prompts.

See the package's legend for axes; of prompts R rows, T tokens (row after row), X pages (row after row), D draws, Y
tokens that are scored, K top_logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from smc.types import Array, ModelRole

if TYPE_CHECKING:
    from smc.distributions import DistributionSpec
    from smc.philox import Purpose
    from smc.stops import StopMachine


class Stream(NamedTuple):
    """A sequence that a model runs for each row of a request, with pages of its pool: the row itself, or of a guided
    request the unconditional one after the negative prompt (`smc.executor.guidance`)."""

    role: ModelRole
    unconditional: bool = False


Result = TypeVar("Result", covariant=True)


class Pending(Protocol, Generic[Result]):
    """A result on its way."""

    def result(self) -> Result:
        """Waits for it."""
        ...

    def spans(self) -> dict[str, tuple[int, int]]:
        """What was done for it, and when it began and ended, nanoseconds of the monotonic clock: the pass of a model in
        a round has the name of its role, that of prompts is `prompt`. After `result`."""
        ...


@dataclass(frozen=True)
class Draws:
    """D tokens to be drawn after the last one of each row, from p^alpha normalised, and with which random numbers
    (smc/philox.py)."""

    distribution: DistributionSpec[np.ndarray]
    seed_R: np.ndarray
    """int64."""
    round_R: np.ndarray
    """int64 count of rounds of the row's request."""
    stream_RD: np.ndarray
    """int64 number that tells apart draws of the same request, round and position."""
    purpose: Purpose
    count_R: np.ndarray
    """int32: how many of the D are wanted."""
    kind_R: np.ndarray
    """int32 `smc.algorithm.expansion.PopulationKind`: `DISTINCT` ones are drawn without replacement."""
    biased_2Y: np.ndarray
    """int32: rows and tokens whose logits are changed, each pair once."""
    bias_Y: np.ndarray
    """float32: what is added to these."""
    unconditional_R: np.ndarray | None = None
    """int32 which row of the batch guides this one (`smc.executor.guidance`); itself: none does. None: no row is
    guided."""
    scale_R: np.ndarray | None = None
    """float32 scale of guidance; 1: none."""
    seen_2Z: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int32))
    """int32: rows and tokens of their prompts, each pair once, of rows with a repetition penalty."""
    repetition_Z: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """float32: the penalty."""
    machines: tuple[StopMachine | None, ...] = ()
    """What each row's constraint and bad words are of; None: it has none. Empty: no row has any."""
    by_answer_R: np.ndarray | None = None
    """bool: see `smc.executor.masks`."""


@dataclass(frozen=True)
class TopLogprobsSpec:
    """The likeliest tokens after each of the last tokens of rows, under the distribution of what comes there. Axis R is
    of the first rows of the batch, those that are scored; those after them only guide. Axis Y is of their scored
    tokens, row after row."""

    distribution: DistributionSpec[np.ndarray]
    count: int
    """K, or the whole vocabulary if that has fewer."""
    scored_R: np.ndarray
    """int32: of how many of its last tokens; of all rows of the batch. A row that guides another is scored as
    often."""
    least_R: np.ndarray
    """int32 position up to which what comes does not end the answer."""
    machines: tuple[StopMachine | None, ...]
    """What is added to each row's logits, and ends its answer (`smc.executor.state`); None: nothing is added."""
    unconditional_R: np.ndarray | None = None
    """As of `Draws`."""
    scale_R: np.ndarray | None = None
    given_Y: np.ndarray | None = None
    """int64: tokens that come, whose log-probabilities and ranks are reported besides; 0 where they are not wanted.
    None: of no row."""


@dataclass(frozen=True)
class PromptBatch:
    """R rows and the T tokens to run through the model for them."""

    pages_X: np.ndarray
    """int32 pages of all positions of every row, those of its new tokens last."""
    starts_R: np.ndarray
    """int32 positions whose keys and values are there already, or will be once the rows before have been stored."""
    counts_R: np.ndarray
    """int32 new tokens of each row, at least 1."""
    tokens_T: np.ndarray
    """int64 token ids, row after row."""
    draws: Draws | None = None
    """After the first rows; those after them only guide."""
    top_logprobs: TopLogprobsSpec | None = None
    """In place of draws."""


@dataclass(frozen=True)
class PromptResult(Generic[Array]):
    """Draws [R, 0] where none were asked for, and no `top_logprobs`."""

    drawn_RD: Array
    """int32."""
    drawn_logp_RD: Array
    """float32 log-probability of each drawn token under p itself, whatever alpha."""
    logw_RD: Array
    """float64 log-weight that a particle begins with; -inf where nothing was drawn."""
    log_z_R: Array
    """float32 log normaliser of p^alpha after the last token; NaN if the model's logits were."""
    top_YK: Array
    """int32: likeliest first, of every token that has `top_logprobs`, row after row."""
    top_logp_YK: Array
    """float32 log-probabilities of these: -inf outside of a truncation, NaN if the model's logits were."""
    given_logp_Y: Array
    """float32 log-probabilities of the tokens that come, NaN if the model's logits were; [0] unless they were asked
    for."""
    given_rank_Y: Array
    """int32: how many tokens are at least as likely as these, themselves included; [0] unless they were asked
    for."""


class ModelLost(RuntimeError):
    """The worker of a model is gone, with its keys and values and all that it was asked for; the other goes on."""

    def __init__(self, role: ModelRole, why: str) -> None:
        super().__init__(f"the {role} model is lost: {why}")
        self.role, self._why = role, why

    def __reduce__(self) -> tuple[type[ModelLost], tuple[ModelRole, str]]:
        return ModelLost, (self.role, self._why)


class Worker(Protocol):
    """One model with its KV memory. Calls are carried out in the order they are made."""

    def run_prompts(self, batch: PromptBatch) -> Pending[PromptResult[np.ndarray]]: ...


@dataclass(frozen=True)
class DraftedRows:
    """What the draft sends the target: rows of K tokens, F for every batch index, each group's in the order of the
    batch indices they come from."""

    all_WX: Tensor
    """int32, in one piece, as it travels: tokens, the bits of their log q, root, count, whether ended, cut, the bits of
    the share."""

    @staticmethod
    def width(block: int) -> int:
        """W: numbers of a row of so many tokens."""
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
        """K."""
        return (len(self.all_WX) - 5) // 2

    @property
    def tokens_XK(self) -> Tensor:
        """int32."""
        return self.all_WX[: self.block].t()

    @property
    def logq_XK(self) -> Tensor:
        """float32."""
        return self.all_WX[self.block : -5].view(torch.float32).t()

    @property
    def root_X(self) -> Tensor:
        """int32 batch index whose particle a row continues."""
        return self.all_WX[-5]

    @property
    def count_X(self) -> Tensor:
        """int64: how many tokens exist; 0 where the particle had ended."""
        return self.all_WX[-4].long()

    @property
    def ended_X(self) -> Tensor:
        """bool: the last token is terminal."""
        return self.all_WX[-3] > 0

    @property
    def cut_X(self) -> Tensor:
        """int64: how many of the root's last tokens the row takes back; above 0, it begins at an inner node."""
        return self.all_WX[-2].long()

    @property
    def share_X(self) -> Tensor:
        """float64 log of the row's mass over its root's, without what its tokens' log q are weighed with; -inf where
        there is no row."""
        return self.all_WX[-1].view(torch.float32).double()


@dataclass(frozen=True)
class RoundChoice:
    """What the target sends the draft: how each batch index goes on. By batch index after the choice."""

    all_9A: Tensor
    """int64, in one piece, as it travels."""

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
        """`bonus`: a token, or -1 where none is appended."""
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
        """Batch index whose particle goes on here."""
        return self.all_9A[0]

    @property
    def row_A(self) -> Tensor:
        """Which drafted row it goes on with."""
        return self.all_9A[1]

    @property
    def count_A(self) -> Tensor:
        """How many tokens of that row it takes."""
        return self.all_9A[2]

    @property
    def cut_A(self) -> Tensor:
        """How many of the ancestor's last tokens are taken back first."""
        return self.all_9A[3]

    @property
    def bonus_A(self) -> Tensor:
        """Token of the target's own that is appended last; -1: none."""
        return self.all_9A[4]

    @property
    def alive_A(self) -> Tensor:
        """bool: the batch index holds a particle."""
        return self.all_9A[5] > 0

    @property
    def ended_A(self) -> Tensor:
        """bool: it runs nothing any more, or holds nothing."""
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
    """Pages that particles have more or less than their ancestors had, by batch index after the choice. Tensors where
    the model is."""

    path_AW: Array
    """int32."""
    kept_A: Array
    """int32: how many of them hold keys and values of the particle's tokens."""
    dropped_A: Array
    """int32: how many of the ancestor's last pages are released."""


@dataclass(frozen=True)
class DraftReport(Generic[Array]):
    """What the host learns of the draft's part in a round of both models. Tensors where the model is."""

    lineage: Lineage[Array]
    """At the draft."""
    observed_3A: Array
    """float32, by batch index after the choice: what the target's draw after the root of the drafted rows says of
    the exponent of coupled drafting, score and information (`smc.algorithm.coupling.DrawObservation`), and how many
    tokens the draft thought more likely to be drawn; NaN: nothing was seen, or the rank was not looked for."""


@dataclass(frozen=True)
class RoundResult(Generic[Array]):
    """What the host learns of a round. By batch index, after the choice, unless said otherwise. Tensors where the model
    is."""

    ancestor_A: Array
    """Batch index."""
    alive_A: Array
    """bool: the batch index holds a particle. One that does not repeats another of its group, and has ended."""
    cut_A: Array
    """How many of the ancestor's last tokens were taken back."""
    grown_AQ: Array
    """Tokens that came after those."""
    count_A: Array
    """How many of them exist."""
    ended_A: Array
    logw_A: Array
    """float64."""
    logq_AQ: Array
    """float32 log q of the tokens that came."""
    logp_AQ: Array
    """float32 log p of the tokens after the first of the block that was scored, as far as they stay; NaN beyond."""
    first_logp_A: Array
    """float32 log p of the token that follows the scored block; NaN where none does."""
    log_z_G: Array
    ess_G: Array
    resampled_G: Array
    collapsed_G: Array
    draft_nan_G: Array
    """bool: the draft returned NaN among tokens that exist."""
    target_nan_G: Array
    hit_G: Array
    """bool: rows that were drafted ahead go on (exact decoding)."""
    lineage: Lineage[Array]
    """At the target, or the model that decodes alone."""
