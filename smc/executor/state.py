"""State that each model keeps for every slot between rounds, and changes of logits before they become a token
distribution: penalties, the biases of requests, and -inf for tokens that would end an answer too early. The last slot
is a dummy that padding points to.

Both models' logits are changed alike, so proposals stay close to the target's distribution, and every log-probability
is of the distribution after the change. Only rounds with requests that need it do so. `add_biases` is the torch form;
the Triton form is in `smc.kernels.sampling`.

Penalties change logits by the tokens of the prompt and the answer,

    l' = l / r if l > 0, l r otherwise    for tokens in the prompt or in the answer so far (repetition),
    l' - f n - p [n > 0]                  for tokens that occur n times in the answer so far (frequency f, presence p),

before biases, temperature and truncation. Each model stores the token of every page, as it stores keys and values; so
the tokens of a row follow from its block table. Penalties are plain torch of fixed shape on every device.

See the package's legend for axes; E entries of the tables, B tokens of an entry, R rows, V columns, M columns of a
draft's own head, L positions of a block table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import PopulationKind
from smc.api.limits import MAX_BIASES, MAX_STOP_IDS
from smc.arrays import to_device
from smc.executor.forward import Rows
from smc.executor.plan import Penalties, RoundPlan, SequenceHandoff
from smc.memory.pages import DUMMY_PAGE
from smc.stops import START, StopMachine, StopTables

MAX_EOS = 64
WIDTHS = (16, 256, MAX_STOP_IDS + MAX_BIASES + MAX_EOS)
"""Numbers of tokens of an entry that a round may read. They are few, because fewer kinds of rounds save more than fewer
operations."""
SlotEntries = tuple[Tensor, Tensor]
"""For all slots: the entry, and the number of leading tokens of the sequence that must not end it."""


def biased_tokens(machine: StopMachine) -> dict[int, tuple[float, float]]:
    """Return for each token what is added to its logit while the answer must not end, and what is added afterwards."""
    found = {token: (bias, bias) for token, bias in machine.biases}
    return found | {token: (-np.inf, found.get(token, (0.0, 0.0))[1]) for token in machine.stop_ids}


def width_of(machine: StopMachine) -> int:
    """Return the width of rounds that have a request with this machine."""
    count = len({token for token, _ in machine.biases}.union(machine.stop_ids))
    return next(width for width in WIDTHS if count <= width)


class BiasTables:
    """Values that are added to logits on one device, by entry of the stop tables."""

    def __init__(self, entries: int, columns: int, device: torch.device, ids_M: np.ndarray | None = None) -> None:
        """`columns`: number of columns of the logits; `ids_M`: the token of each column, ascending; None: column v is
        token v."""
        self.device, self._columns, self._ids_M = device, columns, ids_M
        self.column_EB = torch.zeros(entries, WIDTHS[-1], dtype=torch.int32, device=device)
        self.early_EB, self.late_EB = torch.zeros(2, entries, WIDTHS[-1], device=device)
        self.count_E = torch.zeros(entries, dtype=torch.int32, device=device)

    def set(self, entry: int, machine: StopMachine) -> None:
        """Write a machine's biases to an entry. Tokens that have no column are left out."""
        added = biased_tokens(machine)
        token_B = np.array(sorted(added), dtype=np.int64)
        column_B = token_B
        if self._ids_M is not None:
            column_B = np.searchsorted(self._ids_M, token_B).clip(max=len(self._ids_M) - 1)
            column_B = np.where(self._ids_M[column_B] == token_B, column_B, self._columns)
        is_there_B = column_B < self._columns
        values_B2 = np.array([added[token] for token in token_B[is_there_B].tolist()], dtype=np.float32).reshape(-1, 2)
        count = len(values_B2)
        self.count_E[entry].fill_(count)
        # The rest of the entry adds 0 to column 0.
        early_B, late_B = np.ascontiguousarray(values_B2.T)
        for table_EB, values_B in (
            (self.column_EB, column_B[is_there_B]),
            (self.early_EB, early_B),
            (self.late_EB, late_B),
        ):
            table_EB[entry].fill_(0)
            table_EB[entry, :count] = to_device(values_B, self.device).to(table_EB.dtype)


