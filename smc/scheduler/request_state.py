"""The states of a request inside the engine, and which transitions between them are legal.

    submit -> WAITING --- admit ---> PREFILL --- run ---> RUNNING
                 ^                   | ^ | ^               | | |
                 |                   | | | +--- switch ----+ | |     between draft-target pair and target alone
                 +----- preempt -----+ | |                   | |     before the first token
                                       | |                   | |
                PREEMPTED --- admit ---+ |                   | |
                  | ^ ^                  |                   | |
                  | | +---- preempt -----+                   | |     while it resumes from its checkpoint
                  | +------ preempt -------------------------+ |     with a checkpoint of its particles
                  | ^                                          |
                  | +------ redraw ----------------------------+     from before its last round; to WAITING from before
                  |                                            |     its first tokens
                  +-------- rescore ---> RESCORING <- rescore -+     from PREFILL, too, while it resumes

    every state --- finish ---> FINISHED

Whether a request of exact decoding is decoded by the draft-target pair or by the target alone is not a state: it has
either in each of them. A request that loses its draft takes the same `switch` as one that the latency model stops
drafting for.

Besides its state a request has at most one pending change, which waits until no round of the request is in flight."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RequestState(Enum):
    WAITING = "waiting"
    """It is queued, and holds nothing."""
    PREFILL = "prefill"
    """It holds slots and pages; its prompt, or what it resumes from, runs through the models."""
    RUNNING = "running"
    """It takes part in rounds."""
    PREEMPTED = "preempted"
    """It is queued with a checkpoint of its particles, and holds neither slots nor pages."""
    RESCORING = "rescoring"
    """Its answer is drawn, and runs through the target once more, or its prompt does: for `top_logprobs` and
    `prompt_logprobs`. It holds no slots."""
    FINISHED = "finished"
    """The engine has forgotten it."""


QUEUED = frozenset({RequestState.WAITING, RequestState.PREEMPTED})
ADMITTED = frozenset({RequestState.PREFILL, RequestState.RUNNING})
UNFINISHED = frozenset(RequestState) - {RequestState.FINISHED}
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.PREFILL: frozenset(
        {
            RequestState.RUNNING,
            RequestState.WAITING,
            RequestState.PREEMPTED,
            RequestState.RESCORING,
            RequestState.FINISHED,
        }
    ),
    RequestState.RUNNING: frozenset(
        {
            RequestState.WAITING,
            RequestState.PREFILL,
            RequestState.PREEMPTED,
            RequestState.RESCORING,
            RequestState.FINISHED,
        }
    ),
    RequestState.PREEMPTED: frozenset({RequestState.PREFILL, RequestState.RESCORING, RequestState.FINISHED}),
    RequestState.RESCORING: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}
"""States that may follow each state."""


class PendingChange(NamedTuple):
    """What a request changes to as soon as no round of it is in flight."""

    rows: int
    """Rows of the tree, or particles, that it is to have. 0: the target decodes it alone."""
    switches: bool
    """Between the draft-target pair and the target alone; otherwise only the number of rows changes."""
