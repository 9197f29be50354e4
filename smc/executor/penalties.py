"""Penalties: logits change by the tokens that the prompt and the answer hold.

    l' = l / r if l > 0, l r otherwise    of tokens in the prompt or in the answer so far (repetition),
    l' - f n - p [n > 0]                  of tokens that the answer so far holds n times (frequency f, presence p),

before biases, temperature and truncation. Each model keeps the token of every page, as it keeps keys and values; so what
a row holds follows it wherever its block table goes. Plain torch of fixed shape on every device. Knows nothing about
methods and trees. See the package's legend for axes; L positions of a block table, M columns of a draft's own head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.executor.forward import Rows
from smc.executor.plan import Penalties
from smc.memory.pages import DUMMY_PAGE


@dataclass(frozen=True)
class PageTokens:
    """The token of every page, of requests with penalties."""

    token_P: Tensor
    """int32."""
    vocab: int
    ids_M: Tensor | None = None
    """int64 token of each column of the logits; None: columns are tokens."""

    def set(self, pages_XL: Tensor, tokens_XL: Tensor) -> None:
        self.token_P[pages_XL.flatten().long()] = tokens_XL.flatten().int()

    def store(self, tokens_T: Tensor, rows: Rows) -> None:
        """Keep the tokens that rows run."""
        column_Q = torch.arange(rows.queries, device=tokens_T.device)
        page_RQ = _pages(rows, rows.start_R[:, None].long() + column_Q)
        page_RQ = torch.where(column_Q < rows.count_R[:, None], page_RQ, DUMMY_PAGE)
        self.token_P[page_RQ.flatten()] = tokens_T.int()

    def penalise(
        self, logits_TV: Tensor, penalties: Penalties[Tensor], tokens_T: Tensor, rows: Rows, output_R: Tensor | None
    ) -> Tensor:
        """Logits after all tokens, [T, V], or after one of each row, [R, V], the `output`-th of the T."""
        q, device = rows.queries, tokens_T.device
        index_R = torch.arange(len(rows.slot_R), device=device) // (len(rows.slot_R) // len(penalties.prompt_A))
        prompt_R1, start_R1 = penalties.prompt_A[index_R, None], rows.start_R[:, None].long()
        position_L = torch.arange(rows.table_SL.shape[1], device=device)
        token_RL = self.token_P[_pages(rows, position_L.expand(len(index_R), -1))].long()
        before_RL = position_L < start_R1
        in_answer_RV, in_prompt_RV = torch.zeros(2, len(index_R), self.vocab, device=device)
        in_answer_RV.scatter_add_(1, token_RL, (before_RL & (position_L >= prompt_R1)).float())
        in_prompt_RV.scatter_add_(1, token_RL, (before_RL & (position_L < prompt_R1)).float())
        column_Q = torch.arange(q, device=device)
        counts_RQ = (column_Q < rows.count_R[:, None]) & (start_R1 + column_Q >= prompt_R1)
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
        if self.ids_M is not None:
            in_answer_TV, seen_TV = in_answer_TV[:, self.ids_M], seen_TV[:, self.ids_M]
        own_TV, beyond_TX = logits_TV.float().split(
            (in_answer_TV.shape[1], logits_TV.shape[1] - in_answer_TV.shape[1]), 1
        )
        own_TV = repeated(own_TV, seen_TV, penalties.repetition_A[index_T, None])
        own_TV = own_TV - penalties.frequency_A[index_T, None] * in_answer_TV
        own_TV = own_TV - penalties.presence_A[index_T, None] * (in_answer_TV > 0)
        return torch.cat((own_TV, beyond_TX), 1)


def repeated(logits: Tensor, seen: Tensor, repetition: Tensor) -> Tensor:
    """Logits with the repetition penalty where a token has been `seen`."""
    return torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)


def _pages(rows: Rows, position_RX: Tensor) -> Tensor:
    """int64 pages [R, X] of rows at positions; past what a row has, any."""
    held_RX = position_RX.clamp(max=rows.table_SL.shape[1] - 1)
    page_RX = rows.table_SL[rows.slot_R[:, None].long(), held_RX]
    if rows.tail_RB is not None and rows.tail_R is not None and rows.tail_RB.shape[1]:
        offset_RX = position_RX - rows.tail_R[:, None]
        tail_RX = rows.tail_RB.gather(1, offset_RX.clamp(0, rows.tail_RB.shape[1] - 1))
        page_RX = torch.where(offset_RX >= 0, tail_RX, page_RX)
    return page_RX.long()
