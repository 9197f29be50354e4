"""Runs what groups start from through the models, a chunk at a time: prompts, and the answers of groups that are taken
up again.

Sequences of a group share the pages of what they have in common. A prompt is run once per model; when its last chunk
has been asked for, so have the first tokens of all particles, drawn from the target independently (design section 2).
Nothing here waits: a chunk is asked for beside the rounds of other groups, and what it draws is read when those have
been asked for, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from smc.executor.messages import Draws, Pending, PromptBatch, PromptResult, Stream, Tops, Worker
from smc.memory.kv_cache import KVCacheManager
from smc.memory.pages import DUMMY_PAGE
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.scheduler.round_plan import Population
from smc.scheduler.sequence_group import SequenceGroup
from smc.types import ModelRole


@dataclass
class PromptRow:
    """A sequence that is to have keys and values on one side."""

    tokens_L: np.ndarray
    pages_L: np.ndarray
    """int32 page of every position."""
    known: int
    """Positions that were there, or asked for by others, when it was planted."""
    done: int = field(init=False)
    """Positions that are there, or have been asked for."""

    def __post_init__(self) -> None:
        self.done = self.known

    @property
    def left(self) -> int:
        return len(self.tokens_L) - self.done


@dataclass(eq=False)
class PrefillRequest:
    """A group on its way to its first round."""

    group: SequenceGroup
    rows: dict[Stream, list[PromptRow]]
    """By lane: a side, or of a guided request its companion there."""
    begun: bool = False
    """Some of it has been asked for."""
    waited: bool = False
    """For what an earlier one has in common with it; what there is of that now has not been looked at."""
    first: Pending[PromptResult[np.ndarray]] | None = None
    """First tokens, asked for with the prompt's last chunk."""
    place: int = 0
    """Of the group among those that were asked for together."""
    tops: list[tuple[Pending[PromptResult[np.ndarray]], slice]] = field(default_factory=list)
    """Of an answer that is rescored: results in the order of its tokens, and where in each its own stand."""

    @property
    def asked(self) -> bool:
        """All has been asked for."""
        return not any(row.left for rows in self.rows.values() for row in rows)

    def on(self, role: ModelRole) -> list[PromptRow]:
        """What its model is to run."""
        return [*self.rows.get(Stream(role), ()), *self.rows.get(Stream(role, unconditional=True), ())]


def count_pages(sequences: Sequence[np.ndarray]) -> int:
    """Pages that sequences of one group need."""
    total = 0
    for i, tokens_L in enumerate(sequences):
        total += len(tokens_L) - max([0, *(common_length(tokens_L, other) for other in sequences[:i])])
    return total


def allocate_from_cache(
    memory: KVCacheManager, role: ModelRole, sequences: Sequence[np.ndarray], cached: tuple[int, int], loose: np.ndarray
) -> list[PromptRow]:
    """Pages for sequences that all begin with the `cached` (positions, page); what they have in common they share.

    `loose` are as many as `count_pages` says, less the cached ones. The last page of every sequence is held once, by
    whoever asked."""
    ledger = memory.ledgers[role]
    rows: list[PromptRow] = []
    for i, tokens_L in enumerate(sequences):
        shared = [common_length(tokens_L, other) for other in sequences[:i]]
        known, pages_L = cached[0], ledger.path(cached[1], cached[0])
        if shared and max(shared) > known:
            known = max(shared)
            pages_L = rows[shared.index(known)].pages_L[:known]
        own_L, loose = loose[: len(tokens_L) - known], loose[len(tokens_L) - known :]
        ledger.chain(int(pages_L[-1]) if known else DUMMY_PAGE, own_L)
        pages_L = np.concatenate((pages_L, own_L)).astype(np.int32)
        ledger.hold(pages_L[-1:])
        rows.append(PromptRow(tokens_L, pages_L, known))
    assert not len(loose), "more pages were set aside than sequences need"
    return rows


def common_length(one_L: np.ndarray, other_L: np.ndarray) -> int:
    """Leading tokens that two sequences have in common."""
    size = min(len(one_L), len(other_L))
    different = np.flatnonzero(one_L[:size] != other_L[:size])
    return int(different[0]) if len(different) else size


def prefill_step(
    starts: list[PrefillRequest], worker: Worker, role: ModelRole, chunk: int
) -> list[tuple[int, Pending[PromptResult[np.ndarray]]]]:
    """Ask for up to `chunk` tokens of one side, oldest request first. Returns what was asked for: tokens, and what
    comes of them."""
    asked: list[tuple[int, Pending[PromptResult[np.ndarray]]]] = []
    plain: list[tuple[PromptRow, int]] = []
    drawing: list[PrefillRequest] = []
    rescoring: list[tuple[PrefillRequest, int]] = []
    for start in starts:
        if start.group.answer is not None:
            chunk = max(0, chunk - _part_of_answer(start, start.on(role), chunk, plain, rescoring))
            continue
        rows, draws = start.on(role), role == start.group.decoding.first and start.group.saved is None
        left = sum(row.left for row in rows)
        if draws and chunk and 0 < left <= max(chunk, len(rows)):
            drawing.append(start)
            chunk = max(0, chunk - left)
            continue
        for row in rows:
            # First tokens are drawn from what both rows of a guided request say: their last tokens are run together.
            count = min(row.left - (draws and len(rows) > 1), chunk)
            if count > 0:
                chunk -= count
                plain.append((row, count))
    if plain:
        asked.append((sum(count for _, count in plain), worker.run_prompts(_batch(plain))))
    last = _last_parts(drawing, role)
    if drawing:
        pending = worker.run_prompts(_batch(last, _first_draws([start.group for start in drawing])))
        asked.append((sum(count for _, count in last), pending))
        for place, start in enumerate(drawing):
            start.first, start.place = pending, place
    parts = _answer_parts(rescoring)
    if rescoring:
        pending = worker.run_prompts(_batch(parts, tops=_tops(rescoring)))
        asked.append((sum(count for _, count in parts), pending))
        ends = accumulate(count for _, count in rescoring)
        for (start, count), end in zip(rescoring, ends):
            start.tops.append((pending, slice(end - count, end)))
    for row, count in (*plain, *last, *parts):
        row.done += count
    for start in starts:
        start.begun |= any(row.done > row.known for row in start.on(role))
    return asked


