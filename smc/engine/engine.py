"""The scheduler: continuous batching of requests, from submission to the final draw. It alone says who is decoded when.

    submit -> queue -> admit (slots and pages) -> prompt (once per model, in chunks) -> first tokens -> rounds -> final draw

One `step` advances everything once: a chunk of prompts is asked for, a round of all running groups is asked for, and what came of
earlier ones is read. What it talks to are two workers, which run prompts, and the pair that runs rounds (smc/runtime); whether they
live here, in other processes or on other machines is not its business.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from smc.algorithm.selection import final_draw
from smc.algorithm.weights import log_mean_weight, normalise
from smc.engine.admission import DuplicateRequest, check_fits, check_queue
from smc.engine.cohorts import Cohorts
from smc.engine.group import Group, Phase
from smc.engine.memory import Memory
from smc.engine.methods import METHODS
from smc.engine.policy import ParticlePolicy, ShrinkWhenShort
from smc.engine.request import Answer, FinishReason, Method, Output, Request
from smc.engine.rounds import Pages, Rounds
from smc.engine.slots import Slots
from smc.engine.starts import Starts, shrink_saved
from smc.engine.stats import EngineStats
from smc.engine.text import StopRules
from smc.kv.pages import OutOfPages
from smc.models.tokenizer import Tokenizer
from smc.philox import Purpose, uniforms
from smc.runtime.config import EngineConfig
from smc.runtime.messages import Worker
from smc.runtime.pair import Pair
from smc.runtime.plan import Program
from smc.stops import TokenBytes

LEARNING = 0.1
"""Weight of the newest answer in the average of how long answers get."""


class Engine:
    """Runs requests over two workers. Not thread-safe: one caller submits, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        workers: dict[str, Worker],
        tokenizer: Tokenizer,
        *,
        pair: Pair,
        pages: dict[str, int],
        context: int,
        clock: Callable[[], float] = time.monotonic,
        policy: ParticlePolicy | None = None,
    ) -> None:
        """`workers` are keyed `draft` and `target`; `pages` are the capacities of their pools; `clock` gives seconds."""
        self.config, self.tokenizer, self.context = config, tokenizer, context
        self.workers, self.pair = workers, pair
        self.slots = Slots(config.max_slots, context + config.block + 1)
        self.memory = Memory(pages, prefix_cache=config.prefix_cache)
        self.starts = Starts(config, self.slots, self.memory, workers, pair, TokenBytes.of(tokenizer))
        self._cohorts = {
            decoding.program: Cohorts(
                Rounds(config, self.slots, self.memory, pair, decoding, config.width(context)),
                config.cohorts if decoding.program is Program.PAIR else 1,
            )
            for decoding in METHODS.values()
        }
        self._policy = policy or ShrinkWhenShort()
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._ready: list[Output] = []
        self._answer_share = 1.0
        """Share of the longest answer that answers have, on average."""
        self._preemptions = self._shrinks = 0

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing running, nothing left to report."""
        return not self._groups and not self._ready

    @property
    def num_queued(self) -> int:
        return len(self._in(Phase.QUEUED))

    @property
    def num_running(self) -> int:
        """Requests past their prefill."""
        return len(self._in(Phase.RUNNING))

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for what this engine could never run or an id in use, QueueFull if it must come later."""
        if request.request_id in self._groups:
            raise DuplicateRequest(f"request_id={request.request_id!r} is already in use; it must be unique among running requests")
        check_fits(request, self.config, self.memory.capacity, self.context, self.tokenizer.size)
        params = request.params
        expected = METHODS[params.method].expected_pages(self.config, params, len(request.prompt), self._answer_share)
        check_queue(expected, self.config, [g.expected for g in self._in(Phase.QUEUED)])
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        rules = StopRules(params, self.tokenizer)
        self._groups[request.request_id] = Group(request, seed, rules, self._clock(), expected)
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
        self._expire()
        self._admit()
        self.starts.ask()
        for cohorts in self._cohorts.values():
            cohorts.advance(self._provide)
        for group in self.starts.finish():
            if not group.error and not self._complete(group):
                self._cohorts[group.decoding.program].join(group)
        for group in list(self._groups.values()):
            self._report(group)
        ready, self._ready = self._ready, []
        return ready

    def run(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Submit all, step until idle, yield what becomes final as it does."""
        for request in requests:
            self.submit(request)
        while not self.idle:
            yield from self.step()

    def resize(self, request_id: str, particles: int) -> None:
        """Let a running SMC request have so many particles from its next round on. Raises ValueError outside of what it allows."""
        group = self._groups.get(request_id)
        if group is None or group.phase is not Phase.RUNNING or not group.decoding.records_population:
            raise ValueError(f"request_id={request_id!r} names no running request of method='smc'")
        if not group.params.least_rows <= particles <= group.params.rows:
            raise ValueError(f"particles={particles}; allowed: {group.params.least_rows}..{group.params.rows}")
        if particles - len(group.slots) > self.slots.num_free:
            raise ValueError(f"particles={particles}; {self.slots.num_free} slots are free")
        if group.wanted is None and particles != group.count:
            self.starts.resize(group, particles)

    def take_stats(self) -> EngineStats:
        """The state now, and what happened since the last call."""
        rounds = self._cohorts[Program.PAIR].rounds
        stats, rounds.stats = rounds.stats, EngineStats()
        memory = self.memory
        stats.queued, stats.running = self.num_queued, len(self._groups) - self.num_queued
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
        return self._cohorts[METHODS[method].program].rounds

    def check_books(self) -> None:
        """When idle, all but what is cached must be free again. Raises AssertionError otherwise."""
        assert self.idle and not any(self.memory.expected.values()), f"pages still expected: {self.memory.expected}"
        assert self.slots.num_free == self.config.max_slots, "slots still claimed"
        assert not self.starts.stops.used, "stop machines still claimed"
        self.memory.check()
        assert not any(leaked := self.memory.leaked().values()), f"KV pages held although nothing runs: {leaked}"

    def _expire(self) -> None:
        now = self._clock()
        for group in list(self._groups.values()):
            budget = group.params.time_budget
            if budget is not None and now - group.submitted >= budget:
                self._finish(group, FinishReason.TIME_BUDGET)

    def _admit(self) -> None:
        """Strictly in order: a large request at the head is not overtaken until it fits. One that was preempted comes first."""
        for group in sorted(self._in(Phase.QUEUED), key=lambda g: g.saved is None):
            if not self.starts.admit(group):
                return

    def _provide(self, wanting: list[Group]) -> list[tuple[Group, Pages]]:
        """Pages for a round of each group, oldest first. Who gets none is left out; if nobody could go on then, somebody gives way."""
        wanting = [group for group in self._admitted() if group in wanting]
        given = self._give(wanting)
        while wanting and not given and not any(g.in_flight for g in self._groups.values()):
            gone = self._make_room(wanting[0])
            if gone is None:
                break
            wanting = [group for group in wanting if group is not gone]
            given = self._give(wanting)
        if len(given) < len(wanting):
            for group, _ in given:
                self._shrink(group)
        return given

    def _give(self, wanting: list[Group]) -> list[tuple[Group, Pages]]:
        given = [(group, self._pages_of_round(group)) for group in wanting]
        return [(group, pages) for group, pages in given if pages is not None]

    def _pages_of_round(self, group: Group) -> Pages | None:
        try:
            return self.memory.allocate(group.decoding.round_pages(self.config, len(group.slots)))
        except OutOfPages:
            return None

    def _shrink(self, group: Group) -> None:
        """In the round that is about to be asked for, as far as the policy wants it."""
        if group.decoding.records_population and group.wanted is None:
            wanted = self._policy.wanted(group, short=True)
            if wanted < group.count:
                self.starts.resize(group, wanted)
                self._shrinks += 1

    def _make_room(self, first: Group) -> Group | None:
        """Nothing is on its way that would free pages, and not even the first group has enough: the youngest of those that hold pages
        where they are short gives up its own, and is returned. None: there are older ones, which are not ready for a round yet."""
        short = self.memory.short(first.decoding.round_pages(self.config, len(first.slots)))
        *older, youngest = (group for group in self._admitted() if set(short) & set(group.decoding.sides))
        if youngest is first and older:
            return None
        # One that was about to have more particles gives that up with its slots.
        grows = len(youngest.slots) > youngest.count
        self._preempt(youngest)
        if youngest is first and not grows:
            wanted = max(first.params.least_rows, first.count // 2)
            assert wanted < first.count, "a request alone has too few pages"
            shrink_saved(first, wanted)
            self._shrinks += 1
        return youngest

    def _preempt(self, group: Group) -> None:
        if group.phase is Phase.RUNNING:
            self._cohorts[group.decoding.program].leave(group)
            self.starts.preempt(group)
        else:
            self.starts.give_up(group)
            group.phase = Phase.QUEUED
        group.tally.preemptions += 1
        self._preemptions += 1

    def _admitted(self) -> list[Group]:
        """Groups that hold slots and pages, oldest first."""
        return [g for g in self._groups.values() if g.phase is not Phase.QUEUED]

    def _in(self, phase: Phase) -> list[Group]:
        return [g for g in self._groups.values() if g.phase is phase]

    def _complete(self, group: Group) -> bool:
        return bool(self.slots.ended_S[group.slots].all()) and not self.slots.unscored(group.slots).any()

    def _report(self, group: Group) -> None:
        """Stream what became common to all particles; finish what is complete or failed."""
        if group.error:
            self._finish(group, FinishReason.ERROR)
        elif group.phase is Phase.RUNNING and self._complete(group):
            self._finish(group, None)
        elif group.phase is Phase.RUNNING and group.committed > group.streamed:
            new = tuple(self.slots.tokens_SL[group.slots[0], group.streamed : group.committed].tolist())
            group.streamed = group.committed
            self._ready.append(Output(group.id, new, group.stream.push(new)))

    def _tokens(self, group: Group, particle: int) -> tuple[int, ...]:
        length = self._record(group, "length_S")[particle]
        return tuple(self._record(group, "tokens_SL")[particle, :length].tolist())

    def _record(self, group: Group, name: str) -> np.ndarray:
        """Rows of an array of `Slots` that are the group's particles, wherever they are kept."""
        return group.saved[name] if group.saved else getattr(self.slots, name)[group.slots]

    def _finish(self, group: Group, reason: FinishReason | None) -> None:
        """The final draw, the last Output, and everything the group held given back. `reason` None: it is complete."""
        particle, tokens = self._final_tokens(group, reason)
        logp, matched = None, None
        if group.params.logprobs:
            logp = tuple(self._record(group, "logp_SL")[particle, : len(tokens)].tolist()) if tokens else ()
        log_z = group.log_z
        if group.has_particles:
            _, log_sum = normalise(torch.from_numpy(self._record(group, "logw_S"))[None])
            log_z += log_mean_weight(log_sum, torch.tensor([group.count])).item()
        if reason is None:
            reason, matched = group.rules.why(tokens, group.params.max_tokens)
            self.starts.remember_answer(group, particle, tokens)
            self._learn(len(tokens) / group.params.max_tokens)
        text = group.rules.text(tokens)
        answer = Answer(
            request_id=group.id,
            tokens=tokens,
            text=text,
            finish_reason=reason,
            matched=matched,
            seed=group.seed,
            prompt_tokens=group.prompt_size,
            statistics=group.tally.statistics(log_z, group.count),
            seconds=self._clock() - group.submitted,
            logprobs=logp,
            error=group.error,
            cached_tokens=group.cached_tokens or 0,
        )
        self._ready.append(Output(group.id, tokens[group.streamed :], group.stream.finish(text), answer))
        self._release(group)

    def _learn(self, share: float) -> None:
        self._answer_share += LEARNING * (share - self._answer_share)

    def _final_tokens(self, group: Group, reason: FinishReason | None) -> tuple[int, tuple[int, ...]]:
        """The drawn particle and its tokens. Before the end: those that have been weighed, and whatever has been streamed."""
        if not group.has_particles:
            return 0, ()
        if reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            return 0, self._tokens(group, 0)[: group.streamed]
        seed_G, round_G = np.array([group.seed], dtype=np.int64), np.array([group.rounds], dtype=np.int64)
        uniform = uniforms(seed_G, round_G, np.zeros(1, dtype=np.int64), Purpose.FINAL)[0, 0]
        particle = final_draw(torch.from_numpy(self._record(group, "logw_S")), float(uniform))
        tokens = self._tokens(group, particle)
        if reason is not None:
            tokens = tokens[: max(int(self._record(group, "block_S")[particle]) + 1, group.streamed)]
        return particle, tokens

    def _release(self, group: Group) -> None:
        if group.phase is Phase.RUNNING:
            self._cohorts[group.decoding.program].leave(group)
        if group.phase is not Phase.QUEUED:
            self.starts.give_up(group)
        del self._groups[group.id]
