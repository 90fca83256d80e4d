"""Queries and documents that go different ways give what sentence-transformers' Router gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from anypool import LLM, PoolingParams
from anypool.entrypoints.serve.app import create_app
from anypool.errors import CheckpointFormatError, InvalidParameterError, UnsupportedArchitectureError
from tests.adapters.test_sparse import masked_lm, save_sparse, sparse_vectors, splade
from tests.entrypoints.conftest import Client
from tests.helpers import HIDDEN, RAGGED, assert_close, copy_of, edit_json, loaded, new_folder, tiny_bert, vectors

QUERIES = ["cat cat mat", "the story", "zzz", ""]


@cache
def inference_free(default_route: str | None = "document", **prompts: str) -> Path:
    """Documents through SPLADE, queries through weights by token."""
    torch.manual_seed(9)
    transformer = Transformer(str(masked_lm(further_words=0)), transformer_task="fill-mask")
    weight = torch.rand(masked_size()) * (torch.rand(masked_size()) > 0.3)
    router = Router(
        {
            "query": [SparseStaticEmbedding(transformer.tokenizer, weight=weight)],
            "document": [transformer, SpladePooling("max", activation_function="log1p_relu")],
        },
        default_route=default_route,
        allow_empty_key=False,
    )
    return save_sparse(router, similarity_fn_name="dot", **({"prompts": prompts} if prompts else {}))


@cache
def masked_size() -> int:
    return int(json.loads((masked_lm(further_words=0) / "config.json").read_text())["vocab_size"])


def reference(folder: Path) -> SparseEncoder:
    return SparseEncoder(str(folder), device="cpu", local_files_only=True)


def encoded(method: Any, texts: list[str], **options: Any) -> torch.Tensor:
    rows: torch.Tensor = method(
        texts, convert_to_tensor=True, convert_to_sparse_tensor=False, show_progress_bar=False, **options
    )
    return rows


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with loaded(inference_free()) as llm:
        yield llm


def test_both_ways_equal_sentence_transformers(llm: LLM) -> None:
    model = reference(inference_free())
    assert_close(sparse_vectors(llm, RAGGED, is_query=False), encoded(model.encode_document, RAGGED))
    assert_close(sparse_vectors(llm, QUERIES, is_query=True), encoded(model.encode_query, QUERIES), atol=0)
    assert_close(sparse_vectors(llm, RAGGED, is_query=True), encoded(model.encode_query, RAGGED), atol=0)


def test_default_way_is_the_one_that_the_router_names(llm: LLM) -> None:
    assert_close(sparse_vectors(llm), encoded(reference(inference_free()).encode, RAGGED))
    folder = inference_free("query")
    with loaded(folder) as other:
        assert_close(sparse_vectors(other), encoded(reference(folder).encode, RAGGED), atol=0)


def test_without_a_default_way_the_side_must_be_said() -> None:
    with loaded(inference_free(None)) as llm:
        with pytest.raises(
            InvalidParameterError, match=r"is_query=None has no route in .*: it has one for False and True"
        ):
            llm.sparse_embed("cat", use_tqdm=False)
        assert len(llm.sparse_embed("cat", is_query=True, use_tqdm=False)) == 1


def test_queries_and_documents_in_one_call(llm: LLM) -> None:
    params = [PoolingParams(is_query=i % 2 == 0) for i in range(len(RAGGED))]
    rows = sparse_vectors(llm, RAGGED, params)
    for text, one, row in zip(RAGGED, params, rows, strict=True):
        assert_close(row, sparse_vectors(llm, [text], is_query=one.is_query)[0], atol=1e-6)


def test_queries_are_not_run(llm: LLM) -> None:
    before = llm.engine.metrics.computed_tokens
    [output] = llm.sparse_embed("cat mat", is_query=True, use_tqdm=False)
    assert llm.engine.metrics.computed_tokens == before
    assert len(output.prompt_token_ids) == 2


def test_largest_weights_of_queries_are_kept(llm: LLM) -> None:
    model = reference(inference_free())
    expected = encoded(model.encode_query, RAGGED[:1], max_active_dims=1)
    assert_close(sparse_vectors(llm, RAGGED[:1], PoolingParams(max_active_dims=1, is_query=True)), expected, atol=0)


def test_prompts_go_with_their_side() -> None:
    folder = inference_free(query="the query: ", document="passage: ")
    model = reference(folder)
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm, RAGGED, is_query=False), encoded(model.encode_document, RAGGED))
        assert_close(sparse_vectors(llm, QUERIES, is_query=True), encoded(model.encode_query, QUERIES), atol=0)


def test_queries_are_cut_at_the_end_that_the_tokenizer_or_the_caller_says() -> None:
    folder = copy_of(inference_free())
    for path in folder.rglob("tokenizer_config.json"):
        edit_json(path, lambda config: config.update(model_max_length=3, truncation_side="left"))
    model, long = reference(folder), ["the cat sat on a mat story"]
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm, long, is_query=True), encoded(model.encode_query, long), atol=0)
        right = sparse_vectors(llm, long, is_query=True, truncation_side="right")
        assert_close(right, sparse_vectors(llm, ["the cat sat"], is_query=True), atol=0)
        assert (right != sparse_vectors(llm, long, is_query=True)).any()


@pytest.mark.parametrize("prompts", [{"query": "the "}, {"query": "the ", "passage": "cat ", "document": "mat "}])
def test_scores_of_splade_have_the_prompts_of_queries_and_documents(prompts: dict[str, str]) -> None:
    folder = copy_of(splade())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(prompts=prompts))
    model = reference(folder)
    expected = encoded(model.encode_query, ["the cat"]) @ encoded(model.encode_document, RAGGED).T
    with loaded(folder) as llm:
        scores = llm.score("the cat", RAGGED, use_tqdm=False)
        ranked = {one.index: one.relevance_score for one in llm.rerank("the cat", RAGGED, use_tqdm=False)}
    assert_close(torch.tensor([one.outputs.score for one in scores]), expected[0], atol=1e-4)
    assert_close(torch.tensor([ranked[i] for i in range(len(RAGGED))]), expected[0], atol=1e-4)


def test_scores_compare_queries_with_documents(llm: LLM) -> None:
    model = reference(inference_free())
    expected = encoded(model.encode_query, ["the cat"]) @ encoded(model.encode_document, RAGGED).T
    scores = llm.score("the cat", RAGGED, use_tqdm=False)
    assert_close(torch.tensor([[one.outputs.score for one in scores]]), expected, atol=1e-4)
    ranked = llm.rerank("the cat", RAGGED, use_tqdm=False)
    assert [one.index for one in ranked] == expected[0].argsort(descending=True).tolist()


def test_side_over_http(llm: LLM) -> None:
    client = Client(create_app(llm.engine))
    [output] = llm.sparse_embed("cat mat", is_query=True, use_tqdm=False)
    expected = pytest.approx(output.outputs.weights)
    for fields in ({"is_query": True}, {"input_type": "search_query"}):
        [vector] = client.post("/embed_sparse", inputs="cat mat", **fields).json()
        assert {one["index"]: one["value"] for one in vector} == expected
        found = client.post("/pooling", input="cat mat", task="sparse_embed", **fields).json()["data"][0]["data"]
        assert dict(zip(found["indices"], found["values"], strict=True)) == expected
    found = client.embed(input="cat mat", input_type="query").json()["data"][0]["embedding"]
    assert dict(zip(found["indices"], found["values"], strict=True)) == expected


def test_weights_in_a_json_file() -> None:
    """Tokens that the vocabulary lacks have the unknown token's id, as sentence-transformers has it."""
    folder = copy_of(inference_free())
    [table] = folder.glob("query_0_*")
    (table / "model.safetensors").unlink()
    (table / "idf.json").write_text(json.dumps({"cat": 1.5, "mat": 0.25, "unheard": 0.75}))
    edit_json(table / "config.json", lambda config: config.update(path="idf.json"))
    tokenizer = reference(inference_free()).tokenizer
    expected = SparseStaticEmbedding.from_json(str(table / "idf.json"), tokenizer).weight.detach()
    with loaded(folder) as llm:
        rows = sparse_vectors(llm, ["cat on a mat", "zzz £"], is_query=True)
    ids = [set(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("cat on a mat", "zzz £")]
    for row, some in zip(rows, ids, strict=True):
        assert {i: float(row[i]) for i in row.nonzero()[:, 0].tolist()} == {
            i: float(expected[i]) for i in sorted(some) if expected[i] != 0
        }


def test_mapped_routes() -> None:
    transformer = Transformer(str(masked_lm(further_words=0)), transformer_task="fill-mask")
    router = Router(
        {"light": [SparseStaticEmbedding(transformer.tokenizer)], "heavy": [transformer, SpladePooling()]},
        default_route="heavy",
        route_mappings={("query", "text"): "light", ("document", None): "heavy"},
    )
    folder = save_sparse(router)
    model = reference(folder)
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm, QUERIES, is_query=True), encoded(model.encode_query, QUERIES), atol=0)
        assert_close(sparse_vectors(llm, RAGGED, is_query=False), encoded(model.encode_document, RAGGED))


