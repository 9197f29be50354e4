"""The plan of a round: all of it that does not depend on what a model says, of groups as they are known to be when it is asked for.

Axes: A places of a batch, G groups, C chains, Q tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smc.algorithm.expansion import Kind
from smc.api.engine_config import EngineConfig
from smc.executor.biases import width_of
from smc.executor.plan import Contexts, RoundPlan
from smc.laws import LawSpec
from smc.scheduler.companions import Pages, companions_of, padded
from smc.scheduler.methods import Decoding
from smc.scheduler.population import Population
from smc.scheduler.slots import Slots

COMMON_KINDS = frozenset({Kind.INDEPENDENT, Kind.DISTINCT, Kind.BEST})
"""Rounds of more than one kind are of all of these, so that there are few sorts of rounds."""


class Planner:
    """Plans rounds of groups that are decoded alike. Changes nothing."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        decoding: Decoding,
        width: int,
        branches: Callable[[int, int], int] | None = None,
    ) -> None:
        """`width`: positions of the models' block tables. `branches`: F of a round of so many places and tokens of context whose groups all
        are decoded exactly, by the walk, up to the config's, which others have."""
        self.config, self.slots, self.decoding = config, slots, decoding
        self.shape, self.width = decoding.shape(config), width
        self._branches = branches

    def plan(self, population: Population, pages: list[Pages]) -> RoundPlan[np.ndarray]:
        groups, slots, shape = population.groups, self.slots, self.shape
        total, places = len(population.slot_A), bucket(len(population.slot_A))
        stride = self.decoding.stride(self.config)
        launched_G = np.array([g.launched for g in groups], dtype=np.int64)
        prompt_G = np.array([g.prompt_size for g in groups], dtype=np.int64)
        length_A = slots.length_S[population.slot_A]
        flying_G = np.array([len(g.in_flight) for g in groups], dtype=np.int64)
        # What the host knows of an earlier round stays true: all particles to come are copies of these.
        shared_G = prompt_G + np.minimum([g.committed for g in groups], population.least(length_A) - 1)
        longest_G = np.maximum(prompt_G, [g.negative_size for g in groups])
        columns = int((longest_G + population.largest(length_A) + stride * (flying_G + 1)).max()) + self.config.block + 2
        columns = min(columns, self.width)
        own = {side: np.concatenate([given[side] for given in pages]).reshape(total, -1) for side in self.decoding.sides}
        begun = own["draft"] if "draft" in own else own["target"]
        decide = self._branches if all(g.elastic for g in groups) else None
        branches = decide(places, int(shared_G.sum())) if decide else shape.branches
        # Pages of branches that there are not come back with those of branches that are not taken.
        branches_XB = begun[:, shape.begin : shape.begin + branches * shape.branch].reshape(total * branches, shape.branch)
        count_G = np.array([g.count for g in groups])
        draws_G = np.array([g.count if g.wanted is None else g.wanted for g in groups])
        params = population.params
        kind_G = np.array([g.decoding.kind for g in groups], dtype=np.int32)
        kinds = frozenset(g.decoding.kind for g in groups)
        chain_C = np.flatnonzero(kind_G[population.group_A] == Kind.CHAINS)
        law_C = self.slots.law_S[population.slot_A[chain_C]].astype(np.int64)
        if len(chain_C):
            chains = min(bucket(len(chain_C)), self.slots.chains)
            chain_C, law_C = (padded(values_C, chains, values_C[0]) for values_C in (chain_C, law_C))
        beside = (places, shared_G, slots, self.config.max_slots)
        return RoundPlan(
            program=self.decoding.program,
            contexts=Contexts.of(columns, total, len(groups)),
            columns=columns,
            kinds=kinds if len(kinds) == 1 else COMMON_KINDS | kinds,
            target_law=_spread(population.target_law, population.group_A, places),
            draft_law=_spread(population.draft_law, population.group_A, places),
            slot_A=padded(population.slot_A, places, self.config.max_slots),
            group_A=padded(population.group_A, places, places - 1),
            particle_A=padded(population.particle_A, places, 0),
            seed_A=padded(population.seed_G[population.group_A], places, 0),
            round_A=padded(launched_G[population.group_A] + 1, places, 1),
            alpha_A=padded(population.per_group([p.alpha for p in params], np.float64, 1.0)[population.group_A], places, 1.0),
            first_G=padded(population.first_G.astype(np.int32), places, 0),
            size_G=padded(population.size_G.astype(np.int32), places, 0),
            count_G=padded(count_G.astype(np.int32), places, 0),
            draws_G=padded(draws_G.astype(np.int32), places, 0),
            shared_G=padded(shared_G.astype(np.int32), places, 0),
            threshold_G=padded(population.per_group([p.ess_threshold for p in params], np.float64), places, 0.0),
            kind_G=padded(kind_G, places, int(Kind.INDEPENDENT)),
            chain_C=chain_C,
            law_C=law_C,
            scheme_G=padded(population.scheme_G, places, 0),
            target_pages_AQ=padded(own["target"] if shape.target else np.zeros((total, 0), np.int32), places, 0),
            begin_pages_AP=padded(begun[:, : shape.begin], places, 0),
            branch_pages_XB=padded(branches_XB.astype(np.int32), places * branches, 0),
            target_companions=companions_of("target", population, pages, *beside),
            draft_companions=companions_of("draft", population, pages, *beside),
            biased=self._biased(population),
        )

    def _biased(self, population: Population) -> int:
        """Width of what is added to logits; none once all answers are past where they must not end."""
        if not any(group.params.logit_bias or group.params.min_tokens for group in population.groups):
            return 0
        # What comes after the first token of a block may be drawn, or weighed, yet.
        next_G = population.least(self.slots.block_S[population.slot_A]) + 1
        widths = [
            width_of(group.rules.machine)
            for group, next_ in zip(population.groups, next_G.tolist())
            if group.params.logit_bias or next_ < group.params.min_tokens
        ]
        return max(widths, default=0)


def bucket(count: int) -> int:
    """The next of few sizes, four for each doubling: never more than a quarter above."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def _spread(law: LawSpec[np.ndarray], group_A: np.ndarray, places: int) -> LawSpec[np.ndarray]:
    """A law per group -> one per place."""
    return law.take(padded(group_A, places, 0))
