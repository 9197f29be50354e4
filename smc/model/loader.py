"""Loads a `Decoder` from a Hugging Face directory, saves it to one, or makes one with random weights, to train it or to
measure speed without a checkpoint. Knows nothing about tokenizers or serving.

Loading streams one piece of a tensor at a time, so the model is never in memory twice. A rank reads only its own shard
of each tensor, except that FP8 and int4 weights are quantised from whole rows, so that scales do not depend on the
number of ranks. On a GPU heads may be padded (`ModelConfig.on_device`).

Local axes: P groups of inputs with a common scale."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from smc.model.config import ModelConfig, read_quantisation
from smc.model.decoder import Decoder, empty_decoder
from smc.model.files import SINGLE_FILE, STORED_FP8, TensorReader, write_json
from smc.model.linear import FP8, INT4, Linear, pieces, quantise, quantise_int4
from smc.model.parallel import WHOLE, Axis, Reduce, Shard, local_config
from smc.model.quantisation import GROUP, Codes, Fp8Quantisation, Int4Quantisation, Quantisation
from smc.model.weight_map import WeightSlice, check_weights, int4_formats, weight_slices

logger = logging.getLogger(__name__)
EMBEDDING, HEAD = "embed.weight", "lm_head.weight"
SCALE = 0.02
"""Standard deviation of the weights, small enough that bfloat16 activations stay finite."""
CODES_DEVIATION = 4.6
"""Standard deviation of uniform int4 codes."""


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
    beside: Decoder | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Decoder:
    """Read a Hugging Face directory, or one rank's shard of it, into a frozen `Decoder` in eval mode. After each
    weight, `progress` is called with the share of all weights that has been read.

    `beside`: another model. If its embedding or head is equal to the directory's, bit by bit and on the same device,
    its matrices are used and not loaded again.

    With dtype int4, matrices that are stored in int4 are kept as they are; if the directory is not quantised to int4,
    the layers' matrices are rounded (`smc.model.linear`). With other dtypes, numbers are converted.

    Raises ValueError that names the file or the weight if a tensor is missing, unknown, corrupt, not finite or of the
    wrong shape. A value that is not finite is found only by the ranks that hold it."""
    if shard.degree > 1 and reduce is None:
        raise ValueError(f"degree={shard.degree} without reduce; a model split over ranks needs a sum over them")
    config = ModelConfig.from_hf(directory).on_device(device)
    slices = weight_slices(config, shard)
    stored = check_weights(directory, config)
    quantisation = read_quantisation(directory)
    int4 = int4_formats(slices, shard, stored, quantisation) if dtype == INT4 else None
    with TensorReader(stored, torch.device(device)) as files:
        published = PublishedWeights(files, quantisation)
        shared = _shared(published, slices, beside, dtype) if beside is not None else {}
        model = empty_decoder(local_config(config, shard), reduce, dtype, device, int4, shared)
        parameters = {name: weight for name, weight in model.named_parameters() if name not in shared}
        if shard.degree > 1 or config.unpadded_head_dim is not None:
            for weight in parameters.values():
                weight.zero_()  # parts that no slice covers are padding
        wanted = [name for name in slices if slices[name].parameter in parameters]
        size = sum(math.prod(slices[name].shape) for name in wanted)
        done = 0
        for name in sorted(wanted, key=lambda name: published.file(slices[name].stored_name(name))):
            _load(published, slices[name].stored_name(name), slices[name], parameters)
            done += math.prod(slices[name].shape)
            progress(done / size)
    if HEAD not in shared:
        model.copy_head()
    if config.rotated < config.head_dim:
        model.pair_rotated()
    return model


def _shared(
    published: PublishedWeights, slices: Mapping[str, WeightSlice], other: Decoder, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Return the parameters of `other` that are equal to the directory's, by name: the embedding, the head and, in FP8,
    the head's scale."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    plain = torch.bfloat16 if dtype in (FP8, INT4) else dtype
    stored = {where.parameter: name for name, where in slices.items() if where.parameter in (EMBEDDING, HEAD)}

    def equal(parameter: str, wanted: torch.dtype) -> bool:
        name, weight = stored[parameter], theirs[parameter]
        if weight.shape != slices[name].shape or weight.dtype != wanted or weight.device != published.files.device:
            return False
        return all(
            _is_part(published, name, rows, weight, theirs.get("lm_head.scale")) for rows in pieces(*weight.shape)
        )

    found = [EMBEDDING] if equal(EMBEDDING, plain) else []
    if HEAD in stored:
        found += [HEAD] if equal(HEAD, FP8 if dtype == FP8 else plain) else []
    elif found and dtype == FP8 and other.config.tied_embeddings and other.lm_head.is_fp8:
        found.append(HEAD)  # both are quantised from the same embedding
    if HEAD in found and dtype == FP8:
        found.append("lm_head.scale")
    if found:
        size = sum(theirs[name].nbytes for name in found)
        logger.info("%s of the other model is used, which saves %.0f MiB", " and ".join(found), size / (1 << 20))
    return {name: theirs[name] for name in found}


def _is_part(published: PublishedWeights, name: str, rows: slice, weight: Tensor, scale_O: Tensor | None) -> bool:
    """Whether the stored tensor and `weight` are equal in these rows."""
    if weight.dtype == FP8:
        weight_OI, row_scale_O = published.fp8_rows(name, rows, weight.shape[1])
        assert scale_O is not None
        # FP8 numbers are compared as bytes, for which torch has a kernel.
        return torch.equal(weight_OI.view(torch.uint8), weight[rows].view(torch.uint8)) and torch.equal(
            row_scale_O, scale_O[rows]
        )
    return torch.equal(published.values(name, (rows, slice(0, weight.shape[1]))).to(weight.dtype), weight[rows])


@dataclass(frozen=True)
class PublishedWeights:
    """Weights of a directory, converted from the dtypes they are stored in. Arguments `part`, `rows` and `columns` are
    slices of the whole tensor."""

    files: TensorReader
    quantisation: Quantisation | None

    def file(self, name: str) -> Path:
        """Return the file that holds a weight, or the codes of a weight stored in int4."""
        if name not in self.files.tensors:
            assert isinstance(self.quantisation, Int4Quantisation)
            name = self.quantisation.codes_name(name)
        return self.files.tensors[name].file

    def values(self, name: str, part: tuple[slice, ...]) -> Tensor:
        stored = self.files.tensors.get(name)
        if stored is not None and stored.dtype != STORED_FP8:
            return self.files.part(name, part)
        assert self.quantisation is not None
        rows, columns = part
        return self.quantisation.values(self.files, name, rows, columns)

    def fp8_rows(self, name: str, rows: slice, inputs: int) -> tuple[Tensor, Tensor]:
        """Return whole rows of `inputs` columns in FP8 [O, I] and their scales [O]. Rows stored in FP8 are kept, except
        that weights with a scale per block are quantised again with a scale per row."""
        part, quantisation = (rows, slice(0, inputs)), self.quantisation
        stored = self.files.tensors.get(name)
        is_fp8 = stored is not None and stored.dtype == STORED_FP8
        if is_fp8 and isinstance(quantisation, Fp8Quantisation) and not quantisation.blocks:
            return self.files.part(name, part), quantisation.rows_scale(self.files, name, rows)
        return quantise(self.values(name, part))

    def int4_rows(self, name: str, rows: slice, axis: Axis, group: int) -> Codes:
        """Return the columns in the one span of `axis` of some rows in int4, in groups of `group` inputs. Rows stored
        in int4 are kept. Others are rounded from their whole width, in groups of up to `GROUP`, or, if spans are
        padded, from the span and its padding."""
        columns, inputs = slice(axis.held.start, axis.held.stop), axis.size
        if isinstance(self.quantisation, Int4Quantisation) and self.quantisation.holds(name, self.files.tensors):
            return self.quantisation.codes(self.files, name, rows, columns, group)
        if axis.padded_span is not None:
            values_OI = self.values(name, (rows, columns))
            return quantise_int4(functional.pad(values_OI, (0, axis.padded_span - len(axis.held))), group)
        whole_group = math.gcd(GROUP, inputs)
        code_OI, scale_OP, zero_OP = quantise_int4(self.values(name, (rows, slice(0, inputs))), whole_group)
        group_P = torch.arange(columns.start, columns.stop, group, device=self.files.device) // whole_group
        return Codes(code_OI[:, columns], scale_OP[:, group_P], zero_OP[:, group_P])


def _load(published: PublishedWeights, name: str, where: WeightSlice, parameters: Mapping[str, Tensor]) -> None:
    """Read one slice of the tensor `name` in the files into the parameters."""
    dtype = parameters[where.parameter].dtype
    if dtype == FP8:
        for band in where.bands():
            _load_fp8(published, name, band, parameters)
        return
    for block in where.blocks():
        if dtype == torch.int32:
            _load_int4(published, name, block, parameters)
        else:
            _load_plain(published, name, block, parameters)


def _load_plain(published: PublishedWeights, name: str, where: WeightSlice, parameters: Mapping[str, Tensor]) -> None:
    view, (_, *columns) = where.view(parameters), where.part
    for piece in pieces(*view.shape):
        view[piece].copy_(published.values(name, (_stored_rows(where, piece), *columns)))
        _require_finite(name, view[piece], view.dtype)


def _load_fp8(published: PublishedWeights, name: str, where: WeightSlice, parameters: Mapping[str, Tensor]) -> None:
    rows, columns = where.axes
    for piece in pieces(len(rows.held), columns.size):
        weight_OI, scale_O = published.fp8_rows(name, _stored_rows(where, piece), columns.size)
        _require_finite(name, weight_OI.float(), FP8)
        _require_finite(name, scale_O, FP8)
        where.write_fp8(parameters, piece, weight_OI, scale_O)


def _load_int4(published: PublishedWeights, name: str, where: WeightSlice, parameters: Mapping[str, Tensor]) -> None:
    rows, columns = where.axes
    scale_PO = parameters[f"{where.parameter.removesuffix('weight')}scale"]
    group = columns.local_size // len(scale_PO)
    for piece in pieces(len(rows.held), columns.size):
        codes = published.int4_rows(name, _stored_rows(where, piece), columns, group)
        _require_finite(name, codes.scale_OP.to(scale_PO.dtype), scale_PO.dtype)
        where.write_int4(parameters, piece, codes)


def _stored_rows(where: WeightSlice, piece: slice) -> slice:
    """Return the rows of the stored tensor for a piece of the slice's rows."""
    first = where.first + where.axes[0].held.start
    return slice(first + piece.start, first + piece.stop)


