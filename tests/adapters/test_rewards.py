"""Reward and process-reward models give what transformers' backbone and their own heads give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.errors import CheckpointFormatError, ConfigError, InvalidPromptError, WeightsError
from tests.adapters.test_heads import COMMON, GPT, GQA, RAW, assert_same, logits_of, ragged, save_head, scores
from tests.helpers import edit_json, loaded
from tests.models.parity import random_ids, save_random

PAD, TAG, OTHER_TAG = 0, 5, 6


def save_reward(stem: str, head: dict[str, nn.Module], architecture: str, folder: Path, **changes: Any) -> Any:
    """A backbone of transformers' under `model.`, with a head beside it as remote code would write it."""
    torch.manual_seed(0)
    config = getattr(hf, f"{stem}Config")(**GQA, **changes)
    model = getattr(hf, f"{stem}Model")._from_config(config, attn_implementation="eager")
    save_random(model, folder)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, module in head.items():
        tensors |= {f"{name}.{part}": tensor.detach() for part, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", lambda keys: keys.update(architectures=[architecture]))
    return model


@torch.inference_mode()
def states_of(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    return [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in texts]


def last_not_pad(ids: list[int]) -> int:
    return max((i for i, token in enumerate(ids) if token != PAD), default=0)


def last(ids: list[int]) -> int:
    return len(ids) - 1


def with_tags() -> list[list[int]]:
    """Texts of 1, 7, 63 and 130 tokens with step tags inside, in a row and at the end."""
    texts = [[token if token not in (TAG, OTHER_TAG) else 9 for token in ids] for ids in ragged(pads=True)[:4]]
    texts[0] = [TAG]
    texts[1][3] = TAG
    texts[2][5:8], texts[2][40] = [TAG] * 3, OTHER_TAG
    texts[3][0], texts[3][64], texts[3][-1] = TAG, TAG, TAG
    return texts


TEXTS = ragged(pads=True)
STEPS = with_tags()


def two_layers(labels: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, labels)).requires_grad_(False)


REWARDS: dict[str, tuple[str, str, dict[str, Any], nn.Module, Callable[[list[int]], int]]] = {
    "score of two layers": ("Qwen2", "Qwen2ForRewardModel", {}, two_layers(1), last_not_pad),
    "score of one layer": ("Llama", "LlamaForRewardModel", {}, nn.Linear(32, 1, bias=False), last_not_pad),
    "v_head": ("Llama", "LlamaForRewardModel", {}, nn.Linear(32, 1, bias=False), last),
    "regression_head": ("Mistral", "MistralRewardModel", {"sliding_window": 20}, nn.Linear(32, 1, bias=False), last),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_is_the_raw_score_of_the_last_token(name: str, tmp_path: Path) -> None:
    stem, architecture, changes, head, place = REWARDS[name]
    tensor = name.partition(" ")[0]
    model = save_reward(stem, {tensor: head}, architecture, tmp_path, **changes)
    with torch.inference_mode():
        rows = [states[place(ids)] for states, ids in zip(states_of(model, TEXTS), TEXTS, strict=True)]
        expected = [head(row) for row in rows]
    with loaded(tmp_path) as llm:
        assert_same(scores(llm, TEXTS, task="reward"), expected)
        assert_same([output.outputs.data for output in llm.reward(TEXTS, use_tqdm=False)], expected)
        sigmoid = PoolingParams(activation="sigmoid")
        assert_same(scores(llm, TEXTS, sigmoid, task="reward"), [row.sigmoid() for row in expected])
        unit = [nn.functional.normalize(states[-1], dim=-1) for states in states_of(model, TEXTS)]
        assert_same(scores(llm, TEXTS, task="embed"), unit)
        assert type(llm.engine.loaded.model).__name__ == f"{stem}ForReward"


def test_a_classifier_of_one_label_gives_raw_rewards_and_probabilities(tmp_path: Path) -> None:
    model = save_head("Llama", GQA, "SequenceClassification", tmp_path, num_labels=1)
    logits = logits_of(model, TEXTS)
    with loaded(tmp_path) as llm:
        assert_same(scores(llm, TEXTS, task="reward"), logits)
        assert_same(scores(llm, TEXTS), [row.sigmoid() for row in logits])
        assert_same(scores(llm, TEXTS, RAW), logits)


# Process rewards


def process_reward(folder: Path) -> tuple[nn.Module, list[torch.Tensor]]:
    head = two_layers(2)
    model = save_reward("Qwen2", {"score": head}, "Qwen2ForProcessRewardModel", folder)
    with torch.inference_mode():
        return head, [head(rows) for rows in states_of(model, STEPS)]


def at(tag: int, rows: list[torch.Tensor], texts: list[list[int]]) -> list[torch.Tensor]:
    return [row[torch.tensor(ids) == tag] for row, ids in zip(rows, texts, strict=True)]


def test_a_process_reward_is_the_second_probability_at_each_step(tmp_path: Path) -> None:
    _, logits = process_reward(tmp_path)
    both = [rows.softmax(-1) for rows in at(TAG, logits, STEPS)]
    assert [len(rows) for rows in both] == [1, 1, 3, 3]
    with loaded(tmp_path, pooler_config=PoolerConfig(step_tag_id=TAG)) as llm:
        assert set(llm.supported_tasks) == {"embed", "token_embed", "token_classify", "reward"}
        assert_same(scores(llm, STEPS, task="reward"), [rows[:, 1:] for rows in both])
        assert_same(scores(llm, STEPS, task="token_classify"), both)
        assert_same(scores(llm, STEPS, RAW, task="reward"), at(TAG, logits, STEPS))
        other = PoolingParams(step_tag_id=OTHER_TAG)
        assert_same(
            scores(llm, STEPS[2:3], other, task="reward"),
            [rows.softmax(-1)[:, 1:] for rows in at(OTHER_TAG, logits[2:3], STEPS[2:3])],
        )
        right = PoolingParams(returned_token_ids=[1], activation="sigmoid")
        assert_same(
            scores(llm, STEPS, right, task="reward"), [rows[:, 1:].sigmoid() for rows in at(TAG, logits, STEPS)]
        )


def test_all_keeps_every_token_of_a_process_reward(tmp_path: Path) -> None:
    _, logits = process_reward(tmp_path)
    with loaded(tmp_path, pooler_config=PoolerConfig(pooling_type="ALL")) as llm:
        assert_same(scores(llm, STEPS, task="reward"), [rows.softmax(-1)[:, 1:] for rows in logits])


def test_the_step_tag_is_qwens_where_nobody_says_another(tmp_path: Path) -> None:
    process_reward(tmp_path)
    with loaded(tmp_path) as llm, pytest.raises(InvalidPromptError, match="input 0 has no step tag: the token 151651"):
        scores(llm, STEPS, task="reward")


def test_a_prompt_without_a_step_tag_is_refused_before_anything_runs(tmp_path: Path) -> None:
    process_reward(tmp_path)
    texts = [*STEPS, [7, 8, 9]]
    with loaded(tmp_path, pooler_config=PoolerConfig(step_tag_id=TAG)) as llm:
        llm.engine.loaded.model.register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
        for task in ("reward", "token_classify"):
            with pytest.raises(InvalidPromptError, match="input 4 has no step tag: the token 5 must stand after") as c:
                scores(llm, texts, task=task)
            assert c.value.param == "step_tag_id"
        with pytest.raises(InvalidPromptError, match="input 1 has no step tag"):  # it is what truncation cuts off
            llm.reward([STEPS[1], [9, 9, 9, 9, TAG]], truncate_prompt_tokens=4, use_tqdm=False)


# Process rewards out of a causal LM's own head

LMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**GQA, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaForCausalLM", {**GQA, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**GQA, "sliding_window": 20}),
    "gemma2-softcap-tied": ("Gemma2ForCausalLM", {**GQA, "head_dim": 16, "final_logit_softcapping": 0.5}),
    "granite-scaled": ("GraniteForCausalLM", {**GQA, "logits_scaling": 4.0}),
    "cohere-scaled-tied": ("CohereForCausalLM", {**GQA, "logit_scale": 0.25}),
    "phi-bias": ("PhiForCausalLM", COMMON),
    "gpt2-tied": ("GPT2LMHeadModel", GPT),
    "gpt-neox": ("GPTNeoXForCausalLM", COMMON),
    "opt-tied": ("OPTForCausalLM", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}),
}
GOOD, BAD = 48, 87


