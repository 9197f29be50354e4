"""Storage formats of FP8 checkpoints: the `quantization_config` of config.json and the conversion to numbers. Knows
nothing about files or our models.

A published matrix W is stored as e4m3 numbers with scales: W = scale * number. Activations are quantised at run time
with one scale per row (`smc.model.linear`), so a checkpoint's settings for dynamic activation scales have no effect.
Static activation scales are ignored with a warning.

Axes: N outputs, K inputs, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
"""Rows and columns of a block with one scale."""
SUPPORTED_METHODS = (
    "compressed-tensors with FP8 weights, symmetric, a scale per channel or per tensor; fp8 with blocks of 128 x 128"
)
COMPRESSED_TENSORS_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class QuantisationConfig:
    """Storage format of a checkpoint's FP8 weights."""

    suffix: str
    """Suffix of the scale's tensor name, which replaces `weight`."""
    blocks: bool
    """Whether every `BLOCK` x `BLOCK` numbers have a scale. Otherwise every row has one, or the whole tensor."""
    static_inputs: bool
    """Whether the checkpoint has static activation scales, which are not used."""

    @staticmethod
    def from_hf(raw: dict[str, Any] | None) -> QuantisationConfig | None:
        """Parse a `quantization_config`. Raises ValueError that names the unsupported setting."""
        if not raw:
            return None
        method = raw.get("quant_method")
        if method == "compressed-tensors":
            return _compressed_tensors(raw)
        if method == "fp8":
            _require("fp8", {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}, raw)
            _require("fp8", {"fmt": "e4m3"}, {"fmt": "e4m3"} | raw)
            return QuantisationConfig("weight_scale_inv", blocks=True, static_inputs=False)
        raise ValueError(
            f"quantization_config: quant_method={method!r} is not supported; supported: {SUPPORTED_METHODS}"
        )

    def scale_name(self, weight: str) -> str:
        return weight.removesuffix("weight") + self.suffix

    def ignores(self, name: str) -> bool:
        """Whether the tensor is a static activation scale."""
        return self.static_inputs and name.endswith(".input_scale")

    def scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        """Shapes allowed for the scale of an [outputs, inputs] matrix."""
        if self.blocks:
            return ((-(-outputs // BLOCK), -(-inputs // BLOCK)),)
        return ((outputs, 1), (outputs,), (1,), ())

    def scale_of_rows(self, scale: Tensor, rows: slice) -> Tensor:
        """Scales [N] of the rows, float32. `scale` is the whole stored tensor. Not for formats with blocks."""
        assert not self.blocks
        scale = scale.float().flatten()
        return scale[rows] if len(scale) > 1 else scale.expand(rows.stop - rows.start)

    def values(self, weight_NK: Tensor, scale: Tensor, rows: slice, columns: slice) -> Tensor:
        """Dequantised float32 weights [N, K]. `weight_NK` is the part at `rows` and `columns`; `scale` is the whole
        stored tensor."""
        import torch

        if not self.blocks:
            return weight_NK.float() * self.scale_of_rows(scale, rows)[:, None]
        block_N, block_K = (
            torch.arange(part.start, part.stop, device=scale.device) // BLOCK for part in (rows, columns)
        )
        return weight_NK.float() * scale.float()[block_N[:, None], block_K]


def _compressed_tensors(raw: dict[str, Any]) -> QuantisationConfig:
    if raw.get("format") not in COMPRESSED_TENSORS_FORMATS:
        raise ValueError(
            f"compressed-tensors of format {raw.get('format')!r} are not supported; supported: {SUPPORTED_METHODS}"
        )
    _require("compressed-tensors", {"kv_cache_scheme": None}, {"kv_cache_scheme": None} | raw)
    for field in ("sparsity_config", "transform_config"):
        if raw.get(field) and raw[field].get("format") != "dense":
            raise ValueError(
                f"compressed-tensors with {field}={raw[field]!r} are not supported; supported: {SUPPORTED_METHODS}"
            )
    groups = raw.get("config_groups") or {}
    if not groups:
        raise ValueError(f"compressed-tensors without config_groups are not supported; supported: {SUPPORTED_METHODS}")
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
    return QuantisationConfig("weight_scale", blocks=False, static_inputs=any(not one.get("dynamic") for one in inputs))


def _require(where: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    for field, value in wanted.items():
        if found.get(field) != value:
            raise ValueError(f"{where}: {field}={found.get(field)!r} is not supported; supported: {value!r}")
