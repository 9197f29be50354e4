"""numerics=invariant: nothing beside a token changes its bits, and exact decoding gives the target's answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.exactness import main as exactness
from benchmarks.invariance import main as invariance
from smc.kernels.fixed_order import gate_up_fixed, linear_fixed
from smc.kernels.int4 import gate_up_int4, linear_int4_fixed
from smc.kernels.linear import reduce
from smc.kernels.norm import round_rows
from smc.model.linear import Linear, QuantisedRows, pack, quantise, quantise_int4
from smc.model.quantisation import Int4Format

COUNTS = [1, 2, 3, 8, 16, 17, 32, 33, 40, 63, 64, 65, 96, 128, 129, 200, 257, 320, 512, 2048]
SHAPES = [
    (6144, 4096, False),
    (1152, 896, True),
    *(
        pytest.param(*shape, marks=pytest.mark.slow)
        for shape in ((4096, 12288, False), (896, 4864, False), (24576, 4096, True))
    ),
]
"""Outputs, inputs, and whether there is a bias."""
BF16 = torch.bfloat16


def near_ties(tokens: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, a weight and a bias. Every second output of the weight is a permutation of the inputs of the one
    before in its largest products, so that the two sums differ by rounding alone."""
    x_TI = torch.randn(tokens, inputs, device="cuda").to(BF16)
    x_TI[:, inputs // 2 :] = x_TI[:, : inputs // 2]
    weight_OI = torch.randn(outputs, inputs, device="cuda").to(BF16) / inputs**0.5
    weight_OI[1::2] = torch.cat(weight_OI[::2].chunk(2, 1)[::-1], 1)
    return x_TI, weight_OI, torch.randn(outputs, device="cuda").to(BF16)


def total(made: Tensor) -> Tensor:
    return reduce(made.view(-1, *made.shape[-2:]), made.new_empty(made.shape[-2:], dtype=BF16))


def first_rows(x: Tensor | QuantisedRows, at: Tensor) -> Tensor | QuantisedRows:
    return x[at] if isinstance(x, Tensor) else QuantisedRows(x.value_TI[at], x.scale_T1[at])


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize(("outputs", "inputs", "biased"), SHAPES)
def test_products_of_1_to_512_rows(kind, outputs, inputs, biased):
    """One token among others, first, last and in between, has the bits that it has alone."""
    x_TI, weight_OI, bias_O = near_ties(max(COUNTS), outputs, inputs)
    x, bias = (round_rows(x_TI) if kind == "fp8" else x_TI), bias_O if biased else None
    if kind == "int4":
        matrix = Linear(inputs, outputs, bias=biased).cuda().to(BF16)
        matrix.to_int4(Int4Format(32, zeros=False, scale_dtype="BF16"))
        codes = quantise_int4(weight_OI, 32)
        matrix.weight.copy_(pack(codes.code_OI, inputs // 32))
        matrix.scale.copy_(codes.scale_OP.t())
        if biased:
            matrix.bias.data = bias_O

    weight, scale = quantise(weight_OI) if kind == "fp8" else (weight_OI, None)

    def product(rows: Tensor | QuantisedRows) -> tuple[Tensor, ...]:
        if kind == "int4":
            return total(linear_int4_fixed(rows, matrix)), gate_up_int4(rows, matrix)
        return (
            total(linear_fixed(rows, weight, None, bias, BF16, scale_O=scale)),
            gate_up_fixed(rows, weight, scale=scale, dtype=BF16),
        )

    alone = product(first_rows(x, torch.zeros(1, dtype=torch.int64, device="cuda")))
    for count in COUNTS:
        for place in {0, count // 2, count - 1}:
            at = torch.randint(1, max(COUNTS), (count,), device="cuda")
            at[place] = 0
            for made, expected in zip(product(first_rows(x, at)), alone):
                assert torch.equal(made[place], expected[0]), (count, place)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("qwen3-0.6b/2", "bfloat16"),
        ("llama-1b/2", "fp8"),
        ("qwen3-0.6b/2", "int4"),
        ("qwen3-30b-a3b/2", "bfloat16"),
        pytest.param("llama-1b/2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b/2", "fp8", marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b/2", "int4", marks=pytest.mark.slow),
    ],
)
def test_logits_of_a_position(shape, dtype):
    sizes = ["--rows", "1,17,64,65,200", "--prompts", "1,65,300", "--context", "1200"]
    found = invariance([shape, "--dtype", dtype, "--parts", "operations,passes", *sizes])
    assert not [finding for finding in found if finding.differ], "nothing beside the row changes its bits"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lockstep", "lookahead"])
def test_exact_answers_are_those_of_the_target_alone(form, capsys):
    """The shipped pair in bf16, at temperatures 0 and 0.7, alone and beside 31 others."""
    options = ["company", "--device", "cuda", "--dtype", "bfloat16", "--problems", "40", "--form", form]
    found = exactness([*options, "-n", "1", "4", "8"])
    assert set(found.values()) == {40}, capsys.readouterr().out
