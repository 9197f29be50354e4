"""Everything here needs a GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_ignore_collect(config):
    """Without a GPU, `make test` need not import what it would skip; the whole run does, and finds what no longer can
    be imported."""
    return True if config.option.markexpr == "not slow" and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Bounds on rounding errors hold for nearly all random inputs, not for all: every run has the same ones."""
    torch.manual_seed(0)
