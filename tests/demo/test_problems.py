"""Properties of the demo problems and of their tokenizer."""

from __future__ import annotations

import operator
import re
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from smc.demo import corpus, problems
from smc.demo.problems import Problem, generate, grade, split_of
from smc.model.tokenizer import Tokenizer as ServedTokenizer

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
SAMPLE = generate(0, 1_000, "train")


@lru_cache(maxsize=1)
def learned() -> Tokenizer:
    return corpus.build(text for problem in SAMPLE for text in (problem.question, problem.solution))


def test_same_arguments_same_problems():
    assert generate(0, 50, "train") == SAMPLE[:50]
    assert generate(1, 50, "train") != SAMPLE[:50]


def test_splits_are_disjoint():
    for split in ("train", "test"):
        assert {split_of(problem.question) for problem in generate(0, 200, split)} == {split}


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'dev' is unknown; known: 'train', 'test'"):
        generate(0, 1, "dev")


def test_every_step_is_right_and_the_last_one_is_the_result():
    for problem in SAMPLE:
        for step in problem.steps:
            a, op, b, result = STEP.fullmatch(step).groups()
            assert OPERATORS[op](int(a), int(b)) == int(result), problem
        assert int(result) == problem.result
        assert problem.solution == "\n".join(problem.steps) + f"\n#### {problem.result}"


def test_every_operand_was_told_computed_or_is_a_word():
    words = {"2": ("twice", "half", "doubles")}
    for problem in SAMPLE:
        known = set(re.findall(r"\d+", problem.question))
        known |= {digit for digit, spelled in words.items() if any(word in problem.question for word in spelled)}
        for step in problem.steps:
            a, _, b, result = STEP.fullmatch(step).groups()
            assert {a, b} <= known, problem
            known.add(result)


def test_steps_and_amounts_are_within_bounds():
    assert {len(problem.steps) for problem in SAMPLE} == set(range(problems.MIN_STEPS, problems.MAX_STEPS + 1))
    amounts = [int(amount) for problem in SAMPLE for amount in re.findall(r"\d+", problem.question + problem.solution)]
    assert max(amounts) <= problems.MAX_AMOUNT


def test_questions_are_filled_in_and_rarely_repeat():
    assert not any("{" in problem.question or "None" in problem.question for problem in SAMPLE)
    assert len({problem.question for problem in SAMPLE}) > 0.99 * len(SAMPLE)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("12 + 16 = 28\n#### 28", True),
        ("####28", True),
        ("#### 28 apples.", True),
        ("#### 28.", True),
        ("#### 5\n#### 28", True),
        ("#### 028", True),
        ("#### 28\n#### 5", False),
        ("#### 280", False),
        ("#### 28.5", False),
        ("#### -28", False),
        ("28", False),
        ("#### ", False),
        ("#### twenty-eight 28", False),
        ("### 28", False),
        ("", False),
        ("#### " + "9" * 10_000, False),
    ],
)
def test_grade(answer: str, right: bool):
    assert grade(Problem("?", ("12 + 16 = 28",), 28, ""), answer) is right


def test_own_solutions_are_right():
    assert all(grade(problem, problem.solution) for problem in SAMPLE)


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str):
    assert learned().decode(learned().encode(text).ids, skip_special_tokens=False) == text


@given(st.integers(min_value=0))
def test_digits_are_single_tokens(number: int):
    assert learned().encode(str(number)).tokens == list(str(number))
    assert not any(any(map(str.isdigit, token)) and len(token) > 1 for token in learned().get_vocab())


def test_tokenizer_is_deterministic_and_of_the_stated_size():
    again = corpus.build(text for problem in SAMPLE for text in (problem.question, problem.solution))
    assert again.to_str() == learned().to_str()
    assert again.get_vocab_size() == corpus.VOCAB_SIZE
    assert [again.token_to_id(special) for special in corpus.SPECIALS] == [0, 1, 2, 3]


def test_too_few_texts_are_refused():
    with pytest.raises(ValueError, match="512 are needed"):
        corpus.build(["no", "variety"])


def test_served_prompts_are_the_trained_ones(tmp_path):
    corpus.write(learned(), tmp_path, max_context=512)
    served = ServedTokenizer.load(tmp_path)
    question = SAMPLE[0].question
    prompt = served.chat([{"role": "user", "content": question}])
    assert prompt == learned().encode(corpus.render(question)).ids
    assert served.eos_ids == (learned().token_to_id(corpus.EOS),)
    assert served.decode(served.encode(SAMPLE[0].solution)) == SAMPLE[0].solution
    with pytest.raises(ValueError, match="user and assistant only"):
        served.chat([{"role": "system", "content": "Be brief."}])
