"""The kernels of mixture-of-experts layers equal the reference for any number of tokens, experts and features.

Local axes: Z experts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from smc.kernels.experts import _all_widened, choose, experts
from smc.model.decoder import Experts
from smc.model.quantisation import Int4Format
from tests.attention.packed import DEVICE
from tests.kernels.test_linear import KIND
from tests.model.tiny import tiny_config


def module(normalised: bool = True, **sizes: int) -> Experts:
    generator = torch.Generator().manual_seed(1)
    made = Experts(tiny_config("mixtral", normalised_experts=normalised, **sizes)).requires_grad_(False)
    for weight in made.parameters():
        weight.normal_(0, 0.3, generator=generator)
    return made.to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "inner"), [(1, 1, 1, 16), (3, 5, 2, 24), (17, 8, 8, 40), (70, 4, 1, 33)]
)
@pytest.mark.parametrize("normalised", [False, True])
def test_experts(tokens, count, chosen, inner, normalised):
    """Includes more tokens than one program takes, experts that no token chooses, and tokens that choose all
    experts."""
    made = module(normalised, num_experts=count, experts_per_token=chosen, intermediate_size=inner)
    x_TE = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    torch.testing.assert_close(experts(made, x_TE).sum(0), made(x_TE), atol=1e-4, rtol=1e-4)


def in_int4(made: Experts, group: int, zeros: bool) -> Experts:
    """Convert to int4 with random codes and scales, and random zero points if `zeros`."""
    generator = torch.Generator().manual_seed(3)
    for matrix in (made.gate_up, made.down):
        matrix.to_int4(Int4Format(min(group, matrix.in_features), zeros, "F16"))
        matrix.weight.copy_(torch.randint(-(1 << 31), 1 << 31, matrix.weight.shape, generator=generator))
        matrix.scale.copy_((0.5 + torch.rand(matrix.scale.shape, generator=generator)) * 0.3 / matrix.in_features**0.5)
        if matrix.zero is not None:
            matrix.zero.copy_(torch.randint(16, matrix.zero.shape, generator=generator))
    return made


@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "inner", "group", "zeros"),
    [
        (1, 1, 1, 32, 32, False),
        (3, 5, 2, 96, 32, True),
        (17, 8, 8, 64, 64, False),
        (70, 4, 1, 128, 128, True),
        (5, 6, 2, 160, 32, False),
    ],
)
def test_experts_in_int4(tokens, count, chosen, inner, group, zeros):
    """Results equal the reference, and the weights widened for the grouped product of prompts are exact."""
    made = module(num_experts=count, experts_per_token=chosen, intermediate_size=inner, hidden_size=128)
    made = in_int4(made, group, zeros)
    x_TE = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected_TE = made(x_TE)
    assert expected_TE.std() > 0.05
    torch.testing.assert_close(experts(made, x_TE).sum(0), expected_TE, atol=1e-4, rtol=1e-4)
    for matrix in (made.gate_up, made.down):
        assert torch.equal(_all_widened(matrix, KIND), matrix.values(slice(None), KIND))


def test_only_chosen_experts_are_read():
    """The scales of all other experts are NaN, which must not reach the output."""
    made = in_int4(module(num_experts=4, experts_per_token=2, intermediate_size=64, hidden_size=64), 32, True)
    x_TE = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    made.router.weight[2:] = 0
    made.router.weight[:2] = 100 * x_TE.sign().mean(0)
    x_TE = x_TE.abs() * made.router.weight[0].sign()
    expected_TE = experts(made, x_TE).sum(0)
    assert made.choose(x_TE).expert_TP.unique().tolist() == [0, 1]
    for matrix in (made.gate_up, made.down):
        matrix.scale.view(len(matrix.scale), 4, -1)[:, 2:] = torch.nan
    assert torch.equal(experts(made, x_TE).sum(0), expected_TE)


def test_choice_of_extreme_logits():
    """Among equal logits the first experts are chosen; one logit may exceed all others by far."""
    logits_TZ = torch.tensor([[0.0, 0.0, 0.0], [-1e5, 1e5, 0.0], [-1e30, -1e30, -1e30]], device=DEVICE)
    found = choose(logits_TZ, 2, True)
    assert found.expert_TP.tolist() == [[0, 1], [1, 0], [0, 1]]
    torch.testing.assert_close(found.weight_TP.cpu(), torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]))


def test_prompts_of_a_gpu_take_one_product_of_all_experts():
    """The grouped product equals the product expert by expert, also if no token chooses some expert. The library's
    product takes bfloat16 only."""
    made = module(num_experts=6, experts_per_token=2, intermediate_size=16).bfloat16()
    x_TE = torch.randn(40, 32, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    choice = made.choose(x_TE)
    choice = choice._replace(expert_TP=torch.where(choice.expert_TP == 3, 4, choice.expert_TP))
    expected_TE = made.expert_by_expert(x_TE, choice)
    torch.testing.assert_close(made.grouped(x_TE, choice), expected_TE, atol=0.05, rtol=0.05)
