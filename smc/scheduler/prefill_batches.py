"""Prefill jobs and their batches: sequences of requests that run through the models before the requests' rounds, or
after them. They are prompts, answers of resumed requests, and answers and prompts that are rescored.

Sequences of a request share the pages of their common beginning. A prompt is run once per model. Its last chunk also
draws the first tokens of all particles, independently, from the target. Nothing here waits: a chunk is scheduled beside
the rounds of other requests, and its draws are read after those rounds have been scheduled.

Local axes: Y tokens that are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.request import Alternatives, Answer, PromptToken
from smc.arrays import common_length
from smc.distributions import DistributionSpec
from smc.executor.messages import Draws, Guidance, Pending, PromptBatch, PromptResult, TopLogprobsSpec, Worker
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.scheduler.methods import TARGET_ALONE, Progress
from smc.scheduler.planner import SlotBatch, reports_raw
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Stream
from smc.types import ModelRole


@dataclass
class PromptRow:
    """A sequence whose keys and values one model is to compute."""

    tokens_L: np.ndarray
    pages_L: np.ndarray
    """Page of every position, int32."""
    known: int
    """Positions that were cached, or scheduled by other requests, when pages were allocated."""
    done: int = field(init=False)
    """Positions that are computed or scheduled."""

    def __post_init__(self) -> None:
        self.done = self.known

    @property
    def left(self) -> int:
        return len(self.tokens_L) - self.done


Part = tuple[PromptRow, int]
"""The next tokens of a sequence that run: the row, and their number."""
Chunk = tuple[int, Pending[PromptResult[np.ndarray]]]
"""Tokens that are scheduled at one model: their number, and the pending result."""


@dataclass(eq=False)
class PrefillJob:
    """Sequences of one request that are to run through the models."""

    group: SequenceGroup
    config: EngineConfig
    rows: dict[Stream, list[PromptRow]] = field(init=False, default_factory=dict)
    """Rows by stream, once pages have been allocated."""
    passes: dict[ModelRole, Pending[PromptResult[np.ndarray]]] = field(init=False, default_factory=dict)
    """Last batch at each model that holds a part of the job."""
    begun: bool = field(init=False, default=False)
    """Whether some of the job has been scheduled."""
    waited: bool = field(init=False, default=False)
    """Whether the job waited for a common beginning that an earlier job runs, and has not searched the cache since."""

    @property
    def scheduled(self) -> bool:
        """Whether all of the job has been scheduled."""
        return not any(row.left for rows in self.rows.values() for row in rows)

    @property
    def streams(self) -> tuple[Stream, ...]:
        return self.group.streams

    @property
    def round_pages(self) -> dict[ModelRole, int]:
        """Pages that the first round after the job allocates."""
        return self.group.round_pages(self.config)

    def on(self, role: ModelRole) -> list[PromptRow]:
        """Rows that a model is to run."""
        return [*self.rows.get(Stream(role), ()), *self.rows.get(Stream(role, unconditional=True), ())]

    def pages(self, stream: Stream) -> int:
        """Number of pages for the job's sequences of a stream."""
        raise NotImplementedError

    def sequences(self, stream: Stream) -> list[np.ndarray]:
        """Tokens of each sequence of a stream whose keys and values are needed."""
        raise NotImplementedError

    def most_cached(self, stream: Stream) -> int:
        """Maximum number of prompt tokens from the prefix cache: tokens whose logits are needed must run."""
        raise NotImplementedError

    def count_cached(self, tokens: int) -> None:
        """Record that this many tokens of the prompt need not be run."""


