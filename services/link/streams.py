"""The link over gRPC streams, for hosts that torch.distributed does not reach. Messages and deadlines are the same.

Each leader runs a server; the coordinator calls `Work` on both, the draft's leader calls `Exchange` on the target's.
Both are streams of bytes in both directions. Calls carry a proof of the worker group's secret: other processes cannot
command a worker, and a listener at a forged address does not learn the secret."""

from __future__ import annotations

import hmac
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from services.link.base import CLOSE_SECONDS, LinkError, keyed_hash

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without this a ping may stay unanswered for a minute, whatever the timeout above is (seen in grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Calls stay between our own processes; proxies are for calls to the outside.
    ("grpc.enable_http_proxy", 0),
)
PROOF_KEY = "smc-group-proof"
SERVICE = "smc.internal.Worker"


def proof(secret: str, what: str) -> str:
    """Return a proof that the sender of `what` knows the worker group's secret. It does not reveal the secret, and is
    valid for `what` only."""
    return keyed_hash(secret, what.encode()).hex()


def is_proven(metadata: Iterable[tuple[str, str | bytes]], secret: str, address: str) -> bool:
    """Return whether a call's metadata proves that it comes from the worker group and is meant for this address."""
    return hmac.compare_digest(str(dict(metadata).get(PROOF_KEY, "")), proof(secret, address))


def stream_server(
    host: str, threads: int, service: str, streams: Mapping[str, Callable[..., Any]]
) -> tuple[grpc.Server, str]:
    """Make a server at any free port of `host`, and return it with its address; start it once the address is known to
    its streams. `streams`: by name of the method, bytes in both directions."""
    server = grpc.server(ThreadPoolExecutor(threads, service), options=OPTIONS)
    handlers = {name: grpc.stream_stream_rpc_method_handler(stream) for name, stream in streams.items()}
    server.add_registered_method_handlers(service, handlers)
    return server, f"{host}:{server.add_insecure_port(f'{host}:0')}"


class StreamEnd:
    """An end whose outbox a gRPC stream sends, and whose inbox it fills. `receive` raises an exception that is in the
    inbox."""

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue = queue.SimpleQueue()
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()

    def send(self, message: bytes) -> None:
        self.outbox.put(message)

    def receive(self, timeout: float) -> bytes:
        try:
            item = self.inbox.get(timeout=timeout)
        except queue.Empty:
            raise LinkError(f"the link was silent for {timeout:g} s") from None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self.outbox.put(None)


class StreamCaller(StreamEnd):
    """The calling end: the coordinator calls `Work`, the draft's leader calls `Exchange` on the target's leader."""

    def __init__(self, address: str, secret: str, method: str) -> None:
        super().__init__()
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._call = self._channel.stream_stream(f"/{SERVICE}/{method}")(
            iter(self.outbox.get, None), metadata=((PROOF_KEY, proof(secret, address)),), wait_for_ready=True
        )
        source = self._call, self.inbox, f"the leader at {address}"
        self._reader = threading.Thread(target=_pump, args=source, daemon=True)
        self._reader.start()

    def send(self, message: bytes) -> None:
        if not self._call.is_active():
            raise LinkError(f"the link broke: {self._call.details()}")
        super().send(message)

    def close(self) -> None:
        """Close once the other side has read everything and closed its end, too, or after `CLOSE_SECONDS`: messages in
        transit would be lost."""
        super().close()
        self._reader.join(CLOSE_SECONDS)
        self._channel.close()


class StreamServer:
    """A leader's server: its ends of the link to the coordinator and, at the target, of the link between the
    leaders."""

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret
        self.coordinator, self.peer = StreamEnd(), StreamEnd()
        # Work and Exchange each hold a thread for as long as they run; the third thread refuses other callers.
        self._server, self.address = stream_server(host, 3, SERVICE, {"Work": self.Work, "Exchange": self.Exchange})
        self._server.start()

    def Work(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from self._join(self.coordinator, messages, context, "the coordinator")

    def Exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from self._join(self.peer, messages, context, "the draft")

    def renew_peer(self) -> StreamEnd:
        """Return an end for another peer, whose call arrives later. The end for the earlier peer is closed."""
        self.peer.close()
        self.peer = StreamEnd()
        return self.peer

    def close(self) -> None:
        self.coordinator.close()
        self.peer.close()
        self._server.stop(grace=1.0).wait(2.0)

    def _join(self, end: StreamEnd, messages: Iterator, context: grpc.ServicerContext, other: str) -> Iterator:
        if not is_proven(context.invocation_metadata(), self._secret, self.address):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this port belongs to another worker group")
        threading.Thread(target=_pump, args=(messages, end.inbox, other), daemon=True).start()
        return iter(end.outbox.get, None)


def _pump(messages: Iterator, inbox: queue.SimpleQueue, other: str) -> None:
    """Put every message of a stream into the inbox, and at its end a LinkError."""
    try:
        for message in messages:
            inbox.put(message)
        inbox.put(LinkError(f"{other} ended the link"))
    except Exception as error:  # gRPC raises RpcError on one side and a bare Exception on the other
        inbox.put(LinkError(f"{other} is gone: {error.details() if isinstance(error, grpc.Call) else error}"))
