"""The coordinator's gRPC server: one stream, from the one gateway, that carries every request."""

from __future__ import annotations

import hmac
import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from services.coordinator.loop import EngineLoop, Step
from services.link.streams import OPTIONS, SECRET_KEY
from services.pb import coordinator_pb2 as pb
from services.pb import coordinator_pb2_grpc as pb_grpc
from services.wire.generation import to_sampling
from services.wire.steps import to_response
from smc.engine.request import Request

logger = logging.getLogger(__name__)


class CoordinatorServer(pb_grpc.CoordinatorServiceServicer):
    """Hands submissions to the engine's loop and its steps to the gateway."""

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret
        self._loop: EngineLoop | None = None
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
        if (outbox := self._outbox) is not None:
            outbox.put(step)

    def Attach(self, request_iterator: Iterator[pb.AttachRequest], context: grpc.ServicerContext) -> Iterator[pb.AttachResponse]:
        if not hmac.compare_digest(dict(context.invocation_metadata()).get(SECRET_KEY, ""), self._secret):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this coordinator belongs to another gang")
        if not self._turn.acquire(blocking=False):
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "a gateway is attached already")
        outbox = self._outbox = queue.SimpleQueue()
        asked: set[str] = set()  # and not ended yet
        threading.Thread(target=self._take_all, args=(request_iterator, outbox, asked), daemon=True).start()
        try:
            for step in iter(outbox.get, None):
                asked.difference_update(step.refusals, (o.request_id for o in step.outputs if o.answer is not None))
                yield to_response(step)
        finally:
            self._outbox = None
            self._turn.release()

    def close(self) -> None:
        if (outbox := self._outbox) is not None:
            outbox.put(None)
        self._server.stop(grace=0.5)

    def _take_all(self, requests: Iterator[pb.AttachRequest], outbox: queue.SimpleQueue, asked: set[str]) -> None:
        """Everything the gateway asks. When it goes, so do its requests."""
        try:
            for request in requests:
                if request.WhichOneof("command") == "abort":
                    self._loop.abort(request.abort)
                    continue
                submission = request.submit
                asked.add(submission.request_id)
                params = to_sampling(submission.sampling, logprobs=submission.logprobs)
                request = Request(submission.request_id, tuple(submission.prompt), params, submission.cache_salt, submission.waited)
                self._loop.submit(request)
        except Exception as error:  # gRPC's way of saying that the other side is gone
            logger.info("the gateway is gone: %s", error)
        while asked:
            self._loop.abort(asked.pop())
        outbox.put(None)
