"""Slots: the host's record of every particle, as arrays indexed by slot. The models have arrays of their own
(smc/executor). Also the checkpoint of a request's particles while they hold no slots: a preempted request resumes from
it, and a request that switches between the draft-target pair and the target alone continues from it.

A request claims its slots when it is admitted and holds them until it ends, is preempted, or has fewer particles.
Resampling overwrites the content of slots, never their ownership. Between rounds a particle has a block in flight,
whose first token is already counted in its weight:
  lockstep    the seed
  look-ahead  [d_1..d_K], drafted while the block before it was being scored

A particle of a guided request has a second slot, for its unconditional row, of which only the pages count
(smc/executor/guidance.py).

Local axes: Y chosen slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from smc.memory.pages import PageAllocator
from smc.round.tensors import Lineage
from smc.types import ModelRole

SAVED = (
    *("tokens_SL", "logp_SL", "raw_logp_SL", "logq_SL", "length_S", "block_S"),
    *("logw_S", "logphi_S", "weighed_S", "ended_S"),
)
"""Arrays of `Slots` that a checkpoint copies."""


class Stream(NamedTuple):
    """A sequence that a model runs for each row of a request, in pages of that model's pool: the row itself or, for a
    guided request, the unconditional row after the negative prompt (`smc.executor.guidance`)."""

    role: ModelRole
    unconditional: bool = False
    redrafted: bool = False
    """The row's tokens that are drafted again after a miss (`smc.executor.redraft`)."""


REDRAFTED = Stream(ModelRole.DRAFT, redrafted=True)
RoundPages = dict[Stream, np.ndarray]
"""Pages that a round has allocated for a request, by stream; int32, row after row."""


