"""A loaded module of transformers cut down to the share of one process, by the plan in its configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anypool.errors import ConfigError
from anypool.model_executor.distributed import ranks, sum_over_ranks
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.split import LocalHeads, Share, Split, even_share
from anypool.model_executor.models.transformers_backend.probe import Probed, differs_from
from anypool.model_executor.weights.loading import construct, materialize, slots_of

if TYPE_CHECKING:
    from anypool.model_executor.models.transformers_backend.model import TransformersModel

# What a plan calls layers. Those whose output is gathered, or whose input is whole, stay whole here.
_SPLITS: dict[str, Split] = {"colwise": "column", "rowwise": "row"}
_EXPERTS = {"packed_colwise": (1, 2), "rowwise": (2, 1)}  # the dimension that is split, and the blocks stacked in it
_SUMMED = "moe_tp_experts"
_WHOLE = ("colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce", "embedding_rowwise")


def split_module(backbone: TransformersModel, probed: Probed) -> None:
    """Leaves of each layer what this process computes.

    Args:
        backbone: Its module is whole.
        probed: What it gives whole, which it has to give split.

    Raises:
        ConfigError: transformers has no plan for the family, or one that is not understood or gives other numbers.
    """
    plan: dict[str, str] = getattr(backbone.model.config, "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - {*_SPLITS, *_EXPERTS, _SUMMED, *_WHOLE})
    if unknown:
        raise _refusal(backbone, f"its plan has {', '.join(unknown)}")
    are_there = [_split(backbone, pattern, style) for pattern, style in plan.items() if style not in _WHOLE]
    if not any(are_there):
        raise _refusal(backbone, "transformers has no plan that splits its layers")
    problem = differs_from(backbone, probed)
    if problem is not None:
        raise _refusal(backbone, f"split by transformers' plan it {problem}")


def _split(backbone: TransformersModel, pattern: str, style: str) -> bool:
    """Splits the layers of one line of a plan; whether there are any."""
    matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
    modules = [(name, module) for name, module in backbone.model.named_modules() if matches(name)]
    parameters = [name for name, _ in backbone.model.named_parameters() if matches(name)]
    for name, module in modules:
        if style == _SUMMED:
            module.register_forward_hook(_sum_output)
        elif type(module) is nn.Linear and style in _SPLITS:
            _exchange(backbone, name, module, _SPLITS[style])
        else:
            raise _refusal(backbone, f"its layer {name} is a {type(module).__name__} that is to be split {style}")
    for name in parameters:
        if style not in _EXPERTS or backbone.model.get_parameter(name).dim() != 3:
            raise _refusal(backbone, f"its parameter {name} is to be split {style}")
        _cut_experts(backbone, name, *_EXPERTS[style])
    return bool(modules or parameters)


def _exchange(backbone: TransformersModel, name: str, whole: nn.Linear, split: Split) -> None:
    """Puts a `Linear` with a share of the weight in a layer's place."""
    parent = backbone.model.get_submodule(name.rpartition(".")[0])
    size = whole.out_features if split == "column" else whole.in_features
    rows = _key_rows(backbone, name, parent, whole) if split == "column" else None
    if rows is None:
        _require_division(backbone, name, size)
    shares = None if rows is None else {"": rows}
    ours = construct(
        lambda: Linear(whole.in_features, whole.out_features, bias=whole.bias is not None, split=split, rows=shares)
    )
    materialize(ours, device=whole.weight.device, dtype=whole.weight.dtype)
    for kind, slot in slots_of(ours).items():
        slot.fill(whole.get_parameter(kind), stored=f"{name}.{kind}", name=backbone.config.name)
    setattr(parent, name.rpartition(".")[2], ours.eval())


def _key_rows(backbone: TransformersModel, name: str, parent: Any, whole: nn.Linear) -> Share | None:
    """Rows of a projection to keys or values, of which there may be fewer heads than processes; None for any other."""
    size = getattr(parent, "head_dim", None)
    if not name.endswith((".k_proj", ".v_proj")) or not isinstance(size, int) or whole.out_features % size:
        return None
    heads, kv_heads = backbone.config.num_heads, whole.out_features // size
    return None if heads % kv_heads else LocalHeads.share(heads, kv_heads).key_rows(size)


def _cut_experts(backbone: TransformersModel, name: str, dimension: int, blocks: int) -> None:
    """Cuts the weights of all experts, `[experts, out, in]`, down to this process's share."""
    whole = backbone.model.get_parameter(name)
    _require_division(backbone, name, whole.shape[dimension] // blocks)
    share = even_share(whole.shape[dimension], blocks=blocks)
    rows = torch.cat([torch.arange(part.start, part.stop, device=whole.device) for part in share])
    parent, _, own = name.rpartition(".")
    setattr(
        backbone.model.get_submodule(parent),
        own,
        nn.Parameter(whole.index_select(dimension, rows), requires_grad=False),
    )


def _sum_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return sum_over_ranks(output)


def _require_division(backbone: TransformersModel, name: str, size: int) -> None:
    if size % ranks().tp_size:
        raise _refusal(backbone, f"the size of its layer {name} is {size:,}, which it does not divide")


def _refusal(backbone: TransformersModel, reason: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size={ranks().tp_size}: {backbone.config.name} ({backbone.config.model_type}) runs through "
        f"transformers and cannot be split: {reason}. The native decoders and encoders can be, and families with a "
        "plan that names whole layers (docs/parallelism.md). Leave it at 1"
    )
