"""Converts model directories to FP8 in the formats in which FP8 models are published."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from smc.model.linear import FP8, FP8_MAX, quantise

ACTIVATIONS = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}
WEIGHTS = {
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": ACTIVATIONS,
            "output_activations": None,
            "weights": WEIGHTS,
        },
    },
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
"""Configuration as AutoFP8 writes it."""
KINDS = ("channel", "tensor", "static", "blocks", "fp8 tensor", "compressed blocks")


OF_FP8 = {"blocks": BLOCKS, "fp8 tensor": PER_TENSOR}


def by_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers, and one scale for every block of 128 x 128; the last blocks may be smaller."""
    rows, columns = (-(-size // 128) for size in weight_OI.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: len(weight_OI), : weight_OI.shape[1]] = weight_OI
    scale = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / FP8_MAX
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight_OI), : weight_OI.shape[1]]
    return (weight_OI / whole).to(FP8), scale


def config_of(kind: str, **changes) -> dict:
    """Return a `quantization_config`; `changes` replace settings of the weights' group."""
    if kind in OF_FP8:
        return OF_FP8[kind]
    group = COMPRESSED_TENSORS["config_groups"]["group_0"]
    weights = group["weights"] | {"strategy": "channel" if kind == "channel" else "tensor"}
    if kind == "compressed blocks":
        weights |= {"strategy": "block", "block_structure": [128, 128]}
    inputs = {"input_activations": ACTIVATIONS | {"dynamic": False, "strategy": "tensor"}} if kind == "static" else {}
    return COMPRESSED_TENSORS | {"config_groups": {"group_0": group | inputs | {"weights": weights} | changes}}


def compress(directory: Path, kind: str, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Rewrite a directory of ours with all projections of its layers in FP8. Returns the values that its weights now
    stand for, by published names."""
    file = directory / "model.safetensors"
    stored, values = {}, {}
    for name, weight in load_file(file).items():
        stored[name] = values[name] = weight
        if "_proj.weight" not in name:
            continue
        if kind.endswith("blocks"):
            stored[name], scale = by_blocks(weight)
            scale = scale.to(scale_dtype)
            whole = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
            stored[f"{name}_scale_inv" if kind == "blocks" else f"{name}_scale"] = scale
        else:
            scale = (weight.abs().amax(1, keepdim=True) if kind == "channel" else weight.abs().max()[None]) / FP8_MAX
            # A scale below the exact one would put the largest weight beyond the largest FP8 number.
            scale = whole = (scale * (1 + 2**-7)).to(scale_dtype).float()
            stored[name] = (weight / scale).to(FP8)
            stored[f"{name}_scale"] = scale.to(scale_dtype)
        values[name] = stored[name].float() * whole
        if kind in ("static", "fp8 tensor"):
            stored[name.replace("weight", "input_scale")] = torch.ones(1)
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": config_of(kind)}))
    return values


def as_rows(values: Tensor) -> Tensor:
    """Return the values that a matrix has after rounding to FP8 with one scale per row."""
    weight8_OI, scale_O = quantise(values)
    return weight8_OI.float() * scale_O[:, None]
