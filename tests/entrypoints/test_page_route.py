"""The page at `/` as files: what is served, to whom, with which headers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.server_options import ServerOptions
from tests.entrypoints.conftest import Client
from tests.entrypoints.test_server import error

FOLDER = Path(__file__).parents[2] / "anypool" / "entrypoints" / "serve" / "page"
FILES = sorted(file.name for file in FOLDER.iterdir())
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
         ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}  # fmt: skip


def with_options(engine: Engine, **options: Any) -> Client:
    return Client(create_app(engine, ServerOptions(**options)))


def test_the_page_stands_at_the_root(client: Client) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.content == (FOLDER / "index.html").read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_each_file_has_its_type_and_a_tag_that_saves_sending_it_again(client: Client, name: str) -> None:
    response = client.get(f"/page/{name}")
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == TYPES[Path(name).suffix]
    assert response.headers["cache-control"] == "no-cache"
    tag = response.headers["etag"]
    again = client.request("GET", f"/page/{name}", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.request("GET", f"/page/{name}", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_policy_allows_nothing_that_is_not_a_file_of_the_server(client: Client) -> None:
    policy = dict(part.strip().split(" ", 1) for part in client.get("/").headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    own = {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")}
    assert own == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types")} == {"'none'"}
    assert client.get("/").headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_writes_markup(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|url\(|@import", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|\bFunction\(", text)
    if name == "index.html":
        assert not re.search(r"<script(?! type=\"module\" src=)|<style|\sstyle=|\son\w+=", text)


@pytest.mark.parametrize(("path", "methods"), [("/", "POST, GET"), ("/page/page.css", "GET")])
def test_head_and_a_wrong_method(client: Client, path: str, methods: str) -> None:
    head = client.request("HEAD", path)
    assert head.status_code == 200
    assert int(head.headers["content-length"]) > 0
    refused = client.request("DELETE", path)
    assert f"takes {methods}, not DELETE" in error(refused, 405)["message"]
    assert refused.headers["allow"] == methods


def test_a_post_to_the_same_path_still_runs_the_model(engine: Engine) -> None:
    for page in (True, False):
        assert len(with_options(engine, page=page).post("/", inputs="a").json()[0]) == 384


@pytest.mark.parametrize(
    "path", ["/page/none.js", "/page/../route.py", "/page/%2e%2e/route.py", "/page/", "/index.html"]
)
def test_what_is_no_file_of_the_page_is_404(client: Client, path: str) -> None:
    assert error(client.get(path), 404)["code"] == "not_found"


def test_the_page_needs_no_key_and_tells_nothing(engine: Engine) -> None:
    client = with_options(engine, api_key="right")
    assert client.get("/").content == with_options(engine).get("/").content
    assert all(b"minilm" not in client.get(f"/page/{name}").content for name in FILES)
    assert client.get("/page/none.js").status_code == 404
    assert client.get("/info").status_code == 401


def test_the_page_can_be_switched_off(engine: Engine) -> None:
    client = with_options(engine, page=False)
    assert error(client.get("/page/page.js"), 404)["code"] == "not_found"
    assert error(client.get("/"), 405)["message"] == "/ takes POST, not GET"
    for path in ("/", "/page/page.js"):
        assert with_options(engine, page=False, api_key="k").get(path).status_code == 401  # as any unknown path


def test_info_is_of_the_model_that_the_query_names(engine: Engine) -> None:
    client = Client(create_app(engine))
    assert client.get("/info?model=minilm").json() == client.get("/info").json()
    refused = client.get("/info?model=other")
    assert refused.status_code == 404
    assert "'other' is not served here" in refused.json()["error"]


def test_pooling_returns_the_ids_that_it_ran(client: Client) -> None:
    asked = {"task": "token_embed", "input": ["Hello world", "word " * 300], "truncate": True}
    answer = client.post("/pooling", **asked, return_token_ids=True).json()["data"]
    expected = client.post("/tokenize", prompt="Hello world").json()["tokens"]
    assert answer[0]["prompt_token_ids"] == expected
    assert [len(one["prompt_token_ids"]) for one in answer] == [len(one["data"]) for one in answer] == [4, 256]
    packed = client.post("/pooling", **asked, return_token_ids=True, encoding_format="base64").json()["data"]
    assert packed[1]["prompt_token_ids"] == answer[1]["prompt_token_ids"]
    assert "prompt_token_ids" not in client.post("/pooling", **asked).json()["data"][0]
    refused = client.post("/pooling", **asked, return_token_ids=True, encoding_format="bytes")
    assert error(refused, 400)["param"] == "return_token_ids"
