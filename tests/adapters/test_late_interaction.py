"""Multi-vector checkpoints give the vectors and scores of the library that wrote them.

PyLate needs other versions of transformers than are installed here: `tests/fixtures` has checkpoints that it wrote, and
what it says about them.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.errors import (
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    UnsupportedTaskError,
    WeightsError,
)
from tests.fixtures.colbert_texts import DOCUMENTS, QUERIES
from tests.helpers import (
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    copy_of,
    edit_json,
    loaded,
    new_folder,
    save,
    tiny_bert,
    tiny_llama,
    wordpiece_tokenizer,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
ASKED = ["the cat", "none", " ".join(["a story, and a mat"] * 9), "", "a long passage?"]
FIXED = {"strategy": "fixed", "length": 12}


def token_vectors(llm: LLM, texts: Any, *params: Any, **options: Any) -> list[torch.Tensor]:
    outputs = llm.token_embed(texts, *params, use_tqdm=False, **options)
    return [output.outputs.data for output in outputs]


def assert_all_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, atol: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, atol=atol)


def dense(size_in: int, size_out: int, activation: Any = torch.nn.Identity, **options: Any) -> Dense:
    torch.manual_seed(size_in)
    return Dense(
        size_in, size_out, bias=False, activation_function=activation(), module_input_name="token_embeddings", **options
    )


def encoder(
    backbone: Path, *modules: Any, skiplist: Sequence[str] = tuple(string.punctuation), **settings: Any
) -> tuple[Path, MultiVectorEncoder]:
    """A checkpoint that sentence-transformers wrote, and what reads it."""
    prompts = settings.pop("prompts", {"query": "query: ", "document": "passage: "})
    transformer = Transformer(str(backbone), **settings)
    mask, unit = MultiVectorMask(list(skiplist)), Normalize(module_input_name="token_embeddings")
    chain = [transformer, *(modules or (dense(32, 16),)), mask, unit]
    pooling = [module for module in modules if isinstance(module, HierarchicalTokenPooling)]
    chain = [module for module in chain if module not in pooling] + pooling
    folder = new_folder("multi-vector")
    MultiVectorEncoder(modules=chain, prompts=prompts, device="cpu").save(str(folder), create_model_card=False)
    return folder, MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)


def backbones() -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    return {
        "distilbert": lambda v: DistilBertModel(
            DistilBertConfig(vocab_size=v, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=160)
        ),
        "xlm-roberta": lambda v: XLMRobertaModel(
            XLMRobertaConfig(vocab_size=v, max_position_embeddings=MAX_POSITIONS + 2, pad_token_id=0, **sizes)
        ),
        "mpnet": lambda v: MPNetModel(MPNetConfig(vocab_size=v, max_position_embeddings=MAX_POSITIONS + 2, **sizes)),
        "modernbert": lambda v: ModernBertModel(
            ModernBertConfig(
                vocab_size=v, max_position_embeddings=160, local_attention=8, global_attn_every_n_layers=2,
                pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3, **sizes,
            )
        ),
        "deberta": lambda v: DebertaV2Model(DebertaV2Config(vocab_size=v, max_position_embeddings=160, **sizes)),
    }  # fmt: skip


@cache
def backbone(name: str) -> Path:
    torch.manual_seed(5)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    return save(backbones()[name](len(tokenizer)), tokenizer, name)


# What each library gives.


@pytest.mark.parametrize("name", ["pylate", "pylate-several", "pylate-plain", "stanford"])
def test_vectors_are_pylates(name: str) -> None:
    """Markers, expansion attended to or not or none, several Dense, skip lists, prompts, texts that are cut."""
    expected = load_file(FIXTURES / f"{name}.safetensors")
    with loaded(FIXTURES / name) as llm:
        for side, texts, is_query in (("query", QUERIES, True), ("document", DOCUMENTS, False)):
            assert_all_close(
                token_vectors(llm, texts, is_query=is_query), [expected[f"{side}{i}"] for i in range(len(texts))]
            )


def test_stanfords_layout_gives_the_vectors_of_sentence_transformers() -> None:
    """It leaves out of the skip list what the vocabulary does not have; these texts have nothing of that kind."""
    model = MultiVectorEncoder(str(FIXTURES / "stanford"), device="cpu", local_files_only=True)
    documents = [text for text in DOCUMENTS if "~" not in text]
    with loaded(FIXTURES / "stanford") as llm:
        assert_all_close(token_vectors(llm, QUERIES, is_query=True), model.encode_query(QUERIES))
        assert_all_close(token_vectors(llm, documents, is_query=False), model.encode_document(documents))


@pytest.mark.parametrize("attend", [False, True], ids=["not attended to", "attended to"])
@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_vectors_and_scores_are_those_of_sentence_transformers(strategy: str, attend: bool) -> None:
    expansion = {"strategy": strategy, "length": 12, "attend": attend}
    lengths = {"query_length": 16} if strategy == "min" else {}
    folder, model = encoder(tiny_bert(), query_expansion=expansion, document_length=20, **lengths)
    queries, documents = model.encode_query(ASKED), model.encode_document(RAGGED)
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), queries)
        assert_all_close(token_vectors(llm, RAGGED), documents)
        scores = llm.score(ASKED[4], RAGGED, use_tqdm=False)
        ranked = llm.rerank(ASKED[4], RAGGED, use_tqdm=False)
    expected = model.similarity(queries[4:], documents)[0]
    assert_close(torch.tensor([one.outputs.score for one in scores]), expected, atol=2e-5)
    assert [one.index for one in ranked] == expected.argsort(descending=True).tolist()


@pytest.mark.parametrize("name", ["distilbert", "xlm-roberta", "mpnet", "modernbert"])
def test_every_native_encoder_expands_queries_without_attending_to_that(name: str) -> None:
    """Of ModernBERT's layers, half see four tokens to either side: some of the expansion sees none of the query."""
    folder, model = encoder(backbone(name), query_expansion={"strategy": "fixed", "length": 24})
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), model.encode_query(ASKED))
        assert_all_close(token_vectors(llm, RAGGED), model.encode_document(RAGGED))


