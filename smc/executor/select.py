"""What a round's choice is among, and its weights: the reference, in plain torch; `smc.executor.kernel_choice` has what
GPUs use.

See the package's legend for axes; C offers of a row.

What goes on after a round: candidates are weighed and chosen from, or compared with what the target drew itself.

In look-ahead candidates are the rows that the draft made while the target scored the blocks before them; in lockstep
they are the blocks themselves, each with a token of the target's own after it. `conclude` is the reference, in plain
torch; `smc.executor.kernel_choice` has what GPUs use. See the package's legend for axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc.algorithm.bounds import Bounds
from smc.algorithm.expansion import Expansion, Kind, Offers
from smc.algorithm.selection import Selection
from smc.algorithm.weights import block_log_weight
from smc.executor.messages import DraftedRows, Lineage, RoundChoice, RoundResult
from smc.executor.plan import RoundPlan
from smc.executor.sampling import DrawKeys, Sampling
from smc.executor.state import SlotState
from smc.executor.verify import VerifyOutputs
from smc.philox import Purpose
from smc.stops import grow


@dataclass(frozen=True)
class TargetOutputs:
    """What the target says of the token after every block; None: it has not been asked."""

    logp_X: Tensor | None = None
    """float32 log p of the first token of each row ahead (look-ahead), or of the token that it draws itself
    (lockstep)."""
    bonus_A: Tensor | None = None
    """Integers: the tokens that it draws for independent rows."""
    log_z_A: Tensor | None = None
    """float32 log Z of the law that it draws or offers from; NaN where its logits are."""
    offers: Offers | None = None
    """What it offers after each block, of which rows that are never the same are made."""
    offered_logp_AC: Tensor | None = None


@dataclass(frozen=True)
class ScoreInputs:
    """All that a choice is made from. Candidates are the rows ahead (look-ahead), or the blocks themselves."""

    plan: RoundPlan[Tensor]
    state: SlotState
    scored: VerifyOutputs
    drafted: DraftedRows
    said: TargetOutputs
    best_A: Tensor | None
    """int64, of groups that are decoded exactly: the block that agrees longest with the target's draws. None: there are
    none."""
    right_A: Tensor | None
    """int64: and how many of its tokens do."""
    lookahead: bool

    @property
    def width(self) -> int:
        """F: rows of a place."""
        return self.drafted.all_WX.shape[1] // len(self.plan.slot_A)

    @property
    def agreed(self) -> tuple[Tensor, Tensor]:
        """`best` and `right`, of a round in which some are decoded exactly."""
        assert self.best_A is not None and self.right_A is not None, "nobody is decoded exactly"
        return self.best_A, self.right_A

    @property
    def open_X(self) -> Tensor:
        """bool: the block that a row stands for, or continues, has not ended."""
        return self.scored.blocks.open_A[self.drafted.root_X] if self.lookahead else self.scored.blocks.open_A


@dataclass(frozen=True)
class GroupSizes:
    """What deciders are told of the groups; integers."""

    own_size_G: Tensor
    """Places of groups of independent particles, 0 of others."""
    source_first_G: Tensor
    """First candidate."""
    source_size_G: Tensor
    """Candidates."""
    seed_G: Tensor
    round_G: Tensor


@dataclass(frozen=True)
class Candidates:
    """X rows: those of the batch's places (lockstep), or F for each of them (look-ahead)."""

    root_X: Tensor
    """int64 place whose particle a row continues."""
    weight_X: Tensor
    """float64 log-weight, -inf where that is NaN; of exact decoding, the draft's log-likelihood."""
    there_X: Tensor
    """bool: the row may be chosen."""
    offers: Offers
    """Of the token after the block, where it is chosen, too; or the row itself."""
    alive_A: Tensor
    """bool: the place held a particle before the round."""
    target_nan_G: Tensor
    draft_nan_G: Tensor
    numbers: GroupSizes


Weigh = Callable[[ScoreInputs], Candidates]


