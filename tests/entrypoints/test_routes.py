"""Every route against the Python calls it stands for, on one server with several tiny models."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, AutoTokenizer

from anypool import LLM, PoolingParams
from anypool.config import EngineConfig, PoolerConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.prompt_names import NamedPrompts
from anypool.entrypoints.server_options import ServerOptions
from tests.adapters.test_bge_m3 import bge_m3
from tests.adapters.test_sparse import splade
from tests.entrypoints.conftest import Client
from tests.helpers import HIDDEN, copy_of, save_sentence_transformer, tiny_bert, tiny_llama
from tests.named_checkpoints import (
    colbert,
    cross_encoder,
    named_entities,
    process_reward_model,
    qwen3_reranker,
    reward_model,
    sentiment,
)

TEXTS = ["the cat sat on a mat", "none saw the story", "a cat"]
PROMPTS = {"query": "the query: ", "document": "a long passage: "}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ flavour }}"
)


@cache
def prompted() -> Path:
    return save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), prompts=PROMPTS)


@cache
def chatty() -> Path:
    folder = copy_of(tiny_llama())
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder


MODELS = {
    "sentiment": sentiment,
    "cross": cross_encoder,
    "ner": named_entities,
    "prm": process_reward_model,
    "reward": reward_model,
    "qwen": qwen3_reranker,
    "prompted": prompted,
    "chatty": chatty,
    "colbert": colbert,
    "splade": splade,
    "bge": bge_m3,
}


@pytest.fixture(scope="module")
def engines(engine: Engine) -> Iterator[dict[str, Engine]]:
    own = {
        name: Engine(EngineConfig(model=str(make()), served_model_name=name, device="cpu", use_tqdm_on_load=False))
        for name, make in MODELS.items()
    }
    yield {"minilm": engine, **own}
    for one in own.values():
        one.close()


@pytest.fixture(scope="module")
def server(engines: dict[str, Engine]) -> Client:
    return Client(create_app(list(engines.values())))


def llm_of(engine: Engine) -> LLM:
    """The Python interface of an engine that somebody else closes."""

    class Borrowed(LLM):
        def __init__(self) -> None:
            self.engine = engine

        def __del__(self) -> None:
            pass

    return Borrowed()


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def close(actual: Any, expected: Any, *, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=atol)


def embeddings(engine: Engine, texts: list[str], params: PoolingParams | None = None, **options: Any) -> np.ndarray:
    outputs = llm_of(engine).embed(texts, params, use_tqdm=False, **options)
    return np.stack([output.outputs.numpy() for output in outputs])


# /v1/embeddings: forms, prompts, conversations.


def test_bytes_come_with_any_request_id(server: Client) -> None:
    name = "\u4e2d\r\nX-Evil: 1"
    response = server.embed(input="a", encoding_format="bytes", request_id=name)
    assert response.status_code == 200
    assert json.loads(response.headers["metadata"])["id"] == f"embd-{name}"
    assert "x-evil" not in response.headers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"])
def test_base64_and_bytes_hold_the_numbers_of_every_type(server: Client, engine: Engine, dtype: str) -> None:
    numpy_types = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "binary": "i1", "ubinary": "u1"}
    expected = embeddings(engine, TEXTS)
    fields: dict[str, Any] = {"input": TEXTS, "embed_dtype": dtype}
    shown = np.array([row["embedding"] for row in ok(server.post("/v1/embeddings", **fields))["data"]])
    for endianness, order in (("little", "<"), ("big", ">")):
        kind = np.dtype(order + numpy_types.get(dtype, dtype[:-1][0] + "1"))
        coded = ok(server.post("/v1/embeddings", **fields, encoding_format="base64", endianness=endianness))
        rows = np.stack([np.frombuffer(base64.b64decode(row["embedding"]), kind) for row in coded["data"]])
        raw = server.post("/v1/embeddings", **fields, encoding_format="bytes", endianness=endianness)
        np.testing.assert_array_equal(np.frombuffer(raw.content, kind).reshape(len(TEXTS), -1), rows)
        if dtype == "bfloat16":
            rows = torch.from_numpy(rows.astype(np.uint16)).view(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(rows.astype(np.float32), shown.astype(np.float32))
    if dtype in ("float32", "float16", "bfloat16"):
        close(shown, expected, atol={"float32": 1e-6, "float16": 1e-4, "bfloat16": 1e-3}[dtype])
    elif dtype in ("int8", "uint8"):
        levels = shown + 0.5 - (128 if dtype == "uint8" else 0)
        cosines = (levels * expected).sum(axis=1) / np.linalg.norm(levels, axis=1) / np.linalg.norm(expected, axis=1)
        assert (cosines > 0.999).all()
    else:
        bits = np.packbits(expected > 0, axis=1).astype(int) - (128 if dtype == "binary" else 0)
        np.testing.assert_array_equal(shown, bits)


def test_a_small_number_does_not_depend_on_its_neighbours(server: Client) -> None:
    alone = ok(server.post("/v1/embeddings", input="a cat", embed_dtype="int8"))["data"][0]["embedding"]
    among = ok(server.post("/v1/embeddings", input=TEXTS, embed_dtype="int8"))["data"][2]["embedding"]
    assert np.abs(np.array(alone) - np.array(among)).max() <= 1  # batches differ by 1e-6, which may cross a step


def test_bytes_say_where_each_vector_lies(server: Client) -> None:
    response = server.post("/v1/embeddings", input=TEXTS, encoding_format="bytes", dimensions=8)
    assert response.headers["content-type"] == "application/octet-stream"
    described = json.loads(response.headers["metadata"])
    assert [(one["start"], one["end"], one["shape"]) for one in described["data"]] == [
        (0, 32, [8]),
        (32, 64, [8]),
        (64, 96, [8]),
    ]
    assert described["usage"]["prompt_tokens"] == 18
    only = server.post("/v1/embeddings", input=TEXTS, encoding_format="bytes_only", dimensions=8)
    assert only.content == response.content
    assert "metadata" not in only.headers
    many = server.post("/v1/embeddings", input=["a"] * 200, encoding_format="bytes")
    assert many.json()["error"]["param"] == "encoding_format"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PROMPTS["query"]},
        {"prompt_name": "query"},
        {"input_type": "search_query"},
        {"input_type": "query"},
        {"task": "retrieval.query"},
    ],
)
def test_a_query_gets_the_models_prompt_for_queries_by_any_name(
    server: Client, engines: dict[str, Engine], fields: dict[str, str]
) -> None:
    expected = embeddings(engines["prompted"], TEXTS, prompt_name="query")
    rows = ok(server.post("/v1/embeddings", input=TEXTS, model="prompted", **fields))["data"]
    close([row["embedding"] for row in rows], expected, atol=1e-6)


def test_words_for_documents_and_other_uses(server: Client, engines: dict[str, Engine]) -> None:
    def rows(model: str, **fields: str) -> list[list[float]]:
        body = ok(server.post("/v1/embeddings", input=TEXTS, model=model, **fields))
        return [row["embedding"] for row in body["data"]]

    close(rows("prompted", task="retrieval.passage"), embeddings(engines["prompted"], TEXTS, prompt_name="document"))
    close(rows("prompted", input_type="clustering"), embeddings(engines["prompted"], TEXTS))
    close(rows("minilm", input_type="search_document"), embeddings(engines["minilm"], TEXTS))


@pytest.mark.parametrize(
    ("word", "chosen"),
    [
        ("search_query", ("query", None)),
        ("Query", ("query", None)),
        ("retrieval.passage", (None, "")),  # documents stand bare, even where there is a default prompt
        ("separation", ("clustering", None)),
        ("classification", (None, None)),
        ("sts", ("STS", None)),
        ("own", ("own", None)),
    ],
)
def test_words_for_uses_find_the_checkpoints_prompts(word: str, chosen: tuple[str | None, str | None]) -> None:
    prompts = NamedPrompts({"query": "q: ", "clustering": "c: ", "STS": "s: ", "own": "o: "})
    assert prompts.choose(prompt=None, prompt_name=None, input_type=word, task=None) == chosen
    assert prompts.choose(prompt=None, prompt_name=None, input_type=None, task=word) == chosen


def test_long_inputs_are_run_in_windows_rather_than_cut_where_the_server_does_that(minilm: str) -> None:
    config = EngineConfig(
        model=minilm, pooler_config=PoolerConfig(enable_chunked_processing=True), use_tqdm_on_load=False
    )
    engine = Engine(config)
    try:
        client = Client(create_app(engine))
        for path, fields in (("/embed", {"inputs": "word " * 300}), ("/v2/embed", {"texts": ["word " * 300]})):
            whole = client.post(path, **fields)
            assert int(whole.headers["x-compute-tokens"]) > 302
            assert "x-truncated-tokens" not in whole.headers
            cut = client.post(path, truncate=True, **fields)
            assert cut.headers["x-truncated-tokens"] == "46"
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<user>a cat</user><assistant>a mat</assistant>"),
        ({"add_generation_prompt": True}, "<user>a cat</user><assistant>a mat</assistant><assistant>"),
        ({"continue_final_message": True}, "<user>a cat</user><assistant>a mat"),
        ({"chat_template_kwargs": {"flavour": "!"}}, "<user>a cat</user><assistant>a mat</assistant>!"),
    ],
)
def test_conversations_are_rendered_by_the_models_template(
    server: Client, engines: dict[str, Engine], fields: dict[str, Any], text: str
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]},
        {"role": "assistant", "content": "a mat"},
    ]
    ids = AutoTokenizer.from_pretrained(chatty())(text, add_special_tokens=False)["input_ids"]
    [expected] = llm_of(engines["chatty"]).embed([{"prompt_token_ids": ids}], use_tqdm=False)
    body = ok(server.post("/v1/embeddings", messages=messages, model="chatty", **fields))
    assert body["usage"]["prompt_tokens"] == len(ids)
    close(body["data"][0]["embedding"], expected.outputs.numpy(), atol=1e-6)
    two = ok(server.post("/v1/embeddings", messages=[messages, messages], model="chatty", **fields))
    assert len(two["data"]) == 2


def test_a_template_of_the_request_is_taken_where_that_is_allowed(engines: dict[str, Engine]) -> None:
    trusting = Client(create_app([engines["chatty"]], ServerOptions(trust_request_chat_template=True)))
    messages = [{"role": "user", "content": "a cat"}]
    body = ok(trusting.post("/v1/embeddings", messages=messages, chat_template="{{ messages[0].content }}"))
    plain = ok(trusting.post("/v1/embeddings", input="a cat", add_special_tokens=False))
    assert body["data"] == plain["data"]
    for template in ("{{ ''.__class__.__mro__ }}", "{% for", "{{ messages.append(1) }}"):
        refused = trusting.post("/v1/embeddings", messages=messages, chat_template=template)
        assert refused.status_code == 400


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}),
        ("/score", {"queries": "a", "documents": "b"}),
    ],
)
def test_a_template_that_does_not_end_holds_up_nothing_and_is_stopped(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    for module in ("served", "routes.scoring"):
        monkeypatch.setattr(f"anypool.entrypoints.serve.{module}.LONGEST_RENDER_S", 1.0)
    model = engines["chatty" if "messages" in fields else "qwen"]
    app = create_app(model, ServerOptions(trust_request_chat_template=True))

    async def both() -> tuple[httpx.Response, float]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            running = asyncio.ensure_future(client.post(path, json={**fields, "chat_template": ENDLESS}))
            longest = 0.0
            while not running.done():
                began = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                longest = max(longest, time.monotonic() - began)
                await asyncio.sleep(0.01)
            return await running, longest

    response, longest = asyncio.run(both())
    assert response.status_code == 400
    assert "more than 1 seconds" in response.json()["error"]["message"]
    assert longest < 0.9


@pytest.mark.parametrize("text", ["{{ 10 ** (10**9) }}", "{{ 'a' * 10**12 }}", "{{ 9**999999 * 9**999999 }}"])
def test_products_and_powers_in_a_template_are_bounded(engines: dict[str, Engine], text: str) -> None:
    trusting = Client(create_app(engines["chatty"], ServerOptions(trust_request_chat_template=True)))
    fields = {"messages": [{"role": "user", "content": "a"}]}
    refused = trusting.post("/v1/embeddings", chat_template=text, **fields)
    assert refused.status_code == 400
    assert "more than 1,000,000" in refused.json()["error"]["message"]
    assert ok(trusting.post("/v1/embeddings", chat_template="{{ 'a ' * 3 + (2 ** 8) | string }}", **fields))


def test_special_tokens_may_be_left_out(server: Client) -> None:
    usage = ok(server.post("/v1/embeddings", input="a cat", add_special_tokens=False))["usage"]
    assert usage["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("embedding_type", "same"),
    [("base64", {"encoding_format": "base64"}), ("int8", {"embed_dtype": "int8"}), ("float", {})],
)
def test_jinas_embedding_type(server: Client, embedding_type: str, same: dict[str, str]) -> None:
    jina = ok(server.post("/v1/embeddings", input=TEXTS, embedding_type=embedding_type, normalized=True))
    assert jina["data"] == ok(server.post("/v1/embeddings", input=TEXTS, normalize=True, **same))["data"]


# /pooling, /classify, /reward


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("minilm", "embed"),
        ("minilm", "token_embed"),
        ("sentiment", "classify"),
        ("ner", "token_classify"),
        ("reward", "reward"),
    ],
)
def test_pooling_serves_every_task_as_numbers_and_as_bytes_with_a_shape(
    server: Client, engines: dict[str, Engine], model: str, task: str
) -> None:
    outputs = llm_of(engines[model]).encode(TEXTS, pooling_task=task, use_tqdm=False)
    body = ok(server.post("/pooling", input=TEXTS, model=model, task=task))
    coded = ok(server.post("/pooling", input=TEXTS, model=model, task=task, encoding_format="base64"))
    for output, row, packed in zip(outputs, body["data"], coded["data"], strict=True):
        close(row["data"], output.outputs.numpy(), atol=1e-5)
        assert packed["shape"] == list(output.outputs.data.shape)
        numbers = np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])
        close(numbers, row["data"], atol=1e-6)


def test_pooling_without_a_task_is_what_encode_means(server: Client) -> None:
    by_default = ok(server.post("/pooling", input=TEXTS, model="ner"))
    assert by_default["data"] == ok(server.post("/pooling", input=TEXTS, model="ner", task="token_embed"))["data"]
    twice = {"input": "a<extra_0>", "task": "token_classify", "returned_token_ids": [0] * 100_000}
    assert server.post("/pooling", model="prm", **twice).json()["error"]["param"] == "returned_token_ids"
    found = server.post("/pooling", input="a", task="no such").json()["error"]
    assert found["param"] == "task"
    assert "token_classify" in found["message"]


def test_step_fields_reach_the_pooler(server: Client, engines: dict[str, Engine]) -> None:
    text = "a cat<extra_0>on a mat<extra_0>"
    [expected] = llm_of(engines["prm"]).encode(
        text, PoolingParams(returned_token_ids=[1, 0], activation="softmax"), pooling_task="token_classify",
        use_tqdm=False,
    )  # fmt: skip
    body = ok(
        server.post(
            "/pooling", input=text, model="prm", task="token_classify", returned_token_ids=[1, 0], activation="softmax"
        )
    )
    assert expected.outputs.data.shape == (2, 2)
    close(body["data"][0]["data"], expected.outputs.numpy())


def test_classify_names_the_label_and_gives_all_scores(server: Client, engines: dict[str, Engine]) -> None:
    outputs = llm_of(engines["sentiment"]).classify(TEXTS, use_tqdm=False)
    body = ok(server.post("/classify", input=TEXTS, model="sentiment"))
    for output, row in zip(outputs, body["data"], strict=True):
        assert row["label"] == output.outputs.label
        assert row["num_classes"] == 2
        close(row["probs"], output.outputs.probs)
    raw = ok(server.post("/classify", input=TEXTS, model="sentiment", raw_scores=True))
    close(torch.tensor([row["probs"] for row in raw["data"]]).softmax(dim=1), [row["probs"] for row in body["data"]])
    assert "classify" in server.post("/classify", input="a").json()["error"]["message"]


def test_reward_of_a_text_is_a_number_and_of_steps_a_list(server: Client, engines: dict[str, Engine]) -> None:
    [output] = llm_of(engines["reward"]).reward("a cat", use_tqdm=False)
    close(ok(server.post("/reward", input="a cat", model="reward"))["data"][0]["reward"], output.outputs.data[0])
    steps = "a cat<extra_0>on a mat<extra_0>"
    [output] = llm_of(engines["prm"]).reward(steps, use_tqdm=False)
    found = ok(server.post("/reward", input=steps, model="prm"))["data"][0]["reward"]
    close(found, output.outputs.numpy()[:, 0])
    assert len(found) == 2


# /score, /rerank


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
)
def test_score_takes_pairs_under_every_name(
    server: Client, engines: dict[str, Engine], path: str, names: tuple[str, str]
) -> None:
    for model in ("cross", "minilm", "qwen"):
        expected = [o.outputs.score for o in llm_of(engines[model]).score(TEXTS[0], TEXTS, use_tqdm=False)]
        body = ok(server.post(path, model=model, **{names[0]: TEXTS[0], names[1]: TEXTS}))
        close([row["score"] for row in body["data"]], expected, atol=1e-6)
    assert body["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "queries"),
        ({"queries": "a"}, "queries"),
        ({"queries": "a", "data_2": "b"}, "queries"),
        ({"queries": "a", "documents": [1]}, "documents"),
        ({"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "input"),
        ({"queries": "a", "documents": "b", "instruction": "c"}, "instruction"),
        ({"queries": "a", "documents": "b", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"queries": "a", "documents": "b", "chat_template": "{{ messages }}"}, "chat_template"),
        ({"queries": "a", "documents": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ],
)
def test_scores_that_cannot_be_given_are_400_and_name_the_field(
    server: Client, fields: dict[str, Any], param: str
) -> None:
    response = server.post("/score", **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_an_instruction_reaches_the_template(server: Client, engines: dict[str, Engine]) -> None:
    expected = llm_of(engines["qwen"]).score("a", "b", instruction="the story", use_tqdm=False)[0].outputs.score
    for fields in ({"instruction": "the story"}, {"chat_template_kwargs": {"instruction": "the story"}}):
        body = ok(server.post("/score", model="qwen", queries="a", documents="b", **fields))
        close(body["data"][0]["score"], expected, atol=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["cross", "prompted"])
def test_rerank_orders_documents(server: Client, engines: dict[str, Engine], path: str, model: str) -> None:
    expected = llm_of(engines[model]).rerank(TEXTS[0], TEXTS, use_tqdm=False)
    body = ok(server.post(path, model=model, query=TEXTS[0], documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]))
    assert [row["index"] for row in body["results"]] == [one.index for one in expected]
    close([row["relevance_score"] for row in body["results"]], [one.relevance_score for one in expected], atol=1e-6)
    assert ("document" in body["results"][0]) == (path != "/v2/rerank")
    top = ok(server.post(path, model=model, query="a", documents=TEXTS, top_n=1, return_documents=True))
    assert len(top["results"]) == 1
    assert top["results"][0]["document"] == {"text": TEXTS[top["results"][0]["index"]]}
    assert top["meta"]["billed_units"]["input_tokens"] == top["usage"]["prompt_tokens"]


def test_documents_are_cut_to_max_tokens_per_doc(server: Client) -> None:
    long = "a cat and a mat and a cat"
    cut = server.post("/rerank", model="cross", query="a", documents=[long], max_tokens_per_doc=2)
    short = ok(server.post("/rerank", model="cross", query="a", documents=["a cat"]))
    assert ok(cut)["results"][0]["relevance_score"] == pytest.approx(short["results"][0]["relevance_score"], abs=1e-6)
    assert ok(cut)["usage"]["truncated_tokens"] == 6
    assert cut.headers["x-truncated-tokens"] == "6"
    left = ok(
        server.post("/rerank", model="cross", query="a", documents=[long], max_tokens_per_doc=2, truncation_side="left")
    )
    ends = ok(server.post("/rerank", model="cross", query="a", documents=["a cat"]))
    assert left["results"][0]["relevance_score"] == pytest.approx(ends["results"][0]["relevance_score"], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"input": "a cat", "model": "sentiment"}),
        ("/predict", {"inputs": "a cat", "model": "sentiment"}),
        ("/rerank", {"query": "a", "documents": TEXTS, "model": "cross"}),
    ],
)
@pytest.mark.parametrize("activation", [{"activation": "sigmoid"}, {"use_activation": True}])
def test_raw_scores_with_an_activation_are_refused(
    server: Client, path: str, body: dict[str, Any], activation: dict[str, Any]
) -> None:
    assert ok(server.post(path, raw_scores=True, **body))
    response = server.post(path, raw_scores=True, **body, **activation)
    assert response.status_code in (400, 422)
    assert "activation" in response.text


def test_raw_scores_are_those_before_the_activation(server: Client) -> None:
    def scores(**fields: Any) -> list[float]:
        body = ok(server.post("/rerank", model="cross", query="a", documents=TEXTS, **fields))
        return [row["relevance_score"] for row in sorted(body["results"], key=lambda row: row["index"])]

    close(torch.tensor(scores(raw_scores=True)).sigmoid(), scores(activation="sigmoid"))
    assert ok(server.post("/rerank", query="a", documents=TEXTS, raw_scores=True))["results"]


# Cohere


def test_cohere_embed_gives_every_form(server: Client, engine: Engine) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = ok(
        server.post("/v2/embed", model="minilm", texts=TEXTS, input_type="search_document", embedding_types=kinds)
    )
    expected = embeddings(engine, TEXTS)
    found = body["embeddings"]
    close(found["float"], expected, atol=1e-6)
    close([np.frombuffer(base64.b64decode(row), "<f4") for row in found["base64"]], expected, atol=1e-6)
    np.testing.assert_array_equal(found["ubinary"], np.packbits(expected > 0, axis=1))
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, found["int8"])
    assert body["texts"] == TEXTS
    assert body["meta"]["billed_units"]["input_tokens"] == 18


def test_cohere_cuts_unless_it_is_told_not_to(server: Client) -> None:
    long = "word " * 300
    for fields, status, kept in (
        ({}, 200, 256),
        ({"truncate": "START"}, 200, 256),
        ({"truncate": "NONE"}, 400, 0),
        ({"max_tokens": 9}, 200, 9),
        ({"max_tokens": 9, "truncate": "NONE"}, 400, 0),
    ):
        response = server.post("/v2/embed", texts=[long], **fields)
        assert response.status_code == status, response.text
        if status == 200:
            assert response.json()["meta"]["billed_units"]["input_tokens"] == kept
            assert response.headers["x-truncated-tokens"] == str(302 - kept)
        else:
            assert set(response.json()) == {"id", "message"}


def test_cohere_inputs_of_text_parts(server: Client) -> None:
    content = [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sat on a mat"}]
    body = ok(server.post("/v2/embed", inputs=[{"content": content}]))
    assert body["embeddings"] == ok(server.post("/v2/embed", texts=[TEXTS[0]]))["embeddings"]
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    for fields in ({"inputs": [{"content": image}]}, {"images": ["data:"]}, {}, {"texts": ["a"], "inputs": []}):
        refused = server.post("/v2/embed", **fields)
        assert refused.status_code == 400
        assert set(refused.json()) == {"id", "message"}


def test_weights_whose_sum_is_endless_are_refused_rather_than_answered_with_null(server: Client) -> None:
    found = server.post("/score", model="bge", queries="a", documents="b", fuse=[1e308, 1e308, 1e308])
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "fuse"


# Late chunking

CHUNKS = ["Berlin is the capital of Germany. ", "The city has 3.7 million people, ", "and its mayor is elected."]


def means_of_tokens(minilm: str, chunks: list[str]) -> torch.Tensor:
    """Of each chunk, in one run of transformers over all of them."""
    tokenizer, backbone = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm)
    encoded = tokenizer("".join(chunks), return_tensors="pt", return_offsets_mapping=True)
    starts, ends = encoded.pop("offset_mapping")[0].unbind(1)
    with torch.no_grad():
        [rows] = backbone(**encoded).last_hidden_state
    vectors, begin = [], 0
    for chunk in chunks:
        is_in = (starts < begin + len(chunk)) & (ends > begin) & (starts < ends)
        vectors.append(rows[is_in].mean(0))
        begin += len(chunk)
    return torch.nn.functional.normalize(torch.stack(vectors), dim=1)


def test_late_chunking_embeds_each_text_in_the_light_of_all(server: Client, minilm: str) -> None:
    expected = means_of_tokens(minilm, CHUNKS)
    body = ok(server.embed(model="minilm", input=CHUNKS, late_chunking=True))
    close([row["embedding"] for row in body["data"]], expected)
    assert [row["index"] for row in body["data"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == len(AutoTokenizer.from_pretrained(minilm)("".join(CHUNKS)).input_ids)
    short = torch.nn.functional.normalize(expected[:, :64], dim=1)
    cut = ok(server.embed(input=CHUNKS, late_chunking=True, dimensions=64, embedding_type="base64"))
    close([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in cut["data"]], short)
    [alone] = ok(server.embed(input=CHUNKS[0], late_chunking=True))["data"]
    close(alone["embedding"], means_of_tokens(minilm, CHUNKS[:1])[0])


def test_late_chunking_counts_tokens_of_the_text_and_not_of_the_prompt(
    server: Client, engines: dict[str, Engine]
) -> None:
    texts = ["the cat sat ", "on a mat"]
    spans = [(0, 12), (12, 20)]
    [expected] = llm_of(engines["prompted"]).embed_spans("".join(texts), spans, prompt_name="document", use_tqdm=False)
    body = ok(server.embed(model="prompted", input=texts, late_chunking=True, task="retrieval.passage"))
    close([row["embedding"] for row in body["data"]], expected.outputs.data, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": [[101, 102]]}, "late_chunking", "no token ids"),
        ({"input": ["a", ""]}, "late_chunking", "none of them empty"),
        ({"input": []}, "late_chunking", "takes texts"),
        ({"messages": [{"role": "user", "content": "a"}]}, "late_chunking", "messages"),
        ({"input": ["a ", "  ", "b"]}, "input", "covers no token"),
        ({"input": ["word " * 200] * 2}, "input", "limit is 256"),
        ({"input": ["a", "b"], "model": "chatty"}, None, "pools by LAST"),
    ],
)
def test_late_chunking_says_what_it_cannot_do(
    server: Client, fields: dict[str, Any], param: str | None, words: str
) -> None:
    response = server.embed(late_chunking=True, **fields)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == param


def test_ids_without_special_tokens_are_warned_of_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(create_app(engine))
    ok(client.embed(input=[101, 7592, 102]))
    assert not caplog.records
    for _ in range(2):
        ok(client.embed(input=[[7592, 2088]]))
    [record] = caplog.records
    assert "another tokenizer" in record.getMessage()


# text-embeddings-inference


def tei_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == kind
    return str(response.json()["error"])


def test_tei_embed(server: Client, engine: Engine, engines: dict[str, Engine]) -> None:
    close(ok(server.post("/embed", inputs=TEXTS)), embeddings(engine, TEXTS), atol=1e-6)
    close(ok(server.post("/embed", inputs=TEXTS[0])), embeddings(engine, TEXTS[:1]), atol=1e-6)
    cut = embeddings(engine, TEXTS, PoolingParams(dimensions=8))
    close(ok(server.post("/embed", inputs=TEXTS, dimensions=8, truncation_direction="Right")), cut, atol=1e-6)
    raw = embeddings(engines["prompted"], TEXTS, PoolingParams(normalize=False), prompt_name="query")
    fields = {"model": "prompted", "prompt_name": "query", "normalize": False}
    close(ok(server.post("/embed", inputs=TEXTS, **fields)), raw, atol=1e-5)
    scaled = ok(server.post("/embed", inputs=TEXTS, model="prompted"))  # whatever the checkpoint's own default is
    close(np.linalg.norm(scaled, axis=1), np.ones(3))


def test_tei_embed_all_and_sparse(server: Client, engine: Engine) -> None:
    outputs = llm_of(engine).token_embed(TEXTS, PoolingParams(normalize=False), use_tqdm=False)
    for rows, output in zip(ok(server.post("/embed_all", inputs=TEXTS)), outputs, strict=True):
        close(rows, output.outputs.numpy())
    tei_error(server.post("/embed_sparse", inputs=TEXTS), 422, "Validation")


def test_tei_predict_takes_texts_pairs_and_arrays_of_both(server: Client, engines: dict[str, Engine]) -> None:
    [output] = llm_of(engines["sentiment"]).classify(TEXTS[:1], use_tqdm=False)
    alone = ok(server.post("/predict", inputs=TEXTS[0], model="sentiment"))
    assert [one["label"] for one in alone] == [
        output.outputs.labels[int(i)] for i in output.outputs.data.argsort(descending=True)
    ]
    close([one["score"] for one in alone], sorted(output.outputs.probs, reverse=True))
    close(
        [one["score"] for one in ok(server.post("/predict", inputs=[[TEXTS[0]]], model="sentiment"))[0]],
        [one["score"] for one in alone],
    )
    score = llm_of(engines["cross"]).score(TEXTS[0], TEXTS[1], use_tqdm=False)[0].outputs.score
    [pair] = ok(server.post("/predict", inputs=TEXTS[:2], model="cross"))
    close(pair["score"], score)
    [[first], [second]] = ok(server.post("/predict", inputs=[TEXTS[:2], [TEXTS[2]]], model="cross"))
    close(first["score"], score)
    assert second["score"] != first["score"]
    for wrong in (["a", "b", 3], [["a", "b", "c"]], 7, [[1]]):
        tei_error(server.post("/predict", inputs=wrong, model="cross"), 422, "Validation")


def test_tei_rerank_and_similarity(server: Client, engines: dict[str, Engine]) -> None:
    expected = llm_of(engines["cross"]).rerank(TEXTS[0], TEXTS, use_tqdm=False)
    ranks = ok(server.post("/rerank", model="cross", query=TEXTS[0], texts=TEXTS, return_text=True))
    assert [(row["index"], row["text"]) for row in ranks] == [(one.index, one.document) for one in expected]
    close([row["score"] for row in ranks], [one.relevance_score for one in expected])
    scores = [o.outputs.score for o in llm_of(engines["minilm"]).score(TEXTS[0], TEXTS, use_tqdm=False)]
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    close(ok(server.post("/similarity", inputs=inputs)), scores)
    close(ok(server.post("/similarity", inputs=inputs, parameters={"truncate": True})), scores)
    tei_error(server.post("/rerank", query="a", texts=[]), 400, "Empty")
    tei_error(server.post("/similarity", inputs={"source_sentence": "a"}), 422, "Validation")
    error = server.post("/similarity", inputs=inputs, parameters={"model": "cross"})
    assert "name it beside inputs" in tei_error(error, 422, "Validation")


def test_tei_errors_have_its_shape_and_status(server: Client) -> None:
    tei_error(server.post("/embed", inputs=[]), 400, "Empty")
    assert "limit is 256" in tei_error(server.post("/embed", inputs="word " * 300, truncate=False), 422, "Validation")
    assert "inputs" in tei_error(server.post("/embed"), 422, "Validation")
    assert "dimensions" in tei_error(server.post("/embed", inputs="a", dimensions=0), 422, "Validation")
    tei_error(server.request("POST", "/embed", content=b"{"), 400, "Validation")
    cut = server.post("/embed", inputs="word " * 300)
    assert cut.status_code == 200
    assert cut.headers["x-truncated-tokens"] == "46"


# Tokens


def test_tokenize_and_back(server: Client, minilm: str) -> None:
    reference = AutoTokenizer.from_pretrained(minilm)
    ids = reference(TEXTS[0])["input_ids"]
    body = ok(server.post("/tokenize", prompt=TEXTS[0], return_token_strs=True))
    assert body == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": reference.convert_ids_to_tokens(ids),
    }
    assert ok(server.post("/tokenize", prompt=TEXTS[0], add_special_tokens=False))["tokens"] == ids[1:-1]
    for options, kept in (({}, [*ids[:3], ids[-1]]), ({"truncation_side": "left"}, [ids[0], *ids[-3:]])):
        cut = server.post("/tokenize", prompt=TEXTS[0], truncate_prompt_tokens=4, **options)
        assert ok(cut)["tokens"] == kept
        cut = server.post("/tokenize", inputs=[TEXTS[0]], truncate_prompt_tokens=4, **options)
        assert [token["id"] for token in ok(cut)[0]] == kept
    assert ok(server.post("/detokenize", tokens=ids)) == {"prompt": reference.decode(ids)}
    assert ok(server.post("/decode", ids=[ids, ids[:3]])) == [TEXTS[0], "the cat"]
    assert ok(server.post("/decode", ids=ids, skip_special_tokens=False)) == [reference.decode(ids)]
    places = ok(server.post("/tokenize", inputs=["a cat"]))[0]
    assert [(one["text"], one["special"], one["start"], one["stop"]) for one in places] == [
        ("[CLS]", True, None, None),
        ("a", False, 0, 1),
        ("cat", False, 2, 5),
        ("[SEP]", True, None, None),
    ]
    assert len(ok(server.post("/tokenize", messages=[{"role": "user", "content": "a"}], model="chatty"))["tokens"]) > 5
    for path, fields in (("/detokenize", {"tokens": [-1]}), ("/decode", {"ids": [10**9]}), ("/tokenize", {})):
        assert 400 <= server.post(path, **fields).status_code < 500
    tei_error(server.post("/decode", ids="a"), 422, "Validation")


# Many models, /invocations, /info


@pytest.mark.parametrize(
    ("model", "fields", "path"),
    [
        ("minilm", {"input": "a cat"}, "/v1/embeddings"),
        ("minilm", {"inputs": "a cat"}, "/embed"),
        ("minilm", {"texts": ["a cat"]}, "/v2/embed"),
        ("minilm", {"input": "a cat", "task": "token_embed"}, "/pooling"),
        ("minilm", {"input": "a cat", "task": ["embed", "token_embed"]}, "/pooling"),
        ("minilm", {"inputs": {"source_sentence": "a cat", "sentences": TEXTS}}, "/similarity"),
        ("cross", {"inputs": {"source_sentence": "a cat", "sentences": TEXTS}}, "/similarity"),
        ("colbert", {"input": "a cat"}, "/pooling"),
        ("colbert", {"inputs": "a cat"}, "/embed_all"),
        ("splade", {"input": "a cat"}, "/v1/embeddings"),
        ("splade", {"inputs": "a cat"}, "/embed_sparse"),
        ("sentiment", {"input": "a cat"}, "/classify"),
        ("sentiment", {"inputs": "a cat"}, "/predict"),
        ("prm", {"input": "a cat<extra_0>"}, "/reward"),
        ("reward", {"input": "a cat"}, "/reward"),
        ("reward", {"inputs": "a cat"}, "/predict"),
        ("cross", {"query": "a", "documents": TEXTS}, "/rerank"),
        ("cross", {"query": "a", "texts": TEXTS}, "/rerank"),
        ("cross", {"text_1": "a", "text_2": TEXTS}, "/score"),
    ],
)
def test_invocations_does_what_the_body_and_the_model_say(
    server: Client, model: str, fields: dict[str, Any], path: str
) -> None:
    varying = ("id", "created")
    for route in ("/invocations", "/"):
        ours, theirs = (ok(server.post(one, model=model, **fields)) for one in (route, path))
        if isinstance(ours, dict):
            ours, theirs = ({k: v for k, v in one.items() if k not in varying} for one in (ours, theirs))
        assert ours == theirs


def test_models_are_listed_and_found_by_name(server: Client, engines: dict[str, Engine]) -> None:
    assert [card["id"] for card in ok(server.get("/v1/models"))["data"]] == list(engines)
    assert ok(server.get("/v1/models/cross"))["id"] == "cross"
    assert server.post("/classify", input="a", model="nobody").status_code == 404
    assert ok(server.post("/classify", input="a", model="sentiment"))["model"] == "sentiment"


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("minilm", "embedding"),
        ("cross", "reranker"),
        ("qwen", "reranker"),
        ("sentiment", "classifier"),
        ("reward", "reward"),
    ],
)
def test_info_has_the_fields_of_tei_and_the_card(engines: dict[str, Engine], model: str, kind: str) -> None:
    body = ok(Client(create_app(engines[model])).get("/info"))
    assert list(body["model_type"]) == ["classifier" if kind == "reward" else kind]  # which TEI has no name for
    assert body["model_id"] == model
    assert body["max_input_length"] == engines[model].max_model_len
    assert body["card"]["tasks"] == [task.value for task in engines[model].supported_tasks]
    assert str(engines[model].config.model) not in json.dumps(body)


def test_errors_do_not_name_the_models_folder(engines: dict[str, Engine]) -> None:
    folder = engines["sentiment"].config.model
    found = Client(create_app(engines["sentiment"])).post("/v1/embeddings", input="a", dimensions=10**6)
    assert found.status_code == 400
    assert folder not in found.text
    assert "sentiment" in found.text
