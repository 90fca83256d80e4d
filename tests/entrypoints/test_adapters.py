"""LoRA adapters over HTTP: each is a model of its own to whoever calls it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import ConfigError
from tests.adapters.lora_checkpoints import adapter, states
from tests.entrypoints.conftest import Client
from tests.helpers import copy_of, tiny_bert, tiny_llama
from tests.named_checkpoints import sentiment

TEXTS = ["the cat sat on a mat", "none saw the story", "a cat"]
BERT, LABELS = {"target_modules": ["query", "value", "dense"]}, {"target_modules": ["q_lin", "v_lin"]}


@cache
def of_bert(seed: int) -> Path:
    return adapter(tiny_bert(), seed=seed, **BERT)[0]


@cache
def of_llama() -> Path:
    return adapter(tiny_llama(), target_modules=["q_proj", "down_proj"])[0]


@cache
def of_labels() -> Path:
    return adapter(sentiment(), cls=AutoModelForSequenceClassification, seed=3, **LABELS)[0]


@cache
def chatty() -> Path:
    folder = copy_of(tiny_llama())
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def start(model: Path, name: str, **options: Any) -> Engine:
    return Engine(
        EngineConfig(model=str(model), served_model_name=name, device="cpu", use_tqdm_on_load=False, **options)
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """Three models with adapters, and one that takes none."""
    a, b = str(of_bert(1)), str(of_bert(2))
    own = [
        start(tiny_bert(), "bert", enable_lora=True, lora_modules={"a": a, "team/b": b}),
        start(sentiment(), "labels", enable_lora=True, lora_modules={"c": str(of_labels())}),
        start(tiny_llama(), "plain"),
        start(chatty(), "chat", enable_lora=True, lora_modules={"d": str(of_llama())}),
    ]
    yield own
    for one in own:
        one.close()


@pytest.fixture(scope="module")
def server(engines: list[Engine]) -> Client:
    return Client(create_app(engines))


@pytest.fixture(scope="module")
def merged() -> Iterator[Client]:
    """The same names, each a model of its own whose adapter is merged into its weights."""
    own = [
        start(tiny_bert(), "a", lora=str(of_bert(1))),
        start(tiny_bert(), "team/b", lora=str(of_bert(2))),
        start(sentiment(), "c", lora=str(of_labels())),
        start(chatty(), "d", lora=str(of_llama())),
    ]
    yield Client(create_app(own))
    for one in own:
        one.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that adapters may be loaded from, with two in it, beside one that is not to be read."""
    for name, source in {"in/one": of_bert(1), "in/two": of_bert(2), "in/llama": of_llama(), "out": of_bert(3)}.items():
        shutil.copytree(source, tmp_path / name)
    return tmp_path / "in"


@pytest.fixture
def open_server(folder: Path) -> Iterator[Client]:
    """A server that takes adapters of the folder."""
    engine = start(tiny_bert(), "bert", enable_lora=True, max_loras=2, enable_prefix_caching=False)
    yield Client(create_app(engine, ServerOptions(lora_dir=(str(folder),))))
    engine.close()


def load(client: Client, name: str, path: object, **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **fields)


