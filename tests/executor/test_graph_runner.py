"""Stages that a GPU may leave out, with a runner that records nothing; and when the host's copies are freed."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from smc.executor.graph_runner import RECORDINGS, AsyncResult, GraphRunner, StageRunner


class Listing(GraphRunner):
    """Lists the stages that run."""

    def __init__(self) -> None:
        StageRunner.__init__(self, torch.device("cpu"))
        self.ran: list[str] = []

    def run(self, key, name, stage):
        kept = self._of(key)
        if name in kept.seen:
            kept.graphs[name] = (None, ())
        kept.seen.add(name)
        self.ran.append(name)


def test_dummy_rounds_warm_up_what_they_do_not_want():
    """Otherwise the first request that wants it would wait for its kernels."""
    runner = Listing()
    for wanted in (False, False, False, True, False):
        runner.run_if(torch.tensor([wanted]), "key", "stage", lambda: (), host_waits=True)
    assert len(runner.ran) == 3


def test_the_error_of_a_stage_is_not_that_of_ending_its_recording(monkeypatch):
    """Otherwise a lack of memory, which says what to lower, would be taken for another error."""

    class Spoilt:
        def capture_begin(self, **_: object) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def stage() -> tuple[()]:
        raise torch.OutOfMemoryError("no memory")

    runner = Listing()
    monkeypatch.setattr(runner, "_make_room", lambda: None)
    runner.stream = runner._pool = runner._first = None
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        runner._record(runner._of("key"), "stage", Spoilt(), stage)
    with pytest.raises(RuntimeError, match="during capture"):
        runner._record(runner._of("key"), "stage", Spoilt(), lambda: ())
    assert gc.isenabled() and not runner._of("key").graphs


class Arrived:
    """Stands for the event of a copy that has ended."""

    def synchronize(self):
        pass


def test_a_result_is_not_freed_while_another_thread_records():
    """A GPU notes the last use of pinned memory when it is freed, on a stream that may be recorded just then."""
    host = torch.arange(3)
    freed, memory = threading.Event(), weakref.ref(host)
    weakref.finalize(host, freed.set)
    result = AsyncResult((host,), Arrived(), {})
    del host
    with ThreadPoolExecutor(1) as other:
        with RECORDINGS:
            with RECORDINGS:
                waiting = other.submit(result.result)
            assert not freed.wait(0.3) and memory() is not None and not gc.isenabled()
        np.testing.assert_array_equal(waiting.result(20)[0], [0, 1, 2])
    assert freed.wait(20) and gc.isenabled()
    np.testing.assert_array_equal(result.result()[0], [0, 1, 2])


def test_nothing_is_recorded_while_a_result_is_freed():
    with ThreadPoolExecutor(1) as other:
        with RECORDINGS.apart():
            begun = other.submit(RECORDINGS.__enter__)
            with pytest.raises(TimeoutError):
                begun.result(0.2)
        begun.result(20)
        with RECORDINGS:  # a thread of its own never waits for itself
            pass
        assert not gc.isenabled()
        other.submit(RECORDINGS.__exit__).result(20)
    with RECORDINGS, RECORDINGS.apart():
        pass
    assert gc.isenabled()
