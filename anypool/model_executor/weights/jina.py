"""The tensors of Jina's XLM-RoBERTa: query, key and value in one, and the adapters of all tasks in each layer.

The names are those of its authors' code, jinaai/xlm-roberta-flash-implementation: a layer that has adapters keeps its
weight under `parametrizations.weight.original`, and beside it lora_A and lora_B with a first dimension of tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from anypool.errors import WeightsError
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.lora import ModulePatch

_ORIGINAL = ".parametrizations.weight.original"
_ADAPTED = re.compile(r"(.+)\.parametrizations\.weight\.0\.(lora_[AB])")
_FUSED = re.compile(r"(.+)\.mixer\.Wqkv\.(weight|bias)")
_PARTS = ("q_proj", "k_proj", "v_proj")


class FlashCheckpoint(Checkpoint):
    """The backbone of such a checkpoint: without adapters, and with query, key and value apart.

    Args:
        stored: The tensors as they are stored.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self._sources: dict[str, tuple[str, int | None]] = {}  # name -> as stored, and which third of its rows
        for name in stored.names():
            if _ADAPTED.fullmatch(name):
                continue
            plain = name.removesuffix(_ORIGINAL) + ".weight" if name.endswith(_ORIGINAL) else name
            fused = _FUSED.fullmatch(plain)
            if fused is None:
                self._sources[plain] = (name, None)
            else:
                for third, part in enumerate(_PARTS):
                    self._sources[f"{fused[1]}.self_attn.{part}.{fused[2]}"] = (name, third)

    def names(self) -> list[str]:
        return list(self._sources)

    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        needed: dict[str, list[str]] = {}
        for name in wanted:
            needed.setdefault(self._sources[name][0], []).append(name)
        for stored, tensor in self._stored.tensors(set(needed)):
            for name in needed[stored]:
                third = self._sources[name][1]
                yield name, tensor if third is None else tensor[self._rows(len(tensor), third)]

    def shape(self, name: str) -> tuple[int, ...]:
        stored, third = self._sources[name]
        rows, *others = self._stored.shape(stored)
        return (rows if third is None else rows // 3, *others)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        stored, third = self._sources[name]
        first = 0 if third is None else self._rows(self._stored.shape(stored)[0], third).start
        return self._stored.rows(stored, [first + index for index in indices])

    @staticmethod
    def _rows(count: int, third: int) -> slice:
        return slice(third * count // 3, (third + 1) * count // 3)


def read_task_patches(
    stored: Checkpoint, tasks: Sequence[str], *, rank: int, alpha: float, name: str
) -> list[dict[str, ModulePatch]]:
    """What each task changes, by the module's name.

    Of a linear layer lora_A is `[tasks, rank, in]` and lora_B `[tasks, out, rank]`; of a table it is the other way
    round, `[tasks, rows, rank]` and `[tasks, rank, size]`. What is added is `alpha / rank` times their product.

    Args:
        stored: The checkpoint.
        tasks: Their names, in the order in which they are stored.
        rank: Of the adapters.
        alpha: Their `lora_alpha`.
        name: Of the model, for messages.

    Raises:
        WeightsError: There are none, half of a pair, or some of other shapes than these.
    """
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    found = {one: match for one in stored.names() if (match := _ADAPTED.fullmatch(one))}
    for one, tensor in stored.tensors(set(found)):
        pairs.setdefault(found[one][1], {})[found[one][2]] = tensor
    if not pairs:
        raise WeightsError(
            f"{name}: config.json names the tasks {', '.join(tasks)} in lora_adaptations, and the checkpoint has no "
            "adapters for them. Pass hf_overrides={'lora_adaptations': None} to take the weights as they are"
        )
    patches: list[dict[str, ModulePatch]] = [{} for _ in tasks]
    for module, pair in pairs.items():
        is_table = "embeddings" in module.rpartition(".")[2]
        _check(module, pair, is_table, (len(tasks), rank), name)
        for number, own in enumerate(patches):
            a, b = pair["lora_A"][number], pair["lora_B"][number]
            own |= _table(module, a, b, alpha / rank) if is_table else _linear(module, a, b, alpha / rank)
    return patches


def refuse_task_tensors(stored: Checkpoint, name: str) -> None:
    """Refuses adapters that config.json does not name."""
    found = [one for one in stored.names() if _ADAPTED.fullmatch(one)]
    if found:
        raise WeightsError(
            f"{name}: the checkpoint has {len(found):,} tensors of adapters, such as {found[0]}, and config.json names "
            "no tasks in lora_adaptations"
        )


def _check(module: str, pair: Mapping[str, torch.Tensor], is_table: bool, expected: tuple[int, int], name: str) -> None:
    shapes = {part: tuple(tensor.shape) for part, tensor in pair.items()}
    a, b = (shapes.get(part, ()) for part in (("lora_B", "lora_A") if is_table else ("lora_A", "lora_B")))
    # Whatever it is, the one is [tasks, rank, size] and the other [tasks, size, rank].
    if len(a) != 3 or len(b) != 3 or a[:2] != expected or (b[0], b[2]) != expected:
        raise WeightsError(
            f"{name}: the adapters of {module} have the shapes {shapes}, which are not those of {expected[0]} tasks of "
            f"rank {expected[1]}"
        )


def _table(module: str, a_VR: torch.Tensor, b_RE: torch.Tensor, scaling: float) -> dict[str, ModulePatch]:
    return {module: ModulePatch(name=module, scaling=scaling, embedding_a=a_VR.t(), embedding_b=b_RE.t())}


def _linear(module: str, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float) -> dict[str, ModulePatch]:
    """For a layer, or for the three that are fused in it, which share A."""
    parent, _, last = module.rpartition(".mixer.")
    if last != "Wqkv":
        return {module: ModulePatch(name=module, scaling=scaling, a=a_RI, b=b_OR)}
    names = [f"{parent}.self_attn.{part}" for part in _PARTS]
    return {
        one: ModulePatch(name=one, scaling=scaling, a=a_RI, b=part_OR)
        for one, part_OR in zip(names, b_OR.chunk(3), strict=True)
    }
