"""The Ray cluster that a service starts for itself: no other process on this machine can join it, and reservations of
an actor are released after Ray has restarted that actor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from services.launch import cluster

pytestmark = pytest.mark.xdist_group("ray")
SCRIPT = """
import sys, ray
try:
    ray.init(address=sys.argv[1], logging_level="CRITICAL")
except ConnectionError:
    print("refused")
else:
    print("let in")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("RAY_AUTH_MODE") == "disabled", reason="whoever runs the tests has asked for no authentication"
)
def test_cluster_requires_token(ray_cluster):
    """A process without a token, or with a wrong one, cannot join. The setting of `RAY_NUM_REDIS_GET_RETRIES` makes Ray
    try once instead of twenty times, a second apart."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "RAY_NUM_REDIS_GET_RETRIES": "1"
    }
    command = [sys.executable, "-c", SCRIPT, ray.get_runtime_context().gcs_address]
    strangers = [
        subprocess.Popen(command, env=inherited | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for settings in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    ]
    for stranger in strangers:
        said, error = stranger.communicate(timeout=120)
        assert said == "refused\n", error


class Holder:
    """An actor that, whenever its process starts, releases what it left behind and reserves room for two ranks."""

    def __init__(self) -> None:
        cluster.release_left()
        cluster.wait_for(cluster.reserve(2, False, None), 2, False, None, 120)

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
def test_a_restarted_actor_frees_what_it_had_reserved(ray_cluster):
    """A restarted actor releases what its earlier process reserved, and nothing that others reserved."""
    before, free = set(ray.util.placement_group_table()), int(ray.available_resources()["CPU"])

    def states() -> list[str]:
        found = ray.util.placement_group_table()
        return sorted(found[name]["state"] for name in found.keys() - before)

    ours = cluster.reserve(1, False, None)
    cluster.wait_for(ours, 1, False, None, 120)
    holder = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Holder).remote()
    try:
        first = ray.get(holder.pid.remote(), timeout=120)
        assert states() == ["CREATED", "CREATED"]
        os.kill(first, signal.SIGKILL)
        assert ray.get(holder.pid.remote(), timeout=120) != first
        assert states() == ["CREATED", "CREATED", "REMOVED"]
        assert cluster.count_that_fit([(1, False, None), (2, False, None)]) == (free - 3) // 3
    finally:
        ray.kill(holder)
        remove_placement_group(ours)
