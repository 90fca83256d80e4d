"""Checkpoints with an adapter for each task: jina-embeddings-v3 in both of its layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, JinaEmbeddingsV3Config, JinaEmbeddingsV3Model

from anypool import LLM, LoRARequest
from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.prompt_names import NamedPrompts
from anypool.errors import InvalidParameterError, UnsupportedArchitectureError, WeightsError
from tests.adapters.lora_checkpoints import TEXTS, adapter, train, write
from tests.entrypoints.conftest import Client
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    copy_of,
    edit_json,
    embed,
    loaded,
    save,
    vectors,
    wordpiece_tokenizer,
)

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
PROMPTS = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
}
ALL_LAYERS = r".*(_proj|fc1|fc2|word_embeddings|token_type_embeddings|dense)"


@cache
def bare() -> Path:
    """The backbone, as transformers writes it."""
    torch.manual_seed(3)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    config = JinaEmbeddingsV3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return save(JinaEmbeddingsV3Model(config), tokenizer, "jina")


@cache
def with_folders() -> tuple[Path, dict[str, Any]]:
    """The backbone with peft's adapters in a folder per task, and peft's models with them."""
    folder, models = copy_of(bare()), {}
    for seed, task in enumerate(TASKS):
        models[task] = train(AutoModel.from_pretrained(folder), seed=seed, target_modules=ALL_LAYERS)
        write(models[task]).rename(folder / task.replace(".", "_").replace("-", "_"))
    return folder, models


@cache
def original() -> tuple[Path, dict[str, Any]]:
    """The layout of the authors' code, and transformers' models with each task's adapter merged.

    As there, each linear layer and table is `W`, and `W + alpha / rank * B A` for a task, where A and B of a table are
    the other way round.
    """
    folder = copy_of(bare())
    stored, torch_state = load_file(folder / "model.safetensors"), torch.manual_seed(4)
    merged: dict[str, dict[str, torch.Tensor]] = {task: {} for task in TASKS}
    made: dict[str, torch.Tensor] = {}
    rank, alpha = 4, 2
    for name, weight in stored.items():
        is_adapted = name.endswith(".weight") and weight.dim() == 2
        if not is_adapted:
            made[f"roberta.{name}"] = weight
            continue
        rows, columns = weight.shape
        a = torch.randn(len(TASKS), *((rows, rank) if "embeddings" in name else (rank, columns)), generator=torch_state)
        b = torch.randn(len(TASKS), *((rank, columns) if "embeddings" in name else (rows, rank)), generator=torch_state)
        stem = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        made |= {f"{stem}.original": weight, f"{stem}.0.lora_A": a / 4, f"{stem}.0.lora_B": b / 4}
        product = a @ b if "embeddings" in name else b @ a
        for number, task in enumerate(TASKS):
            merged[task][name] = weight + alpha / rank * product[number] / 16
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", lambda config: _authors_config(config, rank, alpha))
    return folder, {task: _merged({**stored, **own}) for task, own in merged.items()}


def _authors_config(config: dict[str, Any], rank: int, alpha: int) -> dict[str, Any]:
    own = {key: value for key, value in config.items() if key not in ("rope_parameters", "transformers_version")}
    code = "jinaai/xlm-roberta-flash-implementation--"
    return {
        **own,
        "architectures": ["XLMRobertaLoRA"],
        "auto_map": {
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_lora.XLMRobertaLoRA",
        },
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
        "emb_pooler": None,
        "load_trained_adapters": True,
        "lora_adaptations": TASKS,
        "lora_alpha": alpha,
        "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False,
        "lora_rank": rank,
        "matryoshka_dimensions": [8, 16, 32],
        "task_instructions": {task: PROMPTS.get(task, "") for task in TASKS},
        "truncate_dim": None,
        "use_flash_attn": True,
    }


def _merged(stored: Mapping[str, torch.Tensor]) -> Any:
    folder = copy_of(bare())
    save_file(dict(stored), folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def means(model: Any, texts: list[str], prompt: str = "") -> torch.Tensor:
    """The reference's vectors: the mean over all tokens, those of the prompt included, normalised."""
    tokenizer = AutoTokenizer.from_pretrained(bare())
    rows = []
    for text in texts:
        inputs = tokenizer(prompt + text, return_tensors="pt", truncation=True, max_length=MAX_POSITIONS)
        rows.append(model(input_ids=inputs["input_ids"]).last_hidden_state[0].mean(0))
    return F.normalize(torch.stack(rows), dim=-1)


