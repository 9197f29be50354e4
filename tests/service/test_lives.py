"""Lives of the worker group that end before they have begun, and many in a row: nothing stays behind."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest
import ray

from services.launch.config import WorkerGroupConfig
from services.launch.errors import WorkerGroupError
from services.launch.worker_group import WorkerGroup
from smc.api.engine_config import EngineConfig
from tests.service.running import open_files

pytestmark = pytest.mark.xdist_group("ray")


def ranks() -> set[int]:
    """Processes of any worker group."""
    return {p.pid for p in psutil.Process().children(recursive=True) if _is_rank(p)}


def _is_rank(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("ray::smcserve: ") for word in process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def until(condition, timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def own_threads() -> list[str]:
    """Names of this process's threads, but for asyncio's pool: that takes another one whenever the last has not quite
    become idle."""
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]


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


@pytest.mark.parametrize("ready", [0, 1, 3])
def test_stop_in_the_middle_of_a_start(ray_cluster, ready):
    """As a signal does when the service is still starting. `ready`: actors that have been made by then."""
    others, room = ranks(), ray.available_resources()["CPU"]
    group, thread, errors = start_in_thread()
    until(lambda: len(group.actors) >= ready, 30, "no actor was made")
    if ready == 3:
        until(lambda: group.progress().percent == {"draft": 100, "target": 100}, 60, "nothing was loaded")
    group.stop(timeout=0.1)
    thread.join(20)
    assert not thread.is_alive() and errors, "the start did not notice"
    until(lambda: ranks() <= others, 20, "processes of the worker group stay")
    until(lambda: ray.available_resources().get("CPU") == room, 20, "its place is not given back")


def test_stop_while_it_waits_for_room(ray_cluster, caplog):
    """What is missing is said at once."""
    others = ranks()
    group, thread, errors = start_in_thread(device="cuda")
    until(lambda: group._groups, 30, "nothing was reserved")
    said = "--device cuda needs 2: --target-tp 1 and --draft-tp 1, one for each process; waiting for hosts to join"
    assert f"the cluster has no GPUs; {said}" in caplog.text
    group.stop(timeout=0.1)
    thread.join(10)
    assert not thread.is_alive() and errors, "the start still waits"
    assert ranks() <= others


@pytest.mark.slow
def test_many_lives(start):
    """Files and threads of this process, where gateway and supervisor are, after every restart.

    Pools of threads fill up as they are first used, so the first two lives say what is held; what every life leaves
    behind is then one more by the third."""
    others = ranks()
    with start(engine=EngineConfig(block=3, branches=2, max_slots=4)) as running:
        files, threads = [], []
        for _ in range(3):
            incarnation = running.supervisor.incarnation
            running.kill("coordinator")
            running.until(
                lambda last=incarnation: running.supervisor.incarnation == last + 1 and running.supervisor.serving,
                60,
                "no restart",
            )
            with running.client() as client:
                client.generate("x", particles=2, max_tokens=4, timeout=30)
            until(lambda: len(ranks() - others) == 3, 20, "processes of earlier lives stay")
            files.append(open_files(os.getpid()))
            threads.append(len(own_threads()))
        until(lambda: open_files(os.getpid()) <= max(files[:2]), 10, f"open files: {files}")
        until(lambda: len(own_threads()) <= max(threads[:2]), 10, f"threads: {threads}, now {own_threads()}")
