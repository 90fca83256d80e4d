"""PEFT's LoRA adapters as their files have them. Hu et al., arXiv:2106.09685."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anypool.config import is_int, is_int_list, is_number
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError, WeightsError
from anypool.model_executor.weights.checkpoint import Checkpoint, PickleCheckpoint, SafetensorsCheckpoint
from anypool.model_executor.weights.repository import Repository

CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# Keys that say which modules were trained and how, which the tensors say already, or who wrote them.
_SAYS_NOTHING_MORE = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config "
    "exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config "
    "lora_alpha lora_bias lora_dropout lora_ga_config megatron_core modules_to_save peft_type peft_version "
    "qalora_group_size r rank_pattern revision runtime_config target_modules task_type trainable_token_indices "
    "use_dora use_rslora".split()
)
# Ways of beginning that leave the base as it is. Others change it, and the adapter is for the changed one.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
# What PEFT saves as it is where the vocabulary was changed, though nothing asks for it.
_SAVED_UNASKED = ("embed_tokens", "lm_head")
# What an adapter may have for a module, by the ending of the tensor's name; the longer ones first.
_ENDINGS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "b_bias",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "token_adapter.trainable_tokens_delta": "token_rows",
    "base_layer.weight": "weight",
    "base_layer.bias": "bias",
    "weight": "weight",
    "bias": "bias",
}


@dataclass(frozen=True, kw_only=True)
class ModulePatch:
    """What an adapter has for one module.

    Attributes:
        name: The module's name in the model that was trained, such as `model.layers.0.self_attn.q_proj`.
        scaling: What `b @ a` is multiplied by.
        a: `[r, in]` of a linear layer.
        b: `[out, r]`.
        b_bias: `[out]` added to what b gives, before it is scaled.
        magnitude: `[out]` lengths of the merged weight's rows, of a DoRA.
        embedding_a: `[r, V]` of a table.
        embedding_b: `[E, r]`.
        weight: In place of the module's own.
        bias: In place of the module's own.
        token_rows: `[I, E]` in place of some rows of a table.
        token_ids: Which.
    """

    name: str
    scaling: float = 1.0
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    b_bias: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    embedding_a: torch.Tensor | None = None
    embedding_b: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """The rank of what is added; 0 where nothing is."""
        return next((len(one) for one in (self.a, self.embedding_a) if one is not None), 0)

    def merged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """A linear layer's `[out, in]` weight as the adapter has it, in float32: `W + scaling * B A`.

        A DoRA scales the rows of that to lengths of its own (Liu et al., arXiv:2402.09353).
        """
        base = (weight_OI if self.weight is None else self.weight).float()
        if self.a is None or self.b is None:
            return base
        merged = base + self.b.float() @ self.a.float() * self.scaling
        if self.magnitude is not None:
            merged = merged * (self.magnitude.float() / torch.linalg.norm(merged, dim=1))[:, None]
        return merged

    def merged_table(self, table_VE: torch.Tensor) -> torch.Tensor:
        """A table's `[V, E]` rows as the adapter has them, in float32."""
        merged = (table_VE if self.weight is None else self.weight).float().clone()
        if self.token_rows is not None:
            merged[list(self.token_ids)] = self.token_rows.to(merged)
        if self.embedding_a is not None and self.embedding_b is not None:
            merged += (self.embedding_b.float() @ self.embedding_a.float()).t().to(merged) * self.scaling
        return merged

    def merged_bias(self, bias_O: torch.Tensor | None) -> torch.Tensor | None:
        """A layer's bias as the adapter has it, in float32; None where neither has one."""
        base = bias_O if self.bias is None else self.bias
        if self.b_bias is None:
            return None if base is None else base.float()
        added = self.b_bias.float() * self.scaling
        return added if base is None else base.float() + added


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in memory.

    Attributes:
        name: Of its repository, for messages.
        base: The model that it was trained on, as its file names it; None where it names none.
        revision: Which version of it.
        task: What it was trained for, such as SEQ_CLS; None where it does not say.
        patches: What it has, by the name of the module.
    """

    name: str
    base: str | None
    revision: str | None
    task: str | None
    patches: Mapping[str, ModulePatch] = field(repr=False)

    @classmethod
    def read(cls, repository: Repository) -> PeftAdapter:
        """Reads adapter_config.json and the tensors beside it.

        Raises:
            CheckpointFormatError: A file is missing, damaged or says something unknown.
            UnsupportedArchitectureError: It is no LoRA.
            WeightsError: Tensors do not fit each other or the file, or there are none.
        """
        config, name = repository.read_object(CONFIG), repository.name
        if config is None:
            raise CheckpointFormatError(f"{name}: the folder {repository.folder} has no {CONFIG}: it is no adapter")
        _refuse_what_is_no_lora(config, name)
        checkpoint = _open(repository)
        own: dict[str, dict[str, torch.Tensor]] = {}
        for stored, tensor in checkpoint.tensors(set(checkpoint.names())):
            module, part = _split(stored, name)
            if part in own.setdefault(module, {}):
                raise WeightsError(f"{name}: the adapter has two tensors for {part} of {module}")
            own[module][part] = tensor
        if not own:
            raise WeightsError(f"{name}: the adapter has no tensors, so it would change nothing")
        patches = {module: _patch(module, parts, config, name) for module, parts in own.items()}
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
        return cls(name, base or None, revision or None, config.get("task_type"), patches)


def merge_adapter(
    weights: dict[str, torch.Tensor], adapter: PeftAdapter, rename: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """A base's weights with an adapter's added, in float32.

    Args:
        weights: The base's, by name; they are not changed.
        adapter: The adapter.
        rename: From the name that a tensor has in the module that was trained to that in `weights`.

    Raises:
        WeightsError: A tensor of it has no place in the base, or another shape.
    """
    merged = dict(weights)
    for module, patch in adapter.patches.items():
        if patch.embedding_a is not None or patch.token_rows is not None:
            raise UnsupportedArchitectureError(f"{adapter.name}: the adapter changes the table {module} row by row")
        for part, changes in (
            ("weight", patch.a is not None or patch.weight is not None),
            ("bias", patch.b_bias is not None or patch.bias is not None),
        ):
            target = rename(f"{module}.{part}")
            if not changes:
                continue
            if target not in merged:
                raise WeightsError(f"{adapter.name}: the adapter's {module}.{part} has no place in its base")
            check_shapes(patch, adapter.name, merged[target] if part == "weight" else None)
            new = patch.merged(merged[target]) if part == "weight" else patch.merged_bias(merged[target])
            assert new is not None
            if new.shape != merged[target].shape:
                shapes = f"{list(new.shape)}, and the base's {target} {list(merged[target].shape)}"
                raise WeightsError(f"{adapter.name}: the adapter's {module}.{part} is for {shapes}")
            merged[target] = new
    return merged


def check_shapes(patch: ModulePatch, name: str, weight_OI: torch.Tensor | None) -> None:
    """Raises a `WeightsError` where what is added to a linear layer's weight does not have its shape."""
    if weight_OI is None or patch.a is None or patch.b is None:
        return
    found = [len(patch.b), patch.a.shape[1]]
    if found != list(weight_OI.shape):
        raise WeightsError(
            f"{name}: the adapter's {patch.name} is for {found}, and the base's has {list(weight_OI.shape)}"
        )


