"""A sequence group: one request inside the engine, with its state machine, the slots of its particles, and the tokens
that have been committed and streamed.

Other files read its attributes and call its transitions; only this file assigns the fields of the state machine. The
states and the legal transitions between them:

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

A request with confirmed tokens (`Request.confirmed`) resumes from them: it becomes PREEMPTED when it is submitted.

A request of exact decoding is decoded by the draft-target pair or by the target alone. This choice is not a state: each
state has both. A request that loses its draft takes the same `switch` as a request for which drafting does not pay.

Besides its state, a request has at most one pending change, which is applied when no round of the request is in
flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from smc.algorithm.coupling import ExponentFit
from smc.api.engine_config import EngineConfig
from smc.api.request import CONTINUED, Request, Times
from smc.api.sampling_params import SamplingParams
from smc.executor.logit_changes import biased_tokens
from smc.executor.messages import ModelLost, Pending
from smc.philox import RoundKeys
from smc.scheduler.detokenizer import StopRules, TextStream
from smc.scheduler.methods import TARGET_ALONE, DecodingRules, rules_of
from smc.scheduler.slots import Checkpoint, RoundPages, Slots, Stream
from smc.scheduler.speculation import Acceptance
from smc.scheduler.stats import RequestCounters
from smc.types import ModelRole

MEMORY = 0.97
"""Factor by which the counts of a request's earlier rounds in its `acceptance` decay with each round."""
SHRINK_ROUND = 1 << 30
"""First round number for the random numbers of choices between rounds, so that they differ from those of rounds."""


class RequestState(Enum):
    WAITING = "waiting"
    """Is queued, without slots and pages."""
    PREFILL = "prefill"
    """Holds slots and pages; the prompt, or what the request resumes from, runs through the models."""
    RUNNING = "running"
    """Takes part in rounds."""
    PREEMPTED = "preempted"
    """Is queued with a checkpoint of its particles, without slots and pages."""
    RESCORING = "rescoring"
    """The answer is drawn. For `top_logprobs` the answer, for `prompt_logprobs` the prompt runs through the target once
    more. The request holds no slots."""
    FINISHED = "finished"
    """Has left the engine."""


QUEUED = frozenset({RequestState.WAITING, RequestState.PREEMPTED})
ADMITTED = frozenset({RequestState.PREFILL, RequestState.RUNNING})
UNFINISHED = frozenset(RequestState) - {RequestState.FINISHED}


class PendingChange(NamedTuple):
    """A change that is applied to a request as soon as no round of it is in flight."""

    rows: int
    """Number of rows of the tree, or of particles, after the change. 0: the target decodes alone."""
    switches: bool
    """Whether the request switches between the draft-target pair and the target alone; otherwise only its number of
    rows changes."""


class WeighedParticles(NamedTuple):
    """The particles of a request, saved when its potential last left any of them with weight. The next round can be
    drawn again from them."""

    checkpoint: Checkpoint
    particles: np.ndarray
    committed: int


