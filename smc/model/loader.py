"""Weights between a Hugging Face directory and a `Decoder`, in both directions. Knows nothing about tokenizers or
serving.

Loading streams a piece of a tensor at a time, so memory never holds the model twice; a rank of several reads its own
part of each. Of what it is to hold in FP8 it reads whole rows, so that scales do not depend on how many ranks there
are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from smc.model.config import ModelConfig, compression_of
from smc.model.decoder import Decoder, empty_decoder
from smc.model.linear import FP8, pieces, quantise
from smc.model.parallel import WHOLE, Reduce, Shard, local_config
from smc.model.quantisation import Compression
from smc.model.safetensors_files import SINGLE_FILE, STORED_FP8, Files
from smc.model.weight_map import Place, check_weights, weight_places


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """Read a Hugging Face directory, or one rank's shard of it, into a frozen `Decoder` in eval mode.

    Raises ValueError for anything missing, unknown, misshapen, corrupt or not finite, naming the file or the weight. A
    value that is not finite stops only the ranks that hold it."""
    if shard.degree > 1 and reduce is None:
        raise ValueError(f"degree={shard.degree} without reduce; ranks that hold a model together need a sum over them")
    config = ModelConfig.from_hf(directory)
    places = weight_places(config, shard)
    stored = check_weights(directory, config)
    model = empty_decoder(local_config(config, shard), reduce, dtype, device)
    parameters = dict(model.named_parameters())
    if shard.degree > 1:
        for weight in parameters.values():
            weight.zero_()  # what no place covers is padding
    with Files(stored) as files:
        published = Published(files, compression_of(directory), torch.device(device))
        for name in sorted(places, key=lambda name: stored[name].file):
            _load(published, name, places[name], parameters)
    model.copy_head()
    return model


@dataclass(frozen=True)
class Published:
    """Weights of a directory as numbers, whatever they are stored as. Parts are slices of the whole tensor."""

    files: Files
    compression: Compression | None
    device: torch.device

    def values(self, name: str, part: tuple[slice, ...]) -> Tensor:
        stored = self.files.part(name, part).to(self.device)
        if stored.dtype != FP8:
            return stored
        assert self.compression is not None
        return self.compression.values(stored, self._scale(name), *part)

    def rows(self, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        """Whole rows in FP8, [N, K], and their scales [N]. Those stored so stay as they are; blocks are rounded
        anew."""
        tensor = self.files.tensors[name]
        part = (rows, slice(0, tensor.shape[1]))
        if tensor.dtype == STORED_FP8 and self.compression is not None and not self.compression.blocks:
            return self.files.part(name, part).to(self.device), self.compression.scale_of_rows(self._scale(name), rows)
        return quantise(self.values(name, part))

    def _scale(self, name: str) -> Tensor:
        assert self.compression is not None
        scale = self.compression.scale_name(name)
        return self.files.part(scale, tuple(slice(0, size) for size in self.files.tensors[scale].shape)).to(self.device)


def _load(published: Published, name: str, place: Place, parameters: Mapping[str, Tensor]) -> None:
    view, (held, *columns) = place.view(parameters), place.part
    for piece in pieces(*view.shape):
        rows = slice(held.start + piece.start, held.start + piece.stop)
        if view.dtype == FP8:
            weight_NK, scale_N = published.rows(name, rows)
            _require_finite(name, weight_NK.float(), FP8)
            _require_finite(name, scale_N, FP8)
            place.put(parameters, piece, weight_NK, scale_N)
        else:
            view[piece].copy_(published.values(name, (rows, *columns)))
            _require_finite(name, view[piece], view.dtype)


def save_model(model: Decoder, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` with the published names, stored in `dtype` (default: as they
    are)."""
    if model.reduce is not None:
        raise ValueError("this decoder is one rank's shard (it has a reduce); only a whole model can be saved")
    if model.lm_head.scale is not None:
        raise ValueError("this decoder's weights are FP8, which are not saved; load it as bfloat16")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.embed.weight.dtype
    parameters = dict(model.named_parameters())
    # Copies, because safetensors refuses tensors that share storage, as slices of a fused matrix do.
    tensors = {
        name: place.view(parameters).to("cpu", dtype, copy=True) for name, place in weight_places(model.config).items()
    }
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    config = model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _require_finite(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Looks at converted numbers, so that overflow to a narrower type is found too."""
    if not values.numel():  # all that this rank holds of it is padding
        return
    low, high = values.aminmax()  # propagates NaN, and unlike isfinite allocates nothing
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} holds NaN or inf as {str(dtype).removeprefix('torch.')}; every weight must be finite")