def test_dense_routes_that_are_the_same_load() -> None:
    chain = [Transformer(str(tiny_bert())), Pooling(HIDDEN, "mean")]
    folder = new_folder("router")
    model = SentenceTransformer(modules=[Router({"query": chain, "document": chain})], device="cpu")
    model.save(str(folder), create_model_card=False)
    expected = model.encode(RAGGED, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False)
    with loaded(folder) as llm:
        outputs = llm.embed(RAGGED, PoolingParams(normalize=True), use_tqdm=False, truncate_prompt_tokens=-1)
    assert_close(torch.stack([one.outputs.data for one in outputs]), expected)


@cache
def two_heads(*, is_first: bool) -> Path:
    """Queries and documents with a Dense each, the router first or after the pooling."""
    torch.manual_seed(10)
    shared = [Transformer(str(tiny_bert())), Pooling(HIDDEN, "mean")]
    heads = {"query": [Dense(HIDDEN, 16)], "document": [Dense(HIDDEN, 16), Dense(16, 16)]}
    if is_first:
        modules = [Router({name: [*shared, *head] for name, head in heads.items()}, default_route="document")]
    else:
        modules = [*shared, Router(heads, default_route="document")]
    folder = new_folder("router")
    SentenceTransformer(modules=[*modules, Normalize()], device="cpu").save(str(folder), create_model_card=False)
    return folder


