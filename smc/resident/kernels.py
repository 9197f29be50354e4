"""The parts of rounds that run as fused kernels on a GPU: forward pass, draws, choice. Same interfaces as the references.

Matrix products of few rows are bound by reading weights; what is done here is to leave little else. See the package's legend for axes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from smc.algorithm import selection
from smc.algorithm.selection import Selection
from smc.attention.kernels import SharedPrefixAttention, check_heads
from smc.attention.step import step_attention
from smc.engine.worker import ModelWorker
from smc.kernels import selection as selection_kernel
from smc.kernels.law import Cut
from smc.kernels.linear import gate_up_silu, linear
from smc.kernels.norm import add_norm, silu_mul
from smc.kernels.rows import place_tokens
from smc.kernels.sampling import draw, score
from smc.kernels.store import store_kv
from smc.kernels.truncation import truncate
from smc.laws import LawSpec
from smc.models.decoder import Layer
from smc.resident.forward import StaticForward, StaticRows
from smc.resident.sampling import DrawKeys, Sampling
from smc.resident.sides import Parts
from smc.resident.stages import Graphs

FEW_ROWS, FEW_WIDE_ROWS = 64, 32
"""Up to here our own products read weights at least as fast as the library's; the latter where rows are wide."""
WIDE = 8192
"""Features."""


Attend = Callable[[Layer, Tensor, Tensor], None]
"""(layer, product with its query, key and value weights, out [T, H, D])"""


