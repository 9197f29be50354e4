"""Weight map: the position of every published tensor in our fused parameters. Loading, saving, padding and the check of
safetensors headers use it.

Knows nothing about values. Does not import torch, so that directories can be checked before torch is loaded.

Local axes: P groups of inputs with a common scale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from smc.model.config import ModelConfig, read_quantisation
from smc.model.files import StoredTensor, abbreviate, read_headers, read_json
from smc.model.parallel import WHOLE, Axis, Shard, Split
from smc.model.quantisation import (
    GROUP,
    LEAST_GROUP,
    Codes,
    Expected,
    Int4Format,
    Int4Quantisation,
    Quantisation,
    local_group,
)

if TYPE_CHECKING:
    from torch import Tensor

ROUTER = "experts.router.weight"
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int4": 0.53}
"""Approximate bytes of a weight, by data type; of int4 with the scale of its group."""
PLAIN_BYTES = 2
"""Bytes of a weight in bfloat16."""
QUANTISED_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
"""Suffixes of the tensors that only quantised checkpoints have."""


@dataclass(frozen=True)
class WeightSlice:
    """Position of this rank's part of a published tensor: rows of one parameter, from row `start` on."""

    parameter: str
    start: int
    axes: tuple[Axis, ...]
    """Axes of the published tensor, as this rank sees them."""
    stored: str = ""
    """Name of the tensor in the files if it holds several published tensors below each other; otherwise empty."""
    first: int = 0
    """Row of the tensor `stored` at which the published tensor begins."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole published tensor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def part(self) -> tuple[slice, ...]:
        """Slices of the published tensor that this rank holds, if they are one block."""
        return tuple(slice(axis.held.start, axis.held.stop) for axis in self.axes)

    def bands(self) -> Iterator[WeightSlice]:
        """Yield a slice for each span of rows, with all columns."""
        rows, *columns = self.axes
        return (replace(self, axes=(band, *columns)) for band in rows.split())

    def blocks(self) -> Iterator[WeightSlice]:
        """Yield a slice for each span of rows and of columns. Only such slices have `part` and `view`."""
        return (replace(self, axes=axes) for axes in product(*(axis.split() for axis in self.axes)))

    def stored_name(self, published: str) -> str:
        """Name of the tensor in the files."""
        return self.stored or published

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the part of the parameter that holds this block, without padding. Not for int4 matrices, whose first
        axis is that of groups."""
        rows, *columns = (slice(axis.start, axis.start + len(axis.held)) for axis in self.axes)
        values = parameters[self.parameter].detach()
        assert values.is_floating_point(), self.parameter
        return values[(self._rows(rows), *columns)]

    def write_fp8(self, parameters: Mapping[str, Tensor], rows: slice, weight_OI: Tensor, scale_O: Tensor) -> None:
        """Write FP8 weights and scales of some of the rows of this band. `weight_OI` has all columns of the published
        tensor."""
        outputs = self._rows(slice(self.axes[0].start + rows.start, self.axes[0].start + rows.stop))
        weight = parameters[self.parameter].detach()
        for held, start in self.axes[1].spans:
            weight[outputs, start : start + len(held)] = weight_OI[:, held.start : held.stop]
        parameters[f"{self.parameter.removesuffix('weight')}scale"].detach()[outputs] = scale_O

    def write_int4(self, parameters: Mapping[str, Tensor], rows: slice, codes: Codes) -> None:
        """Write int4 weights of some of the rows of this block; `codes` has its columns."""
        from smc.model.linear import pack

        base, (own_rows, columns) = self.parameter.removesuffix("weight"), self.axes
        outputs = self._rows(slice(own_rows.start + rows.start, own_rows.start + rows.stop))
        words_POW, groups = parameters[self.parameter].detach(), codes.scale_OP.shape[1]
        first = columns.start * len(words_POW) // columns.local_size
        words_POW[first : first + groups, outputs] = pack(codes.code_OI, groups)
        for name, part_OP in (("scale", codes.scale_OP), ("zero", codes.zero_OP)):
            if f"{base}{name}" in parameters:
                values_PO = parameters[f"{base}{name}"].detach()
                values_PO[first : first + groups, outputs] = part_OP.t().to(values_PO.dtype)

    def _rows(self, rows: slice) -> slice:
        """Convert rows of this rank's part to rows of the parameter."""
        return slice(self.start + rows.start, self.start + rows.stop)


