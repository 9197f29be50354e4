"""Compares the losses of `smcserve distill`: trains one draft with each loss, from the same layers, on the same
conversations, in the same time. Other drafts can be measured, too.

    python -m benchmarks.losses --out DIR [--target DIR] [--minutes 5] [--device cuda] [--beside DRAFT ...]

The target first writes conversations, for `--writing-minutes`. Then a draft learns from them with every loss, each for
`--minutes`, with the same batches in the same order. On a CPU, minutes are those of the process's CPU time, so that
other processes on the machine do not favour a loss. If the directory already holds conversations or drafts, they are
used. At the end a Markdown table is printed, and one line of JSON. They show for every draft:

- on held-out conversations: overlap, KL and log(1 + chi-square) at temperature 1;
- exact decoding: tokens a round in lockstep with N = 8 and N = 1, and in look-ahead with N = 8, F = 4;
- SMC in lockstep with N = 8, for every `--population`: log-probability of an answer's token under the target, minus
  that of the target's own answers; log Z-hat a token; collapsed rounds; and the distance of short answers from the
  target's distribution.

This distance is the KL divergence of the observed short answers from the target's distribution, in nats, averaged over
prompts. A first sample of the target's own answers defines classes of answers: each answer that is expected at least
`LEAST` times is a class, and all others together are another one. The probability of an answer is the target's, the
product over its tokens. KL of a finite sample is above 0 by chance: a second sample of the target shows by how much,
and this is subtracted. The total variation, half the sum of absolute differences, is corrected in the same way.
Standard errors are those of the differences over prompts.

Prompts are the demo problems of the test split for the demo target, otherwise `benchmarks/chat_prompts.jsonl`."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.load import problem_prompts
from services.cli.distill import SIZES, demo_prompts
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.demo.problems import derived_seed
from smc.distill.conversations import ConversationStore, TalkSettings
from smc.distill.measure import HeldOut
from smc.distill.run import SAMPLE, DistillConfig, make_writer
from smc.distill.student import StudentSpec, choose_layers, make_student, save_student
from smc.distill.trainer import LOSSES, Ranks, Trainer, TrainingSettings
from smc.local_engine import ModelPair, fitted_engine
from smc.model.decoder import Decoder
from smc.model.loader import load_model
from smc.model.tokenizer import Tokenizer
from smc.terminal import err

PROMPTS = Path(__file__).with_name("chat_prompts.jsonl")
N, BLOCK = 8, 5
LEAST = 5.0
"""Expected number of occurrences from which an answer is a class of its own."""
SMALLEST = 1e-6
"""Lower bound of the probability of all other answers together: the difference from 1 has errors of this size."""
AT_ONCE = {"cpu": 16, "cuda": 64}
"""Device -> number of concurrent requests."""
CLOCKS = {"cpu": time.process_time, "cuda": time.monotonic}
LOCKSTEP = EngineConfig(form="lockstep", block=BLOCK, drafting="always")
AHEAD = EngineConfig(form="lookahead", block=BLOCK, branches=4, drafting="always")


@dataclass(frozen=True)
class Population:
    """Results of SMC with one population."""

    logp: float
    """Mean log-probability of a token under the target, minus that of the target's own answers."""
    log_z: float
    """log Z-hat a token."""
    collapses: int
    """Number of collapsed rounds, over all answers."""
    kl: float
    """KL divergence of short answers from the target's distribution, minus that of a sample of the target's own."""
    kl_error: float
    """Standard error of `kl`."""
    tv: float
    """Total variation, corrected like `kl`."""
    tv_error: float


@dataclass(frozen=True)
class DraftQuality:
    """Results of one draft."""

    name: str
    steps: int | None
    """Number of training steps; None: not trained in this run."""
    overlap: float
    kl: float
    chi2: float
    lockstep_8: float
    """Tokens a round of exact decoding, here and in the next two."""
    lockstep_1: float
    ahead_8: float
    populations: dict[str, Population]


@dataclass(frozen=True)
class Terms:
    """Settings of the measurement that all drafts share."""

    temperature: float
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    """Maximum number of tokens of a long answer."""
    short_prompts: int
    """Number of prompts that get short answers."""
    short_tokens: int
    samples: int
    """Number of short answers to a prompt."""
    populations: tuple[str, ...]
    device: str


