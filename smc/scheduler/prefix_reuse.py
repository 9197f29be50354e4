"""What groups start from, and what of it the prefix caches have: pages for prompts, and for the answers of groups that
are taken up again; and what is cached of them for those that come later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.messages import guides, side_of
from smc.memory.kv_cache import KVCacheManager
from smc.memory.pages import OutOfPages
from smc.scheduler.methods import Decoding
from smc.scheduler.prefill_batches import PrefillRequest, PromptRow, allocate_from_cache, count_pages
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots


class PrefixReuse:
    """Sequences of tokens that groups have before their rounds, and at their end."""

    def __init__(self, config: EngineConfig, slots: Slots, memory: KVCacheManager) -> None:
        self.config, self.slots, self.memory = config, slots, memory

    def has_room(self, group: SequenceGroup) -> bool:
        """Whether it could start if all that is cached made room, or was its own; what is cached of it is not looked up
        for that."""
        memory = self.memory
        if group.needs is None:
            group.needs = {lane: len(group.prompt_of(lane)) for lane in group.lanes}
            if group.saved is not None:
                group.needs = {lane: count_pages(self._sequences(group, lane)) for lane in group.needs}
        spare = memory.spare(self._round_pages(group))
        return all(count + spare[side] <= memory.room(side) for side, count in _by_side(group.needs).items())

    def plant(self, group: SequenceGroup) -> dict[str, list[PromptRow]] | None:
        """Rows of all lanes, or None if there are too few pages."""
        memory, lanes = self.memory, group.lanes
        assert group.needs is not None, "it has room"
        cached = {lane: memory.match(side_of(lane), self._keys(group, lane), self._most(group, lane)) for lane in lanes}
        wanted = {lane: group.needs[lane] - cached[lane][0] for lane in lanes}
        try:
            loose = self._allocate(wanted, memory.spare(self._round_pages(group)))
            if group.saved is None:
                group.cached_tokens = min(cached[side][0] for side in group.decoding.sides)
            sequences = {lane: self._sequences(group, lane) for lane in lanes}
            for lane, of_lane in sequences.items():
                memory.count_match(side_of(lane), len(of_lane[0]), cached[lane][0])
            return {
                lane: allocate_from_cache(memory, side_of(lane), of_lane, cached[lane], loose[lane])
                for lane, of_lane in sequences.items()
            }
        except OutOfPages:
            return None
        finally:
            # What rows do not refer to by now may go again.
            for lane, (_, page) in cached.items():
                memory.ledgers[side_of(lane)].release([page])

    def plant_again(self, start: PrefillRequest) -> None:
        """Where more is cached by now of what a start begins with, of which nothing has been asked for, that takes its
        own pages' place."""
        group, memory = start.group, self.memory
        assert group.needs is not None
        for lane, rows in start.rows.items():
            side = side_of(lane)
            count, page = memory.match(side, self._keys(group, lane), self._most(group, lane))
            if count > rows[0].known:
                self._release(lane, rows)
                # Nobody shares what has not been run: more than these have just become free.
                loose = memory.allocate({side: group.needs[lane] - count})
                start.rows[lane] = allocate_from_cache(
                    memory, side, self._sequences(group, lane), (count, page), loose[side]
                )
                memory.count_match(side, 0, count - rows[0].known)
            memory.ledgers[side].release([page])
        if group.saved is None:
            group.cached_tokens = min(rows[0].known for lane, rows in start.rows.items() if not guides(lane))

    def carry(
        self, group: SequenceGroup, decoding: Decoding, places: int, record: dict[str, np.ndarray]
    ) -> dict[str, list[PromptRow]] | None:
        """Rows of a running group's confirmed sequence, for another decoding: those of a side that had a part in it
        already are there as a whole. None if there are too few pages for the others. Those of sides that have no part
        in it any more are cached."""
        memory, slot = self.memory, int(group.living(self.slots)[0])
        answer, lanes = record["tokens_SL"][0, : int(record["length_S"][0]) - 1], group.lanes_by(decoding)
        either = dict.fromkeys((*group.lanes, *lanes))
        sequences = {lane: np.concatenate((np.array(group.prompt_of(lane), dtype=np.int64), answer)) for lane in either}
        keys = {lane: memory.keys(sequence, group.request.cache_salt) for lane, sequence in sequences.items()}
        new = [lane for lane in lanes if lane not in group.lanes]
        cached = {lane: memory.match(side_of(lane), keys[lane], len(sequences[lane])) for lane in new}
        try:
            round_pages = decoding.round_pages(self.config, places, group.params.guided_sides)
            spare = memory.spare({side_of(lane): round_pages[side_of(lane)] for lane in new})
            loose = self._allocate({lane: len(sequences[lane]) - cached[lane][0] for lane in new}, spare)
        except OutOfPages:
            return None
        else:
            rows = {
                lane: allocate_from_cache(memory, side_of(lane), [sequences[lane]], cached[lane], loose[lane])
                for lane in new
            }
        finally:
            for lane, (_, page) in cached.items():
                memory.ledgers[side_of(lane)].release([page])
        for lane in group.lanes:
            side, sequence = side_of(lane), sequences[lane]
            pages = self._path(side, int(self.slots.companion_S[slot]) if guides(lane) else slot)[: len(sequence)]
            if lane in lanes:
                assert len(pages) == len(sequence), "a model lacks what has been confirmed"
                memory.ledgers[side].hold(pages[-1:])
                rows[lane] = [PromptRow(sequence, pages, len(pages))]
            else:
                self._remember(side, keys[lane], pages)
        return rows

    def release(self, start: PrefillRequest) -> None:
        """A start holds no pages any longer."""
        self.drop(start, list(start.rows))

    def drop(self, start: PrefillRequest, lanes: Sequence[str]) -> None:
        """Nor in these lanes, which it is not to run in."""
        for lane in lanes:
            self._release(lane, start.rows.pop(lane))

    def beginning(self, start: PrefillRequest) -> bytes | None:
        """Starts of another beginning have no block in common; None: it has none at all."""
        keys = self._keys(start.group, "target")
        return keys[0] if keys else None

    def awaits(self, start: PrefillRequest, earlier: list[PrefillRequest]) -> bool:
        """Whether one of those before it is about to run what this one begins with, too. What has been asked for is
        cached."""
        group = start.group
        for other in [] if start.begun else earlier:
            for lane in set(start.rows) & set(other.rows):
                row, keys, side = other.rows[lane][0], self._keys(other.group, lane), side_of(lane)
                common = self.memory.common(side, self._keys(group, lane), keys, self._most(group, lane))
                if common > start.rows[lane][0].known:
                    start.waited = True
                    if row.done < common:
                        return True
                    self.memory.remember(side, keys, row.pages_L[:common])
        return False

    def _release(self, lane: str, rows: list[PromptRow]) -> None:
        self.memory.ledgers[side_of(lane)].release([row.pages_L[-1] for row in rows])

    def _most(self, group: SequenceGroup, lane: str) -> int:
        """The last token of a prompt is run where it is asked what comes after it."""
        return len(group.prompt_of(lane)) - (side_of(lane) == group.decoding.first and group.asks_beyond_prompt)

    def remember_prompt(self, group: SequenceGroup, rows: dict[str, list[PromptRow]]) -> None:
        """Cache the prompts, for which the rows of every lane have been run."""
        for lane, of_lane in rows.items():
            self.memory.remember(
                side_of(lane), self._keys(group, lane), of_lane[0].pages_L[: len(group.prompt_of(lane))]
            )

    def remember_answer(self, group: SequenceGroup, particle: int, tokens: tuple[int, ...]) -> None:
        """Cache what the models have computed of a group's answer."""
        keys = self.memory.keys((*group.request.prompt, *tokens), group.request.cache_salt)
        slot, size = int(group.slots[particle]), group.prompt_size + len(tokens)
        for side in group.decoding.sides:
            self._remember(side, keys, self._path(side, slot)[:size])

    def forget_prompt(self, group: SequenceGroup) -> None:
        """A model has made NaN of it: nobody shall go on from there."""
        for lane in group.lanes:
            self.memory.forget(self._keys(group, lane))

    def _allocate(self, wanted: dict[str, int], spare: dict[str, int]) -> dict[str, np.ndarray]:
        """Loose pages for lanes, as `Memory.allocate`."""
        loose = self.memory.allocate(_by_side(wanted), spare)
        found = {}
        for lane, count in wanted.items():
            side = side_of(lane)
            found[lane], loose[side] = np.split(loose[side], [count])
        return found

    def _path(self, side: str, slot: int) -> np.ndarray:
        """Pages of all positions of a particle whose keys and values a side has."""
        return self.memory.ledgers[side].path(int(self.slots.head_S[side][slot]), int(self.slots.held_S[side][slot]))

    def _remember(self, side: str, keys: list[bytes], pages: np.ndarray) -> None:
        # What is cached stays when no particle holds it any longer.
        self.memory.ledgers[side].count_grown(pages, False)
        self.memory.remember(side, keys, pages)

    def _round_pages(self, group: SequenceGroup) -> dict[str, int]:
        return group.decoding.round_pages(self.config, group.rows, group.params.guided_sides)

    def _keys(self, group: SequenceGroup, lane: str) -> list[bytes]:
        """Of its prompt's blocks."""
        kind = "negative" if guides(lane) else "prompt"
        if kind not in group.keys:
            group.keys[kind] = self.memory.keys(group.prompt_of(lane), group.request.cache_salt)
        return group.keys[kind]

    def _sequences(self, group: SequenceGroup, lane: str) -> list[np.ndarray]:
        """What is to have keys and values in a lane: its prompt, and of a group that is taken up again all but pending
        tokens."""
        prompt, side = np.array(group.prompt_of(lane), dtype=np.int64), side_of(lane)
        if group.saved is None:
            return [prompt]
        held, sequences = group.decoding.held_tokens, []
        for tokens_L, length, block, ended in zip(
            *(group.saved[name] for name in ("tokens_SL", "length_S", "block_S", "ended_S"))
        ):
            count = held(
                self.config, side, length=int(length), block=int(block), ended=bool(ended), rounds=group.rounds
            )
            sequences.append(np.concatenate((prompt, tokens_L[:count])))
        return sequences


def _by_side(pages: dict[str, int]) -> dict[str, int]:
    """Of all lanes of each side."""
    found: dict[str, int] = {}
    for lane, count in pages.items():
        found[side_of(lane)] = found.get(side_of(lane), 0) + count
    return found