class PrefillRequest(PrefillJob):
    """A request between its admission and its first round: its prompt, or the sequences that it resumes from."""

    first: Pending[PromptResult[np.ndarray]] | None = None
    """First tokens, drawn in the batch of the prompt's last chunk."""
    batch_index: int = 0
    """Row of the request in the batch that draws its first tokens."""
    was_left: bool = False
    """Whether an earlier step has left the first tokens to be read."""

    def draws_at(self, role: ModelRole) -> bool:
        """Whether first tokens are drawn from this model."""
        return role is self.group.rules.first and self.group.draws_first_token

    def pages(self, stream: Stream) -> int:
        group = self.group
        if group.checkpoint is None:
            return len(group.prompt_of(stream))
        return group.checkpoint.pages((group.rules, stream), lambda: count_pages(self.sequences(stream)))

    def sequences(self, stream: Stream) -> list[np.ndarray]:
        group = self.group
        prompt = np.array(group.prompt_of(stream), dtype=np.int64)
        if group.checkpoint is None:
            return [prompt]
        saved = (group.checkpoint[name] for name in ("tokens_SL", "length_S", "block_S", "ended_S"))
        sequences = []
        for tokens_L, length, block, ended in zip(*saved):
            particle = Progress(int(length), int(block), bool(ended), group.rounds)
            held = group.rules.held_tokens(self.config, stream.role, particle)
            sequences.append(np.concatenate((prompt, tokens_L[:held])))
        return sequences

    def most_cached(self, stream: Stream) -> int:
        return len(self.group.prompt_of(stream)) - self.draws_at(stream.role)

    def count_cached(self, tokens: int) -> None:
        if self.group.draws_first_token:
            self.group.cached_tokens = tokens


