"""Packed rows with random keys and values, and a float64 reference that computes attention for one query at a time,
over the pages that the row's block table and tail name.

Local axes: U entries of the workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from smc.attention.kernels import SharedPrefixAttention
from smc.attention.step import StepTiling, step_attention
from smc.kernels.packed_rows import CacheTensors
from smc.round.tensors import RowGroups, RowSpans, RowTables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {
    torch.float32: 3e-6,
    torch.bfloat16: 1e-2,
}  # Bounds of ||out - reference|| / ||reference||; the interpreter truncates.
PAGES, FOREIGN = 2500, 10  # The last FOREIGN pages belong to other requests and hold NaN.
SMALL = {"pieces": 3, "block_p": 16, "min_tiles": 1}


@dataclass(frozen=True)
class Case:
    """The rows of every group as (positions held, new tokens). The first `shared` positions of a group's live rows are
    the same pages."""

    shared: list[int]
    held: list[list[tuple[int, int]]]
    queries: int
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dtype: torch.dtype = torch.float32
    tail: int | None = None
    """Number of positions before a row's first new token at which its tail begins; None: there are no tails."""
    declared: list[int] | None = None
    """Shared positions that the host declares; None: the true ones."""
    padding: int = 1
    """Rows of padding before every group and at the end, and groups of padding."""
    backwards: bool = False
    """The last group's rows come first."""
    tuning: dict = field(default_factory=lambda: dict(SMALL))