@dataclass(eq=False)
class SequenceGroup:
    """Mutable state of one request. Its particles are in `Slots`; this class holds what is common to them."""

    request: Request
    seed: int
    stop_rules: StopRules
    submitted: float
    """Engine time of the request's arrival, seconds."""
    number: int
    """Position of the request in the order of submission."""
    expected: dict[ModelRole, int]
    """KV pages in each pool that the request was likely to need when it was submitted."""
    state: RequestState = field(init=False, default=RequestState.WAITING)
    pending: PendingChange | None = field(init=False, default=None)
    """The change to apply when no round of the request is in flight."""
    requested: DecodingRules = field(init=False)
    """How the request's method decodes it while there is a draft."""
    rules: DecodingRules = field(init=False)
    """How the request is decoded now: by its method, or exact decoding by the target alone."""
    checkpoint: Checkpoint | None = field(init=False, default=None)
    """The particles that the request resumes from, while they hold no slots."""
    slots: np.ndarray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int32))
    particles: np.ndarray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of the particle in each slot: part of the key of its random numbers."""
    count: int = field(init=False, default=0)
    """Slots that hold a particle."""
    next_rows: int | None = field(init=False, default=None)
    """Number of particles after the next round, if that round changes it."""
    most_rows: int = field(init=False)
    """Maximum number of rows: fewer than requested if memory was too short for more."""
    drafted: int = field(init=False, default=0)
    """Tokens that the last round launched has drafted for a row."""
    generation: int = field(init=False, default=0)
    """Number of times that the request has released its slots; results of rounds of an earlier generation are
    discarded."""
    in_flight: deque[RoundPages] = field(init=False, default_factory=deque)
    """Pages of every round in flight, oldest first."""
    rounds: int = field(init=False, default=0)
    """Rounds whose results have been processed."""
    admitted_at: float | None = field(init=False, default=None)
    """Engine time at which the request first got slots and pages, seconds."""
    began_at: float | None = field(init=False, default=None)
    """Engine time at which the request first entered RUNNING, seconds."""
    prompt_ran_at: float = field(init=False, default=0.0)
    """Time at which every model of the method had run the prompt, in seconds of the monotonic clock."""
    passes: dict[ModelRole, Pending[Any]] = field(init=False, default_factory=dict)
    """Last part of the prompt at each model, until it is known when these have run."""
    stop_entry: int = 0
    """Entry of the workers' stop tables that holds the request's stop machine."""
    cached_tokens: int = 0
    """Number of prompt tokens that came from the prefix cache, at the model that had the fewest."""
    keys: dict[str, list[bytes]] = field(default_factory=dict)
    """Prefix cache keys of the blocks of the prompts, by `prompt` and `negative`, once computed."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(MEMORY))
    """How often drafted tokens were accepted (exact decoding)."""
    exponent: ExponentFit | None = None
    """Fit of the exponent of coupled drafting; None: no coupled round has run."""
    committed: int = 0
    """Length of the committed prefix, in tokens."""
    streamed: int = 0
    """Number of answer tokens that have been reported to the caller."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the streamed tokens, if requested."""
    lag: int = 0
    """Tokens between the committed prefix and the longest particle."""
    log_z: float = 0.0
    """Running log of the estimate of the target's total mass on answers."""
    weighed: bool = False
    """Whether the weights of the current particles include the potential."""
    last_weighed: WeighedParticles | None = field(init=False, default=None)
    """Particles to draw the next round from again; None: no potential, or it has left no particle with weight yet."""
    redraws: int = field(init=False, default=0)
    """Number of times in a row that the last tokens were drawn again, because the potential left no particle with
    weight."""
    error: str | None = None
    """Why the request fails; the next report ends it."""
    caller_error: bool = False
    """Whether the request itself is at fault, not the engine."""
    text: TextStream = field(init=False)
    counters: RequestCounters = field(init=False)
    params: SamplingParams = field(init=False)
    _round_pages: tuple[tuple[DecodingRules, int], dict[ModelRole, int]] | None = field(init=False, default=None)
    """Pages of a round, and what they depend on."""

    def __post_init__(self) -> None:
        self.params = self.request.params
        self.requested = self.rules = rules_of(self.params)
        self.most_rows = self.params.rows
        self.text = TextStream(self.stop_rules)
        self.counters = RequestCounters(self.params.rows)

    @property
    def draft_exponent(self) -> float:
        """Exponent of coupled drafting; 0 if the current decoding does not couple rows."""
        return self.fitted_exponent if self.rules.coupled else 0.0

    @property
    def fitted_exponent(self) -> float:
        """Exponent of coupled drafting, also while the target decodes alone; 0 if no coupled round has run."""
        return self.exponent.exponent if self.exponent is not None else 0.0

    # Transitions.

    def admit(self, slots: np.ndarray, now: float) -> None:
        """Enter PREFILL with slots, one for each of the request's `rows`."""
        if self.state is RequestState.WAITING:
            self._have_rows(self.rows)
        self._enter(RequestState.PREFILL, QUEUED)
        self.slots = slots
        self.admitted_at = now if self.admitted_at is None else self.admitted_at

    def resume(self) -> None:
        """Enter PREEMPTED after the submission, to go on after the request's confirmed tokens. If they include the end
        of the answer, which was not delivered, their last token is drawn again."""
        tokens = self.request.confirmed
        tokens = tokens[: len(tokens) - self.stop_rules.ends(tokens)]
        if not tokens:
            return
        assert self.params.decoding in CONTINUED, f"an answer by {self.params.decoding} does not go on elsewhere"
        self.checkpoint = Checkpoint.of_tokens(tokens, self.request.confirmed_logprobs[: len(tokens)])
        self.committed = len(tokens)
        self._have_rows(self.rows)
        self._enter(RequestState.PREEMPTED, {RequestState.WAITING})

    def run(self, now: float, passes: dict[ModelRole, Pending[Any]]) -> None:
        """Enter RUNNING: the particles are in slots, and the request takes part in rounds. `passes`: the last part of
        the prompt at each model, which may still run."""
        self._enter(RequestState.RUNNING, {RequestState.PREFILL})
        last = self.last_weighed
        self.weighed = last is not None and self.checkpoint is last.checkpoint
        self.checkpoint = None
        if self.began_at is None:
            self.began_at, self.passes = now, passes

    def preempt(self, checkpoint: Checkpoint | None = None) -> None:
        """Return to the queue after slots and pages were released. `checkpoint`: the particles of a running request;
        None for other requests."""
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

    def switch(self, rules: DecodingRules, rows: int, checkpoint: Checkpoint, slots: np.ndarray) -> None:
        """Continue by another decoding, in other slots, from the confirmed tokens. The old slots were released."""
        self._enter(RequestState.PREFILL, {RequestState.RUNNING})
        self.checkpoint = checkpoint
        self._decode_by(rules, rows)
        self.slots = slots

    def redraw(self) -> None:
        """Return to the queue after slots and pages were released, to continue from before the last round, or from
        before the first tokens: the potential left no particle with weight."""
        last = self.last_weighed
        self._enter(RequestState.WAITING if last is None else RequestState.PREEMPTED, {RequestState.RUNNING})
        self.redraws += 1
        self.committed = 0 if last is None else last.committed
        if last is not None:
            self.checkpoint, self.particles, self.count = last.checkpoint, last.particles, len(last.particles)

    def rescore(self) -> None:
        """Enter RESCORING: the answer is drawn, and slots and pages are released."""
        assert self.has_particles, "an answer is rescored that was not drawn"
        self._enter(RequestState.RESCORING, {*ADMITTED, RequestState.PREEMPTED})
        self.pending = self.checkpoint = None

    def finish(self) -> None:
        self._enter(RequestState.FINISHED, UNFINISHED)
        self.pending = self.checkpoint = None

    # Changes within a state.

    def choose(self, rules: DecodingRules, rows: int | None = None) -> None:
        """While queued, set how the request is decoded from its admission on. `rows`: number of rows; by default as
        many as the request asks for."""
        assert self.state in QUEUED, f"a request changes its decoding while it is {self.state.value}"
        self._decode_by(rules, rows)

    def narrow(self, rules: DecodingRules, rows: int | None = None) -> np.ndarray:
        """During prefill, reduce the request to the rows of this decoding. Return the slots that are no longer
        needed."""
        assert self.state is RequestState.PREFILL, f"a request begins with fewer rows while it is {self.state.value}"
        self._decode_by(rules, rows)
        spare = self.slots[self.count :]
        self.slots = self.slots[: self.count]
        return spare

    def shrink_checkpoint(self, rows: int) -> None:
        """While preempted, reduce the saved particles to `rows` by an unbiased choice."""
        assert self.state is RequestState.PREEMPTED, "a request that is preempted"
        assert self.checkpoint is not None, "a preempted request has a checkpoint"
        keys_G = RoundKeys(torch.tensor([self.seed]), torch.tensor([SHRINK_ROUND + self.counters.preemptions]))
        self.checkpoint, kept_N, log_z = self.rules.shrink(self.checkpoint, rows, self.params, keys_G)
        self.particles = self.particles[kept_N]
        self.count = len(self.particles)
        self.most_rows = rows
        self.log_z += log_z

    def request_rows(self, rows: int) -> None:
        """Request this number of rows; replaces any other pending change."""
        self.pending = PendingChange(rows, switches=False)

    def request_switch(self, rows: int) -> None:
        """Request a switch to the draft-target pair with this number of rows, or with 0 to the target alone. Replaces
        any other pending change."""
        assert self.state in ADMITTED, f"a request switches while it is {self.state.value}"
        self.pending = PendingChange(rows, switches=True)

    def cancel_change(self) -> None:
        self.pending = None

    def cancel_switch(self) -> None:
        if self.switches:
            self.pending = None

    def begin_resize(self, rows: int, new_slots: np.ndarray) -> None:
        """Let the next round leave the request `rows` particles; `new_slots`: additional slots for them."""
        assert self.state is RequestState.RUNNING and self.next_rows is None, "one change of rows at a time"
        self.next_rows = rows
        if len(new_slots):
            more = self.particles.max() + 1 + np.arange(len(new_slots))
            self.particles = np.concatenate((self.particles, more))
            self.slots = np.concatenate((self.slots, new_slots))

    def end_resize(self, kept_N: np.ndarray) -> np.ndarray:
        """Record that the round has left particles in the slots `kept_N`. Return the other slots."""
        assert self.next_rows is not None, "the number of its particles was not to change"
        dropped = self.slots[~kept_N]
        self.slots, self.particles, self.next_rows = self.slots[kept_N], self.particles[kept_N], None
        self.count = len(self.slots)
        return dropped

    def release_slots(self) -> None:
        """Record that slots and pages were released; rounds in flight are discarded."""
        assert self.state in ADMITTED, f"slots of a request that is {self.state.value}"
        # Slots that were to hold a particle after the next round hold none yet.
        self.particles = self.particles[: self.count]
        self.slots = self.slots[:0]
        self.in_flight.clear()
        self.next_rows = None
        self.generation += 1

    def begin_round(self, pages: RoundPages, drafted: int) -> None:
        """Record that a round has been launched. `drafted`: tokens that it drafts for a row."""
        assert self.state is RequestState.RUNNING, f"a round of a request that is {self.state.value}"
        self.in_flight.append(pages)
        self.drafted = drafted

    def end_potential(self, slots: Slots | None = None) -> None:
        """Record that the weights include the potential. `slots`: given if particles have weight; they are saved from
        there."""
        assert self.state is RequestState.RUNNING and not self.in_flight, "particles that a round changes"
        self.weighed = True
        if slots is not None:
            self.redraws = 0
            self.last_weighed = WeighedParticles(self.save(slots), self.particles[: self.count], self.committed)

    def end_round(self) -> None:
        """Record that the results of a round have been processed. Models run a prompt before its rounds, so the passes
        of the prompt have ended."""
        if self.passes:
            self.prompt_ran_at = max(map(_end_of, self.passes.values()))
            self.passes = {}
        self.in_flight.popleft()
        self.weighed = False
        self.rounds += 1
        self.counters.rounds += 1
        self.counters.alone_rounds += self.alone

    def fail(self, role: ModelRole) -> None:
        """Let the request end with an error that names the model."""
        self.error = self.error or f"the {role} model returned NaN logits: its weights or its numeric type are at fault"

    def fail_constraint(self, why: str) -> None:
        """Let the request end because its constraint cannot be followed any further."""
        if self.error is None:
            self.error, self.caller_error = why, True

    def _enter(self, state: RequestState, allowed: frozenset[RequestState] | set[RequestState]) -> None:
        """Enter a state. `allowed`: the states from which the transition is legal."""
        assert self.state in allowed, f"a request becomes {state.value} that is {self.state.value}"
        self.state = state

    def _decode_by(self, rules: DecodingRules, rows: int | None = None) -> None:
        self.rules, self.pending = rules, None
        self._have_rows(rows or rules.rows(self.params))

    def _have_rows(self, rows: int) -> None:
        self.particles = np.arange(rows)
        self.count = rows

    # Properties for other files.

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def is_queued(self) -> bool:
        return self.state in QUEUED

    @property
    def is_running(self) -> bool:
        return self.state is RequestState.RUNNING

    @property
    def awaits_potential(self) -> bool:
        """Whether the potential must be asked about the particles before their next round or the end of the request."""
        unweighed = self.params.potential is not None and not self.weighed and not self.error
        return unweighed and self.is_running and not self.in_flight

    @property
    def alone(self) -> bool:
        """Whether the target decodes the request alone, although its method would draft."""
        return self.rules is not self.requested

    @property
    def switches(self) -> bool:
        """Whether a switch between the draft-target pair and the target alone is pending."""
        return self.pending is not None and self.pending.switches

    @property
    def after_switch(self) -> tuple[DecodingRules, int]:
        """Decoding and number of rows after the pending switch."""
        assert self.pending is not None and self.pending.switches, "a switch is pending"
        return (self.requested, self.pending.rows) if self.pending.rows else (TARGET_ALONE, 1)

    @property
    def tree_rows(self) -> int:
        """Rows that are drafted for the request after all changes; 0: the target decodes it alone."""
        if self.pending is not None:
            return self.pending.rows
        return 0 if self.alone else self.next_rows or self.count

    @property
    def has_particles(self) -> bool:
        """Whether the request has particles, in slots or in a checkpoint."""
        return self.state is RequestState.RUNNING or self.checkpoint is not None

    @property
    def draws_first_token(self) -> bool:
        """Whether the prefill ends with the draw of first tokens; otherwise the request resumes from a checkpoint."""
        return self.checkpoint is None

    @property
    def has_begun(self) -> bool:
        """Whether the request has been admitted at least once."""
        return self.admitted_at is not None

    @property
    def adaptive(self) -> bool:
        """Whether a policy decides the number of rows, and whether anything is drafted."""
        return self.requested.adaptive(self.params)

    @property
    def rows(self) -> int:
        """Slots of the request without those of unconditional rows: those that it has, or will get."""
        return len(self.particles) or self.rules.rows(self.params)

    @property
    def slots_needed(self) -> int:
        """Slots of the request, including those of unconditional rows."""
        return self.rows * self.params.slots_per_row

    @property
    def chains_needed(self) -> int:
        """Draft chains of the request, for which token distributions are stored."""
        return self.rules.chains(self.rows)

    def round_pages(self, config: EngineConfig) -> dict[ModelRole, int]:
        """Pages that one round of the request allocates in each pool."""
        key = self.rules, self.rows
        if self._round_pages is None or self._round_pages[0] != key:
            self._round_pages = key, self.rules.round_pages(config, self.params, self.rows)
        return self._round_pages[1]

    @property
    def launched(self) -> int:
        """Rounds that have been launched."""
        return self.rounds + len(self.in_flight)

    @property
    def prompt_size(self) -> int:
        return len(self.request.prompt)

    @property
    def is_rescored(self) -> bool:
        """Whether the answer or the prompt runs through the target once more after the answer has been drawn. A prompt
        of one token does not: its first token has no log-probability."""
        return self.params.top_logprobs > 0 or (self.params.prompt_logprobs is not None and self.prompt_size > 1)

    @cached_property
    def prompt_text(self) -> str:
        """The prompt as text, for the potential. Computed at first use, in the thread of the potential's call."""
        return self.stop_rules.tokenizer.decode(self.request.prompt)

    @property
    def negative_size(self) -> int:
        """Tokens of the negative prompt; 0: the request is not guided."""
        return self.request.negative_size

    @property
    def context(self) -> int:
        """Tokens of the prompt and of the committed prefix together."""
        return self.prompt_size + self.committed

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Streams of sequences that the models run for the request."""
        return self.streams_by(self.rules)

    def streams_by(self, rules: DecodingRules) -> tuple[Stream, ...]:
        """Streams that the models would run for the request under this decoding."""
        guided = (role for role in rules.roles if role in self.params.guided_roles)
        return (*map(Stream, rules.roles), *(Stream(role, unconditional=True) for role in guided))

    def prompt_of(self, stream: Stream) -> tuple[int, ...]:
        if not stream.unconditional:
            return self.request.prompt
        assert self.request.negative_prompt is not None, "only guided requests have unconditional rows"
        return self.request.negative_prompt

    def living(self, slots: Slots) -> np.ndarray:
        """Slots of the request whose particles differ from each other."""
        slots_N = self.slots[: self.count]
        return self.rules.living(slots_N, slots.logw_S[slots_N])

    def save(self, slots: Slots) -> Checkpoint:
        """Return a checkpoint of a running request's particles; in exact decoding, of its confirmed tokens."""
        slots_N = self.slots[: self.count]
        checkpoint = Checkpoint.of(slots, self.rules.saved(slots_N, slots.logw_S[slots_N]))
        self.rules.trim_checkpoint(checkpoint)
        return checkpoint

    def array(self, slots: Slots, name: str) -> np.ndarray:
        """Return the request's rows of an array of `Slots`, from its slots or its checkpoint."""
        return self.checkpoint[name] if self.checkpoint is not None else getattr(slots, name)[self.slots]

    def first_biases(self) -> list[tuple[int, float]]:
        """Return the biases of the logits that the first token is drawn from: pairs of token and bias."""
        if not self.params.min_tokens:
            return list(self.params.logit_bias)
        return [(token, early) for token, (early, _) in biased_tokens(self.stop_rules.machine).items()]

    def repeated_tokens(self) -> list[int]:
        """Return the distinct tokens of the prompt if the request has a repetition penalty, else no tokens."""
        return sorted(set(self.request.prompt)) if self.params.repetition_penalty != 1 else []

    def times(self, now: float) -> Times:
        """Return the seconds in the queue, in prefill and in decoding, until `now` by the engine's clock."""
        admitted = now if self.admitted_at is None else self.admitted_at
        began = now if self.began_at is None else self.began_at
        if self.prompt_ran_at <= now:  # otherwise the engine has a clock of its own
            began = max(began, self.prompt_ran_at)
        return Times(admitted - self.submitted, began - admitted, now - began)


def _end_of(prompt: Pending[Any]) -> float:
    """Return when a model ended a part of a prompt, in seconds of the monotonic clock; 0 if the model was lost."""
    try:
        prompt.result()
    except ModelLost:  # the request goes on without it
        return 0.0
    return 1e-9 * max(end for _, end in prompt.spans().values())
