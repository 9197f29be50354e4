"""Handing particles to the models. `Handoff` fills the slots of a request that begins or resumes, and sends its
particles to each model that decodes them, with the entry of its stop machine (`StopEntries`)."""

from __future__ import annotations

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.round_executor import RoundExecutor
from smc.memory.kv_cache import KVCacheManager
from smc.round.plan import SequenceHandoff
from smc.scheduler.decode import commit_tokens
from smc.scheduler.planner import SlotBatch
from smc.scheduler.prefill_batches import PrefillRequest, PromptRow
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots, Stream, row_of_batch
from smc.stops import START, StopMachine
from smc.types import ModelRole


class StopEntries:
    """Assigns entries 1..count of the workers' stop tables. Requests with equal stop machines share an entry. An unused
    entry keeps its machine until another machine needs it."""

    def __init__(self, count: int) -> None:
        self._machines: dict[int, StopMachine] = {}
        self._users = dict.fromkeys(range(1, count + 1), 0)
        self._known: set[tuple[ModelRole, int]] = set()
        """Pairs of a model and an entry, for entries whose stop machine the model has."""

    def claim(self, machine: StopMachine) -> int | None:
        """Return the entry of a machine, or None while all entries are in use."""
        entry = next((e for e, there in self._machines.items() if there == machine), None)
        if entry is None:
            entry = next((e for e, users in self._users.items() if not users), None)
            if entry is None:
                return None
            self._machines[entry] = machine
            self._known -= {(role, entry) for role in ModelRole}
        self._users[entry] += 1
        return entry

    def machine_for(self, role: ModelRole, entry: int) -> StopMachine | None:
        """Return the entry's machine, which is sent to a model at the first call for both; None at later calls."""
        if (role, entry) in self._known:
            return None
        self._known.add((role, entry))
        return self._machines[entry]

    def forget(self, role: ModelRole) -> None:
        """Record that a model has lost its stop table."""
        self._known = {(name, entry) for name, entry in self._known if name != role}

    def release(self, entry: int) -> None:
        self._users[entry] -= 1
        assert self._users[entry] >= 0, "a stop entry was released twice"

    @property
    def used(self) -> int:
        return sum(self._users.values())


