"""Keys, limits, deadlines, metrics, headers, logs and the end of a server."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from anypool.config import EngineConfig
from anypool.engine.admission import Admission
from anypool.engine.engine import Engine
from anypool.engine.request import Request
from anypool.entrypoints.cli import main
from anypool.entrypoints.serve.access_log import JsonFormatter
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.auth import Keys
from anypool.entrypoints.serve.routes import adapters
from anypool.entrypoints.serve.routes.table import ROUTES
from anypool.entrypoints.serve.served import served_name
from anypool.entrypoints.serve.state import ServerState
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import ConfigError, InvalidPromptError, OverloadedError
from tests.entrypoints.conftest import Client
from tests.entrypoints.test_server import error

PUBLIC = {
    *product(("GET", "POST"), ("/health", "/health/ready", "/health/live", "/ping")),
    ("GET", "/"),
    ("GET", "/page/page.js"),
}
PATHS = [(method, path) for route in ROUTES for method in route.methods for path in route.paths]


def with_options(engine: Engine, **options: Any) -> Client:
    return Client(create_app(engine, ServerOptions(**options)))


def held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """From now on the engine only collects requests."""
    requests: list[Request] = []
    monkeypatch.setattr(engine, "submit", lambda given, **_: requests.extend(given))
    return requests


# Keys


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_route_but_health_and_the_page_refuses_a_missing_and_a_wrong_key(
    engine: Engine, method: str, path: str
) -> None:
    client = with_options(engine, api_key="right")
    path = path.replace("{model}", "minilm").replace("{file}", "page.js")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}, {"X-API-Key": "wrong"}):
        response = client.request(method, path, headers=headers, content=b"")
        if (method, path) in PUBLIC:
            assert response.status_code == 200
        else:
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert b"API key" in response.content
    off = [one for route in adapters.ROUTES for one in route.paths]  # where no folder is named
    for headers in ({"Authorization": "Bearer right"}, {"X-API-Key": "right"}):
        status = client.request(method, path, headers=headers, content=b"").status_code
        assert status == 404 if path in off else status in (200, 400)


def test_an_unknown_route_tells_nothing_without_a_key(engine: Engine) -> None:
    assert with_options(engine, api_key="right").get("/no/such").status_code == 401


def test_several_keys_from_flags_and_a_file_that_is_read_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anypool.entrypoints.serve.auth._LOOK_EVERY_S", 0.0)
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n second \n", encoding="utf-8")
    client = with_options(engine, api_key=("flag", "other"), api_key_file=str(path))

    def status(key: str) -> int:
        return client.request("GET", "/version", headers={"Authorization": f"bearer {key}"}).status_code

    assert [status(key) for key in ("flag", "other", "first", "second", "# of the team", "")] == [200] * 4 + [401] * 2
    path.write_text("third\n", encoding="utf-8")
    assert [status(key) for key in ("flag", "first", "third")] == [200, 401, 200]
    path.write_text("\n", encoding="utf-8")  # being rewritten: the last keys stay
    assert [status(key) for key in ("first", "third")] == [401, 200]
    path.unlink()
    assert status("third") == 200


def test_a_key_may_have_any_letters_and_a_file_begin_with_a_byte_order_mark(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes("\ufeffschlüssel\n".encode())
    client = with_options(engine, api_key_file=str(tmp_path / "keys"))
    for encoding, status in (("utf-8", 200), ("latin-1", 401)):
        headers = {b"X-API-Key": "schlüssel".encode(encoding)}
        assert client.request("GET", "/version", headers=headers).status_code == status


def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no API key"):
        Keys(path=str(tmp_path / "empty"))


def test_a_bad_file_of_keys_is_found_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anypool.entrypoints.cli_serve.Engine", pytest.fail)
    for content, words in ((b"", "holds no API key"), (b"\xff\xfe\n", "is not text in UTF-8")):
        (tmp_path / "keys").write_bytes(content)
        assert main(["serve", str(tmp_path), "--api-key-file", str(tmp_path / "keys")]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(b) or a == b)
    Keys(["one", "two", "three"]).check("Bearer one")
    assert len(compared) == 3


# Switches and CORS


def test_metrics_and_docs_can_be_switched_off(engine: Engine) -> None:
    client = with_options(engine, metrics=False, docs=False)
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 404
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert with_options(engine).get(path).status_code == 200


def test_cors_is_off_unless_origins_are_named(engine: Engine) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    closed = with_options(engine, api_key="k")
    assert closed.request("OPTIONS", "/v1/embeddings", headers=headers).status_code == 401
    assert "access-control-allow-origin" not in closed.request("GET", "/health", headers=headers).headers
    opened = with_options(engine, api_key="k", allow_origin=["https://page.example"])
    preflight = opened.request("OPTIONS", "/v1/embeddings", headers=headers)
    assert preflight.status_code == 200
    assert "Authorization" in preflight.headers["access-control-allow-headers"]
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    refused = opened.request("POST", "/v1/embeddings", headers=headers)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"  # so that the page sees why
    other = opened.request("GET", "/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    everyone = with_options(engine, allow_origin="*").request("GET", "/health", headers={"Origin": "https://x.example"})
    assert everyone.headers["access-control-allow-origin"] == "*"


# The application as FastAPI's


def test_the_application_can_be_mounted_and_added_to(engine: Engine) -> None:
    app = create_app(engine, ServerOptions(docs=False))

    @app.get("/own/{number}")
    def own(number: int) -> dict[str, int]:
        if number == 0:
            raise HTTPException(409, "zero is taken", headers={"X-Why": "zero"})
        return {"number": number}

    whole = FastAPI(openapi_url=None)
    whole.mount("/models", app)
    client = Client(whole)
    assert client.get("/models/own/3").json() == {"number": 3}
    refused = client.get("/models/own/0")
    assert error(refused, 409)["message"] == "zero is taken"
    assert refused.headers["x-why"] == "zero"
    assert client.post("/models/v1/embeddings", input="a").status_code == 200
    assert "'/no' here" in error(client.get("/models/no"), 404)["message"]
    counts = Client(app).get("/metrics").text
    assert 'anypool_http_requests_total{code="200",path="/v1/embeddings"} 1.0' in counts
    assert 'te_embed_count{method="single"} 1.0' in counts


def test_an_error_that_has_no_handler_is_answered_inside_of_the_middleware(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(requests: list[Request], **_: Any) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(engine, "submit", submit)
    app = create_app(engine, ServerOptions(allow_origin="*"))

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Origin": "https://page.example", "X-Request-Id": "mine"}
            return await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)

    response = asyncio.run(call())
    assert "KeyError" in error(response, 500)["message"]
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["access-control-allow-origin"] == "*"


def test_a_request_that_is_cancelled_is_not_counted_as_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = with_options(engine)

    async def call() -> None:
        transport = httpx.ASGITransport(app=client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as own:
            await asyncio.wait_for(own.post("/v1/embeddings", json={"input": "a"}), 0.2)

    with monkeypatch.context() as patched:
        held(engine, patched)
        with pytest.raises(TimeoutError):
            asyncio.run(call())
    assert samples(client)["anypool_http_requests_running"] == 1  # the one that asks


# Limits and deadlines


def test_limits_of_inputs_and_tokens(engine: Engine) -> None:
    client = with_options(engine, max_inputs=3, max_request_tokens=12)
    assert client.embed(input=["a"] * 3).status_code == 200
    assert "4 items, the limit is 3" in error(client.embed(input=["a"] * 4), 400)["message"]
    for path, fields in (
        ("/rerank", {"query": "a", "documents": ["a"] * 4}),
        ("/rerank", {"query": "a", "texts": ["a"] * 4}),
        ("/score", {"text_1": "a", "text_2": ["a"] * 4}),
        ("/v2/embed", {"texts": ["a"] * 4}),
        ("/embed", {"inputs": ["a"] * 4}),
        ("/predict", {"inputs": [["a"]] * 4}),
        ("/tokenize", {"inputs": ["a"] * 4}),
    ):
        response = client.post(path, **fields)
        assert response.status_code in (400, 422)
        assert "the limit is 3" in response.text
    assert "15 tokens, and this server takes 12" in error(client.embed(input="a " * 13), 400)["message"]


def test_tokens_of_endless_texts_are_refused(engine: Engine) -> None:
    client = with_options(engine)
    for path, fields in (
        ("/tokenize", {"prompt": "a " * 500_001}),
        ("/tokenize", {"inputs": ["a " * 250_001] * 2}),
        ("/tokenize", {"inputs": ["a"] * 101, "prompt": "a" * 10_000}),
        ("/detokenize", {"tokens": [1] * 1_000_001}),
        ("/decode", {"ids": [[1] * 500_001] * 2}),
    ):
        response = client.post(path, **fields)
        assert response.status_code in (400, 422), (path, response.text[:100])
        assert "the limit is 1,000,000" in response.text


def test_images_are_counted_wherever_they_are(engine: Engine) -> None:
    client = with_options(engine, max_inputs=3)
    images = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}] * 2
    message = {"role": "user", "content": images}
    for path, fields in (
        ("/v1/embeddings", {"messages": [message] * 2}),
        ("/pooling", {"messages": [[message]] * 2}),
        ("/classify", {"messages": [message] * 2}),
        ("/reward", {"messages": [message] * 2}),
        ("/score", {"queries": {"content": images}, "documents": [{"content": images}]}),
        ("/score", {"data_1": "a", "data_2": [{"content": images}] * 2}),
        ("/rerank", {"query": "a", "documents": [{"content": images}] * 2}),
        ("/v2/rerank", {"query": {"content": images}, "documents": [{"content": images}]}),
    ):
        response = client.post(path, **fields)
        assert response.status_code == 400
        assert "4 images, the limit is 3" in response.text, (path, response.text)


@pytest.mark.parametrize(("options", "headers"), [({"request_timeout": 0.2}, {}), ({}, {"X-Request-Timeout": "0.2"})])
def test_a_request_that_takes_too_long_is_504_and_its_work_is_dropped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, float], headers: dict[str, str]
) -> None:
    with_options(engine).embed(input="a")  # the first of its length takes longer
    client = with_options(engine, **options)
    with monkeypatch.context() as patched:
        requests = held(engine, patched)
        began = time.monotonic()
        response = client.request("POST", "/v1/embeddings", json={"input": ["a", "b"]}, headers=headers)
        assert 0.15 < time.monotonic() - began < 5
        assert error(response, 504)["code"] == "deadline_exceeded"
        assert [request.future.cancelled() for request in requests] == [True, True]
        tei = client.request("POST", "/embed", json={"inputs": "a"}, headers=headers)
        assert tei.status_code == 504
        assert tei.json()["error_type"] == "Backend"
    assert with_options(engine).embed(input="a").status_code == 200


def test_more_requests_than_are_served_at_once_are_429(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = with_options(engine, max_concurrent_requests=2)
    state: ServerState = client.app.state.server
    with state.turn():
        assert client.embed(input="a").status_code == 200
        with state.turn():
            refused = client.embed(input="a")
            assert error(refused, 429)["message"] == "2 requests are being served, the limit: try again later"
            assert refused.headers["retry-after"] == "1"
            assert client.get("/health").status_code == 200
    assert client.embed(input=3).status_code == 400
    assert client.embed(input="a").status_code == 200
    assert state._running == 0


def test_a_client_that_sends_slowly_keeps_nobody_out(engine: Engine) -> None:
    app = create_app(engine, ServerOptions(max_concurrent_requests=1))

    async def main() -> tuple[int, int]:
        is_open = asyncio.Event()

        async def slow() -> Any:
            yield b'{"input": '
            await is_open.wait()
            yield b'"a"}'

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            first = asyncio.create_task(client.post("/v1/embeddings", content=slow()))
            await asyncio.sleep(0.05)
            second = await client.post("/v1/embeddings", json={"input": "b"})
            is_open.set()
            return (await first).status_code, second.status_code

    assert asyncio.run(main()) == (200, 200)


def test_a_client_may_ask_for_less_time_but_not_for_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda r, **k: (seen.append(k["timeout_s"]), submit(r, **k))[1])
    client = with_options(engine, request_timeout=10.0)
    for asked in ("3", "60"):
        client.request("POST", "/v1/embeddings", json={"input": "a"}, headers={"X-Request-Timeout": asked})
    assert seen[0] is not None
    assert seen[1] is not None
    assert seen[0] <= 3 < seen[1] <= 10
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        response = client.request("POST", "/v1/embeddings", json={"input": "a"}, headers={"X-Request-Timeout": wrong})
        assert error(response, 400)["param"] == "X-Request-Timeout"


def test_priority_and_cache_salt_reach_the_queue(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda r, **k: (seen.append(k), submit(r, **k))[1])
    client = with_options(engine)
    bodies = [
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/embed", {"texts": ["a"]}),
        ("/embed", {"inputs": "a"}),
    ]
    for path, fields in bodies:
        assert client.post(path, priority=-3, cache_salt="tenant", **fields).status_code == 200
    assert [(one["priority"], one["cache_salt"], one["bounded"]) for one in seen] == [(-3, "tenant", True)] * 4


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "' + b"x" * 10_000_000 + b'"}',
        b'{"input": [' + b'"a",' * 99_999 + b'"a"]}',
        b'{"input": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b'{"input": "a\xff"}' * 100_000,
        b'{"input": {' + b'"a": 1, ' * 100_000 + b'"b": 1}}',
    ],
    ids=["10 MB of text", "100,000 texts", "deep", "not UTF-8", "an object"],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/v2/embed"])
def test_a_hostile_body_is_refused_quickly(engine: Engine, body: bytes, path: str) -> None:
    field = {"/v1/embeddings": b"input", "/embed": b"inputs", "/v2/embed": b"texts"}[path]
    client = with_options(engine)
    began = time.process_time()
    response = client.request("POST", path, content=body.replace(b"input", field))
    assert 400 <= response.status_code < 500
    assert time.process_time() - began < 0.5


def test_nul_and_control_characters_are_text(engine: Engine) -> None:
    assert with_options(engine).embed(input="a\x00b\x07").status_code == 200


def test_a_compressed_body_is_415(client: Client) -> None:
    content = gzip.compress(b'{"input": "a"}')
    answer = client.request("POST", "/embed", content=content, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]
    same = client.request("POST", "/embed", content=b'{"inputs": "a"}', headers={"Content-Encoding": "identity"})
    assert same.status_code == 200


def test_a_folder_is_served_under_its_name(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    (tmp_path / "tiny.q4.gguf").touch()
    for model, given, name in (
        (str(tmp_path / "Qwen2.5-0.5B"), None, "Qwen2.5-0.5B"),
        (str(tmp_path / "tiny.q4.gguf"), None, "tiny.q4"),
        ("org/model-1.5", None, "org/model-1.5"),
        (str(tmp_path), "mine", "mine"),
    ):
        config = engine.config.replace(model=model, served_model_name=given or model)
        monkeypatch.setattr(engine, "config", config)
        assert served_name(engine) == name


def test_a_link_to_a_model_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "my-model").symlink_to(tmp_path / "blobs", target_is_directory=True)
    config = EngineConfig(model=str(tmp_path / "my-model"))
    assert served_name(SimpleNamespace(config=config)) == "my-model"  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/health%0A", "/v1/embeddings%0A", "/health%0D%0A", "/health%00", "/health/"])
def test_a_path_with_something_after_it_is_another_path(client: Client, path: str) -> None:
    assert client.get(path).status_code == 404


# Headers


def test_headers_say_how_long_it_took_and_what_was_run(engine: Engine) -> None:
    response = with_options(engine).embed(input=["a b", "c"])
    assert response.headers["x-compute-tokens"] == "7"
    parts = [float(response.headers[f"x-{name}-time"]) for name in ("tokenization", "queue", "inference")]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= float(response.headers["x-total-time"]) + 0.01
    assert "x-truncated-tokens" not in response.headers


def test_request_ids_are_echoed_or_made(engine: Engine) -> None:
    client = with_options(engine)
    named = client.request("POST", "/v1/embeddings", json={"input": "a"}, headers={"X-Request-Id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    assert named.json()["id"] == "embd-mine-1"
    assert client.embed(input="a", request_id="body-1").json()["id"] == "embd-body-1"
    for odd in ("x" * 200, "tab\there"):
        made = client.request("GET", "/health", headers={"X-Request-Id": odd}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{32}", made)
    assert client.get("/no/such").headers["x-request-id"]


# Metrics


def samples(client: Client) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line.rpartition(" ") for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_every_series_is_there_before_the_first_request(engine: Engine) -> None:
    found = samples(with_options(engine))
    for name in (
        'anypool_http_requests_total{code="200",path="/v1/embeddings"}',
        'anypool_http_requests_total{code="200",path="/rerank"}',
        "anypool_http_requests_running",
        "anypool_http_duration_seconds_count",
        'te_request_count{method="single"}',
        'te_request_failure{err="overloaded"}',
        'te_embed_success{method="batch"}',
        "te_predict_duration_count",
        "te_request_queue_duration_count",
    ):
        assert name in found, name
    assert found['te_request_count{method="single"}'] == 0


def test_requests_tokens_and_failures_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = with_options(engine)
    before = samples(client)
    client.embed(input="a b")
    client.post("/embed", inputs=["a", "b"])
    client.embed(input="a", dimensions=0)
    with monkeypatch.context() as patched:
        full = OverloadedError("full", retry_after_s=1)
        patched.setattr(Admission, "refusal", lambda admission, tokens, priority, config: full)
        assert client.embed(input="a").status_code == 429
    after = samples(client)

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert rise('anypool_http_requests_total{code="200",path="/v1/embeddings"}') == 1
    assert rise('anypool_http_requests_total{code="400",path="/v1/embeddings"}') == 1
    assert rise('te_request_success{method="single"}') == 1
    assert rise('te_embed_success{method="batch"}') == 1
    assert rise('te_request_failure{err="validation"}') == 1
    assert rise('te_request_failure{err="overloaded"}') == 1
    assert rise('anypool_prompt_tokens_total{model="minilm"}') == 10
    assert rise('vllm:prompt_tokens_total{model_name="minilm"}') == 10
    assert rise('anypool_inputs_total{model="minilm",outcome="ok"}') == 3
    assert rise('vllm:request_success_total{model_name="minilm"}') == 3
    assert rise('anypool_rejected_total{model="minilm"}') == 1
    assert rise('te_request_input_length_bucket{le="32"}') == 2
    assert rise("anypool_http_duration_seconds_count") == 4
    assert after['anypool_healthy{model="minilm"}'] == 1
    assert after["anypool_http_requests_running"] == 1  # the one that asks


def test_histograms_add_up(engine: Engine) -> None:
    found = samples(with_options(engine))
    for name in ("anypool_batch_tokens", "anypool_queue_seconds"):
        assert found[f'{name}_bucket{{le="+Inf",model="minilm"}}'] == found[f'{name}_count{{model="minilm"}}'] > 0


# Logs


def test_access_log_has_a_line_per_request(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="anypool.access"):
        client = with_options(engine, access_log=True, log_format="json")
        client.request("POST", "/v1/embeddings", json={"input": "a b"}, headers={"X-Request-Id": "one"})
        with_options(engine, access_log=True).get("/no/such")
    first, second = caplog.records
    entry = json.loads(JsonFormatter().format(first))
    assert (entry["request_id"], entry["status"], entry["tokens"], entry["model"]) == ("one", 200, 4, "minilm")
    assert entry["path"] == "/v1/embeddings"
    assert "status=404 " in second.getMessage()


def test_a_path_cannot_write_a_line_of_the_access_log(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="anypool.access"):
        client = with_options(engine, access_log=True)
        client.request("GET", "/x%0AINFO: request_id=1", headers={"X-Request-Id": "a status=200"})
    [record] = caplog.records
    assert 'path="/x\\nINFO: request_id=1"' in record.getMessage()
    assert 'request_id="a status=200"' in record.getMessage()


def test_no_answer_has_a_path_of_the_machine(minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").symlink_to(minilm)
    monkeypatch.chdir(tmp_path)
    for name, served in (("m", None), (".", 'a "b"')):
        if name == ".":
            monkeypatch.chdir(minilm)
        engine = Engine(EngineConfig(model=name, served_model_name=served, use_tqdm_on_load=False))
        try:
            client = with_options(engine)
            [card] = client.get("/v1/models").json()["data"]
            assert card["root"] == card["id"] == (served or "m")
            paths = [os.path.abspath(name), os.path.realpath(name)]
            monkeypatch.setattr(engine, "prepare", _refusing(" ".join(paths)))
            found = error(client.embed(input="a"), 400)["message"]
            assert found == f"{card['id']} {card['id']} is not a model. Mm."
        finally:
            engine.close()


def _refusing(text: str) -> Any:
    def prepare(*_: Any) -> Any:
        raise InvalidPromptError(f"{text} is not a model. Mm.")

    return prepare


def test_a_failure_is_logged_with_its_trace_and_not_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(requests: list[Request], **_: Any) -> None:
        raise RuntimeError("secret /path")

    monkeypatch.setattr(engine, "submit", submit)
    found = error(with_options(engine).embed(input="a"), 500)
    assert "secret" not in found["message"]
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.exc_info is not None


# Options


def test_flags_win_over_the_environment_which_wins_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    path.write_text('{"max-inputs": 1, "max_body_bytes": 2, "allow-origin": ["a"], "port": 3}', encoding="utf-8")
    environment = {
        "ANYPOOL_SERVE_MAX_INPUTS": "10",
        "ANYPOOL_SERVE_PORT": "20",
        "ANYPOOL_SERVE_API_KEY": "one, two",
        "ANYPOOL_SERVE_METRICS": "false",
        "ANYPOOL_SERVE_REQUEST_TIMEOUT": "1.5",
    }
    options = ServerOptions.gather({"port": 30}, path=str(path), environment=environment)
    assert (options.max_body_bytes, options.max_inputs, options.port) == (2, 10, 30)
    assert (options.api_key, options.allow_origin) == (("one", "two"), ("a",))
    assert (options.metrics, options.request_timeout) == (False, 1.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_inputs": 0}, "max_inputs=0 is not a number from 1 on"),
        ({"request_timeout": 0}, "request_timeout=0 is not a number of seconds"),
        ({"log_format": "xml"}, "known: text, json"),
        ({"ssl_keyfile": "k"}, "need ssl_certfile"),
        ({"max_input": 1}, "did you mean 'max_inputs'?"),
        ({"api_key": ("",)}, "is not texts"),
        ({"port": 70000}, "not 0 to 65535"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ServerOptions.gather(given, environment={})
    if isinstance(next(iter(given.values())), int) and "max_inputs" in given:
        with pytest.raises(ConfigError, match="is not a number"):
            ServerOptions.gather({}, environment={"ANYPOOL_SERVE_MAX_INPUTS": "many"})


# The end


class Program:
    """`anypool serve` on a free port."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "anypool", "serve", model, "--port", "0", "--served-model-name", "minilm"]
        self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        self.address = next(found[1] for line in lines if (found := re.search(r"serves on (https?://[\d.:]+)", line)))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def wait_for_work(program: Program) -> None:
    """Until the engine has something in its queue."""
    while not re.search(r"^anypool_queue_requests.* [1-9]", httpx.get(f"{program.address}/metrics").text, re.MULTILINE):
        time.sleep(0.05)


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


