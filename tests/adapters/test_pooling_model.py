"""`as_pooling_model` makes a real subclass, once, without the LM head."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import anypool
from anypool import as_pooling_model, is_pooling_model, is_text_generation_model
from anypool.errors import UnsupportedTaskError
from anypool.model_executor.layers.rotary import RopeConfig
from anypool.model_executor.model_config import FULL, ModelConfig
from anypool.model_executor.models.bert import BertModel
from anypool.model_executor.models.llama import LlamaForCausalLM
from anypool.model_executor.models.transformers_backend import TransformersForCausalLM, TransformersModel

CONFIG = ModelConfig(
    name="tiny",
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=24,
    hidden_act="silu",
    vocab_size=50,
    max_positions=64,
    layer_types=(FULL,),
    rope={FULL: RopeConfig(size=8, max_positions=64, original_max_positions=64)},
)


class ForeignLM(nn.Module):
    """A causal LM that knows nothing of anypool's hooks."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    supports_multimodal = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids_T: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.embed(input_ids_T)

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_TD)


class ForeignForCausalLM(ForeignLM):
    pass


class Neither(nn.Module):
    pass


def test_the_same_class_comes_back_each_time() -> None:
    assert as_pooling_model(LlamaForCausalLM) is as_pooling_model(LlamaForCausalLM, "embed")
    assert as_pooling_model(LlamaForCausalLM) is not as_pooling_model(LlamaForCausalLM, "token_embed")


@pytest.mark.parametrize(
    ("model_cls", "task", "name"),
    [
        (LlamaForCausalLM, "embed", "LlamaForEmbedding"),
        (LlamaForCausalLM, "token_embed", "LlamaForTokenEmbedding"),
        (TransformersForCausalLM, "embed", "TransformersForEmbedding"),
        (TransformersModel, "embed", "TransformersForEmbedding"),
        (BertModel, "embed", "BertForEmbedding"),
        (ForeignForCausalLM, "embed", "ForeignForEmbedding"),
    ],
)
def test_it_is_a_subclass_named_after_the_task(model_cls: type[nn.Module], task: str, name: str) -> None:
    pooling_cls = as_pooling_model(model_cls, task)
    assert issubclass(pooling_cls, model_cls)
    assert pooling_cls.__name__ == name
    assert is_pooling_model(pooling_cls)
    assert not is_text_generation_model(pooling_cls)


def test_a_pooling_model_is_returned_unchanged() -> None:
    pooling_cls = as_pooling_model(LlamaForCausalLM)
    assert as_pooling_model(pooling_cls) is pooling_cls


@pytest.mark.parametrize("wrong", [Neither, "LlamaForCausalLM", None, int])
def test_what_is_neither_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"as_pooling_model takes|cannot be made a pooling model"):
        as_pooling_model(wrong)


@pytest.mark.parametrize(
    ("task", "tasks"),
    [
        ("classify", ["embed", "token_embed", "classify", "token_classify", "reward"]),
        ("token_classify", ["embed", "token_embed", "token_classify", "reward"]),
        ("reward", ["embed", "token_embed", "reward"]),
    ],
)
def test_a_class_made_for_scores_brings_an_empty_layer_for_them(task: str, tasks: list[str]) -> None:
    model: Any = as_pooling_model(LlamaForCausalLM, task)(CONFIG)
    assert [name.value for name in model.pooler.tasks] == tasks
    scores = [name for name, _ in model.named_parameters() if name.startswith("score")]
    assert scores == ([] if task == "reward" else ["score.weight"])


def test_the_lm_head_is_never_allocated() -> None:
    built = []

    class Counting(LlamaForCausalLM):
        def build_lm_head(self) -> nn.Module | None:
            built.append(1)
            return super().build_lm_head()

    model = as_pooling_model(Counting)(CONFIG)
    assert model.lm_head is None
    assert built == []
    assert Counting(CONFIG).lm_head is not None


def test_a_foreign_class_loses_its_head_after_construction() -> None:
    model = as_pooling_model(ForeignForCausalLM)(CONFIG)
    assert model.lm_head is None
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]


def test_class_attributes_are_inherited() -> None:
    pooling_cls: Any = as_pooling_model(ForeignForCausalLM)
    assert pooling_cls.packed_modules_mapping is ForeignLM.packed_modules_mapping
    assert pooling_cls.supports_multimodal


def test_a_pooling_model_has_no_logits() -> None:
    model: Any = as_pooling_model(LlamaForCausalLM)(CONFIG)
    with pytest.raises(UnsupportedTaskError, match="has no LM head"):
        model.compute_logits(torch.zeros(1, 16))


def test_generate_is_refused() -> None:
    with pytest.raises(anypool.AnypoolError, match="does not generate text"):
        anypool.LLM("anything", runner="generate")


def test_a_registered_class_serves_a_checkpoint(tmp_path: Any) -> None:
    import transformers as hf

    class MyLlama(LlamaForCausalLM):
        """A user's own class."""

    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    anypool.register_model("MyLlamaForCausalLM", MyLlama)
    with anypool.LLM(
        str(tmp_path), hf_overrides={"architectures": ["MyLlamaForCausalLM"]}, use_tqdm_on_load=False
    ) as llm:
        assert type(llm.engine.loaded.model).__name__ == "MyLlamaForEmbedding"
        [output] = llm.embed([[1, 2, 3]], use_tqdm=False)
        assert output.outputs.data.shape == (16,)
