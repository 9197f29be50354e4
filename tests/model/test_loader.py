"""Saving and loading a model changes nothing, and broken directories are refused with an error that names the cause."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from smc.model.config import ModelConfig
from smc.model.loader import load_model, save_model
from smc.model.weight_map import weight_slices
from tests.model.tiny import random_decoder, save_tiny, tiny_config, write_json

FAMILIES = ["llama", "qwen2", "qwen3"]
UP = "model.layers.1.mlp.up_proj.weight"


def edit(directory, change) -> None:
    """Apply `change` to the stored mapping of names to tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def shard(directory) -> list[str]:
    """Split the weights into two files with an index."""
    tensors = list(load_file(directory / "model.safetensors").items())
    (directory / "model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": dict(tensors[::2]),
        "model-00002-of-00002.safetensors": dict(tensors[1::2]),
    }
    for file, part in files.items():
        save_file(part, directory / file)
    write_json(
        directory / "model.safetensors.index.json",
        {"weight_map": {name: file for file, part in files.items() for name in part}},
    )
    return list(files)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_exact(family, tied, tmp_path):
    model = random_decoder(tiny_config(family, tied_embeddings=tied))
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), name
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)


@pytest.mark.parametrize("family", FAMILIES)
def test_places_cover_every_weight_once(family):
    config = tiny_config(family)
    parameters = {name: torch.zeros_like(weight) for name, weight in random_decoder(config).named_parameters()}
    for place in weight_slices(config).values():
        view = place.view(parameters)
        assert view.shape == place.shape
        view += 1
    assert all((weight == 1).all() for weight in parameters.values())


def test_storage_type_is_chosen_by_the_caller(tmp_path):
    model = random_decoder(tiny_config())
    save_model(model, tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(load_model(tmp_path).embed.weight, model.embed.weight.bfloat16().float())


def test_loads_shards(tmp_path):
    save_tiny(tmp_path)
    shares: list[float] = []
    whole = load_model(tmp_path, progress=shares.append).state_dict()
    assert shares == sorted(shares) and shares[-1] == 1 and len(shares) > 10
    shard(tmp_path)
    assert all(torch.equal(weight, whole[name]) for name, weight in load_model(tmp_path).state_dict().items())


def test_second_name_of_a_tied_matrix_and_old_buffers_are_ignored(tmp_path):
    save_tiny(tmp_path, tied_embeddings=True)
    extra = {
        "lm_head.weight": torch.full((300, 32), torch.nan),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    edit(tmp_path, lambda tensors: tensors.update(extra))
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.embed.weight


def test_no_weights(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json; no weights were found"
    ):
        load_model(tmp_path)


def test_bin_is_named_as_not_supported(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"found pytorch_model\.bin; .*\.bin and other formats are not"):
        load_model(tmp_path)


def test_missing_shard(tmp_path):
    save_tiny(tmp_path)
    files = shard(tmp_path)
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"1 of 2 shards .* are missing: {files[1]}"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_broken_index(content, tmp_path):
    save_tiny(tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_file(keep, tmp_path):
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        load_model(tmp_path)


def test_missing_weights_are_counted(tmp_path):
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    with pytest.raises(ValueError, match=r"9 weights are missing: model\.layers\.1\..*and 4 more"):
        load_model(tmp_path)


def test_untied_head_must_be_there(tmp_path):
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"1 weights are missing: lm_head\.weight"):
        load_model(tmp_path)


def test_unknown_weights(tmp_path):
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    with pytest.raises(ValueError, match=r"1 weights are unknown to llama: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(tmp_path)


def test_wrong_shape(tmp_path):
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({UP: torch.zeros(47, 32)}))
    with pytest.raises(ValueError, match=rf"{UP} has shape \[47, 32\], expected \[48, 32\]"):
        load_model(tmp_path)


def test_wrong_storage_type(tmp_path):
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({UP: torch.zeros(48, 32, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=f"{UP} is stored as I8; supported: F32, F16, BF16"):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite(value, tmp_path):
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: tensors[UP][5].__setitem__(3, value))
    with pytest.raises(ValueError, match=f"{UP} holds NaN or inf"):
        load_model(tmp_path)


def test_overflow_by_conversion(tmp_path):
    save_tiny(tmp_path)
    edit(tmp_path, lambda tensors: tensors[UP][5].__setitem__(3, 1e6))
    load_model(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"{UP} holds NaN or inf as float16"):
        load_model(tmp_path, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "other"}}, "rope scaling 'other' is not supported; supported: .*'yarn'"),
        ({"vocab_size": None}, "vocab_size=None is not a positive integer"),
        ({"hidden_size": "32", "head_dim": None}, "hidden_size|unsupported operand"),
        ({"num_attention_heads": 3}, "is not a multiple of num_key_value_heads=2"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
    ],
)
def test_refused_configs(change, message, tmp_path):
    write_json(tmp_path / "config.json", tiny_config().to_hf() | change)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_unreadable_config(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)


def test_config_field_missing(tmp_path):
    raw = tiny_config().to_hf()
    del raw["intermediate_size"]
    write_json(tmp_path / "config.json", raw)
    with pytest.raises(ValueError, match="field 'intermediate_size' is missing"):
        ModelConfig.from_hf(tmp_path)


def test_a_git_lfs_pointer_is_named(tmp_path):
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a Git LFS pointer, .*run `git lfs pull` in "):
        load_model(tmp_path)


def test_gguf_files_are_refused_with_what_to_take_instead(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-Q4_K_M.gguf")
    with pytest.raises(ValueError, match="GGUF files are not supported, take the model's safetensors files instead"):
        load_model(tmp_path)


def test_missing_head_with_unstated_tying(tmp_path):
    save_tiny(tmp_path, tied_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ValueError, match='add "tie_word_embeddings": true if the head is the embedding'):
        load_model(tmp_path)