@pytest.mark.timeout(120)
def test_sigterm_drains_while_readiness_is_false_and_loses_nothing(minilm: str) -> None:
    texts = [f"a text {number} " * 20 for number in range(250)]
    with Program(minilm, "--shutdown-delay", "1") as program, httpx.Client(base_url=program.address) as client:
        assert client.get("/health/ready").status_code == 200
        post = lambda: httpx.post(f"{program.address}/v1/embeddings", json={"input": texts}, timeout=60)  # noqa: E731
        thread, answers = in_background(post)
        wait_for_work(program)
        program.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert client.get("/health/ready").json()["error"]["code"] == "shutting_down"
        assert client.get("/health/live").status_code == 200
        assert client.post("/v1/embeddings", json={"input": "late"}, timeout=60).status_code == 200
        thread.join(60)
        assert len(answers[0].json()["data"]) == 250
        assert program.process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{program.address}/health")


@pytest.mark.timeout(120)
def test_sighup_drains_as_well_unless_it_is_ignored(minilm: str) -> None:
    texts = [f"a text {number} " * 20 for number in range(250)]
    with Program(minilm) as program:
        post = lambda: httpx.post(f"{program.address}/v1/embeddings", json={"input": texts}, timeout=60)  # noqa: E731
        thread, answers = in_background(post)
        wait_for_work(program)
        program.process.send_signal(signal.SIGHUP)
        thread.join(60)
        assert len(answers[0].json()["data"]) == 250
        assert program.process.wait(30) == 0
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Program(minilm) as program:
            program.process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert httpx.get(f"{program.address}/health").status_code == 200
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.timeout(120)
def test_a_second_sigterm_does_not_wait(minilm: str) -> None:
    texts = [f"a text {number} " * 40 for number in range(4000)]
    with Program(minilm, "--drain-timeout", "60") as program:

        def call() -> Any:
            try:
                return httpx.post(f"{program.address}/v1/embeddings", json={"input": texts}, timeout=60)
            except httpx.HTTPError as failure:
                return failure

        thread, answers = in_background(call)
        wait_for_work(program)
        program.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert program.process.poll() is None
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(15) == 0
        thread.join(15)
        assert isinstance(answers[0], httpx.HTTPError) or answers[0].status_code == 503


