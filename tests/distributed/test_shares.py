"""Shares of all processes make up the whole, and a checkpoint is audited as a whole by each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.engine import setup
from anypool.errors import ConfigError, WeightsError
from anypool.model_executor import distributed
from anypool.model_executor.distributed import Ranks
from anypool.model_executor.layers.split import LocalHeads, even_share, vocabulary_share
from tests.models.parity import load, save_random
from tests.models.test_native_parity import DECODER


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """This process builds models as that rank; it has nobody to sum with."""
    monkeypatch.setattr(distributed, "_ranks", Ranks(tp_rank=rank, tp_size=size))


@pytest.mark.parametrize(("size", "blocks", "whole"), [(1, 1, 8), (2, 1, 8), (4, 2, 16), (2, 3, 12)])
def test_equal_shares_make_up_the_whole(size: int, blocks: int, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        share = even_share(whole, blocks=blocks)
        assert [len(part) for part in share] == [whole // size // blocks] * blocks
        assert [part.start // (whole // blocks) for part in share] == list(range(blocks))
        found += [row for part in share for row in part]
    assert sorted(found) == list(range(whole))


@pytest.mark.parametrize(("rows", "size"), [(8, 4), (7, 4), (9, 4), (2, 4), (120, 7)])
def test_shares_of_a_vocabulary_make_up_the_whole(rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        found += vocabulary_share(rows)
    assert found == list(range(rows))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (8, 2), (8, 1), (12, 3), (14, 2), (12, 4)])
def test_every_query_meets_its_own_key_on_every_rank(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (size for size in range(1, heads + 1) if heads % size == 0):
        seen: list[int] = []
        for rank in range(size):
            as_rank(monkeypatch, rank, size)
            local = LocalHeads.share(heads, kv_heads)
            group = len(local.queries) // len(local.keys)
            assert group * len(local.keys) == len(local.queries)
            for place, query in enumerate(local.queries):
                assert local.keys[place // group] == query // (heads // kv_heads)
            if kv_heads % size == 0:
                assert len(local.keys) == kv_heads // size, "nothing stands twice that need not"
            seen += local.queries
        assert seen == list(range(heads))


def test_a_tensor_of_a_wrong_shape_is_refused_with_the_shape_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :24].contiguous()  # as large as the share of one of two
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    as_rank(monkeypatch, 1, 2)
    with pytest.raises(WeightsError, match=r"down_proj.weight' has shape \[32, 24\], the model expects \[32, 48\]"):
        load(tmp_path)


def test_each_rank_has_its_share_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), tmp_path)
    monkeypatch.setenv("ANYPOOL_CPU_LINEAR", "plain")
    stored = load_file(tmp_path / "model.safetensors")
    as_rank(monkeypatch, 3, 4)
    model = load(tmp_path)
    layer = model.model.layers[2]
    down_DF = stored["model.layers.2.mlp.down_proj.weight"]
    assert torch.equal(layer.mlp.down_proj.weight, down_DF[:, 36:])
    up_FD = stored["model.layers.2.mlp.up_proj.weight"]
    assert torch.equal(layer.mlp.gate_up_proj.weight[12:], up_FD[36:])
    k_GD = stored["model.layers.2.self_attn.k_proj.weight"]  # two heads of 8 on four processes
    assert torch.equal(layer.self_attn.qkv_proj.weight[8:16], k_GD[8:])
    assert torch.equal(model.model.embed_tokens.weight, stored["model.embed_tokens.weight"][90:])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_caches_of_all_ranks_on_a_cpu_take_the_memory_that_one_may(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        device="cpu",
        use_tqdm_on_load=False,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=size,
    )
    as_rank(monkeypatch, 0, size)
    monkeypatch.setattr(setup, "device_memory", lambda _: 100_000_000)
    loaded = load_pooling_model(config)
    cache = setup.make_cache(setup.resolve(config, loaded, None), loaded)
    assert cache is not None
    kv_heads = max(1, 2 // size)
    floats = 3 * 2 * kv_heads * 8 + 32  # keys and values of three layers, and the last states
    taken = size * cache.store.num_blocks * cache.store.block_size * floats * 4
    assert 0.99 * 10_000_000 < taken <= 10_000_000


@pytest.mark.parametrize(("rank", "tp_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank: int, tp_size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"rank={rank} is none of tp_size={tp_size}"):
        distributed.start(rank, tp_size=tp_size, address=f"file://{tmp_path}/store")
