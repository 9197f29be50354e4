"""Runs prompts through one model, and holds its weights and KV memory. Knows nothing about particles.

Also computes `top_logprobs` and `prompt_logprobs`: the likeliest tokens at positions of a sequence, and how likely its
own tokens are. An answer needs this once, so it is plain torch wherever bits may depend on other rows.

Local axes: P all rows of a batch, U logits that are biased, Y tokens that are scored (row after row), Z tokens of
prompts with a repetition penalty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import SourceRows
from smc.algorithm.resampling import Spans
from smc.api.constraint import Constraint
from smc.arrays import is_one_of, map_tensors, offsets, to_device, where
from smc.attention.backend import ForwardBatch
from smc.attention.prompts import PromptAttention
from smc.constraint_masks import Follower, MaskWriter
from smc.constraints import Compiler
from smc.distributions import DistributionSpec
from smc.executor.graph_runner import AsyncResult, StageRunner
from smc.executor.logit_changes import LogitBiases, add_biases, repeated, width_of
from smc.executor.masks import Sharing, given_constraint
from smc.executor.messages import Draws, PromptBatch, PromptResult, TopLogprobsSpec
from smc.executor.ops import RoundOps
from smc.executor.sampling import Sampling
from smc.mask_reader import MaskPath
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from smc.model.decoder import Decoder, RopeTable
from smc.model.draft_vocab import DraftHead
from smc.philox import DrawKeys, RoundKeys
from smc.round.tensors import BiasTables
from smc.stops import StopMachine, TokenBytes
from smc.types import EXACT, Decoding, ModelRole, Numerics

SLICE = 32
"""Number of tokens whose distributions exist at the same time: distributions of more would take memory that is not
reserved."""
FIRST_STEP = 1 << 10
"""Step in the keys of the random numbers of first tokens; no step of a round has it."""


def last_tokens(counts_R: np.ndarray, scored_R: np.ndarray) -> np.ndarray:
    """Return the index [X] of the last `scored` of every row's `counts` tokens; tokens are stored row after row."""
    end_T = np.repeat(np.cumsum(counts_R), scored_R)
    return end_T - np.repeat(scored_R, scored_R) + offsets(scored_R)


class TopTokens(NamedTuple):
    """The likeliest tokens, with the fields of `PromptResult` that have axis Y."""

    top_YC: Tensor
    top_logp_YC: Tensor
    given_logp_Y: Tensor
    given_rank_Y: Tensor


def likeliest(
    logits: Callable[[Tensor], Tensor], sampling: Sampling, spec: TopLogprobsSpec, hidden_TE: Tensor, ends_R: np.ndarray
) -> TopTokens:
    """Return the likeliest tokens. `ends_R`: number of positions of every row after this pass."""
    device, rows = hidden_TE.device, len(spec.distribution.temperature_R)
    scored_R, ends_R = spec.scored_P[:rows], ends_R[:rows]
    row_Y = np.repeat(np.arange(rows), scored_R)
    next_Y = ends_R[row_Y] - scored_R[row_Y] + offsets(scored_R) + 1
    unconditional_Y = _unconditional_tokens(spec, row_Y, offsets(scored_R))
    tables = _tables(spec, sampling.vocab, device)
    width = max((width_of(machine) for machine in spec.machines if machine is not None), default=0)
    entries = (torch.arange(rows, device=device), to_device(spec.least_R, device))
    found = []
    for first in range(0, len(row_Y), SLICE):
        part = slice(first, first + SLICE)
        row_T = to_device(row_Y[part], device)
        logits_TV = logits(hidden_TE[first : first + len(row_T)])
        if unconditional_Y is not None and spec.guidance is not None:
            theirs_TV = logits(hidden_TE[to_device(unconditional_Y[part], device)])
            own_T = torch.arange(len(row_T), device=device)
            logits_TV = sampling.guide(logits_TV, theirs_TV, own_T, to_device(spec.guidance.scale_R, device)[row_T])
        if tables is not None:
            logits_TV = add_biases(tables, *entries, logits_TV, row_T, to_device(next_Y[part], device), width)
        dist_TV = torch.empty(len(row_T), sampling.vocab, device=device)
        sampling.write_distribution(logits_TV, spec.distribution.take(row_Y[part]), dist_TV)
        token_TC = first_tokens(dist_TV, min(spec.count, sampling.vocab))
        logp_TC = dist_TV.gather(-1, token_TC)
        found.append(TopTokens(token_TC.int(), logp_TC, *_given(spec, part, dist_TV)))
    return TopTokens(*map(torch.cat, zip(*found)))


