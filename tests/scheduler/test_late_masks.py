"""Masks that come late: whenever the library's calls end, and whichever threads carry them out, every answer is the one
that its request gets alone and without delays."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from smc import constraint_masks
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.executor.ops import RoundOps
from smc.local_engine import ModelPair, local_engine
from tests.pairwise import one_of
from tests.scheduler.harness import PaddingOps, answers, config_id, request
from tests.scheduler.pairs import in_float64, tiny_pair
from tests.scheduler.random_histories import assert_same, live, small_engine
from tests.scheduler.test_constraints import METHODS

LOCKSTEP = EngineConfig(form="lockstep", block=3, micro_batches=2, max_slots=60, pages=200, prefill_chunk=16)
LOOKAHEAD = replace(LOCKSTEP, form="lookahead", branches=3, pages=300)
CONSTRAINTS = (
    {"regex": "(ab*c|cba?){4,9}"},
    {"regex": "[a-g]{2,12}", "after": 2},
    {"grammar": 'start: item+ "g"\nitem: "a" item "b" | "c" | "d"\n'},
)
PLAIN = ("target", "exact", "distinct")
LONGEST_NAP = 0.006
"""Maximum seconds by which a call of the library is delayed: three times the time for masks computed together."""
LIMITS = ("ROUND_SECONDS", "LEAST_SECONDS", "ALL_SECONDS", "WAIT_SECONDS", "STUCK_SECONDS", "PATIENCE_SECONDS")


def asked() -> list[Request]:
    """Constrained requests of every method, and others."""
    found = [
        request([2, i, 1, 0], f"{name} {i}", **METHODS[name], seed=i, max_tokens=14, constraint=CONSTRAINTS[i % 3])
        for i, name in enumerate(METHODS)
    ]
    words = {"bad_words": ("ab", "g"), "max_tokens": 12, "seed": 5}
    return [*found, *(request([2, 1], f"{name} beside", **METHODS[name] | words, logprobs=True) for name in PLAIN)]


def delay_calls(monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> Counter:
    """Delay calls of the library at random. Returns counts of the work that was carried out: by one thread for all
    requests, by a thread of its own, and abandoned."""
    seen: Counter = Counter()
    kinds = constraint_masks._Drive
    run, read, compute = kinds.run, kinds._read, kinds._compute

    def nap() -> None:
        if draw.random() < 0.15:
            time.sleep(draw.random() * LONGEST_NAP)

    def late_run(drive) -> None:
        nap()
        run(drive)
        seen["abandoned" if drive.abandoned else "alone" if drive._single else "together"] += 1

    def late_read(drive, reads: list) -> list[bool]:
        nap()
        return read(drive, reads)

    def late_compute(drive, chains: list) -> None:
        nap()
        compute(drive, chains)

    for name, late in (("run", late_run), ("_read", late_read), ("_compute", late_compute)):
        monkeypatch.setattr(kinds, name, late)
    for name in LIMITS:  # however busy the machine is
        monkeypatch.setattr(constraint_masks, name, 60.0)
    monkeypatch.setattr(constraint_masks, "SHARED_SECONDS", LONGEST_NAP / 3)
    monkeypatch.setattr(constraint_masks, "SHARED_SECONDS_EACH", 0.0)
    return seen


def each_alone(pair: ModelPair, config: EngineConfig, requests: list[Request]) -> dict[str, Answer]:
    engine = local_engine(pair, replace(config, pages=4000, prefix_cache=False, prefill_chunk=512))
    return {one.request_id: answers(engine, [one])[one.request_id] for one in requests}


@pytest.mark.parametrize(
    ("config", "ahead"),
    one_of((LOCKSTEP, True), (LOOKAHEAD, False), (LOCKSTEP, False), (LOOKAHEAD, True)),
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else "ahead" if value else "",
)
def test_answers_do_not_depend_on_when_masks_arrive(config: EngineConfig, ahead: bool, monkeypatch):
    """In little memory, with preemptions, and of every method. With float64 weights, because the requests of a round,
    and so the last bits of float32, depend on the time."""
    pair, requests = in_float64(tiny_pair(8, scale=1.0, max_context=96)), asked()
    with monkeypatch.context() as patch:
        patch.setattr("smc.local_engine.ops_for", lambda device: PaddingOps() if ahead else RoundOps())
        expected = each_alone(pair, config, requests)
    assert not any(answer.error for answer in expected.values())
    with monkeypatch.context() as patch:
        seen = delay_calls(patch, random.Random(3))
        engine = small_engine(config, patch, ahead=ahead, made=pair)
        lives = live(engine, requests, random.Random(4), submit=0.7, interrupt=0.25)
    assert min(seen[kind] for kind in ("together", "alone", "abandoned")) > 5, seen
    assert lives.events["interrupted"] > 0
    for one in requests:
        found = lives.final[one.request_id]
        assert not found.error, found.error
        # In look-ahead, a request by rejection that resumes makes other draws.
        resumes = config.lookahead and one.params.verification == "rejection" and found.statistics.preemptions
        if lives.untouched(one.request_id) and not resumes:
            assert_same(found, expected[one.request_id])
