"""Compiles constraints for the tokens of a vocabulary, with the library llguidance, which only this file,
`smc.mask_reader`, `smc.constraint_masks` and `smc.grammar.compiler` import. Knows nothing about answers, models and
rounds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import llguidance
import numpy as np

from smc.api.constraint import Constraint, ConstraintRefused
from smc.grammar.compiler import LIMITS, MOST_ACCEPTED, MOST_COMPILED, NotCompiled, compiled
from smc.stops import TokenBytes

MOST_KEPT = 256
"""Maximum number of compiled constraints that are kept: the most recently used ones."""


class Compiler:
    """Compiles constraints for one vocabulary, and caches them. Thread-safe."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.token_bytes = token_bytes
        self.vocab = len(token_bytes.offset_V) - 1
        self._seconds: list[float] = []
        self._hits = 0
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        """Of what is kept, held for a moment; and of the library, held while a constraint is compiled."""
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], llguidance.LLMatcher | NotCompiled] = OrderedDict()

    @staticmethod
    @lru_cache(maxsize=4)
    def of(token_bytes: TokenBytes) -> Compiler:
        return Compiler(token_bytes)

    @property
    def words(self) -> int:
        """W, the number of words of a mask. The bit after those of the vocabulary stands for the end of the answer."""
        return self.vocab // 32 + 1

    @property
    def eos_ids(self) -> np.ndarray:
        """Tokens that end an answer, int64."""
        return np.array(self.token_bytes.eos_ids, dtype=np.int64)

    def check(self, constraint: Constraint) -> None:
        """Compile a constraint. Raises ConstraintRefused."""
        self.start(constraint)

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint that another process has accepted: it may take longer here. If it is refused all the
        same, `start` says so."""
        with contextlib.suppress(ConstraintRefused):
            self.start(constraint, MOST_ACCEPTED)

    def warm(self) -> None:
        """Read the vocabulary, which takes half a second for 50,000 tokens."""
        with self._compiling:
            self._vocabulary()

    def take_counts(self) -> tuple[list[float], int]:
        """Return the seconds of every constraint that was compiled since the last call, and how many were cached."""
        found, self._seconds, self._hits = (self._seconds, self._hits), [], 0
        return found

    def start(self, constraint: Constraint, seconds: float = MOST_COMPILED) -> llguidance.LLMatcher:
        """Return the matcher of a constraint at its beginning. It is shared: copy it before use. Raises
        ConstraintRefused, also if compiling takes more than `seconds` of processor time."""
        if not len(self.token_bytes.data_P):
            raise constraint.refused("the model's tokens stand for no text; leave it out")
        if not self.token_bytes.eos_ids:
            raise constraint.refused("the model has no token that ends texts; leave it out")
        if constraint.after is not None and constraint.after >= self.vocab:
            raise ConstraintRefused(f"after={constraint.after}; allowed: 0..{self.vocab - 1}")
        found = self._known(constraint)
        if found is None:
            with self._compiling:
                found = self._known(constraint) or self._compiled(constraint, seconds)
        if isinstance(found, NotCompiled):
            raise constraint.refused(found.why, found.rule) from found
        return found

    def _known(self, constraint: Constraint) -> llguidance.LLMatcher | NotCompiled | None:
        """Return what compiling the constraint has given; None: it is not kept. Does not wait for others that are
        compiled meanwhile."""
        with self._lock:
            found = self._kept.get((constraint.kind, constraint.text))
            if found is not None:
                self._kept.move_to_end((constraint.kind, constraint.text))
                self._hits += 1
            return found

    def _compiled(self, constraint: Constraint, seconds: float) -> llguidance.LLMatcher | NotCompiled:
        """Compile a constraint: return its matcher at its beginning, or why it is refused."""
        vocabulary, begin = self._vocabulary(), time.perf_counter()
        found: llguidance.LLMatcher | NotCompiled
        try:
            # The library releases the interpreter's lock meanwhile.
            found = compiled(constraint, vocabulary, LIMITS, seconds)
        except NotCompiled as error:
            found = error
        self._seconds.append(time.perf_counter() - begin)
        with self._lock:
            while len(self._kept) >= MOST_KEPT:
                self._kept.popitem(last=False)
            self._kept[constraint.kind, constraint.text] = found
        return found

    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            # An additional token stands for the end, because a model may have several tokens that end texts.
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self.token_bytes))
            self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.vocab + 1, eos_token=self.vocab)
        return self._tokenizer


class _Vocabulary:
    """The vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, token_bytes: TokenBytes) -> None:
        offset_V, data = token_bytes.offset_V.tolist(), token_bytes.data_P.tobytes()
        self.eos_token_id = len(offset_V) - 1
        tokens = [data[begin:end] for begin, end in pairwise(offset_V)]
        # Tokens without text, and tokens that end answers, occur in no text.
        special = {token for token, text in enumerate(tokens) if not text} | set(token_bytes.eos_ids)
        self.special_token_ids = [*sorted(special), self.eos_token_id]
        self.tokens = [f"<{token}>".encode() if token in special else text for token, text in enumerate(tokens)]
        self.tokens.append(b"<end>")
        self._ids = {text: token for token, text in reversed(list(enumerate(tokens))) if token not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Split a text into tokens, longest first. The library uses this for texts that a grammar forces; masks do not
        depend on it."""
        return list(self._split(text))

    def _split(self, text: bytes) -> Iterator[int]:
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), None)
            if size is not None:
                yield self._ids[text[:size]]
            text = text[size or 1 :]
