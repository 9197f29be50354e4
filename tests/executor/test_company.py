"""In bfloat16, an exact answer is that of the target alone and an SMC answer that of the request alone, in every way in
which an engine may come to it. With torch, whose rounding depends on the number of rows, near ties are rare enough;
with the kernels of one order of sums (numerics=invariant), in Triton's interpreter, log-probabilities have the same
bits, too."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.engine import Engine
from tests.executor.test_kernels import KERNELS, pair
from tests.scheduler.harness import answers, assert_empty, request, running

pytestmark = [
    pytest.mark.usefixtures("few_pieces"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these ways on the GPU itself"),
]

PROMPT = [1, 2, 3, 0, 4, 6, 5, 1, 2, 7, 3, 3, 0, 2, 5, 1, 4, 2, 6, 0, 3]
LAW = {"seed": 4, "max_tokens": 12, "ignore_eos": True, "logprobs": True}
FEW = {"seed": 4, "max_tokens": 12, "logprobs": True, "particles": 3}
CUT = {"top_p": 0.9, "min_p": 0.01, "temperature": 0.8}
LOCKSTEP = EngineConfig(form="lockstep", block=3, drafting="always", max_context=64)
LOOKAHEAD = EngineConfig(block=2, branches=2, drafting="always", max_context=64)
SHAPES = [
    (LOCKSTEP, 3),
    (LOOKAHEAD, 2),
    (replace(LOCKSTEP, block=5), 1),
    (replace(LOOKAHEAD, block=3, branches=4), 4),
    (replace(LOOKAHEAD, block=4, redrafting="always"), 3),
]
"""Forms with K and F, and N."""
OTHER_BLOCKS = dict(zip(("long blocks", "many branches", "redrafting"), SHAPES[2:]))
ALSO = [
    request([5, 6, 7, 4], "1", method="target", seed=5, max_tokens=6, top_p=0.8),
    request([2], "2", particles=2, seed=6, max_tokens=5, alpha=1.7, temperature=0.6),
    request(PROMPT[:9], "3", method="exact", particles=2, seed=7, max_tokens=7, repetition_penalty=1.3),
    request([3, 1], "4", particles=3, seed=8, max_tokens=5, population="distinct", top_k=5, logit_bias={2: 1.5}),
    request([4, 4], "5", method="exact", particles=2, seed=9, max_tokens=8, constraint={"regex": "[ab]{3}c[abc]*"}),
    replace(
        request([6, 1], "6", method="exact", particles=2, seed=3, max_tokens=4, guidance_scale=1.5),
        negative_prompt=(7, 7, 2),
    ),
]


def stepped(engine: Engine, one: Request, act: Callable[[Engine, int], None]) -> Answer:
    """Run a request; call `act` with the number of steps so far after each one."""
    engine.submit(one)
    outputs, steps = [], 0
    while not engine.idle:
        outputs += engine.step()
        steps += 1
        act(engine, steps)
    assert_empty(engine)
    answer = outputs[-1].answer
    assert answer is not None and answer.error is None
    return answer


def preempt(engine: Engine, steps: int) -> None:
    if steps in (2, 5) and running(engine):
        engine.registry.preempt(engine.registry.groups["0"])


def lose_draft(engine: Engine, steps: int) -> None:
    """Lose the draft once rounds of both models have confirmed tokens; on a GPU another one is in flight."""
    if engine.fallback.has_draft and any(group.committed > 3 for group in running(engine)):
        assert engine.detach_draft() == []


class Ways:
    """Ways to an answer."""

    def __init__(self, made: ModelPair, config: EngineConfig, one: Request, expected: Answer) -> None:
        self._made, self._config, self.one, self._expected = made, config, one, expected

    def engine(self, **changes: object) -> Engine:
        return local_engine(self._made, replace(self._config, **changes))

    def alone(self) -> Answer:
        return answers(self.engine(), [self.one])["0"]

    def in_company(self) -> Answer:
        """In the kernels, all requests whose way this is with this engine are also in each other's company."""
        key = repr(self._config)
        ones = {repr(one): replace(one, request_id=repr(one)) for one in (self.one, *TOGETHER.get(key, ()))}
        if ones.keys() - IN_COMPANY.get(key, {}).keys():
            IN_COMPANY[key] = answers(self.engine(), [*ALSO[:3], *ones.values(), *ALSO[3:]])
        return IN_COMPANY[key][repr(self.one)]

    def beside_another(self) -> Answer:
        return answers(self.engine(), [ALSO[2], self.one])["0"]

    def in_chunks(self) -> Answer:
        return answers(self.engine(prefill_chunk=5), [self.one, ALSO[2]])["0"]

    def after_a_cached_prefix(self) -> Answer:
        engine = self.engine()
        before = replace(self.one, request_id="before", params=replace(self.one.params, max_tokens=1))
        assert list(engine.run([before]))[-1].answer is not None
        found = [output.answer for output in engine.run([self.one])][-1]
        assert found is not None and found.cached_tokens > 0
        return found

    def preempted(self) -> Answer:
        found = stepped(self.engine(), self.one, preempt)
        assert found.statistics.preemptions > 0
        return found

    def without_draft(self) -> Answer:
        engine = self.engine()
        found = stepped(engine, self.one, lose_draft)
        assert not engine.fallback.has_draft
        return found

    def resumed(self) -> Answer:
        assert self._expected.logprobs is not None
        there = {"confirmed": self._expected.tokens[:5], "confirmed_logprobs": self._expected.logprobs[:5]}
        return answers(self.engine(), [replace(self.one, **there)])["0"]


