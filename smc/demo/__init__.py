"""A model pair small enough to ship: word problems made here, and where the two models trained on them lie."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
TARGET = WEIGHTS / "target"
DRAFT = WEIGHTS / "draft"
MAX_ANSWER = 112
"""Longest answer that is sampled, in tokens; the longest right one is a little shorter."""