class Handoff:
    """Fills slots, and hands particles to a `RoundExecutor`."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        memory: KVCacheManager,
        executor: RoundExecutor,
        stops: StopEntries,
    ) -> None:
        self._config, self._slots, self._memory, self._executor = config, slots, memory, executor
        self._stops = stops

    def first_tokens(self, job: PrefillRequest) -> None:
        """Write the first token of every particle to its slot. Waits for the draw."""
        assert job.first is not None, "scheduled with the last chunk"
        group, result = job.group, job.first.result()
        n, slots = len(group.slots), self._slots
        tokens_N, logp_N = result.drawn_RF[job.batch_index, :n], result.drawn_logp_RF[job.batch_index, :n]
        log_z = float(result.log_z_R[job.batch_index])
        if (why := job.first.failures().get(job.batch_index)) is not None:
            group.fail_constraint(why)
        if np.isnan(log_z):
            group.fail(group.rules.first)
        logw_N = result.logw_RF[job.batch_index, :n]
        # Slots without a particle repeat the first one, which has a particle.
        like_N = np.where(group.rules.alive(logw_N), np.arange(n), 0)
        tokens_N, logp_N = tokens_N[like_N], logp_N[like_N]
        # A model that fails may return any number.
        ends = {} if group.error else {token: group.stop_rules.ends((token,)) for token in set(tokens_N.tolist())}
        ended_N = np.array([ends.get(token, True) for token in tokens_N.tolist()])
        if result.raw_logp_RF.shape[1]:
            slots.raw_logp_SL[group.slots, 0] = result.raw_logp_RF[job.batch_index, :n][like_N]
        slots.begin(group.slots, tokens_N, logp_N, ended_N | (logw_N == -np.inf))
        slots.logw_S[group.slots] = logw_N
        commit_tokens(slots, SlotBatch([group]))

    def set_heads(self, job: PrefillRequest) -> None:
        """Let every particle, and every unconditional row, refer to the last page of its sequence."""
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
        for role in group.rules.roles:
            self._executor.join(role, self._particles(group, role, job.rows[Stream(role)]))
        for stream in (stream for stream in group.streams if stream.unconditional):
            slots_N = self._slots.unconditional_slots(group.slots)
            pages_RL = _of_slots([row.pages_L for row in job.rows[stream]], len(slots_N))
            self._executor.join(stream.role, _table(slots_N, group, pages_RL, group.negative_size))

    def _particles(self, group: SequenceGroup, role: ModelRole, rows: list[PromptRow]) -> SequenceHandoff:
        slots, slots_N, prompt = self._slots, group.slots, group.prompt_size
        end_N, ended_N = prompt + slots.length_S[slots_N], slots.ended_S[slots_N]
        pending_N = end_N - slots.held_S[role][slots_N]
        if role == ModelRole.DRAFT:
            # For an ended particle, models only need to know that its last token was not run.
            pending_N = np.where(ended_N, 1, pending_N)
        first_N = slots.length_S[slots_N] - pending_N
        column_NQ = np.minimum(first_N[:, None] + np.arange(self._config.block + 2), slots.tokens_SL.shape[1] - 1)
        column_NQ = column_NQ[:, : int(pending_N.max())]
        return SequenceHandoff(
            slots_N=slots_N,
            pages_RL=_of_slots([row.pages_L for row in rows], len(slots_N)),
            base=prompt,
            limit=prompt + group.params.max_tokens,
            least=prompt + group.params.min_tokens,
            end_N=end_N.astype(np.int32),
            pending_NQ=slots.tokens_SL[slots_N[:, None], column_NQ],
            pending_N=pending_N.astype(np.int32),
            logq_NQ=slots.logq_SL[slots_N[:, None], column_NQ],
            ended_N=ended_N,
            alive_N=group.rules.alive(slots.logw_S[slots_N]),
            text_N=self._text(group, first_N).astype(np.int32),
            logw_N=slots.logw_S[slots_N],
            stops=group.stop_entry,
            machine=self._stops.machine_for(role, group.stop_entry),
            tokens_RL=(
                _of_slots([row.tokens_L for row in rows], len(slots_N)) if group.params.follows_tokens else None
            ),
        )

    def add_empty(self, group: SequenceGroup, slots_N: np.ndarray) -> None:
        """Register slots of a group at its models. They hold no particle until the next round fills them."""
        nothing_RL, unconditional_slots = np.zeros((1, 1), dtype=np.int32), self._slots.unconditional_slots(slots_N)
        for stream in group.streams:
            role, there_N = stream.role, unconditional_slots if stream.unconditional else slots_N
            self._slots.head_S[role][there_N] = 0
            self._slots.held_S[role][there_N] = 0
            # The round copies whole sequences there, with the pages of the prompt.
            self._executor.join(role, _table(there_N, group, nothing_RL, 0))

    def _text(self, group: SequenceGroup, length_N: np.ndarray) -> np.ndarray:
        """States of the stop machine after the first `length` tokens of each particle."""
        tokens_SL, stop_rules = self._slots.tokens_SL, group.stop_rules
        return np.array(
            [
                stop_rules.state(tokens_SL[slot, :length].tolist())
                for slot, length in zip(group.slots.tolist(), length_N.tolist())
            ]
        )


def _table(slots_N: np.ndarray, group: SequenceGroup, pages_RL: np.ndarray, base: int) -> SequenceHandoff:
    """Make a handoff of slots that only need block tables: slots without particles, and those of unconditional rows."""
    n = len(slots_N)
    return SequenceHandoff(
        slots_N=slots_N,
        pages_RL=pages_RL,
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


def _of_slots(values: list[np.ndarray], size: int) -> np.ndarray:
    """Repeat the values of the rows of a request, one for each position, for `size` slots: int32 [N, L], with 0 past a
    row's end; [1, L] if all slots share one row."""
    if len(values) > 1:
        values = [values[row] for row in row_of_batch(len(values), size)]
    out_RL = np.zeros((len(values), max(map(len, values))), dtype=np.int32)
    for out_L, values_L in zip(out_RL, values):
        out_L[: len(values_L)] = values_L
    return out_RL
