"""The tensors of rounds: those that a model keeps between rounds, and those that the stages of a round exchange, in the
order of the stages.

Particles have log-weights (`logw`). Rows are selected by their log mass (`mass`): the weight of the particle that a row
continues, times the row's `share` of it and the ratios p^alpha / q of its tokens. In exact decoding, which has no
weights, it is the log-probability that its tokens win the target's draws, by the draft's estimate
(`smc.algorithm.coupling`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens, Expansion, SourceRows
from smc.algorithm.resampling import Spans
from smc.algorithm.selection import NextParticles, SelectionStatistics
from smc.algorithm.verification import Matches
from smc.arrays import FieldMemory, Room, field, to_device
from smc.distributions import DistributionSpec
from smc.memory.pages import DUMMY_PAGE
from smc.philox import DrawKeys, RoundKeys
from smc.round.plan import Contexts, RoundPlan, SequenceHandoff
from smc.stops import START, StopTables
from smc.types import Array, Decoding

KEPT_CANDIDATES = 16
"""Number of candidate tokens that are kept for an inner node."""
DISTRIBUTION = torch.float32
"""Type of the log-distributions that chains were drawn from, which the draft sends to the target: [P, K, V]."""


# What each model keeps for every slot between rounds.
class SlotState(NamedTuple):
    """Sequences of particles at one model, by slot; the last slot is a dummy that padding points to. Keys and values
    are stored for all positions but the last `pending`."""

    table_SL: Tensor
    """int32 page of every position."""
    base_S: Tensor
    """int64 number of leading positions whose pages no round changes."""
    end_S: Tensor
    """int64 number of tokens of the sequence, prompt included."""
    limit_S: Tensor
    """int64 maximum number of tokens of the sequence."""
    least_S: Tensor
    """int64 number of leading tokens of the sequence that must not end the answer."""
    pending_SQ: Tensor
    """int64 pending tokens: the sequence's last tokens, in order. Between rounds the draft has one, the target its next
    block (look-ahead) or the block's seed (lockstep)."""
    pending_S: Tensor
    """int64 number of pending tokens, which have no keys and values yet."""
    ended_S: Tensor
    """bool: the last token is terminal, or the slot holds no particle."""
    alive_S: Tensor
    """bool: the slot holds a particle, with or without weight."""
    text_S: Tensor
    """int64 state of the group's stop machine before the pending tokens."""
    logw_S: Tensor
    """float64 log-weight of the particle; at the draft, the log mass by which groups distribute their rows."""
    entry_S: Tensor
    """int64 entry of the group in the stop tables and the bias tables."""
    stops: StopTables

    @staticmethod
    def allocate(slots: int, width: int, pending: int, stops: StopTables, device: torch.device) -> SlotState:
        """`width`: positions of a block table; `pending`: maximum number of tokens without keys and values between
        rounds."""

        def integers(value: int) -> Tensor:
            return torch.full((slots + 1,), value, dtype=torch.int64, device=device)

        return SlotState(
            table_SL=torch.full((slots + 1, width), DUMMY_PAGE, dtype=torch.int32, device=device),
            base_S=integers(0),
            end_S=integers(1),
            limit_S=integers(1),
            least_S=integers(0),
            pending_SQ=torch.zeros(slots + 1, pending, dtype=torch.int64, device=device),
            pending_S=integers(1),
            ended_S=torch.ones(slots + 1, dtype=torch.bool, device=device),
            alive_S=torch.zeros(slots + 1, dtype=torch.bool, device=device),
            text_S=integers(START),
            logw_S=torch.zeros(slots + 1, dtype=torch.float64, device=device),
            entry_S=integers(0),
            stops=stops,
        )

    @property
    def device(self) -> torch.device:
        return self.end_S.device

    @property
    def dummy(self) -> int:
        """The dummy slot."""
        return len(self.end_S) - 1

    def held(self, slot_A: Tensor) -> Tensor:
        """Return the number of positions [A] whose keys and values are stored."""
        return self.end_S[slot_A] - self.pending_S[slot_A]

    def join(self, group: SequenceHandoff) -> Tensor:
        """Write particles to their slots. Returns the slots as an index.

        All numbers take one copy. Assigning a Python number by index would copy it by itself, from memory that is not
        pinned, and such a copy waits for all work queued on the device."""
        there = JoiningParticles.of(group, self.device)
        slots_N = there.slots_N
        for field_S, values_N in (
            (self.base_S, there.base_N),
            (self.limit_S, there.limit_N),
            (self.least_S, there.least_N),
            (self.end_S, there.end_N),
            (self.pending_S, there.pending_N),
            (self.ended_S, there.ended_N.bool()),
            (self.alive_S, there.alive_N.bool()),
            (self.text_S, there.text_N),
            (self.logw_S, there.bits_N.view(torch.float64)),
            (self.entry_S, there.entry_N),
            (self.pending_SQ[:, : there.pending_NQ.shape[1]], there.pending_NQ),
        ):
            field_S.index_copy_(0, slots_N, values_N)
        pages_NL = to_device(group.pages_RL, self.device).expand(len(slots_N), -1)
        self.table_SL[:, : pages_NL.shape[1]].index_copy_(0, slots_N, pages_NL)
        if group.machine is not None:
            self.stops.set(group.stops, group.machine)
        return slots_N

    def reweigh(self, plan: RoundPlan[Tensor]) -> tuple[()]:
        """Replace the particles' log-weights by those of the plan, where it has any. A distinct particle that has lost
        its weight is removed."""
        assert plan.weights_A is not None, "a round with potentials"
        slot_A, given_A = plan.arrays.slot_A, ~torch.isnan(plan.weights_A)
        lost_A = given_A & plan.is_decoded_by(Decoding.DISTINCT) & (plan.weights_A == -torch.inf)
        self.logw_S[slot_A] = torch.where(given_A, plan.weights_A, self.logw_S[slot_A])
        self.alive_S[slot_A] = self.alive_S[slot_A] & ~lost_A
        self.ended_S[slot_A] = self.ended_S[slot_A] | lost_A
        return ()


