"""On a GPU: modules of transformers, pairs, token vectors, sparse vectors and images give what the libraries do.

As in test_parity.py the reference is the library's own answer on a CPU, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from anypool import LLM, maxsim
from tests import rerankers
from tests.adapters import test_cross_encoder as cross_encoders
from tests.adapters import test_late_interaction as late_interaction
from tests.adapters import test_sparse as sparse
from tests.gpu.test_parity import EAGER, LENGTHS, MEAN, TOLERANCE, embeddings, mean_of, on_gpu
from tests.helpers import RAGGED, tiny_bert
from tests.models import test_transformers_backend as backend
from tests.models.parity import random_ids
from tests.multimodal.checkpoints import clip_folder, picture

pytestmark = pytest.mark.gpu


@contextmanager
def with_words(folder: Path, **settings: Any) -> Iterator[LLM]:
    """As `on_gpu`, in float32 and with the tokenizer."""
    with on_gpu(folder, skip_tokenizer_init=False, dtype="float32", **settings) as llm:
        yield llm


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", backend.CASES)
def test_modules_of_transformers(name: str, tmp_path: Path) -> None:
    model = backend.save(name, tmp_path)
    texts = random_ids(120, LENGTHS)
    with on_gpu(tmp_path, dtype="float32", model_impl="transformers", pooler_config=MEAN) as llm:
        assert_near(embeddings(llm, texts), mean_of(tmp_path, model, texts, name))


@EAGER
@pytest.mark.parametrize("name", cross_encoders.CLASSIFIERS)
def test_scores_of_cross_encoders(name: str, enforce_eager: bool) -> None:
    folder = cross_encoders.saved(
        cross_encoders.CrossEncoder(str(cross_encoders.CLASSIFIERS[name]()), device="cpu", local_files_only=True)
    )
    with with_words(folder, enforce_eager=enforce_eager) as llm:
        assert_near(cross_encoders.scores(llm), cross_encoders.reference(folder))


@EAGER
def test_scores_of_a_reranker_that_answers_with_a_token(enforce_eager: bool) -> None:
    """Its template, rows of the LM head, and prefixes that are cached."""
    folder = rerankers.causal_lm("qwen3", name="Qwen3-Reranker-tiny")
    documents = ["a cat", "a story of a dog that sat on a mat", "yes"]
    prompts = [rerankers.qwen_ids(folder, "cat", document) for document in documents]
    yes, no = (rerankers.ids_of(folder, word)[0] for word in ("yes", "no"))
    logits_NV = rerankers.logits(folder, prompts)
    expected = torch.sigmoid(logits_NV[:, yes] - logits_NV[:, no])
    with with_words(folder, enforce_eager=enforce_eager) as llm:
        for _ in range(2):  # the second time behind the keys of the first
            ranked = llm.rerank("cat", documents, use_tqdm=False)
            by_index = {one.index: one.relevance_score for one in ranked}
            assert_near(torch.tensor([by_index[i] for i in range(len(documents))]), expected)


@pytest.mark.parametrize("attend", [False, True], ids=["not attended to", "attended to"])
def test_late_interaction(attend: bool) -> None:
    """The vectors of queries, expanded, and of documents, and their MaxSim, by the engine and by the kernel."""
    folder, model = late_interaction.encoder(
        tiny_bert(), query_expansion={"strategy": "fixed", "length": 12, "attend": attend}, document_length=20
    )
    queries, documents = model.encode_query(RAGGED[:2]), model.encode_document(RAGGED)
    expected_2N = model.similarity(queries, documents)
    with with_words(folder) as llm:
        own_queries = late_interaction.token_vectors(llm, RAGGED[:2], is_query=True)
        own_documents = late_interaction.token_vectors(llm, RAGGED)
        for actual, expected in zip([*own_queries, *own_documents], [*queries, *documents], strict=True):
            assert_near(actual, expected)
        for query, row in zip(RAGGED[:2], expected_2N, strict=True):
            scores = llm.score(query, RAGGED, use_tqdm=False)
            assert_near(torch.tensor([one.outputs.score for one in scores]), row)
        device = llm.engine.loaded.device
        by_kernel = [maxsim(own_queries[0].to(device), one.to(device)).cpu() for one in own_documents]
        assert_near(torch.stack(by_kernel), expected_2N[0])


@pytest.mark.parametrize("make", [sparse.splade, sparse.auto_encoder])
def test_sparse_vectors(make: Any) -> None:
    folder = make()
    with with_words(folder) as llm:
        assert_near(sparse.sparse_vectors(llm), sparse.expected(folder))


def test_texts_and_images_of_two_towers() -> None:
    folder, texts, pictures = clip_folder(3), ["a cat", "the end of a story"], [picture(1), picture(2, 60, 90)]
    model, processor = hf.CLIPModel.from_pretrained(folder).eval(), hf.CLIPProcessor.from_pretrained(folder)
    with torch.no_grad():
        of_texts = model.get_text_features(**processor(text=texts, return_tensors="pt", padding=True)).pooler_output
        of_images = model.get_image_features(**processor(images=pictures, return_tensors="pt")).pooler_output
    prompts: list[Any] = [*texts, *({"multi_modal_data": {"image": one}} for one in pictures)]
    with with_words(folder) as llm:
        found = torch.stack([output.outputs.data for output in llm.embed(prompts, use_tqdm=False)])
    assert_near(found, F.normalize(torch.cat([of_texts, of_images])))
