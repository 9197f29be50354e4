"""Exact decoding by rejection: answers follow the target's distribution, whatever the draft proposes, whatever else is
in the batch, and whatever happens to the request."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from smc.api.engine_config import DISTRIBUTION_BYTES, EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.executor.ops import RoundOps
from smc.executor.round_executor import OBSERVED_ROOTS
from smc.local_engine import local_engine
from smc.memory.kv_cache import pages_that_fit
from smc.model.draft_vocab import DraftVocab
from smc.scheduler.engine import Engine
from smc.scheduler.methods import rules_of
from smc.types import ModelRole
from tests.pairwise import one_of
from tests.scheduler.harness import (
    Padding,
    PaddingOps,
    TokensOfPages,
    answers,
    assert_empty,
    check_kv,
    config_id,
    request,
)
from tests.scheduler.pairs import exact_law, far_from, next_log_probs, tiny_pair, truncated_law
from tests.scheduler.random_histories import live, small_engine

PROMPT, EOS, LENGTH = (0, 1, 2), 3, 4
LIMIT = 4.5
"""Standard deviations that a chi-square statistic may deviate from its mean: one false alarm in about 10,000 choices of
seeds, over all tests of this file."""
REJECTION = {"method": "exact", "verification": "rejection"}
FORMS = [
    EngineConfig(form="lockstep", block=3, max_slots=2048, pages=40_000),
    EngineConfig(block=3, branches=2, max_slots=2048, pages=40_000),
]
AHEAD = one_of(FORMS[1], FORMS[0])
NARROW = {"top_k": 2, "temperature": 0.7, "draft_temperature": 3.0}
LAWS = [
    (FORMS[0], 4, LENGTH, {"top_k": 2, "temperature": 0.7}),
    (replace(FORMS[1], block=4, branches=3), 3, 7, NARROW),
    pytest.param(replace(FORMS[0], block=4), 4, LENGTH, {"draft_temperature": 2.0}, marks=pytest.mark.slow),
    pytest.param(replace(FORMS[1], block=1), 1, LENGTH, {}, marks=pytest.mark.slow),
]
"""Engine, particles, tokens and settings. In look-ahead the first blocks are hardly ever rejected, so that case has
seven tokens of a narrow distribution."""
COUNT = 250


@pytest.mark.parametrize(
    ("config", "particles", "length", "more"),
    LAWS,
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_answers_have_the_targets_law(config, particles, length, more):
    """Answers end inside blocks, by EOS or by length. By chi-square of whole answers and of their first two tokens.
    Each case that is not slow detects a residual from which the draft's distribution was not subtracted."""
    law = (
        truncated_law(tiny_pair().target, PROMPT, length, EOS, more["temperature"], more["top_k"])
        if "top_k" in more
        else exact_law(tiny_pair().target, PROMPT, length, EOS)
    )
    asked = [
        Request(str(i), PROMPT, SamplingParams(seed=i, max_tokens=length, particles=particles, **REJECTION, **more))
        for i in range(COUNT)
    ]
    found = [one.tokens for one in answers(local_engine(tiny_pair(), config), asked).values()]
    begins = Counter()
    for answer, mass in law.items():
        begins[answer[:2]] += mass
    assert far_from(law, found) < LIMIT
    assert far_from(begins, [answer[:2] for answer in found]) < LIMIT


@pytest.mark.slow
def test_a_draft_with_a_head_of_its_own_changes_no_law():
    """Tokens outside the draft's head are drawn at a small share, which is part of the verified distribution q."""
    head = DraftVocab(np.array([0, 2, 3]), 4, 0.25).head(tiny_pair().draft)
    law, config = (
        exact_law(tiny_pair().target, PROMPT, LENGTH, EOS),
        EngineConfig(form="lockstep", block=2, max_slots=2048, pages=40_000),
    )
    pair = replace(tiny_pair(), draft_head=head)
    asked = [
        Request(str(i), PROMPT, SamplingParams(seed=i, max_tokens=LENGTH, particles=2, **REJECTION))
        for i in range(COUNT)
    ]
    assert far_from(law, [one.tokens for one in answers(local_engine(pair, config), asked).values()]) < LIMIT


