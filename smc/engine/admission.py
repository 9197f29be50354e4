"""Who may start: first come, first served, and only with everything it can ever need reserved.

A reservation is the most pages a group can hold at once, in both pools, taken together or not at all. A running group
therefore never waits for memory, and nothing has to be taken back from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from smc.engine.config import EngineConfig
from smc.engine.request import Method, Request


class DuplicateRequest(ValueError):
    """A request of this id is already queued or running."""


class QueueFull(RuntimeError):
    """No room to wait in. Nothing is wrong with the request: it may be sent again later."""


METHOD_SIDES = {Method.SMC: ("draft", "target"), Method.TARGET: ("target",), Method.DRAFT: ("draft",)}


class PageBudget:
    """Reserved pages of each worker's pool."""

    def __init__(self, capacity: dict[str, int]) -> None:
        self.capacity = capacity
        self.reserved = dict.fromkeys(capacity, 0)

    def reserve(self, pages: dict[str, int]) -> bool:
        """Take all or nothing; False if any pool has too little left."""
        if any(self.reserved[side] + count > self.capacity[side] for side, count in pages.items()):
            return False
        for side, count in pages.items():
            self.reserved[side] += count
        return True

    def give_back(self, pages: dict[str, int]) -> None:
        for side, count in pages.items():
            self.reserved[side] -= count
            assert self.reserved[side] >= 0, "more pages given back than reserved"


def pages_needed(request: Request, config: EngineConfig) -> dict[str, int]:
    """The most pages a request can hold at once in each pool.

    The prompt is held once; each particle holds at most its own answer; at the draft each of its branches may in addition
    hold the block being drafted. A block that runs past `max_tokens` is drafted whole, for the sake of a static shape.
    """
    n, prompt, answer = request.params.rows, len(request.prompt), request.params.max_tokens
    sides = METHOD_SIDES[request.params.method]
    if request.params.method is Method.SMC:
        return {"draft": prompt + n * (answer + config.branches * config.block), "target": prompt + n * answer}
    return {sides[0]: prompt + answer + config.block}


def check_queue(pages: dict[str, int], config: EngineConfig, waiting: Sequence[dict[str, int]]) -> None:
    """Refuse what there is no room to wait in for, given the pages it and those waiting need. Raises QueueFull."""
    if config.max_queue is not None and len(waiting) >= config.max_queue:
        raise QueueFull(f"{len(waiting)} requests are waiting; allowed: {config.max_queue}. Try again later")
    wanted = sum(sum(needed.values()) for needed in (*waiting, pages))
    if waiting and config.max_queue_pages is not None and wanted > config.max_queue_pages:
        raise QueueFull(f"waiting requests would need {wanted} KV pages; allowed: {config.max_queue_pages}. Try again later")


def check_fits(request: Request, config: EngineConfig, capacity: dict[str, int], context: int, vocab_size: int) -> None:
    """Refuse what this engine could never run, whatever else is going on. Raises ValueError."""
    params, size = request.params, len(request.prompt)
    if not size:
        raise ValueError("the prompt is empty; at least one token is needed")
    if size >= context:
        raise ValueError(f"the prompt has {size} tokens; allowed: at most {context - 1}, to leave room for an answer")
    wrong = [t for t in request.prompt if not 0 <= t < vocab_size]
    if wrong:
        raise ValueError(f"the prompt contains token id {wrong[0]}; allowed: 0..{vocab_size - 1}")
    if size + params.max_tokens > context:
        raise ValueError(
            f"max_tokens={params.max_tokens} after a prompt of {size} tokens exceeds the context of {context}; "
            f"allowed here: max_tokens <= {context - size}"
        )
    if params.rows > config.max_slots:
        raise ValueError(f"particles={params.rows}; this engine has max_slots={config.max_slots}")
    for side, pages in pages_needed(request, config).items():
        if pages > capacity[side]:
            raise ValueError(
                f"the request may need {pages} KV pages of the {side} model, which has {capacity[side]}; "
                "lower particles or max_tokens, or give the engine more pages"
            )
