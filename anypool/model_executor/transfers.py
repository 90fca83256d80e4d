"""Work goes to a device: in one copy for a batch, and back in one, through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Tensors begin at multiples of this many bytes, so that each can be seen in its own dtype.
_ALIGNMENT = 16


def make_current(device: torch.device) -> None:
    """Has this thread launch kernels, graphs and copies on a GPU; every thread starts out with the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Host tensors on the device, moved in one copy that the host does not wait for. On a CPU they stay what they are.

    Args:
        tensors: On the host.
        device: Where they go.
    """
    if device.type == "cpu":
        return list(tensors)
    # torch keeps pinned memory until the copies from it are done, and hands it out again.
    return views_of(staged(tensors, pin=True).to(device, non_blocking=True), tensors)


def staged(tensors: Sequence[torch.Tensor], *, pin: bool) -> torch.Tensor:
    """The bytes of tensors, one behind the other."""
    staging = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pin)
    for place, tensor in zip(views_of(staging, tensors), tensors, strict=True):
        place.copy_(tensor)
    return staging


def views_of(staging: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where these tensors lie in the bytes that `staged` gives for them."""
    views, start = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        views.append(staging[start : start + size].view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    return views


def to_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """float32 copies on the host, moved in one copy; on a CPU the tensors themselves where they are float32."""
    if all(value.device.type == "cpu" for value in values):
        return [value.float() for value in values]
    flat = values[0].float().flatten() if len(values) == 1 else torch.cat([value.float().flatten() for value in values])
    host = torch.empty(flat.shape, dtype=torch.float32, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    torch.cuda.current_stream(flat.device).synchronize()
    parts = host.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