def test_the_backbone_gives_transformers_vectors() -> None:
    assert_close(embed(bare(), RAGGED), means(AutoModel.from_pretrained(bare()).eval(), RAGGED))


LAYOUTS = pytest.mark.parametrize("layout", [with_folders, original])


@LAYOUTS
def test_each_task_has_its_prompt_and_its_adapter(layout: Callable[[], tuple[Path, dict[str, Any]]]) -> None:
    folder, models = layout()
    base = AutoModel.from_pretrained(bare()).eval()
    with loaded(folder) as llm:
        assert_close(vectors(llm, RAGGED), means(base, RAGGED))
        for task in TASKS:
            found = vectors(llm, RAGGED, prompt_name=task)
            assert_close(found, means(models[task], RAGGED, PROMPTS.get(task, "")))
            assert not torch.allclose(found, means(base, RAGGED, PROMPTS.get(task, "")), atol=1e-2)
        assert_close(vectors(llm, RAGGED), means(base, RAGGED))


@LAYOUTS
def test_a_batch_has_several_tasks_and_none(layout: Callable[[], tuple[Path, dict[str, Any]]]) -> None:
    folder, models = layout()
    tasks = [None, "separation", "text-matching", None, "separation", "classification"]
    texts = [*TEXTS, *TEXTS][: len(tasks)]
    base = AutoModel.from_pretrained(bare()).eval()
    with loaded(folder) as llm:
        found = vectors(llm, texts, lora_request=tasks)
    for row, task, text in zip(found, tasks, texts, strict=True):
        [expected] = means(models.get(str(task), base), [text])
        assert_close(row, expected)


@LAYOUTS
def test_reranking_reads_queries_and_documents_for_retrieval(layout: Callable[[], Any]) -> None:
    folder, models = layout()
    with loaded(folder) as llm:
        results = sorted(llm.rerank("a cat?", TEXTS, use_tqdm=False), key=lambda result: result.index)
    scores = [result.relevance_score for result in results]
    queries = means(models["retrieval.query"], ["a cat?"], PROMPTS["retrieval.query"])
    documents = means(models["retrieval.passage"], TEXTS, PROMPTS["retrieval.passage"])
    assert_close(torch.tensor(scores), (queries @ documents.T)[0])


def test_the_files_of_sentence_transformers_say_prompts_and_pooling() -> None:
    folder, models = original()
    folder = copy_of(folder)
    kinds = [("custom_st.Transformer", ""), ("sentence_transformers.models.Pooling", "1_Pooling")]
    listed = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (kind, path) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True})
    )
    prompts = {task: f"{task}, a story: " for task in TASKS}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": "separation"})
    )
    with loaded(folder) as llm:
        found = vectors(llm, TEXTS, prompt_name="text-matching")
        assert_close(F.normalize(found, dim=-1), means(models["text-matching"], TEXTS, prompts["text-matching"]))
        default = F.normalize(vectors(llm, TEXTS), dim=-1)
        assert_close(default, means(models["separation"], TEXTS, prompts["separation"]))


def test_adapters_of_requests_stand_beside_those_of_tasks() -> None:
    folder, models = with_folders()
    others = [adapter(bare(), seed=seed, r=8, target_modules=["q_proj", "fc2"]) for seed in (11, 12)]
    asked = [LoRARequest(f"own-{number}", number, str(path)) for number, (path, _) in enumerate(others, start=1)]
    given: list[Any] = ["separation", asked[0], None, asked[1], "classification"]
    base = AutoModel.from_pretrained(bare()).eval()
    references = [models["separation"], others[0][1], base, others[1][1], models["classification"]]
    texts = [*TEXTS, "a cat"]
    with loaded(folder, enable_lora=True, max_loras=1) as llm:
        found = vectors(llm, texts, lora_request=given)
    for row, model, text in zip(found, references, texts, strict=True):
        assert_close(row, means(model, [text])[0])


def test_an_adapter_beside_those_of_tasks_needs_enable_lora() -> None:
    path, _ = adapter(bare(), target_modules=["q_proj"])
    with loaded(with_folders()[0]) as llm:
        with pytest.raises(InvalidParameterError, match="started without enable_lora=True"):
            llm.embed(TEXTS, lora_request=LoRARequest("own", 1, str(path)))
        with pytest.raises(InvalidParameterError, match=r"known: .*'text-matching'"):
            llm.embed(TEXTS, lora_request="unknown")


def test_an_unknown_task_is_refused_with_those_there_are() -> None:
    with loaded(original()[0]) as llm, pytest.raises(InvalidParameterError) as caught:
        llm.embed(TEXTS, prompt_name="clustering")
    assert all(repr(task) in str(caught.value) for task in TASKS)


