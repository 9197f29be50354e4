"""Recorded answers of an engine in one process, to compare with after a change that must not alter behaviour.

    python -m tests.recorded_answers --write FILE      runs every scenario, and stores the answers
    python -m tests.recorded_answers --compare FILE    runs every scenario; exits 1 at the first answer that differs
    --only SUBSTRING    runs the scenarios whose names contain it; the others stay as they are in FILE
    --kernels           also runs the scenarios of the Triton kernels, in the interpreter if there is no GPU

A scenario is an engine, requests that arrive at given steps, and events at given steps. Its clock counts steps, so no
record depends on real time. Every request has a seed. Floats are rounded to four decimals. Another type of processor or
version of torch may round products differently: write the file on the machine on which you compare, with the code
before the change.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

# All imports from the project are here, so that only this block changes when modules move.
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Output, Particle, Request
from smc.api.sampling_params import SamplingParams
from smc.demo.problems import generate
from smc.executor.graph_runner import StageRunner
from smc.executor.ops import RoundOps
from smc.local_engine import ModelPair, local_engine
from smc.model.draft_vocab import DraftVocab
from smc.scheduler.admission import NoDraft
from smc.scheduler.engine import Engine
from smc.scheduler.speculation import LatencyCurve, LatencyModel, ModelLatency
from tests.model.tiny import random_decoder, tiny_config
from tests.scheduler.pairs import letter_tokenizer, peaked, tiny_pair

PARTS_OF_A_DEVICE = "smc.local_engine.ops_for"
"""The function that returns an engine's operations for a device."""
INTERPRETER, KERNELS = "tests.interpreter", "smc.executor.triton_ops"
"""Modules that need Triton. The first is imported before the second, and both only with `--kernels`."""

Settings = dict[str, Any]
Record = dict[str, Any]
Records = dict[str, Record]
"""Records by request id, and under `EVENTS` what belongs to no request."""

EVENTS = "events"
DECIMALS = 4
LONGEST_SCENARIO = 4000
"""Maximum number of steps; a scenario that takes more is taken for endless."""

WAYS: dict[str, Settings] = {
    "distinct": {"method": "smc", "population": "distinct"},
    "independent": {"method": "smc", "population": "independent"},
    "walk": {"method": "exact", "verification": "walk"},
    "rejection": {"method": "exact", "verification": "rejection"},
    "target": {"method": "target"},
    "draft": {"method": "draft"},
}
"""Every way to decode a request."""
LAWS: dict[str, Settings] = {
    "top_p": {"top_p": 0.9, "logprobs": True},
    "top_k": {"top_k": 5, "temperature": 1.5},
    "min_p": {"min_p": 0.1, "temperature": 1.5},
    "all truncations": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.2},
    "alpha 2": {"alpha": 2.0, "logprobs": True},
    "alpha 0.5": {"alpha": 0.5, "temperature": 1.5},
    "draft temperature": {"draft_temperature": 1.4, "temperature": 0.8},
    "logit_bias": {"logit_bias": {10: 3.0, 40: -100.0, 200: 5.5}, "temperature": 1.5},
    "min_tokens": {"min_tokens": 6, "stop": (" ", "="), "stop_token_ids": (5, 17), "temperature": 1.5},
    "stop strings": {"stop": ("=", "so", "\n"), "temperature": 1.2},
    "stop tokens": {"stop_token_ids": tuple(range(0, 512, 9)), "temperature": 1.2},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {0: 4.0, 1: 4.0, 2: 4.0, 3: 4.0}},
    "guidance": {"guidance_scale": 1.8, "logprobs": True},
    "guided draft": {"guidance_scale": 3.0, "temperature": 1.3},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3, "temperature": 1.2},
    "return_particles": {"return_particles": True, "temperature": 1.5},
    "return_particles of a short answer": {
        "return_particles": True,
        "temperature": 1.5,
        "stop": ("=", "."),
        "logprobs": True,
    },
    "always resampled": {"ess_threshold": 1.0, "resampling": "multinomial", "temperature": 1.2},
    "never resampled": {"ess_threshold": 0.0, "return_particles": True, "temperature": 1.2},
    "stratified": {"ess_threshold": 0.9, "resampling": "stratified"},
    "residual": {"ess_threshold": 0.9, "resampling": "residual", "alpha": 1.3},
    "ssp": {"ess_threshold": 0.9, "resampling": "ssp", "top_p": 0.9, "logprobs": True},
}
"""Settings to combine with every way of `WAYS`, except where they have no effect."""
LETTER_LAWS: tuple[Settings, ...] = (
    {"method": "smc", "particles": 6, "ess_threshold": 1.0, "logprobs": True},
    {"method": "smc", "particles": 3, "resampling": "multinomial", "stop": ("ab", "cca"), "logprobs": True},
    {"method": "smc", "particles": 8, "ess_threshold": 0.9, "resampling": "residual", "alpha": 1.3, "min_particles": 2},
    {"method": "exact", "particles": 4, "logprobs": True, "stop": ("abcab",)},
    {"method": "target", "logprobs": True, "stop": ("abab", "cb")},
    {"method": "draft", "temperature": 0.7},
    {"method": "smc", "particles": 5, "top_p": 0.9, "min_particles": 1, "return_particles": True},
    {"method": "exact", "verification": "rejection", "particles": 2, "temperature": 1.5, "logprobs": True},
    {"method": "exact", "particles": 6, "temperature": 0.0},
    {"method": "smc", "particles": 4, "alpha": 2.0, "min_tokens": 6, "logit_bias": {1: 1.5}},
)
"""Settings of requests to pairs whose vocabulary is a few letters."""
HUNGRY_LAWS: tuple[Settings, ...] = (
    {"method": "smc", "particles": 2, "ess_threshold": 0.0},
    {"method": "smc", "particles": 3, "ess_threshold": 0.0},
    {"method": "smc", "particles": 3, "top_p": 0.8, "temperature": 1.3, "ess_threshold": 0.0},
    {"method": "exact", "particles": 4},
    {"method": "smc", "particles": 4, "ess_threshold": 0.0, "min_particles": 2, "alpha": 1.4},
)
"""Settings of requests whose rows share little memory."""
LOCKSTEP, LOOKAHEAD = EngineConfig(form="lockstep", block=3), EngineConfig(block=3, branches=4)
FORMS = {"lockstep": LOCKSTEP, "look-ahead": LOOKAHEAD}


