"""The scheduler: continuous batching of requests, from submission to the final draw. It alone says who is decoded when.

    submit -> queue -> admit (slots and pages) -> prompt (once per model, in chunks) -> first tokens -> rounds -> final draw

One `step` advances everything once: a chunk of prompts is asked for, a round of all running groups is asked for, and what came of
earlier ones is read. What it talks to are two workers, which run prompts, and the pair that runs rounds (smc/runtime); whether they
live here, in other processes or on other machines is not its business.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter, itemgetter

import numpy as np

from smc.engine.admission import DuplicateRequest, NoDraft, check_fits, check_queue
from smc.engine.answers import draw_answer, make_answer
from smc.engine.cohorts import Cohorts
from smc.engine.companions import Pages
from smc.engine.costs import Costs
from smc.engine.drafting import CostsDecide
from smc.engine.expectation import Expectation
from smc.engine.group import Group, Phase
from smc.engine.memory import Memory
from smc.engine.methods import PROGRAMS, TARGET_ALONE, Decoding, decoding_of, program_of
from smc.engine.outputs import Answer, FinishReason, Output
from smc.engine.policy import ParticlePolicy, ShrinkWhenShort, TreePolicy
from smc.engine.queue import Deadlines, Queue
from smc.engine.records import particle_of, shrink_saved
from smc.engine.request import Request
from smc.engine.rounds import Rounds
from smc.engine.sampling_params import Method
from smc.engine.slots import Slots
from smc.engine.starts import Starts
from smc.engine.stats import EngineStats
from smc.engine.text import StopRules
from smc.engine.turns import Turns
from smc.kv.pages import OutOfPages
from smc.models.tokenizer import Tokenizer
from smc.runtime.config import EngineConfig
from smc.runtime.messages import COMPANIONS, Worker
from smc.runtime.pair import Pair
from smc.runtime.plan import Program
from smc.stops import TokenBytes

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests over two workers. Not thread-safe: one caller submits, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        workers: Mapping[str, Worker],
        tokenizer: Tokenizer,
        *,
        pair: Pair,
        pages: dict[str, int],
        context: int,
        clock: Callable[[], float] = time.monotonic,
        policy: ParticlePolicy | None = None,
        trees: TreePolicy | None = None,
    ) -> None:
        """`workers` are keyed `draft` and `target`; `pages` are the capacities of their pools; `clock` gives seconds; `policy` and `trees`
        decide how many particles requests of SMC have, and rows those of exact decoding."""
        self.config, self.tokenizer, self.context = config, tokenizer, context
        self.workers, self.pair = workers, pair
        self.costs: Costs | None = None
        """What its devices take; None: not timed."""
        self.slots = Slots(config.max_slots, context + config.block + 1, config.chains(tokenizer.size))
        self.memory = Memory(pages, prefix_cache=config.prefix_cache)
        self.expectation = Expectation(config, self.slots, self.memory)
        self.starts = Starts(self.expectation, workers, pair, TokenBytes.of(tokenizer))
        self._policy, trees = policy or ShrinkWhenShort(), trees or CostsDecide(config)
        self._cohorts = {program: self._cohorts_of(program, trees) for program in PROGRAMS}
        self._acceptance = self._cohorts[Program.PAIR].rounds.acceptance
        self._turns = Turns(trees, self._acceptance, self.go_alone, self.rejoin)
        self._clock = clock
        self._groups: dict[str, Group] = {}
        """All, by the ids of their requests."""
        self._queue = Queue()
        self._admitted: list[Group] = []
        """Groups that hold slots and pages, oldest first."""
        self._deadlines = Deadlines()
        self._ready: list[tuple[int, Output]] = []
        """With the numbers of their groups."""
        self._numbers = itertools.count()
        self._preemptions = self._shrinks = 0
        self._has_draft = True

    def _cohorts_of(self, program: Program, trees: TreePolicy) -> Cohorts:
        config, is_pair = self.config, program is Program.PAIR
        branches = (lambda places, context: trees.branches(places, context, self.costs)) if is_pair else None
        rounds = Rounds(config, self.slots, self.memory, self.pair, PROGRAMS[program], config.width(self.context), branches)
        return Cohorts(rounds, config.cohorts if is_pair else 1)

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing running, nothing left to report."""
        return not self._groups and not self._ready

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests past their prefill."""
        return sum(group.phase is Phase.RUNNING for group in self._admitted)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for what this engine could never run or an id in use, QueueFull or NoDraft if it must come
        later."""
        if request.request_id in self._groups:
            raise DuplicateRequest(f"request_id={request.request_id!r} is already in use; it must be unique among running requests")
        request = self._with_negative_prompt(request)
        check_fits(request, self.config, self.memory.capacity, self.context, self.tokenizer.size)
        params, decoding = request.params, self._decoding_now(request)
        sizes = {"prompt": len(request.prompt), "negative": request.negative_size}
        expected = self.expectation.pages(decoding, params, rows=decoding.rows(params), **sizes)
        check_queue(expected, self.config, self._queue.waiting, self._queue.pages)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        rules = StopRules(params, self.tokenizer)
        group = Group(request, seed, rules, self._clock() - request.waited, next(self._numbers), expected)
        if decoding is not group.decoding:
            group.decode_by(decoding)
        self._groups[group.id] = group
        self._deadlines.add(group)
        self._queue.push(group)
        self._admit()

    def abort(self, request_id: str) -> bool:
        """End a request, in whatever phase: its slots and pages are free when this returns. False if it is not known."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._finish(group, FinishReason.CANCELLED)
        return True

    def step(self) -> list[Output]:
        """Advance everything once. Returns what became final: at most one Output per request, in order of submission."""
        for group in self._deadlines.passed(self._clock()):
            if group.answer is None:
                self._finish(group, FinishReason.TIME_BUDGET if group.has_begun else FinishReason.QUEUE_TIME)
        self.expectation.follow(self._admitted)
        self._admit()
        first = self._queue.first
        waiting = self._queue.groups if first is not None and self.starts.lacks_slots(first) else ()
        self._turns.follow(self._admitted, waiting, self.costs)
        for group in self._admitted:
            self.starts.grant(group)
        self.starts.ask(beside=self.num_running > 0)
        for cohorts in self._cohorts.values():
            cohorts.advance(self._provide)
        read = [outcome for cohorts in self._cohorts.values() for outcome in cohorts.rounds.take_read()]
        if self.starts.chunks.measures:
            self.starts.chunks.earn(outcome.spans() for outcome in read)
        for group in [group for group in self._admitted if group.turn is not None]:
            self._take_turn(group)
        for group in self.starts.finish():
            group.begun = self._clock() if group.begun is None else group.begun
            if not group.error and not self._complete(group):
                self._cohorts[group.decoding.program].join(group)
        self.starts.finish_rescoring()
        for group in list(self._admitted):
            self._report_alone(group)
        ready, self._ready = self._ready, []
        return [output for _, output in sorted(ready, key=itemgetter(0))]

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
        """Let a running SMC request have so many particles from its next round on. Raises ValueError outside of what it allows.

        The latest call holds. While another change is under way it waits for that; for a request that has been preempted, until it goes
        on; and for slots, if others have taken them by then. Only a request that has too few pages for more particles, although no other
        could give way, stays as it is.
        """
        group = self._groups.get(request_id)
        if group is None or not group.has_particles or not group.decoding.records_population:
            raise ValueError(f"request_id={request_id!r} names no running request of method='smc'")
        if not group.params.least_rows <= particles <= group.params.rows:
            raise ValueError(f"particles={particles}; allowed: {group.params.least_rows}..{group.params.rows}")
        if group.phase is Phase.RUNNING and (particles - len(group.slots)) * group.params.slots_per_row > self.slots.num_free:
            raise ValueError(f"particles={particles}; {self.slots.num_free} slots are free")
        group.wish = particles
        self.starts.grant(group)

    def go_alone(self, group: Group) -> None:
        """From now on the target decodes a request of method `exact` by itself, whatever phase it is in. Nothing more is asked of the draft
        for it; rounds of both models that are under way are not waited for, and count for nothing."""
        group.turn = None
        if group.alone or group.error:
            return
        if group.phase is Phase.RUNNING:
            self._change(group, TARGET_ALONE, 1)
        elif group.phase is Phase.PREFILL:
            self.starts.go_alone(group, TARGET_ALONE)
        else:
            group.decode_by(TARGET_ALONE)
            group.needs = None

    def rejoin(self, group: Group, rows: int | None = None) -> None:
        """The opposite: as soon as no round of it is under way, the draft runs what it lacks, and the request takes part in rounds of the
        pair again, with so many rows or all it may have. Where there are not enough slots or pages for that, or no draft, it stays as it
        is."""
        if not self._has_draft or group.answer is not None or not self._fits_pair(group):
            return
        rows = rows or group.most_rows
        if group.alone and group.phase is not Phase.QUEUED:
            group.turn = rows
        elif group.alone:
            group.decode_by(decoding_of(group.params), rows)
            group.needs = None

    def _fits_pair(self, group: Group) -> bool:
        """Another draft may have fewer pages than the one that a request was let in with."""
        needs = decoding_of(group.params).most_pages(self.config, group.params, group.prompt_size, negative=group.negative_size)
        return all(pages <= self.memory.capacity[side] for side, pages in needs.items())

    def detach_draft(self) -> list[str]:
        """The draft is gone, with its keys and values and the rounds in which it took part. Exact decoding goes on by the target alone;
        other requests that need the draft are dropped without an answer: returns their ids. For when `step` has raised SideLost, or
        somebody knows before."""
        self._has_draft = False
        self._report_ended()
        for program in (Program.PAIR, Program.DRAFT):
            self._cohorts[program].abandon()
        dropped = []
        for group in list(self._groups.values()):
            if group.params.method is Method.EXACT:
                self.go_alone(group)
            elif "draft" in group.decoding.sides:
                self._release(group)
                dropped.append(group.id)
        self.starts.forget("draft")
        self.memory.renew("draft", self.memory.capacity["draft"])
        return dropped

    def attach_draft(self, pages: int) -> None:
        """Another draft is there, which holds nothing yet, with so many pages. Requests that went on by the target alone rejoin: where
        costs decide, when they say so."""
        self.memory.renew("draft", pages)
        self._has_draft = True
        for group in self._groups.values():
            if self.costs is None or not group.elastic:
                self.rejoin(group)

    def _with_negative_prompt(self, request: Request) -> Request:
        """The default is the token that begins texts. Raises ValueError where the model has none."""
        if not request.params.guided or request.negative_prompt is not None:
            return request
        if self.tokenizer.start_id is None:
            raise ValueError("guidance_scale is given without negative_prompt, and the model has no token that begins texts; give both")
        return replace(request, negative_prompt=(self.tokenizer.start_id,))

    def _decoding_now(self, request: Request) -> Decoding:
        """How a request that arrives now begins. Raises NoDraft."""
        decoding = decoding_of(request.params)
        if self._has_draft or "draft" not in decoding.sides:
            return decoding
        if request.params.method is Method.EXACT:
            return TARGET_ALONE
        raise NoDraft(f"method={request.params.method.value!r} needs the draft, whose workers were lost and start again; try again later")

    def take_stats(self) -> EngineStats:
        """The state now, and what happened since the last call."""
        of_pair, alone = (self._cohorts[program].rounds for program in (Program.PAIR, Program.TARGET))
        stats, of_pair.stats = of_pair.stats, EngineStats()
        stats.spec_alone_rounds, alone.stats = alone.stats.spec_alone_rounds, EngineStats()
        memory = self.memory
        stats.queued, stats.running = self._queue.waiting, len(self._admitted)
        stats.slots_free = self.slots.num_free
        stats.pages_total = dict(memory.capacity)
        stats.pages_used = {side: memory.held(side) for side in memory.capacity}
        stats.pages_cached = {side: cache.pages for side, cache in memory.caches.items()}
        counts = {side: cache.take_counts() for side, cache in memory.caches.items()}
        stats.prefix_queries = {side: queried for side, (queried, _) in counts.items()}
        stats.prefix_hits = {side: hits for side, (_, hits) in counts.items()}
        stats.preemptions, self._preemptions = self._preemptions, 0
        stats.shrinks, self._shrinks = self._shrinks, 0
        if not self._groups:
            stats.pages_leaked = memory.leaked()
        return stats

    def rounds_of(self, method: Method) -> Rounds:
        """What advances the groups of a method, for whoever times rounds."""
        return self._cohorts[program_of(method)].rounds

    def check_books(self) -> None:
        """When idle, all but what is cached must be free again. Raises AssertionError otherwise."""
        assert self.idle and not self._queue.waiting and not self._queue.pages and not self._admitted, (
            "requests are still waiting or running"
        )
        assert not any(self.memory.expected.values()), f"pages still expected: {self.memory.expected}"
        assert self.slots.num_free == self.config.max_slots, "slots still claimed"
        assert self.slots.num_free_chains == self.slots.chains, "places for laws still claimed"
        assert not self.starts.stops.used, "stop machines still claimed"
        self.memory.check()
        assert not any(leaked := self.memory.leaked().values()), f"KV pages held although nothing runs: {leaked}"

    def _admit(self) -> None:
        """Strictly in order: a large request at the head is not overtaken until it fits. One that was preempted comes first."""
        while (group := self._queue.first) is not None:
            self._turns.begin(group, self._admitted, self.slots.num_free // len(self._queue), self.costs)
            if not self.starts.admit(group):
                break
            self._queue.remove(group)
            group.taken_up = self._clock() if group.taken_up is None else group.taken_up
            insort(self._admitted, group, key=attrgetter("number"))

    def _provide(self, wanting: list[Group]) -> list[tuple[Group, Pages]]:
        """Pages for a round of each group, oldest first. Who gets none is left out; if nobody could go on then, somebody gives way."""
        wanting = sorted(wanting, key=attrgetter("number"))
        given = self._give(wanting)
        while len(given) < len(wanting) and (self._report_ended() or (not given and self._make_room(wanting[0]))):
            wanting = [group for group in wanting if group in self._admitted]
            left_out = [group for group in wanting if group not in [g for g, _ in given]]
            given += self._give(left_out)
        if len(given) < len(wanting):
            for group, _ in given:
                self._shrink(group)
        return given

    def _give(self, wanting: list[Group]) -> list[tuple[Group, Pages]]:
        given = [(group, self._pages_of_round(group)) for group in wanting]
        return [(group, pages) for group, pages in given if pages is not None]

    def _pages_of_round(self, group: Group) -> Pages | None:
        try:
            pages = self.memory.allocate(self._round_pages(group))
        except OutOfPages:
            return None
        for side in set(pages) & set(group.params.guided_sides):
            pages[side], pages[COMPANIONS[side]] = np.split(pages[side], 2)
        return pages

    def _round_pages(self, group: Group) -> dict[str, int]:
        return group.decoding.round_pages(self.config, len(group.slots), group.params.guided_sides)

    def _shrink(self, group: Group) -> None:
        """In the round that is about to be asked for, as far as the policy wants it."""
        if group.decoding.records_population and group.wanted is None:
            wanted = self._policy.wanted(group, short=True)
            if wanted < group.count:
                self.starts.resize(group, wanted)
                self._shrinks += 1

    def _report_ended(self) -> bool:
        """Finish what has ended in this step already, lest it is made to give way. True if anything has."""
        ended = [group for group in self._admitted if group.error or (group.phase is Phase.RUNNING and self._complete(group))]
        for group in ended:
            self._report(group)
        return bool(ended)

    def _make_room(self, first: Group) -> bool:
        """Nothing is on its way that would free pages, and not even the first group has enough: the youngest of those that hold pages
        where they are short gives up its own. False: something is, or there are older ones, which are not ready for a round yet."""
        if any(group.in_flight for group in self._admitted):
            return False
        short = self.memory.short(self._round_pages(first))
        *older, youngest = (group for group in self._admitted if set(short) & set(group.decoding.sides))
        if youngest is first and older:
            return False
        # One that was about to have more particles gives that up with its slots.
        grows = len(youngest.slots) > youngest.count
        self._preempt(youngest)
        if youngest is first:
            # Nobody is left who could give way, so it may not try again.
            first.wish = None
        if youngest is first and not grows:
            wanted = max(first.params.least_rows, first.count // 2)
            assert wanted < first.count, "a request alone has too few pages"
            shrink_saved(first, wanted)
            first.most_rows = wanted
            self._shrinks += 1
        return True

    def _preempt(self, group: Group) -> None:
        if group.phase is Phase.RUNNING:
            self._cohorts[group.decoding.program].leave(group)
            self.starts.preempt(group)
        else:
            self.starts.give_up(group)
            group.phase = Phase.QUEUED
        self._admitted.remove(group)
        self._queue.push(group)
        group.tally.preemptions += 1
        self._preemptions += 1

    def _take_turn(self, group: Group) -> None:
        if group.phase is Phase.RUNNING and not group.in_flight:
            self._change(group, *group.turned)
            group.turn = None

    def _change(self, group: Group, decoding: Decoding, rows: int) -> None:
        rounds = self._cohorts[group.decoding.program]
        if not group.error and not self._complete(group) and self.starts.change(group, decoding, rows):
            rounds.leave(group)

    def _complete(self, group: Group) -> bool:
        return bool(self.slots.ended_S[group.slots].all()) and not self.slots.unscored(group.slots).any()

    def _report(self, group: Group) -> None:
        """Stream what became common to all particles; finish what is complete or failed."""
        if group.error:
            self._finish(group, FinishReason.ERROR)
        elif group.answer is not None and group.top_logprobs is not None:
            self._answer(group, replace(group.answer, top_logprobs=group.top_logprobs))
        elif group.phase is Phase.RUNNING and self._complete(group):
            self._finish(group, None)
        elif group.phase is Phase.RUNNING and group.committed > group.streamed:
            new = tuple(self.slots.tokens_SL[group.slots[0], group.streamed : group.committed].tolist())
            group.streamed = group.committed
            self._ready.append((group.number, Output(group.id, new, group.stream.push(new))))

    def _report_alone(self, group: Group) -> None:
        """An error in what is this request's alone ends this request alone."""
        try:
            self._report(group)
        except Exception as error:
            if group.error or group.id not in self._groups:
                raise
            logger.exception("request %s failed", group.id)
            group.error = f"an error of the engine ({type(error).__name__}); its log has the details"
            self._finish(group, FinishReason.ERROR)

    def _finish(self, group: Group, reason: FinishReason | None) -> None:
        """The final draw, the last Output, and everything the group held given back. `reason` None: it is complete. An answer that is asked
        for with what else could have stood there is rescored first."""
        particle, tokens = draw_answer(group, self.slots, reason)
        if reason is None:
            self.starts.prefixes.remember_answer(group, particle, tokens)
            self.expectation.learn_answer(len(tokens) / group.params.max_tokens)
        elif group.error:
            self.starts.prefixes.forget_prompt(group)
        answer = make_answer(group, self.slots, reason, particle, tokens)
        if tokens and group.params.top_logprobs and reason in (None, FinishReason.TIME_BUDGET):
            record = particle_of(group, self.slots, particle, len(tokens))
            self._withdraw(group)
            group.rescore(answer, record)
            self._queue.push(group)
        else:
            self._answer(group, answer)

    def _answer(self, group: Group, answer: Answer) -> None:
        now = self._clock()
        answer = replace(answer, seconds=now - group.submitted, times=group.times(now))
        self._ready.append((group.number, Output(group.id, answer.tokens[group.streamed :], group.stream.finish(answer.text), answer)))
        self._release(group)

    def _release(self, group: Group) -> None:
        self._withdraw(group)
        self._deadlines.remove(group)
        del self._groups[group.id]

    def _withdraw(self, group: Group) -> None:
        """It neither waits nor runs, and holds nothing."""
        if group.phase is Phase.RUNNING:
            self._cohorts[group.decoding.program].leave(group)
        if group.phase is Phase.QUEUED:
            self._queue.remove(group)
        else:
            self.starts.give_up(group)
            self._admitted.remove(group)