def _rename_lora(tensors: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    name = "roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()


@pytest.mark.parametrize(
    "change", [lambda x: None, lambda x: x[:3], lambda x: x[..., :2], lambda x: x[0]], ids=["none", "3", "rank", "flat"]
)
def test_adapters_of_other_shapes_are_refused(change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    folder = copy_of(original()[0])
    tensors = load_file(folder / "model.safetensors")
    _rename_lora(tensors, change)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"roberta.encoder.layers.0.mlp.fc1 have the shapes .* 5 tasks of rank 4"):
        LLM(folder, device="cpu")


def test_tasks_without_adapters_and_adapters_without_tasks_are_refused() -> None:
    folder = copy_of(original()[0])
    with pytest.raises(WeightsError, match="names no tasks"):
        LLM(folder, device="cpu", hf_overrides={"lora_adaptations": None})
    tensors = load_file(bare() / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"names the tasks retrieval.query, .*no adapters for them"):
        LLM(folder, device="cpu")
    found = embed(folder, TEXTS, engine={"hf_overrides": {"lora_adaptations": None}})
    assert_close(found, means(AutoModel.from_pretrained(bare()).eval(), TEXTS))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'"),
        ({"emb_pooler": "cls"}, "emb_pooler 'cls'"),
        ({"lora_adaptations": ["a", 2]}, "not names of tasks"),
        ({"lora_adaptations": ["a", "a"]}, "comes twice"),
        ({"lora_rank": 0}, "lora_rank 0"),
        ({"task_instructions": ["a"]}, "not texts by task"),
    ],
)
def test_what_config_json_may_not_say(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=said):
        LLM(original()[0], device="cpu", hf_overrides=keys)


@pytest.mark.parametrize("degree", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_tasks_over_processes(degree: str) -> None:
    folder, models = original()
    with loaded(folder, **{degree: 2}) as llm:
        for task in ("separation", "retrieval.query"):
            assert_close(vectors(llm, TEXTS, prompt_name=task), means(models[task], TEXTS, PROMPTS.get(task, "")))
        mixed = vectors(llm, TEXTS, lora_request=[None, *TASKS[2:]])
        with pytest.raises(InvalidParameterError, match="started without enable_lora"):
            llm.embed(TEXTS, lora_request=LoRARequest("own", 1, "somewhere"))
    for row, text, task in zip(mixed[1:], TEXTS[1:], TASKS[2:], strict=True):
        assert_close(row, means(models[task], [text])[0])


def test_an_empty_folder_of_an_adapter_is_named() -> None:
    folder = copy_of(with_folders()[0])
    (folder / "separation" / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match="neither adapter_model"):
        LLM(folder, device="cpu")


def test_task_of_a_body_picks_prompt_and_adapter() -> None:
    folder, models = original()
    engine = Engine(EngineConfig(model=str(folder), served_model_name="jina", device="cpu", use_tqdm_on_load=False))
    try:
        client = Client(create_app([engine]))
        for fields, task in (
            ({"task": "retrieval.query"}, "retrieval.query"),
            ({"input_type": "search_document"}, "retrieval.passage"),
            ({"task": "clustering"}, "separation"),
            ({"prompt_name": "text-matching"}, "text-matching"),
            ({}, None),
        ):
            answer = client.embed(input=TEXTS, **fields).json()
            found = torch.tensor([one["embedding"] for one in answer["data"]])
            model = AutoModel.from_pretrained(bare()).eval() if task is None else models[task]
            assert_close(found, means(model, TEXTS, PROMPTS.get(str(task), "")))
        refused = client.embed(input=TEXTS, task="code.query")
        assert refused.status_code == 400
        assert all(repr(task) in refused.json()["error"]["message"] for task in TASKS)
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["jina"]
        loading = client.post("/v1/load_lora_adapter", lora_name="a", lora_path="a")
        assert loading.status_code in (400, 404)
    finally:
        engine.close()


def test_a_word_for_a_use_without_a_task_is_refused() -> None:
    folder = copy_of(with_folders()[0])
    shutil.rmtree(folder / "classification")
    with loaded(folder) as llm:
        recipe = llm.engine.loaded.recipe
    prompts = NamedPrompts(recipe.prompts, has_tasks=True)
    with pytest.raises(InvalidParameterError, match="task='classification' is unknown"):
        prompts.choose(prompt=None, prompt_name=None, input_type=None, task="classification")
