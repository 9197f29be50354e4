"""Errors of a worker group that fails to start."""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError

from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.worker_group import WorkerGroup


@pytest.mark.parametrize(
    "error", [ValueError("no such file"), RayTaskError("start", "a long traceback", ValueError("no such file"))]
)
def test_a_start_that_fails_says_why(monkeypatch, error):
    """The error names the cause, also if the start failed in a process of Ray, whose error begins with that process's
    address."""

    def fail(self: WorkerGroup) -> None:
        raise error

    monkeypatch.setattr(WorkerGroup, "_start", fail)
    with pytest.raises(WorkerGroupError, match=r"^the worker group did not start: no such file$"):
        WorkerGroup(WorkerGroupConfig(), None, incarnation=1).start()
