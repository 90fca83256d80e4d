"""A model that is cut into stages gives transformers' hidden states, whatever the family; each has its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.errors import ConfigError, WeightsError
from anypool.model_executor import distributed
from anypool.model_executor.distributed import Ranks
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.stages import own_layers
from anypool.model_executor.weights.checkpoint import open_checkpoint
from anypool.model_executor.weights.repository import Repository
from tests.distributed.links import exchange
from tests.distributed.processes import in_processes
from tests.helpers import assert_close, copy_of, new_folder, tiny_bert, tiny_llama
from tests.models.parity import CPU, random_ids, reference_states, save_random
from tests.models.test_native_parity import DECODER, DECODERS, ENCODER, ENCODERS


def load_stage(folder: Path, monkeypatch: pytest.MonkeyPatch, stage: int, count: int, **engine: Any) -> Any:
    monkeypatch.setattr(distributed, "_ranks", Ranks(pp_rank=stage, pp_size=count))
    config = EngineConfig(model=str(folder), device="cpu", use_tqdm_on_load=False, **engine)
    return load_pooling_model(config, token_id=lambda token: 0).model


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_stages_equal_transformers(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model_cls, config_cls, settings = {**DECODERS, **ENCODERS}[name]
    sizes = {**(DECODER if name in DECODERS else ENCODER), **settings}
    layers = config_cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    model = model_cls._from_config(
        config_cls(**{**sizes, "num_hidden_layers": 4, layers: 4}), attn_implementation="eager"
    )
    folder = new_folder(name)
    save_random(model, folder)
    texts = random_ids(120)
    batch = PackedBatch.pack(texts, device=CPU)
    x_TD, sizes_of_stages = None, []
    for stage in range(stages):
        part = load_stage(folder, monkeypatch, stage, stages)
        sizes_of_stages.append(sum(parameter.numel() for parameter in part.parameters()))
        with torch.inference_mode():
            x_TD = part(batch.input_ids_T, batch.positions_T, batch.attn, intermediate=x_TD)
    assert x_TD is not None
    assert_close(x_TD, reference_states(model, texts))
    whole = sum(parameter.numel() for parameter in load_stage(folder, monkeypatch, 0, 1).parameters())
    assert max(sizes_of_stages) < whole


def test_layers_are_split_evenly() -> None:
    for count in range(4, 40):
        for size in range(1, 5):
            found = [own_layers(count, Ranks(pp_rank=stage, pp_size=size)) for stage in range(size)]
            assert [layer for layers in found for layer in layers] == list(range(count))
            assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_stage_reads_only_its_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_cls, read = type(open_checkpoint(Repository.open(str(tiny_llama())))), set[str]()
    tensors = checkpoint_cls.tensors

    def watched(self: Any, names: set[str]) -> Any:
        read.update(names)
        return tensors(self, names)

    monkeypatch.setattr(checkpoint_cls, "tensors", watched)
    load_stage(tiny_llama(), monkeypatch, 0, 2)
    assert any(".layers.0." in name for name in read)
    assert not any(".layers.1." in name or name.endswith("model.norm.weight") for name in read)


def test_a_tensor_with_no_place_in_any_stage_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of(tiny_llama())
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.layers.7.odd": torch.ones(2)}, file, metadata={"format": "pt"})
    for stage in range(2):
        with pytest.raises(WeightsError, match=r"1 tensors have no place in the model: model\.layers\.7\.odd"):
            load_stage(folder, monkeypatch, stage, 2)


def test_a_stage_that_fails_leaves_the_next_batch_right() -> None:
    nothing, [first, failure, last] = in_processes(exchange, pp_size=2)
    assert nothing == []
    assert failure == "the stage before has failed"
    assert torch.equal(first, torch.zeros(2, 3, dtype=torch.bfloat16))
    assert torch.equal(last, torch.full((2, 3), 3, dtype=torch.bfloat16))


def test_a_model_that_cannot_be_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_folder("gpt2")
    save_random(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4)), folder)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2: .* TransformersForCausalLM, which cannot be cut"):
        load_stage(folder, monkeypatch, 0, 2)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=3 is more than .* has layers, which are 2"):
        load_stage(tiny_bert(), monkeypatch, 0, 3)
    with pytest.raises(ConfigError, match=r"quantization='int8' compares a whole model"):
        load_stage(tiny_bert(), monkeypatch, 0, 2, quantization="int8")