def save_model(model: Decoder, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` with the published tensor names, in `dtype` (default: the model's).
    Raises ValueError for a family that is not in `SAVED_FAMILIES`, a shard or quantised weights."""
    dtype = dtype or model.embed.weight.dtype
    save_with_config(model, directory, model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}, dtype)


def save_with_config(model: Decoder, directory: str | Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Like `save_model` for any family. `config` is the contents of config.json, which must describe the model."""
    if model.reduce is not None:
        raise ValueError("this decoder is one rank's shard (it has a reduce); only a whole model can be saved")
    quantised = {torch.int32: "int4", FP8: "FP8"}
    for weight in model.parameters():
        if weight.dtype in quantised:
            raise ValueError(
                f"this decoder's weights are {quantised[weight.dtype]}, which are not saved; load it as bfloat16"
            )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    parameters = _in_order_of_files(model)
    parts: defaultdict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for name, where in weight_slices(model.config).items():
        parts[where.stored_name(name)].append((where.first, _published(where, parameters, dtype)))
    tensors = {
        name: torch.cat([part for _, part in sorted(found, key=itemgetter(0))]) if len(found) > 1 else found[0][1]
        for name, found in parts.items()
    }
    temporary = directory / f"{SINGLE_FILE}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{directory / SINGLE_FILE} cannot be written: {error}") from error
    temporary.replace(directory / SINGLE_FILE)
    write_json(directory / "config.json", config)


def _in_order_of_files(model: Decoder) -> dict[str, Tensor]:
    """Return the parameters of a model before `pair_rotated`, by name."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if model.config.rotated < model.config.head_dim:
        order_O = model.paired_order().argsort()
        for name in [name for name in parameters if ".qkv." in name]:
            parameters[name] = parameters[name].detach().cpu()[order_O]
    return parameters


def _published(where: WeightSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a copy of a published tensor: slices of a fused matrix share storage, which safetensors rejects."""
    made = torch.empty(where.shape, dtype=dtype)
    for block in where.blocks():
        made[block.part] = block.view(parameters).to("cpu", dtype)
    return made


def _require_finite(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if a converted number is not finite, which includes an overflow of a narrower dtype."""
    low, high = values.aminmax()  # propagates NaN; unlike isfinite, it allocates nothing
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} holds NaN or inf as {str(dtype).removeprefix('torch.')}; every weight must be finite")


def initial_model(config: ModelConfig, seed: int) -> Decoder:
    """Create a decoder in float32 on the CPU with random weights from which a training begins. Matrices that write to
    the residual are scaled down by the depth of the model."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            depth = math.sqrt(2 * config.num_layers) if name.endswith(("o.weight", "down.weight")) else 1
            nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]) / depth)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """Create a decoder, or one rank's shard of it, on `device`, with normally distributed weights and norm weights of
    1. FP8 weights are the bfloat16 weights of the same seed, quantised; int4 weights are random codes."""
    config = config.on_device(device)
    int4 = int4_formats(weight_slices(config, shard), shard) if dtype == INT4 else None
    model = empty_decoder(local_config(config, shard), reduce, dtype, device, int4)
    generator = torch.Generator(device).manual_seed(seed * 1000 + shard.rank)
    for name, weight in model.named_parameters():
        if name.endswith("scale"):
            if weight.dim() == 2:
                weight.fill_(SCALE / CODES_DEVIATION)
            continue
        if weight.dtype == torch.int32:
            weight.random_(-(1 << 31), 1 << 31, generator=generator)
            continue
        if weight.dtype == FP8:
            whole = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
            linear = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, Linear)
            linear.quantise_from(whole.normal_(0.0, SCALE, generator=generator))
        elif weight.dim() == 1 and name.endswith("weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, SCALE, generator=generator)
    model.copy_head()
    return model
