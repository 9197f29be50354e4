"""The losses of `smcserve distill` side by side: one draft for each, from the same layers, on the same conversations, in
the same time. Other drafts may be measured beside them.

    python -m benchmarks.losses --out DIR [--target DIR] [--minutes 5] [--device cuda] [--beside DRAFT ...]

The target first writes conversations, for `--writing-minutes`. Then a draft learns from them by every loss, each for
`--minutes`, with the same batches in the same order. On a CPU, minutes are those that the process has computed, so that
others on the machine do not favour a loss. If the directory holds conversations or drafts already, they are used. A
Markdown table of what every draft gives comes last, and one line of JSON:

- of conversations held out: overlap, KL and log(1 + chi-square) at temperature 1;
- exact decoding: tokens a round in lockstep with N = 8 and N = 1, and in look-ahead with N = 8, F = 4;
- SMC in lockstep with N = 8, of every `--population`: log-probability of an answer's token under the target, less that of
  the target's own answers; log Z-hat a token; collapsed rounds; and how far short answers are from the target's
  distribution.

The last is the KL divergence of the observed short answers from the target's distribution, in nats, averaged over
prompts. A first sample of the target's own answers decides on classes of answers: each answer that is expected at least
`LEAST` times is one, all others together are another. Their probabilities are the target's own, summed over their tokens.
KL of a finite sample is above 0 by chance: a second sample of the target shows by how much, and is subtracted. So it is
for the total variation, half the sum of absolute differences. Standard errors are those of the differences over prompts.

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

from services.cli.distill import CPU_BATCH, CPU_HELD_OUT, CPU_SLOTS, GPU_BATCH, GPU_HELD_OUT, GPU_SLOTS, demo_prompts
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.demo.problems import derived_seed, generate
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
"""Expected occurrences of an answer that is a class of its own."""
SMALLEST = 1e-6
"""Least probability of all other answers: what is left of 1 has errors of this size."""
AT_ONCE = {"cpu": 16, "cuda": 64}
"""Requests, by device."""
CLOCKS = {"cpu": time.process_time, "cuda": time.monotonic}
LOCKSTEP = EngineConfig(form="lockstep", block=BLOCK, drafting="always")
AHEAD = EngineConfig(form="lookahead", block=BLOCK, branches=4, drafting="always")


@dataclass(frozen=True)
class Population:
    """Answers of SMC, of one population."""

    logp: float
    """Log-probability of a token under the target, less that of the target's own answers."""
    log_z: float
    """log Z-hat a token."""
    collapses: int
    """Rounds, over all answers."""
    kl: float
    """Of short answers from the target's distribution, without what a sample of the target's own has by chance."""
    kl_error: float
    """Its standard error."""
    tv: float
    """Total variation, likewise."""
    tv_error: float


@dataclass(frozen=True)
class DraftQuality:
    """What a draft gives."""

    name: str
    steps: int | None
    """Of training; None: not trained here."""
    overlap: float
    kl: float
    chi2: float
    lockstep_8: float
    """Tokens a round of exact decoding."""
    lockstep_1: float
    ahead_8: float
    populations: dict[str, Population]


@dataclass(frozen=True)
class Terms:
    """What all drafts are measured by."""

    temperature: float
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    """Of a long answer."""
    short_prompts: int
    """Prompts that get short answers."""
    short_tokens: int
    samples: int
    """Short answers to a prompt."""
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
        """KL and total variation of each prompt's second sample of the target's own answers."""

    def measure(self, draft: Decoder) -> tuple[dict[str, float], dict[str, Population]]:
        """Tokens a round of exact decoding, by fields of `DraftQuality`, and SMC by population."""
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
        """By prompt. `sample`: samples of different numbers are independent."""
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
    """Without the first token of an answer, which comes with the prompt."""
    return sum(len(each.tokens) - 1 for each in answers) / sum(each.statistics.rounds for each in answers)


def mean_logp(answers: Sequence[Answer]) -> float:
    return sum(sum(each.logprobs or ()) for each in answers) / sum(len(each.tokens) for each in answers)


