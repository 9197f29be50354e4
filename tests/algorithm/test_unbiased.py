"""The whole sampler on a table instead of models: Z-hat is unbiased, and answers approach the target's distribution as
N grows.

Target and draft are random Markov chains over three letters and EOS, and thousands of groups run at once. Everything
except the table look-ups is `smc.algorithm`. Axes: G groups, N particles, F branches, K block, L answer positions, S
states, V tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from smc.algorithm.resampling import Bounds, block_log_weight, log_mean_weight, normalise
from smc.algorithm.selection import select
from smc.api.limits import SCHEME_NAMES
from tests.algorithm.packing import lockstep_candidates, lookahead_candidates
from tests.pairwise import few, one_of

EOS, VOCABULARY, LENGTH, BLOCK = 3, 4, 6, 2
HALVES = {2: 50_000, 8: 100_000, 32: 100_000}  # particles in each half of a distance, by N
BEGIN = VOCABULARY  # the state before the first token; the others are named after the last token
ROUNDS = math.ceil((LENGTH - 1) / BLOCK) + 1
SCHEMES = tuple(SCHEME_NAMES.index(name) for name in ("systematic", "stratified", "residual", "multinomial"))


def tables(seed: int = 5) -> tuple[Tensor, Tensor]:
    """log p and log q [S, V]: the draft is a flattened and perturbed target."""
    generator = torch.Generator().manual_seed(seed)
    logits_SV = torch.randn(VOCABULARY + 1, VOCABULARY, dtype=torch.float64, generator=generator)
    logits_SV[:, EOS] -= 0.7
    noise_SV = torch.randn(VOCABULARY + 1, VOCABULARY, dtype=torch.float64, generator=generator)
    return logits_SV.log_softmax(-1), (0.7 * logits_SV + 0.6 * noise_SV).log_softmax(-1)


LOG_P, LOG_Q = tables()


def answers(alpha: float) -> dict[tuple[int, ...], float]:
    """Every answer with its mass, prod p^alpha. EOS ends an answer, and so does the length cap."""
    mass = {}
    for length in range(1, LENGTH + 1):
        for head in itertools.product(range(EOS), repeat=length - 1):
            for last in range(VOCABULARY) if length == LENGTH else (EOS,):
                states = (BEGIN, *head)
                mass[*head, last] = math.exp(alpha * sum(LOG_P[s, v].item() for s, v in zip(states, (*head, last))))
    return mass


def draw(log_law_SV: Tensor, state_X: Tensor, generator: torch.Generator) -> Tensor:
    """One token after every state, by inversion."""
    cumulative_XV = log_law_SV.exp().cumsum(-1)[state_X]
    point_X1 = torch.rand(state_X.shape, dtype=torch.float64, generator=generator)[..., None] * cumulative_XV[..., -1:]
    return (cumulative_XV <= point_X1).sum(-1)


@dataclass
class Particles:
    """Populations [G, N]. The last `unscored` tokens of each answer are not in its weight yet."""

    tokens_GNL: Tensor
    length_GN: Tensor
    unscored_GN: Tensor
    logw_GN: Tensor
    log_z_G: Tensor

    @property
    def last_GN(self) -> Tensor:
        return self.tokens_GNL.gather(-1, self.length_GN[..., None] - 1).squeeze(-1)

    @property
    def open_GN(self) -> Tensor:
        return (self.last_GN != EOS) & (self.length_GN < LENGTH)

    def append(self, tokens_GNK: Tensor, grows_GN: Tensor) -> None:
        """Append the tokens, up to EOS or the length limit."""
        for k in range(tokens_GNK.shape[-1]):
            grows_GN = grows_GN & self.open_GN
            at_GN1 = torch.where(grows_GN, self.length_GN, 0)[..., None]
            token_GN1 = torch.where(grows_GN[..., None], tokens_GNK[..., k : k + 1], self.tokens_GNL[..., :1])
            self.tokens_GNL = self.tokens_GNL.scatter(-1, at_GN1, token_GN1)
            self.length_GN = self.length_GN + grows_GN
            self.unscored_GN = self.unscored_GN + grows_GN


class Sampler:
    """`groups` populations of `n` particles; `branches` is None for lockstep."""

    def __init__(self, groups: int, n: int, branches: int | None, threshold: float, alpha: float, seed: int) -> None:
        self.shape_GN, self.branches, self.alpha = (groups, n), branches, alpha
        self.generator = torch.Generator().manual_seed(seed)
        self.threshold_G = torch.full((groups,), threshold)
        self.scheme_G = torch.tensor(SCHEMES).repeat(groups // len(SCHEMES) + 1)[:groups]
        self.seed_G, self.rounds = torch.arange(groups) + (seed << 32), 0
        power_SV = alpha * LOG_P
        self.bonus_log_z_S = power_SV.logsumexp(-1)
        self.bonus_SV = power_SV - self.bonus_log_z_S[:, None]

    def run(self) -> Particles:
        first_GN = draw(self.bonus_SV, torch.full(self.shape_GN, BEGIN), self.generator)
        tokens_GNL = torch.zeros(*self.shape_GN, LENGTH, dtype=torch.int64)
        tokens_GNL[..., 0] = first_GN
        particles = Particles(
            tokens_GNL,
            length_GN=torch.ones_like(first_GN),
            unscored_GN=torch.zeros_like(first_GN),
            logw_GN=self.bonus_log_z_S[BEGIN].expand(self.shape_GN),
            log_z_G=torch.zeros(self.shape_GN[0], dtype=torch.float64),
        )
        for _ in range(ROUNDS):
            self._lockstep(particles) if self.branches is None else self._lookahead(particles)
        assert not particles.open_GN.any()
        assert not particles.unscored_GN.any()
        return particles

    def _lockstep(self, particles: Particles) -> None:
        particles.append(self._draft(particles.last_GN), particles.open_GN)
        block_GN, open_GN = self._score(particles), particles.open_GN
        bonus_GN = draw(self.bonus_SV, particles.last_GN, self.generator)
        log_z_GN = torch.where(open_GN, self.bonus_log_z_S[particles.last_GN], 0.0)
        candidates_GN1 = lockstep_candidates(particles.logw_GN, block_GN, log_z_GN)
        ancestor_GN, _ = self._select(particles, candidates_GN1)
        particles.append(bonus_GN.gather(1, ancestor_GN)[..., None], open_GN.gather(1, ancestor_GN))
        particles.unscored_GN = torch.zeros_like(particles.unscored_GN)

    def _lookahead(self, particles: Particles) -> None:
        open_GN = particles.open_GN
        branches_GNFK = self._draft(particles.last_GN[..., None].expand(-1, -1, self.branches))
        block_GN = self._score(particles)
        at = particles.last_GN[..., None], branches_GNFK[..., 0]
        candidates_GNF = lookahead_candidates(particles.logw_GN, block_GN, self.alpha * LOG_P[at] - LOG_Q[at], open_GN)
        ancestor_GN, branch_GN = self._select(particles, candidates_GNF)
        chosen_GNK = branches_GNFK[torch.arange(self.shape_GN[0])[:, None], ancestor_GN, branch_GN]
        grows_GN = open_GN.gather(1, ancestor_GN)
        particles.append(chosen_GNK, grows_GN)
        particles.unscored_GN = particles.unscored_GN - grows_GN.long()  # the first token was counted as a candidate

    def _draft(self, last_X: Tensor) -> Tensor:
        """K tokens [X, K] of the draft after every state."""
        drafted = []
        for _ in range(BLOCK):
            last_X = draw(LOG_Q, last_X, self.generator)
            drafted.append(last_X)
        return torch.stack(drafted, -1)

    def _score(self, particles: Particles) -> Tensor:
        """Increment of the unscored tokens. Positions behind them hold junk, which the result must ignore."""
        begin_GN = particles.length_GN - particles.unscored_GN
        at_GNK = (begin_GN[..., None] + torch.arange(BLOCK)).clamp(max=LENGTH - 1)
        token_XK = particles.tokens_GNL.gather(-1, at_GNK).flatten(0, 1)
        state_XK = particles.tokens_GNL.gather(-1, at_GNK - 1).flatten(0, 1)
        counts_X = particles.unscored_GN.flatten()
        alpha_X = torch.full(counts_X.shape, self.alpha, dtype=torch.float64)
        block_X = block_log_weight(LOG_P[state_XK, token_XK], LOG_Q[state_XK, token_XK], counts_X, alpha_X)
        particles.unscored_GN = torch.zeros_like(particles.unscored_GN)
        return block_X.view(self.shape_GN)

    def _select(self, particles: Particles, candidates_GNF: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the populations by the selected particles; return their ancestors and branches."""
        groups, n, _ = candidates_GNF.shape
        self.rounds += 1
        size_G = torch.full((groups,), n, dtype=torch.int32)
        first_G = torch.arange(0, groups * n, n, dtype=torch.int32)
        chosen = select(
            candidates_GNF.flatten(0, 1),
            torch.ones(groups * n, dtype=torch.bool),
            Bounds(first_G, size_G, size_G, size_G),
            self.threshold_G,
            self.scheme_G,
            self.seed_G,
            torch.full_like(self.seed_G, self.rounds),
        )
        assert chosen.alive_A.all()
        ancestor_GN = chosen.ancestor_A.view(groups, n) - first_G[:, None]
        particles.tokens_GNL = particles.tokens_GNL.gather(1, ancestor_GN[..., None].expand(-1, -1, LENGTH))
        particles.length_GN = particles.length_GN.gather(1, ancestor_GN)
        particles.logw_GN = chosen.logw_A.view(groups, n)
        particles.log_z_G = particles.log_z_G + chosen.log_z_G
        return ancestor_GN, chosen.branch_A.view(groups, n)


