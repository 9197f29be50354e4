"""Capacity: what an engine with given slots and pages can run. Checks requests, computes the longest answer, and
forecasts the pages that requests will hold.

The forecast learns how long answers become and how much of them particles share, both averaged over all requests of an
engine. Only the sums of pages over all requests are cheap to maintain: per-request counts would need a walk through the
pages. Admission needs only sums."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.request import Request, check_guidance
from smc.api.sampling_params import SamplingParams
from smc.memory.kv_cache import KVCacheManager
from smc.scheduler.admission import check_negative, check_prompt
from smc.scheduler.methods import DecodingRules, rules_of
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import ModelRole

LEARNING = 0.1
"""Weight of the newest answer in the average length of answers, and of the newest count in the averages of shared
tokens."""
OWN_TOKENS = 64
"""Last tokens of a particle, which are assumed to be shared with no other. For earlier tokens the share is learnt."""
COUNT_EVERY = 16
"""Number of steps between two counts of held pages."""


def longest_answer(
    params: SamplingParams,
    config: EngineConfig,
    capacity: Mapping[ModelRole, int],
    context: int,
    size: int,
    negative: int = 0,
) -> int:
    """Return the maximum tokens of an answer with these settings, if nothing else ran; at least 1. `size`, `negative`:
    tokens of the prompt and the negative prompt."""
    # The default negative prompt is one token.
    negative = max(negative, int(params.guided))
    rules, room = rules_of(params), max(1, context - max(size, negative))

    def is_too_long(answer: int) -> bool:
        needs = rules.most_pages(config, replace(params, max_tokens=answer, min_tokens=0), size, negative=negative)
        return any(needs.get(role, 0) > pages for role, pages in capacity.items())

    return max(1, bisect_left(range(1, room + 1), True, key=is_too_long))


def check_fits(
    request: Request, config: EngineConfig, capacity: dict[ModelRole, int], context: int, vocab_size: int
) -> None:
    """Reject a request that this engine could never run, even if nothing else ran. Raises ValueError."""
    params, size = request.params, len(request.prompt)
    check_prompt(size, context)
    check_guidance(params, request.negative_prompt is not None)
    if params.guided:
        check_negative(request.negative_size, params.max_tokens, context)
    if size + params.max_tokens > context:
        raise ValueError(
            f"max_tokens={params.max_tokens} after a prompt of {size} tokens exceeds the context of {context}; "
            f"allowed here: max_tokens <= {context - size}"
        )
    if params.rows * params.slots_per_row > config.max_slots:
        each = ", and a guided one takes two for each" if params.guided else ""
        raise ValueError(f"particles={params.rows}; this engine has max_slots={config.max_slots}{each}")
    if rules_of(params).chains(params.rows) > config.chains(vocab_size):
        most = config.chains(vocab_size)
        allowed = f"particles <= {most}, or verification='walk'" if most else "verification='walk'"
        raise ValueError(
            f"particles={params.rows} with verification='rejection'; this engine has room for the token "
            f"distributions of {most} chains (max_chains); "
            f"allowed: {allowed}"
        )
    for role, pages in rules_of(params).most_pages(config, params, size, negative=request.negative_size).items():
        if pages > capacity[role]:
            raise ValueError(
                f"the request may need {pages} KV pages of the {role} model, which has {capacity[role]}; "
                "lower particles or max_tokens, or give the engine more pages"
            )
    for name, prompt in (("the prompt", request.prompt), ("negative_prompt", request.negative_prompt or ())):
        tokens = np.asarray(prompt)
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(wrong):
            raise ValueError(f"{name} contains token id {wrong[0]}; allowed: 0..{vocab_size - 1}")


class PageForecast:
    """Forecasts the pages of new and of admitted requests, and enters those of admitted requests in
    `KVCacheManager`."""

    def __init__(self, config: EngineConfig, slots: Slots, memory: KVCacheManager) -> None:
        self.config, self.slots, self.memory = config, slots, memory
        self.answer_share = 1.0
        """Average length of answers as a share of their `max_tokens`."""
        self._old = self._own = 0.0
        """`_old`: tokens further back than `OWN_TOKENS`, of all particles except one of each request. `_own`: those of
        them that no other particle shares. Both are moving averages."""
        self._steps = 0

    @property
    def own_share(self) -> float:
        """Share of a particle's tokens further back than `OWN_TOKENS` that no other particle shares; 0 until something
        was counted."""
        return self._own / self._old if self._old else 0.0

    def pages(
        self, rules: DecodingRules, params: SamplingParams, prompt: int, rows: int, length: int = 0, negative: int = 0
    ) -> dict[ModelRole, int]:
        """Forecast the pages in each pool for `rows` particles of a request whose answer has `length` tokens
        already."""
        answer = max(1, length, round(self.answer_share * params.max_tokens))
        own = min(answer, OWN_TOKENS) + round(self.own_share * max(0, answer - OWN_TOKENS))
        return rules.expected_pages(self.config, params, prompt, rows, answer, own, negative)

    def of(self, group: SequenceGroup) -> dict[ModelRole, int]:
        """Forecast the pages of a queued or admitted request."""
        if group.checkpoint is not None:
            length = group.checkpoint.longest
        else:
            length = int(self.slots.length_S[group.slots].max(initial=0))
        return self.pages(group.rules, group.params, group.prompt_size, group.rows, length, group.negative_size)

    def expect(self, group: SequenceGroup) -> None:
        """Enter the forecast of an admitted request."""
        self.memory.expect(group.number, self.of(group), group.round_pages(self.config))

    def learn_answer(self, share: float) -> None:
        """Learn from a complete answer, whose length is this share of its `max_tokens`."""
        self.answer_share += LEARNING * (share - self.answer_share)

    def follow(self, admitted: Sequence[SequenceGroup]) -> None:
        """Called once a step: every `COUNT_EVERY` steps, count what is held and update the forecasts of admitted
        requests."""
        self._steps += 1
        if self._steps % COUNT_EVERY:
            return
        self.count([group for group in admitted if group.is_running])
        for group in admitted:
            self.expect(group)

    def count(self, running: Sequence[SequenceGroup]) -> None:
        """Learn from the pages that the particles of running requests hold: in each pool all grown pages, minus one
        path of each request, minus the last `OWN_TOKENS` of every other particle. In exact decoding only the path
        counts: rows share everything that is confirmed."""
        own = old = 0
        for role, allocator in self.memory.allocators.items():
            groups = [group for group in running if role in group.rules.roles]
            if not groups:
                continue
            slots, prompts = [group.living(self.slots) for group in groups], [group.prompt_size for group in groups]
            guided = [group for group in groups if role in group.params.guided_roles]
            slots += [self.slots.unconditional_slots(group.living(self.slots)) for group in guided]
            prompts += [group.negative_size for group in guided]
            held_A = self.slots.held_S[role][np.concatenate(slots)]
            sizes_G = np.array([len(slots_N) for slots_N in slots], dtype=np.int64)
            # A slot without a particle holds not even a prompt.
            held_A = np.maximum(held_A - np.repeat(prompts, sizes_G), 0)
            path_G = np.maximum.reduceat(held_A, np.cumsum(sizes_G) - sizes_G)
            ends = int(np.minimum(held_A, OWN_TOKENS).sum() - np.minimum(path_G, OWN_TOKENS).sum())
            apart = int(held_A.sum() - path_G.sum()) - ends
            old += apart
            own += min(max(allocator.num_grown - int(path_G.sum()) - ends, 0), apart)
        if not old:
            return
        self._old += LEARNING * (old - self._old)
        self._own += LEARNING * (own - self._own)
