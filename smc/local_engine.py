"""An engine whose workers live in this process. A model pair is loaded once; engines with different settings can share
it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.calibration.latency import ONCE, THOROUGH, cached_latency, latency_key, measure_latency
from smc.constraints import Compiler
from smc.executor.ops import RoundOps
from smc.executor.round_executor import LocalRoundExecutor
from smc.executor.worker import ModelWorker
from smc.memory.kv_cache import KVPool, pages_that_fit, pool_for
from smc.model.decoder import Decoder
from smc.model.draft_vocab import DraftHead
from smc.model.source import SourcePair
from smc.model.tokenizer import Tokenizer
from smc.once import warn_once
from smc.scheduler.capacity import check_fits
from smc.scheduler.engine import Engine
from smc.scheduler.methods import rules_of
from smc.scheduler.speculation import LatencyModel
from smc.stops import TokenBytes
from smc.types import ModelRole, Numerics

logger = logging.getLogger(__name__)
TIMED_SLOTS = 8
"""Maximum number of rows that are timed, unless the engine has more slots."""
TIMED_TOKENS = 512
"""Pages of the engine that is timed, for each of its slots."""


@dataclass(frozen=True)
class ModelPair:
    """Weights of a draft and a target."""

    target: Decoder
    draft: Decoder
    tokenizer: Tokenizer
    """The target's, which serves both models."""
    max_context: int
    """The shorter of both contexts, in tokens."""
    draft_head: DraftHead | None = None
    """Output head with which the draft proposes; None: its own."""

    @staticmethod
    def load(
        target_dir: str | Path,
        draft_dir: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        draft_dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> ModelPair:
        """Load a pair from two directories. `draft_dtype`: that of the draft, by default `dtype`. Raises ValueError,
        before reading weights, if the two directories cannot serve as a pair."""
        sources = SourcePair.of("files", Path(target_dir), Path(draft_dir))
        target = sources.target.load(dtype=dtype, device=device)
        draft = sources.draft.load(dtype=draft_dtype or dtype, device=device, beside=target)
        vocab = sources.draft_vocab
        return ModelPair(
            target=target,
            draft=draft,
            tokenizer=sources.target.tokenizer(),
            max_context=sources.max_context,
            draft_head=vocab.head(draft) if vocab else None,
        )


def local_engine(pair: ModelPair, config: EngineConfig | None = None, **engine_options) -> Engine:
    """Make an engine over `pair`; `engine_options` are passed on to Engine."""
    for device in {getattr(pair, role).embed.weight.device for role in ModelRole}:
        if device.type == "cuda":
            # A round of an earlier engine may still run, in memory that this one might get.
            torch.cuda.synchronize(device)
    config = (config or EngineConfig()).on_device(pair.target.embed.weight.device.type)
    context = config.context(pair.max_context)
    models = {role: getattr(pair, role) for role in ModelRole}
    pages = config.pool_pages(context, pages_with_room(models, config, pair.tokenizer.size))
    workers = {
        role: ModelWorker(
            role,
            model,
            width=config.width(context),
            context=context,
            pages=pages,
            vocab_size=pair.tokenizer.size,
            token_bytes=TokenBytes.of(pair.tokenizer),
            draft_head=pair.draft_head if role == ModelRole.DRAFT else None,
            numerics=Numerics(config.numerics),
        )
        for role, model in models.items()
    }
    rounds = LocalRoundExecutor(config, workers, ops_for(workers[ModelRole.TARGET].device))
    return Engine(
        config,
        workers,
        pair.tokenizer,
        executor=rounds,
        pages=dict.fromkeys(ModelRole, pages),
        context=context,
        **{"constraints": Compiler.of(TokenBytes.of(pair.tokenizer))} | engine_options,
    )


def fitted_engine(
    pair: ModelPair, config: EngineConfig, requests: Sequence[Request], concurrency: int = 1, **engine_options
) -> Engine:
    """Make an engine of `fitted_config`. `engine_options` are passed on to Engine."""
    return local_engine(pair, fitted_config(pair, config, requests, concurrency), **engine_options)


def fitted_config(pair: ModelPair, config: EngineConfig, requests: Sequence[Request], concurrency: int) -> EngineConfig:
    """Return the configuration with exactly the slots and pages that `concurrency` of these requests need at once, so
    that none of them waits for memory.

    `max_slots` and `pages` of `config` are replaced. Raises ValueError if a request is too large for the models."""
    needs = [rules_of(r.params).ample_pages(config, r.params, len(r.prompt), r.negative_size) for r in requests]
    most = {role: max(need.get(role, 0) for need in needs) for role in ModelRole}
    slots = max(request.params.rows * request.params.slots_per_row for request in requests)
    context = min(config.max_context or pair.max_context, pair.max_context)
    for request in requests:
        check_fits(request, replace(config, max_slots=slots), most, context, pair.tokenizer.size)
    # At least two pages: a plain method leaves one of the models idle, and a pool cannot be empty.
    pages = max(2, pool_for(concurrency * max(most.values())))
    return replace(config, max_slots=concurrency * slots, pages=pages)


def stored_latency(pair: ModelPair, directories: Sequence[Path], config: EngineConfig) -> LatencyModel | None:
    """Return the latency model of a pair that was loaded from these directories: as measured on this machine before, or
    else now (`smc.calibration.latency`). Return None, with a warning, if there is no memory for measuring, and None if
    contexts are too short for a round. Call it before another engine takes memory."""
    slots = max(TIMED_SLOTS, config.max_slots)
    config = replace(config, max_slots=slots, max_context=None, pages=pool_for(slots * TIMED_TOKENS))
    models = {role: getattr(pair, role) for role in ModelRole}
    columns = None if pair.draft_head is None else len(pair.draft_head.vocab.ids_M)
    effort = ONCE if pair.target.embed.weight.device.type == "cpu" else THOROUGH
    key = latency_key(models, directories, columns, config)
    try:
        return cached_latency(key, lambda: measure_latency(local_engine(pair, config), effort))
    except torch.OutOfMemoryError as error:
        warn_once(logger, "the models are not timed, so drafting is not adapted to them: %s", error)
        return None


def pages_with_room(
    models: Mapping[ModelRole, Decoder], config: EngineConfig, vocab_size: int, *, crowded: bool = False
) -> int | None:
    """Return the number of pages for which there is memory in the pool of each of these models, which get equally
    many; None on a CPU. `crowded`: another process has the other model on the same GPU, and needs as much."""
    page_bytes: Counter[torch.device] = Counter()
    distribution_bytes: Counter[torch.device] = Counter()
    logit_bytes: Counter[torch.device] = Counter()
    for role, model in models.items():
        weight = model.embed.weight
        page_bytes[weight.device] += KVPool.page_bytes(model.config, weight.dtype) * (1 + crowded)
        roles = ModelRole if crowded else (role,)
        distribution_bytes[weight.device] += sum(config.distribution_bytes(each, vocab_size) for each in roles)
        logit_bytes[weight.device] += sum(config.logit_bytes(each, vocab_size) for each in roles)
    gpus = (device for device in page_bytes if device.type == "cuda")
    return min(
        (pages_that_fit(page_bytes[at], at, distribution_bytes[at], logit_bytes[at]) for at in gpus), default=None
    )


def ops_for(device: torch.device) -> RoundOps:
    """Return the operations of rounds on a device: in Triton, or on a CPU in torch."""
    if device.type == "cpu":
        return RoundOps()
    from smc.executor.triton_ops import TritonOps  # needs triton

    return TritonOps()
