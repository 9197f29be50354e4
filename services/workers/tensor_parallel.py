"""The ranks that share models: they sum activations, and the leader (rank 0) passes commands and values on to the
others.

Small sums use one kernel of torch's symmetric memory, where NCCL needs several hops. NVLink multicast stays off: these
kernels do not need it, and a program that dies while it holds multicast memory can take a host's GPUs out of
service."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import LinkError
from services.link.distributed import FRAME, frames, make_group, message_in
from services.link.store import GroupStore

ROOM = 8 << 20
"""Bytes of the largest sum in symmetric memory."""
ONE_SHOT = 256 << 10
"""Bytes up to which every rank reads the whole parts of all ranks. For larger sums each rank sums its share, and
distributes the result."""
SUMMED = (torch.bfloat16, torch.float32)
LEADER_GONE = "the group's leader is gone or silent"
_FROM_LEADER = dist.BroadcastOptions()
_FROM_LEADER.rootRank = 0
_FROM_LEADER.rootTensor = 0


class SymmetricSum:
    """Sums parts that lie in buffers of symmetric memory, which all ranks can read."""

    def __init__(self) -> None:
        """Allocate a buffer on the current GPU. Raises RuntimeError or ImportError if torch cannot share it."""
        # torch reads these at the rendezvous of buffers. If each rank sees only its own GPU, all GPUs have number 0.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        from torch.distributed import _symmetric_memory as symmetric

        self._buffer = symmetric.empty(
            ROOM, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
        )

    @staticmethod
    def between(store: dist.Store, name: str, rank: int, degree: int) -> SymmetricSum | None:
        """Set up the sum of all ranks; return None, on every rank alike, unless all ranks are in one container of one
        host and their GPUs can read each other's memory. This is a collective: the ranks report the result of every
        step to each other, since a rank that stopped alone would leave the others waiting."""
        if len(set(exchange(store, f"{name}/host", rank, degree, _host_and_container()))) > 1:
            return None
        made: list[SymmetricSum] = []
        steps = {"made": lambda: made.append(SymmetricSum()), "met": lambda: made[0].meet(store, name, rank, degree)}
        for step, act in steps.items():
            errors = list(filter(None, exchange(store, f"{name}/{step}", rank, degree, _error_of(act))))
            if errors:
                if rank == 0:
                    print(
                        f"smcserve: sums over GPUs go over NCCL; symmetric memory is not to be had: {errors[0]}",
                        file=sys.stderr,
                    )
                return None
        return made[0]

    def meet(self, store: dist.Store, name: str, rank: int, degree: int) -> None:
        """Share the buffers between the ranks. Raises RuntimeError if a GPU cannot read another one's memory."""
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed.distributed_c10d import GroupName

        self._name, self._group = name, dist.ProcessGroup(dist.PrefixStore(name, store), rank, degree)
        self._group._set_group_name(GroupName(name))
        _register_process_group(GroupName(name), self._group)
        symmetric.rendezvous(self._buffer, GroupName(name))

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor | None:
        """Return the part of the buffer for a tensor [tokens, features], which is summed there without a copy; None if
        its size or type is not supported."""
        size = tokens * features * dtype.itemsize
        if size > ROOM or size % 16 or dtype not in SUMMED:
            return None
        return self._buffer[:size].view(dtype).view(tokens, features)

    def __call__(self, here: Tensor) -> Tensor:
        """Return the sum of the parts in all ranks' `room`, bitwise equal on every rank. It is valid until another part
        is written there.

        The wait for a rank that has died has no limit: the GPU waits until the worker group kills this process."""
        if here.numel() * here.element_size() <= ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce(here, "sum", self._name)
        return torch.ops.symm_mem.two_shot_all_reduce_(here, "sum", self._name)


def _error_of(act: Callable[[], object]) -> str:
    """Call `act`; return its error in one line, or an empty string if it succeeds."""
    try:
        act()
    except (RuntimeError, ImportError, AttributeError) as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def _host_and_container() -> str:
    """Return a name of this process's host and container. Processes with equal names can find each other's sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join((boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt"))))


def exchange(store: dist.Store, name: str, rank: int, degree: int, word: str) -> list[str]:
    """Publish `word` for this rank; return the words of all ranks in order of rank."""
    store.set(f"{name}/{rank}", word)
    return [store.get(f"{name}/{other}").decode() for other in range(degree)]


class TensorParallel:
    """Rank `rank` of `degree` that share models, a `smc.model.parallel.Reduce`. On GPUs small sums of activations use
    symmetric memory, large ones NCCL; commands always go over gloo."""

    def __init__(
        self,
        store: GroupStore,
        name: str,
        rank: int,
        degree: int,
        device: torch.device,
        timeout: float,
        in_order: bool = False,
    ) -> None:
        """`in_order`: add the ranks' parts one after another, whatever the size of the sum. Symmetric memory always
        does; NCCL's order depends on the size, if there are more than two ranks."""
        self._degree, self._in_order = degree, in_order and degree > 2
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
            if self._in_order:
                return self._add_in_order(part)
            self._sums.allreduce([part]).wait()
        except RuntimeError as error:
            raise LinkError(f"a rank of the group is gone: {error}") from error
        return part

    def _add_in_order(self, part: Tensor) -> Tensor:
        """Sum a large part in place: piece by piece in symmetric memory, or else from copies of all parts. Rounds after
        each addition, as symmetric memory does."""
        few, features = self._few, part.shape[1]
        if few is not None and few.room(1, features, part.dtype) is not None:
            for piece in part.split(ROOM // (features * part.element_size())):
                here = few.room(len(piece), features, piece.dtype)
                assert here is not None, "as many rows as there is room for"
                piece.copy_(few(here.copy_(piece)))
            return part
        parts = [torch.empty_like(part) for _ in range(self._degree)]
        self._sums.allgather([parts], [part]).wait()
        part.copy_(parts[0])
        for other in parts[1:]:
            part += other
        return part

    def share(self, tensor: Tensor) -> None:
        """Replace the tensor's values, in place on every rank, with those of rank 0."""
        _broadcast(self._sums, tensor, "a rank of the group is gone")

    def spread(self, data: bytes) -> None:
        """On the leader: send a command to the other ranks."""
        for frame in frames(data):
            _broadcast(self._commands, frame, LEADER_GONE)

    def receive(self) -> bytes:
        """On other ranks: return the leader's next command. Raises LinkError if the leader is gone, or silent past the
        group's timeout."""
        return message_in(self._next(FRAME), self._next)

    def _next(self, size: int) -> Tensor:
        """Return the next frame, which has this size."""
        frame = torch.empty(size, dtype=torch.uint8)
        _broadcast(self._commands, frame, LEADER_GONE)
        return frame


def _broadcast(group: dist.ProcessGroup, tensor: Tensor, failure: str) -> None:
    """Replace the tensor's values with the leader's. Raises LinkError, which says this, if that fails."""
    try:
        group.broadcast([tensor], _FROM_LEADER).wait()
    except RuntimeError as error:
        raise LinkError(f"{failure}: {error}") from error
