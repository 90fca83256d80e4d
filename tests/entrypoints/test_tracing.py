"""Spans of requests: what is in them, whose children they are, and that a collector cannot disturb anything."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.tracing import Tracing, _traces_url
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import ConfigError, MissingDependencyError
from tests.entrypoints.conftest import Client
from tests.entrypoints.test_operations import Program

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP, at /v1/traces."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    outer.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        return [
            span for one in self.received for group in one.resource_spans for s in group.scope_spans for span in s.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.server.shutdown()
    one.server.server_close()


class Traced:
    """A client of an application whose spans are kept."""

    def __init__(self, engine: Engine) -> None:
        app = create_app(engine)
        self.client = Client(app)
        self.kept = InMemorySpanExporter()
        self.tracing = app.state.server.tracing = Tracing("http://127.0.0.1:1", exporter=self.kept)

    def spans(self) -> tuple[ReadableSpan, ...]:
        self.tracing._provider.force_flush()
        return self.kept.get_finished_spans()


@pytest.fixture
def traced(engine: Engine) -> Iterator[Traced]:
    one = Traced(engine)
    yield one
    one.tracing.close()


def test_span_of_a_request_says_what_ran_and_how_long(traced: Traced) -> None:
    before = time.time_ns()
    headers = {"X-Request-Id": "mine"}
    answer = traced.client.request("POST", "/v1/embeddings", json={"input": ["a cat", "a"]}, headers=headers)
    [span] = traced.spans()
    attributes = dict(span.attributes or {})
    assert span.name == "POST /v1/embeddings"
    assert span.kind.name == "SERVER"
    assert span.parent is None
    times = [attributes.pop(f"gen_ai.latency.{name}") for name in ("e2e", "time_in_queue", "time_in_model_inference")]
    tokenization = attributes.pop("anypool.latency.tokenization")
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "minilm",
        "gen_ai.response.model": "minilm",
        "anypool.inputs": 2,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.prompt_tokens": 7,
    }
    total, queue, inference = (float(one) for one in times)
    assert total >= queue + inference + float(tokenization) > 0
    assert float(answer.headers["x-inference-time"]) == pytest.approx(1000 * inference, abs=1e-3)
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    assert span.end_time - span.start_time == pytest.approx(1e9 * total, abs=1e6)
    assert span.resource.attributes["service.name"] == "anypool"


def test_traceparent_names_the_parent_and_whether_it_is_sampled(traced: Traced) -> None:
    for flags in ("01", "00"):
        header = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}
        traced.client.request("POST", "/embed", json={"inputs": "a"}, headers=header)
    [span] = traced.spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state["vendor"] == "1"


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "ÿ" * 99])
def test_a_bad_traceparent_is_no_parent(traced: Traced, header: str) -> None:
    headers = {"traceparent": header.encode("latin-1")}
    assert traced.client.request("POST", "/embed", json={"inputs": "a"}, headers=headers).status_code == 200
    assert traced.spans()[0].parent is None


def test_errors_are_marked_and_probes_have_no_span(traced: Traced) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
        traced.client.get(path)
    traced.client.embed(input=7)
    [span] = traced.spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "400"
    assert span.status.is_ok or span.status.is_unset
    assert "gen_ai.usage.input_tokens" not in span.attributes


def test_a_failure_of_the_server_is_an_error(traced: Traced, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine, "prepare", fail)
    assert traced.client.embed(input="a").status_code == 500
    [span] = traced.spans()
    assert span.status.status_code.name == "ERROR"


def test_spans_reach_a_collector_before_the_server_ends(collector: Collector, minilm: str) -> None:
    with Program(minilm, "--otlp-traces-endpoint", collector.address) as program:
        assert httpx.post(f"{program.address}/v1/embeddings", json={"input": "a"}).status_code == 200
        program.process.terminate()
        assert program.process.wait(30) == 0
    [span] = collector.spans()
    assert span.name == "POST /v1/embeddings"
    [group] = collector.received[0].resource_spans
    assert {one.key: one.value.string_value for one in group.resource.attributes}["service.name"] == "anypool"


def test_a_collector_that_is_away_disturbs_neither_requests_nor_the_end(minilm: str) -> None:
    with Program(minilm, "--otlp-traces-endpoint", "http://127.0.0.1:9") as program:
        for _ in range(5):
            assert httpx.post(f"{program.address}/v1/embeddings", json={"input": "a"}).status_code == 200
        program.process.terminate()
        began = time.monotonic()
        assert program.process.wait(30) == 0
        assert time.monotonic() - began < 20


def test_closing_does_not_wait_for_an_exporter_that_hangs() -> None:
    hung = threading.Event()

    class Hanging(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            hung.wait(60)

    tracing = Tracing("http://127.0.0.1:1", exporter=Hanging())
    tracing._tracer.start_span("a").end()
    began = time.monotonic()
    tracing.close()
    assert time.monotonic() - began < 10
    hung.set()


def test_nothing_is_imported_where_it_is_off() -> None:
    code = (
        "import sys, anypool.entrypoints.serve.server;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_error_says_what_to_install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'anypool\[otel\]'"):
        create_app(engine, ServerOptions(otlp_traces_endpoint="http://127.0.0.1:4318"))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces?x=1", "https://c/otlp/v1/traces?x=1"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_usual_one(given: str, url: str) -> None:
    assert _traces_url(given) == url


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://127"):
        ServerOptions(otlp_traces_endpoint="127.0.0.1:4317")
