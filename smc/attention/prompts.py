"""Attention of prompts: by flashinfer's kernels where it is installed and supports the model, otherwise by torch's
fused kernels.

flashinfer reads keys and values in place. A pool has one position a page, so its kernels see pages of size 1. The
interface used is that of flashinfer 0.6.12 (`BatchPrefillWithPagedKVCacheWrapper`; Ye et al. 2025): a plan on the host,
once per pass, then a run per layer. Two of its kernels are used. `fa3`, for Hopper, takes a tile of queries of one head
at a time over all positions that they see. `fa2` takes the query heads of a key/value head together and splits long
contexts between multiprocessors, so that a few queries occupy a GPU.

torch's kernels run row by row: prompts share nothing, and none is padded."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smc.arrays import to_device
from smc.attention.backend import AttentionBackend, AttentionPass, ForwardBatch
from smc.memory.kv_cache import KVPool
from smc.once import warn_once

if TYPE_CHECKING:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper


HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
FEW_QUERIES = 256
"""Mean number of queries per row below which fa2 is faster (benchmarks/passes.py)."""
MOST_TOKENS, MOST_ROWS, MOST_HEADS = 1 << 16, 1 << 10, 128
"""Limits of a pass: the plan of any batch within them fits into the wrapper's 8 MiB of integers (28 bytes a head and
tile)."""
PLANS = 3
"""Wrappers of each kernel, used in turn. A plan is copied from its wrapper's pinned memory, which the third plan after
it overwrites."""
TILE = 128
"""Queries of fa2's largest tile."""
logger = logging.getLogger(__name__)


def obstacle(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device, windows: bool = False
) -> str | None:
    """Return why `FlashInferAttention` cannot be used, or None. Loads its kernels, so that a missing one is noticed
    here and not in the middle of a pass. `windows`: whether some layers have one."""
    if head_dim not in HEAD_DIMS or dtype not in DTYPES:
        return (
            f"head dimension {head_dim} in {dtype}: flashinfer is used for {', '.join(map(str, HEAD_DIMS))} "
            "in bfloat16 and float16"
        )
    if heads[0] % heads[1] or heads[0] > MOST_HEADS:
        return f"heads (H, J) = {heads}: flashinfer is used if H is a multiple of J and at most {MOST_HEADS}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'smcserve[gpu]'"
    try:
        from flashinfer.prefill import get_batch_prefill_module

        for kernel in kernels_of(device):
            for window in (False, True) if windows else (False,):
                # Dtypes of q, of k and v, of the output, of indices; dimensions; no positional encoding; window; no
                # cap; no sums in float16.
                get_batch_prefill_module(
                    kernel, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, window, False, False
                )
    except Exception as error:  # Third-party code is imported, compiled and loaded, which may fail in any way.
        return f"flashinfer cannot be loaded: {type(error).__name__}: {error}"
    return None


def kernels_of(device: torch.device) -> tuple[str, ...]:
    """Return the kernels that run on a GPU, the one for few queries first."""
    return ("fa2", "fa3") if torch.cuda.get_device_capability(device)[0] == 9 else ("fa2",)


