"""Products of few rows against torch, for every tiling.

Local axes: P splits of the inputs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from smc.executor.triton_forward import FEW_FP8_ROWS, FEW_ROWS
from smc.kernels.linear import choose, gate_up_silu, linear, reduce, token_block_of, token_blocks_of
from smc.model.linear import FP8, QuantisedRows, quantise, quantise_rows
from tests.kernels.sizes import SLOTS, possible, warm_up_sizes

KIND = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""Triton's interpreter multiplies matrices of any type but bf16."""
close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
close_rounded = partial(torch.testing.assert_close, atol=1e-2, rtol=1e-2)


def operands(device, tokens: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    x_TI = torch.randn(tokens, inputs, device=device).to(KIND)
    return x_TI, (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(KIND)


@pytest.mark.parametrize(
    ("tokens", "splits", "outputs"),
    [(1, 1, 64), (8, 1, 200), (33, 2, 64), (64, 2, 200), (1, 4, 200), (64, 4, 64), (8, None, 64), (33, None, 200)],
)
def test_linear(device, tokens, splits, outputs):
    x_TI, weight_OI = operands(device, tokens, outputs, 512)
    out = linear(x_TI, weight_OI, splits=splits)
    expected_TO = x_TI.float() @ weight_OI.float().T
    if out.dim() == 3:
        assert out.dtype == torch.float32 and out.shape[0] == (splits or choose(tokens, outputs, 512).splits)
        close(out.sum(0), expected_TO)
        close_rounded(reduce(out, torch.empty_like(out[0], dtype=KIND)), expected_TO.to(KIND))
    else:
        assert splits == 1
        close_rounded(out, expected_TO.to(KIND))


def test_partials_are_those_of_their_inputs(device):
    x_TI, weight_OI = operands(device, 8, 64, 256)
    parts_PTO = linear(x_TI, weight_OI, splits=4, block_k=64)
    for part_TO, x, weight in zip(parts_PTO, x_TI.chunk(4, 1), weight_OI.chunk(4, 1)):
        close(part_TO, x.float() @ weight.float().T)


@pytest.mark.parametrize("splits", [1, 2])
def test_bias_is_added_once(device, splits):
    x_TI, weight_OI = operands(device, 3, 96, 128)
    bias_O = torch.randn(96, device=device).to(KIND)
    out = linear(x_TI, weight_OI, splits=splits, bias_O=bias_O, block_k=64, dtype=torch.float32)
    total_TO = out if splits == 1 else out.sum(0)
    close(total_TO, F.linear(x_TI.float(), weight_OI.float(), bias_O.float()))


def test_rows_of_a_wider_matrix(device):
    x_TI, weight_OI = operands(device, 4, 64, 128)
    wide = torch.cat((x_TI, torch.full_like(x_TI, torch.nan)), 1)
    close(linear(wide[:, :128], weight_OI, splits=1), linear(x_TI, weight_OI, splits=1))


@pytest.mark.parametrize(
    ("tokens", "inner", "block_n"), [(1, 64, 64), (8, 72, 64), (8, 64, 128), (64, 72, 128), (1, 72, 128), (64, 64, 64)]
)
def test_gate_up_silu(device, tokens, inner, block_n):
    x_TI, weight = operands(device, tokens, 2 * inner, 256)
    gate, up = (x_TI.float() @ weight.float().T).chunk(2, -1)
    act_TI = gate_up_silu(x_TI, weight, block_n=block_n)
    close_rounded(act_TI, (F.silu(gate) * up).to(KIND))


def usual(x: QuantisedRows, weight8_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """Return the expected size of products [T, O] of unrelated vectors with these norms."""
    row_T, row_O = x.value_TI.float().norm(dim=1), weight8_OI.float().norm(dim=1)
    return (row_T[:, None] * x.scale_T1) * (row_O * scale_O) / weight8_OI.shape[1] ** 0.5


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "splits"),
    [
        (1, 64, 1024, 4),
        (300, 64, 1024, 4),
        (33, 200, 512, None),
        (96, 200, 512, None),
        (64, 200, 96, 3),
        (65, 200, 96, 3),
        (96, 40, 32, 1),
        (1, 40, 32, 1),
        (65, 130, 640, 1),
        (300, 130, 640, 1),
    ],
)
def test_fp8(device, tokens, outputs, inputs, splits):
    """Weights and tokens of very different sizes; a row of zeros in each; a bias."""
    x_TI, weight_OI = operands(device, tokens, outputs, inputs)
    weight_OI[0] = 0.0
    weight8_OI, scale_O = quantise(weight_OI * torch.logspace(-3, 3, outputs, device=device)[:, None])
    x = quantise_rows(
        x_TI
        * torch.logspace(2, -2, tokens, device=device)[:, None]
        * (torch.arange(tokens, device=device) != 1)[:, None]
    )
    bias_O = torch.randn(outputs, device=device).to(KIND)
    out = linear(x, weight8_OI, splits, bias_O, torch.float32, scale_O=scale_O)
    total_TO = out if out.dim() == 2 else out.sum(0)
    expected_TO = x.value_TI.float() @ weight8_OI.float().T * x.scale_T1 * scale_O + bias_O.float()
    # Tensor cores keep about 14 bits of a sum of FP8 products.
    bound_TO = (1e-5 if device.type == "cpu" else 2e-2) * usual(x, weight8_OI, scale_O) + 1e-5 * bias_O.float().abs()
    assert ((total_TO - expected_TO).abs() <= bound_TO).all()


@pytest.mark.parametrize(("tokens", "inner"), [(1, 64), (40, 72), (96, 64), (200, 72)])
def test_fp8_gate_up_silu(device, tokens, inner):
    """Every row of the gate and of the up matrix has its own scale."""
    x_TI, weight = operands(device, tokens, 2 * inner, 256)
    weight8, scale = quantise(weight * torch.logspace(-1, 1, 2 * inner, device=device).flip(0)[:, None])
    x = quantise_rows(x_TI)
    gate, up = (x.value_TI.float() @ weight8.float().T * x.scale_T1 * scale).chunk(2, -1)
    found_TI = gate_up_silu(x, weight8, scale=scale)
    assert found_TI.dtype == torch.bfloat16
    torch.testing.assert_close(found_TI.float(), F.silu(gate) * up, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("of_weights", [True, False])
def test_every_fp8_number_is_read_as_it_is(device, of_weights):
    """Multiplies all 256 FP8 numbers, except the two NaN, by the unit matrix."""
    number_I = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)
    number_I = torch.where(number_I.float().isnan(), 0.0, number_I.float()).to(FP8)
    numbers_II, unit_II = number_I.expand(16, -1).contiguous(), torch.eye(256, device=device)[64:128].to(FP8)
    weight, x = (numbers_II, unit_II) if of_weights else (unit_II, numbers_II)
    ones = torch.ones(len(x), 1, device=device), torch.ones(len(weight), device=device)
    found = linear(QuantisedRows(x, ones[0]), weight, 1, dtype=torch.float32, scale_O=ones[1])
    expected = number_I[64:128].float()[:, None].expand(-1, 16)
    assert torch.equal(found, expected if of_weights else expected.T)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "outputs, inputs",
    [(3072, 2048), (2048, 2048), (2048, 8192), (6144, 4096), (4096, 14336), (40, 96), (128256, 4096), (57344, 8192)],
)
def test_choice_divides_the_inputs_and_fits(outputs, inputs, fp8):
    for tokens, gated in product((8, 32, 40, 64, 96, 128, 256, *[512] * fp8), (False, True)):
        tiling = choose(tokens, outputs, inputs, gated, fp8)
        assert inputs % (tiling.block_k * tiling.splits) == 0 and not (gated and tiling.splits > 1)
        assert (
            tiling.stages * tiling.block_k * (tiling.block_n + token_block_of(tokens, fp8)) * (1 if fp8 else 2)
            <= 227 * 1024
        )


