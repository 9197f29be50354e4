"""Decoder-only transformer over a flat list of tokens. Knows nothing about KV pages, requests or particles.

`run_layers` is the only place that says what a layer is. It leaves each operation to a `LayerOps`: torch's (here), that
of few rows and that of prompts on a GPU (`smc.executor.triton_forward`). Attention is a callable. It stores the new
keys and values and returns the attention output, so the same layers are used for serving (paged KV cache) and for
training (`hidden_states`: whole sequences with dense causal attention).

With tensor parallelism (`smc.model.parallel`), each rank runs a decoder with its shard of heads and inner features over
the same tokens. The all-reduce is passed in as well; all ranks compute the same hidden states.

Mixture of experts: each token runs through the few experts that its router chooses, and their outputs are added with
the router's weights. The product has two forms: expert by expert, which is the reference, and one grouped product of
tokens sorted by expert, for prompts on a GPU. Small numbers of rows on a GPU use separate kernels
(`smc.kernels.experts`). Weights in FP8 and int4 are widened, and activations stay as they are, so that all forms
compute the same.

Local axes: P chosen experts of a token, U foreign ids, Y pairs of a token and an expert, Z experts. T = R * L for whole
sequences."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smc.model.config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling, ModelConfig, YarnRopeScaling
from smc.model.families import SILU
from smc.model.linear import FP8, INT4, Linear, QuantisedRows, require_fp8
from smc.model.parallel import Reduce
from smc.model.quantisation import Int4Format

Widen = Callable[[Linear, torch.dtype], Tensor]
Activations = Tensor | QuantisedRows
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THD, k_TJD, v_TJD) -> out_THD. q and k are already rotated."""
NOTHING_SHARED: Mapping[str, nn.Parameter] = MappingProxyType({})
NORMS = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
HIDDEN_LOGIT = -1e30
"""Logit of foreign ids."""
MAIN, LOCAL, UNROTATED = "main", "local", "unrotated"
"""Kinds of rotation: with the model's frequencies, with those of layers that have a window, or none."""


class Choice(NamedTuple):
    """The chosen experts of every token."""

    expert_TP: Tensor
    """Indices of the experts, the most probable first."""
    weight_TP: Tensor
    """Weights of the experts' outputs, float32."""


def _values(matrix: Linear, dtype: torch.dtype) -> Tensor:
    return matrix.values(slice(0, matrix.out_features), dtype)


