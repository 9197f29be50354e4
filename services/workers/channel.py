"""A side's channel in a process of its own: the leader talks to the other side's leader and tells its own ranks."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from services.link.base import LinkError, PeerEnd
from services.workers.parallel import TensorParallel
from smc.executor.graph_runner import StageRunner

logger = logging.getLogger(__name__)


class PeerChannel:
    """`smc.executor.model_runner.Channel`. `end` is the leader's, None at other ranks; `group` None: there are no
    others."""

    def __init__(
        self,
        end: PeerEnd | None,
        group: TensorParallel | None,
        stages: StageRunner,
        timeout: float,
        *,
        outlives_peer: bool = False,
    ) -> None:
        """`timeout`: seconds to wait for the other side where the host has to. `outlives_peer`: when the other side is
        lost, what it was to send is zeros, until `reconnect`: rounds that are under way end on every rank, and nobody
        reads what comes of them."""
        self._end, self._group, self._stages, self._timeout = end, group, stages, timeout
        self._outlives_peer = outlives_peer
        self._lost = False
        self._coming: tuple[int, Future[PeerEnd]] | None = None
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def reconnect(self, epoch: int, make: Callable[[], PeerEnd]) -> bool:
        """Another leader, of this epoch, comes to the other side: `make`, which waits for it, is begun in a thread.
        Asked again, whether that has been done; from then on the end is the new one. Raises RuntimeError if it does not
        come; then it is lost, too."""
        assert self._end is not None
        if self._coming is None or self._coming[0] != epoch:
            self._lost = True
            self._end.close()
            self._coming = epoch, _begun(make)
        _, coming = self._coming
        if not coming.done():
            return False
        self._coming = None
        self._end = coming.result()
        self._sent.clear()
        self._received.clear()
        self._lost = False
        return True

    def close(self) -> None:
        if self._end is not None:
            self._end.close()

    def send(self, name: str, tensor: Tensor) -> None:
        if self._end is not None and not self._lost:
            self._sent[name] += 1
            try:
                self._end.send(name, self._sent[name], tensor)
            except LinkError as error:
                self._set_lost(error)

    def receive(
        self, key: tuple, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
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
            self._received[name] += 1
            try:
                end.receive(name, self._received[name], here, self._timeout)
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
    """Its result, which a thread works on that nobody waits for at the end of the process."""
    coming: Future[PeerEnd] = Future()

    def work() -> None:
        try:
            coming.set_result(make())
        except Exception as error:  # of whoever asks for the result
            coming.set_exception(error)

    threading.Thread(target=work, name="reconnect", daemon=True).start()
    return coming
