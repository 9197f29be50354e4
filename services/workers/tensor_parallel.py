"""Communication within one tensor-parallel group: sums of activations, and commands from the leader to the other ranks.

Small sums use one kernel of torch's symmetric memory, where NCCL needs several hops. NVLink multicast stays off: these
kernels do not need it, and a program that dies while it holds multicast memory can take a host's GPUs out of
service."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import LinkError
from services.link.distributed import FRAME, frames, make_group

ROOM = 8 << 20
"""Bytes of the largest sum made here."""
ONE_SHOT = 256 << 10
"""Bytes up to which every rank reads all of the others' parts; beyond, each sums its share and hands it out."""
SUMMED = (torch.bfloat16, torch.float32)


class SymmetricSum:
    """The ranks' parts lie in a buffer that all of them can read."""

    def __init__(self) -> None:
        """Room on the current GPU. Raises RuntimeError or ImportError where torch cannot share it."""
        # Read by torch at the rendezvous of buffers. Each rank may see its own GPU only, and then all of them have the
        # number 0.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        from torch.distributed import _symmetric_memory as symmetric

        self._buffer = symmetric.empty(
            ROOM, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
        )

    @staticmethod
    def between(store: dist.Store, name: str, rank: int, degree: int) -> SymmetricSum | None:
        """None, on every rank alike, where not all of them are in one place with GPUs that reach each other. A
        collective in which the ranks report the result of every step to each other: a rank that stopped alone would
        leave the others waiting."""
        if len(set(_exchange(store, f"{name}/host", rank, degree, _host_and_container()))) > 1:
            return None
        made: list[SymmetricSum] = []
        steps = {"made": lambda: made.append(SymmetricSum()), "met": lambda: made[0].meet(store, name, rank, degree)}
        for step, act in steps.items():
            errors = list(filter(None, _exchange(store, f"{name}/{step}", rank, degree, _error_of(act))))
            if errors:
                if rank == 0:
                    print(
                        f"smcserve: sums over GPUs go over NCCL; symmetric memory is not to be had: {errors[0]}",
                        file=sys.stderr,
                    )
                return None
        return made[0]

    def meet(self, store: dist.Store, name: str, rank: int, degree: int) -> None:
        """Let the ranks see each other's buffers. Raises RuntimeError where a GPU cannot read another's memory."""
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed.distributed_c10d import GroupName

        self._name, self._group = name, dist.ProcessGroup(dist.PrefixStore(name, store), rank, degree)
        self._group._set_group_name(GroupName(name))
        _register_process_group(GroupName(name), self._group)
        symmetric.rendezvous(self._buffer, GroupName(name))

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor | None:
        """Where a part [tokens, features] can be put to be summed without a copy; None if it is not for here."""
        size = tokens * features * dtype.itemsize
        if size > ROOM or size % 16 or dtype not in SUMMED:
            return None
        return self._buffer[:size].view(dtype).view(tokens, features)

    def __call__(self, here: Tensor) -> Tensor:
        """The sum of the parts in all ranks' `room`, the same bits on every rank. It is valid until another part is put
        there.

        Nothing bounds the wait for a rank that has died: the GPU waits until its process is killed, which the worker
        group does."""
        if here.numel() * here.element_size() <= ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce(here, "sum", self._name)
        return torch.ops.symm_mem.two_shot_all_reduce_(here, "sum", self._name)


def _error_of(act: Callable[[], object]) -> str:
    """What went wrong, in one line; empty if nothing did."""
    try:
        act()
    except (RuntimeError, ImportError, AttributeError) as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def _host_and_container() -> str:
    """The same for processes that find each other's sockets: those of one host and one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join((boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt"))))


def _exchange(store: dist.Store, name: str, rank: int, degree: int, word: str) -> list[str]:
    """The values of all ranks, in their order."""
    store.set(f"{name}/{rank}", word)
    return [store.get(f"{name}/{other}").decode() for other in range(degree)]


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
