"""Compares the policy for trees of exact decoding with fixed sizes, under a virtual clock: no GPU is needed.

    python -m benchmarks.policy --latency FILE [--target DIR --draft DIR] [--prompts-file FILE ..] [--traces FILE]
        [--temperature 0.7 ..] [--form lookahead lockstep] [--requests 1 4 16 64] [-n 1 4 8] [-k 3 5 8] [-f 1 4 8]
        [--grow] [--device cuda] [--without-inner-nodes] [--json FILE]

The engine replays answers of the target (`benchmarks.traces`), so what it accepts, and what the policy chooses, are
those of the pair. Time is that of a latency model (`smc.scheduler.speculation`), for instance one of
`benchmarks/latencies/`: the seconds of a run are the sum over its rounds of what each did, padding included. For every
kind of prompts and temperature the command prints the tokens a round of each fixed N, K and F; then for each number of
requests the fastest of these, and the policy with the largest N, K and F. Contexts count as empty.

With `--traces`, the answers and the draft's offers around them are read from a file if it exists, and written to it.
Without `--latency`, nothing else is done: with `--grow`, a GPU writes a file that a CPU replays without the draft."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.load import ClosedLoop, problem_prompts
from benchmarks.trace_writer import DraftReader, write_traces
from benchmarks.traces import TraceLibrary, load, replay_engine, replayed_request, save
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.executor.messages import Pending
from smc.executor.round_executor import RoundExecutor, RoundReports
from smc.local_engine import ModelPair
from smc.model.linear import DTYPES
from smc.round.plan import RoundPlan, SequenceHandoff
from smc.scheduler.engine import Engine
from smc.scheduler.planner import bucket
from smc.scheduler.speculation import LatencyModel
from smc.types import BOTH_MODELS, ModelRole

GROWN_WIDTH, GROWN_DEPTH = 8, 8
"""Nodes at a depth, and depths, that `--grow` lets the draft run after each node of an answer."""
TURNS = 2
"""Minimum number of answers for each request that runs at the same time."""


class TreeSize(NamedTuple):
    """N, K and F."""

    particles: int
    block: int
    branches: int


class VirtualClock:
    """Wraps the executor of an engine's rounds, and adds up the time that they would take."""

    pipelined = False

    def __init__(self, rounds: RoundExecutor, latency: LatencyModel, config: EngineConfig) -> None:
        self._rounds, self._latency, self._config = rounds, latency, config
        self._spans: list[tuple[float, float]] = []
        """Seconds of draft and target in each round of the present step."""
        self._before = 0.0
        """Seconds in this step for drafting again, while the target waits."""
        self.sizes = Counter[TreeSize]()
        """Rounds by rows of the batch, drafted tokens and branches."""

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self._rounds.join(role, group)

    def round(self, plan: RoundPlan[np.ndarray]) -> Pending[RoundReports]:
        kind, latency, block = plan.kind, self._latency, self._config.block
        pending = self._rounds.round(plan)
        if kind.roles == BOTH_MODELS:
            self._before += kind.redrafted * latency.redraft_overhead
            drafted = pending.result().draft if kind.redrafted else None
            again = None if drafted is None else drafted.redrafted
            if again is not None and (again.count_A > 0).any():
                self._before += kind.redrafted * latency.draft.at(kind.batch_size, 0)
            steps = kind.steps or block
            drafting = latency.draft.at(kind.batch_size, 0) + (steps - 1) * latency.draft.at(
                kind.batch_size * kind.branches, 0
            )
            self._spans.append((drafting, latency.target.at(kind.nodes or kind.batch_size * kind.queries, 0)))
            self.sizes[TreeSize(int(plan.arrays.size_G.sum()), steps, kind.branches)] += 1
        else:
            self._spans.append((0.0, block * latency.alone.at(kind.batch_size, 0)))
        return pending

    def advance(self) -> float:
        """Return the seconds of the rounds since the last call: those of a step of the engine. In look-ahead the models
        work at the same time."""
        if not self._spans:
            return 0.0
        (draft, target), before = map(sum, zip(*self._spans)), self._before
        self._spans.clear()
        self._before = 0.0
        longest = max(draft, target) if self._config.lookahead else draft + target
        return before + longest + self._latency.round_overhead


