"""Hidden states of a checkpoint here, packed, against transformers' own, one text at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.model_executor.packed_batch import PackedBatch

LENGTHS = (1, 7, 63, 130, 7)


def random_ids(vocab_size: int, lengths: tuple[int, ...] = LENGTHS, *, first: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(first, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def save_random(model: Any, folder: Path) -> None:
    """Saves a model with weights large enough that every path matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.08)
    model.eval().save_pretrained(folder)


@torch.inference_mode()
def reference_states(model: Any, texts: list[list[int]], **inputs: Any) -> torch.Tensor:
    """`[T, D]` of transformers' eager attention, each text alone."""
    base = getattr(model, model.base_model_prefix, model)
    return torch.cat([base(input_ids=torch.tensor([ids]), **inputs).last_hidden_state[0] for ids in texts])


@torch.inference_mode()
def packed_states(folder: Path, texts: list[list[int]], **engine: Any) -> torch.Tensor:
    """`[T, D]` of ours, all texts in one batch."""
    loaded = load_pooling_model(EngineConfig(model=str(folder), use_tqdm_on_load=False, device="cpu", **engine))
    batch = PackedBatch.pack(texts, device=loaded.device)
    return loaded.model(batch.input_ids_T, batch.positions_T, batch.attn)
