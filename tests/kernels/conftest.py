"""Kernels run on the GPU if there is one, otherwise in Triton's interpreter. Without Triton these tests are not
collected."""

from __future__ import annotations

import importlib.util

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return DEVICE
