"""A prompt's pass through a model on a GPU: matrix products and attention by libraries, and one launch for what is
between two of them.

Of the last layer only what is asked about is computed once its keys and values are stored. See the package's legend for
axes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.attention.base import ForwardBatch
from smc.executor.worker import Reader
from smc.kernels.norm import add_norm, silu_mul
from smc.kernels.rounding import round_rows
from smc.kernels.store import store_kv
from smc.model.decoder import Layer
from smc.model.linear import Linear


@torch.inference_mode()
def run_prompt(reader: Reader, tokens_T: Tensor, batch: ForwardBatch, asked_X: Tensor) -> Tensor:
    """See `smc.executor.worker.PromptPass`."""
    model, config, planned = reader.model, reader.model.config, reader.attention.plan(reader.pool, batch)
    position_T, page_T = (
        to_device(array_T.astype(np.int32), reader.device) for array_T in (batch.positions_T, batch.pages_T)
    )
    x_TE, parts_TE = model.embed(tokens_T), None
    q_THD = x_TE.new_empty(len(tokens_T), config.num_heads, config.head_dim)
    for layer in model.layers:
        hidden_TE = add_norm(x_TE, parts_TE, layer.attn_norm.weight, config.rms_eps)
        store = (
            q_THD,
            reader.pool.keys[layer.index],
            reader.pool.values[layer.index],
            reader.rope.table,
            position_T,
            page_T,
        )
        store_kv(
            _product(layer.qkv, hidden_TE),
            *store,
            (config.num_heads, config.num_kv_heads),
            *layer.head_norms,
            eps=config.rms_eps,
        )
        if layer is model.layers[-1]:
            if not len(asked_X):
                return x_TE[asked_X]
            x_TE, out_THD = x_TE[asked_X], planned.read(layer.index, q_THD)[asked_X]
        else:
            out_THD = planned.read(layer.index, q_THD)
        hidden_TE = add_norm(x_TE, _sum(layer, layer.o, out_THD.flatten(1)), layer.mlp_norm.weight, config.rms_eps)
        parts_TE = _sum(layer, layer.down, silu_mul(_product(layer.gate_up, hidden_TE)))
    return add_norm(x_TE, parts_TE, model.norm.weight, config.rms_eps)


def _product(matrix: Linear, x_TK: Tensor) -> Tensor:
    """What `matrix` returns, with activations rounded in one launch if it is FP8."""
    return matrix(x_TK) if matrix.scale is None else matrix.of_rounded(round_rows(x_TK)).to(x_TK.dtype)


def _sum(layer: Layer, matrix: Linear, x_TK: Tensor) -> Tensor:
    """Of all ranks' shares."""
    part_TE = _product(matrix, x_TK)
    return part_TE if layer.reduce is None else layer.reduce(part_TE)
