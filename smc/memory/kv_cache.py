"""KV memory of a pair of models. The pools hold keys and values of every layer, indexed by page, on the models'
devices. The prefix cache maps blocks of tokens at the beginning of prompts and answers to the pages that hold their
keys and values. The KV cache manager alone decides page numbers; workers receive them with their work.

A released page may be allocated again at once, since a worker carries out its work in order. Every entry of the prefix
cache holds one reference to the last page of its block; lineage keeps the pages before it."""

from __future__ import annotations

import math
import mmap
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.memory.pages import DUMMY_PAGE, OutOfPages, PageAllocator, Pages
from smc.memory.prefix_keys import BLOCK, Tokens, block_keys
from smc.model.config import ModelConfig
from smc.types import ModelRole

RESERVED_BYTES = 5 << 30
"""Memory of a GPU that is reserved for activations and captured graphs, with logits of up to `RESERVED_LOGITS`."""
RESERVED_LOGITS = 2 << 30
LOOKED_AT = 4096
"""Maximum number of blocks held by requests that are looked at to find out whether an eviction suffices: 1 ms."""
WATERMARK = 0.05
"""Share of a pool that new requests must leave free for running ones."""


def common_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Return the number of leading blocks that two sequences have in common. The key of a block covers all blocks
    before it, so a binary search finds the last common one."""
    if not one or not other or one[0] != other[0]:
        return 0
    return bisect_left(
        range(1, min(len(one), len(other)) + 1), True, key=lambda count: one[count - 1] != other[count - 1]
    )


class CachedBeginning(NamedTuple):
    """Leading tokens of a sequence whose keys and values are cached."""

    tokens: int
    """Number of these tokens."""
    page: int
    """Page of the last of them; the dummy page if there are none."""


class PrefixCache:
    """Cached blocks of one pool. The key of a block covers a salt and all tokens up to its end: sequences share a block
    only if both are equal."""

    def __init__(self, allocator: PageAllocator, block: int = BLOCK) -> None:
        if block < 1:
            raise ValueError(f"a block of the prefix cache needs at least 1 token, got {block}")
        self.allocator = allocator
        self.block = block
        self.queried_tokens = 0
        """Number of tokens that were looked up."""
        self.hit_tokens = 0
        """Number of tokens that were found."""
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        """Last page of each block, by key, least recently used first. A block comes after all blocks that continue it,
        except those that a request held during an eviction."""
        self._nothing_at: int | None = None
        """Number of references that had been released when the last search of the whole cache found no block to drop.
        Until another one is released, there is none: whatever is cached meanwhile is held by a request."""

    @property
    def entries(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> int:
        """Number of cached positions, each of which is a page; requests may hold some of these pages, too."""
        return len(self._pages) * self.block

    def keys(self, tokens: Tokens, salt: str = "") -> list[bytes]:
        """Return the keys of the whole blocks of `tokens`, in order."""
        return block_keys(tokens, salt, self.block)

    def find(self, keys: Sequence[bytes]) -> CachedBeginning:
        """Return the leading tokens that are cached.

        Marks their blocks as just used. A caller that wants to keep the page must `hold` it before anything is
        evicted."""
        known = []
        for key in keys:
            if key not in self._pages:
                break
            known.append(key)
        for key in reversed(known):
            self._pages.move_to_end(key)
        return CachedBeginning(len(known) * self.block, self._pages[known[-1]] if known else DUMMY_PAGE)

    def count(self, queried: int, hit: int) -> None:
        """Count the tokens of a match that the caller uses."""
        self.queried_tokens += queried
        self.hit_tokens += hit

    def keep(self, keys: Sequence[bytes], head_pages: Pages) -> None:
        """Cache the blocks with these keys. `head_pages` [T]: the pages of the sequence's positions, in lineage order;
        pages after the last whole block are ignored.

        A block that is already cached keeps its page. Later blocks may then descend from other pages than that one:
        lineage keeps those pages."""
        last_pages = np.asarray(head_pages)[self.block - 1 :: self.block].tolist()
        new_pages = []
        for key, page in zip(reversed(keys), reversed(last_pages), strict=True):
            if key not in self._pages:
                self._pages[key] = page
                new_pages.append(page)
            self._pages.move_to_end(key)
        self.allocator.hold(new_pages)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these blocks, if they are cached. Blocks that continue them are not found until the dropped blocks are
        cached again."""
        self.allocator.release([self._pages.pop(key) for key in keys if key in self._pages])

    def evict(self, count: int) -> int:
        """Drop the least recently used blocks until `count` more pages are free or only requests hold what is left.
        Returns how many became free."""
        before = self.allocator.num_free
        keys, _ = self._unused(count, len(self._pages))
        self.allocator.release([self._pages.pop(key) for key in keys])
        return self.allocator.num_free - before

    def frees(self, count: int) -> bool:
        """Return whether `evict` would free `count` pages. Drops nothing. False as well if `LOOKED_AT` blocks that
        requests hold have been seen before: the next call looks at others."""
        return self._unused(count, LOOKED_AT)[1] >= count

    def _unused(self, count: int, most_used: int) -> tuple[list[bytes], int]:
        """Return the least recently used blocks that must be dropped to free `count` pages, or as many as possible, and
        the number of pages that become free. Blocks that requests hold count as just used: later calls look at them
        last. `most_used`: after this many of them, nothing more is looked for."""
        unused: list[bytes] = []
        used: dict[int, bytes] = {}
        gone: dict[int, int] = {}
        freed = 0
        if self._nothing_at == self.allocator.num_released:
            return unused, freed
        freed_by = self.allocator.freed_by
        for key, page in self._pages.items():
            if freed >= count or len(used) == most_used:
                break
            used[page] = key
            # The page before those that become free loses a reference: its block may have been looked at too early.
            while freed < count and page in used:
                more, before = freed_by(page, gone)
                if not more:
                    break
                unused.append(used.pop(page))
                freed += more
                page = before
        if len(used) == len(self._pages):
            self._nothing_at = self.allocator.num_released
        for key in used.values():
            self._pages.move_to_end(key)
        return unused, freed

    def take_counts(self) -> tuple[int, int]:
        """Return (`queried_tokens`, `hit_tokens`) and reset both to 0."""
        counts = self.queried_tokens, self.hit_tokens
        self.queried_tokens = self.hit_tokens = 0
        return counts

    def clear(self) -> None:
        self.allocator.release(list(self._pages.values()))
        self._pages.clear()


