"""A worker group that is stopped while it starts leaves no processes and no reservations behind. Repeated restarts:
test_faults.py."""

from __future__ import annotations

import threading
import time

import pytest
import ray

from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.worker_group import WorkerGroup
from tests.service.running import ranks

pytestmark = pytest.mark.xdist_group("ray")


def until(condition, timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def start_in_thread(**settings) -> tuple[WorkerGroup, threading.Thread, list[Exception]]:
    config, errors = WorkerGroupConfig(start_timeout=90.0, **settings), []
    group = WorkerGroup(config, config.serving_pair(), 1)

    def start() -> None:
        try:
            group.start()
        except WorkerGroupError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    return group, thread, errors


@pytest.mark.parametrize("ready", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_stop_in_the_middle_of_a_start(ray_cluster, ready):
    """A signal may stop the service while it is still starting. `ready`: number of actors that have been created by
    then."""
    others, room = ranks(), ray.available_resources()["CPU"]
    group, thread, errors = start_in_thread()
    until(lambda: len(group.actors) >= ready, 30, "no actor was made")
    if ready == 3:
        until(lambda: group.progress().percent == {"draft": 100, "target": 100}, 60, "nothing was loaded")
    group.stop(timeout=0.1)
    thread.join(20)
    assert not thread.is_alive() and errors, "the start did not notice"
    until(lambda: ranks() <= others, 20, "processes of the worker group stay")
    # Another test may have given back its own place since.
    until(lambda: ray.available_resources().get("CPU", 0) >= room, 20, "its place is not given back")


def test_stop_while_waiting_for_resources(ray_cluster, caplog):
    """The log says at once which resources are missing, and a stop ends the waiting start."""
    others = ranks()
    group, thread, errors = start_in_thread(device="cuda")
    until(lambda: group._groups, 30, "nothing was reserved")
    said = "--device cuda needs 2: --target-tp 1 and --draft-tp 1, one for each process; waiting for hosts to join"
    assert f"the cluster has no GPUs; {said}" in caplog.text
    group.stop(timeout=0.1)
    thread.join(10)
    assert not thread.is_alive() and errors, "the start still waits"
    assert ranks() <= others
