"""Linear layers give the same numbers however they are computed, and hold their weight once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.errors import ConfigError
from anypool.model_executor.layers.activation import ACTIVATIONS
from anypool.model_executor.layers.linear import GatedLinear, Linear
from anypool.model_executor.layers.packing import pack_linears, replace_linears
from anypool.model_executor.layers.products import OneDnnProduct, cpu_linear, onednn_works, pick_product
from tests.models.parity import packed_states, random_ids, reference_states, save_random

DTYPES = [torch.float32, torch.bfloat16]
# Input and output sizes, and rows.
SHAPES = [(1, 1, 1), (24, 40, 7), (33, 7, 1), (130, 63, 63), (64, 256, 130), (16, 8, 0)]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """fp32 differs in the order of sums; bf16 has 8 bits, and the fused form rounds less often."""
    return {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if not onednn_works(request.param):
        pytest.skip("oneDNN has no packed products here")
    return request.param


def filled(linear: Any, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.2).to(dtype)
    return linear


def packed(linear: Any) -> Any:
    linear.pack(OneDnnProduct)
    return linear


def is_gone(weight: torch.Tensor) -> bool:
    return weight.untyped_storage().nbytes() == weight.element_size()


def rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("size", "out", "count"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_equal_plain_ones(dtype: torch.dtype, size: int, out: int, count: int, bias: bool) -> None:
    linear = filled(Linear(size, out, bias=bias), dtype)
    x, other = rows(count, size, dtype=dtype), rows(count, out, dtype=dtype)
    calls: list[dict[str, Any]] = [{}, {"add": other}, *({"act": act} for act in ACTIVATIONS.values())]
    expected = [linear(x, **call) for call in calls]
    packed(linear)
    for call, plain in zip(calls, expected, strict=True):
        torch.testing.assert_close(linear(x, **call), plain, **tolerance(dtype))


@pytest.mark.parametrize("kind", ["transposed", "slice", "expanded", "three dimensions", "one dimension"])
def test_packed_products_take_inputs_of_any_layout(dtype: torch.dtype, kind: str) -> None:
    x = {
        "transposed": rows(33, 9, dtype=dtype).t(),
        "slice": rows(9, 70, dtype=dtype)[:, 37:],
        "expanded": rows(1, 33, dtype=dtype).expand(5, 33),
        "three dimensions": rows(1, 9, 33, dtype=dtype),
        "one dimension": rows(33, dtype=dtype),
    }[kind]
    linear = filled(Linear(33, 20, bias=True), dtype)
    other = rows(*x.shape[:-1], 41, dtype=dtype)[..., 21:]
    plain = linear(x), linear(x, add=other)
    packed(linear)
    torch.testing.assert_close((linear(x), linear(x, add=other)), plain, **tolerance(dtype))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated_products_equal_activation_times_second_half(dtype: torch.dtype, act: str) -> None:
    gated = filled(GatedLinear(33, {"gate_proj": 20, "up_proj": 20}, act=ACTIVATIONS[act], bias=True), dtype)
    x = rows(9, 33, dtype=dtype)
    gate, up = F.linear(x.float(), gated.weight.float(), gated.bias.float()).chunk(2, dim=-1)
    expected = (ACTIVATIONS[act](gate) * up).to(dtype)
    torch.testing.assert_close(gated(x), expected, **tolerance(dtype))
    torch.testing.assert_close(packed(gated)(x), expected, **tolerance(dtype))


@pytest.mark.parametrize("make", [lambda: Linear(33, 20), lambda: GatedLinear(33, 40, act=ACTIVATIONS["silu"])])
def test_unpacking_gives_the_weight_back(dtype: torch.dtype, make: Any) -> None:
    linear = filled(make(), dtype)
    weight = linear.weight.clone()
    packed(linear).unpack()
    assert torch.equal(linear.weight, weight)


def test_the_plain_weight_is_gone_and_says_so(dtype: torch.dtype) -> None:
    linear = packed(filled(Linear(33, 20), dtype))
    assert is_gone(linear.weight)
    assert (linear.weight.shape, linear.weight.dtype) == ((20, 33), dtype)
    assert F.linear(rows(1, 33, dtype=dtype), linear.weight).isnan().all()


def test_a_tied_weight_and_a_head_stay_plain() -> None:
    model = nn.Module()
    model.embed, model.tied, model.head, model.body = nn.Embedding(9, 8), Linear(8, 9), Linear(8, 2), Linear(8, 8)
    model.tied.weight = model.embed.weight
    with cpu_linear("onednn"):
        pack_linears(model, leave=[model.head])
    assert [bool(model.get_submodule(name).products) for name in ("tied", "head", "body")] == [False, False, True]


def test_foreign_layers_are_replaced_and_put_back() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(8, 12), hf.pytorch_utils.Conv1D(6, 12)
            self.same = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.a(x) + self.same(x))

    model, x = Foreign().requires_grad_(False), torch.randn(3, 8)
    weights, expected = [model.a.weight.clone(), model.c.weight.clone()], model(x)
    with cpu_linear("onednn"):
        restore = replace_linears(model)
    assert all(isinstance(layer, Linear) and is_gone(layer.weight) for layer in (model.a, model.c))
    assert model.a is model.same
    torch.testing.assert_close(model(x), expected)
    restore()
    assert isinstance(model.a, nn.Linear)
    assert model.a is model.same
    assert torch.equal(model.a.weight, weights[0])
    assert torch.equal(model.c.weight, weights[1])
    torch.testing.assert_close(model(x), expected)


def test_the_environment_and_a_context_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYPOOL_CPU_LINEAR", "plain")
    assert pick_product(torch.float32) is None
    with cpu_linear("onednn"):
        assert pick_product(torch.float32) is OneDnnProduct
    monkeypatch.setenv("ANYPOOL_CPU_LINEAR", "fast")
    with pytest.raises(ConfigError, match=r"ANYPOOL_CPU_LINEAR='fast' is unknown; known: auto, plain, onednn"):
        pick_product(torch.float32)


def test_without_the_private_operations_layers_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Any, *_: Any) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    onednn_works.cache_clear()
    monkeypatch.setattr(OneDnnProduct, "__init__", gone)
    try:
        with cpu_linear("auto"):
            assert pick_product(torch.float32) is None
        with cpu_linear("onednn"), pytest.raises(ConfigError, match="oneDNN does not multiply"):
            pick_product(torch.float32)
    finally:
        onednn_works.cache_clear()


SIZES = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("way", ["plain", "onednn"])
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("model_cls", "config"),
    [
        (hf.BertModel, hf.BertConfig(**SIZES, intermediate_size=96)),
        (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=2)),
        (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4)),
    ],
    ids=["bert", "llama", "gpt2"],
)
def test_models_equal_transformers_either_way(model_cls: Any, config: Any, impl: str, way: str, tmp_path: Path) -> None:
    if impl == "native" and config.model_type == "gpt2":
        pytest.skip("GPT-2 runs through transformers")
    model = model_cls._from_config(config, attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(120)
    with cpu_linear(way):
        actual = packed_states(tmp_path, texts, model_impl=impl)
    torch.testing.assert_close(actual, reference_states(model, texts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_no_linear_layer_of_a_loaded_model_holds_its_weight_twice(impl: str, tmp_path: Path) -> None:
    hf.BertModel(hf.BertConfig(**SIZES, intermediate_size=96)).save_pretrained(tmp_path)
    with cpu_linear("onednn"):
        loaded = load_pooling_model(EngineConfig(model=str(tmp_path), model_impl=impl, use_tqdm_on_load=False))
    linears = {name: m for name, m in loaded.model.named_modules() if isinstance(m, Linear | nn.Linear)}
    inside = {name: m for name, m in linears.items() if ".pooler." not in f".{name}"}
    assert inside
    assert all(is_gone(m.weight) and m.products for m in inside.values())


def test_a_module_that_reads_its_weights_itself_keeps_transformers_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.bert import modeling_bert

    def by_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(F.linear(x, self.dense.weight, self.dense.bias))

    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", by_weight)
    model = hf.BertModel._from_config(hf.BertConfig(**SIZES, intermediate_size=96), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(120)
    with cpu_linear("onednn"):
        actual = packed_states(tmp_path, texts, model_impl="transformers")
    torch.testing.assert_close(actual, reference_states(model, texts), atol=1e-5, rtol=0)
