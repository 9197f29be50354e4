"""What an engine of given slots and pages could run at all: checks of requests, the longest answer, and sizes that just
suffice."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.request import Request, check_guidance
from smc.api.sampling_params import SamplingParams
from smc.scheduler.admission import check_negative, check_prompt
from smc.scheduler.methods import decoding_of
from smc.types import ModelRole


def longest_answer(
    params: SamplingParams,
    config: EngineConfig,
    capacity: Mapping[ModelRole, int],
    context: int,
    size: int,
    negative: int = 0,
) -> int:
    """Longest answer of such a request after a prompt of `size` tokens and a negative one, at least 1, if nothing else
    ran."""
    # The default negative prompt is one token.
    negative = max(negative, int(params.guided))
    decoding, room = decoding_of(params), max(1, context - max(size, negative))

    def is_too_long(answer: int) -> bool:
        needs = decoding.most_pages(config, replace(params, max_tokens=answer, min_tokens=0), size, negative=negative)
        return any(needs.get(role, 0) > pages for role, pages in capacity.items())

    return max(1, bisect_left(range(1, room + 1), True, key=is_too_long))


def sized_for(config: EngineConfig, params: SamplingParams, requests: int) -> EngineConfig:
    """The config with just the slots, and room for the distributions of chains, that so many such requests need at
    once."""
    rows = requests * params.rows
    return replace(config, max_slots=rows * params.slots_per_row, max_chains=decoding_of(params).chains(rows))


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
    if decoding_of(params).chains(params.rows) > config.chains(vocab_size):
        most = config.chains(vocab_size)
        allowed = f"particles <= {most}, or verification='walk'" if most else "verification='walk'"
        raise ValueError(
            f"particles={params.rows} with verification='rejection'; this engine has room for the token "
            f"distributions of {most} chains (max_chains); "
            f"allowed: {allowed}"
        )
    for role, pages in decoding_of(params).most_pages(config, params, size, negative=request.negative_size).items():
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
