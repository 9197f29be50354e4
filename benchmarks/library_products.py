"""Rounds on a GPU without our kernels for passes of few rows: the other side of a comparison that shows what those
kernels bring (`smcserve bench --kernels library`). Only measurements use it.

What differs: the library computes all matrix products of rounds, so that gate, up and their activation are two launches
and no draft's pass is one launch, and each kernel begins when the one before it has ended. What stays: attention,
norms, sampling and selection by our kernels, and CUDA graphs."""

from __future__ import annotations

from smc.executor.forward import Reader, StaticForward
from smc.executor.triton_forward import TritonForward
from smc.executor.triton_ops import TritonOps
from smc.model.decoder import Activations
from smc.model.linear import Linear
from smc.types import Numerics


class LibraryForward(TritonForward):
    """`TritonForward` with the library's products and without early launches. Raises ValueError for models with
    experts, whose products the library cannot compute in a CUDA graph."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader, pdl=False)
        if count := reader.model.config.num_experts:
            raise ValueError(f"--kernels library: the {reader.name} has {count} experts; allowed: models without")

    def _few(self, x: Activations, matrix: Linear) -> bool:
        return False


class LibraryOps(TritonOps):
    """`TritonOps` with `LibraryForward` for the passes of rounds. Prompts run as they always do."""

    def forward(self, reader: Reader) -> StaticForward:
        assert self.numerics(reader) is Numerics.FASTEST, "one order of sums has products of its own"
        return LibraryForward(reader)
