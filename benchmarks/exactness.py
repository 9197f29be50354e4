"""Compares exact decoding with plain decoding on the shipped pair, on hundreds of problems.

    python -m benchmarks.exactness equality --problems 1000 [--device cuda --dtype bfloat16] [--form lockstep]
    python -m benchmarks.exactness misses --problems 24 [--temperature 1]
    python -m benchmarks.exactness company --problems 400 [--device cuda --dtype bfloat16] [--numerics fastest]
    [--target DIR --draft DIR --prompts-file FILE ..] [-n 4] [--in-flight 32] [--max-tokens 300] [--form lockstep]
    [--redrafting always] [--verified nodes] [--target-tp 2] [--first 50]

`equality` spreads problems over temperatures, truncations, stop strings, forms, N, K and F, and decodes half of them
beside SMC requests. It prints the answers that differ from plain decoding, the number of these that are right, and the
tokens a round. The tests run fewer problems on a smaller pair.

`misses` prints, for every temperature and N, the share of compared tokens that the target drew differently, and the
tokens a round with F = 4 and with F = 1; for every temperature also the exponent by which this share falls with N.
`smc.scheduler.speculation.WIDTH_GAIN` was taken from it. With 48 problems it takes ten minutes.

`company` decodes each prompt by the target alone, with nothing beside it, at temperatures 0 and 0.7 in turn, and then
exactly in every form, for every N, beside the others. It prints how many answers are equal, token by token. With
`--target-tp` so many processes share both models, with one GPU each, in lockstep."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.problem_file import FileProblem, read_problems
from benchmarks.processes import RankProcesses
from services.launch.config import WorkerGroupConfig
from services.link.base import SHARED
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import POPULATIONS, Method, SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import Problem, derived_seed, generate, grade
from smc.local_engine import ModelPair, local_engine
from smc.model.linear import DTYPES
from smc.model.tokenizer import Tokenizer
from smc.scheduler.engine import Engine
from smc.scheduler.stats import ExactStats
from smc.types import Numerics

CONFIGS = [
    EngineConfig(form="lockstep", block=5),
    EngineConfig(form="lockstep", block=8),
    EngineConfig(block=5, branches=4),
    EngineConfig(block=4, branches=1),
    EngineConfig(block=8, branches=2),
]
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
CUTS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}, {"stop": ("so", ".")})
SAMPLING = [{"temperature": temperature, **cut} for temperature, cut in itertools.product(TEMPERATURES, CUTS)]
EQUALITY_PARTICLES = (1, 4, 8, 16)
MISSES_PARTICLES = (1, 2, 4, 8)
MISSES_SEED = 5
BESIDE = 8
"""Number of concurrent requests while misses are counted."""


def problem_request(pair: ModelPair, name: str, problem: Problem, params: SamplingParams) -> Request:
    prompt = pair.tokenizer.chat([{"role": "user", "content": problem.question}])
    return Request(name, tuple(prompt), params)


def request_by(method: str, pair: ModelPair, index: int, problem: Problem) -> Request:
    """Return the request for a problem. Its sampling settings and its seed depend on the index alone."""
    rows = {}
    if method == "exact":
        rows = {"particles": EQUALITY_PARTICLES[index // len(SAMPLING) % len(EQUALITY_PARTICLES)]}
    own: dict[str, Any] = {**SAMPLING[index % len(SAMPLING)], **rows}
    params = SamplingParams(method=Method(method), max_tokens=MAX_ANSWER, seed=derived_seed(3, index), **own)
    return problem_request(pair, f"{method} {index}", problem, params)


def answers_of(engine: Engine, requests: list[Request]) -> dict[str, Answer]:
    return {output.answer.request_id: output.answer for output in engine.run(requests) if output.answer}


def with_smc_beside(requests: list[Request]) -> list[Request]:
    """Insert an SMC request after each of the first half of `requests`."""
    beside = [
        Request(
            f"smc {i}",
            one.prompt,
            SamplingParams(method=Method.SMC, particles=4, population=POPULATIONS[i % 2], seed=i, max_tokens=40),
        )
        for i, one in enumerate(requests[: len(requests) // 2])
    ]
    return [one for two in itertools.zip_longest(requests, beside) for one in two if one]


def compare(given: argparse.Namespace) -> None:
    """Print every exact answer that differs from the plain one, then the totals."""
    configs = [config for config in CONFIGS if given.form in (None, config.form)]
    pair = ModelPair.load(demo.TARGET, demo.DRAFT, dtype=DTYPES[given.dtype], device=given.device)
    problems, found = generate(11, given.problems, "test"), Counter[str]()
    for number, config in enumerate(configs):
        own = range(number, given.problems, len(configs))
        engine = local_engine(pair, config)
        plain = answers_of(engine, [request_by("target", pair, i, problems[i]) for i in own])
        exact = answers_of(engine, with_smc_beside([request_by("exact", pair, i, problems[i]) for i in own]))
        for i in own:
            one, other = plain[f"target {i}"], exact[f"exact {i}"]
            # The pass over the prompt yields the first token.
            found.update(answers=1, tokens=len(other.tokens) - 1, rounds=other.statistics.rounds)
            if (one.tokens, one.text, one.finish_reason) != (other.tokens, other.text, other.finish_reason):
                right = {"plain_right": grade(problems[i], one.text), "exact_right": grade(problems[i], other.text)}
                found.update(different=1, **right)
                print(f"problem {i}, {config}, {SAMPLING[i % len(SAMPLING)]}: {one.tokens} {other.tokens}")
        print(
            f"{config.form} K={config.block} F={config.branches}: {len(own)} problems, "
            f"{found['different']} different so far",
            flush=True,
        )
    rate = f", {found['tokens'] / found['rounds']:.2f} tokens a round" if found["rounds"] else ""
    print(f"{found['answers']} answers, {found['different']} different{rate}")
    print(
        f"of those that differ, {found['plain_right']} of plain and {found['exact_right']} of exact decoding are right"
    )


def misses_of(pair: ModelPair, problems: int, temperature: float, particles: int, branches: int) -> ExactStats:
    """Answer problems in look-ahead with blocks of 5; return the statistics."""
    engine = local_engine(pair, EngineConfig(block=5, branches=branches, max_slots=BESIDE * particles))
    requests = []
    for i, problem in enumerate(generate(MISSES_SEED, problems, "test")):
        params = SamplingParams(
            method=Method.EXACT,
            particles=particles,
            temperature=temperature,
            max_tokens=MAX_ANSWER,
            seed=derived_seed(1, i),
        )
        requests.append(problem_request(pair, str(i), problem, params))
    for _ in engine.run(requests):
        pass
    return engine.take_stats().exact["walk"]


def count_misses(given: argparse.Namespace) -> None:
    """For every temperature print a line for each N, then the exponent."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    for temperature in given.temperature or (1.0, 1.5, 2.0):
        missed = {}
        for particles in MISSES_PARTICLES:
            wide, lean = (misses_of(pair, given.problems, temperature, particles, branches) for branches in (4, 1))
            missed[particles] = wide.misses / (wide.accepted_tokens + wide.misses)
            print(
                f"temperature {temperature:g}, N={particles}: {100 * missed[particles]:.2f}% of the tokens missed; "
                f"tokens a round {wide.tokens_a_round:.2f} with F=4, {lean.tokens_a_round:.2f} with F=1",
                flush=True,
            )
        most = MISSES_PARTICLES[-1]
        gain = math.log(missed[1] / missed[most]) / math.log(most)
        print(f"temperature {temperature:g}: N rows miss N^{gain:.2f} times less often", flush=True)


