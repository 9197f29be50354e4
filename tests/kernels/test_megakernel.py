"""The kernel of a whole pass without a GPU: it compiles for the shapes of published models, refuses others by name, and
computes on an emulated GPU what torch computes. `tests/gpu/test_megakernel.py` runs it on a GPU."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from smc.executor.worker import ModelWorker
from smc.kernels import megakernel
from smc.kernels.megakernel import (
    BFLOAT16,
    FP8_WEIGHTS,
    Megakernel,
    Weights,
    constants,
    model_obstacle,
    shape_obstacle,
    tiles_of,
)
from smc.model.config import ModelConfig
from smc.model.presets import preset
from smc.model.quantisation import Int4Format
from smc.round.tensors import Rows, RowSpans
from tests.kernels.emulated_gpu import EmulatedGpu, complaint, needs_compiler
from tests.kernels.megakernel_cases import (
    CONFIGS,
    DENSE,
    INT4_FORMATS,
    LARGE,
    PARTS,
    WIDTH,
    check_against_torch,
    check_company,
    config,
    full,
    long_rows,
    matrices,
    round_to_int4,
    some_rows,
    tokens_of,
    worker,
)

GRID = 132
"""Multiprocessors of an H100 and of an H200."""
DIFFERENT = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "gemma3_text")
"""Families for which the kernel has code of its own."""
INT4 = Weights(torch.int32, 128, torch.bfloat16)
INT4_ZEROS = Weights(torch.int32, 32, torch.float16, zeros=True)
INT4_F16 = Weights(torch.int32, 128, torch.float16, zeros=True)
INT4_FORMS = [
    Weights(torch.int32, group, scales, zeros)
    for group, scales, zeros in product((32, 64, 128), megakernel.SCALES, (False, True))
]
GEMMA3_4B = replace(
    preset("gemma3-1b"),
    num_layers=34,
    window_layers=tuple(layer for layer in range(34) if (layer + 1) % 6),
    hidden_size=2560,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=10_240,
)
DEEPEST = replace(preset("llama-1b"), num_layers=35)
"""As many layers of Llama as shared memory has variables for."""
RESERVED_BYTES, MOST_SHARED_BYTES = 1 << 10, 227 << 10
"""Shared memory: what CUDA takes of each block's, which machine code counts with the variables; and the most that a
block may have besides."""


@pytest.mark.parametrize(
    ("shape", "weights", "tiles"),
    [
        ("qwen2.5-0.5b", FP8_WEIGHTS, 4),
        ("llama-1b", BFLOAT16, 1),
        ("qwen3-0.6b", FP8_WEIGHTS, 2),
        ("llama-8b/4", FP8_WEIGHTS, 8),
        ("gemma3-1b", BFLOAT16, 1),
        pytest.param("olmo2-1b", FP8_WEIGHTS, 1, marks=pytest.mark.slow),
        ("qwen2.5-0.5b", INT4, 2),
        pytest.param("olmo2-1b", INT4_ZEROS, 1, marks=pytest.mark.slow),
    ],
)
def test_compiles(shape, weights, tiles):
    config = replace(preset(shape), **({"window": 4096} if shape == "llama-1b" else {}))
    assert shape_obstacle(config, GRID, weights, 32_768) is None
    check_machine_code(config, weights, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (GEMMA3_4B, BFLOAT16),
        (DEEPEST, BFLOAT16),
        *((replace(preset("llama-8b/4"), hidden_size=hidden), INT4) for hidden in (1664, 1920, 3328)),
    ],
    ids=lambda value: f"{value.hidden_size}-{value.num_layers}" if isinstance(value, ModelConfig) else "",
)
def test_compiles_for_any_number_of_tiles(config, weights, tiles):
    assert shape_obstacle(config, GRID, weights, 4096) is None
    check_machine_code(config, weights, tiles)


def check_machine_code(config: ModelConfig, weights: Weights, tiles: int) -> None:
    """Compile the kernel, and compare the shared memory of its variables with what `shape_obstacle` counts and with
    what a multiprocessor has."""
    given = constants(config, GRID, weights)
    used = variable_bytes(megakernel.machine_code(given | {"TILES": tiles}))
    counted = megakernel.variable_bytes(config, given)
    assert used <= counted
    assert used + megakernel.ROOM_BYTES <= MOST_SHARED_BYTES
    if tiles == 8 and not config.window:
        assert used == counted


def variable_bytes(code: bytes) -> int:
    """Return the size of a kernel's variables in shared memory: of a section of its ELF file."""
    assert code[:4] == b"\x7fELF"
    (begin,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", code, begin + i * size) for i in range(count)]
    name_at = sections[names][4]
    (found,) = (section[5] for section in sections if code.startswith(b".nv.shared.step\0", name_at + section[0]))
    return found - RESERVED_BYTES


def test_errors_of_the_compiler_are_told():
    with pytest.raises(RuntimeError, match=r"(?s)megakernel\.cu does not compile: .*HIDDEN"):
        megakernel.machine_code({})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"hidden_size": 2000}, "multiples of 64, got"),
        ({"head_dim": 96}, "multiples of 64, got"),
        ({"num_layers": DEEPEST.num_layers + 1}, "needs 15 KiB of shared memory for variables; allowed: 14 KiB"),
        ({"head_dim": 512}, "heads of at most 256 features, got 512"),
        (
            {"head_dim": 256, "num_heads": 256, "num_kv_heads": 1},
            "KiB of shared memory for attention of 256 heads to one key",
        ),
    ],
)
def test_other_shapes_are_refused(changed, told):
    assert told in str(shape_obstacle(replace(preset("llama-1b"), **changed), GRID, BFLOAT16, 4096))


