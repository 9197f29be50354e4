"""What the model runner asks of an attention backend, and what it tells it. Knows nothing about how attention is
computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.memory.kv_pool import KVPool


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass over R rows: T new tokens, row after row. Consecutive rows form S segments that share a
    prefix."""

    table_RL: np.ndarray
    """Page of every position of each row; past its last new token, whatever there is."""
    starts_R: np.ndarray
    """Positions each row held before this pass."""
    counts_R: np.ndarray
    """New tokens of each row, at least 1."""
    pages_T: np.ndarray
    """Page of every new token; the dummy page for one whose keys and values are there already."""
    positions_T: np.ndarray
    """Position of every new token."""
    bounds_S: np.ndarray
    """[S + 1]: segment s is rows bounds[s] .. bounds[s + 1] - 1."""
    shared_S: np.ndarray
    """[S]: the first `shared` positions of all rows of a segment are the same pages."""


class NewEntries:
    """Keys and values that a pass brings, and where they go. The dummy page stays zero: every reader masks it, and
    0 * NaN is NaN."""

    def __init__(self, batch: ForwardBatch, device: torch.device) -> None:
        stored_T = None if batch.pages_T.all() else np.flatnonzero(batch.pages_T)
        self.pages_X = to_device(batch.pages_T if stored_T is None else batch.pages_T[stored_T], device)
        self.index_X = None if stored_T is None else to_device(stored_T, device)
        """Tokens that are stored; None: all."""

    def store(self, keys: Tensor, values: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> None:
        if self.index_X is not None:
            k_TJD, v_TJD = k_TJD[self.index_X], v_TJD[self.index_X]
        keys[self.pages_X], values[self.pages_X] = k_TJD, v_TJD


class AttentionPass(ABC):
    """One forward pass, planned: all that does not depend on the layer has been done."""

    def __init__(self, pool: KVPool, batch: ForwardBatch) -> None:
        self.pool, self.batch = pool, batch

    @cached_property
    def new(self) -> NewEntries:
        return NewEntries(self.batch, self.pool.keys.device)

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        """Store the new tokens' keys and values, then `read`: what a decoder asks of each layer
        (`smc.model.decoder.Attend`)."""
        self.new.store(self.pool.keys[layer], self.pool.values[layer], k_TJD, v_TJD)
        return self.read(layer, q_THD)

    @abstractmethod
    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        """Causal attention [T, H, D] over the pages of every row, on which the new tokens' keys and values are by
        now."""


class AttentionBackend(ABC):
    """Computes causal attention of new tokens over paged keys and values."""

    @abstractmethod
    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        """Once per pass; what it returns is used once per layer."""
