"""A decoder's forward pass over few tokens in one launch (a megakernel). `megakernel.cu` says how it works; this is its
host's side: which models it runs, its memory, and its compilation.

A pass of a small model over few tokens takes several times as long as reading its weights, because of its hundred and
more launches. Here one launch does everything from the embeddings to the last norm. The kernel is CUDA C++, compiled
by NVRTC for the model's shape and for 8, 16, 32 or 64 tokens when it is first needed, which takes about 3 s, and kept
in Triton's cache.

All blocks of the grid wait for each other, so all must run at the same time. The launch is cooperative, with one block
for each multiprocessor: the driver starts it only if the GPU can hold all blocks. Kernels of other streams may delay a
block, but they end without waiting for this one, so every block runs at last. A wait of more than `LIMIT_SECONDS` ends
the kernel, and `check` raises an error."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smc.kernels.nvrtc import compiled, done, is_compiled, nvrtc_version
from smc.memory.kv_cache import KVPool
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, Layer, RopeTable
from smc.model.families import LLAMA_NORMS, SILU
from smc.model.linear import FP8
from smc.round.tensors import Rows

CAPABILITY = (9, 0)
"""Compute capability that the kernel is written for: Hopper."""
MOST_TOKENS = 64
TILE, BLOCK, TILE_ROWS = 8, 64, 16
"""Tokens of a tile; inputs that a warp multiplies at a time; rows of a weight's tile."""
MOST_WARPS = 16
CHUNK_STEPS = {64: 2}
"""Groups of 16 positions that a warp takes of a chunk of positions, by head size; 1 for others."""
KEPT_UNITS = 2
"""Units of attention of a block whose pages are kept in shared memory."""
ROOM_BYTES, VARIABLE_BYTES, STAGE_BYTES = 213 << 10, 14 << 10, 150 << 10
"""Shared memory of a block, with which a multiprocessor runs one block; of its variables; and the part of the first
that tiles of gate and up may take."""
PADDING = 128
"""Maximum number of bytes between rows in shared memory."""
MOST_PARTIAL_BYTES = 256 << 20
"""Maximum memory for the attention of single chunks."""
CLOCKS = 10
"""Clocks of a layer in a profile: before and after the work of each of its five phases."""
LIMIT_SECONDS = 10.0
"""Maximum wait for other blocks."""


class MegakernelRoom(NamedTuple):
    """Device memory of the kernel, by the names of the kernel's parameters. Local axes: O = H * D, I inner features."""

    stream: Tensor
    """The residual stream, bfloat16 [tokens, E]."""
    q: Tensor
    """Queries, bfloat16 [tokens, O]."""
    attended: Tensor
    """Outputs of attention, bfloat16 [tokens, O]."""
    inner: Tensor
    """Outputs of the gated activation, bfloat16 [tokens, I]."""
    partial: Tensor
    """Attention of chunks: float32 sums, maxima and totals."""
    merged: Tensor
    """int32 [tokens, J]: chunks that are done. 0 between passes."""
    arrivals: Tensor
    """int64 [1]: blocks that have arrived at barriers, since the beginning."""
    times: Tensor
    """int64 [blocks, layers, CLOCKS] in a profile, otherwise empty: clocks of the last pass, each block by its own."""
    layers: Tensor
    """int64 [layers, 17]: addresses of the layers' tensors."""