class Comparison:
    """Measures drafts of one target on the same prompts."""

    def __init__(self, target: Decoder, tokenizer: Tokenizer, terms: Terms) -> None:
        self._target, self._tokenizer, self._terms = target, tokenizer, terms
        plain = ModelPair(target, target, tokenizer, target.config.max_context)
        own = self._long(plain, LOCKSTEP, method="target", logprobs=True)
        self._logp = mean_logp(own)
        classes, noise = (self._short(plain, sample, method="target") for sample in (0, 1))
        self._classes = [classes_of(answers) for answers in classes]
        self.noise = [distances(answers, known) for answers, known in zip(noise, self._classes)]
        """KL and total variation of the second sample of the target's own answers, for each prompt."""

    def measure(self, draft: Decoder) -> tuple[dict[str, float], dict[str, Population]]:
        """Return the tokens a round of exact decoding, by fields of `DraftQuality`, and the results of SMC, by
        population."""
        pair = ModelPair(self._target, draft, self._tokenizer, min(m.config.max_context for m in (self._target, draft)))
        rounds = {
            name: tokens_a_round(self._long(pair, config, method="exact", particles=rows))
            for name, config, rows in (
                ("lockstep_8", LOCKSTEP, N),
                ("lockstep_1", LOCKSTEP, 1),
                ("ahead_8", AHEAD, N),
            )
        }
        return rounds, {population: self._population(pair, population) for population in self._terms.populations}

    def _population(self, pair: ModelPair, population: str) -> Population:
        given = {"method": "smc", "particles": N, "population": population}
        answers = self._long(pair, LOCKSTEP, logprobs=True, **given)
        short = self._short(pair, 2, **given)
        apart = [
            (kl - noise_kl, tv - noise_tv)
            for (kl, tv), (noise_kl, noise_tv) in zip(map(distances, short, self._classes), self.noise, strict=True)
        ]
        (kl, kl_error), (tv, tv_error) = (with_error(values) for values in zip(*apart))
        return Population(
            logp=mean_logp(answers) - self._logp,
            log_z=sum(each.statistics.log_z for each in answers) / sum(len(each.tokens) for each in answers),
            collapses=sum(each.statistics.collapses for each in answers),
            kl=kl,
            kl_error=kl_error,
            tv=tv,
            tv_error=tv_error,
        )

    def _long(self, pair: ModelPair, config: EngineConfig, **given) -> list[Answer]:
        terms = self._terms
        params = SamplingParams(temperature=terms.temperature, max_tokens=terms.max_tokens, **given)
        return self._answers(pair, config, terms.prompts, params, 0)

    def _short(self, pair: ModelPair, sample: int, **given) -> list[list[Answer]]:
        """Return short answers, by prompt. Samples with different numbers `sample` are independent."""
        terms = self._terms
        prompts = [prompt for prompt in terms.prompts[: terms.short_prompts] for _ in range(terms.samples)]
        params = SamplingParams(temperature=terms.temperature, max_tokens=terms.short_tokens, logprobs=True, **given)
        found = self._answers(pair, LOCKSTEP, prompts, params, 1 + sample)
        return [found[i : i + terms.samples] for i in range(0, len(found), terms.samples)]

    def _answers(
        self,
        pair: ModelPair,
        config: EngineConfig,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        seed: int,
    ) -> list[Answer]:
        requests = [
            Request(str(i), prompt, replace(params, seed=derived_seed(seed, i))) for i, prompt in enumerate(prompts)
        ]
        engine = fitted_engine(pair, config, requests, AT_ONCE[self._terms.device])
        found = {output.request_id: output.answer for output in engine.run(requests) if output.answer is not None}
        return [found[request.request_id] for request in requests]


def tokens_a_round(answers: Sequence[Answer]) -> float:
    """Return the mean tokens of a round. The first token of an answer does not count: the pass over the prompt yields
    it."""
    return sum(len(each.tokens) - 1 for each in answers) / sum(each.statistics.rounds for each in answers)


def mean_logp(answers: Sequence[Answer]) -> float:
    return sum(sum(each.logprobs or ()) for each in answers) / sum(len(each.tokens) for each in answers)


