"""Admission checks that need no model code: whether a request may wait in the queue, and the errors if it may not. The
checks whether an engine could ever run a request are in `smc.scheduler.capacity`."""

from __future__ import annotations

from smc.api.engine_config import EngineConfig
from smc.api.limits import PromptTooLong
from smc.types import ModelRole


class DuplicateRequest(ValueError):
    """A request with this id is already queued or running."""


class QueueFull(RuntimeError):
    """The queue is full. The request itself is valid and may be sent again later."""


class NoDraft(RuntimeError):
    """The request needs the draft, which is lost. The request itself is valid and may be sent again later."""


def check_waiting(config: EngineConfig, waiting: int) -> None:
    """Raise QueueFull if too many requests wait to accept another one."""
    if config.max_queue is not None and waiting >= config.max_queue:
        raise QueueFull(f"{waiting} requests are waiting; allowed: {config.max_queue}. Try again later")


def check_queue(pages: dict[ModelRole, int], config: EngineConfig, waiting: int, waiting_pages: int) -> None:
    """Raise QueueFull if the queue has no room for a request. `pages`: pages that the request is likely to need;
    `waiting_pages`: pages that the waiting requests are likely to need."""
    check_waiting(config, waiting)
    wanted = waiting_pages + sum(pages.values())
    if waiting and config.max_queue_pages is not None and wanted > config.max_queue_pages:
        raise QueueFull(
            f"waiting requests would need {wanted} KV pages; allowed: {config.max_queue_pages}. Try again later"
        )


def check_prompt(size: int, context: int) -> None:
    """Reject a prompt of `size` tokens that is empty or leaves no room for an answer. Raises ValueError."""
    if not size:
        raise ValueError("the prompt is empty; at least one token is needed")
    if size >= context:
        raise PromptTooLong(
            f"the prompt has {size} tokens; allowed: at most {context - 1}, to leave room for an answer"
        )


def check_negative(size: int, max_tokens: int, context: int) -> None:
    """Reject a negative prompt of `size` tokens that is empty or leaves no room for an answer. Raises ValueError."""
    if not size:
        raise ValueError("negative_prompt is empty; at least one token is needed, or leave it out")
    if size + max_tokens > context:
        raise ValueError(
            f"negative_prompt has {size} tokens, and max_tokens={max_tokens} after them exceeds the context of "
            f"{context}; allowed: a shorter negative_prompt, or fewer max_tokens"
        )
