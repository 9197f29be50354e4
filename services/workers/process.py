"""The process of one rank: it loads its shard of one model or of both, connects to the other processes and executes
commands until it is told to stop."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from functools import partial

import torch

from services.link.connect import LeaderEnds, leader_ends, peer_end, progress_reporter
from services.link.store import GroupStore
from services.workers import memory
from services.workers.draft_part import faster_part
from services.workers.rank import PeerChannel, Rank, Reconnection, follow, lead
from services.workers.spec import ModelSpec, RankSpec
from services.workers.tensor_parallel import TensorParallel
from smc.api.limits import AUTO_DTYPE
from smc.calibration.compile_ahead import compile_ahead, watch_compiler
from smc.constraints import Compiler
from smc.draft_dtype import draft_dtype
from smc.executor.masks import Sharing
from smc.executor.round_executor import DraftRunner, LocalRoundExecutor, OneModelExecutor, TargetRunner
from smc.executor.worker import ModelWorker
from smc.local_engine import ops_for
from smc.model.decoder import Decoder
from smc.model.draft_vocab import DraftHead
from smc.model.linear import DTYPES
from smc.model.parallel import Shard
from smc.stops import TokenBytes
from smc.types import ModelRole, Numerics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A rank's shards of its models, with its tensor-parallel group."""

    models: dict[ModelRole, Decoder]
    group: TensorParallel | None
    draft_head: DraftHead | None


def load_rank(spec: RankSpec) -> Loaded:
    """Load the shards of a rank. Connects to the other ranks of its models, and waits for them. Raises ValueError,
    which says what to lower, if there is too little memory."""
    torch.set_num_threads(spec.threads)
    device, group, store = torch.device(spec.device), None, spec.rendezvous.store()
    if spec.place.degree > 1:
        spec.rendezvous.check_layouts(store)  # ranks share messages of the other model
        name = spec.rendezvous.name(f"{spec.name}/ranks")
        in_order = Numerics(spec.engine.numerics) is Numerics.INVARIANT
        place = (spec.place.rank, spec.place.degree, device)
        group = TensorParallel(spec.rendezvous.store(), name, *place, spec.timeout, in_order)
    # Before anything is loaded: to choose a type and a part of the draft takes memory for a while.
    spec = replace(spec, models={role: _decided(spec, role, group, store) for role in spec.models})
    models: dict[ModelRole, Decoder] = {}
    with memory.enough_for_weights(spec):
        for role in sorted(spec.models, key=lambda role: role is ModelRole.DRAFT):
            one = spec.models[role]
            report = progress_reporter(store, spec.rendezvous.loaded(role, spec.place.rank))
            models[role] = one.source.load(
                dtype=DTYPES[one.dtype],
                device=device,
                shard=one.shard,
                reduce=group if one.shard.degree > 1 else None,
                beside=models.get(ModelRole.TARGET),
                progress=report,
            )
            report(1.0)
        draft = spec.models.get(ModelRole.DRAFT)
        vocab = draft and draft.draft_vocab
        return Loaded(models, group, vocab.head(models[ModelRole.DRAFT]) if vocab else None)


def _decided(spec: RankSpec, role: ModelRole, group: TensorParallel | None, store: GroupStore) -> ModelSpec:
    """Return how the rank loads a model, once its data type and its part of the model are chosen."""
    one = spec.models[role]
    parts = [
        replace(one, shard=shard, or_shard=None, dtype=_dtype(spec, role, shard, store))
        for shard in (one.shard, one.or_shard)
        if shard is not None
    ]
    if len(parts) == 1:
        return parts[0]
    assert group is not None, "a single rank holds whole models"
    chosen = faster_part(spec, parts, group, store)
    if spec.leads:
        store.set(spec.rendezvous.draft_degree, str(chosen.shard.degree))
    return chosen


def _dtype(spec: RankSpec, role: ModelRole, shard: Shard, store: GroupStore) -> str:
    """Return the name of a model's data type. For `auto` the first rank chooses it for all ranks of the model."""
    one = spec.models[role]
    if one.dtype != AUTO_DTYPE:
        return one.dtype
    name = spec.rendezvous.name(f"{role}/dtype/{shard.degree}")
    if spec.leads:
        store.set(name, draft_dtype(one.source, spec.device, one.dtype, shard))
    return store.get(name).decode()


