"""Prefill: how requests start and stop running. Slots and pages are claimed, prompts are scheduled in chunks, particles
are handed to the models (`Handoff`: it fills the slots of a request that begins or resumes, and sends its particles to
each model), and everything is released again. A resumed request takes the same path, with the checkpoint of its
particles instead of first tokens. Answers that are rescored run among the prompts."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer
from smc.executor.messages import Pending, Worker
from smc.executor.round_executor import RoundExecutor
from smc.memory.kv_cache import KVCacheManager
from smc.round.slot_state import SequenceHandoff
from smc.scheduler.capacity import PageForecast
from smc.scheduler.decode import commit_tokens
from smc.scheduler.methods import TARGET_ALONE, DecodingRules
from smc.scheduler.planner import Population
from smc.scheduler.prefill_batches import Chunk, PrefillJob, PrefillRequest, PromptRow, RescoringJob, prefill_step
from smc.scheduler.prefix_reuse import PrefixReuse
from smc.scheduler.sequence_group import RequestState, SequenceGroup
from smc.scheduler.slots import Slots, Stream, row_of_batch
from smc.stops import DONE, START, StopMachine, TokenBytes
from smc.types import ModelRole

LEAST = 256
"""Minimum tokens of a chunk beside rounds, if the prompts have that many left: a pass of fewer takes hardly less time,
because it reads all weights."""
IN_FLIGHT = 2
"""Maximum number of chunks in flight at a model. More would delay the next round."""
Spans = Mapping[str, tuple[int, int]]
"""Begin and end of each piece of work, in nanoseconds. The names of models' passes are their roles."""
Job = TypeVar("Job", bound=PrefillJob)