class KernelForward(StaticForward):
    """A decoder of one worker. With `own_products` matrix products of few rows are ours too, but not in float32, which tensor cores
    would round; with `pdl` kernels begin before those before them have ended (programmatic dependent launch). Raises ValueError for heads
    that the kernels cannot do."""

    def __init__(self, worker: ModelWorker, *, own_products: bool = True, pdl: bool = False) -> None:
        super().__init__(worker.model, worker.pool, worker.rope)
        check_heads((worker.model.config.num_heads, worker.model.config.num_kv_heads), worker.model.config.head_dim)
        self._longest, self._own_products, self._pdl = worker.tables.table_RL.shape[1], own_products, pdl
        self._attention: dict[tuple[int, int, int], SharedPrefixAttention] = {}

    def __call__(self, tokens_T: Tensor, rows: StaticRows) -> Tensor:
        config, model, pdl = self.model.config, self.model, self._pdl
        x_TE = model.embed(tokens_T)
        out_THD, parts = x_TE.new_empty(len(tokens_T), config.num_heads, config.head_dim), None
        attend = self._in_one_launch(rows) if rows.short and rows.queries == 1 else self._stored_first(rows)
        for layer in model.layers:
            hidden_TE = add_norm(x_TE, parts, layer.attn_norm.weight, config.rms_eps, pdl=pdl)
            attend(layer, self._product(hidden_TE, layer.qkv.weight, layer.qkv.bias), out_THD)
            parts = self._sum(layer, out_THD.flatten(1), layer.o.weight)
            hidden_TE = add_norm(x_TE, parts, layer.mlp_norm.weight, config.rms_eps, pdl=pdl)
            parts = self._sum(layer, self._gated(layer, hidden_TE), layer.down.weight)
        return add_norm(x_TE, parts, model.norm.weight, config.rms_eps, pdl=pdl)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        weight_VE = self.model.lm_head.weight
        if self._few(hidden_RE):
            return linear(hidden_RE, weight_VE, splits=1, pdl=self._pdl)
        return F.linear(hidden_RE, weight_VE)

    def _in_one_launch(self, rows: StaticRows) -> Attend:
        assert rows.skip_R is None

        def attend(layer: Layer, qkv: Tensor, out_RHD: Tensor) -> None:
            keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
            where = (self.rope.table, rows.table_RL, rows.size_G, rows.start_R, rows.count_R)
            step_attention(qkv, keys, values, *where, out_RHD, *_norms(layer), self.model.config.rms_eps, pdl=self._pdl)

        return attend

    def _stored_first(self, rows: StaticRows) -> Attend:
        config, attention = self.model.config, self._attention_for(rows)
        heads = (config.num_heads, config.num_kv_heads)
        q_THD = self.model.embed.weight.new_empty(len(rows.start_R) * rows.queries, config.num_heads, config.head_dim)
        where = place_tokens(rows.table_RL, rows.start_R, rows.count_R, rows.skip_R, rows.queries)
        bounds = (rows.size_G, rows.shared_G, rows.start_R, rows.count_R)

        def attend(layer: Layer, qkv: Tensor, out_THD: Tensor) -> None:
            keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
            store_kv(qkv, q_THD, keys, values, self.rope.table, *where, heads, *_norms(layer), eps=config.rms_eps, pdl=self._pdl)
            attention.run(q_THD, keys, values, rows.table_RL, *bounds, out_THD, rows.short)

        return attend

    def _gated(self, layer: Layer, hidden_TE: Tensor) -> Tensor:
        if self._few(hidden_TE):
            return gate_up_silu(hidden_TE, layer.gate_up.weight, pdl=self._pdl)
        return silu_mul(F.linear(hidden_TE, layer.gate_up.weight))

    def _product(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """x W^T, perhaps as partial sums [S, T, N]."""
        if self._few(x_TK):
            return linear(x_TK, weight_NK, bias_N=bias_N, pdl=self._pdl)
        return F.linear(x_TK, weight_NK, bias_N)

    def _sum(self, layer: Layer, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """`_product` of all ranks' shares."""
        if layer.reduce is None:
            return self._product(x_TK, weight_NK)
        return layer.reduce(torch.mm(x_TK, weight_NK.t(), out=layer.reduce.room(len(x_TK), len(weight_NK), x_TK.dtype)))

    def _few(self, x_TK: Tensor) -> bool:
        few = FEW_ROWS if self.model.config.hidden_size < WIDE else FEW_WIDE_ROWS
        return self._own_products and len(x_TK) <= few and x_TK.dtype != torch.float32

    def _attention_for(self, rows: StaticRows) -> SharedPrefixAttention:
        groups, config = len(rows.size_G), self.model.config
        shape = (groups, len(rows.start_R) // groups, rows.queries)
        if shape not in self._attention:
            weight, heads = self.model.embed.weight, (config.num_heads, config.num_kv_heads)
            self._attention[shape] = SharedPrefixAttention(
                *shape, heads, config.head_dim, weight.dtype, weight.device, self._longest, overlap=self._pdl
            )
        return self._attention[shape]


def _norms(layer: Layer) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if layer.q_norm is None else (layer.q_norm.weight, layer.k_norm.weight)


class KernelSampling(Sampling):
    """Laws by the kernels: no array of a law is ever written."""

    def propose(self, logits_RV: Tensor, law: LawSpec, mixture: float, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        token_RD, logq_RD, _ = self._draw(logits_RV, law.temperature_R, keys, self._cut(logits_RV, law, mixture))
        return token_RD, logq_RD

    def score(self, logits_RV: Tensor, law: LawSpec, token_RD: Tensor) -> Tensor:
        cut = self._cut(logits_RV, law)
        if token_RD.shape[1] == 1:
            return score(logits_RV, self.vocab, law.temperature_R, token_RD[:, 0].int(), cut=cut)[0][:, None]
        none_R = torch.full_like(token_RD[:, 0], -1, dtype=torch.int32)
        return score(logits_RV, self.vocab, law.temperature_R, none_R, token_RD.int(), cut)[1]

    def bonus(self, logits_RV: Tensor, law: LawSpec, keys: DrawKeys) -> tuple[Tensor, Tensor, Tensor]:
        cut = self._cut(logits_RV, law)
        if "alpha" not in law.active:
            token_RD, logp_RD, lse_R = self._draw(logits_RV, law.temperature_R, keys, cut)
            return token_RD.long(), logp_RD, lse_R * 0.0
        # p^alpha is p at 1 / alpha of the temperature, and what it takes to normalise shows in any of its tokens.
        token_RD, powered_RD, lse_R = self._draw(logits_RV, law.temperature_R / law.alpha_R, keys, cut)
        logp_RD = score(logits_RV, self.vocab, law.temperature_R, torch.full_like(token_RD[:, 0], -1), token_RD, cut)[1]
        log_z_R = torch.where(law.alpha_R == 1, 0.0, law.alpha_R * logp_RD[:, 0] - powered_RD[:, 0])
        return token_RD.long(), logp_RD, log_z_R + lse_R * 0.0

    def _cut(self, logits_RV: Tensor, law: LawSpec, share: float = 0.0) -> Cut | None:
        processors = {"top_k": law.top_k_R, "top_p": law.top_p_R, "min_p": law.min_p_R}
        used = [values_R if name in law.active else None for name, values_R in processors.items()]
        return truncate(logits_RV, self.vocab, law.temperature_R, *used, share) if law.active & set(processors) else None

    def _draw(self, logits_RV: Tensor, temperature_R: Tensor, keys: DrawKeys, cut: Cut | None) -> tuple[Tensor, Tensor, Tensor]:
        random = (keys.seed_R, keys.round_R, keys.stream_RD, keys.position_R, int(keys.purpose))
        return draw(logits_RV, self.vocab, temperature_R, *random, cut)


def select(
    candidates_GNF: Tensor, size_G: Tensor, threshold_G: Tensor, schemes: list[str], uniforms_GU: Tensor, branch_uniforms_GN: Tensor
) -> Selection:
    """`smc.algorithm.selection.select` in one kernel where every scheme is systematic."""
    if set(schemes) == {"systematic"}:
        return selection_kernel.select(candidates_GNF, size_G, threshold_G, uniforms_GU, branch_uniforms_GN)
    return selection.select(candidates_GNF, size_G, threshold_G, schemes, uniforms_GU, branch_uniforms_GN)


def gpu_parts(**options: bool) -> Parts:
    """What sides run on GPUs; options are those of `KernelForward`."""
    return Parts(
        forward=lambda worker: KernelForward(worker, **options),
        sampling=KernelSampling,
        stages=Graphs,
        select=select,
    )
