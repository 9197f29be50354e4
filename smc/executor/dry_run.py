"""A round that launches all kernels and runs nothing: its stages are captured as CUDA graphs, which are thrown away. So
values do not matter, and memory does not change. Of layers whose kernels are alike, only the first ones are launched.
What a dry run needs of kernels is known before any is compiled (`smc.kernels.compile_jobs.recorded`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from smc.api.engine_config import EngineConfig
from smc.executor.forward import Reader
from smc.executor.graph_runner import RECORDINGS, GraphRunner, StageRunner
from smc.executor.round_executor import DraftRunner, LocalRoundExecutor, OneModelExecutor, TargetRunner
from smc.executor.triton_forward import TritonForward
from smc.executor.triton_ops import TritonOps
from smc.executor.whole_pass import PassKind, timed_rows
from smc.executor.worker import ModelWorker
from smc.kernels.compile_jobs import Need
from smc.kernels.megakernel import MOST_TOKENS, MegakernelJob, Weights, obstacle, tiles_of
from smc.model.decoder import Decoder
from smc.model.linear import Linear
from smc.round.tensors import Rows
from smc.types import ModelRole


class DryRunner(GraphRunner):
    """Captures every stage, each time, and keeps nothing."""

    def beside(self) -> DryRunner:
        return DryRunner(self.device, self.stream)

    def run(self, key: Hashable, name: str, stage: Callable[[], Any]) -> Any:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with RECORDINGS:
            self._first = self._first or graph
            # Libraries may allocate memory when they are first used: other captures forbid that.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                return stage()
            finally:
                graph.capture_end()

    def run_if(
        self, wanted_1: Tensor, key: Hashable, name: str, stage: Callable[[], tuple[()]], *, host_waits: bool
    ) -> None:
        self.run(key, name, stage)

    def keep(self, key: Hashable, name: str, make: Callable[[], Any]) -> Any:
        return make()

    def copy_of(self, key: Hashable, name: str, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self.device)

    def read(self, *_: Any) -> Any:
        """Read nothing."""


class DryChannel:
    """A channel to a model in another process, which takes no part in a dry run."""

    host_waits = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, key: Hashable, name: str, tensor: Tensor, *, keeps: bool = False) -> None: ...

    def receive(
        self, key: Hashable, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device) if into is None else into

    def share(self, tensor: Tensor) -> Tensor:
        return tensor

    def settle(self) -> None: ...


class DryDraftForward(TritonForward):
    """A draft's passes in many launches, and those that `WholePassForward` times."""

    def __init__(self, reader: Reader, need: Need) -> None:
        super().__init__(reader)
        self._need = need
        self._is_timed = obstacle(self.model, self.pool, reader.width) is None
        self._timed: set[PassKind] = set()

    def __call__(self, tokens_T: Tensor, rows: Rows) -> Tensor:
        if self._is_timed and len(tokens_T) <= MOST_TOKENS:
            self._time(PassKind(tiles_of(len(tokens_T)), rows.queries, rows.contexts), tokens_T, rows)
        return super().__call__(tokens_T, rows)

    def _time(self, kind: PassKind, tokens_T: Tensor, like: Rows) -> None:
        if kind not in self._timed:
            if kind.tiles not in {timed.tiles for timed in self._timed}:
                self._need(MegakernelJob.of(self.model, kind.tiles))
            self._timed.add(kind)
            super().__call__(tokens_T, timed_rows(kind, like, self))


class DryOps(TritonOps):
    """The operations of a dry run: those of a GPU."""

    def __init__(self, need: Need, runner: Callable[[torch.device], StageRunner] = DryRunner) -> None:
        """`need`: called for kernels that Triton does not compile."""
        super().__init__()
        self._need, self._runner = need, runner

    def stage_runner(self, device: torch.device) -> StageRunner:
        return self._runner(device)

    def drafting(self, reader: Reader) -> TritonForward:
        return DryDraftForward(reader, self._need)


class _NoSum:
    """A `smc.model.parallel.Reduce` without other ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, part_TE: Tensor) -> Tensor:
        return part_TE

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(tokens, features, dtype=dtype, device=self._device)


@contextlib.contextmanager
def dry_executor(
    config: EngineConfig, workers: Mapping[ModelRole, ModelWorker], ops: DryOps
) -> Iterator[LocalRoundExecutor | OneModelExecutor]:
    """In this context there is an executor of dry runs on the workers of this process, whose models have their first
    layers only. It has memory of its own for the state of slots. Other ranks take no part."""
    before = [(worker, worker.stages, worker.ops) for worker in workers.values()]
    with contextlib.ExitStack() as stack:
        for worker in workers.values():
            stack.enter_context(_without_sums(worker.model, worker.device))
            stack.enter_context(_first_layers(worker.model))
        try:
            if len(workers) > 1:
                yield LocalRoundExecutor(config, workers, ops)
            else:
                ((role, worker),) = workers.items()
                runner = DraftRunner if role is ModelRole.DRAFT else TargetRunner
                stages = ops.stage_runner(worker.device)
                yield OneModelExecutor(runner(config, worker, ops, stages, DryChannel(worker.device)))
        finally:
            for worker, stages, own_ops in before:
                worker.stages, worker.ops = stages, own_ops


@contextlib.contextmanager
def _first_layers(model: Decoder) -> Iterator[None]:
    """In this context the model has as many of its layers as have all of its kernels."""
    layers = model.layers
    model.layers = layers[: telling_layers(model)]
    try:
        yield
    finally:
        model.layers = layers


def telling_layers(model: Decoder) -> int:
    """Return how many of the first layers have all kinds of layers and, since a kernel adds what the layer before it
    has computed, all pairs of kinds that follow each other. Checkpoints may keep some matrices unquantised."""
    kinds = [
        (
            model.config.window_of(layer.index),
            layer.rope_kind,
            tuple(Weights.of(matrix) for matrix in layer.modules() if isinstance(matrix, Linear)),
        )
        for layer in model.layers
    ]
    pairs = list(pairwise(kinds))
    return max((pairs.index(pair) + 2 for pair in pairs), default=1)


@contextlib.contextmanager
def _without_sums(model: Decoder, device: torch.device) -> Iterator[None]:
    """In this context the model does not wait for other ranks that hold parts of it."""
    modules: Iterable[Any] = model.modules()
    before = [(module, module.reduce) for module in modules if getattr(module, "reduce", None) is not None]
    try:
        for module, _ in before:
            module.reduce = _NoSum(device)
        yield
    finally:
        for module, reduce in before:
            module.reduce = reduce