OF_ALL = [Ways.alone, Ways.in_company, Ways.in_chunks, Ways.after_a_cached_prefix, Ways.preempted]
EXACT = [*OF_ALL, Ways.without_draft, Ways.resumed]
GUIDANCE = {"guidance_scale": 2.5, "negative_prompt": (7, 7, 2)}
PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 0.8, "frequency_penalty": 0.5}
MASK = {"constraint": {"regex": "([ab]c?[d-f]){12}"}, "ignore_eos": False}
BIASES = {"logit_bias": {2: 1.5, 5: -1.0, 7: 1.0}, "min_tokens": 12, "ignore_eos": False}
CHANGES = {
    "guidance": GUIDANCE,
    "penalties": PENALTIES,
    "mask": MASK,
    "biases": BIASES,
    "all changes": GUIDANCE | PENALTIES | MASK | BIASES,
}
"""What changes logits before a token is drawn."""
NEAR_TIES = {"guidance": 13, "penalties": 19, "mask": 16, "biases": 5, "all changes": 10}
"""Seeds of near ties: torch's rounding decides some of their tokens, so that its exact answers are not the target's."""


def cases(
    first: dict[str, tuple],
    ways: list[Callable],
    quick: Collection[tuple[str, Callable]],
    slow: Collection[tuple[str, Callable]] | None = None,
) -> list:
    """Return parameters `first`, a configuration and more, a way, and whether kernels run. With kernels, which take ten
    times as long, only what is `quick` or `slow` runs (None: all others are slow), and one process runs all ways of a
    configuration."""

    def marks(name: str, config: EngineConfig, way: Callable) -> list:
        group = pytest.mark.xdist_group(f"{config.form} {config.block} {config.branches} in kernels")
        return [group] if (name, way) in quick else [group, pytest.mark.slow]

    return [
        pytest.param(
            *values, way, kernels,
            id=f"{name}-{way.__name__}-{'kernels' if kernels else 'torch'}",
            marks=marks(name, values[0], way) if kernels else [],
        )
        for (name, values), way, kernels in product(first.items(), ways, (False, True))
        if not kernels or slow is None or (name, way) in {*quick, *slow}
    ]  # fmt: skip


@pytest.fixture
def engines(monkeypatch) -> Callable[[bool], None]:
    """A function that makes engines run kernels."""

    def choose(kernels: bool) -> None:
        if kernels:
            monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)

    return choose


def in_bfloat16() -> ModelPair:
    made = pair("qwen3")
    return replace(made, target=made.target.bfloat16(), draft=made.draft.bfloat16())


def asked(method: str, **law: object) -> Request:
    """Return the request that the ways answer. `law`: sampling parameters, and perhaps a negative prompt."""
    negative_prompt = law.pop("negative_prompt", None)
    return replace(request(PROMPT, "0", method=method, **law), negative_prompt=negative_prompt)


ALONE: dict[str, Answer] = {}
"""Answers to requests alone, which several ways are compared with."""
IN_COMPANY: dict[str, dict[str, Answer]] = {}
"""Answers in company, by configuration and request."""


def alone(made: ModelPair, config: EngineConfig, one: Request) -> Answer:
    """Return the answer to a request alone. Kernels are those that run with numerics=invariant."""
    key = repr((config, one))
    if key not in ALONE:
        ALONE[key] = answers(local_engine(made, config), [one])["0"]
    return ALONE[key]


def assert_the_target_s(way: Callable[[Ways], Answer], made: ModelPair, config: EngineConfig, **law: object) -> Answer:
    """Assert that an exact answer is that of the target alone; with numerics=invariant bit for bit. Returns it."""
    particles = law.pop("particles")
    expected = alone(made, config, asked("target", **law))
    found = way(Ways(made, config, asked("exact", particles=particles, **law), expected))
    assert found.tokens == expected.tokens and len(expected.tokens) == law["max_tokens"]
    if config.numerics == "invariant":
        assert found.statistics.numerics == "invariant"
        assert found.logprobs == expected.logprobs
    return found


def assert_as_alone(way: Callable[[Ways], Answer], made: ModelPair, config: EngineConfig, **law: object) -> Answer:
    """Assert that an SMC answer is that of the request alone, as `assert_the_target_s`."""
    one = asked("smc", **(FEW | law))
    expected = alone(made, config, one)
    found = way(Ways(made, config, one, expected))
    assert found.tokens == expected.tokens
    assert found.statistics.log_z == pytest.approx(expected.statistics.log_z, abs=0.1)
    if config.numerics == "invariant":
        assert found.statistics.numerics == "invariant"
        assert (found.logprobs, found.statistics.log_z) == (expected.logprobs, expected.statistics.log_z)
    return found


