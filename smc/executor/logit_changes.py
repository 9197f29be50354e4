"""Changes of logits before they become a token distribution: penalties, the biases of requests, and -inf for tokens
that would end an answer too early.

Both models' logits are changed alike, so proposals stay close to the target's distribution, and every log-probability
is of the distribution after the change. Only rounds with requests that need it do so. `add_biases` and `penalise` are
the torch forms; the Triton forms are in `smc.kernels.sampling` and `smc.kernels.penalties`.

Penalties change logits by the tokens of the prompt and the answer,

    l' = l / r if l > 0, l r otherwise    for tokens in the prompt or in the answer so far (repetition),
    l' - f n - p [n > 0]                  for tokens that occur n times in the answer so far (frequency f, presence p),

before biases, temperature and truncation. Each model stores the token of every page, as it stores keys and values; so
the tokens of a row follow from its block table.

Local axes: Y columns past the vocabulary, Z entries of the bias tables."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smc.api.limits import MAX_BIASES, MAX_STOP_IDS
from smc.arrays import to_device
from smc.round.plan import Penalties
from smc.round.tensors import BiasTables, PageTokens, Rows
from smc.stops import StopMachine

MAX_EOS = 64
WIDTHS = (16, 256, MAX_STOP_IDS + MAX_BIASES + MAX_EOS)
"""Numbers of tokens of an entry that a round may read. They are few, because fewer kinds of rounds save more than fewer
operations."""


def biased_tokens(machine: StopMachine) -> dict[int, tuple[float, float]]:
    """Return for each token what is added to its logit while the answer must not end, and what is added afterwards."""
    found = {token: (bias, bias) for token, bias in machine.biases}
    return found | {token: (-np.inf, found.get(token, (0.0, 0.0))[1]) for token in machine.stop_ids}


def width_of(machine: StopMachine) -> int:
    """Return the width of rounds that have a request with this machine."""
    count = len({token for token, _ in machine.biases}.union(machine.stop_ids))
    return next(width for width in WIDTHS if count <= width)


class LogitBiases:
    """The bias tables of one model's logits."""

    def __init__(self, entries: int, columns: int, device: torch.device, ids_M: np.ndarray | None = None) -> None:
        """`columns`: number of columns of the logits; `ids_M`: the token of each column, ascending; None: column v is
        token v."""
        self._device, self._columns, self._ids_M = device, columns, ids_M
        shape = (entries, WIDTHS[-1])
        self.tables = BiasTables(
            column_ZT=torch.zeros(shape, dtype=torch.int32, device=device),
            early_ZT=torch.zeros(shape, device=device),
            late_ZT=torch.zeros(shape, device=device),
            count_Z=torch.zeros(entries, dtype=torch.int32, device=device),
        )

    def set(self, entry: int, machine: StopMachine) -> None:
        """Write a machine's biases to an entry. Tokens that have no column are left out."""
        added, tables = biased_tokens(machine), self.tables
        token_T = np.array(sorted(added), dtype=np.int64)
        column_T = token_T
        if self._ids_M is not None:
            column_T = np.searchsorted(self._ids_M, token_T).clip(max=len(self._ids_M) - 1)
            column_T = np.where(self._ids_M[column_T] == token_T, column_T, self._columns)
        is_there_T = column_T < self._columns
        values_T2 = np.array([added[token] for token in token_T[is_there_T].tolist()], dtype=np.float32).reshape(-1, 2)
        count = len(values_T2)
        tables.count_Z[entry].fill_(count)
        early_T, late_T = np.ascontiguousarray(values_T2.T)
        for table_ZT, values_T in (
            (tables.column_ZT, column_T[is_there_T]),
            (tables.early_ZT, early_T),
            (tables.late_ZT, late_T),
        ):
            table_ZT[entry].fill_(0)
            table_ZT[entry, :count] = to_device(values_T, self._device).to(table_ZT.dtype)