def _last_parts(starts: list[PrefillRequest], role: ModelRole) -> list[tuple[PromptRow, int]]:
    """What is left of prompts after which tokens are drawn, then of those that guide them."""
    rows = [start.rows[Stream(role)][0] for start in starts]
    guiding = [start.rows[Stream(role, unconditional=True)][0] for start in starts if start.group.params.guided]
    return [(row, row.left) for row in (*rows, *guiding)]


def _part_of_answer(
    start: PrefillRequest,
    rows: list[PromptRow],
    chunk: int,
    plain: list[tuple[PromptRow, int]],
    rescoring: list[tuple[PrefillRequest, int]],
) -> int:
    """What is asked for next of an answer that is rescored: of what comes before it, in `plain`, or if all of that can
    be, in `rescoring`: with as many of its tokens, of all rows alike, as there is room for. Returns how many tokens
    this is."""
    if not rows or not chunk:
        return 0
    answer, before = _answer_size(start), _before_answer(start, rows)
    # Both rows of a guided request are asked about the same tokens at a time.
    count = min([(max(chunk, len(rows)) - sum(before)) // len(rows), answer, *(row.left for row in rows)])
    if count > 0:
        rescoring.append((start, count))
        return sum(before) + count * len(rows)
    asked = 0
    for row, left in zip(rows, before):
        part = min(left, chunk - asked)
        if part > 0:
            plain.append((row, part))
            asked += part
    return asked


def _answer_parts(rescoring: list[tuple[PrefillRequest, int]]) -> list[tuple[PromptRow, int]]:
    """Rows that are asked about, then those that guide them, each with what comes before the answer."""
    parts = [
        (start.rows[stream], start, count)
        for stream in (Stream(ModelRole.TARGET), Stream(ModelRole.TARGET, unconditional=True))
        for start, count in rescoring
        if stream in start.rows
    ]
    return [(rows[0], _before_answer(start, rows)[0] + count) for rows, start, count in parts]


def _before_answer(start: PrefillRequest, rows: list[PromptRow]) -> list[int]:
    """Tokens that are left to run in each row after which no token of the answer comes."""
    return [max(0, row.left - _answer_size(start)) for row in rows]


def _answer_size(start: PrefillRequest) -> int:
    assert start.group.answer is not None
    return len(start.group.answer.tokens)


def _batch(parts: list[tuple[PromptRow, int]], draws: Draws | None = None, tops: Tops | None = None) -> PromptBatch:
    ends = [row.done + count for row, count in parts]
    return PromptBatch(
        pages_X=np.concatenate([row.pages_L[:end] for (row, _), end in zip(parts, ends)]),
        starts_R=np.array([row.done for row, _ in parts], dtype=np.int32),
        counts_R=np.array([count for _, count in parts], dtype=np.int32),
        tokens_T=np.concatenate([row.tokens_L[row.done : end] for (row, _), end in zip(parts, ends)]).astype(np.int64),
        draws=draws,
        tops=tops,
    )


def _tops(rescoring: list[tuple[PrefillRequest, int]]) -> Tops:
    groups, guided = (
        [start.group for start, _ in rescoring],
        [count for start, count in rescoring if start.group.params.guided],
    )
    is_biased = [bool(g.params.logit_bias or g.params.min_tokens) for g in groups]
    return Tops(
        law=Population(groups).target_law,
        count=max(g.params.top_logprobs for g in groups),
        asked_R=np.array([*(count for _, count in rescoring), *guided], dtype=np.int32),
        least_R=np.array([g.prompt_size + g.params.min_tokens for g in groups], dtype=np.int32),
        machines=tuple(g.rules.machine if biased else None for g, biased in zip(groups, is_biased)),
        **_guidance(groups),
    )


def _first_draws(groups: list[SequenceGroup]) -> Draws:
    population = Population(groups)
    biases = [(row, token, bias) for row, group in enumerate(groups) for token, bias in group.first_biases()]
    role = groups[0].decoding.first
    return Draws(
        law=population.draft_law if role == ModelRole.DRAFT else population.target_law,
        seed_R=population.seed_G,
        round_R=np.zeros(len(groups), dtype=np.int64),
        stream_RD=np.tile(np.arange(population.size_G.max()) * STREAMS_PER_PARTICLE, (len(groups), 1)),
        purpose=Purpose.TARGET,
        count_R=population.size_G.astype(np.int32),
        kind_R=np.array([g.decoding.kind for g in groups], dtype=np.int32),
        biased_2Y=np.array([(row, token) for row, token, _ in biases], dtype=np.int32).reshape(-1, 2).T,
        bias_Y=np.array([bias for _, _, bias in biases], dtype=np.float32),
        **_guidance(groups),
    )


def _guidance(groups: list[SequenceGroup]) -> dict[str, np.ndarray]:
    """Which rows guide others: they come after all of those."""
    guided = np.array([g.params.guided for g in groups])
    if not guided.any():
        return {}
    row_R = np.arange(len(groups))
    companion_R = np.where(guided, len(groups) + np.cumsum(guided) - 1, row_R)
    return {
        "companion_R": companion_R.astype(np.int32),
        "scale_R": np.array([g.params.guidance_scale for g in groups], dtype=np.float32),
    }