@pytest.mark.parametrize("config", AHEAD, ids=config_id)
def test_a_draft_that_is_the_target_is_always_kept(config):
    equal = replace(tiny_pair(), draft=tiny_pair().target)
    engine = local_engine(equal, config)
    answers(
        engine,
        [
            request(request_id=str(i), seed=i, particles=2, max_tokens=25, ignore_eos=True, **REJECTION)
            for i in range(8)
        ],
    )
    stats = engine.take_stats().exact["rejection"]
    kept = stats.accepted_by_position[: config.block]
    # Except in the last round of an answer. In look-ahead the token after a block is guessed: one of the two most
    # probable of four.
    assert kept[-1] >= stats.rounds - 8 if not config.lookahead else stats.hits > stats.misses


@pytest.mark.parametrize("config", AHEAD, ids=config_id)
def test_laws_with_nothing_in_common_still_answer(config):
    """Top-k 1 and temperature 0: all probability is on one token, often a different one for each model. The answer is
    the target's greedy one."""
    law = {"max_tokens": 10, "ignore_eos": True}
    plain = answers(local_engine(tiny_pair(), config), [request(method="target", temperature=0.0, **law)])["r"]
    for more in ({"top_k": 1}, {"temperature": 0.0}):
        found = answers(local_engine(tiny_pair(), config), [request(particles=3, seed=4, **law, **more, **REJECTION)])[
            "r"
        ]
        assert found.tokens == plain.tokens


@pytest.mark.parametrize("config", AHEAD, ids=config_id)
def test_answers_do_not_depend_on_company(config, monkeypatch):
    """The same answers alone and in a batch with requests of every other kind, with padded rounds that are requested
    ahead."""
    asked = [
        request([i % 3, 1], str(i), seed=i, particles=1 + i % 4, max_tokens=8 + i, logprobs=True, **REJECTION)
        for i in range(6)
    ]
    alone = {}
    for one in asked:
        alone |= answers(local_engine(tiny_pair(), config), [one])
    others = [{"method": "smc", "population": kind} for kind in POPULATIONS] + [
        {"method": "exact"},
        {"method": "target", "particles": None},
    ]
    beside = [request([2], f"beside {i}", seed=i, max_tokens=20, **{"particles": 3, **others[i % 4]}) for i in range(8)]
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    found = answers(local_engine(tiny_pair(), config), [one for pair in zip(beside, asked) for one in pair])
    for request_id, one in alone.items():
        assert found[request_id].tokens == one.tokens
        assert found[request_id].logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_logprobs_are_of_the_targets_law():
    found = answers(
        local_engine(tiny_pair(), FORMS[0]),
        [request(PROMPT, seed=3, max_tokens=9, ignore_eos=True, logprobs=True, **REJECTION)],
    )
    tokens = found["r"].tokens
    wanted = [
        next_log_probs(tiny_pair().target, (*PROMPT, *tokens[:i]))[token].item() for i, token in enumerate(tokens)
    ]
    assert found["r"].logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("config", "ahead"), one_of((FORMS[1], True), (FORMS[0], False)), ids=["lookahead, ahead", "lockstep"]
)
def test_slots_hold_the_tokens_of_their_particles(config, ahead, monkeypatch):
    """With stop strings, preemptions, cancelled requests and cached prompts; every page is free afterwards. Narrow
    distributions make several chains equal: each continues on its own pages."""
    rng = random.Random(5)
    engine = small_engine(
        replace(config, max_slots=40, max_chains=20, pages=400, prefill_chunk=24), monkeypatch, ahead=ahead
    )
    written, seen = {side: TokensOfPages(engine, side) for side in ModelRole}, []
    others = [
        {"method": "smc", "particles": 4},
        {**REJECTION, "temperature": 0.3},
        {**REJECTION, "particles": 6, "stop": ("ab", "ca")},
        REJECTION,
    ]
    asked = [
        Request(
            str(i),
            tuple(rng.randrange(3) for _ in range(rng.randint(1, 30))),
            SamplingParams(seed=i, max_tokens=20, **others[i % 4]),
        )
        for i in range(11)
    ]
    lives = live(
        engine, asked, rng, cancel=0.1, interrupt=0.15, after_step=lambda engine: seen.append(check_kv(engine, written))
    )
    assert_empty(engine)
    assert sum(seen) > 100 and lives.events["interrupted"] and lives.events["cancelled"]


