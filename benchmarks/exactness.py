"""Exact decoding beside plain decoding on the shipped pair, by the hundred: `python -m
benchmarks.exactness --problems 1000`.

Problems are spread over temperatures, truncations, stop strings, forms, N, K and F; half of them are decoded beside SMC
requests. Prints what differs, how many of those answers are right, and tokens a round. The tests run fewer, on a
smaller pair."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import derived_seed, generate, grade
from smc.local_engine import ModelPair, local_engine
from smc.model.linear import DTYPES

CONFIGS = [
    EngineConfig(form="lockstep", block=5),
    EngineConfig(form="lockstep", block=8),
    EngineConfig(block=5, branches=4),
    EngineConfig(block=4, branches=1),
    EngineConfig(block=8, branches=2),
]
LAWS = [
    {**law, **more}
    for law, more in itertools.product(
        ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.5}),
        ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}, {"stop": ("so", ".")}),
    )
]
PARTICLES = (1, 4, 8, 16)


def asked(pair: ModelPair, index: int, question: str, method: str) -> Request:
    """The problem's request by a method; its law and seed depend on the index alone."""
    law = LAWS[index % len(LAWS)]
    rows = {"particles": PARTICLES[index // len(LAWS) % len(PARTICLES)]} if method == "exact" else {}
    params = SamplingParams(method=method, max_tokens=MAX_ANSWER, seed=derived_seed(3, index), **law, **rows)
    return Request(f"{method} {index}", tuple(pair.tokenizer.chat([{"role": "user", "content": question}])), params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="in any but float32 a row's company rounds it otherwise"
    )
    parser.add_argument("--device", default="cpu", help="where both models are, such as cuda")
    parser.add_argument("--form", choices=sorted({config.form for config in CONFIGS}), help="default: both")
    given = parser.parse_args()
    count, dtype = given.problems, DTYPES[given.dtype]
    configs = [config for config in CONFIGS if given.form in (None, config.form)]
    pair, problems = (
        ModelPair.load(demo.TARGET, demo.DRAFT, dtype=dtype, device=given.device),
        generate(11, count, "test"),
    )
    plain, found, different = {}, Counter(), 0
    for number, config in enumerate(configs):
        mine = range(number, count, len(configs))
        engine = local_engine(pair, config)
        requests = [asked(pair, i, problems[i].question, "target") for i in mine]
        plain = {output.answer.request_id: output.answer for output in engine.run(requests) if output.answer}
        requests = [asked(pair, i, problems[i].question, "exact") for i in mine]
        company = [
            Request(
                f"smc {i}",
                one.prompt,
                SamplingParams(particles=4, population=POPULATIONS[i % 2], seed=i, max_tokens=40),
            )
            for i, one in enumerate(requests[: len(requests) // 2])
        ]
        beside = [one for pair_ in itertools.zip_longest(requests, company) for one in pair_ if one]
        answers = {output.answer.request_id: output.answer for output in engine.run(beside) if output.answer}
        for i in mine:
            one, other = plain[f"target {i}"], answers[f"exact {i}"]
            found.update(answers=1, tokens=len(other.tokens), rounds=other.statistics.rounds)
            if (one.tokens, one.text, one.finish_reason) != (other.tokens, other.text, other.finish_reason):
                different += 1
                found.update(plain_right=grade(problems[i], one.text), exact_right=grade(problems[i], other.text))
                print(f"problem {i}, {config}, {LAWS[i % len(LAWS)]}: {one.tokens} {other.tokens}")
        print(
            f"{config.form} K={config.block} F={config.branches}: {len(mine)} problems, {different} different so far",
            flush=True,
        )
    print(f"{found['answers']} answers, {different} different, {found['tokens'] / found['rounds']:.2f} tokens a round")
    print(
        f"of those that differ, {found['plain_right']} of plain and {found['exact_right']} of exact decoding are right"
    )


if __name__ == "__main__":
    main()
