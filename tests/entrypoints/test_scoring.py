"""`score` and `rerank`: pairs, errors, and what the model does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling

from anypool import LLM, ModelRegistry, PoolingParams, PoolingTask, register_model
from anypool.errors import (
    CheckpointFormatError,
    InvalidParameterError,
    InvalidPromptError,
    PromptTooLongError,
    UnsupportedTaskError,
)
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.bert import BertModel
from anypool.pooling.methods import PoolingType
from anypool.pooling.plan import ScoreDefaults
from anypool.pooling.pooler import DispatchPooler, EmbedPooler, ScorePooler
from tests.adapters.test_cross_encoder import bert, reference
from tests.helpers import (
    HIDDEN,
    RAGGED,
    assert_close,
    copy_of,
    edit_json,
    loaded,
    save_sentence_transformer,
    tiny_bert,
)

FIRST = ["the cat", *RAGGED]
SECOND = ["a mat", *reversed(RAGGED)]
PROMPTS = {"query": "the query: ", "document": "a long passage: "}


@cache
def embedder() -> Path:
    return save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), prompts=PROMPTS)


@pytest.fixture(scope="module")
def cross_encoder() -> Iterator[LLM]:
    with loaded(bert()) as llm:
        yield llm


@pytest.fixture(scope="module")
def embedding_model() -> Iterator[LLM]:
    with loaded(embedder()) as llm:
        yield llm


def scores(llm: LLM, first: Any, second: Any, **options: Any) -> torch.Tensor:
    return torch.tensor([output.outputs.score for output in llm.score(first, second, use_tqdm=False, **options)])


# Pairs


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("cat", "mat", [("cat", "mat")]),
        ("cat", ["mat"], [("cat", "mat")]),
        (["cat"], "mat", [("cat", "mat")]),
        ("cat", ["mat", "", "cat"], [("cat", "mat"), ("cat", ""), ("cat", "cat")]),
        (["cat"], ["mat", "a"], [("cat", "mat"), ("cat", "a")]),
        (["cat", "mat"], ["mat", "cat"], [("cat", "mat"), ("mat", "cat")]),
        (("cat", "cat"), ("mat", "mat"), [("cat", "mat"), ("cat", "mat")]),
        ("cat", iter(["mat", "a"]), [("cat", "mat"), ("cat", "a")]),
        ("cat", {1: "mat", 2: "a"}.values(), [("cat", "mat"), ("cat", "a")]),
        (numpy.array(["cat", "a"]), numpy.array(["mat", "b"]), [("cat", "mat"), ("a", "b")]),
    ],
)
def test_one_with_one_one_with_several_and_as_many_with_as_many(
    cross_encoder: LLM, first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    assert_close(scores(cross_encoder, first, second), reference(bert(), pairs))


@pytest.mark.parametrize("model", ["cross_encoder", "embedding_model"])
def test_no_pairs_give_no_scores(model: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(model)
    assert llm.score("cat", [], use_tqdm=False) == []
    assert llm.score([], [], use_tqdm=False) == []
    assert llm.rerank("cat", [], use_tqdm=False) == []


@pytest.mark.parametrize("model", ["cross_encoder", "embedding_model"])
@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        (["a", "b"], ["c"], "2 texts cannot be paired with 1: give one and any number, or as many on both sides"),
        (["a", "b"], "c", "2 texts cannot be paired with 1"),
        (["a", "b"], ["c", "d", "e"], "2 texts cannot be paired with 3"),
        ([], ["c"], "0 texts cannot be paired with 1"),
        (3, "c", "data_1 must be a text or a list of texts, and is of type int"),
        ("a", None, "data_2 must be a text or a list of texts, and is of type NoneType"),
        ("a", b"bytes", "data_2 must be a text or a list of texts, and is of type bytes"),
        ("a", {"text": "b"}, "data_2 must be a text or a list of texts, and is of type dict"),
        ("a", {"b"}, "data_2 must be a text or a list of texts, and is of type set"),
        ("a", ["b", 3], "data_2 has 3 at 1, which is not a text"),
        ("a", [[2, 3]], r"data_2 has \[2, 3\] at 0"),
        (["a", None], ["b", "c"], "data_1 has None at 1"),
        ("a", ["b", "\ud800"], "data_2 1 is not valid Unicode"),
    ],
)
def test_what_are_no_pairs_is_refused(
    model: str, request: pytest.FixtureRequest, first: Any, second: Any, match: str
) -> None:
    with pytest.raises(InvalidPromptError, match=match):
        request.getfixturevalue(model).score(first, second, use_tqdm=False)


# Cross-encoders


def test_the_prompt_of_a_pair_is_that_of_both_texts(cross_encoder: LLM) -> None:
    [output] = cross_encoder.score("cat", "the mat", use_tqdm=False)
    tokenizer = cross_encoder.engine.tokenizer
    assert tokenizer is not None
    [first, second] = tokenizer.encode(["cat", "the mat"], special_tokens=False)
    assert output.prompt_token_ids == [2, *first, 3, *second, 3]
    assert output.num_truncated_tokens == 0
    assert output.finished
    assert output.outputs.data.shape == ()
    assert output.outputs.data.dtype is torch.float32


def test_pairs_are_cut_unless_the_user_wants_an_error(cross_encoder: LLM) -> None:
    [output] = cross_encoder.score(RAGGED[1], RAGGED[1], truncate_prompt_tokens=20, use_tqdm=False)
    assert len(output.prompt_token_ids) == 20
    [whole] = cross_encoder.score(RAGGED[1], RAGGED[1], use_tqdm=False)
    assert whole.num_truncated_tokens + 160 == output.num_truncated_tokens + 20
    with pytest.raises(PromptTooLongError, match=r"input 1 has 273 tokens, the limit is 160"):
        cross_encoder.score(RAGGED[1], ["a", RAGGED[1]], truncate_prompt_tokens=None, use_tqdm=False)
    with pytest.raises(InvalidPromptError, match="truncate_prompt_tokens=2 leaves no room"):
        cross_encoder.score("cat", "mat", truncate_prompt_tokens=2, use_tqdm=False)


def test_a_pair_that_no_vocabulary_could_fit_is_refused_before_it_is_tokenised(
    cross_encoder: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = cross_encoder.engine.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **options: pytest.fail("it was tokenised"))
    for options in ({}, {"chat_template": "{{ messages[0].content }} {{ messages[1].content }}"}):
        with pytest.raises(PromptTooLongError, match=r"input 1 has [\d,]+ characters, and the limit is 160 tokens"):
            cross_encoder.score("cat", ["a", "b" * 50_000], truncate_prompt_tokens=None, use_tqdm=False, **options)


def test_an_activation_is_for_one_call(cross_encoder: LLM) -> None:
    raw = scores(cross_encoder, "cat", SECOND, pooling_params=PoolingParams(activation="none"))
    assert_close(scores(cross_encoder, "cat", SECOND), raw.sigmoid(), atol=1e-6)
    assert_close(scores(cross_encoder, "cat", SECOND, pooling_params=PoolingParams(use_activation=False)), raw)
    with pytest.raises(InvalidParameterError, match=r"dimensions=3 has no meaning"):
        scores(cross_encoder, "cat", SECOND, pooling_params=PoolingParams(dimensions=3))


def test_several_labels_have_no_score() -> None:
    with loaded(bert(3)) as llm:
        for call in (lambda: llm.score("cat", "mat"), lambda: llm.rerank("cat", ["mat"])):
            with pytest.raises(UnsupportedTaskError, match=r"has 3 labels, and a score is one number: call classify"):
                call()


@pytest.mark.parametrize("model", ["cross_encoder", "embedding_model"])
def test_the_parameters_of_scores_are_one_object(model: str, request: pytest.FixtureRequest) -> None:
    for wrong in ([PoolingParams()], {"activation": "none"}):
        with pytest.raises(InvalidParameterError, match="is not a PoolingParams; pairs of a call share one"):
            request.getfixturevalue(model).score("cat", "mat", pooling_params=wrong, use_tqdm=False)


def test_a_softmax_over_the_one_label_is_refused(cross_encoder: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="'softmax' of a single score is always 1: use 'sigmoid'"):
        scores(cross_encoder, "cat", SECOND, pooling_params=PoolingParams(activation="softmax"))


# Embedding models


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan", None])
def test_embeddings_are_compared_as_the_checkpoint_says(name: str | None, normalized: bool) -> None:
    modules = [Normalize()] if normalized else []
    folder = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), *modules, similarity_fn_name=name)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    expected = model.similarity_pairwise(
        *(model.encode(texts, convert_to_tensor=True, show_progress_bar=False) for texts in (FIRST, SECOND))
    )
    with loaded(folder) as llm:
        assert_close(scores(llm, FIRST, SECOND), expected)


def test_an_unknown_similarity_stops_the_load() -> None:
    folder = copy_of(embedder())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(similarity_fn_name="jaccard"))
    with pytest.raises(CheckpointFormatError, match="similarity_fn_name 'jaccard'; known: cosine, dot, euclidean"):
        LLM(folder, device="cpu")


def test_the_prompt_of_two_embeddings_is_both_and_what_was_cut_is_summed(embedding_model: LLM) -> None:
    outputs = embedding_model.score(["cat"], ["mat", RAGGED[1]], truncate_prompt_tokens=10, use_tqdm=False)
    [query, *documents] = embedding_model.embed(["cat", "mat", RAGGED[1]], truncate_prompt_tokens=10, use_tqdm=False)
    for output, document in zip(outputs, documents, strict=True):
        assert output.prompt_token_ids == query.prompt_token_ids + document.prompt_token_ids
        assert output.num_truncated_tokens == document.num_truncated_tokens
    assert outputs[1].num_truncated_tokens > 100


def test_each_text_is_embedded_once(embedding_model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    prepare = embedding_model.engine.prepare
    monkeypatch.setattr(
        embedding_model.engine, "prepare", lambda texts, *rest: seen.extend(texts) or prepare(texts, *rest)
    )
    embedding_model.score(["a", "a", "b"], ["c", "d", "c"], use_tqdm=False)
    assert seen == ["a", "b", "c", "d"]


def test_dimensions_cut_what_is_compared(embedding_model: LLM) -> None:
    params = PoolingParams(dimensions=8)
    vectors = [output.outputs.data for output in embedding_model.embed(["cat", "mat"], params, use_tqdm=False)]
    expected = torch.cosine_similarity(vectors[0], vectors[1], dim=0)
    assert_close(scores(embedding_model, "cat", "mat", pooling_params=params), expected.unsqueeze(0))
    with pytest.raises(InvalidParameterError, match="activation='none' has no meaning for task 'embed'"):
        scores(embedding_model, "cat", "mat", pooling_params=PoolingParams(activation="none"))


# rerank


@pytest.mark.parametrize("top_n", [None, 0, 1, 3, 100])
def test_rerank_gives_the_best_first(cross_encoder: LLM, top_n: int | None) -> None:
    expected = scores(cross_encoder, "cat", SECOND)
    results = cross_encoder.rerank("cat", SECOND, top_n, use_tqdm=False)
    order = expected.argsort(descending=True).tolist()[: top_n or None]
    assert [result.index for result in results] == order
    assert [result.document for result in results] == [SECOND[i] for i in order]
    assert_close(torch.tensor([result.relevance_score for result in results]), expected[order], atol=1e-6)


def test_documents_of_equal_scores_stay_in_their_order(cross_encoder: LLM, embedding_model: LLM) -> None:
    for llm in (cross_encoder, embedding_model):
        results = llm.rerank("cat", ["mat", "a story", "mat", "mat"], use_tqdm=False)
        assert [result.index for result in results if result.document == "mat"] == [0, 2, 3]


@pytest.mark.parametrize(
    ("query", "documents", "top_n", "match"),
    [
        (3, ["a"], None, "query=3 is not a text"),
        (["a"], ["a"], None, r"query=\['a'\] is not a text"),
        ("a", "abc", None, "documents='abc' is one text; give a list of texts"),
        ("a", None, None, "documents must be a text or a list of texts"),
        ("a", ["b", None], None, "documents has None at 1"),
        ("\udfff", ["b"], None, "query is not valid Unicode"),
        ("a", ["b"], -1, "top_n=-1 is not a number of documents"),
        ("a", ["b"], 1.5, "top_n=1.5 is not a number of documents"),
        ("a", ["b"], True, "top_n=True is not a number of documents"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    cross_encoder: LLM, query: Any, documents: Any, top_n: Any, match: str
) -> None:
    with pytest.raises((InvalidPromptError, InvalidParameterError), match=match):
        cross_encoder.rerank(query, documents, top_n, use_tqdm=False)


def ranked(folder: Path, **options: Any) -> torch.Tensor:
    with loaded(folder) as llm:
        results = llm.rerank("cat", SECOND, use_tqdm=False, **options)
    return torch.tensor([r.relevance_score for r in sorted(results, key=lambda result: result.index)])


def compared(folder: Path, query: Callable[..., Any], document: Callable[..., Any]) -> torch.Tensor:
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return model.similarity(query(model), document(model))[0]


def test_rerank_puts_the_checkpoints_prompts_before_query_and_documents() -> None:
    folder = save_sentence_transformer(
        tiny_bert(), Pooling(HIDDEN, "mean"), prompts=PROMPTS | {"other": "none "}, default_prompt_name="other"
    )
    by_role = compared(folder, lambda m: m.encode_query(["cat"]), lambda m: m.encode_document(SECOND))
    assert_close(ranked(folder), by_role)
    # a prompt of the user's stands before both, and so does the default one for `score`, which knows no roles
    by_name = compared(
        folder, lambda m: m.encode(["cat"], prompt_name="query"), lambda m: m.encode(SECOND, prompt_name="query")
    )
    assert_close(ranked(folder, prompt_name="query"), by_name)
    given = compared(folder, lambda m: m.encode(["cat"], prompt="a "), lambda m: m.encode(SECOND, prompt="a "))
    assert_close(ranked(folder, prompt="a "), given)
    default = compared(folder, lambda m: m.encode(["cat"]), lambda m: m.encode(SECOND))
    with loaded(folder) as llm:
        assert_close(scores(llm, "cat", SECOND), default)
    assert (by_role - default).abs().max() > 1e-3


def test_a_prompt_for_roles_that_is_empty_takes_the_place_of_the_default_one() -> None:
    folder = save_sentence_transformer(
        tiny_bert(), Pooling(HIDDEN, "mean"), prompts={"other": "the none "}, default_prompt_name="other"
    )
    by_role = compared(folder, lambda m: m.encode_query(["cat"]), lambda m: m.encode_document(SECOND))
    assert_close(ranked(folder), by_role)


@pytest.mark.parametrize("name", ["passage", "corpus"])
def test_prompts_for_documents_have_other_names_too(name: str) -> None:
    folder = save_sentence_transformer(
        tiny_bert(), Pooling(HIDDEN, "mean"), prompts={"query": "the query: ", name: "a long passage: "}
    )
    by_name = compared(
        folder, lambda m: m.encode(["cat"], prompt_name="query"), lambda m: m.encode(SECOND, prompt_name=name)
    )
    assert_close(ranked(folder), by_name)


# Classes of one's own


class LateBert(BertModel):
    score_type = "late-interaction"


@pytest.fixture
def late_interaction(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(ModelRegistry, "_own", {})
    register_model("LateBert", LateBert)
    folder = copy_of(embedder())
    edit_json(folder / "config.json", lambda config: config.update(architectures=["LateBert"]))
    with loaded(folder) as llm:
        yield llm


def test_late_interaction_is_a_loop_over_the_tokens(late_interaction: LLM) -> None:
    rows = {
        text: output.outputs.data
        for text in {*FIRST, *SECOND}
        for output in late_interaction.token_embed(text, use_tqdm=False)
    }
    expected = [sum(max(float(q @ d) for d in rows[b]) for q in rows[a]) for a, b in zip(FIRST, SECOND, strict=True)]
    assert_close(scores(late_interaction, FIRST, SECOND), torch.tensor(expected))
    [output] = late_interaction.score("cat", "mat", use_tqdm=False)
    both = late_interaction.embed(["cat", "mat"], use_tqdm=False)
    assert output.prompt_token_ids == both[0].prompt_token_ids + both[1].prompt_token_ids
    ranking = late_interaction.rerank("cat", ["a story", "cat", "mat"], use_tqdm=False)
    assert sorted(result.index for result in ranking) == [0, 1, 2]
    assert ranking == sorted(ranking, key=lambda result: -result.relevance_score)
    assert late_interaction.score([], [], use_tqdm=False) == []


@pytest.mark.parametrize("option", [{"instruction": "do"}, {"chat_template": "{{ messages[0].content }}"}])
def test_late_interaction_reads_no_template(late_interaction: LLM, option: dict[str, str]) -> None:
    [name] = option
    with pytest.raises(InvalidParameterError, match=f"reads each text by itself, so it takes no {name}"):
        late_interaction.score("cat", "mat", use_tqdm=False, **option)


def test_a_late_interaction_class_with_a_head_compares_tokens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_own", {})
    register_model("LateBertForSequenceClassification", LateBert)
    with loaded(bert(), hf_overrides={"architectures": ["LateBertForSequenceClassification"]}) as llm:
        assert "classify" in llm.supported_tasks
        rows = [output.outputs.data for output in llm.token_embed(["cat", "mat"], use_tqdm=False)]
        assert_close(scores(llm, "cat", "mat"), (rows[0] @ rows[1].T).amax(dim=1).sum().unsqueeze(0))


class JudgingBert(BertModel):
    """A pooler of its own that embeds and classifies; `judge` is a tensor of its checkpoint."""

    is_pooling_model = True
    labels: ClassVar[int] = 1
    score_defaults: ClassVar[dict[PoolingTask, ScoreDefaults]] = {
        PoolingTask.CLASSIFY: ScoreDefaults(activation="sigmoid", columns=1)
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.judge = Linear(config.hidden_size, self.labels)
        self.pooler = DispatchPooler(
            {
                PoolingTask.EMBED: EmbedPooler((PoolingType.MEAN,)),
                PoolingTask.CLASSIFY: ScorePooler((PoolingType.MAX,), self.judge),
            }
        )


class ThreeWayBert(JudgingBert):
    labels = 3
    score_defaults: ClassVar[dict[PoolingTask, ScoreDefaults]] = {
        PoolingTask.CLASSIFY: ScoreDefaults(activation="softmax", columns=3)
    }


@pytest.mark.parametrize("model_cls", [JudgingBert, ThreeWayBert])
def test_a_class_with_a_pooler_of_its_own_scores_pairs_where_it_has_one_label(
    model_cls: type[JudgingBert], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRegistry, "_own", {})
    register_model("JudgingBert", model_cls)
    folder = copy_of(tiny_bert())
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"judge.weight": torch.randn(model_cls.labels, HIDDEN)}, folder / "model.safetensors")
    edit_json(folder / "config.json", lambda config: config.update(architectures=["JudgingBert"]))
    with loaded(folder) as llm:
        [output] = llm.score("cat", "mat", use_tqdm=False)
        if model_cls.labels == 1:
            [judged] = llm.classify([output.prompt_token_ids], use_tqdm=False)
            assert output.prompt_token_ids.count(3) == 2  # one [CLS] and two [SEP]: both texts in one prompt
            assert_close(output.outputs.data, judged.outputs.data[0])
        else:
            a_E, b_E = (embedding.outputs.data for embedding in llm.embed(["cat", "mat"], use_tqdm=False))
            assert_close(output.outputs.data, torch.cosine_similarity(a_E, b_E, dim=0))