class Experts(nn.Module):
    """Router and experts of one layer. Each of the two matrices holds the rows of all experts one after another; in
    `gate_up`, an expert's gate comes before its up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.count, self.chosen = config.num_experts, config.experts_per_token
        self.inner, self.normalised = config.intermediate_size, config.normalised_experts
        self.router = nn.Linear(config.hidden_size, self.count, bias=False)
        self.gate_up = Linear(config.hidden_size, self.count * 2 * self.inner)
        self.down = Linear(self.inner, self.count * config.hidden_size)

    def choose(self, x_TE: Tensor) -> Choice:
        """Choose the most probable experts of each token."""
        share_TZ = torch.softmax(self.router(x_TE), dim=-1, dtype=torch.float32)
        weight_TP, expert_TP = share_TZ.topk(self.chosen, dim=-1)
        if self.normalised:
            weight_TP = weight_TP / weight_TP.sum(-1, keepdim=True)
        return Choice(expert_TP, weight_TP)

    def has_grouped_product(self, x_TE: Tensor) -> bool:
        """Whether torch supports the product of `grouped` for these activations."""
        return x_TE.is_cuda and x_TE.dtype == torch.bfloat16 and self.inner % 8 == 0

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return this rank's share of the weighted sum of the experts' outputs [T, E]."""
        choice = self.choose(x_TE)
        return (self.grouped if self.has_grouped_product(x_TE) else self.expert_by_expert)(x_TE, choice)

    def expert_by_expert(self, x_TE: Tensor, choice: Choice) -> Tensor:
        """The reference form of `forward`: one product for each expert in use."""
        expert_TP, weight_TP = choice
        parts_TPE = x_TE.new_zeros(*expert_TP.shape, x_TE.shape[1])
        for expert in expert_TP.unique().tolist():
            token_Y, column_Y = (expert_TP == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x_TE[token_Y], self._matrix(self.gate_up, expert, x_TE.dtype)).chunk(2, dim=-1)
            parts_TPE[token_Y, column_Y] = F.linear(F.silu(gate) * up, self._matrix(self.down, expert, x_TE.dtype))
        return (parts_TPE.float() * weight_TP[..., None]).sum(1).to(x_TE.dtype)

    def grouped(self, x_TE: Tensor, choice: Choice, widen: Widen = _values) -> Tensor:
        """The form of `forward` that multiplies the tokens of all experts in one grouped product, without waiting for
        the device. `widen` returns a whole matrix as numbers of a given dtype."""
        expert_TP, weight_TP = choice
        order_Y = expert_TP.flatten().argsort(stable=True)
        ends_Z = (expert_TP.flatten()[:, None] == torch.arange(self.count, device=x_TE.device)).sum(0).cumsum(0).int()
        gate, up = F.grouped_mm(
            x_TE[order_Y // self.chosen], self._all(self.gate_up, x_TE.dtype, widen).transpose(1, 2), offs=ends_Z
        ).chunk(2, dim=-1)
        out_YE = F.grouped_mm(F.silu(gate) * up, self._all(self.down, x_TE.dtype, widen).transpose(1, 2), offs=ends_Z)
        parts_YE = torch.empty_like(out_YE)
        parts_YE[order_Y] = out_YE
        return (parts_YE.view(*expert_TP.shape, -1).float() * weight_TP[..., None]).sum(1).to(x_TE.dtype)

    def _matrix(self, matrix: Linear, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers of one expert's matrix [outputs, inputs]."""
        rows = matrix.out_features // self.count
        return matrix.values(slice(expert * rows, (expert + 1) * rows), dtype)

    def _all(self, matrix: Linear, dtype: torch.dtype, widen: Widen) -> Tensor:
        """Return the numbers of all experts' matrices [X, outputs, inputs]."""
        return widen(matrix, dtype).unflatten(0, (self.count, -1))


class Decoder(nn.Module):
    """Decoder-only transformer with fused query/key/value and gate/up matrices.

    `config` is the shape of this rank's shard. `reduce` sums over ranks; None for a model on a single rank."""

    def __init__(self, config: ModelConfig, reduce: Reduce | None = None) -> None:
        super().__init__()
        self.config = config
        self.reduce = reduce
        # An explicit weight skips the random initialisation, which is slow to set up on the meta device.
        self.embed = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size)
        )
        # torch does not type the elements of a ModuleList.
        self.layers = cast("Sequence[Layer]", nn.ModuleList(Layer(config, i, reduce) for i in range(config.num_layers)))
        self.norm = make_norm(config, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tied_embeddings:
            self.lm_head.weight = self.embed.weight
        self.foreign_U: Tensor | None = None
        """For a draft, the ids of the target that are foreign to it (`smc.model.vocabularies`)."""

    def forward(self, tokens_T: Tensor, rope_T2D: Tensor, attend: Attend) -> Tensor:
        """Run all layers. `rope_T2D` is `RopeTable.at(positions)`. Returns the hidden states after the final norm [T,
        E]."""
        return run_layers(self, self.embedded(tokens_T), TorchLayerOps(), attend_rotated(rope_T2D, attend))

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Next-token logits [T, V] in float32 for the chosen hidden states."""
        return self.hide_foreign(self.finish_logits(self.lm_head(hidden_TE).float()))

    def hide_foreign(self, logits_TV: Tensor) -> Tensor:
        """Give the foreign ids of a draft a logit at which they are not drawn. It is finite, so that a constraint which
        allows nothing else leaves a distribution."""
        if self.foreign_U is None:
            return logits_TV
        return logits_TV.index_fill(1, self.foreign_U, max(HIDDEN_LOGIT, torch.finfo(logits_TV.dtype).min))

    def embedded(self, tokens_T: Tensor) -> Tensor:
        """Return the input of the first layer [T, E]: the embeddings, times the factor that some families have."""
        hidden_TE = self.embed(tokens_T)
        factor = self.config.embedding_multiplier
        # The factor is rounded to the embeddings' dtype first, as in the published code.
        return hidden_TE if factor == 1.0 else hidden_TE * torch.tensor(factor, dtype=hidden_TE.dtype)

    @property
    def plain_logits(self) -> bool:
        """Whether the head's products are the logits, without a divisor or a cap."""
        return self.config.logit_divisor == 1.0 and self.config.logit_cap is None

    def finish_logits(self, logits_TV: Tensor) -> Tensor:
        """Turn the head's products into logits: apply the divisor and the cap."""
        divisor, cap = self.config.logit_divisor, self.config.logit_cap
        if divisor != 1.0:
            logits_TV = logits_TV / divisor
        return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap

    @torch.no_grad()
    def pair_rotated(self) -> None:
        """Permute the features of query and key heads so that the two features of a rotated pair are half a head apart,
        as `rotate` expects. The features that are not rotated form pairs of their own. Products of queries and keys
        stay the same."""
        order_O = self.paired_order()
        for layer in self.layers:
            layer.qkv.permute_outputs(order_O.to(layer.qkv.weight.device))

    def paired_order(self) -> Tensor:
        """Return, for each feature [O] of queries, keys and values as `pair_rotated` orders them, its index in the
        files."""
        size, rotated = self.config.head_dim, self.config.rotated
        middle = rotated + (size - rotated) // 2
        halves = (range(rotated // 2), range(rotated, middle), range(rotated // 2, rotated), range(middle, size))
        order_D = torch.tensor([feature for part in halves for feature in part])
        paired, keys = self.config.num_heads + self.config.num_kv_heads, self.config.num_kv_heads
        heads_HD = torch.arange((paired + keys) * size).view(-1, size)
        heads_HD[:paired] = heads_HD[:paired, order_D]
        return heads_HD.flatten()

    def copy_head(self) -> None:
        """Quantise the embedding into the head, if the head is tied and in FP8. Call after the embedding is loaded."""
        if self.config.tied_embeddings and self.lm_head.is_fp8:
            self.lm_head.quantise_from(self.embed.weight)


def empty_decoder(
    config: ModelConfig,
    reduce: Reduce | None,
    dtype: torch.dtype,
    device: torch.device | str,
    int4: Mapping[str, Int4Format] | None = None,
    shared: Mapping[str, nn.Parameter] = NOTHING_SHARED,
) -> Decoder:
    """Create a frozen decoder in eval mode with uninitialised weights. `dtype` is one of `smc.model.linear.DTYPES`.
    `int4`: formats of the weights to hold in int4, by parameter name; only with dtype int4. `shared`: another model's
    parameters that are used instead of new ones, by name.

    In FP8 a tied head gets a matrix of its own, with half the embedding's bytes: a step reads all of the head but only
    a few rows of the embedding. Raises ValueError if the device does not support the dtype."""
    tied = config.tied_embeddings and dtype != FP8
    with torch.device("meta"):
        model = Decoder(config, reduce).to(torch.bfloat16 if dtype in (FP8, INT4) else dtype)
    if dtype == FP8:
        require_fp8(device)
        for module in model.modules():
            if isinstance(module, Linear):
                module.to_fp8()
    for name, held in (int4 or {}).items():
        cast("Linear", model.get_submodule(name.removesuffix(".weight"))).to_int4(held)
    if tied:
        model.lm_head.register_parameter("weight", None)  # otherwise `_apply` would create two matrices
    for name in shared:
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).register_parameter(own, None)
    # `to_empty` on `meta` tensors makes torch import its symbolic-shape library, which takes as long as importing
    # torch.
    model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=device))
    for name, weight in shared.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).register_parameter(own, weight)
    if tied:
        model.lm_head.weight = model.embed.weight
    return model.requires_grad_(False).eval()