class Handoff:
    """Fills slots, and hands particles to a `RoundExecutor`."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        memory: KVCacheManager,
        executor: RoundExecutor,
        stops: StopEntries,
        token_bytes: TokenBytes,
    ) -> None:
        self._config, self._slots, self._memory, self._executor = config, slots, memory, executor
        self._stops, self._token_bytes = stops, token_bytes

    def first_tokens(self, job: PrefillRequest) -> None:
        """Write the first token of every particle to its slot. Waits for the draw."""
        assert job.first is not None, "scheduled with the last chunk"
        group, result = job.group, job.first.result()
        n, stop_rules, slots = len(group.slots), group.stop_rules, self._slots
        tokens_N, logp_N = result.drawn_RF[job.batch_index, :n], result.drawn_logp_RF[job.batch_index, :n]
        log_z = float(result.log_z_R[job.batch_index])
        if (why := job.first.failures().get(job.batch_index)) is not None:
            group.fail_constraint(why)
        if np.isnan(log_z):
            group.fail(group.rules.first)
        logw_N = result.logw_RF[job.batch_index, :n]
        # Slots without a particle repeat the first one, which has a particle.
        like_N = np.where(group.rules.alive(logw_N), np.arange(n), 0)
        tokens_N, logp_N = tokens_N[like_N], logp_N[like_N]
        text_N = stop_rules.machine.after(
            np.full(n, START), tokens_N, self._token_bytes, early=group.params.min_tokens > 0
        )
        if result.raw_logp_RF.shape[1]:
            slots.raw_logp_SL[group.slots, 0] = result.raw_logp_RF[job.batch_index, :n][like_N]
        slots.begin(
            group.slots, tokens_N, logp_N, (text_N == DONE) | (group.params.max_tokens == 1) | (logw_N == -np.inf)
        )
        slots.logw_S[group.slots] = logw_N
        commit_tokens(slots, Population([group]))

    def set_heads(self, job: PrefillRequest) -> None:
        """Let every particle, and every unconditional row, refer to the last page of its sequence."""
        group, slots = job.group, self._slots
        for stream, rows in job.rows.items():
            role = stream.role
            slots_N = slots.unconditional_slots(group.slots) if stream.unconditional else group.slots
            allocator = self._memory.allocators[role]
            last = [row.pages_L[-1] for row in rows]
            row_N = row_of_batch(len(rows), len(slots_N))
            heads_N = np.array(last)[row_N]
            allocator.hold(heads_N)
            allocator.release(last)
            for row in rows:
                allocator.count_grown(row.pages_L[len(group.prompt_of(stream)) :], True)
            slots.head_S[role][slots_N] = heads_N
            slots.held_S[role][slots_N] = np.array([len(row.tokens_L) for row in rows])[row_N]

    def add_sequences(self, job: PrefillRequest) -> None:
        """Hand the particles to the models that decode them."""
        group = job.group
        for role in group.rules.roles:
            self._executor.join(role, self._particles(group, role, job.rows[Stream(role)]))
        for stream in (stream for stream in group.streams if stream.unconditional):
            slots_N = self._slots.unconditional_slots(group.slots)
            pages_RL = _of_slots([row.pages_L for row in job.rows[stream]], len(slots_N))
            self._executor.join(stream.role, _table(slots_N, group, pages_RL, group.negative_size))

    def _particles(self, group: SequenceGroup, role: ModelRole, rows: list[PromptRow]) -> SequenceHandoff:
        slots, slots_N, prompt = self._slots, group.slots, group.prompt_size
        end_N, ended_N = prompt + slots.length_S[slots_N], slots.ended_S[slots_N]
        pending_N = end_N - slots.held_S[role][slots_N]
        if role == ModelRole.DRAFT:
            # For an ended particle, models only need to know that its last token was not run.
            pending_N = np.where(ended_N, 1, pending_N)
        first_N = slots.length_S[slots_N] - pending_N
        column_NQ = np.minimum(first_N[:, None] + np.arange(self._config.block + 2), slots.tokens_SL.shape[1] - 1)
        column_NQ = column_NQ[:, : int(pending_N.max())]
        return SequenceHandoff(
            slots_N=slots_N,
            pages_RL=_of_slots([row.pages_L for row in rows], len(slots_N)),
            base=prompt,
            limit=prompt + group.params.max_tokens,
            least=prompt + group.params.min_tokens,
            end_N=end_N.astype(np.int32),
            pending_NQ=slots.tokens_SL[slots_N[:, None], column_NQ],
            pending_N=pending_N.astype(np.int32),
            logq_NQ=slots.logq_SL[slots_N[:, None], column_NQ],
            ended_N=ended_N,
            alive_N=group.rules.alive(slots.logw_S[slots_N]),
            text_N=self._text(group, first_N).astype(np.int32),
            logw_N=slots.logw_S[slots_N],
            stops=group.stop_entry,
            machine=self._stops.machine_for(role, group.stop_entry),
            tokens_RL=(
                _of_slots([row.tokens_L for row in rows], len(slots_N)) if group.params.follows_tokens else None
            ),
        )

    def add_empty(self, group: SequenceGroup, slots_N: np.ndarray) -> None:
        """Register slots of a group at its models. They hold no particle until the next round fills them."""
        nothing_RL, unconditional_slots = np.zeros((1, 1), dtype=np.int32), self._slots.unconditional_slots(slots_N)
        for stream in group.streams:
            role, there_N = stream.role, unconditional_slots if stream.unconditional else slots_N
            self._slots.head_S[role][there_N] = 0
            self._slots.held_S[role][there_N] = 0
            # The round copies whole sequences there, with the pages of the prompt.
            self._executor.join(role, _table(there_N, group, nothing_RL, 0))

    def _text(self, group: SequenceGroup, length_N: np.ndarray) -> np.ndarray:
        """States of the stop machine after the first `length` tokens of each particle."""
        tokens_SL, stop_rules = self._slots.tokens_SL, group.stop_rules
        return np.array(
            [
                stop_rules.state(tokens_SL[slot, :length].tolist())
                for slot, length in zip(group.slots.tolist(), length_N.tolist())
            ]
        )


def _table(slots_N: np.ndarray, group: SequenceGroup, pages_RL: np.ndarray, base: int) -> SequenceHandoff:
    """Make a handoff of slots that only need block tables: slots without particles, and those of unconditional rows."""
    n = len(slots_N)
    return SequenceHandoff(
        slots_N=slots_N,
        pages_RL=pages_RL,
        base=base,
        limit=group.prompt_size + group.params.max_tokens,
        least=group.prompt_size + group.params.min_tokens,
        end_N=np.ones(n, dtype=np.int32),
        pending_NQ=np.zeros((n, 1), dtype=np.int32),
        pending_N=np.ones(n, dtype=np.int32),
        logq_NQ=np.zeros((n, 1), dtype=np.float32),
        ended_N=np.ones(n, dtype=bool),
        alive_N=np.zeros(n, dtype=bool),
        text_N=np.full(n, START, dtype=np.int32),
        logw_N=np.full(n, -np.inf),
        stops=group.stop_entry,
        machine=None,
    )


def _of_slots(values: list[np.ndarray], size: int) -> np.ndarray:
    """Repeat the values of the rows of a request, one for each position, for `size` slots: int32 [N, L], with 0 past a
    row's end; [1, L] if all slots share one row."""
    if len(values) > 1:
        values = [values[row] for row in row_of_batch(len(values), size)]
    out_RL = np.zeros((len(values), max(map(len, values))), dtype=np.int32)
    for out_L, values_L in zip(out_RL, values):
        out_L[: len(values_L)] = values_L
    return out_RL


