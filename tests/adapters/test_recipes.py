"""Recipes of embedding models: each family's vectors are those of the library, or of the formula, that it is from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer
from torch import nn

from anypool import PoolerConfig, PoolingParams
from anypool.errors import CheckpointFormatError, InvalidPromptError
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    byte_tokenizer,
    embed,
    loaded,
    new_folder,
    reference,
    save,
    save_sentence_transformer,
    tiny_llama,
    vectors,
    wordpiece_tokenizer,
)

PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


def projection(in_features: int, out_features: int) -> Dense:
    """W x, as EmbeddingGemma has two."""
    torch.manual_seed(in_features)
    return Dense(in_features, out_features, bias=False, activation_function=nn.Identity())


# Prompts that are not pooled


@pytest.mark.parametrize("mode", ["mean", "weightedmean", "max", "cls"])
@pytest.mark.parametrize(
    "engine",
    [{"max_num_batched_tokens": 16}, {"enable_prefix_caching": True, "block_size": 16, "max_num_batched_tokens": 32}],
    ids=["chunks", "prefixes"],
)
def test_a_prompt_is_left_out_of_chunked_and_cached_texts_too(mode: str, engine: dict[str, Any]) -> None:
    folder = save_sentence_transformer(tiny_llama(), Pooling(HIDDEN, mode, include_prompt=False), prompts=PROMPTS)
    expected = reference(folder, RAGGED, prompt_name="query")
    with loaded(folder, **engine) as llm:
        for _ in range(2):  # the second time prefixes come out of the cache
            assert_close(vectors(llm, RAGGED, prompt_name="query"), expected)


# EmbeddingGemma


@cache
def embedding_gemma() -> Path:
    """A Gemma 3 that attends in both directions, two projections and a norm."""
    torch.manual_seed(7)
    tokenizer = byte_tokenizer("<s> $A </s>", model_max_length=MAX_POSITIONS)
    config = hf.Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        sliding_window=20,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        initializer_range=0.2,
        use_bidirectional_attention=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return save_sentence_transformer(
        save(hf.Gemma3TextModel(config), tokenizer, "embedding-gemma"),
        Pooling(HIDDEN, "mean"),
        projection(HIDDEN, 4 * HIDDEN),
        projection(4 * HIDDEN, HIDDEN),
        Normalize(),
        prompts=PROMPTS,
    )


@pytest.mark.parametrize("prompt_name", [None, "query", "document"])
def test_embedding_gemma_equals_sentence_transformers(prompt_name: str | None) -> None:
    folder = embedding_gemma()
    options = {} if prompt_name is None else {"prompt_name": prompt_name}
    expected = reference(folder, RAGGED, **options)
    with loaded(folder, model_impl="native") as llm:
        together = vectors(llm, RAGGED, **options)
        alone = torch.cat([vectors(llm, [text], **options) for text in RAGGED])
    assert_close(together, expected, atol=1e-6)
    assert_close(alone, together, atol=1e-6)


def test_embedding_gemma_is_cut_and_then_normalised() -> None:
    expected = reference(embedding_gemma(), RAGGED, truncate_dim=8, normalize_embeddings=True)
    assert_close(embed(embedding_gemma(), RAGGED, engine={"pooler_config": PoolerConfig(dimensions=8)}), expected)


# Tables of token vectors


UNKNOWN = "cat ☃ mat ☃ story"


def token_vectors(rows: int, size: int = HIDDEN) -> torch.Tensor:
    torch.manual_seed(8)
    return torch.randn(rows, size)


@pytest.mark.parametrize("normalized", [True, False], ids=["normalized", "raw"])
def test_static_embedding_equals_sentence_transformers(normalized: bool) -> None:
    tokenizer = wordpiece_tokenizer()
    module = StaticEmbedding(tokenizer, embedding_weights=token_vectors(len(tokenizer)))
    folder = new_folder("static")
    SentenceTransformer(modules=[module, *[Normalize()] * normalized], device="cpu", prompts=PROMPTS).save(str(folder))
    texts = [*RAGGED, UNKNOWN]
    assert_close(embed(folder, texts), reference(folder, texts), atol=1e-6)
    assert_close(embed(folder, texts, prompt_name="query"), reference(folder, texts, prompt_name="query"), atol=1e-6)


def test_static_embedding_with_a_projection_and_a_cut_equals_sentence_transformers() -> None:
    tokenizer = byte_tokenizer("<s> $A </s>")
    module = StaticEmbedding(tokenizer, embedding_weights=token_vectors(len(tokenizer)))
    folder = new_folder("static")
    SentenceTransformer(modules=[module, projection(HIDDEN, 48)], device="cpu", truncate_dim=24).save(str(folder))
    assert_close(embed(folder, RAGGED), reference(folder, RAGGED, truncate_dim=24))


def model2vec(*, rows: int | None = None, weighted: bool = False, **config: Any) -> Path:
    """A folder as model2vec writes it; with fewer `rows` than tokens, those of a vocabulary-quantised model."""
    folder = new_folder("model2vec")
    tokenizer = wordpiece_tokenizer()
    tensors = {"embeddings": token_vectors(rows or len(tokenizer))}
    if rows is not None:
        tensors["mapping"] = torch.arange(len(tokenizer)) * 7 % rows
    if weighted:
        tensors["weights"] = torch.rand(len(tokenizer)) + 0.5
    save_file(tensors, folder / "model.safetensors")
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": HIDDEN, **config})
    )
    return folder


def by_formula(folder: Path, text: str) -> torch.Tensor:
    """What model2vec computes: the mean of weights[i] embeddings[mapping[i]] over the known tokens i."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    unknown = tokenizer.token_to_id("[UNK]")
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False).ids if i != unknown]
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["mapping"][ids] if "mapping" in tensors else ids
    weights = tensors["weights"][ids] if "weights" in tensors else torch.ones(len(ids))
    return (tensors["embeddings"][rows] * weights[:, None]).mean(dim=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"weighted": True}, {"rows": 19}, {"rows": 19, "weighted": True}],
    ids=["plain", "w", "map", "map-w"],
)
def test_model2vec_equals_its_formula(options: dict[str, Any]) -> None:
    texts = [*RAGGED, UNKNOWN]
    folder = model2vec(**options)
    expected = torch.stack([by_formula(folder, text) for text in texts])
    assert_close(embed(folder, texts), expected, atol=1e-6)
    normalized = model2vec(**options, normalize=True)
    expected = torch.stack([by_formula(normalized, text) for text in texts])
    assert_close(embed(normalized, texts), nn.functional.normalize(expected, dim=-1), atol=1e-6)