def save_lm(name: str, folder: Path) -> Any:
    architecture, values = LMS[name]
    torch.manual_seed(0)
    cls = getattr(hf, architecture)
    model = cls._from_config(cls.config_class(**values), attn_implementation="eager")
    save_random(model, folder)
    return model


@pytest.mark.parametrize("name", LMS)
def test_a_causal_lm_rewards_steps_with_the_softmax_of_two_tokens(name: str, tmp_path: Path) -> None:
    model = save_lm(name, tmp_path)
    logits = [rows[:, [GOOD, BAD]] for rows in at(TAG, logits_of(model, STEPS), STEPS)]
    expected = [rows.softmax(-1) for rows in logits]
    config = PoolerConfig(pooling_type="STEP", step_tag_id=TAG, returned_token_ids=(GOOD, BAD))
    with loaded(tmp_path, pooler_config=config) as llm:
        assert_same(scores(llm, STEPS, task="token_classify"), expected)
        assert_same(scores(llm, STEPS, task="reward"), expected)
        assert_same(scores(llm, STEPS, RAW, task="reward"), logits)


def test_one_token_of_a_causal_lm_rewards_steps_with_its_sigmoid(tmp_path: Path) -> None:
    model = save_lm("llama", tmp_path)
    config = PoolerConfig(pooling_type="STEP", step_tag_id=TAG, returned_token_ids=(GOOD,))
    with loaded(tmp_path, pooler_config=config) as llm:
        logits = at(TAG, logits_of(model, STEPS), STEPS)
        assert_same(scores(llm, STEPS, task="reward"), [rows[:, GOOD : GOOD + 1].sigmoid() for rows in logits])


