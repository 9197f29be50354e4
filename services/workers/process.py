"""The life of one rank's process: load the shard, meet the others, carry out commands until told to stop."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from services.link.connect import Rendezvous, leader_ends, peer_end
from services.workers.channel import PeerChannel
from services.workers.parallel import TensorParallel
from services.workers.rank import Rank, follow, lead
from smc.api.engine_config import EngineConfig
from smc.executor.model_runner import DraftRunner, TargetRunner
from smc.executor.worker import ModelWorker
from smc.local_engine import ops_for
from smc.memory.kv_pool import KVPool, pages_that_fit
from smc.model.decoder import Decoder
from smc.model.draft_vocab import DraftHead, DraftVocab
from smc.model.linear import DTYPES
from smc.model.parallel import Shard
from smc.model.source import Source
from smc.stops import TokenBytes
from smc.types import ModelRole


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank is told when it starts."""

    rendezvous: Rendezvous
    role: ModelRole
    """`draft` or `target`."""
    shard: Shard
    source: Source
    vocabulary: Source
    """Whose tokenizer is the pair's."""
    draft_vocab: DraftVocab | None
    """Of a draft: what it proposes, if not every token by its own likelihood."""
    dtype: str
    device: str
    """`cpu` or `cuda`: the one GPU that this process sees."""
    between: str
    """Device over which the leaders tell each other: `cuda` (NCCL) if each has a GPU that the other has not, else
    `cpu`."""
    width: int
    context: int
    """Tokens of the longest sequence."""
    shares_gpu: bool
    """With the other side's rank."""
    vocab_size: int
    timeout: float
    """Seconds a command may be waited for; the coordinator sends a sign of life more often."""
    threads: int
    engine: EngineConfig
    outlives_peer: bool
    """It goes on when the other side is lost."""


@dataclass(frozen=True)
class Loaded:
    """A rank's share of a model, with the others that hold it."""

    model: Decoder
    group: TensorParallel | None
    draft_head: DraftHead | None


def load_rank(spec: RankSpec) -> Loaded:
    """Meets the other ranks of the model."""
    torch.set_num_threads(spec.threads)
    device, shard, group = torch.device(spec.device), spec.shard, None
    if shard.degree > 1:
        name = spec.rendezvous.name(f"{spec.role}/ranks")
        group = TensorParallel(spec.rendezvous.store(), name, shard.rank, shard.degree, device, spec.timeout)
    model = spec.source.load(dtype=DTYPES[spec.dtype], device=device, shard=shard, reduce=group)
    return Loaded(model, group, spec.draft_vocab.head(model) if spec.draft_vocab else None)


def run_rank(spec: RankSpec, host: str, loaded: Loaded | None = None) -> None:
    """Returns when the coordinator says stop. Raises whatever went wrong: the gang then starts again."""
    loaded = loaded or load_rank(spec)
    model, group = loaded.model, loaded.group
    device, leads = torch.device(spec.device), spec.shard.rank == 0
    sizes = {"width": spec.width, "pages": agree_on_pages(spec, model), "vocab_size": spec.vocab_size}
    worker = ModelWorker(
        spec.role, model, token_bytes=TokenBytes.of(spec.vocabulary.tokenizer()), draft_head=loaded.draft_head, **sizes
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    store = spec.rendezvous.store()
    between = torch.device(spec.between)
    ends = leader_ends(spec.rendezvous, store, spec.role, host, between) if leads else None
    ops = ops_for(device)
    stages = ops.stage_runner(device)
    channel = PeerChannel(ends.peer if ends else None, group, stages, spec.timeout, outlives_peer=spec.outlives_peer)

    def reconnect(epoch: int, seconds: float) -> bool:
        there = replace(spec.rendezvous, epoch=epoch, start_timeout=seconds)
        assert ends is not None
        return channel.reconnect(epoch, lambda: peer_end(there, store, spec.role, between, ends.server))

    runner = DraftRunner if spec.role == ModelRole.DRAFT else TargetRunner
    work = runner(spec.engine, worker, ops, stages, channel)
    rank = Rank(worker, work, spec.rendezvous.epoch, spec.timeout, reconnect if leads else None)
    try:
        if ends is not None:
            lead(rank, ends.coordinator, group.spread if group else None)
        else:
            assert group is not None
            follow(rank, group.receive)
    except Exception as error:
        spec.rendezvous.report_failure(store, spec.role, error)
        raise
    finally:
        if ends is not None:
            channel.close()
            ends.close()


def agree_on_pages(spec: RankSpec, model: Decoder) -> int:
    """Pages of the pool: as many as every rank of the model has memory for. The leader tells the coordinator."""
    store, name, weight = spec.rendezvous.store(), spec.rendezvous.name(f"{spec.role}/pages"), model.embed.weight
    room = None
    if weight.device.type == "cuda":
        roles = ModelRole if spec.shares_gpu else (spec.role,)
        law_bytes = sum(spec.engine.law_bytes(role, spec.vocab_size) for role in roles)
        room = pages_that_fit(KVPool.page_bytes(model.config, weight.dtype), weight.device, law_bytes) // len(roles)
        store.set(f"{name}/{spec.shard.rank}", str(room))
        room = min(int(store.get(f"{name}/{rank}")) for rank in range(spec.shard.degree))
    pages = spec.engine.pool_pages(spec.context, room)
    if spec.shard.rank == 0:
        store.set(name, str(pages))
    return pages