def test_other_models_are_refused():
    one, machine = worker(config("llama"), "bfloat16", "cpu"), EmulatedGpu()
    round_to_int4(one.model.layers[1].qkv, INT4_FORMATS[0])
    assert "int4 of one format" in str(model_obstacle(one.model, one.pool, WIDTH, machine))
    one = worker(config("qwen3_moe", num_experts=4, experts_per_token=2), "bfloat16", "cpu")
    assert "experts" in str(model_obstacle(one.model, one.pool, WIDTH, machine))
    one = worker(config("llama"), "float32", "cpu")
    assert "runs weights of one type" in str(model_obstacle(one.model, one.pool, WIDTH, machine))
    with pytest.raises(ValueError, match="needs a GPU of compute capability"):
        Megakernel(one.model, one.pool, one.rope, WIDTH)


@pytest.mark.parametrize("hidden", [256, 2048, 4096, 4864, 5120, 5632, 6144, 8192, 10_240])
@pytest.mark.parametrize("weights", [FP8_WEIGHTS, BFLOAT16, INT4, INT4_ZEROS])
def test_shapes_that_are_not_refused_have_room_for_tiles(hidden, weights):
    given_config = replace(preset("llama-8b/20"), hidden_size=hidden)
    given = constants(given_config, GRID, weights)
    assert shape_obstacle(given_config, GRID, weights, 4096) or min(given["GATED_TILES"], given["QKV_TILES"]) > 0


