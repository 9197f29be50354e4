"""Directories whose weights are FP8 already: which kinds there are, and what their numbers mean. Knows nothing about
files or our models.

A published matrix W is stored as e4m3 numbers with scales: W = scale * number. Activations are our own affair
(`smc.model.linear`), so what a directory says about dynamic ones changes nothing; scales of static ones are passed
over, and the user is told.

Axes: N outputs, K inputs, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
"""Rows and columns that share a scale."""
SUPPORTED = (
    "compressed-tensors with FP8 weights, symmetric, a scale per channel or per tensor; fp8 with blocks of 128 x 128"
)
FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Compression:
    """How the FP8 weights of a directory are stored."""

    suffix: str
    """Of the scale's name, in place of `weight`."""
    blocks: bool
    """A scale for every `BLOCK` x `BLOCK` numbers; else for every row, or one."""
    static_inputs: bool
    """The directory has scales of inputs, which are not used."""

    @staticmethod
    def of(raw: dict[str, Any] | None) -> Compression | None:
        """What a `quantization_config` stands for. Raises ValueError, naming what is not supported."""
        if not raw:
            return None
        method = raw.get("quant_method")
        if method == "compressed-tensors":
            return _compressed_tensors(raw)
        if method == "fp8":
            _require("fp8", {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}, raw)
            _require("fp8", {"fmt": "e4m3"}, {"fmt": "e4m3"} | raw)
            return Compression("weight_scale_inv", blocks=True, static_inputs=False)
        raise ValueError(f"quantization_config: quant_method={method!r} is not supported; supported: {SUPPORTED}")

    def scale_name(self, weight: str) -> str:
        return weight.removesuffix("weight") + self.suffix

    def passes_over(self, name: str) -> bool:
        """A tensor that is known, and not needed."""
        return self.static_inputs and name.endswith(".input_scale")

    def scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        """Those that a scale may have."""
        if self.blocks:
            return ((-(-outputs // BLOCK), -(-inputs // BLOCK)),)
        return ((outputs, 1), (outputs,), (1,), ())

    def scale_of_rows(self, scale: Tensor, rows: slice) -> Tensor:
        """[N] float32, of some rows; `scale` is whole. Not for blocks."""
        assert not self.blocks
        scale = scale.float().flatten()
        return scale[rows] if len(scale) > 1 else scale.expand(rows.stop - rows.start)

    def values(self, weight_NK: Tensor, scale: Tensor, rows: slice, columns: slice) -> Tensor:
        """float32 [N, K] of a rectangle, which `weight_NK` is; `scale` is whole."""
        import torch

        if not self.blocks:
            return weight_NK.float() * self.scale_of_rows(scale, rows)[:, None]
        block_N, block_K = (
            torch.arange(part.start, part.stop, device=scale.device) // BLOCK for part in (rows, columns)
        )
        return weight_NK.float() * scale.float()[block_N[:, None], block_K]


def _compressed_tensors(raw: dict[str, Any]) -> Compression:
    if raw.get("format") not in FORMATS:
        raise ValueError(
            f"compressed-tensors of format {raw.get('format')!r} are not supported; supported: {SUPPORTED}"
        )
    _require("compressed-tensors", {"kv_cache_scheme": None}, {"kv_cache_scheme": None} | raw)
    for field in ("sparsity_config", "transform_config"):
        if raw.get(field) and raw[field].get("format") != "dense":
            raise ValueError(
                f"compressed-tensors with {field}={raw[field]!r} are not supported; supported: {SUPPORTED}"
            )
    groups = raw.get("config_groups") or {}
    if not groups:
        raise ValueError(f"compressed-tensors without config_groups are not supported; supported: {SUPPORTED}")
    inputs = []
    for name, group in groups.items():
        where = f"compressed-tensors, {name}"
        weights = group.get("weights") or {}
        _require(f"{where}, weights", {"type": "float", "num_bits": 8, "symmetric": True}, weights)
        if weights.get("strategy") not in ("channel", "tensor"):
            raise ValueError(
                f"{where}, weights: strategy={weights.get('strategy')!r} is not supported; supported: channel, tensor"
            )
        if group.get("input_activations"):
            inputs.append(group["input_activations"])
            _require(f"{where}, input_activations", {"type": "float", "num_bits": 8}, inputs[-1])
        _require(where, {"output_activations": None}, {"output_activations": None} | group)
    return Compression("weight_scale", blocks=False, static_inputs=any(not one.get("dynamic") for one in inputs))


def _require(where: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    for field, value in wanted.items():
        if found.get(field) != value:
            raise ValueError(f"{where}: {field}={found.get(field)!r} is not supported; supported: {value!r}")