def weight_slices(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, WeightSlice]:
    """Map each weight's published name to its slice, for the model `config`. A tied `lm_head.weight` has no entry."""
    vocab, hidden, split = Axis.whole(config.vocab_size), Axis.whole(config.hidden_size), Split.of(config, shard)
    slices = {"model.embed_tokens.weight": WeightSlice("embed.weight", 0, (vocab, hidden))}
    for layer in range(config.num_layers):
        slices |= _layer_slices(config, split, f"model.layers.{layer}.", f"layers.{layer}.")
    slices["model.norm.weight"] = WeightSlice("norm.weight", 0, (hidden,))
    if not config.tied_embeddings:
        slices["lm_head.weight"] = WeightSlice("lm_head.weight", 0, (vocab, hidden))
    return slices


def count_parameters(config: ModelConfig) -> int:
    """Number of weights; a tied matrix counts once."""
    return sum(math.prod(where.shape) for where in weight_slices(config).values())


def _layer_slices(config: ModelConfig, split: Split, theirs: str, ours: str) -> dict[str, WeightSlice]:
    traits, hidden, query, key = config.traits, Axis.whole(config.hidden_size), split.query, split.key
    slices = {
        f"{theirs}{published}.weight": WeightSlice(f"{ours}{name}.weight", 0, (hidden,))
        for name, published in traits.norms.items()
    }
    slices[f"{theirs}self_attn.o_proj.weight"] = WeightSlice(f"{ours}o.weight", 0, (hidden, query))
    qkv = f"{theirs}self_attn.qkv_proj.weight" if traits.fused else ""
    for letter, start, rows, first in (
        ("q", 0, query, 0),
        ("k", query.local_size, key, query.size),
        ("v", query.local_size + key.local_size, key, query.size + key.size),
    ):
        slices[f"{theirs}self_attn.{letter}_proj.weight"] = WeightSlice(
            f"{ours}qkv.weight", start, (rows, hidden), qkv, first if qkv else 0
        )
        if traits.qkv_bias:
            slices[f"{theirs}self_attn.{letter}_proj.bias"] = WeightSlice(f"{ours}qkv.bias", start, (rows,))
    if traits.qk_norm:
        heads = {"q": query, "k": key} if traits.whole_qk_norm else dict.fromkeys("qk", Axis.whole(config.head_dim))
        for letter, axis in heads.items():
            slices[f"{theirs}self_attn.{letter}_norm.weight"] = WeightSlice(f"{ours}{letter}_norm.weight", 0, (axis,))
    return slices | (
        _expert_slices(config, split.inner, theirs, ours)
        if traits.experts is not None
        else _mlp_slices(config, split.inner, theirs, ours)
    )


def _mlp_slices(config: ModelConfig, inner: Axis, theirs: str, ours: str) -> dict[str, WeightSlice]:
    hidden = Axis.whole(config.hidden_size)
    both = f"{theirs}mlp.gate_up_proj.weight" if config.traits.fused else ""
    return {
        f"{theirs}mlp.gate_proj.weight": WeightSlice(f"{ours}gate_up.weight", 0, (inner, hidden), both),
        f"{theirs}mlp.up_proj.weight": WeightSlice(
            f"{ours}gate_up.weight", inner.local_size, (inner, hidden), both, inner.size if both else 0
        ),
        f"{theirs}mlp.down_proj.weight": WeightSlice(f"{ours}down.weight", 0, (hidden, inner)),
    }


def _expert_slices(config: ModelConfig, inner: Axis, theirs: str, ours: str) -> dict[str, WeightSlice]:
    names, hidden, experts = config.traits.experts, Axis.whole(config.hidden_size), Axis.whole(config.num_experts)
    assert names is not None
    slices = {f"{theirs}{names.router}.weight": WeightSlice(f"{ours}{ROUTER}", 0, (experts, hidden))}
    for expert in range(config.num_experts):
        gate, up, down = (f"{theirs}{name.format(expert)}.weight" for name in (names.gate, names.up, names.down))
        begin = expert * 2 * inner.local_size
        slices[gate] = WeightSlice(f"{ours}experts.gate_up.weight", begin, (inner, hidden))
        slices[up] = WeightSlice(f"{ours}experts.gate_up.weight", begin + inner.local_size, (inner, hidden))
        slices[down] = WeightSlice(f"{ours}experts.down.weight", expert * hidden.size, (hidden, inner))
    return slices


