"""`as_pooling_model` makes a real subclass, once, without the LM head."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import anypool
from anypool import as_pooling_model, is_pooling_model, is_text_generation_model
from anypool.adapters.heads import Head, HeadRecipe
from anypool.adapters.pooling_model import PoolingMixin
from anypool.errors import InvalidParameterError, UnsupportedTaskError
from anypool.model_executor.layers.rotary import RopeConfig
from anypool.model_executor.model_config import FULL, HeadConfig, ModelConfig
from anypool.model_executor.models.bert import BertModel
from anypool.model_executor.models.interfaces import is_encoder_model
from anypool.model_executor.models.llama import LlamaForCausalLM
from anypool.model_executor.models.transformers_backend import TransformersForCausalLM, TransformersModel
from anypool.model_executor.packed_batch import PackedBatch
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.tasks import PoolingTask

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
        (LlamaForCausalLM, "classify", "LlamaForSequenceClassification"),
        (LlamaForCausalLM, "reward", "LlamaForReward"),
        (LlamaForCausalLM, "token_classify", "LlamaForTokenClassification"),
        (BertModel, "classify", "BertForSequenceClassification"),
        (BertModel, "reward", "BertForReward"),
        (ForeignForCausalLM, "embed", "ForeignForEmbedding"),
    ],
)
def test_it_is_a_subclass_named_after_the_task(model_cls: type[nn.Module], task: str, name: str) -> None:
    pooling_cls: Any = as_pooling_model(model_cls, task)
    assert issubclass(pooling_cls, model_cls)
    assert pooling_cls.__name__ == name
    assert is_pooling_model(pooling_cls)
    assert not is_text_generation_model(pooling_cls)
    assert pooling_cls.__mro__[:3] == (pooling_cls, PoolingMixin, model_cls)
    assert pooling_cls.__module__ == model_cls.__module__
    assert pooling_cls.pooling_task is PoolingTask(task)
    assert is_encoder_model(pooling_cls) == is_encoder_model(model_cls)
    assert not is_pooling_model(model_cls), "the class that it was made from is as it was"


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


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(
        InvalidParameterError, match="'score' is unknown; known: embed, classify, reward, sparse_embed, token_embed"
    ):
        as_pooling_model(LlamaForCausalLM, "score")


STATES = {"embed": 16, "token_embed": 16}


@pytest.mark.parametrize(
    ("model_cls", "task", "columns"),
    [
        (LlamaForCausalLM, "embed", {**STATES, "reward": 16}),
        (LlamaForCausalLM, "token_embed", {**STATES, "reward": 16}),
        (LlamaForCausalLM, "reward", {**STATES, "reward": 16}),
        (LlamaForCausalLM, "classify", {**STATES, "classify": 3, "token_classify": 3, "reward": 3}),
        (LlamaForCausalLM, "token_classify", {**STATES, "token_classify": 3, "reward": 3}),
        (BertModel, "embed", STATES),
        (BertModel, "reward", {**STATES, "reward": 16}),
        (BertModel, "classify", {**STATES, "classify": 3, "token_classify": 3, "reward": 3}),
    ],
)
def test_a_class_built_without_a_checkpoint_runs(
    model_cls: type[nn.Module], task: str, columns: dict[str, int]
) -> None:
    model: Any = as_pooling_model(model_cls, task)(CONFIG.replace(head=HeadConfig(labels=3), type_vocab_size=2))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # their memory is not initialised
        parameter.detach().copy_(torch.randn(parameter.shape, generator=generator) / 4)
    assert {str(served) for served in model.pooler.tasks} == set(columns)
    texts = [[5, 6, 0], [7, 8, 9, 1, 0, 0, 4], [3]]
    batch = PackedBatch.pack(texts, device=torch.device("cpu"), pad_token_id=0)
    hidden_TD = model(batch.input_ids_T, batch.positions_T, batch.attn).detach()
    for served, width in columns.items():
        groups = model.pooler(hidden_TD, batch.segments, [PoolingPlan(task=PoolingTask(served))] * len(texts))
        found: dict[int, torch.Tensor] = {}
        for group in groups:
            parts = group.values.unbind(0) if group.rows is None else group.values.split(group.rows)
            found |= dict(zip(group.requests, parts, strict=True))
        for i, rows in enumerate(hidden_TD.split([len(ids) for ids in texts])):
            expected = rows if width == 16 else rows @ model.score.weight.T
            if served in ("embed", "classify") or (served, task) == ("reward", "classify"):
                # A causal LM scores its last token that is no padding; an encoder pools as it does for embeddings.
                last = (1, 6, 0)[i] if width == 3 else -1
                expected = expected.mean(dim=0) if model_cls is BertModel else expected[last]
            torch.testing.assert_close(found[i], expected, atol=1e-6, rtol=1e-6)


def test_a_class_without_a_count_of_labels_has_two() -> None:
    model: Any = as_pooling_model(LlamaForCausalLM, "classify")(CONFIG)
    assert model.score.weight.shape == (2, 16)


def test_a_class_scores_with_the_head_that_it_is_given() -> None:
    module = nn.Linear(16, 5)
    head = Head(module=module, recipe=HeadRecipe(layers=(), token_level=True), labels=5)
    model: Any = as_pooling_model(LlamaForCausalLM, "token_classify")(CONFIG, head)
    assert model.pooler[PoolingTask.TOKEN_CLASSIFY].head is module
    assert not hasattr(model, "score")


def test_a_subclass_of_a_pooling_class_is_one() -> None:
    base: Any = as_pooling_model(LlamaForCausalLM, "classify")

    class Mine(base):  # type: ignore[misc]
        """A user's own."""

    assert is_pooling_model(Mine)
    assert as_pooling_model(Mine, "embed") is Mine
    assert Mine(CONFIG).pooler.tasks == base(CONFIG).pooler.tasks


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