@dataclass(frozen=True)
class Replay:
    """A number of requests at a time, replayed."""

    tokens: int
    seconds: float
    rounds: int
    """Rounds of requests: one of several requests counts for each."""
    alone_rounds: int
    """Those in which nothing was drafted."""
    sizes: dict[TreeSize, int]

    @property
    def speed(self) -> float:
        """Tokens a second of all requests together."""
        return self.tokens / self.seconds

    @property
    def tokens_a_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def usual(self) -> str:
        """The most frequent size of rounds."""
        if not self.sizes:
            return "nothing drafted"
        (rows, block, branches), _ = max(self.sizes.items(), key=lambda item: item[1])
        return f"{rows} rows, K={block}, F={branches}"


def replay(
    library: TraceLibrary,
    latency: LatencyModel,
    config: EngineConfig,
    particles: int,
    requests: int,
    answers: int,
    learning: int = 0,
) -> Replay:
    """Replay traces in turn, `requests` at a time: `learning` answers from which the policy learns about the pair, and
    then `answers`. Only steps after the first ones count, and only while all requests run."""
    clocks: list[VirtualClock] = []

    def timed(rounds: RoundExecutor) -> VirtualClock:
        clocks.append(VirtualClock(rounds, latency, config))
        return clocks[0]

    engine = replay_engine(library, replace(config, max_slots=requests * particles), timed)
    engine.latency = latency if config.drafting == "adaptive" else None
    waiting = (replayed_request(library, n, particles) for n in range(learning + answers))
    loop = ClosedLoop(engine, waiting, requests)
    tokens, seconds, rounds, alone, ended = 0, 0.0, 0, 0, 0
    while loop.running:
        running, before = engine.num_running, _rounds_of(engine)
        outputs, spent = loop.step(), clocks[0].advance()
        done = [output.answer.statistics for output in outputs if output.answer is not None]
        if ended >= learning and loop.running == requests:
            # The first token of an answer comes from its prompt.
            tokens += sum(len(output.tokens) for output in outputs) - len(done)
            seconds += spent * running / requests
            after = np.array([[each.rounds, each.alone_rounds] for each in done]).reshape(-1, 2).sum(0)
            change = _rounds_of(engine) + after - before
            rounds, alone = rounds + int(change[0]), alone + int(change[1])
        ended += len(done)
    return Replay(tokens, seconds, rounds, alone, dict(clocks[0].sizes))


def _rounds_of(engine: Engine) -> np.ndarray:
    """Rounds of all running requests so far, and those without the draft [2]."""
    counters = [group.counters for group in engine.registry.admitted]
    return np.array([[each.rounds, each.alone_rounds] for each in counters]).reshape(-1, 2).sum(0)


def seconds_of_round(latency: LatencyModel, form: str, size: TreeSize, requests: int) -> float:
    """Return the seconds of a round of trees of one size."""
    rows, lookahead = bucket(requests * size.particles), form == "lookahead"
    drafting = latency.draft.at(rows, 0) + (size.block - 1) * latency.draft.at(rows * size.branches, 0)
    target = latency.target.at(rows * (size.block + (not lookahead)), 0)
    return (max(drafting, target) if lookahead else drafting + target) + latency.round_overhead


def config_of(form: str, size: TreeSize, drafting: str) -> EngineConfig:
    return EngineConfig(
        form=form, block=size.block, branches=size.branches if form == "lookahead" else 1, drafting=drafting
    )


