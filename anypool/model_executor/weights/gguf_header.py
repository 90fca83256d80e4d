"""The header of a GGUF file: key-values and the table of tensors, as its specification lays them out.

(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.) The gguf package's own reader makes numpy views of every
string of the vocabulary, which takes half a minute for 262 thousand of them; skipping them takes a tenth of a second.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from anypool.errors import CheckpointFormatError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies: its shape in torch's order, its block type, and its offset in the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Key-values, with an array of strings replaced by its length, and the tensors."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parses the header.

    Raises:
        CheckpointFormatError: It is not a GGUF file of version 2 or 3, or it is cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).header()
    except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise CheckpointFormatError(f"{path}: not a GGUF file, or one that is cut short: {error!r}") from error


class _Cursor:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise CheckpointFormatError(f"{self.path}: not a GGUF file: it does not begin with 'GGUF'")
        self.at = 4
        version, tensor_count, pair_count = self.numbers("IQQ")
        if version not in (2, 3):
            raise CheckpointFormatError(f"{self.path}: GGUF version {version} is not supported; known: 2, 3")
        metadata = {}
        for _ in range(pair_count):
            key = self.string()
            metadata[key] = self.value(*self.numbers("I"))
        table = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        return GgufHeader(metadata, tuple(GgufTensor(t.name, t.shape, t.type, start + t.offset) for t in table))

    def numbers(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + format, self.data, self.at)
        self.at += struct.calcsize("<" + format)
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        text = self.data[self.at : self.at + length].decode("utf-8")
        self.at += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(_SCALARS[kind])[0]
        item, count = self.numbers("IQ")
        if item != _STRING:
            return list(self.numbers(f"{count}{_SCALARS[item]}"))
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self.data, self.at)
            self.at += 8 + length
        return count

    def tensor(self) -> GgufTensor:
        name = self.string()
        (rank,) = self.numbers("I")
        dimensions = self.numbers(f"{rank}Q")
        kind, offset = self.numbers("IQ")
        assert prod(dimensions) > 0
        return GgufTensor(name, tuple(reversed(dimensions)), kind, offset)
