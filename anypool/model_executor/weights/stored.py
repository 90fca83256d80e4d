"""How many bytes of tensors a checkpoint's files hold, told from their headers."""

from __future__ import annotations

import struct
from pathlib import Path

from anypool.model_executor.weights.repository import Repository


def stored_bytes(repository: Repository) -> int | None:
    """Bytes of tensors in the safetensors files of a checkpoint, or what their index says; None where neither is there.

    A safetensors file is the length of its header in 8 bytes, the header, and the tensors.
    """
    index = repository.read_object("model.safetensors.index.json")
    names = ["model.safetensors"] if index is None else sorted(set((index.get("weight_map") or {}).values()))
    files = [repository.folder / name for name in names]
    if files and all(file.is_file() for file in files):
        return sum(map(_tensor_bytes, files))
    total = ((index or {}).get("metadata") or {}).get("total_size")
    return None if total is None else int(total)


def _tensor_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        [header] = struct.unpack("<Q", opened.read(8))
    return file.stat().st_size - 8 - int(header)
