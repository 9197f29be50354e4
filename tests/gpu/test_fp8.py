"""FP8 on a GPU: our kernels and the library's products against float64, peak memory while models are loaded, and
answers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.demo.problems import generate
from smc.kernels.linear import gate_up_silu, linear, reduce
from smc.kernels.norm import round_rows
from smc.local_engine import ModelPair, local_engine
from smc.model import linear as models
from smc.model.linear import FP8, Linear, quantise
from smc.model.loader import load_model, random_model
from smc.model.padded import padded_model
from smc.model.presets import preset
from tests.kernels.test_linear import usual
from tests.model.dense import dense_logits
from tests.scheduler.harness import answers

SHAPES = [(2048, 3072), (8192, 2048), (4096, 6144), (14336, 4096), (2048, 128256), (256, 512), (640, 256)]
"""(inputs, outputs)"""


def matrix(inputs: int, outputs: int, bias: bool = False) -> Linear:
    """A matrix whose rows have very different sizes."""
    generator = torch.Generator("cuda").manual_seed(inputs + outputs)
    made = Linear(inputs, outputs, bias).to("cuda", torch.bfloat16).requires_grad_(False)
    weight_OI = torch.randn(outputs, inputs, generator=generator, device="cuda") * inputs**-0.5
    made.to_fp8()
    made.quantise_from(
        weight_OI * torch.logspace(-2, 2, outputs, device="cuda")[torch.randperm(outputs, device="cuda")][:, None]
    )
    return made


def errors(found: torch.Tensor, expected: torch.Tensor, made: Linear) -> torch.Tensor:
    """Return the error [O] of every output over all tokens, relative to the output's norm or, where that happens to be
    small, to the norm that activations of size 1 give."""
    usual_O = (made.weight.double() * made.scale[:, None].double()).norm(dim=1) * len(found) ** 0.5
    return (found.double() - expected).norm(dim=0) / torch.maximum(expected.norm(dim=0), usual_O)


def off(found: torch.Tensor, expected: torch.Tensor, made: Linear) -> float:
    """Return the largest error of an output."""
    return float(errors(found, expected, made).max())


@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 65, 128, 200, 512])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_our_products(tokens, inputs, outputs):
    made, x = matrix(inputs, outputs), round_rows(torch.randn(tokens, inputs, device="cuda").bfloat16())
    expected_TO = (x.value_TI.double() * x.scale_T1.double()) @ (made.weight.double() * made.scale[:, None].double()).T
    for splits in (None, 1):
        out = linear(x, made.weight, splits, scale_O=made.scale)
        if out.dim() == 3:
            out = reduce(out, torch.empty_like(out[0], dtype=torch.bfloat16))
        # Tensor cores keep about 14 bits of a sum of FP8 products.
        assert off(out, expected_TO, made) < 2e-2
    act_TI = gate_up_silu(x, made.weight, scale=made.scale)
    gate, up = expected_TO.chunk(2, 1)
    gate_off, up_off = (2e-2 * torch.maximum(expected_TO.abs(), usual(x, made.weight, made.scale).double())).chunk(2, 1)
    bound_TI = 1.1 * gate_off * (up.abs() + up_off) + F.silu(gate).abs() * up_off + 1e-2 * (F.silu(gate) * up).abs()
    assert ((act_TI.double() - F.silu(gate) * up).abs() <= bound_TI).all()


@pytest.mark.parametrize("tokens", [1, 17, 160, 600])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES[:4])
def test_products_of_the_library(tokens, inputs, outputs):
    """Products with a bias equal those of rounded activations and are close to those of the activations themselves. A
    row has the same result alone."""
    made, x_TI = matrix(inputs, outputs, bias=True), torch.randn(tokens, inputs, device="cuda").bfloat16()
    x = round_rows(x_TI)
    weight_OI, bias_O = made.weight.double() * made.scale[:, None].double(), made.bias.double()
    found_TO = made.multiply_quantised(x)
    assert found_TO.dtype == torch.bfloat16
    assert off(found_TO, x.value_TI.double() * x.scale_T1.double() @ weight_OI.T + bias_O, made) < 6e-3
    assert errors(made(x_TI), x_TI.double() @ weight_OI.T + bias_O, made).mean() < 4e-2
    room_TO = torch.full_like(found_TO, torch.nan)
    assert made.multiply_quantised(x, room_TO) is room_TO and torch.equal(room_TO, found_TO)
    alone_TO = made.multiply_quantised(round_rows(x_TI[:1]))
    assert off(alone_TO, found_TO[:1].double(), made) < 6e-3


def test_a_product_that_the_library_cannot_do():
    made, x_TI = matrix(100, 40), torch.randn(5, 100, device="cuda").bfloat16()
    x = round_rows(x_TI)
    expected_TO = (x.value_TI.double() * x.scale_T1.double()) @ (made.weight.double() * made.scale[:, None].double()).T
    assert off(made.multiply_quantised(x), expected_TO, made) < 6e-3


@pytest.mark.parametrize("load", ["random", "grown", "files"])
def test_peak_memory_while_loading(load):
    """While a model is loaded, peak memory exceeds the model by a part of one matrix only, in the 1B shape for random
    and padded weights."""
    small = load_model(demo.DRAFT)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if load == "random":
        model = random_model(preset("llama-1b"), dtype=FP8, device="cuda")
    elif load == "grown":
        model = padded_model(small, preset("llama-1b"), dtype=FP8, device="cuda")
    else:
        model = load_model(demo.TARGET, dtype=FP8, device="cuda")
    held = torch.cuda.memory_allocated() - before
    most = torch.cuda.max_memory_allocated() - before
    print(f"{load}: {held / 2**30:.2f} GiB, at most {most / 2**30:.2f}")
    assert held < 1.01 * sum(weight.numel() * weight.element_size() for weight in model.parameters()) + (32 << 20)
    assert most - held < max(12 * models.PIECE, 2**30)


@torch.inference_mode()
def test_logits_are_those_of_the_cpu():
    ids_T = torch.randint(512, (200,), generator=torch.Generator().manual_seed(1))
    for directory in (demo.TARGET, demo.DRAFT):
        expected_TV = dense_logits(load_model(directory), ids_T)
        here, there = (load_model(directory, dtype=FP8, device=device) for device in ("cpu", "cuda"))
        found_TV = dense_logits(there, ids_T.cuda()).cpu()
        errors = [(one - expected_TV).abs() for one in (dense_logits(here, ids_T), found_TV)]
        print(f"{directory.name}: largest error {errors[0].max():.2f} on the CPU, {errors[1].max():.2f} here")
        assert errors[1].max() < 2.5


def test_fp8_solves_as_many_problems():
    """Both models in FP8. The target alone solves as many problems as before, and exact decoding gives the same answers
    except for near-ties."""
    problems, pair = generate(11, 64, "test"), ModelPair.load(demo.TARGET, demo.DRAFT, dtype=FP8, device="cuda")
    prompts = [pair.tokenizer.chat([{"role": "user", "content": p.question}]) for p in problems]
    found = {}
    for method in (Method.TARGET, Method.EXACT):
        asked = [
            Request(str(i), tuple(prompt), SamplingParams(method=method, seed=i, max_tokens=200))
            for i, prompt in enumerate(prompts)
        ]
        found[method] = answers(local_engine(pair, EngineConfig(block=5)), asked)
        right = sum(
            found[method][str(i)].text.rsplit("####", 1)[-1].strip() == str(p.result) for i, p in enumerate(problems)
        )
        print(f"{method}: {right} of {len(problems)} solved")
        assert right >= 58
    same = sum(found[Method.TARGET][str(i)].tokens == found[Method.EXACT][str(i)].tokens for i in range(len(problems)))
    print(f"{same} of {len(problems)} answers equal")
    assert same >= 48


def test_rounding_on_the_gpu_is_that_on_the_cpu():
    weight_OI = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    for one, other in zip(quantise(weight_OI), quantise(weight_OI.cuda())):
        assert torch.equal(one.float(), other.float().cpu())