def stored_shapes(slices: Mapping[str, WeightSlice]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the files that holds weights, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for published, where in slices.items():
        name, (rows, *columns) = where.stored_name(published), where.shape
        shapes[name] = (shapes.get(name, (0,))[0] + rows, *columns)
    return shapes


NOTHING_STORED: Mapping[str, StoredTensor] = MappingProxyType({})


def int4_formats(
    slices: Mapping[str, WeightSlice],
    shard: Shard,
    stored: Mapping[str, StoredTensor] = NOTHING_STORED,
    quantisation: Quantisation | None = None,
) -> dict[str, Int4Format]:
    """Return the formats of the matrices that a rank holds in int4, by parameter: the matrices that are stored in int4
    or, if `quantisation` is not int4, all matrices of the layers, including experts but not routers. Raises ValueError
    if groups cannot be split over the ranks."""
    published: defaultdict[str, list[str]] = defaultdict(list)
    for name, where in slices.items():
        if where.parameter.startswith("layers.") and len(where.axes) == 2 and not where.parameter.endswith(ROUTER):
            published[where.parameter].append(name)
    formats = {}
    for parameter, names in published.items():
        inputs = slices[names[0]].axes[1]
        group, zeros, scale_dtype = GROUP, False, "BF16"
        size, step = inputs.size, inputs.step
        if isinstance(quantisation, Int4Quantisation):
            files = [slices[name].stored_name(name) for name in names]
            if not all(quantisation.holds(name, stored) for name in files):
                continue
            group, zeros = quantisation.group_size(inputs.size), not quantisation.symmetric
            scale_dtype = quantisation.scale_dtype(files[0], stored)
        elif inputs.padded_span is not None:  # its padding is rounded with it
            size, step = inputs.local_size, inputs.padded_span
        held = local_group(group, size, step)
        if held is None:
            parts, instead = f"{shard.degree} ranks", "another degree, or dtype=bfloat16"
            if inputs.padded_span is not None:
                parts, instead = f"heads that are padded to {inputs.padded_span} features", "dtype=bfloat16"
            raise ValueError(
                f"dtype=int4: {parameter} has {inputs.size} inputs in groups of {group}, which {parts} cut at "
                f"multiples of {inputs.step}; each must hold whole groups, or whole parts of {LEAST_GROUP} inputs of "
                f"them. Take {instead}"
            )
        formats[parameter] = Int4Format(held, zeros, scale_dtype)
    return formats


def rank_bytes(config: ModelConfig, shard: Shard, int4: Mapping[str, Int4Format]) -> int:
    """Return the bytes of a rank's weights, padding included: the parameters in `int4` in that format, all others in
    bfloat16."""
    total = 0
    for where in weight_slices(config, shard).values():
        sizes = [axis.local_size for axis in where.axes]
        total += (
            int4[where.parameter].bytes(sizes[0], sizes[1])
            if where.parameter in int4
            else PLAIN_BYTES * math.prod(sizes)
        )
    return total


def check_weights(directory: str | Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Compare the safetensors headers with the weights that the model needs. Reads no weights.

    Returns the tensors to load, including those that hold quantised weights. Raises ValueError that lists missing and
    unknown tensors and wrong shapes and types."""
    wanted, quantisation = stored_shapes(weight_slices(config)), read_quantisation(directory)
    stored = {
        name: tensor for name, tensor in read_headers(directory).items() if not _is_ignored(name, config, quantisation)
    }
    expected: dict[str, Expected] = {}
    for name, shape in wanted.items():
        is_matrix = quantisation is not None and len(shape) == 2
        parts = quantisation.stored_as(name, shape, stored) if quantisation is not None and is_matrix else None
        expected |= parts or {name: Expected((shape,))}
    problems = []
    if missing := [name for name in expected if name not in stored]:
        problems.append(f"{len(missing)} weights are missing: {abbreviate(missing)}")
        if missing == ["lm_head.weight"] and "tie_word_embeddings" not in read_json(Path(directory) / "config.json"):
            problems.append(
                'config.json has no tie_word_embeddings; add "tie_word_embeddings": true if the head is the embedding'
            )
    if unknown := [name for name in stored if name not in expected]:
        problems.append(f"{len(unknown)} weights are unknown to {config.family}: {abbreviate(unknown)}")
        if quantisation is None and any(name.endswith(QUANTISED_SUFFIXES) for name in unknown):
            problems.append(
                "the weights are quantised, and config.json has no quantization_config; download config.json again"
            )
    for name in (name for name in expected if name in stored):
        found, (allowed, types) = stored[name], expected[name]
        if found.shape not in allowed:
            problems.append(
                f"{name} has shape {list(found.shape)}, expected {' or '.join(str(list(shape)) for shape in allowed)}"
            )
        if found.dtype not in types:
            problems.append(f"{name} is stored as {found.dtype}; supported: {', '.join(types)}")
    if problems:
        raise ValueError(f"{directory}: {abbreviate(problems, separator='; ')}")
    return stored


def _is_ignored(name: str, config: ModelConfig, quantisation: Quantisation | None) -> bool:
    """Whether the tensor is not loaded: rotary frequencies (old Llama files store them), the head of a tied model, or a
    static activation scale."""
    tied = config.tied_embeddings and name.startswith("lm_head.")
    return name.endswith("rotary_emb.inv_freq") or tied or (quantisation is not None and quantisation.ignores(name))
