"""numerics=invariant: nothing beside a token changes its bits, and exact decoding gives the target's answer.

Local axes: P partial sums."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from benchmarks.exactness import main as exactness
from benchmarks.invariance import main as invariance
from smc.api.engine_config import EngineConfig
from smc.attention.fixed_order import UNIT, FixedTiling
from smc.kernels.fixed_order import gate_up_fixed, linear_fixed
from smc.kernels.int4 import gate_up_int4, linear_int4_fixed
from smc.kernels.linear import reduce
from smc.kernels.norm import Residual, add_norm, add_norm_rounded, round_rows
from smc.local_engine import ModelPair, local_engine
from smc.model.linear import Linear, QuantisedRows, pack, quantise, quantise_int4
from smc.model.quantisation import Int4Format
from tests.attention.packed import Case
from tests.attention.test_fixed_order import assert_near_ties_stay
from tests.executor.test_company import (
    CHANGES,
    CUT,
    EXACT,
    LAW,
    LAWS,
    OF_ALL,
    Ways,
    assert_as_alone,
    assert_the_target_s,
)
from tests.executor.test_company import SHAPES as WAY_SHAPES
from tests.kernels.test_norm import norm_near_ties, taken_in
from tests.model.tiny import OF_FAMILY, random_decoder, tiny_config
from tests.scheduler.harness import answers, request
from tests.scheduler.pairs import letter_tokenizer, peaked

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
QUICK = ("olmo2", "gemma3_text", "phi3")
QUICK_WAYS = (Ways.in_company, Ways.without_draft)
SHAPE = {
    "hidden_size": 256, "head_dim": 64, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 512,
    "max_context": 1024,
}  # fmt: skip


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


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4", "int4 in groups of 128"])
@pytest.mark.parametrize(("outputs", "inputs", "biased"), SHAPES)
def test_products_of_1_to_512_rows(kind, outputs, inputs, biased):
    """One token among others, first, last and in between, has the bits that it has alone."""
    x_TI, weight_OI, bias_O = near_ties(max(COUNTS), outputs, inputs)
    x, bias = (round_rows(x_TI) if kind == "fp8" else x_TI), bias_O if biased else None
    if kind.startswith("int4"):
        group = 128 if "128" in kind else 32
        matrix = Linear(inputs, outputs, bias=biased).cuda().to(BF16)
        matrix.to_int4(Int4Format(group, zeros=False, scale_dtype="BF16"))
        codes = quantise_int4(weight_OI, group)
        matrix.weight.copy_(pack(codes.code_OI, inputs // group))
        matrix.scale.copy_(codes.scale_OP.t())
        if biased:
            matrix.bias.data = bias_O

    weight, scale = quantise(weight_OI) if kind == "fp8" else (weight_OI, None)

    def made_of(rows: Tensor | QuantisedRows) -> tuple[Tensor, ...]:
        if kind.startswith("int4"):
            return total(linear_int4_fixed(rows, matrix)), gate_up_int4(rows, matrix, fixed=True)
        return (
            total(linear_fixed(rows, weight, None, bias, BF16, scale_O=scale)),
            gate_up_fixed(rows, weight, scale=scale, dtype=BF16),
        )

    alone = made_of(first_rows(x, torch.zeros(1, dtype=torch.int64, device="cuda")))
    for count in COUNTS:
        for place in {0, count // 2, count - 1}:
            at = torch.randint(1, max(COUNTS), (count,), device="cuda")
            at[place] = 0
            for made, expected in zip(made_of(first_rows(x, at)), alone):
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
    sizes = ["--rows", "1,17,64,65,200,512", "--prompts", "1,65,512", "--sequences", "1,8,200,512", "--context", "1200"]
    found = invariance([shape, "--dtype", dtype, "--parts", "operations,passes", *sizes])
    assert not [finding for finding in found if finding.differ], "nothing beside the row changes its bits"


@pytest.mark.parametrize(
    "family", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in OF_FAMILY]
)
def test_logits_of_every_family(family):
    model = random_decoder(tiny_config(family, **SHAPE, vocab_size=4096))
    sizes = ["--rows", "1,17,65,512", "--prompts", "1,65,300", "--context", "700"]
    found = invariance(["--device", "cuda", "--dtype", "bfloat16", "--parts", "operations,passes", *sizes], model)
    assert not [finding for finding in found if finding.differ], "nothing beside the row changes its bits"


@pytest.mark.parametrize("kind", [BF16, torch.float32])
@pytest.mark.parametrize("features", [896, 4096, 5120, 8192])
def test_norms_after_products_of_few_and_of_many_tokens(features, kind):
    """A row's norm is the same whether the product before it left partial sums or their rounded sum, with and without
    a norm of the product, in the type of the weights and rounded to FP8, where sums are near ties."""
    x_TE, parts_PTE = norm_near_ties(512, features, torch.device("cuda"))
    weight_E = torch.rand(features, device="cuda").to(kind)
    sum_TE = reduce(parts_PTE, torch.empty_like(x_TE))
    for add, residual in product((add_norm, add_norm_rounded), (Residual(), Residual(weight_E))):
        few, many = (taken_in(add, x_TE, parts, weight_E, residual) for parts in (parts_PTE, sum_TE))
        assert all(torch.equal(one, other) for one, other in zip(few, many))


@pytest.mark.parametrize(("queries", "counts"), [(1, (2, 33, 65, 257, 512)), (5, (8, 102))])
def test_attention_of_near_ties(queries, counts, monkeypatch):
    """With the sizes of a model of 8B, in tiles as in service."""
    case = Case([1800], [[(1800, queries)] * max(counts)], queries, (32, 8), 128, BF16)
    order = {"unit": UNIT, "block_p": FixedTiling.choose(1, 1, queries, case.heads, case.dim, BF16).block_p}
    assert_near_ties_stay(case, counts, monkeypatch, order, {"unit": 2 * UNIT, "block_p": 32})


def on_gpu() -> ModelPair:
    target, draft = (
        peaked(random_decoder(tiny_config("qwen3", **SHAPE, vocab_size=8, num_layers=layers), layers), 0.4)
        for layers in (2, 1)
    )
    return ModelPair(target.to("cuda", BF16), draft.to("cuda", BF16), letter_tokenizer(8), 64)


@pytest.mark.parametrize("way", EXACT, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("config", "particles"), WAY_SHAPES)
@pytest.mark.parametrize("more", [{}, CUT], ids=["whole", "cut"])
def test_exact_answers_in_every_way(way, config, particles, more):
    config = replace(config, numerics="invariant")
    assert_the_target_s(way, on_gpu(), config, **LAW, **more, particles=particles)


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.__name__, marks=[] if way in QUICK_WAYS else pytest.mark.slow) for way in EXACT],
)
@pytest.mark.parametrize(("config", "particles"), WAY_SHAPES[:2])
@pytest.mark.parametrize("name", CHANGES)
def test_exact_answers_with_changed_logits(way, config, particles, name):
    config, law = replace(config, numerics="invariant"), LAW | CHANGES[name]
    assert_the_target_s(way, on_gpu(), config, **law, particles=particles)


@pytest.mark.parametrize("way", OF_ALL[1:], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("config", "law"), LAWS.values(), ids=LAWS)
def test_smc_answers_in_every_way(way, config, law):
    assert_as_alone(way, on_gpu(), replace(config, numerics="invariant"), **law)


def test_float32_weights_name_fastest():
    made = on_gpu()
    made = replace(made, target=made.target.float(), draft=made.draft.float())
    one = request([1, 2, 3], "0", method="exact", particles=2, max_tokens=4)
    engine = local_engine(made, EngineConfig(form="lockstep", block=2, numerics="invariant"))
    assert answers(engine, [one])["0"].statistics.numerics == "fastest"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lockstep", "lookahead"])
def test_exact_answers_are_those_of_the_target_alone(form, capsys):
    """The shipped pair in bf16, at temperatures 0 and 0.7, alone and beside 31 others."""
    options = ["company", "--device", "cuda", "--dtype", "bfloat16", "--problems", "40", "--form", form]
    found = exactness([*options, "-n", "1", "4", "8"])
    assert set(found.values()) == {40}, capsys.readouterr().out


@pytest.mark.slow
def test_exact_answers_of_two_ranks():
    """As above, with each model divided between two GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    options = ["company", "--device", "cuda", "--dtype", "bfloat16", "--problems", "40", "--form", "lockstep"]
    found = exactness([*options, "--target-tp", "2", "-n", "1", "8"])
    assert set(found.values()) == {40}
