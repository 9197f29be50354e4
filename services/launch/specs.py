"""What each process of a gang is told when it starts."""

from __future__ import annotations

from services.backend import ServingPair
from services.coordinator.remote import CoordinatorSpec
from services.launch.config import GangConfig
from services.link.connect import Rendezvous
from services.workers.process import RankSpec
from smc.calibration.costs import BRIEF, THOROUGH
from smc.model.parallel import Shard
from smc.types import ModelRole


def rank_spec(
    config: GangConfig,
    pair: ServingPair,
    rendezvous: Rendezvous,
    role: ModelRole,
    shard: Shard,
    *,
    shares_gpu: bool = False,
) -> RankSpec:
    """`shares_gpu`: ranks of both sides are on one; NCCL takes no two of those."""
    engine, context = pair.engine, pair.context
    return RankSpec(
        rendezvous=rendezvous,
        role=role,
        shard=shard,
        source=config.sources.of_role(role),
        vocabulary=config.sources.target,
        draft_vocab=config.sources.draft_vocab if role == ModelRole.DRAFT else None,
        dtype=config.dtypes[role],
        device=config.device,
        between="cpu" if shares_gpu else config.device,
        width=engine.width(context),
        context=context,
        shares_gpu=shares_gpu,
        vocab_size=pair.tokenizer.size,
        # A worker must outlast a coordinator that waits for the other worker.
        timeout=2 * max(config.link_timeout, config.start_timeout),
        threads=config.threads,
        engine=engine,
        outlives_peer=role == ModelRole.TARGET and config.outlives_draft,
    )


def coordinator_spec(
    config: GangConfig, pair: ServingPair, rendezvous: Rendezvous, *, rehearse: bool = True
) -> CoordinatorSpec:
    """`rehearse`: do what a service does before it serves; no rounds are rehearsed where nothing is compiled."""
    compiles, times = config.device == "cuda", rehearse and pair.engine.drafting == "costs"
    return CoordinatorSpec(
        rendezvous=rendezvous,
        target=config.sources.target,
        engine=pair.engine,
        context=pair.context,
        timeout=config.link_timeout,
        heartbeat=config.heartbeat,
        rehearse=rehearse and compiles,
        timing=(THOROUGH if compiles else BRIEF) if times else None,
        trace=config.trace.absolute() if config.trace else None,
        outlives_draft=config.outlives_draft,
    )
