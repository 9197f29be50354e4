"""Models in int4: published layouts, converted or kept as stored, with the same result for any number of ranks; and
plain weights, rounded when they are loaded.

Local axes: P groups of inputs with a common scale."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from smc.local_engine import ModelPair, local_engine
from smc.model.config import ModelConfig, read_quantisation
from smc.model.decoder import Decoder
from smc.model.linear import FP8, INT4, Linear, dequantise, pack, quantise_int4, unpack
from smc.model.loader import load_model, random_model, save_model, save_with_config
from smc.model.padded import padded_model
from smc.model.parallel import Shard
from smc.model.quantisation import Quantisation, local_group
from smc.model.weight_map import WeightSlice, check_weights, int4_formats, rank_bytes, weight_slices
from tests.model.compressed import compress
from tests.model.dense import dense_logits
from tests.model.int4 import LAYOUTS, config_of, exact_int4, to_int4
from tests.model.ranks import in_ranks
from tests.model.test_padded import shape_of
from tests.model.tiny import numbers_tokenizer, random_decoder, save_tiny, tiny_config
from tests.pairwise import few_of_pairs, one_of
from tests.scheduler.harness import CASES, answers, request

UP = "model.layers.1.mlp.up_proj"
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
"""Sizes that are multiples of the groups 128 and 64, as are the halves of a layer's inputs."""
IDS_T = torch.randint(300, (50,), generator=torch.Generator().manual_seed(2))


def numbers(model: Decoder) -> dict[str, Tensor]:
    """Return the values of the weight with this published name."""
    return {name: numbers_of(model, where) for name, where in weight_slices(model.config).items()}


def numbers_of(model: Decoder, block: WeightSlice) -> Tensor:
    matrix = model.get_submodule(block.parameter.rpartition(".")[0])
    if len(block.axes) == 1 or not isinstance(matrix, Linear):
        return block.view(dict(model.named_parameters())).float()
    rows, columns = (slice(axis.start, axis.start + len(axis.held)) for axis in block.axes)
    rows = slice(block.start + rows.start, block.start + rows.stop)
    return matrix.values(rows, torch.float32)[:, columns]