def test_a_token_classifier_rewards_steps(tmp_path: Path) -> None:
    model = save_head("Llama", GQA, "TokenClassification", tmp_path, num_labels=2)
    logits = logits_of(model, STEPS)
    with loaded(tmp_path, pooler_config={"pooling_type": "STEP", "step_tag_id": TAG}) as llm:
        assert_same(scores(llm, STEPS, task="reward"), [rows.softmax(-1) for rows in at(TAG, logits, STEPS)])
    with loaded(tmp_path) as llm:
        assert_same(scores(llm, STEPS, task="reward"), logits)
        chosen = PoolingParams(step_tag_id=TAG)
        assert_same(scores(llm, STEPS, chosen, task="token_classify"), [r.softmax(-1) for r in at(TAG, logits, STEPS)])


@pytest.mark.parametrize("convert", ["auto", "reward"])
def test_the_reward_of_a_causal_lm_without_a_head_is_its_states(convert: str, tmp_path: Path) -> None:
    model = save_lm("llama", tmp_path)
    expected = states_of(model.model, TEXTS)
    with loaded(tmp_path, convert=convert) as llm:
        assert_same(scores(llm, TEXTS, task="reward"), expected)
        unit = [nn.functional.normalize(rows, dim=-1) for rows in expected]
        assert_same(scores(llm, TEXTS, PoolingParams(normalize=True), task="reward"), unit)


def test_an_encoder_gives_its_states_as_a_reward_where_that_is_asked(tmp_path: Path) -> None:
    model = hf.BertModel._from_config(hf.BertConfig(**COMMON), attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(120)
    with loaded(tmp_path) as llm:
        assert "reward" not in llm.supported_tasks
    with loaded(tmp_path, convert="reward") as llm:
        assert_same(scores(llm, texts, task="reward"), states_of(model, texts))
        assert type(llm.engine.loaded.model).__name__ == "BertForReward"


# Errors


def test_an_unknown_reward_head_names_those_that_are_known(tmp_path: Path) -> None:
    save_reward("Llama", {"gating": nn.Linear(32, 4)}, "LlamaForRewardModel", tmp_path)
    match = "LlamaForRewardModel has none of the reward heads that are known: score.0, score, v_head, regression_head"
    with pytest.raises(CheckpointFormatError, match=match):
        LLM(tmp_path, device="cpu", use_tqdm_on_load=False)


def test_half_a_reward_head_is_refused(tmp_path: Path) -> None:
    head = {"score.0": nn.Linear(32, 32)}
    save_reward("Qwen2", head, "Qwen2ForRewardModel", tmp_path)
    with pytest.raises(WeightsError, match=r"the head of Qwen2ForRewardModel needs a tensor 'score.2.weight'"):
        LLM(tmp_path, device="cpu", use_tqdm_on_load=False)


def test_layers_that_do_not_fit_one_another_are_refused(tmp_path: Path) -> None:
    head = {"score.0": nn.Linear(32, 32), "score.2": nn.Linear(31, 1)}
    save_reward("Qwen2", head, "Qwen2ForRewardModel", tmp_path)
    with pytest.raises(WeightsError, match=r"'score.2.weight' has shape \[1, 31\], and what comes before gives rows"):
        LLM(tmp_path, device="cpu", use_tqdm_on_load=False)


def test_a_process_reward_of_one_label_is_refused(tmp_path: Path) -> None:
    save_reward("Qwen2", {"score": two_layers(1)}, "Qwen2ForProcessRewardModel", tmp_path)
    with pytest.raises(ConfigError, match="is column 1 of its head, which has the columns 0 to 0"):
        LLM(tmp_path, device="cpu", use_tqdm_on_load=False)


def test_a_second_head_is_a_tensor_without_a_place(tmp_path: Path) -> None:
    heads = {"score": nn.Linear(32, 1, bias=False), "v_head": nn.Linear(32, 1, bias=False)}
    save_reward("Llama", heads, "LlamaForRewardModel", tmp_path)
    with pytest.raises(WeightsError, match=r"1 tensors have no place in the model: v_head\.weight"):
        LLM(tmp_path, device="cpu", use_tqdm_on_load=False)


def test_rows_that_the_lm_head_does_not_have_are_refused(tmp_path: Path) -> None:
    save_lm("llama", tmp_path)
    for wrong in (120, -1):
        with pytest.raises(ConfigError, match=f"the LM head has rows 0 to 119, and not {wrong}"):
            LLM(tmp_path, device="cpu", pooler_config={"returned_token_ids": [wrong]})


def test_rows_of_an_lm_head_that_is_not_there_are_refused(tmp_path: Path) -> None:
    hf.LlamaModel(hf.LlamaConfig(**GQA)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"there is no LM head to take rows from: none of lm_head\.weight"):
        LLM(tmp_path, device="cpu", pooler_config={"returned_token_ids": [5, 6]})
