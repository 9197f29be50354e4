"""Persistent slots: the state of every particle that is not a tensor of KV, as arrays indexed by slot.

A group claims its slots when it is admitted and holds them until it is finalised; resampling overwrites their content, never
their ownership. A particle always has a block in flight, whose first token is already counted in its weight:
  lockstep    [seed] between rounds, [seed, d_1..d_K] while the target scores
  look-ahead  [d_1..d_K], drafted while the block before it was being scored

Axes: S slots, X chosen slots, L answer positions, B block positions, K new tokens.
"""

from __future__ import annotations

import numpy as np


class Slots:
    """`count` slots for answers of up to `width` tokens, blocks of up to `block` tokens, over a vocabulary of `vocab_size`."""

    def __init__(self, count: int, width: int, block: int, vocab_size: int) -> None:
        self.tokens_SL = np.zeros((count, width), dtype=np.int32)
        self.logp_SL = np.full((count, width), np.nan, dtype=np.float32)
        """Log-probability of every token under the target law, NaN where not known yet; kept up only for requests that ask."""
        self.length_S = np.zeros(count, dtype=np.int32)
        """Tokens of the answer so far, block in flight included."""
        self.block_S = np.zeros(count, dtype=np.int32)
        """Index of the block's first token."""
        self.logq_SB = np.zeros((count, block), dtype=np.float32)
        """Log-probability under the proposal of the block's tokens; the first, already counted, only tells NaN."""
        self.logw_S = np.zeros(count, dtype=np.float64)
        self.ended_S = np.zeros(count, dtype=bool)
        """The last token is terminal: EOS, a stop, or the length cap."""
        self.cap_S = np.zeros(count, dtype=np.int32)
        """max_tokens of the slot's request."""
        self.is_stop_SV = np.zeros((count, vocab_size), dtype=bool)
        """Which tokens end the answer of the slot's request."""
        self.draft_kv_S = np.zeros(count, dtype=np.int32)
        """Positions the draft holds for the slot, prompt included."""
        self.target_kv_S = np.zeros(count, dtype=np.int32)
        self.draft_live_S = np.zeros(count, dtype=bool)
        """The slot holds pages of the draft."""
        self.target_live_S = np.zeros(count, dtype=bool)
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def claim(self, count: int, cap: int, stop_ids: list[int]) -> np.ndarray:
        """Slots for one request, int32. The caller has checked that there are enough."""
        assert count <= len(self._free), "more slots claimed than free"
        slots = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
        self.length_S[slots] = self.block_S[slots] = 0
        self.logw_S[slots] = 0.0
        self.logq_SB[slots] = 0.0
        self.logp_SL[slots] = np.nan
        self.ended_S[slots] = False
        self.cap_S[slots] = cap
        self.is_stop_SV[slots] = False
        self.is_stop_SV[np.ix_(slots, stop_ids)] = True
        return slots

    def give_back(self, slots: np.ndarray) -> None:
        assert not (self.draft_live_S[slots] | self.target_live_S[slots]).any(), "a slot was given back with pages"
        self._free.extend(slots.tolist())

    def unscored(self, slots_X: np.ndarray) -> np.ndarray:
        """Tokens of the block in flight that the target has not scored yet, [X]."""
        return self.length_S[slots_X] - 1 - self.block_S[slots_X]

    def append(self, slots_X: np.ndarray, tokens_XK: np.ndarray) -> None:
        """Add tokens up to and including the first terminal one; what follows does not exist."""
        k = tokens_XK.shape[1]
        length_X = self.length_S[slots_X]
        stop_XK = self.is_stop_SV[slots_X[:, None], tokens_XK]
        room_X = np.minimum(self.cap_S[slots_X] - length_X, k)
        first_stop_X = np.where(stop_XK.any(1), stop_XK.argmax(1) + 1, k + 1)
        count_X = np.minimum(first_stop_X, room_X)
        self.tokens_SL[slots_X[:, None], length_X[:, None] + np.arange(k)] = tokens_XK
        self.length_S[slots_X] = length_X + count_X
        self.ended_S[slots_X] = (first_stop_X <= count_X) | (length_X + count_X == self.cap_S[slots_X])

    def cut(self, slot: int, length: int) -> None:
        """End a slot's answer earlier than its last token: a stop string was completed there."""
        assert self.block_S[slot] < length <= self.length_S[slot]
        self.length_S[slot] = length
        self.ended_S[slot] = True

    def copy(self, dst_X: np.ndarray, src_X: np.ndarray) -> None:
        """Each dst takes over the particle of src, all at once. Ownership, caps and stops stay; weights are set elsewhere."""
        width = int(self.length_S[src_X].max(initial=0))
        for array in (self.tokens_SL, self.logp_SL):
            array[dst_X, :width] = array[src_X, :width]
        for array in (self.length_S, self.block_S, self.ended_S, self.draft_kv_S, self.target_kv_S, self.logq_SB):
            array[dst_X] = array[src_X]
