"""Adapters with heads of their own: classifiers in one batch, heads that the base has not, projections of ColBERTs."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from anypool import LLM
from anypool.errors import UnsupportedArchitectureError, WeightsError
from tests.adapters.lora_checkpoints import TEXTS, adapter, base, request, states, train, write
from tests.helpers import copy_of, edit_json, loaded

FIXTURES = Path(__file__).parents[1] / "fixtures"
TARGETS = {"bert": ["query", "dense"], "llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"], "modernbert": ["Wqkv"]}


@cache
def classifier(family: str, labels: int = 3) -> Path:
    """A base with a classification head."""
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(base(family), num_labels=labels, pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    folder = copy_of(base(family))
    model.save_pretrained(folder)
    return folder


def trained(family: str, seed: int, folder: Path | None = None, **config: Any) -> tuple[Path, PeftModel]:
    return adapter(
        folder or classifier(family),
        cls=AutoModelForSequenceClassification,
        seed=seed,
        task_type="SEQ_CLS",
        target_modules=TARGETS[family],
        **config,
    )


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return found


def assert_scores(llm: LLM, cases: list[tuple[Any, Any]], **arguments: Any) -> None:
    """Texts with adapters in one batch get the scores of peft's models."""
    prompts = [text for text in TEXTS for _ in cases]
    adapters = [one for _ in TEXTS for one, _ in cases]
    outputs = llm.classify(prompts, lora_request=adapters if any(adapters) else None, use_tqdm=False, **arguments)
    for index, output in enumerate(outputs):
        expected = logits(cases[index % len(cases)][1], output.prompt_token_ids).softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "modernbert"])
def test_adapters_with_heads_share_a_batch(family: str) -> None:
    made = [trained(family, seed) for seed in range(2)]
    plain = AutoModelForSequenceClassification.from_pretrained(classifier(family)).eval()
    with loaded(classifier(family), enable_lora=True) as llm:
        assert_scores(llm, [(None, plain), (request(made[0][0], 1), made[0][1]), (request(made[1][0], 2), made[1][1])])


def test_heads_are_kept_apart_for_every_task_and_in_chunks() -> None:
    folder, model = trained("llama", 0)
    with loaded(classifier("llama"), enable_lora=True, max_num_batched_tokens=64) as llm:
        text = "a story: the passage " * 6
        [output] = llm.classify(text, lora_request=request(folder), truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(output.prompt_token_ids) > 64
        expected = logits(model, output.prompt_token_ids).softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, atol=1e-5, rtol=0)
        [several] = llm.encode(
            TEXTS[:1], pooling_task=["embed", "classify"], lora_request=request(folder), use_tqdm=False
        )
        ids = several.prompt_token_ids
        torch.testing.assert_close(
            torch.tensor(several.outputs.classify.probs),
            logits(model, ids).softmax(-1),
            atol=1e-5,
            rtol=0,  # type: ignore[union-attr]
        )
        last = F.normalize(states(model, ids)[-1], dim=-1)
        torch.testing.assert_close(torch.as_tensor(several.outputs.embed.data), last, atol=1e-5, rtol=0)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "modernbert"])
def test_a_merged_adapter_brings_the_head_that_its_base_has_not(family: str) -> None:
    if family in ("bert", "llama"):
        folder, model = trained(family, 1, base(family))
    else:  # transformers fills the head of these with numbers that no seed of ours decides
        folder, model = trained(family, 1)
    with loaded(folder) as llm:
        assert_scores(llm, [(None, model)])


def test_a_merged_adapter_of_a_token_classifier_brings_its_head() -> None:
    folder, model = adapter(
        base("bert"), cls=AutoModelForTokenClassification, task_type="TOKEN_CLS", target_modules=["value"]
    )
    with loaded(folder) as llm:
        for output in llm.token_classify(TEXTS, use_tqdm=False):
            expected = logits(model, output.prompt_token_ids).softmax(-1)
            torch.testing.assert_close(output.outputs.data, expected, atol=1e-5, rtol=0)


def test_a_dora_in_a_head_is_as_peft_has_it() -> None:
    folder, model = adapter(
        classifier("bert"), cls=AutoModelForSequenceClassification, target_modules=["pooler.dense"], use_dora=True
    )
    with loaded(classifier("bert"), enable_lora=True) as llm:
        assert_scores(llm, [(request(folder), model)])


def test_a_head_of_another_shape_or_without_a_place_is_an_error() -> None:
    other, _ = trained("llama", 0, classifier("llama", 4))
    with (
        loaded(classifier("llama"), enable_lora=True) as llm,
        pytest.raises(WeightsError, match=r"score\.weight has shape \[4, 32\], the layer's is \[3, 32\]"),
    ):
        llm.classify("cat", lora_request=request(other), use_tqdm=False)
    with loaded(base("llama"), enable_lora=True) as llm, pytest.raises(WeightsError, match="score has no place"):
        llm.embed("cat", lora_request=request(other), use_tqdm=False)
    with pytest.raises(WeightsError, match=r"score\.weight has shape"):
        LLM(classifier("llama"), lora=str(other), device="cpu", use_tqdm_on_load=False)


# Multi-vector models.


