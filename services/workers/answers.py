"""Sends a leader's responses in the order of its commands, each when what it tells of has come from the device."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from services.link.base import LAYOUT_VERSION, LeaderEnd, failure_text
from services.pb import particles_pb2 as pb

CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Answers:
    """`waits`: what responses tell of may take a while; a thread waits for it, so that the next command can be carried
    out."""

    def __init__(self, end: LeaderEnd, epoch: int, *, waits: bool) -> None:
        self._end, self._epoch = end, epoch
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], pb.WorkResponse]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True) if waits else None
        if self._thread is not None:
            self._thread.start()

    def put(self, sequence: int, respond: Callable[[], pb.WorkResponse]) -> None:
        """Send what `respond` returns for command `sequence`, after all that was put before it."""
        if self._thread is None:
            self._send(respond())
        else:
            self._queue.put((sequence, respond))

    def fail(self, sequence: int, error: Exception) -> None:
        """Say that the worker could not carry out a command and stops; whatever else was put may never be sent."""
        failure = pb.Failure(message=failure_text(error))
        self._send(pb.WorkResponse(version=LAYOUT_VERSION, epoch=self._epoch, sequence=sequence, failure=failure))

    def close(self) -> None:
        """After everything has been sent, or has taken too long."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        for sequence, respond in iter(self._queue.get, None):
            try:
                self._send(respond())
            except Exception as error:  # of the device, met by whoever waits for it
                logger.exception("command %d failed", sequence)
                self.fail(sequence, error)
                return

    def _send(self, response: pb.WorkResponse) -> None:
        """A failure is reported by another thread than what was put before it, and an end takes one message at a
        time."""
        with self._turn:
            self._end.send(response)
