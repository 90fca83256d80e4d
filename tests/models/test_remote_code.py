"""Code that comes with a checkpoint runs where the user trusts it, and is never run otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import dynamic_module_utils

from anypool.errors import UnsupportedArchitectureError
from anypool.model_executor.models.transformers_backend import Way
from anypool.model_executor.packed_batch import PackedBatch
from tests.models.parity import CPU, load, random_ids, run, save_random
from tests.models.test_transformers_backend import GQA

CODE = '''
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class RunningMeanConfig(PreTrainedConfig):
    model_type = "running_mean"

    def __init__(self, vocab_size=120, hidden_size=32, num_hidden_layers=1, **others):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**others)


class RunningMeanModel(PreTrainedModel):
    """Each token is the mean of those up to it."""

    config_class = RunningMeanConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, return_dict=True):
        sums = self.dense(self.embed(input_ids)).cumsum(1)
        return BaseModelOutput(last_hidden_state=sums / torch.arange(1, 1 + input_ids.shape[1])[:, None])
'''


def save_remote(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(120, 32, generator=generator),
        "dense.weight": torch.randn(32, 32, generator=generator),
        "dense.bias": torch.randn(32, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "modeling_running_mean.py").write_text(CODE)
    classes = {"AutoConfig": "RunningMeanConfig", "AutoModel": "RunningMeanModel"}
    config = {
        "model_type": "running_mean",
        "architectures": ["RunningMeanModel"],
        "auto_map": {auto: f"modeling_running_mean.{name}" for auto, name in classes.items()},
    }
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 120, "hidden_size": 32}))
    return tensors["embed.weight"], tensors["dense.weight"], tensors["dense.bias"]


def test_code_that_is_trusted_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "model").mkdir()
    embed, weight, bias = save_remote(tmp_path / "model")
    model = load(tmp_path / "model", trust_remote_code=True)
    assert model.way is Way.PADDED  # it takes no position_ids, and padding stands behind what a token sees
    texts = random_ids(120, (3, 9, 1, 10))
    expected = [
        torch.nn.functional.linear(embed[ids], weight, bias).cumsum(0) / torch.arange(1, 1 + len(ids))[:, None]
        for ids in texts
    ]
    actual = run(model, PackedBatch.pack(texts, device=CPU))
    torch.testing.assert_close(actual, torch.cat(expected), atol=1e-5, rtol=0)


def test_code_that_is_not_trusted_is_refused(tmp_path: Path) -> None:
    save_remote(tmp_path)
    (tmp_path / "modeling_running_mean.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(UnsupportedArchitectureError, match="'running_mean'; its own code is needed: pass trust_remote"):
        load(tmp_path)


def test_a_known_family_with_code_of_its_own_runs_without_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random(hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_none.NoModel"}}))
    with caplog.at_level(logging.WARNING):
        assert type(load(tmp_path)).__name__ == "LlamaForEmbedding"
    assert "comes with code of its own, which does not run: pass trust_remote_code=True" in caplog.text
