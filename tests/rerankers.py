"""Tiny random rerankers that answer with a token, and the scores and prompts of their authors' code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.helpers import new_folder, save

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {"head_dim": 8}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 4.0}),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
}
LIMIT = 256

QWEN_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MXBAI_PREFIX = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment "
    "(0 for not relevant, 1 for relevant).\nRelevance:"
)
MXBAI_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
GEMMA_PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>"]
_SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"""


@cache
def _backend() -> str:
    """A byte-level BPE of Qwen's kind, trained on the templates, so that it has merges across every seam of theirs."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    templates = (QWEN_PREFIX, QWEN_SUFFIX, QWEN_INSTRUCTION, MXBAI_TASK, GEMMA_PROMPT, ".\n", ".\n\n", ">:", ":\n")
    backend.train_from_iterator([*templates, *["yes", "no", "Yes", "No", " cat", " story", ".\n"] * 9], trainer)
    return str(backend.to_str())


def tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """Of Qwen's kind, without special tokens around a text, or of Gemma's, with `<bos>` before it."""
    backend = Tokenizer.from_str(_backend())
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 3)]
        )
    named = {"pad_token": "<|endoftext|>", "eos_token": "<eos>"} | ({"bos_token": "<bos>"} if bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=LIMIT, **named)


@cache
def causal_lm(
    family: str, *, tied: bool = False, name: str = "reranker", shard: str | None = None, limit: int = LIMIT
) -> Path:
    """A causal LM of two layers, in a folder of that name."""
    torch.manual_seed(11)
    config_cls, model_cls, settings = FAMILIES[family]
    words = tokenizer(bos="gemma" in family)
    words.model_max_length = limit
    config = config_cls(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=limit,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=4,
        **settings,
    )
    options = {} if shard is None else {"max_shard_size": shard}
    folder = save(model_cls(config), words, f"saved-{family}", **options)
    return folder.rename(new_folder("named") / name)


@torch.inference_mode()
def logits(folder: Path, prompts: Sequence[list[int]]) -> torch.Tensor:
    """Logits after the last token of each prompt, `[N, V]` float32, by the whole causal LM."""
    model = _model(folder)
    return torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in prompts])


@lru_cache(maxsize=8)
def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@lru_cache(maxsize=8)
def _words(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def ids_of(folder: Path, *texts: str) -> list[int]:
    """Ids of pieces, each tokenised by itself without special tokens, joined."""
    words = _words(folder)
    return [i for text in texts for i in words(text, add_special_tokens=False)["input_ids"]]


def qwen_ids(
    folder: Path, query: str, document: str, *, instruction: str = QWEN_INSTRUCTION, limit: int = LIMIT
) -> list[int]:
    """The prompt of Qwen3-Reranker: the fields are cut together, between prefix and suffix."""
    prefix, suffix = ids_of(folder, QWEN_PREFIX), ids_of(folder, QWEN_SUFFIX)
    body = ids_of(folder, f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
    return prefix + body[: limit - len(prefix) - len(suffix)] + suffix


def mxbai_ids(
    folder: Path, query: str, document: str, *, instruction: str | None = None, limit: int = LIMIT
) -> list[int]:
    """The prompt of mxbai-rerank-v2: the document is cut, template and query are not."""
    asked = f"instruction: {instruction}\n" if instruction else ""
    before = ids_of(folder, MXBAI_PREFIX, f"{asked}query: {query}", "\n")
    after = ids_of(folder, "\n", MXBAI_TASK, MXBAI_SUFFIX)
    return before + ids_of(folder, f"document: {document}")[: limit - len(before) - len(after)] + after


def gemma_ids(
    folder: Path, query: str, document: str, *, instruction: str = GEMMA_PROMPT, limit: int = LIMIT
) -> list[int]:
    """The prompt of bge-reranker-v2-gemma: one `<bos>`, and pieces joined as ids."""
    before = [3, *ids_of(folder, f"A: {query}", "\n")]
    after = ids_of(folder, "\n", instruction)
    return before + ids_of(folder, f"B: {document}")[: limit - len(before) - len(after)] + after
