"""The table of power and potentials: measures the share of problems that a pair solves at a high temperature with
p^alpha over whole answers, and with a potential that checks arithmetic. For comparison it measures other ways to
sharpen: a lower temperature, and the likeliest or the commonest of N answers. The demo pair solves its own held-out
problems, another pair those of a file.

    python -m benchmarks.power --temperature 2 --problems 128 --processes 8
    python -m benchmarks.power --target DIR --draft DIR --problems-file benchmarks/number_questions.jsonl \\
        --temperature 1

N answers and N particles run about as many positions through the target. Every problem has a seed of its own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.problem_file import NUMBER, FileProblem, read_problems
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.checkers import arithmetic
from smc.demo.problems import derived_seed, generate, grade
from smc.loading import loaded_models, pair_directories, use_threads
from smc.local_engine import ModelPair, fitted_engine

ALPHAS, PARTICLES, BLOCK = (1.5, 2.0, 4.0), (8, 32), 5
ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class PowerRow:
    """One way of answering."""

    name: str
    solved: float
    """Share of problems that are solved."""
    error: float
    """Standard error of `solved`."""
    positions: float
    """Positions run through the target for an answer, without those of the prompt."""
    passes: float
    """Consecutive passes of the target for an answer."""
    best_solved: float | None
    """Share of problems solved if the likeliest particle is the answer; None: there are no particles."""


@dataclass(frozen=True)
class PowerProblem:
    """A prompt, and the check whether an answer is right."""

    prompt: tuple[int, ...]
    """Token ids."""
    is_right: Callable[[str], bool]


@dataclass(frozen=True)
class ProblemSource:
    """The source of the problems, and the pair that solves them."""

    directories: tuple[Path, Path]
    """Directories of target and draft."""
    file: Path | None
    """None: the demo pair's problems."""
    count: int
    tokens: int
    """Maximum number of tokens of an answer."""

    def problems(self, pair: ModelPair, seed: int) -> dict[int, PowerProblem]:
        """Return the problems by number. Raises ValueError for a file that cannot be read, or a line without an
        answer."""
        tokenizer = pair.tokenizer
        if self.file is None:
            return {
                index: PowerProblem(
                    tuple(tokenizer.chat([{"role": "user", "content": problem.question}])), partial(grade, problem)
                )
                for index, problem in enumerate(generate(seed, self.count, "test"))
            }
        found = {}
        for problem in read_problems(self.file)[: self.count]:
            if problem.answer is None:
                raise ValueError(f"{self.file}, line {problem.number}: there is no answer; every line needs one")
            prompt = tuple(problem.tokens(tokenizer, raw=False))
            found[problem.number] = PowerProblem(prompt, partial(_is_right, problem))
        return found


def _is_right(problem: FileProblem, text: str) -> bool:
    return bool(problem.grade(text))


@dataclass(frozen=True)
class Ways:
    """Settings of the ways of answering that are compared."""

    temperature: float
    seed: int
    particles: tuple[int, ...]
    alphas: tuple[float, ...]
    populations: tuple[str, ...]


@dataclass(frozen=True)
class Solved:
    """Result of one problem with one way of answering."""

    share: float
    """Share of the answers that are right; of particles, weighted."""
    positions: float
    passes: float
    best: float | None = None