class JoiningParticles(NamedTuple, Generic[Array]):
    """The numbers of a `SequenceHandoff`, one for each particle; int64, so that one copy takes all."""

    slots_N: Array
    base_N: Array
    limit_N: Array
    least_N: Array
    entry_N: Array
    end_N: Array
    pending_N: Array
    text_N: Array
    bits_N: Array
    """The bits of the float64 log-weight."""
    ended_N: Array
    alive_N: Array
    pending_NQ: Array

    @staticmethod
    def of(group: SequenceHandoff, device: torch.device) -> JoiningParticles[Tensor]:
        """Return the numbers on the device, as views of one tensor in the order of the fields."""
        *each_N, pending_NQ = JoiningParticles[Any](
            slots_N=group.slots_N,
            base_N=group.base,
            limit_N=group.limit,
            least_N=group.least,
            entry_N=group.stops,
            end_N=group.end_N,
            pending_N=group.pending_N,
            text_N=group.text_N,
            bits_N=group.logw_N.view(np.int64),
            ended_N=group.ended_N,
            alive_N=group.alive_N,
            pending_NQ=group.pending_NQ,
        )
        columns = np.broadcast_arrays(*each_N, *pending_NQ.T)
        numbers_FN: Tensor = to_device(np.stack(columns, dtype=np.int64), device)
        return JoiningParticles._make((*numbers_FN[: len(each_N)], numbers_FN[len(each_N) :].T))


