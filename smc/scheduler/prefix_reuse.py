"""What the prefix caches have of the sequences that requests begin with: pages for prompts and for the answers of
resumed requests, and what is cached of them for later requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.messages import Stream
from smc.memory.kv_cache import KVCacheManager
from smc.memory.pages import OutOfPages
from smc.scheduler.methods import Decoding
from smc.scheduler.prefill_batches import PrefillJob, PrefillRequest, PromptRow, allocate_from_cache
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import ModelRole


class PrefixReuse:
    """Sequences of tokens that requests have before their rounds, and at their end."""

    def __init__(self, config: EngineConfig, slots: Slots, memory: KVCacheManager) -> None:
        self.config, self.slots, self.memory = config, slots, memory

    def has_room(self, job: PrefillJob) -> bool:
        """Whether it could start if everything cached was evicted, or was its own; the cache is not searched for
        that."""
        memory = self.memory
        pages = _by_role({stream: job.pages(stream) for stream in job.streams})
        spare = memory.spare(job.round_pages)
        return all(count + spare[role] <= memory.room(role) for role, count in pages.items())

    def allocate(self, job: PrefillJob) -> bool:
        """Allocate rows of all streams; False if there are too few pages."""
        memory, streams = self.memory, job.streams
        cached = {stream: self._match(job, stream) for stream in streams}
        try:
            wanted = {stream: job.pages(stream) - cached[stream][0] for stream in streams}
            new_pages = self._allocate(wanted, memory.spare(job.round_pages))
            job.count_cached(min(cached[stream][0] for stream in streams if not stream.unconditional))
            for stream in streams:
                sequences = job.sequences(stream)
                memory.count_match(stream.role, len(sequences[0]), cached[stream][0])
                job.rows[stream] = allocate_from_cache(
                    memory, stream.role, sequences, cached[stream], new_pages[stream]
                )
            return True
        except OutOfPages:
            return False
        finally:
            # Rows refer to what they need by now.
            for stream, (_, page) in cached.items():
                memory.allocators[stream.role].release([page])

    def reallocate(self, job: PrefillJob) -> None:
        """Where more is cached by now of what a job begins with, of which nothing has been scheduled, that replaces its
        own pages."""
        memory = self.memory
        for stream, rows in job.rows.items():
            role = stream.role
            count, page = self._match(job, stream)
            if count > rows[0].known:
                self._release(stream, rows)
                # Pages that have not been run are not shared: more than these have just become free.
                new_pages = memory.allocate({role: job.pages(stream) - count})
                job.rows[stream] = allocate_from_cache(
                    memory, role, job.sequences(stream), (count, page), new_pages[role]
                )
                memory.count_match(role, 0, count - rows[0].known)
            memory.allocators[role].release([page])
        job.count_cached(min(rows[0].known for stream, rows in job.rows.items() if not stream.unconditional))

    def carry(
        self, group: SequenceGroup, decoding: Decoding, rows: int, answer: np.ndarray
    ) -> dict[Stream, list[PromptRow]] | None:
        """Rows of a running request's prompt and confirmed `answer`, for another decoding: complete for a model that
        has run them already. None if there are too few pages for the others. What a model has that takes no part any
        more is cached."""
        memory, slot, streams = self.memory, int(group.living(self.slots)[0]), group.streams_by(decoding)
        either = dict.fromkeys((*group.streams, *streams))
        sequences = {
            stream: np.concatenate((np.array(group.prompt_of(stream), dtype=np.int64), answer)) for stream in either
        }
        keys = {stream: memory.keys(sequence, group.request.cache_salt) for stream, sequence in sequences.items()}
        new = [stream for stream in streams if stream not in group.streams]
        cached = {stream: memory.match(stream.role, keys[stream], len(sequences[stream])) for stream in new}
        try:
            round_pages = decoding.round_pages(self.config, rows, group.params.guided_roles)
            spare = memory.spare({stream.role: round_pages[stream.role] for stream in new})
            new_pages = self._allocate({stream: len(sequences[stream]) - cached[stream][0] for stream in new}, spare)
        except OutOfPages:
            return None
        else:
            carried = {
                stream: allocate_from_cache(memory, stream.role, [sequences[stream]], cached[stream], new_pages[stream])
                for stream in new
            }
        finally:
            for stream, (_, page) in cached.items():
                memory.allocators[stream.role].release([page])
        for stream in group.streams:
            role, sequence = stream.role, sequences[stream]
            at = int(self.slots.unconditional_S[slot]) if stream.unconditional else slot
            pages = self._path(role, at)[: len(sequence)]
            if stream in streams:
                assert len(pages) == len(sequence), "a model lacks what has been confirmed"
                memory.allocators[role].hold(pages[-1:])
                carried[stream] = [PromptRow(sequence, pages, len(pages))]
            else:
                self._remember(role, keys[stream], pages)
        return carried

    def release(self, job: PrefillJob) -> None:
        """A job refers to no pages any longer."""
        self.drop(job, list(job.rows))

    def drop(self, job: PrefillJob, streams: Sequence[Stream]) -> None:
        """Nor in these streams, which it is not to run."""
        for stream in streams:
            self._release(stream, job.rows.pop(stream))

    def beginning(self, job: PrefillJob) -> bytes | None:
        """Jobs of another beginning have no block in common; None: the job has no whole block."""
        keys = self._keys(job.group, Stream(ModelRole.TARGET))
        return keys[0] if keys else None

    def awaits(self, job: PrefillJob, earlier: list[PrefillJob]) -> bool:
        """Whether an earlier job is about to run what this one begins with, too. What has been scheduled is cached."""
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
        """Cache the prompts, whose rows have been run in every stream."""
        for stream, rows in job.rows.items():
            size = len(job.group.prompt_of(stream))
            self.memory.remember(stream.role, self._keys(job.group, stream), rows[0].pages_L[:size])

    def remember_answer(self, group: SequenceGroup, particle: int, tokens: tuple[int, ...]) -> None:
        """Cache what the models have computed of a request's answer."""
        keys = self.memory.keys((*group.request.prompt, *tokens), group.request.cache_salt)
        slot, size = int(group.slots[particle]), group.prompt_size + len(tokens)
        for role in group.decoding.roles:
            self._remember(role, keys, self._path(role, slot)[:size])

    def forget_prompt(self, group: SequenceGroup) -> None:
        """A model has returned NaN after it: later requests must not go on from there."""
        for stream in group.streams:
            self.memory.forget(self._keys(group, stream))

    def _match(self, job: PrefillJob, stream: Stream) -> tuple[int, int]:
        return self.memory.match(stream.role, self._keys(job.group, stream), job.most_cached(stream))

    def _allocate(self, wanted: dict[Stream, int], spare: dict[ModelRole, int]) -> dict[Stream, np.ndarray]:
        """Unassigned pages for streams, as `KVCacheManager.allocate`."""
        new_pages = self.memory.allocate(_by_role(wanted), spare)
        found = {}
        for stream, count in wanted.items():
            found[stream], new_pages[stream.role] = np.split(new_pages[stream.role], [count])
        return found

    def _path(self, role: ModelRole, slot: int) -> np.ndarray:
        """Pages of all positions of a particle whose keys and values a model has."""
        return self.memory.allocators[role].path(int(self.slots.head_S[role][slot]), int(self.slots.held_S[role][slot]))

    def _release(self, stream: Stream, rows: list[PromptRow]) -> None:
        self.memory.allocators[stream.role].release([row.pages_L[-1] for row in rows])

    def _remember(self, role: ModelRole, keys: list[bytes], pages: np.ndarray) -> None:
        # Cached pages stay when no particle holds them any longer.
        self.memory.allocators[role].count_grown(pages, False)
        self.memory.remember(role, keys, pages)

    def _keys(self, group: SequenceGroup, stream: Stream) -> list[bytes]:
        """Of its prompt's blocks."""
        kind = "negative" if stream.unconditional else "prompt"
        if kind not in group.keys:
            group.keys[kind] = self.memory.keys(group.prompt_of(stream), group.request.cache_salt)
        return group.keys[kind]


def _by_role(pages: dict[Stream, int]) -> dict[ModelRole, int]:
    """Sums over the streams of each model."""
    found: dict[ModelRole, int] = {}
    for stream, count in pages.items():
        found[stream.role] = found.get(stream.role, 0) + count
    return found
