"""Other people's clients, and the documentation's examples, against `anypool serve` as a program."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import re
import shlex
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import cohere
import httpx
import numpy as np
import openai
import pytest
from cohere.core.api_error import ApiError
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.entrypoints.test_operations import Program
from tests.named_checkpoints import cross_encoder
from tests.test_docs import ROOT, fences, shell_lines

TEXTS = ["How tall is the Eiffel Tower?", "330 m", "Ein Satz auf Deutsch."]
PAGE = ROOT / "docs" / "http-api.md"
KEY = "key-of-the-test"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Not every client here can be closed, and examples leave theirs open: their sockets go with their test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def address(minilm: str) -> Iterator[str]:
    with Program(minilm, "--model", f"cross={cross_encoder()}", "--api-key", KEY) as program:
        yield program.address


@pytest.fixture(scope="module")
def vectors(address: str) -> np.ndarray:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        rows = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float").data
    return np.array([row.embedding for row in rows], np.float32)


def test_openai_sees_its_own_errors(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.embeddings.create(model="minilm", input="a")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="minilm", input="word " * 300)
        assert refused.value.code == "context_length_exceeded"
        assert [model.id for model in client.models.list()] == ["minilm", "cross"]


def test_cohere_embeds_and_reranks(address: str, vectors: np.ndarray) -> None:
    with httpx.Client() as transport:
        client = cohere.ClientV2(api_key=KEY, base_url=address, httpx_client=transport)
        response = client.embed(
            model="minilm",
            texts=TEXTS,
            input_type="search_document",
            embedding_types=["float", "int8", "ubinary", "base64"],
        )
        assert response.embeddings.float_ is not None
        np.testing.assert_allclose(np.array(response.embeddings.float_, np.float32), vectors, atol=1e-6)
        assert np.array(response.embeddings.int8).shape == vectors.shape
        np.testing.assert_array_equal(response.embeddings.ubinary, np.packbits(vectors > 0, axis=1))
        assert response.meta is not None
        assert response.meta.billed_units is not None
        assert response.meta.billed_units.input_tokens
        ranking = client.rerank(model="cross", query=TEXTS[0], documents=TEXTS, top_n=2, max_tokens_per_doc=50)
        assert len(ranking.results) == 2
        assert ranking.results[0].relevance_score >= ranking.results[1].relevance_score
        with pytest.raises(ApiError) as refused:
            client.embed(model="minilm", texts=TEXTS, input_type="no such", request_options={"max_retries": 0})
        assert refused.value.status_code == 400
        older = cohere.Client(api_key=KEY, base_url=address, httpx_client=transport)
        first = older.rerank(model="cross", query=TEXTS[0], documents=TEXTS, return_documents=True).results
        assert {result.document.text for result in first if result.document} == set(TEXTS)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' environment forbids the hub's library to connect to anything, this machine included."""
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("path", ["/embed", "/"])
def test_hugging_face_extracts_features(address: str, vectors: np.ndarray, path: str) -> None:
    client = InferenceClient(f"{address}{path}", token=KEY)
    rows = client.feature_extraction(TEXTS, normalize=True, truncate=True, truncation_direction="right")
    np.testing.assert_allclose(rows, vectors, atol=1e-6)
    scores = InferenceClient(f"{address}/similarity", token=KEY).sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    np.testing.assert_allclose(scores, vectors @ vectors[0], atol=1e-5)
    with pytest.raises(HfHubHTTPError, match="401"):
        InferenceClient(f"{address}{path}", token="wrong").feature_extraction(TEXTS)


def test_langchain_embeds_what_it_is_given(address: str, vectors: np.ndarray) -> None:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        model="minilm", base_url=f"{address}/v1", api_key=KEY, check_embedding_ctx_length=False, max_retries=0
    )
    np.testing.assert_allclose(client.embed_documents(TEXTS), vectors, atol=1e-6)
    np.testing.assert_allclose(client.embed_query(TEXTS[0]), vectors[0], atol=1e-6)

    async def both() -> tuple[list[list[float]], list[float]]:
        return await client.aembed_documents(TEXTS), await client.aembed_query(TEXTS[0])

    rows, row = asyncio.run(both())
    np.testing.assert_allclose(rows, vectors, atol=1e-6)
    np.testing.assert_allclose(row, vectors[0], atol=1e-6)


