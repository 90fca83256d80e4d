"""Sparse vectors and several tasks at once over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anypool import LLM
from anypool.entrypoints.serve.app import create_app
from tests.adapters.test_bge_m3 import TASKS, bge_m3
from tests.adapters.test_sparse import splade
from tests.entrypoints.conftest import Client
from tests.helpers import loaded

TEXTS = ["the cat sat", "a long story", "cat"]


@pytest.fixture(scope="module")
def sparse_llm() -> Iterator[LLM]:
    with loaded(splade()) as llm:
        yield llm


@pytest.fixture(scope="module")
def m3_llm() -> Iterator[LLM]:
    with loaded(bge_m3()) as llm:
        yield llm


def served(llm: LLM) -> Client:
    return Client(create_app(llm.engine))


def vectors(llm: LLM) -> list[dict[int, float]]:
    return [pytest.approx(one.outputs.weights, abs=1e-6) for one in llm.sparse_embed(TEXTS, use_tqdm=False)]


def of(vector: dict[str, Any]) -> dict[int, float]:
    assert vector["indices"] == sorted(vector["indices"])
    return dict(zip(vector["indices"], vector["values"], strict=True))


def test_tei_route_gives_an_object_per_weight(sparse_llm: LLM) -> None:
    response = served(sparse_llm).post("/embed_sparse", inputs=TEXTS)
    assert response.status_code == 200, response.text
    assert [{one["index"]: one["value"] for one in vector} for vector in response.json()] == vectors(sparse_llm)
    assert int(response.headers["x-compute-tokens"]) == 5 + 5 + 3
    [few] = served(sparse_llm).post("/embed_sparse", inputs=TEXTS[0], max_active_dims=3).json()
    assert len(few) == 3


def test_embeddings_of_a_sparse_model_are_indices_and_values(sparse_llm: LLM) -> None:
    body = served(sparse_llm).embed(input=TEXTS).json()
    assert [of(one["embedding"]) for one in body["data"]] == vectors(sparse_llm)
    assert body["usage"] == {"prompt_tokens": 13, "total_tokens": 13}


def test_pooling_route_gives_indices_and_values(sparse_llm: LLM) -> None:
    body = served(sparse_llm).post("/pooling", input=TEXTS, task="sparse_embed").json()
    assert [of(one["data"]) for one in body["data"]] == vectors(sparse_llm)


@pytest.mark.parametrize("field", [{"encoding_format": "base64"}, {"embed_dtype": "int8"}], ids=str)
def test_sparse_vectors_have_one_form(sparse_llm: LLM, field: dict[str, str]) -> None:
    client = served(sparse_llm)
    for response in (
        client.embed(input=TEXTS, **field),
        client.post("/pooling", input="a", task="sparse_embed", **field),
    ):
        assert response.status_code == 400
        assert "sent as JSON numbers" in response.text


def test_rerank_compares_sparse_vectors(sparse_llm: LLM) -> None:
    body = served(sparse_llm).post("/rerank", query=TEXTS[0], documents=TEXTS).json()
    rows = [one.outputs.to_dense() for one in sparse_llm.sparse_embed(TEXTS, use_tqdm=False)]
    scores = {one["index"]: one["relevance_score"] for one in body["results"]}
    assert scores == {i: pytest.approx(float(rows[0] @ row), rel=1e-5) for i, row in enumerate(rows)}


def test_dense_model_says_why_it_has_no_sparse_vectors(client: Client) -> None:
    response = client.post("/embed_sparse", inputs=TEXTS)
    assert response.status_code == 422
    assert "sparse_embed" in response.text


def test_several_tasks_are_answered_at_once(m3_llm: LLM) -> None:
    client = served(m3_llm)
    before = m3_llm.engine.metrics.computed_tokens
    body = client.post("/pooling", input=TEXTS, task=TASKS).json()
    assert m3_llm.engine.metrics.computed_tokens - before == 13 == body["usage"]["prompt_tokens"]
    for one, expected in zip(body["data"], m3_llm.encode(TEXTS, pooling_task=TASKS, use_tqdm=False), strict=True):
        output = expected.outputs
        assert list(one["data"]) == TASKS
        assert output.embed is not None
        assert output.sparse_embed is not None
        assert output.token_embed is not None
        assert one["data"]["embed"] == pytest.approx(output.embed.data.tolist(), abs=1e-6)
        assert of(one["data"]["sparse_embed"]) == pytest.approx(output.sparse_embed.weights, abs=1e-6)
        assert one["data"]["token_embed"][1] == pytest.approx(output.token_embed.data[1].tolist(), abs=1e-6)


def test_tasks_that_are_not_known_are_refused(m3_llm: LLM) -> None:
    response = served(m3_llm).post("/pooling", input="a", task=["embed", "all"])
    assert response.status_code == 400
    assert "'all' is unknown" in response.text


def test_fused_scores_over_http(m3_llm: LLM) -> None:
    client = served(m3_llm)
    expected = [one.outputs.score for one in m3_llm.score(TEXTS[0], TEXTS, fuse=True, use_tqdm=False)]
    for fuse in (True, [0.4, 0.2, 0.4]):
        body = client.post("/score", queries=TEXTS[0], documents=TEXTS, fuse=fuse).json()
        assert [one["score"] for one in body["data"]] == pytest.approx(expected, abs=1e-6)
