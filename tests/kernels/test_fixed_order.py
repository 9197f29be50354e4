"""Products in one order of sums: the bits of a token are the same for every number of tokens. The numbers are such that
sums of a part are exact and sums of parts are not, so that another order of parts would be seen, and the interpreter's
own order within a part is not.

Local axes: Z experts; of gates and ups, both of each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from smc.kernels.compile_jobs import is_recording, recorded
from smc.kernels.experts import experts, experts_fixed
from smc.kernels.fixed_order import (
    FEW_FP8_TOKENS,
    FEW_TOKENS,
    ManyTiling,
    choose_many,
    gate_up_fixed,
    linear_fixed,
    splits_of,
)
from smc.kernels.int4 import FIXED_PROGRAMS, fixed_splits, gate_up_int4, linear_int4_fixed, token_block
from smc.kernels.library import LibraryProducts, by_library, cancelling, small_bias
from smc.kernels.linear import reduce
from smc.kernels.norm import silu_mul
from smc.model.decoder import Experts
from smc.model.linear import FP8, Linear, QuantisedRows
from smc.model.quantisation import Int4Format
from tests.kernels.test_experts import in_int4
from tests.kernels.test_linear import KIND
from tests.model.tiny import tiny_config

COUNTS = (1, 2, 17, 64, 65, 130, 300)
OUTPUTS, INPUTS = 200, 512
HIDDEN, INNER = 64, 32
"""Sizes of experts."""


def whole_numbers(rows: int, columns: int, device: torch.device, seed: int, parts: int = 1) -> Tensor:
    """Return whole numbers; every second of `parts` parts of the columns is 2^20 times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-7, 8, (rows, columns), generator=generator).float()
    for part in x.chunk(parts, 1)[1::2]:
        part *= 2.0**10
    for part in x.chunk(parts, 1)[::2]:
        part *= 2.0**-10
    return x.to(device)


def total(made: Tensor, kind: torch.dtype = KIND) -> Tensor:
    """Return partial sums added in their order and rounded, as their readers do."""
    return reduce(made.view(-1, *made.shape[-2:]), made.new_empty(made.shape[-2:], dtype=kind))


def assert_alike(results: dict[object, Tensor]) -> None:
    """All results begin with the same rows."""
    (_, first), *others = results.items()
    for name, made in others:
        rows = min(len(first), len(made))
        assert torch.equal(made[:rows], first[:rows]), (name, int((made[:rows] != first[:rows]).sum()))


@pytest.fixture
def few_programs(monkeypatch) -> None:
    """Programs add up all parts themselves even if this leaves multiprocessors without work."""
    monkeypatch.setattr("smc.kernels.fixed_order.MULTIPROCESSORS", 1)


