"""What an actor has reserved on a real cluster, after Ray has started it again."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from services.launch import cluster

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]


class Holder:
    """Reserves whenever its process starts."""

    def __init__(self) -> None:
        cluster.release_left()
        cluster.wait_for(cluster.reserve(2, False, None), 2, False, None, 120)

    def pid(self) -> int:
        return os.getpid()


def states() -> list[str]:
    return sorted(group["state"] for group in ray.util.placement_group_table().values())


def test_a_restarted_actor_frees_what_it_had_reserved():
    """And nothing of others."""
    cluster.connect(None)
    try:
        cluster.wait_for(cluster.reserve(1, False, None), 1, False, None, 120)
        holder = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Holder).remote()
        first = ray.get(holder.pid.remote(), timeout=120)
        assert states() == ["CREATED", "CREATED"]
        os.kill(first, signal.SIGKILL)
        assert ray.get(holder.pid.remote(), timeout=120) != first
        assert states() == ["CREATED", "CREATED", "REMOVED"]
        assert cluster.count_that_fit([(1, False, None), (2, False, None)]) == (cluster.LOCAL_CPUS - 3) // 3
    finally:
        cluster.disconnect()
