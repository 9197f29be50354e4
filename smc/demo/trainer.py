"""Training loop of the demo models: hyperparameters and the trainer of one model.

Knows nothing about the source of the problems, the grading of models or their files.

Axes: B problems of one batch, S token positions, T = B * S, D head dimension, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from smc.demo.corpus import GROUPS, IGNORED, Corpus
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, RopeTable
from smc.model.dense import hidden_states
from smc.training import LearningRate, Optimizer


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
    peak_rate: float = 1e-3
    warmup: int = 200
    """Steps of linear learning-rate warm-up. The rate then follows a cosine to zero at the end of the run."""
    weight_decay: float = 0.1
    clip: float = 1.0
    """Maximum gradient norm."""

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

    @property
    def rate(self) -> LearningRate:
        return LearningRate(self.peak_rate, self.warmup)


StopCondition = Callable[[int, Decoder], bool]
"""(step, model) -> whether to stop. Called after every step."""


def initialise(config: ModelConfig, seed: int) -> Decoder:
    """A decoder with random weights. Matrices that write to the residual are scaled down by the depth of the model."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            depth = math.sqrt(2 * config.num_layers) if name.endswith(("o.weight", "down.weight")) else 1
            torch.nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]) / depth)
    return model


def answer_loss(model: Decoder, rope_SD: Tensor, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum of the negative log-likelihood over all answer tokens."""
    logits_TV = model.logits(hidden_states(model, rope_SD, tokens_BS).flatten(0, 1))
    return F.cross_entropy(logits_TV, labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")


class DemoTrainer:
    """Trains one model."""

    def __init__(self, recipe: Recipe, data: Corpus, device: str, compile_loss: bool) -> None:
        self.recipe, self.data, self.device = recipe, data, device
        self.model = initialise(recipe.config, recipe.seed).to(device)
        self.rope_SD = RopeTable(recipe.config, recipe.config.max_context, device).table
        self.loss = torch.compile(answer_loss, dynamic=False) if compile_loss else answer_loss
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.optimizer = Optimizer(self.model.parameters(), recipe.rate, recipe.weight_decay, recipe.clip)

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
        answer_tokens = sum((part.labels_BS != IGNORED).sum() for part in parts)
        total = torch.zeros((), device=self.device)
        for part in parts:
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device != "cpu"):
                loss = self.loss(self.model, self.rope_SD, part.tokens_BS, part.labels_BS) / answer_tokens
            loss.backward()
            total += loss.detach()
        return total


def _print_progress(step: int, loss: float, progress: float, seconds: float) -> None:
    eta = seconds / progress - seconds if progress else float("nan")
    print(
        f"step {step:6d}  loss {loss:.4f}  {step / seconds:6.2f} steps/s  {progress:4.0%} done, {eta:.0f} s left",
        flush=True,
    )
