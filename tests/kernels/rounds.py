"""Random rounds of all kinds, with the special cases that a round may contain: dead and ended particles, NaN, particles
without weight, padding. A seed gives the same round on every device."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens
from smc.arrays import map_tensors
from smc.distributions import DistributionSpec
from smc.round.plan import Contexts, RoundArrays, RoundKind, RoundPlan
from smc.round.tensors import DraftedRows, ScoreInputs, SlotState, TargetOutputs, VerifyInputs, VerifyOutputs
from smc.stops import StopMachine, StopTables, TokenBytes
from smc.types import Decoding

VOCAB, WIDTH = 12, 64
NO_MASS = -np.inf
MACHINES = (StopMachine.of((3,), ()), StopMachine.of((5, 6), (b"ab", b"bca")))


def assert_equal(found: object, wanted: object, name: str = "") -> None:
    """Compare tensors or tuples of them: integers must be equal, other numbers equal up to rounding."""
    if hasattr(wanted, "_fields"):
        for field, one, other in zip(wanted._fields, found, wanted, strict=True):
            if field != "memory":  # the fields of a message, with undefined bytes between them
                assert_equal(one, other, f"{name}.{field}")
    elif isinstance(wanted, tuple):
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_equal(one, other, f"{name}[{i}]")
    elif isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype, f"{name}: {found.dtype}, not {wanted.dtype}"
        tolerance = {torch.float64: 1e-11, torch.float32: 1e-6}.get(wanted.dtype, 0.0)
        close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
        torch.testing.assert_close(found.cpu(), wanted.cpu(), **close, msg=lambda text: f"{name}: {text}")
    else:
        assert found == wanted, name


class Round:
    """One randomly drawn round."""

    def __init__(
        self, seed: int, kinds: frozenset[Decoding], lookahead: bool, device: torch.device, *, largest: int = 6
    ) -> None:
        self.rng, self.device, self.kinds, self.lookahead = np.random.default_rng(seed), device, kinds, lookahead
        rng = self.rng
        self.sizes = rng.integers(1, largest + 1, rng.integers(1, 5)).tolist()
        self.padding, self.k = int(rng.integers(0, 4)), int(rng.integers(1, 6))
        self.f = int(rng.integers(1, 5)) if lookahead else 1
        self.most = self.k + (not lookahead)
        # In look-ahead, blocks in flight may have fewer tokens than those that are drafted.
        self.q = -(-self.k // 2) if lookahead and seed % 2 else self.most
        self.used = sum(self.sizes)
        self.places = self.used + self.padding
        self.nan, self.dead = rng.choice([0.0, 0.0, 0.05]), rng.choice([0.0, 0.3, 1.0], p=[0.4, 0.5, 0.1])
        self.slots = self.places + 3
        self.plan = self._plan()
        self.state = self._state()

    def here(self, values: object, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(np.asarray(values)).to(self.device, dtype)

    def floats(self, *shape: int, nan: bool = True) -> np.ndarray:
        """Random float32 log-probabilities."""
        values = -np.abs(self.rng.normal(size=shape) * self.rng.choice([0.1, 3.0, 500.0])).astype(np.float32)
        values[self.rng.random(shape) < self.dead / 4] = NO_MASS
        values[self.rng.random(shape) < self.nan * nan] = np.nan
        return values

    def _plan(self) -> RoundPlan:
        rng, groups = self.rng, len(self.sizes) + (1 if self.padding else 0)
        first = list(itertools.accumulate(self.sizes, initial=0))[: len(self.sizes)]
        padded = lambda values, fill=0: self.here(np.array([*values, *[fill] * (groups - len(self.sizes))], np.int32))  # noqa: E731
        group_A = np.repeat(np.arange(groups), [*self.sizes, self.padding][:groups])
        seed_G = rng.integers(0, 2**31, groups)
        law = DistributionSpec.plain(self.places).to(self.device)
        slot_A = np.concatenate((rng.permutation(self.slots)[: self.used], np.full(self.padding, self.slots)))
        kinds = rng.choice(sorted(self.kinds), len(self.sizes))
        chain_P = np.flatnonzero(
            np.array([*kinds, Decoding.INDEPENDENT])[np.minimum(group_A, len(kinds))] == Decoding.REJECTION
        )
        arrays = RoundArrays(
            slot_A=self.here(slot_A),
            group_A=self.here(group_A),
            particle_A=self.here(np.arange(self.places) - np.array([*first, self.used])[group_A]),
            seed_A=self.here(seed_G[group_A]),
            round_A=self.here(group_A + 7),
            alpha_A=self.here(rng.choice([1.0, 0.7], groups)[group_A]),
            exponent_A=self.here(
                np.where(rng.random(groups) < 0.3, 0, rng.uniform(0.5, 8, groups))[group_A], torch.float32
            ),
            first_G=padded(first),
            size_G=padded(self.sizes),
            count_G=padded(self.sizes),
            next_count_G=padded([rng.integers(1, size + 1) if rng.random() < 0.2 else size for size in self.sizes]),
            shared_G=padded([0] * len(self.sizes)),
            threshold_G=self.here(rng.choice([0.0, 0.5, 1.0], groups)),
            decoding_G=padded(kinds, int(Decoding.INDEPENDENT)),
            chain_P=self.here(chain_P),
            distribution_P=self.here(chain_P),
            nodes_G=padded(self.sizes),
            scheme_G=padded(rng.integers(0, 5, len(self.sizes))),
            target_pages_AQ=self.here(rng.integers(1, 999, (self.places, self.q)).astype(np.int32)),
            begin_pages_AQ=self.here(np.zeros((self.places, 1), np.int32)),
            branch_pages_XB=self.here(np.zeros((self.places * self.f, self.k - 1), np.int32)),
        )
        kind = RoundKind(Contexts.SHORT, self.kinds)
        return RoundPlan(kind, WIDTH, arrays, law, law).sized()

    def _state(self) -> SlotState:
        rng, n = self.rng, self.slots + 1
        tables = StopTables.allocate(
            3,
            VOCAB,
            TokenBytes(np.frombuffer(b"abcabcabcabc", np.uint8).copy(), np.arange(13, dtype=np.int32)),
            self.device,
        )
        for entry, machine in enumerate(MACHINES, 1):
            tables.set(entry, machine)
        state = SlotState.allocate(self.slots, WIDTH, self.most, tables, self.device)
        pending_S = rng.integers(1, self.q + 1, n) if self.lookahead else np.ones(n, np.int64)
        end_S = pending_S + rng.integers(1, 20, n)
        alive_S = rng.random(n) >= self.dead
        values = {
            "table_SL": rng.integers(1, 999, (n, WIDTH)),
            "base_S": np.minimum(rng.integers(0, 4, n), end_S - pending_S),
            "end_S": end_S,
            "limit_S": end_S + rng.integers(0, 6, n),
            "pending_SQ": rng.integers(0, VOCAB, (n, self.most)),
            "pending_S": pending_S,
            "ended_S": ~alive_S | (rng.random(n) < self.dead / 2),
            "alive_S": alive_S,
            "text_S": rng.choice([0, 0, 2], n),
            "logw_S": rng.normal(size=n) * 5,
            "entry_S": np.zeros(n),
            "least_S": rng.integers(0, 30, n),
        }
        for name, value in values.items():
            getattr(state, name)[:-1] = self.here(value[:-1], getattr(state, name).dtype)
        for first, size, kind in zip(
            self.plan.arrays.first_G.tolist(), self.sizes, self.plan.arrays.decoding_G.tolist()
        ):
            if kind == Decoding.REJECTION:
                # Give some chains the same tokens.
                slots = self.plan.arrays.slot_A[first : first + size]
                like = slots[self.here(rng.integers(0, size, size) * rng.integers(0, 2, size))]
                for name in ("pending_SQ", "pending_S", "end_S"):
                    getattr(state, name)[slots] = getattr(state, name)[like]
        # Particles of a group share the conditions that end them.
        state.entry_S[self.plan.arrays.slot_A] = self.plan.arrays.group_A % 3
        state.entry_S[-1] = 0
        state.text_S[state.entry_S != 2] = 0
        return state

    def drafted(self) -> DraftedRows:
        """Random drafted rows. The rows of a group are in the order of the batch indices that they come from."""
        rng, x = self.rng, self.places * self.f
        root_X = np.repeat(np.arange(self.places), self.f)
        for size, first, kind in zip(
            self.sizes, self.plan.arrays.first_G.tolist(), self.plan.arrays.decoding_G.tolist()
        ):
            if kind != Decoding.INDEPENDENT:
                mine = slice(first * self.f, (first + size) * self.f)
                root_X[mine] = np.sort(rng.integers(first, first + size, size * self.f))
        tokens_XK, logq_XK = rng.integers(0, VOCAB, (x, self.k)), self.floats(x, self.k)
        count_X, ended_X = rng.integers(1, self.k + 1, x), rng.random(x) < 0.3
        share_X = self.floats(x)
        share_X[self.used * self.f :] = NO_MASS
        # Rows of exact decoding may begin at an inner node of their root's block.
        kind_X = self.plan.arrays.decoding_G.cpu().numpy()[self.plan.arrays.group_A.cpu().numpy()][root_X]
        block_X = self.state.pending_S.cpu().numpy()[self.plan.arrays.slot_A.cpu().numpy()][root_X]
        cut_X = np.where(self.lookahead & (kind_X == Decoding.WALK), rng.integers(0, block_X), 0)
        rows = map_tensors(self.here, DraftedRows(tokens_XK, logq_XK, root_X, count_X, ended_X, cut_X, share_X))
        return DraftedRows.memory(x, self.k).allocate(self.device).write(rows).fields

    def verified(self, asked: VerifyInputs) -> VerifyOutputs:
        """Target outputs that agree with most of the drafted tokens."""
        rng, a, q = self.rng, self.places, self.q
        blocks = asked.blocks
        column_Q = torch.arange(q, device=self.device)
        labelled_AQ = column_Q < blocks.count_A[:, None] - 1
        next_AQ = blocks.tokens_AQ.roll(-1, 1)
        logp_AQ = torch.where(labelled_AQ | self.here(rng.random((a, 1)) < 0.5), self.here(self.floats(a, q)), 0.0)
        return VerifyOutputs(
            blocks=blocks,
            logp_AQ=logp_AQ,
            drawn_AQ=torch.where(
                self.here(rng.random((a, q)) < 0.8), next_AQ, self.here(rng.integers(0, VOCAB, (a, q)))
            ),
            drawn_logp_AQ=self.here(self.floats(a, q)),
            next_AV=logp_AQ,
            nan_A=torch.isnan(logp_AQ).any(-1) & blocks.alive_A,
            nan_AQ=self.here(rng.random((a, q)) < self.nan),
        )

    def target_outputs(self, drafted: DraftedRows) -> TargetOutputs:
        """Random outputs in the form that `smc.executor.select.target_outputs` returns."""
        rng, rows, c = self.rng, len(drafted.root_X), 4
        if self.plan.kind.all_exact:
            return TargetOutputs()
        logp_X, log_z_A = self.here(self.floats(rows)), self.here(self.floats(rows))
        if self.lookahead:
            return TargetOutputs(logp_X)
        own = (
            (logp_X, self.here(rng.integers(0, VOCAB, rows)), log_z_A)
            if Decoding.INDEPENDENT in self.kinds
            else (None, None, log_z_A)
        )
        if self.kinds == {Decoding.INDEPENDENT}:
            return TargetOutputs(*own)
        candidate_logp_AC = self.here(self.floats(rows, c))
        offers = CandidateTokens(
            self.here(rng.integers(0, VOCAB, (rows, c))), candidate_logp_AC, self.here(self.floats(rows, c))
        )
        return TargetOutputs(*own, offers, candidate_logp_AC)

    def inputs(self, asked: VerifyInputs, drafted: DraftedRows, walk: object) -> ScoreInputs:
        verified, blocks, matched = self.verified(asked), asked.blocks, None
        if self.plan.kind.has_exact:
            groups = self.plan.arrays.groups
            matched = walk(blocks.tokens_AQ, blocks.count_A, verified.drawn_AQ, blocks.alive_A, groups)
        return ScoreInputs(
            self.plan, self.state, verified, drafted, self.target_outputs(drafted), matched, self.lookahead
        )