def test_a_module_of_transformers_expands_queries_so_too() -> None:
    folder, model = encoder(tiny_bert(), query_expansion=FIXED)
    with loaded(folder, model_impl="transformers") as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), model.encode_query(ASKED))


def test_a_decoder_gives_token_vectors_too() -> None:
    folder, model = encoder(tiny_llama(template="<s> $A </s>"), skiplist=(), query_expansion=FIXED)
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), model.encode_query(ASKED))
        assert_all_close(token_vectors(llm, RAGGED, truncate_prompt_tokens=-1), model.encode_document(RAGGED))


def test_cached_prefixes_are_not_those_of_a_query_whose_expansion_is_not_attended_to() -> None:
    """A document may begin with the ids of a query, mask tokens included, and mean other states by them."""
    folder, model = encoder(tiny_llama(template="<s> $A </s>"), skiplist=(), query_expansion={**FIXED, "length": 40})
    with loaded(folder, enable_prefix_caching=True, block_size=4) as llm:
        [query] = llm.token_embed("the cat sat", is_query=True, use_tqdm=False)
        [as_document] = token_vectors(llm, {"prompt_token_ids": query.prompt_token_ids})
        again = token_vectors(llm, ["the cat sat", "the cat sat on"], is_query=True)
    assert_all_close([query.outputs.data, *again[1:]], model.encode_query(["the cat sat", "the cat sat on"]))
    assert_close(again[0], query.outputs.data, atol=1e-6)
    ids = torch.tensor([query.prompt_token_ids])
    transformer, *_ = model
    with torch.no_grad():
        states = transformer.model(input_ids=ids).last_hidden_state[0]
        expected = torch.nn.functional.normalize(model[1].linear(states), dim=-1)
    assert_close(as_document, expected)


