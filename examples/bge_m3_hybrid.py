"""Hybrid search with BGE-M3: dense, sparse and token vectors of one run, alone and fused. Needs `anypool[dev]`.

The model is tiny and random, and made here in BGE-M3's form, so that nothing is downloaded: which texts it finds means
nothing. With `LLM("BAAI/bge-m3")` in its place it does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from anypool import LLM

DOCUMENTS = ["the sea rises twice a day", "bread rises with yeast", "a cat sat on the mat"]
QUERY = "why does the sea rise"


def make_model(folder: Path) -> None:
    """Saves an encoder, and the two heads beside it that FlagEmbedding has."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = sorted({word for text in (*DOCUMENTS, QUERY) for word in text.split()})
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = XLMRobertaConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)
    XLMRobertaModel(config).save_pretrained(folder)
    torch.save(torch.nn.Linear(32, 1).state_dict(), folder / "sparse_linear.pt")
    torch.save(torch.nn.Linear(32, 32).state_dict(), folder / "colbert_linear.pt")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with LLM(folder, use_tqdm_on_load=False) as llm:
            print("serves", ", ".join(llm.supported_tasks))
            tasks = ["embed", "sparse_embed", "token_embed"]
            [output] = llm.encode([QUERY], pooling_task=tasks, use_tqdm=False)
            vectors = output.outputs
            assert vectors.embed is not None
            assert vectors.sparse_embed is not None
            assert vectors.token_embed is not None
            print("one vector of", vectors.embed.hidden_size)
            print(len(vectors.sparse_embed.indices), "words with a weight")
            print(len(vectors.token_embed.data), "token vectors")
            for name, fuse in (
                ("dense", (1.0, 0.0, 0.0)),
                ("sparse", (0.0, 1.0, 0.0)),
                ("tokens", (0.0, 0.0, 1.0)),
                ("fused", True),
            ):
                best = llm.rerank(QUERY, DOCUMENTS, fuse=fuse, use_tqdm=False)[0]
                print(f"best by {name}: {best.document} ({best.relevance_score:.3f})")


if __name__ == "__main__":
    main()