def company_requests(given: argparse.Namespace, tokenizer: Tokenizer, method: Method, **params: Any) -> list[Request]:
    """Return a request for each problem from `first` on: those of the files, then word problems. Temperature and
    seed depend on the number of the problem alone."""
    end = given.first + given.problems
    asked = [problem for file in given.prompts_file for problem in read_problems(Path(file))]
    words = generate(11, max(0, end - len(asked)), "test")
    asked += [FileProblem(number, problem.question) for number, problem in enumerate(words, 1)]
    return [
        Request(
            str(i),
            tuple(problem.tokens(tokenizer, raw=False)),
            SamplingParams(
                method=method,
                seed=derived_seed(5, i),
                max_tokens=given.max_tokens,
                temperature=(0.0, 0.7)[i % 2],
                **params,
            ),
        )
        for i, problem in enumerate(asked[:end])
        if i >= given.first
    ]


Engines = Callable[[EngineConfig], AbstractContextManager[Engine]]
"""Makes an engine, which ends with the context."""


@contextmanager
def engines_in_processes(given: argparse.Namespace) -> Iterator[Engines]:
    """Yield engines over ranks in processes of their own, which keep their models. All ranks share both models."""
    group = WorkerGroupConfig(
        target=Path(given.target), draft=Path(given.draft), device=given.device, dtype=given.dtype, placement=SHARED,
        target_tp=given.target_tp, draft_tp=given.target_tp, engine=EngineConfig(form="lockstep"),
    )  # fmt: skip
    gpus = {SHARED: list(range(given.target_tp))} if given.device == "cuda" else None
    with RankProcesses(group, gpus) as processes:

        @contextmanager
        def engine(config: EngineConfig) -> Iterator[Engine]:
            with processes.engine(config) as remote:
                yield remote.engine

        yield engine


def compare_in_company(given: argparse.Namespace) -> dict[str, int]:
    """Print and return, for each form, N and number of requests in flight, how many exact answers equal those of the
    target alone."""
    if given.target_tp > 1:
        with engines_in_processes(given) as engines:
            return _compare_in_company(given, Tokenizer.load(Path(given.target)), engines)
    pair = ModelPair.load(given.target, given.draft, dtype=DTYPES[given.dtype], device=given.device)
    return _compare_in_company(given, pair.tokenizer, lambda config: nullcontext(local_engine(pair, config)))