class InnerNodes(NamedTuple):
    """The inner nodes of the block in flight, by slot; C candidate tokens of a node."""

    token_SKC: Tensor
    """int32 candidate tokens."""
    share_SKC: Tensor
    """float32 log of the candidate's share of the node's mass; -inf: not an outcome."""
    mass_SK: Tensor
    """float64 log mass of the node, on the same scale as the mass of the slot's row."""
    text_SK: Tensor
    """int64 state of the stop machine at the node."""
    count_S: Tensor
    """int64 number of tokens of the block."""

    @staticmethod
    def allocate(slots: int, block: int, columns: int, device: torch.device) -> InnerNodes:
        """`columns`: number of tokens that the draft can propose."""
        shape, most = (slots + 1, block - 1), min(KEPT_CANDIDATES, columns)
        return InnerNodes(
            token_SKC=torch.zeros(*shape, most, dtype=torch.int32, device=device),
            share_SKC=torch.full((*shape, most), -torch.inf, device=device),
            mass_SK=torch.zeros(*shape, dtype=torch.float64, device=device),
            text_SK=torch.zeros(*shape, dtype=torch.int64, device=device),
            count_S=torch.zeros(slots + 1, dtype=torch.int64, device=device),
        )

    @property
    def block(self) -> int:
        """K: tokens of a block."""
        return self.mass_SK.shape[1] + 1

    def forget(self, slots_N: Tensor) -> None:
        """Remove the outcomes of slots that new particles take, each with a block of one token."""
        self.share_SKC.index_fill_(0, slots_N, -torch.inf)
        self.count_S.index_fill_(0, slots_N, 0)


class BiasTables(NamedTuple):
    """Values that are added to logits on one device, by entry of the stop tables; T tokens of an entry. What an entry
    does not use adds 0 to column 0."""

    column_ZT: Tensor
    """int32 columns of the logits."""
    early_ZT: Tensor
    """float32 values while the answer must not end."""
    late_ZT: Tensor
    """float32 values afterwards."""
    count_Z: Tensor
    """int32 number of columns."""


# A pass through a model. Tensors are int32, on the model's device.
class RowTables(NamedTuple):
    """The page of every position of rows: of position p of row r, tail_RB[r, p - tail_R[r]] from tail_R[r] on, and
    table_SL[slot_R[r], p] before it. Past the width of either there is no page."""

    table_SL: Tensor
    """Block tables of slots."""
    slot_R: Tensor
    """Slot whose block table the row reads."""
    tail_RB: Tensor | None = None
    """The row's own pages; None: all its pages are in the table."""
    tail_R: Tensor | None = None
    """Position of the first of the row's own pages."""

    def pages_at(self, position_RL: Tensor) -> Tensor:
        """Return the int64 pages [R, X] of rows at positions; past the end of a row, any pages."""
        held_RL = position_RL.clamp(max=self.table_SL.shape[1] - 1)
        page_RL = self.table_SL[self.slot_R[:, None].long(), held_RL]
        if self.tail_RB is not None and self.tail_R is not None and self.tail_RB.shape[1]:
            offset_RL = position_RL - self.tail_R[:, None]
            tail_RL = self.tail_RB.gather(1, offset_RL.clamp(0, self.tail_RB.shape[1] - 1))
            page_RL = torch.where(offset_RL >= 0, tail_RL, page_RL)
        return page_RL.long()


class RowSpans(NamedTuple):
    """The positions of a row's tokens."""

    start_R: Tensor
    """Position of a row's first token."""
    count_R: Tensor
    """Number of tokens that exist, 0..Q."""


class RowGroups(NamedTuple):
    """The groups of rows; the rows of a group are adjacent."""

    group_R: Tensor
    """Group of every row; any group for padding."""
    first_G: Tensor
    """First row of each group."""
    size_G: Tensor
    """Number of rows of each group, ended ones included; 0 for a padding group."""
    shared_G: Tensor
    """Upper bound of the number of leading positions that all live rows of a group have in common."""


class Rows(NamedTuple):
    """R rows of Q tokens each. A row of count 0 is padding or has ended, and writes nothing."""

    tables: RowTables
    spans: RowSpans
    groups: RowGroups
    queries: int
    """Q: tokens of a row."""
    contexts: Contexts
    path_RB: Tensor | None = None
    """For rows of one token whose earlier own positions other rows run in the same pass: the row of each own position
    up to the token's. None: no row reads what another one runs."""


