"""Bodies as clients of other servers send them, with every field that they have, and the answers that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from tests.entrypoints.conftest import Client
from tests.named_checkpoints import cross_encoder, sentiment

TEXTS = ["How tall is the Eiffel Tower?", "330 m", "Ein Satz auf Deutsch."]
QUERY = TEXTS[0]
TEI = {"truncate": True, "truncation_direction": "Right"}
VLLM = {
    "user": "u", "truncate_prompt_tokens": -1, "truncation_side": "right", "request_id": "r", "priority": 0,
    "mm_processor_kwargs": None, "cache_salt": "salt", "padding": "do_not_pad",
}  # fmt: skip
CHAT = {"add_special_tokens": True, "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None}
NUMBERS = {"encoding_format": "float", "embed_dtype": "float32", "endianness": "native"}
PAIRS = {"max_tokens_per_query": 0, "max_tokens_per_doc": 0, "use_activation": True}

# What an answer looks like: names of fields, the form of a list's first item, the type of a value.
USAGE = {"prompt_tokens": "int", "total_tokens": "int"}
HEAD = {"object": "str", "id": "str", "created": "int", "model": "str", "usage": USAGE}
EMBEDDINGS = {**HEAD, "data": [{"object": "str", "index": "int", "embedding": ["float"]}]}
META = {"api_version": {"version": "str"}, "billed_units": {"input_tokens": "int", "search_units": "int"}}
RANKING = {**HEAD, "meta": META, "results": [{"index": "int", "relevance_score": "float"}]}
RANKED_TEXTS = {
    **HEAD,
    "meta": META,
    "results": [{"index": "int", "relevance_score": "float", "document": {"text": "str"}}],
}
SCORES = {**HEAD, "data": [{"object": "str", "index": "int", "score": "float"}]}
LABELS = [{"label": "str", "score": "float"}]

RECORDED: dict[str, tuple[str, dict[str, Any], Any]] = {
    # text-embeddings-inference
    "TEI embed": (
        "/embed",
        {"inputs": TEXTS, "normalize": True, "prompt_name": None, "dimensions": 64, **TEI},
        [["float"]],
    ),
    "TEI embed, one text": ("/embed", {"inputs": QUERY, **TEI}, [["float"]]),
    "TEI embed, ids": ("/embed", {"inputs": [[101, 7592, 102]], "truncate": False}, [["float"]]),
    "TEI embed_all": ("/embed_all", {"inputs": TEXTS, "prompt_name": None, **TEI}, [[["float"]]]),
    "TEI predict, a text": (
        "/predict",
        {"inputs": QUERY, "raw_scores": False, "model": "sentiment", **TEI},
        LABELS,
    ),
    "TEI predict, texts": ("/predict", {"inputs": [["a"], ["b"]], "model": "sentiment", **TEI}, [LABELS]),
    "TEI predict, a pair": ("/predict", {"inputs": ["a", "b"], "raw_scores": True, "model": "cross"}, LABELS),
    "TEI predict, pairs": ("/predict", {"inputs": [["a", "b"], ["c", "d"]], "model": "cross", **TEI}, [LABELS]),
    "TEI rerank": (
        "/rerank",
        {"query": QUERY, "texts": TEXTS, "raw_scores": False, "return_text": False, "model": "cross", **TEI},
        [{"index": "int", "score": "float"}],
    ),
    "TEI rerank with texts": (
        "/rerank",
        {"query": QUERY, "texts": TEXTS, "raw_scores": True, "return_text": True, "model": "cross"},
        [{"index": "int", "score": "float", "text": "str"}],
    ),
    "TEI similarity": (
        "/similarity",
        {
            "inputs": {"source_sentence": QUERY, "sentences": TEXTS},
            "parameters": {"truncate": True, "truncation_direction": "Left", "prompt_name": None},
        },
        ["float"],
    ),
    "TEI tokenize": (
        "/tokenize",
        {"inputs": TEXTS, "add_special_tokens": False, "prompt_name": None},
        [[{"id": "int", "text": "str", "special": "bool", "start": "int", "stop": "int"}]],
    ),
    "TEI decode": ("/decode", {"ids": [[101, 7592, 102]], "skip_special_tokens": True}, ["str"]),
    "TEI OpenAI": (
        "/v1/embeddings",
        {"input": TEXTS, "model": "minilm", "user": None, "encoding_format": "float", "dimensions": 64},
        EMBEDDINGS,
    ),
    "TEI SageMaker": ("/invocations", {"inputs": TEXTS, "truncate": True}, [["float"]]),
    # Jina
    "Jina embeddings": (
        "/v1/embeddings",
        {
            "model": "minilm", "input": TEXTS, "task": "retrieval.passage", "dimensions": 128, "normalized": True,
            "embedding_type": "float", "late_chunking": False, "truncate": True, "return_multivector": False,
        },
        EMBEDDINGS,
    ),
    "Jina late chunking": (
        "/v1/embeddings",
        {"model": "minilm", "input": ["a cat ", "sat"], "task": "text-matching", "late_chunking": True},
        EMBEDDINGS,
    ),
    "Jina base64": (
        "/v1/embeddings",
        {"model": "minilm", "input": TEXTS, "task": "separation", "embedding_type": "base64"},
        {**HEAD, "data": [{"object": "str", "index": "int", "embedding": "str"}]},
    ),
    "Jina reranker": (
        "/v1/rerank",
        {"model": "cross", "query": QUERY, "documents": TEXTS, "top_n": 2, "return_documents": False},
        RANKING,
    ),
    "Jina reranker, objects": (
        "/v1/rerank",
        {"model": "cross", "query": QUERY, "documents": [{"text": "a"}], "return_documents": True},
        RANKED_TEXTS,
    ),
    # vLLM
    "vLLM embeddings": (
        "/v1/embeddings",
        {"model": "minilm", "input": TEXTS, "add_special_tokens": True, "dimensions": 64, **NUMBERS, **VLLM},
        EMBEDDINGS,
    ),
    "vLLM pooling": (
        "/pooling",
        {"model": "minilm", "input": TEXTS, "task": "token_embed", **NUMBERS, **VLLM},
        {**HEAD, "data": [{"object": "str", "index": "int", "data": [["float"]]}]},
    ),
    "vLLM classify": (
        "/classify",
        {"model": "sentiment", "input": TEXTS, "use_activation": True, **VLLM},
        {**HEAD, "data": [{"index": "int", "label": "str", "probs": ["float"], "num_classes": "int"}]},
    ),
    **{
        f"vLLM score of {left} and {right}": ("/score", {"model": "cross", left: QUERY, right: TEXTS, **PAIRS}, SCORES)
        for left, right in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
    },
    "vLLM score": ("/v1/score", {"model": "cross", "data_1": TEXTS, "data_2": TEXTS, **PAIRS, **VLLM}, SCORES),
    "vLLM rerank": (
        "/v1/rerank",
        {"model": "cross", "query": QUERY, "documents": TEXTS, "top_n": 0, **PAIRS, **VLLM},
        RANKED_TEXTS,
    ),
    "vLLM tokenize": (
        "/tokenize",
        {"model": "minilm", "prompt": QUERY, "add_special_tokens": True, "return_token_strs": False},
        {"count": "int", "max_model_len": "int", "tokens": ["int"]},
    ),
    "vLLM detokenize": ("/detokenize", {"model": "minilm", "tokens": [101, 102]}, {"prompt": "str"}),
    # Cohere
    "Cohere embed": (
        "/v2/embed",
        {
            "model": "minilm", "texts": TEXTS, "input_type": "classification", "embedding_types": ["float"],
            "output_dimension": 64, "max_tokens": 100, "truncate": "END", "priority": 0,
        },
        {
            "id": "str", "response_type": "str", "embeddings": {"float": [["float"]]}, "texts": ["str"],
            "meta": {"api_version": {"version": "str"}, "billed_units": {"input_tokens": "int"}},
        },
    ),
    "Cohere rerank": (
        "/v2/rerank",
        {"model": "cross", "query": QUERY, "documents": TEXTS, "top_n": 2, "max_tokens_per_doc": 4096, "priority": 0},
        RANKING,
    ),
    "Cohere v1 rerank": (
        "/v1/rerank",
        {
            "model": "cross", "query": QUERY, "documents": [{"text": "b"}], "rank_fields": ["text"], "top_n": 1,
            "return_documents": True, "max_chunks_per_doc": 1,
        },
        RANKED_TEXTS,
    ),
    # infinity, LangChain, LlamaIndex
    "infinity": (
        "/embeddings",
        {"model": "minilm", "input": TEXTS, "encoding_format": "float", "dimensions": 64, "modality": "text"},
        EMBEDDINGS,
    ),
    "LangChain with ids": (
        "/v1/embeddings",
        {"input": [[101, 7592, 102]], "model": "minilm", "encoding_format": "base64"},
        {**HEAD, "data": [{"object": "str", "index": "int", "embedding": "str"}]},
    ),
    "LlamaIndex": (
        "/v1/embeddings",
        {"input": TEXTS, "model": "minilm", "user": None, "extra_body": None},
        EMBEDDINGS,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Client]:
    own = [
        Engine(EngineConfig(model=str(make()), served_model_name=name, device="cpu", use_tqdm_on_load=False))
        for name, make in (("cross", cross_encoder), ("sentiment", sentiment))
    ]
    yield Client(create_app([engine, *own]))
    for one in own:
        one.close()


def outline(answer: Any) -> Any:
    """Names, types, and of a list what its first item is like."""
    if isinstance(answer, dict):
        return {name: outline(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [outline(answer[0])]
    return type(answer).__name__


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_bodies_get_the_answer_that_their_clients_read(server: Client, name: str) -> None:
    path, body, expected = RECORDED[name]
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    assert outline(response.json()) == expected


def test_info_has_every_field_that_tei_has(server: Client) -> None:
    fields = (
        "model_id model_sha model_dtype model_type max_concurrent_requests max_input_length max_batch_tokens "
        "max_batch_requests max_client_batch_size auto_truncate tokenization_workers version sha docker_label "
        "served_model_name"
    )
    assert set(fields.split()) <= set(server.get("/info").json())
    assert server.get("/api-doc/openapi.json").json()["openapi"]
    assert server.get("/models").json() == server.get("/v1/models").json()
