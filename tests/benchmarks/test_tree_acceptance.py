"""Acceptance of trees along answers, and the comparison of types: all types have the same contexts, so differences have
standard errors of their own."""

from __future__ import annotations

from benchmarks.load import problem_prompts
from benchmarks.tree_acceptance import held_along, lines_of, lines_of_rounds, rounds_along, write_answers
from smc import demo
from smc.distill.measure import TreeDraft
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
    held_T = held_along(TreeDraft(target, pair.tokenizer.size, 2, 1.0), texts, 3, 1.0, seed=3)
    assert len(held_T) == 2 and all(held and set(held) == {3} for held in held_T)


def test_rounds_of_an_answer():
    held = [2, 0, 1, 0, 3, 0, 0, 0]
    # Rounds begin after 0, 3, 4 and 8 tokens; with one step, after 0, 2, 4, 6 and 7.
    assert rounds_along(held, 3) == (3, 8, 9)
    assert rounds_along(held, 1) == (5, 8, 5)
    assert rounds_along(held, None) == (3, 8, 5)
    assert list(lines_of_rounds([held], 1, pass_steps=4.0, plain_steps=4.0)) == [
        "depth 1: 1.60 tokens a round, 1.0 steps, 1.28 times plain",
        "the best depth: 2.67 tokens a round, 1.7 steps, 1.88 times plain",
    ]
