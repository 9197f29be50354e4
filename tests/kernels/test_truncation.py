"""Truncation by top-k, top-p and min-p: scores and draws after a cut, against the slow reference and the torch
distributions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc import distributions
from smc.arrays import to_device
from smc.kernels import sampling, truncation
from smc.kernels.truncation import Cut, truncate
from smc.philox import DrawKeys, Purpose, exponentials, words
from tests.kernels.conftest import DEVICE
from tests.kernels.truncation_helpers import kept
from tests.test_distributions import PROCESSORS, Spec, assert_same_law, batches, law_spec, reference, softmax

DTYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
MIXED = [
    Spec(),
    Spec(0.7, top_k=9),
    Spec(1.3, top_p=0.8),
    Spec(0.0, top_k=3),
    Spec(min_p=0.1),
    Spec(0.8, 25, 0.9, 0.01),
    Spec(1.1, 40, 0.6),
]


def cut_of(
    logits_RV: torch.Tensor,
    spec: distributions.DistributionSpec,
    share: float = 0.0,
    block: int | None = None,
    vocab: int | None = None,
) -> Cut:
    return truncate(logits_RV, vocab or logits_RV.shape[1], spec.to(DEVICE), share, block=block)


def law_after(logits_RV: torch.Tensor, temperature_R: np.ndarray, cut: Cut, block: int | None = None) -> torch.Tensor:
    """Return the log-probability of every entry [R, V]."""
    rows, vocab = logits_RV.shape
    every_RV = torch.arange(vocab, dtype=torch.int32, device=DEVICE).expand(rows, vocab)
    none_R = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    return sampling.score(logits_RV, vocab, to_device(temperature_R, DEVICE), none_R, every_RV, cut, block=block)[
        1
    ].cpu()


@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        ("all", torch.bfloat16),
        *(
            pytest.param(one, dtype, marks=pytest.mark.slow)
            for one, dtype in zip(
                ("all", "top-k", "top-p", "min-p"), (torch.float32, torch.float32, torch.bfloat16, torch.float32)
            )
        ),
    ],
)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_laws_equal_the_slow_version(dtype, processor, data):
    logits, specs = data.draw(batches(PROCESSORS[processor]))
    share = data.draw(st.sampled_from([0.0, 0.1]))
    truncated_RV = torch.stack([reference(row, spec) for row, spec in zip(logits, specs)]).exp()
    whole_RV = torch.tensor([softmax(row, spec.temperature) for row, spec in zip(logits, specs)], dtype=torch.float64)
    logits_RV, spec = torch.tensor(logits, dtype=dtype, device=DEVICE), law_spec(*specs)
    found_RV = law_after(logits_RV, spec.temperature_R, cut_of(logits_RV, spec, share, block=4), block=4)
    assert_same_law(found_RV, ((1 - share) * truncated_RV + share * whole_RV).log())


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.bfloat16, 0.05), pytest.param(torch.float32, 0.0, marks=pytest.mark.slow)]
)
def test_laws_of_hundreds_of_entries_equal_the_torch_laws(dtype, share):
    """Rows that use some settings are next to rows that use others or none."""
    random = torch.Generator().manual_seed(11)
    logits_RV = (torch.randn(len(MIXED), 300, generator=random) * 3).to(dtype).to(DEVICE)
    spec = law_spec(*MIXED)
    expected_RV = distributions.Distributions(spec).proposal(logits_RV.cpu().float(), share)
    assert_same_law(
        law_after(logits_RV, spec.temperature_R, cut_of(logits_RV, spec, share, block=128), block=256), expected_RV
    )


@pytest.mark.parametrize(
    ("spec", "kept"),
    [(Spec(top_k=7), 7), (Spec(top_p=0.301), 31), (Spec(top_k=50, top_p=0.5), 25), (Spec(min_p=1), 100)],
)
def test_of_equal_entries_the_first_are_kept(spec, kept):
    """All hundred logits are equal, in blocks of 16; zero has two signs."""
    logits_RV = torch.zeros(2, 100, device=DEVICE, dtype=torch.bfloat16)
    logits_RV[1, ::3] = -0.0
    both = law_spec(spec, spec)
    found_RV = law_after(logits_RV, both.temperature_R, cut_of(logits_RV, both, block=16))
    assert (found_RV > -torch.inf).int().tolist() == [[1] * kept + [0] * (100 - kept)] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_top_p_keeps_argmax(dtype):
    """If several tokens are equally likely, the first of them is left; 1e-50 is 0 in float32."""
    specs = [
        replace(of, top_p=top_p)
        for of in (Spec(), Spec(0.7, top_k=3), Spec(0.0), Spec(min_p=0.1))
        for top_p in (1e-50, 1e-30)
    ]
    logits_RV, spec = torch.tensor([[1.0, 3.0, -2.0, 3.0]] * len(specs), dtype=dtype, device=DEVICE), law_spec(*specs)
    for some_RV in (
        logits_RV,
        torch.where(logits_RV[0] == 1, 1.0, -math.inf).to(logits_RV).expand_as(logits_RV).contiguous(),
    ):
        found_RV = law_after(some_RV, spec.temperature_R, cut_of(some_RV, spec))
        assert found_RV.exp().tolist() == [[float(v == some_RV[0].argmax()) for v in range(4)]] * len(specs)


@pytest.mark.slow
def test_real_vocabulary_in_default_blocks():
    random = torch.Generator().manual_seed(12)
    logits_RV = (torch.randn(3, 128256, generator=random) * 3).bfloat16().to(DEVICE)
    specs = [Spec(0.8, top_p=0.95), Spec(top_k=1000, top_p=0.7), Spec(top_k=5000)]
    kept_RV = kept(logits_RV, cut_of(logits_RV, law_spec(*specs))).cpu()
    for logits_V, spec, kept_V in zip(logits_RV.cpu().double(), specs, kept_RV):
        order_V, count = logits_V.sort(descending=True, stable=True).indices, int(kept_V.sum())
        assert kept_V[order_V[:count]].all()
        mass_V = (logits_V / spec.temperature)[order_V[: spec.top_k or None]].softmax(0).cumsum(0)
        # Up to rounding this is the smallest set that holds enough mass; float32 sums are exact to a millionth.
        assert (
            count == spec.top_k
            if spec.top_p == 1
            else mass_V[count - 2] < spec.top_p + 1e-6 and mass_V[count - 1] > spec.top_p - 1e-6
        )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("top", [-100.0, -0.5, 0.0, 0.5, 5.0, 100.0])
def test_neighbouring_numbers_around_the_bound_of_min_p(dtype, top):
    """Forty neighbouring numbers of the type, with the bound in their middle; numbers above the row's largest logit are
    set to it."""
    best = torch.tensor(top, dtype=dtype)
    steps = torch.arange(-20, 20, dtype=torch.int32 if dtype is torch.float32 else torch.int16)
    for bound in (0.9, 0.3, 0.02):
        middle = (best.float() + math.log(bound)).to(dtype)
        near_V = (middle.view(steps.dtype) + steps).view(dtype).clamp(max=best)
        logits_RV = torch.cat((best[None], near_V, torch.tensor([top - 50.0], dtype=dtype)))[None].to(DEVICE)
        spec = law_spec(Spec(min_p=bound))
        distance_V = logits_RV[0].cpu().double() - best.double() - math.log(np.float32(bound))
        clear_V = distance_V.abs() > 1e-6 * max(1.0, abs(top))
        found_V = kept(logits_RV, cut_of(logits_RV, spec, block=16))[0].cpu()
        assert torch.equal(found_V[clear_V], (distance_V >= 0)[clear_V])
        assert clear_V.sum() >= 35 or dtype is torch.float32


def test_draws_equal_those_from_the_torch_laws():
    random, draws = torch.Generator().manual_seed(13), 3
    logits_RV, spec = torch.randn(len(MIXED), 150, generator=random).to(DEVICE) * 3, law_spec(*MIXED)
    rng = np.random.default_rng(5)
    keys = (
        rng.integers(0, 2**31, len(MIXED)),
        np.full(len(MIXED), 3),
        rng.integers(0, 2**31, (len(MIXED), draws)),
        np.full(len(MIXED), 9),
    )
    temperature_R, *on_device = (to_device(array, DEVICE) for array in (spec.temperature_R, *keys))
    cut = cut_of(logits_RV, spec, 0.3, block=64)
    draw_keys = DrawKeys(*on_device, Purpose.PROPOSAL)
    token_RF, logq_RF, _ = sampling.draw(logits_RV, 150, temperature_R, draw_keys, cut, block=64)
    word0, word1, _, _ = words(*(array.reshape(len(MIXED), -1) for array in keys), Purpose.PROPOSAL)
    expected_RV = distributions.Distributions(spec).proposal(logits_RV.cpu(), 0.3)
    expected_RF = distributions.draw(expected_RV, exponentials(torch.from_numpy(word0), torch.from_numpy(word1), 150))
    assert torch.equal(token_RF.cpu().long(), expected_RF)
    torch.testing.assert_close(logq_RF.cpu(), expected_RV.gather(1, expected_RF), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", [Spec(top_k=3), Spec(top_p=0.5), Spec(min_p=0.3), Spec(0.0, 2, 0.5, 0.3)])
def test_rows_without_a_law_stay_without_one(spec, bad):
    """A row with one bad entry, with nothing but bad entries, or without any possible token becomes NaN."""
    logits_RV = torch.tensor(
        [[0.5, bad, 2.0, 0.0, 1.0], [0.5, -1.0, 2.0, 0.0, 1.0], [bad] * 5, [-math.inf] * 5], device=DEVICE
    )
    every = law_spec(*[spec] * 4)
    for share in (0.0, 0.1):
        found_RV = law_after(logits_RV, every.temperature_R, cut_of(logits_RV, every, share))
        assert found_RV[[0, 2, 3]].isnan().all()
        assert_same_law(
            found_RV[1:2], distributions.Distributions(law_spec(spec)).proposal(logits_RV[1:2].cpu(), share)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary_of_one(dtype):
    logits_RV, spec = torch.full((len(MIXED), 1), -3.0, dtype=dtype, device=DEVICE), law_spec(*MIXED)
    assert law_after(logits_RV, spec.temperature_R, cut_of(logits_RV, spec)).tolist() == [[0.0]] * len(MIXED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [Spec(top_k=30, top_p=0.9), Spec(min_p=0.3)])
def test_columns_past_the_vocabulary_count_for_nothing(dtype, spec):
    logits_RV = torch.full((1, 40), 9.0, device=DEVICE, dtype=dtype)
    logits_RV[0, :20] = torch.linspace(0, 3, 20)
    cut, alone = (cut_of(x, law_spec(spec), block=8, vocab=20) for x in (logits_RV, logits_RV[:, :20].contiguous()))
    assert [x.tolist() for x in cut] == [x.tolist() for x in alone]


def test_top_p_does_not_depend_on_another_row_s_top_k(device):
    """A row that uses top-p only is cut at the same entry and mass beside a row that uses top-k. The shares are masses
    of so many entries, so that sums in another order would be seen."""
    rows, vocab = 60, 256
    logits_RV = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 1.5).bfloat16().to(device)
    mass_RV = torch.softmax(logits_RV.float() / 0.7, -1).sort(-1, descending=True).values.cumsum(-1).cpu()
    at_R = torch.randint(5, 40, (rows,), generator=torch.Generator().manual_seed(1))
    top_p_R = mass_RV[torch.arange(rows), at_R].numpy()

    def cut(extra: int):
        law = distributions.DistributionSpec.of(
            temperature_R=[0.7] * (rows + extra),
            top_k_R=[0] * rows + [5] * extra,
            top_p_R=np.append(top_p_R, [1.0] * extra),
        )
        both = torch.cat((logits_RV, logits_RV[:extra]))
        return truncate(both, vocab, law.to(device), block=64)

    alone, beside = cut(0), cut(1)
    for name in ("key_R", "last_R", "drop_R"):
        assert torch.equal(getattr(alone, name), getattr(beside, name)[:rows]), name


CUT = [Spec(0.7, 20, 0.8), Spec(top_p=0.95), Spec(1.3, 30, 1.0, 0.001), Spec(min_p=0.02), Spec(0.0, 5, 0.5), Spec()]


def cuts(logits_RV: torch.Tensor, most: int) -> list[list[float]]:
    spec = law_spec(*CUT)
    return [field.tolist() for field in truncate(logits_RV, logits_RV.shape[1], spec.to(DEVICE), block=64, most=most)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "spread", "mask"),
    [
        (1500, 2.0, 0.0),
        (1500, 4.0, 0.0),
        (1500, 0.05, 0.0),
        (1500, 2.0, 0.99),
        (1500, 2.0, 1.0),
        (150, 1.0, 0.0),
    ],
    ids=["spread", "peaked", "flat", "ten allowed", "one allowed", "few tokens"],
)
def test_few_candidates_and_the_whole_row_give_one_cut(dtype, vocab, spread, mask):
    """With room for 8 candidates most rows are searched as a whole, with room for 2,048 none; between these, some take
    more parts."""
    generator = torch.Generator().manual_seed(14)
    logits_RV = torch.randn(len(CUT), vocab, generator=generator).to(dtype) * spread
    is_out_RV = torch.rand(len(CUT), vocab, generator=generator) < mask
    is_out_RV[:, 77] = False
    logits_RV[is_out_RV] = -math.inf
    found = [cuts(logits_RV.to(DEVICE), most) for most in (8, 64, 256, 2048)]
    possible_RV = logits_RV > -math.inf
    first_RV, *others_RV = (kept(logits_RV, Cut(*map(torch.tensor, one))) & possible_RV for one in found)
    assert all(torch.equal(one, first_RV) for one in others_RV)
    for drop_R in (one[2] for one in found):
        assert drop_R == pytest.approx(found[0][2], abs=1e-5)


def test_a_row_has_the_same_cut_whatever_its_type():
    """Beside a request with biases, a row's logits are in float32."""
    logits_RV = (torch.randn(len(CUT), 1500, generator=torch.Generator().manual_seed(15)) * 2).bfloat16().to(DEVICE)
    half, whole = (Cut(*map(torch.tensor, cuts(one_RV, 256))) for one_RV in (logits_RV, logits_RV.float()))
    assert torch.equal(kept(logits_RV.cpu(), half), kept(logits_RV.cpu().float(), whole))
    assert torch.equal(half.drop_R, whole.drop_R)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="no interpreter runs")
