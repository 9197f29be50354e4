"""Prefix reuse: allocates pages for prompts and for the answers of resumed requests, starting from what the prefix
caches hold, and caches sequences for later requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.arrays import common_length
from smc.memory.kv_cache import CachedBeginning, KVCacheManager
from smc.memory.pages import DUMMY_PAGE, OutOfPages
from smc.scheduler.methods import DecodingRules
from smc.scheduler.prefill_batches import PrefillJob, PrefillRequest, PromptRow
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots, Stream
from smc.types import ModelRole, Numerics


class HeldBlocks:
    """Counts the cached blocks of running requests' prompts. What the prefix caches hold beside them, nobody uses."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[ModelRole, bytes]] = Counter()
        """Number of requests that hold a block, by model and key."""
        self._blocks = dict.fromkeys(ModelRole, 0)
        """Number of different blocks that requests hold."""
        self._streams: dict[SequenceGroup, tuple[Stream, ...]] = {}

    def only_cached(self, running: Iterable[SequenceGroup], memory: KVCacheManager) -> dict[ModelRole, int]:
        """Return the number of pages that only the cache of each model holds. `running`: the requests whose prompts
        have run; those that were among them at the last call cost nothing."""
        now = {group: group.streams for group in running}
        for group in [group for group, streams in self._streams.items() if now.get(group) != streams]:
            self._count(group, self._streams.pop(group), -1)
        for group in now.keys() - self._streams.keys():
            self._count(group, now[group], 1)
        self._streams = now
        return {role: max(0, cache.entries - self._blocks[role]) * cache.block for role, cache in memory.caches.items()}

    def _count(self, group: SequenceGroup, streams: tuple[Stream, ...], sign: int) -> None:
        for stream in streams:
            for key in group.keys.get("negative" if stream.unconditional else "prompt", ()):
                held = self._requests.pop((stream.role, key), 0)
                if held + sign:
                    self._requests[stream.role, key] = held + sign
                self._blocks[stream.role] += (held + sign > 0) - (held > 0)


