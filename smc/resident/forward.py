"""Runs a fixed number of tokens per row through a decoder. The reference, in plain torch; see the package's legend.

Every row sees its own positions by its own table; that a group's rows share a prefix is of no account here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.kv.pages import DUMMY_PAGE
from smc.kv.pool import KVPool
from smc.models.decoder import Decoder, RopeTable


@dataclass(frozen=True)
class StaticRows:
    """R rows of Q tokens each, in groups of equally many rows."""

    table_RL: Tensor
    """int32 pages."""
    start_R: Tensor
    """int32 position of a row's first token."""
    count_R: Tensor
    """int32 tokens that exist; the others leave no trace."""
    size_G: Tensor
    """int32 rows of each group that are no padding."""
    shared_G: Tensor
    """int32 leading positions that all rows of a group have in common."""
    queries: int
    """Q."""
    short: bool
    """Rows hold few positions."""
    skip_R: Tensor | None = None
    """int32 leading tokens whose keys and values are there already."""


class StaticForward:
    """A decoder with its pool and rotary table."""

    def __init__(self, model: Decoder, pool: KVPool, rope: RopeTable) -> None:
        self.model, self.pool, self.rope = model, pool, rope

    def __call__(self, tokens_T: Tensor, rows: StaticRows) -> Tensor:
        """Hidden states [T, E]; keys and values are stored."""
        q, end = rows.queries, int((rows.start_R + rows.count_R).max())
        offset_Q = torch.arange(q, device=tokens_T.device)
        exists_RQ = offset_Q < rows.count_R[:, None]
        position_RQ = torch.where(exists_RQ, rows.start_R[:, None] + offset_Q, 0)
        stored_RQ = exists_RQ if rows.skip_R is None else exists_RQ & (offset_Q >= rows.skip_R[:, None])
        page_T = torch.where(stored_RQ, rows.table_RL.gather(1, position_RQ), DUMMY_PAGE).flatten().long()
        hidden_RQL = torch.arange(end, device=tokens_T.device) > position_RQ[..., None]
        pages_RL = rows.table_RL[:, :end].long()

        def attend(layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
            keys, values = self.pool.keys[layer], self.pool.values[layer]
            # The dummy page stays zero: whoever reads it masks it, and 0 * NaN is NaN.
            real_T = (page_T != DUMMY_PAGE)[:, None, None]
            keys[page_T], values[page_T] = torch.where(real_T, k_TJD, 0), torch.where(real_T, v_TJD, 0)
            heads, dim = q_THD.shape[1:]
            kv_heads = k_TJD.shape[1]
            q_RJXQD = q_THD.view(-1, q, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4) * dim**-0.5
            scores = torch.einsum("rjxqd,rljd->rjxql", q_RJXQD, keys[pages_RL])
            weights = scores.masked_fill(hidden_RQL[:, None, None], -torch.inf).softmax(-1, dtype=torch.float32).to(q_THD.dtype)
            unseen_RL = hidden_RQL.all(1)[..., None, None]
            out = torch.einsum("rjxql,rljd->rqjxd", weights, values[pages_RL].masked_fill(unseen_RL, 0))
            return out.reshape(-1, heads, dim)

        return self.model(tokens_T, self.rope.at(position_RQ.flatten()), attend)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V], in whatever type; the columns past the vocabulary are padding."""
        return self.model.logits(hidden_RE)
