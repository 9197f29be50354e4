"""Models and rows on which the kernel of a whole pass is compared with torch: without a GPU in
`tests/kernels/test_megakernel.py`, on one in `tests/gpu/test_megakernel.py`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from smc.arrays import map_tensors
from smc.executor.forward import StaticForward
from smc.executor.worker import ModelWorker
from smc.kernels.megakernel import BFLOAT16, FP8_WEIGHTS, Megakernel, Weights
from smc.memory.kv_cache import KVPool
from smc.model.config import ModelConfig
from smc.model.families import FAMILIES
from smc.model.linear import DTYPES, INT4, SCALE_DTYPES, Linear
from smc.model.loader import random_model
from smc.model.presets import NoText
from smc.model.quantisation import Int4Format
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.stops import TokenBytes
from smc.types import ModelRole
from tests.model.tiny import OF_FAMILY, tiny_config

WIDTH, PAGES, VOCAB = 2048, 2500, 1000
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_layers": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_context": WIDTH,
    "rms_eps": 1e-6,
    "tied_embeddings": True,
}
DENSE = tuple(name for name, family in FAMILIES.items() if family.experts is None)


def config(family: str, **changed) -> ModelConfig:
    """A tiny model of a family, of sizes that the kernel takes."""
    windows = {"window": 100} if OF_FAMILY[family].get("window") else {}
    return tiny_config(family, **(SIZES | windows | changed))


CONFIGS = {
    **{family: config(family) for family in DENSE},
    "odd sizes": config("qwen2", hidden_size=448, num_heads=7, num_kv_heads=1, intermediate_size=832),
    "head norms": config("qwen3", head_dim=128),
    "partial rotation": config("phi3", rotary_dim=32),
    "padded heads": config("phi3", head_dim=96).on_device("cuda"),
    "many heads of a key": config("llama", num_heads=12, num_kv_heads=1),
    "heads of 256": config("llama", head_dim=256),
    "norms of heads of 256": config("gemma3_text", head_dim=256, num_kv_heads=1),
    "norms of outputs, odd sizes": config("gemma3_text", hidden_size=640, num_kv_heads=4, residual_multiplier=0.5),
    "norms of all heads": config("olmo2", head_dim=128, hidden_size=320, num_kv_heads=4),
    "small": config("llama", hidden_size=64, intermediate_size=1024),
}
INT4_FORMATS = [
    Int4Format(128, zeros=True, scale_dtype="F16"),
    Int4Format(128, zeros=False, scale_dtype="BF16"),
    Int4Format(64, zeros=True, scale_dtype="BF16"),
    Int4Format(64, zeros=False, scale_dtype="F32"),
    Int4Format(32, zeros=True, scale_dtype="F32"),
    Int4Format(32, zeros=False, scale_dtype="F16"),
]


def weights_of(dtype: str, held: Int4Format | None = None) -> Weights:
    """The weights of `worker`, as the kernel's constants take them."""
    if held is None:
        return FP8_WEIGHTS if dtype == "fp8" else BFLOAT16
    return Weights(torch.int32, held.group, SCALE_DTYPES[held.scale_dtype], held.zeros)


def matrices(model: nn.Module) -> list[Linear]:
    return [getattr(layer, name) for layer in model.layers for name in ("qkv", "o", "gate_up", "down")]


def worker(
    given: ModelConfig, dtype: str, device: str = "cuda", held: Int4Format | None = None, pages: int = PAGES
) -> ModelWorker:
    """A model whose weights, norms and biases are random, and a pool full of random keys and values. `held`: the format
    of its int4 weights."""
    torch.manual_seed(0)
    made_dtype = DTYPES[dtype]
    model = random_model(given, dtype=torch.bfloat16 if made_dtype == INT4 else made_dtype, device=device)
    if held is not None:
        for matrix in matrices(model):
            round_to_int4(matrix, held)
    for layer in model.layers:
        for name in ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm"):
            if (norm := getattr(layer, name)) is not None:
                norm.weight.normal_(1.0 - layer.norm_offset, 0.2)
        if layer.qkv.bias is not None:
            layer.qkv.bias.normal_(0.0, 0.5)
    model.norm.weight.normal_(1.0 - given.traits.norm_offset, 0.2)
    text = TokenBytes.of(NoText(VOCAB))
    made = ModelWorker(ModelRole.DRAFT, model, width=given.max_context, pages=pages, vocab_size=VOCAB, token_bytes=text)
    for store in (made.pool.keys, made.pool.values):
        store.normal_()
        store[:, 0] = 0.0
    return made


def round_to_int4(matrix: Linear, held: Int4Format) -> None:
    """Give a matrix random int4 weights of the same size as its own, with another scale and zero point for each
    group."""
    size = float(matrix.weight.std()) / 5
    matrix.to_int4(held)
    matrix.weight.random_(-(1 << 31), 1 << 31)
    matrix.scale.copy_(size * (0.5 + torch.rand(matrix.scale.shape)))
    if matrix.zero is not None:
        matrix.zero.random_(4, 12)


