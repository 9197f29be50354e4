"""A draft that has the same embedding or head as the target shares its memory, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smc.distill.student import cut
from smc.loading import loaded_models
from smc.local_engine import ModelPair, local_engine
from smc.model.decoder import Decoder
from smc.model.linear import DTYPES
from smc.model.loader import load_model, save_model
from tests.model.dense import dense_logits
from tests.model.tiny import random_decoder, save_byte_level, tiny_config
from tests.pairwise import one_of
from tests.scheduler.harness import CASES, answers, request

IDS_T = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2))
EMBEDDING = "model.embed_tokens.weight"


def save_pair(folder: Path, tied: bool, **changes: int) -> tuple[Path, Path]:
    """Save a target, and a draft that is one of its layers."""
    whole = random_decoder(tiny_config("llama", tied_embeddings=tied, hidden_size=64, intermediate_size=64, **changes))
    for role, model in (("target", whole), ("draft", cut(whole, (1,)))):
        save_model(model, folder / role)
    return folder / "target", folder / "draft"


def both(folder: tuple[Path, Path], dtype: str, draft_dtype: str | None = None) -> tuple[Decoder, Decoder]:
    target = load_model(folder[0], dtype=DTYPES[dtype])
    return target, load_model(folder[1], dtype=DTYPES[draft_dtype or dtype], beside=target)


def bytes_of(*models: Decoder) -> int:
    """Return the bytes of the models' weights; shared storage counts once."""
    storages = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for model in models
        for weight in model.parameters()
    }
    return sum(storages.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int4"])
def test_shared_weights_use_memory_once(tied, dtype, tmp_path):
    directories = save_pair(tmp_path, tied)
    target, draft = both(directories, dtype)
    alone = load_model(directories[1], dtype=DTYPES[dtype])
    assert draft.embed.weight is target.embed.weight and draft.lm_head.weight is target.lm_head.weight
    saved = alone.embed.weight.nbytes + (
        0 if alone.lm_head.weight is alone.embed.weight else alone.lm_head.weight.nbytes
    )
    saved += alone.lm_head.scale.nbytes if dtype == "fp8" else 0
    assert bytes_of(target, draft) == bytes_of(target) + bytes_of(alone) - saved
    assert torch.equal(dense_logits(draft, IDS_T), dense_logits(alone, IDS_T))
    assert not draft.embed.weight.requires_grad


@pytest.mark.parametrize(("dtype", "draft_dtype"), [("bfloat16", "fp8"), ("fp8", "bfloat16"), ("bfloat16", "int4")])
def test_types_that_differ(dtype, draft_dtype, tmp_path):
    """The embedding is bfloat16 for all these types and is shared; a head in FP8 is a separate matrix."""
    directories = save_pair(tmp_path, True)
    target, draft = both(directories, dtype, draft_dtype)
    assert draft.embed.weight is target.embed.weight
    assert (draft.lm_head.weight is target.lm_head.weight) == ("fp8" not in (dtype, draft_dtype))
    alone = load_model(directories[1], dtype=DTYPES[draft_dtype])
    assert torch.equal(dense_logits(draft, IDS_T), dense_logits(alone, IDS_T))


def change(directory: Path, name: str) -> None:
    """Flip the last bit of the last number."""
    file = directory / "model.safetensors"
    stored = load_file(file)
    stored[name].view(torch.int32)[-1, -1] ^= 1
    save_file(stored, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_one_bit_makes_another_matrix(tied, tmp_path):
    directories = save_pair(tmp_path, tied)
    change(directories[1], EMBEDDING)
    target, draft = both(directories, "float32")
    assert draft.embed.weight is not target.embed.weight
    assert not torch.equal(draft.embed.weight, target.embed.weight)
    assert (draft.lm_head.weight is target.lm_head.weight) == (not tied)
    if not tied:
        change(directories[1], "lm_head.weight")
        target, draft = both(directories, "float32")
        assert draft.lm_head.weight is not target.lm_head.weight


def test_another_shape_shares_nothing(tmp_path):
    (target_dir, _), (draft_dir, _) = save_pair(tmp_path / "a", True), save_pair(tmp_path / "b", True, vocab_size=290)
    target, draft = both((target_dir, draft_dir), "float32")
    assert draft.embed.weight is not target.embed.weight


@pytest.mark.parametrize("config", one_of(*CASES[::-1]), ids=lambda case: case.form)
def test_the_same_answers(config, tmp_path):
    directories = save_pair(tmp_path, True)
    for directory in directories:
        save_byte_level(directory)
    pair = loaded_models("files", directories, "cpu", None).pair("cpu", "cpu")
    assert pair.draft.embed.weight is pair.target.embed.weight
    apart = ModelPair(load_model(directories[0]), load_model(directories[1]), pair.tokenizer, pair.max_context)
    asked = [
        request(request_id=f"{method} {seed}", method=method, seed=seed, max_tokens=12, ignore_eos=True)
        for method in ("smc", "exact", "target", "draft")
        for seed in range(1)
    ]
    found, expected = (answers(local_engine(each, config), asked) for each in (pair, apart))
    assert all(found[name].tokens == expected[name].tokens for name in expected)


def test_check_says_so(smcserve, tmp_path):
    directories = save_pair(tmp_path, False)
    for directory in directories:
        save_byte_level(directory)
    names = ("--target", directories[0], "--draft", directories[1])
    report = json.loads(smcserve("check", *names, "--json").out)
    assert report["shared_bytes"] == 2 * 300 * 64 * 2
    assert "shared: 0.07 MiB of the draft's embedding and head are the target's" in smcserve("check", *names).out
    change(directories[1], EMBEDDING)
    assert json.loads(smcserve("check", *names, "--json").out)["shared_bytes"] == 300 * 64 * 2
    change(directories[1], "lm_head.weight")
    assert json.loads(smcserve("check", *names, "--json").out)["shared_bytes"] == 0
    assert "shared" not in smcserve("check", *names).out.partition("ok")[2].replace("shared token ids", "")