def _open(repository: Repository) -> Checkpoint:
    for file, kind in zip(_FILES, (SafetensorsCheckpoint, PickleCheckpoint), strict=True):
        if repository.exists(file):
            return kind([repository.folder / file])
    raise WeightsError(f"{repository.name}: the adapter has neither {' nor '.join(_FILES)} beside its {CONFIG}")


def _split(stored: str, name: str) -> tuple[str, str]:
    """The module and the field of `ModulePatch` that a tensor is for."""
    own = stored.removeprefix(_PREFIX)
    for ending, part in _ENDINGS.items():
        if own.endswith(f".{ending}"):
            return own.removesuffix(f".{ending}"), part
    raise WeightsError(
        f"{name}: the adapter's tensor {stored!r} is none of a LoRA; known are: {', '.join(dict.fromkeys(_ENDINGS))}"
    )


def _patch(module: str, parts: dict[str, torch.Tensor], config: Mapping[str, Any], name: str) -> ModulePatch:
    patch = replace(ModulePatch(name=module), **parts)  # type: ignore[arg-type]
    _refuse_what_the_config_does_not_name(module, parts, config, name)
    for one, other in (("a", "b"), ("b", "a"), ("embedding_a", "embedding_b"), ("embedding_b", "embedding_a")):
        if one in parts and other not in parts:
            raise WeightsError(f"{name}: the adapter has lora_{one} of {module} without its lora_{other}")
    for first, second in ((patch.a, patch.b), (patch.embedding_a, patch.embedding_b)):
        if first is None or second is None:
            continue
        if first.dim() != 2 or second.dim() != 2 or len(first) != second.shape[1]:
            shapes = f"{list(first.shape)} and {list(second.shape)}"
            raise WeightsError(f"{name}: the adapter's A and B of {module} have the shapes {shapes}: no rank in common")
        stated = _by_pattern(config, "rank_pattern", module, config.get("r"), name)
        if len(first) != stated:
            raise WeightsError(f"{name}: {CONFIG} has rank {stated!r} for {module}, and the tensors {len(first)}")
        patch = replace(patch, scaling=_scaling(config, module, len(first), name))
    if patch.token_rows is not None:
        ids = _token_ids(config, module, name)
        if len(ids) != len(patch.token_rows):
            raise WeightsError(
                f"{name}: {CONFIG} has {len(ids)} trainable_token_indices for {module}, and the tensor "
                f"{len(patch.token_rows)} rows"
            )
        patch = replace(patch, token_ids=ids)
    return patch


