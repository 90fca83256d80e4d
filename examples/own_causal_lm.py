"""A causal LM of one's own, a GRU, registered and served as an embedding model. Needs `anypool[transformers]`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from anypool import LLM, PoolerConfig, register_model

WORDS = "[UNK] the a cat dog sat slept on under mat sofa".split()


class GruForCausalLM(nn.Module):
    """What anypool asks of a class: built from its configuration, packed tokens in, hidden states out.

    `compute_logits` says that it is a causal LM. The LM head may be there: it is dropped before memory is allocated.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.gru = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: Any, **_: Any) -> torch.Tensor:
        # The batch is packed: the tokens of all texts one after the other, and their lengths. Nothing may flow between.
        texts = self.embed(input_ids_T).split(attn.lengths)
        return torch.cat([self.gru(text_LD[None])[0][0] for text_LD in texts])

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_TD)


class GruConfig(PretrainedConfig):
    """A model type that transformers does not know has to be made known to it."""

    model_type = "gru-lm"
    hidden_size = 32
    num_hidden_layers = 1
    max_position_embeddings = 512


def save_checkpoint(folder: Path) -> nn.Module:
    """Writes the three files of a checkpoint, with random weights, and returns the model."""
    torch.manual_seed(0)
    config = GruConfig(vocab_size=len(WORDS))
    model = GruForCausalLM(config)
    save_file(model.state_dict(), folder / "model.safetensors")
    described = {**config.to_dict(), "architectures": ["GruForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def main() -> None:
    AutoConfig.register("gru-lm", GruConfig)
    register_model("GruForCausalLM", GruForCausalLM)
    text = "the cat slept on the sofa"
    with tempfile.TemporaryDirectory() as folder:
        own = save_checkpoint(Path(folder))
        with LLM(folder, pooler_config=PoolerConfig(pooling_type="LAST"), use_tqdm_on_load=False) as llm:
            model = llm.engine.loaded.model
            [output] = llm.embed(text, use_tqdm=False)
    print(f"{type(model).__name__} serves {', '.join(llm.supported_tasks)}")
    print(f"LM head: {model.lm_head}")
    with torch.no_grad():
        hidden_LD = own.gru(own.embed(torch.tensor([output.prompt_token_ids])))[0][0]
    expected_D = F.normalize(hidden_LD[-1], dim=0)
    print(f"the last hidden state, normalised: {torch.allclose(output.outputs.data, expected_D, atol=1e-6)}")


if __name__ == "__main__":
    main()