def test_codes_are_packed_and_unpacked():
    code_OI = torch.randint(16, (5, 64), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    assert all(torch.equal(unpack(pack(code_OI, groups)), code_OI) for groups in (1, 2))
    words_POW = pack(torch.arange(16)[None], 1)
    assert words_POW.tolist() == [[[0x75316420, 0xFDB9ECA8 - (1 << 32)]]]


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_error_of_rounding(size):
    weight_OI = torch.randn(50, 256, generator=torch.Generator().manual_seed(1)) * size
    weight_OI[3] = 0.0
    weight_OI[4, 5] = 100 * size
    codes = quantise_int4(weight_OI, 64)
    found_OI = dequantise(pack(codes.code_OI, codes.scale_OP.shape[1]), codes.scale_OP.t(), None, torch.float32)
    scale_OI = codes.scale_OP.repeat_interleave(64, 1)
    # Scales are stored in bfloat16, so the largest weight may exceed the last code by up to 2^-9 of itself.
    assert ((found_OI - weight_OI).abs() <= 0.54 * scale_OI).all()
    assert not found_OI[3].any()


@pytest.mark.parametrize(
    ("layout", "group", "symmetric", "family"),
    few_of_pairs(product(LAYOUTS, [128, 64, -1], [True, False], ["llama", "qwen2"])),
)
def test_published_layouts_are_read(layout, group, symmetric, family, tmp_path):
    """Loaded as float32 or int4, weights have the stored values; loaded as bfloat16 or FP8, these are rounded."""
    save_tiny(tmp_path, family=family, **WIDE)
    values = to_int4(tmp_path, layout, group, symmetric)
    plain, packed, half, fp8 = (
        load_model(tmp_path, dtype=dtype) for dtype in (torch.float32, INT4, torch.bfloat16, FP8)
    )
    of_plain, of_packed, of_half, of_fp8 = map(numbers, (plain, packed, half, fp8))
    for name, value in values.items():
        assert torch.equal(of_plain[name], value), name
        if "_proj.weight" in name:
            assert torch.equal(of_packed[name], value), name
            assert (of_fp8[name] - value).norm() < 0.035 * value.norm(), name
        assert torch.equal(of_half[name], value.bfloat16().float()), name
    assert packed.layers[0].qkv.weight.dtype == torch.int32 and packed.embed.weight.dtype == torch.bfloat16
    assert (packed.layers[0].qkv.zero is None) == symmetric
    with torch.inference_mode():
        expected_TV = dense_logits(plain, IDS_T)
        assert (dense_logits(exact_int4(tmp_path), IDS_T) - expected_TV).norm() < 1e-4 * expected_TV.norm()
        assert (dense_logits(packed, IDS_T) - expected_TV).norm() < 0.1 * expected_TV.norm()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_scales_of_other_types_are_kept(scale_dtype, tmp_path):
    save_tiny(tmp_path, **WIDE)
    values = to_int4(tmp_path, "pack-quantized", scale_dtype=scale_dtype)
    model = load_model(tmp_path, dtype=INT4)
    assert model.layers[0].down.scale.dtype == scale_dtype
    assert torch.equal(numbers(model)[f"{UP}.weight"], values[f"{UP}.weight"])


@pytest.mark.parametrize("layout", ["gptq", "pack-quantized"])
def test_act_order_is_converted_and_refused_by_name_in_int4(layout, tmp_path):
    save_tiny(tmp_path, **WIDE)
    values = to_int4(tmp_path, layout, symmetric=False, act_order=True)
    found = numbers(load_model(tmp_path))
    for name, value in values.items():
        assert torch.equal(found[name], value), name
    with pytest.raises(ValueError, match=r"act-order.*take dtype=bfloat16, or a checkpoint with desc_act=false"):
        load_model(tmp_path, dtype=INT4)


def test_phi_s_fused_matrices(tmp_path):
    """Phi-3 stores several matrices fused in one tensor."""
    model = random_decoder(tiny_config("phi3", **WIDE, window=None, window_layers=()))
    of_phi = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None}
    save_with_config(model, tmp_path, tiny_config(**WIDE, rope_scaling=None).to_hf() | of_phi, torch.float32)
    values = to_int4(tmp_path, "awq", 64)
    plain, packed = load_model(tmp_path), load_model(tmp_path, dtype=INT4)
    for layer in range(2):
        for matrix, name in (("qkv", "self_attn.qkv_proj"), ("gate_up", "mlp.gate_up_proj")):
            expected = values[f"model.layers.{layer}.{name}.weight"]
            assert torch.equal(getattr(plain.layers[layer], matrix).weight, expected)
            assert torch.equal(getattr(packed.layers[layer], matrix).values(slice(None), torch.float32), expected)


@pytest.mark.parametrize(
    ("layout", "group", "degree"), few_of_pairs(product([*LAYOUTS, "rounded", "FP8"], [128, 64], [2, 3, 6]))
)
def test_shards_are_the_whole(layout, group, degree, tmp_path):
    """The values of each rank are those of the whole model, and its padding is zero. Groups that ranks would cut are
    split into smaller groups."""
    save_tiny(tmp_path, family="qwen2", **WIDE)
    if layout == "FP8":
        compress(tmp_path, "channel")
    elif layout != "rounded":
        to_int4(tmp_path, layout, group, symmetric=False)
    whole, config = numbers(load_model(tmp_path, dtype=INT4)), tiny_config("qwen2", **WIDE)
    for rank in range(degree):
        shard = Shard(rank, degree)
        model = load_model(tmp_path, dtype=INT4, shard=shard, reduce=Tensor.clone)
        slices = weight_slices(config, shard)
        for name, where in slices.items():
            for block in where.blocks():
                assert torch.equal(numbers_of(model, block), whole[name][block.part]), name
        for matrix, name in ((model.layers[0].o, "self_attn.o_proj"), (model.layers[0].down, "mlp.down_proj")):
            values_OI = matrix.values(slice(0, 256), torch.float32)
            for held, start in slices[f"model.layers.0.{name}.weight"].axes[1].spans:
                values_OI[:, start : start + len(held)] = 0
            assert not values_OI.any(), "padding is not zero"