class PrefillBudget:
    """Computes how many prompt tokens a step may schedule, from measured times of chunks and rounds.

    Prompts and rounds take turns on the models. Rounds accrue a time budget: `prefill_share` of their own time. A chunk
    is scheduled once its expected time has accrued. So the average round takes at most 1 + `prefill_share` times as
    long as without prompts, whatever chunks cost. If `prefill_share` is None, every step may schedule `prefill_chunk`
    tokens."""

    def __init__(self, config: EngineConfig) -> None:
        self._most, self._share = config.prefill_chunk, config.prefill_share
        # In look-ahead the models work at the same time, in lockstep one after the other.
        self._together = max if config.lookahead else sum
        self._in_flight: dict[ModelRole, deque[Chunk]] = {role: deque() for role in ModelRole}
        self._cost = dict.fromkeys(ModelRole, 0.0)
        """Seconds per token of each model's last finished chunk, which is taken to have at least `LEAST` tokens."""
        self._accrued = 0.0
        """Accrued time budget in seconds; negative if more was spent."""
        self._saw_rounds = False
        """Whether the last step has read rounds with measured times."""

    def most(self, beside: bool) -> int:
        """Return how many tokens may be scheduled at each model now. `beside`: whether requests are in rounds. Waits
        while too many chunks are in flight."""
        self.settle(IN_FLIGHT - 1)
        if self._share is None or not beside:
            return self._most
        cost = self._together(self._cost.values())
        if not cost or not self._saw_rounds:
            return min(self._most, LEAST)
        return min(self._most, max(LEAST, int(self._accrued / cost))) if self._accrued >= LEAST * cost else 0

    def settle(self, left: int = 0) -> None:
        """Wait until at most `left` chunks of each model are in flight."""
        for role, chunks in self._in_flight.items():
            while len(chunks) > left:
                self._learn(role, chunks.popleft())

    def forget(self, role: ModelRole) -> None:
        """Drop the model's chunks in flight, whose results will not arrive."""
        self._in_flight[role].clear()

    def spend(self, scheduled: Mapping[ModelRole, Sequence[Chunk]], beside: bool) -> None:
        """Charge the chunks that have been scheduled at each model."""
        for role, chunks in scheduled.items():
            self._in_flight[role].extend(chunks)
        if beside:
            took = self._together(
                sum(max(tokens, LEAST) for tokens, _ in scheduled[role]) * self._cost[role] for role in ModelRole
            )
            # Time spent beyond the budget is owed, but at most that of one chunk.
            self._accrued = max(-LEAST * self._together(self._cost.values()), self._accrued - took)

    def accrue(self, rounds: Iterable[Pending]) -> None:
        """Accrue time for the rounds that a step has read. Without a `prefill_share` their times are not used."""
        if self._share is None:
            return
        spans = [outcome.spans() for outcome in rounds]
        took = [self._together(_length(of_round, role) for role in ModelRole) for of_round in spans]
        self._saw_rounds, accrued = bool(took), self._share * sum(took)
        # At most the time of one chunk is carried over; otherwise the prompts of a busy moment would block all other
        # requests.
        self._accrued = min(self._accrued, LEAST * self._together(self._cost.values())) + accrued

    def _learn(self, role: ModelRole, chunk: Chunk) -> None:
        tokens, pending = chunk
        pending.result()
        if self._share is not None:
            self._cost[role] = _length(pending.spans(), "prompt") / max(tokens, LEAST)


