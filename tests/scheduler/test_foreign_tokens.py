"""A draft whose tokenizer differs from the target's in added tokens: exact decoding gives the target's own answers, SMC
is weighted right over all of them, and the draft reads every id."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair, local_engine
from tests.model.foreign import FOREIGN, TARGET_ENDS, VOCAB, save_foreign_pair
from tests.scheduler.harness import CASES, LOOKAHEAD_FIRST, answers, config_id, request
from tests.scheduler.pairs import law_of, logits_after, mean_and_error, next_log_probs
from tests.scheduler.shared_answers import CONFIGS, DISTINCT, INDEPENDENT, evidence, population, votes
from tests.scheduler.test_exact import settings_of

LENGTH = 4
PROMPT = (0, 3, 4, 1)
"""Has both ids that are foreign to the draft."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> ModelPair:
    return ModelPair.load(*save_foreign_pair(tmp_path_factory.mktemp("foreign")))


def test_what_is_loaded(pair):
    """The draft has a row for every id of the target: those that it lacks are the mean of its own."""
    assert pair.tokenizer.eos_ids == TARGET_ENDS
    assert pair.draft_head.vocab.ids_M.tolist() == [0, 1, 2] and pair.draft_head.vocab.vocab == VOCAB
    weight = pair.draft.embed.weight
    assert pair.draft.config.vocab_size == len(weight) == pair.draft.lm_head.out_features == VOCAB
    assert torch.allclose(weight[4], weight[:4].mean(0), atol=1e-6)


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_exact_answers_are_those_of_plain_decoding(pair, config):
    """Prompts and answers have foreign ids, and some answers end at an id that the draft lacks."""
    rng = random.Random(11)
    asked = [([rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))], str(i), settings_of(rng)) for i in range(12)]
    found = {
        method: answers(local_engine(pair, config), [request(p, i, method=method, **law) for p, i, law in asked])
        for method in ("target", "exact")
    }
    for name, one in found["target"].items():
        other = found["exact"][name]
        assert (other.tokens, other.finish_reason) == (one.tokens, one.finish_reason)
    drawn = {token for one in found["exact"].values() for token in one.tokens}
    assert drawn == set(range(VOCAB))


def often_foreign(pair: ModelPair) -> ModelPair:
    """The pair with a draft that proposes foreign ids often enough for statistics."""
    vocab = replace(pair.draft_head.vocab, share=0.25)
    return replace(pair, draft_head=vocab.head(pair.draft))


@pytest.mark.parametrize("config", [EngineConfig(form="lockstep", block=3), EngineConfig(block=3, branches=1)])
@pytest.mark.parametrize("often", [True, False])
def test_a_weight_is_the_product_of_ratios(pair, config, often):
    """With one particle, Z-hat is the product of p / q over the drafted tokens, recomputed from scratch: q is the
    draft's distribution over the other ids, less the share of the foreign ones."""
    pair = often_foreign(pair) if often else pair
    share, law = pair.draft_head.vocab.share, {"particles": 1, "ess_threshold": 0, "max_tokens": 9}
    asked = [request(PROMPT, str(seed), seed=seed, population="independent", **law) for seed in range(24)]
    drafted = set()
    for found in answers(local_engine(pair, config), asked).values():
        expected = 0.0
        for i, token in enumerate(found.tokens):
            if i % 4 == 0 if config.form == "lockstep" else i == 0:
                continue  # the target's own
            past = (*PROMPT, *found.tokens[:i])
            logq_M = logits_after(pair.draft, past)[:3].log_softmax(-1)
            q = share / 2 if token in FOREIGN else (1 - share) * logq_M[token].exp().item()
            expected += next_log_probs(pair.target, past)[token].item() - math.log(q)
            drafted.add(token)
        assert found.statistics.log_z == pytest.approx(expected, abs=2e-4)
    assert drafted >= ({*range(VOCAB)} if often else {0, 1, 2})


@pytest.mark.parametrize(
    ("config", "law"),
    [
        (CONFIGS[0], DISTINCT),
        (CONFIGS[2], INDEPENDENT | {"ess_threshold": 0.5}),
        pytest.param(CONFIGS[3], DISTINCT, marks=pytest.mark.slow),
        pytest.param(CONFIGS[0], INDEPENDENT | {"ess_threshold": 0.5}, marks=pytest.mark.slow),
    ],
    ids=["lockstep-distinct", "lookahead-independent", "lookahead-distinct", "lockstep-independent"],
)
def test_weights_are_right_over_all_answers(pair, config, law):
    """E[Z-hat * weight of an answer] is its probability under the target, which is enumerated. Answers are grouped by
    their last token and by whether they contain id 3: ten means at 4.5 standard errors, one false alarm in about 15,000
    choices of seeds."""
    exact = law_of(lambda prefix: next_log_probs(pair.target, (*PROMPT, *prefix)).tolist(), LENGTH, *TARGET_ENDS)
    assert sum(exact.values()) == pytest.approx(1)
    assert sum(p for answer, p in exact.items() if set(answer[1:]) & set(FOREIGN)) > 0.2
    found = population(config, 300, often_foreign(pair), prompt=PROMPT, max_tokens=LENGTH, particles=8, **law)
    z, masses = evidence(found), [votes(one) for one in found]
    groups = sorted({group_of(answer) for answer in exact})
    assert len(groups) == 10
    for group in groups:
        mean, error = mean_and_error(
            [each * sum(w for a, w in mass.items() if group_of(a) == group) for each, mass in zip(z, masses)]
        )
        expected = sum(p for answer, p in exact.items() if group_of(answer) == group)
        assert abs(mean - expected) < 4.5 * error + 1e-6, (group, mean, expected, error)
    mean, error = mean_and_error(z)
    assert abs(mean - 1) < 4.5 * error and error < 0.07, (mean, error)


def group_of(answer: tuple[int, ...]) -> tuple[int, bool]:
    return answer[-1], 3 in answer[:-1]


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_the_draft_alone_draws_no_foreign_id(pair, config):
    requests = [request(PROMPT, str(i), seed=i, method="draft", max_tokens=12, ignore_eos=True) for i in range(6)]
    found = answers(local_engine(pair, config), requests)
    assert {token for one in found.values() for token in one.tokens} == {0, 1, 2}


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_requests_beside_each_other(pair, config):
    """Requests of all methods share rounds, and answer as they do alone."""
    methods = ("smc", "exact", "target", "draft")
    asked = [request((3, 4, i % 2), f"{m} {i}", seed=i, method=m, max_tokens=10) for m in methods for i in range(3)]
    together = answers(local_engine(pair, config), asked)
    for one in asked:
        (alone,) = answers(local_engine(pair, config), [one]).values()
        assert alone.tokens == together[one.request_id].tokens