def add_biases(
    tables: BiasTables, entries: SlotEntries, logits_RV: Tensor, slot_X: Tensor, position_R: Tensor, width: int
) -> Tensor:
    """Return logits with the biases of their rows, equally many rows for each of X slots. `position`: that of the row's
    next token in the sequence. The logits may be changed in place."""
    entry_S, least_S = entries
    slot_R = slot_X.long().repeat_interleave(len(logits_RV) // len(slot_X))
    entry_R, is_early_R1 = entry_S[slot_R], (position_R < least_S[slot_R])[:, None]
    value_RB = torch.where(is_early_R1, tables.early_EB[entry_R, :width], tables.late_EB[entry_R, :width])
    return logits_RV.scatter_add(1, tables.column_EB[entry_R, :width].long(), value_RB.to(logits_RV.dtype))


class SlotState:
    """Sequences of `slots` particles at one model. Keys and values are stored for all positions but the last
    `pending`."""

    def __init__(
        self,
        slots: int,
        width: int,
        pending: int,
        stops: StopTables,
        device: torch.device,
    ) -> None:
        """`width`: positions of a block table; `pending`: maximum number of tokens without keys and values between
        rounds."""

        def integers(value: int) -> Tensor:
            return torch.full((slots + 1,), value, dtype=torch.int64, device=device)

        self.device, self.dummy, self.stops = device, slots, stops
        self.table_SL = torch.full((slots + 1, width), DUMMY_PAGE, dtype=torch.int32, device=device)
        self.base_S = integers(0)
        """Number of leading positions whose pages no round changes."""
        self.end_S = integers(1)
        """Number of tokens of the sequence, prompt included."""
        self.limit_S = integers(1)
        """Maximum number of tokens of the sequence."""
        self.least_S = integers(0)
        """Number of leading tokens of the sequence that must not end the answer."""
        self.pending_SQ = torch.zeros(slots + 1, pending, dtype=torch.int64, device=device)
        """Pending tokens: the sequence's last tokens, in order."""
        self.pending_S = integers(1)
        """Number of pending tokens, which have no keys and values yet."""
        self.ended_S = torch.ones(slots + 1, dtype=torch.bool, device=device)
        """The last token is terminal, or the slot holds no particle."""
        self.alive_S = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        """The slot holds a particle, with or without weight."""
        self.text_S = integers(START)
        """State of the group's stop machine before the pending tokens."""
        self.logw_S = torch.zeros(slots + 1, dtype=torch.float64, device=device)
        """Log-weight of the particle; at the draft, the log mass by which groups distribute their rows."""
        self.entry_S = integers(0)
        """The group's entry of the stop tables and the bias tables."""
        self.biases: list[BiasTables] = []
        self.nan = torch.full((1, 1), torch.nan, device=device)
        """For reports without seen draws; allocated once, which saves a launch."""

    def join(self, group: SequenceHandoff) -> Tensor:
        """Write particles to their slots. Returns the slots as an index."""
        slots_N = self._here(group.slots_N)
        self.table_SL[slots_N, : group.pages_XL.shape[1]] = to_device(group.pages_XL, self.device)
        self.base_S[slots_N] = group.base
        self.limit_S[slots_N] = group.limit
        self.least_S[slots_N] = group.least
        self.end_S[slots_N] = self._here(group.end_N)
        self.pending_SQ[slots_N, : group.pending_NQ.shape[1]] = self._here(group.pending_NQ)
        self.pending_S[slots_N] = self._here(group.pending_N)
        self.ended_S[slots_N] = to_device(group.ended_N, self.device)
        self.alive_S[slots_N] = to_device(group.alive_N, self.device)
        self.text_S[slots_N] = self._here(group.text_N)
        self.logw_S[slots_N] = to_device(group.logw_N, self.device)
        self.entry_S[slots_N] = group.stops
        if group.machine is not None:
            self.stops.set(group.stops, group.machine)
            for biases in self.biases:
                biases.set(group.stops, group.machine)
        return slots_N

    def reweigh(self, plan: RoundPlan[Tensor]) -> tuple[()]:
        """Replace the particles' log-weights by those of the plan, where it has any. A distinct particle that has lost
        its weight is removed."""
        assert plan.weights_A is not None, "a round with potentials"
        slot_A, given_A = plan.slot_A, ~torch.isnan(plan.weights_A)
        lost_A = given_A & plan.has_kind(PopulationKind.DISTINCT) & (plan.weights_A == -torch.inf)
        self.logw_S[slot_A] = torch.where(given_A, plan.weights_A, self.logw_S[slot_A])
        self.alive_S[slot_A] = self.alive_S[slot_A] & ~lost_A
        self.ended_S[slot_A] = self.ended_S[slot_A] | lost_A
        return ()

    @property
    def entries(self) -> SlotEntries:
        """The slots' entries, as `add_biases` takes them."""
        return self.entry_S, self.least_S

    def held(self, slot_A: Tensor) -> Tensor:
        """Return the number of positions [A] whose keys and values are stored."""
        return self.end_S[slot_A] - self.pending_S[slot_A]

    def _here(self, values: np.ndarray) -> Tensor:
        return to_device(values, self.device).long()


@dataclass(frozen=True)
class PageTokens:
    """The token of every page, for requests with penalties or constraints."""

    token_P: Tensor
    """int32 token of every page."""
    vocab: int
    ids_M: Tensor | None = None
    """int64 token of each column of the logits; None: column v is token v."""

    def set(self, pages_XL: Tensor, tokens_XL: Tensor) -> None:
        self.token_P[pages_XL.flatten().long()] = tokens_XL.flatten().int()

    def store(self, tokens_T: Tensor, rows: Rows) -> None:
        """Store the tokens that rows run."""
        column_Q = torch.arange(rows.queries, device=tokens_T.device)
        page_RQ = _pages(rows, rows.start_R[:, None].long() + column_Q)
        page_RQ = torch.where(column_Q < rows.count_R[:, None], page_RQ, DUMMY_PAGE)
        self.token_P[page_RQ.flatten()] = tokens_T.int()

    def penalise(
        self, logits_TV: Tensor, penalties: Penalties[Tensor], tokens_T: Tensor, rows: Rows, output_R: Tensor | None
    ) -> Tensor:
        """Return the penalised logits after all tokens [T, V], or after one token of each row [R, V], the `output`-th
        of the T."""
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
    """Apply the repetition penalty to the logits of tokens that have been `seen`."""
    return torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)


def _pages(rows: Rows, position_RX: Tensor) -> Tensor:
    """Return the int64 pages [R, X] of rows at positions; past the end of a row, any pages."""
    held_RX = position_RX.clamp(max=rows.table_SL.shape[1] - 1)
    page_RX = rows.table_SL[rows.slot_R[:, None].long(), held_RX]
    if rows.tail_RB is not None and rows.tail_R is not None and rows.tail_RB.shape[1]:
        offset_RX = position_RX - rows.tail_R[:, None]
        tail_RX = rows.tail_RB.gather(1, offset_RX.clamp(0, rows.tail_RB.shape[1] - 1))
        page_RX = torch.where(offset_RX >= 0, tail_RX, page_RX)
    return page_RX.long()