class Layer(nn.Module):
    """Weights and traits of one transformer layer: attention, then a gated MLP or experts, each between the norms that
    the family has. `run_layers` runs it."""

    def __init__(self, config: ModelConfig, index: int, reduce: Reduce | None) -> None:
        super().__init__()
        self.index = index
        self.reduce = reduce
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.rope_kind, traits = rope_kinds(config).index(_rope_kind(config, index)), config.traits
        self.residual_multiplier, self.norm_offset = config.residual_multiplier, traits.norm_offset
        norms = {name: make_norm(config, config.hidden_size) if name in traits.norms else None for name in NORMS}
        self.attn_norm, self.attn_out_norm = norms["attn_norm"], norms["attn_out_norm"]
        self.qkv = Linear(config.hidden_size, q_size + 2 * kv_size, bias=traits.qkv_bias)
        widths = (q_size, kv_size) if traits.whole_qk_norm else (config.head_dim, config.head_dim)
        self.q_norm, self.k_norm = (make_norm(config, width) if traits.qk_norm else None for width in widths)
        self.whole_widths = None
        """Numbers of query and key features, over all ranks, that are normalised as one row; None: norms apply to
        single heads, or there are none."""
        if traits.whole_qk_norm:
            heads = config.whole_heads or (config.num_heads, config.num_kv_heads)
            self.whole_widths = (heads[0] * config.head_dim, heads[1] * config.head_dim)
        self.o = Linear(q_size, config.hidden_size)
        self.mlp_norm, self.mlp_out_norm = norms["mlp_norm"], norms["mlp_out_norm"]
        self.gelu = traits.activation != SILU
        if config.num_experts:
            self.experts: Experts | None = Experts(config)
            return
        self.experts = None
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)

    def split_heads(self, qkv_TO: Tensor) -> tuple[Tensor, ...]:
        """Return queries [T, H, D], keys and values [T, J, D] each."""
        return qkv_TO.unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)

    def normalise_whole(self, q_THD: Tensor, k_TJD: Tensor) -> tuple[Tensor, Tensor]:
        """RMS-normalise all query heads of a token together, over all ranks, and all key heads."""
        assert self.q_norm is not None and self.k_norm is not None and self.whole_widths is not None
        # Four columns, because sums over GPUs need multiples of 16 bytes.
        squares_T4 = q_THD.new_zeros(len(q_THD), 4, dtype=torch.float32)
        for column, x in enumerate((q_THD, k_TJD)):
            squares_T4[:, column] = x.float().square().sum((-2, -1))
        squares_T4 = self.sum(squares_T4)
        return tuple(
            (
                x.float()
                * torch.rsqrt(squares_T4[:, column, None, None] / width + (norm.eps or 0.0))
                * norm.weight.float().unflatten(0, (-1, self.head_dim))
            ).to(x.dtype)
            for column, (x, norm, width) in enumerate(
                zip((q_THD, k_TJD), (self.q_norm, self.k_norm), self.whole_widths)
            )
        )

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the query and key norms of single heads; (None, None) for a model without them."""
        if self.q_norm is None or self.k_norm is None or self.whole_widths is not None:
            return None, None
        return self.q_norm.weight, self.k_norm.weight

    def sum(self, part_TE: Tensor) -> Tensor:
        """Sum over all ranks."""
        return part_TE if self.reduce is None else self.reduce(part_TE)


class Addend(NamedTuple):
    """An output of attention, of an MLP or of experts, which is added to the residual stream."""

    values: Tensor
    """[T, E], or partial sums of it [parts, T, E]."""
    norm: nn.RMSNorm | None
    """Applied to the output before it is added."""
    layer: Layer


class LayerOps(ABC):
    """The operations of a layer except attention."""

    @abstractmethod
    def normed(
        self, x_TE: Tensor, addend: Addend | None, norm: nn.RMSNorm | None, matrix: Linear | None
    ) -> tuple[Tensor, Activations]:
        """Return the residual stream [T, E] with `addend`, and its norm: the input of `matrix`; None: of experts or of
        the head. May change `x`."""

    @abstractmethod
    def product(self, x: Activations, matrix: Linear) -> Tensor:
        """Return x W^T [T, O], or partial sums of it [parts, T, O]."""

    @abstractmethod
    def normalise_whole(self, layer: Layer, qkv: Tensor) -> Tensor:
        """Return queries, keys and values [T, O]: all query heads of a token are normalised together, and all key
        heads."""

    @abstractmethod
    def gated(self, layer: Layer, x: Activations) -> Tensor:
        """Return act(gate) * up [T, I] of this rank's inner features."""

    @abstractmethod
    def experts(self, layer: Layer, module: Experts, x: Activations) -> Tensor:
        """Return the output of experts, as `summed` does."""

    def summed(self, layer: Layer, x_TI: Tensor, matrix: Linear) -> Tensor:
        """Return `product`, summed over all ranks."""
        return layer.sum(self.product(x_TI, matrix))


