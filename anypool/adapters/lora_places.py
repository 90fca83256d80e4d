"""Where in a loaded model low-rank adapters may change something, by the names that PEFT writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from anypool.adapters.heads import Head
from anypool.adapters.recipe import Recipe
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.packing import is_foreign_linear
from anypool.model_executor.models.interfaces import LM_HEAD_NAMES
from anypool.model_executor.models.transformers_backend import TransformersModel
from anypool.model_executor.models.transformers_backend.loading import HEAD_NAMES
from anypool.model_executor.stages import Elsewhere
from anypool.model_executor.weights.loading import slots_of
from anypool.pooling.pooler import DispatchPooler

# The tables that are looked up by token ids in native classes.
_TABLES = ("embed_tokens", "word_embeddings", "tok_embeddings")
# What stands before the names of modules in a whole sentence-transformers model: its first module's.
_FIRST_MODULE = re.compile(r"^0\.(auto_model|model)\.")


@dataclass(frozen=True)
class Place:
    """A layer, or some outputs of a fused one.

    Attributes:
        module: The layer, in the backbone or in a pooler.
        start, size: Which outputs; of a table, how many rows of what size.
        part: The checkpoint's name of the outputs of a fused layer; "" for all of a layer.
        is_table: Whether it is a table of embeddings rather than a linear layer.
        in_pooler: Whether it is part of a head.
        is_elsewhere: Whether another stage of a pipeline has it, so that only its shape is known here.
    """

    module: Any
    start: int
    size: int
    part: str = ""
    is_table: bool = False
    in_pooler: bool = False
    is_elsewhere: bool = False


class Places:
    """The layers of a model by PEFT's names for them.

    Args:
        model: The pooling model, with its poolers.
        head: What gives scores.
        recipe: What the sentence-transformers files say.
        claimed: Tensors of the checkpoint that heads were read from.

    Attributes:
        reads_lm_head: Whether scores come from rows of the LM head.
    """

    def __init__(self, model: Any, *, head: Head | None, recipe: Recipe, claimed: Collection[str]) -> None:
        self._model = model
        self._pooler: nn.Module | None = model.pooler if isinstance(model.pooler, nn.Module) else None
        self._backbone = dict(self._layers())
        self._heads = dict(self._head_layers(head, recipe))
        # A head made of its rows has no layers of its own.
        self.reads_lm_head = head is not None and not head.recipe.layers
        self._claimed = {name.rpartition(".")[0] for name in claimed}
        self._renames = [] if isinstance(model, TransformersModel) else getattr(model, "checkpoint_renames", ())
        self._unused = [re.compile(one) for one in self._unused_names()]

    @property
    def are_linear(self) -> bool:
        """Whether there is a linear layer in the backbone at all."""
        return any(not place.is_table for place in self._backbone.values())

    @property
    def linear(self) -> Iterator[Place]:
        """The linear layers of the backbone that are run here."""
        return (place for place in self._backbone.values() if not (place.is_table or place.is_elsewhere))

    def find(self, name: str) -> Place | None:
        """The layer that PEFT calls so; None where there is none."""
        for own in self._own_names(f"{name}.weight"):
            found = self._backbone.get(own.removesuffix(".weight"))
            if found is not None:
                return found
        return self._head(name)

    def parameter(self, name: str) -> nn.Parameter | None:
        """A whole parameter of the backbone that PEFT calls so, such as a norm's weight."""
        slots = slots_of(self._model)
        for stand_in, module in self._model.named_modules():
            if isinstance(module, Elsewhere):
                slots |= {f"{stand_in}.{own}": slot for own, slot in slots_of(module.module).items()}
        found = next((slots[own] for own in self._own_names(name) if own in slots), None)
        return None if found is None or found.shape != tuple(found.parameter.shape) else found.parameter

    def is_unused(self, name: str) -> bool:
        """Whether a layer that has no place here is one that pooling never runs, such as the LM head."""
        if any(name == own or name.endswith(f".{own}") for own in self._claimed):
            return False
        return any(pattern.search(f"{name}.weight") for pattern in self._unused)

    def _layers(self) -> Iterator[tuple[str, Place]]:
        inside = set() if self._pooler is None else set(self._pooler.modules())
        table, names = self._foreign_table(), (*_TABLES, *getattr(self._model, "lora_tables", ()))
        for name, module, elsewhere in self._modules():
            if module in inside:
                continue
            if isinstance(module, Linear) and module.parts:
                start, parent = 0, name.rpartition(".")[0]
                for part, size in module.parts.items():
                    yield f"{parent}.{part}", Place(module, start, size, part, is_elsewhere=elsewhere)
                    start += size
            elif isinstance(module, Linear):
                yield name, Place(module, 0, module.out_size, is_elsewhere=elsewhere)
            elif is_foreign_linear(module) or isinstance(module, nn.Linear):
                yield name, Place(module, 0, out_features(module))
            elif isinstance(module, Embedding) and name.rpartition(".")[2] in names:
                yield name, Place(module, 0, module.num_rows, is_table=True, is_elsewhere=elsewhere)
            elif table is not None and module is table:
                yield name, Place(module, 0, len(table.weight), is_table=True)

    def _modules(self) -> Iterator[tuple[str, Any, bool]]:
        """Every module by its name, and whether another stage has it."""
        for name, module in self._model.named_modules(remove_duplicate=False):
            if not isinstance(module, Elsewhere):
                yield name, module, False
                continue
            for inner, part in module.module.named_modules():
                yield f"{name}.{inner}" if inner else name, part, True

    def _foreign_table(self) -> nn.Embedding | None:
        """The table of embeddings of a module that runs through transformers."""
        if not isinstance(self._model, TransformersModel):
            return None
        try:
            table = self._model.model.get_input_embeddings()
        except (AttributeError, NotImplementedError):  # not every module has one
            return None
        return table if isinstance(table, nn.Embedding) else None

    def _head_layers(self, head: Head | None, recipe: Recipe) -> Iterator[tuple[str, Place]]:
        if head is not None:
            for layer, module in zip(head.recipe.layers, _children(head.module), strict=False):
                yield layer.tensor, _inner(module)
        if not isinstance(self._pooler, DispatchPooler):
            return
        several = recipe.multi_vector
        for pooler in self._pooler.poolers.values():
            chain = list(_children(getattr(pooler, "head", None)))
            if several is not None and several.projection is not None:
                yield from ((several.projection, _inner(module)) for module in chain)
                continue
            modules = recipe.modules if several is None else several.modules
            for (kind, path, _), module in zip(modules, chain, strict=False):
                number = re.match(r"\d+", path)
                if kind != "Normalize" and number is not None:
                    yield f"{number[0]}.{'linear' if kind == 'Dense' else 'norm'}", _inner(module)

    def _head(self, name: str) -> Place | None:
        """A head's layer, before whose name that of the base model may stand."""
        found = self._heads.get(name)
        return found if found is not None else self._heads.get(name.partition(".")[2])

    def _own_names(self, name: str) -> Iterator[str]:
        """What a tensor of PEFT's may be called in the model."""
        name = _FIRST_MODULE.sub("", name)
        if isinstance(self._model, TransformersModel):
            for prefix in self._model.module_prefixes:
                if name.startswith(prefix):
                    yield f"model.{name.removeprefix(prefix)}"
            return
        for pattern, replacement in self._renames:
            name = re.sub(pattern, replacement, name)
        yield from (f"{prefix}{name}" for prefix in ("", "model."))

    def _unused_names(self) -> tuple[str, ...]:
        if self.reads_lm_head:
            return ()
        if isinstance(self._model, TransformersModel):
            return (*LM_HEAD_NAMES, *HEAD_NAMES)
        return (*LM_HEAD_NAMES, *getattr(self._model, "ignored_checkpoint_names", ()))


def out_features(module: Any) -> int:
    """How many outputs a linear layer has; GPT-2's has its weight the other way round."""
    return int(module.out_features if isinstance(module, (Linear, nn.Linear)) else module.weight.shape[1])


def in_features(module: Any) -> int:
    """Size of a linear layer's input; of one that is split over processes, of all of it."""
    if isinstance(module, Linear):
        return module.in_size
    return int(module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0])


def _children(head: Any) -> Iterator[nn.Module]:
    return iter(head) if isinstance(head, nn.Sequential) else iter(() if head is None else (head,))


def _inner(module: Any) -> Place:
    """The layer inside a module of a head."""
    inner = getattr(module, "linear", None) or getattr(module, "norm", None) or module
    return Place(inner, 0, len(inner.weight), in_pooler=True)
