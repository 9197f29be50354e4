"""The Triton kernels against float64 attention of one query at a time. Without a GPU they run in Triton's interpreter.

Axes: G groups, M rows of a group, R = G * M rows, Q queries of a row, T = R * Q tokens, J key/value heads, H query heads, D head
dimension, L positions of a table, X positions that one query sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from smc.attention.kernels import SharedPrefixAttention
from smc.attention.step import step_attention
from smc.kernels.store import store_kv
from smc.models.decoder import rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}  # Of ||out - reference|| / ||reference||; the interpreter truncates.


@dataclass(frozen=True)
class Case:
    """Rows of every group as (positions held, new tokens); `shared` of each group."""

    shared: list[int]
    held: list[list[tuple[int, int]]]
    rows: int
    queries: int
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dtype: torch.dtype = torch.float32
    tuning: dict = field(default_factory=lambda: {"splits": 3, "block_p": 16, "min_tiles": 1})


CASES = {
    "decode": Case([37], [[(37, 1), (40, 1), (55, 1)]], 4, 1, (8, 2), dtype=torch.bfloat16),
    "decode_fp32": Case([37], [[(37, 1), (40, 1), (55, 1)]], 4, 1, (8, 2)),
    "no_prefix": Case([0], [[(0, 1), (3, 1), (20, 1)]], 3, 1),
    "no_sharing": Case([50, 33], [[(50, 2)], [(33, 2)]], 1, 2, (2, 2)),
    "target": Case([70], [[(70, 8), (71, 3), (75, 8), (70, 0)]], 5, 8, (8, 2), 128, torch.bfloat16),
    "target_fp32": Case([70], [[(70, 8), (71, 3), (75, 8), (70, 0)]], 5, 8, (8, 2), 128),
    "wide_heads": Case([21], [[(30, 2), (21, 1)]], 2, 2, (8, 1), 128, torch.bfloat16),
    "groups": Case([5, 0, 48], [[(5, 2)], [(4, 1), (0, 2)], [(48, 2), (49, 0), (60, 1)]], 3, 2),
    "empty_group": Case([9, 0], [[(9, 1)], []], 2, 1),
    "idle_rows": Case([16], [[(16, 0), (16, 0)]], 2, 2),
    "nine_queries": Case([10], [[(12, 9), (10, 5)]], 2, 9, (8, 1)),
    "step_wide": Case([150], [[(150, 1), (170, 1), (160, 0)]], 4, 1, (20, 4), dtype=torch.bfloat16),
    "step_groups": Case([5, 0, 48], [[(5, 1)], [(4, 1), (0, 1)], [(48, 1), (49, 0), (60, 1)]], 3, 1, (8, 1), 128),
    "many_tiles": Case([200], [[(200, 2), (230, 1)]], 2, 2, (8, 2), tuning={"splits": 4, "block_p": 16, "min_tiles": 2, "block_o": 16}),
    "few_splits_used": Case([40], [[(41, 1)]], 2, 1, tuning={"splits": 7, "block_p": 16, "min_tiles": 1, "block_s": 2}),
    "several_query_tiles": Case([35], [[(35, 8), (36, 8), (40, 2)]], 3, 8, (8, 2), tuning={"block_x": 16, "splits": 2}),
    "bf16_partials": Case([70], [[(70, 2), (71, 1)]], 2, 2, dtype=torch.bfloat16, tuning={"partial": torch.bfloat16, "splits": 2}),
    "default_tuning": Case([150], [[(150, 8), (153, 5)]], 2, 8, (8, 2), dtype=torch.bfloat16, tuning={}),
}


class Built:
    """Random tensors of a case, its pages scattered over the pool, and float64 answers."""

    def __init__(self, case: Case) -> None:
        self.case, (h, j), d = case, case.heads, case.dim
        generator = torch.Generator().manual_seed(0)
        rows = len(case.shared) * case.rows
        self.size_G = torch.tensor([len(members) for members in case.held], dtype=torch.int32)
        self.shared_G = torch.tensor(case.shared, dtype=torch.int32)
        # What padding rows hold must not matter.
        self.start_R, self.count_R = torch.full((rows,), 7, dtype=torch.int32), torch.full((rows,), case.queries, dtype=torch.int32)
        self.table, pages = {}, 1
        self.table_RL = torch.zeros(rows, max(case.shared) + 90, dtype=torch.int32)
        order = 1 + torch.randperm(2000, generator=generator).int()
        for g, members in enumerate(case.held):
            prefix, pages = order[pages : pages + case.shared[g]], pages + case.shared[g]
            for m, (held, new) in enumerate(members):
                r, own = g * case.rows + m, held + new - case.shared[g]
                own_pages = order[pages : pages + max(own, 0)]
                self.table_RL[r, : len(prefix)] = prefix
                self.table_RL[r, len(prefix) : len(prefix) + len(own_pages)] = own_pages
                self.start_R[r], self.count_R[r] = held, new
                self.table[r] = torch.cat((prefix, own_pages))
                pages += own
        self.keys, self.values = (torch.randn(2001, j, d, generator=generator).to(case.dtype) for _ in "kv")
        self.keys[0] = self.values[0] = 1e4  # Past the end, page 0 is read and masked: it need only be finite.
        qkv = torch.randn(rows * case.queries, (h + 2 * j) * d, generator=generator).to(case.dtype)
        self.q_THD = qkv[:, : h * d].unflatten(1, (h, d)) * 2

    def reference(self) -> Tensor:
        """Zeros for padding queries."""
        (h, j), q = self.case.heads, self.case.queries
        out_THD = torch.zeros(self.q_THD.shape, dtype=torch.float64)
        for r, pages in self.table.items():
            for i in range(int(self.count_R[r])):
                pages_X = pages[: int(self.start_R[r]) + i + 1]
                k_HXD, v_HXD = (x[pages_X].double().transpose(0, 1).repeat_interleave(h // j, 0) for x in (self.keys, self.values))
                weights_HX = torch.softmax((k_HXD @ self.q_THD[r * q + i].double()[..., None]).squeeze(-1) * self.case.dim**-0.5, -1)
                out_THD[r * q + i] = (weights_HX[:, None] @ v_HXD).squeeze(1)
        return out_THD

    def run(self, short: bool = False) -> Tensor:
        case, tokens = self.case, len(self.q_THD)
        attention = SharedPrefixAttention(
            len(case.shared), case.rows, case.queries, case.heads, case.dim, case.dtype, DEVICE, 256, **case.tuning
        )
        attention.part_STHD.fill_(torch.nan)
        attention.lse_STH.fill_(torch.nan)
        # The real input is a strided view of the fused matrix, and stays one.
        qkv = torch.full((tokens, (case.heads[0] + 2 * case.heads[1]) * case.dim), torch.nan, dtype=case.dtype, device=DEVICE)
        q_THD = qkv[:, : case.heads[0] * case.dim].unflatten(1, (case.heads[0], case.dim))
        q_THD.copy_(self.q_THD)
        out_THD = torch.full(q_THD.shape, torch.nan, dtype=case.dtype, device=DEVICE)
        inputs = (self.keys, self.values, self.table_RL, self.size_G, self.shared_G, self.start_R, self.count_R)
        return attention.run(q_THD, *(x.to(DEVICE) for x in inputs), out_THD, short=short).cpu()


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_each_query_alone(name, short):
    built = Built(CASES[name])
    out_THD, reference_THD = built.run(short), built.reference()
    assert torch.equal(out_THD[reference_THD.abs().sum((1, 2)) == 0], torch.zeros_like(out_THD[reference_THD.abs().sum((1, 2)) == 0]))
    assert _error(out_THD, reference_THD) < TOLERANCE[built.case.dtype]


def test_one_query_of_many_is_as_good_as_the_others():
    """The norm over all hides one bad query; large logits would show a lost maximum."""
    built = Built(CASES["target_fp32"])
    built.q_THD *= 10
    out_THD, reference_THD = built.run(), built.reference()
    assert torch.allclose(out_THD.double(), reference_THD, atol=2e-4)


def test_a_workspace_serves_changed_lengths():
    """What a longer prefix left in the workspace is not merged into a shorter one."""
    case = CASES["few_splits_used"]
    long, short = Built(Case([90], [[(95, 1), (90, 1)]], 2, 1, tuning=case.tuning)), Built(case)
    attention = SharedPrefixAttention(1, 2, 1, case.heads, case.dim, case.dtype, DEVICE, 256, **case.tuning)
    for built in (long, short):
        inputs = (built.keys, built.values, built.table_RL, built.size_G, built.shared_G, built.start_R, built.count_R)
        out_THD = torch.full(built.q_THD.shape, torch.nan, dtype=case.dtype, device=DEVICE)
        attention.run(built.q_THD.to(DEVICE), *(x.to(DEVICE) for x in inputs), out_THD)
        assert _error(out_THD.cpu(), built.reference()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "norm"), [((4, 2), 64, False), ((8, 2), 128, True), ((20, 4), 64, True)])
@pytest.mark.parametrize("splits", [1, 2])
def test_store_normalises_rotates_and_writes(dtype, heads, dim, norm, splits):
    generator = torch.Generator().manual_seed(1)
    (h, j), tokens = heads, 5
    qkv = torch.randn(tokens, (h + 2 * j) * dim, generator=generator).to(dtype)
    qkv[-1] = torch.nan  # A padding token's input can be anything.
    rope = torch.randn(30, dim, generator=generator)
    position_T, page_T = torch.tensor([3, 29, 0, 7, 0], dtype=torch.int32), torch.tensor([4, 1, 9, 0, 0], dtype=torch.int32)
    keys, values = (torch.randn(11, j, dim, generator=generator).to(dtype) for _ in "kv")
    norms = [torch.randn(dim, generator=generator).to(dtype) for _ in "qk"] if norm else [None, None]
    q_out = torch.full((tokens, h, dim), torch.nan, dtype=dtype)
    parts = qkv if splits == 1 else torch.stack((qkv.float() - 1, torch.ones_like(qkv, dtype=torch.float32)))
    on_device = [x if x is None else x.to(DEVICE).clone() for x in (parts, q_out, keys, values, rope, position_T, page_T, *norms)]
    store_kv(*on_device[:7], heads, *on_device[7:], eps=1e-6)
    out, new_keys, new_values = (x.cpu() for x in on_device[1:4])

    q_THD, k_TJD, v_TJD = qkv.float().unflatten(1, (-1, dim)).split((h, j, j), 1)
    if norm:
        q_THD, k_TJD = (torch.nn.functional.rms_norm(x, (dim,), w.float(), 1e-6) for x, w in zip((q_THD, k_TJD), norms))
    q_THD, k_TJD = (rotate(x, rope[position_T]) for x in (q_THD, k_TJD))
    keys[page_T[:3]], values[page_T[:3]] = k_TJD[:3].to(dtype), v_TJD[:3].to(dtype)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 8e-3}
    torch.testing.assert_close(out[:4], q_THD[:4].to(dtype), **tolerance)
    torch.testing.assert_close(new_keys, keys, **tolerance)
    torch.testing.assert_close(new_values, values, **(tolerance if splits > 1 else {"atol": 0, "rtol": 0}))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", ["decode", "decode_fp32", "no_prefix", "empty_group", "step_wide", "step_groups"])
def test_one_launch_does_what_storing_and_attending_do(name, splits, norm):
    built, case = Built(CASES[name]), CASES[name]
    (h, j), d, rows, generator = case.heads, case.dim, len(built.start_R), torch.Generator().manual_seed(3)
    qkv = torch.randn(rows, (h + 2 * j) * d, generator=generator).to(case.dtype)
    exists_R = (torch.arange(rows) % case.rows < built.size_G.repeat_interleave(case.rows)) & (built.count_R > 0)
    qkv[~exists_R] = torch.nan  # What padding rows hold must not matter.
    parts = qkv if splits == 1 else torch.stack((qkv.float() - 1, torch.ones_like(qkv, dtype=torch.float32)))
    norms = [torch.randn(d, generator=generator).to(case.dtype) for _ in "qk"] if norm else [None, None]
    rope = torch.randn(300, d, generator=generator)
    index = (built.table_RL, built.size_G, built.start_R, built.count_R)

    def on_device(*tensors: Tensor | None) -> list[Tensor | None]:
        return [x if x is None else x.to(DEVICE).clone() for x in tensors]

    page_R = torch.where(exists_R, built.table_RL.gather(1, built.start_R[:, None].long())[:, 0], 0).int()
    position_R = torch.where(exists_R, built.start_R, 0).int()
    q_RHD = torch.empty(rows, h, d, dtype=case.dtype)
    expected = on_device(parts, q_RHD, built.keys, built.values, rope, position_R, page_R, *norms)
    store_kv(*expected[:7], (h, j), *expected[7:], eps=1e-6)
    attention = SharedPrefixAttention(len(case.shared), case.rows, 1, case.heads, d, case.dtype, DEVICE, 256)
    table, size, start, count = on_device(*index)
    out_RHD = attention.run(*expected[1:4], table, size, built.shared_G.to(DEVICE), start, count, torch.empty_like(expected[1]), short=True)

    found = on_device(parts, built.keys, built.values, rope, *index, torch.full_like(q_RHD, torch.nan), *norms)
    step_attention(*found, eps=1e-6)
    # A norm's sum is made in two halves there.
    torch.testing.assert_close(found[1], expected[2], **({"atol": 1e-5, "rtol": 8e-3} if norm else {"atol": 0, "rtol": 0}))
    assert torch.equal(found[2], expected[3])
    assert not found[8][~exists_R].any()
    assert _error(found[8].cpu(), out_RHD.cpu().double()) < TOLERANCE[case.dtype]


def test_a_workspace_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="multiple of J"):
        SharedPrefixAttention(1, 2, 1, (5, 2), 64, torch.float32, "cpu", 64)


def _error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))