AttendLayer = Callable[[Layer, Tensor, Tensor | None], Tensor]
"""(layer, its product of queries, keys and values, `output` of `run_layers` in the last layer) -> out [T, H * D]:
normalises single heads, rotates, stores keys and values, and attends."""


def run_layers(
    model: Decoder, x_TE: Tensor, ops: LayerOps, attend: AttendLayer, output_T: Tensor | None = None
) -> Tensor:
    """Run all layers on the embedded tokens. Returns the hidden states after the final norm, [T, E], or those of the
    tokens `output` [T, E]: in the last layer only these are computed once keys and values are stored."""
    addend = None
    for layer in model.layers:
        x_TE, hidden = ops.normed(x_TE, addend, layer.attn_norm, layer.qkv)
        qkv = ops.product(hidden, layer.qkv)
        if layer.whole_widths is not None:
            qkv = ops.normalise_whole(layer, qkv)
        kept_T = output_T if layer is model.layers[-1] else None
        out_TO = attend(layer, qkv, kept_T)
        if kept_T is not None:
            x_TE = x_TE[kept_T]
            if not len(kept_T):
                return x_TE
        addend = Addend(ops.summed(layer, out_TO, layer.o), layer.attn_out_norm, layer)
        if layer.experts is None:
            x_TE, hidden = ops.normed(x_TE, addend, layer.mlp_norm, layer.gate_up)
            values = ops.summed(layer, ops.gated(layer, hidden), layer.down)
        else:
            x_TE, hidden = ops.normed(x_TE, addend, layer.mlp_norm, None)
            values = ops.experts(layer, layer.experts, hidden)
        addend = Addend(values, layer.mlp_out_norm, layer)
    _, hidden = ops.normed(x_TE, addend, model.norm, None)
    assert isinstance(hidden, Tensor)
    return hidden


