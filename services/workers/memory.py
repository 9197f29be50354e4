"""Memory of a rank's device: the number of KV pages that fit beside the weights, and errors that say what to lower if
there is too little of it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

from services.link.store import GroupStore
from services.workers.spec import RankSpec
from smc.local_engine import pages_with_room
from smc.memory.kv_cache import KVPool, reserved_bytes
from smc.model.decoder import Decoder
from smc.model.weight_map import WEIGHT_BYTES
from smc.types import ModelRole

logger = logging.getLogger(__name__)
CPU_SHORTAGE = "DefaultCPUAllocator: "
"""Beginning of the part of torch's error that says how much memory a CPU lacks."""


def agree_on_pages(spec: RankSpec, models: Mapping[ModelRole, Decoder], store: GroupStore) -> int:
    """Return the number of pages of each pool of this rank: as many as every rank of these models has memory for. The
    leader reports it to the coordinator. Raises ValueError, which says what to lower, if one request does not fit."""
    name = spec.rendezvous.name(f"{spec.name}/pages")
    room = pages_with_room(models, spec.engine, spec.vocab_size, crowded=spec.shares_gpu)
    if room is not None:
        store.set(f"{name}/{spec.place.rank}", str(room))
        room = min(int(store.get(f"{name}/{rank}")) for rank in range(spec.place.degree))
    try:
        pages = spec.engine.pool_pages(spec.context, room)
    except ValueError as error:
        raise ValueError(f"{error}; {_division(spec, models)}") from error
    if spec.leads:
        sizes = _shown({role: pages * _page_bytes(model) for role, model in models.items()})
        logger.info("KV pools of %d positions: %s; weights: %s", pages, sizes, _shown(_weights(models)))
        store.set(name, str(pages))
    return pages


@contextmanager
def enough_for_weights(spec: RankSpec) -> Iterator[None]:
    """Raise ValueError, which says what to lower, if there is no memory for weights inside this context."""
    free = _free(spec.device)
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        needs = {
            role: WEIGHT_BYTES[one.dtype] * one.source.parameters / one.shard.degree
            for role, one in spec.models.items()
        }
        types = ", ".join(f"{role}_dtype={one.dtype}" for role, one in spec.models.items())
        raise ValueError(
            f"the weights do not fit: about {_shown(needs)} for each rank, and {_gib(free)} of {_gib(_total(spec))} "
            f"were free; lower the types ({types}; allowed: fp8, int4), or raise {_degrees(spec)}"
        ) from error


@contextmanager
def enough_for_pools(spec: RankSpec, models: Mapping[ModelRole, Decoder], pages: int) -> Iterator[None]:
    """Raise ValueError, which says what to lower, if there is no memory for KV pools inside this context."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        sizes = {role: pages * _page_bytes(model) for role, model in models.items()}
        raise ValueError(
            f"the KV pools do not fit: pages={pages} take {_shown(sizes)}; lower pages, or max_context="
            f"{spec.context} and max_slots={spec.engine.max_slots}; {_division(spec, models)}"
        ) from error


@contextmanager
def enough_for_rounds(spec: RankSpec, pages: int) -> Iterator[None]:
    """Raise ValueError, which says what to lower, if there is no memory for rounds or prompts inside this context."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        engine = spec.engine
        raise ValueError(
            f"no memory is left for rounds and prompts ({_gib(_free(spec.device))} of {_gib(_total(spec))} are free); "
            f"lower pages={pages}, max_slots={engine.max_slots}, prefill_chunk={engine.prefill_chunk} or "
            f"max_chains={engine.chains(spec.vocab_size)}"
        ) from error


def is_shortage(error: Exception) -> bool:
    """Whether an error says that a device or this host has too little memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or CPU_SHORTAGE in str(error)


def _division(spec: RankSpec, models: Mapping[ModelRole, Decoder]) -> str:
    """Say what takes the device's memory."""
    page = sum(map(_page_bytes, models.values()))
    told = (
        f"of {_gib(_total(spec))}, {_gib(_free(spec.device))} are free beside the weights ({_shown(_weights(models))})"
    )
    if spec.device == "cpu":
        return f"{told}; a page takes {page} bytes"
    chains = sum(spec.engine.distribution_bytes(role, spec.vocab_size) for role in models)
    held = ModelRole if spec.shares_gpu else models
    reserved = reserved_bytes(sum(spec.engine.logit_bytes(role, spec.vocab_size) for role in held))
    return (
        f"{told}; activations and graphs need {_gib(reserved)} (max_slots={spec.engine.max_slots}), draft chains "
        f"{_gib(chains)} (max_chains={spec.engine.chains(spec.vocab_size)}), a page {page} bytes"
    )


def _degrees(spec: RankSpec) -> str:
    return " and ".join(f"{role}_tp={one.shard.degree}" for role, one in spec.models.items())


def _weights(models: Mapping[ModelRole, Decoder]) -> dict[ModelRole, float]:
    return {role: sum(one.nbytes for one in model.parameters()) for role, model in models.items()}


def _page_bytes(model: Decoder) -> int:
    return KVPool.page_bytes(model.config, model.embed.weight.dtype)


def _free(device: str) -> int:
    """Return the free bytes of a device."""
    return psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]


def _total(spec: RankSpec) -> int:
    return psutil.virtual_memory().total if spec.device == "cpu" else torch.cuda.mem_get_info()[1]


def _shown(sizes: Mapping[ModelRole, float]) -> str:
    return ", ".join(f"{_gib(size)} {role}" for role, size in sizes.items())


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
