"""Storage formats of quantised checkpoints: the `quantization_config` of config.json, the tensors that a matrix is
stored as, and the conversion to numbers. Knows nothing about our models.

FP8: a matrix W is stored as e4m3 numbers with scales, W = scale * number. Activations are quantised at run time
with one scale per row (`smc.model.linear`), so a checkpoint's settings for activation scales have no effect; static
ones are ignored with a warning.

int4: W[n, k] = scale[n, g] (code[n, k] - zero[n, g]), with codes from 0 to 15 and g the group of input k. Eight codes
are packed into an int32, the first in the lowest bits:

| | codes | zero points | scales |
| :-- | :-- | :-- | :-- |
| AWQ (gemm) | `qweight` [I, O/8], outputs packed as 0 2 4 6 1 3 5 7 | `qzeros` [P, O/8], likewise | `scales` [P, O] |
| GPTQ | `qweight` [I/8, O], inputs packed | `qzeros` [P, O/8], less 1 unless v2 | `scales` [P, O] |
| compressed-tensors | `weight_packed` [O, I/8], inputs packed | `weight_zero_point` [O/8, P] | `weight_scale` [O, P] |

With GPTQ's act-order, `g_idx` [I] (`weight_g_idx`) gives the group of each input; otherwise groups are consecutive.

Local axes: P groups of inputs with a common scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from smc.model.files import STORED_BYTES, STORED_DTYPES, STORED_FP8, StoredTensor, TensorReader

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
"""Number of rows and of columns of an FP8 block with one scale."""
SUPPORTED_METHODS = (
    "compressed-tensors with FP8 weights (symmetric, a scale per channel, per tensor or per block of 128 x 128) or "
    "with int4 weights (pack-quantized); fp8 with a scale per tensor or per block of 128 x 128; awq (version gemm) and "
    "gptq with 4 bits"
)
WHAT_TO_DO = "take another checkpoint of the model, or its unquantised one"
PER_WORD = 8
"""Number of codes in an int32."""
SYMMETRIC_ZERO = 8
"""Zero point of matrices that store none."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index, among eight outputs, of the output that each code of a word belongs to, from the lowest bits up."""
GROUP, LEAST_GROUP = 128, 32
"""Number of inputs of a group. `GROUP` is used for weights that are rounded at loading. It is also the maximum in
memory: larger groups are held as several groups with the same scale. `LEAST_GROUP` is the minimum."""


class Expected(NamedTuple):
    """Requirements on a stored tensor."""

    shapes: tuple[tuple[int, ...], ...]
    """Allowed shapes."""
    dtypes: tuple[str, ...] = tuple(STORED_DTYPES)
    """Allowed storage types."""


