"""Converts model directories to int4 in the layouts in which int4 models are published. Handles one code at a time,
unlike the library, which works on whole words."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from smc.model.decoder import Decoder
from smc.model.linear import INT4, Linear
from smc.model.loader import load_model

LAYOUTS = ("awq", "gptq", "gptq_v2", "pack-quantized")
AWQ_OUTPUT_OF_POSITION = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order: position i of a word, counted from the lowest bits, holds this one of eight outputs."""


def is_matrix(name: str) -> bool:
    """Return whether a published weight is a matrix of a layer, other than a router."""
    return "layers." in name and name.endswith(".weight") and not any(part in name for part in ("norm", ".gate.weight"))


def pack_rows(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack codes [A, B] of 0 to 15 into int32 words [A, B/8]."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for position, column in enumerate(order):
        words |= codes[:, column::8].long() << (4 * position)
    return words.to(torch.int32)  # keeps the low 32 bits


def rounded(weight_OI: Tensor, group_I: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round weights whose inputs belong to groups. Returns codes [O, I], and scales and zero points [O, P]."""
    groups = int(group_I.max()) + 1
    parts = [weight_OI[:, group_I == group] for group in range(groups)]
    low, high = (torch.stack(each, 1) for each in zip(*(part.aminmax(dim=1) for part in parts)))
    if symmetric:
        scale, zero = torch.maximum(-low, high) / 7, torch.full_like(low, 8)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(0, 15)
    scale = scale.half().float()
    codes = (weight_OI / scale[:, group_I] + zero[:, group_I]).round().clamp(0, 15)
    return codes.int(), scale, zero.int()


def stored_as(layout: str, codes: Tensor, scale: Tensor, zero: Tensor, symmetric: bool) -> dict[str, Tensor]:
    """Return the tensors that store one matrix, by the last part of their names."""
    if layout == "awq":
        found = {"qweight": pack_rows(codes.t(), AWQ_OUTPUT_OF_POSITION), "scales": scale.t()}
        return found if symmetric else found | {"qzeros": pack_rows(zero.t(), AWQ_OUTPUT_OF_POSITION)}
    if layout.startswith("gptq"):
        stored_zero = (zero - 1) & 15 if layout == "gptq" else zero
        return {"qweight": pack_rows(codes).t(), "scales": scale.t(), "qzeros": pack_rows(stored_zero.t())}
    found = {"weight_packed": pack_rows(codes), "weight_scale": scale, "weight_shape": torch.tensor(codes.shape)}
    return found if symmetric else found | {"weight_zero_point": pack_rows(zero.t()).t()}


def config_of(layout: str, group: int, symmetric: bool, act_order: bool = False) -> dict:
    if layout == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "version": "gemm",
            "zero_point": not symmetric,
            "modules_to_not_convert": None,
        }
    if layout.startswith("gptq"):
        named = {"checkpoint_format": layout} if layout == "gptq_v2" else {}
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "sym": symmetric,
            "desc_act": act_order,
            "true_sequential": True,
            **named,
        }
    weights = {
        "type": "int",
        "num_bits": 4,
        "strategy": "group" if group > 0 else "channel",
        "group_size": group if group > 0 else None,
        "symmetric": symmetric,
        "actorder": "group" if act_order else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}},
    }


def to_int4(
    directory: Path,
    layout: str,
    group: int = 128,
    symmetric: bool = True,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:
    """Rewrite a directory with those matrices of its layers in int4 whose inputs are a multiple of `group`; -1 makes
    one group of all inputs. Returns the values that its weights now stand for, by published names."""
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(5)
    stored, values = {}, {}
    for name, weight in load_file(file).items():
        values[name] = weight
        inputs = weight.shape[-1]
        if not is_matrix(name) or (group > 0 and inputs % group):
            stored[name] = weight
            continue
        group_I = torch.arange(inputs) // (group if group > 0 else inputs)
        if act_order:
            group_I = group_I[torch.randperm(inputs, generator=generator)]
        codes, scale, zero = rounded(weight.float(), group_I, symmetric)
        base = name.removesuffix("weight")
        for part, tensor in stored_as(layout, codes, scale, zero, symmetric).items():
            stored[base + part] = (tensor.to(scale_dtype) if tensor.is_floating_point() else tensor).contiguous()
        if layout.startswith("gptq"):
            stored[f"{base}g_idx"] = group_I.int()
        elif act_order:
            stored[f"{base}weight_g_idx"] = group_I.int()
        values[name] = (codes - zero[:, group_I]) * scale.to(scale_dtype).float()[:, group_I]
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    quantisation = {"quantization_config": config_of(layout, group, symmetric, act_order)}
    (directory / "config.json").write_text(json.dumps(config | quantisation))
    return values


def exact_int4(directory: Path) -> Decoder:
    """Return a directory's model with the matrices of its layers in int4, and activations and all else in float32, so
    that the rest of a batch has no visible effect on a row's result."""
    model, packed = load_model(directory), load_model(directory, dtype=INT4)
    for name, matrix in packed.named_modules():
        if isinstance(matrix, Linear) and matrix.group:
            if matrix.bias is not None:
                matrix.bias = nn.Parameter(model.get_submodule(name).bias, requires_grad=False)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, matrix)
    return model
