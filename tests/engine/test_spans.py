"""A span's vector is the mean of its tokens' states, of one forward over the whole text: late chunking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.functional import normalize

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.errors import (
    InvalidParameterError,
    InvalidPromptError,
    PromptTooLongError,
    UnsupportedTaskError,
)
from tests.engine.test_windows import MINILM, SIZE, TEXT, joined, states, words
from tests.helpers import HIDDEN, assert_close, loaded, save_sentence_transformer, tiny_bert, tiny_llama

Spans = list[tuple[int, int]]

TEXT_1 = "Berlin is the capital of Germany. It has 3.8 million inhabitants; the Spree flows through it. Größe: 891 km²."
SENTENCES = [(0, 33), (34, 93), (94, len(TEXT_1))]


def tokens_of(folder: Path | str, text: str, span: tuple[int, int]) -> list[int]:
    """Places of the tokens that share a character with the span; special ones stand nowhere."""
    places = words(folder)(text, return_offsets_mapping=True)["offset_mapping"]
    return [i for i, (start, end) in enumerate(places) if max(start, span[0]) < min(end, span[1])]


def of_spans(llm: LLM, prompts: Any, spans: Any, *params: Any, **options: Any) -> torch.Tensor:
    [output] = llm.embed_spans(prompts, spans, *params, use_tqdm=False, **options)
    return output.outputs.data


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    with loaded(MINILM, dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with loaded(tiny_bert()) as llm:
        yield llm


def test_minilm_gives_the_means_of_the_states_of_sentences(minilm: LLM) -> None:
    ids = words(MINILM)(TEXT_1)["input_ids"]
    rows = states(MINILM, ids)
    places = [tokens_of(MINILM, TEXT_1, span) for span in SENTENCES]
    expected = torch.stack([rows[place].mean(dim=0) for place in places])
    [output] = minilm.embed_spans(TEXT_1, SENTENCES, use_tqdm=False)
    assert_close(output.outputs.data, normalize(expected, dim=-1))
    assert output.outputs.token_spans == [(place[0], place[-1] + 1) for place in places]
    assert [output.prompt_token_ids[a:b] for a, b in output.outputs.token_spans] == [
        [ids[i] for i in place] for place in places
    ]
    assert output.num_windows == 1
    assert output.outputs.embeddings == output.outputs.data.tolist()
    cut = of_spans(minilm, TEXT_1, SENTENCES, PoolingParams(dimensions=50, normalize=False))
    assert_close(cut, expected[:, :50])


def test_the_span_of_all_tokens_is_the_embedding(minilm: LLM) -> None:
    [whole] = minilm.embed(TEXT_1, use_tqdm=False)
    every = (0, len(whole.prompt_token_ids))
    assert_close(of_spans(minilm, TEXT_1, [every], unit="tokens")[0], whole.outputs.data, atol=1e-6)


@pytest.mark.parametrize("make", [tiny_bert, tiny_llama])
def test_any_spans_of_characters_cover_the_tokens_they_touch(make: Callable[[], Path]) -> None:
    text = "the cat's ½ story: Größe, said none 🐈 a mat"
    spans = [(start, end) for start in range(len(text)) for end in range(start + 1, len(text) + 1)]
    covered = [(span, tokens_of(make(), text, span)) for span in spans]
    kept = [(span, places) for span, places in covered if places]
    assert len(kept) > 500
    rows = states(make(), words(make())(text)["input_ids"])
    expected = torch.stack([rows[places].mean(dim=0) for _, places in kept])
    with loaded(make(), pooler_config=PoolerConfig(pooling_type="MEAN", normalize=False)) as llm:
        assert_close(of_spans(llm, text, [span for span, _ in kept]), expected)


def test_spans_of_tokens_count_the_ids_that_are_run(llm: LLM) -> None:
    ids = [2, 17, 9, 30, 12, 3]
    rows = states(tiny_bert(), ids)
    spans = [(0, 1), (1, 6), (2, 3), (0, 6)]
    expected = normalize(torch.stack([rows[a:b].mean(dim=0) for a, b in spans]), dim=-1)
    assert_close(of_spans(llm, [ids], [spans], unit="tokens"), expected)
    assert_close(of_spans(llm, ids, numpy.array(spans), unit="tokens"), expected)
    assert_close(of_spans(llm, [ids], numpy.array([spans]), unit="tokens"), expected)
    assert_close(of_spans(llm, {"prompt_token_ids": ids}, spans, unit="tokens"), expected)


def test_spans_of_several_texts_and_texts_without_go_in_one_batch(llm: LLM) -> None:
    texts, spans = ["the cat sat", "a long story", "mat"], [[(0, 3), (4, 7)], [(2, 6)], [(0, 3)]]
    outputs = llm.embed_spans(texts, spans, use_tqdm=False)
    for text, places, output in zip(texts, spans, outputs, strict=True):
        assert_close(output.outputs.data, of_spans(llm, text, places), atol=1e-6)
        assert output.outputs.data.shape == (len(places), HIDDEN)
    assert llm.embed_spans([], [], use_tqdm=False) == []


def test_a_prompt_is_read_and_not_counted(llm: LLM) -> None:
    prompt, text = "a query: ", "the cat sat"
    rows = states(tiny_bert(), words(tiny_bert())(prompt + text)["input_ids"])
    places = tokens_of(tiny_bert(), prompt + text, (len(prompt) + 4, len(prompt) + 7))
    expected = normalize(rows[places].mean(dim=0), dim=0)
    assert_close(of_spans(llm, text, [(4, 7)], prompt=prompt)[0], expected)


def test_the_models_own_modules_follow() -> None:
    torch.manual_seed(9)
    folder = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), Dense(HIDDEN, 12))
    dense = load_file(folder / "2_Dense" / "model.safetensors")
    rows = states(tiny_bert(), words(tiny_bert())(TEXT_1)["input_ids"])
    means = torch.stack([rows[tokens_of(tiny_bert(), TEXT_1, span)].mean(dim=0) for span in SENTENCES])
    expected = torch.tanh(means @ dense["linear.weight"].T + dense["linear.bias"])
    with loaded(folder) as llm:
        assert_close(of_spans(llm, TEXT_1, SENTENCES), expected)


@pytest.mark.parametrize("overlap", [None, 0, 9])
def test_spans_of_a_text_in_windows(overlap: int | None) -> None:
    ids = words(tiny_bert())(TEXT)["input_ids"]
    rows = joined(ids, SIZE, 2 if overlap is None else overlap, lambda part: states(tiny_bert(), part))
    spans = [(0, 3), (30, 400), (0, len(TEXT)), (len(TEXT) - 4, len(TEXT)), (500, 502), (100, 400)]
    expected = torch.stack([rows[tokens_of(tiny_bert(), TEXT, span)].mean(dim=0) for span in spans])
    config = PoolerConfig(enable_chunked_processing=True, chunk_overlap=overlap)
    with loaded(tiny_bert(), max_model_len=SIZE, pooler_config=config) as llm:
        [output] = llm.embed_spans(TEXT, spans, use_tqdm=False)
        assert_close(output.outputs.data, normalize(expected, dim=-1))
        assert output.num_windows > 2
        [two] = llm.embed_spans(TEXT, [(0, 3), (len(TEXT) - 4, len(TEXT))], use_tqdm=False)
        assert two.num_windows < output.num_windows  # those that hold no span are not run
        assert_close(two.outputs.data, normalize(expected[[0, 3]], dim=-1))
        raw = of_spans(llm, TEXT, spans, PoolingParams(dimensions=7, normalize=False))
        assert_close(raw, expected[:, :7])


def test_a_text_that_is_too_long_is_refused_and_one_that_is_cut_keeps_its_spans(llm: LLM) -> None:
    text = "cat " * 200
    with pytest.raises(PromptTooLongError, match="input 0 has 202 tokens"):
        of_spans(llm, text, [(0, 3)])
    kept = of_spans(llm, text, [(0, 7)], truncate_prompt_tokens=10)
    assert_close(kept, of_spans(llm, "cat " * 8, [(0, 7)]), atol=1e-6)
    left = of_spans(llm, text, [(796, 799)], truncate_prompt_tokens=10, truncation_side="left")
    assert_close(left, of_spans(llm, "cat " * 8, [(28, 31)]), atol=1e-6)
    with pytest.raises(InvalidParameterError, match=r"the span \(400, 403\), 'cat', covers no token that is run"):
        of_spans(llm, text, [(400, 403)], truncate_prompt_tokens=10)


@pytest.mark.parametrize("kind", ["CLS", "LAST", "MAX", "WEIGHTED_MEAN", "MEAN+CLS"])
def test_only_a_mean_can_be_that_of_a_span(kind: str) -> None:
    with (
        loaded(tiny_bert(), pooler_config=PoolerConfig(pooling_type=kind)) as llm,
        pytest.raises(UnsupportedTaskError, match=rf"pools by {kind.replace('+', '[+]')}: .*pooling_type='MEAN'"),
    ):
        of_spans(llm, "cat", [(0, 3)])


@pytest.mark.parametrize(
    ("prompt", "spans", "options", "kind", "match"),
    [
        ("cat", [], {}, InvalidParameterError, r"input 0: spans=\[\] is not a list of pairs"),
        ("cat", None, {}, InvalidParameterError, "spans=None is not a list of pairs"),
        ("cat", "0-3", {}, InvalidParameterError, "spans='0-3' is not a list of pairs"),
        ("cat", (0, 3), {}, InvalidParameterError, "spans has 0, which is not a pair"),
        ("cat", [(0, 3, 4)], {}, InvalidParameterError, r"spans has \(0, 3, 4\), which is not a pair"),
        ("cat", [(0, 1.5)], {}, InvalidParameterError, r"spans has \(0, 1.5\), which is not a pair of integers"),
        ("cat", [(False, True)], {}, InvalidParameterError, r"spans has \(False, True\), which is not a pair"),
        ("cat", ["03"], {}, InvalidParameterError, "spans has '03', which is not a pair"),
        ("cat", [(-1, 3)], {}, InvalidParameterError, r"spans has \(-1, 3\); a span starts at 0 or later"),
        ("cat", [(2, 1)], {}, InvalidParameterError, r"spans has \(2, 1\); a span .* ends after its start"),
        ("cat", [(1, 1)], {}, InvalidParameterError, r"spans has \(1, 1\); a span .* ends after its start"),
        ("cat", [(0, 4)], {}, InvalidParameterError, r"spans has \(0, 4\), and there are 3 characters"),
        ("a   b", [(0, 1), (2, 4)], {}, InvalidParameterError, r"the span \(2, 4\), '  ', covers no token"),
        ("cat", [(0, 4)], {"unit": "tokens"}, InvalidParameterError, r"spans has \(0, 4\), and there are 3 tokens"),
        ("cat", [(0, 1)], {"unit": "words"}, InvalidParameterError, "unit='words' is neither"),
        ([2, 5, 3], [(0, 1)], {}, InvalidParameterError, "token ids have no characters: pass unit='tokens'"),
        (["cat", "mat"], [[(0, 1)]], {}, InvalidParameterError, "2 prompts need a list of as many lists of spans"),
        (["cat", "mat"], [[(0, 1)], [(0, 9)]], {}, InvalidParameterError, r"input 1: spans has \(0, 9\)"),
        (["cat"], None, {}, InvalidParameterError, "1 prompts need a list of as many lists of spans"),
        ([3.5], [[(0, 1)]], {}, InvalidPromptError, "input 0 is 3.5"),
        ("cat", [(0, 1)], {"prompt_name": "x"}, InvalidParameterError, "prompt_name='x' is unknown"),
    ],
    ids=str,
)
def test_spans_that_cannot_be_served_are_refused(
    llm: LLM, prompt: Any, spans: Any, options: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match) as caught:
        llm.embed_spans(prompt, spans, use_tqdm=False, **options)
    assert type(caught.value) is kind
    assert of_spans(llm, "cat", [(0, 3)]).isfinite().all()
