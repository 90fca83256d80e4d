"""LoRA adapters that peft itself writes, and what it gives with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from anypool import LLM, LoRARequest
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    byte_tokenizer,
    new_folder,
    save,
    tiny_bert,
    tiny_llama,
    wordpiece_tokenizer,
)

TEXTS = ["the cat sat", "a long story, and a mat", "none", "the passage: a query?"]


_SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
_LONG: dict[str, Any] = {**_SIZES, "intermediate_size": 64, "max_position_embeddings": MAX_POSITIONS + 4}
# Families that run through transformers, or with one adapter at a time.
_OTHERS: dict[str, Any] = {
    "albert": lambda v: hf.AlbertModel(hf.AlbertConfig(vocab_size=v, embedding_size=16, **_LONG)),
    "deberta": lambda v: hf.DebertaV2Model(
        hf.DebertaV2Config(
            vocab_size=v,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
            share_att_key=True,
            **_LONG,
        )
    ),
    "mixtral": lambda v: hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=v, num_key_value_heads=2, **_LONG)),
    "opt": lambda v: hf.OPTForCausalLM(
        hf.OPTConfig(vocab_size=v, ffn_dim=64, word_embed_proj_dim=HIDDEN, max_position_embeddings=160, **_SIZES)
    ),
    "t5": lambda v: hf.T5EncoderModel(
        hf.T5Config(vocab_size=v, d_model=HIDDEN, d_ff=64, d_kv=8, num_layers=2, num_heads=4, eos_token_id=2)
    ),
    "xlm-roberta": lambda v: hf.XLMRobertaModel(hf.XLMRobertaConfig(vocab_size=v, **_LONG)),
}


@cache
def base(family: str) -> Path:
    """A tiny base model of a family."""
    torch.manual_seed(11)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.2,
    }
    match family:
        case "bert":
            return tiny_bert()
        case "llama":
            return tiny_llama()
        case "modernbert":
            tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
            ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
            return save(ModernBertModel(ModernBertConfig(vocab_size=len(tokenizer), **sizes, **ids)), tokenizer, family)
    tokenizer = byte_tokenizer(model_max_length=MAX_POSITIONS)
    common = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes}
    if family in _OTHERS:
        return save(_OTHERS[family](len(tokenizer)), tokenizer, family)
    match family:
        case "qwen3":
            model: Any = Qwen3ForCausalLM(Qwen3Config(**common, num_key_value_heads=2, head_dim=8))
        case "wide":
            wide = {**common, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
            model = Qwen3ForCausalLM(Qwen3Config(**wide, num_key_value_heads=2))
        case "gemma3":
            model = Gemma3ForCausalLM(Gemma3TextConfig(**common, num_key_value_heads=2, head_dim=8))
        case "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=len(tokenizer),
                    n_embd=HIDDEN,
                    n_layer=2,
                    n_head=4,
                    n_positions=MAX_POSITIONS,
                    initializer_range=0.2,
                    pad_token_id=0,
                    bos_token_id=1,
                    eos_token_id=2,
                )
            )
        case _:
            raise AssertionError(family)
    return save(model, tokenizer, family)


def train(model: Any, *, seed: int = 0, **config: Any) -> PeftModel:
    """A model with an adapter whose every parameter is random."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about where weights are tied
        made: Any = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **config}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made.eval()


def write(trained: PeftModel, name: str = "adapter") -> Path:
    """The adapter's folder, as peft writes it."""
    folder = new_folder(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, that it saves embeddings too
        trained.save_pretrained(folder)
    return folder


def adapter(folder: Path, *, seed: int = 0, cls: Any = AutoModel, **config: Any) -> tuple[Path, PeftModel]:
    """An adapter for a checkpoint: its folder, and peft's model with it."""
    trained = train(cls.from_pretrained(folder), seed=seed, **config)
    return write(trained), trained


@torch.no_grad()
def states(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """`[L, D]` last hidden states of a text."""
    output = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    last: torch.Tensor = output.last_hidden_state if "last_hidden_state" in output else output.hidden_states[-1]
    return last[0]


def assert_as_peft(llm: LLM, expected: Any, lora: LoRARequest | None = None, texts: Sequence[str] = TEXTS) -> None:
    """Each token's state is that of the reference, to 1e-5 of its length."""
    for output in llm.token_embed(list(texts), lora_request=lora, truncate_prompt_tokens=-1, use_tqdm=False):
        reference = F.normalize(states(expected, output.prompt_token_ids), dim=-1)
        torch.testing.assert_close(output.outputs.data, reference, atol=1e-5, rtol=0)


def request(folder: Path, number: int = 1, name: str | None = None) -> LoRARequest:
    """A request for the adapter in a folder."""
    return LoRARequest(name or f"adapter-{number}", number, str(folder))
