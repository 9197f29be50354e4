"""Products with int4 weights against products with the widened matrix."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from smc.kernels.int4 import MOST_TOKENS, choose_int4, gate_up_int4, linear_int4, multiply_widened, token_block, widened
from smc.kernels.linear import reduce
from smc.model.linear import Linear
from smc.model.quantisation import Int4Format
from tests.kernels.test_linear import KIND
from tests.pairwise import few_of_pairs


def matrix_of(device, outputs: int, inputs: int, group: int, zeros: bool, bias: bool = False) -> Linear:
    """A matrix with random codes, scales of very different sizes, and random zero points if `zeros`."""
    generator = torch.Generator().manual_seed(1)
    matrix = Linear(inputs, outputs, bias).requires_grad_(False)
    matrix.to_int4(Int4Format(group, zeros, "F16"))
    matrix.weight.random_(-(1 << 31), 1 << 31, generator=generator)
    size_O = torch.logspace(-2, 1, outputs)
    matrix.scale.copy_((0.5 + torch.rand(matrix.scale.shape, generator=generator)) * size_O / inputs**0.5)
    if matrix.zero is not None:
        matrix.zero.random_(0, 16, generator=generator)
    if bias:
        matrix.bias = torch.nn.Parameter(torch.randn(outputs, generator=generator).to(KIND), requires_grad=False)
    return matrix.to(device)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the error of every output, over all tokens, is at most 1e-2 of that output's norm."""
    error_O, size_O = (found.float() - expected).norm(dim=0), expected.norm(dim=0)
    assert (error_O <= 1e-2 * size_O).all(), (error_O / size_O).max()


@pytest.mark.parametrize(
    ("tokens", "group", "zeros", "splits", "outputs"),
    few_of_pairs(product([1, 8, 13, 20, 33, 100], [128, 64, 32], [False, True], [None, 1, 2, 4], [64, 200])),
)
def test_linear(device, tokens, group, zeros, splits, outputs):
    matrix = matrix_of(device, outputs, 512, group, zeros, bias=True)
    x_TI = torch.randn(tokens, 512, device=device).to(KIND)
    values_OI = matrix.values(slice(0, outputs), torch.float32)
    expected_TO = F.linear(x_TI.float(), values_OI, matrix.bias.float())
    out = linear_int4(x_TI, matrix, splits, torch.float32)
    if out.dim() == 3:
        assert out.dtype == torch.float32 and out.shape[0] == (
            splits or choose_int4(tokens, outputs, 512, group, zeros=zeros).splits
        )
        near(reduce(out, torch.empty_like(out[0], dtype=KIND)), expected_TO)
        torch.testing.assert_close(out.sum(0), expected_TO, atol=1e-3, rtol=1e-3)
    else:
        torch.testing.assert_close(out, expected_TO, atol=1e-3, rtol=1e-3)
        near(linear_int4(x_TI, matrix, splits), expected_TO)


@pytest.mark.parametrize(
    ("tokens", "inner", "zeros", "gelu"),
    few_of_pairs(product([1, 13, 40, 100], [64, 72], [False, True], [False, True])),
)
def test_gate_up(device, tokens, inner, zeros, gelu):
    matrix = matrix_of(device, 2 * inner, 256, 64, zeros)
    x_TI = torch.randn(tokens, 256, device=device).to(KIND)
    gate, up = (x_TI.float() @ matrix.values(slice(0, 2 * inner), torch.float32).T).chunk(2, -1)
    expected_TI = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    found_TI = gate_up_int4(x_TI, matrix, gelu, torch.float32)
    torch.testing.assert_close(found_TI, expected_TI, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, KIND])
def test_weights_are_widened(device, zeros, dtype):
    """Weights are widened bit for bit, all rows or some; products with many tokens use them."""
    matrix = matrix_of(device, 200, 384, 128, zeros, bias=True)
    for rows in (slice(0, 200), slice(70, 135)):
        assert torch.equal(widened(matrix, rows, dtype), matrix.values(rows, dtype))
    matrix.bias = torch.nn.Parameter(matrix.bias.to(dtype), requires_grad=False)
    x_TI = torch.randn(70, 384, device=device).to(dtype)
    expected_TO = F.linear(x_TI.float(), matrix.values(slice(0, 200), torch.float32), matrix.bias.float())
    near(multiply_widened(x_TI, matrix), expected_TO)
    out_TO = x_TI.new_empty(70, 200)
    assert multiply_widened(x_TI, matrix, out_TO) is out_TO
    near(out_TO, expected_TO)


def test_widening_in_pieces(device, monkeypatch):
    monkeypatch.setattr("smc.kernels.int4._WIDENED", 64 * 128)
    matrix, x_TI = matrix_of(device, 200, 128, 64, True), torch.randn(5, 128, device=device)
    expected_TO = x_TI @ matrix.values(slice(0, 200), torch.float32).T
    torch.testing.assert_close(multiply_widened(x_TI, matrix), expected_TO, atol=1e-4, rtol=1e-4)


def test_every_code_and_zero_point_is_exact(device):
    """Multiplies by the unit matrix, which returns every weight."""
    matrix = Linear(32, 256).requires_grad_(False).to(device)
    matrix.to_int4(Int4Format(32, True, "F32"))
    matrix.scale.fill_(1.0)
    matrix.zero.copy_((torch.arange(256, device=device) // 16)[None])
    code_O = torch.arange(256, device=device) % 16
    word_O = sum(code_O.long() << (4 * i) for i in range(8))
    matrix.weight.copy_(torch.where(word_O >= 1 << 31, word_O - (1 << 32), word_O).int()[None, :, None])
    expected_O = (code_O - torch.arange(256, device=device) // 16).float()
    found_TO = linear_int4(torch.eye(32, device=device).to(KIND), matrix, 1, torch.float32)
    assert torch.equal(found_TO, expected_O.expand(32, -1))


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(3072, 2048), (6144, 4096), (4096, 14336), (10240, 8192), (8192, 28672), (40, 96)]
)
def test_choice_divides_the_groups_and_fits(outputs, inputs):
    for tokens, gated, group in product((1, 8, 13, 40, 64, 100), (False, True), (128, 64, 32)):
        if inputs % group:
            continue
        tiling = choose_int4(tokens, outputs, inputs, group, zeros=True, gated=gated)
        assert (inputs // group) % tiling.splits == 0 and not (gated and tiling.splits > 1)
        in_flight = group * (tiling.block_n // 2 + 2 * token_block(tokens, group))
        assert tiling.stages * in_flight + 2 * group * tiling.block_n <= 113 * 1024


def test_what_does_not_fit_is_refused(device):
    matrix = matrix_of(device, 64, 384, 128, False)
    with pytest.raises(ValueError, match="splits must divide the 3 groups of K=384; got 2"):
        linear_int4(torch.randn(2, 384, device=device), matrix, splits=2)
    with pytest.raises(ValueError, match=f"at most {MOST_TOKENS} tokens"):
        linear_int4(torch.randn(129, 384, device=device), matrix)
