"""The counter-based random numbers, and the exponential races that are run on them.

Statistical tests use fixed seeds; each says how often a correct implementation would fail for a freshly chosen seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.distributions import draw
from smc.philox import Purpose, exponentials, philox4x32, uniforms, words
from smc.reference import philox

# https://github.com/DEShawResearch/random123, tests/kat_vectors: philox4x32, 10 rounds (counter, key, result).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KEY_PARTS = ("seed", "rounds", "stream", "position", "purpose")
word = st.integers(0, 2**32 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)
examples = settings(max_examples=12, deadline=None)


def parse(hexadecimal: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in hexadecimal.split())


def vectorised(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    columns = (np.array(words, dtype=np.uint64)[:, None] for words in (counter, key))
    return tuple(philox4x32(*columns)[:, 0].tolist())


def bits(seed: int = 0, rounds: int = 0, stream: int = 0, position: int = 0, purpose: int = 1) -> list[int]:
    parts = [np.array([part], dtype=np.int64) for part in (seed, rounds, stream, position)]
    return words(*parts, purpose)[:, 0].tolist()


def variates(rows: int, size: int, seed: int = 7, purpose: Purpose = Purpose.PROPOSAL) -> torch.Tensor:
    """Exponentials [R, V] of keys that differ only in their position."""
    w0, w1, _, _ = words(np.int64(seed), np.int64(3), np.int64(64), np.arange(rows), purpose)
    return exponentials(torch.from_numpy(w0), torch.from_numpy(w1), size)


def goodness_of_fit(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square statistic as a standard normal deviate (Wilson and Hilferty 1931); cells with an expectation under 10
    are pooled."""
    expected = law * counts.sum()
    small = expected < 10
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    ratio = ((observed - wanted) ** 2 / wanted).sum() / freedom
    return (ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, result):
    assert vectorised(parse(counter), parse(key)) == parse(result)
    assert philox(parse(counter), parse(key)) == parse(result)


@examples
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_philox_is_that_of_the_reference(counter, key):
    assert vectorised(counter, key) == philox(counter, key)


@examples
@given(seeds, word, word, word, st.sampled_from(Purpose))
def test_a_key_fills_counter_and_key_of_philox(seed, rounds, stream, position, purpose):
    """Negative seeds are used as their two's complement."""
    key = seed % 2**32, seed % 2**64 >> 32
    assert tuple(bits(seed, rounds, stream, position, purpose)) == philox((position, stream, rounds, purpose), key)


@examples
@given(
    st.lists(st.tuples(seeds, word, word, word), min_size=1, max_size=8, unique=True),
    st.sampled_from(Purpose),
    st.randoms(),
)
def test_a_key_gives_its_bits_in_any_batch_and_order(keys, purpose, random):
    together = words(*np.array(keys, dtype=np.int64).T, purpose).T.tolist()
    assert together == [bits(*key, purpose) for key in keys]
    order = random.sample(range(len(keys)), len(keys))
    assert words(*np.array(keys, dtype=np.int64)[order].T, purpose).T.tolist() == [together[i] for i in order]
    assert len(set(map(tuple, together))) == len(keys)


def test_key_parts_broadcast():
    seed, rounds, stream = np.array([5, -6])[:, None], np.array([1, 2])[:, None], np.array([[0, 64, 128]])
    position = np.arange(4)[:, None, None]
    together = words(seed, rounds, stream, position, 2)
    assert together.shape == (4, 4, 2, 3)
    for (p, r, s), _ in np.ndenumerate(together[0]):
        assert together[:, p, r, s].tolist() == bits(int(seed[r, 0]), int(rounds[r, 0]), int(stream[0, s]), p, 2)


@examples
@given(seeds, word, word, word, word, st.sampled_from(KEY_PARTS), st.integers(0, 63))
def test_every_bit_of_every_key_part_matters(seed, rounds, stream, position, purpose, part, bit):
    key = {"seed": seed, "rounds": rounds, "stream": stream, "position": position, "purpose": purpose}
    bit = bit if part == "seed" else bit % 32
    flipped = key[part] ^ (1 << bit)
    if flipped >= 2**63:
        flipped -= 2**64
    elif flipped < -(2**63):
        flipped += 2**64
    # Philox is a bijection of the counter, so another counter must give other bits; another key does so with
    # probability 1 - 2**-128.
    assert bits(**(key | {part: flipped})) != bits(**key)