@dataclass(frozen=True)
class Comparison:
    """The policy beside the fastest fixed size."""

    form: str
    requests: int
    best: TreeSize
    best_tokens: float
    """Tokens a round."""
    best_speed: float
    plain_speed: float
    chosen: Replay

    @property
    def ratio(self) -> float:
        """Speed of the policy's choice, as a multiple of that of the best fixed size or of plain decoding."""
        return self.chosen.speed / max(self.best_speed, self.plain_speed)

    def __str__(self) -> str:
        n, k, f = self.best
        rate, chosen = self.best_speed / self.best_tokens / self.requests, self.chosen
        return (
            f"{self.form:9} {self.requests:3} requests: fixed N={n:<2} K={k} F={f} {self.best_tokens:.2f} tokens a "
            f"round, {rate:4.0f} rounds/s, {self.best_speed:6,.0f} tokens/s | policy ({chosen.usual}) "
            f"{chosen.tokens_a_round:.2f}, {chosen.speed / chosen.tokens_a_round / self.requests:4.0f}, "
            f"{chosen.speed:6,.0f} | plain {self.plain_speed:6,.0f} | ratio {self.ratio:.3f}"
        )


def fixed_tokens(library: TraceLibrary, form: str, sizes: Iterable[TreeSize]) -> dict[TreeSize, float]:
    """Return the tokens a round of fixed sizes. They do not depend on what runs beside a request."""
    together = len(library.traces)
    return {size: replay_all(library, config_of(form, size, "always"), size.particles, together) for size in sizes}


def replay_all(library: TraceLibrary, config: EngineConfig, particles: int, together: int) -> float:
    """Replay every trace once, all at a time. Returns tokens a round."""
    engine = replay_engine(library, replace(config, max_slots=together * particles))
    for _ in engine.run([replayed_request(library, n, particles) for n in range(together)]):
        pass
    found = engine.take_stats().exact["walk"].tokens_a_round
    assert found is not None, "requests have rounds"
    return found


def compare(
    library: TraceLibrary,
    latency: LatencyModel,
    form: str,
    tokens: dict[TreeSize, float],
    requests: int,
    turns: int = 1,
) -> Comparison:
    """Compare the policy, which may choose up to the largest N, K and F, with fixed sizes of these tokens a round."""
    speeds = {size: requests * each / seconds_of_round(latency, form, size, requests) for size, each in tokens.items()}
    best, largest = max(speeds, key=speeds.__getitem__), TreeSize(*map(max, zip(*tokens)))
    config = config_of(form, largest, "adaptive")
    count = len(library.traces)
    chosen = replay(
        library,
        latency,
        config,
        largest.particles,
        requests,
        answers=max(turns * count, TURNS * requests if requests > 1 else 0),
        learning=max(count, requests),
    )
    plain = requests / (latency.alone.at(bucket(requests), 0) + latency.round_overhead / config.block)
    return Comparison(form, requests, best, tokens[best], speeds[best], plain, chosen)


def grid(
    form: str, particles: Sequence[int], blocks: Sequence[int], branches: Sequence[int], most: int
) -> Iterator[TreeSize]:
    """Yield all sizes with at most `most` rows ahead."""
    for n, k, f in itertools.product(particles, blocks, branches if form == "lookahead" else (1,)):
        if n * f <= most:
            yield TreeSize(n, k, f)


def prompts_of(pair: ModelPair, files: Sequence[Path], count: int) -> list[tuple[str, list[int]]]:
    """Return prompts with their kind: the first ones of each file, or demo problems."""
    if not files:
        return [("problem", prompt) for prompt in problem_prompts(pair.tokenizer, count)]
    found = []
    for file in files:
        lines = file.read_text().splitlines()[:count]
        kind = file.stem.removesuffix("_prompts")
        found += [(kind, list(pair.tokenizer.chat(json.loads(line)["messages"]))) for line in lines]
    return found


def record(given: argparse.Namespace) -> TraceLibrary:
    """Read or write the traces. Without a draft, unlikely nodes that a file lacks offer what nodes do on average; with
    one, only the answers are read."""
    if given.traces is not None and given.traces.exists():
        library = load(given.traces)
        if given.draft is None:
            library.offer_averages()
            return library
        traces = [replace(each, parents=[], places=[], tokens=[], offered={}, children={}) for each in library.traces]
        exponents, target = library.exponents, given.target or given.draft
        pair = ModelPair.load(target, given.draft, dtype=DTYPES[given.dtype], device=given.device)
    else:
        where, exponents = (given.target or demo.TARGET, given.draft or demo.DRAFT), {}
        pair = ModelPair.load(*where, dtype=DTYPES[given.dtype], device=given.device)
        prompts = prompts_of(pair, given.prompts_file, given.prompts)
        traces = [
            trace
            for temperature in given.temperature
            for trace in write_traces(pair, prompts, temperature, given.tokens)
        ]
    reader = DraftReader(pair.draft, pair.tokenizer.size, max(len(trace.text) for trace in traces), exponents)
    reader.read_answers(traces, range(len(traces)))
    library = TraceLibrary(traces, reader)
    if given.grow:
        library.grow(GROWN_WIDTH, GROWN_DEPTH)
    if given.traces is not None:
        save(library, given.traces)
    return library