@pytest.mark.parametrize(("spread", "most", "lists", "whole"), [(4.0, 2048, 5, 0), (4.0, 256, 6, 1), (0.05, 64, 6, 3)])
def test_rows_are_searched_as_a_whole_only_if_candidates_do_not_decide(spread, most, lists, whole, monkeypatch):
    """Of five truncated rows. With little room one takes more parts, and one keeps more entries than parts exist."""
    from tests import interpreter

    counts = dict.fromkeys(("_list_candidates", "_decide"), 0)

    def counted(name: str):
        def call(*arguments) -> None:
            counts[name] += name == "_list_candidates" or arguments[1] is None

        return call

    for name in counts:
        monkeypatch.setitem(interpreter._replacements, getattr(truncation, name), counted(name))
    logits_RV = torch.randn(len(CUT), 1500, generator=torch.Generator().manual_seed(14)) * spread
    cuts(logits_RV, most)
    assert (counts["_list_candidates"], counts["_decide"]) == (lists, whole)


@pytest.mark.parametrize("count", [64, 65])
def test_as_many_candidates_as_there_is_room_for(count):
    """The entry that the list has no room for is the largest one."""
    logits_RV = torch.full((1, 1500), -5.0, device=DEVICE)
    logits_RV[0, torch.arange(count - 1) * 23] = 1.0
    logits_RV[0, 1499] = 2.0
    spec = law_spec(Spec(top_k=2))
    found = truncate(logits_RV, 1500, spec.to(DEVICE), block=64, most=64)
    assert kept(logits_RV, found)[0].nonzero().flatten().tolist() == [0, 1499]
