"""The engine: continuous batching of requests, from submission to the final draw. It alone decides when each request
runs.

    submit -> queue -> admit (slots and pages) -> prefill (once per model, in chunks) -> rounds -> final draw

One `step` advances everything once: it schedules a chunk of prompts and a round of all running requests, and processes
the results of earlier ones. The engine talks to two workers, which run prompts, and to the executor of rounds
(smc/executor). They may live in this process, in other processes or on other machines."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Output, Request
from smc.constraints import Compiler
from smc.executor.messages import Pending, Worker
from smc.executor.round_executor import RoundExecutor, RoundReports
from smc.memory.kv_cache import KVCacheManager
from smc.model.tokenizer import Tokenizer
from smc.potentials import Potential, load_potentials
from smc.scheduler.admission import DuplicateRequest, NoDraft, check_queue
from smc.scheduler.capacity import PageForecast, check_fits
from smc.scheduler.decode import RoundScheduler
from smc.scheduler.detokenizer import StopRules
from smc.scheduler.mask_turns import MaskTurns
from smc.scheduler.methods import RULES_OF_ROUNDS, DecodingRules, rules_of
from smc.scheduler.planner import DraftSize
from smc.scheduler.potential_calls import PotentialCalls
from smc.scheduler.preemption import Preemption
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.prefix_reuse import HeldBlocks
from smc.scheduler.preparation import Preparation
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.results import ResultReporter
from smc.scheduler.round_overhead import RoundOverhead
from smc.scheduler.sequence_group import RequestState, SequenceGroup
from smc.scheduler.slots import Slots
from smc.scheduler.speculation import LatencyModel
from smc.scheduler.stats import EngineStats
from smc.scheduler.tree_policy import DraftFallback, LatencyTreePolicy, TreeController
from smc.types import BOTH_MODELS, Decoding, ModelRole

NO_POTENTIALS: Mapping[str, Potential] = MappingProxyType({})

COMPANY = 8
"""Requests in rounds from which a new request waits for them, not they for it: a step takes it in after it has launched
rounds, and does not wait for the first tokens of its prompts. Either costs a new request a round; the other way the
host would keep all of them waiting."""


class Engine:
    """Runs requests over two workers. Not thread-safe: one caller submits, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        workers: Mapping[ModelRole, Worker],
        tokenizer: Tokenizer,
        *,
        executor: RoundExecutor,
        pages: dict[ModelRole, int],
        context: int,
        clock: Callable[[], float] = time.monotonic,
        trees: LatencyTreePolicy | None = None,
        constraints: Compiler | None = None,
        potentials: Mapping[str, Potential] = NO_POTENTIALS,
    ) -> None:
        """`pages`: capacities of both pools. `clock`: time in seconds. `trees`: decides the number of rows of exact
        decoding. `constraints`: checks the constraints of requests, if they have not been checked before. `potentials`:
        those that requests may name, besides those of `config`. Raises ValueError if a potential cannot be
        imported."""
        self.config, self.tokenizer, self.context = config, tokenizer, context
        self._constraints = constraints
        self.workers, self.executor = workers, executor
        self._overhead = RoundOverhead(lookahead=config.lookahead)
        self.slots = Slots(config.max_slots, context + config.block + 1, config.chains(tokenizer.size))
        self.memory = KVCacheManager(pages, prefix_cache=config.prefix_cache)
        self.forecast = PageForecast(config, self.slots, self.memory)
        self.prefill = PrefillManager(config, self.slots, self.memory, self.forecast, workers, executor)
        self._preparation = Preparation(workers)
        self._turns = MaskTurns()
        rounds = {roles: self._round_scheduler(roles) for roles in RULES_OF_ROUNDS}
        self.registry = RequestRegistry(self.slots, self.prefill, rounds)
        self.fallback = DraftFallback(self.registry, self.prefill, self._preparation)
        known = dict(load_potentials(config.potentials)) | dict(potentials)
        self.potentials = PotentialCalls(known, config.potential_timeout, self.slots)
        self.results = ResultReporter(self.registry, self.prefill, self.forecast, clock, constraints, workers)
        self.preemption = Preemption(self.registry, self.prefill, self.results)
        self.trees = TreeController(
            trees or LatencyTreePolicy(config),
            rounds[BOTH_MODELS].acceptance,
            self.fallback,
            lookahead=config.lookahead,
        )
        self._clock = clock
        self._numbers = itertools.count()
        self._held_blocks = HeldBlocks()

    def _round_scheduler(self, roles: tuple[ModelRole, ...]) -> RoundScheduler:
        config, is_pair = self.config, roles == BOTH_MODELS

        def decide(groups: Sequence[SequenceGroup], rows: int, context: int) -> DraftSize:
            return self.trees.draft_size(groups, rows, context, self.latency)

        return RoundScheduler(
            config,
            self.slots,
            self.memory,
            self.executor,
            RULES_OF_ROUNDS[roles],
            width=config.width(self.context),
            micro_batches=config.micro_batches if is_pair else 1,
            turns=self._turns,
            decide=decide if is_pair else None,
        )

    @property
    def latency(self) -> LatencyModel | None:
        """Times of steps and passes on the engine's devices; None: not measured. The overhead of a round is that of
        `RoundOverhead`: 0 at first, whatever was measured."""
        return self._overhead.latency

    @latency.setter
    def latency(self, measured: LatencyModel | None) -> None:
        self._overhead.begin(measured)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or left to report."""
        return not self.registry.groups and not self.results

    @property
    def num_queued(self) -> int:
        return len(self.registry.queue)

    @property
    def num_running(self) -> int:
        """Number of requests past their prefill."""
        return self.registry.num_running

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError if this engine could never run it or if its id is in use; QueueFull or
        NoDraft if it may be submitted again later."""
        if request.request_id in self.registry.groups:
            raise DuplicateRequest(
                f"request_id={request.request_id!r} is already in use; it must be unique among running requests"
            )
        if request.params.constraint is not None and self._constraints is not None:
            self._constraints.check(request.params.constraint)
        if request.params.potential is not None:
            self.potentials.check(request.params.potential)
        request = self._with_negative_prompt(request)
        check_fits(request, self.config, self.memory.capacity, self.context, self.tokenizer.size)
        params, rules = request.params, self._rules_now(request)
        sizes = {"prompt": len(request.prompt), "negative": request.negative_size}
        expected = self.forecast.pages(rules, params, rows=rules.rows(params), **sizes)
        check_queue(expected, self.config, len(self.registry.queue), self.registry.queue.pages)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        stop_rules = StopRules(params, self.tokenizer)
        group = SequenceGroup(request, seed, stop_rules, self._clock() - request.waited, next(self._numbers), expected)
        if rules is not group.rules:
            group.choose(rules)
        if request.confirmed:
            group.resume()
        self.registry.add(group, held=not self._preparation.is_ready(group))
        self._admit()

    def abort(self, request_id: str) -> bool:
        """End a request in any state; its slots and pages are free when this returns. Return False if the id is
        unknown."""
        group = self.registry.groups.get(request_id)
        if group is None:
            return False
        self.results.finish(group, FinishReason.CANCELLED)
        return True

    def drop(self, request_id: str) -> None:
        """End a request in any state without an output; unknown ids are ignored. For one that could not be
        submitted."""
        if (group := self.registry.groups.get(request_id)) is not None:
            self.registry.release(group)

    def step(self, submit: Callable[[], object] | None = None) -> list[Output]:
        """Advance everything once. Return new final output: at most one Output per request, in order of submission.

        `submit` is called once, to submit requests, unless the step fails before: while rounds run if they have enough
        requests (`COMPANY`), otherwise at the beginning. It must not raise."""
        if submit is not None and not self._has_company:
            submit()
            submit = None
        self._end_expired()
        self.forecast.follow(self.registry.admitted)
        self._preparation.follow(self.registry.queue, beside=bool(self.registry.admitted))
        self._admit()
        beside_prompts = self._schedule_prefill()
        rounds = self._run_decode_step(submit)
        self._overhead.follow(rounds, beside_prompts=beside_prompts)
        self._process_results(rounds)
        return self.results.take()

    def _end_expired(self) -> None:
        """Finish requests whose time budget is used up."""
        for group in self.registry.deadlines.passed(self._clock()):
            if group.state is not RequestState.RESCORING:
                self.results.finish(group, FinishReason.TIME_BUDGET if group.has_begun else FinishReason.QUEUE_TIME)

    def _admit(self) -> None:
        """Admit queued requests strictly in order: a large request at the head is not overtaken until it fits. Requests
        that were preempted come first."""
        self.prefill.admit_rescoring()
        while (group := self.registry.queue.first) is not None:
            if not self._preparation.is_kept(group):
                self.registry.queue.hold_back(group)
                continue
            self.trees.begin(
                group, self.registry.admitted, self.slots.num_free // len(self.registry.queue.groups), self.latency
            )
            if not self.registry.admit(group, self._clock()):
                break

    def _schedule_prefill(self) -> bool:
        """Schedule a chunk of prompts, after the pending changes of running requests. Return whether there was
        one."""
        admitted, queue = self.registry.admitted, self.registry.queue
        first = queue.first
        waiting = queue.groups if first is not None and self.prefill.lacks_slots(first) else ()
        self.trees.follow(admitted, waiting, self.latency)
        for group in admitted:
            self.prefill.grant(group)
        return self.prefill.schedule(self.registry.num_running)

    @property
    def _has_company(self) -> bool:
        return self.executor.pipelined and self.registry.num_running >= COMPANY

    def _run_decode_step(self, submit: Callable[[], object] | None) -> list[Pending[RoundReports]]:
        """Launch rounds of all running requests. Return the rounds whose results were read."""
        every, found = self.registry.rounds.values(), []
        self._turns.begin_step(group for rounds in every for group in rounds.constrained())
        for rounds in every:
            launched = rounds.launch(self.preemption.allocate)
            if launched and submit is not None:
                submit()
                submit = None
            found += rounds.read(launched)
        if submit is not None:
            submit()
        return found

    def _process_results(self, rounds: list[Pending[RoundReports]]) -> None:
        self.prefill.budget.accrue(rounds)
        self.fallback.apply_switches()
        for group in self.prefill.finish(self._clock, later=self._has_company):
            self.registry.run(group)
        for group in self.potentials.follow(self.registry.admitted):
            self.registry.redraw(group)
        self.results.report_all()

    def run(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Submit all requests, step until idle, and yield outputs as they become final."""
        for request in requests:
            self.submit(request)
        while not self.idle:
            yield from self.step()

    def forget(self) -> None:
        """Discard measurements and counters of warm-up requests: acceptance, draft exponents, statistics."""
        self.trees.forget()
        for rounds in self.registry.rounds.values():
            rounds.exponents.forget()
        self.take_stats()

    def resize(self, request_id: str, particles: int) -> None:
        """Change the number of particles of a running SMC request from its next round on. Raises ValueError for a
        number outside of what the request allows.

        The latest call replaces earlier ones. The change waits while another one is under way, while the request is
        preempted, and while other requests hold the slots. It is dropped only if the request has too few pages for more
        particles and no other request could be preempted."""
        group = self.registry.groups.get(request_id)
        if group is None or not group.has_particles or not group.rules.resizable:
            raise ValueError(f"request_id={request_id!r} names no running request of method='smc'")
        if not group.params.least_rows <= particles <= group.params.rows:
            raise ValueError(f"particles={particles}; allowed: {group.params.least_rows}..{group.params.rows}")
        if group.is_running and (particles - len(group.slots)) * group.params.slots_per_row > self.slots.num_free:
            raise ValueError(f"particles={particles}; {self.slots.num_free} slots are free")
        group.request_rows(particles)
        self.prefill.grant(group)

    def detach_draft(self) -> list[str]:
        """Continue without the draft after its loss: its keys and values, and the rounds in which it took part, are
        gone. Exact decoding falls back to the target; other requests that need the draft are dropped without an answer.
        Return the ids of the dropped requests. Called after `step` has raised ModelLost, or when the loss is known
        earlier."""
        self.fallback.has_draft = False
        self.results.report_ended()
        for roles in (BOTH_MODELS, Decoding.DRAFT.roles):
            self.registry.rounds[roles].abandon()
        dropped = []
        for group in list(self.registry.groups.values()):
            if group.state is RequestState.RESCORING:
                continue
            if group.requested.without_draft is None:
                self.registry.release(group)
                dropped.append(group.id)
            elif group.requested.without_draft is not group.requested:
                self.fallback.fall_back(group)
        self.prefill.forget(ModelRole.DRAFT)
        self.memory.renew(ModelRole.DRAFT, self.memory.capacity[ModelRole.DRAFT])
        return dropped

    def attach_draft(self, pages: int) -> None:
        """Use a new draft, which holds no keys and values yet and has room for `pages` pages. Requests that fell back
        to the target get a draft again: at once, or when drafting pays if the latency model decides for them."""
        self.memory.renew(ModelRole.DRAFT, pages)
        self.fallback.has_draft = True
        for group in self.registry.groups.values():
            if group.state is not RequestState.RESCORING and (self.latency is None or not group.adaptive):
                self.fallback.reenable_draft(group)

    def _with_negative_prompt(self, request: Request) -> Request:
        """Complete a guided request: the default negative prompt is the token that begins texts. Raises ValueError if
        the model has no such token."""
        if not request.params.guided or request.negative_prompt is not None:
            return request
        if self.tokenizer.start_id is None:
            raise ValueError(
                "guidance_scale is given without negative_prompt, and the model has no token that begins texts; "
                "give both"
            )
        return replace(request, negative_prompt=(self.tokenizer.start_id,))

    def _rules_now(self, request: Request) -> DecodingRules:
        """Return how a request that arrives now begins. Raises NoDraft if it needs the lost draft."""
        rules = rules_of(request.params)
        if self.fallback.has_draft:
            return rules
        if rules.without_draft is None:
            raise NoDraft(
                f"method={request.params.method.value!r} needs the draft, whose workers were lost and start again; "
                "try again later"
            )
        return rules.without_draft

    def take_stats(self) -> EngineStats:
        """Return the current state, and the counters since the last call."""
        stats = self.registry.rounds[BOTH_MODELS].take_stats()
        for decoding in (Decoding.TARGET, Decoding.DRAFT):
            alone = self.registry.rounds[decoding.roles].take_stats()
            stats.exact_alone_rounds += alone.exact_alone_rounds
            stats.mask_seconds += alone.mask_seconds
        memory = self.memory
        stats.potentials = self.potentials.take_stats()
        stats.collapses += stats.potentials.collapses
        stats.queued = len(self.registry.queue)
        stats.running = len(self.registry.admitted) + self.prefill.num_rescoring
        stats.slots_free = self.slots.num_free
        stats.pages_total = dict(memory.capacity)
        stats.numerics = {role: worker.numerics for role, worker in self.workers.items()}
        stats.pages_used = {role: memory.held(role) for role in memory.capacity}
        running = [group for group in self.registry.admitted if group.is_running]
        stats.pages_cached = self._held_blocks.only_cached(running, memory)
        counts = {role: cache.take_counts() for role, cache in memory.caches.items()}
        stats.prefix_queries = {role: queried for role, (queried, _) in counts.items()}
        stats.prefix_hits = {role: hits for role, (_, hits) in counts.items()}
        stats.preemptions, stats.shrinks = self.registry.take_preemptions(), self.preemption.take_shrinks()
        if not self.registry.groups:
            stats.pages_leaked = memory.leaked()
        return stats

    def rounds_of(self, decoding: Decoding) -> RoundScheduler:
        """Return the scheduler of the rounds of requests that are decoded in this way, for timing."""
        return self.registry.rounds[decoding.roles]

    def check_books(self) -> None:
        """Check that an idle engine has freed everything except the prefix cache. Raises AssertionError otherwise."""
        assert self.idle and not self.num_queued and not self.registry.queue.pages and not self.registry.admitted, (
            "requests are still waiting or running"
        )
        assert not any(self.memory.expected.values()), f"pages still expected: {self.memory.expected}"
        assert self.slots.num_free == self.config.max_slots, "slots still claimed"
        assert self.slots.num_free_chains == self.slots.chains, "distributions of chains still stored"
        assert not self.prefill.stops.used, "stop entries still claimed"
        self.memory.check()
        assert not any(leaked := self.memory.leaked().values()), f"KV pages held although nothing runs: {leaked}"
