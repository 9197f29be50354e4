"""Conversations that the target writes: their distribution, the chat template, filters, and rows on disk."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from smc import demo
from smc.distill.conversations import (
    ChatFormat,
    Conversation,
    ConversationStore,
    TalkSettings,
    TalkWriter,
    repeated_share,
)
from smc.distill.student import cut
from smc.local_engine import ModelPair
from smc.model.loader import load_model
from smc.model.tokenizer import Tokenizer
from tests.model.dense import dense_logits
from tests.model.tiny import numbers_tokenizer, random_decoder, tiny_config

SIZE = 5
"""Size of the tiny vocabulary; its last token ends a text."""


def tiny_pair() -> ModelPair:
    target = random_decoder(tiny_config(vocab_size=SIZE, rope_scaling=None), seed=3)
    target.lm_head.weight.mul_(0.3)
    return ModelPair(target, cut(target, (0,)), numbers_tokenizer(SIZE), 256)


def written(
    pair: ModelPair, settings: TalkSettings, store: ConversationStore, count: int, **options: Any
) -> list[Conversation]:
    """Write `count` conversations to a store, and return them."""
    begin = len(store)
    TalkWriter(pair, settings, store, **options).write(lambda: len(store) >= begin + count)
    return [
        Conversation(
            int(row["number"]),
            float(row["temperature"]),
            row["tokens"][: row["length"]].tolist(),
            row["is_answer"][: row["length"]].tolist(),
        )
        for row in store.rows(range(begin, len(store)))
    ]


def test_texts_follow_the_targets_distribution(tmp_path):
    """Chi-square test over all beginnings of three tokens, at two temperatures. False alarms: one in a thousand
    each."""
    pair, count = tiny_pair(), 480
    settings = TalkSettings(temperatures=(1.0, 0.5), width=32, answer_tokens=4, turns=1)
    found = written(pair, settings, ConversationStore(tmp_path, 32), count, slots=128)
    assert [each.number for each in found] == sorted(each.number for each in found)
    logits = cache(lambda prefix: dense_logits(pair.target, torch.tensor(prefix))[-1])
    for temperature in settings.temperatures:
        answers = [tuple(each.tokens[1:4]) for each in found if each.temperature == temperature]
        probability = {}
        for index in np.ndindex(SIZE - 1, SIZE - 1, SIZE - 1):
            tokens = (SIZE - 1, *map(int, index))  # the first token begins texts
            probability[tokens[1:]] = 0.0
        keys = list(probability)
        rows = torch.tensor([[SIZE - 1, *key] for key in keys])
        prefixes = {tuple(row[: n + 1].tolist()) for row in rows for n in range(3)}
        logp = {prefix: torch.log_softmax(logits(prefix) / temperature, -1) for prefix in prefixes}
        for key in keys:
            text = (SIZE - 1, *key)
            probability[key] = sum(logp[text[: n + 1]][text[n + 1]].item() for n in range(3))
        expected = np.exp([probability[key] for key in keys])
        expected *= len(answers) / expected.sum()  # shorter answers are left out
        seen = Counter(answers)
        assert set(seen) <= set(keys)
        # Rare answers are pooled.
        common = expected >= 5
        observed = np.array([seen[key] for key in keys], dtype=float)
        e = np.append(expected[common], expected[~common].sum())
        o = np.append(observed[common], observed[~common].sum())
        degrees = len(e) - 1
        # Wilson and Hilferty: the cube root of chi-square is nearly normal.
        z = (((o - e) ** 2 / e).sum() / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))
        assert z / (2 / (9 * degrees)) ** 0.5 < 3.1


def test_a_run_that_begins_again_writes_the_same(tmp_path):
    pair, settings = tiny_pair(), TalkSettings(width=32, answer_tokens=12, turns=1)
    whole = written(pair, settings, ConversationStore(tmp_path / "whole", 32), 22, slots=8)
    first = written(pair, settings, ConversationStore(tmp_path / "parts", 32), 9, slots=8)
    again = written(pair, settings, ConversationStore(tmp_path / "parts", 32), 13, slots=3)
    assert first + again == whole


@pytest.fixture(scope="module")
def demo_pair() -> ModelPair:
    target = load_model(demo.TARGET)
    return ModelPair(target, cut(target, (0,)), Tokenizer.load(demo.TARGET), target.config.max_context)


def test_conversations_are_what_the_template_renders(demo_pair, tmp_path):
    """A given prompt is rendered by the template and answered. The tokens of the answer are marked, end-of-text
    included."""
    tokenizer = demo_pair.tokenizer
    chat = ChatFormat.of(tokenizer)
    assert chat.between is not None
    texts = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    probe = tokenizer.encode("x", False)
    rendered = [*chat.opening, *probe, *chat.closing, *probe, *chat.between, *probe, *chat.closing]
    assert tokenizer.chat(texts) == rendered
    prompt = tokenizer.chat([{"role": "user", "content": "Mia has 12 apples. She buys 30 more. How many now?"}])
    settings, store = TalkSettings(temperatures=(0.0,), turns=1), ConversationStore(tmp_path, 512)
    (found,) = written(demo_pair, settings, store, 1, slots=2, prompts=[prompt], mixed=False)
    assert found.tokens[: len(prompt)] == prompt
    assert found.is_answer == [False] * len(prompt) + [True] * (len(found.tokens) - len(prompt))
    assert found.tokens[-1] in tokenizer.eos_ids
    assert "42" in tokenizer.decode(found.tokens[len(prompt) :])


def test_a_target_that_writes_nothing_to_learn_from(tmp_path):
    """If every answer is too short, writing ends with an error."""
    settings = TalkSettings(width=32, answer_tokens=2, turns=1)
    store = ConversationStore(tmp_path, 32)
    writer = TalkWriter(tiny_pair(), settings, store, slots=128)
    with pytest.raises(ValueError, match=r"nothing to learn from: \d+ an answer nearly empty; give --prompts"):
        writer.write(lambda: len(store) >= 1)


TEMPLATES = {
    "system only": "{% for m in messages %}{% if m.role != 'system' %}{{ raise_exception('system only') }}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "no user": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}<eos>",
    "text first": "{% for m in messages %}{{ m.content }}<eos>{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_shows_no_user_turn(template, demo_pair, tmp_path, caplog):
    """The target then answers the given prompts only; without prompts there is an error that says so."""
    with_template = Tokenizer(
        demo_pair.tokenizer._tokenizer, demo_pair.tokenizer.eos_ids, {"eos_token": "<eos>"}, template
    )
    pair = ModelPair(demo_pair.target, demo_pair.draft, with_template, demo_pair.max_context)
    settings, store = TalkSettings(width=256, answer_tokens=8, turns=2), ConversationStore(tmp_path, 256)
    with pytest.raises(ValueError, match="chat template"):
        TalkWriter(pair, settings, store, slots=4)
    prompts = [demo_pair.tokenizer.chat([{"role": "user", "content": text}]) for text in ("1 + 2", "3 + 4")]
    found = written(pair, settings, store, 4, slots=4, prompts=prompts)
    assert "given prompts" in caplog.text
    assert all(each.tokens[: len(prompts[each.number % 2])] == prompts[each.number % 2] for each in found)


def test_neither_a_template_nor_a_first_token(tmp_path):
    """The error recommends --prompts, and with prompts the writer works."""
    pair = tiny_pair()
    pair.tokenizer.eos_ids = ()
    settings, store = TalkSettings(width=32, answer_tokens=12, turns=1), ConversationStore(tmp_path, 32)
    with pytest.raises(ValueError, match="give --prompts"):
        TalkWriter(pair, settings, store, slots=8)
    found = written(pair, settings, store, 4, slots=8, prompts=[(1, 2)])
    assert all(each.tokens[:2] == [1, 2] for each in found)


def test_what_repeats_itself_is_left_out():
    assert repeated_share(range(20)) == 0
    assert repeated_share([1, 2] * 10) == pytest.approx(15 / 17)


def test_rows_come_back_from_disk(tmp_path, monkeypatch):
    """Rows are read from full files, an incomplete file and rows not yet flushed; the number of open files is
    limited."""
    monkeypatch.setattr("smc.distill.conversations.ROWS_PER_FILE", 4)
    monkeypatch.setattr("smc.distill.conversations.OPEN_FILES", 1)
    store = ConversationStore(tmp_path, 6)
    made = [
        Conversation(2 * n, 0.5 * n, [*range(n % 6 + 1)], [i % 2 == 1 for i in range(n % 6 + 1)]) for n in range(11)
    ]
    for each in made:
        store.append(each)
    for opened in (store, None):
        if opened is None:
            store.flush()
            opened = ConversationStore(tmp_path, 6)
        assert len(opened) == 11 and opened.next_number == 21
        assert opened.tokens == sum(sum(each.is_answer) for each in made)
        for index, row in zip((10, 0, 7, 3), opened.rows((10, 0, 7, 3))):
            length = int(row["length"])
            assert row["tokens"][:length].tolist() == made[index].tokens
            assert row["is_answer"][:length].tolist() == made[index].is_answer
            assert (row["number"], row["temperature"]) == (made[index].number, made[index].temperature)
    with pytest.raises(ValueError, match="rows of 6 tokens; this run needs 8"):
        ConversationStore(tmp_path, 8)


@pytest.mark.parametrize("changes", [{"temperatures": ()}, {"temperatures": (3.0,)}, {"width": 8}, {"turns": 0}])
def test_wrong_settings_are_refused(changes):
    with pytest.raises(ValueError, match="allowed"):
        TalkSettings(**changes)