def ask(
    sampling: Sampling, plan: RoundPlan[Tensor], scored: VerifyOutputs, drafted: DraftedRows, lookahead: bool
) -> TargetOutputs:
    """Ask for what a choice depends on."""
    if plan.all_exact:
        # What the target drew itself decides.
        return TargetOutputs()
    next_AV = scored.next_AV
    assert next_AV is not None, "kept unless all are decoded exactly"
    if lookahead:
        return TargetOutputs(sampling.score(next_AV, plan.target_law, drafted.tokens_XK[:, :1], drafted.root_X)[:, 0])
    said, blocks = TargetOutputs(), scored.blocks

    def keys(stream_A: Tensor) -> DrawKeys:
        return DrawKeys(plan.seed_A, plan.round_A, stream_A[:, None], blocks.position_A, Purpose.TARGET)

    if Kind.INDEPENDENT in plan.kinds:
        bonus_A1, logp_A1, log_z_A = sampling.bonus(next_AV, plan.target_law, keys(blocks.stream_A))
        said = TargetOutputs(logp_A1[:, 0], bonus_A1[:, 0], log_z_A)
    if plan.kinds - {Kind.INDEPENDENT}:
        offers, offered_logp_AC, log_z_A = sampling.bonus_offer(next_AV, plan.target_law, keys(blocks.rank_A))
        said = replace(said, log_z_A=log_z_A, offers=offers, offered_logp_AC=offered_logp_AC)
    return said


def weigh(evidence: ScoreInputs) -> Candidates:
    """Candidates and their weights."""
    return Weigher(evidence).candidates()