@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [
        ((16, 0), (1, 16)),
        ((32, 0), (17, 32)),
        ((32, 16), (33, 48)),
        ((64, 0), (49, 64)),
        ((64, 32), (65, 96)),
        ((128, 0), (97, 300)),
    ],
)
def test_tokens_of_fp8_are_padded_to_a_power_of_two_or_to_three_quarters_of_one(blocks, tokens):
    assert {token_blocks_of(each, fp8=True) for each in tokens} == {blocks}


@pytest.mark.parametrize("fp8", [False, True])
def test_warm_up_covers_tilings_of_unconditional_rows(fp8):
    """The tilings that rounds with unconditional rows need are all among those of the warm-up: for one token of a row
    at the draft, and for 2 to 9 at the target."""
    shapes = [
        (3072, 2048),
        (2048, 8192),
        (8192, 2048),
        (6144, 4096),
        (4096, 14336),
        (14336, 4096),
        (8192, 28672),
        (128256, 4096),
    ]

    @cache
    def products(tokens: int) -> set[tuple[object, ...]]:
        if tokens > (FEW_FP8_ROWS if fp8 else FEW_ROWS):
            return set()
        each = product(shapes, (False, True))
        return {
            (token_block_of(tokens, fp8), shape, gated, choose(tokens, *shape, gated, fp8)) for shape, gated in each
        }

    def tilings(rows: Iterable[int], tokens: int) -> set[tuple[object, ...]]:
        return set().union(*(products(count * each) for count in rows for each in (1, tokens)))

    for slots, tokens in product(SLOTS, range(2, 10)):
        assert tilings(possible(slots), tokens) <= tilings(warm_up_sizes(slots), tokens), (slots, tokens)


def test_what_does_not_divide_is_refused(device):
    x_TI, weight_OI = operands(device, 2, 64, 96)
    with pytest.raises(ValueError, match="must divide K=96"):
        linear(x_TI, weight_OI, splits=5)
    with pytest.raises(ValueError, match="must divide K=48"):
        linear(quantise_rows(x_TI[:, :48]), quantise(weight_OI[:, :48])[0], scale_O=torch.ones(64, device=device))
    with pytest.raises(ValueError, match="weight"):
        linear(x_TI, weight_OI.T)


def test_gate_up_gelu(device):
    x_TI, weight = torch.randn(5, 64, device=device).bfloat16(), torch.randn(80, 64, device=device).bfloat16() / 8
    gate, up = (x_TI.float() @ weight.float().T).chunk(2, -1)
    found_TI = gate_up_silu(x_TI, weight, gelu=True, dtype=torch.float32)
    torch.testing.assert_close(found_TI, F.gelu(gate, approximate="tanh") * up, atol=1e-3, rtol=1e-3)
