"""Forward passes through a decoder on a GPU: of few packed rows, and of prompts. The Triton form of
`smc.executor.forward`.

The time of matrix products of few rows is that of reading weights, so everything around them is fused.

Local axes: P chosen experts of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import RMSNorm

from smc.arrays import to_device
from smc.attention.backend import AttentionPass, ForwardBatch
from smc.attention.kernels import SharedPrefixAttention, check_heads
from smc.attention.step import step_attention
from smc.executor.forward import Reader, StaticForward
from smc.kernels.experts import experts, grouped
from smc.kernels.int4 import MOST_TOKENS as FEW_INT4_ROWS
from smc.kernels.int4 import gate_up_int4, linear_int4, multiply_widened
from smc.kernels.launch import supports_pdl
from smc.kernels.linear import gate_up_silu, linear, multiplies_fp8, reduce
from smc.kernels.norm import Residual, add_norm, add_norm_rounded, round_rows, silu_mul, square_sums, whole_norm
from smc.kernels.packed_rows import CacheTensors, HeadNorms, Prepared, store_kv
from smc.memory.kv_cache import KVPool
from smc.model.config import ModelConfig
from smc.model.decoder import Activations, Addend, AttendLayer, Experts, Layer, LayerOps, run_layers
from smc.model.linear import Linear, QuantisedRows
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables

FEW_ROWS, FEW_WIDE_ROWS = 64, 32
"""Up to these numbers of rows, our own products read weights at least as fast as the library's; the second is for wide
rows."""
FEW_FP8_ROWS, FP8_INPUTS = 512, 32
"""The same number for FP8 (timed for the 1B and 8B shapes); and the number of inputs that our FP8 products take at a
time, which must divide the number of input features."""
WIDE = 8192
"""Features from which rows are wide."""


class RowAttention(Protocol):
    """Attention of rows for one static shape, such as `SharedPrefixAttention`."""

    @property
    def workspace_bytes(self) -> int: ...

    def prepare(self, tables: RowTables, spans: RowSpans, groups: RowGroups) -> Prepared: ...

    def run(
        self,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: Prepared,
        out_THD: Tensor,
        window: int | None = None,
    ) -> Tensor: ...


class TritonForward(StaticForward, LayerOps):
    """A decoder of one reader. Matrix products of few rows are ours too, except for float32 weights, which tensor cores
    would round. With `pdl`, kernels may begin before the one before has ended, if the device supports it
    (`smc.kernels.launch`). Raises ValueError for heads that the kernels do not support."""

    attention_class: Callable[..., RowAttention] = SharedPrefixAttention
    step_attention: Callable[..., None] = staticmethod(step_attention)

    def __init__(self, reader: Reader, *, pdl: bool = True) -> None:
        super().__init__(reader.model, reader.pool, reader.rope)
        config, weight = reader.model.config, reader.model.embed.weight
        check_heads((config.num_heads, config.num_kv_heads), config.head_dim)
        self.longest, self._dtype = reader.width, weight.dtype
        self._own_fp8 = multiplies_fp8(weight.device)
        self._pdl = pdl and supports_pdl(weight.device)
        self._head_norms = [head_norms(layer, config.rms_eps) for layer in reader.model.layers]
        self._attentions: dict[tuple[int, int, int, int], RowAttention] = {}

    @property
    def workspace_bytes(self) -> int:
        """Memory of the workspaces of attention, for all shapes seen so far."""
        return sum(attention.workspace_bytes for attention in self._attentions.values())

    def __call__(self, tokens_T: Tensor, rows: Rows) -> Tensor:
        attend = self._in_one_launch(rows) if rows.contexts is Contexts.SHORT else self._stored_first(rows)
        return run_layers(self.model, self.model.embedded(tokens_T), self, attend)

    def logits(self, hidden_RE: Tensor, head: Linear | None = None) -> Tensor:
        logits_RV = self.product(hidden_RE, head or self.model.lm_head, splits=1)
        if not self.model.plain_logits:
            logits_RV = self.model.finish_logits(logits_RV.float())
        return self.model.hide_foreign(logits_RV) if head is None else logits_RV

    def _in_one_launch(self, rows: Rows) -> AttendLayer:
        out_THD = self._heads_of(rows)

        def attend(layer: Layer, qkv: Tensor, output_T: Tensor | None) -> Tensor:
            cache, norm = cache_of(layer, self.pool), self._head_norms[layer.index]
            given = (qkv, cache, self.rope.of(layer), rows.tables, rows.spans, out_THD, norm)
            window = self.pool.windows[layer.index]
            self.step_attention(*given, window=window, path_RB=rows.path_RB, pdl=self._pdl)
            return out_THD.flatten(1)

        return attend

    def _heads_of(self, rows: Rows) -> Tensor:
        """Allocate a row of query heads for each token [T, H, D]."""
        config, weight = self.model.config, self.model.embed.weight
        return weight.new_empty(len(rows.spans.start_R) * rows.queries, config.num_heads, config.head_dim)

    def _stored_first(self, rows: Rows) -> AttendLayer:
        config, attention = self.model.config, self._attention_for(rows)
        heads = (config.num_heads, config.num_kv_heads)
        q_THD, out_THD = self._heads_of(rows), self._heads_of(rows)
        prepared = attention.prepare(rows.tables, rows.spans, rows.groups)

        def attend(layer: Layer, qkv: Tensor, output_T: Tensor | None) -> Tensor:
            cache, norm = cache_of(layer, self.pool), self._head_norms[layer.index]
            where = (self.rope.of(layer), prepared.layout.position_T, prepared.layout.page_T)
            store_kv(qkv, q_THD, cache, *where, heads, norm, self._pdl)
            attention.run(q_THD, *cache, prepared, out_THD, self.pool.windows[layer.index])
            return out_THD.flatten(1)

        return attend

    def normed(
        self, x_TE: Tensor, addend: Addend | None, norm: RMSNorm | None, matrix: Linear | None
    ) -> tuple[Tensor, Activations]:
        take_in = add_norm_rounded if matrix is not None and matrix.is_fp8 else add_norm
        config, parts = self.model.config, None if addend is None else addend.values
        residual = residual_of(addend, config)
        return x_TE, take_in(x_TE, parts, weight_of(norm), config.rms_eps, self._pdl, residual)

    def normalise_whole(self, layer: Layer, qkv: Tensor) -> Tensor:
        return normalise_whole(layer, qkv, self._dtype)

    def experts(self, layer: Layer, module: Experts, x: Activations) -> Tensor:
        """As `LayerOps.experts`: partial sums [P, T, E], one for each chosen expert, if there is one rank."""
        assert isinstance(x, Tensor)
        parts_PTE = experts(module, x, pdl=self._pdl)
        if layer.reduce is None:
            return parts_PTE
        room_TE = layer.reduce.room(len(x), x.shape[1], x.dtype)
        return layer.reduce(reduce(parts_PTE, room_TE, self._pdl))

    def gated(self, layer: Layer, hidden: Activations) -> Tensor:
        matrix = layer.gate_up
        if self._few(hidden, matrix):
            if matrix.group:
                assert isinstance(hidden, Tensor)
                return gate_up_int4(hidden, matrix, layer.gelu, self._dtype, self._pdl)
            return gate_up_silu(
                hidden, matrix.weight, pdl=self._pdl, scale=matrix.scale, dtype=self._dtype, gelu=layer.gelu
            )
        return silu_mul(self._by_library(hidden, matrix), gelu=layer.gelu)

    def product(self, x: Activations, matrix: Linear, splits: int | None = None) -> Tensor:
        """As `LayerOps.product`. The input of an FP8 matrix is rounded here, if it is not
        yet."""
        if matrix.is_fp8 and not isinstance(x, QuantisedRows):
            x = round_rows(x, pdl=self._pdl)
        if self._few(x, matrix):
            if matrix.group:
                assert isinstance(x, Tensor)
                return linear_int4(x, matrix, splits, self._dtype, self._pdl)
            return linear(x, matrix.weight, splits, matrix.bias, self._dtype, pdl=self._pdl, scale_O=matrix.scale)
        return self._by_library(x, matrix)

    def _by_library(self, x: Activations, matrix: Linear, out_TO: Tensor | None = None) -> Tensor:
        if isinstance(x, QuantisedRows):
            return matrix.multiply_quantised(x, out_TO).to(self._dtype)
        if matrix.group:
            return multiply_widened(x, matrix, out_TO)
        return matrix(x) if out_TO is None else torch.mm(x, matrix.weight.t(), out=out_TO)

    def summed(self, layer: Layer, x_TI: Tensor, matrix: Linear) -> Tensor:
        if layer.reduce is None:
            return self.product(x_TI, matrix)
        room_TO = layer.reduce.room(len(x_TI), matrix.out_features, x_TI.dtype)
        if matrix.scale is None:
            self._by_library(x_TI, matrix, room_TO)
            return layer.reduce(room_TO)
        x = round_rows(x_TI, pdl=self._pdl) if matrix.is_fp8 else x_TI
        if self._few(x, matrix):
            reduce(self.product(x, matrix).view(-1, *room_TO.shape), room_TO, self._pdl)
        else:
            self._by_library(x, matrix, room_TO)
        return layer.reduce(room_TO)

    def _few(self, x: Activations, matrix: Linear) -> bool:
        if isinstance(x, QuantisedRows):
            return self._own_fp8 and len(x.value_TI) <= FEW_FP8_ROWS and matrix.in_features % FP8_INPUTS == 0
        if matrix.group:
            return len(x) <= FEW_INT4_ROWS
        few = FEW_WIDE_ROWS if self.model.config.hidden_size >= WIDE else FEW_ROWS
        return len(x) <= few and x.dtype != torch.float32

    def _attention_for(self, rows: Rows) -> RowAttention:
        config, groups, count = self.model.config, len(rows.groups.first_G), len(rows.spans.start_R)
        # Every batch index has equally many rows, and the number of groups is padded to that of batch indices, so this
        # is the number of rows of a batch index. Some groups may have more than one batch index.
        together = count // groups if rows.contexts is Contexts.SINGLE else count
        shape = (groups, count, together, rows.queries)
        if shape not in self._attentions:
            weight, heads = self.model.embed.weight, (config.num_heads, config.num_kv_heads)
            self._attentions[shape] = self.attention_class(
                *shape, heads, config.head_dim, weight.dtype, weight.device, self.longest, self._pdl
            )
        return self._attentions[shape]


@torch.inference_mode()
def run_prompt(reader: Reader, tokens_T: np.ndarray, batch: ForwardBatch, output_T: np.ndarray) -> Tensor:
    """See `smc.executor.forward.run_prompt`. Libraries compute matrix products and attention, with one launch between
    two of them."""
    planned = reader.attention.plan(reader.pool, batch)
    return run_prompt_by(PromptOps(reader.model.config), planned, reader, tokens_T, batch, output_T)


def run_prompt_by(
    ops: LayerOps,
    planned: AttentionPass,
    reader: Reader,
    tokens_T: np.ndarray,
    batch: ForwardBatch,
    output_T: np.ndarray,
) -> Tensor:
    """Run rows of prompts by these operations and this attention. In the last layer only the `output` tokens are
    computed once its keys and values are stored."""
    model, config = reader.model, reader.model.config
    position_T, page_T = (
        to_device(array_T.astype(np.int32), reader.device) for array_T in (batch.positions_T, batch.pages_T)
    )
    x_TE = model.embedded(to_device(tokens_T, reader.device))
    q_THD = x_TE.new_empty(len(tokens_T), config.num_heads, config.head_dim)

    def attend(layer: Layer, qkv: Tensor, kept_T: Tensor | None) -> Tensor:
        where = (reader.rope.of(layer), position_T, page_T)
        heads = (config.num_heads, config.num_kv_heads)
        store_kv(qkv, q_THD, cache_of(layer, reader.pool), *where, heads, head_norms(layer, config.rms_eps))
        if kept_T is not None and not len(kept_T):
            return q_THD[:0].flatten(1)
        out_THD = planned.read(layer.index, q_THD)
        return (out_THD if kept_T is None else out_THD[kept_T]).flatten(1)

    return run_layers(model, x_TE, ops, attend, to_device(output_T, reader.device))


class PromptOps(LayerOps):
    """Operations on the tokens of prompts: products by libraries, with one launch between two of them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def normed(
        self, x_TE: Tensor, addend: Addend | None, norm: RMSNorm | None, matrix: Linear | None
    ) -> tuple[Tensor, Tensor]:
        parts_TE, residual = None if addend is None else addend.values, residual_of(addend, self.config)
        return x_TE, add_norm(x_TE, parts_TE, weight_of(norm), self.config.rms_eps, residual=residual)

    def product(self, x: Activations, matrix: Linear) -> Tensor:
        """As `LayerOps.product`. For FP8 one launch rounds the activations; for int4 one launch widens the weights."""
        assert isinstance(x, Tensor)
        if matrix.group:
            return multiply_widened(x, matrix)
        return matrix(x) if matrix.scale is None else matrix.multiply_quantised(round_rows(x)).to(x.dtype)

    def normalise_whole(self, layer: Layer, qkv: Tensor) -> Tensor:
        return normalise_whole(layer, qkv, qkv.dtype)

    def gated(self, layer: Layer, x: Activations) -> Tensor:
        return silu_mul(self.product(x, layer.gate_up), gelu=layer.gelu)

    def experts(self, layer: Layer, module: Experts, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        return layer.sum(grouped(x, module) if module.has_grouped_product(x) else module(x))


def weight_of(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def residual_of(addend: Addend | None, config: ModelConfig) -> Residual:
    """Return how an addend is added to the residual stream."""
    if addend is None:
        return Residual(norm_offset=config.traits.norm_offset)
    return Residual(weight_of(addend.norm), addend.layer.residual_multiplier, addend.layer.norm_offset)


def cache_of(layer: Layer, pool: KVPool) -> CacheTensors:
    """Return a layer's keys and values."""
    return CacheTensors(pool.keys[layer.index], pool.values[layer.index])


def head_norms(layer: Layer, eps: float) -> HeadNorms | None:
    """Return the norms of single heads, as attention's kernels take them; None for a model without them."""
    query, key = layer.head_norms
    if query is None or key is None:
        return None
    if layer.norm_offset:
        query, key = (weight.float() + layer.norm_offset for weight in (query, key))
    return HeadNorms(query, key, eps)


def normalise_whole(layer: Layer, qkv: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply `Layer.normalise_whole` to a product [T, O] or to its partial sums."""
    assert layer.q_norm is not None and layer.k_norm is not None and layer.whole_widths is not None
    widths, tokens = (len(layer.q_norm.weight), len(layer.k_norm.weight)), qkv.shape[-2]
    if layer.reduce is None:
        squares_T4 = square_sums(qkv, widths, dtype)
    else:
        squares_T4 = layer.reduce(square_sums(qkv, widths, dtype, layer.reduce.room(tokens, 4, torch.float32)))
    out_TO = qkv.new_empty(qkv.shape[-2:], dtype=dtype)
    weights = (layer.q_norm.weight, layer.k_norm.weight)
    whole_norm(qkv, widths, weights, squares_T4, layer.whole_widths, layer.q_norm.eps or 0.0, out_TO)
    return out_TO
