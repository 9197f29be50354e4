"""A sequence group: one request inside the engine. Its state machine, the slots of its particles, and what has been
committed and streamed.

Other files read its attributes and call its transitions; only this file assigns what belongs to the state machine. The
states, and which transitions between them are legal:

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

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from smc.algorithm.coupling import ExponentFit
from smc.api.request import Request, Times
from smc.api.sampling_params import SamplingParams
from smc.executor.messages import Stream
from smc.executor.state import biased_tokens
from smc.scheduler.detokenizer import StopRules, TextStream
from smc.scheduler.methods import TARGET_ALONE, Decoding, decoding_of
from smc.scheduler.slots import Checkpoint, RandomKeys, Slots
from smc.scheduler.speculation import Acceptance
from smc.scheduler.stats import RequestCounters
from smc.types import ModelRole


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


MEMORY = 0.97
"""Weight that the acceptance of a request's earlier rounds keeps after each round."""

RoundPages = dict[Stream, np.ndarray]
"""Pages that a round has allocated for a request, by stream."""


class WeighedParticles(NamedTuple):
    """The particles of a request as its potential last left them with weight, from which the round after it can be
    drawn again."""

    checkpoint: Checkpoint
    particles: np.ndarray
    committed: int


@dataclass(eq=False)
class SequenceGroup:
    """Mutable state of one request. Particles are in `Slots`; this holds what they have in common."""

    request: Request
    seed: int
    rules: StopRules
    submitted: float
    """Engine time of the request's arrival, seconds."""
    number: int
    """Position of the request in the order of submission."""
    expected: dict[ModelRole, int]
    """KV pages in each pool that the request was likely to need when it was submitted."""
    state: RequestState = field(init=False, default=RequestState.WAITING)
    pending: PendingChange | None = field(init=False, default=None)
    """The change that is applied when no round of the request is in flight."""
    method: Decoding = field(init=False)
    """How the request's method decodes it while there is a draft."""
    decoding: Decoding = field(init=False)
    """How it is decoded now: by its method, or exact decoding by the target alone."""
    checkpoint: Checkpoint | None = field(init=False, default=None)
    """The particles that the request resumes from, while they hold no slots."""
    slots: np.ndarray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int32))
    particles: np.ndarray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of the particle in each slot: part of the key of its random numbers."""
    count: int = field(init=False, default=0)
    """Slots that hold a particle."""
    next_rows: int | None = field(init=False, default=None)
    """Particles after the next round, if that round changes their number."""
    most_rows: int = field(init=False)
    """Rows that the request may have: fewer than requested where there was too little memory for more."""
    generation: int = field(init=False, default=0)
    """How often the request has released its slots; results of rounds of an earlier generation are discarded."""
    in_flight: deque[RoundPages] = field(init=False, default_factory=deque)
    """Pages of every round in flight, oldest first."""
    rounds: int = field(init=False, default=0)
    """Rounds whose results have been processed."""
    admitted_at: float | None = field(init=False, default=None)
    """Engine time at which the request first got slots and pages, seconds."""
    first_token_at: float | None = field(init=False, default=None)
    """Engine time of the first token, seconds."""
    stop_entry: int = 0
    """Entry of the workers' stop tables that holds the request's stop machine."""
    cached_tokens: int = 0
    """Prompt tokens that need not be run, at the model where they are fewest."""
    keys: dict[str, list[bytes]] = field(default_factory=dict)
    """Prefix cache keys of the blocks of its prompts, by `prompt` and `negative`, once they have been computed."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(MEMORY))
    """How often drafted tokens were accepted (exact decoding)."""
    exponent: ExponentFit | None = None
    """Of coupled drafting; None: it has not been drafted so."""
    committed: int = 0
    """Answer tokens on which all particles agree."""
    streamed: int = 0
    """Answer tokens that have been reported to the caller."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities that have been reported, if requested: one for each of these tokens."""
    lag: int = 0
    """Tokens between the committed prefix and the longest particle."""
    log_z: float = 0.0
    """Running log of the estimate of the target's total mass on answers."""
    weighed: bool = False
    """Its potential is in the weights that its particles have now."""
    last_weighed: WeighedParticles | None = field(init=False, default=None)
    """None: it has no potential, or this has left no particle with weight yet."""
    redraws: int = field(init=False, default=0)
    """How often its last tokens have been drawn again, because its potential left no particle with weight."""
    error: str | None = None
    """Why the request fails; the next report ends it."""
    text: TextStream = field(init=False)
    counters: RequestCounters = field(init=False)

    def __post_init__(self) -> None:
        self.method = self.decoding = decoding_of(self.params)
        self.most_rows = self.params.rows
        self.text = TextStream(self.rules)
        self.counters = RequestCounters(self.params.rows)

    @property
    def draft_exponent(self) -> float:
        """Exponent of coupled drafting; 0: its rows are not coupled."""
        return self.fitted_exponent if self.decoding.coupled else 0.0

    @property
    def fitted_exponent(self) -> float:
        """Exponent of coupled drafting, also while the target decodes alone; 0: nothing was drafted so."""
        return self.exponent.exponent if self.exponent is not None else 0.0

    # Transitions.

    def admit(self, slots: np.ndarray, now: float) -> None:
        """It gets slots, one for each of its `rows`, and pages."""
        if self.state is RequestState.WAITING:
            self._have_rows(self.rows)
        self._enter(RequestState.PREFILL, QUEUED)
        self.slots = slots
        self.admitted_at = now if self.admitted_at is None else self.admitted_at

    def run(self, now: float) -> None:
        """Its particles are in slots, and it takes part in rounds."""
        self._enter(RequestState.RUNNING, {RequestState.PREFILL})
        last = self.last_weighed
        self.weighed = last is not None and self.checkpoint is last.checkpoint
        self.checkpoint = None
        self.first_token_at = now if self.first_token_at is None else self.first_token_at

    def preempt(self, checkpoint: Checkpoint | None = None) -> None:
        """It has released slots and pages, and waits to be admitted again. `checkpoint`: of the particles of a running
        request."""
        assert (checkpoint is not None) == (self.state is RequestState.RUNNING), "only what runs is saved"
        if checkpoint is not None:
            self.checkpoint = checkpoint
            self._enter(RequestState.PREEMPTED, {RequestState.RUNNING})
            if self.switches:
                self._decode_by(*self.after_switch)
        else:
            resumes = self.checkpoint is not None
            self._enter(RequestState.PREEMPTED if resumes else RequestState.WAITING, {RequestState.PREFILL})
        self.counters.preemptions += 1

    def switch(self, decoding: Decoding, rows: int, checkpoint: Checkpoint, slots: np.ndarray) -> None:
        """It has released its slots for others, in which it goes on by another decoding from what is confirmed."""
        self._enter(RequestState.PREFILL, {RequestState.RUNNING})
        self.checkpoint = checkpoint
        self._decode_by(decoding, rows)
        self.slots = slots

    def redraw(self) -> None:
        """It has released slots and pages, and waits to go on from before its last round, or before its first tokens:
        its potential leaves no particle with weight."""
        last = self.last_weighed
        self._enter(RequestState.WAITING if last is None else RequestState.PREEMPTED, {RequestState.RUNNING})
        self.redraws += 1
        self.committed = 0 if last is None else last.committed
        if last is not None:
            self.checkpoint, self.particles, self.count = last.checkpoint, last.particles, len(last.particles)

    def rescore(self) -> None:
        """Its answer is drawn; slots and pages are released."""
        assert self.has_particles, "an answer is rescored that was not drawn"
        self._enter(RequestState.RESCORING, {*ADMITTED, RequestState.PREEMPTED})
        self.pending = self.checkpoint = None

    def finish(self) -> None:
        self._enter(RequestState.FINISHED, UNFINISHED)
        self.pending = self.checkpoint = None

    # Changes within a state.

    def choose(self, decoding: Decoding, rows: int | None = None) -> None:
        """While it is queued: how it is decoded from its admission on; `rows` if not as many as it asks for."""
        assert self.state in QUEUED, f"a request changes its decoding while it is {self.state.value}"
        self._decode_by(decoding, rows)

    def narrow(self, decoding: Decoding, rows: int | None = None) -> np.ndarray:
        """During prefill: it needs no more slots than these rows. Returns the slots that it does not need."""
        assert self.state is RequestState.PREFILL, f"a request begins with fewer rows while it is {self.state.value}"
        self._decode_by(decoding, rows)
        spare = self.slots[self.count :]
        self.slots = self.slots[: self.count]
        return spare

    def shrink_checkpoint(self, rows: int) -> None:
        """While it is preempted: fewer particles than it had, by an unbiased choice."""
        assert self.state is RequestState.PREEMPTED, "a request that is preempted"
        assert self.checkpoint is not None, "a preempted request has a checkpoint"
        keys = RandomKeys(self.seed, self.counters.preemptions)
        self.checkpoint, kept_X, log_z = self.decoding.shrink(self.checkpoint, rows, self.params, keys)
        self.particles = self.particles[kept_X]
        self.count = len(self.particles)
        self.most_rows = rows
        self.log_z += log_z

    def request_rows(self, rows: int) -> None:
        """It is to have so many rows; replaces any other pending change."""
        self.pending = PendingChange(rows, switches=False)

    def request_switch(self, rows: int) -> None:
        """It is to be decoded by the draft-target pair with so many rows, or by the target alone: 0. Replaces any other
        pending change."""
        assert self.state in ADMITTED, f"a request switches while it is {self.state.value}"
        self.pending = PendingChange(rows, switches=True)

    def cancel_change(self) -> None:
        self.pending = None

    def cancel_switch(self) -> None:
        if self.switches:
            self.pending = None

    def begin_resize(self, rows: int, new_slots: np.ndarray) -> None:
        """The next round leaves it so many particles; `new_slots` hold those that it has not had before."""
        assert self.state is RequestState.RUNNING and self.next_rows is None, "one change of rows at a time"
        self.next_rows = rows
        if len(new_slots):
            more = self.particles.max() + 1 + np.arange(len(new_slots))
            self.particles = np.concatenate((self.particles, more))
            self.slots = np.concatenate((self.slots, new_slots))

    def end_resize(self, kept_N: np.ndarray) -> np.ndarray:
        """The round has left it the particles in these of its slots. Returns the others."""
        assert self.next_rows is not None, "the number of its particles was not to change"
        dropped = self.slots[~kept_N]
        self.slots, self.particles, self.next_rows = self.slots[kept_N], self.particles[kept_N], None
        self.count = len(self.slots)
        return dropped

    def release_slots(self) -> None:
        """Slots and pages are no longer its own; rounds in flight are discarded."""
        assert self.state in ADMITTED, f"slots of a request that is {self.state.value}"
        # Slots that were to hold a particle after the next round hold none yet.
        self.particles = self.particles[: self.count]
        self.slots = self.slots[:0]
        self.in_flight.clear()
        self.next_rows = None
        self.generation += 1

    def begin_round(self, pages: RoundPages) -> None:
        assert self.state is RequestState.RUNNING, f"a round of a request that is {self.state.value}"
        self.in_flight.append(pages)

    def end_potential(self, slots: Slots | None = None) -> None:
        """Its potential is in the weights of its particles. Where these have weight, they are kept from `slots`."""
        assert self.state is RequestState.RUNNING and not self.in_flight, "particles that a round changes"
        self.weighed = True
        if slots is not None:
            self.redraws = 0
            self.last_weighed = WeighedParticles(self.save(slots), self.particles[: self.count], self.committed)

    def end_round(self) -> None:
        self.in_flight.popleft()
        self.weighed = False
        self.rounds += 1
        self.counters.rounds += 1
        self.counters.alone_rounds += self.alone

    def fail(self, role: ModelRole) -> None:
        """The request ends with an error that names the model."""
        why = "its weights or its numeric type are at fault"
        if self.params.constraint is not None:
            why += ", or the constraint has become too complex to be followed"
        self.error = self.error or f"the {role} model returned NaN logits: {why}"

    def _enter(self, state: RequestState, allowed: frozenset[RequestState] | set[RequestState]) -> None:
        legal = self.state in allowed and state in TRANSITIONS[self.state]
        assert legal, f"a request becomes {state.value} that is {self.state.value}"
        self.state = state

    def _decode_by(self, decoding: Decoding, rows: int | None = None) -> None:
        self.decoding, self.pending = decoding, None
        self._have_rows(rows or decoding.rows(self.params))

    def _have_rows(self, rows: int) -> None:
        self.particles = np.arange(rows)
        self.count = rows

    # What others read.

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def is_queued(self) -> bool:
        return self.state in QUEUED

    @property
    def is_running(self) -> bool:
        return self.state is RequestState.RUNNING

    @property
    def awaits_potential(self) -> bool:
        """Its potential is to be asked about its particles before anything else happens to them."""
        unweighed = self.params.potential is not None and not self.weighed and not self.error
        return unweighed and self.is_running and not self.in_flight

    @property
    def alone(self) -> bool:
        """The target decodes it, although its method would draft."""
        return self.decoding is not self.method

    @property
    def switches(self) -> bool:
        """It changes between the draft-target pair and the target alone as soon as no round of it is in flight."""
        return self.pending is not None and self.pending.switches

    @property
    def after_switch(self) -> tuple[Decoding, int]:
        """How it is decoded after its pending switch, and with how many rows."""
        assert self.pending is not None and self.pending.switches, "a switch is pending"
        return (self.method, self.pending.rows) if self.pending.rows else (TARGET_ALONE, 1)

    @property
    def tree_rows(self) -> int:
        """Rows that are drafted for it after all changes; 0: the target decodes it alone."""
        if self.pending is not None:
            return self.pending.rows
        return 0 if self.alone else self.next_rows or self.count

    @property
    def has_particles(self) -> bool:
        """In slots, or in a checkpoint."""
        return self.state is RequestState.RUNNING or self.checkpoint is not None

    @property
    def draws_first_token(self) -> bool:
        """Its prefill ends with the draw of first tokens; otherwise it resumes from a checkpoint."""
        return self.checkpoint is None

    @property
    def has_begun(self) -> bool:
        """It has been admitted at least once."""
        return self.admitted_at is not None

    @property
    def adaptive(self) -> bool:
        """A policy decides how many rows it has, and whether anything is drafted."""
        return self.method.adaptive(self.params)

    @property
    def rows(self) -> int:
        """Slots that it has, or is to have."""
        return len(self.particles) or self.decoding.rows(self.params)

    @property
    def slots_needed(self) -> int:
        """Slots of its rows, with those of unconditional rows."""
        return self.rows * self.params.slots_per_row

    @property
    def chains_needed(self) -> int:
        """Draft chains whose token distributions are stored."""
        return self.decoding.chains(self.rows)

    @property
    def launched(self) -> int:
        """Rounds that have been launched."""
        return self.rounds + len(self.in_flight)

    @property
    def prompt_size(self) -> int:
        return len(self.request.prompt)

    @property
    def is_rescored(self) -> bool:
        """Its answer or its prompt runs through the target once more, when the answer has been drawn. The first token of
        a prompt has no log-probability."""
        return self.params.top_logprobs > 0 or (self.params.prompt_logprobs is not None and self.prompt_size > 1)

    @cached_property
    def prompt_text(self) -> str:
        """For its potential; made when first asked for, in the thread of a call."""
        return self.rules.tokenizer.decode(self.request.prompt)

    @property
    def negative_size(self) -> int:
        """Tokens of the negative prompt; 0: the request is not guided."""
        return self.request.negative_size

    @property
    def context(self) -> int:
        """Tokens of the prompt and of the committed prefix."""
        return self.prompt_size + self.committed

    @property
    def streams(self) -> tuple[Stream, ...]:
        """What the models run for it."""
        return self.streams_by(self.decoding)

    def streams_by(self, decoding: Decoding) -> tuple[Stream, ...]:
        """What the models would run for it, decoded so."""
        guided = (role for role in decoding.roles if role in self.params.guided_roles)
        return (*map(Stream, decoding.roles), *(Stream(role, unconditional=True) for role in guided))

    def prompt_of(self, stream: Stream) -> tuple[int, ...]:
        if not stream.unconditional:
            return self.request.prompt
        assert self.request.negative_prompt is not None, "only guided requests have unconditional rows"
        return self.request.negative_prompt

    def living(self, slots: Slots) -> np.ndarray:
        """Its slots whose particles differ from each other."""
        slots_N = self.slots[: self.count]
        return self.decoding.living(slots_N, slots.logw_S[slots_N])

    def save(self, slots: Slots) -> Checkpoint:
        """A checkpoint of the particles that a running request has; of exact decoding, of what is confirmed."""
        checkpoint = Checkpoint.of(slots, self.living(slots))
        self.decoding.trim_checkpoint(checkpoint)
        return checkpoint

    def array(self, slots: Slots, name: str) -> np.ndarray:
        """Rows of an array of `Slots` that are its particles, in slots or in its checkpoint."""
        return self.checkpoint[name] if self.checkpoint is not None else getattr(slots, name)[self.slots]

    def first_biases(self) -> list[tuple[int, float]]:
        """What is added to the logits that its first token is drawn from, by token."""
        if not self.params.min_tokens:
            return list(self.params.logit_bias)
        return [(token, early) for token, (early, _) in biased_tokens(self.rules.machine).items()]

    def repeated_tokens(self) -> list[int]:
        """Tokens of the prompt, each once, if its first token has a repetition penalty."""
        return sorted(set(self.request.prompt)) if self.params.repetition_penalty != 1 else []

    def times(self, now: float) -> Times:
        """Seconds in the queue, in prefill and in decoding, until `now` by the engine's clock."""
        admitted = now if self.admitted_at is None else self.admitted_at
        began = now if self.first_token_at is None else self.first_token_at
        return Times(admitted - self.submitted, began - admitted, now - began)
