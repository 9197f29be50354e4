"""Acceptance of trees, and the comparison of types: all types have the same contexts, so differences have standard
errors of their own."""

from __future__ import annotations

from benchmarks.load import problem_prompts
from benchmarks.tree_acceptance import DrawnContinuation, TreeDraft, lines_of, write_answers
from smc import demo
from smc.distill.measure import Context
from smc.local_engine import ModelPair
from smc.model.loader import load_model
from smc.model.tokenizer import Tokenizer


def test_differences_are_of_pairs():
    lines = list(lines_of({"bfloat16": [5, 0, 3, 4], "int4": [5, 0, 2, 4]}))
    assert lines == [
        "bfloat16: 3.00 +- 1.08 on 4 contexts",
        "int4: 2.75 +- 1.11, less the first -0.250 +- 0.250 on 4 contexts",
    ]


def test_a_tree_of_the_target_itself_holds_its_answers():
    """The trees are coupled to the noise with which the answers were drawn."""
    target = load_model(demo.TARGET)
    pair = ModelPair(target, target, Tokenizer.load(demo.TARGET), max_context=256)
    texts = write_answers(pair, problem_prompts(pair.tokenizer, 2, seed=0), 1.0, seed=3)
    tree = TreeDraft(target, pair.tokenizer.size, 2, 1.0)
    for number, text in enumerate(texts, 3):
        sizes = range(text.answer_from, len(text.tokens) - 3)
        drawn = [DrawnContinuation(Context(text, size), text.tokens[size : size + 3], number) for size in sizes]
        held = tree.held(drawn, 1.0)
        assert held and set(held) == {3}
