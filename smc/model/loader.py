"""Loads a `Decoder` from a Hugging Face directory and saves it to one. Knows nothing about tokenizers or serving.

Loading streams one piece of a tensor at a time, so the model is never in memory twice. A rank reads only its own shard
of each tensor, except that FP8 weights are quantised from whole rows, so that scales do not depend on the number of
ranks."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from smc.model.config import ModelConfig, read_quantisation_config
from smc.model.decoder import Decoder, empty_decoder
from smc.model.linear import FP8, pieces, quantise
from smc.model.parallel import WHOLE, Reduce, Shard, local_config
from smc.model.quantisation import QuantisationConfig
from smc.model.safetensors_files import SINGLE_FILE, STORED_FP8, TensorReader
from smc.model.weight_map import WeightSlice, check_weights, weight_slices


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """Read a Hugging Face directory, or one rank's shard of it, into a frozen `Decoder` in eval mode.

    Raises ValueError that names the file or the weight if a tensor is missing, unknown, corrupt, not finite or of the
    wrong shape. A value that is not finite is found only by the ranks that hold it."""
    if shard.degree > 1 and reduce is None:
        raise ValueError(f"degree={shard.degree} without reduce; a model split over ranks needs a sum over them")
    config = ModelConfig.from_hf(directory)
    slices = weight_slices(config, shard)
    stored = check_weights(directory, config)
    model = empty_decoder(local_config(config, shard), reduce, dtype, device)
    parameters = dict(model.named_parameters())
    if shard.degree > 1:
        for weight in parameters.values():
            weight.zero_()  # parts that no slice covers are padding
    with TensorReader(stored) as files:
        published = PublishedWeights(files, read_quantisation_config(directory), torch.device(device))
        for name in sorted(slices, key=lambda name: stored[slices[name].stored_name(name)].file):
            _load(published, slices[name].stored_name(name), slices[name], parameters)
    model.copy_head()
    return model


@dataclass(frozen=True)
class PublishedWeights:
    """Weights of a directory, converted from the types they are stored in. `part` and `rows` are slices of the whole
    tensor."""

    files: TensorReader
    quantisation: QuantisationConfig | None
    device: torch.device

    def values(self, name: str, part: tuple[slice, ...]) -> Tensor:
        stored = self.files.part(name, part).to(self.device)
        if stored.dtype != FP8:
            return stored
        assert self.quantisation is not None
        return self.quantisation.values(stored, self._scale(name), *part)

    def fp8_rows(self, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        """Whole rows in FP8 [N, K] and their scales [N]. Rows stored in FP8 are kept, except that weights with a scale
        per block are quantised again with a scale per row."""
        tensor = self.files.tensors[name]
        part = (rows, slice(0, tensor.shape[1]))
        if tensor.dtype == STORED_FP8 and self.quantisation is not None and not self.quantisation.blocks:
            return self.files.part(name, part).to(self.device), self.quantisation.scale_of_rows(self._scale(name), rows)
        return quantise(self.values(name, part))

    def _scale(self, name: str) -> Tensor:
        assert self.quantisation is not None
        scale = self.quantisation.scale_name(name)
        return self.files.part(scale, tuple(slice(0, size) for size in self.files.tensors[scale].shape)).to(self.device)


def _load(published: PublishedWeights, name: str, where: WeightSlice, parameters: Mapping[str, Tensor]) -> None:
    """`name`: of the tensor in the files."""
    view, (held, *columns) = where.view(parameters), where.part
    for piece in pieces(*view.shape):
        rows = slice(where.first + held.start + piece.start, where.first + held.start + piece.stop)
        if view.dtype == FP8:
            weight_NK, scale_N = published.fp8_rows(name, rows)
            _require_finite(name, weight_NK.float(), FP8)
            _require_finite(name, scale_N, FP8)
            where.write_fp8(parameters, piece, weight_NK, scale_N)
        else:
            view[piece].copy_(published.values(name, (rows, *columns)))
            _require_finite(name, view[piece], view.dtype)


def save_model(model: Decoder, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` with the published tensor names, in `dtype` (default: the model's).
    Raises ValueError for a family that is not saved."""
    dtype = dtype or model.embed.weight.dtype
    save_with_config(model, directory, model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}, dtype)


def save_with_config(model: Decoder, directory: str | Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Like `save_model`, with these contents of config.json, which must describe the model."""
    if model.reduce is not None:
        raise ValueError("this decoder is one rank's shard (it has a reduce); only a whole model can be saved")
    if model.lm_head.scale is not None:
        raise ValueError("this decoder's weights are FP8, which are not saved; load it as bfloat16")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.named_parameters())
    # Slices of a fused matrix share storage, which safetensors rejects, so they are copied.
    parts: defaultdict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for name, where in weight_slices(model.config).items():
        parts[where.stored_name(name)].append((where.first, where.view(parameters).to("cpu", dtype, copy=True)))
    tensors = {
        name: torch.cat([part for _, part in sorted(found, key=itemgetter(0))]) if len(found) > 1 else found[0][1]
        for name, found in parts.items()
    }
    temporary = directory / f"{SINGLE_FILE}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(directory / SINGLE_FILE)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _require_finite(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Check the converted numbers, which also finds overflow to a narrower type. Raises ValueError."""
    if not values.numel():  # this rank holds only padding of the tensor
        return
    low, high = values.aminmax()  # propagates NaN; unlike isfinite, it allocates nothing
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} holds NaN or inf as {str(dtype).removeprefix('torch.')}; every weight must be finite")
