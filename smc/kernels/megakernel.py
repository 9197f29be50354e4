"""A decoder's forward pass over few tokens in one launch (a megakernel). `megakernel.cu` says how it works; this is its
host's side: which models it runs, its memory, and its compilation.

A pass of a small model over few tokens takes several times as long as reading its weights, because of its hundred and
more launches. Here one launch does everything from the embeddings to the last norm. The kernel is CUDA C++, compiled
by NVRTC for the model's shape and for 8, 16, 32 or 64 tokens when it is first needed, which takes about 3 s, and kept
in Triton's cache.

It runs every dense family, with weights in bfloat16, FP8 or int4 (groups of 32, 64 or 128 inputs, with or without zero
points), one format for all matrices of the layers. `obstacle` names what it does not run:

- experts, and a model divided among ranks;
- activations that are not bfloat16, and GPUs other than Hopper;
- sizes that are no multiples of 64, the inputs that a warp multiplies at a time. Larger heads of other sizes than 128
  and 256 have been padded to one of these when a model is loaded (`ModelConfig.on_device`);
- shapes that need more shared memory than there is. For heads of 256, eight warps of a block divide the positions
  instead of up to sixteen: each holds 16 KiB of keys and values and 8 KiB of results.

Norms of heads have a phase and a barrier of their own. If the blocks that multiply finished whole heads instead, 100 of
132 blocks would have no part of the queries, keys and values of a model with 32 heads.

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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from smc.kernels.nvrtc import compiled, done, is_compiled, nvrtc_version
from smc.memory.kv_cache import KVPool
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, Layer, RopeTable
from smc.model.families import SILU
from smc.model.linear import FP8, Linear
from smc.round.tensors import Rows

SOURCES = ("hopper.cuh", "megakernel.cu")
CAPABILITY = (9, 0)
"""Compute capability that the kernel is written for: Hopper."""
MOST_TOKENS = 64
TILE, BLOCK, TILE_ROWS = 8, 64, 16
"""Tokens of a tile; inputs that a warp multiplies at a time; rows of a weight's tile."""
MOST_WARPS = 16
MOST_HEAD = 256
CHUNK_STEPS = {64: 2}
"""Groups of 16 positions that a warp takes of a chunk of positions, by head size; 1 for others."""
KEPT_UNITS = 2
"""Units of attention of a block whose pages are kept in shared memory."""
ROOM_BYTES, VARIABLE_BYTES, STAGE_BYTES = 213 << 10, 14 << 10, 150 << 10
"""Shared memory of a block, with which a multiprocessor runs one block; of its variables; and the part of the first
that tiles of gate and up may take."""
ROOM_ALIGNMENT, CHUNK_BYTES, SIGNAL_BYTES = 128, 32, 24
"""Alignment of a block's shared memory behind its variables; size of the kernel's `Chunk`; and of its flag and barriers
of copies."""
PADDING = 128
"""Maximum number of bytes between rows in shared memory."""
MOST_PARTIAL_BYTES = 256 << 20
"""Maximum memory for the attention of single chunks."""
SCALES = {torch.float32: "SCALE_FLOAT", torch.bfloat16: "SCALE_BF16", torch.float16: "SCALE_HALF"}
"""Types of scales, as the kernel names them."""
LIMIT_SECONDS = 10.0
"""Maximum wait for other blocks."""


class MegakernelRoom(NamedTuple):
    """Device memory of the kernel, by the names of the kernel's parameters. Local axes: O = H * D, I inner features."""

    stream: Tensor
    """The residual stream, bfloat16 [tokens, E]; with norms of outputs two of them [2, tokens, E]."""
    branch: Tensor
    """With norms of outputs: the output of attention or of the MLP, bfloat16 [tokens, E]; otherwise empty."""
    raw: Tensor
    """With norms of heads: products with the query/key/value weights, bfloat16 [tokens, O + 2 J D]; otherwise empty."""
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
    """int64 [blocks, layers, 2 * phases] in a profile, otherwise empty: clocks before and after the work of each phase
    of the last pass, each block by its own."""
    layers: Tensor
    """int64: addresses of the layers' tensors."""