def reserved_bytes(logit_bytes: int) -> int:
    """Return the memory of a GPU that is reserved for activations and captured graphs. `logit_bytes`: of the models'
    largest rounds, as of `EngineConfig.logit_bytes`."""
    return RESERVED_BYTES + max(0, logit_bytes - RESERVED_LOGITS)


def pages_that_fit(page_bytes: int, device: torch.device, distribution_bytes: int = 0, logit_bytes: int = 0) -> int:
    """Return the number of pages that fit into a GPU's free memory, after reserving memory for activations, captured
    graphs and the token distributions of draft chains (`distribution_bytes`)."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - reserved_bytes(logit_bytes) - distribution_bytes) // page_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU their memory is allocated page by page when it is written; an allocator might clear all of
    it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(untouched, dtype=dtype).view(shape)


class KVPool:
    """Keys and values [layers][pages + 1, J, D] each; page 0 is the dummy page. J key/value heads of D dimensions."""

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (config.num_layers, capacity + 1, config.num_kv_heads, config.head_dim)
        self.windows = tuple(config.window_of(layer) for layer in range(config.num_layers))
        """Number of positions that a token sees in each layer, itself included; None: all."""
        # Zeros, because a masked position still takes part in a product, and 0 * NaN is NaN.
        self.keys, self.values = (_zeros(shape, dtype, torch.device(device)) for _ in range(2))

    @staticmethod
    def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the bytes that one token position takes over all layers."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def pool_for(pages: int) -> int:
    """Return the size of a pool in which requests that need `pages` pages run in parallel."""
    return math.ceil(pages / (1 - WATERMARK))


class KVCacheManager:
    """A page allocator and a prefix cache for each model."""

    def __init__(self, capacity: dict[ModelRole, int], *, prefix_cache: bool) -> None:
        self.capacity = dict(capacity)
        self.allocators = {role: PageAllocator(pages) for role, pages in capacity.items()}
        self.caches = (
            {role: PrefixCache(allocator) for role, allocator in self.allocators.items()} if prefix_cache else {}
        )
        self.expected = dict.fromkeys(capacity, 0)
        """Number of pages that admitted requests are likely to hold."""
        self.next_round = dict.fromkeys(capacity, 0)
        """Number of pages that a round of all admitted requests allocates."""
        self._shares: dict[int, tuple[dict[ModelRole, int], dict[ModelRole, int]]] = {}
        """Share of each admitted request in `expected` and `next_round`."""

    def renew(self, role: ModelRole, pages: int) -> None:
        """Replace a model's pool by an empty one of `pages` pages. No request may refer to pages of the old one."""
        if role in self.caches:
            self.caches[role].clear()
        allocator = self.allocators[role]
        assert allocator.num_free == self.capacity[role], f"pages of the {role} model are held although it is lost"
        self.capacity[role] = pages
        self.allocators[role] = PageAllocator(pages)
        if role in self.caches:
            self.caches[role] = PrefixCache(self.allocators[role])

    def admits(self, pages: dict[ModelRole, int]) -> bool:
        """Return whether the forecast leaves the watermark free if a request with these pages is added. A request alone
        is always admitted."""
        return all(
            not self.expected[role] or self.expected[role] + count <= (1 - WATERMARK) * self.capacity[role]
            for role, count in pages.items()
        )

    def expect(self, request: int, pages: dict[ModelRole, int], round_pages: dict[ModelRole, int]) -> None:
        """Enter or replace the forecast of an admitted request: `pages` that it is likely to hold, and `round_pages`
        that one of its rounds allocates."""
        self.no_longer_expect(request)
        self._shares[request] = pages, round_pages
        self._add(pages, round_pages, 1)

    def no_longer_expect(self, request: int) -> None:
        if request in self._shares:
            self._add(*self._shares.pop(request), -1)

    def _add(self, pages: dict[ModelRole, int], round_pages: dict[ModelRole, int], sign: int) -> None:
        for role, count in pages.items():
            self.expected[role] += sign * count
            self.next_round[role] += sign * round_pages[role]

    def spare(self, round_pages: dict[ModelRole, int]) -> dict[ModelRole, int]:
        """Return the number of pages that a request must leave free when it starts, so that no other request is
        preempted at once; 0 if it is alone."""
        least = {role: round(WATERMARK * self.capacity[role]) for role in round_pages}
        return {
            role: max(self.next_round[role] + count, least[role]) if self.expected[role] else 0
            for role, count in round_pages.items()
        }

    def allocate(
        self, pages: dict[ModelRole, int], spare: dict[ModelRole, int] | None = None
    ) -> dict[ModelRole, np.ndarray]:
        """Allocate unassigned pages in all of these pools or in none; cached pages that no request holds are evicted if
        necessary. Raises OutOfPages.

        `spare`: number of pages of each pool that must stay free, for a request that can wait; nothing is evicted if
        that would not suffice."""
        wanted = pages if spare is None else {role: count + spare[role] for role, count in pages.items()}
        hopeless = [] if spare is None else [role for role, count in wanted.items() if not self._suffices(role, count)]
        for role in hopeless or self.short(wanted):
            raise OutOfPages(f"{wanted[role]} pages of the {role} model wanted, {self.allocators[role].num_free} free")
        return {role: self.allocators[role].allocate(count) for role, count in pages.items()}

    def short(self, pages: dict[ModelRole, int]) -> list[ModelRole]:
        """Return the pools that have fewer free pages than these, after the cache has evicted as many as necessary and
        possible."""
        for role, count in pages.items():
            missing = count - self.allocators[role].num_free
            if missing > 0 and role in self.caches:
                self.caches[role].evict(missing)
        return [role for role, count in pages.items() if count > self.allocators[role].num_free]

    def _suffices(self, role: ModelRole, count: int) -> bool:
        """Return whether `count` pages are free or can be made free by eviction."""
        missing = count - self.allocators[role].num_free
        return missing <= 0 or (role in self.caches and self.caches[role].frees(missing))

    def room(self, role: ModelRole) -> int:
        """Return at most how many pages are free or would be if the cache were evicted and requests held none of its
        pages: all pages of a pool that no request uses."""
        if not self.expected[role]:
            return self.capacity[role]
        return self.allocators[role].num_free + (self.caches[role].pages if role in self.caches else 0)

    def held(self, role: ModelRole) -> int:
        """Return the number of pages that are not free, including those that only the cache holds."""
        return self.capacity[role] - self.allocators[role].num_free

    def leaked(self) -> dict[ModelRole, int]:
        """Return the number of references and unassigned pages without an owner. Call it while no request runs: then
        only the cache may hold pages."""
        cached = {role: self.caches[role].entries if role in self.caches else 0 for role in self.allocators}
        return {
            role: allocator.num_unassigned + allocator.num_holds - cached[role]
            for role, allocator in self.allocators.items()
        }

    def keys(self, tokens: Sequence[int] | np.ndarray, salt: str) -> list[bytes]:
        """Return the keys of the blocks of a sequence, for either model's cache."""
        return next((cache.keys(tokens, salt) for cache in self.caches.values()), [])

    def match(self, role: ModelRole, keys: list[bytes], most: int) -> CachedBeginning:
        """Look up at most `most` tokens by `PrefixCache.find`. The caller holds the page from now on, and calls
        `count_match` if it uses the match."""
        if role not in self.caches:
            return CachedBeginning(0, DUMMY_PAGE)
        cache = self.caches[role]
        found = cache.find(keys[: most // cache.block])
        self.allocators[role].hold([found.page])
        return found

    def common(self, role: ModelRole, one: list[bytes], other: list[bytes], most: int) -> int:
        """Return how many leading tokens, at most `most`, two sequences have in common, in whole blocks of the
        cache."""
        if role not in self.caches:
            return 0
        block = self.caches[role].block
        return block * min(common_blocks(one, other), most // block)

    def count_match(self, role: ModelRole, queried: int, hit: int) -> None:
        if role in self.caches:
            self.caches[role].count(queried, hit)

    def remember(self, role: ModelRole, keys: list[bytes], pages: np.ndarray) -> None:
        """Cache a sequence as far as it has pages; blocks that are already cached stay."""
        if role in self.caches:
            cache = self.caches[role]
            cache.keep(keys[: len(pages) // cache.block], pages)

    def forget(self, keys: list[bytes]) -> None:
        """Drop these blocks from both caches."""
        for cache in self.caches.values():
            cache.forget(keys)

    def check(self) -> None:
        for allocator in self.allocators.values():
            allocator.check()