class PageTokens(NamedTuple):
    """The token of every page, for requests with penalties or constraints."""

    token_B: Tensor
    """int32 token of every page."""
    vocab: int
    ids_M: Tensor | None = None
    """int64 token of each column of the logits; None: column v is token v."""

    def set(self, pages_RL: Tensor, tokens_RL: Tensor) -> None:
        self.token_B[pages_RL.flatten().long()] = tokens_RL.flatten().int()

    def store(self, tokens_T: Tensor, rows: Rows) -> None:
        """Store the tokens that rows run."""
        column_Q = torch.arange(rows.queries, device=tokens_T.device)
        page_RQ = rows.tables.pages_at(rows.spans.start_R[:, None].long() + column_Q)
        page_RQ = torch.where(column_Q < rows.spans.count_R[:, None], page_RQ, DUMMY_PAGE)
        self.token_B[page_RQ.flatten()] = tokens_T.int()


class LastTokens(NamedTuple):
    """A pass over the last tokens of rows; int32, named as in `RowTables` and `RowSpans`."""

    slot_X: Tensor
    tail_X: Tensor
    """Position of the row's first own token."""
    start_X: Tensor
    """Position of the last token."""
    count_X: Tensor
    """Whether the last token runs."""


# Draft.
class TokenTree(NamedTuple):
    """Rows while they grow, or the particles that they continue."""

    root_X: Tensor
    """int64 batch index whose particle the row continues."""
    tokens_XK: Tensor
    """int64 tokens; those of the steps so far exist."""
    logq_XK: Tensor
    tail_XB: Tensor
    """int32 pages of all tokens but the last."""
    count_X: Tensor
    """int64 number of tokens that exist."""
    alive_X: Tensor
    ended_X: Tensor
    """The sequence has ended and takes no further token."""
    before_X: Tensor
    """int64 state of the stop machine before the last token."""
    text_X: Tensor
    """int64 state of the stop machine after the last token."""
    mass_X: Tensor
    """float64 log mass."""
    last_X: Tensor
    """int64 last token."""
    next_X: Tensor
    """int64 position of the next token."""
    cut_X: Tensor
    """int64 number of the root's last tokens that the row rolls back first: it begins at an inner node of the root's
    block (`smc.executor.draft`)."""
    outcome_X: Tensor
    """int64 row of the first step that it continues. Rows with the same outcome are adjacent."""

    @staticmethod
    def allocate(room: Room, rows: int, tokens: int, pages: int) -> TokenTree:
        """Return rows of `tokens` tokens and `pages` pages."""
        return TokenTree(
            root_X=room.longs(rows),
            tokens_XK=room.longs(rows, tokens),
            logq_XK=room.floats(rows, tokens),
            tail_XB=room.ints(rows, pages),
            count_X=room.longs(rows),
            alive_X=room.bools(rows),
            ended_X=room.bools(rows),
            before_X=room.longs(rows),
            text_X=room.longs(rows),
            mass_X=room.doubles(rows),
            last_X=room.longs(rows),
            next_X=room.longs(rows),
            cut_X=room.longs(rows),
            outcome_X=room.longs(rows),
        )


class CandidateLayout(NamedTuple):
    """Properties of the rows that propose tokens, as far as reparenting does not change them. There is one row for each
    batch index at the first step, and F later."""

    group_R: Tensor
    """int32 group."""
    sources: Spans
    """The rows of each group, int32."""
    rows: Spans
    """The rows of each group that continue them."""
    rank_R1: Tensor
    """int64 index of the row in its group."""
    stream_RF: Tensor
    """int64 random streams, for independent groups: one for each of the F rows that continue the row."""
    keys_R: RoundKeys
    keys_G: RoundKeys
    distribution: DistributionSpec[Tensor]


class DraftInputs(NamedTuple):
    """The particles with the pending tokens that are to be run."""

    tokens_AQ: Tensor
    rows: Rows
    last_A: Tensor
    """int64 index of each particle's last pending token among the A Q tokens."""
    tree: TokenTree
    """The particles as rows."""
    first: CandidateLayout
    """Layout of the particles."""
    later: CandidateLayout
    """Layout of the rows that continue them."""
    chains: ChainAssignment | None = None
    """None: no rows are chains."""