def _compare_in_company(given: argparse.Namespace, tokenizer: Tokenizer, engines: Engines) -> dict[str, int]:
    plain, alone = company_requests(given, tokenizer, Method.TARGET), dict[str, Answer]()
    # No more memory than these requests need, so that several processes may share a GPU.
    common = {"numerics": given.numerics, "max_context": max(len(one.prompt) for one in plain) + given.max_tokens}
    with engines(EngineConfig(form="lockstep", block=5, max_slots=1, **common)) as engine:
        for request in plain:
            alone |= answers_of(engine, [request])
    print(f"{len(alone)} answers by the target alone", flush=True)
    forms = [form for form in ("lockstep", "lookahead") if given.form in (None, form)]
    rows = [("target", None, in_flight) for in_flight in given.in_flight if in_flight > 1]
    rows += [(form, n, in_flight) for form in forms for n in given.particles for in_flight in given.in_flight]
    found: dict[str, int] = {}
    for form, n, in_flight in rows:
        config = EngineConfig(
            form="lockstep" if n is None else form, block=5, max_slots=in_flight * (n or 1), **common,
            prefix_cache=in_flight > 1, verified=given.verified,
            redrafting=given.redrafting if form == "lookahead" else "never",
        )  # fmt: skip
        asked = plain if n is None else company_requests(given, tokenizer, Method.EXACT, particles=n)
        with engines(config) as engine:
            made = answers_of(engine, asked)
        name = f"{form}, {in_flight} in flight" if n is None else f"{form}, N={n}, {in_flight} in flight"
        differ = [i for i, answer in alone.items() if made[i].tokens != answer.tokens]
        found[name] = len(alone) - len(differ)
        rounds = sum(answer.statistics.rounds for answer in made.values())
        tokens = sum(len(answer.tokens) - 1 for answer in made.values())  # the pass over the prompt yields the first
        rate = f"; {tokens / rounds:.2f} tokens a round" if n is not None and rounds else ""
        print(f"{name}: {found[name]} of {len(alone)} answers equal; others: {differ[:20]}{rate}", flush=True)
    print(json.dumps(found))
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, int] | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("equality", "misses", "company"))
    parser.add_argument(
        "--problems", type=int, help="number of problems; default: 1000 for equality, 48 for misses, 400 for company"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="type of both models; beside other requests float32 rounds nearly as alone, and other types as alone only "
        "with --numerics invariant; default: %(default)s",
    )
    parser.add_argument("--device", default="cpu", help="device of both models, such as cuda; default: %(default)s")
    parser.add_argument(
        "--form", choices=sorted({config.form for config in CONFIGS}), help="form of rounds; default: both forms"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        action="append",
        help="for misses: temperature; may be repeated; default: 1, 1.5, 2",
    )
    parser.add_argument("--target", default=demo.TARGET, help="for company: directory of the target")
    parser.add_argument("--draft", default=demo.DRAFT, help="for company: directory of the draft")
    parser.add_argument(
        "--prompts-file",
        nargs="+",
        default=[],
        help="for company: files of prompts, as for `smcserve eval --problems`; word problems follow",
    )
    parser.add_argument(
        "--first", type=int, default=0, help="for company: number of the first problem, to divide them among processes"
    )
    parser.add_argument(
        "--redrafting",
        choices=("never", "always"),
        default="never",
        help="for company, look-ahead: whether the draft drafts again after a miss; default: %(default)s",
    )
    parser.add_argument("--verified", help="for company: nodes or paths; default: as serve")
    parser.add_argument("--max-tokens", type=int, default=MAX_ANSWER, help="for company; default: %(default)s")
    parser.add_argument(
        "--numerics",
        choices=tuple(Numerics),
        help="for company: order of sums; default: invariant on GPUs, fastest on a CPU",
    )
    parser.add_argument("--target-tp", type=int, default=1, help="for company: GPUs that share both models")
    parser.add_argument("-n", "--particles", type=int, nargs="+", default=[1, 4, 8], help="for company: values of N")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32], help="for company: concurrent requests")
    given = parser.parse_args(argv)
    given.numerics = given.numerics or ("invariant" if given.device.startswith("cuda") else "fastest")
    if given.part == "company" and given.target_tp > 1 and given.form != "lockstep":
        parser.error("--target-tp shares both models, which work in turn: give --form lockstep as well")
    if given.first < 0 or (given.first and given.part != "company"):
        parser.error(f"--first {given.first} with {given.part}; allowed: 0 and more, with company")
    if given.problems is None:
        given.problems = {"equality": 1000, "misses": 48, "company": 400}[given.part]
    if given.part == "company":
        return compare_in_company(given)
    (compare if given.part == "equality" else count_misses)(given)
    return None


if __name__ == "__main__":
    main()