class Slots:
    """`count` slots for answers of up to `width` tokens, with room for the token distributions of `chains` draft
    chains."""

    def __init__(self, count: int, width: int, chains: int = 0) -> None:
        self.tokens_SL = np.zeros((count, width), dtype=np.int32)
        self.logp_SL = np.full((count, width), np.nan, dtype=np.float32)
        """Log-probability of every token under the target's distribution, NaN if not known yet; maintained only for
        requests that need it."""
        self.raw_logp_SL = np.full((count, width), np.nan, dtype=np.float32)
        """The same under the softmax of the target's own logits, for requests that report it."""
        self.logq_SL = np.zeros((count, width), dtype=np.float32)
        """Log-probability of every token under the proposal; valid in the block in flight, from which a request
        resumes."""
        self.length_S = np.zeros(count, dtype=np.int32)
        """Tokens of the answer so far, including the block in flight."""
        self.block_S = np.zeros(count, dtype=np.int32)
        """Index of the first token of the block in flight."""
        self.logw_S = np.zeros(count, dtype=np.float64)
        self.logphi_S = np.zeros(count, dtype=np.float64)
        """Log of the potential that the weight includes; 0 without a potential."""
        self.weighed_S = np.zeros(count, dtype=np.int32)
        """Tokens of the answer that the potential has been asked about."""
        self.ended_S = np.zeros(count, dtype=bool)
        """Whether the last token is terminal: EOS, a stop, or the length limit. True as well for slots without a
        particle."""
        self.head_S = {role: np.zeros(count, dtype=np.int32) for role in ModelRole}
        """Page of the last position whose keys and values a model has. The slot holds a reference to it, and thereby to
        all pages before it."""
        self.held_S = {role: np.zeros(count, dtype=np.int32) for role in ModelRole}
        """Positions, including the prompt's, whose keys and values a model has."""
        self.unconditional_S = np.full(count, -1, dtype=np.int32)
        """Slot of the particle's unconditional row; -1: it has none."""
        self.distribution_S = np.full(count, -1, dtype=np.int32)
        """Index at which the draft stores the token distributions of the particle, if it is a draft chain; -1: it is
        none."""
        self.chains = chains
        self._free, self._free_distributions = list(range(count - 1, -1, -1)), list(range(chains - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_chains(self) -> int:
        """Draft chains for whose token distributions there is still room."""
        return len(self._free_distributions)

    def claim(self, count: int, guided: bool = False, *, chained: bool = False) -> np.ndarray:
        """Claim slots for `count` particles of one request, int32. `guided`: as many further slots for unconditional
        rows; `chained`: room for token distributions, too. The caller has checked that there are enough."""
        slots = self._claim(count)
        if guided:
            self.unconditional_S[slots] = self._claim(count)
        if chained:
            assert count <= len(self._free_distributions), "more draft chains than there is room for"
            self.distribution_S[slots] = [self._free_distributions.pop() for _ in range(count)]
        return slots

    def _claim(self, count: int) -> np.ndarray:
        assert count <= len(self._free), "more slots claimed than free"
        slots = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
        for array in (self.length_S, self.block_S, self.logw_S, self.logphi_S, self.weighed_S, self.ended_S):
            array[slots] = 0
        self.logp_SL[slots] = self.raw_logp_SL[slots] = np.nan
        return slots

    def release(self, slots: np.ndarray) -> None:
        self.release_distributions(slots)
        unconditional_slots = self.unconditional_slots(slots)
        self.unconditional_S[slots] = -1
        self._free.extend([*unconditional_slots.tolist(), *slots.tolist()])

    def release_distributions(self, slots_Y: np.ndarray) -> None:
        """Free the room for token distributions: the particles of these slots are no longer draft chains."""
        distribution_Y = self.distribution_S[slots_Y]
        self._free_distributions.extend(distribution_Y[distribution_Y >= 0].tolist())
        self.distribution_S[slots_Y] = -1

    def unconditional_slots(self, slots_Y: np.ndarray) -> np.ndarray:
        """Slots of the unconditional rows of these particles: one for each particle of a guided request, none for
        others."""
        slot_Y = self.unconditional_S[slots_Y]
        return slot_Y[slot_Y >= 0]

    def release_pages(self, slots_Y: np.ndarray, allocators: dict[ModelRole, PageAllocator]) -> None:
        """Release the pages that the particles of these slots refer to."""
        for held_Y in (slots_Y, self.unconditional_slots(slots_Y)):
            for role, allocator in allocators.items():
                allocator.release(self.head_S[role][held_Y])
                self.head_S[role][held_Y] = 0

    def descend(
        self,
        role: ModelRole,
        allocator: PageAllocator,
        slot_Y: np.ndarray,
        source_Y: np.ndarray,
        lineage: Lineage[np.ndarray],
        given_B: np.ndarray,
    ) -> None:
        """At a model, let slots refer to pages that continue those of the slots `source_Y`, all at once. Of the pages
        `given_B`, those that are not kept are freed."""
        head_S, held_S = self.head_S[role], self.held_S[role]
        path_YB, kept_Y, dropped_Y = map(np.asarray, lineage)
        before_Y, after_Y = (
            head_S[slot_Y],
            allocator.grow(allocator.ancestors(head_S[source_Y], dropped_Y), path_YB, kept_Y),
        )
        allocator.hold(after_Y)
        allocator.release(before_Y)
        allocator.settle(given_B, np.where(np.arange(path_YB.shape[1]) < kept_Y[:, None], path_YB, 0))
        held_S[slot_Y] = held_S[source_Y] - dropped_Y + kept_Y
        head_S[slot_Y] = after_Y

    def vacate(self, slots_Y: np.ndarray) -> None:
        """Mark slots as holding no particle: no tokens are added there, and the weight is zero."""
        self.ended_S[slots_Y] = True
        self.block_S[slots_Y] = self.length_S[slots_Y] - 1
        self.logw_S[slots_Y] = -np.inf

    def unscored(self, slots_Y: np.ndarray) -> np.ndarray:
        """Number of tokens of the block in flight that the target has not scored yet [Y]."""
        return self.length_S[slots_Y] - 1 - self.block_S[slots_Y]

    def begin(self, slots_Y: np.ndarray, tokens_Y: np.ndarray, logp_Y: np.ndarray, ended_Y: np.ndarray) -> None:
        """Set first tokens, and whether they end the answers."""
        self.tokens_SL[slots_Y, 0], self.logp_SL[slots_Y, 0] = tokens_Y, logp_Y
        self.length_S[slots_Y], self.ended_S[slots_Y] = 1, ended_Y

    def copy(self, dst_Y: np.ndarray, src_Y: np.ndarray) -> None:
        """Copy the particles of slots `src_Y` to `dst_Y`, all at once. Ownership stays; weights and pages are set
        elsewhere."""
        width = int(self.length_S[src_Y].max(initial=0))
        for array in (self.tokens_SL, self.logp_SL, self.raw_logp_SL, self.logq_SL):
            array[dst_Y, :width] = array[src_Y, :width]
        for of_slots in (self.length_S, self.block_S, self.logphi_S, self.weighed_S, self.ended_S):
            of_slots[dst_Y] = of_slots[src_Y]


@dataclass(eq=False)
class Checkpoint:
    """Saved particles: rows of the arrays of `Slots`, by name."""

    arrays: dict[str, np.ndarray]
    _pages: dict[object, int] = field(default_factory=dict)

    @staticmethod
    def of(slots: Slots, slots_N: np.ndarray) -> Checkpoint:
        width = int(slots.length_S[slots_N].max())
        arrays = {name: getattr(slots, name) for name in SAVED}
        return Checkpoint(
            {name: of_S[slots_N, :width] if of_S.ndim > 1 else of_S[slots_N] for name, of_S in arrays.items()}
        )

    @staticmethod
    def of_tokens(tokens_L: Sequence[int], logp_L: Sequence[float]) -> Checkpoint:
        """Return one row with these confirmed tokens, at least one, of which the last has not been run. `logp_L`: their
        log-probabilities; empty if they are not needed."""
        size, reported = len(tokens_L), slice(len(logp_L))
        slots = Slots(1, size)
        slots.tokens_SL[0] = tokens_L
        slots.logp_SL[0, reported] = slots.raw_logp_SL[0, reported] = logp_L
        slots.length_S[0], slots.block_S[0] = size, size - 1
        return Checkpoint.of(slots, np.zeros(1, dtype=np.int32))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.arrays["length_S"])

    @property
    def longest(self) -> int:
        """Tokens of the longest particle."""
        return int(self.arrays["length_S"].max())

    def pages(self, key: object, count: Callable[[], int]) -> int:
        """Number of pages needed to resume, in the circumstances that `key` identifies. `count` computes it at the
        first call."""
        if key not in self._pages:
            self._pages[key] = count()
        return self._pages[key]

    def take(self, index_N: np.ndarray, logw_N: np.ndarray) -> Checkpoint:
        """Return the rows with these indices and other weights."""
        return Checkpoint({name: values[index_N] for name, values in self.arrays.items()} | {"logw_S": logw_N})

    def restore(self, slots: Slots, slots_N: np.ndarray) -> None:
        """Write the rows to slots. Further slots repeat the first row and hold no particle."""
        row_N = row_of_batch(len(self), len(slots_N))
        for name, values in self.arrays.items():
            there = getattr(slots, name)
            if there.ndim > 1:
                there[slots_N, : values.shape[1]] = values[row_N]
            else:
                there[slots_N] = values[row_N]
        rest_Y = slots_N[len(self) :]
        slots.ended_S[rest_Y], slots.logw_S[rest_Y] = True, -np.inf


def row_of_batch(rows: int, size: int) -> np.ndarray:
    """Row for each index of a batch of `size`: its own, or the first if there are fewer rows [N]."""
    index_N = np.arange(size)
    return np.where(index_N < rows, index_N, 0)


class ShrunkCheckpoint(NamedTuple):
    checkpoint: Checkpoint
    kept_N: np.ndarray
    """Indices of the particles that stay."""
    log_z: float
    """Increment of the request's log Z-hat."""