MOE = {"moe_intermediate_size": 192, "hidden_size": 128, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("layout", [*one_of("awq", "gptq", "pack-quantized"), "rounded"])
def test_experts(layout, tmp_path):
    """Experts kept in int4 have the stored values on any number of ranks; each rank holds a part of every expert."""
    pytest.importorskip("transformers")
    from tests.model.families import save_hf

    save_hf("qwen3_moe", tmp_path, **MOE)
    if layout != "rounded":
        to_int4(tmp_path, layout, 64, symmetric=layout == "gptq")
    plain, whole = load_model(tmp_path), load_model(tmp_path, dtype=INT4)
    matrices = whole.layers[1].experts.gate_up, whole.layers[1].experts.down
    assert all(matrix.weight.dtype == torch.int32 for matrix in matrices)
    if layout != "rounded":
        expected = plain.layers[1].experts.gate_up.weight, plain.layers[1].experts.down.weight
        assert all(torch.equal(one.values(slice(None), torch.float32), two) for one, two in zip(matrices, expected))
    config, of_whole = ModelConfig.from_hf(tmp_path), numbers(whole)
    for degree in (2, 3):
        for rank in range(degree):
            shard = Shard(rank, degree)
            model = load_model(tmp_path, dtype=INT4, shard=shard, reduce=Tensor.clone)
            for name, where in weight_slices(config, shard).items():
                for block in where.blocks():
                    assert torch.equal(numbers_of(model, block), of_whole[name][block.part]), name
            held = int4_formats(weight_slices(config, shard), shard, *stored_and_kind(tmp_path))
            assert rank_bytes(config, shard, held) == sum(weight.nbytes for weight in model.parameters())


def stored_and_kind(directory: Path) -> tuple[dict, Quantisation | None]:
    return check_weights(directory, ModelConfig.from_hf(directory)), read_quantisation(directory)


@pytest.mark.parametrize("dtype", [torch.float32, INT4])
def test_ranks_compute_what_one_does(dtype, tmp_path):
    save_tiny(tmp_path, family="qwen3", **WIDE)
    to_int4(tmp_path, "awq", 64, symmetric=False)
    with torch.inference_mode():
        expected_TV = dense_logits(load_model(tmp_path), IDS_T)
        bound = 1e-4 if dtype == torch.float32 else 2e-2
        for degree in (1, 2, 3, 6):
            ranks = in_ranks(degree, lambda shard, reduce: _logits(tmp_path, dtype, shard, reduce))
            for found_TV in ranks:
                assert (found_TV - expected_TV).norm() < bound * expected_TV.norm()


@torch.inference_mode()
def _logits(directory, dtype, shard, reduce):
    return dense_logits(load_model(directory, dtype=dtype, shard=shard, reduce=reduce), IDS_T)


def test_groups_that_ranks_would_cut_are_refused(tmp_path):
    """Two ranks split the inputs of 14 heads of 16 into 112 each, which is not a multiple of the group size."""
    save_tiny(tmp_path, **WIDE | {"hidden_size": 224, "head_dim": 16, "num_heads": 14, "num_kv_heads": 2})
    to_int4(tmp_path, "gptq", 32)
    load_model(tmp_path, shard=Shard(0, 2), reduce=Tensor.clone)
    load_model(tmp_path, dtype=INT4)
    with pytest.raises(
        ValueError, match=r"layers\.0\.o\.weight has 224 inputs in groups of 32, which 2 ranks cut at multiples of 112"
    ):
        load_model(tmp_path, dtype=INT4, shard=Shard(0, 2), reduce=Tensor.clone)
    assert local_group(128, 28672, 3584) == 128 and local_group(128, 11008, 2752) == 64


def test_plain_weights_are_rounded(tmp_path):
    """All matrices of the layers are rounded; embedding and head stay in bfloat16, and a tied head stays tied."""
    published = load_file(save_tiny(tmp_path, tied_embeddings=True, **WIDE) / "model.safetensors")
    model = load_model(tmp_path, dtype=INT4)
    assert model.lm_head.weight is model.embed.weight
    found = numbers(model)
    for name, value in published.items():
        if "_proj" not in name:
            assert torch.equal(found[name], value.bfloat16().float()), name
            continue
        codes = quantise_int4(value, 128)
        expected = (codes.code_OI - 8) * codes.scale_OP.repeat_interleave(128, 1)
        assert torch.equal(found[name], expected), name
        assert (expected - value).norm() < 0.13 * value.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zeros", [True, False])
def test_the_product_is_that_of_the_dequantised_matrix(dtype, zeros, tmp_path):
    save_tiny(tmp_path, family="qwen2", **WIDE)
    to_int4(tmp_path, "gptq", 64, symmetric=not zeros)
    matrix, x_TI = load_model(tmp_path, dtype=INT4).layers[1].qkv, torch.randn(7, 256).to(dtype)
    matrix.bias = torch.nn.Parameter(matrix.bias.to(dtype), requires_grad=False)
    values_OI = matrix.values(slice(0, matrix.out_features), torch.float32)
    expected_TO = F.linear(x_TI.double(), values_OI.double(), matrix.bias.double())
    found_TO = matrix(x_TI)
    assert found_TO.dtype == dtype
    assert (found_TO - expected_TO).norm() < 1e-2 * expected_TO.norm()


def test_a_random_model(tmp_path):
    model = random_model(tiny_config(**WIDE), dtype=INT4, device="cpu")
    values_OI = model.layers[0].down.values(slice(0, 256), torch.float32)
    assert 0.015 < values_OI.std() < 0.025
    with torch.inference_mode():
        assert dense_logits(model, IDS_T).isfinite().all()


def test_what_is_not_done_in_int4_is_refused(tmp_path):
    small = random_decoder(tiny_config())
    with pytest.raises(ValueError, match="dtype=int4 is not supported for padded models"):
        padded_model(small, shape_of(small.config), dtype=INT4, device="cpu")
    save_tiny(tmp_path, **WIDE)
    with pytest.raises(ValueError, match="weights are int4, which are not saved; load it as bfloat16"):
        save_model(load_model(tmp_path, dtype=INT4), tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "config"), [("gptq", CASES[1])], ids=["gptq"])
