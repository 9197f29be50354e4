"""Types that several packages share. Imports neither torch nor numpy."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Array = TypeVar("Array", "np.ndarray", "Tensor")
"""A NumPy array on the host, or a tensor on the model's device."""


class ModelRole(StrEnum):
    """One of the two models. Compares equal to its name, so it can be a key in messages that are sent as text."""

    DRAFT = "draft"
    TARGET = "target"


class Numerics(StrEnum):
    """What the bits of a result may depend on, on GPUs."""

    INVARIANT = "invariant"
    """On the request alone: every sum has one order, whatever is computed beside it."""
    FASTEST = "fastest"
    """Also on what is computed beside it: the order of sums is the fastest for the number of tokens."""


BOTH_MODELS = (ModelRole.DRAFT, ModelRole.TARGET)


class Decoding(IntEnum):
    """How a request is decoded."""

    TARGET = 0
    """The target alone, token after token."""
    DRAFT = 1
    """The draft alone."""
    WALK = 2
    """Exactly: the draft grows a tree, and the target's own draws walk through it (`smc.algorithm.verification`)."""
    REJECTION = 3
    """Exactly: each row is a draft chain from one root, verified by rejection sampling."""
    INDEPENDENT = 4
    """SMC: each particle draws its own tokens, and the population is resampled (`smc.algorithm.selection`)."""
    DISTINCT = 5
    """SMC: particles are sampled without replacement from all candidates of the population
    (`smc.algorithm.expansion`)."""

    @property
    def roles(self) -> tuple[ModelRole, ...]:
        """The models that take part. The first one drafts, or decodes alone."""
        return _ALONE.get(self, BOTH_MODELS)

    @property
    def deciding(self) -> tuple[ModelRole, ...]:
        """The models on whose results the answer depends."""
        return (ModelRole.TARGET,) if self is Decoding.WALK else self.roles


_ALONE = {Decoding.TARGET: (ModelRole.TARGET,), Decoding.DRAFT: (ModelRole.DRAFT,)}
EXACT = frozenset({Decoding.WALK, Decoding.REJECTION})
SMC = frozenset({Decoding.INDEPENDENT, Decoding.DISTINCT})
OF_BOTH_MODELS = EXACT | SMC
SEPARATE = frozenset({Decoding.TARGET, Decoding.DRAFT, Decoding.INDEPENDENT})
"""Each row continues by itself; otherwise all rows of a request compete for its places, or share a root."""


def mask_span(role: ModelRole) -> str:
    """Name of the span in which masks of constrained requests were computed beside a model's work."""
    return f"masks of {role}"


def is_mask_span(span: str) -> bool:
    return span.startswith("masks of ")
