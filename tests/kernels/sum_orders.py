"""Compiles kernels for an H100, on a machine without one, and prints as JSON in which order they add: for each kernel
and each kind of its inputs, the register layouts of the sums whose order depends on which thread holds which number,
"permuted" if a product takes its inputs in another order than most do, "begun" if it does not begin with zero, and
"fused" if the compiler may fuse multiplications with additions.

The compiler chooses the layout of a block by the type that it is loaded as. So two variants of a kernel may add the
same numbers in different orders, which the interpreter cannot show. A sum of two numbers has one order. An instruction
for a product takes 16 inputs of two bytes at a time: adjacent ones, or, if they were widened from fewer bits for an
instruction of one warp, some of each 32.

    python -m tests.kernels.sum_orders

Local axes: P experts that a token has chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from triton.backends.nvidia.compiler import CUDABackend

from smc.distributions import DistributionSpec
from smc.executor.triton_ops import TritonOps
from smc.kernels.experts import MOST_TOKENS, chosen_experts, experts_fixed, sort_by_expert
from smc.kernels.fixed_order import gate_up_fixed, linear_fixed
from smc.kernels.int4 import gate_up_int4, linear_int4_fixed
from smc.kernels.norm import Residual, add_norm, add_norm_rounded, square_sums, whole_norm
from smc.kernels.sampling import log_mass
from smc.model.decoder import Choice, Experts
from smc.model.linear import Linear
from smc.model.quantisation import Int4Format
from smc.philox import DrawKeys, Purpose
from tests.kernels.compile_rounds import accept, compile_only
from tests.model.tiny import tiny_config

VOCAB, ROWS = 151_936, 3
FUSED = "\n// fused"
HIDDEN = (1024, 3584, 5120, 8192)
REDUCTION = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32[^}]*\}> '
    r'\(\{((?:(?!"tt\.reduce"\().)*?)\}\) : \(tensor<([\dx]+)xf32, (#\w+)>\) ->',
    re.DOTALL,
)
"""A reduction of float32 numbers: axis, operation, shape and layout."""


PERMUTED = re.compile(r"x(?:bf16|f16), #ttg\.dot_op<\{[^}]*kWidth = (?!2\D)\d+\}>")
"""An operand of a product of numbers of two bytes that are not taken two by two."""
PRODUCT = re.compile(r"= (?:ttng\.warp_group_dot|tt\.dot) %[\w#]+, %[\w#]+, (%[\w#]+)")
"""A product, and the numbers to which it is added."""


def is_begun(module: str) -> bool:
    """Return whether a product is added to other numbers than zeros or its own sums: the compiler makes one instruction
    of a product of a single step and an addition after it, which rounds otherwise."""
    begins = PRODUCT.findall(module)
    assert begins or not re.search(r"tt\.dot |warp_group_dot ", module), "the compiler writes products in another form"
    for begin in begins:
        made = re.search(rf"^ *{re.escape(begin)}(?::\d+)? = (.*)$", module, re.MULTILINE)
        if made and not re.match(r"arith\.constant dense<0\.0|ttng\.warp_group_dot|tt\.dot|scf\.for", made[1]):
            return True
    return False


def sums(module: str) -> Iterator[str]:
    """Yield shape, axis and layout of each sum of more than two float32 numbers of a compiled kernel, and what else
    decides on the order of sums."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", module, re.MULTILINE))
    for axis, operation, shape, layout in REDUCTION.findall(module):
        if "addf" in operation and int(shape.split("x")[int(axis)]) > 2:
            yield f"{shape} axis {axis} {layouts[layout]}"
    if PERMUTED.search(module):
        yield "permuted"
    if is_begun(module):
        yield "begun"
    if module.endswith(FUSED):
        yield "fused"


def record(modules: list[str]) -> None:
    """Make every later launch compile its kernel as far as layouts, and add the result to `modules`."""
    compile_only(set())
    add_all_stages = CUDABackend.add_stages

    def add_stages(self: CUDABackend, stages: dict, options: Any, *how: Any) -> None:
        add_all_stages(self, stages, options, *how)
        lay_out = stages["ttgir"]

        def recorded(*args: Any) -> Any:
            made = lay_out(*args)
            modules.append(str(made) + FUSED * options.enable_fp_fusion)
            return made

        stages |= {"ttgir": recorded, "llir": accept}

    CUDABackend.add_stages = add_stages


