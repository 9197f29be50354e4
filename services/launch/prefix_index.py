"""Which beginnings of texts a worker group has run, as far as its prefix cache can still hold them. Knows nothing about
requests or worker groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from smc.memory.prefix_keys import BLOCK, Tokens, block_keys

MAX_TOKENS = 16_384
"""Only so many tokens of a text count, so that choosing a worker group takes a millisecond or two however long the text
is."""


def index_keys(tokens: Tokens, salt: str) -> list[bytes]:
    """Return the keys of the whole blocks of a text, as the prefix cache computes them."""
    return block_keys(tokens[:MAX_TOKENS], salt)


class PrefixIndex:
    """Blocks of the texts that a worker group was sent. The least recently sent are forgotten first, and those at the
    end of a text before those at its beginning, as in the prefix cache."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        """A block comes after all blocks that continue it."""

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading blocks that were sent."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def add(self, keys: Sequence[bytes], pages: int) -> None:
        """Add the blocks of a text. `pages`: positions that the worker group's pool holds; beyond as many, old blocks
        are forgotten."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > pages // BLOCK:
            self._keys.popitem(last=False)

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the blocks that are not there."""
        return [key for key in keys if key not in self._keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove blocks of a text that was sent but not taken."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