class Int4Format(NamedTuple):
    """Format of an int4 matrix in memory (`smc.model.linear`)."""

    group: int
    """Number of inputs of a group."""
    zeros: bool
    """Whether groups have zero points of their own. Otherwise all are `SYMMETRIC_ZERO`."""
    scale_dtype: str
    """Storage type of the scales."""

    def bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix in this format, scales and zero points included."""
        return outputs * inputs // 2 + outputs * (inputs // self.group) * (
            STORED_BYTES[self.scale_dtype] + STORED_BYTES["I32"] * self.zeros
        )


class Codes(NamedTuple):
    """Part of an int4 matrix, with groups of consecutive inputs."""

    code_OI: Tensor
    """Codes of 0 to 15, int32."""
    scale_OP: Tensor
    """Scales of the groups, float32."""
    zero_OP: Tensor
    """Zero points of 0 to 15, int32."""


@dataclass(frozen=True)
class Fp8Quantisation:
    """Storage format of FP8 weights."""

    title: str
    suffix: str
    """Suffix of the scale's tensor name, which replaces `weight`."""
    blocks: bool
    """Whether every block of `BLOCK` x `BLOCK` numbers has a scale. Otherwise there is one for each row or for the
    whole tensor."""
    static_inputs: bool
    """Whether the checkpoint has static activation scales, which are not used."""

    def ignores(self, name: str) -> bool:
        """Whether the tensor is a static activation scale."""
        return self.static_inputs and name.endswith(".input_scale")

    def stored_as(
        self, name: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]
    ) -> dict[str, Expected] | None:
        """Return the tensors that hold the matrix `name` [O, I], with their requirements; None if it is not
        quantised."""
        if name not in stored or stored[name].dtype != STORED_FP8:
            return None
        return {
            name: Expected((shape,), (*STORED_DTYPES, STORED_FP8)),
            self._scale_name(name): Expected(self._scale_shapes(*shape)),
        }

    def rows_scale(self, files: TensorReader, name: str, rows: slice) -> Tensor:
        """Return the scales [O] of the rows, float32. Not for formats with blocks."""
        assert not self.blocks
        scale = files.part(self._scale_name(name)).float().flatten()
        return scale[rows] if len(scale) > 1 else scale.expand(rows.stop - rows.start)

    def values(self, files: TensorReader, name: str, rows: slice, columns: slice) -> Tensor:
        """Dequantised float32 weights [O, I] of a part of a quantised matrix."""
        import torch

        weight_OI = files.part(name, (rows, columns)).float()
        if not self.blocks:
            return weight_OI * self.rows_scale(files, name, rows)[:, None]
        scale = files.part(self._scale_name(name)).float()
        block_O, block_I = (
            torch.arange(part.start, part.stop, device=scale.device) // BLOCK for part in (rows, columns)
        )
        return weight_OI * scale[block_O[:, None], block_I]

    def _scale_name(self, weight: str) -> str:
        return weight.removesuffix("weight") + self.suffix

    def _scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        if self.blocks:
            return ((-(-outputs // BLOCK), -(-inputs // BLOCK)),)
        return ((outputs, 1), (outputs,), (1,), ())


@dataclass(frozen=True)
class Packing:
    """Names and layout of the tensors that an int4 matrix is stored as."""

    codes: str
    zeros: str
    scales: str
    index: str
    inputs_first: bool
    """Whether codes have the axes [I, O] instead of [O, I], and scales and zero points [P, O] instead of [O, P]."""
    packs_inputs: bool
    """Whether eight inputs share a word of codes, instead of eight outputs. Words of zero points always hold eight
    outputs."""
    order: tuple[int, ...] = tuple(range(PER_WORD))
    shape: str = ""
    """Name of the tensor with the shape of the matrix, which is not read."""


AWQ = Packing("qweight", "qzeros", "scales", "", inputs_first=True, packs_inputs=False, order=AWQ_ORDER)
GPTQ = Packing("qweight", "qzeros", "scales", "g_idx", inputs_first=True, packs_inputs=True)
PACK_QUANTIZED = Packing(
    "weight_packed",
    "weight_zero_point",
    "weight_scale",
    "weight_g_idx",
    inputs_first=False,
    packs_inputs=True,
    shape="weight_shape",
)


@dataclass(frozen=True)
class Int4Quantisation:
    """Storage format of int4 weights."""

    method: str
    packing: Packing
    group: int | None
    """Number of inputs of a group; None: all inputs."""
    symmetric: bool
    """Whether all zero points are `SYMMETRIC_ZERO`."""
    stores_zeros: bool
    """Whether zero points must be stored. Otherwise they may be stored."""
    act_order: bool = False
    """Whether the groups are of arbitrary inputs, which the tensor `Packing.index` lists. Otherwise they are of
    consecutive ones."""
    zero_shift: int = 0
    """Number that is added to stored zero points."""

    static_inputs = False

    @property
    def title(self) -> str:
        groups = f"groups of {self.group}" if self.group else "one group a row"
        order = ", act-order" if self.act_order else ""
        return f"{self.method}, {groups}{'' if self.symmetric else ', zero points'}{order}"

    def ignores(self, name: str) -> bool:
        return False

    def stored_as(
        self, name: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]
    ) -> dict[str, Expected] | None:
        """Return the tensors that hold the matrix `name` [O, I], with their requirements; None if it is not quantised.
        Raises ValueError if groups or words do not divide the number of inputs."""
        packing = self.packing
        parts = (packing.codes, packing.zeros, packing.scales, packing.index)
        codes, zeros, scales, index = (self._name(name, part) for part in parts)
        if codes not in stored:
            return None
        outputs, inputs = shape
        groups = self._groups(name, inputs)
        words = -(-outputs // PER_WORD)
        packed = (outputs, inputs // PER_WORD) if self.packing.packs_inputs else (words, inputs)
        expected = {
            codes: Expected((self._ordered(packed),), ("I32",)),
            scales: Expected((self._ordered((outputs, groups)),)),
        }
        if self.stores_zeros or zeros in stored:
            expected[zeros] = Expected((self._ordered((words, groups)),), ("I32",))
        if self.packing.index and (self.act_order or index in stored):
            expected[index] = Expected(((inputs,),), ("I32", "I64"))
        if self.packing.shape and (shape_name := self._name(name, self.packing.shape)) in stored:
            expected[shape_name] = Expected(((2,),), ("I32", "I64"))
        return expected

    def codes_name(self, name: str) -> str:
        return self._name(name, self.packing.codes)

    def holds(self, name: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Whether the matrix is stored in this format."""
        return self.codes_name(name) in stored

    def values(self, files: TensorReader, name: str, rows: slice, columns: slice) -> Tensor:
        """Dequantised float32 weights [O, I] of a part of a quantised matrix."""
        code_OI = self._codes(files, name, rows, columns)
        scale_OP, zero_OP = self._scales(files, name, rows), self._zeros(files, name, rows)
        group_I = self._group_of_inputs(files, name, scale_OP.shape[1], columns)
        return (code_OI - zero_OP[:, group_I]).float() * scale_OP[:, group_I]

    def codes(self, files: TensorReader, name: str, rows: slice, columns: slice, group: int) -> Codes:
        """Return part of the matrix as it is stored, in groups of `group` inputs. `group` must divide the checkpoint's
        groups and the bounds of `columns`. Raises ValueError if the groups' inputs are not consecutive, or for zero
        points that contradict config.json."""
        import torch

        scale_OP, zero_OP = self._scales(files, name, rows), self._zeros(files, name, rows)
        if self.symmetric and bool((zero_OP != SYMMETRIC_ZERO).any()):
            raise ValueError(
                f"{name} has zero points other than {SYMMETRIC_ZERO}, and config.json calls it symmetric (sym=true); "
                "the directory is broken, download it again"
            )
        inputs = self._inputs(files, name)
        of_I = self._group_of_inputs(files, name, scale_OP.shape[1], slice(0, inputs))
        if not torch.equal(of_I, torch.arange(inputs, device=of_I.device) // (inputs // scale_OP.shape[1])):
            raise ValueError(
                f"{name}: its groups are not of consecutive inputs (GPTQ's act-order), which the kernels of dtype=int4 "
                "do not support; take dtype=bfloat16, or a checkpoint with desc_act=false"
            )
        group_P = of_I[columns.start : columns.stop : group]
        return Codes(self._codes(files, name, rows, columns), scale_OP[:, group_P], zero_OP[:, group_P])

    def scale_dtype(self, name: str, stored: Mapping[str, StoredTensor]) -> str:
        """Storage type of the scales of a quantised matrix."""
        return stored[self._name(name, self.packing.scales)].dtype

    def group_size(self, inputs: int) -> int:
        return self.group or inputs

    @staticmethod
    def _name(weight: str, part: str) -> str:
        return weight.removesuffix("weight") + part

    def _ordered(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Convert a shape with outputs first to the stored order of axes."""
        return shape[::-1] if self.packing.inputs_first else shape

    def _groups(self, name: str, inputs: int) -> int:
        group = self.group_size(inputs)
        if inputs % group or inputs % PER_WORD:
            raise ValueError(
                f"{name}: {inputs} inputs are not whole groups of {group} and whole words of {PER_WORD}; {WHAT_TO_DO}"
            )
        return inputs // group

    def _inputs(self, files: TensorReader, name: str) -> int:
        shape = files.tensors[self._name(name, self.packing.codes)].shape
        axis = 0 if self.packing.inputs_first else 1
        return shape[axis] * (PER_WORD if self.packing.packs_inputs else 1)

    def _codes(self, files: TensorReader, name: str, rows: slice, columns: slice) -> Tensor:
        packed, other = (columns, rows) if self.packing.packs_inputs else (rows, columns)
        return self._unpacked(files, self.packing.codes, name, packed, other, self.packing.packs_inputs)

    def _zeros(self, files: TensorReader, name: str, rows: slice) -> Tensor:
        """Zero points [O, P]."""
        if self._name(name, self.packing.zeros) not in files.tensors:
            return self._scales(files, name, rows).int().fill_(SYMMETRIC_ZERO)
        found = self._unpacked(files, self.packing.zeros, name, rows, slice(None), False)
        # With a shift of 1, a zero point of 0 is stored as the low four bits of -1.
        return (found + self.zero_shift) & 15

    def _unpacked(
        self, files: TensorReader, part: str, name: str, packed: slice, other: slice, by_inputs: bool
    ) -> Tensor:
        """Read part of a packed tensor as numbers [O, I] or [O, P]. `packed` and `other`: indices along the packed axis
        and along the other one. `by_inputs`: whether the second axis is the packed one."""
        import torch

        first, end = packed.start // PER_WORD, -(-packed.stop // PER_WORD)
        words, axis = slice(first, end), int(by_inputs)
        where = (other, words) if by_inputs else (words, other)
        packed_OI = files.part(self._name(name, part), where[::-1] if self.packing.inputs_first else where)
        packed_OI = packed_OI.t() if self.packing.inputs_first else packed_OI
        positions = sorted(range(PER_WORD), key=self.packing.order.__getitem__)
        shift_8 = 4 * torch.tensor(positions, dtype=torch.int32, device=packed_OI.device)
        shifts = shift_8 if by_inputs else shift_8[:, None]
        codes = ((packed_OI.unsqueeze(axis + 1) >> shifts) & 15).flatten(axis, axis + 1)
        begin = packed.start - first * PER_WORD
        return codes.narrow(axis, begin, packed.stop - packed.start)

    def _scales(self, files: TensorReader, name: str, rows: slice) -> Tensor:
        """Scales [O, P], float32."""
        where = (slice(None), rows) if self.packing.inputs_first else (rows, slice(None))
        scale = files.part(self._name(name, self.packing.scales), where).float()
        return scale.t() if self.packing.inputs_first else scale

    def _group_of_inputs(self, files: TensorReader, name: str, groups: int, columns: slice) -> Tensor:
        """Return the group [I] of every input in `columns`."""
        import torch

        index = self._name(name, self.packing.index)
        if not self.packing.index or index not in files.tensors:
            of_group = self._inputs(files, name) // groups
            return torch.arange(columns.start, columns.stop, device=files.device) // of_group
        group_I = files.part(index, (columns,)).long()
        if len(group_I) and not 0 <= int(group_I.min()) <= int(group_I.max()) < groups:
            raise ValueError(
                f"{index} names groups {int(group_I.min())} to {int(group_I.max())}; the matrix has {groups}: the file "
                "is broken, download it again"
            )
        return group_I


def local_group(group: int, inputs: int, step: int) -> int | None:
    """Return the number of inputs of a group in memory if ranks cut the inputs at multiples of `step`: the largest up
    to `GROUP` that divides both the checkpoint's groups and the cuts. None if it is below `LEAST_GROUP`, the smallest
    that kernels support."""
    held = math.gcd(GROUP, group, inputs, step)
    return held if held >= LEAST_GROUP else None


Quantisation = Fp8Quantisation | Int4Quantisation


def quantisation_of(raw: dict[str, Any] | None) -> Quantisation | None:
    """Parse a `quantization_config`. Raises ValueError that names the unsupported setting and what is supported."""
    if not raw:
        return None
    method = raw.get("quant_method")
    if method not in _METHODS:
        raise _unsupported(f"quantization_config: quant_method={method!r} is")
    return _METHODS[method](raw)


def _fp8(raw: dict[str, Any]) -> Quantisation:
    _require("fp8", {"fmt": "e4m3"}, {"fmt": "e4m3"} | raw)
    if raw.get("weight_block_size") is None:
        _allow("fp8", "activation_scheme", ("dynamic", "static"), raw)
        static = raw["activation_scheme"] == "static"
        return Fp8Quantisation("FP8, a scale per tensor", "weight_scale", blocks=False, static_inputs=static)
    _require("fp8", {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}, raw)
    return Fp8Quantisation("FP8, blocks of 128 x 128", "weight_scale_inv", blocks=True, static_inputs=False)


def _awq(raw: dict[str, Any]) -> Quantisation:
    raw = {"bits": raw.get("w_bit"), "group_size": raw.get("q_group_size"), "version": "gemm", "zero_point": True} | raw
    _require("awq", {"bits": 4, "version": "gemm"}, raw | {"version": str(raw["version"]).lower()})
    return Int4Quantisation(
        "AWQ int4", AWQ, _group("awq", raw["group_size"]), not raw["zero_point"], bool(raw["zero_point"])
    )


def _gptq(raw: dict[str, Any]) -> Quantisation:
    raw = {"checkpoint_format": "gptq", "lm_head": False, "dynamic": None, "desc_act": False} | raw
    _require("gptq", {"bits": 4, "lm_head": False}, raw)
    _require("gptq", {"dynamic": None}, raw | {"dynamic": raw["dynamic"] or None})
    _allow("gptq", "checkpoint_format", ("gptq", "gptq_v2"), raw)
    shift = 1 if raw["checkpoint_format"] == "gptq" else 0
    group = _group("gptq", raw.get("group_size"))
    return Int4Quantisation("GPTQ int4", GPTQ, group, bool(raw.get("sym", True)), True, bool(raw["desc_act"]), shift)


COMPRESSED_FP8, COMPRESSED_INT4 = ("float-quantized", "naive-quantized"), "pack-quantized"


def _compressed_tensors(raw: dict[str, Any]) -> Quantisation:
    if raw.get("format") not in (*COMPRESSED_FP8, COMPRESSED_INT4):
        raise _unsupported(f"compressed-tensors of format {raw.get('format')!r} are")
    _require("compressed-tensors", {"kv_cache_scheme": None}, raw)
    for field in ("sparsity_config", "transform_config"):
        if raw.get(field) and raw[field].get("format") != "dense":
            raise _unsupported(f"compressed-tensors with {field}={raw[field]!r} are")
    groups = raw.get("config_groups") or {}
    if not groups:
        raise ValueError(f"compressed-tensors without config_groups are not supported; supported: {SUPPORTED_METHODS}")
    read = _compressed_int4 if raw["format"] == COMPRESSED_INT4 else _compressed_fp8
    found = list(dict.fromkeys(read(f"compressed-tensors, {name}", group) for name, group in groups.items()))
    first, fp8 = found[0], [each for each in found if isinstance(each, Fp8Quantisation)]
    if len(found) == 1:
        return first
    if len({(each.suffix, each.blocks) for each in fp8}) == 1:
        return replace(fp8[0], static_inputs=any(each.static_inputs for each in fp8))
    titles = ", ".join(sorted(each.title for each in found))
    what = f"compressed-tensors with config_groups that differ ({titles}) are"
    raise _unsupported(what, "one format for all matrices")


def _compressed_fp8(where: str, group: dict[str, Any]) -> Quantisation:
    weights = group.get("weights") or {}
    _require(f"{where}, weights", {"type": "float", "num_bits": 8, "symmetric": True}, weights)
    _allow(f"{where}, weights", "strategy", ("channel", "tensor", "block"), weights)
    strategy = weights["strategy"]
    if strategy == "block":
        _require(f"{where}, weights", {"block_structure": [BLOCK, BLOCK]}, weights)
    inputs = group.get("input_activations") or {}
    if inputs:
        _require(f"{where}, input_activations", {"type": "float", "num_bits": 8}, inputs)
    _require(where, {"output_activations": None}, group)
    per = "blocks of 128 x 128" if strategy == "block" else f"a scale per {strategy}"
    static = bool(inputs) and not inputs.get("dynamic")
    return Fp8Quantisation(f"FP8, {per}", "weight_scale", blocks=strategy == "block", static_inputs=static)


def _compressed_int4(where: str, group: dict[str, Any]) -> Quantisation:
    weights = {"symmetric": True} | (group.get("weights") or {})
    _require(f"{where}, weights", {"type": "int", "num_bits": 4}, weights)
    _allow(f"{where}, weights", "strategy", ("group", "channel"), weights)
    _allow(f"{where}, weights", "actorder", (None, False, "weight", "static", True, "group", "dynamic"), weights)
    for field in ("input_activations", "output_activations"):
        _require(where, {field: None}, group)
    size = _group(f"{where}, weights", weights.get("group_size") if weights["strategy"] == "group" else -1)
    act_order = weights.get("actorder") in (True, "group", "dynamic")
    symmetric = bool(weights["symmetric"])
    return Int4Quantisation("compressed-tensors int4", PACK_QUANTIZED, size, symmetric, not symmetric, act_order)


_METHODS = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}


def _group(where: str, size: Any) -> int | None:
    """Check and return `group_size` of a config; None: all inputs are one group."""
    if size == -1:
        return None
    if not isinstance(size, int) or size < LEAST_GROUP or size % LEAST_GROUP:
        raise _unsupported(f"{where}: group_size={size!r} is", f"multiples of {LEAST_GROUP}, -1")
    return size


def _require(where: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    for field, value in wanted.items():
        _allow(where, field, (value,), found)


def _allow(where: str, field: str, allowed: tuple[Any, ...], found: dict[str, Any]) -> None:
    if found.get(field) not in allowed:
        raise _unsupported(f"{where}: {field}={found.get(field)!r} is", ", ".join(map(repr, allowed)))


def _unsupported(what: str, supported: str = SUPPORTED_METHODS) -> ValueError:
    return ValueError(f"{what} not supported; supported: {supported}; {WHAT_TO_DO}")
