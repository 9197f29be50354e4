"""A prompt's pass through a model: the reference, as the decoder has it; `smc.executor.kernel_prompts` has what GPUs use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from smc.arrays import to_device
from smc.attention.base import AttentionBackend, ForwardBatch
from smc.memory.kv_pool import KVPool
from smc.model.decoder import Decoder, RopeTable


class Reader(Protocol):
    """What a pass runs through: a `ModelWorker`, or as much of one."""

    model: Decoder
    pool: KVPool
    rope: RopeTable
    device: torch.device

    @property
    def attention(self) -> AttentionBackend: ...


PromptPass = Callable[[Reader, Tensor, ForwardBatch, Tensor], Tensor]
"""(what it runs through, tokens [T], rows, index [X] of the tokens that are asked about) -> their hidden states [X, E]. Keys and values
of all tokens are stored."""


def run_prompt(reader: Reader, tokens_T: Tensor, batch: ForwardBatch, asked_X: Tensor) -> Tensor:
    attend = reader.attention.plan(reader.pool, batch).attend
    rope_T2D = reader.rope.at(to_device(batch.positions_T, reader.device))
    return reader.model(tokens_T, rope_T2D, attend)[asked_X]
