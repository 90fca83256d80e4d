"""GGUF files, through transformers' tables of names and the gguf package's dequantisation (extra: anypool[gguf])."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch

from anypool.errors import CheckpointFormatError, MissingDependencyError, UnsupportedArchitectureError
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.gguf_header import GgufTensor, read_gguf_header

# GGUF architecture -> model type, where the metadata keys map one to one to config.json. transformers reads the others
# in full, which is slow.
_MODEL_TYPES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# Tensors that hold what the configuration says already.
_REDUNDANT = ("rope_freqs.weight",)


def _tables() -> Any:
    """transformers' module with the tables of names."""
    try:
        import gguf  # noqa: F401 - the tables come from it
        from transformers import modeling_gguf_pytorch_utils as tables
    except ImportError as error:
        raise MissingDependencyError("reading GGUF files needs more packages: pip install 'anypool[gguf]'") from error
    return tables


def read_gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would say. A GGUF file names no class; its model type stands for the causal LM."""
    tables = _tables()
    header = read_gguf_header(path)
    metadata = header.metadata
    architecture = str(metadata.get("general.architecture"))
    model_type = _MODEL_TYPES.get(architecture)
    if model_type is None:
        try:
            config: dict[str, Any] = tables.load_gguf_checkpoint(str(path))["config"]
        except (ValueError, KeyError, IndexError) as error:
            raise CheckpointFormatError(f"{path}: a GGUF file that transformers cannot read: {error}") from error
        return config
    if architecture == "llama" and "mistral" in str(metadata.get("general.name", "")).lower():
        model_type = "mistral"
    table = tables.GGUF_TO_TRANSFORMERS_MAPPING["config"][architecture]
    config = dict(tables.GGUF_CONFIG_DEFAULTS_MAPPING.get(architecture) or {})
    for key, name in table.items():
        if name not in (None, -1) and f"{architecture}.{key}" in metadata:
            config[name] = metadata[f"{architecture}.{key}"]
    return {
        "vocab_size": metadata.get("tokenizer.ggml.tokens"),  # an array of strings, of which the size was kept
        **config,
        "model_type": model_type,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in header.tensors),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under transformers' names, dequantised to float32 one at a time."""

    def __init__(self, path: Path) -> None:
        tables = _tables()
        config = read_gguf_config(path)
        header = read_gguf_header(path)
        architecture = header.metadata["general.architecture"]
        processor = tables.TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)(config=config)
        self._map: dict[str, str] = tables.get_gguf_hf_weights_map(_meta_model(path, config), processor)
        unknown = [t.name for t in header.tensors if t.name not in self._map and t.name not in _REDUNDANT]
        if unknown:
            raise CheckpointFormatError(f"{path}: tensors that transformers has no name for: {', '.join(unknown[:5])}")
        self._path = path
        self._processor = processor
        self._tensors = {self._map[t.name]: t for t in header.tensors if t.name in self._map}

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        data = numpy.memmap(self._path, mode="r", dtype=numpy.uint8)
        for name, tensor in self._tensors.items():
            if name in wanted:
                # The processors undo what the converter did: Llama's permuted rows, Gemma's norms stored plus one.
                values = self._processor.process(
                    weights=self._dequantize(data, tensor),
                    name=tensor.name,
                    tensor_key_mapping=self._map,
                    parsed_parameters={"tensors": {}},
                ).weights
                yield name, torch.from_numpy(numpy.ascontiguousarray(values, dtype=numpy.float32))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        [(_, values)] = self.tensors({name})
        return values[list(indices)]

    def _dequantize(self, data: Any, tensor: GgufTensor) -> Any:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(tensor.type)
        block, size = GGML_QUANT_SIZES[kind]
        count = prod(tensor.shape) // block * size
        raw = data[tensor.offset : tensor.offset + count]
        if len(raw) < count:
            raise CheckpointFormatError(f"{self._path} is cut short: tensor {tensor.name!r} is not all there")
        return dequantize(raw.reshape(*tensor.shape[:-1], -1), kind).reshape(tensor.shape)


def _meta_model(path: Path, config: dict[str, Any]) -> Any:
    """The causal LM without memory: its parameter names are what GGUF names are matched with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except ValueError as error:
        raise UnsupportedArchitectureError(
            f"{path}: transformers cannot build a {config.get('model_type')!r} causal LM: {error}"
        ) from error