def draws(dtype: torch.dtype) -> None:
    """Launch everything that an answer's tokens pass through after the target's logits, which have this type: float32
    if any request of the round has penalties, guidance or a constraint."""
    one_R, long_R = np.ones(ROWS), torch.zeros(ROWS, dtype=torch.int64)
    spec = DistributionSpec.of(
        temperature_R=one_R * 0.7, top_k_R=one_R * 5, top_p_R=one_R * 0.9, min_p_R=one_R * 0.1, alpha_R=one_R * 2
    )
    sampling, logits_RV = TritonOps().sampling(VOCAB), torch.zeros(ROWS, VOCAB, dtype=dtype)
    keys = DrawKeys(long_R, long_R, long_R[:, None], long_R, Purpose.TARGET)
    given = spec.to(torch.device("cpu"))
    sampling.own_draws(logits_RV, given, keys)
    sampling.propose_bonus(logits_RV, given, keys)
    sampling.score(logits_RV, given, long_R)
    sampling.write_distribution(logits_RV, given, torch.zeros(ROWS, VOCAB))


def norms(parts: Any, dtype: torch.dtype) -> None:
    """Launch norms after products whose result has this form: partial sums of few tokens, or the sum of many."""
    for hidden, out_normed in product(HIDDEN, (False, True)):
        x_TE, weight_E = torch.zeros(ROWS, hidden, dtype=torch.bfloat16), torch.zeros(hidden, dtype=torch.bfloat16)
        added = torch.zeros(*parts, ROWS, hidden, dtype=dtype)
        residual = Residual(weight_E if out_normed else None)
        for take_in in (add_norm, add_norm_rounded):
            take_in(x_TE, added, weight_E, 1e-5, residual=residual)
        square_sums(added, (hidden // 2, hidden // 4), torch.bfloat16)


def products(tokens: int) -> None:
    """Launch the products of one order for so many tokens."""
    x_TI, weight_OI = torch.zeros(tokens, 256, dtype=torch.bfloat16), torch.zeros(256, 256, dtype=torch.bfloat16)
    linear_fixed(x_TI, weight_OI)
    gate_up_fixed(x_TI, weight_OI)
    # Of several parts of one step each, one of which adds a bias.
    bias_O = torch.zeros(8192, dtype=torch.bfloat16)
    linear_fixed(x_TI, torch.zeros(1024, 256, dtype=torch.bfloat16), bias_O=bias_O[:1024])
    linear_fixed(x_TI[:, :128].contiguous(), torch.zeros(8192, 128, dtype=torch.bfloat16), 2, bias_O)
    for group, zeros in product((32, 64, 128), (False, True)):
        held, matrix = Int4Format(group, zeros, "BF16"), Linear(256, 256)
        matrix.to_int4(held)
        linear_int4_fixed(x_TI, matrix)
        gate_up_int4(x_TI, matrix, fixed=True)
        module = Experts(tiny_config("mixtral", hidden_size=256, intermediate_size=256)).bfloat16()
        module.gate_up.to_int4(held)
        module.down.to_int4(held)
        none_TP = torch.zeros(tokens, module.chosen, dtype=torch.int32)
        blocks = None if tokens <= MOST_TOKENS else sort_by_expert(none_TP, module.count)
        chosen_experts(module, x_TI, Choice(none_TP, none_TP.float()), blocks, fixed=True)


def others() -> None:
    """Launch further kernels on the way from hidden states to an answer, which have one variant for a model."""
    log_mass(torch.zeros(ROWS, VOCAB))
    whole = torch.zeros(ROWS, 2048, dtype=torch.bfloat16)
    weights, squares_T4 = (whole[0, :1024].clone(), whole[0, :512].clone()), torch.zeros(ROWS, 4)
    whole_norm(whole, (1024, 512), weights, squares_T4, (1024, 512), 1e-5, torch.empty_like(whole))
    module = Experts(tiny_config("qwen3_moe", hidden_size=64, intermediate_size=64)).bfloat16()
    experts_fixed(module, torch.zeros(ROWS, 64, dtype=torch.bfloat16))


def main() -> dict[str, dict[str, list[str]]]:
    """Return, by kernel and by type of its inputs, its sums."""
    modules: list[str] = []
    record(modules)
    found: dict[str, dict[str, set[str]]] = {}
    for kind, launch in {
        "bfloat16": lambda: draws(torch.bfloat16),
        "float32": lambda: draws(torch.float32),
        "sum": lambda: norms((), torch.bfloat16),
        "parts": lambda: norms((4,), torch.float32),
        "others": others,
        **{f"{tokens} tokens": partial(products, tokens) for tokens in (1, 17, 300, 600)},
    }.items():
        modules.clear()
        launch()
        for module in modules:
            name = re.search(r"tt\.func public @(\w+)", module)
            assert name is not None, "a module holds one kernel"
            found.setdefault(name[1], {}).setdefault(kind, set()).update(sums(module))
    return {name: {kind: sorted(orders) for kind, orders in of.items()} for name, of in found.items()}


if __name__ == "__main__":
    print(json.dumps(main()))