class TorchLayerOps(LayerOps):
    """Operations in plain torch."""

    def normed(
        self, x_TE: Tensor, addend: Addend | None, norm: nn.RMSNorm | None, matrix: Linear | None
    ) -> tuple[Tensor, Tensor]:
        if addend is not None:
            out_TE, factor = _normed(addend.norm, addend.values), addend.layer.residual_multiplier
            x_TE = x_TE + (out_TE if factor == 1.0 else out_TE * factor)
        return x_TE, _normed(norm, x_TE)

    def product(self, x: Activations, matrix: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        return matrix(x)

    def normalise_whole(self, layer: Layer, qkv: Tensor) -> Tensor:
        q_THD, k_TJD, v_TJD = layer.split_heads(qkv)
        return torch.cat((*layer.normalise_whole(q_THD, k_TJD), v_TJD), -2).flatten(-2)

    def gated(self, layer: Layer, x: Activations) -> Tensor:
        gate, up = self.product(x, layer.gate_up).chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") if layer.gelu else F.silu(gate)) * up

    def experts(self, layer: Layer, module: Experts, x: Activations) -> Tensor:
        return layer.sum(module(x))


def attend_rotated(rope_T2D: Tensor, attend: Attend) -> AttendLayer:
    """Normalise single heads and rotate in torch, then call `attend`."""

    def attend_layer(layer: Layer, qkv: Tensor, output_T: Tensor | None) -> Tensor:
        assert output_T is None, "torch computes all tokens"
        q_THD, k_TJD, v_TJD = layer.split_heads(qkv)
        if layer.whole_widths is None and layer.q_norm is not None and layer.k_norm is not None:
            q_THD, k_TJD = layer.q_norm(q_THD), layer.k_norm(k_TJD)
        rope = rope_T2D if rope_T2D.dim() == 2 else rope_T2D[layer.rope_kind]
        return attend(layer.index, rotate(q_THD, rope), rotate(k_TJD, rope), v_TJD).flatten(-2)

    return attend_layer


def rotate(x_THD: Tensor, rope_T2D: Tensor) -> Tensor:
    """Rotary embedding with the half-split layout: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    cos, sin = rope_T2D.to(x_THD.dtype).unsqueeze(-2).chunk(2, dim=-1)
    x1, x2 = x_THD.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class OffsetNorm(nn.RMSNorm):
    """RMSNorm in float32 with a constant `offset` added to the weights."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__(width, eps=eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.normalized_shape, self.weight.float() + self.offset, self.eps)
        return normed.to(x.dtype)


def make_norm(config: ModelConfig, width: int) -> nn.RMSNorm:
    offset = config.traits.norm_offset
    return OffsetNorm(width, config.rms_eps, offset) if offset else nn.RMSNorm(width, eps=config.rms_eps)


def _normed(norm: nn.RMSNorm | None, x_TE: Tensor) -> Tensor:
    return x_TE if norm is None else norm(x_TE)


def _rope_kind(config: ModelConfig, layer: int) -> str:
    if layer in config.unrotated_layers:
        return UNROTATED
    return LOCAL if config.local_rope_theta is not None and layer in config.window_layers else MAIN


def rope_kinds(config: ModelConfig) -> list[str]:
    """Kinds of rotation that the model's layers have, sorted by name."""
    return sorted({_rope_kind(config, layer) for layer in range(config.num_layers)})


class RopeTable:
    """Rotary table [max_positions, D]: for each position D/2 cosines, then D/2 sines, in float32. If layers have more
    than one kind of rotation, one such table for each kind [kinds, max_positions, D].

    If the model's attention scores have another factor than D ** -0.5, which attention applies, all numbers contain the
    square root of the ratio, because rotation multiplies both queries and keys by them."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        device: torch.device | str = "cpu",
        context: int | None = None,
    ) -> None:
        """`context`: tokens of the longest text; default: `max_positions`."""
        kinds = rope_kinds(config)
        tables = [_rope_table(config, kind, max_positions, context or max_positions) for kind in kinds]
        self.table = (tables[0] if len(tables) == 1 else torch.stack(tables)).to(device)

    def at(self, positions_T: Tensor) -> Tensor:
        return self.table[..., positions_T, :]

    def of(self, layer: Layer) -> Tensor:
        """The table [max_positions, D] of a layer."""
        return self.table if self.table.dim() == 2 else self.table[layer.rope_kind]


def _rope_table(config: ModelConfig, kind: str, max_positions: int, context: int) -> Tensor:
    theta = config.local_rope_theta if kind == LOCAL else config.rope_theta
    assert theta is not None
    inv_freq, factor = theta ** (-torch.arange(0, config.rotated, 2, dtype=torch.float64) / config.rotated), 1.0
    scaling = config.rope_scaling if kind == MAIN else None
    if isinstance(scaling, Llama3RopeScaling):
        inv_freq = _llama3_frequencies(inv_freq, scaling)
    elif isinstance(scaling, LinearRopeScaling):
        inv_freq = inv_freq / scaling.factor
    elif isinstance(scaling, YarnRopeScaling):
        inv_freq, factor = _yarn_frequencies(inv_freq, theta, scaling), scaling.attention_factor
    elif isinstance(scaling, LongRopeScaling):
        factors = torch.tensor(scaling.factors(context), dtype=torch.float64)
        inv_freq, factor = inv_freq / factors, scaling.attention_factor
    if kind == UNROTATED:
        inv_freq = torch.zeros_like(inv_freq)
    # Pairs that are not rotated have an angle of 0.
    rest = config.head_dim // 2 - len(inv_freq)
    factor_D = F.pad(torch.full_like(inv_freq, factor), (0, rest), value=1.0)
    if config.score_scale is not None:
        factor_D *= math.sqrt(config.score_scale * math.sqrt(config.head_dim))
    angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * F.pad(inv_freq, (0, rest))
    return (torch.cat((angle.cos(), angle.sin()), dim=-1) * factor_D.repeat(2)).float()


def _yarn_frequencies(inv_freq: Tensor, theta: float, scaling: YarnRopeScaling) -> Tensor:
    pairs = len(inv_freq)

    def pair_of(rotations: float) -> float:
        """Return the index (with a fraction) of the pair that makes this many rotations within the original context."""
        return pairs * math.log(scaling.original_context / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretched = ((torch.arange(pairs, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return inv_freq * (1 - stretched) + inv_freq / scaling.factor * stretched


def _llama3_frequencies(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / scaling.factor)


def attend_causally(q_RHLD: Tensor, k_RJLD: Tensor, v_RJLD: Tensor, window: int | None) -> Tensor:
    """Dense causal attention [T, H, D] of whole sequences; `window`: number of positions that a token sees, itself
    included; None: all."""
    width, seen_LL = q_RHLD.shape[2], None
    if window is not None and window < width:
        seen_LL = torch.ones(width, width, dtype=torch.bool, device=q_RHLD.device).tril().triu(1 - window)
    out_RHLD = F.scaled_dot_product_attention(
        q_RHLD, k_RJLD, v_RJLD, seen_LL, is_causal=seen_LL is None, enable_gqa=True
    )
    return out_RHLD.transpose(1, 2).flatten(0, 1)


def hidden_states(model: Decoder, rope_LD: Tensor, tokens_RL: Tensor) -> Tensor:
    """Hidden states [R, L, E] with dense causal attention. Row s of `rope_LD` is position s of the rotary table."""
    rows, width = tokens_RL.shape

    def attend(layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, width)).transpose(1, 2) for x in (q_THD, k_TJD, v_TJD))
        return attend_causally(q, k, v, model.config.window_of(layer))

    rope = torch.cat([rope_LD[..., :width, :]] * rows, dim=-2)
    return model(tokens_RL.flatten(), rope, attend).unflatten(0, (rows, width))
