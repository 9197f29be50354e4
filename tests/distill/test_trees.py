"""Batched draws of the target and trees of the draft for several texts, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc.distill.measure import OwnText, TreeDraft, draw_next, target_noise
from tests.model.dense import dense_logits
from tests.model.tiny import random_decoder, tiny_config

VOCAB, SEED = 300, 7


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_texts_of_different_lengths_do_not_change_each_other(family):
    """Includes layers with an attention window that is shorter than the contexts."""
    config = tiny_config(family, num_layers=3)
    target, draft = (random_decoder(config, seed) for seed in (1, 2))
    target.lm_head.weight.mul_(0.5)
    generator = np.random.default_rng(0)
    texts = [OwnText(tuple(generator.integers(0, VOCAB, size).tolist()), 5) for size in (12, 30, 21)]
    contexts = [context for text in texts for context in text.contexts(4)]
    drawn = draw_next(target, contexts, 5, 1.0, SEED, VOCAB)
    assert [each.context for each in drawn] == contexts
    assert [each.seed for each in drawn] == list(range(SEED, SEED + len(drawn)))
    of_texts = [[each for each in drawn if each.context.text is text] for text in texts]
    for text, of_text in zip(texts, of_texts):
        each = of_text[-1]
        tokens = list(text.tokens[: each.context.size])
        for _ in range(5):
            noise_V = target_noise(np.array([each.seed]), np.array([len(tokens)]), VOCAB, torch.device("cpu"))[0]
            logp_V = torch.log_softmax(dense_logits(target, torch.tensor(tokens))[-1], -1)
            tokens.append(int((logp_V + noise_V).argmax()))
        assert tuple(tokens[each.context.size :]) == each.tokens
    tree = TreeDraft(draft, VOCAB, rows=8, exponent=1.0)
    assert tree.held(drawn, 1.0) == [count for of_text in of_texts for count in tree.held(of_text, 1.0)]
    own = TreeDraft(target, VOCAB, rows=1, exponent=1.0)
    assert own.held(drawn, 1.0) == [5] * len(drawn)


def test_a_vocabulary_smaller_than_the_tree():
    """The first level of the tree has fewer continuations than rows."""
    config = tiny_config(vocab_size=5)
    target = random_decoder(config, 1)
    text = OwnText((0, 1, 2, 3, 4, 0, 1, 2), 2)
    drawn = draw_next(target, text.contexts(2), 3, 1.0, SEED, 5)
    held = TreeDraft(target, 5, rows=8, exponent=1.0).held(drawn, 1.0)
    assert held == [3] * len(held) and held
