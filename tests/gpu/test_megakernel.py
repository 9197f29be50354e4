"""The kernel of a whole pass on a GPU: against torch in float32 and the launches of `TritonForward`.
`tests/kernels/test_megakernel.py` has the same comparisons with torch on an emulated GPU. First all kernels are
compiled, many at a time."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy

import pytest
import torch

from smc.executor.triton_forward import TritonForward
from smc.executor.whole_pass import WholePassForward
from smc.executor.worker import ModelWorker
from smc.kernels import megakernel
from smc.kernels.megakernel import Gpu, Megakernel, constants, machine_code, obstacle
from smc.model.quantisation import Int4Format
from tests.kernels.megakernel_cases import (
    CONFIGS,
    INT4_FORMATS,
    LARGE,
    PARTS,
    check_against_torch,
    check_company,
    config,
    long_rows,
    some_rows,
    tokens_of,
    weights_of,
    widen,
    worker,
)

WIDE = config("llama", hidden_size=2048, num_heads=32, num_kv_heads=8, intermediate_size=8192)
MODELS = CONFIGS | {"wide": WIDE, "large": LARGE}
Case = tuple[str, str, Int4Format | None]
"""Name of a model, type of its weights, and their format in int4."""
CASES: list[Case] = [
    *((name, dtype, None) for name in (*CONFIGS, "wide") for dtype in ("bfloat16", "fp8")),
    *(("qwen2", "int4", held) for held in INT4_FORMATS),
    *((name, "int4", held) for name in ("gemma3_text", "olmo2") for held in INT4_FORMATS[::3]),
]
WITH_COMPANY: list[Case] = [
    *((name, dtype, None) for name in ("odd sizes", "large") for dtype in ("bfloat16", "fp8")),
    *((name, "int4", held) for name in ("large", "gemma3_text") for held in INT4_FORMATS[::3]),
    *((name, "bfloat16", None) for name in ("gemma3_text", "olmo2", "norms of heads of 256", "heads of 256")),
]
WITH_LAUNCHES: list[Case] = [
    ("qwen2", "fp8", None),
    ("gemma3_text", "bfloat16", None),
    ("olmo2", "bfloat16", None),
    ("wide", "fp8", None),
    ("qwen2", "int4", INT4_FORMATS[0]),
]


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != megakernel.CAPABILITY:
        pytest.skip("needs a GPU of compute capability 9.0")
    grid = Gpu(torch.device("cuda")).multiprocessors
    needed = {(case, tiles) for case in CASES for tiles in (1, 8)} | {
        (case, tiles) for case in WITH_COMPANY for tiles in (1, 2, 4, 8)
    }
    given = [
        constants(MODELS[name], grid, weights_of(dtype, held)) | {"TILES": tiles}
        for (name, dtype, held), tiles in needed
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), context) as processes:
        list(processes.map(machine_code, given))


def made_by(one: ModelWorker) -> Megakernel:
    assert obstacle(one.model, one.pool, one.width) is None
    return Megakernel(one.model, one.pool, one.rope, one.width)


def check_against_launches(one: ModelWorker, whole: Megakernel) -> None:
    """Compare hidden states, keys and values with those of many launches."""
    other, asked = deepcopy_of(one), some_rows(7, 1, tails=True)
    tokens_T = tokens_of(asked)
    other.pool.keys.copy_(one.pool.keys), other.pool.values.copy_(one.pool.values)
    found_TE = whole(tokens_T, asked)
    whole.check()
    expected_TE = TritonForward(other)(tokens_T, asked)
    is_there_T = asked.spans.count_R > 0
    assert not found_TE[~is_there_T].any()
    error_T = (found_TE.float() - expected_TE.float()).norm(dim=1) / expected_TE.float().norm(dim=1).clamp(min=1e-3)
    assert error_T[is_there_T].max() < 0.03
    for mine, theirs in zip((one.pool.keys, one.pool.values), (other.pool.keys, other.pool.values), strict=True):
        assert (mine.float() - theirs.float()).norm() / theirs.float().norm() < 2e-3


def deepcopy_of(one: ModelWorker) -> ModelWorker:
    """The same model and pool, with weights that are not quantised."""
    other = worker(one.model.config, "bfloat16")
    other.model = deepcopy(one.model)
    widen(other.model)
    return other


@pytest.mark.parametrize(("name", "dtype", "held"), CASES, ids=str)
def test_a_pass_is_torch_s(name, dtype, held):
    one = worker(MODELS[name], dtype, held=held)
    whole = made_by(one)
    for rows, queries, tails in [(1, 2, False), (7, 1, True), (16, 4, True)]:
        asked = some_rows(rows, queries, tails)
        check_against_torch(one, whole, asked, tokens_of(asked))


@pytest.mark.parametrize(("name", "dtype", "held"), WITH_LAUNCHES, ids=str)
def test_a_pass_is_that_of_many_launches(name, dtype, held):
    one = worker(MODELS[name], dtype, held=held)
    check_against_launches(one, made_by(one))


@pytest.mark.parametrize(("name", "dtype", "held"), WITH_COMPANY, ids=str)
def test_a_row_s_bits_do_not_depend_on_its_company(name, dtype, held):
    """For every kernel of 8 to 64 tokens, at any place among the rows."""
    one = worker(MODELS[name], dtype, held=held)
    check_company(one, made_by(one), PARTS)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("factor", [0.0, 1e-4, 1e4])
def test_extreme_activations_are_torch_s(family, dtype, factor):
    one = worker(config(family), dtype)
    one.model.embed.weight.mul_(factor)
    one.pool.values.mul_(factor)
    one.pool.keys.mul_(min(factor, 8.0))
    asked = some_rows(7, 1, True)
    check_against_torch(one, made_by(one), asked, tokens_of(asked))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_of_32k_positions_are_torch_s(family):
    one = worker(config(family, max_context=1 << 15), "bfloat16")
    asked = long_rows("cuda")
    check_against_torch(one, made_by(one), asked, tokens_of(asked))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_captured_pass_is_the_same(family):
    one = worker(CONFIGS[family], "fp8")
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


@pytest.mark.parametrize(("family", "held"), [("llama", None), ("gemma3_text", None), ("olmo2", INT4_FORMATS[0])])
def test_repeated_passes_are_the_same(family, held):
    """A block that reads what another has not written yet, or has already replaced, would change bits now and then."""
    one = worker(config(family), "int4" if held else "bfloat16", held=held)
    whole, asked = made_by(one), some_rows(31, 1)
    tokens_T = tokens_of(asked)
    expected_TE = whole(tokens_T, asked)
    for _ in range(500):
        assert torch.equal(whole(tokens_T, asked), expected_TE)
    whole.check()


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
    one = worker(config("qwen3_moe", num_experts=4, experts_per_token=2), "bfloat16")
    with pytest.raises(ValueError, match="runs neither experts nor parts of a model"):
        Megakernel(one.model, one.pool, one.rope, one.width)
