"""Names the kernels of an engine's rounds by dry runs, compiles some of them for an H100 in other processes, and then
launches them, on a machine without a GPU. Prints as JSON what happened.

    python -m tests.kernels.compile_ahead"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.runtime.jit import JITFunction

from smc.api.engine_config import EngineConfig
from smc.calibration.compile_ahead import plans_of_all_kinds, submit_kernels
from smc.executor.dry_run import DryOps, dry_executor
from smc.kernels.compile_jobs import CompileJob, CompilePool, CompilerWatch, Job
from smc.kernels.launch import MULTIPROCESSORS
from smc.kernels.megakernel import FP8_WEIGHTS, MegakernelJob, constants
from smc.local_engine import ModelPair, local_engine
from smc.model.presets import NoText, preset
from tests.kernels.compile_rounds import NoDriver
from tests.model.tiny import random_decoder, tiny_config
from tests.scheduler.harness import Padding

VOCAB, CONTEXT = 300, 1024
COMPILED = ("_begin", "_pack", "_advance", "_add_norm", "megakernel")
"""Kernels of which the pool compiles all variants."""
LEFT = "_lay_out"
"""A kernel that is left to its first launch."""


class Kept(list[Job]):
    """In place of a pool: keeps the jobs."""

    submit = list.append


def engine() -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "head_dim": 64, "intermediate_size": 128, "max_context": CONTEXT}
    windows = tiny_config("gemma3_text", num_layers=6, window_layers=(0, 1, 3, 4), **sizes)
    target, draft = (random_decoder(shape, 1).bfloat16() for shape in (windows, tiny_config(num_layers=3, **sizes)))
    config = EngineConfig(block=3, max_slots=4, max_context=CONTEXT).on_device("cuda")
    return local_engine(ModelPair(target, draft, NoText(VOCAB), CONTEXT), config)


def told(jobs: Sequence[Job]) -> set[tuple[str, ...]]:
    """Return what tells the kernels apart."""
    return {
        (job.name, *map(str, (job.signature, job.constants, job.attributes, job.options)))
        if isinstance(job, CompileJob)
        else (job.name, str(vars(job)))
        for job in jobs
    }


def main() -> dict[str, Any]:
    triton.runtime.driver.set_active(NoDriver())
    # Without launches nothing is written, so memory must not be read uninitialised.
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    made = engine()
    workers = {role: runner.worker for role, runner in made.executor.runners.items()}
    stages = {role: worker.stages for role, worker in workers.items()}
    plans, kept = plans_of_all_kinds(made.config, CONTEXT, VOCAB, workers), Kept()
    said: dict[str, Any] = {"found": submit_kernels(plans, made.config, workers, kept, Padding), "missing": len(kept)}
    every = Kept()
    with patch("smc.executor.dry_run.telling_layers", lambda model: len(model.layers)):
        submit_kernels(plans, made.config, workers, every, Padding)
    said["layers"] = [len(worker.model.layers) for worker in workers.values()]
    said["differ"] = sorted(name for name, *_ in told(kept) ^ told(every))
    said["restored"] = all(worker.stages is stages[role] for role, worker in workers.items())
    shape = preset("qwen2.5-0.5b")
    kept.append(MegakernelJob(constants(shape, MULTIPROCESSORS, FP8_WEIGHTS) | {"TILES": 1}))
    chosen = [job for job in kept if job.name.rpartition(".")[2] in COMPILED]
    pool = CompilePool(2)
    for job in chosen:
        pool.submit(job)
    said["pool"] = vars(pool.wait())
    said["cached"] = sorted({job.name.rpartition(".")[2] for job in kept if job.is_cached()})
    said["cached jobs"] = [job.is_cached() for job in kept].count(True)
    said["chosen"] = len(chosen)

    # A pool whose processes end at once, as for lack of memory.
    broken = CompilePool(2, (sys.executable, "-c", "import sys; sys.stdin.buffer.read(9); sys.exit(3)"))
    for job in kept[:5]:
        broken.submit(job)
    said["broken"] = vars(broken.wait())
    absent = CompilePool(2, ("/nonexistent",))
    absent.submit(kept[0])
    said["absent"] = vars(absent.wait())

    # Launches compile what the pool has not compiled, and nothing else. They find the rest in the cache.
    run, watch = JITFunction.run, CompilerWatch()
    compiled: list[str] = []
    launched: set[str] = set()

    def listen(**told: Any) -> None:
        watch.compiled(**told)
        compiled.extend([] if told["cache_hit"] else [told["src"].name])

    triton.knobs.compilation.listener = listen

    def without_gpu(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        if self.__name__ in (*COMPILED, LEFT):
            launched.add(self.__name__)
            return run(self, *args, grid=grid, warmup=True, **options)
        return None

    JITFunction.run = without_gpu
    with dry_executor(made.config, workers, DryOps(kept.append, Padding)) as executor:
        executor.round(plans[0])
    watch.report()
    said["launched"], said["compiled at launch"] = sorted(launched), compiled
    return said


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = str(Path(cache))
        print(json.dumps(main()))