def classes_of(answers: Sequence[Answer]) -> dict[tuple[int, ...] | None, float]:
    """Probabilities of the answers that are classes of their own, and of all others together: None."""
    probability = {each.tokens: math.exp(sum(each.logprobs or ())) for each in answers}
    found: dict[tuple[int, ...] | None, float] = {
        tokens: p for tokens, p in probability.items() if p * len(answers) >= LEAST
    }
    return {**found, None: max(SMALLEST, 1 - sum(found.values()))}


def distances(answers: Sequence[Answer], classes: dict[tuple[int, ...] | None, float]) -> tuple[float, float]:
    """KL divergence of observed answers from the target's distribution over classes, nats, and total variation."""
    counts = Counter(each.tokens if each.tokens in classes else None for each in answers)
    shares = {tokens: counts[tokens] / len(answers) for tokens in classes}
    kl = sum(share * math.log(share / classes[tokens]) for tokens, share in shares.items() if share)
    return kl, sum(abs(share - classes[tokens]) for tokens, share in shares.items()) / 2


def with_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


class Training:
    """Trains drafts that differ in their loss alone."""

    def __init__(self, config: DistillConfig, minutes: float) -> None:
        """`config`: of the conversations, the student and the settings; `minutes`: of each draft."""
        self._config, self._seconds, self._now = config, 60 * minutes, CLOCKS[config.device]
        on_gpu = config.device == "cuda"
        self.target = load_model(config.target, dtype=torch.bfloat16 if on_gpu else torch.float32, device=config.device)
        self.tokenizer = Tokenizer.load(config.target)
        self.vocab = min(self.tokenizer.size, self.target.config.vocab_size)
        self.store = ConversationStore(config.out / "conversations", config.talk.width)

    def write(self, minutes: float) -> None:
        """Nothing if there are conversations."""
        if len(self.store):
            return
        writer = make_writer(self._config, self.target, self.tokenizer, self.store, Ranks())
        stop, least = self._now() + 60 * minutes, self._config.held_out + SAMPLE
        for _ in writer.write(lambda: self._now() >= stop and len(self.store) >= least):
            pass

    def train(self, loss: str) -> int:
        """Write the draft's directory, and return its steps."""
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
    """Token ids of prompts that no draft has learnt from."""
    if directory.resolve() == demo.TARGET.resolve():
        messages = [[{"role": "user", "content": each.question}] for each in generate(0, count, "test")]
    else:
        messages = [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines()[:count]]
    return tuple(tuple(tokenizer.chat(each)) for each in messages)


def table(found: Sequence[DraftQuality]) -> str:
    """Markdown, a row for every draft and population."""
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
    parser.add_argument("--target", type=Path, default=demo.TARGET, help="default: the demo target")
    parser.add_argument("--out", type=Path, required=True, help="directory of conversations and drafts")
    parser.add_argument("--loss", action="append", choices=LOSSES, help="may be repeated; default: all")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each draft; default: %(default)s")
    parser.add_argument("--writing-minutes", type=float, help="default: as --minutes")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="another draft; may be repeated")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=96, help="of a long answer; default: %(default)s")
    parser.add_argument("--short-prompts", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--short-tokens", type=int, default=12, help="of a short answer; default: %(default)s")
    parser.add_argument("--samples", type=int, default=200, help="short answers to a prompt; default: %(default)s")
    parser.add_argument("--population", action="append", choices=POPULATIONS, help="may be repeated; default: all")
    parser.add_argument("--device", choices=tuple(AT_ONCE), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    given = parser.parse_args()
    on_gpu, is_demo = given.device == "cuda", given.target.resolve() == demo.TARGET.resolve()
    tokenizer = Tokenizer.load(given.target)
    config = DistillConfig(
        target=given.target,
        out=given.out,
        minutes=given.minutes,
        student=StudentSpec(),
        talk=TalkSettings(),
        training=TrainingSettings(batch=GPU_BATCH if on_gpu else CPU_BATCH),
        prompts=demo_prompts(tokenizer) if is_demo else (),
        mixed=not is_demo,
        device=given.device,
        slots=GPU_SLOTS if on_gpu else CPU_SLOTS,
        held_out=GPU_HELD_OUT if on_gpu else CPU_HELD_OUT,
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
