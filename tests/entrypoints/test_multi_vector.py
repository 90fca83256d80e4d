"""A multi-vector model over HTTP: the words for queries and documents choose how a text is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.cli_info import as_text, describe
from anypool.entrypoints.serve.app import create_app
from tests.entrypoints.conftest import Client
from tests.fixtures.colbert_texts import DOCUMENTS, QUERIES
from tests.helpers import assert_close

FOLDER = Path(__file__).parents[1] / "fixtures" / "pylate"


@pytest.fixture(scope="module")
def colbert() -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=str(FOLDER), served_model_name="colbert", device="cpu", use_tqdm_on_load=False))
    yield engine
    engine.close()


@pytest.fixture
def client(colbert: Engine) -> Client:
    return Client(create_app(colbert))


def expected(side: str, texts: list[str]) -> list[torch.Tensor]:
    stored = load_file(FOLDER.with_suffix(".safetensors"))
    return [stored[f"{side}{i}"] for i in range(len(texts))]


@pytest.mark.parametrize(
    ("fields", "side"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_query"}, "query"),
        ({"is_query": True}, "query"),
        ({"input_type": "passage"}, "document"),
        ({"is_query": False}, "document"),
        ({}, "document"),
    ],
    ids=str,
)
def test_pooling_reads_a_text_as_its_side_says(fields: dict[str, Any], side: str, client: Client) -> None:
    texts = QUERIES if side == "query" else DOCUMENTS
    answer = client.post("/pooling", input=texts, task="token_embed", **fields).json()
    for one, vectors in zip(answer["data"], expected(side, texts), strict=True):
        assert_close(torch.tensor(one["data"]), vectors)


def test_embed_all_gives_the_same_and_takes_the_same_words(client: Client) -> None:
    for side, texts in (("query", QUERIES), ("document", DOCUMENTS)):
        rows = client.post("/embed_all", inputs=texts, input_type=side).json()
        for one, vectors in zip(rows, expected(side, texts), strict=True):
            assert_close(torch.tensor(one), vectors)


def test_documents_may_be_pooled_and_cut_and_sent_in_bytes(client: Client) -> None:
    fields = {"input": DOCUMENTS[1], "task": "token_embed", "pool_factor": 2, "token_pooling": "pylate"}
    [pooled] = client.post("/pooling", **fields).json()["data"]
    assert len(pooled["data"]) == 1 + (len(expected("document", DOCUMENTS)[1]) - 1) // 2
    [bits] = client.post("/pooling", input="cat", task="token_embed", dimensions=4, embed_dtype="ubinary").json()[
        "data"
    ]
    assert np.array(bits["data"]).shape == (4, 1)


def test_rerank_and_score_compare_token_vectors(client: Client) -> None:
    [query, *_], documents = expected("query", QUERIES), expected("document", DOCUMENTS)
    scores = torch.stack([(query @ one.T).amax(dim=1).sum() for one in documents])
    ranked = client.post("/rerank", query=QUERIES[0], documents=DOCUMENTS).json()["results"]
    assert_close(torch.tensor([one["relevance_score"] for one in ranked]), scores.sort(descending=True).values)
    scored = client.post("/score", queries=QUERIES[0], documents=DOCUMENTS).json()["data"]
    assert_close(torch.tensor([one["score"] for one in scored]), scores)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_type": "query", "is_query": False}, "is_query=False contradicts input_type"),
        ({"input_type": "clustering"}, "input_type='clustering' means nothing to this model, which knows 'query'"),
        ({"pool_factor": 0.5}, "pool_factor"),
        ({"is_query": True, "pool_factor": 2}, "pool_factor=2.0 has no meaning for queries"),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str, client: Client) -> None:
    answer = client.post("/pooling", input="cat", task="token_embed", **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_one_vector_per_text_is_refused_with_what_is_served(client: Client) -> None:
    answer = client.embed(input="cat")
    assert answer.status_code == 400
    assert "task 'embed' is not served by" in answer.json()["error"]["message"]


def test_info_says_how_queries_and_documents_are_read(colbert: Engine) -> None:
    lines = dict(line.split("  ", 1) for line in as_text(describe(colbert)).splitlines())
    facts = {name: value.strip() for name, value in lines.items()}
    assert facts["multi-vector"] == "PyLate, 8 dimensions per token"
    assert facts["queries"] == "marked '[Q] ', expanded to 12 tokens, not attended to, cut at 12 tokens"
    assert facts["documents"] == "marked '[D] ', cut at 20 tokens, 8 tokens have no vector"
    assert facts["similarity"] == "maxsim"
