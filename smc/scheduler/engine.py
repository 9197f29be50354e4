"""The scheduler: continuous batching of requests, from submission to the final draw. It alone says who is decoded when.

    submit -> queue -> admit (slots and pages) -> prompt (once per model, in chunks) -> first tokens -> rounds -> final
    draw

One `step` advances everything once: a chunk of prompts is asked for, a round of all running groups is asked for, and
what came of earlier ones is read. What it talks to are two workers, which run prompts, and the pair that runs rounds
(smc/executor); whether they live here, in other processes or on other machines is not its business."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from smc.api.engine_config import EngineConfig
from smc.api.outputs import FinishReason, Output
from smc.api.request import Request
from smc.api.sampling_params import Method
from smc.executor.executor import RoundExecutor
from smc.executor.messages import Worker
from smc.executor.plan import Program
from smc.memory.kv_cache import KVCacheManager
from smc.model.tokenizer import Tokenizer
from smc.scheduler.admission import DuplicateRequest, NoDraft, check_fits, check_queue
from smc.scheduler.decode import MicroBatches, RoundScheduler
from smc.scheduler.detokenizer import StopRules
from smc.scheduler.latency_model import LatencyModel
from smc.scheduler.methods import PROGRAMS, TARGET_ALONE, Decoding, decoding_of, program_of
from smc.scheduler.page_forecast import PageForecast
from smc.scheduler.preemption import Preemption
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.results import ResultReporter
from smc.scheduler.sequence_group import Phase, SequenceGroup
from smc.scheduler.slots import Slots
from smc.scheduler.stats import EngineStats
from smc.scheduler.tree_controller import DraftFallback, TreeController
from smc.scheduler.tree_policy import CostBasedTreePolicy, ParticlePolicy, ShrinkWhenShort, TreePolicy
from smc.stops import TokenBytes
from smc.types import ModelRole


class Engine:
    """Runs requests over two workers. Not thread-safe: one caller submits, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        workers: Mapping[ModelRole, Worker],
        tokenizer: Tokenizer,
        *,
        pair: RoundExecutor,
        pages: dict[ModelRole, int],
        context: int,
        clock: Callable[[], float] = time.monotonic,
        policy: ParticlePolicy | None = None,
        trees: TreePolicy | None = None,
    ) -> None:
        """`workers` are keyed `draft` and `target`; `pages` are the capacities of their pools; `clock` gives seconds;
        `policy` and `trees` decide how many particles requests of SMC have, and rows those of exact decoding."""
        self.config, self.tokenizer, self.context = config, tokenizer, context
        self.workers, self.pair = workers, pair
        self.costs: LatencyModel | None = None
        """What its devices take; None: not timed."""
        self.slots = Slots(config.max_slots, context + config.block + 1, config.chains(tokenizer.size))
        self.memory = KVCacheManager(pages, prefix_cache=config.prefix_cache)
        self.expectation = PageForecast(config, self.slots, self.memory)
        self.starts = PrefillManager(self.expectation, workers, pair, TokenBytes.of(tokenizer))
        trees = trees or CostBasedTreePolicy(config)
        cohorts = {program: self._cohorts_of(program, trees) for program in PROGRAMS}
        self.registry = RequestRegistry(self.slots, self.starts, cohorts)
        self.changes = DraftFallback(self.registry, self.starts)
        self.reports = ResultReporter(self.registry, self.expectation, self.starts.prefixes, clock)
        self.preemption = Preemption(self.registry, self.starts, self.reports, policy or ShrinkWhenShort())
        self._acceptance = cohorts[Program.PAIR].rounds.acceptance
        self._turns = TreeController(trees, self._acceptance, self.changes.go_alone, self.changes.rejoin)
        self._clock = clock
        self._numbers = itertools.count()

    def _cohorts_of(self, program: Program, trees: TreePolicy) -> MicroBatches:
        config, is_pair = self.config, program is Program.PAIR
        branches = (lambda places, context: trees.branches(places, context, self.costs)) if is_pair else None
        rounds = RoundScheduler(
            config, self.slots, self.memory, self.pair, PROGRAMS[program], config.width(self.context), branches
        )
        return MicroBatches(rounds, config.cohorts if is_pair else 1)

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing running, nothing left to report."""
        return not self.registry.groups and not self.reports

    @property
    def num_queued(self) -> int:
        return len(self.registry.queue)

    @property
    def num_running(self) -> int:
        """Requests past their prefill."""
        return self.registry.num_running

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for what this engine could never run or an id in use, QueueFull or NoDraft
        if it must come later."""
        if request.request_id in self.registry.groups:
            raise DuplicateRequest(
                f"request_id={request.request_id!r} is already in use; it must be unique among running requests"
            )
        request = self._with_negative_prompt(request)
        check_fits(request, self.config, self.memory.capacity, self.context, self.tokenizer.size)
        params, decoding = request.params, self._decoding_now(request)
        sizes = {"prompt": len(request.prompt), "negative": request.negative_size}
        expected = self.expectation.pages(decoding, params, rows=decoding.rows(params), **sizes)
        check_queue(expected, self.config, self.registry.queue.waiting, self.registry.queue.pages)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        rules = StopRules(params, self.tokenizer)
        group = SequenceGroup(request, seed, rules, self._clock() - request.waited, next(self._numbers), expected)
        if decoding is not group.decoding:
            group.decode_by(decoding)
        self.registry.add(group)
        self._admit()

    def abort(self, request_id: str) -> bool:
        """End a request, in whatever phase: its slots and pages are free when this returns. False if it is not
        known."""
        group = self.registry.groups.get(request_id)
        if group is None:
            return False
        self.reports.finish(group, FinishReason.CANCELLED)
        return True

    def step(self) -> list[Output]:
        """Advance everything once. Returns what became final: at most one Output per request, in order of
        submission."""
        admitted, queue = self.registry.admitted, self.registry.queue
        for group in self.registry.deadlines.passed(self._clock()):
            if group.answer is None:
                self.reports.finish(group, FinishReason.TIME_BUDGET if group.has_begun else FinishReason.QUEUE_TIME)
        self.expectation.follow(admitted)
        self._admit()
        first = queue.first
        waiting = queue.groups if first is not None and self.starts.lacks_slots(first) else ()
        self._turns.follow(admitted, waiting, self.costs)
        for group in admitted:
            self.starts.grant(group)
        self.starts.ask(beside=self.registry.num_running > 0)
        for cohorts in self.registry.cohorts.values():
            cohorts.advance(self.preemption.provide)
        read = [outcome for cohorts in self.registry.cohorts.values() for outcome in cohorts.rounds.take_read()]
        if self.starts.chunks.measures:
            self.starts.chunks.earn(outcome.spans() for outcome in read)
        self.changes.take_turns()
        for group in self.starts.finish():
            group.begun = self._clock() if group.begun is None else group.begun
            if not group.error and not self.registry.complete(group):
                self.registry.cohorts[group.decoding.program].join(group)
        self.starts.finish_rescoring()
        self.reports.report_all()
        return self.reports.take()

    def run(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Submit all, step until idle, yield what becomes final as it does."""
        for request in requests:
            self.submit(request)
        while not self.idle:
            yield from self.step()

    def forget(self) -> None:
        """What requests so far have shown of acceptance, and what has been counted: they were nobody's."""
        self._acceptance.fade(0.0)
        self.take_stats()

    def resize(self, request_id: str, particles: int) -> None:
        """Let a running SMC request have so many particles from its next round on. Raises ValueError outside of what it
        allows.

        The latest call holds. While another change is under way it waits for that; for a request that has been
        preempted, until it goes on; and for slots, if others have taken them by then. Only a request that has too few
        pages for more particles, although no other could give way, stays as it is."""
        group = self.registry.groups.get(request_id)
        if group is None or not group.has_particles or not group.decoding.records_population:
            raise ValueError(f"request_id={request_id!r} names no running request of method='smc'")
        if not group.params.least_rows <= particles <= group.params.rows:
            raise ValueError(f"particles={particles}; allowed: {group.params.least_rows}..{group.params.rows}")
        if (
            group.phase is Phase.RUNNING
            and (particles - len(group.slots)) * group.params.slots_per_row > self.slots.num_free
        ):
            raise ValueError(f"particles={particles}; {self.slots.num_free} slots are free")
        group.wish = particles
        self.starts.grant(group)

    def detach_draft(self) -> list[str]:
        """The draft is gone, with its keys and values and the rounds in which it took part. Exact decoding goes on by
        the target alone; other requests that need the draft are dropped without an answer: returns their ids. For when
        `step` has raised SideLost, or somebody knows before."""
        self.changes.has_draft = False
        self.reports.report_ended()
        for program in (Program.PAIR, Program.DRAFT):
            self.registry.cohorts[program].abandon()
        dropped = []
        for group in list(self.registry.groups.values()):
            if group.params.method is Method.EXACT:
                self.changes.go_alone(group)
            elif ModelRole.DRAFT in group.decoding.roles:
                self.registry.release(group)
                dropped.append(group.id)
        self.starts.forget(ModelRole.DRAFT)
        self.memory.renew(ModelRole.DRAFT, self.memory.capacity[ModelRole.DRAFT])
        return dropped

    def attach_draft(self, pages: int) -> None:
        """Another draft is there, which holds nothing yet, with so many pages. Requests that went on by the target
        alone rejoin: where costs decide, when they say so."""
        self.memory.renew(ModelRole.DRAFT, pages)
        self.changes.has_draft = True
        for group in self.registry.groups.values():
            if self.costs is None or not group.elastic:
                self.changes.rejoin(group)

    def _with_negative_prompt(self, request: Request) -> Request:
        """The default is the token that begins texts. Raises ValueError where the model has none."""
        if not request.params.guided or request.negative_prompt is not None:
            return request
        if self.tokenizer.start_id is None:
            raise ValueError(
                "guidance_scale is given without negative_prompt, and the model has no token that begins texts; give both"
            )
        return replace(request, negative_prompt=(self.tokenizer.start_id,))

    def _decoding_now(self, request: Request) -> Decoding:
        """How a request that arrives now begins. Raises NoDraft."""
        decoding = decoding_of(request.params)
        if self.changes.has_draft or ModelRole.DRAFT not in decoding.roles:
            return decoding
        if request.params.method is Method.EXACT:
            return TARGET_ALONE
        raise NoDraft(
            f"method={request.params.method.value!r} needs the draft, whose workers were lost and start again; try again later"
        )

    def take_stats(self) -> EngineStats:
        """The state now, and what happened since the last call."""
        of_pair, alone = (self.registry.cohorts[program].rounds for program in (Program.PAIR, Program.TARGET))
        stats, of_pair.stats = of_pair.stats, EngineStats()
        stats.spec_alone_rounds, alone.stats = alone.stats.spec_alone_rounds, EngineStats()
        memory = self.memory
        stats.queued, stats.running = self.registry.queue.waiting, len(self.registry.admitted)
        stats.slots_free = self.slots.num_free
        stats.pages_total = dict(memory.capacity)
        stats.pages_used = {role: memory.held(role) for role in memory.capacity}
        stats.pages_cached = {role: cache.pages for role, cache in memory.caches.items()}
        counts = {role: cache.take_counts() for role, cache in memory.caches.items()}
        stats.prefix_queries = {role: queried for role, (queried, _) in counts.items()}
        stats.prefix_hits = {role: hits for role, (_, hits) in counts.items()}
        stats.preemptions, stats.shrinks = self.registry.take_preemptions(), self.preemption.take_shrinks()
        if not self.registry.groups:
            stats.pages_leaked = memory.leaked()
        return stats

    def rounds_of(self, method: Method) -> RoundScheduler:
        """What advances the groups of a method, for whoever times rounds."""
        return self.registry.cohorts[program_of(method)].rounds

    def check_books(self) -> None:
        """When idle, all but what is cached must be free again. Raises AssertionError otherwise."""
        assert (
            self.idle
            and not self.registry.queue.waiting
            and not self.registry.queue.pages
            and not self.registry.admitted
        ), "requests are still waiting or running"
        assert not any(self.memory.expected.values()), f"pages still expected: {self.memory.expected}"
        assert self.slots.num_free == self.config.max_slots, "slots still claimed"
        assert self.slots.num_free_chains == self.slots.chains, "places for laws still claimed"
        assert not self.starts.stops.used, "stop machines still claimed"
        self.memory.check()
        assert not any(leaked := self.memory.leaked().values()), f"KV pages held although nothing runs: {leaked}"

    def _admit(self) -> None:
        """Strictly in order: a large request at the head is not overtaken until it fits. One that was preempted comes
        first."""
        while (group := self.registry.queue.first) is not None:
            self._turns.begin(
                group, self.registry.admitted, self.slots.num_free // len(self.registry.queue), self.costs
            )
            if not self.registry.admit(group):
                break
            group.taken_up = self._clock() if group.taken_up is None else group.taken_up
