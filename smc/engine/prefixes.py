"""What groups start from, and what of it the prefix caches have: pages for prompts, and for the answers of groups that are taken up again;
and what is cached of them for those that come later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smc.engine.group import Group
from smc.engine.memory import Memory
from smc.engine.methods import Decoding
from smc.engine.prefill import Row, Start, count_pages, plant
from smc.engine.slots import Slots
from smc.kv.pages import OutOfPages
from smc.runtime.config import EngineConfig


class Prefixes:
    """Sequences of tokens that groups have before their rounds, and at their end."""

    def __init__(self, config: EngineConfig, slots: Slots, memory: Memory) -> None:
        self.config, self.slots, self.memory = config, slots, memory

    def has_room(self, group: Group) -> bool:
        """Whether it could start if all that is cached made room, or was its own; what is cached of it is not looked up for that."""
        memory = self.memory
        if group.needs is None:
            group.needs = dict.fromkeys(group.decoding.sides, group.prompt_size)
            if group.saved is not None:
                group.needs = {side: count_pages(self._sequences(group, side)) for side in group.needs}
        spare = memory.spare(self._round_pages(group))
        return all(count + spare[side] <= memory.room(side) for side, count in group.needs.items())

    def plant(self, group: Group) -> dict[str, list[Row]] | None:
        """Rows of all sides, or None if there are too few pages."""
        memory, sides = self.memory, group.decoding.sides
        cached = {side: memory.match(side, self._keys(group), self._most(group, side)) for side in sides}
        wanted = {side: group.needs[side] - cached[side][0] for side in sides}
        try:
            loose = memory.allocate(wanted, memory.spare(self._round_pages(group)))
            if group.saved is None:
                group.cached_tokens = min(count for count, _ in cached.values())
            sequences = {side: self._sequences(group, side) for side in sides}
            for side, of_side in sequences.items():
                memory.count_match(side, len(of_side[0]), cached[side][0])
            return {side: plant(memory, side, of_side, cached[side], loose[side]) for side, of_side in sequences.items()}
        except OutOfPages:
            return None
        finally:
            # What rows do not refer to by now may go again.
            for side, (_, page) in cached.items():
                memory.ledgers[side].release([page])

    def plant_again(self, start: Start) -> None:
        """Where more is cached by now of what a start begins with, of which nothing has been asked for, that takes its own pages' place."""
        group, memory = start.group, self.memory
        for side, rows in start.rows.items():
            count, page = memory.match(side, self._keys(group), self._most(group, side))
            if count > rows[0].known:
                self._release(side, rows)
                # Nobody shares what has not been run: more than these have just become free.
                loose = memory.allocate({side: group.needs[side] - count})
                start.rows[side] = plant(memory, side, self._sequences(group, side), (count, page), loose[side])
                memory.count_match(side, 0, count - rows[0].known)
            memory.ledgers[side].release([page])
        if group.saved is None:
            group.cached_tokens = min(rows[0].known for rows in start.rows.values())

    def carry(self, group: Group, decoding: Decoding, places: int, record: dict[str, np.ndarray]) -> dict[str, list[Row]] | None:
        """Rows of a running group's confirmed sequence, for another decoding: those of a side that had a part in it already are there as a
        whole. None if there are too few pages for the others. Those of sides that have no part in it any more are cached."""
        memory, slot, confirmed = self.memory, int(group.living(self.slots)[0]), int(record["length_S"][0])
        answer = record["tokens_SL"][0, :confirmed]
        sequence = np.concatenate((np.array(group.request.prompt, dtype=np.int64), answer[:-1]))
        keys = memory.keys(sequence, group.request.cache_salt)
        new = [side for side in decoding.sides if side not in group.decoding.sides]
        cached = {side: memory.match(side, keys, len(sequence)) for side in new}
        try:
            round_pages = decoding.round_pages(self.config, places)
            spare = memory.spare({side: round_pages[side] for side in new})
            loose = memory.allocate({side: len(sequence) - cached[side][0] for side in new}, spare)
        except OutOfPages:
            return None
        else:
            rows = {side: plant(memory, side, [sequence], cached[side], loose[side]) for side in new}
        finally:
            for side, (_, page) in cached.items():
                memory.ledgers[side].release([page])
        for side in group.decoding.sides:
            pages = self._path(side, slot)[: len(sequence)]
            if side in decoding.sides:
                assert len(pages) == len(sequence), "a model lacks what has been confirmed"
                memory.ledgers[side].hold(pages[-1:])
                rows[side] = [Row(sequence, pages, len(pages))]
            else:
                self._remember(side, keys, pages)
        return rows

    def release(self, start: Start) -> None:
        """A start holds no pages any longer."""
        self.drop(start, list(start.rows))

    def drop(self, start: Start, sides: Sequence[str]) -> None:
        """Nor on these sides, which it is not to run on."""
        for side in sides:
            self._release(side, start.rows.pop(side))

    def beginning(self, start: Start) -> bytes | None:
        """Starts of another beginning have no block in common; None: it has none at all."""
        keys = self._keys(start.group)
        return keys[0] if keys else None

    def awaits(self, start: Start, earlier: list[Start]) -> bool:
        """Whether one of those before it is about to run what this one begins with, too. What has been asked for is cached."""
        group = start.group
        for other in [] if start.begun else earlier:
            for side in set(start.rows) & set(other.rows):
                row, keys = other.rows[side][0], self._keys(other.group)
                common = self.memory.common(side, self._keys(group), keys, self._most(group, side))
                if common > start.rows[side][0].known:
                    start.waited = True
                    if row.done < common:
                        return True
                    self.memory.remember(side, keys, row.pages_L[:common])
        return False

    def _release(self, side: str, rows: list[Row]) -> None:
        self.memory.ledgers[side].release([row.pages_L[-1] for row in rows])

    def _most(self, group: Group, side: str) -> int:
        """The last token of a prompt is run, for what comes after it is to be drawn."""
        return group.prompt_size - (side == group.decoding.first and group.saved is None)

    def remember_prompt(self, group: Group, rows: dict[str, list[Row]]) -> None:
        """Cache the prompt, for which the rows of every side have been run."""
        for side, of_side in rows.items():
            self.memory.remember(side, self._keys(group), of_side[0].pages_L[: group.prompt_size])

    def remember_answer(self, group: Group, particle: int, tokens: tuple[int, ...]) -> None:
        """Cache what the models have computed of a group's answer."""
        keys = self.memory.keys((*group.request.prompt, *tokens), group.request.cache_salt)
        slot, size = int(group.slots[particle]), group.prompt_size + len(tokens)
        for side in group.decoding.sides:
            self._remember(side, keys, self._path(side, slot)[:size])

    def forget_prompt(self, group: Group) -> None:
        """A model has made NaN of it: nobody shall go on from there."""
        self.memory.forget(self._keys(group))

    def _path(self, side: str, slot: int) -> np.ndarray:
        """Pages of all positions of a particle whose keys and values a side has."""
        return self.memory.ledgers[side].path(int(self.slots.head_S[side][slot]), int(self.slots.held_S[side][slot]))

    def _remember(self, side: str, keys: list[bytes], pages: np.ndarray) -> None:
        # What is cached stays when no particle holds it any longer.
        self.memory.ledgers[side].count_grown(pages, False)
        self.memory.remember(side, keys, pages)

    def _round_pages(self, group: Group) -> dict[str, int]:
        return group.decoding.round_pages(self.config, group.rows)

    def _keys(self, group: Group) -> list[bytes]:
        """Of its prompt's blocks."""
        if group.keys is None:
            group.keys = self.memory.keys(group.request.prompt, group.request.cache_salt)
        return group.keys

    def _sequences(self, group: Group, side: str) -> list[np.ndarray]:
        """What is to have keys and values on a side: the prompt, and of a group that is taken up again all but pending tokens."""
        prompt = np.array(group.request.prompt, dtype=np.int64)
        if group.saved is None:
            return [prompt]
        held, sequences = group.decoding.held_tokens, []
        for tokens_L, length, block, ended in zip(*(group.saved[name] for name in ("tokens_SL", "length_S", "block_S", "ended_S"))):
            count = held(self.config, side, length=int(length), block=int(block), ended=bool(ended), rounds=group.rounds)
            sequences.append(np.concatenate((prompt, tokens_L[:count])))
        return sequences
