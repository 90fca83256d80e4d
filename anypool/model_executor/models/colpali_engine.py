"""Checkpoints that the colpali-engine library writes, merged or as a LoRA adapter beside its base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from anypool.errors import WeightsError
from anypool.model_executor.models.transformers_backend.loading import load_whole
from anypool.model_executor.models.vision_language import RetrievalModel
from anypool.model_executor.weights.checkpoint import open_checkpoint
from anypool.model_executor.weights.lora import PeftAdapter, merge_adapter
from anypool.model_executor.weights.repository import Repository


class _Layout(NamedTuple):
    """Where a class of colpali-engine keeps what transformers' base model has.

    Attributes:
        base: transformers' class of the model below the projection.
        projection: The linear layer's name.
        renames: Patterns of names and what they become, one after the other, for every version of transformers that
            wrote them.
    """

    base: str
    projection: str
    renames: tuple[tuple[str, str], ...]


_QWEN = ((r"^model\.(?=(language_model|visual)\.)", ""), (r"^model\.", "language_model."))
_PALIGEMMA = (
    (r"^model\.(model\.)?(?=(language_model|vision_tower|multi_modal_projector|lm_head)\.)", ""),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "language_model."),
)
_LAYOUTS = {
    "ColIdefics3": _Layout("Idefics3Model", "linear", ((r"^model\.", ""),)),
    "ColPali": _Layout("PaliGemmaModel", "custom_text_proj", _PALIGEMMA),
    "ColQwen2": _Layout("Qwen2VLModel", "custom_text_proj", _QWEN),
    "ColQwen2_5": _Layout("Qwen2_5_VLModel", "custom_text_proj", _QWEN),
}


class ColPaliEngineModel(RetrievalModel):
    """`ColPali`, `ColQwen2`, `ColQwen2_5` or `ColIdefics3` of colpali-engine.

    Their vectors have 128 numbers. An adapter is merged into its base while loading.
    """

    def load_whole(self, repository: Repository, *, dtype: torch.dtype, claimed: frozenset[str], progress: bool) -> Any:
        layout = _LAYOUTS[self.config.architecture]
        checkpoint = open_checkpoint(repository.base or repository)
        found = checkpoint.tensors(set(checkpoint.names()))
        weights = {_renamed(name, layout): tensor for name, tensor in found}
        self._require_projection(weights, layout.projection)
        if repository.base is not None:
            weights = merge_adapter(weights, PeftAdapter.read(repository), lambda name: _renamed(name, layout))
        self._loaded_projection = [self._take_projection(weights, layout.projection, dtype)]
        return load_whole(
            self.config, repository, layout.base, dtype=dtype, claimed=claimed, progress=progress, state_dict=weights
        )

    def _require_projection(self, weights: Mapping[str, torch.Tensor], name: str) -> None:
        missing = [key for key in (f"{name}.weight", f"{name}.bias") if key not in weights]
        if missing:
            raise WeightsError(
                f"{self.config.name}: {' and '.join(missing)} of the layer that makes the vectors cannot be found. An "
                "adapter has to stand on the base it was trained on, such as those of vidore that end in -base"
            )

    def _take_projection(self, weights: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> nn.Linear:
        weight_ED, bias_E = weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias")
        self.embedding_size, width = weight_ED.shape
        projection = nn.Linear(width, self.embedding_size, dtype=dtype)
        projection.load_state_dict({"weight": weight_ED, "bias": bias_E})
        return projection.requires_grad_(False)


def _renamed(name: str, layout: _Layout) -> str:
    for pattern, into in layout.renames:
        name = re.sub(pattern, into, name)
    return name
