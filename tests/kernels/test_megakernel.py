"""The kernel of a whole pass without a GPU: it compiles for the shapes of published models, and refuses others by name.
What it computes is tested on a GPU (`tests/gpu/test_megakernel.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smc.kernels import megakernel
from smc.kernels.megakernel import constants, shape_obstacle, tiles_of
from smc.model.presets import preset

GRID = 132
"""Multiprocessors of an H100 and of an H200."""


@pytest.mark.parametrize(
    ("shape", "is_fp8", "tiles"),
    [("qwen2.5-0.5b", True, 4), ("llama-1b", False, 1), ("qwen3-0.6b", True, 2), ("llama-8b/4", True, 8)],
)
def test_compiles(shape, is_fp8, tiles):
    config = replace(preset(shape), window=4096 if shape == "llama-1b" else None)
    assert shape_obstacle(config, GRID, is_fp8, 32_768) is None
    given = constants(config, GRID, is_fp8) | {"TILES": tiles}
    assert megakernel.machine_code(given)[:4] == b"\x7fELF"


def test_errors_of_the_compiler_are_told():
    with pytest.raises(RuntimeError, match=r"(?s)megakernel\.cu does not compile: .*HIDDEN"):
        megakernel.machine_code({})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"hidden_size": 2000}, "multiples of 64, got"),
        ({"family": "gemma3_text"}, "does not run the family gemma3_text"),
        ({"family": "olmo2"}, "does not run the family olmo2"),
        ({"num_layers": 100}, "KiB of shared memory for variables"),
        ({"head_dim": 256, "qk_norm": True}, "KiB of shared memory for query, key and value weights"),
    ],
)
def test_other_shapes_are_refused(changed, told):
    assert told in str(shape_obstacle(replace(preset("llama-1b"), **changed), GRID, False, 4096))


@pytest.mark.parametrize("hidden", [256, 2048, 4096, 4864, 5120, 5632, 6144, 8192, 10_240])
@pytest.mark.parametrize("is_fp8", [True, False])
def test_shapes_that_are_not_refused_have_room_for_tiles(hidden, is_fp8):
    config = replace(preset("llama-8b/20"), hidden_size=hidden)
    given = constants(config, GRID, is_fp8)
    assert shape_obstacle(config, GRID, is_fp8, 4096) or min(given["GATED_TILES"], given["QKV_TILES"]) > 0


def test_wide_shapes_are_refused():
    config = replace(preset("llama-8b/20"), hidden_size=10_240)
    assert "KiB of shared memory for" in str(shape_obstacle(config, GRID, False, 4096))


def test_long_rows_are_refused():
    assert "MiB for attention to 1000000 positions" in str(shape_obstacle(preset("llama-1b"), GRID, True, 1_000_000))


def test_tiles_of_tokens():
    assert [tiles_of(tokens) for tokens in (1, 8, 9, 16, 17, 32, 33, 64)] == [1, 1, 2, 2, 4, 4, 8, 8]
