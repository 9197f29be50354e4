"""`check_pair` describes a pair that fits, and reports every problem of one that does not, without reading a weight."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from smc.model.check import check_pair, require_pair
from tests.model.tiny import random_decoder, save_byte_level, save_sentencepiece, save_tiny, tiny_config, write_json


@pytest.fixture
def pair(tmp_path):
    """A target and a draft of different families, padded vocabulary sizes and contexts, with one tokenizer."""
    target = save_byte_level(save_tiny(tmp_path / "target", family="qwen3", vocab_size=320, tied_embeddings=True))
    draft = save_byte_level(
        save_tiny(tmp_path / "draft", family="llama", num_layers=1, vocab_size=304, max_context=128)
    )
    return target, draft


def test_a_pair_that_fits(pair):
    report = require_pair(*pair)
    assert report == check_pair(*pair)
    assert report.problems == ()
    assert (report.vocab_size, report.max_context) == (304, 128)
    assert report.target.config == tiny_config("qwen3", vocab_size=320, tied_embeddings=True)
    expected = sum(weight.numel() for weight in random_decoder(report.target.config).parameters())
    assert (report.target.parameters, report.target.bytes) == (expected, 4 * expected)


def test_weights_are_not_read(pair):
    file = pair[0] / "model.safetensors"
    tensors = load_file(file)
    save_file({name: weight.fill_(torch.nan).bfloat16() for name, weight in tensors.items()}, file)
    report = require_pair(*pair)
    assert report.target.bytes == 2 * report.target.parameters


def test_every_problem_is_named_at_once(pair):
    target, draft = pair
    (target / "tokenizer.json").unlink()
    write_json(draft / "config.json", tiny_config(vocab_size=304, num_layers=2).to_hf())
    report = check_pair(target, draft)
    assert report.target is not None and report.draft is None
    assert (report.vocab_size, report.max_context) == (0, 0)
    assert len(report.problems) == 2
    with pytest.raises(ValueError, match=r"(?s)target: .*tokenizer\.json is missing.*draft: .*9 weights are missing"):
        require_pair(target, draft)


def test_different_kinds_of_tokenizer(pair):
    save_sentencepiece(pair[1])
    assert "different vocabularies" in check_pair(*pair).problems[0]


def test_embedding_smaller_than_the_tokenizer(pair):
    save_tiny(pair[1], vocab_size=270)
    with pytest.raises(ValueError, match=r"draft: .*vocab_size=270 is below the tokenizer's \d+ ids"):
        require_pair(*pair)


def test_missing_directory(pair, tmp_path):
    problems = check_pair(pair[0], tmp_path / "nowhere").problems
    assert any("nowhere/config.json is missing" in problem for problem in problems)
