"""Forward passes on a GPU in which nothing that stands beside a token changes its bits: `numerics: invariant`.

Every product, and attention, adds up in one order (`smc.kernels.fixed_order`, `smc.attention.fixed_order`), in rounds
of any number of rows and in prompts. All other operations work on one token at a time.

Local axes: P chosen experts of a token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from smc.attention.backend import ForwardBatch
from smc.attention.fixed_order import FixedOrderAttention, FixedOrderPrompts, Workspace
from smc.attention.fixed_step import step_attention_fixed
from smc.executor.forward import Reader
from smc.executor.triton_forward import FP8_INPUTS, TritonForward, run_prompt_by
from smc.kernels.experts import experts_fixed
from smc.kernels.fixed_order import FEW_TOKENS, gate_up_fixed, linear_fixed
from smc.kernels.int4 import gate_up_int4, linear_int4_fixed
from smc.kernels.library import LibraryProducts
from smc.kernels.linear import multiplies_fp8, reduce
from smc.kernels.norm import round_rows, silu_mul
from smc.model.decoder import Activations, Decoder, Experts, Layer
from smc.model.linear import Linear, QuantisedRows
from smc.once import warn_once
from smc.types import Numerics

BLOCK = 16
"""Number of inputs that an instruction takes at a time."""
logger = logging.getLogger(__name__)


def is_invariant(reader: Reader) -> bool:
    """Return whether this model runs in one order of sums. Logs why it does not, if it should."""
    if reader.wanted_numerics is not Numerics.INVARIANT:
        return False
    if (why := obstacle(reader.model)) is not None:
        warn_once(logger, "numerics=invariant does not apply, so near ties may fall differently: %s", why)
    return why is None


def obstacle(model: Decoder) -> str | None:
    """Return why the kernels cannot run this model in one order of sums; None: they can."""
    weight = model.embed.weight
    if weight.dtype == torch.float32:
        return "float32 weights, which tensor cores would round"
    for name, matrix in model.named_modules():
        if not isinstance(matrix, Linear):
            continue
        if matrix.is_fp8 and not multiplies_fp8(weight.device):
            return f"FP8 weights on {torch.cuda.get_device_name(weight.device)}"
        if not matrix.group and matrix.in_features % (FP8_INPUTS if matrix.is_fp8 else BLOCK):
            return f"{name} has {matrix.in_features} inputs, not a multiple of {FP8_INPUTS if matrix.is_fp8 else BLOCK}"
    return None


class InvariantForward(TritonForward):
    """`TritonForward` in one order of sums, for any number of rows, and the operations of a layer on prompts."""

    _library = LibraryProducts()
    step_attention: Callable[..., None] = staticmethod(step_attention_fixed)
    _prompts = FixedOrderPrompts()

    def __init__(self, reader: Reader, *, pdl: bool = True, of_prompts: bool = False) -> None:
        """`of_prompts`: numbers of tokens are hardly ever the same twice."""
        super().__init__(reader, pdl=pdl and not of_prompts)
        self._of_prompts = of_prompts
        self._spaces: dict[int, Workspace] = {}
        self.attention_class = partial(FixedOrderAttention, spaces=self._spaces)

    @property
    def workspace_bytes(self) -> int:
        return sum(space.nbytes for space in self._spaces.values())

    def gated(self, layer: Layer, hidden: Activations) -> Tensor:
        matrix = layer.gate_up
        if matrix.group:
            assert isinstance(hidden, Tensor)
            return gate_up_int4(hidden, matrix, layer.gelu, self._dtype, self._pdl, fixed=True)
        if isinstance(hidden, Tensor) and len(hidden) > FEW_TOKENS:
            return silu_mul(self.product(hidden, matrix, splits=1), layer.gelu)
        return gate_up_fixed(hidden, matrix.weight, self._pdl, matrix.scale, self._dtype, layer.gelu)

    def product(self, x: Activations, matrix: Linear, splits: int | None = None) -> Tensor:
        if matrix.is_fp8 and not isinstance(x, QuantisedRows):
            x = round_rows(x, pdl=self._pdl)
        if matrix.group:
            assert isinstance(x, Tensor)
            return linear_int4_fixed(x, matrix, splits, self._dtype, self._pdl)
        if isinstance(x, Tensor) and len(x) > FEW_TOKENS:
            return self._library.multiply(x, matrix.weight, matrix.bias, splits, divided=self._of_prompts)
        return linear_fixed(x, matrix.weight, splits, matrix.bias, self._dtype, self._pdl, matrix.scale)

    def summed(self, layer: Layer, x_TI: Tensor, matrix: Linear) -> Tensor:
        made = self.product(x_TI, matrix)
        if layer.reduce is None:
            return made
        room_TO = layer.reduce.room(len(x_TI), matrix.out_features, x_TI.dtype)
        return layer.reduce(reduce(made.view(-1, *room_TO.shape), room_TO, self._pdl))

    def experts(self, layer: Layer, module: Experts, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        parts_PTE = experts_fixed(module, x, pdl=self._pdl)
        if layer.reduce is None:
            return parts_PTE
        room_TE = layer.reduce.room(len(x), x.shape[1], x.dtype)
        return layer.reduce(reduce(parts_PTE, room_TE, self._pdl))

    @torch.inference_mode()
    def run_prompt(self, reader: Reader, tokens_T: np.ndarray, batch: ForwardBatch, output_T: np.ndarray) -> Tensor:
        """See `smc.executor.forward.run_prompt`."""
        return run_prompt_by(self, self._prompts.plan(reader.pool, batch), reader, tokens_T, batch, output_T)