class OwnDraws(NamedTuple):
    """Tokens that rows draw for themselves: F rows continue each of the R rows."""

    token_RF: Tensor
    """Integers of any type."""
    logq_RF: Tensor
    """float32."""


class ChosenTokens(NamedTuple):
    """A choice among the candidates of all rows of a group."""

    expansion: Expansion
    candidates: CandidateTokens
    """The candidates that it was made from."""


class Continuation(NamedTuple):
    """How rows continue: in trees as chosen among the candidates of the whole group, in independent groups with a token
    that each row draws, in chains with their own draws or guesses. None: the round has no such rows."""

    chosen: ChosenTokens | None
    own: OwnDraws | None
    chains: ChainDraws | None = None


class DraftStep(NamedTuple):
    """One step of the draft in a round with draft trees."""

    tree: TokenTree
    """The rows that the step has kept."""
    parent_X: Tensor
    """int64 row of the step before that each row continues; at the first step, the node."""
    candidates: CandidateTokens
    """Candidate tokens of the rows of the step before."""


class GrownRows(NamedTuple):
    """The rows that a round has drafted."""

    tree: TokenTree
    steps: tuple[DraftStep, ...]
    """All steps, in a round with draft trees of exact decoding; otherwise empty."""
    leaf_X: Tensor | None = None
    """int64 node at which each row ends: step times X, plus the row of that step (`smc.executor.draft`). None: the
    rows are those of the last step."""
    raw_logp_XK: Tensor | None = None
    """float32 log-probability of every token under the softmax of the model's own logits. None: the round does not
    report it, or the model does not decode alone."""


class DraftedRows(NamedTuple):
    """Message from the draft to the target: rows of K tokens, F for every batch index. The rows of each group are in
    the order of the batch indices that they continue."""

    tokens_XK: Tensor
    """int32 token ids."""
    logq_XK: Tensor
    """float32 log-probability of each token under the proposal; in a walk that of winning the target's draw, by the
    draft's estimate, which no decision reads."""
    root_X: Tensor
    """int32 batch index whose particle the row continues."""
    count_X: Tensor
    """int32 number of tokens that exist; 0 if the particle had ended."""
    ended_X: Tensor
    """bool: the last token is terminal."""
    cut_X: Tensor
    """int32 number of the root's last tokens that the row rolls back; if above 0, the row begins at an inner node."""
    share_X: Tensor
    """float32 log of the row's share of its root's mass, before its tokens are weighted by p^alpha / q; -inf where
    there is no row."""

    @property
    def block(self) -> int:
        """K: tokens of a row."""
        return self.tokens_XK.shape[1]

    @staticmethod
    @lru_cache(maxsize=256)
    def memory(rows: int, block: int) -> FieldMemory:
        """Return where the fields lie, for rows of `block` tokens."""
        tokens, number = (rows, block), (rows,)
        return FieldMemory(
            DraftedRows(
                tokens_XK=field(np.int32, tokens),
                logq_XK=field(np.float32, tokens),
                root_X=field(np.int32, number),
                count_X=field(np.int32, number),
                ended_X=field(np.bool_, number),
                cut_X=field(np.int32, number),
                share_X=field(np.float32, number),
            )
        )


# Verify.
class Blocks(NamedTuple):
    """Blocks that the target scores, by batch index."""

    origin_A: Tensor
    """int64 batch index whose particle the block continues; in look-ahead its own."""
    tokens_AQ: Tensor
    logq_AQ: Tensor
    count_A: Tensor
    """Number of tokens that exist, at least 1."""
    ended_A: Tensor
    """bool: the block's last token ends the answer."""
    alive_A: Tensor
    logw_A: Tensor
    """float64 log-weight before the target's scores."""
    open_A: Tensor
    """bool: the particle continues after its block."""
    run_A: Tensor
    """Number of tokens of the block that the model runs: if the block has ended, all but the last."""
    position_A: Tensor
    """int64 position of the token after the block, counted from the beginning of the sequence."""
    stream_A: Tensor
    """int64 random stream of the bonus token of an independent particle."""
    rank_A: Tensor
    """int64 index of the batch index in its group."""


