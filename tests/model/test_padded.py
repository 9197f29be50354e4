"""A padded model computes the same function as the small one: in memory, in shards, saved to a directory, and run by
transformers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import grow as grow_files
from benchmarks.grow import save_padded_model
from services.cli.service_options import worker_group_config
from smc import demo
from smc.demo.problems import generate
from smc.model.check import require_pair
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder
from smc.model.files import read_headers
from smc.model.loader import load_model, save_model
from smc.model.padded import PaddedWeights, padded_config, padded_model
from smc.model.parallel import Shard
from smc.model.presets import PRESETS, preset
from smc.model.source import SourcePair
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import count_parameters, weight_slices
from tests.model.dense import dense_logits
from tests.model.tiny import random_decoder, save_byte_level, save_tiny, tiny_config
from tests.pairwise import few_of_pairs

FAR_BELOW = -100.0
# transformers takes seconds to import, in every process that uses it.
TRANSFORMERS = pytest.mark.xdist_group("transformers")
MODEST = {
    "vocab_size": 700,
    "hidden_size": 84,
    "num_layers": 3,
    "num_heads": 12,
    "num_kv_heads": 3,
    "intermediate_size": 56,
    "max_context": 2048,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "rms_eps": 1e-6,
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_context",
)
CHANGES = {
    "wider groups and heads": {},
    "narrower groups: a key head twice": {"num_heads": 4, "num_kv_heads": 4},
    "heads of one size": {"head_dim": 8},
    "heads four times as wide": {"head_dim": 64},
    "a tied shape": {"tied_embeddings": True},
    "one feature more": {"hidden_size": 33},
    "no other tokens": {"vocab_size": 300, "hidden_size": 32},
}


def shape_of(small: ModelConfig, **changes) -> ModelConfig:
    """A modest shape. Its family and other settings must not replace those of the small model."""
    return tiny_config("llama", **({**MODEST, "head_dim": 2 * small.head_dim} | changes))


def tokens_T(vocab: int, count: int = 60) -> Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(2))


def grow(small: Decoder, shape: ModelConfig) -> Decoder:
    return padded_model(small, shape, dtype=torch.float32, device="cpu")


def assert_same_function(small: Decoder, grown: Decoder) -> None:
    vocab = small.config.vocab_size
    expected_TV, found_TV = (dense_logits(model, tokens_T(vocab)) for model in (small, grown))
    assert expected_TV.std() > 0.1, "logits too flat to tell models apart"
    torch.testing.assert_close(found_TV[:, :vocab], expected_TV, atol=1e-4, rtol=0)
    assert found_TV[:, vocab:].isfinite().all() and (found_TV[:, vocab:] < FAR_BELOW).all()


@pytest.mark.parametrize(
    ("family", "tied", "changes"),
    few_of_pairs(product(["llama", "qwen2", "qwen3"], [False, True], CHANGES.values())),
    ids=lambda value: next((name for name, changes in CHANGES.items() if changes is value), None),
)
def test_the_same_function(family, tied, changes):
    """Covers scaled rotary frequencies of llama, and grouped heads of every family."""
    small = random_decoder(tiny_config(family, tied_embeddings=tied))
    shape = shape_of(
        small.config, **(changes if family != "qwen3" or changes.get("head_dim") != 8 else {"head_dim": 16})
    )
    grown = grow(small, shape)
    of_the_shape = {name: getattr(shape, name) for name in SIZES}
    assert grown.config == replace(small.config, **of_the_shape, tied_embeddings=False, rms_eps=grown.config.rms_eps)
    assert_same_function(small, grown)


def test_eps_counts():
    """With a residual as small as eps, an eps that is only nearly right gives wrong results."""
    for family in ("llama", "qwen3"):
        small = random_decoder(tiny_config(family, rms_eps=0.05))
        assert_same_function(small, grow(small, shape_of(small.config)))


def test_a_tied_model_stays_tied_if_it_can():
    small = random_decoder(tiny_config(tied_embeddings=True))
    grown = grow(small, shape_of(small.config, vocab_size=300, tied_embeddings=True))
    assert grown.lm_head.weight is grown.embed.weight
    assert_same_function(small, grown)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("degree", [2, 5])
def test_shards_are_the_model(family, degree):
    small = random_decoder(tiny_config(family))
    whole = grow(small, shape_of(small.config))
    published = {
        name: place.view(dict(whole.named_parameters())) for name, place in weight_slices(whole.config).items()
    }
    for rank in range(degree):
        shard = Shard(rank, degree)
        model = padded_model(
            small, shape_of(small.config), dtype=torch.float32, device="cpu", shard=shard, reduce=Tensor.clone
        )
        parameters = dict(model.named_parameters())
        for name, where in weight_slices(whole.config, shard).items():
            for block in where.blocks():
                view = block.view(parameters)
                assert torch.equal(view, published[name][block.part]), name
                view.zero_()
        assert not any(weight.any() for weight in parameters.values()), "padding is not zero"


@TRANSFORMERS
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_directory_is_the_model(family, tmp_path, monkeypatch):
    """The weights are written to several files with holes. Our loader and transformers read them, tokenizer
    included."""
    monkeypatch.setattr(grow_files, "FILE_BYTES", 150_000)
    monkeypatch.setattr(grow_files, "PIECE_BYTES", 256)
    small, out, told = tmp_path / "small", tmp_path / "grown", []
    size = Tokenizer.load(save_byte_level(small)).size
    save_tiny(small, family=family, vocab_size=size)
    config = save_padded_model(
        small, shape_of(tiny_config(family)), out, dtype=torch.float32, on_bytes=lambda *counts: told.append(counts)
    )

    per_file = Counter(tensor.file for tensor in read_headers(out).values())
    assert len(per_file) > 2 and all(path.stat().st_size < 160_000 or count == 1 for path, count in per_file.items())
    assert told == sorted(told) and told[-1] == (4 * count_parameters(config),) * 2
    grown = load_model(out)
    assert grown.config == config == ModelConfig.from_hf(out)
    assert_same_function(load_model(small), grown)

    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval().requires_grad_(False)
    prompt_T = tokens_T(size)
    torch.testing.assert_close(
        dense_logits(grown, prompt_T)[:, :size], theirs(prompt_T[None]).logits[0, :, :size], atol=1e-4, rtol=0
    )


@TRANSFORMERS
def test_the_vocabulary_is_the_shape_s(tmp_path):
    import transformers

    """Every new id has a token, which no text encodes to, not even text that spells it. All other tokens are
    unchanged."""
    small, out = tmp_path / "small", tmp_path / "grown"
    before = Tokenizer.load(
        save_byte_level(small, words=("added",), chat_template="{{ messages[0].content }}", model_max_length=64)
    )
    save_tiny(small, vocab_size=before.size)
    save_padded_model(small, shape_of(tiny_config()), out, dtype=torch.bfloat16)
    after = Tokenizer.load(out)
    assert after.size == 700 and after.eos_ids == before.eos_ids
    assert [after.bytes_of(i) for i in range(before.size)] == [before.bytes_of(i) for i in range(before.size)]
    for text in ("the added fox<tool call> 日本<|eos|>", "<|unused 699|>", "<|bos|>"):
        assert after.encode(text) == before.encode(text)
    assert after.chat([{"content": "hi", "role": "user"}]) == before.chat([{"content": "hi", "role": "user"}])
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 2048
    assert transformers.AutoTokenizer.from_pretrained(out)("the added fox").input_ids == before.encode("the added fox")


def test_a_model_with_ids_of_no_token_keeps_its_tokenizer(tmp_path):
    size = Tokenizer.load(save_byte_level(tmp_path / "small")).size
    save_tiny(tmp_path / "small", vocab_size=size + 5)
    save_padded_model(tmp_path / "small", shape_of(tiny_config()), tmp_path / "grown", dtype=torch.bfloat16)
    assert Tokenizer.load(tmp_path / "grown").size == size


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(dense_logits(model, torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_the_shipped_pair_answers_as_before(monkeypatch):
    """`--load grown` finds the shapes by name; they share a vocabulary. Answers in float32 are equal token by token."""
    monkeypatch.setitem(
        PRESETS,
        "big",
        tiny_config(
            **MODEST | {"hidden_size": 320, "num_layers": 9, "num_heads": 12, "head_dim": 128, "intermediate_size": 648}
        ),
    )
    monkeypatch.setitem(
        PRESETS, "less big", tiny_config(**MODEST | {"hidden_size": 192, "head_dim": 64, "intermediate_size": 256})
    )
    places = (demo.TARGET, demo.DRAFT)
    pair = SourcePair.of("grown", Path("big"), Path("less big"), small=places)
    tokenizer = pair.target.tokenizer()
    assert (
        tokenizer.size == 700
        and pair.max_context == 2048
        and tokenizer.fingerprint() == pair.draft.tokenizer().fingerprint()
    )
    question = generate(0, 1, "test")[0].question
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    assert prompt == Tokenizer.load(demo.TARGET).chat([{"role": "user", "content": question}])
    for source, place in zip((pair.target, pair.draft), places):
        grown = source.load(dtype=torch.float32, device="cpu")
        assert grown.config == source.config and source.parameters == sum(
            weight.numel() for weight in grown.parameters()
        )
        assert greedy(grown, prompt, 12) == greedy(load_model(place), prompt, 12)


def test_bfloat16_stays_close():
    """About half of the scales in this shape are powers of two; the others round."""
    small = load_model(demo.TARGET)
    shape = tiny_config(**MODEST | {"hidden_size": 320, "num_layers": 8, "head_dim": 128, "intermediate_size": 640})
    ids_T = tokens_T(512)
    exact_TV = dense_logits(small, ids_T)
    rounded_TV = dense_logits(load_model(demo.TARGET, dtype=torch.bfloat16), ids_T)
    grown_TV = dense_logits(padded_model(small, shape, dtype=torch.bfloat16, device="cpu"), ids_T)[:, :512]
    of_bfloat16, of_growing = (float((found_TV - exact_TV).abs().mean()) for found_TV in (rounded_TV, grown_TV))
    assert of_growing < 1.5 * of_bfloat16


def test_a_published_shape_with_fewer_layers():
    assert preset("llama-8b/4") == replace(preset("llama-8b"), num_layers=4)
    for name, said in {
        "llama-9b/4": "is not a known shape",
        "llama-8b/0": "layers='0'",
        "llama-8b/": "layers=''",
    }.items():
        with pytest.raises(ValueError, match=said):
            preset(name)


def test_published_shapes_hold_the_shipped_pair():
    """Every published shape has room for the shipped pair, whatever its family and head size, unless it has a single
    key/value head."""
    for place in (demo.TARGET, demo.DRAFT):
        small = ModelConfig.from_hf(place)
        for shape in PRESETS.values():
            if shape.num_kv_heads < small.num_kv_heads:
                with pytest.raises(ValueError, match="num_kv_heads=1; allowed: >= 2"):
                    padded_config(small, shape)
                continue
            config = padded_config(small, shape)
            assert (
                config.family == "llama"
                and config.rope_theta == small.rope_theta
                and 0 < config.rms_eps < small.rms_eps
            )
    cut = SourcePair.of("grown", Path("llama-8b"), Path("llama-8b/8"), small=(demo.TARGET, demo.DRAFT)).draft
    assert (cut.name, cut.config.num_layers, cut.config.hidden_size) == ("llama-8b/8", 8, 4096)
    pair = SourcePair.of("grown", Path("llama-8b"), Path("llama-1b"), small=(demo.TARGET, demo.DRAFT))
    assert pair.target.parameters == 8_030_261_248 and pair.target.name == "llama-8b" and pair.max_context == 131_072


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 299}, "vocab_size=299; allowed: >= 300"),
        ({"hidden_size": 32}, "hidden_size=32; allowed: >= 33, one more than the model's, for tokens"),
        ({"num_layers": 1}, "num_layers=1; allowed: >= 2"),
        ({"intermediate_size": 47}, "intermediate_size=47; allowed: >= 48"),
        ({"head_dim": 12}, "head_dim=12; allowed: multiples of the model's 8"),
        (
            {"num_heads": 12, "num_kv_heads": 1},
            "num_kv_heads=1; allowed: >= 2, for 2 of 2 query heads each, where the shape's have 12",
        ),
        (
            {"num_heads": 3, "num_kv_heads": 3},
            "num_kv_heads=3; allowed: >= 4, for 2 of 2 query heads each, where the shape's have 1",
        ),
        (
            {"num_layers": 1, "hidden_size": 8},
            "hidden_size=8; .*; num_layers=1; .*Take a larger shape or a smaller model",
        ),
    ],
)
def test_shapes_that_are_too_small(changes, message):
    small = random_decoder(tiny_config())
    with pytest.raises(ValueError, match=f"the shape cannot hold the model: .*{message}"):
        PaddedWeights(small, shape_of(small.config, **changes))


def test_a_model_without_eps():
    with pytest.raises(ValueError, match=r"rms_norm_eps=0\.0 of the model; allowed: above 0"):
        padded_config(tiny_config(rms_eps=0.0), shape_of(tiny_config()))


def test_refusals_come_before_any_file(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        save_padded_model(
            save_tiny(tmp_path / "no text"), shape_of(tiny_config()), tmp_path / "out", dtype=torch.bfloat16
        )
    small = save_byte_level(tmp_path / "small")
    save_model(random_decoder(tiny_config(vocab_size=99)), small)
    with pytest.raises(ValueError, match=r"vocab_size=99 is below the tokenizer's \d+ ids"):
        save_padded_model(small, shape_of(tiny_config()), tmp_path / "out", dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="small is there and not an empty directory; give the name of a new one"):
        save_padded_model(demo.TARGET, preset("llama-1b"), small, dtype=torch.bfloat16)


def test_pairs_that_cannot_be():
    small = (demo.TARGET, demo.DRAFT)
    with pytest.raises(ValueError, match="'llama-9b' is not a known shape; allowed: llama-1b, "):
        SourcePair.of("grown", Path("llama-9b"), Path("llama-1b"), small=small)
    with pytest.raises(ValueError, match="vocabularies of 128256 and 151936 tokens; a pair shares one"):
        SourcePair.of("grown", Path("llama-8b"), Path("qwen3-0.6b"), small=small)


def test_command(smcserve, tmp_path, monkeypatch):
    monkeypatch.setitem(
        PRESETS,
        "modest",
        tiny_config(**MODEST | {"hidden_size": 320, "num_layers": 8, "head_dim": 64, "intermediate_size": 640}),
    )
    ran = smcserve("grow", demo.TARGET, tmp_path / "target", "--shape", "modest")
    assert ran.code == 0 and "in the shape modest, 0.01 B weights" in ran.err
    assert smcserve("grow", demo.DRAFT, "--shape", "modest", tmp_path / "draft", "--dtype", "float32").code == 0
    report = require_pair(tmp_path / "target", tmp_path / "draft")
    assert report.vocab_size == 700 and report.max_context == 2048
    assert load_model(tmp_path / "target", dtype=torch.bfloat16).config.num_layers == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "llama-9b"), "'llama-9b' is not a known shape; allowed: llama-1b"),
        (("--shape", "llama-1b", "--dtype", "int8"), "--dtype int8; allowed: float32, bfloat16, float16"),
        ((), "Missing option '--shape'"),
    ],
)
def test_mistakes(smcserve, tmp_path, arguments, message):
    ran = smcserve("grow", demo.TARGET, tmp_path / "out", *arguments)
    assert (ran.code, ran.out) == (2, "") and message in ran.err and not (tmp_path / "out").exists()


def test_worker_groups_grow_the_shipped_pair():
    config = worker_group_config({"load": "grown", "target": Path("llama-8b"), "draft": Path("llama-1b")})
    assert config.sources.draft.small == demo.DRAFT and config.sources.target.small == demo.TARGET
    with pytest.raises(ValueError, match="--load grown needs --target and --draft, each the name of a published shape"):
        worker_group_config({"load": "grown"})
