"""What the model runner asks of an attention backend, and what it tells it. Knows nothing about how attention is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from smc.kv.pool import KVPool
from smc.models.decoder import Attend


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass over R rows: T new tokens, row after row. Consecutive rows form S segments that share a prefix."""

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


class AttentionBackend(ABC):
    """Computes causal attention of new tokens over paged keys and values, after storing theirs."""

    @abstractmethod
    def plan(self, pool: KVPool, batch: ForwardBatch) -> Attend:
        """Everything that does not depend on the layer, once per pass. The returned callable is used once per layer."""