@dataclass
class _Planner:
    """A wrapper, and the event recorded when its last plan had been copied."""

    wrapper: BatchPrefillWithPagedKVCacheWrapper
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class FlashInferAttention(AttentionBackend):
    """Attention by flashinfer, for one shape of heads on one GPU where `obstacle` returns None. Its passes must run one
    after another, on one stream."""

    def __init__(self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.heads, self.head_dim, self.dtype = heads, head_dim, dtype
        self._splits = torch.empty(_split_bytes(heads, head_dim, device), dtype=torch.uint8, device=device)
        self._planners = {
            kernel: [
                _Planner(BatchPrefillWithPagedKVCacheWrapper(self._splits, "NHD", backend=kernel)) for _ in range(PLANS)
            ]
            for kernel in kernels_of(device)
        }
        self._turns = {kernel: cycle(planners) for kernel, planners in self._planners.items()}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory, the same for all batches."""
        wrappers = [planner.wrapper for planners in self._planners.values() for planner in planners]
        return self._splits.nbytes + sum(w._int_workspace_buffer.nbytes + w._kv_lens_buffer.nbytes for w in wrappers)

    def takes(self, batch: ForwardBatch) -> bool:
        """Return whether the plan of a batch fits into the wrapper's memory."""
        return len(batch.pages_T) <= MOST_TOKENS and len(batch.starts_R) <= MOST_ROWS

    def kernel(self, batch: ForwardBatch) -> str:
        few = len(batch.pages_T) < FEW_QUERIES * len(batch.starts_R)
        return "fa2" if few or "fa3" not in self._planners else "fa3"

    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        return self.plan_with(self.kernel(batch), pool, batch)

    def plan_with(self, kernel: str, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        """Plan a pass with this kernel."""
        assert self.takes(batch) and pool.keys.dtype == self.dtype
        assert pool.keys.shape[2:] == (self.heads[1], self.head_dim)
        planned = {window: self._plan(kernel, pool, batch, window) for window in set(pool.windows)}
        return _FlashInferPass(pool, batch, planned)

    def _plan(
        self, kernel: str, pool: KVPool, batch: ForwardBatch, window: int | None
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        planner, ends_R = next(self._turns[kernel]), batch.starts_R + batch.counts_R
        held_RL = np.arange(batch.table_RL.shape[1]) < ends_R[:, None]
        planner.copied.synchronize()
        planner.wrapper.plan(
            qo_indptr=_bounds(batch.counts_R),
            paged_kv_indptr=_bounds(ends_R),
            paged_kv_indices=to_device(batch.table_RL[held_RL].astype(np.int32), pool.keys.device),
            paged_kv_last_page_len=torch.ones(len(ends_R), dtype=torch.int32),
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim_qk=self.head_dim,
            page_size=1,
            causal=True,
            window_left=-1 if window is None else window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        planner.copied.record()
        return planner.wrapper


class _FlashInferPass(AttentionPass):
    def __init__(
        self, pool: KVPool, batch: ForwardBatch, planned: dict[int | None, BatchPrefillWithPagedKVCacheWrapper]
    ) -> None:
        """`planned`: the planned wrapper for each window size that a layer has."""
        super().__init__(pool, batch)
        self.planned = planned

    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        # [pages, 1, J, D]: the second axis is the positions of a page.
        keys, values = self.pool.keys[layer][:, None], self.pool.values[layer][:, None]
        return self.planned[self.pool.windows[layer]].run(
            q_THD, (keys, values), out=torch.empty_like(q_THD), enable_pdl=False
        )


def _bounds(counts_R: np.ndarray) -> Tensor:
    """Return cumulative counts [R + 1], int32, on the host, where plans are made."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts_R))).astype(np.int32))


def _split_bytes(heads: tuple[int, int], head_dim: int, device: torch.device) -> int:
    """Return the bytes of the partial results of fa2's splits, in float32. fa2 splits into at most two programs for
    each multiprocessor, over all key/value heads."""
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count // heads[1]
    return 4 * heads[0] * programs * TILE * (head_dim + 1) + 64


class FusedAttention(AttentionBackend):
    """Attention by torch's fused kernels, for rows of many new tokens. It does not use the prefixes that segments
    share."""

    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        return _FusedPass(pool, batch)


class _FusedPass(AttentionPass):
    def __init__(self, pool: KVPool, batch: ForwardBatch) -> None:
        super().__init__(pool, batch)
        ends_R = batch.starts_R + batch.counts_R
        self.tables = [to_device(table_L[:end], pool.keys.device) for table_L, end in zip(batch.table_RL, ends_R)]
        self.bounds = list(pairwise(np.concatenate(([0], np.cumsum(batch.counts_R))).tolist()))

    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        keys, values, window = self.pool.keys[layer], self.pool.values[layer], self.pool.windows[layer]
        return torch.cat(
            [
                _row(q_THD[a:b], *_seen(keys, values, pages_L, b - a, window), window)
                for (a, b), pages_L in zip(self.bounds, self.tables)
            ]
        )


def _seen(keys: Tensor, values: Tensor, pages_L: Tensor, queries: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all positions that at least one of the last `queries` positions sees."""
    if window is not None:
        pages_L = pages_L[max(0, len(pages_L) - queries - window + 1) :]
    return keys[pages_L], values[pages_L]


def _row(q_QHD: Tensor, k_LJD: Tensor, v_LJD: Tensor, window: int | None) -> Tensor:
    """Return the attention [Q, H, D] of the queries at the last Q of L positions."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_QHD, k_LJD, v_LJD))
    grouped = q_QHD.shape[1] != k_LJD.shape[1]
    if window is not None and len(k_LJD) > window:
        seen_QL = torch.ones(len(q_QHD), len(k_LJD), dtype=torch.bool, device=q.device)
        last = len(k_LJD) - len(q_QHD)
        out = F.scaled_dot_product_attention(q, k, v, seen_QL.tril(last).triu(last - window + 1), enable_gqa=grouped)
    elif len(q_QHD) == 1:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    elif len(q_QHD) == len(k_LJD):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, _last_queries(len(q_QHD), len(k_LJD), q.device), enable_gqa=grouped
        )
    return out[0].transpose(0, 1)


def _last_queries(queries: int, positions: int, device: torch.device) -> Tensor:
    """Return a mask with which each of the last `queries` of `positions` positions sees all positions up to itself."""
    if device.type == "cuda":
        # Imported only here, since that takes seconds. This bias selects kernels that need no mask.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, positions)
    return torch.ones(queries, positions, dtype=torch.bool, device=device).tril(positions - queries)


class PromptAttention(AttentionBackend):
    """Attention of prompts by flashinfer where it can take a batch, otherwise by torch. On a GPU, logs why flashinfer
    cannot be used."""

    def __init__(
        self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device, windows: bool = False
    ) -> None:
        """`heads` (H, J); `windows`: whether some layers have one."""
        self._torch, self.flashinfer = FusedAttention(), None
        if device.type != "cuda":
            return
        why = obstacle(heads, head_dim, dtype, device, windows)
        if why is None:
            self.flashinfer = FlashInferAttention(heads, head_dim, dtype, device)
        else:
            warn_once(logger, "torch computes the attention of prompts, which is slower for long prompts: %s", why)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory."""
        return 0 if self.flashinfer is None else self.flashinfer.workspace_bytes

    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        chosen = self._torch if self.flashinfer is None or not self.flashinfer.takes(batch) else self.flashinfer
        return chosen.plan(pool, batch)