class NodeLayout(NamedTuple):
    """Blocks whose common tokens run once (`smc.executor.verify`)."""

    node_AQ: Tensor
    """int64 node, among the T nodes of the pass, of every token of the blocks; 0 for a token that does not run."""
    token_T: Tensor
    """int64 index of every node's token among the A Q tokens of the blocks; 0 for an unused node."""
    count_A: Tensor
    """int64 number of tokens of each block that can be verified: all, unless there were too few nodes."""
    pages_AQ: Tensor
    """int32 page of every token; that of its node if the token runs."""


class VerifyInputs(NamedTuple):
    """Inputs of the pass over blocks, and of sampling from its logits. With `nodes`, the T tokens of the pass are these
    nodes, each a row of one token."""

    blocks: Blocks
    rows: Rows
    distribution_T: DistributionSpec[Tensor]
    label_T: Tensor
    """Integers: the block's token after this one; -1: there is none."""
    keys: DrawKeys
    """Keys of the target's own draws after each token: those of plain decoding, which depend on the position and not on
    the round."""
    last_A: Tensor
    """int64 index of the block's last token among all A Q tokens."""
    nodes: NodeLayout | None = None
    """None: every token of every block runs."""


class TargetDraws(NamedTuple):
    """The target's own draws after each token, as `smc.executor.sampling.Sampling.own_draws` returns them."""

    token_T1: Tensor
    """Integers of any type."""
    logp_T1: Tensor
    """float32."""
    log_z_T: Tensor
    """float32 log Z, NaN if the target's logits are NaN."""


class VerifyOutputs(NamedTuple):
    """The target's outputs for blocks, by batch index."""

    blocks: Blocks
    logp_AQ: Tensor
    """log p of the block's token after each token; 0 where there is none. In groups that are decoded exactly: log p of
    the token that the target drew."""
    drawn_AQ: Tensor
    """int64 token that the target takes after each token: its own draw, or for chains the result of rejection
    sampling."""
    drawn_logp_AQ: Tensor
    """float32 log p of these tokens."""
    next_AV: Tensor | None
    """Logits after the block; None: no stage reads them."""
    nan_A: Tensor
    """bool: the target's logits were NaN for a token of the block."""
    nan_AQ: Tensor
    """bool: the logits that the target drew from were NaN."""
    next_mass_A: Tensor | None = None
    """float32 log of the mass that a constraint allows in the distribution after the block; `next_AV` has the logits
    given the constraint. None: no stage reads it."""
    raw_TV: Tensor | None = None
    """The target's own logits after all tokens of the pass. None: the round does not report log-probabilities under
    them."""
    nodes: NodeLayout | None = None
    """As in `VerifyInputs`."""

    @property
    def alone(self) -> VerifyOutputs:
        """The outputs without logits, masses and nodes, for kernels that do not read them: whether there are any makes
        no variant of a kernel."""
        return self._replace(next_AV=None, next_mass_A=None, raw_TV=None, nodes=None)


# Select.
class TargetOutputs(NamedTuple):
    """The target's outputs for the token after every block; None: not computed."""

    logp_X: Tensor | None = None
    """float32 log p of the first token of each row ahead (look-ahead), or of the token that the target draws
    (lockstep)."""
    bonus_A: Tensor | None = None
    """Integers: the tokens that the target draws for independent rows."""
    log_z_A: Tensor | None = None
    """float32 log Z of the distribution that the target draws from; NaN if its logits are NaN."""
    candidate_tokens: CandidateTokens | None = None
    """Candidate tokens after each block, from which distinct rows are selected."""
    candidate_logp_AC: Tensor | None = None