@dataclass(frozen=True)
class Scenario:
    """An engine and what happens to it. `steps` lists the actions before a step, by its number."""

    name: str
    pair: Callable[[], ModelPair]
    config: EngineConfig
    requests: Sequence[Request] | Callable[[ModelPair], Sequence[Request]]
    arrivals: Mapping[str, int] = field(default_factory=dict)
    """The step before which a request is submitted; 0 if not given."""
    steps: Mapping[int, Sequence[Callable[[Engine], object]]] = field(default_factory=dict)
    prepare: Callable[[Engine], None] = lambda engine: None
    """Changes the engine before the first step."""
    parts: Callable[[], RoundOps] | None = None
    """The operations of rounds; None: those that the engine chooses for a CPU."""

    @property
    def category(self) -> str:
        return self.name.split("/")[0]


class Padded(StageRunner):
    """Pads rounds to few shapes and lets the next round be requested before the last is read, as on a GPU, but captures
    no graphs."""

    records = True


# Pairs of models.


@cache
def demo_pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@cache
def demo_pair_of_few_tokens() -> ModelPair:
    """The demo pair with a draft that proposes 200 of its 512 tokens."""
    pair = demo_pair()
    ids = sorted({*pair.tokenizer.eos_ids, *pair.tokenizer.special_ids, *range(4, 200), 300, 400})
    return replace(pair, draft_head=DraftVocab(np.array(ids), pair.tokenizer.size, 0.05).head(pair.draft))


def letters() -> ModelPair:
    """A pair with five tokens; the last one ends a text."""
    return tiny_pair(5, max_context=128)


@cache
def letters_of_few_tokens() -> ModelPair:
    pair = letters()
    return replace(pair, draft_head=DraftVocab(np.array([0, 2, 4]), 5, 0.2).head(pair.draft))


@cache
def family_pair(family: str) -> ModelPair:
    """Random models of a family, with head sizes that the kernels support."""
    shape = {"vocab_size": 8, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "max_context": 64}
    draft, target = (
        peaked(random_decoder(tiny_config(family, num_layers=layers, **shape), seed), 0.4)
        for layers, seed in ((1, 1), (2, 2))
    )
    return ModelPair(target, draft, letter_tokenizer(8), 64)


# Requests.


@cache
def questions() -> tuple[str, ...]:
    return tuple(problem.question for problem in generate(7, 16, "test"))


def demo_prompt(pair: ModelPair, number: int) -> tuple[int, ...]:
    """The beginning of a question. After whole questions the distributions of this pair are so sharp that all methods
    agree."""
    whole = pair.tokenizer.chat([{"role": "user", "content": questions()[number % 16]}])
    return tuple(whole[: 24 + number % 9])