def test_purposes_never_share_a_number():
    drawn = np.stack([uniforms(np.array([5]), np.array([2]), np.arange(64), purpose) for purpose in Purpose])
    assert len(np.unique(drawn)) == drawn.size


@examples
@given(
    st.lists(st.tuples(seeds, word), min_size=1, max_size=6),
    st.lists(word, min_size=1, max_size=9),
    st.sampled_from(Purpose),
)
def test_a_uniform_depends_on_its_own_seed_round_and_position_only(keys, positions, purpose):
    seed_R, round_R = np.array(keys, dtype=np.int64).T
    together = uniforms(seed_R, round_R, np.array(positions), purpose)
    assert together.shape == (len(keys), len(positions))
    for row, seed, rounds in zip(together, seed_R, round_R):
        for number, position in zip(row, positions):
            assert uniforms(np.array([seed]), np.array([rounds]), np.array([position]), purpose) == [[number]]
            assert (
                number
                == (
                    bits(seed, rounds, 0, position, purpose)[0] * 2**21
                    + (bits(seed, rounds, 0, position, purpose)[1] >> 11)
                )
                / 2**53
            )


def test_uniforms_are_uniform():
    """Mean, variance and Kolmogorov-Smirnov distance; false alarm under 2e-5 in all."""
    drawn = np.sort(uniforms(np.arange(-256, 256), np.full(512, 9), np.arange(256), Purpose.SELECTION).ravel())
    n = len(drawn)
    assert drawn[0] >= 0
    assert drawn[-1] < 1
    assert abs(drawn.mean() - 1 / 2) < 4.5 * math.sqrt(1 / 12 / n)
    assert abs(drawn.var() - 1 / 12) < 4.5 * math.sqrt(1 / 180 / n)
    assert np.abs(drawn - (np.arange(n) + 0.5) / n).max() < 2.7 / math.sqrt(n)
    assert len(np.unique(drawn)) == n  # 53 bits: two equal ones of 2**17 would be a 1 in 10**6 event


def test_exponentials_are_exponential():
    """Mean, variance, Kolmogorov-Smirnov distance and both tails of 2**21 numbers; false alarm under 7e-5 in all."""
    drawn = np.sort(variates(32, 2**16).numpy().astype(np.float64).ravel())
    n = len(drawn)
    assert abs(drawn.mean() - 1) < 4.5 * math.sqrt(1 / n)
    assert abs(drawn.var() - 1) < 4.5 * math.sqrt(8 / n)
    assert np.abs(-np.expm1(-drawn) - (np.arange(n) + 0.5) / n).max() < 2.7 / math.sqrt(n)
    for low in (1e-2, 1e-4, 1e-5):
        expected = n * -math.expm1(-low)
        assert abs((drawn < low).sum() - expected) < 4.5 * math.sqrt(expected)
    for high in (6, 8, 10):
        expected = n * math.exp(-high)
        assert abs((drawn > high).sum() - expected) < 4.5 * math.sqrt(expected)


def test_each_row_of_exponentials_has_mean_one():
    """512 rows, each within 5 standard errors: false alarm 3e-4."""
    mean_R = variates(512, 4096).mean(-1)
    assert (mean_R - 1).abs().max() < 5 / math.sqrt(4096)


def test_small_exponentials_keep_their_relative_precision():
    """Of 4194 numbers under 1e-3, about 4 share a value on a grid of 2**-31; on one of 2**-24, as of 1 - u, about 480
    would."""
    drawn = variates(64, 2**16).ravel()
    small = drawn[drawn < 1e-3]
    assert len(small.unique()) > 0.99 * len(small)


def test_no_exponential_is_zero_infinite_or_nan():
    drawn = variates(256, 2**15)
    assert drawn.isfinite().all()
    assert (drawn > 0).all()


@pytest.mark.parametrize(("word0", "word1", "entry"), [(3447817223, 3233201345, 80967), (876213611, 1370994564, 22323)])
def test_the_largest_exponential_is_finite(word0, word1, entry):
    """An infinite one would tie with entries of probability zero, and one of those might win the race."""
    drawn = exponentials(torch.tensor([word0]), torch.tensor([word1]), entry + 1)
    assert drawn.argmax() == entry
    assert 16 < drawn[0, entry] < 17
    greedy = torch.full((1, entry + 1), -torch.inf)
    greedy[0, entry] = 0
    assert draw(greedy, drawn[:, None]).item() == entry


