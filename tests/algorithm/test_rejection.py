"""Decoding by rejection: the output follows the target's distribution, whatever the draft's distribution is.

Target and draft are tables: a distribution after every sequence. Axes as in `smc.algorithm.verification`; S sequences,
T tokens of an output."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from smc.algorithm.resampling import Spans
from smc.algorithm.verification import NO_TOKEN, Chains, match_samples, verify_by_rejection

V = 3
GROUPS = 60_000
LIMIT = 4.0
"""Standard deviations that a chi-square statistic may exceed its mean: one false alarm in 30,000 tests."""


def table(seed: int, length: int, flatness: float = 1.0, allowed: int = V) -> dict[tuple[int, ...], Tensor]:
    """A distribution [V] after every sequence of up to `length` tokens; tokens from `allowed` on have probability
    zero."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for tokens in (t for n in range(length + 1) for t in itertools.product(range(V), repeat=n)):
        logits_V = torch.randn(V, dtype=torch.float64, generator=generator) / flatness
        logits_V[allowed:] = -torch.inf
        laws[tokens] = logits_V.log_softmax(-1)
    return laws


def packed(laws: dict[tuple[int, ...], Tensor], tokens_AQ: Tensor) -> Tensor:
    """The distribution after each token of a block, whose first token stands for the prompt [A, Q, V]."""
    q = tokens_AQ.shape[1]
    sequences = list(itertools.product(range(V), repeat=q - 1))
    of_all_SQV = torch.stack([torch.stack([laws[s[:j]] for j in range(q)]) for s in sequences])
    weights = torch.tensor([V ** (q - 2 - j) for j in range(q - 1)])
    return of_all_SQV[(tokens_AQ[:, 1:] * weights).sum(-1)]


def drawn(laws: dict[tuple[int, ...], Tensor], count: int, length: int, generator: torch.Generator) -> Tensor:
    """Blocks [count, 1 + length] drawn from the distributions of a table."""
    tokens_AQ = torch.zeros(count, 1, dtype=torch.int64)
    for j in range(length):
        prefixes = [tuple(p) for p in itertools.product(range(V), repeat=j)]
        law_SV = torch.stack([laws[p] for p in prefixes]).exp()
        index_A = (tokens_AQ[:, 1:] * torch.tensor([V ** (j - 1 - i) for i in range(j)], dtype=torch.int64)).sum(-1)
        token_A1 = torch.multinomial(law_SV[index_A], 1, generator=generator)
        tokens_AQ = torch.cat((tokens_AQ, token_A1), 1)
    return tokens_AQ


def one_round(p: dict, q: dict, n: int, k: int, seed: int, groups: int = GROUPS) -> tuple[Tensor, Tensor]:
    """The tokens that every group accepts [G, K + 1], with NO_TOKEN after the last, and how many of them were drafted
    [G]."""
    generator = torch.Generator().manual_seed(seed)
    tokens_AQ = drawn(q, groups * n, k, generator)
    count_A = torch.full((groups * n,), k + 1)
    alive_A = torch.ones(groups * n, dtype=torch.bool)
    chains = Chains(tokens_AQ, count_A, alive_A, packed(p, tokens_AQ), packed(q, tokens_AQ)[:, :-1])
    bounds = Spans(torch.arange(groups) * n, torch.full((groups,), n))
    uniform_AQ = torch.rand(groups * n, k + 1, dtype=torch.float64, generator=generator)
    noise_HQV = -torch.log(-torch.log(torch.rand(groups, k + 1, V, dtype=torch.float64, generator=generator)))
    said_AQ, _ = verify_by_rejection(chains, bounds, uniform_AQ, noise_HQV)
    best_A, right_A = match_samples(tokens_AQ, count_A, said_AQ, alive_A, bounds)
    best_G, right_G = best_A[bounds.first_G], right_A[bounds.first_G]
    taken_GT = said_AQ[best_G]
    taken_GT[torch.arange(k + 1) >= right_G[:, None]] = NO_TOKEN
    return taken_GT, right_G - 1


def finished(p: dict, taken_GT: Tensor, generator: torch.Generator) -> Tensor:
    """Fill in the tokens that a round did not produce, drawn from the target's distribution, so that all outputs have
    the same length."""
    for j in range(taken_GT.shape[1]):
        is_missing_G = taken_GT[:, j] == NO_TOKEN
        for prefix in set(map(tuple, taken_GT[is_missing_G, :j].tolist())):
            at_G = is_missing_G & (taken_GT[:, :j] == torch.tensor(prefix)).all(-1)
            drawn = torch.multinomial(p[prefix].exp(), int(at_G.sum()), replacement=True, generator=generator)
            taken_GT[at_G, j] = drawn
    return taken_GT


