"""PEFT's LoRA adapters, added to the weights of their base. Hu et al., arXiv:2106.09685."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError, WeightsError
from anypool.model_executor.weights.checkpoint import SafetensorsCheckpoint
from anypool.model_executor.weights.repository import Repository

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Keys that say which modules were trained and how, which the tensors say already, or who wrote them.
_SAYS_NOTHING_MORE = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode "
    "init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config "
    "megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision runtime_config "
    "target_modules task_type use_rslora".split()
)


def merge_adapter(
    weights: dict[str, torch.Tensor], adapter: Repository, rename: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """A base's weights with an adapter's added: `W + scaling * B A`, in float32.

    The scaling is `lora_alpha / r`, or `lora_alpha / sqrt(r)` where it is rank-stabilised (arXiv:2312.03732).

    Args:
        weights: The base's, by name; they are not changed.
        adapter: The folder with adapter_config.json and adapter_model.safetensors.
        rename: From the name that a tensor has in colpali-engine's module to that in `weights`.

    Raises:
        UnsupportedArchitectureError: It is no plain LoRA.
        WeightsError: A tensor of it has no place in the base.
    """
    config = adapter.read_object("adapter_config.json") or {}
    _refuse_what_is_no_plain_lora(config, adapter.name)
    path = adapter.folder / _WEIGHTS
    if not path.is_file():
        raise WeightsError(f"{adapter.name}: the adapter has no {_WEIGHTS}; save it with a newer peft")
    checkpoint = SafetensorsCheckpoint([path])
    own = {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint.tensors(set(checkpoint.names()))}
    saved = tuple(config.get("modules_to_save") or ())
    merged = dict(weights)
    for name, tensor in own.items():
        if name.endswith(_B) and name.removesuffix(_B) + _A in own:
            continue
        is_lora = name.endswith(_A) and name.removesuffix(_A) + _B in own
        target = rename(name.removesuffix(_A) + ".weight" if is_lora else name)
        if target not in merged or not (is_lora or target.rpartition(".")[0].endswith(saved)):
            raise WeightsError(f"{adapter.name}: the adapter's tensor {name} has no place in its base")
        new = tensor
        if is_lora:
            product = own[name.removesuffix(_A) + _B].float() @ tensor.float()
            new = product * _scaling(config, len(tensor), adapter.name)
        if new.shape != merged[target].shape:
            shapes = f"{list(new.shape)}, and the base's {target} {list(merged[target].shape)}"
            raise WeightsError(f"{adapter.name}: the adapter's tensor {name} is for {shapes}")
        merged[target] = merged[target].float() + new if is_lora else new
    return merged


def _scaling(config: Mapping[str, Any], rank: int, name: str) -> float:
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise CheckpointFormatError(f"{name}: adapter_config.json has lora_alpha {alpha!r}, not a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _refuse_what_is_no_plain_lora(config: Mapping[str, Any], name: str) -> None:
    unknown = {key: value for key, value in config.items() if value and key not in _SAYS_NOTHING_MORE}
    if unknown.get("bias") == "none":
        del unknown["bias"]
    if config.get("peft_type") != "LORA":
        unknown["peft_type"] = config.get("peft_type")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # others change the base, too
        unknown["init_lora_weights"] = config["init_lora_weights"]
    if unknown:
        what = ", ".join(f"{key}={value!r}" for key, value in sorted(unknown.items()))
        raise UnsupportedArchitectureError(
            f"{name}: adapter_config.json has {what}, and plain LoRA is merged alone: merge the adapter into its base "
            "with peft and save the result"
        )
