"""`guide_draft`: what is proposed is of the guided law, too. That laws, answers and pages stay right is in
`tests.scheduler.test_guidance`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.outputs import Answer
from smc.api.request import Request
from smc.local_engine import ModelPair, local_engine
from smc.model.draft_vocab import DraftVocab
from tests.scheduler.harness import FORMS, answers, config_id, request
from tests.scheduler.pairs import tiny_pair

HOW = {
    "chains": {"method": "exact", "particles": 2, "verification": "rejection"},
    "tree": {"method": "exact", "particles": 1, "temperature": 0.0},
    "resampled": {"particles": 6, "ess_threshold": 1.0, "resampling": "multinomial"},
    "apart": {"particles": 3, "ess_threshold": 0.0},
}


ENDS = [FORMS[0], FORMS[2]]


def asked(name: str, seed: int, **guidance) -> Request:
    """Sequences of different lengths, so that companions are ahead of some particles and behind others."""
    prompt, negative = ((0, 1, 2, 0, 1), (2,)) if seed % 2 else ((1,), (2, 0, 1, 1, 2, 0, 2))
    one = request(prompt, f"{name} {seed}", seed=seed, max_tokens=25, ignore_eos=True, **guidance, **HOW[name])
    return replace(one, negative_prompt=negative if one.params.guided else None)


@pytest.mark.parametrize("config", ENDS, ids=config_id)
def test_a_draft_that_is_the_target_proposes_its_guided_law(config):
    """Then nothing is to be corrected: all that is drafted is kept, and all weights are 1, in rounds beside drafts that
    are not guided."""
    target = tiny_pair().target
    twins = replace(tiny_pair(), draft=target)

    def found(**guidance) -> dict[str, Answer]:
        company = [asked(name, seed, guidance_scale=1.7) for name in HOW for seed in (8, 9)]
        given = [asked(name, seed, **guidance) for name in HOW for seed in range(3)]
        return answers(local_engine(twins, replace(config, max_slots=256)), [*company[:4], *given, *company[4:]])

    guided, plain, others = found(guidance_scale=2.5, guide_draft=True), found(), found(guidance_scale=2.5)
    rounds = [0, 0]
    for name in HOW:
        for seed in range(3):
            one, like, other = (answer[f"{name} {seed}"].statistics for answer in (guided, plain, others))
            if name in ("chains", "tree"):
                assert one.rounds == like.rounds
                rounds = [rounds[0] + one.rounds, rounds[1] + other.rounds]
            else:
                assert one.log_z == pytest.approx(0, abs=1e-4) and abs(other.log_z) > 0.01
            assert one.draft_tokens == 2 * like.draft_tokens and one.target_tokens == 2 * like.target_tokens
    assert rounds[1] > 1.1 * rounds[0]


@pytest.mark.parametrize("config", ENDS, ids=config_id)
def test_a_draft_of_few_tokens_is_guided_over_these(config):
    """A head of its own: its columns are guided, and what it has no row for is proposed as ever."""
    made = tiny_pair()
    pair = ModelPair(
        made.target, made.draft, made.tokenizer, 64, DraftVocab(np.array([0, 2, 3]), 4, 0.2).head(made.draft)
    )
    law = {"guidance_scale": 2.5, "max_tokens": 16}
    plain = [request(request_id=str(seed), seed=seed, method="target", **law) for seed in range(6)]
    exact = [
        request(request_id=str(seed), seed=seed, method="exact", particles=3, guide_draft=True, **law)
        for seed in range(6)
    ]
    particles = [
        request(request_id=f"smc {seed}", seed=seed, particles=16, guide_draft=True, **law) for seed in range(6)
    ]
    expected, found = (
        answers(local_engine(pair, config), plain),
        answers(local_engine(pair, replace(config, max_slots=256)), exact + particles),
    )
    assert all(found[str(seed)].tokens == expected[str(seed)].tokens for seed in range(6))
    assert all(abs(found[f"smc {seed}"].statistics.log_z) < 3 for seed in range(6))


def test_admission_counts_the_companions_of_the_draft():
    """As many pages again there: in a pool that a request fits in without them, it does not."""
    config = EngineConfig(block=3, branches=4, pages=800)
    law = {"particles": 8, "max_tokens": 40, "population": "independent"}
    asks = [request(guidance_scale=2.0, guide_draft=guide_draft, **law) for guide_draft in (False, True)]
    local_engine(tiny_pair(), config).submit(asks[0])
    with pytest.raises(ValueError, match=r"the request may need \d+ KV pages of the draft model, which has 800"):
        local_engine(tiny_pair(), config).submit(asks[1])
