"""What may be submitted, what may wait, and the errors that say why not. Who starts when is the engine's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.request import Request, check_guidance
from smc.api.sampling_params import SamplingParams
from smc.types import ModelRole


class DuplicateRequest(ValueError):
    """A request of this id is already queued or running."""


class QueueFull(RuntimeError):
    """No room to wait in. Nothing is wrong with the request: it may be sent again later."""


class NoDraft(RuntimeError):
    """The request needs the draft, which is lost. Nothing is wrong with it: it may be sent again later."""


def check_waiting(config: EngineConfig, waiting: int) -> None:
    """Refuse another request where so many wait. Raises QueueFull."""
    if config.max_queue is not None and waiting >= config.max_queue:
        raise QueueFull(f"{waiting} requests are waiting; allowed: {config.max_queue}. Try again later")


def check_queue(pages: dict[ModelRole, int], config: EngineConfig, waiting: int, waiting_pages: int) -> None:
    """Refuse what there is no room to wait in for, given the pages it and those waiting are likely to need. Raises
    QueueFull."""
    check_waiting(config, waiting)
    wanted = waiting_pages + sum(pages.values())
    if waiting and config.max_queue_pages is not None and wanted > config.max_queue_pages:
        raise QueueFull(
            f"waiting requests would need {wanted} KV pages; allowed: {config.max_queue_pages}. Try again later"
        )


def check_prompt(size: int, context: int) -> None:
    """Refuse a prompt of so many tokens if there can be no answer to it. Raises ValueError."""
    if not size:
        raise ValueError("the prompt is empty; at least one token is needed")
    if size >= context:
        raise ValueError(f"the prompt has {size} tokens; allowed: at most {context - 1}, to leave room for an answer")


def check_negative(size: int, max_tokens: int, context: int) -> None:
    """Refuse a negative prompt of so many tokens that leaves no room for an answer. Raises ValueError."""
    if not size:
        raise ValueError("negative_prompt is empty; at least one token is needed, or leave it out")
    if size + max_tokens > context:
        raise ValueError(
            f"negative_prompt has {size} tokens, and max_tokens={max_tokens} after them exceeds the context of {context}; "
            "allowed: a shorter negative_prompt, or fewer max_tokens"
        )


def longest_answer(
    params: SamplingParams,
    config: EngineConfig,
    capacity: Mapping[ModelRole, int],
    context: int,
    size: int,
    negative: int = 0,
) -> int:
    """Most tokens that such a request could be answered with after a prompt of `size`, and a negative one, at least 1,
    if nothing else ran."""
    from smc.scheduler.methods import decoding_of

    # Guided without a negative prompt, it has one of a token.
    negative = max(negative, int(params.guided))
    decoding, room = decoding_of(params), max(1, context - max(size, negative))

    def is_too_long(answer: int) -> bool:
        needs = decoding.most_pages(config, replace(params, max_tokens=answer, min_tokens=0), size, negative=negative)
        return any(needs.get(role, 0) > pages for role, pages in capacity.items())

    return max(1, bisect_left(range(1, room + 1), True, key=is_too_long))


def sized_for(config: EngineConfig, params: SamplingParams, requests: int) -> EngineConfig:
    """With slots, and room for the laws of chains, for so many such requests at once, and no more."""
    from smc.scheduler.methods import decoding_of

    rows = requests * params.rows
    chains = rows if decoding_of(params).chained else 0
    return replace(config, max_slots=rows * params.slots_per_row, max_chains=chains)


def check_fits(
    request: Request, config: EngineConfig, capacity: dict[ModelRole, int], context: int, vocab_size: int
) -> None:
    """Refuse what this engine could never run, whatever else is going on. Raises ValueError."""
    from smc.scheduler.methods import decoding_of

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
    if decoding_of(params).chained and params.rows > config.chains(vocab_size):
        most = config.chains(vocab_size)
        allowed = f"particles <= {most}, or verification='walk'" if most else "verification='walk'"
        raise ValueError(
            f"particles={params.rows} with verification='rejection'; this engine has room for the laws of {most} chains (max_chains); "
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
