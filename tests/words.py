"""Replaced words of our own, each with the standard word to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

ANYWHERE = {
    "anybody": "a noun that says who is meant",
    "chooser": "selector",
    "cohort": "micro-batch",
    "companion": "unconditional row",
    "foretell": "forecast",
    "gang": "replica, worker group",
    "give up": "release",
    "given up": "released",
    "give way": "be preempted",
    "go alone": "fall back to the target",
    "hazard": "miss rate",
    "judge": "verify, check",
    "ledger": "page allocator",
    "let go": "release",
    "loose page": "unassigned page",
    "nobody": "a noun that says who is meant",
    "noun": "type",
    "rehearsal": "warm-up, graph capture",
    "rejoin": "re-enable the draft",
    "reroot": "remap the block table",
    "somebody": "a noun that says who is meant",
    "suspect": "quarantined request",
    "taken up again": "resumed",
    "tally": "counters",
    "tops": "top_logprobs",
    "whoever": "a noun that says who is meant",
}
IN_PAGES = {"evidence": "score inputs", "lane": "sequence stream"}
"""In code these are terms of statistics and of GPUs."""
IN_CODE = {"law": "token distribution", "rehearsed": "warmed up"}
IN_NAMES = {
    "asked": "a noun: inputs, requested, completion",
    "law": "distribution",
    "life": "incarnation, run",
    "lives": "runs, entries",
    "loose": "unassigned",
    "news": "updates",
    "offer": "candidate",
    "offered": "candidate",
    "offering": "candidates",
    "place": "batch index, batch size",
    "said": "a noun: outputs, fields",
    "says": "a noun: matches, outputs",
}
"""These words are ordinary English in prose, so they are replaced only in names."""


def parts(name: str) -> str:
    """The words of a name, or of the names in a text."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ")


def replaced(text: str, words: Mapping[str, str]) -> dict[str, str]:
    """The words of `words` that a text contains, each with its replacement."""
    if not _any_of(tuple(words)).search(text):
        return {}
    return {word: standard for word, standard in words.items() if _any_of((word,)).search(text)}


@cache
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    one = "|".join(word.replace(" ", r"\s+") for word in words)
    return re.compile(rf"\b(?:{one})s?\b", re.IGNORECASE)