def test_several_layers_an_activation_and_residuals() -> None:
    heads = (dense(32, 24, torch.nn.Tanh, use_residual=True), dense(24, 24, use_residual=True), dense(24, 8))
    folder, model = encoder(tiny_bert(), *heads, query_expansion=FIXED)
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), model.encode_query(ASKED))
        assert_all_close(token_vectors(llm, RAGGED, truncate_prompt_tokens=-1), model.encode_document(RAGGED))


def test_the_skip_list_may_be_about_queries_and_ids_may_be_all_that_is_kept() -> None:
    folder, _ = encoder(tiny_bert(), query_expansion=FIXED)
    edit_json(
        folder / "2_MultiVectorMask/config.json", lambda c: c.update(skiplist_tasks=["query"], skiplist_words=["cat"])
    )
    edit_json(folder / "2_MultiVectorMask/config.json", lambda c: c.update(keep_only_token_ids=[2, 3, 14]))
    model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), model.encode_query(ASKED))
        assert_all_close(token_vectors(llm, RAGGED, truncate_prompt_tokens=-1), model.encode_document(RAGGED))


@pytest.mark.parametrize("expansion", [None, {"strategy": "fixed", "length": 14}, {"strategy": "min", "length": 6}])
def test_lengths_of_queries_and_documents_win_over_the_tokenizers(expansion: dict[str, Any] | None) -> None:
    lengths = {"document_length": 20} | (
        {} if expansion is not None and expansion["length"] == 14 else {"query_length": 12}
    )
    folder, _ = encoder(tiny_bert(), query_expansion=expansion, **lengths)
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(model_max_length=10))
    edit_json(folder / "sentence_bert_config.json", lambda c: c.update(max_seq_length=9))
    model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), model.encode_query(ASKED))
        assert_all_close(token_vectors(llm, RAGGED), model.encode_document(RAGGED))
        assert len(llm.token_embed(RAGGED[-1], truncate_prompt_tokens=64, use_tqdm=False)[0].prompt_token_ids) <= 64


def test_only_one_length_wins_over_the_tokenizers() -> None:
    folder, _ = encoder(tiny_bert(), document_length=20)
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(model_max_length=10))
    model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, RAGGED), model.encode_document(RAGGED))


def test_pylates_lengths_win_over_what_its_tokenizer_was_last_cut_to() -> None:
    folder = copy_of(FIXTURES / "pylate")
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(model_max_length=11))
    expected = load_file(FIXTURES / "pylate.safetensors")
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, DOCUMENTS), [expected[f"document{i}"] for i in range(len(DOCUMENTS))])


@pytest.mark.parametrize("module", ["2_MultiVectorMask", "4_HierarchicalTokenPooling"])
def test_modules_that_are_about_no_side_do_nothing(module: str) -> None:
    folder, _ = encoder(tiny_bert(), dense(32, 16), HierarchicalTokenPooling(2.0), document_length=20)
    edit_json(folder / module / "config.json", lambda c: c.update({next(k for k in c if k.endswith("tasks")): []}))
    model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, RAGGED), model.encode_document(RAGGED))


# Batches, and how prompts are given.


def test_a_text_has_the_same_vectors_in_any_batch_of_queries_and_documents() -> None:
    params = [PoolingParams(is_query=i % 2 == 0) for i in range(len(QUERIES + DOCUMENTS))]
    with loaded(FIXTURES / "pylate") as llm:
        together = token_vectors(llm, QUERIES + DOCUMENTS, params)
        alone = [token_vectors(llm, text, one)[0] for text, one in zip(QUERIES + DOCUMENTS, params, strict=True)]
    assert_all_close(together, alone, atol=1e-6)


