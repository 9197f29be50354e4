"""The kernel of a whole pass against the launches of `TritonForward`, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from smc.arrays import map_tensors
from smc.executor.triton_forward import TritonForward
from smc.executor.whole_pass import WholePassForward
from smc.executor.worker import ModelWorker
from smc.kernels import megakernel
from smc.kernels.megakernel import Megakernel, obstacle
from smc.model.config import ModelConfig
from smc.model.linear import DTYPES
from smc.model.loader import random_model
from smc.model.presets import NoText
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.stops import TokenBytes
from smc.types import ModelRole

WIDTH, PAGES, VOCAB = 2048, 6000, 1000


def config(family: str, **changed) -> ModelConfig:
    sizes = (VOCAB, 256, 3, 4, 2, 64, 512)
    made = ModelConfig(family, *sizes, WIDTH, 1e-6, 10_000.0, None, True, qkv_bias=False, qk_norm=False)
    return replace(made, **changed)


CONFIGS = {
    "llama": config("llama"),
    "biases, odd sizes": config(
        "qwen2", qkv_bias=True, hidden_size=448, num_heads=7, num_kv_heads=1, intermediate_size=832
    ),
    "head norms": config("qwen3", qk_norm=True, head_dim=128),
    "windows": config("mistral", window=100, window_layers=(0, 2)),
    "partial rotation": config("phi3", rotary_dim=32),
    "multipliers": config("granite", embedding_multiplier=3.0, residual_multiplier=0.3, score_scale=0.2),
    "unrotated layers": config("smollm3", unrotated_layers=(1,)),
    "many heads of a key": config("llama", num_heads=12, num_kv_heads=1),
    "wide": config("llama", hidden_size=2048, num_heads=32, num_kv_heads=8, intermediate_size=8192),
}


@pytest.fixture(scope="module", autouse=True)
def needs_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != megakernel.CAPABILITY:
        pytest.skip("needs a GPU of compute capability 9.0")


def worker(given: ModelConfig, dtype: str) -> ModelWorker:
    torch.manual_seed(0)
    model = random_model(given, dtype=DTYPES[dtype], device="cuda")
    for layer in model.layers:
        for norm in (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm):
            if norm is not None:
                norm.weight.normal_(1.0, 0.2)
        if layer.qkv.bias is not None:
            layer.qkv.bias.normal_(0.0, 0.5)
    text = TokenBytes.of(NoText(VOCAB))
    made = ModelWorker(ModelRole.DRAFT, model, width=WIDTH, pages=PAGES, vocab_size=VOCAB, token_bytes=text)
    for store in (made.pool.keys, made.pool.values):
        store.normal_()
        store[:, 0] = 0.0
    return made


def widen(one: ModelWorker) -> None:
    """Replace FP8 weights by the same numbers in bfloat16: the kernel does not round activations."""
    for layer in one.model.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            if matrix.is_fp8:
                values = matrix.values(slice(0, matrix.out_features), torch.bfloat16)
                matrix.weight = nn.Parameter(values, requires_grad=False)
                matrix.register_parameter("scale", None)


def some_rows(rows: int, queries: int, tails: bool = False) -> Rows:
    """Return rows of different lengths on random pages; the last one has a token less than the others."""
    generator = torch.Generator().manual_seed(rows)
    table_SL = torch.zeros(rows, WIDTH, dtype=torch.int32)
    start_R = torch.randint(1, 900, (rows,), generator=generator, dtype=torch.int32)
    start_R[0] = 0
    pages = 1 + torch.randperm(PAGES - 1, generator=generator).int()
    for row in range(rows):
        length = int(start_R[row]) + queries
        table_SL[row, :length] = pages[torch.randint(0, len(pages) - 64 * 8, (length,), generator=generator)]
        # New tokens have pages of their own.
        own = len(pages) - (row + 1) * queries
        table_SL[row, length - queries : length] = pages[own : own + queries]
    count_R = torch.full((rows,), queries, dtype=torch.int32)
    count_R[-1] = queries - 1
    tail_RB = tail_R = None
    if tails:
        tail_R = (start_R - 5).clamp(min=0)
        tail_RB = torch.stack([table_SL[row, at : at + 16] for row, at in enumerate(tail_R.tolist())])
        for row, at in enumerate(tail_R.tolist()):
            table_SL[row, at:] = 1
    zero_R = torch.zeros(rows, dtype=torch.int32)
    group_R, one_R = torch.arange(rows, dtype=torch.int32), torch.ones_like(zero_R)
    slot_R = torch.arange(rows, dtype=torch.int32)
    made = (
        RowTables(table_SL, slot_R, tail_RB, tail_R),
        RowSpans(start_R, count_R),
        RowGroups(group_R, group_R, one_R, zero_R),
    )
    return Rows(*map_tensors(Tensor.cuda, made), queries, Contexts.SHORT)


def tokens_of(rows: Rows) -> Tensor:
    return torch.randint(
        0, VOCAB, (len(rows.spans.start_R) * rows.queries,), generator=torch.Generator().manual_seed(1)
    ).cuda()


def made_by(one: ModelWorker) -> Megakernel:
    assert obstacle(one.model, one.pool, WIDTH) is None
    return Megakernel(one.model, one.pool, one.rope, WIDTH)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_keys_and_values(name, dtype):
    one = worker(CONFIGS[name], dtype)
    whole = made_by(one)
    for rows, queries, tails in [(1, 2, False), (7, 1, True), (8, 2, False), (31, 1, True), (16, 4, True)]:
        asked = some_rows(rows, queries, tails)
        tokens_T = tokens_of(asked)
        found_TE = whole(tokens_T, asked)
        whole.check()
        found = one.pool.keys.clone(), one.pool.values.clone()
        other = worker(CONFIGS[name], dtype)
        other.pool.keys.copy_(one.pool.keys), other.pool.values.copy_(one.pool.values)
        widen(other)
        expected_TE = TritonForward(other)(tokens_T, asked)
        is_there_T = (torch.arange(queries, device="cuda") < asked.spans.count_R[:, None]).flatten()
        assert not found_TE[~is_there_T].any()
        error_T = (found_TE.float() - expected_TE.float()).norm(dim=1) / expected_TE.float().norm(dim=1).clamp(min=1e-3)
        assert error_T[is_there_T].max() < 0.03, (rows, queries)
        for mine, theirs in zip(found, (other.pool.keys, other.pool.values)):
            assert (mine.float() - theirs.float()).norm() / theirs.float().norm() < 2e-3, (rows, queries)


LARGE = config(
    "qwen2", qkv_bias=True, hidden_size=896, num_heads=14, num_kv_heads=2, intermediate_size=4864, num_layers=2
)
"""The layers of a published draft: with 64 tokens, the activations of `down` do not fit into shared memory at once."""


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("given", [CONFIGS["biases, odd sizes"], LARGE], ids=["small", "large"])
def test_a_row_s_bits_do_not_depend_on_its_company(given, dtype):
    """For every kernel of 8 to 64 tokens, at any place among the rows."""
    one = worker(given, dtype)
    whole, asked = made_by(one), some_rows(60, 1)
    asked = asked._replace(spans=asked.spans._replace(count_R=torch.ones_like(asked.spans.count_R)))
    tokens_T = tokens_of(asked)
    before = one.pool.keys.clone(), one.pool.values.clone()
    all_TE = whole(tokens_T, asked)
    for first, count in [(0, 1), (3, 5), (11, 8), (20, 9), (20, 17), (7, 33), (30, 30)]:
        one.pool.keys.copy_(before[0]), one.pool.values.copy_(before[1])
        few = slice(first, first + count)
        some = asked._replace(
            tables=asked.tables._replace(slot_R=asked.tables.slot_R[few].contiguous()),
            spans=RowSpans(*(values_R[few].contiguous() for values_R in asked.spans)),
        )
        assert torch.equal(whole(tokens_T[few].clone(), some), all_TE[few]), (first, count)


def test_a_captured_pass_is_the_same():
    one = worker(CONFIGS["llama"], "fp8")
    forward, asked = WholePassForward(one), some_rows(8, 1)
    tokens_T = tokens_of(asked)
    expected_TE = forward(tokens_T, asked).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found_TE = forward(tokens_T, asked)
    for _ in range(300):
        graph.replay()
    torch.cuda.synchronize()
    forward.check()
    assert torch.equal(found_TE, expected_TE)


def test_a_wait_without_end_is_an_error(monkeypatch):
    """The counter of the barrier is moved, so that the blocks wait for arrivals that never come."""
    monkeypatch.setattr(megakernel, "LIMIT_SECONDS", 0.2)
    one = worker(CONFIGS["llama"], "bfloat16")
    whole, asked = made_by(one), some_rows(8, 1)
    whole(tokens_of(asked), asked)
    torch.cuda.synchronize()
    whole.check()
    whole.workspace.arrivals.fill_(-5)
    whole(tokens_of(asked), asked)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"waited 0\.2 s for its own blocks"):
        whole.check()


def test_other_models_are_refused():
    one = worker(config("olmo2", qk_norm=True), "bfloat16")
    with pytest.raises(ValueError, match="does not run the family olmo2"):
        Megakernel(one.model, one.pool, one.rope, WIDTH)
