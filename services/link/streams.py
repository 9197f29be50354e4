"""The link over gRPC streams, for hosts that torch.distributed does not reach. Same messages, same deadlines.

Each leader runs a `WorkerService`; the coordinator calls `Work` on both, the draft's leader calls `Exchange` on the target's.
Calls carry the gang's secret: nobody else can give orders to a worker.
"""

from __future__ import annotations

import hmac
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
from torch import Tensor

from services.link.base import LAYOUT_VERSION, LinkError, check_envelope
from services.pb import particles_pb2 as pb
from services.pb import particles_pb2_grpc as pb_grpc

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a ping may stay unanswered for a minute, whatever the timeout above says (seen in grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
SECRET_KEY = "smc-gang-secret"


class Inbox:
    """Messages that a thread of gRPC's puts in and ours takes out, with a deadline. An exception put in is raised here."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()

    def put(self, item: object) -> None:
        self._queue.put(item)

    def get(self, timeout: float) -> object:
        try:
            item = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise LinkError(f"the link was silent for {timeout:g} s") from None
        if isinstance(item, Exception):
            raise item
        return item


class StreamCoordinatorEnd:
    """The coordinator's end: calls `Work` at the leader's address."""

    def __init__(self, address: str, secret: str) -> None:
        self._outbox: queue.SimpleQueue[pb.WorkRequest | None] = queue.SimpleQueue()
        self._inbox = Inbox()
        self._channel = grpc.insecure_channel(address, OPTIONS)
        stub = pb_grpc.WorkerServiceStub(self._channel)
        responses = stub.Work(iter(self._outbox.get, None), metadata=((SECRET_KEY, secret),), wait_for_ready=True)
        threading.Thread(target=_pump, args=(responses, self._inbox, f"the leader at {address}"), daemon=True).start()

    def send(self, request: pb.WorkRequest) -> None:
        self._outbox.put(request)

    def receive(self, timeout: float) -> pb.WorkResponse:
        return self._inbox.get(timeout)

    def close(self) -> None:
        self._outbox.put(None)
        self._channel.close()


class StreamServer(pb_grpc.WorkerServiceServicer):
    """A leader's server: its end of the link to the coordinator and, at the target, of the link between the leaders."""

    def __init__(self, host: str, epoch: int, secret: str) -> None:
        self._epoch, self._secret = epoch, secret
        self._commands = Inbox()
        self.peer = StreamPeer(epoch, pb.ExchangeResponse)
        self._responses: queue.SimpleQueue[pb.WorkResponse | None] = queue.SimpleQueue()
        # Work and Exchange each hold a thread for as long as they run; a third one refuses whoever else comes.
        self._server = grpc.server(ThreadPoolExecutor(3, "link"), options=OPTIONS)
        pb_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._server.start()

    def Work(self, request_iterator: Iterator[pb.WorkRequest], context: grpc.ServicerContext) -> Iterator[pb.WorkResponse]:
        self._admit(context)
        threading.Thread(target=_pump, args=(request_iterator, self._commands, "the coordinator"), daemon=True).start()
        yield from iter(self._responses.get, None)

    def Exchange(self, request_iterator: Iterator[pb.ExchangeRequest], context: grpc.ServicerContext) -> Iterator[pb.ExchangeResponse]:
        self._admit(context)
        threading.Thread(target=_pump, args=(request_iterator, self.peer.inbox, "the draft"), daemon=True).start()
        yield from iter(self.peer.outbox.get, None)

    def receive(self, timeout: float) -> pb.WorkRequest:
        return self._commands.get(timeout)

    def send(self, response: pb.WorkResponse) -> None:
        self._responses.put(response)

    def close(self) -> None:
        self._responses.put(None)
        self.peer.close()
        self._server.stop(grace=1.0).wait(2.0)

    def _admit(self, context: grpc.ServicerContext) -> None:
        given = dict(context.invocation_metadata()).get(SECRET_KEY, "")
        if not hmac.compare_digest(given, self._secret):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this port belongs to another gang")


class StreamPeer:
    """A leader's end of the link to the other, whichever of them called: what it gives goes into the outbox."""

    def __init__(self, epoch: int, sends: type[pb.ExchangeRequest] | type[pb.ExchangeResponse]) -> None:
        self._epoch, self._sends = epoch, sends
        self.outbox: queue.SimpleQueue[pb.ExchangeRequest | pb.ExchangeResponse | None] = queue.SimpleQueue()
        self.inbox = Inbox()

    def give(self, name: str, sequence: int, tensor: Tensor) -> None:
        data = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        self.outbox.put(self._sends(version=LAYOUT_VERSION, epoch=self._epoch, name=name, sequence=sequence, data=data))

    def take(self, name: str, sequence: int, here: Tensor, timeout: float) -> None:
        message = self.inbox.get(timeout)
        check_envelope(message, self._epoch)
        if (message.name, message.sequence) != (name, sequence):
            raise LinkError(f"{message.name}, number {message.sequence}, came; expected {name}, number {sequence}")
        here.copy_(torch.frombuffer(bytearray(message.data), dtype=here.dtype).view(here.shape))

    def settle(self) -> None:
        """Messages are copies."""

    def close(self) -> None:
        self.outbox.put(None)


class StreamCaller(StreamPeer):
    """The draft's leader: calls `Exchange` at the target's."""

    def __init__(self, address: str, epoch: int, secret: str) -> None:
        super().__init__(epoch, pb.ExchangeRequest)
        self._channel = grpc.insecure_channel(address, OPTIONS)
        stub = pb_grpc.WorkerServiceStub(self._channel)
        self._call = stub.Exchange(iter(self.outbox.get, None), metadata=((SECRET_KEY, secret),), wait_for_ready=True)
        threading.Thread(target=_pump, args=(self._call, self.inbox, f"the target's leader at {address}"), daemon=True).start()

    def give(self, name: str, sequence: int, tensor: Tensor) -> None:
        if not self._call.is_active():
            raise LinkError(f"the link to the target's leader broke: {self._call.details()}")
        super().give(name, sequence, tensor)

    def close(self) -> None:
        super().close()
        self._channel.close()


def _pump(messages: Iterator, inbox: Inbox, other: str) -> None:
    """Everything a stream brings goes into the inbox, its end too."""
    try:
        for message in messages:
            inbox.put(message)
        inbox.put(LinkError(f"{other} ended the link"))
    except Exception as error:  # gRPC raises RpcError on one side and a bare Exception on the other
        inbox.put(LinkError(f"{other} is gone: {error.details() if isinstance(error, grpc.Call) else error}"))
