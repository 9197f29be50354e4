"""Compiles the kernels of the warm-up before it runs, on all cores: one after another, as each is first launched, they
take minutes. Dry runs of rounds of all kinds name the kernels. What they miss is compiled at its first launch.

Local axes: P chains, U unconditional rows."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch

from smc.api.engine_config import EngineConfig
from smc.calibration.warm_up import (
    AS_IT_IS,
    DECODINGS,
    REPEATS,
    UsualSampling,
    padding_plan,
    queries_of,
    warm_up_plans,
)
from smc.distributions import NO_PROCESSORS, Processors
from smc.executor.logit_changes import WIDTHS
from smc.executor.worker import ModelWorker
from smc.round.plan import Contexts, RoundKind, RoundPlan, UnconditionalRows
from smc.scheduler.methods import RULES_OF_ROUNDS, fixed_steps
from smc.scheduler.planner import COMMON, DraftSize
from smc.types import OF_BOTH_MODELS, Decoding, ModelRole

if TYPE_CHECKING:
    from smc.executor.graph_runner import StageRunner
    from smc.kernels.compile_jobs import CompilePool, Job

logger = logging.getLogger(__name__)
SIZES = (1, 4, 8, 16, 64)
"""Sizes of dry runs of all kinds of rounds. Those of the default kind have every size."""
ALL_DECODINGS = (
    *DECODINGS,
    *(frozenset({one}) for one in Decoding if {one} not in DECODINGS),
    COMMON,
    OF_BOTH_MODELS,
)
CHANGES = ((0, False), (WIDTHS[0], False), (0, True))
"""How many tokens are biased, and whether rows are penalised."""
SPECIAL = ((False, False), (True, False), (False, True))
"""Whether rows are guided, and whether the target reports its own log-probabilities."""


def watch_compiler(device: torch.device) -> Callable[[], None]:
    """Count the kernels that this process itself compiles from now on. Returns a function that logs them, if there are
    any since its last call."""
    if device.type != "cuda":
        return lambda: None
    from smc.kernels.compile_jobs import CompilerWatch  # needs triton

    return CompilerWatch().report


def compile_ahead(
    config: EngineConfig, context: int, workers: Mapping[ModelRole, ModelWorker], usual: UsualSampling = AS_IT_IS
) -> None:
    """Compile what a warm-up of these workers' engine launches, on a GPU; nothing elsewhere. Call it before the
    workers take part in rounds. If anything goes wrong, kernels are compiled at their first launch. `usual`: as in
    `smc.calibration.warm_up.warm_up_plans`."""
    worker = next(iter(workers.values()))
    if worker.device.type != "cuda":
        return
    begin = time.monotonic()
    try:
        from smc.executor.dry_run import DryRunner
        from smc.kernels.compile_jobs import CompilePool, is_interpreted, possible_processes

        if is_interpreted():
            return
        pool = CompilePool(possible_processes())
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                plans = plans_of_all_kinds(config, context, worker.vocab_size, workers, usual)
                found = submit_kernels(plans, config, workers, pool, DryRunner)
            searched = time.monotonic() - begin
        finally:
            done = pool.wait()
            gc.collect()
            torch.cuda.empty_cache()
    except Exception as error:  # whatever it is, an engine can start without this
        logger.warning(
            "kernels are compiled at their first launch, since they could not be compiled before: %s: %s",
            type(error).__name__, error,
        )  # fmt: skip
        return
    if not done.kernels + done.failed:
        logger.info("%d kernels are in the cache (%.1f s)", found, searched)
        return
    logger.info(
        "compiled %d of %d kernels in %.1f s, of which dry runs took %.1f s, by %d processes: each kernel took %.2f s",
        done.kernels, found, time.monotonic() - begin, searched, done.processes, done.seconds / max(1, done.kernels),
    )  # fmt: skip
    if done.failed:
        logger.warning("%d kernels are left to their first launch: %s", done.failed, done.error)


def submit_kernels(
    plans: Sequence[RoundPlan[np.ndarray]],
    config: EngineConfig,
    workers: Mapping[ModelRole, ModelWorker],
    pool: CompilePool,
    runner: Callable[[torch.device], StageRunner],
) -> int:
    """Submit all kernels of these rounds that the cache lacks to the pool, and return how many it has and lacks. If the
    kernels of the first and the last round are in the cache, so are those of the other rounds: a warm-up has run.
    `runner`: makes the runner of stages, which must not depend on results."""
    from smc.executor.dry_run import DryOps, dry_executor
    from smc.kernels.compile_jobs import recorded

    found = missing = 0

    def need(job: Job) -> None:
        nonlocal found, missing
        found += 1
        if not job.is_cached():
            missing += 1
            pool.submit(job)

    with recorded(need), dry_executor(config, workers, DryOps(need, runner)) as executor:
        for number, plan in enumerate((plans[0], plans[-1], *plans[1:-1])):
            if number == 2 and not missing:
                break
            executor.round(plan)
    return found


def plans_of_all_kinds(
    config: EngineConfig,
    context: int,
    vocab: int,
    roles: Sequence[ModelRole] | Mapping[ModelRole, ModelWorker],
    usual: UsualSampling = AS_IT_IS,
) -> list[RoundPlan[np.ndarray]]:
    """Return plans of rounds in which these models take part: of those usual kinds that may have kernels of their own,
    then of rarer ones."""
    every = warm_up_plans(config, context, usual=usual)[::REPEATS]
    plans = [*(plan for plan in every if _is_dry_run(plan.kind, config)), *rare_plans(config, vocab)]
    return [plan for plan in plans if set(plan.kind.roles) & set(roles)]


def _is_dry_run(kind: RoundKind, config: EngineConfig) -> bool:
    """Return whether a dry run is worth its time: rounds of other sizes, with fewer tokens or branches or longer
    contexts, have the kernels of those that do run."""
    is_all = kind.steps == fixed_steps(config, kind.decodings)
    is_whole = is_all and kind.branches == RULES_OF_ROUNDS[kind.roles].shape(config).branches
    if kind.batch_size in SIZES:
        return is_whole or kind.contexts is Contexts.SHORT or kind.batch_size == 1
    is_default = kind.decodings == {Decoding.WALK} and not kind.nodes and kind.redrafted == config.redrafted
    return is_whole and is_default


def rare_plans(config: EngineConfig, vocab: int) -> Iterator[RoundPlan[np.ndarray]]:
    """Yield plans of rounds of a single row that have what requests of the kinds in
    `smc.calibration.warm_up.rare_requests` have: kernels of other sizes are those of usual rounds."""
    for decodings in ALL_DECODINGS:
        roles, chains = next(iter(decodings)).roles, min(1, config.chains(vocab))
        if Decoding.REJECTION in decodings and not chains:
            continue
        shape = RULES_OF_ROUNDS[roles].shape(config)
        for processors, (biased, is_penalised), (is_guided, reports_raw) in product(
            (NO_PROCESSORS, Processors.TRUNCATION), CHANGES, SPECIAL
        ):
            if reports_raw and (processors or biased or is_penalised or len(decodings) > 1):
                continue
            size = DraftSize(shape.branches, fixed_steps(config, decodings))
            queries = queries_of(config, shape, size.steps)
            plan = padding_plan(
                *(decodings, shape, 1, config.max_slots, Contexts.SHORT),
                processors=processors,
                queries=queries,
                size=size,
                penalised=is_penalised,
            )
            arrays = plan.arrays
            if Decoding.REJECTION in decodings:
                first_P = np.zeros(chains, dtype=np.int64)
                arrays = arrays._replace(chain_P=first_P, distribution_P=first_P, size_G=arrays.size_G + 1)
            unconditional = None
            if is_guided and ModelRole.TARGET in roles:
                unconditional = _unconditional(plan, queries or shape.begin + shape.branch)
            kind = replace(plan.kind, biased=biased, raw_logprobs=reports_raw)
            yield replace(plan, kind=kind, arrays=arrays, target_unconditional=unconditional).sized()
    # After a long prompt the draft alone begins with one token, unlike a block.
    alone = frozenset({Decoding.DRAFT})
    yield padding_plan(alone, RULES_OF_ROUNDS[Decoding.DRAFT.roles].shape(config), 1, config.max_slots, Contexts.SINGLE)


def _unconditional(plan: RoundPlan[np.ndarray], pages: int) -> UnconditionalRows[np.ndarray]:
    """Return an unconditional row for each batch index of a plan of padding. `pages`: of each of these rows."""
    arrays = plan.arrays
    zero_U, whole_U = np.zeros_like(arrays.slot_A), np.zeros_like(arrays.first_G)
    return UnconditionalRows(
        scale_A=np.ones_like(arrays.exponent_A),
        of_A=zero_U,
        index_U=zero_U,
        slot_U=arrays.slot_A,
        shift_U=zero_U,
        group_U=arrays.group_A,
        first_U=whole_U,
        size_U=whole_U,
        shared_U=whole_U,
        pages_UB=np.zeros((len(zero_U), pages), dtype=np.int32),
    )