class Weights(NamedTuple):
    """How the matrices of all layers are stored."""

    dtype: torch.dtype = torch.bfloat16
    """bfloat16, FP8 or int32, words of int4."""
    group: int = 0
    """int4: inputs of a group."""
    scales: torch.dtype = torch.float32
    zeros: bool = False
    """int4: whether groups have zero points of their own."""

    @staticmethod
    def of(matrix: Linear) -> Weights:
        scales = torch.float32 if matrix.scale is None else matrix.scale.dtype
        return Weights(matrix.weight.dtype, matrix.group, scales, matrix.zero is not None)

    def tile_bytes(self, inputs: int) -> int:
        """Return the shared memory of a tile."""
        if not self.group:
            return TILE_ROWS * (inputs * self.dtype.itemsize + PADDING)
        return TILE_ROWS * (inputs // 2 + inputs // self.group * (self.scales.itemsize + 4 * self.zeros))


BFLOAT16 = Weights()
FP8_WEIGHTS = Weights(FP8)


class Params(ctypes.Structure):
    """`Params` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("layers", "tokens", "embed", "norm", "hidden")),
        *((name, ctypes.c_uint64) for name in ("table", "slot", "tail", "tail_start", "start", "count")),
        *((name, ctypes.c_uint64) for name in ("table_stride", "tail_stride")),
        *((name, ctypes.c_int32) for name in ("table_width", "tail_width", "rows", "queries")),
        *((name, ctypes.c_uint64) for name in ("stream", "branch", "raw", "q", "attended", "inner")),
        *((name, ctypes.c_uint64) for name in ("partial", "merged", "arrivals", "failure", "limit_ns", "times")),
    ]


Launch = Callable[[Params], None]


class Machine(Protocol):
    """What runs the kernel."""

    @property
    def multiprocessors(self) -> int: ...

    def load(self, given: dict[str, Any]) -> Launch:
        """Compile and load the kernel for these constants; return its launch on the current stream."""
        ...


def obstacle(model: Decoder, pool: KVPool, width: int) -> str | None:
    """Return why the kernel cannot run this model for rows of up to `width` positions, or None if it can."""
    device = model.embed.weight.device
    return device_obstacle(device) or model_obstacle(model, pool, width, Gpu(device))


def device_obstacle(device: torch.device) -> str | None:
    """As `obstacle`, as far as the device decides."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return f"needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    try:
        nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"needs cuda-bindings and NVRTC, pip install 'smcserve[gpu]': {error}"
    return None


def model_obstacle(model: Decoder, pool: KVPool, width: int, machine: Machine) -> str | None:
    """As `obstacle`, as far as the model decides."""
    config = model.config
    if config.num_experts or model.reduce is not None:
        return "runs neither experts nor parts of a model"
    matrices = [matrix for layer in model.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    kinds = {Weights.of(matrix) for matrix in matrices}
    if len(kinds) > 1 or matrices[0].weight.dtype not in (torch.bfloat16, FP8, torch.int32):
        return f"runs weights of one type, bfloat16, FP8 or int4 of one format, got {', '.join(map(str, kinds))}"
    if {model.embed.weight.dtype, pool.keys.dtype} != {torch.bfloat16}:
        return "needs bfloat16 activations"
    return shape_obstacle(config, machine.multiprocessors, kinds.pop(), width)


def shape_obstacle(config: ModelConfig, grid: int, weights: Weights, width: int) -> str | None:
    """As `obstacle`, as far as the shape of the model and the number of multiprocessors decide."""
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    if any(size % BLOCK for size in sizes):
        return f"needs hidden, inner and head sizes that are multiples of {BLOCK}, got {sizes}"
    if config.head_dim > MOST_HEAD:
        return f"runs heads of at most {MOST_HEAD} features, got {config.head_dim}"
    given = constants(config, grid, weights)
    if not given["ATTEND_WARPS"]:
        each = config.num_heads // config.num_kv_heads
        return f"needs more than {ROOM_BYTES >> 10} KiB of shared memory for attention of {each} heads to one key"
    tile = weights.tile_bytes(config.hidden_size) + given["WARPS"] * 512
    rooms = {
        "query, key and value weights": given["QKV_TILES"] * tile,
        "gate and up weights": given["GATED_TILES"] * tile,
    }
    for part, size in rooms.items():
        if size > ROOM_BYTES:
            return f"needs {_kib(size)} KiB of shared memory for {part}; allowed: {_kib(ROOM_BYTES)} KiB"
    if (size := variable_bytes(config, given)) > VARIABLE_BYTES:
        return f"needs {_kib(size)} KiB of shared memory for variables; allowed: {_kib(VARIABLE_BYTES)} KiB"
    if (size := _partial_bytes(config, given, width)) > MOST_PARTIAL_BYTES:
        return f"needs {size >> 20} MiB for attention to {width} positions; allowed: {MOST_PARTIAL_BYTES >> 20} MiB"
    return None


def _kib(size: int) -> int:
    """Return bytes as KiB, rounded up, so that what is too large by a few bytes does not look allowed."""
    return -(-size // 1024)


def variable_bytes(config: ModelConfig, given: dict[str, Any]) -> int:
    """Return the shared memory of the kernel's variables for `MOST_TOKENS` tokens."""
    squares = given["WARPS"] * MOST_TOKENS * 4 * (1 + given["POST_NORM"] * given["PRE_NORM"])
    tokens = 4 * (3 * MOST_TOKENS + 2 * (MOST_TOKENS + 1))  # positions, rows, pages; chunks before
    kept = KEPT_UNITS * (64 * given["ATTEND_WARPS"] * given["STEPS"] + CHUNK_BYTES)
    size = config.num_layers * 8 * _layer_size(given) + squares + tokens + kept + SIGNAL_BYTES
    return -(-size // ROOM_ALIGNMENT) * ROOM_ALIGNMENT


def _layer_size(given: dict[str, Any]) -> int:
    """Return the number of addresses in the kernel's `Layer`."""
    return 17 + 4 * given["ZEROS"] + 2 * given["POST_NORM"]


def _partial_bytes(config: ModelConfig, given: dict[str, Any], width: int) -> int:
    chunks = -(-width // (16 * given["ATTEND_WARPS"] * given["STEPS"]))
    return 4 * MOST_TOKENS * chunks * config.num_heads * (config.head_dim + 2)


class Megakernel:
    """The kernel for one model and its pool of keys and values, with its workspace. Passes must follow each other on
    one stream. `width`: maximum number of positions of a row. Raises ValueError for a model with an `obstacle`."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        rope: RopeTable,
        width: int,
        *,
        profile: bool = False,
        machine: Machine | None = None,
    ) -> None:
        """`profile`: note clocks in `MegakernelRoom.times`; `machine`: what runs the kernel; default: the GPU."""
        device = model.embed.weight.device
        why = device_obstacle(device) if machine is None else None
        if (why := why or model_obstacle(model, pool, width, machine or Gpu(device))) is not None:
            raise ValueError(f"the kernel of a whole pass {why}")
        self.model, config = model, model.config
        self._machine = machine or Gpu(device)
        self._grid = self._machine.multiprocessors
        self._constants = constants(config, self._grid, Weights.of(model.layers[0].qkv))
        self._constants["PROFILE"] = int(profile)
        buffers, raw_tokens = 1 + self._constants["POST_NORM"], MOST_TOKENS * self._constants["HEAD_NORM"]

        def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        heads = config.num_heads * config.head_dim
        self._room = MegakernelRoom(
            stream=room(buffers, MOST_TOKENS, config.hidden_size),
            branch=room((buffers - 1) * MOST_TOKENS, config.hidden_size),
            raw=room(raw_tokens, heads + 2 * config.num_kv_heads * config.head_dim),
            q=room(MOST_TOKENS, heads),
            attended=room(MOST_TOKENS, heads),
            inner=room(MOST_TOKENS, config.intermediate_size),
            partial=room(_partial_bytes(config, self._constants, width) // 4, dtype=torch.float32),
            merged=room(MOST_TOKENS, config.num_kv_heads, dtype=torch.int32),
            arrivals=room(1, dtype=torch.int64),
            times=room(self._grid if profile else 0, config.num_layers, self._constants["CLOCKS"], dtype=torch.int64),
            layers=torch.tensor([_layer(layer, pool, rope, self._constants) for layer in model.layers], device=device),
        )
        self._failure = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._launches: dict[int, Launch] = {}

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of a layer's phases."""
        return phases(self._constants)

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
        params = Params(
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

    def _launch(self, tiles: int) -> Launch:
        if tiles not in self._launches:
            self._launches[tiles] = self._machine.load(self._constants | {"TILES": tiles})
        return self._launches[tiles]


def tiles_of(tokens: int) -> int:
    """Return the number of tiles of the smallest kernel that takes so many tokens: 1, 2, 4 or 8."""
    return 1 << max(0, -(-tokens // TILE) - 1).bit_length()


def constants(config: ModelConfig, grid: int, weights: Weights) -> dict[str, Any]:
    """Return the constants of the kernel that depend on the model and on the number of multiprocessors."""
    traits, blocks = config.traits, config.hidden_size // BLOCK
    fitting_warps = [
        warps for warps in range(MOST_WARPS // 2, MOST_WARPS + 1) if _turn_bytes(weights, warps) <= ROOM_BYTES
    ]
    # As few idle turns of warps as possible, then as many warps. In groups of two blocks, 13 or 15 warps take too much.
    warps = min(fitting_warps, key=lambda warps: (-(-blocks // warps) * warps, -warps))
    tile = weights.tile_bytes(config.hidden_size)
    most = max(1, min(STAGE_BYTES // tile, ROOM_BYTES // (tile + 512 * warps)))
    qkv_tiles = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim // TILE_ROWS
    grid, steps = grid // 2 * 2, CHUNK_STEPS.get(config.head_dim, 1)
    queries = -(-config.num_heads // config.num_kv_heads // TILE) * TILE
    attended = steps * config.head_dim * 64 + queries * (config.head_dim + 2) * 4
    made = {
        "GRID": grid,
        "HIDDEN": config.hidden_size,
        "INNER": config.intermediate_size,
        "HEADS": config.num_heads,
        "KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "LAYERS": config.num_layers,
        "WINDOW": config.window or 0,
        "FP8": int(weights.dtype == FP8),
        "GROUP": weights.group,
        "SCALE": SCALES[weights.scales],
        "ZEROS": int(weights.zeros),
        "BIAS": int(config.traits.qkv_bias),
        "HEAD_NORM": int(config.traits.qk_norm),
        "WHOLE_NORM": int(traits.whole_qk_norm),
        "PRE_NORM": int("attn_norm" in traits.norms),
        "POST_NORM": int("attn_out_norm" in traits.norms),
        "GELU": int(traits.activation != SILU),
        "WARPS": warps,
        # Two blocks divide the inputs of a tile where there are fewer tiles than blocks.
        "SPLIT": 2 if 2 * (config.hidden_size // TILE_ROWS) <= grid else 1,
        "QKV_TILES": min(most, -(-qkv_tiles // grid)),
        "GATED_TILES": min(most, -(-(config.intermediate_size // TILE) // grid)),
        "ATTEND_WARPS": min(warps, ROOM_BYTES // attended),
        "STEPS": steps,
        "KEPT": KEPT_UNITS,
        "ROOM": ROOM_BYTES,
        "PROFILE": 0,
        "ROOT_DIM": f"{math.sqrt(config.head_dim)!r}f",
        "EPS": f"{config.rms_eps!r}f",
        "NORM_OFFSET": f"{traits.norm_offset!r}f",
        "RESIDUAL": f"{float(config.residual_multiplier)!r}f",
        "EMBED_FACTOR": f"{float(torch.tensor(config.embedding_multiplier, dtype=torch.bfloat16))!r}f",
    }
    return made | {"CLOCKS": 2 * len(phases(made))}


def _turn_bytes(weights: Weights, warps: int) -> int:
    """Return the maximum shared memory of the shortest turn of the kernel's `Residual`: weights, the activations of
    `MOST_TOKENS` tokens, and sums of another block. A turn has whole groups, and as many blocks of inputs for each
    warp."""
    group_blocks = max(1, weights.group // BLOCK)
    inputs = BLOCK * warps * (group_blocks if warps % group_blocks else 1)
    return weights.tile_bytes(inputs) + MOST_TOKENS * (2 * inputs + PADDING) + MOST_TOKENS // TILE * 512


def phases(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of a layer's phases."""
    return ("qkv", *(("heads",) if given["HEAD_NORM"] else ()), "attend", "output", "gated", "down")


def _layer(layer: Layer, pool: KVPool, rope: RopeTable, given: dict[str, Any]) -> list[int]:
    """Return a layer in the order of the kernel's `Layer`; 0 for what it does not have."""
    matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
    norms = [layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm]
    if given["POST_NORM"]:
        norms += [layer.attn_out_norm, layer.mlp_out_norm]
    parts = ("weight", "scale", "zero") if given["ZEROS"] else ("weight", "scale")
    tensors = (
        *(getattr(matrix, part) for matrix in matrices for part in parts),
        layer.qkv.bias,
        *(None if norm is None else norm.weight for norm in norms),
        pool.keys[layer.index],
        pool.values[layer.index],
        rope.of(layer),
    )
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    made = [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [pool.windows[layer.index] or 0]
    assert len(made) == _layer_size(given)
    return made


def machine_code(given: dict[str, Any]) -> bytes:
    """Return the kernel's machine code for these constants."""
    return compiled(*_source(given))


def _source(given: dict[str, Any]) -> tuple[str, bytes, list[str]]:
    """Return the kernel's name, its source, and the compiler's options for these constants."""
    options = [f"-arch=sm_{CAPABILITY[0]}{CAPABILITY[1]}a", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in sorted(given.items())]
    folder = Path(__file__).parent
    parts = (b"".join((f'#line 1 "{name}"\n'.encode(), (folder / name).read_bytes())) for name in SOURCES)
    return "megakernel", b"".join(parts), options


@dataclass(frozen=True)
class MegakernelJob:
    """A `smc.kernels.compile_jobs.Job`: the kernel for a model and a number of tiles."""

    given: dict[str, Any]
    name: str = "megakernel"

    @staticmethod
    def of(model: Decoder, tiles: int) -> MegakernelJob:
        grid = Gpu(model.embed.weight.device).multiprocessors
        return MegakernelJob(constants(model.config, grid, Weights.of(model.layers[0].qkv)) | {"TILES": tiles})

    def is_cached(self) -> bool:
        return is_compiled(*_source(self.given))

    def run(self) -> None:
        machine_code(self.given)


class Gpu:
    """The GPU as the kernel's `Machine`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(self._device).multi_processor_count

    def load(self, given: dict[str, Any]) -> Launch:
        from cuda.bindings import driver

        with torch.cuda.device(self._device):
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

        def launch(params: Params) -> None:
            config.hStream = driver.CUstream(torch.cuda.current_stream(self._device).cuda_stream)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            done(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(arguments), 0))

        return launch
