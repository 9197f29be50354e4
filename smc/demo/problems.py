"""Generates arithmetic word problems of 3 to 7 steps with worked solutions. Knows nothing about models or tokens.

A problem is a story about one or two people who own one kind of thing. Every sentence is needed, every amount lies in
0..999, and each question has exactly one solution text, so a model that can do the arithmetic has no ambiguity left.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from smc.demo import phrases

Split = Literal["train", "test"]

MIN_STEPS, MAX_STEPS = 3, 7
MAX_AMOUNT = 999
MAX_PRODUCT = 500
"""Maximum product or dividend of a step, so that no step needs a long multiplication."""
FACTORS = (2, 3, 4, 5)
TEST_SHARE = 16
"""One of this many questions belongs to the test split."""

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_ANSWER = re.compile(r"\s*(-?[0-9]{1,9})(?!\.?[0-9])")


@dataclass(frozen=True)
class Problem:
    """A question with its solution."""

    question: str
    steps: tuple[str, ...]
    """Lines such as `12 + 7 = 19`, in the order of the story."""
    result: int
    solution: str
    """The steps, one per line, then `#### result`."""


def generate(seed: int, count: int, split: Split) -> list[Problem]:
    """`count` problems of one split; deterministic in the arguments. No question is in both splits, for any seeds."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is unknown; known: 'train', 'test'")
    rng = random.Random(f"{split}-{seed}")
    problems: list[Problem] = []
    while len(problems) < count:
        problem = _generate_one(rng)
        if split_of(problem.question) == split:
            problems.append(problem)
    return problems


def split_of(question: str) -> Split:
    """The split of a question: a hash of its text decides."""
    return "test" if hashlib.sha256(question.encode()).digest()[0] % TEST_SHARE == 0 else "train"


def grade(problem: Problem, answer_text: str) -> bool:
    """Whether the integer after the last `####` is the result. False if there is no such integer."""
    _, mark, tail = answer_text.rpartition("####")
    found = _ANSWER.match(tail) if mark else None
    return found is not None and int(found[1]) == problem.result


def derived_seed(seed: int, index: int) -> int:
    """The seed of the request for problem `index` in a run with this seed: 63 bits of a hash, so that the seeds of
    neighbouring runs and problems are unrelated."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8]) >> 1


class _Story:
    """State of a story: the person, their current amount, the sentences and the computed steps so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.gender = rng.choice("fm")
        self.name = rng.choice(phrases.NAMES[self.gender])
        self.thing = rng.choice(phrases.THINGS)
        self.value = 0
        self.mate: str | None = None
        self.mate_value = 0
        self.sentences: list[str] = []
        self.steps: list[str] = []

    def say(self, phrasings: tuple[str, ...], n: int = 0, k: int = 0) -> None:
        p, q, s = phrases.PRONOUNS[self.gender]
        others = [name for names in phrases.NAMES.values() for name in names if name not in (self.name, self.mate)]
        text = self.rng.choice(phrasings).format(
            name=self.name, p=p, q=q, s=s, thing=self.thing, extra=self.rng.choice(others), mate=self.mate, n=n, k=k
        )
        self.sentences.append(text[0].upper() + text[1:])

    def compute(self, a: int, op: str, b: int) -> int:
        result = _OPERATORS[op](a, b)
        self.steps.append(f"{a} {op} {b} = {result}")
        return result

    def amount(self, limit: int) -> int:
        """A random number from 2 to `limit`; small numbers are more likely."""
        top = self.rng.choice((20, 20, 60, 100, 300))
        return self.rng.randint(2, max(2, min(top, limit)))

    def factor(self) -> int | None:
        """A random factor that keeps the product in bounds; None if there is none."""
        return self._one_of([k for k in FACTORS if self.value * k <= MAX_PRODUCT])

    def divisor(self) -> int | None:
        """A random factor that divides the current amount; None if there is none."""
        return self._one_of([k for k in FACTORS if self.value % k == 0 and self.value <= MAX_PRODUCT])

    def _one_of(self, factors: list[int]) -> int | None:
        return self.rng.choice(factors) if factors else None


def _generate_one(rng: random.Random) -> Problem:
    story = _Story(rng)
    total = rng.randint(MIN_STEPS, MAX_STEPS)
    _start(story)
    while len(story.steps) < total - 1:
        event = rng.choices(_EVENTS, _EVENT_WEIGHTS)[0]
        event(story, total - 1 - len(story.steps))
    while len(story.steps) < total:
        rng.choices(_ENDS, _END_WEIGHTS)[0](story)
    solution = "\n".join((*story.steps, f"#### {story.value}"))
    return Problem(" ".join(story.sentences), tuple(story.steps), story.value, solution)