@pytest.fixture
def tokenizer_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken downloads its vocabularies; LlamaIndex comes with them."""
    import llama_index.core

    folder = Path(llama_index.core.__file__).parent / "_static" / "tiktoken_cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))


@pytest.mark.usefixtures("tokenizer_of_openai")
def test_ids_of_openais_tokenizer_which_langchain_sends_by_default_are_told(address: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(model="minilm", base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=r"token id 54850.* 0 to 30521.*another tokenizer"):
        client.embed_documents(TEXTS[2:])


def test_langchain_cuts_with_the_models_own_tokenizer(address: str, minilm: str, vectors: np.ndarray) -> None:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(model=minilm, base_url=f"{address}/v1", api_key=KEY, tiktoken_enabled=False)
    texts = [text.lower() for text in TEXTS]  # it sends what its tokens decode to
    np.testing.assert_allclose(client.embed_documents(texts), vectors, atol=1e-6)


def test_llama_index_embeds_over_both_apis(address: str, vectors: np.ndarray) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    for client in (
        OpenAILikeEmbedding(model_name="minilm", api_base=f"{address}/v1", api_key=KEY, max_retries=0),
        TextEmbeddingsInference(
            model_name="minilm", base_url=address, auth_token=KEY, text_instruction="", query_instruction=""
        ),
    ):
        np.testing.assert_allclose(client.get_text_embedding_batch(TEXTS), vectors, atol=1e-6)
        np.testing.assert_allclose(client.get_query_embedding(TEXTS[0]), vectors[0], atol=1e-6)
        rows = asyncio.run(client.aget_text_embedding_batch(TEXTS))
        np.testing.assert_allclose(rows, vectors, atol=1e-6)


def test_llama_index_reranks_over_both_apis(address: str, vectors: np.ndarray) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.jinaai_rerank import JinaRerank
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    similar = vectors @ vectors[0]
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    for client in (
        JinaRerank(base_url=f"{address}/v1", api_key=KEY, model="minilm", top_n=2),
        TextEmbeddingInference(base_url=address, auth_token=f"Bearer {KEY}", top_n=2),
    ):
        found = client.postprocess_nodes(nodes, query_str=TEXTS[0])
        best = np.argsort(-similar)[:2]
        assert [node.text for node in found] == [TEXTS[i] for i in best]
        np.testing.assert_allclose([node.score for node in found], similar[best], atol=1e-5)


@pytest.fixture(scope="module")
def open_address(minilm: str) -> Iterator[str]:
    with Program(minilm) as program:
        yield program.address


@pytest.mark.usefixtures("online")
def test_examples_of_the_page_run_and_print_what_it_says(open_address: str) -> None:
    ran = 0
    for fence in fences(PAGE):
        if fence.language != "python":
            continue
        code = fence.code.replace("http://127.0.0.1:8000", open_address)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"{PAGE.name}:{fence.line}", "exec"), {})
        assert printed.getvalue() == fence.output, f"{PAGE.name}:{fence.line}"
        ran += 1
    assert ran == 6


def test_curl_commands_of_the_pages_are_served(open_address: str) -> None:
    commands = [line for page in (PAGE, ROOT / "docs" / "server.md") for line in shell_lines(page)]
    curls = [shlex.split(line) for line in commands if line.startswith("curl ")]
    assert len(curls) >= 8
    for words in curls:
        words = [word.replace("http://127.0.0.1:8000", open_address) for word in words]
        done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)


def test_page_has_every_route() -> None:
    from anypool.entrypoints.serve.routes.table import ROUTES

    shown = {path for route in ROUTES if route.is_shown for path in route.paths}
    listed = set(re.findall(r"`(?:POST |GET )?(/[\w/{}]*)`", PAGE.read_text(encoding="utf-8")))
    assert shown <= listed
