"""The HTTP server over a real MiniLM engine, in process; one test starts it as a program."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers

import anypool
import anypool.entrypoints.serve
from anypool.engine.engine import Engine
from anypool.engine.request import Request
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import EngineDeadError, MissingDependencyError, NonFiniteResultError, OverloadedError
from tests.entrypoints.conftest import Client

TEXTS = ["How tall is the Eiffel Tower?", "330 m", "Ein Satz auf Deutsch, etwas länger als die anderen."]


def vectors(response: Any) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array([row["embedding"] for row in response.json()["data"]], np.float32)


def decoded(response: Any) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.stack([np.frombuffer(base64.b64decode(r["embedding"]), "<f4") for r in response.json()["data"]])


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.fixture(scope="session")
def token_ids(minilm: str) -> Callable[[str], list[int]]:
    """Ids by the tokenizers library itself."""
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(minilm) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text).ids)


# Answers.


def test_response_has_openai_shape(client: Client, token_ids: Callable[[str], list[int]]) -> None:
    body = client.embed(input=TEXTS, model="minilm", user="someone").json()
    tokens = sum(len(token_ids(text)) for text in TEXTS)
    assert body["object"] == "list"
    assert body["id"].startswith("embd-")
    assert body["model"] == "minilm"
    assert isinstance(body["created"], int)
    assert [(row["object"], row["index"], len(row["embedding"])) for row in body["data"]] == [
        ("embedding", index, 384) for index in range(3)
    ]
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_vectors_are_those_of_the_engine_in_the_order_of_the_inputs(engine: Engine, client: Client) -> None:
    alone = np.concatenate([vectors(client.embed(input=text)) for text in TEXTS])
    np.testing.assert_allclose(vectors(client.embed(input=TEXTS)), alone, atol=1e-6)
    with anypool.LLM(engine.config.model, use_tqdm_on_load=False) as llm:
        offline = np.stack([output.outputs.numpy() for output in llm.embed(TEXTS, use_tqdm=False)])
    np.testing.assert_allclose(alone, offline, atol=1e-6)


@pytest.mark.parametrize("fields", [{}, {"dimensions": 7}, {"normalize": False}])
def test_base64_holds_exactly_the_floats(client: Client, fields: dict[str, Any]) -> None:
    numbers = vectors(client.embed(input=TEXTS[0], **fields))
    np.testing.assert_array_equal(decoded(client.embed(input=TEXTS[0], encoding_format="base64", **fields)), numbers)


def test_large_response_has_every_row_in_its_place(client: Client) -> None:
    texts = [str(number) for number in range(60)]
    rows = vectors(client.embed(input=texts))
    assert rows.shape == (60, 384)
    np.testing.assert_allclose(rows[[0, 59]], vectors(client.embed(input=["0", "59"])), atol=1e-6)


def test_token_ids_give_what_their_text_gives(client: Client, token_ids: Callable[[str], list[int]]) -> None:
    expected = vectors(client.embed(input=TEXTS))
    ids = [token_ids(text) for text in TEXTS]
    np.testing.assert_allclose(vectors(client.embed(input=ids)), expected, atol=1e-6)
    np.testing.assert_allclose(vectors(client.embed(input=ids[0])), expected[:1], atol=1e-6)


def test_dimensions_cuts_before_scaling(client: Client) -> None:
    full, cut = vectors(client.embed(input=TEXTS)), vectors(client.embed(input=TEXTS, dimensions=64))
    expected = full[:, :64] / np.linalg.norm(full[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, atol=1e-6)


def test_normalize_false_gives_the_unscaled_vector(client: Client) -> None:
    scaled, raw = vectors(client.embed(input=TEXTS)), vectors(client.embed(input=TEXTS, normalize=False))
    norms = np.linalg.norm(raw, axis=1, keepdims=True)
    assert (abs(norms - 1) > 0.01).all()
    np.testing.assert_allclose(raw / norms, scaled, atol=1e-6)


@pytest.mark.parametrize(
    ("side", "kept"), [("right", "one two three"), ("left", "four five six"), (None, "one two three")]
)
def test_truncation_cuts_the_text_and_is_reported(client: Client, side: str | None, kept: str) -> None:
    response = client.embed(input="one two three four five six", truncate_prompt_tokens=5, truncation_side=side)
    assert response.json()["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "truncated_tokens": 3}
    np.testing.assert_allclose(vectors(response), vectors(client.embed(input=kept)), atol=1e-6)


def test_truncation_to_the_models_limit(client: Client) -> None:
    usage = client.embed(input="word " * 1000, truncate_prompt_tokens=-1).json()["usage"]
    assert usage == {"prompt_tokens": 256, "total_tokens": 256, "truncated_tokens": 746}


def test_empty_list_gives_an_empty_list(client: Client) -> None:
    body = client.embed(input=[]).json()
    assert body["data"] == []
    assert body["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_empty_text_is_embedded(client: Client) -> None:
    assert client.embed(input=[""]).json()["usage"]["prompt_tokens"] == 2
    np.testing.assert_array_equal(vectors(client.embed(input="")), vectors(client.embed(input=[""])))


def test_unknown_fields_and_nulls_are_ignored(client: Client) -> None:
    fields = {"dimensions": None, "prompt_name": None, "user": None, "model": None, "truncation_side": None}
    response = client.embed(input="a", no_such_field={"x": [1]}, add_special_tokens=True, **fields)
    np.testing.assert_array_equal(vectors(response), vectors(client.embed(input="a")))


def test_model_may_be_the_served_name_the_path_or_missing(engine: Engine, client: Client) -> None:
    for name in ("minilm", engine.config.model, "", None):
        assert client.embed(input="a", model=name).json()["model"] == "minilm"


def test_content_type_does_not_matter(client: Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        response = client.request("POST", "/v1/embeddings", content=b'{"input": "a"}', headers={"content-type": kind})
        assert response.status_code == 200


# Refusals. After each of them the server still answers.

DEEP = b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_BODIES = {
    "empty": (b"", "empty"),
    "not json": (b"input=a", "not valid JSON"),
    "cut off": (b'{"input": "a"', "not valid JSON"),
    "two values": (b'{"input": "a"} {}', "not valid JSON"),
    "invalid utf-8": (b'{"input": "\xff\xfe"}', "UTF-8"),
    "utf-16": ('{"input": "a"}'.encode("utf-16"), "UTF-8"),
    "lone surrogate": (b'{"input": "\\ud800"}', "surrogate"),
    "lone surrogate as a name": (b'{"input": "a", "prompt_name": "\\udfff"}', "not valid JSON"),
    "lone surrogate as a key": (b'{"input": "a", "\\ud800": 1}', "surrogate"),
    "NaN": (b'{"input": [NaN]}', "not valid JSON"),
    "Infinity": (b'{"input": "a", "dimensions": Infinity}', "not valid JSON"),
    "deep nesting": (DEEP, "not valid JSON"),
    "gzip": (b"\x1f\x8b\x08\x00", "not valid JSON"),
    "array": (b'["a"]', "JSON object"),
    "string": (b'"a"', "JSON object"),
    "null": (b"null", "JSON object"),
    "number": (b"1", "JSON object"),
}


@pytest.fixture
def survivor(client: Client) -> Iterator[Client]:
    yield client
    assert client.get("/health").status_code == 200
    assert vectors(client.embed(input="still here")).shape == (1, 384)


@pytest.mark.parametrize("name", BAD_BODIES)
def test_body_that_is_no_json_object_is_400(survivor: Client, name: str) -> None:
    body, words = BAD_BODIES[name]
    found = error(survivor.embed_raw(body), 400)
    assert words in found["message"]
    assert found["type"] == "invalid_request_error"


BAD_FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({}, "input", "missing"),
    "input null": ({"input": None}, "input", "missing"),
    "input number": ({"input": 3}, "input", "the number 3"),
    "input float": ({"input": 3.5}, "input", "the number 3.5"),
    "input bool": ({"input": True}, "input", "a boolean"),
    "input object": ({"input": {"prompt": "a"}}, "input", "an object"),
    "input nulls": ({"input": ["a", None]}, "input", "input[1] is null"),
    "input bools": ({"input": [True, False]}, "input", "input[0] is a boolean"),
    "input objects": ({"input": [{"prompt": "a"}]}, "input", "input[0] is an object"),
    "input floats": ({"input": [101, 7.0]}, "input", "input[1] is the number 7.0"),
    "input text and id": ({"input": ["a", 1]}, "input", "input[1] is the number 1"),
    "input id and text": ({"input": [1, "a"]}, "input", "input[1] is a string"),
    "input text and ids": ({"input": ["a", [1]]}, "input", "input[1] is an array"),
    "input ids and id": ({"input": [[1], 1]}, "input", "input[1] is the number 1"),
    "input ids of text": ({"input": [[1], ["a"]]}, "input", "input[1][0] is a string"),
    "input ids of bools": ({"input": [[1, True]]}, "input", "input[0][1] is a boolean"),
    "input ids of ids": ({"input": [[[1]]]}, "input", "input[0][0] is an array"),
    "input empty ids": ({"input": [[]]}, "input", "empty"),
    "input too many": ({"input": [""] * (16_384 + 1)}, "input", "16,385 items"),
    "input too long": ({"input": ["a", "word " * 300]}, "input", "input 1 has 302 tokens, the limit is 256"),
    "ids too long": ({"input": [7] * 257}, "input", "257 tokens"),
    "id over vocabulary": ({"input": [101, 30522]}, "input", "30522"),
    "id negative": ({"input": [-1]}, "input", "-1"),
    "id of 63 bits": ({"input": [2**63 - 1]}, "input", str(2**63 - 1)),
    "id of 70 bits": ({"input": [2**70]}, "input", "number"),
    "model number": ({"input": "a", "model": 3}, "model", "string"),
    "encoding_format": ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float', 'base64', 'bytes'"),
    "dimensions too large": ({"input": "a", "dimensions": 385}, "dimensions", "1 to 384"),
    "dimensions zero": ({"input": "a", "dimensions": 0}, "dimensions", "positive"),
    "dimensions huge": ({"input": "a", "dimensions": 10**18}, "dimensions", "1 to 384"),
    "dimensions string": ({"input": "a", "dimensions": "64"}, "dimensions", "integer"),
    "dimensions float": ({"input": "a", "dimensions": 64.0}, "dimensions", "integer"),
    "dimensions bool": ({"input": "a", "dimensions": True}, "dimensions", "integer"),
    "prompt_name": ({"input": "a", "prompt_name": "no such"}, "prompt_name", "'no such'"),
    "prompt_name number": ({"input": "a", "prompt_name": 1}, "prompt_name", "string"),
    "normalize": ({"input": "a", "normalize": "yes"}, "normalize", "boolean"),
    "truncate to 0": ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "positive"),
    "truncate to -2": ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "positive"),
    "truncate to 257": ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "256"),
    "truncate to 1": ({"input": "a b", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "special tokens"),
    "truncation_side": ({"input": "a", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
    "embed_dtype": ({"input": "a", "embed_dtype": "float64"}, "embed_dtype", "'float32', 'float16'"),
    "endianness": ({"input": "a", "endianness": "middle"}, "endianness", "'native', 'little' or 'big'"),
    "messages": ({"messages": [{"role": "user", "content": "a"}]}, "messages", "has no chat template"),
    "both inputs": ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "both given"),
    "messages empty": ({"messages": []}, "messages", "messages is empty"),
    "message without a role": ({"messages": [{"content": "a"}]}, "messages", "role and content"),
    "message with an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "image_url is x; give {'url': 'data:image/png;base64,...'}",
    ),
    "chat_template": (
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages }}"},
        "chat_template",
        "--trust-request-chat-template",
    ),
    "chat_template in kwargs": (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template",
        "--trust-request-chat-template",
    ),
    "prompt twice": ({"input": "a", "prompt": "b", "prompt_name": "c"}, "prompt", "give one"),
    "input_type": ({"input": "a", "input_type": "no such"}, "input_type", "'no such' is unknown; known: 'query'"),
    "task": ({"input": "a", "task": "retrieval.nothing"}, "task", "is unknown"),
    "truncate": ({"input": "a", "truncate": "MIDDLE"}, "truncate", "NONE, START, END"),
    "truncate and not": ({"input": "a", "truncate": False, "truncate_prompt_tokens": 5}, "truncate", "contradicts"),
    "two sides": ({"input": "a", "truncate": "END", "truncation_side": "left"}, "truncation_side", "contradict"),
    "activation": ({"input": "a", "activation": "sigmoid"}, "activation", "no meaning for task 'embed'"),
    "priority": ({"input": "a", "priority": 2**63}, "priority", "less than"),
    "cache_salt": ({"input": "a", "cache_salt": ""}, "cache_salt", "at least 1"),
    "return_multivector": ({"input": "a", "return_multivector": True}, "return_multivector", "token_embed"),
    "modality": ({"input": "a", "modality": "image"}, "modality", "text"),
    "embedding_type": ({"input": "a", "embedding_type": "int8", "embed_dtype": "int8"}, "embedding_type", "give one"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_field_that_cannot_be_served_is_400_and_named(survivor: Client, name: str) -> None:
    fields, param, words = BAD_FIELDS[name]
    found = error(survivor.embed(**fields), 400)
    assert found["param"] == param
    assert words in found["message"]


def test_too_long_input_has_openais_code(client: Client) -> None:
    assert error(client.embed(input="word " * 300), 400)["code"] == "context_length_exceeded"


def test_messages_do_not_quote_megabytes(survivor: Client) -> None:
    long = "x" * 1_000_000
    for fields in (
        {"prompt_name": long},
        {"encoding_format": long},
        {"dimensions": [0] * 300_000},
        {"embed_dtype": long},
        {"input_type": long},
    ):
        assert len(error(survivor.embed(input="a", **fields), 400)["message"]) <= 1001


def test_unknown_model_is_404(survivor: Client) -> None:
    found = error(survivor.embed(input="a", model="gpt"), 404)
    assert found["code"] == "model_not_found"
    assert found["param"] == "model"
    assert "'gpt'" in found["message"]
    assert "'minilm'" in found["message"]
    assert error(survivor.get("/v1/models/gpt"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/embedding", "/v1/embeddings/x", "/v1/%ED%A0%80", "/%00"])
def test_unknown_route_is_404(survivor: Client, path: str) -> None:
    assert error(survivor.get(path), 404)["code"] == "not_found"


def test_wrong_method_is_405(survivor: Client) -> None:
    response = survivor.get("/v1/embeddings")
    assert error(response, 405)["message"] == "/v1/embeddings takes POST, not GET"
    assert response.headers["allow"] == "POST"
    assert error(survivor.request("POST", "/v1/models"), 405)["code"] == "method_not_allowed"


def test_body_over_the_limit_is_413(engine: Engine) -> None:
    small = Client(create_app(engine, ServerOptions(max_body_bytes=1000)))
    fitting = json.dumps({"input": "a", "pad": ""}).encode()
    fitting = fitting[:-2] + b"x" * (1000 - len(fitting)) + fitting[-2:]

    async def chunks(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    for body in (fitting, chunks(fitting)):
        assert small.embed_raw(body).status_code == 200
    for body in (fitting + b" ", b" " * 5000, chunks(fitting + b" "), chunks(b" " * 5000)):
        found = error(small.embed_raw(body), 413)
        assert "1,000 bytes" in found["message"]
        assert found["code"] == "body_too_large"


# The engine's own trouble.


def fail_with(monkeypatch: pytest.MonkeyPatch, engine: Engine, failure: Exception) -> None:
    def submit(requests: list[Request], *, bounded: bool, **_: Any) -> None:
        assert bounded
        for request in requests:
            request.future.set_exception(failure)

    monkeypatch.setattr(engine, "submit", submit)


def test_overload_is_429_with_retry_after(client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(requests: list[Request], **_: Any) -> None:
        raise OverloadedError("the queue is full", retry_after_s=2.2)

    monkeypatch.setattr(engine, "submit", submit)
    response = client.embed(input=TEXTS)
    assert error(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (NonFiniteResultError("NaN or infinity"), 500, "NaN or infinity"),
        (EngineDeadError("the thread died"), 503, "the thread died"),
        (RuntimeError("secret /path"), 500, "the server failed on this request (RuntimeError)"),
    ],
)
def test_engine_failure_is_a_server_error_in_the_same_shape(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, failure: Exception, status: int, words: str
) -> None:
    with monkeypatch.context() as patched:
        fail_with(patched, engine, failure)
        found = error(client.embed(input=TEXTS), status)
    assert found["type"] == "server_error"
    assert words in found["message"]
    assert "secret" not in found["message"]
    assert client.embed(input=TEXTS).status_code == 200


def test_health_is_503_when_the_engine_is_dead(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    monkeypatch.setattr(Engine, "is_alive", property(lambda engine: False))
    for path in ("/health", "/health/ready", "/health/live", "/ping"):
        assert error(client.get(path), 503)["code"] == "engine_dead"
    assert error(client.embed(input="a"), 503)["code"] == "engine_dead"


def test_health_answers_while_the_engine_is_busy(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, submit = threading.Event(), engine.submit
    held: list[Request] = []

    def hold(requests: list[Request], **_: Any) -> None:
        held.extend(requests)
        queued.set()

    monkeypatch.setattr(engine, "submit", hold)
    responses: list[Any] = []
    waiting = threading.Thread(target=lambda: responses.append(client.embed(input=TEXTS)))
    waiting.start()
    assert queued.wait(10)
    assert client.get("/health").status_code == 200
    assert not responses
    submit(held)
    waiting.join(10)
    assert responses[0].status_code == 200


async def _call_and_leave(app: Any, body: bytes, leave: asyncio.Event) -> list[dict[str, Any]]:
    """Calls the application as a server would, and reports that the client is gone once `leave` is set."""
    sent: list[dict[str, Any]] = []
    read = False

    async def receive() -> dict[str, Any]:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/embeddings",
        "raw_path": b"/v1/embeddings",
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": None,
        "server": ("test", 80),
    }
    await app(scope, receive, send)
    return sent


def test_queued_requests_are_cancelled_when_the_client_leaves(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Request] = []
    cancelled: list[bool] = []

    async def call() -> list[dict[str, Any]]:
        leave, loop = asyncio.Event(), asyncio.get_running_loop()

        def hold(requests: list[Request], **_: Any) -> None:
            held.extend(requests)
            loop.call_soon_threadsafe(leave.set)

        monkeypatch.setattr(engine, "submit", hold)
        body = json.dumps({"input": TEXTS}).encode()
        sent = await asyncio.wait_for(_call_and_leave(client.app, body, leave), 10)
        await asyncio.sleep(0.05)
        cancelled.extend(request.future.cancelled() for request in held)  # before the loop ends and cancels all
        return sent

    sent = asyncio.run(call())
    assert sent[0]["status"] == 499
    assert cancelled == [True] * len(TEXTS)


def test_other_inputs_are_cancelled_when_one_fails(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Request] = []

    def fail_second(requests: list[Request], **_: Any) -> None:
        held.extend(requests)
        requests[1].future.set_exception(NonFiniteResultError("NaN"))

    monkeypatch.setattr(engine, "submit", fail_second)
    error(client.embed(input=TEXTS), 500)
    assert [request.future.cancelled() for request in held] == [True, False, True]


# Other routes, and the package.


def test_models_lists_the_served_model(client: Client, engine: Engine) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert card["id"] == "minilm"
    assert card["object"] == "model"
    assert card["root"] == "minilm"  # the folder is nobody's business
    assert card["max_model_len"] == 256
    assert client.get("/v1/models/minilm").json() == card


def test_version(client: Client) -> None:
    assert client.get("/version").json() == {"version": anypool.__version__}


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "orjson" else object())
    with pytest.raises(
        MissingDependencyError, match=re.escape("the server needs orjson: pip install 'anypool[serve]'")
    ):
        importlib.reload(anypool.entrypoints.serve)


def test_importing_anypool_and_its_cli_imports_no_web_framework() -> None:
    code = (
        "import sys, anypool.entrypoints.cli; "
        "names = 'fastapi starlette uvicorn pydantic orjson prometheus_client'.split(); "
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def program(minilm: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`anypool serve` on a free port, and its address."""
    command = [sys.executable, "-m", "anypool", "serve", minilm, "--port", "0", "--served-model-name", "minilm"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            address = next(found[1] for line in lines if (found := re.search(r"serves on (http://[\d.:]+)", line)))
            yield process, address
        finally:
            process.kill()


@pytest.mark.timeout(120)
def test_program_serves_the_openai_client_and_ends_at_sigterm(
    program: tuple[subprocess.Popen[str], str], token_ids: Callable[[str], list[int]]
) -> None:
    process, address = program
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        numbers = client.embeddings.create(model="minilm", input=TEXTS[:2], encoding_format="float")
        coded = client.embeddings.create(model="minilm", input=TEXTS[:2], encoding_format="base64")
        default = client.embeddings.create(model="minilm", input=TEXTS[:2])
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=1000)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")
        assert [model.id for model in client.models.list()] == ["minilm"]
        assert client.models.retrieve("minilm").id == "minilm"

    assert refused.value.param == "dimensions"
    rows = np.array([row.embedding for row in numbers.data], np.float32)
    assert rows.shape == (2, 384)
    raw = [row.embedding for row in coded.data]
    assert all(isinstance(row, str) for row in raw)
    np.testing.assert_array_equal(np.stack([np.frombuffer(base64.b64decode(str(row)), "<f4") for row in raw]), rows)
    np.testing.assert_array_equal(np.array([row.embedding for row in default.data], np.float32), rows)
    tokens = sum(len(token_ids(text)) for text in TEXTS[:2])
    assert (numbers.usage.prompt_tokens, numbers.usage.total_tokens) == (tokens, tokens)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_body_that_never_ends_is_given_up(engine: Engine) -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b'{"input": '
        await asyncio.sleep(60)

    slow = Client(create_app(engine, ServerOptions(body_timeout=0.05)))
    found = error(slow.embed_raw(never()), 408)
    assert found["code"] == "request_timeout"
    assert "within 0.05 seconds" in found["message"]


def test_health_answers_head_and_a_null_encoding_is_the_default(client: Client) -> None:
    assert client.request("HEAD", "/health").status_code == 200
    answer = client.embed(input="a", encoding_format=None)
    assert isinstance(answer.json()["data"][0]["embedding"], list)
