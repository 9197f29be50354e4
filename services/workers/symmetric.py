"""Sums of few values over GPUs that read each other's memory: one kernel of torch's symmetric memory, where NCCL needs several hops.

NVLink multicast stays off: these kernels do without it, and a program that dies while it holds multicast memory can take a
host's GPUs out of service.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOM = 8 << 20
"""Bytes of the largest sum made here."""
ONE_SHOT = 256 << 10
"""Bytes up to which every rank reads all of the others' parts; beyond, each sums its share and hands it out."""
SUMMED = (torch.bfloat16, torch.float32)


class SymmetricSum:
    """The ranks' parts lie in a buffer that all of them can read."""

    def __init__(self, store: dist.Store, name: str, rank: int, degree: int) -> None:
        """On the current GPU; a collective of all ranks. Raises RuntimeError where a GPU cannot read another's memory."""
        # Read by torch when the buffers meet. Each rank may see its own GPU only, and then all of them have the number 0.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import _symmetric_memory as symmetric

        self._name, self._group = name, dist.ProcessGroup(dist.PrefixStore(name, store), rank, degree)
        self._group._set_group_name(name)
        _register_process_group(name, self._group)
        self._buffer = symmetric.empty(ROOM, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        symmetric.rendezvous(self._buffer, name)

    @staticmethod
    def between(store: dist.Store, name: str, rank: int, degree: int) -> SymmetricSum | None:
        """None, on every rank alike, where not all of them are in one place with GPUs that reach each other. A collective."""
        if len(set(_exchange(store, f"{name}/place", rank, degree, _place()))) > 1:
            return None
        made, error = None, ""
        try:
            made = SymmetricSum(store, name, rank, degree)
        except RuntimeError as failed:
            error = str(failed).splitlines()[0]
        errors = [said for said in _exchange(store, f"{name}/error", rank, degree, error) if said]
        if errors and rank == 0:
            print(f"smcserve: sums over GPUs go over NCCL, since symmetric memory is not to be had: {errors[0]}", file=sys.stderr)
        return None if errors else made

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor | None:
        """Where a part [tokens, features] can be put to be summed without a copy; None if it is not for here."""
        size = tokens * features * dtype.itemsize
        if size > ROOM or size % 16 or dtype not in SUMMED:
            return None
        return self._buffer[:size].view(dtype).view(tokens, features)

    def __call__(self, here: Tensor) -> Tensor:
        """The sum of the parts in everybody's `room`, the same bits on every rank. It lasts until another part is put there."""
        if here.numel() * here.element_size() <= ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce(here, "sum", self._name)
        return torch.ops.symm_mem.two_shot_all_reduce_(here, "sum", self._name)


def _place() -> str:
    """The same for processes that find each other's sockets: those of one host and one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join((boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt"))))


def _exchange(store: dist.Store, name: str, rank: int, degree: int, word: str) -> list[str]:
    """What every rank says, in their order."""
    store.set(f"{name}/{rank}", word)
    return [store.get(f"{name}/{other}").decode() for other in range(degree)]