def obstacle(model: Decoder, pool: KVPool, width: int) -> str | None:
    """Return why the kernel cannot run this model for rows of up to `width` positions, or None if it can."""
    config, device = model.config, model.embed.weight.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return f"needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    if config.num_experts or model.reduce is not None:
        return "runs neither experts nor parts of a model"
    matrices = [matrix for layer in model.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    if any(matrix.group for matrix in matrices) or len({matrix.weight.dtype for matrix in matrices}) > 1:
        return "runs weights of one type, bfloat16 or FP8"
    if {model.embed.weight.dtype, pool.keys.dtype} != {torch.bfloat16}:
        return "needs bfloat16 activations"
    try:
        nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"needs cuda-bindings and NVRTC, pip install 'smcserve[gpu]': {error}"
    grid = torch.cuda.get_device_properties(device).multi_processor_count
    return shape_obstacle(config, grid, matrices[0].weight.dtype == FP8, width)


def shape_obstacle(config: ModelConfig, grid: int, is_fp8: bool, width: int) -> str | None:
    """As `obstacle`, as far as the shape of the model and the number of multiprocessors decide."""
    traits = config.traits
    if (
        traits.whole_qk_norm
        or traits.norms.keys() != LLAMA_NORMS.keys()
        or traits.activation != SILU
        or traits.norm_offset
    ):
        return f"does not run the family {config.family}"
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    if any(size % BLOCK for size in sizes):
        return f"needs hidden, inner and head sizes that are multiples of {BLOCK}, got {sizes}"
    given = constants(config, grid, is_fp8)
    warps, queries = given["WARPS"], -(-config.num_heads // config.num_kv_heads // TILE) * TILE
    row = config.hidden_size * (1 if is_fp8 else 2) + PADDING
    tile = TILE_ROWS * row + warps * 512
    rooms = {
        "query, key and value weights": given["QKV_TILES"] * tile,
        "gate and up weights": given["GATED_TILES"] * tile,
        "attention": warps * (given["STEPS"] * config.head_dim * 64 + queries * (config.head_dim + 2) * 4),
    }
    for part, size in rooms.items():
        if size > ROOM_BYTES:
            return f"needs {size >> 10} KiB of shared memory for {part}; allowed: {ROOM_BYTES >> 10} KiB"
    variables = config.num_layers * 136 + warps * (MOST_TOKENS * 4 + KEPT_UNITS * given["STEPS"] * 64) + (3 << 10)
    if variables > VARIABLE_BYTES:
        return f"needs {variables >> 10} KiB of shared memory for variables; allowed: {VARIABLE_BYTES >> 10} KiB"
    if (size := _partial_bytes(config, given, width)) > MOST_PARTIAL_BYTES:
        return f"needs {size >> 20} MiB for attention to {width} positions; allowed: {MOST_PARTIAL_BYTES >> 20} MiB"
    return None


def _partial_bytes(config: ModelConfig, given: dict[str, Any], width: int) -> int:
    chunks = -(-width // (16 * given["WARPS"] * given["STEPS"]))
    return 4 * MOST_TOKENS * chunks * config.num_heads * (config.head_dim + 2)


class _Params(ctypes.Structure):
    """`Params` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("layers", "tokens", "embed", "norm", "hidden")),
        *((name, ctypes.c_uint64) for name in ("table", "slot", "tail", "tail_start", "start", "count")),
        *((name, ctypes.c_uint64) for name in ("table_stride", "tail_stride")),
        *((name, ctypes.c_int32) for name in ("table_width", "tail_width", "rows", "queries")),
        *((name, ctypes.c_uint64) for name in ("stream", "q", "attended", "inner")),
        *((name, ctypes.c_uint64) for name in ("partial", "merged", "arrivals", "failure", "limit_ns", "times")),
    ]


class Megakernel:
    """The kernel for one model and its pool of keys and values, with its workspace. Passes must follow each other on
    one stream. `width`: maximum number of positions of a row. Raises ValueError for a model with an `obstacle`."""

    def __init__(self, model: Decoder, pool: KVPool, rope: RopeTable, width: int, *, profile: bool = False) -> None:
        if (why := obstacle(model, pool, width)) is not None:
            raise ValueError(f"the kernel of a whole pass {why}")
        self.model, config, device = model, model.config, model.embed.weight.device
        self._device, self._grid = device, torch.cuda.get_device_properties(device).multi_processor_count
        self._constants = constants(config, self._grid, model.layers[0].qkv.weight.dtype == FP8)
        self._constants["PROFILE"] = int(profile)

        def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        heads = config.num_heads * config.head_dim
        self._room = MegakernelRoom(
            stream=room(MOST_TOKENS, config.hidden_size),
            q=room(MOST_TOKENS, heads),
            attended=room(MOST_TOKENS, heads),
            inner=room(MOST_TOKENS, config.intermediate_size),
            partial=room(_partial_bytes(config, self._constants, width) // 4, dtype=torch.float32),
            merged=room(MOST_TOKENS, config.num_kv_heads, dtype=torch.int32),
            arrivals=room(1, dtype=torch.int64),
            times=room(self._grid if profile else 0, config.num_layers, CLOCKS, dtype=torch.int64),
            layers=torch.tensor([_layer(layer, pool, rope) for layer in model.layers], device=device),
        )
        self._failure = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._launches: dict[int, Callable[[_Params], None]] = {}

    @property
    def workspace(self) -> MegakernelRoom:
        return self._room

    @property
    def workspace_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._room)

    def __call__(self, tokens_T: Tensor, rows: Rows) -> Tensor:
        """Run the tokens of rows, int64 [T] with T = R * Q of at most `MOST_TOKENS`, and store their keys and values.
        Returns hidden states after the last norm [T, E], zero where there is no token."""
        tokens, table, tail = len(tokens_T), rows.tables.table_SL, rows.tables.tail_RB
        assert tokens == len(rows.spans.start_R) * rows.queries <= MOST_TOKENS and tokens_T.dtype == torch.int64
        assert table.stride(1) == 1 and (tail is None or tail.stride(1) == 1) and tokens_T.is_contiguous()
        hidden_TE = self.model.embed.weight.new_empty(tokens, self.model.config.hidden_size)
        params = _Params(
            tokens=tokens_T.data_ptr(),
            embed=self.model.embed.weight.data_ptr(),
            norm=self.model.norm.weight.data_ptr(),
            hidden=hidden_TE.data_ptr(),
            table=table.data_ptr(),
            table_stride=table.stride(0),
            table_width=table.shape[1],
            slot=rows.tables.slot_R.data_ptr(),
            start=rows.spans.start_R.data_ptr(),
            count=rows.spans.count_R.data_ptr(),
            rows=len(rows.spans.start_R),
            queries=rows.queries,
            failure=self._failure.data_ptr(),
            limit_ns=int(LIMIT_SECONDS * 1e9),
            **{name: tensor.data_ptr() for name, tensor in self._room._asdict().items()},
        )
        if tail is not None and rows.tables.tail_R is not None:
            params.tail, params.tail_start = tail.data_ptr(), rows.tables.tail_R.data_ptr()
            params.tail_stride, params.tail_width = tail.stride(0), tail.shape[1]
        self._launch(tiles_of(tokens))(params)
        return hidden_TE

    def check(self) -> None:
        """Raise RuntimeError if a pass has given up because not all of its blocks ran. Its results are undefined."""
        if self._failure[0]:
            raise RuntimeError(
                f"a pass in one launch waited {LIMIT_SECONDS:g} s for its own blocks; "
                "give the GPU to this process alone"
            )

    def _launch(self, tiles: int) -> Callable[[_Params], None]:
        if tiles not in self._launches:
            self._launches[tiles] = _load(self._constants | {"TILES": tiles}, self._device)
        return self._launches[tiles]


def tiles_of(tokens: int) -> int:
    """Return the number of tiles of the smallest kernel that takes so many tokens: 1, 2, 4 or 8."""
    return 1 << max(0, -(-tokens // TILE) - 1).bit_length()


def constants(config: ModelConfig, grid: int, is_fp8: bool) -> dict[str, Any]:
    """Return the constants of the kernel that depend on the model and on the number of multiprocessors."""
    head_tiles, blocks = config.head_dim // TILE_ROWS, config.hidden_size // BLOCK
    together = head_tiles if config.qk_norm else 1
    units = (config.num_heads + 2 * config.num_kv_heads) * head_tiles // together
    # As few idle turns of warps as possible, then as many warps.
    warps = min(range(MOST_WARPS // 2, MOST_WARPS + 1), key=lambda warps: (-(-blocks // warps) * warps, -warps))
    most = STAGE_BYTES // (TILE_ROWS * (config.hidden_size * (1 if is_fp8 else 2) + PADDING))
    grid = grid // 2 * 2
    return {
        "GRID": grid,
        "HIDDEN": config.hidden_size,
        "INNER": config.intermediate_size,
        "HEADS": config.num_heads,
        "KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "LAYERS": config.num_layers,
        "WINDOW": config.window or 0,
        "FP8": int(is_fp8),
        "BIAS": int(config.qkv_bias),
        "HEAD_NORM": int(config.qk_norm),
        "WARPS": warps,
        # Two blocks divide the inputs of a tile where there are fewer tiles than blocks.
        "SPLIT": 2 if 2 * (config.hidden_size // TILE_ROWS) <= grid else 1,
        "QKV_TILES": min(max(1, most // together), -(-units // grid)) * together,
        "GATED_TILES": min(max(1, most), -(-(config.intermediate_size // TILE) // grid)),
        "STEPS": CHUNK_STEPS.get(config.head_dim, 1),
        "KEPT": KEPT_UNITS,
        "ROOM": ROOM_BYTES,
        "PROFILE": 0,
        "ROOT_DIM": f"{math.sqrt(config.head_dim)!r}f",
        "EPS": f"{config.rms_eps!r}f",
        "RESIDUAL": f"{float(config.residual_multiplier)!r}f",
        "EMBED_FACTOR": f"{float(torch.tensor(config.embedding_multiplier, dtype=torch.bfloat16))!r}f",
    }


def _layer(layer: Layer, pool: KVPool, rope: RopeTable) -> list[int]:
    """Return a layer in the order of the kernel's `Layer`; 0 for what it does not have."""
    matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
    norms = (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    tensors = (
        *(matrix.weight for matrix in matrices),
        *(matrix.scale for matrix in matrices),
        layer.qkv.bias,
        *(None if norm is None else norm.weight for norm in norms),
        pool.keys[layer.index],
        pool.values[layer.index],
        rope.of(layer),
    )
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [pool.windows[layer.index] or 0]


def machine_code(given: dict[str, Any]) -> bytes:
    """Return the kernel's machine code for these constants."""
    return compiled(*_source(given))


def _source(given: dict[str, Any]) -> tuple[str, bytes, list[str]]:
    """Return the kernel's name, its source, and the compiler's options for these constants."""
    options = [f"-arch=sm_{CAPABILITY[0]}{CAPABILITY[1]}a", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in sorted(given.items())]
    return "megakernel", Path(__file__).with_suffix(".cu").read_bytes(), options


@dataclass(frozen=True)
class MegakernelJob:
    """A `smc.kernels.compile_jobs.Job`: the kernel for a model and a number of tiles."""

    given: dict[str, Any]
    name: str = "megakernel"

    @staticmethod
    def of(model: Decoder, tiles: int) -> MegakernelJob:
        device, is_fp8 = model.embed.weight.device, model.layers[0].qkv.weight.dtype == FP8
        grid = torch.cuda.get_device_properties(device).multi_processor_count
        return MegakernelJob(constants(model.config, grid, is_fp8) | {"TILES": tiles})

    def is_cached(self) -> bool:
        return is_compiled(*_source(self.given))

    def run(self) -> None:
        machine_code(self.given)


def _load(given: dict[str, Any], device: torch.device) -> Callable[[_Params], None]:
    """Compile and load the kernel; return its launch on torch's current stream."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream()
        module = done(driver.cuModuleLoadData(machine_code(given)))
        kernel = done(driver.cuModuleGetFunction(module, b"step"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        done(driver.cuFuncSetAttribute(kernel, attribute, ROOM_BYTES))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = given["GRID"], 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32 * given["WARPS"], 1, 1
    config.sharedMemBytes = ROOM_BYTES
    cooperative = driver.CUlaunchAttribute()
    cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    config.attrs, config.numAttrs = [cooperative], 1

    def launch(params: _Params) -> None:
        config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        done(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(arguments), 0))

    return launch