class Weigher:
    """Weighs the candidates of one round."""

    def __init__(self, evidence: ScoreInputs) -> None:
        self.evidence, self.plan, self.scored, self.drafted = evidence, evidence.plan, evidence.scored, evidence.drafted
        self.place_X = self.plan.place_of_rows(evidence.width)
        """Place that every row belongs to: its group is that of its root."""
        self.group_X = self.plan.group_A[self.place_X]

    def candidates(self) -> Candidates:
        plan, lookahead = self.plan, self.evidence.lookahead
        weight_X, there_X, nan_2X = self._rows_ahead() if lookahead else self._blocks_with_bonus()
        nan_2G = self._of_group(nan_2X)
        nan_2G[1] |= self._of_group(self._nan_of_blocks()[None])[0]
        if plan.has_exact:
            weight_X, there_X, nan_2G = self._that_agree(weight_X, there_X, nan_2G)
        weight_X = weight_X.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        offers = self.evidence.said.offers
        if offers is None:
            offers = Offers.whole(weight_X)
        else:
            offers = offers.unless(~self.scored.blocks.open_A | plan.is_exact_A)
        width = self.evidence.width
        own_size_G = torch.where(plan.kind_G == Kind.INDEPENDENT, plan.size_G, 0)
        numbers = GroupSizes(own_size_G, plan.first_G * width, plan.size_G * width, plan.seed_G, plan.round_G)
        root_X = self.drafted.root_X.long() if lookahead else self.scored.blocks.origin_A
        alive_A = self.evidence.state.alive_S[plan.slot_A]
        target_nan_G, draft_nan_G = nan_2G
        return Candidates(root_X, weight_X, there_X, offers, alive_A, target_nan_G, draft_nan_G, numbers)

    def _rows_ahead(self) -> tuple[Tensor, Tensor, Tensor]:
        """Look-ahead: the rows that were drafted while the blocks were scored. A row's weight is that of its block, the
        share that it has of its root, and what the target says of its first token. Weights [X], rows that are there
        [X], NaN of target and draft [2, X]."""
        scored, drafted, root_X, open_X = self.scored, self.drafted, self.drafted.root_X, self.evidence.open_X
        logq_X = drafted.logq_XK[:, 0]
        logp_X = torch.zeros_like(logq_X) if self.evidence.said.logp_X is None else self.evidence.said.logp_X
        next_X = torch.where(open_X, self.plan.alpha_A[root_X] * logp_X - logq_X, 0.0)
        target_nan_X = (open_X & torch.isnan(logp_X)) | scored.nan_A[self.place_X]
        return (
            self._weight_of_blocks()[root_X] + next_X + drafted.share_X,
            scored.blocks.alive_A[root_X] & (drafted.share_X > -torch.inf),
            torch.stack((target_nan_X, open_X & torch.isnan(logq_X))),
        )

    def _blocks_with_bonus(self) -> tuple[Tensor, Tensor, Tensor]:
        """Lockstep: the blocks themselves, and what the target says after them."""
        scored, weight_A = self.scored, self._weight_of_blocks()
        log_z_A = self.evidence.said.log_z_A
        log_z_A = torch.zeros_like(weight_A) if log_z_A is None else torch.where(scored.blocks.open_A, log_z_A, 0.0)
        nan_A = scored.nan_A | torch.isnan(log_z_A)
        return weight_A + log_z_A, scored.blocks.alive_A, torch.stack((nan_A, torch.zeros_like(nan_A)))

    def _that_agree(self, weight_X: Tensor, there_X: Tensor, nan_2G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of groups that are decoded exactly, only what follows the target's own draws is left: in lockstep the block
        that agrees longest; in look-ahead rows of it, if it agrees as a whole, that begin with what the target says
        next."""
        plan, scored, place_X = self.plan, self.scored, self.place_X
        best_A, right_A = self.evidence.agreed
        is_exact_X = plan.is_exact_A[place_X]
        agrees_X = place_X == best_A[place_X]
        if self.evidence.lookahead:
            root_X = self.drafted.root_X
            next_A = scored.drawn_AQ[best_A, right_A - 1]
            says_X = self.drafted.tokens_XK[:, 0] == next_A[place_X]
            agrees_X = self._whole_A()[root_X] & says_X & scored.blocks.open_A[root_X]
        # What the draft says is of no consequence here, be it NaN; nor what the target would say after tokens that are
        # wrong.
        column_Q = torch.arange(scored.nan_AQ.shape[1], device=place_X.device)
        nan_A = (scored.nan_AQ[best_A] & (column_Q < right_A[:, None])).any(-1)
        is_exact_G = plan.is_exact_G
        target_nan_G = torch.where(is_exact_G, plan.any_of_group(nan_A[None], plan.group_A)[0], nan_2G[0])
        likelihood_X = self.drafted.share_X.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        return (
            torch.where(is_exact_X, likelihood_X, weight_X),
            there_X & (agrees_X | ~is_exact_X),
            torch.stack((target_nan_G, nan_2G[1] & ~is_exact_G)),
        )

    def _whole_A(self) -> Tensor:
        """bool [A]: the block is right to its end. Of chains several may be, with the same tokens."""
        blocks, (best_A, right_A) = self.scored.blocks, self.evidence.agreed
        column_Q = torch.arange(blocks.tokens_AQ.shape[1], device=best_A.device)
        same_A = ((blocks.tokens_AQ == blocks.tokens_AQ[best_A]) | (column_Q >= right_A[:, None])).all(-1)
        return same_A & blocks.alive_A & (blocks.count_A == right_A)

    def _weight_of_blocks(self) -> Tensor:
        blocks = self.scored.blocks
        return blocks.logw_A + block_log_weight(
            self.scored.logp_AQ[:, :-1], blocks.logq_AQ[:, 1:], blocks.count_A - 1, self.plan.alpha_A
        )

    def _nan_of_blocks(self) -> Tensor:
        """bool [X]: there is a NaN of the draft in the block of the row's place."""
        blocks = self.scored.blocks
        exists_AQ = torch.arange(blocks.logq_AQ.shape[1], device=self.place_X.device) < blocks.count_A[:, None]
        nan_X = (torch.isnan(blocks.logq_AQ) & exists_AQ).any(-1)[self.place_X]
        if Kind.DISTINCT in self.plan.kinds:
            # Rows of NaN have given way to others, on which the draft has left a mark.
            nan_X = nan_X | (
                torch.isnan(self.drafted.logq_XK).any(-1) & self.plan.places_of(Kind.DISTINCT)[self.place_X]
            )
        return nan_X

    def _of_group(self, mask_NX: Tensor) -> Tensor:
        """Whether masks hold anywhere in a group, bool [N, G]."""
        return self.plan.any_of_group(mask_NX, self.group_X)


LEAST_SHARE = 0.1
"""Distinct particles of less than this share of the mean weight lose their place more often than not: an answer waits
for all of them."""


@dataclass(frozen=True)
class SelectedTrees:
    """How groups whose rows are never the same, and those that are decoded exactly, go on."""

    chosen: Expansion
    pick_A: Tensor
    """int64: which of the chosen rows goes on at each place."""
    alive_A: Tensor
    """bool: whether any does."""


Concluded = tuple[RoundChoice, RoundResult[Tensor]]
Conclude = Callable[[ScoreInputs, Candidates, Selection | None, SelectedTrees | None], Concluded]


@dataclass(frozen=True)
class SelectOps:
    """What decides for groups: the references, or kernels."""

    weigh: Weigh
    select: Callable[..., Selection]
    expand: Callable[..., Expansion]
    keep_roots: Callable[..., tuple[Tensor, Tensor]]
    walk: Callable[..., tuple[Tensor, Tensor]]
    conclude: Conclude


class Selector:
    """Chooses, round after round."""

    def __init__(self, sampling: Sampling, state: SlotState, deciders: SelectOps, *, lookahead: bool) -> None:
        self.sampling, self.state, self.decide, self.lookahead = sampling, state, deciders, lookahead

    def choose(self, plan: RoundPlan[Tensor], scored: VerifyOutputs, drafted: DraftedRows) -> Concluded:
        """`drafted`: what may follow the blocks (look-ahead), or the blocks themselves."""
        best_A = right_A = own = trees = None
        if plan.has_exact:
            blocks, groups = scored.blocks, (plan.first_G, plan.size_G)
            best_A, right_A = self.decide.walk(
                blocks.tokens_AQ, blocks.count_A, scored.drawn_AQ, blocks.alive_A, groups
            )
        said = ask(self.sampling, plan, scored, drafted, self.lookahead)
        evidence = ScoreInputs(plan, self.state, scored, drafted, said, best_A, right_A, self.lookahead)
        candidates = self.decide.weigh(evidence)
        if Kind.INDEPENDENT in plan.kinds:
            own = self._selected(plan, candidates)
        if plan.kinds - {Kind.INDEPENDENT}:
            trees = self._regrown(plan, candidates, drafted.block)
        return self.decide.conclude(evidence, candidates, own, trees)

    def _selected(self, plan: RoundPlan[Tensor], candidates: Candidates) -> Selection:
        """Independent particles: `smc.algorithm.selection`."""
        numbers = candidates.numbers
        bounds = Bounds(plan.first_G, numbers.own_size_G, plan.count_G, plan.draws_G)
        random = (plan.threshold_G, plan.scheme_G, numbers.seed_G, numbers.round_G)
        return self.decide.select(candidates.weight_X.view(len(plan.slot_A), -1), candidates.alive_A, bounds, *random)

    def _regrown(self, plan: RoundPlan[Tensor], candidates: Candidates, step: int) -> SelectedTrees:
        """Particles that are never the same, and exact decoding: `smc.algorithm.expansion`."""
        numbers, rows, places = candidates.numbers, (plan.first_G, plan.size_G), len(plan.slot_A)
        weights, sources = (candidates.weight_X, candidates.there_X), (numbers.source_first_G, numbers.source_size_G)
        random = (numbers.seed_G, numbers.round_G, step)
        chosen = self.decide.expand(
            candidates.offers, *weights, sources, rows, plan.draws_G, plan.kind_G, random, places, LEAST_SHARE
        )
        kept = self.decide.keep_roots(candidates.root_X, chosen.parent_X, chosen.alive_X, rows, rows, places)
        return SelectedTrees(chosen, *kept)


@dataclass(frozen=True)
class SelectedRows:
    """What goes on at each place."""

    row_A: Tensor
    """int64, of the candidates."""
    ancestor_A: Tensor
    """int64 place whose particle it continues."""
    block_A: Tensor
    """int64 place whose block it continues: in look-ahead the ancestor."""
    alive_A: Tensor
    bonus_A: Tensor
    """int64 token of the target's own that is appended to what is kept of the block; -1: none."""
    logp_A: Tensor
    """float32 log p of the first token after what is kept of the block."""
    logw_A: Tensor
    misses_A: Tensor
    """bool: none of the drafted rows goes on (exact decoding in look-ahead)."""
    log_z_G: Tensor
    ess_G: Tensor
    resampled_G: Tensor
    collapsed_G: Tensor


def conclude(
    evidence: ScoreInputs, candidates: Candidates, own: Selection | None, trees: SelectedTrees | None
) -> Concluded:
    """What becomes of every place, and what the host learns of it. `own`: of independent particles; `trees`: of the
    others."""
    return Conclusion(evidence, candidates).of(own, trees)


class Conclusion:
    """What has been decided for groups, for all of their places."""

    def __init__(self, evidence: ScoreInputs, candidates: Candidates) -> None:
        self.evidence, self.candidates, self.plan = evidence, candidates, evidence.plan
        self.scored, self.drafted, self.lookahead = evidence.scored, evidence.drafted, evidence.lookahead
        self.blocks = self.scored.blocks
        self.is_exact_A = self.plan.is_exact_A

    def of(self, own: Selection | None, trees: SelectedTrees | None) -> Concluded:
        taken = self._take(own, trees)
        count_A = self.blocks.count_A[taken.block_A]
        kept_A = count_A
        if self.evidence.right_A is not None:
            kept_A = torch.where(self.is_exact_A, torch.minimum(self.evidence.right_A, count_A), count_A)
        ended_A, text_A, grown_A = self._grown(taken, kept_A)
        choice = RoundChoice.of(
            ancestor_A=taken.ancestor_A,
            row_A=taken.row_A,
            count_A=grown_A,
            cut_A=count_A - kept_A if self.lookahead else torch.zeros_like(count_A),
            bonus_A=taken.bonus_A,
            alive_A=taken.alive_A,
            ended_A=ended_A | ~taken.alive_A,
            text_A=text_A,
            mass_A=taken.logw_A,
        )
        return choice, self._result(taken, choice, kept_A)

    def _take(self, own: Selection | None, trees: SelectedTrees | None) -> SelectedRows:
        if trees is None:
            assert own is not None, "a round has groups of some kind"
            return self._of_own(own)
        theirs = self._of_trees(trees)
        if self.plan.has_exact:
            theirs = self._confirmed(theirs)
        if own is None:
            return theirs
        is_tree_G = self.plan.kind_G != Kind.INDEPENDENT
        is_tree_A = is_tree_G[self.plan.group_A]
        pairs = ((name, getattr(theirs, name), mine) for name, mine in vars(self._of_own(own)).items())
        return SelectedRows(
            **{
                name: torch.where(is_tree_G if name.endswith("_G") else is_tree_A, other, mine)
                for name, other, mine in pairs
            }
        )

    def _of_own(self, own: Selection) -> SelectedRows:
        said, row_A = self.evidence.said, own.ancestor_A.long() * self.evidence.width + own.branch_A.long()
        open_A, none_A = self.evidence.open_X[row_A], torch.full_like(row_A, -1)
        assert said.logp_X is not None, "asked for where there are independent rows"
        return SelectedRows(
            row_A=row_A,
            ancestor_A=own.ancestor_A.long(),
            block_A=own.ancestor_A.long(),
            alive_A=own.alive_A,
            bonus_A=none_A if said.bonus_A is None else torch.where(open_A, said.bonus_A[row_A], none_A),
            logp_A=torch.where(open_A, said.logp_X[row_A], torch.nan),
            logw_A=own.logw_A,
            misses_A=torch.zeros_like(own.alive_A),
            log_z_G=own.log_z_G.double(),
            ess_G=own.ess_G.double(),
            resampled_G=own.resampled_G,
            collapsed_G=own.collapsed_G,
        )

    def _of_trees(self, trees: SelectedTrees) -> SelectedRows:
        said, chosen, offers = self.evidence.said, trees.chosen, self.candidates.offers
        row_A, offer_A = chosen.parent_X[trees.pick_A], chosen.offer_X[trees.pick_A]
        ancestor_A, open_A = self.candidates.root_X[row_A], self.evidence.open_X[row_A]
        bonus_A, logp_A = torch.full_like(row_A, -1), torch.full_like(row_A, torch.nan, dtype=torch.float32)
        if said.offered_logp_AC is not None:
            bonus_A = torch.where(open_A, offers.token_RC[row_A, offer_A], bonus_A)
            logp_A = torch.where(open_A, said.offered_logp_AC[row_A, offer_A], logp_A)
        elif self.lookahead and said.logp_X is not None:
            logp_A = torch.where(open_A, said.logp_X[row_A], logp_A)
        zero_G = torch.zeros_like(chosen.ess_G)
        return SelectedRows(
            row_A=row_A,
            ancestor_A=ancestor_A,
            block_A=ancestor_A if self.lookahead else row_A,
            alive_A=trees.alive_A,
            bonus_A=bonus_A,
            logp_A=logp_A,
            logw_A=torch.where(trees.alive_A, chosen.mass_X[trees.pick_A], -torch.inf),
            misses_A=torch.zeros_like(trees.alive_A),
            log_z_G=torch.where(chosen.collapsed_G, -torch.inf, zero_G),
            ess_G=chosen.ess_G,
            resampled_G=zero_G > 0,
            collapsed_G=chosen.collapsed_G,
        )

    def _confirmed(self, taken: SelectedRows) -> SelectedRows:
        """Of groups that are decoded exactly: where nothing that was drafted goes on, the block that agrees longest
        does, and the token that the target says after it."""
        plan, blocks, is_exact_A = self.plan, self.blocks, self.is_exact_A
        best_A, right_A = self.evidence.agreed
        any_A = plan.any_of_group(taken.alive_A[None], plan.group_A)[0][plan.group_A]
        misses_A = is_exact_A & ~any_A & (plan.size_G > 0)[plan.group_A]
        ancestor_A = torch.where(misses_A, blocks.origin_A[best_A], taken.ancestor_A)
        place_A = torch.arange(len(best_A), device=best_A.device)
        is_over_A = blocks.ended_A[best_A] & (right_A == blocks.count_A[best_A])
        says_A = is_exact_A & ~is_over_A & (misses_A if self.lookahead else is_exact_A)
        next_A, next_logp_A = (
            values_AQ[best_A, right_A - 1] for values_AQ in (self.scored.drawn_AQ, self.scored.logp_AQ)
        )
        changed = {
            "row_A": taken.row_A if self.lookahead else torch.where(misses_A, best_A, taken.row_A),
            "ancestor_A": ancestor_A,
            # What follows a block that is right to its end keeps its own, be it one of several of the same tokens.
            "block_A": torch.where(misses_A if self.lookahead else is_exact_A, best_A, taken.block_A),
            "alive_A": torch.where(misses_A, place_A == ancestor_A, taken.alive_A),
            "bonus_A": torch.where(is_exact_A, torch.where(says_A, next_A, -1), taken.bonus_A),
            "logp_A": torch.where(is_exact_A, torch.where(is_over_A, torch.nan, next_logp_A), taken.logp_A),
            "logw_A": torch.where(misses_A, torch.where(place_A == ancestor_A, 0.0, -torch.inf), taken.logw_A),
            "misses_A": misses_A,
        }
        return SelectedRows(**(vars(taken) | changed))

    def _grown(self, taken: SelectedRows, kept_A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether what goes on has ended [A], the stop machine's state after what is kept of the blocks [A], and how
        many drafted tokens each place takes [A]."""
        state, blocks, drafted = self.evidence.state, self.blocks, self.drafted
        slot_A = self.plan.slot_A[taken.ancestor_A]
        entry_A, early_A = state.entry_S[slot_A], state.least_S[slot_A] - state.held(slot_A)
        text_A = grow(
            state.stops, entry_A, state.text_S[slot_A], blocks.tokens_AQ[taken.block_A], kept_A, early_A
        ).text_A
        room_A = state.limit_S[slot_A] - state.held(slot_A) - kept_A
        said = grow(state.stops, entry_A, text_A, taken.bonus_A[:, None], room_A, early_A - kept_A)
        over_A = blocks.ended_A[taken.block_A] & (kept_A == blocks.count_A[taken.block_A])
        grown_A, ended_A = kept_A - 1, over_A
        if self.lookahead:
            goes_on_A = ~taken.misses_A & ~over_A
            grown_A = torch.where(goes_on_A, drafted.count_X[taken.row_A], 0)
            ended_A = over_A | (goes_on_A & drafted.ended_X[taken.row_A])
        return torch.where(taken.bonus_A >= 0, said.ends_A, ended_A), text_A, grown_A

    def _result(self, taken: SelectedRows, choice: RoundChoice, kept_A: Tensor) -> RoundResult[Tensor]:
        plan, blocks, candidates, has_bonus_A = self.plan, self.blocks, self.candidates, choice.bonus_A >= 0
        bonus_A1 = choice.bonus_A.clamp(min=0)[:, None]
        if self.lookahead:
            grown_AQ = torch.where(has_bonus_A[:, None], bonus_A1, self.drafted.tokens_XK[choice.row_A].long())
            logq_AQ = self.drafted.logq_XK[choice.row_A]
        else:
            grown_AQ = blocks.tokens_AQ[taken.block_A].roll(-1, 1).scatter(1, (kept_A - 1)[:, None], bonus_A1)
            logq_AQ = torch.zeros_like(grown_AQ, dtype=torch.float32)
        column_Q = torch.arange(blocks.tokens_AQ.shape[1], device=kept_A.device)
        says_G = plan.any_of_group((has_bonus_A & choice.alive_A)[None], plan.group_A)[0]
        run_A = torch.minimum(self.scored.blocks.run_A[taken.block_A], kept_A)
        return RoundResult(
            ancestor_A=choice.ancestor_A,
            alive_A=choice.alive_A,
            cut_A=choice.cut_A,
            grown_AQ=grown_AQ,
            count_A=choice.count_A + has_bonus_A.long(),
            ended_A=choice.ended_A,
            logw_A=taken.logw_A,
            logq_AQ=logq_AQ,
            logp_AQ=torch.where(column_Q < kept_A[:, None] - 1, self.scored.logp_AQ[taken.block_A], torch.nan),
            first_logp_A=taken.logp_A,
            log_z_G=taken.log_z_G,
            ess_G=taken.ess_G,
            resampled_G=taken.resampled_G,
            collapsed_G=taken.collapsed_G,
            draft_nan_G=candidates.draft_nan_G,
            target_nan_G=candidates.target_nan_G,
            hit_G=plan.is_exact_G & ~says_G,
            lineage=Lineage(plan.target_pages_AQ[taken.block_A], run_A.int(), torch.zeros_like(run_A).int()),
        )