def test_token_ids_are_marked_and_expanded_as_texts_are() -> None:
    with loaded(FIXTURES / "pylate") as llm:
        assert llm.engine.tokenizer is not None
        for texts, is_query in ((QUERIES, True), (DOCUMENTS, False)):
            ids = llm.engine.tokenizer.encode(texts)
            by_ids = token_vectors(llm, [{"prompt_token_ids": one} for one in ids], is_query=is_query)
            assert_all_close(by_ids, token_vectors(llm, texts, is_query=is_query), atol=1e-6)


def test_what_is_cut_is_reported_and_documents_may_be_longer_where_that_is_asked() -> None:
    with loaded(FIXTURES / "pylate") as llm:
        long = DOCUMENTS[1]
        own, longer, shorter = (
            llm.token_embed(long, truncate_prompt_tokens=limit, use_tqdm=False)[0] for limit in (None, 64, 8)
        )
        [query] = llm.token_embed(QUERIES[2], is_query=True, truncate_prompt_tokens=64, use_tqdm=False)
    assert [len(one.prompt_token_ids) for one in (own, longer, shorter, query)] == [20, 54, 8, 12]
    assert [one.num_truncated_tokens > 0 for one in (own, longer, shorter, query)] == [True, False, True, True]


@pytest.mark.parametrize("dimensions", [1, 4, 8])
def test_a_cut_vector_has_unit_length(dimensions: int) -> None:
    with loaded(FIXTURES / "pylate") as llm:
        whole = token_vectors(llm, DOCUMENTS, PoolingParams(normalize=False))
        cut = token_vectors(llm, DOCUMENTS, PoolingParams(dimensions=dimensions))
    assert_all_close(cut, [torch.nn.functional.normalize(one[:, :dimensions], dim=-1) for one in whole], atol=1e-6)


# Scores.


def test_scores_equal_a_double_loop_and_the_query_is_run_once() -> None:
    with loaded(FIXTURES / "pylate") as llm:
        ranked = llm.rerank(QUERIES[0], DOCUMENTS, use_tqdm=False)
        [query], documents = token_vectors(llm, QUERIES[0], is_query=True), token_vectors(llm, DOCUMENTS)
        alone = [llm.rerank(QUERIES[0], [one], use_tqdm=False)[0].relevance_score for one in DOCUMENTS]
    expected = [sum(max(float(q @ d) for d in document) for q in query) for document in documents]
    by_index = {one.index: one.relevance_score for one in ranked}
    assert_close(torch.tensor([by_index[i] for i in range(4)]), torch.tensor(expected))
    assert_close(torch.tensor(alone), torch.tensor(expected))


def test_a_mean_of_maxima_is_divided_by_the_querys_vectors() -> None:
    folder, _ = encoder(tiny_bert(), query_expansion=FIXED)
    edit_json(folder / "config_sentence_transformers.json", lambda c: c.update(similarity_fn_name="meanmaxsim"))
    model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    with loaded(folder) as llm:
        scores = llm.score(ASKED[0], RAGGED, use_tqdm=False)
    expected = model.similarity(model.encode_query(ASKED[:1]), model.encode_document(RAGGED))[0]
    assert_close(torch.tensor([one.outputs.score for one in scores]), expected)


# Token pooling.


@pytest.mark.parametrize("factor", [1.5, 2, 4, 100])
def test_documents_are_pooled_as_sentence_transformers_pools_them(factor: float) -> None:
    folder, model = encoder(tiny_bert(), query_expansion=FIXED)
    pooling = HierarchicalTokenPooling(factor)
    with loaded(folder) as llm:
        queries = token_vectors(llm, ASKED, PoolingParams(is_query=True))
        documents = token_vectors(llm, RAGGED, PoolingParams(pool_factor=factor), truncate_prompt_tokens=-1)
        pooled = llm.score(ASKED[0], RAGGED[1], pooling_params=PoolingParams(pool_factor=factor), use_tqdm=False)
    expected = model.encode_document(RAGGED, token_pooling=pooling)
    assert_all_close(documents, expected)
    assert_all_close(queries, model.encode_query(ASKED))
    assert_close(pooled[0].outputs.data, model.similarity(model.encode_query(ASKED[:1]), expected[1:2])[0, 0])