def classes_of(answers: Sequence[Answer]) -> dict[tuple[int, ...] | None, float]:
    """Return the probabilities of the answers that are classes of their own, and under None that of all others."""
    probability = {each.tokens: math.exp(sum(each.logprobs or ())) for each in answers}
    found: dict[tuple[int, ...] | None, float] = {
        tokens: p for tokens, p in probability.items() if p * len(answers) >= LEAST
    }
    return {**found, None: max(SMALLEST, 1 - sum(found.values()))}


def distances(answers: Sequence[Answer], classes: dict[tuple[int, ...] | None, float]) -> tuple[float, float]:
    """Return the distances of observed answers from the target's distribution over classes: KL divergence in nats, and
    total variation."""
    counts = Counter(each.tokens if each.tokens in classes else None for each in answers)
    shares = {tokens: counts[tokens] / len(answers) for tokens in classes}
    kl = sum(share * math.log(share / classes[tokens]) for tokens, share in shares.items() if share)
    return kl, sum(abs(share - classes[tokens]) for tokens, share in shares.items()) / 2


def with_error(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


class Training:
    """Trains drafts that differ only in their loss."""

    def __init__(self, config: DistillConfig, minutes: float) -> None:
        """`config`: conversations, student and settings; `minutes`: training time of each draft."""
        self._config, self._seconds, self._now = config, 60 * minutes, CLOCKS[config.device]
        on_gpu = config.device == "cuda"
        self.target = load_model(config.target, dtype=torch.bfloat16 if on_gpu else torch.float32, device=config.device)
        self.tokenizer = Tokenizer.load(config.target)
        self.vocab = min(self.tokenizer.size, self.target.config.vocab_size)
        self.store = ConversationStore(config.out / "conversations", config.talk.width)

    def write(self, minutes: float) -> None:
        """Write conversations, unless there are some already."""
        if len(self.store):
            return
        writer = make_writer(self._config, self.target, self.tokenizer, self.store, Ranks())
        stop, least = self._now() + 60 * minutes, self._config.held_out + SAMPLE
        writer.write(lambda: self._now() >= stop and len(self.store) >= least)

    def train(self, loss: str) -> int:
        """Train a draft and write its directory; return the number of steps."""
        config, first = self._config, self._config.held_out
        sample = self.store.rows(range(SAMPLE))
        layers = choose_layers(self.target, config.student, sample, self.vocab)
        student = make_student(self.target, config.target, config.student, layers)
        settings = TrainingSettings(loss=loss, batch=config.training.batch)
        trainer = Trainer(self.target, student.model, self.vocab, config.talk.width, settings, Ranks())
        began, step = self._now(), 0
        while (progress := (self._now() - began) / self._seconds) < 1:
            generator = np.random.default_rng([config.talk.seed, step])
            index = generator.integers(first, len(self.store), settings.batch).tolist()
            trainer.step(self.store.rows(index), step, progress)
            step += 1
        save_student(student, config.target, config.out / loss)
        return step


def prompts_of(directory: Path, tokenizer: Tokenizer, count: int) -> tuple[tuple[int, ...], ...]:
    """Return token ids of prompts that no draft was trained on."""
    if directory.resolve() == demo.TARGET.resolve():
        prompts = problem_prompts(tokenizer, count, seed=0)
    else:
        lines = PROMPTS.read_text().splitlines()[:count]
        prompts = [tokenizer.chat(json.loads(line)["messages"]) for line in lines]
    return tuple(map(tuple, prompts))


def table(found: Sequence[DraftQuality]) -> str:
    """Return a table in Markdown with a row for every draft and population."""
    of_drafts = "draft | steps | overlap | KL | log(1 + chi2) | exact N = 8 | N = 1 | ahead N = 8"
    of_populations = "SMC N = 8 | log p | log Z | collapses | short answers: KL | TV"
    lines = [f"| {of_drafts} | {of_populations} |", f"| :-- | {'--: | ' * 7}:-- | {'--: | ' * 5}".rstrip()]
    for each in found:
        of_draft = [
            each.name,
            "" if each.steps is None else f"{each.steps:,}",
            *(f"{value:.3f}" for value in (each.overlap, each.kl, each.chi2)),
            *(f"{value:.2f}" for value in (each.lockstep_8, each.lockstep_1, each.ahead_8)),
        ]
        for name, of in each.populations.items():
            apart = (f"{of.kl:.3f} +- {of.kl_error:.3f}", f"{of.tv:.3f} +- {of.tv_error:.3f}")
            values = (f"{of.logp:+.3f}", f"{of.log_z:+.3f}", f"{of.collapses}", *apart)
            lines.append(f"| {' | '.join((*of_draft, name, *values))} |")
            of_draft = [""] * len(of_draft)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", type=Path, default=demo.TARGET, help="directory of the target; default: the demo target"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory that conversations and drafts are written to, or taken from"
    )
    parser.add_argument(
        "--loss", action="append", choices=LOSSES, help="loss to compare; may be repeated; default: all"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="minutes of training each draft; default: %(default)s"
    )
    parser.add_argument("--writing-minutes", type=float, help="minutes of writing conversations; default: as --minutes")
    parser.add_argument(
        "--beside",
        type=Path,
        action="append",
        default=[],
        help="directory of another draft to measure; may be repeated",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of answers; default: %(default)s")
    parser.add_argument(
        "--prompts", type=int, default=24, help="number of prompts for long answers; default: %(default)s"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=96, help="maximum tokens of a long answer; default: %(default)s"
    )
    parser.add_argument(
        "--short-prompts", type=int, default=12, help="number of prompts for short answers; default: %(default)s"
    )
    parser.add_argument(
        "--short-tokens", type=int, default=12, help="maximum tokens of a short answer; default: %(default)s"
    )
    parser.add_argument(
        "--samples", type=int, default=200, help="number of short answers to each prompt; default: %(default)s"
    )
    parser.add_argument(
        "--population", action="append", choices=POPULATIONS, help="population of SMC; may be repeated; default: all"
    )
    parser.add_argument("--device", choices=tuple(AT_ONCE), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    given = parser.parse_args()
    size, is_demo = SIZES[given.device], given.target.resolve() == demo.TARGET.resolve()
    tokenizer = Tokenizer.load(given.target)
    config = DistillConfig(
        target=given.target,
        out=given.out,
        minutes=given.minutes,
        student=StudentSpec(),
        talk=TalkSettings(),
        training=TrainingSettings(batch=size.batch),
        prompts=demo_prompts(tokenizer) if is_demo else (),
        mixed=not is_demo,
        device=given.device,
        slots=size.slots,
        held_out=size.held_out,
    )
    training = Training(config, given.minutes)
    training.write(given.writing_minutes or given.minutes)
    err.print(f"{len(training.store):,} conversations, {training.store.tokens:,} answer tokens")
    drafts: list[tuple[str, Path, int | None]] = [(each.name, each, None) for each in given.beside]
    for loss in given.loss or LOSSES:
        made = (given.out / loss / "config.json").exists()
        drafts.append((loss, given.out / loss, None if made else training.train(loss)))
        err.print(f"{loss}: trained")
    terms = Terms(
        given.temperature,
        prompts_of(given.target, tokenizer, given.prompts),
        given.max_tokens,
        given.short_prompts,
        given.short_tokens,
        given.samples,
        tuple(given.population or POPULATIONS),
        given.device,
    )
    comparison = Comparison(training.target, tokenizer, terms)
    held_out = HeldOut(training.store.rows(range(config.held_out)), (1.0,), config.contexts, config.talk.seed)
    found = []
    for name, directory, steps in drafts:
        weight = training.target.embed.weight
        draft = load_model(directory, dtype=weight.dtype, device=weight.device, beside=training.target)
        values = held_out.measure(
            training.target, draft, training.vocab, None, seconds=0.0, step=0, trained_tokens=0, written_tokens=0
        )
        rounds, populations = comparison.measure(draft)
        found.append(
            DraftQuality(name, steps, values.overlap, values.kl, values.chi2, **rounds, populations=populations)
        )
        err.print(table(found[-1:]), soft_wrap=True)
    print(table(found))
    kl, tv = map(statistics.mean, zip(*comparison.noise))
    print(f"Short answers of the target's own: KL {kl:.3f}, TV {tv:.3f}, which are subtracted.")
    record = {"noise": comparison.noise, "drafts": [asdict(each) for each in found]}
    if given.json:
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
