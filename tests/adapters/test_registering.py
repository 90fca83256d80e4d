"""Classes of one's own: taken as they are, read from their checkpoint, and under the user's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from anypool import LLM, ModelRegistry, PoolerConfig, PoolingParams, PoolingTask, is_pooling_model, register_model
from anypool.errors import ConfigError, InvalidParameterError, UnsupportedTaskError, WeightsError
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.llama import LlamaForCausalLM
from anypool.pooling.methods import PoolingType
from anypool.pooling.plan import ScoreDefaults
from anypool.pooling.pooler import DispatchPooler, EmbedPooler, ScorePooler, TokenScorePooler
from tests.adapters.test_heads import GQA, RAW, assert_same, ragged, scores
from tests.helpers import edit_json, loaded
from tests.models.parity import save_random

SIZE, LABELS = 10, 4
TEXTS = ragged(pads=True)


class TwoHeadedLlama(LlamaForCausalLM):
    """A projection for embeddings and a classifier, each a tensor of the checkpoint."""

    is_pooling_model = True
    embedding_size = SIZE
    score_defaults: ClassVar[dict[PoolingTask, ScoreDefaults]] = {
        PoolingTask.CLASSIFY: ScoreDefaults(activation="sigmoid", columns=LABELS),
        PoolingTask.TOKEN_CLASSIFY: ScoreDefaults(activation="tanh", columns=LABELS, token_level=True, step_tag_id=0),
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.lm_head = None
        self.down = Linear(config.hidden_size, SIZE)
        self.judge = Linear(config.hidden_size, LABELS, bias=True)
        self.pooler = DispatchPooler(
            {
                PoolingTask.EMBED: EmbedPooler((PoolingType.MEAN,), nn.Sequential(self.down)),
                PoolingTask.CLASSIFY: ScorePooler((PoolingType.MAX,), self.judge),
                PoolingTask.TOKEN_CLASSIFY: TokenScorePooler(self.judge),
            }
        )


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_own", {})


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GQA))
    save_random(model, tmp_path)
    torch.manual_seed(0)
    extra = {
        "down.weight": torch.randn(SIZE, 32),
        "judge.weight": torch.randn(LABELS, 32) / 6,
        "judge.bias": torch.randn(LABELS),
    }
    save_file({**load_file(tmp_path / "model.safetensors"), **extra}, tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", lambda config: config.update(architectures=["TwoHeadedLlama"]))
    register_model("TwoHeadedLlama", TwoHeadedLlama)
    return tmp_path, model, extra


Checkpoint = tuple[Path, Any, dict[str, torch.Tensor]]


@torch.inference_mode()
def states_of(model: Any) -> list[torch.Tensor]:
    return [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in TEXTS]


def test_the_pooling_of_a_pooler_of_ones_own_is_not_called_a_guess(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(checkpoint[0]):
        assert "is a guess" not in caplog.text


def test_a_pooler_of_ones_own_reads_its_tensors_and_keeps_its_defaults(checkpoint: Checkpoint) -> None:
    folder, model, extra = checkpoint
    judged = [rows @ extra["judge.weight"].T + extra["judge.bias"] for rows in states_of(model)]
    most = [rows.amax(0) @ extra["judge.weight"].T + extra["judge.bias"] for rows in states_of(model)]
    down = [rows.mean(0) @ extra["down.weight"].T for rows in states_of(model)]
    with loaded(folder) as llm:
        assert type(llm.engine.loaded.model) is TwoHeadedLlama
        assert llm.supported_tasks == ("embed", "classify", "token_classify")
        assert_same(scores(llm, TEXTS, task="embed"), [nn.functional.normalize(row, dim=-1) for row in down])
        raw = PoolingParams(normalize=False, dimensions=7)
        assert_same(scores(llm, TEXTS, raw, task="embed"), [row[:7] for row in down])
        assert_same(scores(llm, TEXTS), [row.sigmoid() for row in most])
        assert_same(scores(llm, TEXTS, RAW), most)
        tagged = [i for i, ids in enumerate(TEXTS) if 0 in ids]
        steps = [judged[i][torch.tensor(TEXTS[i]) == 0].tanh() for i in tagged]
        assert_same(scores(llm, [TEXTS[i] for i in tagged], task="token_classify"), steps)
        with pytest.raises(InvalidParameterError, match="it supports 1 to 10"):
            scores(llm, TEXTS, PoolingParams(dimensions=11), task="embed")
        with pytest.raises(
            UnsupportedTaskError, match=r"'reward' is not served by .*; it serves embed, classify, token"
        ):
            scores(llm, TEXTS, task="reward")


def test_the_users_settings_win_over_those_of_a_class_of_ones_own(checkpoint: Checkpoint) -> None:
    folder, model, extra = checkpoint
    judged = [rows @ extra["judge.weight"].T + extra["judge.bias"] for rows in states_of(model)]
    most = [rows.amax(0) @ extra["judge.weight"].T + extra["judge.bias"] for rows in states_of(model)]
    config = PoolerConfig(
        activation="softmax",
        logit_mean=0.5,
        logit_sigma=2.0,
        tok_pooling_type="ALL",
        returned_token_ids=(3, 1),
        dimensions=4,
        normalize=False,
    )
    with loaded(folder, pooler_config=config) as llm:
        assert_same(scores(llm, TEXTS), [((row - 0.5) / 2).softmax(-1) for row in most])
        expected = [((rows[:, [3, 1]] - 0.5) / 2).softmax(-1) for rows in judged]
        assert_same(scores(llm, TEXTS, task="token_classify"), expected)
        down = [(rows.mean(0) @ extra["down.weight"].T)[:4] for rows in states_of(model)]
        assert_same(scores(llm, TEXTS, task="embed"), down)
    with loaded(folder, pooler_config=PoolerConfig(use_activation=False, step_tag_id=2)) as llm:
        assert_same(scores(llm, TEXTS), most)
        assert_same(scores(llm, TEXTS[2:3], task="token_classify"), [judged[2][torch.tensor(TEXTS[2]) == 2]])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pooling_type": "MEAN"}, "pooling_type='MEAN' has no effect: TwoHeadedLlama has a pooler of its own"),
        ({"returned_token_ids": [4]}, "returned_token_ids has 4; the head has the columns 0 to 3"),
        ({"dimensions": 11}, "dimensions=11 is not available"),
    ],
    ids=str,
)
def test_settings_that_a_pooler_of_ones_own_cannot_follow_are_refused(
    settings: dict[str, Any], match: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM(checkpoint[0], device="cpu", use_tqdm_on_load=False, pooler_config=settings)


def test_a_tensor_that_a_class_of_ones_own_needs_or_does_not_know_is_named(checkpoint: Checkpoint) -> None:
    file = checkpoint[0] / "model.safetensors"
    tensors = load_file(file)
    bias = tensors.pop("judge.bias")
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"1 tensors that the model needs are missing: judge\.bias"):
        LLM(checkpoint[0], device="cpu", use_tqdm_on_load=False)
    save_file({**tensors, "judge.bias": bias, "jury.weight": torch.zeros(2)}, file)
    with pytest.raises(WeightsError, match=r"1 tensors have no place in the model: jury\.weight"):
        LLM(checkpoint[0], device="cpu", use_tqdm_on_load=False)


def test_convert_none_takes_a_pooling_model_and_nothing_else(checkpoint: Checkpoint) -> None:
    with loaded(checkpoint[0], convert="none") as llm:
        assert is_pooling_model(type(llm.engine.loaded.model))
    with pytest.raises(ConfigError, match="convert='none': LlamaForCausalLM is not a pooling model"):
        LLM(checkpoint[0], device="cpu", convert="none", hf_overrides={"architectures": ["LlamaForCausalLM"]})


def test_a_class_is_registered_by_the_name_of_its_module(checkpoint: Checkpoint) -> None:
    register_model("TwoHeadedLlama", f"{__name__}:TwoHeadedLlama")
    with loaded(checkpoint[0]) as llm:
        assert type(llm.engine.loaded.model) is TwoHeadedLlama
    assert "TwoHeadedLlama" in ModelRegistry.get_supported_archs()


@pytest.mark.parametrize("wrong", ["TwoHeadedLlama", "a:b:c", 3, None, dict])
def test_what_is_no_module_class_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"model_cls=.* is not of the form|model_cls=.* is neither an nn.Module class"
    ):
        register_model("TwoHeadedLlama", wrong)
    with pytest.raises(ConfigError, match="architecture='' is not a name"):
        register_model("", TwoHeadedLlama)


def test_a_registered_class_that_cannot_pool_is_refused_when_it_is_loaded(checkpoint: tuple[Path, Any]) -> None:
    register_model("Silent", torch.nn.Linear)
    with pytest.raises(ConfigError, match=r"Silent cannot be loaded: Linear .* has no compute_logits"):
        LLM(checkpoint[0], device="cpu", use_tqdm_on_load=False, hf_overrides={"architectures": ["Silent"]})


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("no_such_package_at_all.module:Class", "cannot be imported: No module named 'no_such_package_at_all'"),
        (f"{__name__}:NoSuchClass", "cannot be imported: .* has no attribute 'NoSuchClass'"),
        (f"{__name__}:TEXTS", r"is \[.* and not an nn.Module class"),
    ],
)
def test_a_registered_name_that_does_not_lead_to_a_class_is_refused(
    path: str, match: str, checkpoint: Checkpoint
) -> None:
    register_model("TwoHeadedLlama", path)
    with pytest.raises(ConfigError, match=f"TwoHeadedLlama is registered as '{path}', which {match}"):
        LLM(checkpoint[0], device="cpu", use_tqdm_on_load=False)
