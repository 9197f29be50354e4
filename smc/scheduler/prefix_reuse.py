"""What groups start from, and what of it the prefix caches have: pages for prompts, and for the answers of groups that
are taken up again; and what is cached of them for those that come later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.messages import Stream
from smc.memory.kv_cache import KVCacheManager
from smc.memory.pages import OutOfPages
from smc.scheduler.methods import Decoding
from smc.scheduler.prefill_batches import PrefillRequest, PromptRow, allocate_from_cache, count_pages
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import ModelRole


class PrefixReuse:
    """Sequences of tokens that groups have before their rounds, and at their end."""

    def __init__(self, config: EngineConfig, slots: Slots, memory: KVCacheManager) -> None:
        self.config, self.slots, self.memory = config, slots, memory

    def has_room(self, group: SequenceGroup) -> bool:
        """Whether it could start if all that is cached made room, or was its own; what is cached of it is not looked up
        for that."""
        memory = self.memory
        if group.needs is None:
            group.needs = {stream: len(group.prompt_of(stream)) for stream in group.streams}
            if group.saved is not None:
                group.needs = {stream: count_pages(self._sequences(group, stream)) for stream in group.needs}
        spare = memory.spare(self._round_pages(group))
        return all(count + spare[role] <= memory.room(role) for role, count in _by_role(group.needs).items())

    def plant(self, group: SequenceGroup) -> dict[Stream, list[PromptRow]] | None:
        """Rows of all lanes, or None if there are too few pages."""
        memory, streams = self.memory, group.streams
        assert group.needs is not None, "it has room"
        cached = {
            stream: memory.match(stream.role, self._keys(group, stream), self._most(group, stream))
            for stream in streams
        }
        wanted = {stream: group.needs[stream] - cached[stream][0] for stream in streams}
        try:
            loose = self._allocate(wanted, memory.spare(self._round_pages(group)))
            if group.saved is None:
                group.cached_tokens = min(cached[Stream(role)][0] for role in group.decoding.roles)
            sequences = {stream: self._sequences(group, stream) for stream in streams}
            for stream, of_stream in sequences.items():
                memory.count_match(stream.role, len(of_stream[0]), cached[stream][0])
            return {
                stream: allocate_from_cache(memory, stream.role, of_stream, cached[stream], loose[stream])
                for stream, of_stream in sequences.items()
            }
        except OutOfPages:
            return None
        finally:
            # What rows do not refer to by now may go again.
            for stream, (_, page) in cached.items():
                memory.ledgers[stream.role].release([page])

    def plant_again(self, start: PrefillRequest) -> None:
        """Where more is cached by now of what a start begins with, of which nothing has been asked for, that takes its
        own pages' place."""
        group, memory = start.group, self.memory
        assert group.needs is not None
        for stream, rows in start.rows.items():
            role = stream.role
            count, page = memory.match(role, self._keys(group, stream), self._most(group, stream))
            if count > rows[0].known:
                self._release(stream, rows)
                # Nobody shares what has not been run: more than these have just become free.
                loose = memory.allocate({role: group.needs[stream] - count})
                start.rows[stream] = allocate_from_cache(
                    memory, role, self._sequences(group, stream), (count, page), loose[role]
                )
                memory.count_match(role, 0, count - rows[0].known)
            memory.ledgers[role].release([page])
        if group.saved is None:
            group.cached_tokens = min(rows[0].known for stream, rows in start.rows.items() if not stream.unconditional)

    def carry(
        self, group: SequenceGroup, decoding: Decoding, places: int, record: dict[str, np.ndarray]
    ) -> dict[Stream, list[PromptRow]] | None:
        """Rows of a running group's confirmed sequence, for another decoding: those of a side that had a part in it
        already are there as a whole. None if there are too few pages for the others. Those of sides that have no part
        in it any more are cached."""
        memory, slot = self.memory, int(group.living(self.slots)[0])
        answer, streams = record["tokens_SL"][0, : int(record["length_S"][0]) - 1], group.streams_by(decoding)
        either = dict.fromkeys((*group.streams, *streams))
        sequences = {
            stream: np.concatenate((np.array(group.prompt_of(stream), dtype=np.int64), answer)) for stream in either
        }
        keys = {stream: memory.keys(sequence, group.request.cache_salt) for stream, sequence in sequences.items()}
        new = [stream for stream in streams if stream not in group.streams]
        cached = {stream: memory.match(stream.role, keys[stream], len(sequences[stream])) for stream in new}
        try:
            round_pages = decoding.round_pages(self.config, places, group.params.guided_roles)
            spare = memory.spare({stream.role: round_pages[stream.role] for stream in new})
            loose = self._allocate({stream: len(sequences[stream]) - cached[stream][0] for stream in new}, spare)
        except OutOfPages:
            return None
        else:
            rows = {
                stream: allocate_from_cache(memory, stream.role, [sequences[stream]], cached[stream], loose[stream])
                for stream in new
            }
        finally:
            for stream, (_, page) in cached.items():
                memory.ledgers[stream.role].release([page])
        for stream in group.streams:
            role, sequence = stream.role, sequences[stream]
            pages = self._path(role, int(self.slots.companion_S[slot]) if stream.unconditional else slot)[
                : len(sequence)
            ]
            if stream in streams:
                assert len(pages) == len(sequence), "a model lacks what has been confirmed"
                memory.ledgers[role].hold(pages[-1:])
                rows[stream] = [PromptRow(sequence, pages, len(pages))]
            else:
                self._remember(role, keys[stream], pages)
        return rows

    def release(self, start: PrefillRequest) -> None:
        """A start holds no pages any longer."""
        self.drop(start, list(start.rows))

    def drop(self, start: PrefillRequest, streams: Sequence[Stream]) -> None:
        """Nor in these lanes, which it is not to run in."""
        for stream in streams:
            self._release(stream, start.rows.pop(stream))

    def beginning(self, start: PrefillRequest) -> bytes | None:
        """Starts of another beginning have no block in common; None: it has none at all."""
        keys = self._keys(start.group, Stream(ModelRole.TARGET))
        return keys[0] if keys else None

    def awaits(self, start: PrefillRequest, earlier: list[PrefillRequest]) -> bool:
        """Whether one of those before it is about to run what this one begins with, too. What has been asked for is
        cached."""
        group = start.group
        for other in [] if start.begun else earlier:
            for stream in set(start.rows) & set(other.rows):
                row, keys, role = other.rows[stream][0], self._keys(other.group, stream), stream.role
                common = self.memory.common(role, self._keys(group, stream), keys, self._most(group, stream))
                if common > start.rows[stream][0].known:
                    start.waited = True
                    if row.done < common:
                        return True
                    self.memory.remember(role, keys, row.pages_L[:common])
        return False

    def _release(self, stream: Stream, rows: list[PromptRow]) -> None:
        self.memory.ledgers[stream.role].release([row.pages_L[-1] for row in rows])

    def _most(self, group: SequenceGroup, stream: Stream) -> int:
        """The last token of a prompt is run where it is asked what comes after it."""
        return len(group.prompt_of(stream)) - (stream.role == group.decoding.first and group.asks_beyond_prompt)

    def remember_prompt(self, group: SequenceGroup, rows: dict[Stream, list[PromptRow]]) -> None:
        """Cache the prompts, for which the rows of every lane have been run."""
        for stream, of_stream in rows.items():
            self.memory.remember(
                stream.role, self._keys(group, stream), of_stream[0].pages_L[: len(group.prompt_of(stream))]
            )

    def remember_answer(self, group: SequenceGroup, particle: int, tokens: tuple[int, ...]) -> None:
        """Cache what the models have computed of a group's answer."""
        keys = self.memory.keys((*group.request.prompt, *tokens), group.request.cache_salt)
        slot, size = int(group.slots[particle]), group.prompt_size + len(tokens)
        for role in group.decoding.roles:
            self._remember(role, keys, self._path(role, slot)[:size])

    def forget_prompt(self, group: SequenceGroup) -> None:
        """A model has made NaN of it: nobody shall go on from there."""
        for stream in group.streams:
            self.memory.forget(self._keys(group, stream))

    def _allocate(self, wanted: dict[Stream, int], spare: dict[ModelRole, int]) -> dict[Stream, np.ndarray]:
        """Loose pages for lanes, as `Memory.allocate`."""
        loose = self.memory.allocate(_by_role(wanted), spare)
        found = {}
        for stream, count in wanted.items():
            role = stream.role
            found[stream], loose[role] = np.split(loose[role], [count])
        return found

    def _path(self, role: ModelRole, slot: int) -> np.ndarray:
        """Pages of all positions of a particle whose keys and values a side has."""
        return self.memory.ledgers[role].path(int(self.slots.head_S[role][slot]), int(self.slots.held_S[role][slot]))

    def _remember(self, role: ModelRole, keys: list[bytes], pages: np.ndarray) -> None:
        # What is cached stays when no particle holds it any longer.
        self.memory.ledgers[role].count_grown(pages, False)
        self.memory.remember(role, keys, pages)

    def _round_pages(self, group: SequenceGroup) -> dict[ModelRole, int]:
        return group.decoding.round_pages(self.config, group.rows, group.params.guided_roles)

    def _keys(self, group: SequenceGroup, stream: Stream) -> list[bytes]:
        """Of its prompt's blocks."""
        kind = "negative" if stream.unconditional else "prompt"
        if kind not in group.keys:
            group.keys[kind] = self.memory.keys(group.prompt_of(stream), group.request.cache_salt)
        return group.keys[kind]

    def _sequences(self, group: SequenceGroup, stream: Stream) -> list[np.ndarray]:
        """What is to have keys and values in a lane: its prompt, and of a group that is taken up again all but pending
        tokens."""
        prompt, role = np.array(group.prompt_of(stream), dtype=np.int64), stream.role
        if group.saved is None:
            return [prompt]
        held, sequences = group.decoding.held_tokens, []
        for tokens_L, length, block, ended in zip(
            *(group.saved[name] for name in ("tokens_SL", "length_S", "block_S", "ended_S"))
        ):
            count = held(
                self.config, role, length=int(length), block=int(block), ended=bool(ended), rounds=group.rounds
            )
            sequences.append(np.concatenate((prompt, tokens_L[:count])))
        return sequences


def _by_role(pages: dict[Stream, int]) -> dict[ModelRole, int]:
    """Of all lanes of each side."""
    found: dict[ModelRole, int] = {}
    for stream, count in pages.items():
        found[stream.role] = found.get(stream.role, 0) + count
    return found