class ScoreInputs(NamedTuple):
    """All inputs of a selection among the rows ahead (look-ahead), or among the blocks themselves (lockstep)."""

    plan: RoundPlan[Tensor]
    state: SlotState
    verified: VerifyOutputs
    drafted: DraftedRows
    target: TargetOutputs
    matched: Matches | None
    """The blocks that agree longest with the target's draws, for groups that are decoded exactly. None: there are no
    such groups."""
    lookahead: bool

    @property
    def width(self) -> int:
        """F: number of rows of a batch index."""
        return len(self.drafted.root_X) // self.plan.kind.batch_size

    @property
    def open_X(self) -> Tensor:
        """bool: the block that a row is (lockstep) or continues (look-ahead) has not ended."""
        return self.verified.blocks.open_A[self.drafted.root_X] if self.lookahead else self.verified.blocks.open_A


class ScoredRows(NamedTuple):
    """X rows: one for each batch index (lockstep), or F for each of them (look-ahead)."""

    root_X: Tensor
    """int64 batch index whose particle the row continues."""
    source: SourceRows
    """The rows with their mass: the particle's weight after the block times the row's share; in exact decoding, the
    share alone. A row of which `there` is false may not be selected. Candidates are those for the token after the
    block, if it is selected together with the row; otherwise one, which is the row itself."""
    alive_A: Tensor
    """bool: the batch index held a particle before the round."""
    target_nan_G: Tensor
    draft_nan_G: Tensor
    own_size_G: Tensor
    """Number of batch indices of groups of independent particles; 0 for other groups."""
    keys_G: RoundKeys
    """Keys of each group's draws."""


class RoundSelection(NamedTuple, Generic[Array]):
    """Message from the target to the draft, and part of the report to the host: how each batch index continues. By
    batch index after the selection.

    In a walk in look-ahead, after a hit a row is taken whole: `taken` is its length, `bonus` -1. After a miss one batch
    index goes on: `taken` is 0, `bonus` the target's draw. If the answer is over, `taken` is 0 and `bonus` -1."""

    particles: NextParticles[Array]
    taken_A: Array
    """int64 number of tokens that it takes from its row."""
    cut_A: Array
    """int64 number of the ancestor's last tokens that are rolled back first."""
    bonus_A: Array
    """int64 token drawn by the target that is appended last; -1: none."""
    ended_A: Array
    """bool: the particle has ended, or there is none."""
    text_A: Array
    """int64 state of the stop machine before the row's tokens (look-ahead) or before the bonus token."""

    @property
    def count_A(self) -> Array:
        """int64 number of appended tokens."""
        return self.taken_A + (self.bonus_A >= 0)

    @staticmethod
    @lru_cache(maxsize=256)
    def memory(batch_size: int) -> FieldMemory:
        """Return where the fields lie."""
        integer, flag = field(np.int64, (batch_size,)), field(np.bool_, (batch_size,))
        return FieldMemory(
            RoundSelection(
                particles=NextParticles(integer, integer, flag, field(np.float64, (batch_size,))),
                taken_A=integer,
                cut_A=integer,
                bonus_A=integer,
                ended_A=flag,
                text_A=integer,
            )
        )


class AppliedSelection(NamedTuple):
    """How a round continues."""

    memory: Tensor
    """uint8: the message to the draft, which has the fields of `result.selection`."""
    result: RoundResult[Tensor]


# Remap.
class NextSequences(NamedTuple):
    """How sequences continue at one model, by batch index after the selection."""

    end_A: Tensor
    """int64 number of tokens of the sequence."""
    tokens_AQ: Tensor
    """int64 pending tokens, the last of the sequence; as many columns as tokens may be pending. At the target the next
    block: K in look-ahead; in lockstep one, its seed."""
    pending_A: Tensor
    """int64 number of tokens that are pending: they have not been run."""
    text_A: Tensor
    """int64 state of the stop machine before the pending tokens."""


class Lineage(NamedTuple, Generic[Array]):
    """Pages by which particles differ from their ancestors, by batch index after the selection."""

    path_AB: Array
    """int32 new pages, in the order of positions."""
    kept_A: Array
    """int32: how many of the first of these pages hold keys and values of the particle's tokens."""
    dropped_A: Array
    """int32 number of the ancestor's last pages that are released."""


