"""Models in FP8: rounded when they are loaded from any kind of source, or stored in FP8, with the same result for any
number of ranks."""

from __future__ import annotations

import json
import logging
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from smc import demo
from smc.model.check import check_pair
from smc.model.decoder import Decoder
from smc.model.linear import FP8, FP8_MAX, Linear, pieces, quantise
from smc.model.loader import load_model, random_model, save_model
from smc.model.padded import padded_model
from smc.model.parallel import Shard
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import WeightSlice, weight_slices
from tests.model.compressed import (
    ACTIVATIONS,
    BLOCKS,
    COMPRESSED_TENSORS,
    KINDS,
    PER_TENSOR,
    WEIGHTS,
    as_rows,
    compress,
    config_of,
)
from tests.model.dense import dense_logits
from tests.model.test_padded import shape_of
from tests.model.tiny import in_fp8, random_decoder, save_byte_level, save_tiny, tiny_config
from tests.pairwise import few_of_pairs

UP = "model.layers.1.mlp.up_proj.weight"
WIDE = {"hidden_size": 160, "intermediate_size": 200}
"""More than one block of 128; the last block is smaller."""
LARGER = {"vocab_size": 300, "tied_embeddings": True}


def numbers(model: Decoder) -> dict[str, Tensor]:
    """Return the values that the weights of an FP8 model stand for, by published names."""
    return {name: numbers_of(model, where) for name, where in weight_slices(model.config).items()}


def numbers_of(model: Decoder, block: WeightSlice) -> Tensor:
    parameters = dict(model.named_parameters())
    view = block.view(parameters)
    if view.dtype != FP8:
        return view.float()
    first = block.start + block.axes[0].start
    return view.float() * parameters[block.parameter.replace("weight", "scale")][first : first + len(view), None]


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_error_of_rounding(size):
    weight_OI = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * size
    weight_OI[3] = 0.0
    weight_OI[4, 5] = 1e4 * size
    weight8_OI, scale_O = quantise(weight_OI)
    found_OI = weight8_OI.float() * scale_O[:, None]
    bound_OI = torch.maximum(weight_OI.abs() / 16, scale_O[:, None] * 2**-10) * (1 + 1e-5)
    assert ((found_OI - weight_OI).abs() <= bound_OI).all()
    assert not found_OI[3].any() and (weight8_OI.float().abs().amax(1) == FP8_MAX).sum() == 49