def add_biases(
    tables: BiasTables,
    entry_S: Tensor,
    least_S: Tensor,
    logits_RV: Tensor,
    slot_X: Tensor,
    position_R: Tensor,
    width: int,
) -> Tensor:
    """Return logits with the biases of their rows, equally many rows for each of X slots. `entry`: the tables' entry of
    every slot; `least`: number of leading tokens of its sequence that must not end the answer; `position`: that of the
    row's next token in the sequence. The logits may be changed in place."""
    slot_R = slot_X.long().repeat_interleave(len(logits_RV) // len(slot_X))
    entry_R, is_early_R1 = entry_S[slot_R], (position_R < least_S[slot_R])[:, None]
    value_RT = torch.where(is_early_R1, tables.early_ZT[entry_R, :width], tables.late_ZT[entry_R, :width])
    return logits_RV.scatter_add(1, tables.column_ZT[entry_R, :width].long(), value_RT.to(logits_RV.dtype))


def penalise(
    page_tokens: PageTokens,
    logits_TV: Tensor,
    penalties: Penalties[Tensor],
    tokens_T: Tensor,
    rows: Rows,
    output_R: Tensor | None,
) -> Tensor:
    """Return the penalised logits in float32, after all tokens [T, V], or after one token of each row [R, V], the
    `output`-th of the T. `tokens`: those that the rows run."""
    q, device, count = rows.queries, tokens_T.device, len(rows.spans.start_R)
    index_R = torch.arange(count, device=device) // (count // len(penalties.prompt_A))
    prompt_R1, start_R1 = penalties.prompt_A[index_R, None], rows.spans.start_R[:, None].long()
    position_L = torch.arange(rows.tables.table_SL.shape[1], device=device)
    token_RL = page_tokens.token_B[rows.tables.pages_at(position_L.expand(len(index_R), -1))].long()
    before_RL = position_L < start_R1
    in_answer_RV, in_prompt_RV = torch.zeros(2, len(index_R), page_tokens.vocab, device=device)
    in_answer_RV.scatter_add_(1, token_RL, (before_RL & (position_L >= prompt_R1)).float())
    in_prompt_RV.scatter_add_(1, token_RL, (before_RL & (position_L < prompt_R1)).float())
    column_Q = torch.arange(q, device=device)
    counts_RQ = (column_Q < rows.spans.count_R[:, None]) & (start_R1 + column_Q >= prompt_R1)
    if output_R is not None:
        counts_RQ = counts_RQ & (column_Q <= (output_R % q)[:, None])
    counts = []
    for column in range(q):
        in_answer_RV = in_answer_RV.scatter_add(
            1, tokens_T.view(-1, q)[:, column : column + 1], counts_RQ[:, column : column + 1].float()
        )
        counts.append(in_answer_RV)
    in_answer_TV = in_answer_RV if output_R is not None else torch.stack(counts, 1).flatten(0, 1)
    each = len(in_answer_TV) // len(index_R)
    index_T = index_R.repeat_interleave(each)
    seen_TV = (in_answer_TV > 0) | (in_prompt_RV > 0).repeat_interleave(each, 0)
    if page_tokens.ids_M is not None:
        in_answer_TV, seen_TV = in_answer_TV[:, page_tokens.ids_M], seen_TV[:, page_tokens.ids_M]
    own_TV, beyond_TY = logits_TV.float().split((in_answer_TV.shape[1], logits_TV.shape[1] - in_answer_TV.shape[1]), 1)
    own_TV = repeated(own_TV, seen_TV, penalties.repetition_A[index_T, None])
    own_TV = own_TV - penalties.frequency_A[index_T, None] * in_answer_TV
    own_TV = own_TV - penalties.presence_A[index_T, None] * (in_answer_TV > 0)
    return torch.cat((own_TV, beyond_TY), 1)


def repeated(logits: Tensor, seen: Tensor, repetition: Tensor) -> Tensor:
    """Apply the repetition penalty to the logits of tokens that have been `seen`."""
    return torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
