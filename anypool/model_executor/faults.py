"""What an error of torch says about the device."""

from __future__ import annotations

import traceback

import torch

# After these every further call fails, whatever it is, until the process ends. CUDA's words and HIP's.
_STICKY = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "illegal instruction",
    "unspecified launch failure",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable ECC error",
    "launch timed out",
    "device is lost",
    "device not available",
)
# Memory that a library of the device could not have, for which torch has no class.
_NO_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "out of memory")


class PeerFailedError(RuntimeError):
    """Another process has failed with a batch, so this one cannot run it either."""


# What gloo says of a process that closed its connections.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")


def is_peers_failure(error: BaseException) -> bool:
    """Whether the cause is with another process, which has an error of its own."""
    if isinstance(error, PeerFailedError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)


def forget_tensors(error: BaseException | None) -> None:
    """Frees the local variables of the calls that an error went through: they hold the memory of the failed pass."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_sticky(error: BaseException) -> bool:
    """Whether the device is of no more use to this process: every call after this error fails."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    text = str(error)
    return ("CUDA error" in text or "HIP error" in text) and any(words in text for words in _STICKY)
