"""The coordinator's gRPC server: one stream, from the one gateway, that carries every request."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from services.coordinator.loop import EngineLoop
from services.link.streams import OPTIONS, is_proven
from services.pb import coordinator_pb2 as pb
from services.pb import coordinator_pb2_grpc as pb_grpc
from services.step import Step
from services.wire.generation import to_sampling
from services.wire.steps import to_response
from smc.api.request import Request
from smc.scheduler.stats import EngineStats

MAX_BEHIND = 10_000
"""Steps that may wait for the gateway: minutes of them. A gateway that far behind has stopped."""

logger = logging.getLogger(__name__)


class CoordinatorServer(pb_grpc.CoordinatorServiceServicer):
    """Hands submissions to the engine's loop and its steps to the gateway."""

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret
        self._loop: EngineLoop | None = None
        """There before the first call: the server starts with it."""
        self._outbox: queue.SimpleQueue[Step | None] | None = None
        self._turn = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(4, "attach"), options=OPTIONS)
        pb_grpc.add_CoordinatorServiceServicer_to_server(self, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"

    def attach_to(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._server.start()

    def deliver(self, step: Step) -> None:
        """In the engine's thread: only puts the step into a queue. Without a gateway nobody waits for it."""
        if (outbox := self._outbox) is None:
            return
        outbox.put(step)
        if outbox.qsize() > MAX_BEHIND:
            logger.error("the gateway is %d steps behind; it is given up", MAX_BEHIND)
            self._outbox = None
            outbox.put(None)

    def Attach(
        self, request_iterator: Iterator[pb.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachResponse]:
        if not is_proven(context.invocation_metadata(), self._secret, self.address):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this coordinator belongs to another gang")
        if not self._turn.acquire(blocking=False):
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "a gateway is attached already")
        outbox = self._outbox = queue.SimpleQueue()
        context.send_initial_metadata(())  # from now on the gateway can be told
        asked = _Asked()
        threading.Thread(target=self._take_all, args=(request_iterator, outbox, asked), daemon=True).start()
        try:
            for step in iter(outbox.get, None):
                asked.end(step)
                yield to_response(step)
        finally:
            self._outbox = None
            self._turn.release()

    def close(self) -> None:
        if (outbox := self._outbox) is not None:
            outbox.put(None)
        self._server.stop(grace=0.5)

    def _take_all(self, requests: Iterator[pb.AttachRequest], outbox: queue.SimpleQueue, asked: _Asked) -> None:
        """Everything the gateway asks. When it goes, so do its requests."""
        loop = self._loop
        assert loop is not None
        try:
            for request in requests:
                if request.WhichOneof("command") == "abort":
                    loop.abort(request.abort)
                    continue
                asked.add(request.submit.request_id)
                self._submit(loop, request.submit)
        except Exception as error:  # gRPC's way of saying that the other side is gone
            logger.debug("the gateway is gone: %s", error)
        for request_id in asked.take():
            loop.abort(request_id)
        outbox.put(None)

    def _submit(self, loop: EngineLoop, submission: pb.Submission) -> None:
        try:
            params = to_sampling(submission)
        except ValueError as error:
            self.deliver(Step(refusals={submission.request_id: error}, stats=EngineStats()))
            return
        prompt, negative = tuple(submission.prompt), tuple(submission.negative_prompt) or None
        loop.submit(Request(submission.request_id, prompt, params, submission.cache_salt, submission.waited, negative))


class _Asked:
    """Requests that have not ended yet. One thread adds them, another takes away those that have ended."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._guard = threading.Lock()

    def add(self, request_id: str) -> None:
        with self._guard:
            self._ids.add(request_id)

    def end(self, step: Step) -> None:
        with self._guard:
            self._ids.difference_update(step.refusals, (o.request_id for o in step.outputs if o.answer is not None))

    def take(self) -> set[str]:
        """All of them, and none are left."""
        with self._guard:
            ids, self._ids = self._ids, set()
        return ids
