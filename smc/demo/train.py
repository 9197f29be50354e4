"""Trains the two demo models and writes them to a directory: `python -m smc.demo.train --out smc/demo/weights`.

Knows nothing about serving. The target is trained to the end. The draft is trained until its own accuracy reaches a
goal, because a draft that is always or never right demonstrates nothing.

Axes: as in `smc.demo.dense`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from smc.demo import WEIGHTS, corpus, dense
from smc.demo import tokenizer as demo_tokenizer
from smc.demo.problems import Problem, generate
from smc.demo.trainer import DemoTrainer, Recipe, StopCondition
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, RopeTable
from smc.model.loader import save_model

TARGET_SEED, DRAFT_SEED = 1, 2
SNAPSHOT_SEED, FINAL_SEED = 3, 4
"""Seeds of the problems that select the draft and of those that both models are measured on. Both sets belong to the
test split."""

TARGET_CONFIG = ModelConfig(
    family="llama",
    vocab_size=demo_tokenizer.VOCAB_SIZE,
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
    qkv_bias=False,
    qk_norm=False,
)
DRAFT_CONFIG = replace(TARGET_CONFIG, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=256)


class Evaluator:
    """Measures the accuracy of models as they are served, with weights rounded to bfloat16."""

    def __init__(self, tokenizer: Tokenizer, device: str, count: int) -> None:
        self.tokenizer, self.device = tokenizer, device
        self.snapshot_problems = generate(SNAPSHOT_SEED, min(count, 512), "test")
        self.final_problems = generate(FINAL_SEED, count, "test")

    def quick(self, model: Decoder) -> dense.Accuracy:
        return self._measure(model, self.snapshot_problems, SNAPSHOT_SEED)

    def final(self, model: Decoder) -> dense.Accuracy:
        return self._measure(model, self.final_problems, FINAL_SEED)

    def _measure(self, model: Decoder, problems: list[Problem], seed: int) -> dense.Accuracy:
        served = copy.deepcopy(model).bfloat16()
        if self.device == "cpu":
            served.float()  # CPUs compute faster in float32; the weights stay rounded
        rope_SD = RopeTable(model.config, model.config.max_context, self.device).table
        return dense.measure(served, rope_SD, self.tokenizer, problems, seed)


def stop_at(goal: float, every: int, evaluator: Evaluator) -> StopCondition:
    """Stop at the first snapshot with an accuracy of at least `goal`; one snapshot every `every` steps."""

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
    demo_tokenizer.write(evaluator.tokenizer, out / name, model.config.max_context)
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
    path.write_text(json.dumps(records | {name: record}, indent=2) + "\n")


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
        f"prompt {data.prompt_N.float().mean():.1f}, "
        f"answer {(data.length_N - data.prompt_N).float().mean():.1f}, longest row {max(data.widths)}",
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
