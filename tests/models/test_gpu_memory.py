"""What a model will take of a GPU's memory is added up without one."""

from __future__ import annotations

import pytest
import torch

from anypool.adapters.load import load_pooling_model, pick_dtype
from anypool.config import EngineConfig
from anypool.errors import ConfigError
from anypool.model_executor.gpu_memory import MemoryPlan, per_token, plan_memory
from anypool.model_executor.model_config import ModelConfig
from tests.helpers import tiny_llama

GIB = 1 << 30


def config(**values: object) -> ModelConfig:
    sizes = {"hidden_size": 1024, "num_layers": 2, "num_heads": 16, "vocab_size": 10, "max_positions": 99}
    return ModelConfig(name="m", architecture="A", **{"model_type": "llama", **sizes, **values})  # type: ignore[arg-type]


def test_a_plan_adds_up_and_says_what_it_is_made_of() -> None:
    plan = MemoryPlan(total=80 * GIB, limit=40 * GIB, weights=16 * GIB, activations=2 * GIB, cache=GIB)
    assert plan.needed == 19 * GIB
    assert plan.fits
    assert str(plan) == (
        "19.00 GiB of 40.00 GiB (80.00 GiB in all): weights 16.00 GiB, activations 2.00 GiB, key-value cache 1.00 GiB"
    )
    assert not MemoryPlan(total=GIB, limit=GIB, weights=GIB, activations=1).fits


def test_weights_are_those_of_the_model_and_the_rest_follows_from_its_sizes() -> None:
    loaded = load_pooling_model(EngineConfig(model=str(tiny_llama()), device="cpu", use_tqdm_on_load=False))
    plan = plan_memory(
        loaded.model,
        loaded.config,
        total=1000,
        utilization=0.5,
        batched_tokens=100,
        graph_tokens=10,
        cache_tokens=16,
        dtype=torch.float32,
    )
    assert plan.limit == 500
    assert plan.weights == sum(p.numel() * 4 for p in loaded.model.parameters())
    assert plan.activations == 10 * plan.graphs == 100 * 4 * (2 * 32 + 3 * 64)
    assert plan.cache == 16 * 4 * (2 * 2 * 2 * 8 + 32)


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ({"num_kv_heads": 8, "head_size": 64, "intermediate_size": 3072}, 2 * 1024 + 3 * 3072),
        ({"num_kv_heads": 16, "head_size": 256, "intermediate_size": 1024}, 1024 + 6 * 4096),
    ],
)
def test_a_token_takes_the_larger_moment_of_a_layer(sizes: dict[str, int], elements: int) -> None:
    assert per_token(config(**sizes), torch.bfloat16) == 2 * elements


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gemma_does_not_run_in_float16_on_a_gpu(family: str) -> None:
    on_gpu, gemma = torch.device("cuda"), config(model_type=family, dtype="float16")
    assert pick_dtype("auto", gemma, on_gpu) is torch.bfloat16
    assert pick_dtype("float32", gemma, on_gpu) is torch.float32
    with pytest.raises(ConfigError, match="grow beyond what float16 holds; use dtype='bfloat16'"):
        pick_dtype("float16", gemma, on_gpu)
    assert pick_dtype("float16", config(), on_gpu) is torch.float16