def test_decoding(layout, config, tmp_path):
    """Exact decoding with target and draft in int4 equals decoding by the target alone, accepts drafted tokens, and SMC
    ends."""
    settings = {"num_layers": 1, "vocab_size": 300, **WIDE}
    target, draft = (save_tiny(tmp_path / role, **settings) for role in ("target", "draft"))
    to_int4(target, layout, 128, symmetric=False)
    to_int4(draft, layout, 64)
    pair = ModelPair(exact_int4(target), exact_int4(draft), numbers_tokenizer(300), 256)
    common = {"prompt": [5, 7, 11, 13], "max_tokens": 24, "ignore_eos": True, "temperature": 0.5}
    found = answers(
        local_engine(pair, replace(config, max_slots=16)),
        [
            request(request_id="target", method="target", seed=7, **common),
            request(request_id="exact", method="exact", seed=7, particles=4, **common),
            request(request_id="smc", method="smc", seed=7, particles=4, **common),
        ],
    )
    assert found["exact"].tokens == found["target"].tokens
    assert found["exact"].statistics.rounds < 24, "nothing drafted was accepted"
    assert len(found["smc"].tokens) == 24 and math.isfinite(found["smc"].statistics.log_z)


GROUP_0 = config_of("pack-quantized", 128, True)["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            config_of("awq", 128, True) | {"bits": 8},
            "awq: bits=8 is not supported; supported: 4; take another checkpoint",
        ),
        (config_of("awq", 128, True) | {"version": "gemv"}, "awq: version='gemv' is not supported; supported: 'gemm'"),
        (config_of("awq", 48, True), "awq: group_size=48 is not supported; supported: multiples of 32, -1"),
        (config_of("gptq", 128, True) | {"bits": 3}, "gptq: bits=3 is not supported; supported: 4"),
        (config_of("gptq", 128, True) | {"lm_head": True}, "gptq: lm_head=True is not supported"),
        (config_of("gptq", 128, True) | {"dynamic": {"-:x": {}}}, "gptq: dynamic=.* is not supported; supported: None"),
        (
            config_of("gptq", 128, True) | {"checkpoint_format": "marlin"},
            "gptq: checkpoint_format='marlin' is not supported; supported: 'gptq', 'gptq_v2'",
        ),
        (
            {
                **config_of("pack-quantized", 128, True),
                "config_groups": {"group_0": GROUP_0 | {"weights": GROUP_0["weights"] | {"num_bits": 8}}},
            },
            "group_0, weights: num_bits=8 is not supported; supported: 4",
        ),
        (
            {
                **config_of("pack-quantized", 128, True),
                "config_groups": {"group_0": GROUP_0 | {"input_activations": {"num_bits": 8, "type": "int"}}},
            },
            "group_0: input_activations=.* is not supported; supported: None",
        ),
        (
            {
                **config_of("pack-quantized", 128, True),
                "config_groups": {
                    "group_0": GROUP_0,
                    "group_1": GROUP_0 | {"weights": GROUP_0["weights"] | {"group_size": 64}},
                },
            },
            r"config_groups that differ \(compressed-tensors int4, groups of 128, .*groups of 64\) are not supported",
        ),
        (
            config_of("awq", 128, True),
            r"model\.layers\.0\.self_attn\.q_proj.weight: 96 inputs are not whole groups of 128",
        ),
    ],
)
def test_other_settings_are_refused_by_name(config, message, tmp_path):
    save_tiny(tmp_path, **WIDE | {"hidden_size": 96})
    to_int4(tmp_path, "awq", 32)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop(f"{UP}.scales"), rf"1 weights are missing: {UP}\.scales"),
        (lambda stored: stored.pop(f"{UP}.qzeros"), rf"1 weights are missing: {UP}\.qzeros"),
        (
            lambda stored: stored.update({f"{UP}.qweight": torch.zeros(8, 8, dtype=torch.int32)}),
            rf"{UP}\.qweight has shape \[8, 8\], expected \[32, 384\]",
        ),
        (
            lambda stored: stored.update({f"{UP}.qzeros": torch.zeros(2, 48)}),
            rf"{UP}\.qzeros is stored as F32; supported: I32",
        ),
        (lambda stored: stored[f"{UP}.scales"].fill_(torch.inf), rf"{UP}\.weight holds NaN or inf"),
        (lambda stored: stored[f"{UP}.g_idx"].fill_(7), rf"{UP}\.g_idx names groups 7 to 7; the matrix has 2"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, INT4])
def test_broken_directories(change, message, dtype, tmp_path):
    save_tiny(tmp_path, **WIDE)
    to_int4(tmp_path, "gptq", symmetric=False)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, dtype=dtype)


def test_zero_points_of_a_symmetric_checkpoint(tmp_path):
    """Kernels do not read the zero points of a checkpoint that is declared symmetric, so zero points other than 8 are
    refused."""
    save_tiny(tmp_path, **WIDE)
    to_int4(tmp_path, "gptq", symmetric=False)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["sym"] = True
    (tmp_path / "config.json").write_text(json.dumps(raw))
    load_model(tmp_path)
    with pytest.raises(ValueError, match=r"zero points other than 8, and config\.json calls it symmetric"):
        load_model(tmp_path, dtype=INT4)


def test_quantised_weights_without_a_word_in_the_config_are_refused(tmp_path):
    save_tiny(tmp_path, **WIDE)
    to_int4(tmp_path, "gptq")
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"config\.json has no quantization_config; download config\.json again"):
        load_model(tmp_path)
