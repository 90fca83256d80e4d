"""Linear layers in eight bits give the product of the rounded numbers, row by row."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from anypool.adapters import quantization
from anypool.adapters.load import LoadedModel, load_pooling_model
from anypool.config import EngineConfig
from anypool.errors import ConfigError
from anypool.model_executor.layers.activation import ACTIVATIONS
from anypool.model_executor.layers.int8 import Int8Product, int8_works, quantize_rows, quantize_weight
from anypool.model_executor.layers.linear import GatedLinear, Linear
from anypool.model_executor.layers.packing import quantize_linears
from anypool.model_executor.layers.products import OneDnnProduct, cpu_linear
from anypool.model_executor.packed_batch import PackedBatch
from tests.models.parity import random_ids, run, save_random

# Input and output sizes, and rows.
SHAPES = [(1, 1, 1), (24, 40, 7), (33, 7, 1), (130, 63, 63), (1536, 384, 260), (16, 8, 0)]


needs_int8 = pytest.mark.skipif(not int8_works(torch.float32), reason="oneDNN does not multiply integers here")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if not int8_works(request.param):
        pytest.skip("oneDNN does not multiply integers here")
    return request.param


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """The integers are exact: what is left are the roundings of fp32, or a few of bf16, which has 8 bits."""
    return {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the rounded numbers in float64."""
    rows, (values, scales) = quantize_rows(x), quantize_weight(weight)
    y = ((rows.values.double() - 128) * rows.scales.double()) @ (values.double() * scales.double()[:, None]).t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(("size", "out", "count"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_rounded_numbers(
    dtype: torch.dtype, size: int, out: int, count: int, bias: bool
) -> None:
    weight, x = random(out, size, dtype=dtype) * 0.1, random(count, size, dtype=dtype, seed=1)
    added = random(out, dtype=dtype, seed=2) if bias else None
    other = random(count, out, dtype=dtype, seed=3)
    product, plain = Int8Product(weight, added), exact(x, weight, added)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({}, plain),
        ({"add": other}, plain + other.double()),
        ({"mul": other}, plain * other.double()),
        *(({"act": act}, act(plain)) for act in ACTIVATIONS.values()),
    ]
    kept = x.clone(), other.clone()
    for call, expected in calls:
        y = product(x, **call)
        assert (y.dtype, y.shape) == (dtype, (count, out))
        torch.testing.assert_close(y.double(), expected, **tolerance(dtype))
    assert torch.equal(x, kept[0])
    assert torch.equal(other, kept[1])


@pytest.mark.parametrize("kind", ["transposed", "slice", "expanded", "three dimensions", "one dimension"])
def test_inputs_of_any_layout(dtype: torch.dtype, kind: str) -> None:
    x = {
        "transposed": random(33, 9, dtype=dtype).t(),
        "slice": random(9, 70, dtype=dtype)[:, 37:],
        "expanded": random(1, 33, dtype=dtype).expand(5, 33),
        "three dimensions": random(1, 9, 33, dtype=dtype),
        "one dimension": random(33, dtype=dtype),
    }[kind]
    weight, bias = random(20, 33, dtype=dtype, seed=1) * 0.1, random(20, dtype=dtype, seed=2)
    y = Int8Product(weight, bias)(x)
    assert y.shape == (*x.shape[:-1], 20)
    torch.testing.assert_close(y.double(), exact(x, weight, bias), **tolerance(dtype))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated_products_equal_activation_times_second_half(dtype: torch.dtype, act: str) -> None:
    gated = GatedLinear(33, {"gate_proj": 20, "up_proj": 20}, act=ACTIVATIONS[act])
    gated.weight.data = random(40, 33, dtype=dtype) * 0.1
    x = random(9, 33, dtype=dtype, seed=1)
    gate, up = exact(x, gated.weight, None).chunk(2, dim=-1)
    gated.pack(Int8Product)
    torch.testing.assert_close(gated(x).double(), ACTIVATIONS[act](gate) * up, **tolerance(dtype))


def test_rounding_stays_within_half_a_step(dtype: torch.dtype) -> None:
    x = random(200, 384, dtype=dtype)
    rows, (values, scales) = quantize_rows(x), quantize_weight(x)
    # bf16 rounds the quotient first, to half a step where it is above 64.
    step = 0.5 if dtype == torch.float32 else 0.75
    assert bool(
        (
            ((rows.values.float() - 128) * rows.scales.float() - x.float()).abs() <= rows.scales.float() * (step + 1e-3)
        ).all()
    )
    assert bool(((values * scales[:, None] - x.float()).abs() <= scales[:, None] * (0.5 + 1e-3)).all())
    assert int((rows.values.int() - 128).abs().amax()) >= 125
    assert int(values.abs().amax()) == 127


def test_no_largest_number_of_a_row_overflows() -> None:
    bits = torch.arange(0, 0x7F80, dtype=torch.int16)  # every bfloat16 from 0 up to infinity
    x = torch.stack([bits.view(torch.bfloat16), -bits.view(torch.bfloat16)], dim=1)
    for rows in (quantize_rows(x), quantize_rows(x.float())):
        values = rows.values.int() - 128
        assert torch.equal(values[:, 0], -values[:, 1])
        assert bool((values[x[:, 0] > 1e-29, 0] >= 125).all())
        assert bool((values[:, 0] >= 0).all())


def test_zero_rows_constant_rows_and_outliers_give_no_nan(dtype: torch.dtype) -> None:
    weight = random(20, 33, dtype=dtype) * 0.1
    weight[3], weight[5, 7] = 0, 1e4
    x = random(6, 33, dtype=dtype, seed=1)
    x[0], x[1], x[2, 4], x[3, 0], x[4] = 0, 5, 1e30, -1e-38, 1e-38
    assert bool((quantize_rows(x).scales > 0).all())
    y = Int8Product(weight, None)(x)
    assert y.isfinite().all()
    assert not y[0].any()
    assert not y[:, 3].any()
    torch.testing.assert_close(y[1].double(), exact(x, weight, None)[1], **tolerance(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_spoil_their_row_and_no_other(dtype: torch.dtype, bad: float) -> None:
    product, x = Int8Product(random(20, 33, dtype=dtype), None), random(3, 33, dtype=dtype, seed=1)
    before = product(x)
    x[1, 2] = bad
    y = product(x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], before[[0, 2]])


def test_a_row_is_the_same_alone_and_in_any_company(dtype: torch.dtype) -> None:
    product, x = Int8Product(random(70, 96, dtype=dtype), random(70, dtype=dtype)), random(40, 96, dtype=dtype, seed=1)
    x[::2] *= 1000
    alone = torch.cat([product(x[i : i + 1]) for i in range(len(x))])
    assert torch.equal(product(x), alone)


def test_unpacking_gives_the_rounded_weight(dtype: torch.dtype) -> None:
    linear = Linear(33, 20)
    linear.weight.data = random(20, 33, dtype=dtype)
    weight = linear.weight.clone()
    linear.pack(Int8Product)
    assert linear.weight.untyped_storage().nbytes() == linear.weight.element_size()
    linear.unpack()
    values, scales = quantize_weight(weight)
    assert torch.equal(linear.weight, (values * scales[:, None]).to(dtype))


@needs_int8
def test_narrow_layers_outliers_heads_and_tied_weights_are_kept() -> None:
    model = nn.Module()
    model.embed, model.tied = nn.Embedding(90, 64), Linear(64, 90)
    model.head, model.body, model.narrow, model.short = Linear(64, 64), Linear(64, 64), Linear(64, 63), Linear(63, 64)
    model.spiky, model.packed = Linear(256, 64), Linear(256, 64)
    model.gates = GatedLinear(64, 126, act=ACTIVATIONS["silu"])
    for linear in model.children():
        linear.weight.data = random(*linear.weight.shape, dtype=torch.float32)
    model.tied.weight = model.embed.weight
    for spiky in (model.spiky, model.packed):
        spiky.weight.data[:, 0] = 30
    model.packed.pack(OneDnnProduct)
    layers = quantize_linears(model, leave=[model.head])
    assert layers.quantized == ("body",)
    assert layers.kept == ("narrow", "short", "spiky", "packed", "gates")
    assert isinstance(model.packed.products[0], OneDnnProduct)
    assert not model.spiky.products


SIZES = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def load(folder: Path, **engine: Any) -> LoadedModel:
    with cpu_linear("onednn"):
        return load_pooling_model(EngineConfig(model=str(folder), use_tqdm_on_load=False, device="cpu", **engine))


@needs_int8
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("model_cls", "config"),
    [
        (hf.BertModel, hf.BertConfig(**SIZES, intermediate_size=96)),
        (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=4)),
        (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4)),
    ],
    ids=["bert", "llama", "gpt2"],
)
def test_models_stay_close_alone_and_in_a_batch(
    model_cls: Any, config: Any, impl: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if impl == "native" and config.model_type == "gpt2":
        pytest.skip("GPT-2 runs through transformers")
    save_random(model_cls._from_config(config), tmp_path)
    texts = random_ids(120)
    with caplog.at_level(logging.INFO, logger="anypool"):
        loaded = load(tmp_path, model_impl=impl, quantization="int8", dtype="float32")
    report = loaded.quantization
    assert report is not None
    assert 0.98 < report.min_cosine <= report.mean_cosine <= 1
    assert f"mean {report.mean_cosine:.4f}, lowest {report.min_cosine:.4f}" in caplog.text
    linears = [m for m in loaded.model.modules() if isinstance(m, Linear)]
    assert len(report.layers.quantized) == len(linears) > 0
    assert all(isinstance(p, Int8Product) for m in linears for p in m.products)
    assert all(m.weight.untyped_storage().nbytes() == m.weight.element_size() for m in linears)
    states = run(loaded.model, PackedBatch.pack(texts, device=torch.device("cpu")))
    alone = [run(loaded.model, PackedBatch.pack([ids], device=torch.device("cpu"))) for ids in texts]
    plain = run(load(tmp_path, model_impl=impl).model, PackedBatch.pack(texts, device=torch.device("cpu")))
    # A number that lands on the other side of a rounding moves a row by a step of a layer, about 1 %.
    assert F.cosine_similarity(states, torch.cat(alone)).min() > 0.999
    assert F.cosine_similarity(states, plain).min() > 0.97
    assert not torch.equal(states, plain)


def save_with_an_outlier(folder: Path) -> None:
    """One activation is so large that eight bits hold nothing of the others, and it counts for nothing itself."""
    model = hf.BertModel(hf.BertConfig(**SIZES, intermediate_size=96))
    save_random(model, folder)
    for layer in model.encoder.layer:
        layer.intermediate.dense.bias.data[0] = 1e4
        layer.output.dense.weight.data.mul_(10)[:, 0] = 0
    model.save_pretrained(folder)


@needs_int8
def test_a_model_that_eight_bits_change_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    save_with_an_outlier(tmp_path)
    match = r"int8' changes .* too much: on 13 probe texts the mean cosine .* below min_quantized_cosine=0.98; leave"
    with pytest.raises(ConfigError, match=match) as refused:
        load(tmp_path, quantization="int8")
    loaded = load(tmp_path, quantization="int8", min_quantized_cosine=0)
    assert loaded.quantization is not None
    assert loaded.quantization.mean_cosine < 0.98
    found = re.search(r"is (0\.\d+) \(lowest", str(refused.value))
    assert found is not None
    assert float(found[1]) == pytest.approx(loaded.quantization.mean_cosine, abs=1e-4)


@needs_int8
def test_a_model_of_nan_is_refused(tmp_path: Path) -> None:
    model = hf.BertModel(hf.BertConfig(**SIZES, intermediate_size=96))
    model.encoder.layer[0].output.LayerNorm.weight.data[0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="mean cosine with the unquantised model is nan"):
        load(tmp_path, quantization="int8")


@needs_int8
def test_a_model_of_narrow_layers_is_refused(tmp_path: Path) -> None:
    hf.BertModel(hf.BertConfig(**{**SIZES, "hidden_size": 32}, intermediate_size=96)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no linear layer to quantise"):
        load(tmp_path, quantization="int8")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"quantization": "int4"}, "quantization='int4' is not supported; known: int8, or None"),
        ({"quantization": True}, "quantization=True is not a str"),
        ({"min_quantized_cosine": 1.1}, "min_quantized_cosine=1.1 is not a number from 0 to 1"),
        ({"min_quantized_cosine": "0.9"}, "min_quantized_cosine='0.9' is not a number"),
    ],
)
def test_settings_that_are_wrong_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig.from_kwargs(model="m", **arguments)


@needs_int8
def test_other_devices_and_machines_without_the_operations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="runs on the CPU only, not on cuda:1; pass device='cpu'"):
        quantization.require_int8(torch.device("cuda:1"), torch.bfloat16)

    def gone(self: Any, *_: Any) -> None:
        raise AttributeError("'_OpNamespace' 'onednn' object has no attribute 'qlinear_prepack'")

    hf.BertModel(hf.BertConfig(**SIZES, intermediate_size=96)).save_pretrained(tmp_path)
    int8_works.cache_clear()
    monkeypatch.setattr(Int8Product, "__init__", gone)
    try:
        with pytest.raises(ConfigError, match="oneDNN operations for integers are missing here"):
            load(tmp_path, quantization="int8")
    finally:
        int8_works.cache_clear()


@needs_int8
def test_a_machine_whose_integers_overflow_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.ops.onednn.qlinear_pointwise

    def saturating(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        y: torch.Tensor = multiply(x, *rest)
        return y.clamp(-(2**15), 2**15 - 1)

    int8_works.cache_clear()
    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", saturating)
    try:
        assert not int8_works(torch.float32)
    finally:
        int8_works.cache_clear()
