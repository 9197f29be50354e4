"""The handoff from prefill to decoding: what the slots of a request hold when it begins or resumes, and what each model
is told of its particles."""

from __future__ import annotations

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.executor import RoundExecutor
from smc.executor.messages import Stream
from smc.executor.plan import SequenceHandoff
from smc.memory.kv_cache import KVCacheManager
from smc.scheduler.checkpoint import row_of_batch
from smc.scheduler.decode import commit_tokens
from smc.scheduler.prefill_batches import PrefillRequest, PromptRow
from smc.scheduler.round_plan import Population
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.stops import DONE, START, TokenBytes
from smc.types import ModelRole


class Handoff:
    """Fills slots, and hands particles to a `RoundExecutor`."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        memory: KVCacheManager,
        executor: RoundExecutor,
        token_bytes: TokenBytes,
    ) -> None:
        self._config, self._slots, self._memory, self._executor = config, slots, memory, executor
        self._token_bytes = token_bytes
        self._known: set[tuple[ModelRole, int]] = set()
        """Models and entries of their stop tables whose machine is there."""

    def forget(self, role: ModelRole) -> None:
        """The model has lost its state."""
        self._known = {(name, stops) for name, stops in self._known if name != role}

    def forget_stops(self, entry: int) -> None:
        """Another machine takes the entry."""
        self._known -= {(role, entry) for role in ModelRole}

    def first_tokens(self, job: PrefillRequest) -> None:
        """Every particle gets its first token."""
        assert job.first is not None, "scheduled with the last chunk"
        group, result = job.group, job.first.result()
        n, rules, slots = len(group.slots), group.rules, self._slots
        tokens_N, logp_N = result.drawn_RD[job.batch_index, :n], result.drawn_logp_RD[job.batch_index, :n]
        log_z = float(result.log_z_R[job.batch_index])
        if np.isnan(log_z):
            group.fail(group.decoding.first)
        logw_N = result.logw_RD[job.batch_index, :n]
        # Slots without a particle repeat one that has.
        like_N = np.where(group.decoding.alive(logw_N), np.arange(n), 0)
        tokens_N, logp_N = tokens_N[like_N], logp_N[like_N]
        text_N = rules.machine.after(np.full(n, START), tokens_N, self._token_bytes, early=group.params.min_tokens > 0)
        slots.begin(
            group.slots, tokens_N, logp_N, (text_N == DONE) | (group.params.max_tokens == 1) | (logw_N == -np.inf)
        )
        slots.logw_S[group.slots] = logw_N
        commit_tokens(slots, Population([group]))

    def set_heads(self, job: PrefillRequest) -> None:
        """Every particle refers to the last page of its sequence, and so does its unconditional row."""
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
        for role in group.decoding.roles:
            self._executor.join(role, self._particles(group, role, job.rows[Stream(role)]))
            self._known.add((role, group.stop_entry))
        for stream in (stream for stream in group.streams if stream.unconditional):
            slots_N = self._slots.unconditional_slots(group.slots)
            self._executor.join(
                stream.role, _table(slots_N, group, _pages(job.rows[stream], len(slots_N)), group.negative_size)
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
            alive_N=group.decoding.alive(slots.logw_S[slots_N]),
            text_N=self._text(group, first_N).astype(np.int32),
            logw_N=slots.logw_S[slots_N],
            stops=group.stop_entry,
            machine=None if (role, group.stop_entry) in self._known else group.rules.machine,
            tokens_XL=_of_rows(rows, len(slots_N), "tokens_L") if group.params.follows_tokens else None,
        )

    def add_empty(self, group: SequenceGroup, slots_N: np.ndarray) -> None:
        """Slots of a group that hold no particle before its next round's choice."""
        nothing_XL, unconditional_slots = np.zeros((1, 1), dtype=np.int32), self._slots.unconditional_slots(slots_N)
        for stream in group.streams:
            role, there_N = stream.role, unconditional_slots if stream.unconditional else slots_N
            self._slots.head_S[role][there_N] = 0
            self._slots.held_S[role][there_N] = 0
            # They take over whole sequences, with the pages of the prompt.
            self._executor.join(role, _table(there_N, group, nothing_XL, 0))

    def _text(self, group: SequenceGroup, length_N: np.ndarray) -> np.ndarray:
        """States of the stop machine after so many of the particles' tokens."""
        tokens_SL, rules = self._slots.tokens_SL, group.rules
        return np.array(
            [
                rules.state(tokens_SL[slot, :length].tolist())
                for slot, length in zip(group.slots.tolist(), length_N.tolist())
            ]
        )


def _table(slots_N: np.ndarray, group: SequenceGroup, pages_XL: np.ndarray, base: int) -> SequenceHandoff:
    """Slots of a request without particles yet, or of unconditional rows: only their block tables count."""
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
        stops=group.stop_entry,
        machine=None,
    )


def _pages(rows: list[PromptRow], size: int) -> np.ndarray:
    """int32 [N, L] pages of every row's positions; page 0 where there is none. [1, L] where all rows have the same."""
    return _of_rows(rows, size, "pages_L")


def _of_rows(rows: list[PromptRow], size: int, name: str) -> np.ndarray:
    """As `_pages`, of an array of each row."""
    row_N = row_of_batch(len(rows), size)
    values = [getattr(rows[row], name) for row in (row_N if len(rows) > 1 else row_N[:1])]
    out_XL = np.zeros((len(values), max(map(len, values))), dtype=np.int32)
    for out_L, values_L in zip(out_XL, values):
        out_L[: len(values_L)] = values_L
    return out_XL
