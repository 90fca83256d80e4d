"""The tensors of a checkpoint by name, read one at a time."""

from __future__ import annotations

import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from anypool.errors import CheckpointFormatError, ModelNotFoundError
from anypool.model_executor.weights.repository import Repository

# How a file of Git LFS begins that stands for one which was not fetched.
_POINTER = b"version https://git-lfs"


class Checkpoint(ABC):
    """Named tensors. Only what is asked for is read."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor's name."""

    @abstractmethod
    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The wanted tensors, in the order in which they lie in the files."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""

    @abstractmethod
    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Some rows of a tensor, in the order given, without reading the others."""


class SafetensorsCheckpoint(Checkpoint):
    """One or several safetensors files, memory-mapped."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._names = {file: self._read(file, lambda tensors: list(tensors.keys())) for file in files}

    def names(self) -> list[str]:
        return [name for names in self._names.values() for name in names]

    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for file, names in self._names.items():
            if not wanted.isdisjoint(names):
                with safe_open(file, framework="pt") as tensors:
                    for name in names:
                        if name in wanted:
                            yield name, tensors.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._read(
            self._file_of(name), lambda tensors: tuple(tensors.get_slice(name).get_shape())
        )
        return shape

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        def read(tensors: Any) -> torch.Tensor:
            lazy = tensors.get_slice(name)
            return torch.cat([lazy[index : index + 1] for index in indices])

        rows: torch.Tensor = self._read(self._file_of(name), read)
        return rows

    def _file_of(self, name: str) -> Path:
        return next(file for file, names in self._names.items() if name in names)

    @staticmethod
    def _read(file: Path, use: Any) -> Any:
        try:
            with safe_open(file, framework="pt") as tensors:
                return use(tensors)
        except (SafetensorError, OSError) as error:
            fault = "it is damaged or cut short"
            if isinstance(error, SafetensorError) and _is_pointer(file):
                fault = "it is a Git LFS pointer, and the weights were not fetched: run `git lfs pull` in its folder"
            raise CheckpointFormatError(f"{file} cannot be read: {fault} ({error})") from error


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


class PickleCheckpoint(Checkpoint):
    """`pytorch_model.bin` files. Only tensors are unpickled, never code."""

    def __init__(self, files: list[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                # Files written before torch 1.6 are not zip archives, and only those can be mapped.
                stored = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
            except Exception as error:  # torch.load raises half a dozen unrelated types for a damaged file
                raise CheckpointFormatError(f"{file} cannot be read as plain tensors: {error}") from error
            if not isinstance(stored, dict) or not all(isinstance(t, torch.Tensor) for t in stored.values()):
                raise CheckpointFormatError(f"{file} is not a table of tensors by name")
            twice = sorted(self._tensors.keys() & stored.keys())
            if twice:
                raise CheckpointFormatError(
                    f"{file} holds tensors that another shard holds too: {', '.join(twice[:5])}"
                )
            self._tensors.update(stored)

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in self._tensors.items() if name in wanted)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        return self._tensors[name][list(indices)]


class ExtendedCheckpoint(Checkpoint):
    """A checkpoint with further tensors, such as an adapter's head."""

    def __init__(self, base: Checkpoint, further: Mapping[str, torch.Tensor]) -> None:
        assert not set(further) & set(base.names())
        self._base, self._further = base, dict(further)

    def names(self) -> list[str]:
        return [*self._base.names(), *self._further]

    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._base.tensors(wanted)
        yield from ((name, tensor) for name, tensor in self._further.items() if name in wanted)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._further[name].shape) if name in self._further else self._base.shape(name)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        return self._further[name][list(indices)] if name in self._further else self._base.rows(name, indices)


def open_checkpoint(repository: Repository, subfolder: str = "") -> Checkpoint:
    """Opens the weights of a checkpoint or of one of its module folders.

    Raises:
        ModelNotFoundError: There are none.
        CheckpointFormatError: A file is damaged, or a shard is missing.
    """
    if repository.gguf is not None:
        from anypool.model_executor.weights.gguf import GgufCheckpoint

        return GgufCheckpoint(repository.gguf)
    folder = repository.folder / subfolder
    for stem, suffix, kind in (
        ("model", ".safetensors", SafetensorsCheckpoint),
        ("pytorch_model", ".bin", PickleCheckpoint),
    ):
        files = _files(folder, stem + suffix)
        if files:
            return kind(files)
    raise ModelNotFoundError(
        f"{repository.name}: the folder {folder} has no weights: "
        "expected model.safetensors, its shards with an index, or pytorch_model.bin"
    )


def _files(folder: Path, name: str) -> list[Path]:
    """The single file, or the shards that its index lists."""
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return []
    try:
        shards = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointFormatError(f"{index} is not a valid index: {error!r}") from error
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointFormatError(f"{index} lists shards that are not there: {', '.join(missing)}")
    return shards
