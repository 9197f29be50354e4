"""The life of one rank's process: load the shard, meet the others, carry out commands until told to stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from services.link.connect import Meeting, leader_ends
from services.workers.channel import PeerChannel
from services.workers.parallel import TensorParallel
from services.workers.rank import Rank, Resident, follow, lead
from smc.engine.config import EngineConfig
from smc.engine.local import parts_for
from smc.engine.worker import ModelWorker
from smc.models.loader import load_model
from smc.models.parallel import Shard
from smc.resident.sides import DraftSide, PlainSide, TargetSide


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank is told when it starts."""

    meeting: Meeting
    side: str
    """`draft` or `target`."""
    shard: Shard
    directory: Path
    dtype: str
    device: str
    """`cpu` or `cuda`: the one GPU that this process sees."""
    peer_device: str
    rows: int
    width: int
    pages: int
    vocab_size: int
    timeout: float
    """Seconds a command may be waited for; the coordinator sends a sign of life more often."""
    threads: int
    engine: EngineConfig
    resident: bool
    """State of rounds stays here (smc/resident)."""


def run_rank(spec: RankSpec, host: str) -> None:
    """Returns when the coordinator says stop. Raises whatever went wrong: the gang then starts again."""
    torch.set_num_threads(spec.threads)
    store, device = spec.meeting.store(), torch.device(spec.device)
    group = None
    if spec.shard.degree > 1:
        name = spec.meeting.name(f"{spec.side}/ranks")
        group = TensorParallel(store, name, spec.shard.rank, spec.shard.degree, device, spec.timeout)
    model = load_model(
        spec.directory, dtype=getattr(torch, spec.dtype), device=device, shard=spec.shard, reduce=group.reduce if group else None
    )
    sizes = {"rows": spec.rows, "width": spec.width, "pages": spec.pages, "vocab_size": spec.vocab_size}
    worker = ModelWorker(spec.side, model, **sizes)
    leads = spec.shard.rank == 0
    ends = leader_ends(spec.meeting, store, spec.side, host, device, torch.device(spec.peer_device)) if leads else None
    peer = ends.peer if ends else None
    resident = _resident(spec, worker, PeerChannel(peer, group, device, spec.timeout)) if spec.resident else None
    rank = Rank(worker, spec.meeting.epoch, spec.timeout, leads=leads, peer=peer, resident=resident)
    if not leads:
        follow(rank, group.receive)
        return
    try:
        lead(rank, ends.coordinator, group.spread if group else None)
    finally:
        ends.close()


def _resident(spec: RankSpec, worker: ModelWorker, channel: PeerChannel) -> Resident:
    parts = parts_for(worker.device)
    stages = parts.stages(worker.device)
    side = DraftSide if spec.side == "draft" else TargetSide
    return Resident(
        together=side(spec.engine, worker, parts, stages, channel),
        alone=PlainSide(spec.side, spec.engine, worker, parts, stages),
    )
