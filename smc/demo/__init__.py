"""The demo pair: two small models, shipped with the package, that solve generated arithmetic word problems."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
TARGET = WEIGHTS / "target"
DRAFT = WEIGHTS / "draft"
MAX_ANSWER = 112
"""Maximum length of a sampled answer, in tokens. The longest correct answer is slightly shorter."""
