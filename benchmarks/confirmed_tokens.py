"""How often exact decoding misses, by rows of its trees and rows ahead, on the shipped pair: `python -m
benchmarks.confirmed_tokens`.

What `smc.scheduler.acceptance.WIDTH_GAIN` and docs/speculation.md are drawn from. For every temperature and N: the share of
compared tokens that the target drew otherwise, and the exponent by which it falls with N; tokens a round with F = 4,
and with F = 1. Takes ten minutes."""

from __future__ import annotations

import argparse
import math

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import derived_seed, generate
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.stats import SpecStats

PROBLEM_SEED = 5
PARTICLES = (1, 2, 4, 8)
BESIDE = 8


def measured(pair: ModelPair, problems: int, temperature: float, particles: int, branches: int) -> SpecStats:
    """Of look-ahead with blocks of 5."""
    engine = local_engine(pair, EngineConfig(block=5, branches=branches, max_slots=BESIDE * particles))
    law = {"method": "exact", "particles": particles, "temperature": temperature, "max_tokens": MAX_ANSWER}
    asked = [
        Request(
            str(i),
            tuple(pair.tokenizer.chat([{"role": "user", "content": problem.question}])),
            SamplingParams(seed=derived_seed(1, i), **law),
        )
        for i, problem in enumerate(generate(PROBLEM_SEED, problems, "test"))
    ]
    for _ in engine.run(asked):
        pass
    return engine.take_stats().spec["walk"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated; default: 1, 1.5, 2")
    given = parser.parse_args()
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    for temperature in given.temperature or (1.0, 1.5, 2.0):
        missed = {}
        for particles in PARTICLES:
            wide, lean = (measured(pair, given.problems, temperature, particles, branches) for branches in (4, 1))
            missed[particles] = wide.misses / (wide.accepted_tokens + wide.misses)
            print(
                f"temperature {temperature:g}, N={particles}: {100 * missed[particles]:.2f}% of the tokens missed; tokens a round "
                f"{wide.tokens_a_round:.2f} with F=4, {lean.tokens_a_round:.2f} with F=1",
                flush=True,
            )
        gain = math.log(missed[1] / missed[PARTICLES[-1]]) / math.log(PARTICLES[-1])
        print(f"temperature {temperature:g}: N rows miss N^{gain:.2f} times less often", flush=True)


if __name__ == "__main__":
    main()