def test_a_draft_that_is_lost_leaves_the_target_alone():
    engine = local_engine(tiny_pair(), FORMS[1])
    engine.submit(request(seed=1, particles=3, max_tokens=30, ignore_eos=True, **REJECTION))
    for _ in range(4):
        engine.step()
    assert engine.detach_draft() == []
    for _ in range(2):
        engine.step()
    engine.attach_draft(engine.memory.capacity["draft"])
    final = [output.answer for output in engine.run([]) if output.answer]
    assert len(final[0].tokens) == 30 and final[0].statistics.alone_rounds
    assert_empty(engine)


def test_where_a_draft_makes_nan_the_target_decides():
    draft = copy.deepcopy(tiny_pair().draft)
    draft.embed.weight[1] = float("nan")
    for config in FORMS:
        found = answers(
            local_engine(replace(tiny_pair(), draft=draft), config),
            [request(seed=2, max_tokens=12, ignore_eos=True, **REJECTION)],
        )["r"]
        assert found.error is None and len(found.tokens) == 12


def test_equal_chains_fit_the_admission_limit():
    """Chains that are all right continue on their own pages, so an answer may be held once per chain; admission
    reserves enough."""
    pair = tiny_pair(max_context=512)
    pair = replace(pair, draft=pair.target)
    asked = request(seed=1, particles=6, max_tokens=70, ignore_eos=True, **REJECTION | {"temperature": 0.02})
    config = EngineConfig(block=3, branches=2, max_slots=16)
    needs = rules_of(asked.params).most_pages(config, asked.params, len(asked.prompt))
    engine = local_engine(pair, replace(config, pages=max(needs.values())))
    assert len(answers(engine, [asked])["r"].tokens) == 70
    assert_empty(engine)


class Keeping(Padding):
    """As on a GPU, keeps the outputs of a stage and received tensors for every kind of round."""

    def run(self, key, name, stage):
        self._of(key).made[f"of {name}"] = outputs = stage()
        return outputs

    def copy_of(self, key, name, tensor):
        return self.keep(key, name, lambda: torch.empty_like(tensor)).copy_(tensor)


class KeepingOps(RoundOps):
    def stage_runner(self, device):
        return Keeping(device)


def storages(*, wide: int | None = None) -> dict[int, int]:
    """Bytes of the storages of all tensors, by address. `wide`: only float32 tensors with that many columns."""
    gc.collect()
    there = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    if wide is not None:
        there = [one for one in there if one.dim() > 1 and one.shape[-1] == wide and one.dtype == torch.float32]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in there}


@pytest.mark.slow
@pytest.mark.parametrize("config", FORMS[1:], ids=config_id)
def test_distributions_use_the_reserved_memory(config, monkeypatch):
    """The distributions take exactly the reserved memory, for any number of slots and after any number of kinds of
    rounds."""
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KeepingOps())
    pair, vocab = tiny_pair(7), 7
    for slots in (24, 96):
        engine = None
        before = storages()
        sized = replace(config, max_slots=slots, max_chains=12)
        engine = local_engine(pair, sized)
        asked = [
            request([i % 6], str(i), seed=i, particles=1 + i % 5, max_tokens=6 + i, ignore_eos=True, **REJECTION)
            for i in range(5)
        ]
        asked += [
            replace(one, request_id=f"cut {one.request_id}", params=replace(one.params, top_k=3)) for one in asked
        ]
        answers(engine, asked)
        assert engine.executor.stages["draft"].recorded_keys > 6
        laws = [nbytes for where, nbytes in storages(wide=vocab).items() if where not in before]
        # In addition, log q after the roots of drafted rows.
        kept = 4 * vocab * min(slots, OBSERVED_ROOTS)
        if config.lookahead:  # and the candidates at inner nodes, one set for each token
            kept += 4 * vocab * (slots + 1) * (config.block - 1)
        assert sum(laws) == sum(sized.distribution_bytes(side, vocab) for side in ModelRole) + kept


def chains_of(engine: Engine) -> int:
    return engine.slots.chains - engine.slots.num_free_chains


