"""Context-free productions, reduced to which symbols need which others: finds the symbols that produce a finite text.
Knows nothing about the texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable


class Productions:
    """Productions `symbol -> needed symbols`. What needs nothing produces a text. Takes time linear in their size."""

    def __init__(self) -> None:
        self._symbols: list[Hashable] = []
        self._missing: list[int] = []
        self._uses: dict[Hashable, list[int]] = defaultdict(list)

    def add(self, symbol: Hashable, needed: Iterable[Hashable] = ()) -> None:
        needed = set(needed)
        for each in needed:
            self._uses[each].append(len(self._symbols))
        self._symbols.append(symbol)
        self._missing.append(len(needed))

    def productive(self) -> set[Hashable]:
        """Return the symbols that produce a text."""
        missing = list(self._missing)
        waiting = [symbol for symbol, count in zip(self._symbols, missing) if not count]
        found = set(waiting)
        while waiting:
            for use in self._uses.get(waiting.pop(), ()):
                missing[use] -= 1
                symbol = self._symbols[use]
                if not missing[use] and symbol not in found:
                    found.add(symbol)
                    waiting.append(symbol)
        return found
