"""Where the patches of images stand among a prompt's tokens, for models whose patches cover an image as one grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anypool.model_executor.images import PatchGrid

# What an image processor may do so that its pixels are not the whole of an image, or more than it.
_NOT_THE_IMAGE = ("do_center_crop", "do_pad", "do_pan_and_scan", "do_image_splitting", "crop_to_patches")


def patch_grids(
    ids: Sequence[int],
    tensors: Mapping[str, torch.Tensor],
    count: int,
    *,
    image_token: int | None,
    patch_size: int | None,
    image_processor: Any,
) -> tuple[PatchGrid, ...] | None:
    """The grid of each image, or None where there is none: images are cut into tiles, cropped, padded or resampled.

    Args:
        ids: Token ids of the prompt.
        tensors: What the vision tower takes.
        count: How many images there are.
        image_token: The token in whose places patches stand; None where it is not known.
        patch_size: Side of the vision tower's patches in pixels.
        image_processor: transformers' own.
    """
    shapes = _shapes(tensors, count, patch_size, image_processor)
    places = [place for place, token in enumerate(ids) if token == image_token]
    if shapes is None or len(places) != sum(rows * columns for rows, columns in shapes):
        return None
    grids, start = [], 0
    for rows, columns in shapes:
        first, last = places[start], places[start + rows * columns - 1]
        if last - first + 1 != rows * columns:
            return None  # a token of another kind after each row
        grids.append(PatchGrid(rows, columns, first))
        start += rows * columns
    return tuple(grids)


def num_patches(tensors: Mapping[str, torch.Tensor], patch_size: int) -> int:
    """How many patches one image has."""
    pixels = tensors["pixel_values"]
    if "spatial_shapes" in tensors:  # patches already
        return int(pixels.shape[1])
    return int((pixels.shape[-2] // patch_size) * (pixels.shape[-1] // patch_size))


def _shapes(
    tensors: Mapping[str, torch.Tensor], count: int, patch_size: int | None, image_processor: Any
) -> list[tuple[int, int]] | None:
    """Rows and columns of each image."""
    if "image_grid_thw" in tensors:  # patches before `merge_size` x `merge_size` of them become one token
        sizes = tensors["image_grid_thw"].tolist()
        merge = getattr(image_processor, "merge_size", None)
        return (
            None
            if merge is None
            else [(rows // merge, columns // merge) for frames, rows, columns in sizes if frames == 1]
        )
    pixels = tensors.get("pixel_values")
    if patch_size is None or pixels is None or pixels.ndim != 4 or len(pixels) != count:
        return None
    if any(getattr(image_processor, name, False) for name in _NOT_THE_IMAGE):
        return None
    return [(pixels.shape[-2] // patch_size, pixels.shape[-1] // patch_size)] * count
