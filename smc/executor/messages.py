"""What passes between the scheduler and a worker besides rounds: prompts, as a flat batch of rows.

A worker learns nothing of requests, particles or weights from these. All arrays are NumPy, so a link can ship their bytes.
Axes: R rows, T tokens (row after row), X pages (row after row), D draws; Y tokens that are asked about, K tops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from smc.types import Array

if TYPE_CHECKING:
    from smc.laws import LawSpec
    from smc.philox import Purpose
    from smc.stops import StopMachine

SIDES = ("draft", "target")
COMPANIONS = {side: f"{side} companion" for side in SIDES}
"""Beside the sides: what each runs of guided requests besides (`smc.executor.guidance`), with pages of its pool."""
_SIDE_OF = {lane: side for side, companion in COMPANIONS.items() for lane in (side, companion)}


def side_of(lane: str) -> str:
    """The side whose model runs a lane: a side's own, or its companions'."""
    return _SIDE_OF[lane]


def guides(lane: str) -> bool:
    """It is one of companions."""
    return lane not in SIDES


Result = TypeVar("Result", covariant=True)


class Pending(Protocol, Generic[Result]):
    """A result on its way."""

    def result(self) -> Result:
        """Waits for it."""
        ...

    def spans(self) -> dict[str, tuple[int, int]]:
        """What was done for it, and when it began and ended, nanoseconds of the monotonic clock: the pass of a model in a round has the
        name of its side, that of prompts is `prompt`. After `result`."""
        ...


@dataclass(frozen=True)
class Draws:
    """D tokens to be drawn after the last one of each row, from p^alpha normalised, and with which random numbers (smc/philox.py)."""

    law: LawSpec[np.ndarray]
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
    """int32 `smc.algorithm.expansion.Kind`: `DISTINCT` ones are drawn without replacement."""
    biased_2Y: np.ndarray
    """int32: rows and tokens whose logits are changed, each pair once."""
    bias_Y: np.ndarray
    """float32: what is added to these."""
    companion_R: np.ndarray | None = None
    """int32 which row of the batch guides this one (`smc.executor.guidance`); itself: none does. None: nobody is guided."""
    scale_R: np.ndarray | None = None
    """float32 scale of guidance; 1: none."""


@dataclass(frozen=True)
class Tops:
    """The likeliest tokens after each of the last tokens of rows, under the law of what comes there. Axis R is of the first rows of the
    batch, those that are asked about; those after them only guide."""

    law: LawSpec[np.ndarray]
    count: int
    """K, or the whole vocabulary if that has fewer."""
    asked_R: np.ndarray
    """int32: of how many of its last tokens; of all rows of the batch. A row that guides another is asked about as many."""
    least_R: np.ndarray
    """int32 position up to which what comes does not end the answer."""
    machines: tuple[StopMachine | None, ...]
    """What is added to each row's logits, and ends its answer (`smc.executor.biases`); None: nothing is added."""
    companion_R: np.ndarray | None = None
    """As of `Draws`."""
    scale_R: np.ndarray | None = None


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
    tops: Tops | None = None
    """In place of draws."""


@dataclass(frozen=True)
class PromptResult(Generic[Array]):
    """Draws [R, 0] where none were asked for, and no tops."""

    drawn_RD: Array
    """int32."""
    drawn_logp_RD: Array
    """float32 log-probability of each drawn token under p itself, whatever alpha."""
    logw_RD: Array
    """float64 log-weight that a particle begins with; -inf where nothing was drawn."""
    log_z_R: Array
    """float32 log normaliser of p^alpha after the last token; NaN if the model's logits were."""
    top_YK: Array
    """int32: likeliest first, of every token that tops were asked of, row after row."""
    top_logp_YK: Array
    """float32 log-probabilities of these: -inf outside of a truncation, NaN if the model's logits were."""


class SideLost(RuntimeError):
    """The worker of a side is gone, with its keys and values and all that it was asked for; the other goes on."""

    def __init__(self, side: str, why: str) -> None:
        super().__init__(f"the {side} model is lost: {why}")
        self.side, self._why = side, why

    def __reduce__(self) -> tuple[type[SideLost], tuple[str, str]]:
        return SideLost, (self.side, self._why)


class Worker(Protocol):
    """One model with its KV memory. Calls are carried out in the order they are made."""

    def run_prompts(self, batch: PromptBatch) -> Pending[PromptResult[np.ndarray]]: ...
