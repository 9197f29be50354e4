"""A signal to this process's group, as of `timeout` or a terminal, reaches none of Ray's processes."""

from __future__ import annotations

import os

import psutil
import pytest

from services.client import Client

pytestmark = pytest.mark.xdist_group("ray")


def is_ray(command: list[str]) -> bool:
    """A worker, or a program of Ray's; not one that merely has Ray on its path of modules."""
    return any(part.startswith("ray::") or (part.startswith("/") and "/ray/" in part) for part in command)


def test_processes_of_ray_are_in_other_sessions(group):
    with Client(group.address) as client:
        assert client.generate("1 + 1 =", seed=1, max_tokens=2).tokens
    ours = os.getsid(0), os.getpgid(0)
    children = psutil.Process().children(recursive=True)
    names = {child.pid: child.name() for child in children if child.status() != psutil.STATUS_ZOMBIE}
    assert {"gcs_server", "raylet"} <= set(names.values()) and set(group.pids().values()) <= set(names)
    # Not the helpers of other tests in this process.
    of_ray = {child.pid for child in children if child.pid in names and is_ray(child.cmdline())}
    assert set(group.pids().values()) <= of_ray
    assert not [names[pid] for pid in of_ray if os.getsid(pid) == ours[0] or os.getpgid(pid) == ours[1]]