def test_pieces_are_all_rows_once():
    for rows, columns in ((0, 5), (1, 10**9), (100, 1), (70, 1 << 20)):
        assert [i for piece in pieces(rows, columns) for i in range(piece.start, piece.stop)] == list(range(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_rounded_matrix_and_rows(dtype):
    matrix, x_TI = Linear(40, 30, bias=True).requires_grad_(False), torch.randn(7, 40).to(dtype)
    weight_OI, matrix.bias = matrix.weight.clone(), torch.nn.Parameter(torch.randn(30).to(dtype), requires_grad=False)
    matrix.to_fp8()
    matrix.quantise_from(weight_OI)
    expected_TO = F.linear(as_rows(x_TI).double(), as_rows(weight_OI).double(), matrix.bias.double())
    torch.testing.assert_close(
        matrix(x_TI).double(), expected_TO, atol=1e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2
    )
    torch.testing.assert_close(matrix(x_TI[3:4]), matrix(x_TI)[3:4])
    assert matrix(x_TI).dtype == dtype


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_loaded_weights_are_rounded(family, tied, tmp_path):
    """All matrices except the embedding are rounded; a tied head becomes a rounded copy of it. The logits stay
    close."""
    published = load_file(save_tiny(tmp_path, family=family, tied_embeddings=tied) / "model.safetensors")
    model = load_model(tmp_path, dtype=FP8)
    for name, found in numbers(model).items():
        matrix = found.dim() == 2 and "embed" not in name
        assert torch.equal(found, as_rows(published[name]) if matrix else published[name].bfloat16().float()), name
    head = as_rows(model.embed.weight if tied else published["lm_head.weight"])
    assert torch.equal(model.lm_head.weight.float() * model.lm_head.scale[:, None], head)
    assert model.embed.weight.dtype == torch.bfloat16
    ids_T = torch.randint(300, (50,), generator=torch.Generator().manual_seed(2))
    expected_TV, found_TV = (dense_logits(one, ids_T) for one in (load_model(tmp_path), model))
    assert (found_TV - expected_TV).norm() < 0.2 * expected_TV.norm()


@pytest.mark.parametrize(
    ("family", "kind", "scale_dtype"), few_of_pairs(product(["llama", "qwen2"], KINDS, [torch.float32, torch.bfloat16]))
)
def test_directories_in_fp8_are_read(family, kind, scale_dtype, tmp_path):
    """Loaded as float32, the weights have the stored values. Loaded as FP8, they stay as stored, except formats with
    one scale per block, which are rounded again by rows."""
    save_tiny(tmp_path, family=family, **WIDE)
    values = compress(tmp_path, kind, scale_dtype)
    plain = dict(numbers(load_model(tmp_path)))
    found = numbers(load_model(tmp_path, dtype=FP8))
    for name, value in values.items():
        assert torch.equal(plain[name], value), name
        if "_proj.weight" not in name:
            continue
        if kind.endswith("blocks"):
            assert torch.equal(found[name], as_rows(value)), name
            error = (found[name] - value).norm() / value.norm()
            assert error < 0.035, "no more than of a matrix that was never rounded before"
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("family", "degree", "kind"), few_of_pairs(product(["llama", "qwen2"], [2, 3, 4, 6], ["plain", *KINDS]))
)
def test_shards_are_the_whole(family, degree, kind, tmp_path):
    """Values and scales of each rank are those of the whole model, and its padding is zero."""
    shape = {**WIDE, "num_heads": 6, "num_kv_heads": 3, "intermediate_size": 197}
    save_tiny(tmp_path, family=family, **shape)
    if kind != "plain":
        compress(tmp_path, kind)
    whole, config = numbers(load_model(tmp_path, dtype=FP8)), tiny_config(family, **shape)
    for rank in range(degree):
        shard = Shard(rank, degree)
        model = load_model(tmp_path, dtype=FP8, shard=shard, reduce=Tensor.clone)
        parameters = dict(model.named_parameters())
        for name, where in weight_slices(config, shard).items():
            for block in where.blocks():
                assert torch.equal(numbers_of(model, block), whole[name][block.part]), name
                block.view(parameters).zero_()
        assert not any(weight.float().any() for name, weight in parameters.items() if not name.endswith("scale")), (
            "padding is not zero"
        )


@pytest.mark.parametrize(("degree", "changes"), [(1, {}), (2, LARGER), (4, {})])
def test_a_grown_model(degree, changes, monkeypatch):
    """Rounding a padded model piece by piece equals rounding the whole; tokens that the small model lacks keep their
    very low logits."""
    monkeypatch.setattr("smc.model.linear.PIECE", 1 << 10)
    small = random_decoder(tiny_config(tied_embeddings=True))
    shape = shape_of(small.config, **changes)
    large = padded_model(small, shape, dtype=torch.float32, device="cpu")
    config = large.config
    for rank in range(degree):
        shard = Shard(rank, degree)
        model = padded_model(small, shape, dtype=FP8, device="cpu", shard=shard, reduce=Tensor.clone)
        slices = weight_slices(config, shard)
        for name, weight in numbers(large).items():
            matrix = weight.dim() == 2 and "embed" not in name
            expected = as_rows(weight) if matrix else weight.bfloat16().float()
            for block in slices[name].blocks():
                assert torch.equal(numbers_of(model, block), expected[block.part]), name
    ids_T = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2))
    whole = padded_model(small, shape, dtype=FP8, device="cpu")
    logits_TV = dense_logits(whole, ids_T)
    assert (logits_TV[:, 300:] < -100).all()
    assert (logits_TV[:, :300] - dense_logits(small, ids_T)).norm() < 0.15 * dense_logits(small, ids_T).norm()


@pytest.mark.parametrize("tied", [False, True])
def test_a_random_model_is_that_in_bfloat16_rounded(tied):
    config = tiny_config("qwen2", tied_embeddings=tied)
    plain, found = (random_model(config, dtype=dtype, device="cpu") for dtype in (torch.bfloat16, FP8))
    parameters = dict(plain.named_parameters())
    for name, weight in numbers(found).items():
        expected = weight_slices(config)[name].view(parameters)
        assert torch.equal(
            weight, as_rows(expected) if weight.dim() == 2 and "embed" not in name else expected.float()
        ), name
    assert found.lm_head.weight.dtype == FP8


