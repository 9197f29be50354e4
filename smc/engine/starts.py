"""How a group comes to run and to stop running: memory and slots claimed, prompts asked for, particles handed to the models, and all
given back. A group that is taken up again comes the same way, with the record of its particles in place of a prompt's first tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from smc.engine.chunks import Chunks
from smc.engine.expectation import Expectation
from smc.engine.group import Group, Phase, Population
from smc.engine.methods import Decoding
from smc.engine.prefill import Start, prefill_step
from smc.engine.prefixes import Prefixes
from smc.engine.records import record_of
from smc.engine.rounds import commit_tokens
from smc.engine.stop_entries import StopEntries
from smc.runtime.messages import SIDES, Worker, guides, side_of
from smc.runtime.pair import Pair
from smc.runtime.plan import Join
from smc.stops import DONE, START, TokenBytes


class Starts:
    """Groups between the queue and their rounds."""

    def __init__(self, expectation: Expectation, workers: Mapping[str, Worker], pair: Pair, token_bytes: TokenBytes) -> None:
        self.config, self.slots, self.memory = expectation.config, expectation.slots, expectation.memory
        self.workers, self.pair = workers, pair
        self.prefixes = Prefixes(self.config, self.slots, self.memory)
        self.stops = StopEntries(self.config.max_stops - 1)
        self.chunks = Chunks(self.config)
        self._expectation = expectation
        self._token_bytes = token_bytes
        self._starts: list[Start] = []
        self._known: set[tuple[str, int]] = set()
        """Sides and entries of stop tables whose machine is there."""

    def admit(self, group: Group) -> bool:
        """Give a group slots, and pages for what it starts from; False if there are not enough of either."""
        if group.slots_needed > self.slots.num_free or not self._has_room(group):
            return False
        claimed = self.stops.claim(group.rules.machine)
        if claimed is None:
            return False
        group.stops, is_new = claimed
        if is_new:
            self._known -= {(side, group.stops) for side in SIDES}
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
        self._starts.append(Start(group, rows))
        return True

    def lacks_slots(self, group: Group) -> bool:
        """Nothing else keeps it from being admitted."""
        return group.slots_needed > self.slots.num_free and self._has_room(group)

    def _has_room(self, group: Group) -> bool:
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
            self.chunks.ask({side: prefill_step(starts, self.workers[side], side, chunk) for side in SIDES}, beside)

    def _unblocked(self) -> list[Start]:
        """All but those that wait for what an earlier one is about to run for both."""
        found: list[Start] = []
        alike: defaultdict[bytes, list[Start]] = defaultdict(list)
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

    def finish(self) -> list[Group]:
        """Groups whose last chunk has been asked for, now ready for rounds. Waits for their first tokens."""
        ready = [start for start in self._starts if start.asked and start.group.answer is None]
        for start in ready:
            if start.first is not None:
                # What may be lost is waited for before anything is changed.
                start.first.result()
        for start in ready:
            self._starts.remove(start)
            if start.group.saved is None:
                self._first_tokens(start)
            else:
                self._restore(start.group)
            if not start.group.error:
                self.prefixes.remember_prompt(start.group, start.rows)
            self._set_heads(start)
            self._join(start)
            start.group.saved = None
            start.group.phase = Phase.RUNNING
        return [start.group for start in ready]

    def finish_rescoring(self) -> None:
        """Groups whose answer has been asked for as a whole know what else could have stood there. Waits for it."""
        for start in [start for start in self._starts if start.asked and start.group.answer is not None]:
            group, found = start.group, []
            for result, at in [(pending.result(), at) for pending, at in start.tops]:
                token_YK, logp_YK = (top_YK[at, : group.params.top_logprobs] for top_YK in (result.top_YK, result.top_logp_YK))
                if np.isnan(logp_YK).any():
                    group.fail("target")
                # What is outside of the law comes last.
                count_Y = (logp_YK > -np.inf).sum(1)
                found += [tuple(zip(*row[:2]))[: row[2]] for row in zip(token_YK.tolist(), logp_YK.tolist(), count_Y.tolist())]
            group.top_logprobs = tuple(found)

    def forget(self, side: str) -> None:
        """A side knows nothing any more, and what it was asked for will not come."""
        self.chunks.forget(side)
        self._known = {(name, stops) for name, stops in self._known if name != side}

    def preempt(self, group: Group) -> None:
        """Save the record of a group's particles, and give up its slots and pages; it waits to be taken up again."""
        # Slots that were to have a particle after the next round have none yet.
        group.particles = group.particles[: group.count]
        group.saved = record_of(group, self.slots)
        self.give_up(group)
        group.phase = Phase.QUEUED
        if group.turn is not None:
            group.decode_by(*group.turned)

    def give_up(self, group: Group) -> None:
        """What a group that has been admitted holds is free; what was asked for it concerns it no more."""
        start = self._start_of(group)
        self._leave_slots(group)
        if start is not None:
            self._starts.remove(start)
            self.prefixes.release(start)
        self.stops.give_back(group.stops)
        self.memory.no_longer_expect(group.number)
        group.needs = None

    def change(self, group: Group, decoding: Decoding, rows: int) -> bool:
        """Let a running group of exact decoding go on by another decoding, from what has been confirmed: what a model has of that and still
        needs stays where it is, the rest is run as if the group was taken up again. False if there are not enough slots, or pages."""
        record = record_of(group, self.slots)
        expected = self._expectation.pages(decoding, group.params, group.prompt_size, rows, int(record["length_S"][0]), group.negative_size)
        new = {side: pages for side, pages in expected.items() if side not in group.decoding.sides}
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
        group.needs = {lane: len(of_lane[0].tokens_L) for lane, of_lane in carried.items()}
        group.slots = self.slots.claim(rows, group.params.guided, chained=decoding.chained)
        group.phase = Phase.PREFILL
        self._expectation.expect(group)
        self._starts.append(Start(group, carried))
        return True

    def go_alone(self, group: Group, alone: Decoding) -> None:
        """A group on its way to rounds of the pair shall come to decode by one model: it needs no more of the other."""
        start, left = self._start_of(group), [lane for lane in group.lanes if lane not in group.lanes_by(alone)]
        assert start is not None, "a group on its way has a start"
        self.prefixes.drop(start, left)
        self._begin_with(group, alone)
        self.slots.leave_laws(group.slots)

    def _begin_with(self, group: Group, decoding: Decoding, rows: int | None = None) -> None:
        """A group on its way to its first rounds, or to come to decode by one model, needs no more slots than these."""
        group.decode_by(decoding, rows)
        self.slots.give_back(group.slots[group.count :])
        group.slots = group.slots[: group.count]
        self._expectation.expect(group)

    def _start_of(self, group: Group) -> Start | None:
        return next((start for start in self._starts if start.group is group), None)

    def _leave_slots(self, group: Group) -> None:
        """A group refers to no pages and has no slots; what was asked for it concerns it no more."""
        self.slots.let_go(group.slots, self.memory.ledgers)
        for given in group.in_flight:
            for lane, pages in given.items():
                self.memory.ledgers[side_of(lane)].free(pages)
        group.in_flight.clear()
        self.slots.give_back(group.slots)
        group.slots = group.slots[:0]
        group.wanted = None
        group.lives += 1

    def _first_tokens(self, start: Start) -> None:
        """Every particle gets its first token."""
        assert start.first is not None, "asked for with the last chunk"
        group, result = start.group, start.first.result()
        n, rules, slots = len(group.slots), group.rules, self.slots
        tokens_N, logp_N = result.drawn_RD[start.place, :n], result.drawn_logp_RD[start.place, :n]
        log_z = float(result.log_z_R[start.place])
        if np.isnan(log_z):
            group.fail(group.decoding.first)
        logw_N = result.logw_RD[start.place, :n]
        if group.decoding.competes:
            # Slots without a particle repeat one that has.
            like_N = np.where(logw_N > -np.inf, np.arange(n), 0)
            tokens_N, logp_N = tokens_N[like_N], logp_N[like_N]
        text_N = rules.machine.after(np.full(n, START), tokens_N, self._token_bytes, early=group.params.min_tokens > 0)
        slots.begin(group.slots, tokens_N, logp_N, (text_N == DONE) | (group.params.max_tokens == 1) | (logw_N == -np.inf))
        slots.logw_S[group.slots] = logw_N
        commit_tokens(slots, Population([group]))

    def _restore(self, group: Group) -> None:
        slots, saved = self.slots, group.saved
        assert saved is not None, "what is restored has been saved"
        row_N = _row_of(len(saved["length_S"]), len(group.slots))
        for name, values in saved.items():
            getattr(slots, name)[group.slots] = values[row_N]
        rest_X = group.slots[len(saved["length_S"]) :]
        slots.ended_S[rest_X], slots.logw_S[rest_X] = True, -np.inf

    def _set_heads(self, start: Start) -> None:
        """Every particle refers to the last page of its sequence, and so does its companion."""
        group, slots = start.group, self.slots
        for lane, rows in start.rows.items():
            side = side_of(lane)
            slots_N = slots.companions(group.slots) if guides(lane) else group.slots
            ledger = self.memory.ledgers[side]
            last = [row.pages_L[-1] for row in rows]
            row_N = _row_of(len(rows), len(slots_N))
            heads_N = np.array(last)[row_N]
            ledger.hold(heads_N)
            ledger.release(last)
            for row in rows:
                ledger.count_grown(row.pages_L[len(group.prompt_of(lane)) :], True)
            slots.head_S[side][slots_N] = heads_N
            slots.held_S[side][slots_N] = np.array([len(row.tokens_L) for row in rows])[row_N]

    def _join(self, start: Start) -> None:
        """Hand the particles to the models that decode them."""
        group, slots = start.group, self.slots
        slots_N, prompt = group.slots, group.prompt_size
        end_N = prompt + slots.length_S[slots_N]
        width = self.config.block + 2
        alive_N = slots.alive(slots_N) if group.decoding.competes else np.ones(len(slots_N), dtype=bool)
        for side in group.decoding.sides:
            rows = start.rows[side]
            pending_N = end_N - slots.held_S[side][slots_N]
            # Of a particle that has ended no model needs more than that its last token was not run.
            ended_N = slots.ended_S[slots_N]
            if side == "draft":
                pending_N = np.where(ended_N, 1, pending_N)
            first_N = slots.length_S[slots_N] - pending_N
            row_N = _row_of(len(rows), len(slots_N))
            column_NQ = np.minimum(first_N[:, None] + np.arange(width), slots.tokens_SL.shape[1] - 1)[:, : int(pending_N.max())]
            self.pair.join(
                side,
                Join(
                    slots_N=slots_N,
                    # Where all have the same, it is said once.
                    pages_XL=_rectangle([rows[row].pages_L for row in (row_N if len(rows) > 1 else row_N[:1])]),
                    base=prompt,
                    limit=prompt + group.params.max_tokens,
                    least=prompt + group.params.min_tokens,
                    end_N=end_N.astype(np.int32),
                    pending_NQ=slots.tokens_SL[slots_N[:, None], column_NQ],
                    pending_N=pending_N.astype(np.int32),
                    logq_NQ=slots.logq_SL[slots_N[:, None], column_NQ],
                    ended_N=ended_N,
                    alive_N=alive_N,
                    text_N=self._text(group, first_N).astype(np.int32),
                    logw_N=slots.logw_S[slots_N],
                    stops=group.stops,
                    machine=None if (side, group.stops) in self._known else group.rules.machine,
                ),
            )
            self._known.add((side, group.stops))
        for lane in filter(guides, group.lanes):
            pages = [row.pages_L for row in start.rows[lane]]
            row_N = _row_of(len(pages), len(slots_N))
            tables_XL = _rectangle([pages[row] for row in (row_N if len(pages) > 1 else row_N[:1])])
            self.pair.join(side_of(lane), _table(slots.companions(slots_N), group, tables_XL, group.negative_size))

    def grant(self, group: Group) -> None:
        """Let the next round bring the particles that the caller has asked for: if no other change is under way, and there are slots. Who
        has had no round yet begins with fewer at once."""
        if group.phase is Phase.PREFILL and group.saved is None and (group.wish or group.count) < group.count:
            self._begin_with(group, group.decoding, group.wish)
        if group.phase is not Phase.RUNNING or group.wanted is not None:
            return
        if group.wish == group.count:
            group.wish = None
        elif group.wish is not None and (group.wish - len(group.slots)) * group.params.slots_per_row <= self.slots.num_free:
            self.resize(group, group.wish)

    def resize(self, group: Group, particles: int) -> None:
        """The group shall have so many particles after its next round, by an unbiased choice; slots for more are claimed now."""
        group.wanted = particles
        more = particles - len(group.slots)
        if more <= 0:
            return
        new = self.slots.claim(more, group.params.guided)
        companions = self.slots.companions(new)
        self.slots.copy(new, np.repeat(group.slots[:1], more))
        self.slots.vacate(new)
        group.particles = np.concatenate((group.particles, group.particles.max() + 1 + np.arange(more)))
        group.slots = np.concatenate((group.slots, new))
        nothing_XL = np.zeros((1, 1), dtype=np.int32)
        for lane in group.lanes:
            side, slots_N = side_of(lane), companions if guides(lane) else new
            self.slots.head_S[side][slots_N] = 0
            self.slots.held_S[side][slots_N] = 0
            # What they will hold they take over whole, the prompt's pages too.
            self.pair.join(side, _table(slots_N, group, nothing_XL, 0))

    def _text(self, group: Group, length_N: np.ndarray) -> np.ndarray:
        """States of the stop machine after so many of the particles' tokens."""
        tokens_SL, rules = self.slots.tokens_SL, group.rules
        return np.array([rules.state(tokens_SL[slot, :length].tolist()) for slot, length in zip(group.slots.tolist(), length_N.tolist())])


def _row_of(rows: int, places: int) -> np.ndarray:
    """Row that each place takes: its own, or where there is none the first."""
    place_N = np.arange(places)
    return np.where(place_N < rows, place_N, 0)


def _table(slots_N: np.ndarray, group: Group, pages_XL: np.ndarray, base: int) -> Join:
    """Slots of a group without particles yet, or of companions, of which only the block tables count."""
    n = len(slots_N)
    return Join(
        slots_N=slots_N,
        pages_XL=pages_XL,
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
        stops=group.stops,
        machine=None,
    )


def _rectangle(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of different lengths, side by side; what is missing is page 0."""
    out = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for row, pages_L in zip(out, rows):
        row[: len(pages_L)] = pages_L
    return out