class Projected(nn.Module):
    """A backbone and a projection of its states, as PyLate's modules and Stanford's class have them."""

    def __init__(self, folder: Path, weight: torch.Tensor, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        self.projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.projection.weight = nn.Parameter(weight)
        self.backbone = AutoModel.from_pretrained(folder)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.projection(self.backbone(input_ids=input_ids).last_hidden_state)
        return found


def projected(kind: str, seed: int) -> tuple[Path, nn.Module]:
    """An adapter of a ColBERT whose projection is trained, by the names of the library's own module."""
    folder = FIXTURES / kind
    stored = folder / "1_Dense" / "model.safetensors" if kind == "pylate" else folder / "model.safetensors"
    weight = load_file(stored)["linear.weight"]
    names = ("0.auto_model.", "1.linear.") if kind == "pylate" else ("bert.", "linear.")
    model = train(
        Projected(folder, weight, names),
        seed=seed,
        target_modules=["query", "value", "projection"] if seed % 2 else ["query"],
        modules_to_save=None if seed % 2 else ["projection"],
    )
    written = write(model)
    file = written / "adapter_model.safetensors"
    renamed = {
        name.replace("model.backbone.", f"model.{names[0]}").replace("model.projection.", f"model.{names[1]}"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    saved = [names[1][:-1]] if seed % 2 == 0 else None
    edit_json(written / "adapter_config.json", lambda config: {**config, "modules_to_save": saved})
    return written, model


@torch.no_grad()
def token_vectors(model: nn.Module, ids: list[int]) -> torch.Tensor:
    return F.normalize(model(torch.tensor([ids]))[0], dim=-1)


@pytest.mark.parametrize("kind", ["pylate", "stanford"])
@pytest.mark.parametrize("seed", [0, 1], ids=["saved", "low-rank"])
def test_a_projection_of_its_own_makes_the_vectors(kind: str, seed: int) -> None:
    texts = ["the cat sat on a mat", "a long story and none"]
    folder, model = projected(kind, seed)
    for engine, lora in (({"enable_lora": True}, request(folder)), ({"lora": str(folder)}, None)):
        with loaded(FIXTURES / kind, **engine) as llm:
            for output in llm.token_embed(texts, lora_request=lora, use_tqdm=False):
                expected = token_vectors(model, output.prompt_token_ids)
                torch.testing.assert_close(output.outputs.data, expected, atol=1e-5, rtol=0)


def test_queries_and_documents_with_adapters_are_compared() -> None:
    """Base and adapters in one batch, and MaxSim of either with the adapter's vectors."""
    folder, model = projected("pylate", 0)
    with loaded(FIXTURES / "pylate", enable_lora=True) as llm:
        text = "the cat sat on a mat"
        plain, own = llm.token_embed([text, text], lora_request=[None, request(folder)], use_tqdm=False)
        expected = token_vectors(model, own.prompt_token_ids)
        torch.testing.assert_close(own.outputs.data, expected, atol=1e-5, rtol=0)
        assert (plain.outputs.data - own.outputs.data).abs().max() > 0.05
        [score] = llm.score("a story", text, lora_request=request(folder), use_tqdm=False)
        [query] = llm.token_embed("a story", is_query=True, lora_request=request(folder), use_tqdm=False)
        by_hand = (query.outputs.data @ own.outputs.data.T).amax(1).sum()
        assert score.outputs.score == pytest.approx(float(by_hand), abs=1e-4)


# Folders of sentence-transformers.


def in_folder(adapter_folder: Path, whole: Path, *, dense: torch.Tensor | None = None) -> Path:
    """A sentence-transformers folder in whose transformer's place an adapter lies, as that library saves it."""
    folder = copy_of(whole)
    (folder / "model.safetensors").unlink()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter_folder / name, folder / name)
    if dense is not None:
        save_file({"linear.weight": dense}, folder / "1_Dense" / "model.safetensors")
    return folder


@pytest.mark.parametrize("keeps_config", [True, False])
def test_the_folder_of_a_colbert_with_an_adapter_is_a_model_and_an_adapter(keeps_config: bool) -> None:
    whole = FIXTURES / "pylate"
    made, model = adapter(whole, target_modules=["query", "dense"])
    torch.manual_seed(9)
    dense = torch.randn_like(load_file(whole / "1_Dense" / "model.safetensors")["linear.weight"])
    folder = in_folder(made, whole, dense=dense)
    if not keeps_config:
        (folder / "config.json").unlink()
    for path, engine, lora in ((folder, {}, None), (whole, {"enable_lora": True}, request(folder))):
        with loaded(path, **engine) as llm:
            [output] = llm.token_embed("the cat sat on a mat", lora_request=lora, use_tqdm=False)
        expected = F.normalize(states(model, output.prompt_token_ids) @ dense.T, dim=-1)
        torch.testing.assert_close(output.outputs.data, expected, atol=1e-5, rtol=0)


def test_an_adapter_beside_another_model_is_refused() -> None:
    made, _ = adapter(base("llama"), target_modules=["q_proj"])
    shutil.copy(base("llama") / "config.json", made / "config.json")
    with loaded(made) as llm:
        assert llm.embed("cat", use_tqdm=False)
    edit_json(made / "config.json", lambda config: {**config, "architectures": ["LlamaBiModel"]})
    with pytest.raises(UnsupportedArchitectureError, match="another without it"):
        LLM(made, device="cpu", use_tqdm_on_load=False)
    (made / "config.json").unlink()
    (made / "llm2vec_config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    with pytest.raises(UnsupportedArchitectureError, match="another without it"):
        LLM(made, device="cpu", use_tqdm_on_load=False)