def test_model2vec_with_modules_equals_sentence_transformers() -> None:
    folder = model2vec(rows=19, weighted=True, normalize=True)
    kind = "sentence_transformers.models."
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": ".", "type": kind + "StaticEmbedding"},
                {"idx": 1, "name": "1", "path": "1_Normalize", "type": kind + "Normalize"},
            ]
        )
    )
    texts = [*RAGGED, UNKNOWN]
    assert_close(embed(folder, texts), reference(folder, texts), atol=1e-6)


def test_token_vectors_of_a_table_are_its_rows() -> None:
    folder = model2vec()
    with loaded(folder) as llm:
        [output] = llm.token_embed([UNKNOWN], PoolingParams(normalize=False), use_tqdm=False)
    ids = [Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(word) for word in ("cat", "mat", "story")]
    assert_close(output.outputs.data, token_vectors(len(wordpiece_tokenizer()))[ids], atol=0)


def test_a_text_without_tokens_is_refused_where_a_table_has_no_special_ones() -> None:
    with loaded(model2vec()) as llm, pytest.raises(InvalidPromptError, match="input 1 has no tokens"):
        vectors(llm, ["cat", "☃"])


def test_a_table_that_is_none_is_refused() -> None:
    folder = model2vec()
    save_file({"vectors": torch.ones(3, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"a matrix 'embedding.weight' or 'embeddings'"), loaded(folder):
        pass
