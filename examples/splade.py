"""Sparse vectors of a SPLADE model, searched with an inverted index. Needs `anypool[dev]`.

The model is tiny and random, and made here by sentence-transformers, so that nothing is downloaded: which texts it
finds means nothing. With `LLM("naver/splade-v3")` in its place it does.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from anypool import LLM, PoolingParams

DOCUMENTS = ["the sea rises twice a day", "bread rises with yeast", "a cat sat on the mat"]
QUERY = "why does the sea rise"


def make_model(folder: Path) -> None:
    """Saves a SPLADE model: a masked language model, and what makes a weight per word of its logits."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for text in (*DOCUMENTS, QUERY) for word in text.split()})
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    backbone = folder / "masked-lm"
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)).save_pretrained(backbone)
    tokenizer.save_pretrained(backbone)
    modules = [Transformer(str(backbone), transformer_task="fill-mask"), SpladePooling("max")]
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder / "splade"), create_model_card=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with LLM(Path(folder) / "splade", use_tqdm_on_load=False) as llm:
            few = PoolingParams(max_active_dims=8)  # smaller postings lists, and hardly another ranking
            documents = [output.outputs for output in llm.sparse_embed(DOCUMENTS, few, use_tqdm=False)]
            query = llm.sparse_embed(QUERY, few, use_tqdm=False)[0].outputs
            same = SparseEncoder(str(Path(folder) / "splade"), device="cpu").encode(DOCUMENTS, max_active_dims=8)
    print(f"{len(query.indices)} of {query.size} words have a weight in the query")
    index: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for number, document in enumerate(documents):
        for word, weight in document.weights.items():
            index[word].append((number, weight))
    scores: dict[int, float] = defaultdict(float)
    for word, weight in query.weights.items():
        for number, other in index[word]:
            scores[number] += weight * other
    for number, score in sorted(scores.items(), key=lambda entry: -entry[1]):
        print(f"{score:6.3f}  {DOCUMENTS[number]}")
    rows = torch.stack([document.to_dense() for document in documents])
    print("as sentence-transformers has them:", torch.allclose(rows, torch.stack([*same]).to_dense(), atol=1e-5))


if __name__ == "__main__":
    main()
