"""The life of one rank's process: load the shard, meet the others, carry out commands until told to stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from services.link.connect import Meeting, leader_ends
from services.workers.parallel import TensorParallel
from services.workers.rank import Rank, follow, lead
from smc.engine.worker import ModelWorker
from smc.models.loader import load_model
from smc.models.parallel import Shard


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
    rank = Rank(worker, spec.meeting.epoch, spec.timeout, leads=spec.shard.rank == 0)
    if not rank.leads:
        follow(rank, group.receive)
        return
    ends = leader_ends(spec.meeting, store, spec.side, host, device, torch.device(spec.peer_device))
    rank.publisher, rank.source = ends.publish, ends.take
    try:
        lead(rank, ends.coordinator, group.spread if group else None)
    finally:
        ends.close()
