"""All tests in this folder need a GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_ignore_collect(config):
    """Skip the folder's imports in `make test` on a machine without a GPU. The whole suite collects it everywhere, and
    so finds modules that cannot be imported."""
    return True if config.option.markexpr == "not slow" and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch: bounds on rounding errors hold for nearly all random inputs, so every run uses the same ones."""
    torch.manual_seed(0)
