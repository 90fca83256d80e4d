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


class ToHost:
    """float32 copies on the host, on their way in one copy; on a CPU the tensors themselves where they are float32.

    Args:
        values: On the device. They may be overwritten by what is launched there later.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if all(value.device.type == "cpu" for value in values):
            self._parts = [value.float() for value in values]
            return
        flats = [value.float().flatten() for value in values]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        host = torch.empty(flat.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(flat.device))
        parts = host.split([value.numel() for value in values])
        self._parts = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[torch.Tensor]:
        """The copies, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._parts


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
