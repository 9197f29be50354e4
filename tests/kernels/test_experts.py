"""Experts' kernels do what the reference does, for any number of tokens, experts and features."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from smc.kernels.experts import choose, experts
from smc.model.experts import Experts
from tests.attention.packed import DEVICE
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
    """More tokens than a program takes; experts that nobody chose; all experts chosen."""
    made = module(normalised, num_experts=count, experts_per_token=chosen, intermediate_size=inner)
    x_TE = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    torch.testing.assert_close(experts(made, x_TE).sum(0), made(x_TE), atol=1e-4, rtol=1e-4)


def test_choice_of_extreme_logits():
    """Of equal ones the first, and one that outweighs all others by far."""
    logits_TX = torch.tensor([[0.0, 0.0, 0.0], [-1e5, 1e5, 0.0], [-1e30, -1e30, -1e30]], device=DEVICE)
    found = choose(logits_TX, 2, True)
    assert found.expert_TC.tolist() == [[0, 1], [1, 0], [0, 1]]
    torch.testing.assert_close(found.weight_TC.cpu(), torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]))


def test_prompts_of_a_gpu_take_one_product_of_all_experts():
    """Experts that nobody chose among them. The library's product takes bfloat16."""
    made = module(num_experts=6, experts_per_token=2, intermediate_size=16).bfloat16()
    x_TE = torch.randn(40, 32, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    choice = made.choose(x_TE)
    choice = choice._replace(expert_TC=torch.where(choice.expert_TC == 3, 4, choice.expert_TC))
    expected_TE = made.expert_by_expert(x_TE, choice)
    torch.testing.assert_close(made.grouped(x_TE, choice), expected_TE, atol=0.05, rtol=0.05)