class Residual:
    """`Residual` of the kernel, which multiplies with a matrix of `inputs` inputs: the arithmetic of its static
    assertions."""

    def __init__(self, given: dict[str, Any], tiles: int, inputs: int, parts: int) -> None:
        self.given, self.tiles = given, tiles
        unit = given["GROUP"] // 64 if given["GROUP"] > 64 else 1
        self.share = -(-inputs // (64 * parts * unit)) * unit
        self.step = given["WARPS"] * (unit if given["WARPS"] % unit else 1)
        self.turn = self.share if self.fits(self.share) else self.share // self.step * self.step
        while self.turn > self.step and not self.fits(self.turn):
            self.turn -= self.step

    def fits(self, turn: int) -> bool:
        padding = {0: 64, 128: 32}.get(self.given["GROUP"], 16)
        activations = self.tiles * 8 * (128 * turn + padding)
        return tile_bytes(self.given, 64 * turn) + activations + self.tiles * 512 <= self.given["ROOM"]

    @property
    def compiles(self) -> bool:
        sums = (self.given["WARPS"] + 1) * self.tiles * 512
        is_ordered = self.turn == self.share or self.turn % self.step == 0
        return self.turn > 0 and self.fits(self.turn) and sums <= self.given["ROOM"] and is_ordered


def tile_bytes(given: dict[str, Any], inputs: int) -> int:
    """`tile_bytes` of the kernel."""
    if given["GROUP"]:
        each = given["GROUP"] // 2 + (4 if given["SCALE"] == "SCALE_FLOAT" else 2) + 4 * given["ZEROS"]
        return inputs // given["GROUP"] * 16 * each
    size, more = (inputs, 32) if given["FP8"] else (2 * inputs, 64)
    return 16 * (size + (more - size) % 128)


def compiles(given: dict[str, Any], tiles: int) -> bool:
    """Return whether the kernel's static assertions hold, and its tiles of weights have room."""
    sums = 512 * given["WARPS"]
    most = max(given["QKV_TILES"], given["GATED_TILES"])
    output = Residual(given, tiles, given["HEADS"] * given["HEAD_DIM"], 1)
    down = Residual(given, tiles, given["INNER"], given["SPLIT"])
    return output.compiles and down.compiles and most * (tile_bytes(given, given["HIDDEN"]) + sums) <= given["ROOM"]


@pytest.mark.parametrize("shape", ["llama-8b/20", "qwen2.5-0.5b"])
@pytest.mark.parametrize("weights", [FP8_WEIGHTS, BFLOAT16, *INT4_FORMS], ids=lambda given: "-".join(map(str, given)))
def test_shapes_that_are_not_refused_compile_by_arithmetic(shape, weights):
    taken = 0
    for hidden in range(128, 8192 + 1, 128):
        config = replace(preset(shape), hidden_size=hidden, intermediate_size=hidden * 7 // 256 * 128)
        if shape_obstacle(config, GRID, weights, 4096) is None:
            given = constants(config, GRID, weights)
            assert [tiles for tiles in (1, 2, 4, 8) if not compiles(given, tiles)] == [], hidden
            taken += 1
    assert taken > 40


FEW_WARPS = [1664, 1920, 2432, 3328, 3712, 3840]
"""Hidden sizes that 13 or 15 warps would divide best, whose turns would be too long for groups of 128 inputs."""


@pytest.mark.parametrize("tiles", [8, *(pytest.param(tiles, marks=pytest.mark.slow) for tiles in (1, 2, 4))])
@pytest.mark.parametrize(
    "hidden",
    [hidden if hidden in (1920, 3328) else pytest.param(hidden, marks=pytest.mark.slow) for hidden in FEW_WARPS],
)
def test_groups_of_128_compile_for_any_hidden_size(hidden, tiles):
    needs_compiler()
    given = constants(replace(preset("llama-8b/20"), hidden_size=hidden), GRID, INT4) | {"TILES": tiles}
    assert complaint(given) == ""


@pytest.mark.parametrize("warps", [15, pytest.param(13, marks=pytest.mark.slow)])
def test_the_arithmetic_of_the_test_is_the_kernel_s(warps):
    """With more warps than `constants` takes, both find that a turn does not fit."""
    needs_compiler()
    given = constants(replace(preset("llama-8b/20"), hidden_size=1920), GRID, INT4) | {"WARPS": warps}
    assert compiles(given, 4) and not compiles(given, 8)
    assert "static assertion failed: shared memory" in complaint(given | {"TILES": 8})


@pytest.mark.parametrize("weights", [BFLOAT16, FP8_WEIGHTS, INT4, INT4_ZEROS])
def test_deep_models_are_not_refused(weights):
    assert shape_obstacle(DEEPEST, GRID, BFLOAT16, 4096) is None
    assert shape_obstacle(GEMMA3_4B, GRID, weights, 4096) is None


def test_warps_of_measured_shapes_are_as_they_were():
    shapes = [("qwen2.5-0.5b", FP8_WEIGHTS), ("qwen2.5-0.5b", INT4), ("llama-1b", BFLOAT16), ("llama-1b", INT4)]
    made = [constants(preset(shape), GRID, weights) for shape, weights in shapes]
    assert [(given["WARPS"], given["QKV_TILES"], given["GATED_TILES"]) for given in made] == [
        (14, 1, 5),
        (14, 1, 5),
        (16, 2, 2),
        (16, 2, 8),
    ]


def test_wide_shapes_are_refused():
    given = replace(preset("llama-8b/20"), hidden_size=10_240)
    assert "KiB of shared memory for" in str(shape_obstacle(given, GRID, BFLOAT16, 4096))


def test_long_rows_are_refused():
    told = str(shape_obstacle(preset("llama-1b"), GRID, FP8_WEIGHTS, 1_000_000))
    assert "MiB for attention to 1000000 positions" in told


@pytest.mark.parametrize("family", DENSE)
def test_norms_of_heads_are_a_phase(family):
    given = constants(CONFIGS[family], GRID, BFLOAT16)
    assert ("heads" in megakernel.phases(given)) == CONFIGS[family].traits.qk_norm


def test_products_before_norms_of_heads_are_divided_among_all_blocks():
    """Qwen3 0.6B has 256 tiles of queries, keys and values, of 32 heads."""
    assert constants(preset("qwen3-0.6b"), GRID, FP8_WEIGHTS)["QKV_TILES"] == 2


def test_tiles_of_tokens():
    assert [tiles_of(tokens) for tokens in (1, 8, 9, 16, 17, 32, 33, 64)] == [1, 1, 2, 2, 4, 4, 8, 8]


# The kernel on an emulated GPU.

SEVERAL_TURNS = replace(LARGE, num_layers=1, intermediate_size=2048)
"""A part of `LARGE` in which `down` still takes several turns for 64 tokens, and for these alone. Its attention is that
of the others."""
OF_EACH_SIZE = [part for part in PARTS if part[1] in (1, 9, 17, 33)]
"""One part for each number of tiles."""


@pytest.mark.parametrize(("hidden", "weights"), [(896, BFLOAT16), (896, INT4_F16), (1664, INT4_F16), (1920, INT4_F16)])
def test_several_turns(hidden, weights):
    given = constants(replace(SEVERAL_TURNS, hidden_size=hidden), EmulatedGpu().multiprocessors, weights)
    down = [Residual(given, tiles, given["INNER"], given["SPLIT"]) for tiles in (4, 8)]
    assert [one.turn < one.share for one in down] == [False, True]


def emulated(
    given: ModelConfig, dtype: str, held: Int4Format | None = None, machine: EmulatedGpu | None = None
) -> tuple[ModelWorker, Megakernel]:
    needs_compiler()
    one = worker(given, dtype, "cpu", held)
    return one, Megakernel(one.model, one.pool, one.rope, one.width, machine=machine or EmulatedGpu())


def compare(one: ModelWorker, whole: Megakernel, *sizes: tuple[int, int, bool]) -> None:
    for rows, queries, tails in sizes:
        asked = some_rows(rows, queries, tails, "cpu", longest=600)
        check_against_torch(one, whole, asked, tokens_of(asked))


def test_every_dense_family_is_compared():
    assert set(DENSE) <= set(CONFIGS)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*DIFFERENT, *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name not in DIFFERENT)]
)
def test_a_pass_is_torch_s(name, dtype):
    compare(*emulated(CONFIGS[name], dtype), (1, 2, False), (7, 1, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "fp8"), ("gemma3_text", "bfloat16"), ("olmo2", "fp8"), ("qwen2", "bfloat16")]
)
def test_a_pass_of_many_tokens_is_torch_s(family, dtype):
    compare(*emulated(config(family), dtype), (9, 1, False), (31, 1, True), (16, 4, True))