def main(argv: Sequence[str] | None = None) -> list[Comparison]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=Path, help="latency model, as JSON; without it, traces are written only")
    parser.add_argument("--target", help="directory of the target; default: that of the shipped pair")
    parser.add_argument("--draft", help="directory of the draft; default: that of the shipped pair")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of both models; default: %(default)s")
    parser.add_argument("--device", default="cpu", help="where both models run; default: %(default)s")
    parser.add_argument("--traces", type=Path, help="file of traces")
    parser.add_argument("--grow", action="store_true", help="run likely nodes first, in batches: for large drafts")
    parser.add_argument("--prompts-file", type=Path, action="append", default=[], help="chats; default: problems")
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts of each file; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of an answer; default: %(default)s")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7], help="default: 0.7")
    parser.add_argument("--form", nargs="+", choices=("lookahead", "lockstep"), default=["lookahead", "lockstep"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64], help="default: 1 4 16 64")
    parser.add_argument("-n", "--particles", type=int, nargs="+", default=[1, 2, 4, 8], help="values of N")
    parser.add_argument("-k", "--block", type=int, nargs="+", default=[3, 4, 5, 6, 8], help="values of K")
    parser.add_argument("-f", "--branches", type=int, nargs="+", default=[1, 4, 8], help="values of F")
    parser.add_argument("--rows", type=int, default=32, help="largest N F of fixed sizes; default: %(default)s")
    parser.add_argument("--turns", type=int, default=2, help="replays of each trace; default: %(default)s")
    parser.add_argument("--without-inner-nodes", action="store_true", help="draft ahead after whole rows only")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    given = parser.parse_args(argv)
    if given.latency is None and given.traces is None:
        parser.error("--latency and --traces: allowed: to give at least one of them")
    latency = given.latency and LatencyModel.from_json(given.latency.read_text())
    library = record(given)
    nodes = sum(len(trace.offered) for trace in library.traces)
    print(f"{len(library.traces)} answers, {sum(len(trace.answer) for trace in library.traces)} tokens, {nodes} nodes")
    if latency is None:
        return []
    print(f"{given.latency}: {latency}")
    found: list[Comparison] = []
    records: list[dict[str, Any]] = []
    for subject, temperature in sorted({(trace.subject, trace.temperature) for trace in library.traces}):
        part = library.part(subject, temperature)
        part.inner_nodes = not given.without_inner_nodes
        print(f"\n{subject}, temperature {temperature:g}: {len(part.traces)} answers", flush=True)
        for form in given.form:
            sizes = grid(form, given.particles, given.block, given.branches, given.rows)
            tokens = fixed_tokens(part, form, sizes)
            for (n, k), of_size in itertools.groupby(tokens.items(), key=lambda item: item[0][:2]):
                line = "  ".join(f"F={size.branches}: {each:.2f}" for size, each in of_size)
                print(f"{form:9} N={n:<2} K={k}  tokens a round {line}", flush=True)
            for requests in given.requests:
                found.append(compare(part, latency, form, tokens, requests, given.turns))
                print(found[-1], flush=True)
            records.append(
                {"subject": subject, "temperature": temperature, "form": form,
                 "fixed": [[*size, each] for size, each in tokens.items()]}
            )  # fmt: skip
        if given.traces is not None and library.reader is not None:
            save(library, given.traces)
    if given.json is not None:
        policy = [asdict(replace(each, chosen=replace(each.chosen, sizes={}))) for each in found]
        given.json.write_text(json.dumps({"fixed": records, "policy": policy}))
    return found


if __name__ == "__main__":
    main()
