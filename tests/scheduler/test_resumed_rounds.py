"""Requests that are preempted after any of their rounds go on as if nothing had happened: every later round has the
same particles in the same places, with the same weights. With float64 weights, so that no near tie hides a fault or
looks like one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import Method
from smc.local_engine import ModelPair, local_engine
from smc.potentials import Prefixes
from smc.scheduler.engine import Engine
from smc.scheduler.sequence_group import SequenceGroup
from tests.pairwise import one_of
from tests.scheduler.harness import PaddingOps, assert_empty, request, running
from tests.scheduler.pairs import character_pair, in_float64, tiny_pair

LOCKSTEP = EngineConfig(form="lockstep", block=4, max_slots=160, max_chains=8)
LOOKAHEAD = EngineConfig(form="lookahead", block=3, branches=3, max_slots=160)
CONFIGS = {
    "lockstep": LOCKSTEP,
    "look-ahead": LOOKAHEAD,
    "drafting again": replace(LOOKAHEAD, block=4, drafting="always", redrafting="always", prefix_cache=False),
}
TOLERANCE = 1e-5
"""Logits are rounded to float32, so a sum of few log-probabilities may differ by some 1e-7."""
DISTINCT = {"method": "smc", "population": "distinct", "particles": 5}
INDEPENDENT = {"method": "smc", "population": "independent", "particles": 3}
WALK = {"method": "exact", "particles": 4}
LAWS: list[dict[str, Any]] = [
    # Some of their rounds leave places between their particles empty.
    DISTINCT | {"seed": 11, "max_tokens": 24, "ignore_eos": True},
    DISTINCT | {"seed": 19, "max_tokens": 24, "ignore_eos": True},
    # Truncation takes all weight from populations; some have ended in the block that is then taken back.
    INDEPENDENT | {"seed": 35, "max_tokens": 16, "ignore_eos": True, "top_p": 0.6, "ess_threshold": 0.5},
    INDEPENDENT | {"seed": 36, "max_tokens": 16, "top_k": 2, "ess_threshold": 1.0, "resampling": "residual"},
    DISTINCT | {"seed": 37, "max_tokens": 18, "ignore_eos": True, "top_p": 0.6, "logprobs": True},
    DISTINCT | {"seed": 38, "max_tokens": 12, "temperature": 0.5, "min_p": 0.2},
    DISTINCT | {"seed": 2, "max_tokens": 20, "alpha": 1.5, "stop": ("ab", "cd"), "min_tokens": 4},
    INDEPENDENT | {"seed": 3, "max_tokens": 20, "alpha": 1.5, "ess_threshold": 0.0, "draft_temperature": 1.5},
    INDEPENDENT | {"seed": 4, "max_tokens": 18, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    DISTINCT | {"seed": 5, "max_tokens": 18, "guidance_scale": 1.5, "ignore_eos": True},
    INDEPENDENT | {"seed": 6, "max_tokens": 18, "guidance_scale": 1.5, "logprobs": True, "ess_threshold": 0.9},
    DISTINCT | {"seed": 7, "max_tokens": 24, "constraint": {"regex": "(ab*c|cba?){6,}"}},
    DISTINCT | {"seed": 8, "max_tokens": 14, "potential": "phi"},
    INDEPENDENT | {"seed": 9, "max_tokens": 14, "potential": "phi"},
    WALK | {"seed": 10, "max_tokens": 20, "logprobs": True},
    WALK | {"seed": 12, "max_tokens": 20, "guidance_scale": 1.5, "temperature": 0.6},
    {"method": "exact", "verification": "rejection", "particles": 2, "seed": 13, "max_tokens": 20},
    {"method": "target", "seed": 14, "max_tokens": 20},
    {"method": "draft", "seed": 15, "max_tokens": 20},
]


def phi(prefixes: Prefixes) -> list[float]:
    """A potential that forbids one pair of letters."""
    return [-np.inf if "aa" in text else -0.4 * text.count("b") for text in prefixes.texts]


def asked(config: EngineConfig) -> list[Request]:
    requests = []
    for law in LAWS:
        if law.get("verification") and config.lookahead:
            # After a preemption its chains begin at another position, so its draws differ.
            continue
        one = request([2, 1, law["seed"] % 5], str(law["seed"]), **law)
        requests.append(replace(one, negative_prompt=(3, 2)) if one.params.guided else one)
    return requests


class Particle(NamedTuple):
    """A particle of a round, and what its request has in common."""

    place: int
    """Its position among the rows of its request."""
    tokens: list[int]
    block: int
    ended: bool
    committed: int
    numbers: tuple[float, float, float]
    """Log-weight, log of the potential, and log Z-hat of the request so far."""


class Run(NamedTuple):
    rounds: dict[tuple[str, int], list[Particle]]
    """By request and number of its rounds, as they were first seen."""
    answers: dict[str, Answer]
    steps: int


def particles(engine: Engine, group: SequenceGroup) -> list[Particle]:
    slots, rows = engine.slots, group.slots[: group.count]
    return [
        Particle(
            rows.tolist().index(slot),
            slots.tokens_SL[slot, : slots.length_S[slot]].tolist(),
            int(slots.block_S[slot]),
            bool(slots.ended_S[slot]),
            group.committed,
            (float(slots.logw_S[slot]), float(slots.logphi_S[slot]), group.log_z),
        )
        for slot in group.living(slots).tolist()
    ]


def run(pair: ModelPair, config: EngineConfig, preempts: Callable[[int], bool] = lambda step: False) -> Run:
    """Run all requests together; after the steps for which `preempts` is true, preempt all that hold slots."""
    engine = local_engine(pair, config, potentials={"phi": phi})
    for one in asked(config):
        engine.submit(one)
    rounds: dict[tuple[str, int], list[Particle]] = {}
    found, steps = {}, 0
    while not engine.idle:
        found |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
        steps += 1
        for group in running(engine):
            # The weights of a round get the potential later.
            if group.params.method is Method.SMC and not group.awaits_potential:
                rounds.setdefault((group.id, group.rounds), particles(engine, group))
        if preempts(steps):
            for group in list(engine.registry.admitted):
                engine.registry.preempt(group)
    assert_empty(engine)
    return Run(rounds, found, steps)


def assert_same_rounds(found: Run, expected: Run) -> None:
    for at, ours in found.rounds.items():
        theirs = expected.rounds.get(at)
        if theirs is None:  # a step of the other run has read two results
            continue
        assert [one[:-1] for one in ours] == [one[:-1] for one in theirs], at
        numbers = np.array([[one.numbers for one in each] for each in (ours, theirs)])
        np.testing.assert_allclose(*numbers, atol=TOLERANCE, err_msg=str(at))
    for name, ours in found.answers.items():
        theirs = expected.answers[name]
        assert (ours.tokens, ours.text, ours.finish_reason) == (theirs.tokens, theirs.text, theirs.finish_reason), name
        assert ours.logprobs == (theirs.logprobs and pytest.approx(theirs.logprobs, abs=TOLERANCE)), name
        assert ours.statistics.log_z == pytest.approx(theirs.statistics.log_z, abs=TOLERANCE), name
        counts = [(one.statistics.resamples, one.statistics.collapses) for one in (ours, theirs)]
        assert counts[0] == counts[1], name


@pytest.mark.parametrize(
    ("form", "vocab", "ahead", "times", "stride", "every"),
    one_of(
        ("look-ahead", 8, False, 1, 3, 6),
        ("look-ahead", 8, False, 1, 1, 5),
        ("drafting again", 96, True, 2, 2, 6),
        ("lockstep", 8, True, 1, 2, 4),
    ),
)
def test_later_rounds_are_those_of_an_undisturbed_request(form, vocab, ahead, times, stride, every, monkeypatch):
    """`times`: preemptions in a row, the second one while requests wait or resume. They are repeated every `every`
    steps, and each further run begins them `stride` steps later: with a stride of 1, requests are preempted after
    nearly every one of their rounds. Distinct rows of a large vocabulary draw a token that stands for the rest of their
    distribution."""
    if ahead:
        monkeypatch.setattr("smc.local_engine.ops_for", lambda device: PaddingOps())
    small = tiny_pair(8, scale=1.0, draft_seed=5, max_context=160)
    pair = in_float64(small if vocab == 8 else character_pair((), 160))
    expected = run(pair, CONFIGS[form])
    assert not any(answer.error for answer in expected.answers.values())
    if form == "look-ahead":
        assert_power(expected)
    for first in range(1, 1 + every, stride):
        found = run(pair, CONFIGS[form], lambda step, first=first: step >= first and (step - first) % every < times)
        assert_same_rounds(found, expected)


def assert_power(expected: Run) -> None:
    """Assert that the states occur that are hard to resume from."""
    gaps = [at for at, rows in expected.rounds.items() if [one.place for one in rows] != [*range(len(rows))]]
    back = [
        at
        for at, rows in expected.rounds.items()
        if all(one.ended for one in rows)
        and not all(one.ended for one in expected.rounds.get((at[0], at[1] + 1), rows))
    ]
    assert gaps and back
