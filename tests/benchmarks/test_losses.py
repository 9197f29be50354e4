"""Measurements of the comparison of losses: a draft that is the target itself loses nothing."""

from __future__ import annotations

import pytest

from benchmarks.losses import Comparison, DraftQuality, Population, Terms, table
from tests.model.tiny import numbers_tokenizer, random_decoder, tiny_config

SIZE = 5


@pytest.mark.slow
def test_the_target_is_its_own_best_draft():
    """The target as draft has no divergence beyond statistical error; another draft has more, even for short
    answers."""
    config = tiny_config(vocab_size=SIZE)
    target, other = (random_decoder(config, seed) for seed in (3, 4))
    target.lm_head.weight.mul_(0.5)
    other.lm_head.weight.mul_(3)
    terms = Terms(1.0, ((0, 1), (2, 3), (1, 1), (3, 0)), 24, 4, 3, 80, ("independent",), "cpu")
    comparison = Comparison(target, numbers_tokenizer(SIZE), terms)
    rounds, populations = comparison.measure(target)
    own = populations["independent"]
    assert rounds["lockstep_8"] >= rounds["lockstep_1"] > 2.5
    assert own.log_z == pytest.approx(0, abs=1e-4) and own.collapses == 0
    assert abs(own.kl) < 4 * own.kl_error + 0.02 and abs(own.tv) < 4 * own.tv_error + 0.02
    assert all(0 < kl < 0.4 and 0 < tv < 0.3 for kl, tv in comparison.noise)
    worse_rounds, worse = comparison.measure(other)
    assert worse_rounds["lockstep_8"] < rounds["lockstep_8"] - 0.5
    assert worse["independent"].kl > own.kl + 4 * own.kl_error
    assert worse["independent"].tv > own.tv + 4 * own.tv_error and worse["independent"].log_z < -0.05


def test_the_table_has_a_row_for_every_population():
    of = Population(-0.1, -0.2, 3, 0.4, 0.05, 0.1, 0.02)
    made = DraftQuality("tv", 1200, 0.9, 0.1, 0.2, 4.0, 3.0, 2.5, {"distinct": of, "independent": of})
    lines = table([made]).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 4
    assert (
        "| tv | 1,200 | 0.900 |" in lines[2]
        and "| independent | -0.100 | -0.200 | 3 | 0.400 +- 0.050 | 0.100 +- 0.020 |" in lines[3]
    )