@pytest.mark.parametrize("config", one_of(*FORMS), ids=config_id)
def test_chains_wait_for_room_and_answer_the_same(config):
    """Requests wait so that never more chains run than have reserved memory; answers stay the same."""
    asked = [request([i % 3], str(i), seed=i, particles=1 + i % 4, max_tokens=12, **REJECTION) for i in range(9)]
    asked.insert(3, request([1], "trees", seed=1, particles=4, max_tokens=12, method="exact"))
    expected, few = answers(local_engine(tiny_pair(), config), asked), replace(config, max_chains=5)
    engine, found, most = local_engine(tiny_pair(), few), {}, []
    for one in asked:
        engine.submit(one)
    while not engine.idle:
        found |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
        most.append(chains_of(engine))
    assert_empty(engine)
    assert 2 < max(most) <= 5
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in expected.items()}


def test_lost_draft_releases_chains():
    """When the draft returns, as many requests use it again as have room for their chains; the target continues the
    others alone."""
    engine = local_engine(tiny_pair(), replace(FORMS[1], max_chains=4))
    engine.submit(request(request_id="first", seed=1, particles=3, max_tokens=30, ignore_eos=True, **REJECTION))
    for _ in range(3):
        engine.step()
    assert chains_of(engine) == 3
    engine.detach_draft()
    for i in range(3):
        engine.submit(request(request_id=str(i), seed=i, particles=2, max_tokens=30, ignore_eos=True, **REJECTION))
    for _ in range(2):
        engine.step()
    assert chains_of(engine) == 0 and engine.num_running == 4
    engine.attach_draft(engine.memory.capacity["draft"])
    found, most = [], 0
    while not engine.idle:
        found += [output.answer for output in engine.step() if output.answer]
        most = max(most, chains_of(engine))
    assert most in (3, 4) and len(found) == 4 and all(len(one.tokens) == 30 for one in found)
    assert_empty(engine)


@pytest.mark.parametrize(
    ("chains", "says"),
    [
        (
            3,
            r"particles=4 with verification='rejection'; .* of 3 chains \(max_chains\); allowed: particles <= 3, "
            r"or verification='walk'",
        ),
        (0, r"of 0 chains \(max_chains\); allowed: verification='walk'$"),
    ],
)
def test_what_there_is_never_room_for_is_refused(chains, says):
    engine = local_engine(tiny_pair(), replace(FORMS[1], max_chains=chains))
    with pytest.raises(ValueError, match=says):
        engine.submit(request(particles=4, max_tokens=3, **REJECTION))
    assert answers(engine, [request(particles=4, max_tokens=3, method="exact")])["r"].tokens


def test_distribution_memory_is_reserved_before_pools(monkeypatch):
    """By default the reserved memory is close to a fixed size for any vocabulary, and KV pools are sized after
    subtracting it."""
    for form, block, vocab in (
        ("lockstep", 1, 32_000),
        ("lockstep", 32, 152_000),
        ("lookahead", 1, 256_000),
        ("lookahead", 8, 152_000),
    ):
        config = EngineConfig(form=form, block=block, max_slots=65536)
        used = max(config.distribution_bytes(side, vocab) for side in ModelRole)
        assert 0.95 * DISTRIBUTION_BYTES < used <= DISTRIBUTION_BYTES
    config = EngineConfig()
    assert config.chains(128_256) == 49 and replace(config, max_slots=24).chains(128_256) == 24
    with pytest.raises(ValueError, match="max_chains=-1; allowed: >= 0"):
        EngineConfig(max_chains=-1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (40 << 30, 80 << 30))
    device, page = torch.device("cuda:0"), 1 << 17
    without = pages_that_fit(page, device)
    assert without - pages_that_fit(page, device, config.distribution_bytes("draft", 128_256)) == -(
        -config.distribution_bytes("draft", 128_256) // page
    )


@pytest.mark.parametrize(
    ("law", "says"),
    [
        ({"method": "smc", "verification": "rejection"}, "verification='rejection' has no effect with method='smc'"),
        ({"method": "target", "verification": "walk"}, "verification='walk' has no effect with method='target'"),
        ({"method": "exact", "verification": "luck"}, "verification='luck'; allowed: walk, rejection"),
        ({"method": "exact", "draft_temperature": 2.0}, "draft_temperature=2.0 has no effect with verification='walk'"),
    ],
)
def test_what_has_no_effect_is_refused(law, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**law)
