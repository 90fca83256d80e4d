"""A model's parameters and operations, told from its configuration, are those that torch counts while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.errors import UnsupportedArchitectureError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.outline import Outline
from anypool.model_executor.weights.repository import Repository

VOCABULARY, LENGTH = 50, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, tuple[Any, Any]] = {
    "encoder": (hf.BertModel, hf.BertConfig(**SIZES)),
    "encoder through transformers": (hf.RoFormerModel, hf.RoFormerConfig(**SIZES)),
    "decoder": (hf.LlamaModel, hf.LlamaConfig(**SIZES)),
    "decoder with grouped heads": (hf.Qwen3Model, hf.Qwen3Config(**GROUPED)),
    "decoder with Conv1D": (hf.GPT2Model, hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)),
    "decoder with experts": (hf.Qwen3MoeModel, hf.Qwen3MoeConfig(**EXPERTS)),
}


def saved(cls: Any, config: Any, folder: Path) -> Any:
    model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def outline_of(folder: Path, **options: Any) -> Outline:
    repository = Repository.open(str(folder))
    return Outline.of(ModelConfig.from_pretrained(repository), repository, **options)


def counted(model: Any, length: int) -> int:
    """Operations of the backbone as torch counts them; a BERT's pooler, which nobody asks for, left out."""
    model.pooler = None
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.arange(length)[None] % VOCABULARY)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_that_torch_counts(name: str, tmp_path: Path) -> None:
    model = saved(*CASES[name], tmp_path)
    outline = outline_of(tmp_path)
    config = outline.config
    # torch counts what eager attention computes: every query with every key, also where a mask hides it.
    head_size = getattr(model.config, "head_dim", None) or 32 // 4
    pairs = 4 * 4 * head_size * 2 * LENGTH**2
    assert counted(model, LENGTH) == LENGTH * outline.flop_per_token + pairs
    visible = LENGTH * (LENGTH + 1) // 2 if config.is_causal else LENGTH**2
    assert outline.attention_flop(LENGTH) == pairs * visible // LENGTH**2
    assert outline.flop(LENGTH) == LENGTH * outline.flop_per_token + outline.attention_flop(LENGTH)


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_bytes_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    saved(*CASES[name], tmp_path)
    outline = outline_of(tmp_path)
    loaded = load_pooling_model(EngineConfig(model=str(tmp_path), device="cpu", use_tqdm_on_load=False))
    assert outline.weight_bytes(torch.float32) == 4 * outline.parameters
    by_name = {name for name, _ in outline.model.named_parameters()}
    pooler = 32 * 32 + 32 if any("pooler" in name for name in by_name) else 0  # transformers' own, which has no use
    assert outline.parameters - pooler == sum(p.numel() for p in loaded.model.parameters()) - pooler


def test_windows_hide_the_keys_beyond_them(tmp_path: Path) -> None:
    config = hf.ModernBertConfig(
        **SIZES, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, attention_dropout=0.0
    )
    saved(hf.ModernBertModel, config, tmp_path)
    outline = outline_of(tmp_path)
    near = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() <= 4
    assert sorted(outline.config.layer_types) == ["full_attention", "sliding_attention"]
    assert outline.attention_flop(LENGTH) == 4 * 32 * (LENGTH**2 + int(near.sum()))


def test_what_cannot_be_told_from_the_configuration_is_said(tmp_path: Path) -> None:
    table = ModelConfig.of_table("potion", (10, 4))
    with pytest.raises(UnsupportedArchitectureError, match="potion is a table of vectors"):
        Outline.of(table, Repository("potion", tmp_path))
