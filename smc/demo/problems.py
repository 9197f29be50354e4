"""Generates and grades arithmetic word problems of 3 to 7 steps with worked solutions, and computes the accuracy over
many. Knows nothing about models or tokens.

A problem is a story about one or two people who own one kind of thing. Every sentence is needed, every amount lies in
0..999, and each question has exactly one solution text, so a model that can do the arithmetic has no ambiguity left.

Templates of sentences are filled by `str.format` with `name`, `p` (she), `q` (her, as in "gives her"), `s` (her, as in
"her box"), `thing`, `extra` (a third person), `mate` (the person compared with) and the amounts `n` and `k`."""

from __future__ import annotations

import hashlib
import math
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PRONOUNS = {"f": ("she", "her", "her"), "m": ("he", "him", "his")}

NAMES = {
    "f": ("Mia", "Ana", "Lucy", "Nora", "Emma", "Zoe", "Ruth", "Ivy", "Clara", "Leila", "Rosa", "Grace", "Kate"),
    "m": ("Tom", "Ben", "Omar", "Leo", "Max", "Sam", "Ivan", "Hugo", "Paul", "Raj", "Finn", "Adam"),
}

THINGS = (
    "apples",
    "pears",
    "plums",
    "lemons",
    "eggs",
    "nuts",
    "cookies",
    "cakes",
    "candies",
    "marbles",
    "stickers",
    "stamps",
    "coins",
    "cards",
    "books",
    "pens",
    "pencils",
    "beads",
    "shells",
    "stones",
    "roses",
    "tulips",
    "balloons",
    "buttons",
    "tickets",
)

START = (
    "{name} has {n} {thing}.",
    "{name} starts with {n} {thing}.",
    "{name} owns {n} {thing}.",
    "There are {n} {thing} on the desk of {name}.",
)
START_BOXES = (
    "{name} has {k} boxes with {n} {thing} in each.",
    "{name} buys {k} bags of {n} {thing} each.",
    "{name} fills {k} jars with {n} {thing} each.",
)
GAIN = (
    "{p} buys {n} more.",
    "{p} finds {n} more.",
    "{extra} gives {q} {n} more.",
    "Then {p} gets {n} more from {extra}.",
    "The next day {p} buys {n} {thing}.",
    "{p} wins {n} {thing} in a game.",
)
LOSS = (
    "{p} gives {n} to {extra}.",
    "Then {p} loses {n} of them.",
    "{p} sells {n} of {s} {thing}.",
    "{extra} takes {n} of {s} {thing}.",
    "Later {p} gives {n} {thing} away.",
    "Then {p} drops {n} {thing} in the river.",
)
GAIN_BOXES = (
    "{p} buys {k} boxes of {n} {thing} each.",
    "{extra} brings {q} {k} bags with {n} {thing} in each.",
    "Then {p} finds {k} packs of {n}.",
)
LOSS_BOXES = (
    "{p} gives {n} {thing} to each of {k} friends.",
    "{p} sells {k} bags of {n} {thing} each.",
    "Then {p} loses {k} packs of {n}.",
)
DOUBLE = ("A week later {p} has twice as many.", "Then {p} doubles {s} {thing}.", "{extra} then doubles what {p} has.")
TIMES = (
    "A week later {p} has {k} times as many.",
    "By spring {p} has {k} times as many {thing}.",
    "Soon {p} has {k} times that number.",
)
HALVE = ("{p} gives half of them to {extra}.", "Then {p} loses half of {s} {thing}.", "{p} sells half of the {thing}.")
SPLIT = (
    "{p} sorts them into {k} equal piles and keeps one pile.",
    "{p} puts them in {k} equal boxes and keeps only one box.",
    "{p} splits them evenly among {k} jars and keeps one jar.",
)
MORE_THAN = ("{name} has {n} more {thing} than {mate}.", "{name} owns {n} more than {mate}.")
FEWER_THAN = ("{name} has {n} fewer {thing} than {mate}.", "{name} owns {n} fewer than {mate}.")
TWICE = ("{name} has twice as many {thing} as {mate}.", "{name} owns twice as many as {mate}.")
TIMES_AS = ("{name} has {k} times as many {thing} as {mate}.", "{name} owns {k} times as many as {mate}.")
HALF_AS = ("{name} has half as many {thing} as {mate}.", "{name} owns half as many as {mate}.")

