"""How much memory a request is likely to hold: learnt from how long answers get, and from how much of them particles
hold in common.

Both are averages over all requests of an engine. Of what groups hold, only sums are known without walking through their
pages, and sums are what admission needs: a pool does not ask who fills it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.memory.kv_cache import KVCacheManager
from smc.scheduler.methods import Decoding
from smc.scheduler.sequence_group import Phase, SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import ModelRole

LEARNING = 0.1
"""Weight of the newest answer in the average of how long answers get, and of the newest count in that of what particles
share."""
OWN_TOKENS = 64
"""Tokens at the end of its past that a particle shares with no other, as a rule. Whether it shares those before is
learnt."""
COUNT_EVERY = 16
"""Steps between two counts of what is held."""


class PageForecast:
    """What is expected of requests that come, and of those that have been admitted: in `Memory`, whose books it keeps
    up."""

    def __init__(self, config: EngineConfig, slots: Slots, memory: KVCacheManager) -> None:
        self.config, self.slots, self.memory = config, slots, memory
        self.answer_share = 1.0
        """Share of the longest answer that answers have, on average."""
        self._old = self._own = 0.0
        """Tokens further back than `OWN_TOKENS` of all particles but one a group; and how many of them they hold for
        themselves."""
        self._steps = 0

    @property
    def own_share(self) -> float:
        """Share of its past further back than `OWN_TOKENS` that a particle shares with no other: 0 as long as nothing
        is known."""
        return self._own / self._old if self._old else 0.0

    def pages(
        self, decoding: Decoding, params: SamplingParams, prompt: int, rows: int, length: int = 0, negative: int = 0
    ) -> dict[ModelRole, int]:
        """Pages on each side of so many particles of a request, whose answer has `length` tokens already."""
        answer = max(1, length, round(self.answer_share * params.max_tokens))
        own = min(answer, OWN_TOKENS) + round(self.own_share * max(0, answer - OWN_TOKENS))
        return decoding.expected_pages(self.config, params, prompt, rows, answer, own, negative)

    def of(self, group: SequenceGroup) -> dict[ModelRole, int]:
        """For a group that waits, or runs."""
        if group.saved is not None:
            length = int(group.saved["length_S"].max())
        else:
            length = int(self.slots.length_S[group.slots].max(initial=0))
        if group.answer is not None:
            return group.decoding.expected_pages(
                self.config, group.params, group.prompt_size, 0, length, 0, group.negative_size
            )
        return self.pages(group.decoding, group.params, group.prompt_size, group.rows, length, group.negative_size)

    def expect(self, group: SequenceGroup) -> None:
        """Of one that is admitted, or goes on."""
        self.memory.expect(
            group.number, self.of(group), group.decoding.round_pages(self.config, group.rows, group.params.guided_roles)
        )

    def learn_answer(self, share: float) -> None:
        """An answer is complete, and has this share of its longest."""
        self.answer_share += LEARNING * (share - self.answer_share)

    def follow(self, admitted: Sequence[SequenceGroup]) -> None:
        """Once a step. Now and then, count what is held, and correct what is expected of those that have been
        admitted."""
        self._steps += 1
        if self._steps % COUNT_EVERY:
            return
        self.count([group for group in admitted if group.phase is Phase.RUNNING])
        for group in admitted:
            self.expect(group)

    def count(self, running: Sequence[SequenceGroup]) -> None:
        """Learn from what the particles of running groups hold: on each side all pages grown, less one path a group,
        less `OWN_TOKENS`.

        Of exact decoding, only the path counts: its rows share all but what has not been confirmed.
        """
        own = old = 0
        for role, ledger in self.memory.ledgers.items():
            groups = [group for group in running if role in group.decoding.roles]
            if not groups:
                continue
            slots, prompts = [group.living(self.slots) for group in groups], [group.prompt_size for group in groups]
            guided = [group for group in groups if role in group.params.guided_roles]
            slots += [self.slots.companions(group.living(self.slots)) for group in guided]
            prompts += [group.negative_size for group in guided]
            held_A = self.slots.held_S[role][np.concatenate(slots)]
            sizes_G = np.array([len(slots_N) for slots_N in slots], dtype=np.int64)
            # A slot without a particle holds not even a prompt.
            held_A = np.maximum(held_A - np.repeat(prompts, sizes_G), 0)
            path_G = np.maximum.reduceat(held_A, np.cumsum(sizes_G) - sizes_G)
            ends = int(np.minimum(held_A, OWN_TOKENS).sum() - np.minimum(path_G, OWN_TOKENS).sum())
            apart = int(held_A.sum() - path_G.sum()) - ends
            old += apart
            own += min(max(ledger.num_grown - int(path_G.sum()) - ends, 0), apart)
        if not old:
            return
        self._old += LEARNING * (old - self._old)
        self._own += LEARNING * (own - self._own)