@dataclass(eq=False)
class RescoringJob(PrefillJob):
    """A prompt and a drawn answer that run through the target once more, as a prompt does. This gives, as requested,
    the log-probabilities of the prompt's tokens and the likeliest tokens at each position of the answer. The job takes
    part in no round and holds no slot."""

    answer: Answer
    results: list[tuple[Pending[PromptResult[np.ndarray]], slice]] = field(init=False, default_factory=list)
    """Results in the order of the answer's tokens, each with the slice of its tokens that belong to this job."""
    prompt_results: list[tuple[Pending[PromptResult[np.ndarray]], slice]] = field(init=False, default_factory=list)
    """Likewise for the prompt's tokens."""

    @property
    def raw(self) -> bool:
        """Whether answers are scored under the softmax of the target's own logits."""
        return self.config.logprobs_mode == "raw"

    @property
    def streams(self) -> tuple[Stream, ...]:
        # The prompt's tokens are scored without guidance.
        is_guided = self.scored_answer and not self.raw
        return self.group.streams_by(TARGET_ALONE) if is_guided else (Stream(ModelRole.TARGET),)

    @property
    def scored_answer(self) -> tuple[int, ...]:
        """Tokens of the answer that are scored: all, or none."""
        return self.answer.tokens if self.group.params.top_logprobs else ()

    @property
    def round_pages(self) -> dict[ModelRole, int]:
        return {ModelRole.TARGET: 0}

    @property
    def expected_pages(self) -> dict[ModelRole, int]:
        """Pages that the job is likely to hold."""
        return {ModelRole.TARGET: sum(map(self.pages, self.streams))}

    def pages(self, stream: Stream) -> int:
        # Nothing follows the last token, so it need not run.
        return len(self.group.prompt_of(stream)) + len(self.scored_answer) - 1

    def sequences(self, stream: Stream) -> list[np.ndarray]:
        return [np.array((*self.group.prompt_of(stream), *self.scored_answer)[:-1], dtype=np.int64)]

    def most_cached(self, stream: Stream) -> int:
        # Tokens from the cache are not scored.
        if self.group.params.prompt_logprobs is not None and not stream.unconditional:
            return 0
        return len(self.group.prompt_of(stream)) - 1

    def rescored(self) -> Answer:
        """Return the answer with the requested log-probabilities. Waits for them. Fails the request if the model's
        logits are NaN."""
        return replace(self.answer, top_logprobs=self._top_logprobs(), prompt_logprobs=self._prompt_logprobs())

    def _top_logprobs(self) -> tuple[Alternatives, ...] | None:
        count = self.group.params.top_logprobs
        if not count:
            return None
        found: list[Alternatives] = []
        for result, at in [(pending.result(), at) for pending, at in self.results]:
            found += self._likeliest(result, at, count)
        return tuple(found)

    def _prompt_logprobs(self) -> tuple[PromptToken, ...] | None:
        count = self.group.params.prompt_logprobs
        if count is None:
            return None
        found: list[PromptToken] = []
        for result, at in [(pending.result(), at) for pending, at in self.prompt_results]:
            likeliest = self._likeliest(result, at, count)
            found += map(PromptToken, result.given_logp_Y[at].tolist(), result.given_rank_Y[at].tolist(), likeliest)
        return tuple(found)

    def _likeliest(self, result: PromptResult[np.ndarray], at: slice, count: int) -> list[Alternatives]:
        """The `count` likeliest tokens at each of these positions."""
        token_YC, logp_YC = result.top_YC[at, :count], result.top_logp_YC[at, :count]
        if np.isnan(result.top_logp_YC[at]).any():
            self.group.fail(ModelRole.TARGET)
        # Tokens outside of a truncated distribution come last.
        count_Y = (logp_YC > -np.inf).sum(1)
        return [tuple(zip(*row[:2]))[: row[2]] for row in zip(token_YC.tolist(), logp_YC.tolist(), count_Y.tolist())]

    def prompt_left(self, rows: list[PromptRow]) -> int:
        """Number of tokens still to run that are followed by a token of the prompt to score."""
        if self.group.params.prompt_logprobs is None:
            return 0
        return max(0, self.group.prompt_size - 1 - rows[0].done)

    def before_answer(self, rows: list[PromptRow]) -> list[int]:
        """Number of tokens of each row still to run that are not followed by a token of the answer."""
        return [max(0, row.left - len(self.scored_answer)) for row in rows]

    def next_part(self, rows: list[PromptRow], chunk: int, plain: list[Part], scored: list[ScoredPart]) -> int:
        """Add the job's next part, of at most about `chunk` tokens, and return its number of tokens. Tokens of a scored
        prompt are added to `scored`. Other tokens before the answer are added to `plain`, unless all of them and tokens
        of the answer fit: then `scored` gets both, with as many of the answer's tokens as fit, the same in all rows."""
        if not rows or not chunk:
            return 0
        if left := self.prompt_left(rows):
            scored.append(ScoredPart(self, min(left, chunk), of_prompt=True))
            return min(left, chunk)
        before = self.before_answer(rows)
        # Both rows of a guided request are scored at the same tokens.
        answer = len(self.scored_answer)
        count = min([(max(chunk, len(rows)) - sum(before)) // len(rows), answer, *(row.left for row in rows)])
        if count > 0:
            scored.append(ScoredPart(self, count, of_prompt=False))
            return sum(before) + count * len(rows)
        added = 0
        for row, left in zip(rows, before):
            part = min(left, chunk - added)
            if part > 0:
                plain.append((row, part))
                added += part
        return added


@dataclass(frozen=True, eq=False)
class ScoredPart:
    """Tokens of a prompt or an answer that a chunk scores."""

    job: RescoringJob
    count: int
    of_prompt: bool

    @property
    def plain(self) -> bool:
        """Whether the tokens are scored under the softmax of the target's own logits: those of prompts always are."""
        return self.of_prompt or self.job.raw

    @property
    def guided(self) -> bool:
        return self.job.group.params.guided and not self.plain


def count_pages(sequences: Sequence[np.ndarray]) -> int:
    """Number of pages that the sequences of one group need."""
    total = 0
    for i, tokens_L in enumerate(sequences):
        total += len(tokens_L) - max([0, *(common_length(tokens_L, other) for other in sequences[:i])])
    return total


def prefill_step(jobs: list[PrefillJob], worker: Worker, role: ModelRole, chunk: int) -> list[Chunk]:
    """Schedule up to `chunk` tokens at one model, oldest job first. Return what was scheduled."""
    scheduled: list[Chunk] = []
    plain: list[Part] = []
    drawing: list[PrefillRequest] = []
    scored: list[ScoredPart] = []
    ran: dict[int, Pending[PromptResult[np.ndarray]]] = {}
    for job in jobs:
        if isinstance(job, RescoringJob):
            chunk = max(0, chunk - job.next_part(job.on(role), chunk, plain, scored))
        else:
            assert isinstance(job, PrefillRequest)
            chunk = _next_part(job, role, chunk, plain, drawing)

    def run(parts: list[Part], batch: PromptBatch) -> Pending[PromptResult[np.ndarray]]:
        pending = worker.run_prompts(batch)
        scheduled.append((sum(count for _, count in parts), pending))
        ran.update({id(row): pending for row, _ in parts})
        return pending

    if plain:
        run(plain, _batch(plain))
    last = _last_parts(drawing, role)
    if drawing:
        first = run(last, _batch(last, _first_draws(drawing)))
        for index, job in enumerate(drawing):
            job.first, job.batch_index = first, index
    for row, count in (*plain, *last):
        row.done += count
    # Batches of their own, so that results do not depend on the settings of other requests.
    for same in ([part for part in scored if part.plain], [part for part in scored if not part.plain]):
        if not same:
            continue
        parts = _scored_rows(same)
        pending = run(parts, _batch(parts, top_logprobs=_top_logprobs_spec(same)))
        for part, end in zip(same, accumulate(part.count for part in same)):
            results = part.job.prompt_results if part.of_prompt else part.job.results
            results.append((pending, slice(end - part.count, end)))
        for row, count in parts:
            row.done += count
    for job in jobs:
        job.begun |= any(row.done > row.known for row in job.on(role))
        if last_ran := [ran[id(row)] for row in job.on(role) if id(row) in ran]:
            job.passes[role] = last_ran[-1]
    return scheduled


def _next_part(
    job: PrefillRequest, role: ModelRole, chunk: int, plain: list[Part], drawing: list[PrefillRequest]
) -> int:
    """Add the next part of a request: to `drawing` if first tokens are drawn after it, else to `plain`. Return the rest
    of the chunk."""
    rows, draws = job.on(role), job.draws_at(role)
    left = sum(row.left for row in rows)
    if draws and chunk and 0 < left <= max(chunk, len(rows)):
        drawing.append(job)
        return max(0, chunk - left)
    for row in rows:
        # First tokens of a guided request depend on both of its rows, so the last tokens of both run together.
        count = min(row.left - (draws and len(rows) > 1), chunk)
        if count > 0:
            chunk -= count
            plain.append((row, count))
    return chunk


def _last_parts(drawing: list[PrefillRequest], role: ModelRole) -> list[Part]:
    """Remaining tokens of prompts after which first tokens are drawn, then those of their unconditional rows."""
    rows = [job.rows[Stream(role)][0] for job in drawing]
    unconditional = [job.rows[Stream(role, True)][0] for job in drawing if job.group.params.guided]
    return [(row, row.left) for row in (*rows, *unconditional)]


def _scored_rows(scored: list[ScoredPart]) -> list[Part]:
    """Rows with scored tokens, then their unconditional rows. Rows with scored answers include the remaining tokens
    before the answer."""
    rows = [(part.job.rows[Stream(ModelRole.TARGET)], part) for part in scored]
    rows += [(part.job.rows[Stream(ModelRole.TARGET, unconditional=True)], part) for part in scored if part.guided]
    return [
        (of_stream[0], part.count + (0 if part.of_prompt else part.job.before_answer(of_stream)[0]))
        for of_stream, part in rows
    ]


def _batch(parts: list[Part], draws: Draws | None = None, top_logprobs: TopLogprobsSpec | None = None) -> PromptBatch:
    ends = [row.done + count for row, count in parts]
    return PromptBatch(
        pages_B=np.concatenate([row.pages_L[:end] for (row, _), end in zip(parts, ends)]),
        starts_R=np.array([row.done for row, _ in parts], dtype=np.int32),
        counts_R=np.array([count for _, count in parts], dtype=np.int32),
        tokens_T=np.concatenate([row.tokens_L[row.done : end] for (row, _), end in zip(parts, ends)]).astype(np.int64),
        draws=draws,
        top_logprobs=top_logprobs,
    )


def _top_logprobs_spec(scored: list[ScoredPart]) -> TopLogprobsSpec:
    """Return the specification for parts that are all plain, or all not."""
    groups, plain = [part.job.group for part in scored], scored[0].plain
    is_biased = [not plain and bool(g.params.logit_bias or g.params.min_tokens) for g in groups]
    return TopLogprobsSpec(
        distribution=DistributionSpec.plain(len(scored))
        if plain
        else SlotBatch(groups).distribution_of(ModelRole.TARGET),
        count=max(1, *(max(g.params.top_logprobs, g.params.prompt_logprobs or 0) for g in groups)),
        scored_P=np.array(
            [*(part.count for part in scored), *(part.count for part in scored if part.guided)], np.int32
        ),
        least_R=np.array([g.prompt_size + g.params.min_tokens for g in groups], dtype=np.int32),
        machines=tuple(g.stop_rules.machine if biased else None for g, biased in zip(groups, is_biased)),
        given_Y=np.concatenate([_given(part) for part in scored]) if any(part.of_prompt for part in scored) else None,
        guidance=_guidance(groups, [part.guided for part in scored]),
    )


def _given(part: ScoredPart) -> np.ndarray:
    """The prompt tokens that follow each token of this part; zeros for a part of an answer."""
    if not part.of_prompt:
        return np.zeros(part.count, dtype=np.int64)
    first = part.job.rows[Stream(ModelRole.TARGET)][0].done + 1
    return np.array(part.job.group.request.prompt[first : first + part.count], dtype=np.int64)


def _first_draws(jobs: list[PrefillRequest]) -> Draws:
    groups = [job.group for job in jobs]
    slots = SlotBatch(groups)
    biases = [(row, token, bias) for row, group in enumerate(groups) for token, bias in group.first_biases()]
    seen = [(row, token) for row, group in enumerate(groups) for token in group.repeated_tokens()]
    machines = tuple(group.stop_rules.machine if group.params.masked else None for group in groups)
    return Draws(
        distribution=slots.distribution_of(groups[0].rules.first),
        seed_R=slots.seed_G,
        round_R=np.array([group.redraws for group in groups], dtype=np.int64),
        stream_RF=np.tile(np.arange(slots.size_G.max()) * STREAMS_PER_PARTICLE, (len(groups), 1)),
        purpose=Purpose.TARGET,
        count_R=slots.size_G.astype(np.int32),
        decoding_R=np.array([g.rules.decoding for g in groups], dtype=np.int32),
        biased_row_U=np.array([row for row, _, _ in biases], dtype=np.int32),
        biased_token_U=np.array([token for _, token, _ in biases], dtype=np.int32),
        bias_U=np.array([bias for _, _, bias in biases], dtype=np.float32),
        seen_row_Z=np.array([row for row, _ in seen], dtype=np.int32),
        seen_token_Z=np.array([token for _, token in seen], dtype=np.int32),
        repetition_Z=np.array([groups[row].params.repetition_penalty for row, _ in seen], dtype=np.float32),
        machines=machines if any(machines) else (),
        raw_logprobs=reports_raw(jobs[0].config, slots.params),
        by_answer_R=np.array([g.params.constraint_scope == "answer" for g in groups]),
        guidance=_guidance(groups, [g.params.guided for g in groups]),
    )


def _guidance(groups: list[SequenceGroup], is_guided: list[bool]) -> Guidance | None:
    """Index of the unconditional row of each guided row, which follow after all rows, and the guidance scales; None if
    no row is guided."""
    guided = np.array(is_guided)
    if not guided.any():
        return None
    row_R = np.arange(len(groups))
    return Guidance(
        unconditional_R=np.where(guided, len(groups) + np.cumsum(guided) - 1, row_R).astype(np.int32),
        scale_R=np.array([g.params.guidance_scale if each else 1 for g, each in zip(groups, is_guided)], np.float32),
    )
