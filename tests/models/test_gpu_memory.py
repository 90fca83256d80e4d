"""What a model will take of a GPU's memory is added up without one."""

from __future__ import annotations

import threading

import pytest
import torch

from anypool.adapters.load import load_pooling_model
from anypool.adapters.placement import pick_device, pick_dtype
from anypool.config import EngineConfig
from anypool.engine import engine, setup
from anypool.engine.engine import Engine
from anypool.errors import ConfigError
from anypool.model_executor.gpu_memory import MemoryPlan, cap_memory, per_token, plan_memory
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


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as torch is asked, there are two GPUs, the second of which is current."""
    for name, fake in {"is_available": True, "device_count": 2, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda fake=fake: fake)


@pytest.mark.parametrize(
    ("asked", "device"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")]
)
def test_a_gpu_has_its_number(asked: str, device: str, two_gpus: None) -> None:
    assert pick_device(asked) == torch.device(device)


def test_a_gpu_that_is_not_there_is_refused(two_gpus: None) -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:2': torch sees 2 GPUs here, counted from 0"):
        pick_device("cuda:2")


@pytest.mark.parametrize("utilization", [0.5, 1])
def test_the_limit_is_what_torch_takes(utilization: float, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself checks the device and the share here, up to the call that needs a GPU."""
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *limit: limits.append(limit), raising=False)
    cap_memory(pick_device("auto"), utilization)
    assert limits == [(utilization, 1)]


def test_loading_and_running_make_their_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is current is a thread's own, and kernels are launched there."""
    made: list[tuple[str, torch.device]] = []
    for module in (setup, engine):
        monkeypatch.setattr(
            module, "make_current", lambda device: made.append((threading.current_thread().name, device))
        )
    Engine(EngineConfig(model=str(tiny_llama()), device="cpu", use_tqdm_on_load=False)).close()
    assert made == [("anypool-apart", torch.device("cpu")), ("anypool-device", torch.device("cpu"))]


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
