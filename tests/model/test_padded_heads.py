"""Models whose heads the kernels of a GPU do not take are padded when they are loaded, and compute the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from services.launch.config import WorkerGroupConfig
from smc.distill.student import StudentSpec, make_student, save_student
from smc.memory.kv_cache import KVPool
from smc.model.check import check_pair
from smc.model.config import GPU_HEAD_DIMS, ModelConfig
from smc.model.linear import FP8, INT4, Linear
from smc.model.loader import load_model, random_model, save_with_config
from smc.model.parallel import Shard
from smc.model.source import ModelSource
from smc.model.weight_map import count_parameters
from tests.model.compressed import KINDS, compress
from tests.model.dense import dense_logits
from tests.model.int4 import LAYOUTS, to_int4
from tests.model.padded_heads import MODELS, PHI3, QWEN2, as_on_a_gpu, save_model_of
from tests.model.ranks import in_ranks
from tests.model.tiny import save_byte_level, save_tiny, tiny_config

OF_INT4 = {"head_dim": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
"""Sizes that four ranks can share in int4."""
IDS_T = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2))


def logits_of(directory, **options) -> Tensor:
    """Return the logits of a directory's weights, in float32 once they are loaded: no activation is rounded."""
    model = load_model(directory, **options)
    for matrix in model.modules():
        if isinstance(matrix, Linear) and matrix.scale is not None:
            matrix.weight = nn.Parameter(matrix.values(slice(0, matrix.out_features), torch.float32), False)
            matrix.scale, matrix.zero, matrix.group = None, None, 0
    return dense_logits(model.float(), IDS_T)