def _refuse_what_the_config_does_not_name(
    module: str, parts: Collection[str], config: Mapping[str, Any], name: str
) -> None:
    saved = config.get("modules_to_save") or ()
    names = list(itertools.accumulate(module.split("."), "{}.{}".format))  # of the modules that it is in, and its own
    is_saved = names[-1].endswith(_SAVED_UNASKED) or any(one.endswith(tuple(saved)) for one in names)
    for part, is_named in (
        ("weight", is_saved),
        ("bias", is_saved or config.get("bias", "none") != "none"),
        ("magnitude", config.get("use_dora")),
    ):
        if part in parts and not is_named:
            raise WeightsError(
                f"{name}: the adapter has a {part} for {module}, which {CONFIG} does not name: it has no place in its "
                "base"
            )
    if config.get("use_dora") and "a" in parts and "magnitude" not in parts:
        raise WeightsError(f"{name}: {CONFIG} has use_dora=True, and the adapter no lora_magnitude_vector of {module}")


def _token_ids(config: Mapping[str, Any], module: str, name: str) -> tuple[int, ...]:
    given = config.get("trainable_token_indices")
    if isinstance(given, Mapping):
        given = next((ids for key, ids in given.items() if f".{module}".endswith(f".{key}")), None)
    if not is_int_list(given):
        raise CheckpointFormatError(f"{name}: {CONFIG} has trainable_token_indices {given!r} for {module}, not ids")
    return tuple(given or ())


def _scaling(config: Mapping[str, Any], module: str, rank: int, name: str) -> float:
    """`alpha / r`, or `alpha / sqrt(r)` where it is rank-stabilised (Kalajdzievski, arXiv:2312.03732)."""
    alpha = _by_pattern(config, "alpha_pattern", module, config.get("lora_alpha"), name)
    if not is_number(alpha):
        raise CheckpointFormatError(f"{name}: {CONFIG} has lora_alpha {alpha!r}, not a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(config: Mapping[str, Any], key: str, module: str, default: Any, name: str) -> Any:
    """The value of the first pattern that the module's name ends in, as PEFT matches them."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise CheckpointFormatError(f"{name}: {CONFIG} has {key} {patterns!r}, not values by module")
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise CheckpointFormatError(f"{name}: {CONFIG} has the {key} {pattern!r}: {error}") from error
    return default


def _refuse_what_is_no_lora(config: Mapping[str, Any], name: str) -> None:
    unknown = {key: value for key, value in config.items() if value and key not in _SAYS_NOTHING_MORE}
    if config.get("peft_type") != "LORA":
        unknown["peft_type"] = config.get("peft_type")
    if config.get("init_lora_weights", True) not in _KEEPS_BASE:
        unknown["init_lora_weights"] = config["init_lora_weights"]
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        unknown["bias"] = config["bias"]
    if unknown:
        what = ", ".join(f"{key}={value!r}" for key, value in sorted(unknown.items()))
        raise UnsupportedArchitectureError(
            f"{name}: {CONFIG} has {what}, and only LoRA is supported: merge the adapter into its base with peft and "
            "save the result"
        )
    if not is_int(config.get("r")):
        raise CheckpointFormatError(f"{name}: {CONFIG} has r {config.get('r')!r}, not a rank")


def highest_rank(patches: Iterable[ModulePatch]) -> int:
    """The highest rank of what is added anywhere."""
    return max((patch.rank for patch in patches), default=0)
