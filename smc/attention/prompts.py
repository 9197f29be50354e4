"""Attention of prompts: by flashinfer where it is there and has a kernel for the model, by torch elsewhere."""

from __future__ import annotations

import logging

import torch

from smc.attention.base import AttentionBackend, AttentionPass, ForwardBatch
from smc.attention.flashinfer import FlashInferAttention, obstacle
from smc.attention.fused import FusedAttention
from smc.memory.kv_pool import KVPool

logger = logging.getLogger(__name__)


class PromptAttention(AttentionBackend):
    """Whichever backend is fastest for a batch. On a GPU it says why, where flashinfer cannot be used."""

    def __init__(
        self,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: bool = False,
    ) -> None:
        """`heads` (H, J); `windows`: whether some layers have one."""
        self._torch, self.flashinfer = FusedAttention(), None
        if device.type != "cuda":
            return
        why = obstacle(heads, head_dim, dtype, device, windows)
        if why is None:
            self.flashinfer = FlashInferAttention(heads, head_dim, dtype, device)
        else:
            logger.warning("attention of prompts by torch, which is slower over long ones: %s", why)

    @property
    def workspace_bytes(self) -> int:
        """Of the device's memory."""
        return 0 if self.flashinfer is None else self.flashinfer.workspace_bytes

    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        chosen = self._torch if self.flashinfer is None or not self.flashinfer.takes(batch) else self.flashinfer
        return chosen.plan(pool, batch)
