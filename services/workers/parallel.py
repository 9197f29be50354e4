"""The ranks of one tensor-parallel group among themselves: sums of activations, and commands from the leader to the
others."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import LinkError
from services.link.distributed import FRAME, frames, make_group
from services.workers.symmetric import SymmetricSum

_HEAD = 8
_FROM_LEADER = dist.BroadcastOptions()
_FROM_LEADER.rootRank = 0
_FROM_LEADER.rootTensor = 0


class TensorParallel:
    """Rank `rank` of `degree` of one model, a `smc.model.parallel.Reduce`. On GPUs activations are summed in symmetric
    memory if they are few, else over NCCL; commands always go over gloo."""

    def __init__(
        self, store: dist.TCPStore, name: str, rank: int, degree: int, device: torch.device, timeout: float
    ) -> None:
        self._commands = make_group(store, f"{name}/commands", rank, degree, timeout)
        self._device, on_cpu = device, device.type == "cpu"
        self._sums = make_group(store, f"{name}/sums", rank, degree, timeout, "cpu" if on_cpu else device)
        self._few = None if on_cpu else SymmetricSum.between(store, f"{name}/few", rank, degree)

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor:
        """See `smc.model.parallel.Reduce`."""
        here = None if self._few is None else self._few.room(tokens, features, dtype)
        return torch.empty(tokens, features, dtype=dtype, device=self._device) if here is None else here

    def __call__(self, part: Tensor) -> Tensor:
        """See `smc.model.parallel.Reduce`."""
        few, (tokens, features) = self._few, part.shape
        here = None if few is None else few.room(tokens, features, part.dtype)
        if few is not None and here is not None:
            return few(here if here.data_ptr() == part.data_ptr() else here.copy_(part))
        try:
            self._sums.allreduce([part]).wait()
        except RuntimeError as error:
            raise LinkError(f"a rank of the group is gone: {error}") from error
        return part

    def share(self, tensor: Tensor) -> None:
        """Rank 0's values, in place, on every rank."""
        try:
            self._sums.broadcast([tensor], _FROM_LEADER).wait()
        except RuntimeError as error:
            raise LinkError(f"a rank of the group is gone: {error}") from error

    def spread(self, data: bytes) -> None:
        """Leader: hand a command to the other ranks."""
        for frame in frames(data):
            self._broadcast(frame)

    def receive(self) -> bytes:
        """Others: the leader's next command. Raises LinkError when it is gone or silent past the group's timeout."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        self._broadcast(frame)
        size, room = int(frame[:_HEAD].view(torch.int64)), FRAME - _HEAD
        if size <= room:
            return frame[_HEAD : _HEAD + size].numpy().tobytes()
        rest = torch.empty(size - room, dtype=torch.uint8)
        self._broadcast(rest)
        return np.concatenate((frame[_HEAD:].numpy(), rest.numpy())).tobytes()

    def _broadcast(self, tensor: Tensor) -> None:
        try:
            self._commands.broadcast([tensor], _FROM_LEADER).wait()
        except RuntimeError as error:
            raise LinkError(f"the group's leader is gone or silent: {error}") from error