def _start(story: _Story) -> None:
    if story.rng.random() < 0.25:
        k, n = story.rng.choice(FACTORS), story.rng.randint(2, 30)
        story.say(phrases.START_BOXES, n=n, k=k)
        story.value = story.compute(k, "*", n)
    else:
        story.value = story.rng.randint(5, 150)
        story.say(phrases.START, n=story.value)


# An event adds sentences and steps to a story; `left` is the number of steps still allowed. If it does not apply, it
# adds nothing.


def _gain(story: _Story, _left: int) -> None:
    if story.value + 2 <= MAX_AMOUNT:
        n = story.amount(MAX_AMOUNT - story.value)
        story.say(phrases.GAIN, n=n)
        story.value = story.compute(story.value, "+", n)


def _loss(story: _Story, _left: int) -> None:
    if story.value > 2:
        n = story.amount(story.value - 1)
        story.say(phrases.LOSS, n=n)
        story.value = story.compute(story.value, "-", n)


def _boxes(story: _Story, left: int) -> None:
    """Two steps: the total of the boxes, then that many more or fewer."""
    k, n = story.rng.choice(FACTORS), story.rng.randint(2, 30)
    more = story.rng.random() < 0.5
    if left < 2 or (k * n > MAX_AMOUNT - story.value if more else k * n >= story.value):
        return
    story.say(phrases.GAIN_BOXES if more else phrases.LOSS_BOXES, n=n, k=k)
    story.value = story.compute(story.value, "+" if more else "-", story.compute(k, "*", n))


def _times(story: _Story, _left: int) -> None:
    if k := story.factor():
        story.say(phrases.DOUBLE if k == 2 else phrases.TIMES, k=k)
        story.value = story.compute(story.value, "*", k)


def _split(story: _Story, _left: int) -> None:
    if k := story.divisor():
        story.say(phrases.HALVE if k == 2 else phrases.SPLIT, k=k)
        story.value = story.compute(story.value, "/", k)


def _compare(story: _Story, _left: int) -> None:
    """Introduce a second person, whose amount is given relative to the first one's, and continue with that person.

    The two have different pronouns, so a later "he" or "she" is unambiguous.
    """
    factor, divisor = story.factor(), story.divisor()
    kinds = ["more"] + ["fewer"] * (story.value > 2) + ["times"] * bool(factor) + ["half"] * (divisor == 2)
    if story.mate is not None or story.value + 2 > MAX_AMOUNT:
        return
    story.mate, story.mate_value = story.name, story.value
    story.gender = "m" if story.gender == "f" else "f"
    story.name = story.rng.choice(phrases.NAMES[story.gender])
    match story.rng.choice(kinds):
        case "more":
            n = story.amount(MAX_AMOUNT - story.value)
            story.say(phrases.MORE_THAN, n=n)
            story.value = story.compute(story.value, "+", n)
        case "fewer":
            n = story.amount(story.value - 1)
            story.say(phrases.FEWER_THAN, n=n)
            story.value = story.compute(story.value, "-", n)
        case "times":
            assert factor is not None
            story.say(phrases.TWICE if factor == 2 else phrases.TIMES_AS, k=factor)
            story.value = story.compute(story.value, "*", factor)
        case "half":
            story.say(phrases.HALF_AS)
            story.value = story.compute(story.value, "/", 2)


# An ending adds the last step and the question. If it does not apply, it adds nothing.


def _end_plain(story: _Story) -> None:
    before = len(story.steps)
    story.rng.choice((_gain, _loss, _times, _split))(story, 1)
    if len(story.steps) > before:
        story.say(phrases.ASK)


def _end_pair(story: _Story) -> None:
    """Ask about both people: their sum or their difference."""
    if story.mate is None:
        return
    if story.rng.random() < 0.6 and story.mate_value + story.value <= MAX_AMOUNT:
        story.say(phrases.ASK_TOGETHER)
        story.value = story.compute(story.mate_value, "+", story.value)
    elif story.value >= story.mate_value:
        story.say(phrases.ASK_MORE)
        story.value = story.compute(story.value, "-", story.mate_value)
    else:
        story.say(phrases.ASK_FEWER)
        story.value = story.compute(story.mate_value, "-", story.value)


def _end_price(story: _Story) -> None:
    if k := story.factor():
        story.say(phrases.ASK_PRICE, k=k)
        story.value = story.compute(story.value, "*", k)


def _end_pack(story: _Story) -> None:
    if k := story.divisor():
        story.say(phrases.ASK_PACK, k=k)
        story.value = story.compute(story.value, "/", k)


_EVENTS: tuple[Callable[[_Story, int], None], ...] = (_gain, _loss, _boxes, _times, _split, _compare)
_EVENT_WEIGHTS = (5, 5, 3, 2, 2, 3)
_ENDS: tuple[Callable[[_Story], None], ...] = (_end_plain, _end_pair, _end_price, _end_pack)
_END_WEIGHTS = (4, 5, 1, 1)