def _length(spans: Spans, name: str) -> float:
    """Duration of a span in seconds; 0 if there is none."""
    begin, end = spans.get(name, (0, 0))
    return 1e-9 * (end - begin)


class StopEntries:
    """Assigns entries 1..count of the workers' stop tables. Requests with equal stop machines share an entry. An unused
    entry keeps its machine until another machine needs it."""

    def __init__(self, count: int) -> None:
        self._machines: dict[int, StopMachine] = {}
        self._users = dict.fromkeys(range(1, count + 1), 0)
        self._known: set[tuple[ModelRole, int]] = set()
        """Pairs of a model and an entry, for entries whose stop machine the model has."""

    def claim(self, machine: StopMachine) -> int | None:
        """Return the entry of a machine, or None while all entries are in use."""
        entry = next((e for e, there in self._machines.items() if there == machine), None)
        if entry is None:
            entry = next((e for e, users in self._users.items() if not users), None)
            if entry is None:
                return None
            self._machines[entry] = machine
            self._known -= {(role, entry) for role in ModelRole}
        self._users[entry] += 1
        return entry

    def machine_for(self, role: ModelRole, entry: int) -> StopMachine | None:
        """Return the entry's machine, which is sent to a model at the first call for both; None at later calls."""
        if (role, entry) in self._known:
            return None
        self._known.add((role, entry))
        return self._machines[entry]

    def forget(self, role: ModelRole) -> None:
        """Record that a model has lost its stop table."""
        self._known = {(name, entry) for name, entry in self._known if name != role}

    def release(self, entry: int) -> None:
        self._users[entry] -= 1
        assert self._users[entry] >= 0, "a stop entry was released twice"

    @property
    def used(self) -> int:
        return sum(self._users.values())


