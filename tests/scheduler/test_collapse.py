"""Populations in which no particle has weight, a frequent effect of the target's truncation. No answer may hold a token
of probability zero, and the mean of Z-hat stays 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from smc import demo
from smc.demo.problems import generate
from smc.distributions import Distributions, DistributionSpec
from smc.local_engine import ModelPair, local_engine
from tests.model.dense import dense_logits
from tests.pairwise import one_of
from tests.scheduler.harness import CASES, answers, request, wide
from tests.scheduler.pairs import tiny_pair

LAWS = {"top-p .9": {"top_p": 0.9}, "top-p .5": {"top_p": 0.5}, "min-p": {"min_p": 0.05}, "top-k": {"top_k": 5}}
EACH = pytest.mark.parametrize(
    ("population", "config"), one_of(("independent", CASES[1]), ("distinct", CASES[0])), ids=["lookahead", "lockstep"]
)


def logp_of(pair: ModelPair, prompt: tuple[int, ...], tokens: tuple[int, ...], law: dict) -> torch.Tensor:
    """log p of each token of an answer under the request's own distribution, recomputed from scratch."""
    logits_TV = dense_logits(pair.target, torch.tensor([*prompt, *tokens])).float()[len(prompt) - 1 : -1]
    spec = DistributionSpec.plain(len(tokens))
    if law:
        spec = DistributionSpec.of(**{f"{name}_R": [value] * len(tokens) for name, value in law.items()})
    return Distributions(spec).target(logits_TV).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@EACH
def test_no_answer_holds_a_token_of_probability_zero(population, config):
    """The shipped pair, on problems worded differently from its training data: nearly every population collapses."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    requests, laws = [], {}
    for i, problem in enumerate(generate(9, 6, "test")):
        name, law = f"{i}", list(LAWS.values())[i % len(LAWS)]
        prompt = pair.tokenizer.encode("Question: " + problem.question.replace("There are", "We see"))
        params = {"method": "smc", "population": population, "particles": 4, "seed": i, "max_tokens": 12}
        requests.append(request(prompt, name, **params, **law))
        laws[name] = law
    found = answers(local_engine(pair, wide(config)), requests)
    assert sum(one.statistics.collapses > 0 for one in found.values()) > 2
    for one in requests:
        logp_T = logp_of(pair, one.prompt, found[one.request_id].tokens, laws[one.request_id])
        assert torch.isfinite(logp_T).all(), one.request_id


@EACH
def test_the_mean_of_z_hat_stays_one(population, config):
    """The draft differs much from the target, and the truncation keeps one or two of four tokens, so many populations
    collapse; their Z-hat is 0. If Z-hat continued from the prefix instead, its mean would exceed 1.1 here."""
    pair, count = tiny_pair(scale=1.5), 180
    engine = local_engine(pair, wide(config))
    requests = [
        request(
            [0, 1], f"{seed}", population=population, particles=3, seed=seed, max_tokens=3, top_p=0.6, ignore_eos=True
        )
        for seed in range(count)
    ]
    found = answers(engine, requests).values()
    z_R = np.exp([one.statistics.log_z for one in found])
    collapsed_R = np.array([one.statistics.collapses > 0 for one in found])
    assert collapsed_R.sum() > count // 10
    assert (z_R[collapsed_R] == 0).all() and (z_R[~collapsed_R] > 0).all()
    assert abs(z_R.mean() - 1) <= 4 * z_R.std() / math.sqrt(count)
