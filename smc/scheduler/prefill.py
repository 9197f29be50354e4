"""Prefill: how requests start and stop running. Slots and pages are claimed, prompts are scheduled in chunks, particles
are handed to the models, and everything is released again. A resumed request takes the same path, with the checkpoint
of its particles instead of first tokens. Answers that are rescored run among the prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TypeVar

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer
from smc.executor.messages import Worker
from smc.executor.round_executor import RoundExecutor
from smc.memory.kv_cache import KVCacheManager
from smc.scheduler.capacity import PageForecast
from smc.scheduler.handoff import Handoff, StopEntries
from smc.scheduler.methods import TARGET_ALONE, DecodingRules
from smc.scheduler.prefill_batches import PrefillJob, PrefillRequest, RescoringJob, prefill_step
from smc.scheduler.prefill_budget import LEAST, PrefillBudget
from smc.scheduler.prefix_reuse import PrefixReuse
from smc.scheduler.sequence_group import RequestState, SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import ModelRole

Job = TypeVar("Job", bound=PrefillJob)


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
    ) -> None:
        self.config, self.slots, self.memory, self.workers = config, slots, memory, workers
        self.prefixes = PrefixReuse(config, slots, memory)
        self.stops = StopEntries(config.max_stops - 1)
        self.budget = PrefillBudget(config)
        self._forecast = forecast
        self._handoff = Handoff(config, slots, memory, executor, self.stops)
        self._jobs: list[PrefillJob] = []
        """Jobs that hold pages, in the order of their admission."""
        self._come = 0
        """Number of jobs that have been added since the last step and have something to run."""
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
        self._add(job)
        return True

    def _add(self, job: PrefillJob) -> None:
        """Let a job run that holds its pages."""
        self._jobs.append(job)
        self._come += not job.scheduled

    def lacks_slots(self, group: SequenceGroup) -> bool:
        """Whether only a lack of slots keeps the request from being admitted."""
        return group.slots_needed > self.slots.num_free and self._has_room(PrefillRequest(group, self.config))

    def _has_room(self, job: PrefillRequest) -> bool:
        if job.group.chains_needed > self.slots.num_free_chains:
            return False
        return self.memory.admits(self._forecast.of(job.group)) and self.prefixes.has_room(job)

    def schedule(self, running: int) -> bool:
        """Schedule a chunk of the pending sequences at each model. `running`: number of requests in rounds. Return
        whether there was one."""
        self.budget.begin_step(self._come)
        self._come = 0
        jobs = self._unblocked()
        if jobs:
            # What has begun to run gains nothing by company, so it counts as a whole chunk.
            begun = any(job.begun for job in jobs)
            tokens = (
                LEAST if begun else max(sum(row.left for job in jobs for row in job.on(role)) for role in ModelRole)
            )
            chunk = self.budget.most(running, len(jobs), tokens)
            steps = {role: prefill_step(jobs, self.workers[role], role, chunk) for role in ModelRole}
            self.budget.spend(steps, beside=running > 0)
            return any(steps.values())
        if not self._jobs:
            # The first tokens of the last prompt have been read, so there is hardly anything left to wait for.
            self.budget.rest()
        return False

    def _unblocked(self) -> list[PrefillJob]:
        """Jobs that may run now: all that have not been scheduled, except those that begin with tokens that an earlier
        job is about to run."""
        found: list[PrefillJob] = []
        alike: defaultdict[bytes, list[PrefillJob]] = defaultdict(list)
        for job in self._jobs:
            beginning = self.prefixes.beginning(job)
            earlier = [] if beginning is None else alike[beginning]
            waits = self.prefixes.awaits(job, earlier)
            earlier.append(job)
            if waits or job.scheduled:
                continue
            if job.waited:
                self.prefixes.reallocate(job)
                job.waited = False
            found.append(job)
        return found

    def finish(self, clock: Callable[[], float], later: bool = False) -> list[SequenceGroup]:
        """Let requests run whose last chunk has been scheduled, and return them. Waits for their first tokens. `clock`:
        of the engine. `later`: first tokens of chunks of this step are left to the next one, in which they have
        arrived: a round that was requested after them is read before."""
        ready = [job for job in self._jobs_of(PrefillRequest) if job.scheduled]
        if later:
            ready = [job for job in ready if job.first is None or job.was_left]
            for job in self._jobs_of(PrefillRequest):
                job.was_left = job.first is not None
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
            self._add(self._rescoring.pop(0))

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
        self._add(job)
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
            if not any(job.group is group and job.first is not None for job in self._jobs_of(PrefillRequest)):
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
