"""How particles come to be, and to the models that decode them: what the slots of a group hold when it begins, or goes
on, and what each side is told of them."""

from __future__ import annotations

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.executor import RoundExecutor
from smc.executor.messages import Stream
from smc.executor.plan import SequenceHandoff
from smc.memory.kv_cache import KVCacheManager
from smc.scheduler.decode import commit_tokens
from smc.scheduler.prefill_batches import PrefillRequest, PromptRow
from smc.scheduler.round_plan import Population
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.stops import DONE, START, TokenBytes
from smc.types import ModelRole


class Handoff:
    """Fills slots, and hands particles to a `Pair`."""

    def __init__(
        self, config: EngineConfig, slots: Slots, memory: KVCacheManager, pair: RoundExecutor, token_bytes: TokenBytes
    ) -> None:
        self._config, self._slots, self._memory, self._pair = config, slots, memory, pair
        self._token_bytes = token_bytes
        self._known: set[tuple[ModelRole, int]] = set()
        """Sides and entries of stop tables whose machine is there."""

    def forget_role(self, role: ModelRole) -> None:
        """It knows nothing any more."""
        self._known = {(name, stops) for name, stops in self._known if name != role}

    def forget_stops(self, entry: int) -> None:
        """Another machine comes to stand there."""
        self._known -= {(role, entry) for role in ModelRole}

    def first_tokens(self, start: PrefillRequest) -> None:
        """Every particle gets its first token."""
        assert start.first is not None, "asked for with the last chunk"
        group, result = start.group, start.first.result()
        n, rules, slots = len(group.slots), group.rules, self._slots
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
        slots.begin(
            group.slots, tokens_N, logp_N, (text_N == DONE) | (group.params.max_tokens == 1) | (logw_N == -np.inf)
        )
        slots.logw_S[group.slots] = logw_N
        commit_tokens(slots, Population([group]))

    def restore(self, group: SequenceGroup) -> None:
        """Its particles are as they were saved."""
        slots, saved = self._slots, group.saved
        assert saved is not None, "what is restored has been saved"
        row_N = _row_of(len(saved["length_S"]), len(group.slots))
        for name, values in saved.items():
            getattr(slots, name)[group.slots] = values[row_N]
        rest_X = group.slots[len(saved["length_S"]) :]
        slots.ended_S[rest_X], slots.logw_S[rest_X] = True, -np.inf

    def set_heads(self, start: PrefillRequest) -> None:
        """Every particle refers to the last page of its sequence, and so does its companion."""
        group, slots = start.group, self._slots
        for stream, rows in start.rows.items():
            role = stream.role
            slots_N = slots.companions(group.slots) if stream.unconditional else group.slots
            ledger = self._memory.ledgers[role]
            last = [row.pages_L[-1] for row in rows]
            row_N = _row_of(len(rows), len(slots_N))
            heads_N = np.array(last)[row_N]
            ledger.hold(heads_N)
            ledger.release(last)
            for row in rows:
                ledger.count_grown(row.pages_L[len(group.prompt_of(stream)) :], True)
            slots.head_S[role][slots_N] = heads_N
            slots.held_S[role][slots_N] = np.array([len(row.tokens_L) for row in rows])[row_N]

    def join(self, start: PrefillRequest) -> None:
        """Hand the particles to the models that decode them."""
        group = start.group
        for role in group.decoding.roles:
            self._pair.join(role, self._particles(group, role, start.rows[Stream(role)]))
            self._known.add((role, group.stops))
        for stream in (stream for stream in group.streams if stream.unconditional):
            slots_N = self._slots.companions(group.slots)
            self._pair.join(
                stream.role, _table(slots_N, group, _pages(start.rows[stream], len(slots_N)), group.negative_size)
            )

    def _particles(self, group: SequenceGroup, role: ModelRole, rows: list[PromptRow]) -> SequenceHandoff:
        slots, slots_N, prompt = self._slots, group.slots, group.prompt_size
        end_N, ended_N = prompt + slots.length_S[slots_N], slots.ended_S[slots_N]
        pending_N = end_N - slots.held_S[role][slots_N]
        if role == ModelRole.DRAFT:
            # Of a particle that has ended no model needs more than that its last token was not run.
            pending_N = np.where(ended_N, 1, pending_N)
        first_N = slots.length_S[slots_N] - pending_N
        column_NQ = np.minimum(first_N[:, None] + np.arange(self._config.block + 2), slots.tokens_SL.shape[1] - 1)
        column_NQ = column_NQ[:, : int(pending_N.max())]
        return SequenceHandoff(
            slots_N=slots_N,
            pages_XL=_pages(rows, len(slots_N)),
            base=prompt,
            limit=prompt + group.params.max_tokens,
            least=prompt + group.params.min_tokens,
            end_N=end_N.astype(np.int32),
            pending_NQ=slots.tokens_SL[slots_N[:, None], column_NQ],
            pending_N=pending_N.astype(np.int32),
            logq_NQ=slots.logq_SL[slots_N[:, None], column_NQ],
            ended_N=ended_N,
            alive_N=slots.alive(slots_N) if group.decoding.competes else np.ones(len(slots_N), dtype=bool),
            text_N=self._text(group, first_N).astype(np.int32),
            logw_N=slots.logw_S[slots_N],
            stops=group.stops,
            machine=None if (role, group.stops) in self._known else group.rules.machine,
        )

    def join_empty(self, group: SequenceGroup, slots_N: np.ndarray) -> None:
        """Slots of a group that hold no particle before its next round's choice."""
        nothing_XL, companions = np.zeros((1, 1), dtype=np.int32), self._slots.companions(slots_N)
        for stream in group.streams:
            role, there_N = stream.role, companions if stream.unconditional else slots_N
            self._slots.head_S[role][there_N] = 0
            self._slots.held_S[role][there_N] = 0
            # What they will hold they take over whole, the prompt's pages too.
            self._pair.join(role, _table(there_N, group, nothing_XL, 0))

    def _text(self, group: SequenceGroup, length_N: np.ndarray) -> np.ndarray:
        """States of the stop machine after so many of the particles' tokens."""
        tokens_SL, rules = self._slots.tokens_SL, group.rules
        return np.array(
            [
                rules.state(tokens_SL[slot, :length].tolist())
                for slot, length in zip(group.slots.tolist(), length_N.tolist())
            ]
        )


def _row_of(rows: int, places: int) -> np.ndarray:
    """Row that each place takes: its own, or where there is none the first."""
    place_N = np.arange(places)
    return np.where(place_N < rows, place_N, 0)


def _table(slots_N: np.ndarray, group: SequenceGroup, pages_XL: np.ndarray, base: int) -> SequenceHandoff:
    """Slots of a group without particles yet, or of companions, of which only the block tables count."""
    n = len(slots_N)
    return SequenceHandoff(
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


def _pages(rows: list[PromptRow], places: int) -> np.ndarray:
    """int32 [N, L] pages of every place's positions, side by side; what is missing is page 0. [1, L] where all have the
    same."""
    row_N = _row_of(len(rows), places)
    pages = [rows[row].pages_L for row in (row_N if len(rows) > 1 else row_N[:1])]
    out_XL = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for out_L, pages_L in zip(out_XL, pages):
        out_L[: len(pages_L)] = pages_L
    return out_XL