class Built:
    """Tensors of a case. Its pages are scattered over the pool and its slots over the table."""

    def __init__(self, case: Case) -> None:
        self.case, (h, j) = case, case.heads
        self.generator = torch.Generator().manual_seed(0)
        self._order = iter((1 + torch.randperm(PAGES - FOREIGN, generator=self.generator)).tolist())
        self.rows = sum(case.padding + len(members) for members in case.held) + case.padding
        groups = len(case.held) + case.padding
        longest = max((held + new for members in case.held for held, new in members), default=1)
        slots, ints = self.rows + 3, {"dtype": torch.int32}
        # Tables name foreign pages past a row's end, and everywhere for a row that has ended.
        self.table_SL = torch.randint(
            PAGES - FOREIGN + 1, PAGES + 1, (slots, longest + 5), generator=self.generator, **ints
        )
        self.slot_R = torch.randperm(slots, generator=self.generator)[: self.rows].int()
        self.start_R, self.count_R = torch.full((self.rows,), 7, **ints), torch.zeros(self.rows, **ints)
        self.group_R, self.first_G, self.size_G = (
            torch.zeros(self.rows, **ints),
            torch.zeros(groups, **ints),
            torch.zeros(groups, **ints),
        )
        self.shared_G = torch.tensor([*(case.declared or case.shared), *[99] * case.padding], **ints)
        width = case.queries + (case.tail or 0)
        self.tail_RB = torch.randint(
            PAGES - FOREIGN + 1, PAGES + 1, (self.rows, width + 1), generator=self.generator, **ints
        )
        self.tail_R = torch.full((self.rows,), 3, **ints)
        self.together = max(map(len, case.held))
        self.pages: dict[int, Tensor] = {}
        """Pages of all positions of a row, new tokens included."""
        row = 0
        for g in reversed(range(len(case.held))) if case.backwards else range(len(case.held)):
            row += case.padding
            self._add_group(g, row)
            row += len(case.held[g])
        self.keys, self.values = (
            torch.randn(PAGES + 1, j, case.dim, generator=self.generator).to(case.dtype) for _ in "kv"
        )
        for store in (self.keys, self.values):
            store[0] = 1e4  # Page 0 is read past the end and masked: it need only be finite.
            store[PAGES - FOREIGN + 1 :] = torch.nan
        qkv = torch.randn(self.rows * case.queries, (h + 2 * j) * case.dim, generator=self.generator).to(case.dtype)
        self.q_THD = qkv[:, : h * case.dim].unflatten(1, (h, case.dim)) * 2
        self.q_THD[~self.exists_T] = torch.nan  # Values of padding must not matter.

    def _take(self, count: int) -> Tensor:
        return torch.tensor([next(self._order) for _ in range(count)], dtype=torch.int32)

    def _add_group(self, g: int, first: int) -> None:
        case, members = self.case, self.case.held[g]
        prefix = self._take(case.shared[g])
        self.first_G[g], self.size_G[g] = first, len(members)
        self.group_R[first : first + len(members)] = g
        for r, (held, new) in enumerate(members, first):
            self.start_R[r], self.count_R[r] = held, new
            if not new:
                continue
            self.pages[r] = pages = torch.cat((prefix, self._take(held + new - len(prefix))))
            tail = held + new if case.tail is None else max(held - case.tail, 0)
            self.tail_R[r] = tail
            self.table_SL[self.slot_R[r], :tail] = pages[:tail]
            self.tail_RB[r, : held + new - tail] = pages[tail:] = (
                self._take(held + new - tail) if case.tail else pages[tail:]
            )

    @property
    def exists_T(self) -> Tensor:
        return (torch.arange(self.case.queries) < self.count_R[:, None]).flatten()

    @property
    def page_T(self) -> Tensor:
        """Page of every token; 0 for padding."""
        page_RQ = torch.zeros(self.rows, self.case.queries, dtype=torch.int32)
        for r, pages in self.pages.items():
            new = int(self.count_R[r])
            page_RQ[r, :new] = pages[-new:]
        return page_RQ.flatten()

    @property
    def position_T(self) -> Tensor:
        position_RQ = self.start_R[:, None] + torch.arange(self.case.queries, dtype=torch.int32)
        return torch.where(self.exists_T, position_RQ.flatten(), 0)

    def tables(self) -> RowTables:
        tails = (None, None) if self.case.tail is None else (self.tail_RB.to(DEVICE), self.tail_R.to(DEVICE))
        return RowTables(self.table_SL.to(DEVICE), self.slot_R.to(DEVICE), *tails)

    def spans(self) -> RowSpans:
        return RowSpans(self.start_R.to(DEVICE), self.count_R.to(DEVICE))

    def groups(self) -> RowGroups:
        return RowGroups(*(x.to(DEVICE) for x in (self.group_R, self.first_G, self.size_G, self.shared_G)))

    def reference(self) -> Tensor:
        """Expected output; zeros for padding queries."""
        (h, j), q = self.case.heads, self.case.queries
        out_THD = torch.zeros(self.q_THD.shape, dtype=torch.float64)
        for r, pages in self.pages.items():
            for i in range(int(self.count_R[r])):
                pages_L = pages[: int(self.start_R[r]) + i + 1]
                k_HLD, v_HLD = (
                    x[pages_L].double().transpose(0, 1).repeat_interleave(h // j, 0) for x in (self.keys, self.values)
                )
                weights_HL = torch.softmax(
                    (k_HLD @ self.q_THD[r * q + i].double()[..., None]).squeeze(-1) * self.case.dim**-0.5, -1
                )
                out_THD[r * q + i] = (weights_HL[:, None] @ v_HLD).squeeze(1)
        return out_THD

    def attention(self, **tuning: object) -> SharedPrefixAttention:
        """Attention whose workspace is filled with NaN."""
        case, shape = self.case, (len(self.first_G), self.rows, self.together, self.case.queries)
        made = SharedPrefixAttention(*shape, case.heads, case.dim, case.dtype, DEVICE, 2000, **(case.tuning | tuning))
        made.part_JUD.fill_(torch.nan)
        made.lse_JU.fill_(torch.nan)
        return made

    def run(self, short: bool = False, attention: SharedPrefixAttention | None = None) -> Tensor:
        return self.run_short() if short else self._run_long(attention or self.attention())

    def run_short(self, tiling: StepTiling | None = None) -> Tensor:
        """Run the pass over short rows, in a single launch. New keys and values are not in the pool before it; the
        rotary angle is 0 everywhere."""
        d = self.case.dim
        new = [x[self.page_T.long()].clone() for x in (self.keys, self.values)]
        for x_TJD in new:
            x_TJD[~self.exists_T] = torch.nan
        qkv = torch.cat([x.flatten(1) for x in (self.q_THD, *new)], 1).to(DEVICE)
        keys, values = (x.to(DEVICE, copy=True) for x in (self.keys, self.values))
        for store in (keys, values):
            store[self.page_T[self.exists_T].long()] = torch.nan
        rope = torch.cat((torch.ones(2000, d // 2), torch.zeros(2000, d // 2)), 1).to(DEVICE)
        out_THD = torch.full(self.q_THD.shape, torch.nan, dtype=self.case.dtype, device=DEVICE)
        step_attention(qkv, CacheTensors(keys, values), rope, self.tables(), self.spans(), out_THD, tiling=tiling)
        for store, expected in ((keys, self.keys), (values, self.values)):
            assert torch.equal(store.cpu().nan_to_num(7.0), expected.nan_to_num(7.0)), (
                "new keys and values are stored, and nothing else"
            )
        return out_THD.cpu()

    def _run_long(self, attention: SharedPrefixAttention) -> Tensor:
        case = self.case
        # As in the model, the input is a strided view of the fused matrix.
        qkv = torch.full(
            (len(self.q_THD), (case.heads[0] + 2 * case.heads[1]) * case.dim),
            torch.nan,
            dtype=case.dtype,
            device=DEVICE,
        )
        q_THD = qkv[:, : case.heads[0] * case.dim].unflatten(1, (case.heads[0], case.dim))
        q_THD.copy_(self.q_THD)
        out_THD = torch.full(q_THD.shape, torch.nan, dtype=case.dtype, device=DEVICE)
        prepared = attention.prepare(self.tables(), self.spans(), self.groups())
        return attention.run(q_THD, self.keys.to(DEVICE), self.values.to(DEVICE), prepared, out_THD).cpu()


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))
