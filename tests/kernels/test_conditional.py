"""The kernel of a condition compiles without a GPU. What the graph does is tested on one
(`tests/gpu/test_conditional.py`)."""

from __future__ import annotations

from smc.kernels.conditional import OPTIONS, SOURCE
from smc.kernels.nvrtc import compiled


def test_the_driver_is_left_to_find_the_function_that_sets_a_condition():
    code = compiled("set_condition", SOURCE, OPTIONS, form="PTX").decode()
    assert ".entry set_condition(" in code and ".extern .func cudaGraphSetConditional" in code
