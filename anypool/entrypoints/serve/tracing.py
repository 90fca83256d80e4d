"""OpenTelemetry: a span per request that runs a model, exported by a thread of its own.

Names are those of OpenTelemetry's conventions for HTTP and for generative AI, and beside them vLLM's for latencies.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import anypool
from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.route import Route
from anypool.errors import MissingDependencyError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# Where a collector takes traces, if its address says no path.
_PATH = "/v1/traces"
# Seconds that the last spans get at the end: a collector that is not there must not hold the server up.
_CLOSING_S = 2.0


class Tracing:
    """Writes spans.

    OpenTelemetry's environment variables hold: `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_...`,
    `OTEL_EXPORTER_OTLP_HEADERS` and so on. When the queue of spans is full, new ones are dropped.

    Args:
        endpoint: URL of a collector that takes OTLP over HTTP.
        exporter: What takes the spans in place of it.

    Raises:
        MissingDependencyError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingDependencyError(
                "--otlp-traces-endpoint needs OpenTelemetry: pip install 'anypool[otel]'"
            ) from error
        ours = {"service.name": "anypool", "service.version": anypool.__version__}
        resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
        # Its own handler at exit would wait for a collector that is not there.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(_traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("anypool", anypool.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server_kind = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)

    def write(self, exchange: Exchange, route: Route | None, status: int) -> None:
        """Notes a request that has its answer, as a child of the span that its `traceparent` header names."""
        if route is None or not route.calls:
            return
        ended = time.time_ns()
        began = ended - int(1e9 * (time.perf_counter() - exchange.began))
        span = self._tracer.start_span(
            f"{exchange.request.method} {exchange.path}",
            context=self._propagator.extract(exchange.request.headers),
            kind=self._server_kind,
            attributes=_attributes(exchange, status, (ended - began) / 1e9),
            start_time=began,
        )
        if status >= 500:
            span.set_status(self._failed)
        span.end(ended)

    def close(self) -> None:
        """Sends what is left, if the collector takes it within a moment."""
        last = threading.Thread(target=self._provider.shutdown, name="anypool-last-spans", daemon=True)
        last.start()
        last.join(_CLOSING_S)


def _attributes(exchange: Exchange, status: int, total_s: float) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "http.request.method": exchange.request.method,
        "http.route": exchange.path,
        "http.response.status_code": status,
        "gen_ai.request.id": exchange.request_id,
        "gen_ai.latency.e2e": total_s,
    }
    if status >= 400:
        attributes["error.type"] = str(status)
    if exchange.model:
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = exchange.model
    if exchange.inputs:
        attributes |= {
            "anypool.inputs": exchange.inputs,
            "gen_ai.usage.input_tokens": exchange.tokens,
            "gen_ai.usage.prompt_tokens": exchange.tokens,
            "anypool.latency.tokenization": exchange.prepare_s,
            "gen_ai.latency.time_in_queue": exchange.queue_s,
            "gen_ai.latency.time_in_model_inference": exchange.inference_s,
        }
    return attributes


def _traces_url(endpoint: str) -> str:
    """The endpoint with the usual path where it has none."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts if parts.path.strip("/") else parts._replace(path=_PATH))