@pytest.mark.timeout(120)
def test_https(minilm: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with Program(minilm, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as program:
        assert program.address.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{program.address}/health", verify=trust).status_code == 200


def test_work_of_a_client_that_leaves_is_dropped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        requests = held(engine, patched)
        app = create_app(engine)

        async def call() -> None:
            body = iter([{"type": "http.request", "body": b'{"inputs": ["a", "b"]}'}, {"type": "http.disconnect"}])

            async def receive() -> dict[str, Any]:
                return next(body)

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            sent: list[dict[str, Any]] = []
            scope = {"type": "http", "method": "POST", "path": "/embed", "headers": []}
            await asyncio.wait_for(app(scope, receive, send), 30)
            assert sent[0]["status"] == 499

        began = time.monotonic()

        asyncio.run(call())
        assert time.monotonic() - began < 20  # not by the end of this test's patience
        assert [request.future.cancelled() for request in requests] == [True, True]


def test_deadline_is_up_before_the_body_is_there(engine: Engine) -> None:
    async def slow() -> Any:
        yield b'{"input": '
        await asyncio.sleep(0.3)
        yield b'"a"}'

    assert error(with_options(engine, request_timeout=0.1).embed_raw(slow()), 504)["code"] == "deadline_exceeded"
    assert error(with_options(engine, body_timeout=0.1).embed_raw(slow()), 408)["code"] == "request_timeout"
    hurried = {"X-Request-Timeout": "0.1"}
    answer = with_options(engine).request("POST", "/v1/embeddings", content=slow(), headers=hurried)
    assert error(answer, 504)["code"] == "deadline_exceeded"


@pytest.mark.parametrize("given", ["1_0", "0", "-1", "inf", "nan", "1e400", "5s", "", "0x10", "+5", ".5"])
def test_a_time_that_is_no_number_of_seconds_is_refused(engine: Engine, given: str) -> None:
    answer = with_options(engine).request(
        "POST", "/v1/embeddings", json={"input": "a"}, headers={"X-Request-Timeout": given}
    )
    assert error(answer, 400)["param"] == "X-Request-Timeout"


@pytest.fixture(autouse=True)
def still_serves(engine: Engine) -> Iterator[None]:
    yield
    assert Client(create_app(engine)).embed(input="still here").status_code == 200