def test_static_scales_of_inputs_are_passed_over_and_said(tmp_path, caplog):

    size = Tokenizer.load(save_byte_level(tmp_path)).size
    save_tiny(tmp_path, vocab_size=size)
    compress(tmp_path, "static")
    with caplog.at_level(logging.WARNING):
        assert not check_pair(tmp_path, tmp_path).problems
    assert "scales of activations are not used" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method='bitsandbytes' is not supported; supported: compressed-tensors with FP8",
        ),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4' is not supported"),
        (
            BLOCKS | {"weight_block_size": [64, 128]},
            r"fp8: weight_block_size=\[64, 128\] is not supported; supported: \[128, 128\]",
        ),
        (
            PER_TENSOR | {"activation_scheme": "none"},
            "fp8: activation_scheme='none' is not supported; supported: 'dynamic', 'static'; take another checkpoint",
        ),
        (
            BLOCKS | {"activation_scheme": "static"},
            "fp8: activation_scheme='static' is not supported; supported: 'dynamic'",
        ),
        (BLOCKS | {"fmt": "e5m2"}, "fp8: fmt='e5m2' is not supported; supported: 'e4m3'"),
        (
            COMPRESSED_TENSORS | {"format": "int-quantized"},
            "compressed-tensors of format 'int-quantized' are not supported",
        ),
        (COMPRESSED_TENSORS | {"config_groups": {}}, "compressed-tensors without config_groups are not supported"),
        (
            COMPRESSED_TENSORS | {"kv_cache_scheme": {"num_bits": 8}},
            r"kv_cache_scheme=\{'num_bits': 8\} is not supported",
        ),
        (COMPRESSED_TENSORS | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config=.* are not supported"),
        (
            config_of("channel", weights=WEIGHTS | {"type": "int"}),
            "group_0, weights: type='int' is not supported; supported: 'float'",
        ),
        (
            config_of("channel", weights=WEIGHTS | {"num_bits": 4}),
            "group_0, weights: num_bits=4 is not supported; supported: 8",
        ),
        (
            config_of("channel", weights=WEIGHTS | {"symmetric": False}),
            "group_0, weights: symmetric=False is not supported",
        ),
        (
            config_of("channel", weights=WEIGHTS | {"strategy": "group"}),
            "strategy='group' is not supported; supported: 'channel', 'tensor', 'block'",
        ),
        (
            config_of("channel", input_activations=ACTIVATIONS | {"type": "int"}),
            "input_activations: type='int' is not supported",
        ),
        (config_of("channel", output_activations=ACTIVATIONS), "output_activations=.* is not supported"),
    ],
)
def test_other_kinds_are_refused_by_name(config, message, tmp_path):
    save_tiny(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message) as error:
        load_model(tmp_path, dtype=FP8)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop(f"{UP}_scale"), rf"1 weights are missing: {UP}_scale"),
        (
            lambda stored: stored.update({f"{UP}_scale": torch.ones(7, 1)}),
            rf"{UP}_scale has shape \[7, 1\], expected \[200, 1\] or",
        ),
        (
            lambda stored: stored.update({f"{UP}_zero_point": torch.ones(1)}),
            "1 weights are unknown to llama: .*zero_point",
        ),
        (
            lambda stored: stored.update({UP: torch.zeros(200, 160, dtype=torch.int8)}),
            f"{UP} is stored as I8; supported: F32, F16, BF16",
        ),
        (
            lambda stored: stored.update({UP: torch.full((200, 160), torch.nan).to(FP8)}),
            f"{UP} holds NaN or inf as float8_e4m3fn",
        ),
        (lambda stored: stored[f"{UP}_scale"].fill_(torch.inf), f"{UP} holds NaN or inf"),
        (
            lambda stored: stored.update({"model.norm.weight": torch.ones(160).to(FP8)}),
            "model.norm.weight is stored as F8_E4M3; supported",
        ),
    ],
)
def test_broken_directories(change, message, tmp_path):
    save_tiny(tmp_path, **WIDE)
    compress(tmp_path, "channel")
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, dtype=FP8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_finite(value, tmp_path):
    save_tiny(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored[UP][5, 3] = value
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{UP} holds NaN or inf"):
        load_model(tmp_path, dtype=FP8)


def test_fp8_weights_without_a_word_in_the_config_are_refused(tmp_path):
    save_tiny(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored[UP] = stored[UP].to(FP8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{UP} is stored as F8_E4M3; supported: F32, F16, BF16"):
        load_model(tmp_path)


def test_an_fp8_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="weights are FP8, which are not saved"):
        save_model(in_fp8(random_decoder(tiny_config())), tmp_path)


@torch.inference_mode()
def test_logits_of_the_shipped_pair():
    """Bounds the largest error of a logit over 200 tokens."""
    ids_T = torch.randint(512, (200,), generator=torch.Generator().manual_seed(1))
    for directory in (demo.TARGET, demo.DRAFT):
        expected_TV = dense_logits(load_model(directory), ids_T)
        error_TV = (dense_logits(load_model(directory, dtype=FP8), ids_T) - expected_TV).abs()
        print(
            f"{directory.name}: std {expected_TV.std():.2f}, largest {error_TV.max():.2f}, mean {error_TV.mean():.3f}"
        )
        assert error_TV.max() < 2.0
