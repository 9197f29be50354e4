"""The prefix cache: blocks of tokens at the beginning of prompts and answers, mapped to the pages that hold their keys
and values.

Knows tokens and page numbers, nothing about requests or particles. Every entry holds one reference on the last page of
its block; lineage keeps the pages before it."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from smc.memory.pages import DUMMY_PAGE, PageAllocator, Pages

KEY_BYTES = 16

Tokens = np.ndarray | Sequence[int]


def common_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Leading blocks that two sequences have in common. The key of a block covers all before it, so that a binary
    search finds the last common one."""
    if not one or not other or one[0] != other[0]:
        return 0
    return bisect_left(
        range(1, min(len(one), len(other)) + 1), True, key=lambda count: one[count - 1] != other[count - 1]
    )


class PrefixCache:
    """Cached blocks of one pool. The key of a block covers all tokens before it and a salt: what differs in either
    shares nothing."""

    def __init__(self, allocator: PageAllocator, block: int = 16) -> None:
        if block < 1:
            raise ValueError(f"a block of the prefix cache needs at least 1 token, got {block}")
        self.allocator = allocator
        self.block = block
        self.queried_tokens = 0
        """Tokens that `match` was asked about."""
        self.hit_tokens = 0
        """Tokens that `match` found."""
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        """Last page of a block, by key, least recently used first. A block stands after all that continue it."""

    @property
    def entries(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> int:
        """Cached positions, each of them a page; requests may hold some of these, too."""
        return len(self._pages) * self.block

    def keys(self, tokens: Tokens, salt: str = "") -> list[bytes]:
        """Keys of the whole blocks of `tokens`, in order."""
        return list(self._keys(tokens, len(tokens), salt))

    def match(self, tokens: Tokens, salt: str = "", most: int | None = None) -> tuple[int, int]:
        """`find` for tokens: at most the first `most` of them. They are counted, too."""
        length = len(tokens) if most is None else max(0, min(len(tokens), most))
        found, page = self.find(self._keys(tokens, length, salt))
        self.count(len(tokens), found)
        return found, page

    def find(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """(Number of leading tokens that are cached; page of the last of them, or 0).

        Marks them as used now. A caller that wants to keep the page must `hold` it before anything is evicted.
        """
        known = []
        for key in keys:
            if key not in self._pages:
                break
            known.append(key)
        for key in reversed(known):
            self._pages.move_to_end(key)
        return len(known) * self.block, self._pages[known[-1]] if known else DUMMY_PAGE

    def count(self, queried: int, hit: int) -> None:
        """Count the tokens of a match that its caller uses."""
        self.queried_tokens += queried
        self.hit_tokens += hit

    def insert(self, tokens: Tokens, head_pages: Pages, salt: str = "") -> None:
        """Keep every whole block of `tokens`. `head_pages` [len(tokens)]: the pages of their positions, in lineage
        order.

        A block that is known keeps its page. Blocks after it may then descend from other pages than that one: lineage
        keeps those."""
        assert len(head_pages) == len(tokens), "a sequence was cached that has not one page a token"
        self.keep(self.keys(tokens, salt), head_pages)

    def keep(self, keys: Sequence[bytes], head_pages: Pages) -> None:
        """`insert` for the keys of a sequence."""
        last_pages = np.asarray(head_pages)[self.block - 1 :: self.block].tolist()
        new_pages = []
        for key, page in zip(reversed(keys), reversed(last_pages), strict=True):
            if key not in self._pages:
                self._pages[key] = page
                new_pages.append(page)
            self._pages.move_to_end(key)
        self.allocator.hold(new_pages)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these blocks, as far as they are cached. Blocks that continue them are not found until these are cached
        again."""
        self.allocator.release([self._pages.pop(key) for key in keys if key in self._pages])

    def evict(self, count: int) -> int:
        """Drop the least recently used blocks until `count` more pages are free or no block is left. Returns how many
        became free."""
        before = self.allocator.num_free
        while self._pages and self.allocator.num_free < before + count:
            missing = before + count - self.allocator.num_free
            self._drop(-(-missing // self.block))
        return self.allocator.num_free - before

    def take_counts(self) -> tuple[int, int]:
        """(`queried_tokens`, `hit_tokens`), which begin again at 0."""
        counts = self.queried_tokens, self.hit_tokens
        self.queried_tokens = self.hit_tokens = 0
        return counts

    def clear(self) -> None:
        self._drop(len(self._pages))

    def _drop(self, count: int) -> None:
        """Drop the `count` least recently used blocks; together, because a release of many costs little more than one
        of one."""
        count = min(count, len(self._pages))
        self.allocator.release([self._pages.popitem(last=False)[1] for _ in range(count)])

    def _keys(self, tokens: Tokens, length: int, salt: str) -> Iterator[bytes]:
        """Keys of the whole blocks of the first `length` tokens, in order."""
        whole = length // self.block * self.block
        text = memoryview(np.asarray(tokens[:whole], dtype=np.int64).tobytes())
        # `person` keeps salts apart from blocks, so that no salt can be made up that continues another caller's text.
        key = blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"salt").digest()
        size = 8 * self.block
        for start in range(0, len(text), size):
            key = blake2b(key + text[start : start + size], digest_size=KEY_BYTES).digest()
            yield key
