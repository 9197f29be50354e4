"""Tokenizers of a pair may differ in added tokens and in nothing else, and a draft is fitted to ids that it does not
know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from smc.model.check import check_pair, require_pair
from smc.model.source import SourcePair
from smc.model.vocabularies import ForeignToken, add_rows
from tests.model.foreign import DRAFT_ENDS, FOREIGN, save_foreign_pair, save_letters
from tests.model.tiny import in_fp8, random_decoder, save_byte_level, save_tiny, tiny_config

RENAMED = ("one", "two", "three", "four", "five")


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """Two models with the same tokenizer."""
    target, draft = (save_byte_level(save_tiny(tmp_path / name, vocab_size=304)) for name in ("target", "draft"))
    return target, draft


def change(directory: Path, edit) -> None:
    """Edit the tokenizer of a directory as the JSON of its file."""
    path = directory / "tokenizer.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def test_a_renamed_and_a_missing_token(tmp_path):
    """Texts end at the target's ids."""
    report = require_pair(*save_foreign_pair(tmp_path))
    assert report.foreign == (ForeignToken(3, "<x>", "<y>"), ForeignToken(4, "<new>", None))
    assert (report.shared_ids, report.vocab_size) == (3, 4)
    drafted, ends = report.notes()
    assert "does not propose 2 of the target's ids" in drafted
    assert drafted.endswith("3 (<x>; draft: <y>), 4 (<new>; draft: no token)")
    assert ends == "texts end at the target's end ids (2, 4), not at the draft's (2, 3)"


def test_an_id_that_ends_texts_in_both_is_known_by_any_name(tmp_path):
    """As in DeepSeek-R1-Distill-Qwen and Qwen 2.5. A draft that never proposed it would not end answers."""
    target, draft = save_foreign_pair(tmp_path)
    save_letters(draft, ("<end>", "<y>"), DRAFT_ENDS)
    assert [token.id for token in require_pair(target, draft).foreign] == [3, 4]
    save_letters(draft, ("<end>", "<y>"), (3,))
    assert [token.id for token in require_pair(target, draft).foreign] == [2, 3, 4]


def test_notes_name_a_few_ids(pair):
    for directory, words in zip(pair, (RENAMED, [word.upper() for word in RENAMED])):
        save_byte_level(directory, words=tuple(words))
    report = require_pair(*pair)
    first = report.foreign[0].id
    assert [token.id for token in report.foreign] == list(range(first, first + 5))
    (note,) = report.notes()
    assert note.endswith(f"{first + 2} (three; draft: THREE) and 2 more")
    assert "(five; draft: FIVE)" in report.notes(5)[0] and "more" not in report.notes(5)[0]


def test_a_draft_with_more_added_tokens_has_no_foreign_ids(pair):
    """Its ids past the target's are never asked for."""
    save_byte_level(pair[1], words=("more",))
    assert require_pair(*pair).foreign == () and require_pair(*pair).notes() == ()
    assert SourcePair.of("files", *pair).draft_vocab is None


def test_a_start_logs_what_is_not_drafted(tmp_path, caplog):
    with caplog.at_level("INFO", logger="smc.model.source"):
        sources = SourcePair.of("files", *save_foreign_pair(tmp_path))
    assert [record.getMessage() for record in caplog.records] == list(
        check_pair(tmp_path / "target", tmp_path / "draft").notes()
    )
    assert sources.draft.foreign.ids == FOREIGN and sources.draft_vocab.ids_M.tolist() == [0, 1, 2]
    assert sources.target.foreign is None


def lowercase(raw):
    raw["normalizer"] = {"type": "Lowercase"}


def prefix_space(raw):
    raw["pre_tokenizer"]["add_prefix_space"] = True


def other_merges(raw):
    merges = raw["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def other_token(raw):
    vocab = raw["model"]["vocab"]
    first, second = [token for token, i in vocab.items() if i in (7, 8)]
    vocab[first], vocab[second] = vocab[second], vocab[first]


@pytest.mark.parametrize("renames", [False, True])
def test_ordinary_tokens_must_be_the_same(pair, renames):
    """Whether added tokens differ or not."""
    if renames:
        save_byte_level(pair[1], words=("renamed",))
    change(pair[1], other_token)
    says = r"different vocabularies \(\d+ and \d+ ids\).*ordinary tokens differ at 2 ids: 7 is '.' and '.', 8"
    with pytest.raises(ValueError, match=says):
        require_pair(*pair)
    assert check_pair(*pair).foreign == () and check_pair(*pair).notes() == ()


@pytest.mark.parametrize("edit", [lowercase, prefix_space, other_merges])
def test_a_draft_may_cut_texts_otherwise(pair, edit):
    """The target's tokenizer cuts every text, and the ids mean the same."""
    change(pair[1], edit)
    require_pair(*pair)


def test_an_ordinary_token_in_place_of_an_added_one(tmp_path):
    target, draft = save_foreign_pair(tmp_path)
    save_letters(draft, ("<eos>",), (3,), letters="abc")
    with pytest.raises(ValueError, match=r"ordinary tokens differ at 1 ids: 2 is '<eos>' and 'c'"):
        require_pair(target, draft)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_added_to_every_kind_of_head(tied, fp8):
    """Logits of the rows that were there stay as they are."""
    model = random_decoder(tiny_config(vocab_size=48, tied_embeddings=tied))
    if fp8:
        model = in_fp8(model, torch.float32)
    mean_E, hidden_TE = model.embed.weight.mean(0), torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    before = model.logits(hidden_TE)
    add_rows(model, 40)
    assert model.config.vocab_size == 48, "a model that has enough rows stays as it is"
    add_rows(model, 51)
    logits = model.logits(hidden_TE)
    assert logits.shape == (3, 51) and torch.equal(logits[:, :48], before) and logits.isfinite().all()
    assert torch.allclose(model.embed(torch.tensor([50])), mean_E, atol=1e-6)
    assert model.config.vocab_size == model.lm_head.out_features == model.embed.num_embeddings == 51
    assert (model.lm_head.weight is model.embed.weight) == (tied and not fp8)