def far_from(p: dict, taken_GT: Tensor) -> float:
    """Standard deviations that the chi-square of the outputs' counts exceeds its mean, against the target's exact
    distribution."""
    length = taken_GT.shape[1]
    sequences = list(itertools.product(range(V), repeat=length))
    expected_S = torch.tensor(
        [sum(p[s[:j]][s[j]].item() for j in range(length)) for s in sequences], dtype=torch.float64
    ).exp()
    index_G = (taken_GT * torch.tensor([V ** (length - 1 - j) for j in range(length)])).sum(-1)
    count_S = torch.bincount(index_G, minlength=len(sequences)).double()
    assert not count_S[expected_S == 0].any()
    seen = expected_S > 0
    expected_S, count_S = expected_S[seen] * len(taken_GT), count_S[seen]
    free = len(expected_S) - 1
    return float((((count_S - expected_S) ** 2 / expected_S).sum() - free) / (2 * free) ** 0.5) if free else 0.0


@pytest.mark.parametrize(
    ("n", "k", "allowed"), [(1, 1, V), (1, 3, V), (4, 1, V), (4, 2, V), (4, 3, V), (2, 4, V), (1, 1, 2), (4, 3, 2)]
)
def test_the_output_has_the_targets_law(n, k, allowed):
    p, q = table(1, k, allowed=allowed), table(2, k, flatness=0.7)
    groups = GROUPS if k == 1 else 10_000
    taken_GT, _ = one_round(p, q, n, k, seed=n + k, groups=groups)
    assert far_from(p, finished(p, taken_GT, torch.Generator().manual_seed(9))) < LIMIT


def test_a_token_is_kept_as_often_as_the_laws_overlap():
    """Exactly: a token is accepted for just the uniforms below min(1, p / q), whose mean under q is 1 - TV(p, q)."""
    p, q = table(1, 1)[()], table(2, 1, flatness=0.7)[()]
    steps = 20_000
    kept = 0.0
    for token in range(V):
        tokens_AQ = torch.tensor([[0, token]]).expand(steps, 2)
        one_AQV = [law.expand(steps, 2, V) for law in (p, q)]
        chains = Chains(
            tokens_AQ, torch.full((steps,), 2), torch.ones(steps, dtype=torch.bool), one_AQV[0], one_AQV[1][:, :-1]
        )
        uniform_AQ = ((torch.arange(steps) + 0.5) / steps)[:, None].expand(steps, 2).double()
        said_AQ, _ = verify_by_rejection(
            chains,
            Spans(torch.arange(steps), torch.ones(steps, dtype=torch.int64)),
            uniform_AQ,
            torch.zeros(steps, 2, V),
        )
        share = (said_AQ[:, 0] == token).double().mean().item()
        assert share == pytest.approx(min(1.0, (p[token] - q[token]).exp().item()), abs=1 / steps)
        kept += q[token].exp().item() * min(1.0, (p[token] - q[token]).exp().item())
    assert kept == pytest.approx(1 - 0.5 * (p.exp() - q.exp()).abs().sum().item(), abs=1e-6)


def test_more_chains_are_kept_longer():
    p, q = table(1, 3), table(2, 3, flatness=0.7)
    lengths = [one_round(p, q, n, 3, seed=3, groups=20_000)[1].double().mean().item() for n in (1, 2, 4, 8)]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] + 0.3


def test_a_draft_that_is_the_target_is_always_kept():
    p = table(1, 3)
    _, kept_G = one_round(p, p, 1, 3, seed=4, groups=5_000)
    assert (kept_G == 3).all()


def test_laws_with_nothing_in_common_keep_nothing_and_still_answer():
    p, q = table(1, 2, allowed=1), table(2, 2)
    q = {tokens: torch.tensor([-torch.inf, 0.0, -torch.inf], dtype=torch.float64) for tokens in q}
    taken_GT, kept_G = one_round(p, q, 3, 2, seed=5, groups=500)
    assert not kept_G.any() and (taken_GT[:, 0] == 0).all() and (taken_GT[:, 1:] == NO_TOKEN).all()


def test_chains_that_ended_and_places_without_one():
    """A block of one token yields only the bonus token; indices that are not alive, and padding, yield none."""
    p = table(1, 2)
    tokens_AQ = torch.tensor([[0, 1, 2], [0, 1, 1], [0, 2, 2], [0, 0, 0]])
    count_A, alive_A = torch.tensor([1, 2, 3, 1]), torch.tensor([True, True, False, True])
    law_AQV = packed(p, tokens_AQ)
    groups = Spans(torch.tensor([0, 1, 4]), torch.tensor([1, 2, 0]))
    said_AQ, logp_AQ = verify_by_rejection(
        Chains(tokens_AQ, count_A, alive_A, law_AQV, law_AQV[:, :-1]), groups, torch.zeros(4, 3), torch.zeros(2, 3, V)
    )
    likeliest = int(p[()].argmax())
    assert said_AQ.tolist()[0] == [likeliest, NO_TOKEN, NO_TOKEN]
    assert said_AQ[1, :2].tolist() == [1, int(p[(1,)].argmax())] and said_AQ[1, 2] == NO_TOKEN
    assert (said_AQ[2:] == NO_TOKEN).all() and logp_AQ[2:].isnan().all()
    assert logp_AQ[1, 0] == pytest.approx(p[()][1].item())
