"""The kernels of a round compile for a GPU, even on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_of_a_round_compile(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_rounds"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
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
        "_expand",
        "_store_inner_nodes",
        "_with_inner_nodes",
        "_limit_outcomes",
        "_find",
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
    } <= set(json.loads(run.stdout))