class PrefillManager:
    """Manages requests between the queue and their rounds."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        memory: KVCacheManager,
        forecast: PageForecast,
        workers: Mapping[ModelRole, Worker],
        executor: RoundExecutor,
        token_bytes: TokenBytes,
    ) -> None:
        self.config, self.slots, self.memory, self.workers = config, slots, memory, workers
        self.prefixes = PrefixReuse(config, slots, memory)
        self.stops = StopEntries(config.max_stops - 1)
        self.budget = PrefillBudget(config)
        self._forecast = forecast
        self._handoff = Handoff(config, slots, memory, executor, self.stops, token_bytes)
        self._jobs: list[PrefillJob] = []
        """Jobs that hold pages, in the order of their admission."""
        self._rescoring: list[RescoringJob] = []
        """Rescoring jobs that wait for pages, oldest request first."""

    @property
    def num_rescoring(self) -> int:
        """Number of answers being rescored, which hold pages."""
        return sum(isinstance(job, RescoringJob) for job in self._jobs)

    def admit(self, group: SequenceGroup, now: float) -> bool:
        """Give a queued request slots, and pages for its sequences. Return False if there are not enough of either."""
        job = PrefillRequest(group, self.config)
        if group.slots_needed > self.slots.num_free or not self._has_room(job):
            return False
        entry = self.stops.claim(group.stop_rules.machine)
        if entry is None:
            return False
        group.stop_entry = entry
        if not self.prefixes.allocate(job):
            self.stops.release(group.stop_entry)
            return False
        slots = self.slots.claim(group.rows, group.params.guided, chained=group.chains_needed > 0)
        group.admit(slots, now)
        self._forecast.expect(group)
        self._jobs.append(job)
        return True

    def lacks_slots(self, group: SequenceGroup) -> bool:
        """Whether only a lack of slots keeps the request from being admitted."""
        return group.slots_needed > self.slots.num_free and self._has_room(PrefillRequest(group, self.config))

    def _has_room(self, job: PrefillRequest) -> bool:
        if job.group.chains_needed > self.slots.num_free_chains:
            return False
        return self.memory.admits(self._forecast.of(job.group)) and self.prefixes.has_room(job)

    def schedule(self, beside: bool) -> None:
        """Schedule a chunk of the pending sequences at each model. `beside`: whether requests are in rounds."""
        jobs = self._unblocked()
        if not jobs:
            # The first tokens of the last prompt have been read, so there is hardly anything left to wait for.
            self.budget.settle()
        else:
            chunk = self.budget.most(beside)
            steps = {role: prefill_step(jobs, self.workers[role], role, chunk) for role in ModelRole}
            self.budget.spend(steps, beside)

    def _unblocked(self) -> list[PrefillJob]:
        """Jobs that may run now: all except those that begin with tokens that an earlier job is about to run."""
        found: list[PrefillJob] = []
        alike: defaultdict[bytes, list[PrefillJob]] = defaultdict(list)
        for job in self._jobs:
            beginning = self.prefixes.beginning(job)
            earlier = [] if beginning is None else alike[beginning]
            waits = self.prefixes.awaits(job, earlier)
            earlier.append(job)
            if waits:
                continue
            if job.waited:
                self.prefixes.reallocate(job)
                job.waited = False
            found.append(job)
        return found

    def finish(self, clock: Callable[[], float]) -> list[SequenceGroup]:
        """Let requests run whose last chunk has been scheduled, and return them. Waits for their first tokens. `clock`:
        of the engine."""
        ready = [job for job in self._jobs_of(PrefillRequest) if job.scheduled]
        for job in ready:
            if job.first is not None:
                # Wait for results, which may be lost, before anything is changed.
                job.first.result()
        now = clock()
        for job in ready:
            self._jobs.remove(job)
            if job.group.checkpoint is None:
                self._handoff.first_tokens(job)
            else:
                job.group.checkpoint.restore(self.slots, job.group.slots)
            if not job.group.error:
                self.prefixes.remember_prompt(job)
            self._handoff.set_heads(job)
            self._handoff.add_sequences(job)
            job.group.run(now, job.passes)
        return [job.group for job in ready]

    def rescore(self, group: SequenceGroup, answer: Answer) -> None:
        """Run a drawn answer through the target once more, as soon as there are pages for it."""
        self._rescoring.append(RescoringJob(group, self.config, answer))
        self._rescoring.sort(key=attrgetter("group.number"))

    def admit_rescoring(self) -> None:
        """Allocate pages for answers that wait to be rescored, oldest request first."""
        while self._rescoring:
            job = self._rescoring[0]
            pages = job.expected_pages
            if not (self.memory.admits(pages) and self.prefixes.has_room(job) and self.prefixes.allocate(job)):
                break
            self.memory.expect(job.group.number, pages, job.round_pages)
            self._jobs.append(self._rescoring.pop(0))

    def finish_rescoring(self) -> list[tuple[SequenceGroup, Answer]]:
        """Return requests whose rescoring is scheduled, with their complete answers. Waits for the results."""
        ready = [job for job in self._jobs_of(RescoringJob) if job.scheduled]
        return [(job.group, job.rescored()) for job in ready]

    def answer_of(self, group: SequenceGroup) -> Answer:
        """Return the drawn answer of a request that is rescored."""
        return next(job.answer for job in (*self._rescoring, *self._jobs_of(RescoringJob)) if job.group is group)

    def forget(self, role: ModelRole) -> None:
        """Record that a model has lost its state, and that results scheduled at it will not arrive."""
        self.budget.forget(role)
        self.stops.forget(role)

    def release(self, group: SequenceGroup) -> None:
        """Release everything that an admitted or rescored request holds."""
        if group.state is RequestState.RESCORING:
            self._rescoring = [job for job in self._rescoring if job.group is not group]
        else:
            self._release_slots(group)
            self.stops.release(group.stop_entry)
        for job in [job for job in self._jobs if job.group is group]:
            self._jobs.remove(job)
            self.prefixes.release(job)
        self.memory.no_longer_expect(group.number)

    def switch(self, group: SequenceGroup, rules: DecodingRules, rows: int) -> bool:
        """Let a running request of exact decoding continue by another decoding, from its confirmed tokens. A model that
        has run them and is still needed keeps its pages; the other models run them as for a resumed request. Return
        False if there are not enough slots or pages."""
        checkpoint = group.save(self.slots)
        length = checkpoint.longest
        expected = self._forecast.pages(rules, group.params, group.prompt_size, rows, length, group.negative_size)
        new = {role: pages for role, pages in expected.items() if role not in group.rules.roles}
        if (rows - len(group.slots)) * group.params.slots_per_row > self.slots.num_free or not self.memory.admits(new):
            return False
        if rules.chains(rows) > self.slots.num_free_chains:
            return False
        carried = self.prefixes.carry(group, rules, rows, checkpoint["tokens_SL"][0, : length - 1])
        if carried is None:
            return False
        self._release_slots(group)
        slots = self.slots.claim(rows, group.params.guided, chained=rules.chains(rows) > 0)
        group.switch(rules, rows, checkpoint, slots)
        self._forecast.expect(group)
        job = PrefillRequest(group, self.config)
        job.rows = carried
        self._jobs.append(job)
        return True

    def fall_back(self, group: SequenceGroup) -> None:
        """During the prefill of a request of the draft-target pair, let the target decode it alone. The pages at the
        draft are released."""
        job = next(job for job in self._jobs_of(PrefillRequest) if job.group is group)
        self.prefixes.drop(job, [stream for stream in group.streams if stream not in group.streams_by(TARGET_ALONE)])
        self._narrow(group, TARGET_ALONE)
        self.slots.release_distributions(group.slots)

    def grant(self, group: SequenceGroup) -> None:
        """Apply a pending number of rows: the next round brings it, if no other change is under way and there are
        slots. A request whose first tokens are yet to be drawn is reduced at once."""
        change = group.pending
        if change is None or change.switches:
            return
        if group.state is RequestState.PREFILL and group.draws_first_token and change.rows < group.count:
            self._narrow(group, group.rules, change.rows)
        elif not group.is_running or group.next_rows is not None:
            return
        elif change.rows == group.count:
            group.cancel_change()
        elif (change.rows - len(group.slots)) * group.params.slots_per_row <= self.slots.num_free:
            self.resize(group, change.rows)

    def resize(self, group: SequenceGroup, particles: int) -> None:
        """Let the next round leave the request `particles` particles, by an unbiased choice. Additional slots are
        claimed now."""
        more = max(0, particles - len(group.slots))
        new = self.slots.claim(more, group.params.guided)
        if more:
            self.slots.copy(new, np.repeat(group.slots[:1], more))
            self.slots.vacate(new)
        group.begin_resize(particles, new)
        if more:
            self._handoff.add_empty(group, new)

    def _narrow(self, group: SequenceGroup, rules: DecodingRules, rows: int | None = None) -> None:
        self.slots.release(group.narrow(rules, rows))
        self._forecast.expect(group)

    def _release_slots(self, group: SequenceGroup) -> None:
        self.slots.release_pages(group.slots, self.memory.allocators)
        for round_pages in group.in_flight:
            for stream, pages in round_pages.items():
                self.memory.allocators[stream.role].free(pages)
        self.slots.release(group.slots)
        group.release_slots()

    def _jobs_of(self, kind: type[Job]) -> Iterator[Job]:
        return (job for job in self._jobs if isinstance(job, kind))
