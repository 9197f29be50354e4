"""The scheduler: continuous batching of requests, from submission to the final draw. It alone says who is decoded when.

    submit -> queue -> admit (slots and pages reserved) -> prefill (once per model, in chunks) -> first tokens -> rounds -> final draw

One `step` advances everything once: at most one chunk of prompts, then one round of all running groups. What it talks to are
two workers (smc/engine/messages.py) and the pair that runs rounds over their pages (smc/resident); whether they live here, in
other processes or on other machines is not its business.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from smc.algorithm.selection import final_draw
from smc.algorithm.weights import log_mean_weight, normalise
from smc.engine.admission import METHOD_SIDES, DuplicateRequest, PageBudget, check_fits, check_queue, pages_needed
from smc.engine.cohorts import Cohorts
from smc.engine.config import EngineConfig
from smc.engine.group import Group, Phase
from smc.engine.messages import SIDES, Worker
from smc.engine.prefill import prefill_step, start_answer
from smc.engine.request import Answer, FinishReason, Method, Output, Request
from smc.engine.rounds import Rounds
from smc.engine.slots import Slots
from smc.engine.stats import EngineStats
from smc.engine.text import StopRules
from smc.models.tokenizer import Tokenizer
from smc.philox import Purpose, uniforms
from smc.resident.pair import Pair


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
    ) -> None:
        """`workers` are keyed `draft` and `target`; `pages` are the capacities of their pools; `clock` gives seconds."""
        self.config, self.tokenizer, self.context = config, tokenizer, context
        self.workers = workers
        self.slots = Slots(config.max_slots, context + config.block + 1)
        self.budget = PageBudget(pages)
        self._smc = Cohorts(Rounds(config, self.slots, pair), config.cohorts)
        self._plain = {side: Cohorts(Rounds(config, self.slots, pair.plain[side]), 1) for side in SIDES}
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._ready: list[Output] = []

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
        check_fits(request, self.config, self.budget.capacity, self.context, self.tokenizer.size)
        pages = pages_needed(request, self.config)
        check_queue(pages, self.config, [g.pages for g in self._in(Phase.QUEUED)])
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        rules = StopRules(request.params, self.tokenizer)
        self._groups[request.request_id] = Group(request, seed, rules, self._clock(), pages)
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
        self._prefill()
        self._run_rounds()
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

    def take_stats(self) -> EngineStats:
        """The state now, and what happened since the last call."""
        rounds = self._smc.rounds
        stats, rounds.stats = rounds.stats, EngineStats()
        stats.queued, stats.running = self.num_queued, len(self._groups) - self.num_queued
        stats.slots_free = self.slots.num_free
        stats.pages_reserved, stats.pages_total = dict(self.budget.reserved), dict(self.budget.capacity)
        return stats

    def rounds_of(self, method: Method) -> Rounds:
        """What advances the groups of a method, for whoever times rounds."""
        return self._cohorts_of(method).rounds

    def check_books(self) -> None:
        """When idle, everything must be free again. Raises AssertionError otherwise."""
        assert self.idle and not any(self.budget.reserved.values()), f"pages still reserved: {self.budget.reserved}"
        assert self.slots.num_free == self.config.max_slots, "slots still claimed"

    def _expire(self) -> None:
        now = self._clock()
        for group in list(self._groups.values()):
            budget = group.params.time_budget
            if budget is not None and now - group.submitted >= budget:
                self._finish(group, FinishReason.TIME_BUDGET)

    def _admit(self) -> None:
        """Strictly in order: a large request at the head is not overtaken until it fits."""
        for group in self._groups.values():
            if group.phase is not Phase.QUEUED:
                continue
            if group.params.rows > self.slots.num_free or not self.budget.reserve(group.pages):
                return
            group.slots = self.slots.claim(group.params.rows)
            group.prefilled = dict.fromkeys(METHOD_SIDES[group.params.method], 0)
            group.phase = Phase.PREFILL

    def _prefill(self) -> None:
        groups = self._in(Phase.PREFILL)
        if not groups:
            return
        for side in SIDES:
            prefill_step(groups, self.slots, self.workers, side, self.config.prefill_chunk)
        for group in groups:
            if not group.error and all(done == group.prompt_size for done in group.prefilled.values()):
                start_answer(group, self.slots)
                group.phase = Phase.RUNNING
                if not self._complete(group):
                    group.cohorts = self._cohorts_of(group.params.method)
                    group.cohorts.join(group)

    def _run_rounds(self) -> None:
        self._smc.advance()
        for cohorts in self._plain.values():
            cohorts.advance()

    def _cohorts_of(self, method: Method) -> Cohorts:
        return self._smc if method is Method.SMC else self._plain[METHOD_SIDES[method][0]]

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
        elif group.committed > group.streamed:
            new = self._tokens(group, 0)[group.streamed : group.committed]
            group.streamed = group.committed
            self._ready.append(Output(group.id, new, group.stream.push(new)))

    def _tokens(self, group: Group, particle: int) -> tuple[int, ...]:
        slot = group.slots[particle]
        return tuple(self.slots.tokens_SL[slot, : self.slots.length_S[slot]].tolist())

    def _finish(self, group: Group, reason: FinishReason | None) -> None:
        """The final draw, the last Output, and everything the group held given back. `reason` None: it is complete."""
        particle, tokens = self._final_tokens(group, reason)
        logp, matched = None, None
        if group.params.logprobs:
            logp = tuple(self.slots.logp_SL[group.slots[particle], : len(tokens)].tolist()) if tokens else ()
        log_z = group.log_z
        if group.phase is Phase.RUNNING:
            _, log_sum = normalise(torch.from_numpy(self.slots.logw_S[group.slots])[None])
            log_z += log_mean_weight(log_sum, torch.tensor([len(group.slots)])).item()
        if reason is None:
            reason, matched = group.rules.why(tokens, group.params.max_tokens)
        text = group.rules.text(tokens)
        answer = Answer(
            request_id=group.id,
            tokens=tokens,
            text=text,
            finish_reason=reason,
            matched=matched,
            seed=group.seed,
            prompt_tokens=group.prompt_size,
            statistics=group.tally.statistics(log_z),
            seconds=self._clock() - group.submitted,
            logprobs=logp,
            error=group.error,
        )
        self._ready.append(Output(group.id, tokens[group.streamed :], group.stream.finish(text), answer))
        self._release(group)

    def _final_tokens(self, group: Group, reason: FinishReason | None) -> tuple[int, tuple[int, ...]]:
        """The drawn particle and its tokens. Before the end: those that have been weighed, and whatever has been streamed."""
        if group.phase is not Phase.RUNNING:
            return 0, ()
        if reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            return 0, self._tokens(group, 0)[: group.streamed]
        seed_G, round_G = np.array([group.seed], dtype=np.int64), np.array([group.rounds], dtype=np.int64)
        uniform = uniforms(seed_G, round_G, np.zeros(1, dtype=np.int64), Purpose.FINAL)[0, 0]
        particle = final_draw(torch.from_numpy(self.slots.logw_S[group.slots]), float(uniform))
        tokens = self._tokens(group, particle)
        if reason is not None:
            tokens = tokens[: max(int(self.slots.block_S[group.slots[particle]]) + 1, group.streamed)]
        return particle, tokens

    def _release(self, group: Group) -> None:
        if group.cohorts is not None:
            group.cohorts.leave(group)
        group.gone = True
        if group.phase is not Phase.QUEUED:
            for side in group.prefilled:
                self.workers[side].release(group.slots[:1])
            self.slots.give_back(group.slots)
            self.budget.give_back(group.pages)
        del self._groups[group.id]