# Report.
class ObservedDraws(NamedTuple, Generic[Array]):
    """What the target's draws after the roots of the drafted rows tell, by batch index after the selection. NaN: no
    draw was seen, or the rank was not computed."""

    score_A: Array
    """float32 score for the exponent of coupled drafting (`smc.algorithm.coupling.DrawObservation`)."""
    information_A: Array
    """float32 information for it."""
    rank_A: Array
    """float32 number of tokens that the draft considered more likely to be drawn."""


class RedraftReport(NamedTuple, Generic[Array]):
    """What was drafted again before a round, by batch index; row and lineage as after a selection. Only batch indices
    with a count above 0 have changed."""

    root_A: Array
    """int32 batch index whose particle the row continues; the last token of that particle is the row's first one."""
    tokens_AK: Array
    """int32 tokens of the row."""
    count_A: Array
    """int32 number of tokens that exist; 0: the group kept its blocks."""
    ended_A: Array
    """bool: the last token is terminal."""
    share_A: Array
    """float32 log mass of the row; -inf: the batch index holds no particle any more."""
    lineage: Lineage[Array]
    """Pages at the draft."""


class DraftReport(NamedTuple, Generic[Array]):
    """The draft's report to the host about a round of both models."""

    lineage: Lineage[Array]
    """Pages at the draft."""
    observed: ObservedDraws[Array]
    redrafted: RedraftReport[Array] | None = None
    """What was drafted again at first. None: the round does not draft again."""


class RoundResult(NamedTuple, Generic[Array]):
    """The report to the host about a round, from the target or from the model that decodes alone. By batch index, after
    the selection, unless stated otherwise."""

    selection: RoundSelection[Array]
    grown_AQ: Array
    """The `RoundSelection.count_A` appended tokens."""
    logq_AQ: Array
    """float32 log q of the appended tokens."""
    logp_AQ: Array
    """float32 log p of the tokens after the first of the scored block, as far as they are kept; NaN beyond."""
    first_logp_A: Array
    """float32 log p of the token that follows the kept part of the scored block; NaN if none does."""
    raw_logp_AQ: Array
    """float32 log-probabilities, under the softmax of the target's own logits, of the tokens after the first of the
    scored block, as far as they are kept, and of the token that follows these; NaN beyond. [A, 0] without
    `RoundKind.raw_logprobs`."""
    statistics: SelectionStatistics[Array]
    draft_nan_G: Array
    """bool: the draft returned NaN for tokens that exist."""
    target_nan_G: Array
    hit_G: Array
    """bool: the round was a hit; rows that were drafted ahead continue, or the answer is over (exact decoding)."""
    lineage: Lineage[Array]
    """Pages at the target, or at the model that decodes alone."""


# Chains, which only decoding by rejection has.
class ChainAssignment(NamedTuple):
    """The particle that every row of chains continues; int64."""

    row_Y: Tensor
    """Index of the row among all X rows."""
    source_Y: Tensor
    """Batch index of the particle."""
    guess_Y: Tensor
    """Index, among the likeliest tokens, of the token that the row guesses first, if it begins with a guess."""
    rank_Y: Tensor
    """Index of the row in its group."""

    def spread(self, values_Y: Tensor, others_X: Tensor) -> Tensor:
        """Return `others` with the values of these rows in their positions."""
        return others_X.index_copy(0, self.row_Y, values_Y.to(others_X.dtype))


class ChainDraws(NamedTuple):
    """Continuations of chains, as arrays over all rows. Only the entries of chains are used."""

    parent_X: Tensor
    """int64 row of the step before."""
    token_X: Tensor
    logq_X: Tensor


def message_layouts() -> str:
    """Describe the tensors that the models send to each other in rounds (`smc.executor.round_executor`). They travel as
    bytes, so both sides must have the same layouts."""
    rows, block = 7, 5  # sizes that show which axis is which
    return "\n\n".join((DraftedRows.memory(rows, block).layout, RoundSelection.memory(rows).layout, str(DISTRIBUTION)))
