"""The prefix kernel of Hopper GPUs, on machines without one: it compiles, leaves enough resources free, and is used on
no other device. `tests/gpu/test_specialized.py` checks its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from smc.attention.kernels import SharedPrefixAttention, _prefix_kernel, compiles_specialized, supports_specialized

ROOT = Path(__file__).parents[2]
SHARED, RESERVED, REGISTERS = 228 * 1024, 1024, 64 * 1024
"""Resources of a multiprocessor: bytes of shared memory, bytes of it that every program reserves, and registers."""
OWN_SHARED, OWN_REGISTERS = 8 * 1024, 256 * 32
"""Resources of a program of the rows' own attention: bytes of shared memory with narrow heads, and registers with
any."""


@pytest.mark.slow
@pytest.mark.skipif(not compiles_specialized(), reason="written for other versions of Triton")
def test_two_programs_share_a_multiprocessor_where_heads_are_narrow_with_rows_own_attention():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attention.compile_specialized", "32x1x64", "8x5x128"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    narrow, wide = json.loads(ran.stdout.splitlines()[-1])
    assert narrow["specialized"] and wide["specialized"]
    assert 2 * (narrow["shared"] + RESERVED) + OWN_SHARED + RESERVED <= SHARED
    assert 2 * (wide["shared"] + RESERVED) <= SHARED
    assert 2 * max(narrow["registers"], wide["registers"]) + OWN_REGISTERS <= REGISTERS


@pytest.mark.parametrize(
    ("capability", "version", "supported"),
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.7.1", True),
        ((8, 9), "3.6.0", False),
        ((10, 0), "3.6.0", False),
        ((12, 0), "3.7.1", False),
        ((9, 0), "3.5.1", False),
        ((9, 0), "3.8.0", False),
    ],
)
@pytest.mark.parametrize("interpreted", [False, True])
def test_supported_gpus(monkeypatch, capability, version, supported, interpreted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    assert supports_specialized("cuda:1") == (supported and not interpreted)


def test_elsewhere_the_kernel_of_any_gpu_reads_prefixes():
    attention = SharedPrefixAttention(1, 32, 32, 1, (32, 8), 64, torch.bfloat16, "cpu", 4096)
    assert attention.tuning.specialized and attention.prefix_kernel is _prefix_kernel