def letter_prompt(number: int, size: int) -> tuple[int, ...]:
    """A fixed irregular sequence of letters, without the token that ends a text."""
    return tuple((number * 7 + i * i + i // 3) % 4 for i in range(size))


def some_request(
    name: str, prompt: Sequence[int], negative: Sequence[int] = (2, 1, 0), salt: str = "", **params: Any
) -> Request:
    """A request; `negative` is its negative prompt if it is guided."""
    given = SamplingParams(**params)
    return Request(name, tuple(prompt), given, salt, negative_prompt=tuple(negative) if given.guided else None)


def has_effect(settings: Settings) -> bool:
    """Whether `SamplingParams` accepts the settings."""
    try:
        SamplingParams(**settings)
    except ValueError:
        return False
    return True


def with_rows(way: str, count: int) -> Settings:
    """Settings of a way, with `count` particles if it has any."""
    return WAYS[way] | ({} if way in ("target", "draft") else {"particles": count})


def every_way(pair: ModelPair, temperature: float, first: int) -> list[Request]:
    """Questions decoded in every way that the temperature allows; the number of particles varies."""
    asked = []
    for number, way in enumerate(WAYS):
        settings = with_rows(way, (1, 2, 4, 8)[(first + number) % 4]) | {"temperature": temperature}
        if has_effect(settings):
            more = {"logprobs": way != "draft", "max_tokens": 9 + number, "seed": 100 * first + number}
            asked.append(some_request(way, demo_prompt(pair, first + number), **settings, **more))
    return asked


def every_way_by_law(pair: ModelPair, law: str, parity: int) -> list[Request]:
    """A question with the settings of a law, decoded in every second way that it has an effect on; `parity` selects
    which half."""
    asked, number = [], list(LAWS).index(law)
    for index, way in enumerate(WAYS):
        settings = with_rows(way, 4) | LAWS[law]
        if way == "draft":
            settings.pop("logprobs", None)
        if (index + number) % 2 == parity and has_effect(settings):
            negative = demo_prompt(pair, number + 5)
            asked.append(
                some_request(
                    way, demo_prompt(pair, number), negative, **settings, max_tokens=10, seed=10 * number + index
                )
            )
    return asked


def letter_requests(count: int, tokens: int, first: int = 0, **more: Any) -> list[Request]:
    """Requests of mixed kinds, with prompts and answers of several lengths."""
    return [
        some_request(
            str(number),
            letter_prompt(first + number, 3 + 5 * number % 31),
            **(
                LETTER_LAWS[number % len(LETTER_LAWS)]
                | {"seed": first + number, "max_tokens": tokens - number % 7}
                | more
            ),
        )
        for number in range(count)
    ]


# What happens to an engine.


def abort(name: str) -> Callable[[Engine], object]:
    return lambda engine: {"abort": name, "known": engine.abort(name)}


def resize(name: str, particles: int) -> Callable[[Engine], object]:
    return lambda engine: engine.resize(name, particles)


def lose_draft(engine: Engine) -> object:
    return {"dropped": engine.detach_draft()}


def find_draft(pages: int) -> Callable[[Engine], object]:
    return lambda engine: engine.attach_draft(pages=pages)


def expect_short_answers(engine: Engine) -> None:
    """Make the engine expect short answers and learn nothing: it starts more requests than it has pages for, so some
    are preempted."""
    engine.forecast.learn_answer = lambda share: None
    engine.forecast.follow = lambda groups: None
    engine.forecast.answer_share = 0.1


def with_latency(draft: float, row: float, target: float, alone: float) -> Callable[[Engine], None]:
    """A fixed latency model, in seconds: a draft step, what another row adds to it, and a target pass in rounds and
    alone."""
    latency = LatencyModel(
        draft=ModelLatency(LatencyCurve(((1, draft), (64, draft + 63 * row))), 1e-8),
        target=ModelLatency(LatencyCurve(((1, target), (256, 1.5 * target))), 2e-8),
        alone=ModelLatency(LatencyCurve(((1, alone), (32, 1.2 * alone))), 2e-8),
        round_overhead=1e-4,
    )

    def prepare(engine: Engine) -> None:
        engine.latency = latency

    return prepare


class PaddedOps(RoundOps):
    def stage_runner(self, device: torch.device) -> StageRunner:
        return Padded(device)


def padded_ops() -> RoundOps:
    return PaddedOps()


@cache
def kernel_ops() -> RoundOps:
    importlib.import_module(INTERPRETER)
    ops = importlib.import_module(KERNELS).TritonOps()
    ops.stage_runner = Padded
    return ops


# Scenarios.


def scenarios() -> Iterator[Scenario]:
    yield from grid_scenarios()
    yield from law_scenarios()
    yield from seed_scenarios()
    yield from draft_vocab_scenarios()
    yield from long_prompt_scenarios()
    yield from prefix_scenarios()
    yield from mixed_scenarios()
    yield from family_scenarios()
    yield from abort_scenarios()
    yield from preemption_scenarios()
    yield from resize_scenarios()
    yield from lost_draft_scenarios()
    yield from cost_scenarios()
    yield from budget_scenarios()


def grid_scenarios() -> Iterator[Scenario]:
    """Every method by form, K, F, N and temperature."""
    configs = [
        EngineConfig(form="lockstep", block=5, pages=6000),
        EngineConfig(form="lockstep", block=8, smc_block=8, pages=6000),
        EngineConfig(block=4, branches=1, pages=6000),
        EngineConfig(block=5, branches=4, pages=6000),
        EngineConfig(block=8, smc_block=8, branches=2, pages=6000),
    ]
    for number, (config, temperature) in enumerate(itertools.product(configs, (0.0, 0.7, 1.0, 1.5))):
        name = f"grid/{config.form} K={config.block} F={config.branches} T={temperature:g}"
        yield Scenario(name, demo_pair, config, lambda pair, t=temperature, n=number: every_way(pair, t, n))


def law_scenarios() -> Iterator[Scenario]:
    for law, (parity, form) in itertools.product(LAWS, enumerate(FORMS)):
        config = replace(FORMS[form], block=4, branches=2 if form == "look-ahead" else 1, pages=6000)
        yield Scenario(
            f"laws/{form} {law}", demo_pair, config, lambda pair, law=law, p=parity: every_way_by_law(pair, law, p)
        )


def seed_scenarios() -> Iterator[Scenario]:
    """One prompt with several seeds, of which some are negative or large."""
    seeds = (0, 1, 2, -1, 2**63 - 1, -(2**63))
    for form, config in FORMS.items():

        def asked(pair: ModelPair) -> list[Request]:
            return [
                some_request(
                    f"{way} {seed}",
                    demo_prompt(pair, 3),
                    seed=seed,
                    max_tokens=16,
                    temperature=1.2,
                    **with_rows(way, 3),
                )
                for way, seed in itertools.product(("distinct", "walk"), seeds)
            ]

        yield Scenario(f"seeds/{form}", demo_pair, replace(config, pages=6000), asked)


def draft_vocab_scenarios() -> Iterator[Scenario]:
    """A draft that proposes only a few tokens."""
    for form, config in FORMS.items():

        def asked(pair: ModelPair) -> list[Request]:
            more = {"seed": 4, "max_tokens": 20, "temperature": 1.1}
            return [some_request(way, demo_prompt(pair, 6), **with_rows(way, 4), **more) for way in WAYS]

        yield Scenario(f"draft_vocab/{form}", demo_pair_of_few_tokens, replace(config, pages=6000), asked)
        guided = {"guidance_scale": 2.0, "seed": 5, "max_tokens": 20, "particles": 3}
        few = [
            some_request(way, letter_prompt(1, 9), **WAYS[way], **guided) for way in ("distinct", "independent", "walk")
        ]
        yield Scenario(f"draft_vocab/{form} guided letters", letters_of_few_tokens, config, few)


def long_prompt_scenarios() -> Iterator[Scenario]:
    """Long prompts, and a long negative prompt, run in chunks beside running requests."""
    for form, config in FORMS.items():

        def asked(pair: ModelPair) -> list[Request]:
            long = tuple(pair.tokenizer.encode(" ".join(questions())))[:330]
            more = {"seed": 9, "max_tokens": 16}
            found = [
                some_request(f"short {way}", demo_prompt(pair, 8), **with_rows(way, 2), **more)
                for way in ("distinct", "walk")
            ]
            found += [
                some_request(f"long {way}", long, **with_rows(way, 2), **more) for way in WAYS if way != "rejection"
            ]
            return [
                *found,
                some_request("long guided", long, long[100:300], method="smc", guidance_scale=1.5, particles=2, **more),
            ]

        arrivals = {"long distinct": 2, "long walk": 3}
        yield Scenario(f"long_prompt/{form}", demo_pair, replace(config, prefill_chunk=24, pages=6000), asked, arrivals)


def prefix_scenarios() -> Iterator[Scenario]:
    """A prompt, then the same again, a longer one, a shorter one, and the same with another salt; one after another,
    and side by side."""
    prompt = letter_prompt(2, 50)
    prompts = {
        "first": prompt,
        "again": prompt,
        "longer": (*prompt, 2, 0, 1),
        "beginning": prompt[:33],
        "other salt": prompt,
    }
    for number, (form, law) in enumerate(itertools.product(FORMS, ("independent", "walk"))):
        asked = [
            some_request(
                name,
                given,
                seed=i,
                max_tokens=14,
                salt="x" * (name == "other salt"),
                logprobs=True,
                **with_rows(law, 3),
            )
            for i, (name, given) in enumerate(prompts.items())
        ]
        arrivals = {name: 40 * i if number % 2 else 2 * i for i, name in enumerate(prompts)}
        yield Scenario(f"prefix/{form} {law}", letters, replace(FORMS[form], prefill_chunk=16), asked, arrivals)


def mixed_scenarios() -> Iterator[Scenario]:
    """Requests of mixed kinds arrive one after another, in rounds that are padded, requested ahead, or split into
    micro-batches."""
    cases = {
        "lockstep": (LOCKSTEP, None),
        "lockstep padded in micro-batches": (replace(LOCKSTEP, micro_batches=2, block=2), padded_ops),
        "look-ahead padded": (replace(LOOKAHEAD, branches=2), padded_ops),
        "look-ahead few slots": (replace(LOOKAHEAD, max_slots=12, branches=1, block=2), None),
    }
    for number, (name, (config, parts)) in enumerate(cases.items()):
        asked = letter_requests(12, 26, first=20 * number)
        arrivals = {one.request_id: 2 * i for i, one in enumerate(asked)}
        yield Scenario(f"mixed/{name}", letters, replace(config, prefill_chunk=16), asked, arrivals, parts=parts)


def family_scenarios() -> Iterator[Scenario]:
    """Random models of other families, with a block of one token and with more branches than tokens."""
    configs = (EngineConfig(form="lockstep", block=1), EngineConfig(block=2, branches=6))
    for family, config in zip(("qwen2", "qwen3"), configs):
        asked = [some_request(way, letter_prompt(3, 6), seed=3, max_tokens=15, **with_rows(way, 3)) for way in WAYS]
        yield Scenario(f"families/{family}", lambda f=family: family_pair(f), config, asked)


def abort_scenarios() -> Iterator[Scenario]:
    """Requests are aborted while they wait, while their prompts are run, and between rounds."""
    for form, config in FORMS.items():
        asked = letter_requests(8, 40, first=5, ignore_eos=True, stop=())
        arrivals = {"6": 6, "7": 8}
        steps = {
            1: [abort("1")],
            4: [abort("0"), abort("unknown")],
            6: [abort("3")],
            7: [abort("6")],
            9: [abort("4"), abort("7")],
        }
        yield Scenario(
            f"aborts/{form}", letters, replace(config, max_slots=24, prefill_chunk=16), asked, arrivals, steps
        )


def preemption_scenarios() -> Iterator[Scenario]:
    """The pool is too small for all requests: some are preempted, or lose particles."""
    cases = {"lockstep": (LOCKSTEP, 300, None), "look-ahead": (replace(LOOKAHEAD, branches=2), 280, padded_ops)}
    for name, (form, pages, parts) in cases.items():
        config = replace(form, pages=pages, prefill_chunk=16)
        more = {"max_tokens": 50, "ignore_eos": True, "logprobs": True}
        asked = [
            some_request(str(i), letter_prompt(i, 12 + i), seed=i, **more, **HUNGRY_LAWS[i % len(HUNGRY_LAWS)])
            for i in range(10)
        ]
        yield Scenario(f"preemptions/{name}", letters, config, asked, prepare=expect_short_answers, parts=parts)


def resize_scenarios() -> Iterator[Scenario]:
    """Populations shrink and grow while they run."""
    for (form, config), parts in itertools.product(FORMS.items(), (None, padded_ops)):
        law = {
            "method": "smc",
            "particles": 8,
            "min_particles": 2,
            "max_tokens": 50,
            "ignore_eos": True,
            "return_particles": True,
        }
        asked = [
            some_request("distinct", letter_prompt(4, 7), seed=1, **law),
            some_request("independent", letter_prompt(4, 7), seed=2, ess_threshold=0.4, **law),
        ]
        names = ("distinct", "independent")
        steps = {
            step: [resize(name, count) for name in names] for step, count in ((4, 3), (7, 7), (10, 2), (11, 1), (12, 5))
        }
        yield Scenario(
            f"resize/{form}{' padded' * (parts is not None)}", letters, config, asked, steps=steps, parts=parts
        )


def lost_draft_scenarios() -> Iterator[Scenario]:
    """The draft is lost while requests run, and replaced, twice. Requests that need it are dropped or refused
    meanwhile."""
    cases = {
        "lockstep": (LOCKSTEP, None),
        "look-ahead": (LOOKAHEAD, None),
        "look-ahead padded": (replace(LOOKAHEAD, branches=2), padded_ops),
    }
    for name, (config, parts) in cases.items():
        exact = [
            some_request(
                f"exact {i}",
                letter_prompt(i, 20),
                method="exact",
                particles=1 + i,
                seed=i,
                max_tokens=56,
                ignore_eos=True,
            )
            for i in range(3)
        ]
        guided = {"guidance_scale": 2.0, "max_tokens": 44, "ignore_eos": True}
        others = [
            some_request("guided", letter_prompt(5, 9), seed=5, method="exact", particles=2, **guided),
            some_request(
                "rejection", letter_prompt(6, 9), seed=6, max_tokens=44, ignore_eos=True, **with_rows("rejection", 2)
            ),
            some_request("target", letter_prompt(7, 9), seed=7, max_tokens=30, method="target"),
            some_request("dropped", letter_prompt(8, 9), method="smc", seed=8, max_tokens=80, ignore_eos=True),
            some_request("refused", letter_prompt(9, 9), method="smc", seed=9, max_tokens=8),
            some_request("late", letter_prompt(9, 9), method="smc", seed=9, max_tokens=12),
            some_request(
                "exact meanwhile", letter_prompt(3, 30), seed=4, max_tokens=50, ignore_eos=True, method="exact"
            ),
        ]
        arrivals = {"refused": 8, "exact meanwhile": 9, "late": 14}
        steps = {6: [lose_draft], 11: [find_draft(1500)], 16: [lose_draft], 19: [find_draft(1500)]}
        config = replace(config, pages=1500, prefill_chunk=16)
        yield Scenario(f"lost_draft/{name}", letters, config, [*exact, *others], arrivals, steps, parts=parts)


def cost_scenarios() -> Iterator[Scenario]:
    """A fixed latency model decides the tree sizes of exact decoding, and whether the draft is used."""
    latency = {
        "a cheap draft": with_latency(1e-4, 1e-6, 1e-2, 1e-2),
        "dear rows": with_latency(5e-4, 5e-4, 4e-3, 4e-3),
        "a dear draft": with_latency(1e-2, 1e-3, 1e-2, 4e-3),
    }
    for (form, config), (name, prepare) in itertools.product(FORMS.items(), latency.items()):
        law = {"method": "exact", "ignore_eos": True, "max_tokens": 48}
        asked = [
            some_request("8 rows", letter_prompt(1, 12), seed=1, particles=8, **law),
            some_request("3 rows", letter_prompt(2, 12), seed=2, particles=3, temperature=1.5, **law),
            some_request("late", letter_prompt(3, 12), seed=3, particles=8, temperature=0.7, **law),
            some_request(
                "beside", letter_prompt(4, 12), method="smc", seed=4, particles=4, max_tokens=24, ignore_eos=True
            ),
        ]
        arrivals = {"late": 7, "beside": 12}
        yield Scenario(
            f"latency/{form} {name}", letters, replace(config, max_slots=24), asked, arrivals, prepare=prepare
        )


def budget_scenarios() -> Iterator[Scenario]:
    """Time budgets end, by a clock that counts steps: of some requests in the queue, of others while they run."""
    for form, config in FORMS.items():
        law = {"max_tokens": 60, "ignore_eos": True, "logprobs": True}
        asked = [
            some_request(
                "particles",
                letter_prompt(1, 9),
                method="smc",
                seed=1,
                particles=6,
                time_budget=7,
                return_particles=True,
                **law,
            ),
            some_request(
                "walk", letter_prompt(2, 9), seed=2, time_budget=6, top_logprobs=2, **law, **with_rows("walk", 4)
            ),
            some_request("target", letter_prompt(3, 9), seed=3, time_budget=9, method="target", **law),
            some_request("waits", letter_prompt(4, 9), method="smc", seed=4, time_budget=3, particles=8, **law),
        ]
        yield Scenario(f"budgets/{form}", letters, replace(config, max_slots=12), asked)


def kernel_scenarios() -> Iterator[Scenario]:
    """A few short answers of each kind through the Triton kernels."""
    more = {"max_tokens": 4, "logprobs": True}
    ahead = [
        some_request(
            "distinct", [1, 2, 3], method="smc", particles=2, seed=4, min_tokens=3, logit_bias={2: 1.5, 7: -2}, **more
        ),
        some_request("independent", [4], method="smc", particles=2, seed=2, ess_threshold=1.0, stop=("ab",), **more),
        some_request("walk", [7], method="exact", particles=2, seed=5, **more),
        some_request("target", [5, 6], method="target", seed=3, **more),
    ]
    lockstep = [
        some_request("rejection", [3, 4], seed=6, top_p=0.95, **more, **with_rows("rejection", 2)),
        some_request("guided", [1, 2], (3,), method="smc", particles=2, seed=2, guidance_scale=2.0, **more),
    ]
    llama, qwen = (lambda family=family: family_pair(family) for family in ("llama", "qwen2"))
    yield Scenario("kernels/look-ahead", qwen, EngineConfig(block=2, branches=2), ahead, parts=kernel_ops)
    yield Scenario("kernels/lockstep", llama, EngineConfig(form="lockstep", block=2), lockstep, parts=kernel_ops)


# Runs.


class Run:
    """One scenario from its first step to its last."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._step = scenario, 0
        pair = scenario.pair()
        with made_of(scenario.parts):
            self._engine = local_engine(pair, scenario.config, clock=lambda: float(self._step))
        scenario.prepare(self._engine)
        given = scenario.requests
        self._waiting = list(given(pair) if callable(given) else given)
        self._outputs: dict[str, list[Output]] = {one.request_id: [] for one in self._waiting}
        self._told: list[object] = []

    def records(self) -> Records:
        """The record of every request, and the events that belong to no request."""
        while self._waiting or not self._engine.idle:
            assert self._step < LONGEST_SCENARIO, f"{self._scenario.name} does not end"
            self._submit()
            self._act()
            if not self._engine.idle:
                for output in self._engine.step():
                    self._outputs[output.request_id].append(output)
            self._step += 1
        stats = self._engine.take_stats()
        self._engine.check_books()
        events = {"steps": self._step, "told": self._told}
        counts = {"preemptions": stats.preemptions, "shrinks": stats.shrinks, "prefix_hits": stats.prefix_hits}
        return {name: record_of(outputs) for name, outputs in self._outputs.items()} | {EVENTS: events | counts}

    def _submit(self) -> None:
        arrivals = self._scenario.arrivals
        now = [one for one in self._waiting if arrivals.get(one.request_id, 0) <= self._step]
        self._waiting = [one for one in self._waiting if one not in now]
        for one in now:
            self._tell(lambda one=one: self._engine.submit(one))

    def _act(self) -> None:
        for act in self._scenario.steps.get(self._step, ()):
            self._tell(lambda act=act: act(self._engine))

    def _tell(self, act: Callable[[], object]) -> None:
        """Call `act`, and note what it returns or why it is refused."""
        try:
            told = act()
        except (NoDraft, ValueError) as error:
            told = {"refused": type(error).__name__, "because": str(error)}
        if told is not None:
            self._told.append([self._step, told])


def made_of(parts: Callable[[], RoundOps] | None) -> AbstractContextManager:
    """Engines built in this context have these operations."""
    if parts is None:
        return nullcontext()
    made = parts()
    return mock.patch(PARTS_OF_A_DEVICE, lambda device: made)


def record_of(outputs: Sequence[Output]) -> Record:
    """An answer with its streamed pieces, or the pieces alone if there is no answer."""
    streamed = {
        "pieces": [len(output.tokens) for output in outputs],
        "streamed_tokens": list(itertools.chain(*(output.tokens for output in outputs))),
        "streamed": "".join(output.text for output in outputs),
    }
    answer = outputs[-1].answer if outputs else None
    if answer is None:
        return {"tokens": None} | streamed
    record = record_of_answer(answer) | streamed
    if record["streamed_tokens"] == record["tokens"]:
        del record["streamed_tokens"]
    return record


def record_of_answer(answer: Answer) -> Record:
    record = {
        "tokens": list(answer.tokens),
        "text": answer.text,
        "finish_reason": answer.finish_reason.value,
        "matched": answer.matched,
        "seed": answer.seed,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "steps": [answer.seconds, *asdict(answer.times).values()],
        "logprobs": answer.logprobs,
        "top_logprobs": answer.top_logprobs,
        "error": answer.error,
        # What is configured is no result.
        "statistics": {name: value for name, value in asdict(answer.statistics).items() if name != "numerics"},
        "particles": None if answer.particles is None else [record_of_particle(one) for one in answer.particles],
    }
    return {name: rounded(value) for name, value in record.items() if value is not None}


def record_of_particle(particle: Particle) -> Record:
    return {
        "tokens": list(particle.tokens),
        "text": particle.text,
        "finish_reason": particle.finish_reason.value,
        "log_weight": math.log(particle.weight) if particle.weight > 0 else -math.inf,
    }


def rounded(value: Any) -> Any:
    """The value as JSON returns it, with floats rounded; non-finite floats become text."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return round(value, DECIMALS) + 0.0 if math.isfinite(value) else str(value)
    return value


# Files and differences.


def read_file(path: Path) -> dict[str, Records]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_file(path: Path, found: Mapping[str, Records]) -> None:
    """Write one line for each record, so that a diff of two files shows the answer that differs."""
    lines = []
    for name, records in found.items():
        each = [f"{json.dumps(key)}:{json.dumps(record, separators=(',', ':'))}" for key, record in records.items()]
        lines.append(f"{json.dumps(name)}:{{\n" + ",\n".join(each) + "\n}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def difference(expected: Any, found: Any, where: str) -> str | None:
    """The first position where two records differ, and both values there."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        pairs = ((f"{where}.{key}", expected.get(key), found.get(key)) for key in keys)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = ((f"{where}[{i}]", one, other) for i, (one, other) in enumerate(zip(expected, found)))
    else:
        same = type(expected) is type(found) and expected == found
        return None if same else f"{where}\n  recorded: {expected!r}\n  found:    {found!r}"
    return next((told for place, one, other in pairs if (told := difference(one, other, place)) is not None), None)


def first_difference(recorded: Mapping[str, Records], found: Mapping[str, Records]) -> str | None:
    """The first difference, with scenario, request and field."""
    for name, records in found.items():
        if name not in recorded:
            return f"scenario {name!r} is not recorded"
        before = recorded[name]
        for key in [*before, *(key for key in records if key not in before)]:
            if told := difference(before.get(key), records.get(key), key):
                return f"scenario {name!r} differs at {told}"
    return None


def print_counts(chosen: Iterable[Scenario], found: Mapping[str, Records], seconds: Mapping[str, float]) -> None:
    answers: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for one in chosen:
        answers[one.category] += sum("text" in record for record in found[one.name].values())
        spent[one.category] += seconds[one.name]
    for category, count in answers.items():
        print(f"{category}: {count} answers, {spent[category]:.1f} s of CPU time")
    print(f"all: {answers.total()} answers, {spent.total():.1f} s of CPU time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--write", type=Path, metavar="FILE", help="store the answers")
    goal.add_argument("--compare", type=Path, metavar="FILE", help="exit 1 at the first answer that differs")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of scenarios' names")
    parser.add_argument("--kernels", action="store_true", help="run those of the Triton kernels, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = [*scenarios(), *kernel_scenarios()]
    assert len({one.name for one in known}) == len(known), "two scenarios have one name"
    chosen = [one for one in known if given.only in one.name and (given.kernels or one.category != "kernels")]
    if not chosen:
        parser.error(f"no scenario has {given.only!r} in its name")
    return store(given.write, known, chosen) if given.write else compare(given.compare, known, chosen)


def store(path: Path, known: Sequence[Scenario], chosen: Sequence[Scenario]) -> int:
    """Run the chosen scenarios and write the file. Records of other scenarios stay as they are; those of scenarios that
    no longer exist are removed."""
    recorded = read_file(path) if path.exists() else {}
    found, seconds = {}, {}
    for one in chosen:
        begun = time.process_time()
        found[one.name] = Run(one).records()
        seconds[one.name] = time.process_time() - begun
    merged = recorded | found
    write_file(path, {one.name: merged[one.name] for one in known if one.name in merged})
    print_counts(chosen, found, seconds)
    return 0


def compare(path: Path, known: Sequence[Scenario], chosen: Sequence[Scenario]) -> int:
    """Run the chosen scenarios until one differs from its record. Returns the exit code."""
    recorded = read_file(path)
    if gone := sorted(set(recorded) - {one.name for one in known}):
        print(f"scenario {gone[0]!r} is recorded and no longer exists")
        return 1
    count = 0
    for one in chosen:
        found = Run(one).records()
        if told := first_difference(recorded, {one.name: found}):
            print(told)
            return 1
        count += sum("text" in record for record in found.values())
    print(f"{count} answers of {len(chosen)} scenarios are as they were recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
