"""Types that several packages share. Imports neither torch nor numpy."""

from __future__ import annotations

from enum import StrEnum
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


def mask_span(role: ModelRole) -> str:
    """Name of the span in which masks of constrained requests were computed beside a model's work."""
    return f"masks of {role}"


def is_mask_span(span: str) -> bool:
    return span.startswith("masks of ")
