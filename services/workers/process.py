"""The process of one rank: it loads its shard, connects to the other processes and executes commands until it is told
to stop. Also defines the leader's channel to the leader of the other model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.link.base import LinkError, PeerEnd
from services.link.connect import Rendezvous, leader_ends, peer_end
from services.link.store import GroupStore
from services.workers.rank import Rank, TensorParallel, follow, lead
from smc.api.engine_config import EngineConfig
from smc.api.limits import AUTO_DTYPE
from smc.constraints import Compiler
from smc.draft_dtype import draft_dtype
from smc.executor.graph_runner import StageRunner
from smc.executor.masks import Sharing
from smc.executor.model_runner import DraftRunner, TargetRunner
from smc.executor.worker import ModelWorker
from smc.local_engine import ops_for
from smc.memory.kv_cache import KVPool, pages_that_fit
from smc.model.decoder import Decoder
from smc.model.draft_vocab import DraftHead, DraftVocab
from smc.model.linear import DTYPES
from smc.model.parallel import Shard
from smc.model.source import ModelSource
from smc.stops import TokenBytes
from smc.types import ModelRole

logger = logging.getLogger(__name__)


class PeerChannel:
    """A `smc.executor.model_runner.Channel`. `end`: the leader's end of the link, None at other ranks. `group`: the
    ranks of this model, None if there is only one."""

    def __init__(
        self,
        end: PeerEnd | None,
        group: TensorParallel | None,
        stages: StageRunner,
        timeout: float,
        *,
        outlives_peer: bool = False,
    ) -> None:
        """`timeout`: seconds to wait for the other model, where the host has to wait. `outlives_peer`: if the other
        model is lost, zeros replace its messages until `reconnect`, so that rounds in flight end on every rank; their
        results are discarded."""
        self._end, self._group, self._stages, self._timeout = end, group, stages, timeout
        self._outlives_peer = outlives_peer
        self._lost = False
        self._coming: tuple[int, Future[PeerEnd]] | None = None

    def reconnect(self, incarnation: int, make: Callable[[], PeerEnd]) -> bool:
        """Connect to the other model's leader of this incarnation. The first call starts `make`, which waits for that
        leader, in a thread. Every call returns whether `make` has completed; then the new end is in use. Raises
        RuntimeError if the leader does not connect; then it counts as lost, too."""
        assert self._end is not None
        if self._coming is None or self._coming[0] != incarnation:
            self._lost = True
            self._end.close()
            self._coming = incarnation, _begun(make)
        _, coming = self._coming
        if not coming.done():
            return False
        self._coming = None
        self._end = coming.result()
        self._lost = False
        return True

    def close(self) -> None:
        if self._end is not None:
            self._end.close()

    def send(self, name: str, tensor: Tensor) -> None:
        if self._end is not None and not self._lost:
            try:
                self._end.send(name, tensor)
            except LinkError as error:
                self._set_lost(error)

    def receive(
        self, key: Hashable, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        here = into
        if here is None:
            here = self._stages.keep(
                key, f"received {name}", lambda: torch.empty(shape, dtype=dtype, device=self._stages.device)
            )
        if self._end is not None:
            self._receive(self._end, name, here)
        return self.share(here)

    def _receive(self, end: PeerEnd, name: str, here: Tensor) -> None:
        if not self._lost:
            try:
                end.receive(name, here, self._timeout)
            except LinkError as error:
                self._set_lost(error)
        if self._lost:
            here.zero_()

    def _set_lost(self, error: LinkError) -> None:
        if not self._outlives_peer:
            raise error
        logger.warning("the other side is lost: %s", error)
        self._lost = True

    def share(self, tensor: Tensor) -> Tensor:
        if self._group is not None:
            self._group.share(tensor)
        return tensor

    def settle(self) -> None:
        if self._end is not None and not self._lost:
            self._end.settle()


def _begun(make: Callable[[], PeerEnd]) -> Future[PeerEnd]:
    """Call `make` in a daemon thread, which is not joined at the end of the process; return its future result."""
    coming: Future[PeerEnd] = Future()

    def work() -> None:
        try:
            coming.set_result(make())
        except Exception as error:  # raised to the caller, who awaits the result
            coming.set_exception(error)

    threading.Thread(target=work, name="reconnect", daemon=True).start()
    return coming


@dataclass(frozen=True)
class RankSpec:
    """A rank's start parameters."""

    rendezvous: Rendezvous
    role: ModelRole
    """`draft` or `target`."""
    shard: Shard
    source: ModelSource
    vocabulary: ModelSource
    """Source of the target model; its tokenizer serves both models."""
    draft_vocab: DraftVocab | None
    """For a draft that proposes only some tokens by its own likelihood: those tokens. Otherwise None."""
    dtype: str
    """Name of the data type; for a draft also `auto`."""
    device: str
    """`cpu` or `cuda`: the one GPU that this process sees."""
    context: int
    """Tokens of the longest sequence."""
    shares_gpu: bool
    """A rank of the other model is on the same GPU."""
    vocab_size: int
    timeout: float
    """Seconds to wait for a command; the coordinator's heartbeats are more frequent."""
    threads: int
    engine: EngineConfig
    outlives_peer: bool
    """Whether this rank goes on when the other model is lost."""

    @property
    def between(self) -> torch.device:
        """Device of the tensors between the leaders: a GPU (NCCL) if they are on different GPUs, else the CPU."""
        return torch.device("cpu" if self.shares_gpu else self.device)


