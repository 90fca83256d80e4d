"""The OpenAPI document is the one in the repository, and nothing that it allows makes the server fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings

from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.openapi import document
from anypool.entrypoints.serve.routes import adapters
from anypool.entrypoints.serve.routes.table import ROUTES
from anypool.entrypoints.server_options import ServerOptions
from tests.entrypoints.conftest import Client
from tests.named_checkpoints import cross_encoder, reward_model, sentiment

GOLDEN = Path(__file__).parent / "openapi.json"


def test_document_is_the_one_in_the_repository() -> None:
    """After a change that is meant: python -m tests.entrypoints.test_openapi"""
    assert as_text(document(ROUTES, has_keys=False)) == GOLDEN.read_text(encoding="utf-8")


def test_document_has_every_route_and_names_the_key_where_there_is_one(engine: Engine) -> None:
    served = Client(create_app(engine, ServerOptions(api_key="k"))).request(
        "GET", "/openapi.json", headers={"X-API-Key": "k"}
    )
    paths = served.json()["paths"]
    off = {path for route in adapters.ROUTES for path in route.paths}  # where no folder is named
    assert set(paths) == {path for route in ROUTES if route.is_shown for path in route.paths} - off
    assert [path for path in paths if "security" not in next(iter(paths[path].values()))] == [
        "/health",
        "/health/ready",
        "/health/live",
        "/ping",
    ]


def test_every_request_schema_has_the_common_fields() -> None:
    schemas = document(ROUTES, has_keys=False)["components"]["schemas"]
    common = {"prompt", "prompt_name", "input_type", "truncate", "truncate_prompt_tokens", "normalize", "activation"}
    for route in ROUTES:
        for call in route.calls:
            assert common | {"priority", "cache_salt", "task"} <= set(schemas[call.schema.__name__]["properties"])


def as_text(found: dict[str, Any]) -> str:
    found["info"]["version"] = ""
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


schema = schemathesis.openapi.from_dict(document(ROUTES, has_keys=False))
_BY_PATH = {"/classify": sentiment, "/predict": sentiment, "/reward": reward_model, "/rerank": cross_encoder}


@cache
def _client(make: Callable[[], Path]) -> Client:
    config = EngineConfig(model=str(make()), device="cpu", use_tqdm_on_load=False)
    return Client(create_app(Engine(config)))


@schema.parametrize()
@settings(
    max_examples=int(os.environ.get("ANYPOOL_FUZZ_EXAMPLES", "12")),
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_nothing_that_the_document_allows_makes_the_server_fail(case: schemathesis.Case, engine: Engine) -> None:
    client = _client(_BY_PATH[case.path]) if case.path in _BY_PATH else Client(create_app(engine))
    sent = case.as_transport_kwargs(base_url="http://test")
    response = client.request(
        sent["method"],
        sent["url"],
        params=sent.get("params"),
        headers=sent["headers"],
        content=sent.get("data") if sent.get("json") is None else json.dumps(sent["json"]).encode(),
    )
    assert response.status_code < 500, response.text
    expected = json.loads(response.content) if response.headers["content-type"] == "application/json" else {}
    if response.status_code >= 400:
        assert set(expected) in ({"error"}, {"error", "error_type"}, {"id", "message"})


if __name__ == "__main__":
    GOLDEN.write_text(as_text(document(ROUTES, has_keys=False)), encoding="utf-8")