def in_order(config: EngineConfig, kernels: bool) -> EngineConfig:
    return replace(config, numerics="invariant") if kernels else config


LAWS = {
    "independent": (LOCKSTEP, {"population": "independent", "ess_threshold": 0.6, "ignore_eos": True}),
    "distinct": (LOOKAHEAD, {"population": "distinct", "ignore_eos": True}),
    "given a constraint": (LOCKSTEP, {"constraint": {"regex": "[ab]{4}c[abc]{5,}"}, "constraint_scope": "answer"}),
}
TOGETHER = {
    repr(in_order(LOCKSTEP, True)): [
        asked("exact", **LAW, particles=SHAPES[0][1]),
        asked("exact", **(LAW | CHANGES["all changes"] | {"seed": NEAR_TIES["all changes"]}), particles=SHAPES[0][1]),
        asked("smc", **(FEW | LAWS["independent"][1])),
    ],
    repr(in_order(LOOKAHEAD, True)): [
        asked("exact", **LAW, particles=SHAPES[1][1]),
        asked("smc", **(FEW | LAWS["distinct"][1])),
    ],
}
"""What `Ways.in_company` is asked for in the kernels, by configuration."""


@pytest.mark.parametrize(
    ("config", "particles", "way", "kernels"),
    cases(dict(zip(("lockstep", "lookahead"), SHAPES)), EXACT, [("lockstep", way) for way in EXACT[2:]]),
)
def test_exact(config, particles, way, kernels, engines):
    engines(kernels)
    found = assert_the_target_s(way, in_bfloat16(), in_order(config, kernels), **LAW, particles=particles)
    assert found.statistics.numerics == ("invariant" if kernels else "fastest")


def of_either_mode(blocks: list) -> list:
    """Give each case one kind of log-probabilities, so that every size, way and form of operations meets both."""
    modes = [("processed", "raw")[(i + i // 4) % 2] for i in range(len(blocks))]
    return [pytest.param(*one.values, mode, id=f"{one.id}-{mode}", marks=one.marks) for one, mode in zip(blocks, modes)]


@pytest.mark.parametrize(
    ("config", "particles", "way", "kernels", "mode"),
    of_either_mode(
        cases(
            OTHER_BLOCKS,
            [Ways.alone, Ways.in_company, Ways.beside_another],
            [],
            [(name, Ways.beside_another) for name in OTHER_BLOCKS],
        )
    ),
)
def test_exact_with_other_blocks(config, particles, way, kernels, mode, engines):
    """N, K and F change nothing, nor does the kind of log-probabilities. In the kernels one request is company enough:
    every row of it is truncated."""
    engines(kernels)
    config = replace(in_order(config, kernels), logprobs_mode=mode)
    # In the kernels cuts take almost as long as all else: four or five rounds of them, look-ahead with a miss.
    law = LAW | CUT | {"max_tokens": 9 if kernels else LAW["max_tokens"]}
    assert_the_target_s(way, in_bfloat16(), config, **law, particles=particles)


@pytest.mark.parametrize(
    ("config", "particles", "name", "way", "kernels"),
    cases(
        {name: (*SHAPES[i % 2], name) for i, name in enumerate(CHANGES)},
        [Ways.in_company, Ways.preempted, Ways.without_draft, Ways.resumed],
        [("all changes", way) for way in (Ways.preempted, Ways.without_draft)],
        [
            ("all changes", Ways.in_company),
            ("all changes", Ways.resumed),
            ("guidance", Ways.resumed),
            ("penalties", Ways.preempted),
            ("mask", Ways.without_draft),
            ("biases", Ways.preempted),
        ],
    ),
)
def test_exact_with_changed_logits(config, particles, name, way, kernels, engines):
    """In the kernels all changes together meet every way, and each alone one of them."""
    engines(kernels)
    law = LAW | CHANGES[name] | {"seed": NEAR_TIES[name] if kernels else 3}
    assert_the_target_s(way, in_bfloat16(), in_order(config, kernels), **law, particles=particles)


def test_each_change_of_logits_changes_the_answer():
    """Exact answers that ignored it would not be the target's."""
    made, one = in_bfloat16(), dict(LAW, method="target")
    plain = alone(made, LOCKSTEP, asked(**one)).tokens
    found = {name: alone(made, LOCKSTEP, asked(**(one | change))).tokens for name, change in CHANGES.items()}
    assert len({plain, *found.values()}) == 1 + len(CHANGES), found


@pytest.mark.parametrize(
    ("config", "law", "way", "kernels"),
    cases(
        LAWS,
        OF_ALL[1:],
        [("distinct", Ways.preempted)],
        [
            *(("distinct", way) for way in (Ways.in_company, Ways.in_chunks, Ways.after_a_cached_prefix)),
            *(("independent", way) for way in (Ways.in_company, Ways.preempted)),
            ("given a constraint", Ways.preempted),
        ],
    ),
)
def test_smc(config, law, way, kernels, engines):
    """In the kernels one law meets every way to run a prompt, which comes before weights; all are preempted."""
    engines(kernels)
    assert_as_alone(way, in_bfloat16(), in_order(config, kernels), **law)