ASK = (
    "How many {thing} does {name} have?",
    "How many {thing} does {name} have now?",
    "How many {thing} does {name} have in the end?",
    "How many does {p} have now?",
)
ASK_TOGETHER = (
    "How many {thing} do {name} and {mate} have together?",
    "How many {thing} do they have together?",
    "How many do they have in total?",
)
ASK_MORE = ("How many more {thing} does {name} have than {mate}?", "How many more does {name} have than {mate}?")
ASK_FEWER = ("How many fewer {thing} does {name} have than {mate}?", "How many fewer does {name} have than {mate}?")
ASK_PRICE = (
    "{p} sells all of them for {k} dollars each. How many dollars does {p} get?",
    "Each one costs {k} dollars. How many dollars are they all worth?",
)
ASK_PACK = (
    "{p} packs them in bags of {k}. How many bags does {p} need?",
    "{p} shares them equally among {k} children. How many does each child get?",
)


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
_EVENT_WEIGHTS = (5, 5, 3, 2, 2, 3)
_END_WEIGHTS = (4, 5, 1, 1)


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
    """Generate `count` problems of one split; deterministic in the arguments. No question is in both splits, for any
    seeds."""
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
    """Return the split of a question, which a hash of its text decides."""
    return "test" if hashlib.sha256(question.encode()).digest()[0] % TEST_SHARE == 0 else "train"


def grade(problem: Problem, answer_text: str) -> bool:
    """Whether the integer after the last `####` is the result. False if there is no such integer."""
    _, mark, tail = answer_text.rpartition("####")
    found = _ANSWER.match(tail) if mark else None
    return found is not None and int(found[1]) == problem.result


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of the request for problem `index` in a run with this seed: 63 bits of a hash, so that the seeds
    of neighbouring runs and problems are unrelated."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8]) >> 1


