"""A draft's own head: the tokens that a text selects, their rows, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.launch.config import WorkerGroupConfig
from smc import demo
from smc.model.draft_vocab import COUNTS_FILE, LEAST_SHARE, MOST_SHARE, DraftVocab, load_counts, save_counts
from smc.model.presets import NoText
from smc.model.tokenizer import Tokenizer
from tests.model.tiny import in_fp8, random_decoder, tiny_config
from tests.scheduler.pairs import letter_tokenizer

EOS = 7
"""The id after those of the seven letters, a = 0 to g = 6."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "like answers.txt"
    file.write_text("ffffff" + "dd" + "bb" + "e", encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("size", "ids", "share"),
    [(1, [7], 1), (2, [5, 7], 5 / 11), (3, [1, 5, 7], 3 / 11), (4, [1, 3, 5, 7], 1 / 11), (6, [0, 1, 3, 4, 5, 7], 0)],
)
def test_the_most_frequent_tokens_are_kept(text, size, ids, share):
    """Among equally frequent tokens the first are kept. Tokens that end texts are always kept. Tokens that the text
    lacks fill the rest."""
    vocab = DraftVocab.of(size, text, letter_tokenizer(8))
    assert vocab.ids_M.tolist() == ids and vocab.vocab == 8
    assert vocab.share == pytest.approx(min(max(share, LEAST_SHARE), MOST_SHARE))


def test_a_long_text_is_counted_piece_by_piece(tmp_path, monkeypatch):
    tokenizer, file = Tokenizer.load(demo.DRAFT), tmp_path / "long.txt"
    file.write_text("".join(f"{i} and {i % 7} are {i + i % 7}, héllo\n" for i in range(300)), encoding="utf-8")
    whole = DraftVocab.of(60, file, tokenizer)
    monkeypatch.setattr("smc.model.draft_vocab.PIECE", 100)
    found = DraftVocab.of(60, file, tokenizer)
    assert np.array_equal(found.ids_M, whole.ids_M) and found.share == whole.share
    assert set(tokenizer.special_ids) | set(tokenizer.eos_ids) <= set(whole.ids_M.tolist())


@pytest.mark.parametrize("size", [0, -1, 8, 9])
def test_sizes_that_cannot_be_are_refused(text, size):
    with pytest.raises(ValueError, match=rf"draft_vocab={size}; allowed: 1\.\.7"):
        DraftVocab.of(size, text, letter_tokenizer(8))


def test_texts_that_cannot_be_are_refused(tmp_path):
    missing, latin, empty = (tmp_path / name for name in ("missing", "latin", "empty"))
    latin.write_bytes("é".encode("latin-1"))
    empty.write_bytes(b"")
    said = {
        missing: "cannot be read: No such file",
        tmp_path: "cannot be read: Is a directory",
        latin: "is not UTF-8",
        empty: "holds no text",
    }
    for file, says in said.items():
        with pytest.raises(ValueError, match=f"draft_vocab_text='{file}' {says}"):
            DraftVocab.of(4, file, letter_tokenizer(8))
    with pytest.raises(ValueError, match="draft_vocab=4 needs draft_vocab_text"):
        DraftVocab.of(4, None, letter_tokenizer(8))
    with pytest.raises(ValueError, match="has no effect on random weights"):
        DraftVocab.of(4, latin, NoText(8))
    assert DraftVocab.of(4, None, NoText(8)).ids_M.tolist() == [0, 1, 2, 3]


def test_without_a_text_the_draft_s_own_counts_are_taken(text, tmp_path):
    """Counts saved with the draft select the same tokens as a text with these counts; a given text takes precedence."""
    counts_V = np.array([0, 2, 0, 2, 1, 6, 0, 0])
    save_counts(tmp_path, counts_V)
    assert np.array_equal(load_counts(tmp_path, 8), counts_V)
    for size in (2, 3, 4, 6):
        found, expected = (
            DraftVocab.of(size, *which)
            for which in ((None, letter_tokenizer(8), tmp_path), (text, letter_tokenizer(8)))
        )
        assert np.array_equal(found.ids_M, expected.ids_M) and found.share == expected.share
    save_counts(tmp_path, counts_V[::-1])
    assert DraftVocab.of(2, text, letter_tokenizer(8), tmp_path).ids_M.tolist() == [5, 7]
    with pytest.raises(ValueError, match=r"draft_vocab=4 needs draft_vocab_text, .* or a draft of `smcserve distill`"):
        DraftVocab.of(4, None, letter_tokenizer(8), tmp_path / "other")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"tokens": [8], "counts": [1]}',
        '{"tokens": [1], "counts": [1, 2]}',
        '{"tokens": [1], "counts": [0]}',
    ],
)
def test_counts_that_cannot_be_are_refused(content, tmp_path):
    (tmp_path / COUNTS_FILE).write_text(content)
    with pytest.raises(ValueError, match=COUNTS_FILE):
        DraftVocab.of(4, None, letter_tokenizer(8), tmp_path)


def test_a_service_reads_it_before_anything_starts(tmp_path):
    file = tmp_path / "text"
    file.write_text("1 + 1 = 2\n", encoding="utf-8")
    sources = WorkerGroupConfig(draft_vocab=64, draft_vocab_text=file).sources
    assert len(sources.draft_vocab.ids_M) == 64
    assert WorkerGroupConfig().sources.draft_vocab is None
    with pytest.raises(ValueError, match="has no effect without draft_vocab"):
        _ = WorkerGroupConfig(draft_vocab_text=file).sources


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_a_head_has_the_rows_of_its_tokens(text, fp8):
    model = random_decoder(tiny_config("llama", vocab_size=8), 1)
    model = in_fp8(model, torch.float32) if fp8 else model
    head, hidden_RE = DraftVocab.of(4, text, letter_tokenizer(8)).head(model), torch.randn(3, model.config.hidden_size)
    torch.testing.assert_close(head.matrix(hidden_RE).float(), model.logits(hidden_RE)[:, [1, 3, 5, 7]])
    first = DraftVocab.without((5, 6, 7), 8).head(model)
    torch.testing.assert_close(first.matrix(hidden_RE).float(), model.logits(hidden_RE)[:, :5])
    assert first.matrix.weight.data_ptr() == model.lm_head.weight.data_ptr(), "the first rows are not copied"


def test_foreign_ids_are_never_among_the_most_frequent(text):
    """Not even special tokens or ends of texts; other tokens take their place."""
    vocab = DraftVocab.of(3, text, letter_tokenizer(8), foreign=(5, 7))
    assert vocab.ids_M.tolist() == [1, 3, 4]
    assert DraftVocab.of(3, None, NoText(8), foreign=(0, 2)).ids_M.tolist() == [1, 3, 4]
    assert DraftVocab.of(6, text, letter_tokenizer(8), foreign=(5, 7)).ids_M.tolist() == [0, 1, 2, 3, 4, 6]
    with pytest.raises(ValueError, match=r"draft_vocab=7; allowed: 1\.\.6"):
        DraftVocab.of(7, text, letter_tokenizer(8), foreign=(5, 7))


def test_tokens_without_a_row_are_refused(text):
    """Happens if the files of one rank differ from those of the others."""
    vocab, model = DraftVocab.of(4, text, letter_tokenizer(8)), random_decoder(tiny_config("llama", vocab_size=8), 1)
    for wrong in (replace(vocab, vocab=9), replace(vocab, ids_M=vocab.ids_M + 1)):
        with pytest.raises(ValueError, match="the draft's head has 8 rows"):
            wrong.head(model)
