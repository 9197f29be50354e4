"""Runs of distill and steps of its trainer, also for subprocesses: this module imports no more than they need.

Local axes: Z conversations."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from smc.distill.conversations import TalkSettings
from smc.distill.run import DistillConfig, distill
from smc.distill.student import StudentSpec, cut
from smc.distill.trainer import OPTIMIZER, Ranks, Trainer, TrainingSettings
from smc.model.decoder import Decoder
from tests.model.tiny import random_decoder, tiny_config

VOCAB = 40
AT_ONCE = replace(OPTIMIZER, warmup=1)
CONFIG = tiny_config(vocab_size=VOCAB, num_layers=3, rope_scaling=None)


def tiny_target() -> Decoder:
    target = random_decoder(CONFIG, seed=5)
    target.lm_head.weight.mul_(2)
    return target


def student(target: Decoder) -> Decoder:
    model = cut(target, (0, 2), copy=True).requires_grad_(True)
    model.embed.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model


def gradients(rank: int, count: int, folder: Path, rows_Z: np.ndarray) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, count, folder / f"rendezvous-{count}", on_gpu=False)
    target = tiny_target()
    trainer = Trainer(target, student(target), VOCAB, 24, TrainingSettings(batch=len(rows_Z)), ranks)
    own = rows_Z[rank::count]
    trainer.step(own, 0, 0.5)
    result = trainer.gradients(own, 0.5)
    if rank == 0:
        torch.save((trainer.optimizer.gradients, result.tokens), folder / f"gradients-{count}.pt")
    ranks.leave()


def config_of(folder: Path, out: str) -> DistillConfig:
    return DistillConfig(
        folder / "target",
        folder / out,
        tokens=1500,
        student=StudentSpec(layers=1),
        talk=TalkSettings(width=32, answer_tokens=24, turns=1),
        training=TrainingSettings(batch=4, optimizer=AT_ONCE),
        rounds=2,
        slots=16,
        held_out=4,
        contexts=8,
        prompts=((5, 6, 7), (8, 9)),
    )


def run_distill(config: DistillConfig) -> None:
    torch.set_num_threads(1)
    distill(config, lambda line: None)


def kill_after_a_round(config: DistillConfig) -> list[int]:
    """Start a run, kill it with signal 9 once there is a draft, and return the processes that it had started."""
    process = get_context("spawn").Process(target=run_distill, args=(config,))
    process.start()
    deadline = time.monotonic() + 200
    while not (config.out / "README.md").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid is not None
    started = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return started


def children(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