def widen(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Replace FP8 and int4 weights by the same numbers in a wider type: the kernel does not round activations."""
    for matrix in matrices(model):
        if matrix.scale is not None:
            values = matrix.values(slice(0, matrix.out_features), dtype)
            matrix.weight, matrix.group = nn.Parameter(values, requires_grad=False), 0
            for name in ("scale", "zero"):
                matrix.register_parameter(name, None)


def in_torch(one: ModelWorker) -> StaticForward:
    """The same model and pool in float32, in plain torch."""
    model = deepcopy(one.model)
    widen(model, torch.float32)
    pool = KVPool(model.config, one.pages, torch.float32, one.device)
    pool.keys.copy_(one.pool.keys), pool.values.copy_(one.pool.values)
    return StaticForward(model.float(), pool, one.rope)


def some_rows(rows: int, queries: int, tails: bool = False, device: str = "cuda", longest: int = 900) -> Rows:
    """Return rows of different lengths on random pages; the last one has a token less than the others."""
    generator = torch.Generator().manual_seed(rows)
    table_SL = torch.zeros(rows, WIDTH, dtype=torch.int32)
    start_R = torch.randint(1, longest, (rows,), generator=generator, dtype=torch.int32)
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
    return Rows(*map_tensors(lambda tensor: tensor.to(device), made), queries, Contexts.SHORT)


def long_rows(device: str) -> Rows:
    """Rows of up to 32,768 positions, whose pages are in no order."""
    starts, made = (32_767, 32_000, 16_384, 1), full(some_rows(4, 1, device="cpu", longest=2))
    pages = 1 + torch.randperm(PAGES - 1).int().repeat(-(-32_768 // (PAGES - 1)))[:32_768]
    table_SL = torch.stack([pages.roll(row) for row in range(len(starts))])
    for row, start in enumerate(starts):
        table_SL[row, start] = own = row + 1  # no other position has the page of a new token
        table_SL[:, :start][table_SL[:, :start] == own] = PAGES - 1
        table_SL[row, start] = own
    start_R = torch.tensor(starts, dtype=torch.int32)
    made = made._replace(tables=made.tables._replace(table_SL=table_SL), spans=made.spans._replace(start_R=start_R))
    return Rows(*map_tensors(lambda tensor: tensor.to(device), made[:3]), made.queries, made.contexts)


def full(rows: Rows) -> Rows:
    """The same rows with all of their tokens."""
    return rows._replace(spans=rows.spans._replace(count_R=torch.full_like(rows.spans.count_R, rows.queries)))


def tokens_of(rows: Rows) -> Tensor:
    count = len(rows.spans.start_R) * rows.queries
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(1)).to(rows.spans.start_R.device)


def check_against_torch(one: ModelWorker, whole: Megakernel, rows: Rows, tokens_T: Tensor, most: float = 0.03) -> None:
    """Compare a pass with torch in float32: its hidden states, keys and values."""
    reference = in_torch(one)
    before = one.pool.keys.clone(), one.pool.values.clone()
    found_TE = whole(tokens_T, rows)
    whole.check()
    expected_TE = reference(tokens_T, rows)
    is_there_T = (torch.arange(rows.queries, device=one.device) < rows.spans.count_R[:, None]).flatten()
    assert not found_TE[~is_there_T].any()
    error_T = (found_TE.float() - expected_TE).norm(dim=1) / expected_TE.norm(dim=1).clamp(min=1e-3)
    assert error_T[is_there_T].max() < most, error_T
    for mine, theirs, old in zip(
        (one.pool.keys, one.pool.values), (reference.pool.keys, reference.pool.values), before, strict=True
    ):
        # A written page is near the reference, and all others are as they were.
        written = (theirs != old.float()).flatten(2).any(2)
        assert torch.equal(mine[~written], old[~written])
        error = (mine[written].float() - theirs[written]).norm() / theirs[written].norm().clamp(min=1e-3)
        assert error < most, error


def check_company(one: ModelWorker, whole: Megakernel, parts: list[tuple[int, int]], longest: int = 900) -> None:
    """Compare the bits of 60 rows, of one token each, with those of the parts (first, count) of them."""
    asked = full(some_rows(60, 1, device=one.device.type, longest=longest))
    tokens_T = tokens_of(asked)
    before = one.pool.keys.clone(), one.pool.values.clone()
    all_TE = whole(tokens_T, asked)
    assert all_TE.isfinite().all() and all_TE.any(1).all()
    for first, count in parts:
        one.pool.keys.copy_(before[0]), one.pool.values.copy_(before[1])
        few = slice(first, first + count)
        some = asked._replace(
            tables=asked.tables._replace(slot_R=asked.tables.slot_R[few].contiguous()),
            spans=RowSpans(*(values_R[few].contiguous() for values_R in asked.spans)),
        )
        assert torch.equal(whole(tokens_T[few].clone(), some), all_TE[few]), (first, count)


PARTS = [(0, 1), (3, 5), (11, 8), (20, 9), (20, 17), (7, 33), (30, 30)]
LARGE = replace(CONFIGS["qwen2"], hidden_size=896, num_heads=14, num_kv_heads=2, intermediate_size=4864)
"""The layers of a published draft: with 64 tokens, the activations of `down` do not fit into shared memory at once."""
