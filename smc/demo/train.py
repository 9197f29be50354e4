"""Trains the two demo models and writes them to a directory: `python -m smc.demo.train --out smc/demo/weights`.

Knows nothing about serving and speculative decoding. The target is trained to the end. The draft is trained until its
own accuracy, with plain sampling, reaches a goal, because a draft that is always or never right demonstrates nothing.

Local axes: Z problems. T = R * L."""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from smc.demo import MAX_ANSWER, WEIGHTS, corpus
from smc.demo.corpus import EOS, GROUPS, IGNORED, Corpus, render
from smc.demo.problems import Accuracy, Problem, generate, grade
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, RopeTable, hidden_states
from smc.model.files import write_json
from smc.model.loader import initial_model, save_model
from smc.training import Optimizer, OptimizerSettings

StopCondition = Callable[[int, Decoder], bool]
"""(step, model) -> whether to stop. Called after every step."""
TARGET_SEED, DRAFT_SEED = 1, 2
SNAPSHOT_SEED, FINAL_SEED = 3, 4
"""Seeds of the problems that select the draft and of those that both models are measured on. Both sets belong to the
test split."""
TARGET_CONFIG = ModelConfig(
    family="llama",
    vocab_size=corpus.VOCAB_SIZE,
    hidden_size=256,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=640,
    max_context=512,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    tied_embeddings=True,
)
DRAFT_CONFIG = replace(TARGET_CONFIG, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=256)
OPTIMIZER = OptimizerSettings(warmup=200, weight_decay=0.1)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one model's training."""

    config: ModelConfig
    seed: int
    """Seed of the initial weights and of the order of the problems."""
    batch: int
    """Problems per step."""
    steps: int | None
    """Number of steps; None if `minutes` is given."""
    minutes: float | None
    """Duration of the run; None if `steps` is given."""
    optimizer: OptimizerSettings = OPTIMIZER

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"steps={self.steps} and minutes={self.minutes}; exactly one of them must be given")
        if self.batch < 1 or self.batch % GROUPS:
            raise ValueError(f"batch={self.batch} is not a positive multiple of {GROUPS}, the number of length groups")

    def progress(self, step: int, seconds: float) -> float:
        """Completed fraction of the run."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)


def answer_loss(model: Decoder, rope_LD: Tensor, tokens_RL: Tensor, labels_RL: Tensor) -> Tensor:
    """Return the sum of the negative log-likelihood over all answer tokens."""
    logits_TV = model.logits(hidden_states(model, rope_LD, tokens_RL).flatten(0, 1))
    return F.cross_entropy(logits_TV, labels_RL.flatten(), ignore_index=IGNORED, reduction="sum")


class DemoTrainer:
    """Trains one model."""

    def __init__(self, recipe: Recipe, data: Corpus, device: str, compile_loss: bool) -> None:
        self.recipe, self.data, self.device = recipe, data, device
        self.model = initial_model(recipe.config, recipe.seed).to(device)
        self.rope_LD = RopeTable(recipe.config, recipe.config.max_context, device).table
        self.loss = torch.compile(answer_loss, dynamic=False) if compile_loss else answer_loss
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.optimizer = Optimizer(self.model.parameters(), recipe.optimizer)

    def run(self, stop: StopCondition | None = None) -> int:
        """Train to the end, or until `stop` returns True. Returns the number of steps done."""
        self.gradients()  # compiles before the clock starts, because the clock sets the learning rate
        began = last_printed = time.monotonic()
        step, progress = 0, 0.0
        while progress < 1:
            loss = self.gradients()
            self.optimizer.step(step, progress)
            step += 1
            if step % 100 == 0 or time.monotonic() - last_printed > 30:
                _print_progress(step, loss.item(), progress, time.monotonic() - began)
                last_printed = time.monotonic()
            if stop is not None and stop(step, self.model):
                break
            progress = self.recipe.progress(step, time.monotonic() - began)
        return step

    def gradients(self) -> Tensor:
        """Compute the gradients of a new batch. Returns its loss per token."""
        self.optimizer.clear()
        parts = list(self.data.sample(self.recipe.batch, self.generator))
        answer_tokens = sum((part.labels_RL != IGNORED).sum() for part in parts)
        total = torch.zeros((), device=self.device)
        for part in parts:
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device != "cpu"):
                loss = self.loss(self.model, self.rope_LD, part.tokens_RL, part.labels_RL) / answer_tokens
            loss.backward()
            total += loss.detach()
        return total


def _print_progress(step: int, loss: float, progress: float, seconds: float) -> None:
    eta = seconds / progress - seconds if progress else float("nan")
    print(
        f"step {step:6d}  loss {loss:.4f}  {step / seconds:6.2f} steps/s  {progress:4.0%} done, {eta:.0f} s left",
        flush=True,
    )


@torch.inference_mode()
def sample_answers(model: Decoder, rope_LD: Tensor, prompts: list[list[int]], eos: int, seed: int) -> list[list[int]]:
    """Continue every prompt until `eos` or MAX_ANSWER tokens. Returns the new tokens without `eos`."""
    device = rope_LD.device
    generator = torch.Generator(device).manual_seed(seed)
    rows_R = torch.arange(len(prompts), device=device)
    end_R = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(end_R.max())
    tokens_RL = torch.full((len(prompts), width + MAX_ANSWER), eos, device=device)
    for row, prompt in enumerate(prompts):
        tokens_RL[row, : len(prompt)] = torch.tensor(prompt, device=device)
    done_R = torch.zeros_like(end_R, dtype=torch.bool)
    for new in range(MAX_ANSWER):
        # Rows are padded on the right, so causal attention never reads the padding.
        hidden_RLE = hidden_states(model, rope_LD, tokens_RL[:, : width + new])
        probability_RV = model.logits(hidden_RLE[rows_R, end_R + new - 1]).softmax(-1)
        next_R = torch.multinomial(probability_RV, 1, generator=generator)[:, 0].masked_fill(done_R, eos)
        tokens_RL[rows_R, end_R + new] = next_R
        done_R |= next_R == eos
        if done_R.all():
            break
    answers = [row[len(prompt) : len(prompt) + MAX_ANSWER] for row, prompt in zip(tokens_RL.tolist(), prompts)]
    return [answer[: answer.index(eos)] if eos in answer else answer for answer in answers]


class Evaluator:
    """Measures the accuracy of models as they are served, with weights rounded to bfloat16."""

    def __init__(self, tokenizer: Tokenizer, device: str, count: int) -> None:
        self.tokenizer, self.device = tokenizer, device
        self.snapshot_problems = generate(SNAPSHOT_SEED, min(count, 512), "test")
        self.final_problems = generate(FINAL_SEED, count, "test")

    def quick(self, model: Decoder) -> Accuracy:
        return self._measure(model, self.snapshot_problems, SNAPSHOT_SEED)

    def final(self, model: Decoder) -> Accuracy:
        return self._measure(model, self.final_problems, FINAL_SEED)

    def _measure(self, model: Decoder, problems: list[Problem], seed: int) -> Accuracy:
        """Sample one answer to each problem at temperature 1, and grade it."""
        served = copy.deepcopy(model).bfloat16()
        if self.device == "cpu":
            served.float()  # CPUs compute faster in float32; the weights stay rounded
        rope_LD = RopeTable(model.config, model.config.max_context, self.device).table
        prompts = [self.tokenizer.encode(render(problem.question)).ids for problem in problems]
        eos = self.tokenizer.token_to_id(EOS)
        assert eos is not None
        answers = sample_answers(served, rope_LD, prompts, eos, seed)
        texts = (self.tokenizer.decode(answer) for answer in answers)
        return Accuracy(sum(grade(problem, text) for problem, text in zip(problems, texts)), len(problems))


def stop_at(goal: float, every: int, evaluator: Evaluator) -> StopCondition:
    """Return a condition that stops at the first snapshot with an accuracy of at least `goal`; there is a snapshot
    every `every` steps."""

    def should_stop(step: int, model: Decoder) -> bool:
        if step % every:
            return False
        accuracy = evaluator.quick(model)
        print(f"snapshot at step {step}: {accuracy}", flush=True)
        return accuracy.share >= goal

    return should_stop


def train_and_write(
    name: str,
    trainer: DemoTrainer,
    stop: StopCondition | None,
    evaluator: Evaluator,
    out: Path,
    settings: dict[str, object],
) -> None:
    """Train one model, write it to `out/name`, measure it, and add its record to `out/training.json`."""
    model = trainer.model
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{name}: {size:,} weights, {2 * size / 2**20:.2f} MiB in bfloat16", flush=True)
    began = time.monotonic()
    steps = trainer.run(stop)
    seconds = time.monotonic() - began
    save_model(model, out / name, dtype=torch.bfloat16)
    corpus.write(evaluator.tokenizer, out / name, model.config.max_context)
    accuracy = evaluator.final(model)
    print(f"{name}: solves {accuracy} after {steps} steps, {seconds:.0f} s", flush=True)
    record = {
        "weights": size,
        "steps_done": steps,
        "seconds": round(seconds, 1),
        "accuracy": {
            "share": round(accuracy.share, 4),
            "interval_95": [round(x, 4) for x in accuracy.interval],
            **asdict(accuracy),
        },
        "recipe": {key: value for key, value in asdict(trainer.recipe).items() if key != "config"},
        "corpus_problems": len(trainer.data),
        "device": trainer.device,
        "torch": torch.__version__,
        **settings,
    }
    _add_to_record(out / "training.json", name, record)


def _add_to_record(path: Path, name: str, record: dict[str, object]) -> None:
    """Add or replace one model's record. The other model's record is kept, since models can be trained separately."""
    records = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, records | {name: record})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m smc.demo.train", description="Train the demo models.")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="directory to write to (default: %(default)s)")
    parser.add_argument("--model", choices=("target", "draft", "both"), default="both")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--problems", type=int, default=1_000_000, help="training problems to generate (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that generate them")
    parser.add_argument("--batch", type=int, default=768, help=f"problems a step, a multiple of {corpus.GROUPS}")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=8_000, help="target steps (default: %(default)s)")
    length.add_argument("--minutes", type=float, help="train the target for this long instead of --steps")
    parser.add_argument("--draft-steps", type=int, default=6_000, help="draft steps at most (default: %(default)s)")
    parser.add_argument(
        "--draft-goal", type=float, default=0.22, help="accuracy the draft stops at (default: %(default)s)"
    )
    parser.add_argument(
        "--draft-every", type=int, default=50, help="steps between two draft snapshots (default: %(default)s)"
    )
    parser.add_argument("--eval-problems", type=int, default=2_000, help="test problems (default: %(default)s)")
    parser.add_argument(
        "--compile", action="store_true", help="compile the target's loss: a minute to start, then faster steps"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.device != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = True
    began = time.monotonic()
    tokenizer = corpus.learn_tokenizer()
    data = corpus.make_corpus(tokenizer, options.problems, options.workers).to(options.device)
    print(
        f"{len(data):,} problems in {time.monotonic() - began:.0f} s; tokens a problem: "
        f"prompt {data.prompt_Z.float().mean():.1f}, "
        f"answer {(data.length_Z - data.prompt_Z).float().mean():.1f}, longest row {max(data.widths)}",
        flush=True,
    )
    evaluator = Evaluator(tokenizer, options.device, options.eval_problems)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.model != "target":
        recipe = Recipe(DRAFT_CONFIG, DRAFT_SEED, options.batch, steps=options.draft_steps, minutes=None)
        stop = stop_at(options.draft_goal, options.draft_every, evaluator)
        # Not compiled: compiling two layers takes longer than it saves.
        trainer = DemoTrainer(recipe, data, options.device, compile_loss=False)
        train_and_write("draft", trainer, stop, evaluator, options.out, {"goal": options.draft_goal})
    if options.model != "draft":
        steps = options.steps if options.minutes is None else None
        recipe = Recipe(TARGET_CONFIG, TARGET_SEED, options.batch, steps=steps, minutes=options.minutes)
        train_and_write(
            "target", DemoTrainer(recipe, data, options.device, options.compile), None, evaluator, options.out, {}
        )
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