def first_tokens(dist_TV: Tensor, count: int) -> Tensor:
    """Return the `count` likeliest tokens of each row in descending order, int64; of equally likely ones the first, as
    torch's own choice depends on the number of rows."""
    bits_TV, column_V = (dist_TV + 0.0).view(torch.int32).long(), torch.arange(dist_TV.shape[1], device=dist_TV.device)
    key_TV = bits_TV ^ ((bits_TV >> 31) & 0x7FFFFFFF)
    packed_TC = ((key_TV << 32) | (0xFFFFFFFF - column_V)).topk(count, dim=-1).values
    return 0xFFFFFFFF - (packed_TC & 0xFFFFFFFF)


def _given(spec: TopLogprobsSpec, part: slice, dist_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p [S] and ranks int32 [S] of the given tokens; [0] if there are none."""
    if spec.given_Y is None:
        return dist_TV[:0, 0], dist_TV[:0, 0].int()
    logp_T1 = dist_TV.gather(-1, to_device(spec.given_Y[part], dist_TV.device)[:, None])
    return logp_T1[:, 0], (dist_TV >= logp_T1).sum(-1).int()


def _unconditional_tokens(spec: TopLogprobsSpec, row_Y: np.ndarray, offset_Y: np.ndarray) -> np.ndarray | None:
    """Return for each scored token the index [Y] of the corresponding token in the row that guides its row, or its own
    index if no row does. None: no row is guided."""
    if spec.guidance is None:
        return None
    begin_P = np.cumsum(spec.scored_P) - spec.scored_P
    return begin_P[spec.guidance.unconditional_R[row_Y]] + offset_Y


def _tables(spec: TopLogprobsSpec, vocab: int, device: torch.device) -> BiasTables | None:
    """Return bias tables with an entry for each row of the batch; None if nothing is added."""
    if not any(spec.machines):
        return None
    biases = LogitBiases(len(spec.machines), vocab, device)
    for row, machine in enumerate(spec.machines):
        if machine is not None:
            biases.set(row, machine)
    return biases.tables


class FirstTokens(NamedTuple):
    """The first tokens of answers."""

    token_RF: Tensor
    """Integers of any type."""
    logp_RF: Tensor
    """float32 log p."""
    logw_RF: Tensor
    """float64 log-weight of the particle that begins with the token; -inf where none does."""


def _empty_result(rows: int) -> PromptResult[Tensor]:
    """Return the result of prompts without draws and scored tokens."""
    none_R0, none_00, none_0 = torch.zeros(rows, 0), torch.zeros(0, 0), torch.zeros(0)
    return PromptResult(
        drawn_RF=none_R0.int(),
        drawn_logp_RF=none_R0,
        raw_logp_RF=none_R0,
        logw_RF=none_R0.double(),
        log_z_R=none_R0.sum(1),
        top_YC=none_00.int(),
        top_logp_YC=none_00,
        given_logp_Y=none_0,
        given_rank_Y=none_0.int(),
    )


class ModelWorker:
    """A decoder and its pool of `pages` token positions, for sequences of up to `width` positions."""

    def __init__(
        self,
        name: ModelRole,
        model: Decoder,
        *,
        width: int,
        pages: int,
        vocab_size: int,
        token_bytes: TokenBytes,
        draft_head: DraftHead | None = None,
        context: int | None = None,
        sharing: Sharing | None = None,
        numerics: Numerics = Numerics.FASTEST,
    ) -> None:
        """`context`: tokens of the longest sequence, if not `width`; `token_bytes`: bytes of the vocabulary's tokens,
        in which stop strings are searched; `draft_head`: the part of its head that a draft proposes with, if not all of
        it; `sharing`: the ranks that hold parts of the model, if there are several; `numerics`: what the bits of
        results may depend on, if the model's operations can ensure it."""
        weight = model.embed.weight
        self.wanted_numerics = numerics
        self.name, self.model, self.device = name, model, weight.device
        self.width, self.pages = width, pages
        self.vocab_size, self.token_bytes, self.draft_head = vocab_size, token_bytes, draft_head
        self.sharing = sharing or Sharing()
        self._writer = MaskWriter(Compiler.of(token_bytes))
        self.pool = KVPool(model.config, pages, weight.dtype, self.device)
        self.rope = RopeTable(model.config, width, self.device, context)
        config = model.config
        self.attention = PromptAttention(
            (config.num_heads, config.num_kv_heads),
            config.head_dim,
            weight.dtype,
            self.device,
            windows=bool(config.window_layers),
        )
        self.stages = StageRunner(self.device)
        """Runs prompts, in the order in which they are requested."""
        self.ops = RoundOps()
        """Runs prompts through the model, masks first tokens, and draws them without replacement."""

    @torch.inference_mode()
    def run_prompts(self, batch: PromptBatch) -> AsyncResult:
        """Queue prompts. Raises ValueError for impossible positions, pages or tokens, before anything is written."""
        with self.stages.working():
            began = self.stages.event()
            last_R = np.cumsum(batch.counts_R) - 1
            result = _empty_result(len(batch.counts_R))
            failures: dict[int, str] = {}
            if batch.draws is not None:
                result = self._drawn(batch.draws, self._logits(self._forward(batch, last_R)), batch, failures)
            elif batch.top_logprobs is not None:
                hidden_TE = self._forward(batch, last_tokens(batch.counts_R, batch.top_logprobs.scored_P))
                top = likeliest(
                    self._logits, self._sampling, batch.top_logprobs, hidden_TE, batch.starts_R + batch.counts_R
                )
                result = result._replace(**top._asdict())
            else:
                self._forward(batch, last_R[:0])
            result = map_tensors(lambda tensor: tensor.to("cpu", non_blocking=True), result)
            arrived = self.stages.event()
            return AsyncResult(result, arrived, {"prompt": (began, arrived)}, failures)

    @property
    def numerics(self) -> Numerics:
        return self.ops.numerics(self)

    def compile(self, constraint: Constraint) -> int:
        """Compile a constraint, here and now. A constraint that is refused fails when its first mask is needed."""
        Compiler.of(self.token_bytes).prepare(constraint)
        return 0

    def has_compiled(self, number: int) -> bool:
        return True

    def keep_alive(self, silence: float) -> None:
        """A worker in this process needs no sign of life."""

    @property
    def _sampling(self) -> Sampling:
        return self.ops.prompt_sampling(self)

    def _logits(self, hidden_RE: Tensor) -> Tensor:
        return self.ops.prompt_logits(self, hidden_RE)

    def _forward(self, batch: PromptBatch, output_T: np.ndarray) -> Tensor:
        """Store keys and values of all tokens. Returns hidden states [X, E] of the tokens at index `output`."""
        ends_R = batch.starts_R + batch.counts_R
        if ends_R.max() > self.width or len(batch.pages_B) != ends_R.sum():
            raise ValueError(
                f"{self.name}: {len(batch.pages_B)} pages for rows of {ends_R} positions; a row holds {self.width}"
            )
        if batch.pages_B.min() <= DUMMY_PAGE or batch.pages_B.max() > self.pages:
            raise ValueError(
                f"{self.name}: pages {batch.pages_B.min()}..{batch.pages_B.max()}; allowed 1..{self.pages}"
            )
        if batch.tokens_T.min() < 0 or batch.tokens_T.max() >= self.vocab_size:
            raise ValueError(
                f"{self.name}: token ids {batch.tokens_T.min()}..{batch.tokens_T.max()}; allowed "
                f"0..{self.vocab_size - 1}"
            )
        rows = len(ends_R)
        row_T = np.repeat(np.arange(rows), batch.counts_R)
        position_T = batch.starts_R[row_T] + offsets(batch.counts_R)
        table_RL = np.zeros((rows, int(ends_R.max())), dtype=np.int32)
        table_RL[np.arange(table_RL.shape[1]) < ends_R[:, None]] = batch.pages_B
        nothing_shared = (np.arange(rows + 1), np.zeros(rows, dtype=np.int64))
        forward = ForwardBatch(
            table_RL, batch.starts_R, batch.counts_R, table_RL[row_T, position_T], position_T, *nothing_shared
        )
        return self.ops.run_prompt(self, batch.tokens_T, forward, output_T)

    def _guided(self, draws: Draws, logits_TV: Tensor) -> Tensor:
        """Return the guided logits [R, V] of the rows that tokens are drawn after, from the logits [X, V] of all
        rows."""
        own_RV = logits_TV[: len(draws.seed_R)]
        if draws.guidance is None:
            return own_RV
        unconditional_R, scale_R = (to_device(values_R, self.device) for values_R in draws.guidance)
        return self._sampling.guide(own_RV, logits_TV, unconditional_R.long(), scale_R)

    def _drawn(
        self, draws: Draws, logits_TV: Tensor, batch: PromptBatch, failures: dict[int, str]
    ) -> PromptResult[Tensor]:
        """Return a result with draws, from the logits after all rows. Adds to `failures`, by row, why constraints
        cannot be followed."""
        rows = len(draws.seed_R)
        ends_R = (batch.starts_R + batch.counts_R)[:rows]
        first, log_z_R = self._draw(draws, self._guided(draws, logits_TV), ends_R, failures)
        token_RF, raw_logp_RF = first.token_RF, first.logp_RF[:, :0]
        if draws.raw_logprobs:
            row_X = torch.arange(rows, device=self.device).repeat_interleave(token_RF.shape[1])
            raw_logp_X = self._sampling.raw_score(logits_TV[:rows], token_RF.flatten(), row_X)
            raw_logp_RF = raw_logp_X.view(token_RF.shape)
        return _empty_result(rows)._replace(
            drawn_RF=token_RF.int(),
            drawn_logp_RF=first.logp_RF,
            raw_logp_RF=raw_logp_RF,
            logw_RF=first.logw_RF,
            log_z_R=log_z_R,
        )

    def _draw(
        self, draws: Draws, logits_RV: Tensor, position_R: np.ndarray, failures: dict[int, str]
    ) -> tuple[FirstTokens, Tensor]:
        """Return the drawn tokens, and log Z of a `PromptResult`, on the device."""
        numbers = (draws.seed_R, draws.round_R, draws.stream_RF, position_R.astype(np.int64))
        # On the host, where the random words are computed: reading the keys from the device would wait for it.
        seed_R, round_R, stream_RF, drawn_at_R = map(torch.from_numpy, numbers)
        keys = DrawKeys(seed_R, round_R, stream_RF, drawn_at_R, draws.purpose)
        if len(draws.repetition_Z):
            seen = tuple(to_device(at_Z, self.device).long() for at_Z in (draws.seen_row_Z, draws.seen_token_Z))
            logits_RV = logits_RV.float()
            logits_Z, repetition_Z = logits_RV[seen], to_device(draws.repetition_Z, self.device)
            logits_RV = logits_RV.index_put(seen, repeated(logits_Z, torch.ones_like(logits_Z) > 0, repetition_Z))
        if len(draws.bias_U):
            biased = tuple(to_device(at_U, self.device).long() for at_U in (draws.biased_row_U, draws.biased_token_U))
            bias_U = to_device(draws.bias_U, self.device).to(logits_RV.dtype)
            logits_RV = logits_RV.index_put(biased, bias_U, accumulate=True)
        distribution: DistributionSpec[Any] = draws.distribution
        mass_R = None
        if draws.machines:
            logits_RV, distribution, mass_R = self._constrained(draws, logits_RV, failures)
        sampling = self._sampling
        token_RF, logp_RF, log_z_R = sampling.own_draws(logits_RV, distribution, keys)
        weight_R = log_z_R.double()
        if mass_R is not None:
            logp_RF = logp_RF + mass_R[:, None]
            # If a truncation leaves no allowed token, its mass does not count in the weight: otherwise no particle
            # would have weight.
            weight_R = weight_R + torch.where(mass_R > -torch.inf, distribution.alpha_R * mass_R, 0.0)
        first_F = torch.arange(token_RF.shape[1], device=token_RF.device) == 0
        decoding_R = to_device(draws.decoding_R, self.device)
        # A group that is decoded exactly begins with one draw of the target.
        none_RF = is_one_of(decoding_R, EXACT)[:, None] & ~first_F
        logw_RF = weight_R[:, None].expand(token_RF.shape).masked_fill(none_RF, -torch.inf)
        first = FirstTokens(token_RF, logp_RF, logw_RF)
        if (draws.decoding_R == Decoding.DISTINCT).any():
            theirs = self._draw_distinct(sampling, draws, distribution, logits_RV, keys, weight_R)
            if mass_R is not None:
                theirs = theirs._replace(logp_RF=theirs.logp_RF + mass_R[:, None])
            first = where((decoding_R == Decoding.DISTINCT)[:, None], theirs, first)
        return first, log_z_R

    def _constrained(
        self, draws: Draws, logits_RV: Tensor, failures: dict[int, str]
    ) -> tuple[Tensor, DistributionSpec[Tensor], Tensor | None]:
        """Apply `given_constraint` to the first tokens of answers."""
        compiler = Compiler.of(self.token_bytes)
        masks_RW = np.full((len(draws.machines), compiler.words), -1, dtype=np.int32)
        if self.sharing.leads:
            rows: defaultdict[StopMachine, list[int]] = defaultdict(list)  # those of several answers to one call
            for row, machine in enumerate(draws.machines):
                if machine is not None:
                    rows[machine].append(row)
            none_0 = np.zeros(0, dtype=np.int64)
            needed = [
                (Follower.of(machine, compiler), [MaskPath(none_0, 0, row, 1) for row in of_machine])
                for machine, of_machine in rows.items()
            ]
            self._writer.begin_round()
            self._writer.write(needed, masks_RW)
            failed = [(one.failure, paths) for one, paths in needed if one.failure is not None]
            failures |= {path.row: why for why, paths in failed for path in paths}
        by_answer_R = None
        if draws.by_answer_R is not None and draws.by_answer_R.any():
            by_answer_R = to_device(draws.by_answer_R, self.device)
        mask_RW = self.sharing(to_device(masks_RW, self.device))
        return given_constraint(
            self._sampling,
            logits_RV,
            self.ops.apply_mask(logits_RV, mask_RW, self.vocab_size),
            mask_RW,
            draws.distribution.to(self.device),
            by_answer_R,
        )

    def _draw_distinct(
        self,
        sampling: Sampling,
        draws: Draws,
        distribution: DistributionSpec[Any],
        logits_RV: Tensor,
        keys: DrawKeys,
        weight_R: Tensor,
    ) -> FirstTokens:
        """Draw without replacement. `weight`: log of each row's total mass."""
        most = keys.stream_RF.shape[1]
        keys = keys._replace(stream_RF=keys.stream_RF[:, :1])
        candidate_tokens, candidate_logp_RC, _ = sampling.propose_bonus(logits_RV, distribution, keys)
        rows = torch.arange(len(logits_RV), device=self.device)
        one_R = torch.ones_like(rows)
        decoding_R, count_R = to_device(draws.decoding_R, self.device), to_device(draws.count_R, self.device)
        source = SourceRows(candidate_tokens, weight_R, rows >= 0, Spans(rows, one_R))
        seed_R, round_R = to_device(draws.seed_R, self.device), to_device(draws.round_R, self.device)
        kept, keys_R = Spans(rows * most, one_R * most), RoundKeys(seed_R, round_R)
        chosen = self.ops.expand(source, kept, count_R, decoding_R, keys_R, FIRST_STEP, len(rows) * most)
        token_X = candidate_tokens.token_RC[chosen.parent_X, chosen.candidate_X]
        logp_X = candidate_logp_RC[chosen.parent_X, chosen.candidate_X]
        return FirstTokens(token_X.view(-1, most), logp_X.view(-1, most), chosen.mass_X.view(-1, most))
