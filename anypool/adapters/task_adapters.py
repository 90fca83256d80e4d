"""Low-rank adapters that a checkpoint has of its own, one for each task that its vectors may be for.

jina-embeddings-v3 (arXiv:2409.10173) is published in two layouts: with the adapters of all tasks in the tensors of each
layer, which config.json names, and, for transformers' own class, with an adapter of PEFT's in a folder per task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anypool.adapters.recipe import Recipe
from anypool.model_executor.families import JINA_V3
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.jina import read_task_patches, refuse_task_tensors
from anypool.model_executor.weights.lora import CONFIG, PeftAdapter
from anypool.model_executor.weights.repository import Repository

# Tasks whose folder is called otherwise: a name of PEFT's has no dots, and these have none with hyphens either.
_FOLDERS = {
    "retrieval_query": "retrieval.query",
    "retrieval_passage": "retrieval.passage",
    "text_matching": "text-matching",
}
# What its authors put before texts, where no file of the second layout says it.
_INSTRUCTIONS = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
}
# The tasks that queries and documents are for, by the names that prompts for them have everywhere else.
_SIDES = {"query": "retrieval.query", "document": "retrieval.passage"}


def with_tasks(recipe: Recipe, backbone: Repository, config: ModelConfig) -> Recipe:
    """The recipe with a prompt for each task, by whose name requests pick its adapter, too.

    A checkpoint that has none comes back as it is.
    """
    if config.model_type != JINA_V3:
        return recipe
    folders = _task_folders(backbone)
    named = config.raw.get("lora_adaptations")
    tasks = tuple(folders) if named is None else tuple(named)
    stated = config.raw.get("task_instructions") or (_INSTRUCTIONS if named is None else {})
    prompts = {**dict.fromkeys(tasks, ""), **{task: stated[task] for task in tasks if task in stated}, **recipe.prompts}
    names = {task: task for task in tasks}
    for side, task in _SIDES.items():
        if task in names and not prompts.get(side):
            prompts[side], names[side] = prompts[task], task
    return replace(recipe, prompts=prompts, tasks=names)


def read_task_adapters(backbone: Repository, config: ModelConfig, checkpoint: Checkpoint) -> dict[str, PeftAdapter]:
    """The adapters of a checkpoint's tasks by name; none where it has none.

    Args:
        backbone: The transformer's files.
        config: What config.json says.
        checkpoint: The tensors.

    Raises:
        ModelLoadError: One cannot be read, or config.json and tensors do not agree.
    """
    if config.model_type != JINA_V3:
        return {}
    named: list[str] | None = config.raw.get("lora_adaptations")
    if named is None:
        refuse_task_tensors(checkpoint, config.name)
        folders = _task_folders(backbone)
        return {task: PeftAdapter.read(backbone.subfolder(folder)) for task, folder in folders.items()}
    rank, alpha = config.raw["lora_rank"], config.raw["lora_alpha"]
    read = read_task_patches(checkpoint, named, rank=rank, alpha=alpha, name=config.name)
    return {
        task: PeftAdapter(f"{config.name}, task {task}", None, None, None, patches)
        for task, patches in zip(named, read, strict=True)
    }


def _task_folders(backbone: Repository) -> Mapping[str, str]:
    """The folders with an adapter, by the name of the task."""
    found = sorted(path.parent.name for path in backbone.folder.glob(f"*/{CONFIG}"))
    return {_FOLDERS.get(folder, folder): folder for folder in found}
