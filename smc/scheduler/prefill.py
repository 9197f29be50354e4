"""How many tokens of prompts a step may ask for: by what chunks and rounds have been seen to take. Knows nothing about
requests.

Prompts beside rounds take turns with them on the models. Rounds earn them time, `prefill_share` of what the rounds take
themselves; a chunk is asked for when what it is going to take has been earned. So a round is, in the mean, at most 1 +
`prefill_share` times as long as it would be alone, whatever chunks cost.

Which entry of the workers' stop tables a request's stop machine has: requests that end alike share one.

How a group comes to run and to stop running: memory and slots claimed, prompts asked for, particles handed to the
models (`smc.scheduler.handoff`), and all given back. A group that is taken up again comes the same way, with the record
of its particles in place of a prompt's first tokens."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.executor import RoundExecutor
from smc.executor.messages import Pending, PromptResult, Worker
from smc.scheduler.checkpoint import record_of
from smc.scheduler.handoff import Handoff
from smc.scheduler.methods import Decoding
from smc.scheduler.page_forecast import PageForecast
from smc.scheduler.prefill_batches import PrefillRequest, prefill_step
from smc.scheduler.prefix_reuse import PrefixReuse
from smc.scheduler.sequence_group import Phase, SequenceGroup
from smc.stops import StopMachine, TokenBytes
from smc.types import ModelRole

LEAST = 256
"""Tokens of a chunk beside rounds, where prompts have as many left: a pass of fewer takes hardly less time, for it
reads all weights."""
IN_FLIGHT = 2
"""Chunks of a model that are asked for before the one before them has been run. More would be in the way of whoever
comes next."""

Spans = Mapping[str, tuple[int, int]]
"""What was done, and when it began and ended, nanoseconds; the passes of models have the names of their sides."""


class PrefillBudget:
    """Of both models. With `prefill_share` None a step may ask for `prefill_chunk` tokens whatever runs beside them."""

    def __init__(self, config: EngineConfig) -> None:
        self._most, self._share = config.prefill_chunk, config.prefill_share
        # In look-ahead models work side by side, in lockstep one after the other.
        self._together = max if config.lookahead else sum
        self._flights: dict[ModelRole, deque[tuple[int, Pending[PromptResult[np.ndarray]]]]] = {
            role: deque() for role in ModelRole
        }
        self._cost = dict.fromkeys(ModelRole, 0.0)
        """Seconds of a token in the chunk that was run last, of at least `LEAST` tokens."""
        self._earned = 0.0
        """Seconds."""
        self._seen = False
        """The last step has read rounds."""

    @property
    def measures(self) -> bool:
        """What rounds take is of interest."""
        return self._share is not None

    def most(self, beside: bool) -> int:
        """Tokens of each model that may be asked for now; `beside`: groups are in rounds. Waits while too many chunks
        are on their way."""
        self.settle(IN_FLIGHT - 1)
        if self._share is None or not beside:
            return self._most
        cost = self._together(self._cost.values())
        if not cost or not self._seen:
            return min(self._most, LEAST)
        return min(self._most, max(LEAST, int(self._earned / cost))) if self._earned >= LEAST * cost else 0

    def settle(self, left: int = 0) -> None:
        """Wait until that many chunks of a model are on their way at most."""
        for role, flights in self._flights.items():
            while len(flights) > left:
                self._learn(role, *flights.popleft())

    def forget(self, role: ModelRole) -> None:
        """Chunks of this model that are on their way will not come."""
        self._flights[role].clear()

    def ask(
        self, asked: Mapping[ModelRole, Sequence[tuple[int, Pending[PromptResult[np.ndarray]]]]], beside: bool
    ) -> None:
        """Chunks of either model that have been asked for: tokens, and what comes of them."""
        for role, chunks in asked.items():
            self._flights[role].extend(chunks)
        if beside:
            took = self._together(
                sum(max(tokens, LEAST) for tokens, _ in asked[role]) * self._cost[role] for role in ModelRole
            )
            # What was asked for beyond what had been earned is owed, but for more than a chunk.
            self._earned = max(-LEAST * self._together(self._cost.values()), self._earned - took)

    def earn(self, rounds: Iterable[Spans]) -> None:
        """Rounds that a step has read; only where it is of interest what they take."""
        assert self._share is not None
        took = [self._together(_length(spans, role) for role in ModelRole) for spans in rounds]
        self._seen, earned = bool(took), self._share * sum(took)
        # What is not spent pays for one chunk, or the prompts of a busy moment would stop everybody else.
        self._earned = min(self._earned, LEAST * self._together(self._cost.values())) + earned

    def _learn(self, role: ModelRole, tokens: int, pending: Pending[PromptResult[np.ndarray]]) -> None:
        pending.result()
        if self._share is not None:
            self._cost[role] = _length(pending.spans(), "prompt") / max(tokens, LEAST)


def _length(spans: Spans, name: str) -> float:
    """Seconds."""
    begin, end = spans.get(name, (0, 0))
    return 1e-9 * (end - begin)


class StopEntries:
    """Entries 1..count. One that nobody uses keeps its machine until another needs the place."""

    def __init__(self, count: int) -> None:
        self._machines: dict[int, StopMachine] = {}
        self._users = dict.fromkeys(range(1, count + 1), 0)

    def claim(self, machine: StopMachine) -> tuple[int, bool] | None:
        """(entry, whether the machine has yet to be put there), or None while all are taken by others."""
        entry = next((e for e, there in self._machines.items() if there == machine), None)
        is_new = entry is None
        if entry is None:
            entry = next((e for e, users in self._users.items() if not users), None)
            if entry is None:
                return None
            self._machines[entry] = machine
        self._users[entry] += 1
        return entry, is_new

    def give_back(self, entry: int) -> None:
        self._users[entry] -= 1
        assert self._users[entry] >= 0, "a stop machine was given back twice"

    @property
    def used(self) -> int:
        return sum(self._users.values())


class PrefillManager:
    """Groups between the queue and their rounds."""

    def __init__(
        self,
        expectation: PageForecast,
        workers: Mapping[ModelRole, Worker],
        pair: RoundExecutor,
        token_bytes: TokenBytes,
    ) -> None:
        self.config, self.slots, self.memory = expectation.config, expectation.slots, expectation.memory
        self.workers = workers
        self.prefixes = PrefixReuse(self.config, self.slots, self.memory)
        self.stops = StopEntries(self.config.max_stops - 1)
        self.chunks = PrefillBudget(self.config)
        self._expectation = expectation
        self._joins = Handoff(self.config, self.slots, self.memory, pair, token_bytes)
        self._starts: list[PrefillRequest] = []

    def admit(self, group: SequenceGroup) -> bool:
        """Give a group slots, and pages for what it starts from; False if there are not enough of either."""
        if group.slots_needed > self.slots.num_free or not self._has_room(group):
            return False
        claimed = self.stops.claim(group.rules.machine)
        if claimed is None:
            return False
        group.stops, is_new = claimed
        if is_new:
            self._joins.forget_stops(group.stops)
        rows = self.prefixes.plant(group)
        if rows is None:
            self.stops.give_back(group.stops)
            return False
        if group.saved is None:
            group.particles = np.arange(group.rows)
            group.count = len(group.particles)
        group.slots = self.slots.claim(len(group.particles), group.params.guided, chained=group.decoding.chained)
        self._expectation.expect(group)
        group.phase = Phase.PREFILL
        self._starts.append(PrefillRequest(group, rows))
        return True

    def lacks_slots(self, group: SequenceGroup) -> bool:
        """Nothing else keeps it from being admitted."""
        return group.slots_needed > self.slots.num_free and self._has_room(group)

    def _has_room(self, group: SequenceGroup) -> bool:
        has_laws = group.chains_needed <= self.slots.num_free_chains
        return has_laws and self.memory.admits(self._expectation.of(group)) and self.prefixes.has_room(group)

    def ask(self, beside: bool) -> None:
        """Ask for a chunk of what is to be run on each side. `beside`: groups are in rounds."""
        starts = self._unblocked()
        if not starts:
            # The last prompt's first tokens have been read, so that hardly anything is left to wait for.
            self.chunks.settle()
        else:
            chunk = self.chunks.most(beside)
            self.chunks.ask({role: prefill_step(starts, self.workers[role], role, chunk) for role in ModelRole}, beside)

    def _unblocked(self) -> list[PrefillRequest]:
        """All but those that wait for what an earlier one is about to run for both."""
        found: list[PrefillRequest] = []
        alike: defaultdict[bytes, list[PrefillRequest]] = defaultdict(list)
        for start in self._starts:
            beginning = self.prefixes.beginning(start)
            earlier = [] if beginning is None else alike[beginning]
            waits = self.prefixes.awaits(start, earlier)
            earlier.append(start)
            if waits:
                continue
            if start.waited:
                self.prefixes.plant_again(start)
                start.waited = False
            found.append(start)
        return found

    def finish(self) -> list[SequenceGroup]:
        """Groups whose last chunk has been asked for, now ready for rounds. Waits for their first tokens."""
        ready = [start for start in self._starts if start.asked and start.group.answer is None]
        for start in ready:
            if start.first is not None:
                # What may be lost is waited for before anything is changed.
                start.first.result()
        for start in ready:
            self._starts.remove(start)
            if start.group.saved is None:
                self._joins.first_tokens(start)
            else:
                self._joins.restore(start.group)
            if not start.group.error:
                self.prefixes.remember_prompt(start.group, start.rows)
            self._joins.set_heads(start)
            self._joins.join(start)
            start.group.saved = None
            start.group.phase = Phase.RUNNING
        return [start.group for start in ready]

    def finish_rescoring(self) -> None:
        """Groups whose answer has been asked for as a whole know what else could have stood there. Waits for it."""
        for start in [start for start in self._starts if start.asked and start.group.answer is not None]:
            group, found = start.group, []
            for result, at in [(pending.result(), at) for pending, at in start.tops]:
                token_YK, logp_YK = (
                    top_YK[at, : group.params.top_logprobs] for top_YK in (result.top_YK, result.top_logp_YK)
                )
                if np.isnan(logp_YK).any():
                    group.fail(ModelRole.TARGET)
                # What is outside of the law comes last.
                count_Y = (logp_YK > -np.inf).sum(1)
                found += [
                    tuple(zip(*row[:2]))[: row[2]] for row in zip(token_YK.tolist(), logp_YK.tolist(), count_Y.tolist())
                ]
            group.top_logprobs = tuple(found)

    def forget(self, role: ModelRole) -> None:
        """A side knows nothing any more, and what it was asked for will not come."""
        self.chunks.forget(role)
        self._joins.forget_role(role)

    def preempt(self, group: SequenceGroup) -> None:
        """Save the record of a group's particles, and give up its slots and pages; it waits to be taken up again."""
        # Slots that were to have a particle after the next round have none yet.
        group.particles = group.particles[: group.count]
        group.saved = record_of(group, self.slots)
        self.give_up(group)
        group.phase = Phase.QUEUED
        if group.turn is not None:
            group.decode_by(*group.turned)

    def give_up(self, group: SequenceGroup) -> None:
        """What a group that has been admitted holds is free; what was asked for it concerns it no more."""
        start = self._start_of(group)
        self._leave_slots(group)
        if start is not None:
            self._starts.remove(start)
            self.prefixes.release(start)
        self.stops.give_back(group.stops)
        self.memory.no_longer_expect(group.number)
        group.needs = None

    def change(self, group: SequenceGroup, decoding: Decoding, rows: int) -> bool:
        """Let a running group of exact decoding go on by another decoding, from what has been confirmed: what a model
        has of that and still needs stays where it is, the rest is run as if the group was taken up again. False if
        there are not enough slots, or pages."""
        record = record_of(group, self.slots)
        expected = self._expectation.pages(
            decoding, group.params, group.prompt_size, rows, int(record["length_S"][0]), group.negative_size
        )
        new = {role: pages for role, pages in expected.items() if role not in group.decoding.roles}
        if (rows - len(group.slots)) * group.params.slots_per_row > self.slots.num_free or not self.memory.admits(new):
            return False
        if decoding.chained and rows > self.slots.num_free_chains:
            return False
        carried = self.prefixes.carry(group, decoding, rows, record)
        if carried is None:
            return False
        self._leave_slots(group)
        group.saved = record
        group.decode_by(decoding, rows)
        group.needs = {stream: len(of_stream[0].tokens_L) for stream, of_stream in carried.items()}
        group.slots = self.slots.claim(rows, group.params.guided, chained=decoding.chained)
        group.phase = Phase.PREFILL
        self._expectation.expect(group)
        self._starts.append(PrefillRequest(group, carried))
        return True

    def go_alone(self, group: SequenceGroup, alone: Decoding) -> None:
        """A group on its way to rounds of the pair shall come to decode by one model: it needs no more of the other."""
        start, left = (
            self._start_of(group),
            [stream for stream in group.streams if stream not in group.streams_by(alone)],
        )
        assert start is not None, "a group on its way has a start"
        self.prefixes.drop(start, left)
        self._begin_with(group, alone)
        self.slots.leave_laws(group.slots)

    def _begin_with(self, group: SequenceGroup, decoding: Decoding, rows: int | None = None) -> None:
        """A group on its way to its first rounds, or to come to decode by one model, needs no more slots than these."""
        group.decode_by(decoding, rows)
        self.slots.give_back(group.slots[group.count :])
        group.slots = group.slots[: group.count]
        self._expectation.expect(group)

    def _start_of(self, group: SequenceGroup) -> PrefillRequest | None:
        return next((start for start in self._starts if start.group is group), None)

    def _leave_slots(self, group: SequenceGroup) -> None:
        """A group refers to no pages and has no slots; what was asked for it concerns it no more."""
        self.slots.let_go(group.slots, self.memory.ledgers)
        for given in group.in_flight:
            for stream, pages in given.items():
                self.memory.ledgers[stream.role].free(pages)
        group.in_flight.clear()
        self.slots.give_back(group.slots)
        group.slots = group.slots[:0]
        group.wanted = None
        group.lives += 1

    def grant(self, group: SequenceGroup) -> None:
        """Let the next round bring the particles that the caller has asked for: if no other change is under way, and
        there are slots. Who has had no round yet begins with fewer at once."""
        if group.phase is Phase.PREFILL and group.saved is None and (group.wish or group.count) < group.count:
            self._begin_with(group, group.decoding, group.wish)
        if group.phase is not Phase.RUNNING or group.wanted is not None:
            return
        if group.wish == group.count:
            group.wish = None
        elif (
            group.wish is not None
            and (group.wish - len(group.slots)) * group.params.slots_per_row <= self.slots.num_free
        ):
            self.resize(group, group.wish)

    def resize(self, group: SequenceGroup, particles: int) -> None:
        """The group shall have so many particles after its next round, by an unbiased choice; slots for more are
        claimed now."""
        group.wanted = particles
        more = particles - len(group.slots)
        if more <= 0:
            return
        new = self.slots.claim(more, group.params.guided)
        self.slots.copy(new, np.repeat(group.slots[:1], more))
        self.slots.vacate(new)
        group.particles = np.concatenate((group.particles, group.particles.max() + 1 + np.arange(more)))
        group.slots = np.concatenate((group.slots, new))
        self._joins.join_empty(group, new)
