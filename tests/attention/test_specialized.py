"""The prefix kernel of Hopper GPUs where there is none: it compiles, and leaves room. What it computes only a GPU can say
(`tests/gpu/test_specialized.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

import triton

from smc.attention.kernels import SPECIALIZED_TRITONS, supports_specialized

SHARED, RESERVED, REGISTERS = 228 * 1024, 1024, 64 * 1024
"""Of a multiprocessor: bytes of shared memory, those that each program takes besides, registers."""
OWN_REGISTERS = 256 * 32
"""Of a program of rows' own attention."""


@pytest.mark.skipif(".".join(triton.__version__.split(".")[:2]) not in SPECIALIZED_TRITONS, reason="written for other versions of Triton")
def test_two_programs_share_a_multiprocessor_and_leave_rows_own_attention_registers():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attention.compile_specialized", "32x1x64", "8x5x128"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for made in json.loads(ran.stdout.splitlines()[-1]):
        assert made["specialized"]
        assert 2 * (made["shared"] + RESERVED) <= SHARED
        assert 2 * made["registers"] + OWN_REGISTERS <= REGISTERS


def test_elsewhere_the_kernel_of_any_gpu_reads_prefixes():
    assert not supports_specialized("cpu")
