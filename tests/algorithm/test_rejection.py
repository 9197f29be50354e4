"""Verification by rejection of many groups at once takes the tokens that `smc.reference` takes. Answers of the latter
follow the target's distribution (tests/test_reference.py).

Target and draft are tables: a distribution after every sequence.

Local axes: Z non-empty groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from smc.algorithm.resampling import Spans
from smc.algorithm.verification import NO_TOKEN, Chains, match_samples, verify_by_rejection
from smc.philox import Purpose
from smc.reference import ExactRejection, Task

V = 3
Table = dict[tuple[int, ...], Tensor]


def table(seed: int, length: int, flatness: float = 1.0, allowed: int = V) -> Table:
    """A distribution [V] after every sequence of up to `length` tokens; tokens from `allowed` on have probability
    zero."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for tokens in (t for n in range(length + 1) for t in itertools.product(range(V), repeat=n)):
        logits_V = torch.randn(V, dtype=torch.float64, generator=generator) / flatness
        logits_V[allowed:] = -torch.inf
        laws[tokens] = logits_V.log_softmax(-1)
    return laws


def packed(laws: Table, tokens_AQ: Tensor) -> Tensor:
    """The distribution after each token of a block [A, Q, V]."""
    return torch.stack([torch.stack([laws[(*row[: j + 1],)] for j in range(len(row))]) for row in tokens_AQ.tolist()])


def one_round(p: Table, q: Table, n: int, k: int, groups: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Verify chains of the reference. Every group must take the tokens that the reference takes. Returns these tokens,
    and how many of them were drafted."""
    tokens, uniforms, noise, wanted = [], [], [], []
    for seed in range(groups):
        made = ExactRejection(Task(lambda t: p[t[1:]].float(), lambda t: q[t[1:]].float(), (0,), -1, k + 2, seed, n, k))
        blocks, _, (node, token) = made.round()
        tokens += [row.tokens[1:] for row in blocks]
        position_Q = range(2, k + 3)
        uniforms += [[made.uniform(at, Purpose.TRIAL, 0, rank) for at in position_Q] for rank in range(n)]
        noise.append(torch.stack([-made.variates(V, at, Purpose.REMAINDER).log() for at in position_Q]))
        wanted.append((*node[2:], *([] if token is None else [token])))
    tokens_AQ, bounds = torch.tensor(tokens), Spans(torch.arange(groups) * n, torch.full((groups,), n))
    count_A, alive_A = torch.full((groups * n,), k + 1), torch.ones(groups * n, dtype=torch.bool)
    chains = Chains(tokens_AQ, count_A, alive_A, packed(p, tokens_AQ).float(), packed(q, tokens_AQ).float()[:, :-1])
    uniform_AQ, noise_ZQV = torch.tensor(uniforms, dtype=torch.float64), torch.stack(noise)
    said_AQ, _ = verify_by_rejection(chains, bounds, uniform_AQ, noise_ZQV)
    best_A, right_A = match_samples(tokens_AQ, count_A, said_AQ, alive_A, bounds)
    best_G, right_G = best_A[bounds.first_G], right_A[bounds.first_G]
    taken = [(*said_AQ[best, :right].tolist(),) for best, right in zip(best_G.tolist(), right_G.tolist())]
    assert taken == wanted
    return taken, (right_G - 1).tolist()


@pytest.mark.parametrize(("n", "k", "allowed"), [(1, 1, V), (4, 2, V), (2, 4, V), (1, 1, 2), (4, 3, 2)])
def test_chains_are_verified_as_by_the_reference(n, k, allowed):
    """With tokens that only the draft can draw, too."""
    _, kept = one_round(table(1, k + 2, allowed=allowed), table(2, k + 2, flatness=0.7), n, k, 150)
    assert 0 in kept and any(kept)


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
    p, q = table(1, 5), table(2, 5, flatness=0.7)
    means = [sum(one_round(p, q, n, 3, groups=150)[1]) / 150 for n in (1, 2, 8)]
    assert means == sorted(means) and means[-1] > means[0] + 0.3


def test_a_draft_that_is_the_target_is_always_kept():
    p = table(1, 5)
    assert set(one_round(p, p, 1, 3, groups=200)[1]) == {3}


def test_laws_with_nothing_in_common_keep_nothing_and_still_answer():
    p, q = table(1, 4, allowed=1), table(2, 4)
    q = {tokens: torch.tensor([-torch.inf, 0.0, -torch.inf], dtype=torch.float64) for tokens in q}
    taken, kept = one_round(p, q, 3, 2, groups=100)
    assert not any(kept) and set(taken) == {(0,)}


def test_chains_that_ended_and_places_without_one():
    """A block of one token yields only the bonus token; indices that are not alive, and padding, yield none."""
    p = table(1, 3)
    tokens_AQ = torch.tensor([[0, 1, 2], [0, 1, 1], [0, 2, 2], [0, 0, 0]])
    count_A, alive_A = torch.tensor([1, 2, 3, 1]), torch.tensor([True, True, False, True])
    law_AQV = packed(p, tokens_AQ)
    groups = Spans(torch.tensor([0, 1, 4]), torch.tensor([1, 2, 0]))
    said_AQ, logp_AQ = verify_by_rejection(
        Chains(tokens_AQ, count_A, alive_A, law_AQV, law_AQV[:, :-1]), groups, torch.zeros(4, 3), torch.zeros(2, 3, V)
    )
    likeliest = int(p[(0,)].argmax())
    assert said_AQ.tolist()[0] == [likeliest, NO_TOKEN, NO_TOKEN]
    assert said_AQ[1, :2].tolist() == [1, int(p[(0, 1)].argmax())] and said_AQ[1, 2] == NO_TOKEN
    assert (said_AQ[2:] == NO_TOKEN).all() and logp_AQ[2:].isnan().all()
    assert logp_AQ[1, 0] == pytest.approx(p[(0,)][1].item())