def operands(device: torch.device, outputs: int, inputs: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    x_TI = whole_numbers(max(COUNTS), inputs, device, 1, parts).to(KIND)
    weight_OI = whole_numbers(outputs, inputs, device, 2).to(KIND)
    return x_TI, weight_OI, torch.randn(outputs, device=device).to(KIND)


@pytest.mark.parametrize(("biased", "middling"), [(False, 512), (True, 130)])
def test_a_token_s_product_does_not_depend_on_the_others(device, biased, middling, monkeypatch):
    """The most tokens are multiplied as those of a round, or as those of a prompt."""
    monkeypatch.setattr("smc.kernels.fixed_order.MIDDLING_TOKENS", middling)
    parts = splits_of(OUTPUTS, INPUTS)
    x_TI, weight_OI, bias_O = operands(device, OUTPUTS, INPUTS, parts)
    bias_O = bias_O if biased else None
    made = {count: total(linear_fixed(x_TI[:count], weight_OI, bias_O=bias_O)) for count in reversed(COUNTS)}
    assert_alike(made)
    expected_TO = x_TI.double() @ weight_OI.double().T + (0 if bias_O is None else bias_O.double())
    torch.testing.assert_close(made[300].double(), expected_TO, rtol=1e-2, atol=1e-2)


def test_programs_that_add_up_all_parts_give_the_same_bits(device, few_programs):
    parts = splits_of(OUTPUTS, INPUTS)
    assert parts > 2 and choose_many(300, OUTPUTS, INPUTS, parts, False, False).grid_splits == 1
    x_TI, weight_OI, bias_O = operands(device, OUTPUTS, INPUTS, parts)
    made = {
        count: total(linear_fixed(x_TI[:count], weight_OI, bias_O=bias_O, dtype=torch.float32), torch.float32)
        for count in (300, 65, 64)
    }
    assert_alike(made)
    whole = linear_fixed(x_TI, weight_OI, 1, bias_O, torch.float32)
    assert not torch.equal(whole, made[300]), "the order of the parts can be seen"


@pytest.mark.parametrize("gelu", [False, True])
def test_gated_products(device, gelu):
    x_TI, weight = whole_numbers(300, 128, device, 3).to(KIND) / 8, whole_numbers(176, 128, device, 4).to(KIND) / 8
    assert_alike({count: gate_up_fixed(x_TI[:count], weight, gelu=gelu) for count in reversed(COUNTS)})


@pytest.mark.parametrize("whole", [False, True])
def test_fp8(device, whole, monkeypatch):
    monkeypatch.setattr("smc.kernels.fixed_order.FEW_FP8_TOKENS", 130)
    if whole:
        monkeypatch.setattr("smc.kernels.fixed_order.MULTIPROCESSORS", 1)
    x = QuantisedRows(whole_numbers(300, INPUTS, device, 5).to(FP8), torch.rand(300, 1, device=device) + 0.5)
    weight_OI, scale_O = whole_numbers(OUTPUTS, INPUTS, device, 6).to(FP8), torch.rand(OUTPUTS, device=device) + 0.5
    bias_O = torch.randn(OUTPUTS, device=device).bfloat16()

    def rows(count: int) -> QuantisedRows:
        return QuantisedRows(x.value_TI[:count], x.scale_T1[:count])

    assert splits_of(OUTPUTS, INPUTS, fp8=True) > 1
    made = {
        count: total(linear_fixed(rows(count), weight_OI, None, bias_O, torch.float32, scale_O=scale_O), torch.float32)
        for count in reversed(COUNTS)
    }
    assert_alike(made)
    expected_TO = x.value_TI.double() @ weight_OI.double().T * x.scale_T1 * scale_O + bias_O.double()
    torch.testing.assert_close(made[300].double(), expected_TO, rtol=2e-2, atol=1e-1)
    gated = weight_OI[: OUTPUTS // 2 * 2]
    assert_alike({count: gate_up_fixed(rows(count), gated, scale=scale_O) for count in reversed(COUNTS)})


def int4_matrix(device: torch.device, outputs: int, inputs: int, group: int) -> Linear:
    matrix = Linear(inputs, outputs, bias=True)
    matrix.to_int4(Int4Format(group, zeros=False, scale_dtype="BF16"))
    generator = torch.Generator().manual_seed(7)
    matrix.weight.random_(-(1 << 31), 1 << 31, generator=generator)
    scale_CO = 2.0 ** torch.randint(-9, 9, matrix.scale.shape, generator=generator).float()
    matrix.scale.copy_(scale_CO * 1.0078125)
    matrix.bias.data = torch.randn(outputs, generator=generator).to(KIND)
    return matrix.to(device).requires_grad_(False)


def test_int4(device, monkeypatch):
    matrix = int4_matrix(device, OUTPUTS, INPUTS, 32)
    x_TI = whole_numbers(300, INPUTS, device, 8).to(KIND)
    made: dict[object, Tensor] = {}
    splits = fixed_splits(OUTPUTS, INPUTS, 32)
    for programs in (FIXED_PROGRAMS, 1):
        monkeypatch.setattr("smc.kernels.int4.FIXED_PROGRAMS", programs)
        for count in (300, 65, 64, 1):
            out = linear_int4_fixed(x_TI[:count], matrix, splits, torch.float32)
            assert out.dim() == (3 if programs > 1 else 2)
            made[programs, count] = total(out, torch.float32)
    assert_alike(made)
    assert not torch.equal(linear_int4_fixed(x_TI, matrix, 1, torch.float32), made[1, 300])
    gated = {count: gate_up_int4(x_TI[:count] / 64, matrix, fixed=True) for count in (300, 65, 64, 17, 1)}
    assert_alike(gated)
    assert {token_block(count, 32) for count in gated} == {16, 32, 64}


def test_the_library_is_compared_by_products_that_show_the_order_of_their_terms():
    """Results that are rounded to 16 bits hide it, unless the terms cancel each other."""

    def share_of_equal(x_TI: Tensor, weight_OI: Tensor) -> float:
        term_TOI = (x_TI[:, None].float() * weight_OI.float()).numpy()
        whole_TO = np.cumsum(term_TOI, axis=2)[:, :, -1]
        halves_TO = np.cumsum(term_TOI.reshape(*whole_TO.shape, 2, -1), axis=3)[..., -1].sum(-1)
        one_TO, other_TO = (torch.from_numpy(sum_TO).bfloat16() for sum_TO in (whole_TO, halves_TO))
        return float((one_TO == other_TO).double().mean())

    generator = torch.Generator().manual_seed(2)
    others = [torch.randn(size, 512, generator=generator).bfloat16() for size in (32, 64)]
    x_TI, weight_OI = cancelling(*others)
    assert x_TI.shape == others[0].shape and weight_OI.dtype == torch.bfloat16
    assert not (x_TI.double() @ weight_OI.double().t()).any()
    assert share_of_equal(*others) > 0.99 and share_of_equal(x_TI, weight_OI) < 0.3


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_library_is_compared_by_a_bias_that_shows_when_it_is_added(kind):
    def share_of_equal(bias_O: Tensor) -> float:
        shift_TO1 = bias_O.float().expand(len(x_TI), -1)[..., None].numpy()
        first_TO, last_TO = (
            np.cumsum(np.concatenate(terms, axis=2), axis=2)[:, :, -1]
            for terms in ((shift_TO1, term_TOI), (term_TOI, shift_TO1))
        )
        one_TO, other_TO = (torch.from_numpy(sum_TO).to(kind) for sum_TO in (first_TO, last_TO))
        return float((one_TO == other_TO).double().mean())

    generator = torch.Generator().manual_seed(2)
    x_TI, weight_OI = cancelling(*(torch.randn(size, 512, generator=generator).to(kind) for size in (32, 64)))
    term_TOI = (x_TI[:, None].float() * weight_OI.float()).numpy()
    bias_O = torch.randn(64, generator=generator).to(kind)
    made_O = small_bias(bias_O)
    assert made_O.shape == bias_O.shape and made_O.dtype == kind
    assert share_of_equal(made_O) < 0.5 < 0.95 < share_of_equal(bias_O)
    assert share_of_equal(torch.zeros_like(bias_O)) == 1


def some_experts(device: torch.device, **sizes: int) -> Experts:
    config = tiny_config("qwen3_moe", hidden_size=HIDDEN, intermediate_size=INNER, **sizes)
    torch.manual_seed(9)
    module = Experts(config).to(device).to(KIND).requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(0.0, 0.1)
    return module


def test_experts(device, monkeypatch):
    """Few tokens run through all experts, many are sorted by expert first."""
    monkeypatch.setattr("smc.kernels.experts.MOST_TOKENS", 16)
    module, x_TE = some_experts(device), torch.randn(150, HIDDEN, device=device).to(KIND)
    made = {count: experts_fixed(module, x_TE[:count]).transpose(0, 1) for count in (150, 17, 16, 1)}
    assert_alike(made)
    torch.testing.assert_close(made[150], experts(module, x_TE).transpose(0, 1), atol=1e-3, rtol=1e-2)


def cancel(weight_OI: Tensor) -> None:
    """Let products with inputs whose halves are equal be what rounding has left of them."""
    half = weight_OI.shape[1] // 2
    weight_OI[:, half:] = -weight_OI[:, :half]


def share_of_equal(one: Tensor, other: Tensor) -> float:
    return float((one == other).double().mean())


@pytest.mark.parametrize("int4", [False, True])
def test_near_ties_between_experts_of_up_to_512_tokens(device, int4):
    """Rounding decides which experts a token chooses. In 16 bits it decides their outputs, too."""
    module = some_experts(device, num_experts=16, experts_per_token=4)
    x_TE = torch.randn(512, HIDDEN // 2, device=device).repeat(1, 2).to(KIND)
    router_ZE, down, gate_up = module.router.weight.mul_(64), module.down.weight, module.gate_up.weight
    gate_up_ZIE = gate_up.view(2 * module.count, INNER, HIDDEN)
    gate_up_ZIE[:, INNER // 2 :] = gate_up_ZIE[:, : INNER // 2]
    cancel(router_ZE)
    cancel(down)
    if int4:
        in_int4(module, 32, zeros=True)
    made = {count: experts_fixed(module, x_TE[:count]).transpose(0, 1) for count in (512, 257, 65, 64, 17, 1)}
    assert_alike(made)
    order_E, order_I = torch.randperm(HIDDEN, device=device), torch.randperm(INNER, device=device)
    logits = [linear_fixed(x, w, 1) for x, w in ((x_TE, router_ZE), (x_TE[:, order_E], router_ZE[:, order_E]))]
    assert share_of_equal(*(total(each) for each in logits)) < 0.5, "the order of a router's sums can be seen"
    if not int4:
        gate_up_ZIE.copy_(gate_up_ZIE[:, order_I])
        down.copy_(down[:, order_I])
        moved = experts_fixed(module, x_TE).transpose(0, 1)
        assert share_of_equal(moved, made[512]) < 0.5, "the order of an expert's sums can be seen"


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [(6144, 4096, False), (4096, 12288, False), (12288, 4096, True), (151936, 4096, False), (2048, 2048, False),
     (1152, 896, False), (896, 4864, False), (40, 96, False)],
)  # fmt: skip
def test_tilings_fit(outputs, inputs, gated, fp8):
    splits = 1 if gated else splits_of(outputs, inputs, fp8=fp8)
    for tokens in (FEW_TOKENS + 1, 100, 192, 256, 320, FEW_FP8_TOKENS + 1, 2048, 16384):
        tiling = choose_many(tokens, outputs, inputs, splits, gated, fp8)
        assert inputs % (splits * tiling.block_k) == 0 and tiling.grid_splits in (1, splits)
        assert shared_bytes(tiling, fp8) <= 227 * 1024


def shared_bytes(tiling: ManyTiling, fp8: bool) -> int:
    return tiling.stages * tiling.block_k * (tiling.block_n + tiling.block_t) * (1 if fp8 else 2)


@pytest.mark.parametrize("divided", [False, True])
def test_many_tokens_by_the_library_or_by_our_kernel(device, divided, monkeypatch):
    """On a GPU the library may multiply sizes that have been checked and timed. A prompt's products are divided into
    pieces of a few sizes, and its last tokens remain."""
    monkeypatch.setattr("smc.kernels.library.PIECES", (128, 64))
    parts = splits_of(OUTPUTS, INPUTS)
    x_TI, weight_OI, bias_O = operands(device, OUTPUTS, INPUTS, parts)
    expected = total(linear_fixed(x_TI, weight_OI, bias_O=bias_O))
    library = LibraryProducts()
    for count in (300, 128, 70, 300):
        made = total(library.multiply(x_TI[:count], weight_OI, bias_O, None, divided=divided))
        assert torch.equal(made, expected[:count])
    sizes = {size[0] for size in library._pays}
    assert sizes == (set() if device.type == "cpu" else {128, 64} if divided else {300, 128, 70})


def test_a_dry_run_decides_nothing_about_the_library(monkeypatch):
    """Our kernel may not run there, so that its result differs from the library's."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("smc.kernels.library._pays", lambda *_: not is_recording())
    x, weight = (SimpleNamespace(is_cuda=True, shape=shape, dtype=KIND) for shape in ((128, 64), (32, 64)))
    library = LibraryProducts()
    with recorded(lambda _: None):
        assert not library._uses(x, weight, None, 1)
    assert library._uses(x, weight, None, 1)


def test_the_library_s_parts_are_added_in_their_order(device):
    if device.type == "cpu":
        pytest.skip("torch adds to products in another type on GPUs only")
    x_TI, weight_OI, bias_O = operands(device, OUTPUTS, INPUTS, 4)
    expected_TO = x_TI.double() @ weight_OI.double().T + bias_O.double()
    torch.testing.assert_close(by_library(x_TI, weight_OI, bias_O, 4).double(), expected_TO, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("gelu", [False, True])
def test_gated_products_in_one_launch_and_in_two(device, gelu):
    x_TI, weight = whole_numbers(300, 128, device, 3).to(KIND) / 8, whole_numbers(176, 128, device, 4).to(KIND) / 8
    fused = gate_up_fixed(x_TI[:40], weight, gelu=gelu)
    assert torch.equal(silu_mul(linear_fixed(x_TI, weight, 1), gelu)[:40], fused)
