"""Sends OpenTelemetry spans of calls, if the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`).

A call's span continues the trace that its caller names (W3C `traceparent`); its child spans show where its time went.
Spans hold no text of users."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from smc.api.request import Times

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NANOSECONDS = 1e9
_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "finish_reason": "gen_ai.response.finish_reason",
    "model": "gen_ai.response.model",
}
"""Names of the log's fields in OpenTelemetry's semantic conventions."""


class Trace:
    """The span of one call."""

    def __init__(self, tracer: Tracer, name: str, context: Context, began: int) -> None:
        """`context`: of the parent span. `began`: start of the call, in nanoseconds since the epoch."""
        from opentelemetry.trace import SpanKind

        self._tracer, self._name, self._context, self._began = tracer, name, context, began
        self._span = tracer.start_span(name, context, SpanKind.SERVER, start_time=began)
        self._http: dict[str, str] = {}
        """Attributes of a call over HTTP."""

    def another(self) -> Trace:
        """Return the span of a further answer to the same call."""
        trace = Trace(self._tracer, self._name, self._context, self._began)
        trace._http = self._http
        return trace

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, as collectors show it."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def is_http(self, method: str, path: str) -> None:
        """Record that the call came over HTTP."""
        self._http = {"http.request.method": method, "url.path": path}

    def end(self, status: str, fields: Mapping[str, Any], times: Times | None, http_status: int | None) -> None:
        """End the span. `fields`: the call's fields in the log. `times`: the times of its answer, if it has one.
        `http_status`: status of the answer if the call came over HTTP."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        self._span.set_attributes({_ATTRIBUTES.get(name, f"smc.{name}"): value for name, value in fields.items()})
        self._span.set_attribute("rpc.grpc.status_code", status)
        if self._http and http_status is not None:
            self._span.set_attributes({**self._http, "http.response.status_code": http_status})
        if first := fields.get("first_token_seconds"):
            self._span.add_event("first token", timestamp=self._began + int(first * NANOSECONDS))
        if status != "OK":
            self._span.set_status(StatusCode.ERROR, str(fields.get("cause", "")))
        if times is not None:
            at, inside = self._began, set_span_in_context(self._span)
            for name, seconds in vars(times).items():
                part = self._tracer.start_span(name, inside, start_time=at)
                at += int(seconds * NANOSECONDS)
                part.end(at)
        self._span.end()


class Tracing:
    """Sends spans to the collector, from a thread of its own. One for each gateway."""

    @staticmethod
    def from_environment() -> Tracing | None:
        """Return the tracing that the environment asks for; None if it names no collector or switches the SDK off."""
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(os.environ.get, ENDPOINTS)):
            return None
        return Tracing()

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = "OTEL_SERVICE_NAME" in os.environ
        self._provider = TracerProvider(
            resource=Resource.create({} if named else {"service.name": "smcserve"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("smcserve", importlib.metadata.version("smcserve"))
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Trace:
        """Begin the span of a call with this name. `metadata` may name the parent span."""
        context = self._propagator.extract({key.lower(): value for key, value in metadata if isinstance(value, str)})
        return Trace(self._tracer, name, context, time.time_ns())

    def close(self) -> None:
        """Send the remaining spans, as far as the collector takes them, and stop. May take a while."""
        self._provider.shutdown()
