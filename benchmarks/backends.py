"""Backends that run modes of decoding: on the GPUs or the CPU of this process, or in other processes
(`benchmarks.processes`).

Knows nothing about what is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.library_products import LibraryOps
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method
from smc.executor.round_executor import LocalRoundExecutor
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.local_engine import ModelPair, local_engine
from smc.model.config import ModelConfig
from smc.model.decoder import Decoder
from smc.model.draft_vocab import DraftHead
from smc.model.tokenizer import Tokenizer
from smc.scheduler.engine import Engine
from smc.stops import TokenBytes
from smc.types import Decoding, ModelRole, Numerics

OWN, LIBRARY = "own", "library"
OPS: Mapping[str, Callable[[], TritonOps]] = {OWN: TritonOps, LIBRARY: LibraryOps}
"""Operations of rounds by the name of their kernels."""


@dataclass(frozen=True)
class Mode:
    """One way of decoding on a number of GPUs: a line of the table."""

    name: str
    method: Method
    config: EngineConfig
    particles: int
    degrees: tuple[int, int]
    """Numbers of GPUs of draft and target; 0: the draft is on the target's first GPU."""
    population: str | None = None
    """Population of SMC; None: the library's default."""
    verification: str | None = None
    """Verification of exact decoding; None: the library's default."""
    shared: bool = False
    """Every GPU of the target holds its share of both models."""
    kernels: str = OWN
    """Key of `OPS`; in processes of their own, models always have their own kernels."""

    @property
    def gpus(self) -> int:
        return self.degrees[1] if self.shared else sum(self.degrees)


class PromptBackend(Protocol):
    """A backend that can run prompts."""

    tokenizer: Tokenizer

    def engine(self, mode: Mode, config: EngineConfig) -> AbstractContextManager[Engine]:
        """Make an engine with these settings; `config` includes the pages of both pools and the longest context."""
        ...

    def shape(self, mode: Mode, role: ModelRole) -> ModelConfig:
        """Return the shape of a whole model, before it is split among GPUs."""
        ...


class BenchBackend(PromptBackend, Protocol):
    """A backend that can also time rounds."""

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        """Return the bytes of weights that the fullest GPU of a model reads in a pass."""
        ...

    def memory(self, mode: Mode) -> int:
        """Return the peak bytes in use on the fullest GPU since the running engine was made."""
        ...


class GpuBackend:
    """Runs on GPUs of this process: one for each model, or one for both."""

    def __init__(
        self,
        models: Callable[[ModelRole, str], Decoder],
        tokenizer: Tokenizer,
        draft_head: Callable[[str], DraftHead | None] = lambda device: None,
    ) -> None:
        """`models` returns the model of a role on a device. `draft_head` returns the part of the draft's head on a
        device that it proposes with; None: the whole head."""
        self._models, self.tokenizer, self._draft_head = models, tokenizer, draft_head

    @contextmanager
    def engine(self, mode: Mode, config: EngineConfig) -> Iterator[Engine]:

        context = config.max_context
        assert context is not None, "measurements say how long requests are"
        pages = config.pool_pages(context)
        devices = self._devices(mode)
        heads = {ModelRole.DRAFT: self._draft_head(devices[ModelRole.DRAFT]), ModelRole.TARGET: None}
        workers = {
            role: ModelWorker(
                role,
                self._models(role, device),
                width=config.width(context),
                pages=pages,
                vocab_size=self.tokenizer.size,
                token_bytes=TokenBytes.of(self.tokenizer),
                draft_head=heads[role],
                numerics=Numerics(config.numerics),
            )
            for role, device in devices.items()
        }
        for device in devices.values():
            torch.cuda.reset_peak_memory_stats(device)
        pair = LocalRoundExecutor(config, workers, OPS[mode.kernels]())
        yield Engine(
            config.on_device("cuda"),
            workers,
            self.tokenizer,
            executor=pair,
            pages=dict.fromkeys(ModelRole, pages),
            context=context,
        )
        for device in devices.values():
            torch.cuda.synchronize(device)  # the last round may still run
        del pair, workers
        gc.collect()
        torch.cuda.empty_cache()

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        device = self._devices(mode)[role]
        return read_bytes(self._models(role, device), self._draft_head(device) if role == ModelRole.DRAFT else None)

    def shape(self, mode: Mode, role: ModelRole) -> ModelConfig:
        return self._models(role, self._devices(mode)[role]).config

    def memory(self, mode: Mode) -> int:
        return max(torch.cuda.max_memory_allocated(device) for device in self._devices(mode).values())

    def _devices(self, mode: Mode) -> dict[ModelRole, str]:
        return {ModelRole.DRAFT: "cuda:0", ModelRole.TARGET: "cuda:1" if mode.gpus > 1 else "cuda:0"}


class CpuBackend:
    """Runs a loaded pair in this process, on the device of its models."""

    def __init__(self, pair: ModelPair) -> None:
        self._pair, self.tokenizer = pair, pair.tokenizer

    @contextmanager
    def engine(self, mode: Mode, config: EngineConfig) -> Iterator[Engine]:
        yield local_engine(self._pair, config)

    def shape(self, mode: Mode, role: ModelRole) -> ModelConfig:
        return getattr(self._pair, role).config


class MixedBackend:
    """Runs a pair that shares one GPU in this process, where the two models exchange data without the host, and every
    other mode in `apart`."""

    def __init__(self, local: BenchBackend, apart: BenchBackend) -> None:
        self._local, self._apart, self.tokenizer = local, apart, apart.tokenizer

    def engine(self, mode: Mode, config: EngineConfig) -> AbstractContextManager[Engine]:
        return self._of(mode).engine(mode, config)

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        return self._of(mode).weight_bytes(mode, role)

    def shape(self, mode: Mode, role: ModelRole) -> ModelConfig:
        return self._of(mode).shape(mode, role)

    def memory(self, mode: Mode) -> int:
        return self._of(mode).memory(mode)

    def _of(self, mode: Mode) -> BenchBackend:
        return self._local if mode.name == "lockstep" else self._apart


def numerics_of_models(engine: Engine, decoding: Decoding) -> Numerics:
    """Return what the bits of results depend on: invariant if all models that take part in this decoding run so,
    whatever the engine was asked for."""
    invariant = all(engine.workers[role].numerics is Numerics.INVARIANT for role in decoding.roles)
    return Numerics.INVARIANT if invariant else Numerics.FASTEST


def read_bytes(model: Decoder, draft_head: DraftHead | None = None) -> int:
    """Return the bytes of the weights that a pass reads: all but the embedding; of the head, the part that is used."""
    head = model.lm_head if draft_head is None else draft_head.matrix
    elsewhere = [weight for name, weight in model.named_parameters() if not name.startswith(("embed.", "lm_head."))]
    return sum(weight.nbytes for weight in (*elsewhere, *head.parameters()))
