"""A classifier out of LM-head rows gives the logits of the whole causal LM, and reads those rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from anypool import LLM, PoolingParams
from anypool.errors import CheckpointFormatError, ConfigError
from anypool.model_executor.weights.checkpoint import SafetensorsCheckpoint
from tests.helpers import assert_close, copy_of, edit_json, loaded
from tests.rerankers import FAMILIES, causal_lm, logits, tokenizer

TEXTS = ["a cat", "yes", "The story, of a query.\n" * 9, "0 or 1?"]
RAW = PoolingParams(activation="none")
# Tokens that no known reranker answers with in the family it is built on.
TWO = {"classifier_from_token": ["No", "1"], "method": "from_2_way_softmax"}
THREE = {"classifier_from_token": ["No", "1", "Yes"], "method": "no_post_processing"}


def token_ids(*tokens: str) -> list[int]:
    return [tokenizer().convert_tokens_to_ids(token) for token in tokens]


def prompts(folder: Path) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]


def classified(llm: LLM, params: PoolingParams | None = None) -> torch.Tensor:
    return torch.stack([output.outputs.data for output in llm.classify(TEXTS, params, use_tqdm=False)])


def assert_rows(folder: Path, **engine: Any) -> None:
    """Both methods equal the logits of the whole model."""
    expected_NV = logits(folder, prompts(folder))
    with loaded(folder, hf_overrides=TWO, **engine) as llm:
        false, true = token_ids("No", "1")
        assert_close(classified(llm, RAW), (expected_NV[:, true] - expected_NV[:, false]).unsqueeze(1))
        assert_close(classified(llm), expected_NV[:, [false, true]].softmax(dim=-1)[:, 1:])
    with loaded(folder, hf_overrides=THREE, **engine) as llm:
        expected_NC = expected_NV[:, token_ids("No", "1", "Yes")]
        assert expected_NC.std() > 1e-2
        assert_close(classified(llm, RAW), expected_NC)
        assert_close(classified(llm), expected_NC.softmax(dim=-1))


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, tied) for family in FAMILIES if family != "cohere" for tied in (False, True)), ("cohere", True)],
)
def test_rows_give_the_logits_of_the_whole_model(family: str, tied: bool) -> None:
    assert_rows(causal_lm(family, tied=tied))


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("gemma2", True)])
def test_rows_through_the_transformers_backend_give_the_same(family: str, tied: bool) -> None:
    assert_rows(causal_lm(family, tied=tied), model_impl="transformers")


@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_found_in_shards(tied: bool) -> None:
    folder = causal_lm("qwen3", tied=tied, shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_rows(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_found_in_pickled_weights(tied: bool) -> None:
    folder = copy_of(causal_lm("qwen2", tied=tied))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_rows(folder)


def test_a_bias_of_the_lm_head_is_added() -> None:
    folder = copy_of(causal_lm("qwen2"))
    tensors = load_file(folder / "model.safetensors")
    bias = torch.randn(tensors["lm_head.weight"].shape[0])
    save_file(tensors | {"lm_head.bias": bias}, folder / "model.safetensors")
    ids = token_ids("No", "1", "Yes")
    expected_NC = logits(causal_lm("qwen2"), prompts(folder))[:, ids] + bias[ids]
    with loaded(folder, hf_overrides=THREE) as llm:
        assert_close(classified(llm, RAW), expected_NC)


class Spy:
    """What is read of a checkpoint: tensors by name, and rows by name and place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[str] = []
        self.rows: list[tuple[str, list[int]]] = []
        read_tensors, read_rows = SafetensorsCheckpoint.tensors, SafetensorsCheckpoint.rows

        def tensors(checkpoint: Any, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in read_tensors(checkpoint, wanted):
                self.tensors.append(name)
                yield name, tensor

        def rows(checkpoint: Any, name: str, indices: Sequence[int]) -> torch.Tensor:
            self.rows.append((name, list(indices)))
            return read_rows(checkpoint, name, indices)

        monkeypatch.setattr(SafetensorsCheckpoint, "tensors", tensors)
        monkeypatch.setattr(SafetensorsCheckpoint, "rows", rows)


@pytest.mark.parametrize("shard", [None, "40KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_only_the_rows_that_are_needed_are_read(
    monkeypatch: pytest.MonkeyPatch, family: str, tied: bool, shard: str | None
) -> None:
    folder = causal_lm(family, tied=tied, shard=shard)
    spy = Spy(monkeypatch)
    with loaded(folder, hf_overrides=TWO):
        pass
    stored = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert spy.rows == [(stored, token_ids("No", "1"))]
    assert "lm_head.weight" not in spy.tensors
    assert spy.tensors.count("model.embed_tokens.weight") == 1
    assert len(set(spy.tensors)) == len(spy.tensors)


def test_the_flag_of_the_original_qwen3_reranker_means_the_two_way_softmax() -> None:
    overrides = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    overrides["architectures"] = ["Qwen3ForSequenceClassification"]
    folder = causal_lm("qwen3")
    expected_NV = logits(folder, prompts(folder))
    no, yes = token_ids("no", "yes")
    with loaded(folder, hf_overrides=overrides) as llm:
        assert_close(classified(llm), torch.sigmoid(expected_NV[:, yes] - expected_NV[:, no]).unsqueeze(1))


def test_the_keys_are_read_from_config_json_too() -> None:
    folder = copy_of(causal_lm("qwen3"))
    edit_json(folder / "config.json", lambda config: config.update(TWO))
    with loaded(folder) as llm, loaded(causal_lm("qwen3"), hf_overrides=TWO) as other:
        assert_close(classified(llm), classified(other), atol=0)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({**TWO, "classifier_from_token": ["no", "not at all"]}, r"'not at all' is not one token.*it is \d+, \["),
        ({**TWO, "classifier_from_token": ["no", ""]}, "'' is not one token.*it is 0"),
        ({**TWO, "classifier_from_token": ["no", "yes", "1"]}, r"two tokens \[false, true\].*\['no', 'yes', '1'\]"),
        ({**TWO, "classifier_from_token": ["yes"]}, r"two tokens \[false, true\].*\['yes'\]"),
        ({**TWO, "classifier_from_token": "yes"}, "classifier_from_token='yes'; it must be a list of names"),
        ({**TWO, "classifier_from_token": [3, 4]}, r"classifier_from_token=\[3, 4\]; it must be a list of names"),
        (
            {**TWO, "classifier_from_token": ["yes", "yes"]},
            r"\['yes', 'yes'\], which are the tokens .*one stands twice",
        ),
        ({**TWO, "method": "from_3_way"}, "method='from_3_way' is unknown.*known: from_2_way_softmax, no_post"),
        ({"classifier_from_token": ["no", "yes"]}, "method=None is unknown.*known: from_2_way_softmax, no_post"),
        ({"method": "no_post_processing"}, "needs classifier_from_token"),
        ({"is_original_qwen3_reranker": True}, "needs classifier_from_token"),
    ],
)
def test_settings_that_give_no_classifier_are_refused(overrides: dict[str, Any], match: str) -> None:
    with pytest.raises((ConfigError, CheckpointFormatError), match=match):
        LLM(causal_lm("qwen3"), device="cpu", hf_overrides=overrides)


def test_tokens_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="classifier_from_token needs the model's tokenizer, and none is loaded"):
        LLM(causal_lm("qwen3"), device="cpu", hf_overrides=TWO, skip_tokenizer_init=True)


def test_a_checkpoint_without_an_lm_head_is_refused() -> None:
    folder = copy_of(causal_lm("qwen3"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"no LM head to take rows from.*the input embedding is not tied"):
        LLM(folder, device="cpu", hf_overrides=TWO)
