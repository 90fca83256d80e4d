"""Images as a vision tower takes them, and a cache of what it made of them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from anypool.model_executor.layers.lora import LoRASlots

# Memory for the features of images that were seen lately.
CACHE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class PatchGrid:
    """The patches of one image, which cover the whole of it in equal cells.

    Attributes:
        rows, columns: Its size in patches.
        first: Place of the first of its tokens in the prompt; the others follow, row by row from the top left.
    """

    rows: int
    columns: int
    first: int


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """What a processor made of the images of one prompt.

    Attributes:
        tensors: What the vision tower takes, by the name of its argument, on the host.
        by_token: `[L]` per token of the prompt, such as `token_type_ids`, by name.
        count: How many images there are.
        grids: The patches of each image; None where they are no single grid.
    """

    tensors: Mapping[str, torch.Tensor]
    by_token: Mapping[str, torch.Tensor] = field(default_factory=dict)
    count: int = 1
    grids: tuple[PatchGrid, ...] | None = None

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal images."""
        found = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(content)
        return found.digest()

    @cached_property
    def each(self) -> tuple[ImageInputs, ...]:
        """The images one by one, or all together where the processor does not keep them apart."""
        if self.count == 1:
            return (self,)
        grid = self.tensors.get("image_grid_thw")
        sizes = [1] * self.count if grid is None else grid.prod(-1).tolist()
        parts: dict[str, Sequence[torch.Tensor]] = {}
        for name, tensor in self.tensors.items():
            if tensor.shape[0] == self.count:
                parts[name] = tensor.split(1)
            elif tensor.shape[0] == sum(sizes):
                parts[name] = tensor.split(sizes)
            else:
                return (self,)
        return tuple(ImageInputs({name: part[i] for name, part in parts.items()}) for i in range(self.count))


class FeatureCache:
    """What a vision tower gave for images, by the images' digest; the least recently used is dropped first.

    Args:
        most_bytes: How much memory it may hold.

    Attributes:
        computed: How many images went through the tower.
        slots: LoRA adapters that change the tower; while one of them runs, nothing is looked up or kept.
    """

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self.most_bytes = most_bytes
        self.computed = 0
        self.slots: LoRASlots | None = None
        self._bytes = 0
        self._kept: OrderedDict[bytes, Any] = OrderedDict()

    def get(self, images: Sequence[ImageInputs], compute: Callable[[list[ImageInputs]], Sequence[Any]]) -> list[Any]:
        """What the tower gives for images.

        Args:
            images: In any order, with repetitions.
            compute: The tower, over images that are all different and not in the cache: tensors, or objects of them.
        """
        if self.slots is not None and self.slots.is_active:
            self.computed += len(images)
            return list(compute(list(images)))
        found = {one.digest: self._kept[one.digest] for one in images if one.digest in self._kept}
        new = list({one.digest: one for one in images if one.digest not in found}.values())
        if new:
            self.computed += len(new)
            found |= zip((one.digest for one in new), compute(new), strict=True)
        for digest, features in found.items():
            self._keep(digest, features)
        return [found[one.digest] for one in images]

    def _keep(self, digest: bytes, features: Any) -> None:
        if digest not in self._kept:
            self._kept[digest] = features
            self._bytes += _size(features)
        self._kept.move_to_end(digest)
        while self._bytes > self.most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(features: Any) -> int:
    """Bytes of the tensors in an object."""
    if isinstance(features, torch.Tensor):
        return features.nbytes
    if isinstance(features, Mapping):
        return sum(map(_size, features.values()))
    return sum(map(_size, features)) if isinstance(features, (list, tuple)) else 0