class PowerProblems:
    """Answers some problems in every way, at one temperature."""

    def __init__(self, pair: ModelPair, problems: dict[int, PowerProblem], tokens: int, ways: Ways) -> None:
        """`problems`: by number; `tokens`: maximum number of tokens of an answer."""
        self._pair, self._problems, self._tokens, self._ways = pair, problems, tokens, ways
        self._temperature, self._seed = ways.temperature, ways.seed
        self.found: dict[str, list[Solved]] = defaultdict(list)
        """Results by the name of the way of answering."""

    def measure(self) -> None:
        temperature, most = self._temperature, max(self._ways.particles)
        samples = self._ask(most, method="target", temperature=temperature, logprobs=True)
        for index, found in samples.items():
            positions = sum(len(answer.tokens) for answer in found) / most
            self._add("one answer", index, found, positions, positions)
            for n in self._ways.particles:
                # All answers, in disjoint sets of n.
                sets = [found[at : at + n] for at in range(0, most, n)]
                passes = sum(max(len(answer.tokens) for answer in one) for one in sets) / len(sets)
                for name, choose in (("likeliest", _likeliest), ("commonest", _commonest)):
                    self._add(f"{name} of {n}", index, [choose(one) for one in sets], n * positions, passes)
        for alpha in self._ways.alphas:
            low = self._ask(4, method="target", temperature=temperature / alpha)
            for index, found in low.items():
                positions = sum(len(answer.tokens) for answer in found) / len(found)
                self._add(f"temperature {temperature / alpha:.3g}", index, found, positions, positions)
        for alpha in (1.0, *self._ways.alphas):
            for population in self._ways.populations:
                for n in self._ways.particles:
                    self._particles(f"alpha {alpha:g}, {population}, N = {n}", n, population, alpha)
        for population in self._ways.populations:
            for n in self._ways.particles:
                self._particles(f"checker, {population}, N = {n}", n, population, 1.0, potential="arithmetic")

    def _particles(self, name: str, n: int, population: str, alpha: float, **more: Any) -> None:
        given = {"temperature": self._temperature, "alpha": alpha, "population": population, "particles": n}
        # At a high temperature the draft is as uncertain as the target, so it proposes at a lower temperature.
        given |= {"draft_temperature": min(1.0, self._temperature / alpha), "answer": "best", "return_particles": True}
        for index, (answer,) in self._ask(1, **given, **more).items():
            is_right, statistics = self._problems[index].is_right, answer.statistics
            share, best = sum(one.weight * is_right(one.text) for one in answer.particles or ()), is_right(answer.text)
            self.found[name].append(Solved(share, statistics.target_tokens, statistics.rounds, best))

    def _add(self, name: str, index: int, answers: Sequence[Answer], positions: float, passes: float) -> None:
        share = sum(self._problems[index].is_right(answer.text) for answer in answers) / len(answers)
        self.found[name].append(Solved(share, positions, passes))

    def _ask(self, count: int, **sampling: Any) -> dict[int, list[Answer]]:
        """Return `count` answers to each problem, by its number. Raises RuntimeError if an answer ends in an error."""
        requests = [
            Request(
                f"{index} {sample}",
                problem.prompt,
                SamplingParams(seed=derived_seed(self._seed + sample, index), max_tokens=self._tokens, **sampling),
            )
            for index, problem in self._problems.items()
            for sample in range(count)
        ]
        engine = fitted_engine(
            self._pair,
            EngineConfig(form="lockstep", block=BLOCK),
            requests,
            max(1, ROWS_AT_ONCE // requests[0].params.rows),
            potentials={"arithmetic": arithmetic},
        )
        found: dict[int, list[Answer]] = defaultdict(list)
        for output in engine.run(requests):
            if output.answer is not None:
                if output.answer.error:
                    raise RuntimeError(output.answer.error)
                found[int(output.request_id.split()[0])].append(output.answer)
        return found


def _likeliest(answers: Sequence[Answer]) -> Answer:
    return max(answers, key=lambda answer: sum(answer.logprobs or ()))


def _commonest(answers: Sequence[Answer]) -> Answer:
    """Return the first answer with the most frequent result. The result is the last number in an answer."""
    results = [(NUMBER.findall(answer.text) or [answer.text.strip()])[-1] for answer in answers]
    return answers[results.index(Counter(results).most_common(1)[0][0])]


def measure_part(part: int, parts: int, source: ProblemSource, ways: Ways, device: str) -> dict[str, list[Solved]]:
    """Answer every `parts`-th problem, beginning with number `part`, in every way."""
    pair = loaded_models("files", source.directories, device, None, None, None, None, None).pair(device, device)
    use_threads(1 if parts > 1 else None, source.directories)
    problems = source.problems(pair, ways.seed)
    mine = {index: problem for index, problem in problems.items() if index % parts == part}
    table = PowerProblems(pair, mine, source.tokens, ways)
    table.measure()
    return dict(table.found)


def rows_of(found: dict[str, list[Solved]]) -> list[PowerRow]:
    rows = []
    for name, of in found.items():
        count, solved = len(of), sum(one.share for one in of) / len(of)
        error = (sum((one.share - solved) ** 2 for one in of) / count**2) ** 0.5
        bests = [one.best for one in of if one.best is not None]
        positions, passes = (sum(getattr(one, field) for one in of) / count for field in ("positions", "passes"))
        rows.append(PowerRow(name, solved, error, positions, passes, sum(bests) / count if bests else None))
    return rows


def text_of(rows: Sequence[PowerRow]) -> str:
    """Return the table in Markdown."""
    lines = ["| | solved, % | likeliest particle, % | positions | passes |", "| :--- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        best = "" if row.best_solved is None else f"{100 * row.best_solved:.0f}"
        solved = f"{100 * row.solved:.0f} ± {100 * row.error:.0f}"
        lines.append(f"| {row.name} | {solved} | {best} | {row.positions:.0f} | {row.passes:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="directory of the target; default: the demo pair's")
    parser.add_argument("--draft", type=Path, help="directory of the draft; default: the demo pair's")
    parser.add_argument(
        "--problems-file", type=Path, help="file of problems with answers, JSON lines as for `smcserve eval --problems`"
    )
    parser.add_argument(
        "--tokens", type=int, default=MAX_ANSWER, help="maximum tokens of an answer; default: %(default)s"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--temperature", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--problems", type=int, default=32, help="number of problems; default: %(default)s")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that share the problems; default: %(default)s"
    )
    parser.add_argument("--particles", type=int, nargs="+", default=PARTICLES, help="values of N; default: %(default)s")
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS, help="values of alpha; default: %(default)s")
    parser.add_argument("--populations", nargs="+", default=POPULATIONS, choices=POPULATIONS)
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    if (given.target is None) != (given.problems_file is None):
        parser.error("--target and --problems-file need each other: only the demo pair has problems of its own")
    source = ProblemSource(
        pair_directories(given.target, given.draft), given.problems_file, given.problems, given.tokens
    )
    parts = given.processes
    found: dict[str, list[Solved]] = defaultdict(list)
    compared = (tuple(given.particles), tuple(given.alphas), tuple(given.populations))
    ways = Ways(given.temperature, given.seed, *compared)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parts, context) as pool:
        measured = [pool.submit(measure_part, part, parts, source, ways, given.device) for part in range(parts)]
        for one in measured:
            for name, solved in one.result().items():
                found[name] += solved
    rows = rows_of(found)
    count = len(next(iter(found.values())))
    print(f"temperature {given.temperature:g}, {count} problems\n\n{text_of(rows)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