class PrefixReuse:
    """Allocates and caches the sequences that requests have before their rounds and at their end."""

    def __init__(self, config: EngineConfig, slots: Slots, memory: KVCacheManager) -> None:
        self.config, self.slots, self.memory = config, slots, memory

    def has_room(self, job: PrefillJob) -> bool:
        """Whether the job could start if everything cached were evicted or belonged to it; does not search the
        cache."""
        memory = self.memory
        pages = _by_role({stream: job.pages(stream) for stream in job.streams})
        spare = memory.spare(job.round_pages)
        return all(count + spare[role] <= memory.room(role) for role, count in pages.items())

    def allocate(self, job: PrefillJob) -> bool:
        """Allocate rows for all streams. Return False if there are too few pages."""
        memory, streams = self.memory, job.streams
        cached = {stream: self._match(job, stream) for stream in streams}
        try:
            wanted = {stream: job.pages(stream) - cached[stream].tokens for stream in streams}
            new_pages = self._allocate(wanted, memory.spare(job.round_pages))
            job.count_cached(min(cached[stream].tokens for stream in streams if not stream.unconditional))
            for stream in streams:
                sequences = job.sequences(stream)
                memory.count_match(stream.role, len(sequences[0]), cached[stream].tokens)
                job.rows[stream] = self._rows(stream.role, sequences, cached[stream], new_pages[stream])
            return True
        except OutOfPages:
            return False
        finally:
            # By now the rows hold references to the cached pages that they need.
            for stream, beginning in cached.items():
                memory.allocators[stream.role].release([beginning.page])

    def reallocate(self, job: PrefillJob) -> None:
        """Replace pages of a job that has not begun, if by now more of its beginning is cached than when they were
        allocated."""
        memory = self.memory
        for stream, rows in job.rows.items():
            role = stream.role
            cached = self._match(job, stream)
            if cached.tokens > rows[0].known:
                self._release(stream, rows)
                # Pages that have not been run are not shared, so more pages were just freed than are needed.
                new_pages = memory.allocate({role: job.pages(stream) - cached.tokens})
                job.rows[stream] = self._rows(role, job.sequences(stream), cached, new_pages[role])
                memory.count_match(role, 0, cached.tokens - rows[0].known)
            memory.allocators[role].release([cached.page])
        job.count_cached(min(rows[0].known for stream, rows in job.rows.items() if not stream.unconditional))

    def carry(
        self, group: SequenceGroup, rules: DecodingRules, rows: int, answer: np.ndarray
    ) -> dict[Stream, list[PromptRow]] | None:
        """Return rows of a running request's prompt and confirmed `answer` for another decoding: complete at a model
        that has run them already. Return None if there are too few pages for the other models. The pages at a model
        that is no longer needed are cached."""
        memory, slot, streams = self.memory, int(group.living(self.slots)[0]), group.streams_by(rules)
        either = dict.fromkeys((*group.streams, *streams))
        sequences = {
            stream: np.concatenate((np.array(group.prompt_of(stream), dtype=np.int64), answer)) for stream in either
        }
        keys = {stream: memory.keys(sequence, group.request.cache_salt) for stream, sequence in sequences.items()}
        new = [stream for stream in streams if stream not in group.streams]
        cached = {stream: memory.match(stream.role, keys[stream], len(sequences[stream])) for stream in new}
        try:
            round_pages = rules.round_pages(self.config, group.params, rows)
            spare = memory.spare({stream.role: round_pages[stream.role] for stream in new})
            new_pages = self._allocate(
                {stream: len(sequences[stream]) - cached[stream].tokens for stream in new}, spare
            )
        except OutOfPages:
            return None
        else:
            carried = {
                stream: self._rows(stream.role, [sequences[stream]], cached[stream], new_pages[stream])
                for stream in new
            }
        finally:
            for stream, beginning in cached.items():
                memory.allocators[stream.role].release([beginning.page])
        for stream in group.streams:
            role, sequence = stream.role, sequences[stream]
            at = int(self.slots.unconditional_S[slot]) if stream.unconditional else slot
            pages = self._path(role, at)[: len(sequence)]
            if stream in streams:
                assert len(pages) == len(sequence), "a model lacks what has been confirmed"
                memory.allocators[role].hold(pages[-1:])
                carried[stream] = [PromptRow(sequence, pages, len(pages))]
            else:
                size = len(sequence) if self._may_cache_answer(group, role) else len(group.prompt_of(stream))
                self._remember(role, keys[stream], pages[:size])
        return carried

    def release(self, job: PrefillJob) -> None:
        """Release all pages of a job."""
        self.drop(job, list(job.rows))

    def drop(self, job: PrefillJob, streams: Sequence[Stream]) -> None:
        """Release the pages of a job in these streams, which it does not run."""
        for stream in streams:
            self._release(stream, job.rows.pop(stream))

    def beginning(self, job: PrefillJob) -> bytes | None:
        """Key of the first block of a job's prompt. Jobs with different keys have no block in common. None: the prompt
        is shorter than a block."""
        keys = self._keys(job.group, Stream(ModelRole.TARGET))
        return keys[0] if keys else None

    def awaits(self, job: PrefillJob, earlier: list[PrefillJob]) -> bool:
        """Whether an earlier job is about to run tokens that this one begins with, too. Common tokens that are
        scheduled already are cached."""
        for other in [] if job.begun else earlier:
            for stream in set(job.rows) & set(other.rows):
                row, keys, role = other.rows[stream][0], self._keys(other.group, stream), stream.role
                common = self.memory.common(role, self._keys(job.group, stream), keys, job.most_cached(stream))
                if common > job.rows[stream][0].known:
                    job.waited = True
                    if row.done < common:
                        return True
                    self.memory.remember(role, keys, row.pages_L[:common])
        return False

    def remember_prompt(self, job: PrefillRequest) -> None:
        """Cache the prompts, after their rows have been run in every stream."""
        for stream, rows in job.rows.items():
            size = len(job.group.prompt_of(stream))
            self.memory.remember(stream.role, self._keys(job.group, stream), rows[0].pages_L[:size])

    def remember_answer(self, group: SequenceGroup, particle: int, tokens: tuple[int, ...]) -> None:
        """Cache the pages that the models have computed for a request's answer."""
        keys = self.memory.keys((*group.request.prompt, *tokens), group.request.cache_salt)
        slot, size = int(group.slots[particle]), group.prompt_size + len(tokens)
        for role in group.rules.roles:
            if self._may_cache_answer(group, role):
                self._remember(role, keys, self._path(role, slot)[:size])

    def _may_cache_answer(self, group: SequenceGroup, role: ModelRole) -> bool:
        """Whether others may read what rounds have computed of a request's answer. With `numerics: invariant`, a model
        whose bits the answer does not depend on may have computed it in another order of sums
        (`smc.executor.whole_pass`), and an answer of SMC must not depend on what is cached."""
        return self.config.numerics != Numerics.INVARIANT or role in group.rules.decoding.deciding

    def forget_prompt(self, group: SequenceGroup) -> None:
        """Remove the request's prompts from the cache: a model has returned NaN after them, so later requests must not
        reuse them."""
        for stream in group.streams:
            self.memory.forget(self._keys(group, stream))

    def _match(self, job: PrefillJob, stream: Stream) -> CachedBeginning:
        return self.memory.match(stream.role, self._keys(job.group, stream), job.most_cached(stream))

    def _allocate(self, wanted: dict[Stream, int], spare: dict[ModelRole, int]) -> dict[Stream, np.ndarray]:
        """Allocate unassigned pages for streams, as `KVCacheManager.allocate` does for models."""
        new_pages = self.memory.allocate(_by_role(wanted), spare)
        found = {}
        for stream, count in wanted.items():
            found[stream], new_pages[stream.role] = np.split(new_pages[stream.role], [count])
        return found

    def _rows(
        self, role: ModelRole, sequences: Sequence[np.ndarray], cached: CachedBeginning, new_pages: np.ndarray
    ) -> list[PromptRow]:
        """Assign pages to sequences that all begin with the `cached` tokens; sequences share the pages of common
        beginnings.

        `new_pages`: unassigned pages, `count_pages` minus the cached positions. The caller holds one reference to the
        last page of every sequence."""
        allocator = self.memory.allocators[role]
        rows: list[PromptRow] = []
        for i, tokens_L in enumerate(sequences):
            shared = [common_length(tokens_L, other) for other in sequences[:i]]
            known, pages_L = cached.tokens, allocator.path(cached.page, cached.tokens)
            if shared and max(shared) > known:
                known = max(shared)
                pages_L = rows[shared.index(known)].pages_L[:known]
            own_L, new_pages = new_pages[: len(tokens_L) - known], new_pages[len(tokens_L) - known :]
            allocator.chain(int(pages_L[-1]) if known else DUMMY_PAGE, own_L)
            pages_L = np.concatenate((pages_L, own_L)).astype(np.int32)
            allocator.hold(pages_L[-1:])
            rows.append(PromptRow(tokens_L, pages_L, known))
        assert not len(new_pages), "more pages were allocated than sequences need"
        return rows

    def _path(self, role: ModelRole, slot: int) -> np.ndarray:
        """Pages of all positions of a particle for which a model has keys and values."""
        return self.memory.allocators[role].path(int(self.slots.head_S[role][slot]), int(self.slots.held_S[role][slot]))

    def _release(self, stream: Stream, rows: list[PromptRow]) -> None:
        self.memory.allocators[stream.role].release([row.pages_L[-1] for row in rows])

    def _remember(self, role: ModelRole, keys: list[bytes], pages: np.ndarray) -> None:
        # Cached pages remain after no particle holds them any longer.
        self.memory.allocators[role].count_grown(pages, False)
        self.memory.remember(role, keys, pages)

    def _keys(self, group: SequenceGroup, stream: Stream) -> list[bytes]:
        """Cache keys of the blocks of the stream's prompt."""
        kind = "negative" if stream.unconditional else "prompt"
        if kind not in group.keys:
            group.keys[kind] = self.memory.keys(group.prompt_of(stream), group.request.cache_salt)
        return group.keys[kind]


def _by_role(pages: dict[Stream, int]) -> dict[ModelRole, int]:
    """Sum the pages of each model's streams."""
    found: dict[ModelRole, int] = {}
    for stream, count in pages.items():
        found[stream.role] = found.get(stream.role, 0) + count
    return found