@dataclass(frozen=True)
class Loaded:
    """A rank's shard of a model, with its tensor-parallel group."""

    model: Decoder
    group: TensorParallel | None
    draft_head: DraftHead | None


def load_rank(spec: RankSpec) -> Loaded:
    """Load the shard of a rank. Connects to the other ranks of the model, and waits for them."""
    torch.set_num_threads(spec.threads)
    device, shard, group = torch.device(spec.device), spec.shard, None
    store = spec.rendezvous.store()
    if shard.degree > 1:
        name = spec.rendezvous.name(f"{spec.role}/ranks")
        group = TensorParallel(spec.rendezvous.store(), name, shard.rank, shard.degree, device, spec.timeout)
    report, dtype = _load_reporter(spec, store), DTYPES[_dtype(spec, store)]
    model = spec.source.load(dtype=dtype, device=device, shard=shard, reduce=group, progress=report)
    report(1.0)
    return Loaded(model, group, spec.draft_vocab.head(model) if spec.draft_vocab else None)


def _load_reporter(spec: RankSpec, store: GroupStore) -> Callable[[float], None]:
    """Return a function that reports the loaded share (0 to 1) of a rank's weights to the supervisor."""
    name, last = spec.rendezvous.loaded(spec.role, spec.shard.rank), -1

    def report(share: float) -> None:
        nonlocal last
        percent = int(100 * share)
        if percent > last:
            last = percent
            store.set(name, str(percent))

    return report


def _dtype(spec: RankSpec, store: GroupStore) -> str:
    """Return the name of the data type. For `auto` the first rank chooses it for all ranks of the model."""
    if spec.dtype != AUTO_DTYPE:
        return spec.dtype
    name = spec.rendezvous.name(f"{spec.role}/dtype")
    if spec.shard.rank == 0:
        store.set(name, draft_dtype(spec.source, spec.device, spec.dtype, spec.shard))
    return store.get(name).decode()


def run_rank(spec: RankSpec, host: str, loaded: Loaded | None = None) -> None:
    """Run a rank until the coordinator sends a stop command. Raises any error: the supervisor then restarts the worker
    group."""
    loaded = loaded or load_rank(spec)
    model, group = loaded.model, loaded.group
    device, leads = torch.device(spec.device), spec.shard.rank == 0
    store = spec.rendezvous.store()
    worker = ModelWorker(
        spec.role,
        model,
        width=spec.engine.width(spec.context),
        pages=agree_on_pages(spec, model, store),
        vocab_size=spec.vocab_size,
        token_bytes=TokenBytes.of(spec.vocabulary.tokenizer()),
        draft_head=loaded.draft_head,
        context=spec.context,
        sharing=Sharing(leads, group and group.share),
    )
    # In a thread of its own: otherwise the first constrained request, and the rest of its batch, would wait for it.
    threading.Thread(target=Compiler.of(worker.token_bytes).warm, name="vocabulary", daemon=True).start()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ends = leader_ends(spec.rendezvous, store, spec.role, host, spec.between) if leads else None
    ops = ops_for(device)
    stages = ops.stage_runner(device)
    channel = PeerChannel(ends.peer if ends else None, group, stages, spec.timeout, outlives_peer=spec.outlives_peer)

    def reconnect(incarnation: int, seconds: float) -> bool:
        there = replace(spec.rendezvous, incarnation=incarnation, start_timeout=seconds)
        assert ends is not None
        return channel.reconnect(incarnation, lambda: peer_end(there, store, spec.role, spec.between, ends.server))

    runner = DraftRunner if spec.role == ModelRole.DRAFT else TargetRunner
    work = runner(spec.engine, worker, ops, stages, channel)
    rank = Rank(worker, work, spec.rendezvous.incarnation, spec.timeout, reconnect if leads else None)
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


def agree_on_pages(spec: RankSpec, model: Decoder, store: GroupStore) -> int:
    """Return the number of pages in the pool: as many as every rank of the model has memory for. The leader reports it
    to the coordinator."""
    name, weight = spec.rendezvous.name(f"{spec.role}/pages"), model.embed.weight
    room = None
    if weight.device.type == "cuda":
        roles = ModelRole if spec.shares_gpu else (spec.role,)
        distribution_bytes = sum(spec.engine.distribution_bytes(role, spec.vocab_size) for role in roles)
        room = pages_that_fit(KVPool.page_bytes(model.config, weight.dtype), weight.device, distribution_bytes) // len(
            roles
        )
        store.set(f"{name}/{spec.shard.rank}", str(room))
        room = min(int(store.get(f"{name}/{rank}")) for rank in range(spec.shard.degree))
    pages = spec.engine.pool_pages(spec.context, room)
    if spec.shard.rank == 0:
        store.set(name, str(pages))
    return pages
