"""The kernels of a round compile for a GPU, even on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def compiled(module: str, cache: Path) -> str:
    """Run a module in a process that compiles kernels; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", module],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_sums_have_one_order(tmp_path):
    """The sums of a row have one order beside rows whose logits have another type, and after products of few and of
    many tokens, which have other types. No multiplication is fused with an addition, and no product with one."""
    found = json.loads(compiled("tests.kernels.sum_orders", tmp_path))
    assert {"_find", "_find_cut", "_race", "_finish_race", "_finish_mass", "_add_norm", "_choose"} <= set(found)
    for name, orders in found.items():
        one, *others = orders.values()
        assert all(one == other for other in others), name
        assert "begun" not in one, "a product of one step may round otherwise than one of several"
        assert "fused" not in one, "a variant of a kernel may fuse what another does not"


@pytest.mark.slow
def test_kernels_of_a_round_compile(tmp_path):
    assert {
        "_begin",
        "_reparent",
        "_pack",
        "_remap_draft",
        "_lay_out",
        "_find_nodes",
        "_write_nodes",
        "_prune_tree",
        "_select",
        "_remap_target",
        "_advance",
        "_apply_selection",
        "_verify",
        "_survey",
        "_observe",
        "_finish_observation",
        "_expand",
        "_store_inner_nodes",
        "_with_inner_nodes",
        "_limit_outcomes",
        "_find",
        "_find_cut",
        "_step_kernel",
        "_fixed_step_kernel",
        "_whole_kernel",
        "_many",
        "_prefix_kernel",
        "_own_kernel",
        "_whole_norm",
        "_square_sums",
        "_choose",
        "_experts",
        "_int4",
        "_widened",
        "_count_tokens",
        "_penalise",
    } <= set(json.loads(compiled("tests.kernels.compile_rounds", tmp_path)))
