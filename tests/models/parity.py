"""Hidden states of a checkpoint here, packed, against transformers' own, one text at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.model_executor.attention import PrefixKeys
from anypool.model_executor.kv_store import KVStore
from anypool.model_executor.packed_batch import PackedBatch

CPU = torch.device("cpu")
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


def load(folder: Path, **engine: Any) -> Any:
    """Our model."""
    return load_pooling_model(EngineConfig(model=str(folder), use_tqdm_on_load=False, device="cpu", **engine)).model


@torch.inference_mode()
def run(model: Any, batch: PackedBatch) -> torch.Tensor:
    """`[T, D]` of a batch."""
    if batch.attn.prefix is not None:
        batch.attn.prefix.begin()
    hidden_TD = model(batch.input_ids_T, batch.positions_T, batch.attn)
    if batch.attn.prefix is not None:
        batch.attn.prefix.end()
    return hidden_TD


def packed_states(folder: Path, texts: list[list[int]], **engine: Any) -> torch.Tensor:
    """`[T, D]` of ours, all texts in one batch."""
    return run(load(folder, **engine), PackedBatch.pack(texts, device=CPU))


class PoisonedStore(KVStore):
    """A store in which a token that was never written is NaN."""

    def _allocate(self, rows: torch.Tensor) -> torch.Tensor:
        return super()._allocate(rows).fill_(torch.nan)


@dataclass
class Part:
    """A part of a prompt that one batch computes.

    Attributes:
        ids: The whole prompt.
        start, end: Which of its tokens.
        blocks: Of the prompt.
        stored: How many of the prompt's tokens are in the store afterwards.
    """

    ids: list[int]
    start: int
    end: int
    blocks: list[int]
    stored: int


def pack_parts(parts: list[Part], store: KVStore) -> PackedBatch:
    starts, lengths = [part.start for part in parts], [part.end - part.start for part in parts]
    prefix = PrefixKeys.plan(
        store,
        starts=starts,
        lengths=lengths,
        block_tables=[part.blocks for part in parts],
        stored=[part.stored for part in parts],
    )
    return PackedBatch.pack(
        [part.ids[part.start : part.end] for part in parts],
        device=CPU,
        starts=starts,
        prompt_lengths=[len(part.ids) for part in parts],
        prefix=prefix,
    )


def chunked_states(model: Any, texts: list[list[int]], *, block_size: int, longest: int) -> torch.Tensor:
    """`[T, D]` of ours, each text in chunks of random lengths, in random company, its blocks in random order."""
    draw = random.Random(block_size)
    needed = [-(-len(ids) // block_size) for ids in texts]
    blocks = list(range(sum(needed)))
    draw.shuffle(blocks)
    store = PoisonedStore(len(blocks), block_size, CPU)
    tables = [[blocks.pop() for _ in range(n)] for n in needed]
    chunks: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while unfinished := [i for i, ids in enumerate(texts) if done[i] < len(ids)]:
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        parts = []
        for i in chosen:
            end = min(len(texts[i]), done[i] + draw.choice((1, 1, 5, longest)))
            # The tail of a prompt that fills no block need not be stored: nobody reads it.
            stored = end if end < len(texts[i]) else end // block_size * block_size
            parts.append(Part(texts[i], done[i], end, tables[i], stored))
            done[i] = end
        batch = pack_parts(parts, store)
        for i, states_LD in zip(chosen, run(model, batch).split(batch.attn.lengths), strict=True):
            chunks[i].append(states_LD)
    return torch.cat([states_LD for text in chunks for states_LD in text])