def test_an_entry_depends_on_its_index_and_key_only():
    whole = variates(6, 512)
    assert torch.equal(variates(6, 100), whole[:, :100])
    assert torch.equal(variates(3, 512), whole[:3])
    assert whole.unique().numel() > 0.999 * whole.numel()


@pytest.mark.parametrize("part", KEY_PARTS)
def test_neighbouring_keys_and_entries_are_uncorrelated(part):
    """Ranks at lags -3..3 over 2**18 entries, both rows; 13 correlations within 5 / sqrt(n): false alarm 8e-6 a
    part."""
    n = 2**18
    key = {"seed": 11, "rounds": 4, "stream": 128, "position": 30, "purpose": 1}
    pair = torch.tensor([bits(**key), bits(**(key | {part: key[part] + 1}))])
    u_RV = -torch.expm1(-exponentials(pair[:, 0], pair[:, 1], n).double()) - 0.5
    u_RV = u_RV / u_RV.std(-1, keepdim=True)
    bound = 5 / math.sqrt(n)
    for lag in range(-3, 4):
        assert abs((u_RV[0] * u_RV[1].roll(lag)).mean()) < bound
    for lag in range(1, 4):
        for row_V in u_RV:
            assert abs((row_V * row_V.roll(lag)).mean()) < bound


def test_words_of_neighbouring_positions_are_uncorrelated():
    """Four words at lags 1..4 over 2**16 positions, 16 correlations within 5 / sqrt(n): false alarm 1e-5."""
    n = 2**16
    for w in words(np.int64(3), np.int64(1), np.int64(0), np.arange(n), 1):
        u = (w / 2.0**32 - 0.5) * math.sqrt(12)
        for lag in range(1, 5):
            assert abs((u * np.roll(u, lag)).mean()) < 5 / math.sqrt(n)


LAWS = {
    "even": np.full(16, 1 / 16),
    "peaked": np.array([0.9] + [0.1 / 31] * 31),
    "geometric": 2.0 ** -np.arange(1, 31),
    "tiny entries": np.array([1e-3] * 20 + [1e-5] * 20 + [1e-7] * 20 + [0.4, 0.57978]),
    "zeros": np.array([0, 0.5, 0, 0.25, 0, 0, 0.25, 0] * 4),
}


@pytest.mark.parametrize("name", LAWS)
def test_races_are_won_as_often_as_the_law_says(name):
    """Chi-square over 2**17 draws from distinct keys, deviate under 4.75: false alarm 1e-6 per distribution. Entries of
    probability zero never win."""
    law = LAWS[name] / LAWS[name].sum()
    rows = 2**16
    log_law_RV = torch.from_numpy(law).log().float().expand(rows, -1)
    drawn_R = draw(log_law_RV, variates(rows, len(law), seed=1234)[:, None])[:, 0]
    counts = np.bincount(drawn_R.numpy(), minlength=len(law))
    assert counts[law == 0].sum() == 0
    assert goodness_of_fit(counts, law) < 4.75


def test_races_over_a_large_vocabulary():
    """A likely entry against 2**15 unlikely ones, in 17 cells over 512 draws: chi-square deviate under 4.75, false
    alarm 1e-6."""
    rows, size = 512, 2**15
    law_V = torch.full((size + 1,), 0.75 / size)
    law_V[size // 3] = 0.25
    winners = torch.cat(
        [draw(law_V.log()[None], variates(128, size + 1, seed=s)[None])[0] for s in range(rows // 128)]
    ).numpy()
    likely = winners == size // 3
    counts = np.append(np.bincount(winners[~likely] * 16 // (size + 1), minlength=16), likely.sum())
    assert goodness_of_fit(counts, np.array([0.75 / 16] * 16 + [0.25])) < 4.75


def test_draws_of_one_row_are_one_per_variate_row():
    exponential_RFV = torch.tensor([[[1.0, 1.0, 4.0], [8.0, 1.0, 1.0]], [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]])
    log_law_RV = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]).log()
    assert draw(log_law_RV, exponential_RFV).tolist() == [[0, 1], [1, 2]]