def check_ranks(directory, expected_TV: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Compare padded models on one, two and four ranks with logits; with four ranks, heads are cut unevenly."""
    for degree in (1, 2, 4):
        for found_TV in in_ranks(
            degree, lambda shard, reduce: logits_of(directory, dtype=dtype, shard=shard, reduce=reduce)
        ):
            assert (found_TV - expected_TV).norm() <= 1e-5 * expected_TV.norm(), degree


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_without_padding(name, tmp_path, monkeypatch):
    save_model_of(PHI3 | MODELS[name], tmp_path)
    expected_TV, whole = logits_of(tmp_path), load_model(tmp_path)
    assert expected_TV.std() > 0.1, "logits too flat to tell models apart"
    as_on_a_gpu(monkeypatch)
    config = load_model(tmp_path).config
    assert config.head_dim in GPU_HEAD_DIMS and config.stored_head_dim == whole.config.head_dim < config.head_dim
    assert config.rotated == whole.config.rotated and count_parameters(config) == count_parameters(whole.config)
    check_ranks(tmp_path, expected_TV)


@pytest.mark.parametrize("head_dim", GPU_HEAD_DIMS)
def test_heads_that_kernels_take_are_not_padded(head_dim):
    config = tiny_config(head_dim=head_dim)
    assert config.on_device("cuda:1") is config


def test_sizes_on_devices():
    def padded(head_dim: int, device: object) -> int:
        return tiny_config("phi3", head_dim=head_dim).on_device(device).head_dim

    assert [padded(size, "cuda") for size in (8, 80, 96, 100, 120, 130)] == [16, 128, 128, 128, 128, 256]
    assert padded(96, torch.device("cuda", 1)) == 128 and padded(96, "cpu") == padded(96, torch.device("cpu")) == 96
    on_gpu = tiny_config("phi3", head_dim=96).on_device("cuda")
    assert on_gpu.on_device("cuda") is on_gpu
    assert (on_gpu.rotated, on_gpu.score_scale, on_gpu.stored_head_dim) == (96, 96**-0.5, 96)


@pytest.mark.parametrize(
    ("family", "head_dim", "message"),
    [
        (
            "qwen3",
            96,
            "head_dim=96 of qwen3, which normalises queries and keys; allowed on a GPU: 16, 32, 64, 128, 256",
        ),
        ("olmo2", 80, "head_dim=80 of olmo2, which normalises"),
        ("llama", 320, "head_dim=320; allowed on a GPU: 16, 32, 64, 128, 256, and smaller ones"),
    ],
)
def test_heads_that_cannot_be_padded_are_refused(family, head_dim, message):
    config = tiny_config(family, head_dim=head_dim)
    assert config.on_device("cpu") is config
    with pytest.raises(ValueError, match=message):
        config.on_device("cuda")


@pytest.mark.parametrize("kind", ["", *KINDS])
@pytest.mark.parametrize("raw", [{}, QWEN2], ids=["fused", "with biases"])
def test_fp8(raw, kind, tmp_path, monkeypatch):
    """Stored in FP8 and dequantised or kept, or rounded to FP8: padding changes no number and no scale."""
    save_model_of(PHI3 | raw | {"hidden_size": 160}, tmp_path)
    if kind:
        compress(tmp_path, kind)
    expected_TV, kept_TV = logits_of(tmp_path), logits_of(tmp_path, dtype=FP8)
    as_on_a_gpu(monkeypatch)
    check_ranks(tmp_path, expected_TV)
    check_ranks(tmp_path, kept_TV, FP8)
    assert dense_logits(load_model(tmp_path, dtype=FP8), IDS_T).isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", [32, 64, -1])
def test_stored_int4(layout, group, tmp_path, monkeypatch):
    """Dequantised, and kept in int4. Heads of 96 cut groups into groups of 32 inputs."""
    save_model_of(PHI3 | OF_INT4, tmp_path)
    to_int4(tmp_path, layout, group, symmetric=layout != "gptq")
    expected_TV, kept_TV = logits_of(tmp_path), logits_of(tmp_path, dtype=INT4)
    as_on_a_gpu(monkeypatch)
    check_ranks(tmp_path, expected_TV)
    padded = load_model(tmp_path, dtype=INT4)
    assert padded.layers[0].o.group == 32 and padded.layers[0].o.in_features == 4 * 128
    check_ranks(tmp_path, kept_TV, INT4)
    assert dense_logits(padded, IDS_T).isfinite().all()


def test_int4_groups_that_padded_heads_would_cut_are_refused(tmp_path, monkeypatch):
    save_model_of(PHI3 | OF_INT4 | {"head_dim": 80}, tmp_path)
    to_int4(tmp_path, "gptq", 64)
    save_byte_level(tmp_path)
    report = check_pair(tmp_path, tmp_path).target
    message = (
        r"dtype=int4: layers\.0\.o\.weight has 320 inputs in groups of 64, which heads that are padded to 128 features "
        r"cut at multiples of 16; .*Take dtype=bfloat16"
    )
    assert not report.rank_bytes and "cut at multiples of 16" in report.gpu_obstacle
    load_model(tmp_path, dtype=INT4)
    as_on_a_gpu(monkeypatch)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, dtype=INT4)
    load_model(tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("head_dim", [80, 96])
def test_weights_rounded_to_int4(head_dim, tmp_path, monkeypatch):
    """Each head's columns of o are rounded with their padding, in the groups of all other matrices, alike on any number
    of ranks."""
    save_model_of(PHI3 | OF_INT4 | {"head_dim": head_dim}, tmp_path)
    expected_TV = logits_of(tmp_path)
    plain_error = (logits_of(tmp_path, dtype=INT4) - expected_TV).norm()
    as_on_a_gpu(monkeypatch)
    padded = load_model(tmp_path, dtype=INT4)
    assert {matrix.group for matrix in (padded.layers[0].qkv, padded.layers[0].o, padded.layers[0].down)} == {128}
    found_TV = logits_of(tmp_path, dtype=INT4)
    assert (found_TV - expected_TV).norm() < 1.2 * plain_error
    check_ranks(tmp_path, found_TV, INT4)


def test_random_weights_have_padded_heads(monkeypatch):
    as_on_a_gpu(monkeypatch)
    config = tiny_config("phi3", head_dim=24)
    for dtype in (torch.float32, FP8, INT4):
        shape = replace(config, hidden_size=128, intermediate_size=128, num_heads=4, num_kv_heads=4)
        model = random_model(shape, dtype=dtype, device="cpu", shard=Shard(1, 2), reduce=Tensor.clone)
        assert (model.config.head_dim, model.config.num_heads) == (32, 2)
        assert dense_logits(model, IDS_T).isfinite().all()


def test_a_source_is_padded_where_it_is_loaded(tmp_path, monkeypatch):
    save_model_of(PHI3, tmp_path)
    source = ModelSource("files", tmp_path, ModelConfig.from_hf(tmp_path), 0)
    assert source.load(dtype=torch.float32, device="cpu").config.head_dim == 24
    as_on_a_gpu(monkeypatch)
    assert source.load(dtype=torch.float32, device="cpu").config.head_dim == 32


def test_check_reports_memory_with_padding(tmp_path, monkeypatch):
    save_byte_level(save_model_of(PHI3, tmp_path))
    report = check_pair(tmp_path, tmp_path).target
    as_on_a_gpu(monkeypatch)
    for degree in (1, 2, 3):
        model = load_model(tmp_path, dtype=torch.bfloat16, shard=Shard(0, degree), reduce=Tensor.clone)
        assert report.rank_bytes[degree] == sum(weight.nbytes for weight in model.parameters())
        assert report.rank_token_bytes[degree] == KVPool.page_bytes(model.config, torch.bfloat16)
    assert report.rank_heads[3] == ((2, 1),) * 3 and not report.gpu_obstacle


def test_what_a_gpu_cannot_run_is_known_before_loading(tmp_path):
    directory = save_byte_level(save_tiny(tmp_path, family="qwen3", head_dim=24))
    report = check_pair(directory, directory)
    assert not report.problems, "a CPU runs it"
    assert "head_dim=24 of qwen3" in report.target.gpu_obstacle and not report.target.rank_bytes
    WorkerGroupConfig(target=directory, draft=directory).serving_pair()
    with pytest.raises(ValueError, match=r"draft: head_dim=24 of qwen3, .*; allowed on a GPU: 16, 32, 64, 128, 256"):
        WorkerGroupConfig(target=directory, draft=directory, device="cuda").serving_pair()


@pytest.mark.parametrize("name", ["phi3", "phi3 with partial rotation", "qwen2, which has biases"])
def test_models_are_saved_without_padding(name, tmp_path, monkeypatch):
    raw = PHI3 | MODELS[name]
    stored = load_file(save_model_of(raw, tmp_path) / "model.safetensors")
    as_on_a_gpu(monkeypatch)
    save_with_config(load_model(tmp_path), tmp_path / "copy", raw, torch.float32)
    saved = load_file(tmp_path / "copy" / "model.safetensors")
    assert saved.keys() == stored.keys() and all(torch.equal(saved[each], stored[each]) for each in stored)


def test_drafts_are_cut_from_a_padded_target(tmp_path, monkeypatch):
    """Training changes no weight of padding, so that none is lost when the draft is saved."""
    as_on_a_gpu(monkeypatch)
    target = load_model(save_byte_level(save_model_of(PHI3, tmp_path / "target")))
    made = make_student(target, tmp_path / "target", StudentSpec(layers=1), (1,))
    optimizer = torch.optim.AdamW([each for each in made.model.parameters() if each.requires_grad], 1e-2)
    for _ in range(3):
        dense_logits(made.model, IDS_T).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_student(made, tmp_path / "target", tmp_path / "draft")
    with torch.no_grad():
        expected_TV, found_TV = (
            dense_logits(one.bfloat16(), IDS_T) for one in (made.model, load_model(tmp_path / "draft"))
        )
    assert torch.equal(found_TV, expected_TV)
    with pytest.raises(ValueError, match=r"--shape 96x1 with a target whose heads have 24 features.*--layers"):
        make_student(target, tmp_path / "target", StudentSpec(shape="96x1"))