class _Story:
    """State of a story: the person, their current amount, the sentences and the computed steps so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.gender = rng.choice("fm")
        self.name = rng.choice(NAMES[self.gender])
        self.thing = rng.choice(THINGS)
        self.value = 0
        self.mate: str | None = None
        self.mate_value = 0
        self.sentences: list[str] = []
        self.steps: list[str] = []

    def say(self, phrasings: tuple[str, ...], n: int = 0, k: int = 0) -> None:
        p, q, s = PRONOUNS[self.gender]
        others = [name for names in NAMES.values() for name in names if name not in (self.name, self.mate)]
        text = self.rng.choice(phrasings).format(
            name=self.name, p=p, q=q, s=s, thing=self.thing, extra=self.rng.choice(others), mate=self.mate, n=n, k=k
        )
        self.sentences.append(text[0].upper() + text[1:])

    def compute(self, a: int, op: str, b: int) -> int:
        result = _OPERATORS[op](a, b)
        self.steps.append(f"{a} {op} {b} = {result}")
        return result

    def change(self, phrasings: tuple[str, ...], op: str, operand: int) -> None:
        """Add a sentence with this number, and a step that changes the amount by it."""
        self.say(phrasings, n=operand, k=operand)
        self.value = self.compute(self.value, op, operand)

    def amount(self, limit: int) -> int:
        """Return a random number from 2 to `limit`; small numbers are more likely."""
        top = self.rng.choice((20, 20, 60, 100, 300))
        return self.rng.randint(2, max(2, min(top, limit)))

    def factor(self) -> int | None:
        """Return a random factor that keeps the product in bounds; None if there is none."""
        return self._one_of([k for k in FACTORS if self.value * k <= MAX_PRODUCT])

    def divisor(self) -> int | None:
        """Return a random factor that divides the current amount; None if there is none."""
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
        story.say(START_BOXES, n=n, k=k)
        story.value = story.compute(k, "*", n)
    else:
        story.value = story.rng.randint(5, 150)
        story.say(START, n=story.value)


# An event adds sentences and steps to a story; `left` is the number of steps still allowed. If it does not apply, it
# adds nothing.


def _gain(story: _Story, _left: int) -> None:
    if story.value + 2 <= MAX_AMOUNT:
        story.change(GAIN, "+", story.amount(MAX_AMOUNT - story.value))


def _loss(story: _Story, _left: int) -> None:
    if story.value > 2:
        story.change(LOSS, "-", story.amount(story.value - 1))


def _boxes(story: _Story, left: int) -> None:
    """Add two steps: the number of things in all boxes, then a gain or loss of this number."""
    k, n = story.rng.choice(FACTORS), story.rng.randint(2, 30)
    more = story.rng.random() < 0.5
    if left < 2 or (k * n > MAX_AMOUNT - story.value if more else k * n >= story.value):
        return
    story.say(GAIN_BOXES if more else LOSS_BOXES, n=n, k=k)
    story.value = story.compute(story.value, "+" if more else "-", story.compute(k, "*", n))


def _times(story: _Story, _left: int) -> None:
    if k := story.factor():
        story.change(DOUBLE if k == 2 else TIMES, "*", k)


def _split(story: _Story, _left: int) -> None:
    if k := story.divisor():
        story.change(HALVE if k == 2 else SPLIT, "/", k)


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
    story.name = story.rng.choice(NAMES[story.gender])
    match story.rng.choice(kinds):
        case "more":
            story.change(MORE_THAN, "+", story.amount(MAX_AMOUNT - story.value))
        case "fewer":
            story.change(FEWER_THAN, "-", story.amount(story.value - 1))
        case "times":
            assert factor is not None
            story.change(TWICE if factor == 2 else TIMES_AS, "*", factor)
        case "half":
            story.change(HALF_AS, "/", 2)


# An ending adds the last step and the question. If it does not apply, it adds nothing.


def _end_plain(story: _Story) -> None:
    before = len(story.steps)
    story.rng.choice((_gain, _loss, _times, _split))(story, 1)
    if len(story.steps) > before:
        story.say(ASK)


def _end_pair(story: _Story) -> None:
    """Ask about both people: their sum or their difference."""
    if story.mate is None:
        return
    if story.rng.random() < 0.6 and story.mate_value + story.value <= MAX_AMOUNT:
        story.say(ASK_TOGETHER)
        story.value = story.compute(story.mate_value, "+", story.value)
    elif story.value >= story.mate_value:
        story.say(ASK_MORE)
        story.value = story.compute(story.value, "-", story.mate_value)
    else:
        story.say(ASK_FEWER)
        story.value = story.compute(story.mate_value, "-", story.value)


def _end_price(story: _Story) -> None:
    if k := story.factor():
        story.change(ASK_PRICE, "*", k)


def _end_pack(story: _Story) -> None:
    if k := story.divisor():
        story.change(ASK_PACK, "/", k)


_EVENTS: tuple[Callable[[_Story, int], None], ...] = (_gain, _loss, _boxes, _times, _split, _compare)
_ENDS: tuple[Callable[[_Story], None], ...] = (_end_plain, _end_pair, _end_price, _end_pack)


@dataclass(frozen=True)
class Accuracy:
    """Number of problems solved, of all problems."""

    correct: int
    count: int

    @property
    def share(self) -> float:
        return self.correct / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95% Wilson score interval of the share."""
        z, n, p = 1.96, self.count, self.share
        middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - spread) / (1 + z * z / n), min(1 + z * z / n, middle + spread) / (1 + z * z / n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.1%} ({self.correct} of {self.count}; 95% interval {low:.1%} to {high:.1%})"