def evidence(particles: Particles) -> Tensor:
    """Z-hat [G] at the end of decoding."""
    _, log_sum_G = normalise(particles.logw_GN)
    size_G = torch.full_like(log_sum_G, particles.logw_GN.shape[1])
    return (particles.log_z_G + log_mean_weight(log_sum_G, size_G)).exp()


def answer_numbers(tokens_XL: Tensor, length_X: Tensor) -> Tensor:
    """Each answer as a number in base 5; absent positions are 4."""
    digits_XL = torch.where(torch.arange(LENGTH) < length_X[..., None], tokens_XL, VOCABULARY)
    return (digits_XL * (VOCABULARY + 1) ** torch.arange(LENGTH)).sum(-1)


@pytest.mark.parametrize(
    ("branches", "threshold", "alpha"), few(itertools.product([None, 1, 2, 4], [0.0, 0.5, 1.0], [1.0, 0.7]))
)
def test_the_mean_evidence_is_the_exact_mass(branches, threshold, alpha):
    """4000 groups of 4, within 4.5 standard errors: false alarm 7e-6 a case, 2e-4 in all."""
    estimate_G = evidence(Sampler(4000, 4, branches, threshold, alpha, seed=3).run())
    exact = sum(answers(alpha).values())
    assert exact == pytest.approx(1) if alpha == 1 else exact > 1.5
    error = estimate_G.std().item() / math.sqrt(len(estimate_G))
    assert error < 0.03 * exact  # sharp enough to see a wrong factor
    assert abs(estimate_G.mean().item() - exact) < 4.5 * error


