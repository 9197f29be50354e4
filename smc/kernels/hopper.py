"""The GPU that sizes are chosen for, an H100 or H200; others run with the same."""

from __future__ import annotations

MULTIPROCESSORS = 132