def test_pooling_that_is_saved_with_the_model_is_done_unless_another_is_asked() -> None:
    folder, model = encoder(tiny_bert(), dense(32, 16), HierarchicalTokenPooling(3.0, num_protected_tokens=2))
    with loaded(folder) as llm:
        own = token_vectors(llm, RAGGED, truncate_prompt_tokens=-1)
        none = token_vectors(llm, RAGGED, PoolingParams(pool_factor=1), truncate_prompt_tokens=-1)
        queries = token_vectors(llm, ASKED, is_query=True)
    assert_all_close(own, model.encode_document(RAGGED))
    assert_all_close(queries, model.encode_query(ASKED))
    assert [len(one) > len(other) for one, other in zip(none, own, strict=True)] == [True] * 4


# What cannot be done.


def test_a_marker_that_is_no_token_is_an_error() -> None:
    folder = copy_of(FIXTURES / "pylate")
    edit_json(folder / "config_sentence_transformers.json", lambda c: c.update(query_prefix="[Query] "))
    with pytest.raises(CheckpointFormatError, match=r"the marker '\[Query\] ', which PyLate puts into each text"):
        LLM(folder, device="cpu")


def test_a_checkpoint_without_its_projection_or_its_tokenizer_is_an_error() -> None:
    folder = copy_of(FIXTURES / "stanford")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "linear.weight"}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"a tensor 'linear\.weight', is missing"):
        LLM(folder, device="cpu")
    with pytest.raises(CheckpointFormatError, match=r"was loaded without one: leave skip_tokenizer_init out"):
        LLM(FIXTURES / "pylate", device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize("name", ["pylate", "multi-vector"])
def test_a_list_of_no_modules_is_an_error(name: str) -> None:
    folder = copy_of(FIXTURES / "pylate" if name == "pylate" else encoder(tiny_bert())[0])
    (folder / "modules.json").write_text("[]")
    with pytest.raises(CheckpointFormatError, match=r"modules\.json lists no modules"):
        LLM(folder, device="cpu")


PYLATE_SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"


@pytest.mark.parametrize(
    ("folder", "file", "key", "value", "what"),
    [
        ("pylate", PYLATE_SETTINGS, "skiplist_words", [1], "not a list of texts"),
        ("pylate", PYLATE_SETTINGS, "query_prefix", 5, "not a text"),
        ("pylate", PYLATE_SETTINGS, "attend_to_expansion_tokens", "false", "not true or false"),
        ("pylate", PYLATE_SETTINGS, "truncate_dim", "8", "not a positive integer"),
        ("stanford", "artifact.metadata", "query_token_id", 7, "not a text"),
        ("encoder", "2_MultiVectorMask/config.json", "skiplist_tasks", 4, "not a list of texts"),
        ("encoder", "4_HierarchicalTokenPooling/config.json", "tasks", 4, "not a list of texts"),
        ("encoder", "4_HierarchicalTokenPooling/config.json", "normalize_embeddings", "no", "not true or false"),
        ("encoder", TRANSFORMER, "query_expansion", {**FIXED, "token": 5}, "token 5, not a text"),
        ("encoder", TRANSFORMER, "modality_config", {"text": "x"}, "not objects by name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_of_the_wrong_kind_are_named(folder: str, file: str, key: str, value: Any, what: str) -> None:
    if folder == "encoder":
        path, _ = encoder(tiny_bert(), dense(32, 16), HierarchicalTokenPooling(2.0), query_expansion=FIXED)
    else:
        path = copy_of(FIXTURES / folder)
    edit_json(path / file, lambda config: config.update({key: value}))
    with pytest.raises(CheckpointFormatError, match=what):
        LLM(path, device="cpu")


def test_expansion_on_the_left_or_longer_than_the_model_takes_is_an_error() -> None:
    folder = copy_of(FIXTURES / "pylate")
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(padding_side="left"))
    with pytest.raises(CheckpointFormatError, match="padding_side 'left', and a query is expanded at its end"):
        LLM(folder, device="cpu")
    with pytest.raises(ConfigError, match="are expanded to 12 tokens, and max_model_len=10 is less"):
        LLM(FIXTURES / "pylate", device="cpu", max_model_len=10)
    with pytest.raises(ConfigError, match="enable_chunked_processing has no meaning for"):
        LLM(FIXTURES / "pylate", device="cpu", pooler_config=PoolerConfig(enable_chunked_processing=True))


def test_a_backbone_that_cannot_leave_keys_out_is_refused_and_runs_where_they_are_attended_to() -> None:
    folder, _ = encoder(backbone("deberta"), query_expansion=FIXED)
    with pytest.raises(CheckpointFormatError, match="expands queries with tokens that are not attended to"):
        LLM(folder, device="cpu")
    folder, model = encoder(backbone("deberta"), query_expansion={**FIXED, "attend": True})
    with loaded(folder) as llm:
        assert_all_close(token_vectors(llm, ASKED, is_query=True), model.encode_query(ASKED))


def test_requests_that_mean_nothing_name_what_is_wrong() -> None:
    folder, _ = encoder(tiny_bert(), skiplist=["[CLS]", "[SEP]", ".", "passage", ":"], query_expansion=FIXED)
    with loaded(folder) as llm:
        for params, message in (
            (PoolingParams(is_query=True, pool_factor=2), "pool_factor=2 has no meaning for queries"),
            (PoolingParams(token_pooling="pylate"), "token_pooling='pylate' needs pool_factor"),
            (
                PoolingParams(token_pooling="ward", pool_factor=2),
                "'ward' is unknown; known: sentence-transformers, pylate",
            ),
            (PoolingParams(dimensions=17), "dimensions=17 is not available .* it supports 1 to 16"),
        ):
            with pytest.raises(InvalidParameterError, match=message):
                llm.token_embed("cat", params)
        with pytest.raises(InvalidParameterError, match=r"is_query=True contradicts PoolingParams\(is_query=False\)"):
            llm.token_embed(["cat"], [PoolingParams(is_query=False)], is_query=True)
        with pytest.raises(InvalidPromptError, match=r"input 1 has no vectors: all of its \d+ tokens are ones that"):
            llm.token_embed(["cat", "..."])
        with pytest.raises(InvalidPromptError, match="reads each text by itself"):
            llm.token_embed({"prompt": "cat", "text_pair": "mat"})
        with pytest.raises(UnsupportedTaskError, match="task 'embed' is not served"):
            llm.embed("cat")
    with loaded(tiny_bert()) as llm:
        with pytest.raises(InvalidParameterError, match=r"is_query=True has no meaning .* no multi-vector model"):
            llm.token_embed("cat", is_query=True)
        with pytest.raises(InvalidParameterError, match=r"pool_factor=0\.5 is not a number from 1"):
            PoolingParams(pool_factor=0.5)


def test_one_vector_per_text_is_served_where_its_pooling_is_said() -> None:
    with loaded(FIXTURES / "pylate", pooler_config=PoolerConfig(pooling_type="MEAN")) as llm:
        assert llm.supported_tasks == ("token_embed", "embed")
        assert llm.embed("cat", use_tqdm=False)[0].outputs.data.shape == (16,)
    with pytest.raises(ConfigError, match=r"convert='embed': .* gives a vector per token; for one per text say how"):
        LLM(FIXTURES / "pylate", device="cpu", convert="embed")