@pytest.mark.parametrize(
    "held",
    [*INT4_FORMATS[:2], *(pytest.param(held, marks=pytest.mark.slow) for held in INT4_FORMATS[2:])],
    ids=lambda held: "-".join(map(str, held)),
)
def test_int4_weights_are_torch_s(held):
    compare(*emulated(config("qwen2"), "int4", held), (7, 1, True))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [1664, 1920])
def test_groups_of_128_with_fewer_warps_are_torch_s(hidden):
    """64 tokens, for which `down` takes several turns."""
    compare(*emulated(replace(SEVERAL_TURNS, hidden_size=hidden), "int4", INT4_FORMATS[0]), (16, 4, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "held"),
    list(zip(2 * ("gemma3_text", "olmo2", "llama"), INT4_FORMATS)),
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_int4_weights_of_many_tokens_are_torch_s(family, held):
    compare(*emulated(config(family), "int4", held), (16, 4, True))


@pytest.mark.parametrize(
    "held", [None, pytest.param(INT4_FORMATS[0], marks=pytest.mark.slow)], ids=["bfloat16", "int4"]
)
def test_two_blocks_of_a_cluster_divide_inputs(held):
    shape = config("llama", hidden_size=128, intermediate_size=640)
    one, whole = emulated(shape, "int4" if held else "bfloat16", held, EmulatedGpu(16))
    assert constants(shape, 16, Weights.of(one.model.layers[0].qkv))["SPLIT"] == 2
    compare(one, whole, (7, 1, True))


def test_copies_that_end_early_or_late_make_no_difference():
    found = []
    for eager in (False, True):
        one, whole = emulated(config("gemma3_text"), "fp8", machine=EmulatedGpu(eager=eager))
        asked = some_rows(7, 1, True, "cpu")
        found.append((whole(tokens_of(asked), asked), one.pool.keys, one.pool.values))
    assert all(torch.equal(late, early) for late, early in zip(*found, strict=True))


@pytest.mark.slow
def test_as_many_blocks_as_there_are_make_no_difference():
    """The order of sums follows from the shape alone, unless the blocks of a cluster divide inputs."""
    found = []
    for multiprocessors in (2, 6):
        _, whole = emulated(config("gemma3_text"), "bfloat16", machine=EmulatedGpu(multiprocessors))
        asked = some_rows(7, 1, True, "cpu")
        found.append(whole(tokens_of(asked), asked))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("given", "dtype", "held"),
    [
        (config("gemma3_text"), "bfloat16", None),
        pytest.param(config("olmo2"), "fp8", None, marks=pytest.mark.slow),
        (config("qwen2"), "int4", INT4_FORMATS[0]),
        pytest.param(config("gemma3_text"), "int4", INT4_FORMATS[4], marks=pytest.mark.slow),
        pytest.param(CONFIGS["odd sizes"], "fp8", None, marks=pytest.mark.slow),
        pytest.param(CONFIGS["norms of heads of 256"], "bfloat16", None, marks=pytest.mark.slow),
        pytest.param(SEVERAL_TURNS, "int4", INT4_FORMATS[0], marks=pytest.mark.slow),
        pytest.param(SEVERAL_TURNS, "bfloat16", None, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.family if isinstance(value, ModelConfig) else str(value),
)
def test_a_row_s_bits_do_not_depend_on_its_company(given, dtype, held):
    if given is SEVERAL_TURNS:
        check_company(*emulated(given, dtype, held), OF_EACH_SIZE, longest=60)
    else:
        check_company(*emulated(given, dtype, held), PARTS, longest=600)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        ("gemma3_text", "bfloat16"),
        pytest.param("olmo2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("llama", "fp8", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "fp8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("factor", [0.0, 1e-4, 1e4])
def test_extreme_activations_are_torch_s(family, dtype, factor):
    """Embeddings and cached values of 0, or far from 1; with large ones, keys choose a single position."""
    one, whole = emulated(config(family), dtype)
    one.model.embed.weight.mul_(factor)
    one.pool.values.mul_(factor)
    one.pool.keys.mul_(min(factor, 8.0))
    compare(one, whole, (7, 1, True))


def test_extreme_weights_of_int4_are_torch_s():
    """Codes of 0 and 15 with zero points of 0 and 15, and groups whose scale is 0."""
    one, whole = emulated(config("llama"), "int4", INT4_FORMATS[2])
    for matrix in matrices(one.model):
        matrix.weight[:, ::2], matrix.weight[:, 1::4] = 0, -1
        matrix.zero[:, ::3], matrix.zero[:, 1::3] = 0, 15
        matrix.scale[:, ::5] = 0.0
        matrix.scale.mul_(0.3)
    compare(one, whole, (7, 1, True))


def at_starts(starts: list[int], counts: list[int] | None = None) -> Rows:
    asked = full(some_rows(len(starts), 1, device="cpu", longest=2))
    pages = 1 + torch.arange(WIDTH, dtype=torch.int32)
    tables = asked.tables._replace(table_SL=torch.stack([pages.roll(71 * row) for row in range(len(starts))]))
    count_R = torch.tensor(counts or [1] * len(starts), dtype=torch.int32)
    return asked._replace(tables=tables, spans=RowSpans(torch.tensor(starts, dtype=torch.int32), count_R))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_positions_around_chunks_and_windows_are_torch_s(family):
    one, whole = emulated(config(family), "bfloat16")
    given = constants(one.model.config, 4, BFLOAT16)
    chunk = 16 * given["ATTEND_WARPS"] * given["STEPS"]
    window = one.model.config.window or 16
    for size in (16, window, chunk, 4 * chunk):
        asked = at_starts([0, size - 2, size - 1, size, size + 1, size + window, 2 * size - 1])
        check_against_torch(one, whole, asked, tokens_of(asked))


def test_rows_without_tokens_are_zero():
    one, whole = emulated(config("gemma3_text"), "bfloat16")
    asked = at_starts([5, 300, 7, 9], counts=[0, 1, 0, 0])
    check_against_torch(one, whole, asked, tokens_of(asked))
    before = one.pool.keys.clone()
    asked = at_starts([5, 300], counts=[0, 0])
    assert not whole(tokens_of(asked), asked).any() and torch.equal(one.pool.keys, before)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_rows_of_32k_positions_are_torch_s(family):
    one, whole = emulated(config(family, max_context=1 << 15), "bfloat16")
    asked = long_rows("cpu")
    check_against_torch(one, whole, asked, tokens_of(asked))


def test_a_wait_without_end_is_an_error(monkeypatch):
    """The counter of the barrier is moved, so that the blocks wait for arrivals that never come."""
    monkeypatch.setattr(megakernel, "LIMIT_SECONDS", 0.2)
    _, whole = emulated(config("llama"), "bfloat16")
    asked = some_rows(7, 1, device="cpu")
    whole(tokens_of(asked), asked)
    whole.check()
    whole.workspace.arrivals.fill_(-5)
    whole(tokens_of(asked), asked)
    with pytest.raises(RuntimeError, match=r"waited 0\.2 s for its own blocks"):
        whole.check()