def unload(client: Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", lora_name=name)


def rows(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


def embed(client: Client, model: str | None = None) -> np.ndarray:
    return rows(client.embed(input=TEXTS, model=model))


def numbers(value: Any) -> list[float]:
    """All floats of an answer, in their order."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float) else []


def test_vectors_are_those_of_pefts_model(server: Client, engines: list[Engine]) -> None:
    trained = adapter(tiny_bert(), seed=1, **BERT)[1]
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    for row, text in zip(embed(server, "a"), TEXTS, strict=True):
        mean = states(trained, [one.id for one in tokenizer.tokens(text, special_tokens=True)]).mean(dim=0)
        torch.testing.assert_close(torch.from_numpy(row), F.normalize(mean, dim=0), atol=1e-5, rtol=0)


PARENTS = {"a": "bert", "team/b": "bert", "c": "labels", "d": "chat"}
PAIRS = {"query": TEXTS[0], "documents": TEXTS}
ROUTES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "embeddings": ("/v1/embeddings", "team/b", {"input": TEXTS}),
    "chat": ("/v1/embeddings", "d", {"messages": [{"role": "user", "content": TEXTS[0]}]}),
    "tokens": ("/pooling", "a", {"input": TEXTS, "task": "token_embed"}),
    "several": ("/pooling", "a", {"input": TEXTS, "task": ["embed", "token_embed"]}),
    "pooling": ("/pooling", "c", {"input": TEXTS, "task": "classify"}),
    "classify": ("/classify", "c", {"input": TEXTS}),
    "score": ("/score", "a", {"text_1": TEXTS[0], "text_2": TEXTS}),
    "rerank": ("/rerank", "a", PAIRS),
    "rerank_v2": ("/v2/rerank", "team/b", PAIRS),
    "cohere": ("/v2/embed", "a", {"texts": TEXTS, "input_type": "search_document"}),
    "embed": ("/embed", "a", {"inputs": TEXTS}),
    "embed_all": ("/embed_all", "a", {"inputs": TEXTS}),
    "predict": ("/predict", "c", {"inputs": TEXTS}),
    "similarity": ("/similarity", "a", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}),
    "tei_rerank": ("/rerank", "a", {"query": TEXTS[0], "texts": TEXTS}),
    "invocations": ("/invocations", "c", {"input": TEXTS}),
}


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_takes_an_adapter_by_its_name(name: str, server: Client, merged: Client) -> None:
    path, model, body = ROUTES[name]
    answer, expected = (one.post(path, model=model, **body) for one in (server, merged))
    assert answer.status_code == expected.status_code == 200, answer.text + expected.text
    found = numbers(answer.json())
    np.testing.assert_allclose(found, numbers(expected.json()), atol=1e-5)
    base = server.post(path, model=PARENTS[model], **body)
    assert np.abs(np.sort(found) - np.sort(numbers(base.json()))).max() > 1e-3
    if "object" in answer.json():
        assert answer.json()["model"] == model


def test_tokenizing_takes_an_adapters_name(server: Client) -> None:
    named, base = (server.post("/tokenize", prompt=TEXTS[0], model=model) for model in ("a", "bert"))
    assert named.json() == base.json()
    ids = named.json()["tokens"]
    assert server.post("/detokenize", tokens=ids, model="a").status_code == 200


@pytest.mark.parametrize("path", sorted({path for path, _, _ in ROUTES.values()} | {"/tokenize"}))
def test_an_unknown_name_is_404_in_the_routes_own_shape(path: str, server: Client) -> None:
    body = next((body for other, _, body in ROUTES.values() if other == path), {"prompt": "a"})
    response = server.post(path, model="nobody", **body)
    assert response.status_code == 404
    assert (
        "'nobody' is not served here; served: 'bert', 'labels', 'plain', 'chat', 'a', 'team/b', 'c', 'd'"
        in response.text
    )


def test_models_list_each_adapter_with_its_parent_and_without_paths(server: Client) -> None:
    listed = server.get("/v1/models")
    cards = {card["id"]: card for card in listed.json()["data"]}
    bases = dict.fromkeys(("bert", "labels", "plain", "chat"))
    assert {name: card["parent"] for name, card in cards.items()} == {**bases, **PARENTS}
    assert cards["team/b"]["root"] == "team/b"
    assert str(of_bert(2).parent) not in listed.text
    assert server.get("/v1/models/team/b").json() == cards["team/b"]


def test_info_is_that_of_the_model(server: Client) -> None:
    assert server.get("/info").json()["model_id"] == "bert"
    named, base = (server.get(f"/info?model={model}").json() for model in ("a", "bert"))
    assert named["model_id"] == named["card"]["model"] == "a"
    assert named["model_type"] == base["model_type"]


def test_metrics_count_adapters_by_model(server: Client) -> None:
    embed(server, "a")
    lines = server.get("/metrics").text.splitlines()
    assert 'anypool_lora_adapters{model="bert"} 2.0' in lines
    assert 'anypool_lora_adapters{model="plain"} 0.0' in lines
    assert not [line for line in lines if "team/b" in line]


def test_openais_client_mixes_the_base_and_two_adapters(server: Client) -> None:
    apart = {model: embed(server, model) for model in ("bert", "a", "team/b")}
    for first, second in (("bert", "a"), ("bert", "team/b"), ("a", "team/b")):
        assert np.abs(apart[first] - apart[second]).max() > 1e-2

    async def together() -> list[Any]:
        transport = httpx.ASGITransport(app=server.app)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            calls = [client.embeddings.create(model=model, input=TEXTS) for _ in range(8) for model in apart]
            return await asyncio.gather(*calls)

    for answer in asyncio.run(together()):
        found = np.array([item.embedding for item in answer.data], np.float32)
        np.testing.assert_allclose(found, apart[answer.model], atol=1e-6)


def test_names_are_told_apart_when_the_server_starts(engines: list[Engine]) -> None:
    own = start(tiny_bert(), "other", enable_lora=True, lora_modules={"a": str(of_bert(1))})
    with pytest.raises(ConfigError, match="the name 'a' of an adapter of other is another adapter's, or a model's"):
        create_app([engines[0], own])
    own.close()
    renamed = start(tiny_bert(), "a")
    with pytest.raises(ConfigError, match="the name 'a' of an adapter of bert is"):
        create_app([engines[0], renamed])
    renamed.close()


# Adapters that come and go.


def test_adapters_are_loaded_only_where_a_folder_for_them_is_named(engines: list[Engine], tmp_path: Path) -> None:
    closed = Client(create_app(engines[0]))
    assert load(closed, "x", of_bert(1)).status_code == unload(closed, "a").status_code == 404
    assert "/v1/load_lora_adapter" not in closed.get("/openapi.json").json()["paths"]
    with pytest.raises(ConfigError, match="has no effect without enable_lora"):
        create_app(engines[2], ServerOptions(lora_dir=(str(tmp_path),)))
    for wrong in ("/", str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match="is not a folder, or all of the machine"):
            ServerOptions(lora_dir=(wrong,))


def test_an_adapter_is_loaded_used_and_unloaded(open_server: Client, folder: Path, merged: Client) -> None:
    base = embed(open_server)
    for name, path in (("rel", "one"), ("abs", folder / "two")):
        answer = load(open_server, name, path)
        assert answer.status_code == 200, answer.text
        assert answer.json()["id"] == answer.json()["root"] == name
        assert answer.json()["parent"] == "bert"
    np.testing.assert_allclose(embed(open_server, "rel"), embed(merged, "a"), atol=1e-5)
    np.testing.assert_allclose(embed(open_server, "abs"), embed(merged, "team/b"), atol=1e-5)
    assert unload(open_server, "rel").json() == {"id": "rel", "object": "model", "deleted": True}
    assert open_server.embed(input="a", model="rel").status_code == 404
    assert [card["id"] for card in open_server.get("/v1/models").json()["data"]] == ["bert", "abs"]
    np.testing.assert_array_equal(embed(open_server), base)
    assert load(open_server, "rel", "two").status_code == 200
    np.testing.assert_allclose(embed(open_server, "rel"), embed(merged, "team/b"), atol=1e-5)


def test_a_name_is_given_once_unless_it_is_to_be_replaced(open_server: Client, merged: Client) -> None:
    assert load(open_server, "x", "one").status_code == 200
    again = load(open_server, "x", "two")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert "the adapter 'x' is loaded already" in again.text
    np.testing.assert_allclose(embed(open_server, "x"), embed(merged, "a"), atol=1e-5)
    assert load(open_server, "x", "two", load_inplace=True).status_code == 200
    np.testing.assert_allclose(embed(open_server, "x"), embed(merged, "team/b"), atol=1e-5)
    # An adapter that cannot take its place leaves it where it is.
    assert load(open_server, "x", "llama", load_inplace=True).status_code == 400
    np.testing.assert_allclose(embed(open_server, "x"), embed(merged, "team/b"), atol=1e-5)


@pytest.mark.parametrize(
    "path", ["../out", "{out}", "missing", ".", "", "link", "circle", "/etc", "a\0b", "x" * 5000, "someone/on-the-hub"]
)
def test_nothing_outside_of_the_folder_is_read(path: str, open_server: Client, folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "out")
    (folder / "circle").symlink_to(folder / "circle")
    response = load(open_server, "x", path.format(out=folder.parent / "out"))
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "lora_path"
    assert "has no adapter_config.json in the folders of --lora-dir" in response.json()["error"]["message"]
    assert len(open_server.get("/v1/models").json()["data"]) == 1


@pytest.mark.parametrize("damage", ["llama", "json", "weights", "empty"])
def test_an_adapter_that_cannot_be_read_is_told_without_the_servers_paths(
    damage: str, open_server: Client, folder: Path
) -> None:
    broken = {
        "json": ("one/adapter_config.json", b"{"),
        "weights": ("one/adapter_model.safetensors", b"\xff" * 64),
        "empty": ("one/adapter_config.json", b"{}"),
    }
    if damage != "llama":
        file, content = broken[damage]
        (folder / file).write_bytes(content)
    name = "llama" if damage == "llama" else "one"
    response = load(open_server, "x", name)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path"), response.text
    assert str(folder) not in response.text
    assert open_server.embed(input="a", model="x").status_code == 404
    embed(open_server)


@pytest.mark.parametrize("name", ["", " x", "x\n", "\0", "x" * 201, "bert", "\u202ex"])
def test_a_name_that_is_none_is_refused(name: str, open_server: Client) -> None:
    response = load(open_server, name, "one")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")


@pytest.mark.parametrize("name", ["é/ü 🙂", 'a"b', "a?b#c", "../x", "%2e", "{x}", "<b>"])
def test_a_name_may_have_any_letters(name: str, open_server: Client) -> None:
    assert load(open_server, name, "one").status_code == 200
    answer = open_server.embed(input="a", model=name)
    assert answer.json()["model"] == name
    assert open_server.get("/metrics").status_code == 200
    assert unload(open_server, name).json()["id"] == name


@pytest.mark.parametrize("body", [{}, {"lora_name": "x"}, {"lora_name": 1, "lora_path": "one"}, {"lora_path": None}])
def test_a_field_that_is_missing_is_named(body: dict[str, Any], open_server: Client) -> None:
    response = open_server.post("/v1/load_lora_adapter", **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("lora_name", "lora_path")


def test_what_is_not_there_cannot_be_unloaded_nor_loaded_into(open_server: Client) -> None:
    gone = unload(open_server, "x")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "adapter_not_found")
    assert load(open_server, "x", "one", model="nobody").status_code == 404


def test_a_model_without_adapters_says_so(engines: list[Engine], folder: Path) -> None:
    client = Client(create_app(engines, ServerOptions(lora_dir=(str(folder),))))
    response = load(client, "x", "llama", model="plain")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "plain was started without enable_lora")


def test_an_adapter_for_another_model_than_the_first_names_it(folder: Path) -> None:
    engines = [start(tiny_bert(), "bert"), start(copy_of(tiny_llama()), "llama", enable_lora=True)]
    client = Client(create_app(engines, ServerOptions(lora_dir=(str(folder),))))
    assert load(client, "x", "llama", model="llama").json()["parent"] == "llama"
    assert client.embed(input="a", model="x").json()["model"] == "x"
    for one in engines:
        one.close()


def test_unloading_while_requests_run_gives_each_a_result_or_an_error(open_server: Client, merged: Client) -> None:
    """Never rows of another adapter, of the base, or none at all."""
    expected = {"one": embed(merged, "a"), "two": embed(merged, "team/b")}

    def call(number: int) -> None:
        response = open_server.embed(input=TEXTS, model="x")
        if response.status_code == 200:
            found = rows(response)
            assert min(np.abs(found - one).max() for one in expected.values()) < 1e-5
        else:
            assert response.status_code in (400, 404), response.text

    def change(number: int) -> None:
        load(open_server, "x", ("one", "two")[number % 2], load_inplace=number % 3 == 0)
        if number % 4 == 3:
            unload(open_server, "x")

    load(open_server, "x", "one")
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(change if number % 5 == 0 else call, number) for number in range(120)]
        for one in calls:
            one.result(timeout=60)
    embed(open_server)


def test_a_thousand_adapters_may_come_and_go_and_no_more_may_stay(
    open_server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anypool.entrypoints.serve.adapters.MOST_ADAPTERS", 3)
    state = open_server.app.state.server
    [model] = state.models
    for number in range(300):
        assert load(open_server, f"adapter {number}", "one").status_code == 200
        assert unload(open_server, f"adapter {number}").status_code == 200
    assert model.engine.lora.requests == ()
    assert len(state.models.all()) == 1
    for number in range(3):
        assert load(open_server, str(number), "two").status_code == 200
    full = load(open_server, "4", "one")
    assert (full.status_code, full.json()["error"]["code"]) == (400, "too_many")
    assert load(open_server, "0", "one", load_inplace=True).status_code == 200


def test_keys_guard_adapters_too(folder: Path) -> None:
    engine = start(tiny_bert(), "bert", enable_lora=True)
    client = Client(create_app(engine, ServerOptions(lora_dir=(str(folder),), api_key=("secret",))))
    assert load(client, "x", "one").status_code == unload(client, "x").status_code == 401
    engine.close()


def test_an_adapter_whose_files_are_gone_fails_its_own_requests_alone(open_server: Client, folder: Path) -> None:
    load(open_server, "x", "one")
    load(open_server, "y", "two")
    before = embed(open_server, "y")
    shutil.rmtree(folder / "one")
    failed = open_server.embed(input="a", model="x")
    assert failed.status_code >= 400
    assert str(folder) not in failed.text
    np.testing.assert_array_equal(embed(open_server, "y"), before)
    embed(open_server)
    assert unload(open_server, "x").status_code == 200


# The command line.


def test_adapters_are_given_by_name_and_model() -> None:
    from anypool.entrypoints.cli_adapters import by_model, parse_module

    modules = [
        parse_module("a=/x=y"),
        parse_module('{"name": "b", "path": "org/b"}'),
        parse_module('{"name": "c", "path": "p", "base_model_name": "second"}'),
    ]
    assert by_model(modules, ("first", "second")) == [{"a": "/x=y", "b": "org/b"}, {"c": "p"}]
    with pytest.raises(ConfigError, match="'c' is for 'second'; the models are 'first'"):
        by_model(modules, ("first",))
    with pytest.raises(ConfigError, match="two adapters have the name 'a'"):
        by_model([modules[0], modules[0]], ("first",))


@pytest.mark.parametrize("text", ["a", "=p", "a=", "{", '{"name": "a"}', json.dumps({"name": 1, "path": "p"})])
def test_an_adapter_without_name_or_path_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from anypool.entrypoints.cli import main

    with pytest.raises(SystemExit):
        main(["serve", "model", "--enable-lora", "--lora-modules", text])
    assert "NAME=PATH" in capsys.readouterr().err or text == "{"


def test_each_model_is_started_with_its_own_adapters() -> None:
    from anypool.entrypoints.cli import build_parser
    from anypool.entrypoints.cli_serve import engine_configs

    second = json.dumps({"name": "c", "path": "q", "base_model_name": "other"})
    flags = ["--enable-lora", "--max-loras", "2", "--lora-modules", "a=p", second, "--lora-modules", "b=p"]
    arguments = build_parser().parse_args(["serve", "m", "--model", "other=n", "--model", "third=o", *flags])
    configs = engine_configs(arguments)
    assert [config.lora_modules for config in configs] == [{"a": "p", "b": "p"}, {"c": "q"}, None]
    assert all(config.enable_lora and config.max_loras == 2 for config in configs)
    with pytest.raises(ConfigError, match="has no effect without enable_lora"):
        engine_configs(build_parser().parse_args(["serve", "m", "--lora-modules", "a=p"]))


def test_embedding_on_the_command_line_with_an_adapter(merged: Client, capsys: pytest.CaptureFixture[str]) -> None:
    from anypool.entrypoints.cli import main

    assert main(["embed", str(tiny_bert()), *TEXTS, "--lora", str(of_bert(1)), "--device", "cpu"]) == 0
    found = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(np.array(found, np.float32), embed(merged, "a"), atol=1e-5)