@pytest.mark.parametrize("is_first", [True, False], ids=["router", "after pooling"])
def test_dense_routes_with_heads_of_their_own(is_first: bool) -> None:
    folder = two_heads(is_first=is_first)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    options: dict[str, Any] = {"convert_to_tensor": True, "show_progress_bar": False}
    queries, documents = model.encode_query(RAGGED, **options), model.encode_document(RAGGED, **options)
    with loaded(folder) as llm:
        assert_close(vectors(llm, RAGGED, PoolingParams(is_query=True)), queries)
        assert_close(vectors(llm, RAGGED, PoolingParams(is_query=False)), documents)
        assert_close(vectors(llm, RAGGED), documents)
        sides = [PoolingParams(is_query=i % 2 == 0) for i in range(len(RAGGED))]
        mixed = [(queries if i % 2 == 0 else documents)[i] for i in range(len(RAGGED))]
        assert_close(vectors(llm, RAGGED, sides), torch.stack(mixed))
        scores = [one.outputs.score for one in llm.score(RAGGED[0], RAGGED, use_tqdm=False)]
        assert_close(torch.tensor(scores), queries[0] @ documents.T)
        client = Client(create_app(llm.engine))
        found = client.embed(input=RAGGED[2], input_type="search_query").json()["data"][0]["embedding"]
        assert_close(torch.tensor(found), queries[2])


def test_dense_routes_with_transformers_of_their_own_are_refused() -> None:
    routes = {name: [Transformer(str(tiny_bert())), Pooling(HIDDEN, "mean")] for name in ("query", "document")}
    folder = new_folder("router")
    model = SentenceTransformer(modules=[Router(routes)], device="cpu")
    model.save(str(folder), create_model_card=False)
    with pytest.raises(UnsupportedArchitectureError, match="have different transformers or poolings"):
        LLM(folder, device="cpu")


def test_routes_that_nobody_can_ask_for_are_refused() -> None:
    chain = [Transformer(str(tiny_bert())), Pooling(HIDDEN, "mean")]
    folder = new_folder("router")
    model = SentenceTransformer(modules=[Router({"query": chain, "title": [*chain, Dense(HIDDEN, 8)]})], device="cpu")
    model.save(str(folder), create_model_card=False)
    with pytest.raises(UnsupportedArchitectureError, match="routes query: Transformer, Pooling; title"):
        LLM(folder, device="cpu")


def test_route_that_is_not_there_is_refused() -> None:
    folder = copy_of(inference_free())
    edit_json(folder / "router_config.json", lambda config: config["parameters"].update(default_route="elsewhere"))
    with pytest.raises(CheckpointFormatError, match="names the route 'elsewhere'; there are query, document"):
        LLM(folder, device="cpu")


def test_router_file_that_is_damaged_is_refused() -> None:
    folder = copy_of(inference_free())
    edit_json(folder / "router_config.json", lambda config: config.pop("structure"))
    with pytest.raises(CheckpointFormatError, match=r"router_config\.json is missing or not a router's"):
        LLM(folder, device="cpu")
