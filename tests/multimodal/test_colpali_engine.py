"""Checkpoints of colpali-engine, merged and as LoRA adapters, give its own vectors of queries and of pages.

The vectors were made with colpali-engine by `tests/fixtures/make_colpali_engine.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from anypool import LLM
from anypool.errors import ConfigError, UnsupportedArchitectureError, WeightsError
from tests.helpers import assert_close, copy_of, edit_json, loaded
from tests.multimodal.colpali_engine_inputs import PAGES, QUERIES

# transformers 5.24 gives numpy a tensor in PaliGemma's processor.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FOLDER = Path(__file__).parent.parent / "fixtures" / "colpali_engine"
ADAPTERS = ["colpali-lora", "colqwen2-lora"]
MERGED = ["colidefics3", "colpali", "colqwen2", "colqwen2_5"]
PROMPTS: list[Any] = [*QUERIES, *({"multi_modal_data": {"image": page}} for page in PAGES)]


def adapter_folder(name: str) -> Path:
    """A copy of an adapter, which names its base where it lies here."""
    folder = copy_of(FOLDER / name)
    base = str(FOLDER / name.removesuffix("-lora"))
    edit_json(folder / "adapter_config.json", lambda config: {**config, "base_model_name_or_path": base})
    return folder


def folder_of(name: str) -> Path:
    return adapter_folder(name) if name in ADAPTERS else FOLDER / name


def options(version: str = "0.3.18") -> dict[str, Any]:
    return {"dtype": "float32", "hf_overrides": {"colpali_engine": version}}


@pytest.mark.parametrize("name", [*MERGED, *ADAPTERS])
def test_queries_and_pages_equal_colpali_engine(name: str) -> None:
    expected = load_file(FOLDER / f"{name}.safetensors")
    with loaded(folder_of(name), **options()) as llm:
        found = llm.token_embed([PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]], use_tqdm=False)
    for output, key in zip(found, ["0.3.18.query.0", "page.0", "0.3.18.query.1", "page.1"], strict=True):
        if key.startswith("0"):
            assert output.prompt_token_ids == expected[key.replace("query", "ids")].tolist()
        assert_close(output.outputs.data, expected[key])


@pytest.mark.parametrize("name", ["colpali", "colqwen2"])
def test_older_versions_write_query_before_a_query(name: str) -> None:
    expected = load_file(FOLDER / f"{name}.safetensors")
    with loaded(FOLDER / name, **options("0.3.12")) as llm:
        [output] = llm.token_embed(QUERIES[0], use_tqdm=False)
    assert output.prompt_token_ids == expected["0.3.12.ids.0"].tolist()
    assert_close(output.outputs.data, expected["0.3.12.query.0"])


def test_colpali_ends_queries_in_a_new_line_until_0_3_10() -> None:
    with loaded(FOLDER / "colpali", **options("0.3.10")) as llm:
        [output] = llm.token_embed(QUERIES[0], use_tqdm=False)
    expected = load_file(FOLDER / "colpali.safetensors")["0.3.12.ids.0"].tolist()
    new_line = AutoTokenizer.from_pretrained(FOLDER / "colpali").encode("\n", add_special_tokens=False)
    assert output.prompt_token_ids == [*expected, *new_line]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "until 0.3.12, and nothing since 0.3.13"),
        ("new", "is not a version"),
        ("0.3.1", "known from 0.3.4"),
    ],
)
def test_a_version_is_asked_for(version: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(FOLDER / "colpali", hf_overrides={"colpali_engine": version})


LEGACY = {
    "colpali": ((r"^model\.vision_tower\.", "model.vision_tower.vision_model."),),
    "colqwen2": ((r"^language_model\.", "model."),),
}


@pytest.mark.parametrize("name", list(LEGACY))
def test_names_of_older_versions_of_transformers_are_read(name: str) -> None:
    folder, expected = copy_of(FOLDER / name), load_file(FOLDER / f"{name}.safetensors")
    weights = load_file(folder / "model.safetensors")
    for pattern, into in LEGACY[name]:
        weights = {re.sub(pattern, into, key): tensor for key, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with loaded(folder, **options()) as llm:
        query, page = llm.token_embed([PROMPTS[0], PROMPTS[2]], use_tqdm=False)
    assert_close(query.outputs.data, expected["0.3.18.query.0"])
    assert_close(page.outputs.data, expected["page.0"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ],
    ids=["loha", "qalora", "target-parameters", "pissa"],
)
def test_what_is_no_lora_is_refused(change: dict[str, Any], message: str) -> None:
    folder = adapter_folder("colqwen2-lora")
    edit_json(folder / "adapter_config.json", lambda config: {**config, **change})
    with pytest.raises(UnsupportedArchitectureError, match=message):
        LLM(folder, **options())


@pytest.mark.parametrize("name", ["base_model.model.visual.x.weight", "base_model.model.custom_text_proj.weight"])
def test_a_tensor_without_a_place_is_an_error(name: str) -> None:
    """The second has one, which `modules_to_save` does not name."""
    folder = adapter_folder("colqwen2-lora")
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({**weights, name: torch.ones(128, 32)}, folder / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="has no place in its base"):
        LLM(folder, **options())


def test_a_saved_module_takes_the_place_of_the_bases() -> None:
    folder, expected = adapter_folder("colqwen2-lora"), load_file(FOLDER / "colqwen2.safetensors")
    saved = load_file(FOLDER / "colqwen2" / "model.safetensors")["custom_text_proj.weight"]
    save_file({"base_model.model.custom_text_proj.weight": -saved}, folder / "adapter_model.safetensors")
    edit_json(folder / "adapter_config.json", lambda config: {**config, "modules_to_save": ["custom_text_proj"]})
    base = copy_of(FOLDER / "colqwen2")
    weights = load_file(base / "model.safetensors")
    save_file(
        {**weights, "custom_text_proj.bias": -weights["custom_text_proj.bias"]},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    edit_json(folder / "adapter_config.json", lambda config: {**config, "base_model_name_or_path": str(base)})
    with loaded(folder, **options()) as llm:
        [output] = llm.token_embed(QUERIES[0], use_tqdm=False)
    assert_close(output.outputs.data, -expected["0.3.18.query.0"])


def test_a_base_without_the_last_layer_is_refused() -> None:
    folder = adapter_folder("colqwen2-lora")
    base = copy_of(FOLDER / "colqwen2")
    edit_json(folder / "adapter_config.json", lambda config: {**config, "base_model_name_or_path": str(base)})
    edit_json(base / "config.json", lambda config: {**config, "architectures": ["Qwen2VLForConditionalGeneration"]})
    with pytest.raises(UnsupportedArchitectureError, match="would be random"):
        LLM(folder, **options())
    edit_json(base / "config.json", lambda config: {**config, "architectures": ["ColQwen2"]})
    weights = load_file(base / "model.safetensors")
    del weights["custom_text_proj.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"custom_text_proj\.weight of the layer"):
        LLM(folder, **options())


OLD_ADAPTERS = {
    "colpali-lora": (r"model\.model\.language_model\.", "model.language_model.model."),
    "colqwen2-lora": (r"model\.language_model\.", "model.model."),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_older_versions_of_transformers_are_read(name: str) -> None:
    folder, expected = adapter_folder(name), load_file(FOLDER / f"{name}.safetensors")
    weights = load_file(folder / "adapter_model.safetensors")
    pattern, into = OLD_ADAPTERS[name]
    renamed = {re.sub(pattern, into, key): tensor for key, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "adapter_model.safetensors")
    with loaded(folder, **options()) as llm:
        [output] = llm.token_embed(QUERIES[1], use_tqdm=False)
    assert_close(output.outputs.data, expected["0.3.18.query.1"])