def run_rank(spec: RankSpec, host: str, loaded: Loaded | None = None) -> None:
    """Run a rank until the coordinator sends a stop command. Raises any error: the supervisor then restarts the worker
    group."""
    loaded = loaded or load_rank(spec)
    device, group, leads = torch.device(spec.device), loaded.group, spec.leads
    share, store = None if group is None else group.share, spec.rendezvous.store()
    token_bytes = TokenBytes.of(spec.vocabulary.tokenizer())
    pages = memory.agree_on_pages(spec, loaded.models, store)
    with memory.enough_for_pools(spec, loaded.models, pages):
        workers = {
            role: ModelWorker(
                role,
                model,
                width=spec.engine.width(spec.context),
                pages=pages,
                vocab_size=spec.vocab_size,
                token_bytes=token_bytes,
                draft_head=loaded.draft_head if role is ModelRole.DRAFT else None,
                context=spec.context,
                sharing=Sharing(leads, share),
                numerics=Numerics(spec.engine.numerics),
            )
            for role, model in loaded.models.items()
        }
    if leads:
        for role, worker in workers.items():
            store.set(spec.rendezvous.name(f"{role}/numerics"), ops_for(device).numerics(worker))
    # In a thread of its own: otherwise the first constrained request, and the rest of its batch, would wait for it.
    threading.Thread(target=Compiler.of(token_bytes).warm, name="vocabulary", daemon=True).start()
    _compile_ahead(spec, workers, store)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ends = leader_ends(spec.rendezvous, store, spec.name, host, spec.between) if leads else None
    executor: LocalRoundExecutor | OneModelExecutor
    channel, reconnect = None, None
    enough = partial(memory.enough_for_rounds, spec, pages)
    with enough():
        if len(workers) > 1:
            executor = LocalRoundExecutor(spec.engine, workers, ops_for(device), share)
        else:
            executor, channel = _one_model(spec, workers, group, ends)
    if channel is not None and ends is not None:
        reconnect = _reconnection(spec, channel, ends)
    report = watch_compiler(device)
    rank = Rank(workers, executor, spec.rendezvous.incarnation, spec.timeout, enough, reconnect, report)
    try:
        if ends is not None:
            lead(rank, ends.coordinator, group.spread if group else None)
        else:
            assert group is not None
            follow(rank, group.receive)
    except Exception as error:
        spec.rendezvous.report_failure(store, spec.name, error)
        raise
    finally:
        if channel is not None:
            channel.close()
        if ends is not None:
            ends.close()


def _compile_ahead(spec: RankSpec, workers: dict[ModelRole, ModelWorker], store: GroupStore) -> None:
    """Compile the kernels that the ranks of these models need. The leader does so, and the others wait: their kernels
    are the same."""
    if spec.device != "cuda":
        return
    name = spec.rendezvous.name(f"{spec.name}/compiled")
    if spec.leads:
        compile_ahead(spec.engine, spec.context, workers, spec.sampling)
        store.set(name, "")
    else:
        store.get(name)


def _one_model(
    spec: RankSpec, workers: dict[ModelRole, ModelWorker], group: TensorParallel | None, ends: LeaderEnds | None
) -> tuple[OneModelExecutor, PeerChannel]:
    """Return the executor of the rank's only model, and its channel to the other one."""
    ((role, worker),) = workers.items()
    ops = ops_for(worker.device)
    stages = ops.stage_runner(worker.device)
    peer = None if ends is None else ends.peer
    over_messages = spec.rendezvous.link == "grpc" or worker.device.type == "cpu"
    channel = PeerChannel(peer, group, stages, spec.timeout, host_waits=over_messages, outlives_peer=spec.outlives_peer)
    runner = DraftRunner if role is ModelRole.DRAFT else TargetRunner
    with stages.working():  # what the runner allocates is filled in the order of its own work
        executor = OneModelExecutor(runner(spec.engine, worker, ops, stages, channel))
    return executor, channel


def _reconnection(spec: RankSpec, channel: PeerChannel, ends: LeaderEnds) -> Reconnection:
    """Return the function by which a leader of one model connects to another leader of the other model. Each attempt
    has its own connection to the store: one that waits there for a leader which never comes holds up whatever else uses
    its connection."""
    (role,) = spec.models
    between = spec.between
    assert between is not None

    def reconnect(incarnation: int, seconds: float) -> bool:
        there = replace(spec.rendezvous, incarnation=incarnation, start_timeout=seconds)
        return channel.reconnect(incarnation, lambda: peer_end(there, there.store(), role, between, ends.server))

    return reconnect