def squared_distance(n: int, branches: int | None, alpha: float) -> float:
    """Squared distance between the answers' distribution and the exact one, estimated without bias from two independent
    halves.

    The distribution of one draw from softmax(log w) is the mean of the softmax itself."""
    mass = answers(alpha)
    sequences = torch.tensor([[*a, *[0] * (LENGTH - len(a))] for a in mass])
    cells_A = answer_numbers(sequences, torch.tensor([len(a) for a in mass]))
    exact_A = torch.tensor(list(mass.values()), dtype=torch.float64) / sum(mass.values())
    halves = []
    for seed in (1, 2):
        particles = Sampler(HALVES[n] // n, n, branches, 0.5, alpha, seed).run()
        weights_GN, _ = normalise(particles.logw_GN)
        numbers_GN = answer_numbers(particles.tokens_GNL, particles.length_GN)
        law = numbers_GN.flatten().bincount(weights_GN.flatten(), minlength=(VOCABULARY + 1) ** LENGTH) / len(
            weights_GN
        )
        assert law[cells_A].sum().item() == pytest.approx(1)
        halves.append(law[cells_A] - exact_A)
    return (halves[0] * halves[1]).sum().item()


@pytest.mark.parametrize(
    ("branches", "alpha"),
    one_of((4, 0.7), (None, 0.7)),
    ids=["F=4", "lockstep"],
)
def test_answers_approach_the_target_law_as_particles_are_added(branches, alpha):
    """The bias falls as 1 / N, so its square falls up to 16-fold when N grows 4-fold; the test requires a factor of 3.

    Over other seeds each difference below is at least 6 times its own standard deviation: false alarm under 1e-8."""
    far, near, nearest = (squared_distance(n, branches, alpha) for n in HALVES)
    assert far > 3 * near
    assert near > 3 * nearest
