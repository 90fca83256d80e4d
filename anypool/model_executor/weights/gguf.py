"""GGUF files, through transformers' tables of names and gguf's dequantisation (extra: anypool[gguf])."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from anypool.errors import CheckpointFormatError, MissingDependencyError, UnsupportedArchitectureError
from anypool.model_executor.weights.checkpoint import Checkpoint


def _gguf_tools() -> Any:
    try:
        import gguf  # noqa: F401 - its presence is what is asked
        from transformers import modeling_gguf_pytorch_utils
    except ImportError as error:
        raise MissingDependencyError(
            "reading GGUF files needs two more packages: pip install 'anypool[gguf]'"
        ) from error
    return modeling_gguf_pytorch_utils


def read_gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would say. A GGUF file names no architecture: it is a causal LM's unless known otherwise."""
    tools = _gguf_tools()
    try:
        config: dict[str, Any] = tools.load_gguf_checkpoint(str(path))["config"]
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointFormatError(f"{path}: not a GGUF file that transformers can read: {error}") from error
    return config


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under transformers' names, dequantised to float32 one at a time."""

    def __init__(self, path: Path) -> None:
        tools = _gguf_tools()
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoModelForCausalLM

        config = read_gguf_config(path)
        try:
            hf_config = AutoConfig.for_model(**config)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(hf_config)
        except ValueError as error:
            raise UnsupportedArchitectureError(
                f"{path}: transformers cannot build a {config.get('model_type')!r} causal LM: {error}"
            ) from error
        reader = GGUFReader(str(path))
        architecture = tools.read_field(reader, "general.architecture")[0]
        processor = tools.TENSOR_PROCESSORS.get(architecture, tools.TensorProcessor)(config=config)
        self._map: dict[str, str] = tools.get_gguf_hf_weights_map(model, processor)
        self._processor = processor
        self._tensors = {self._map[t.name]: t for t in reader.tensors if t.name in self._map}
        unknown = [t.name for t in reader.tensors if t.name not in self._map and t.name != "rope_freqs.weight"]
        if unknown:
            raise CheckpointFormatError(f"{path}: tensors that transformers has no name for: {', '.join(unknown[:5])}")

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from gguf import dequantize

        for name, tensor in self._tensors.items():
            if name in wanted:
                values = dequantize(tensor.data, tensor.tensor_type)
                values = self._processor.process(
                    weights=values, name=tensor.name, tensor_key_mapping=self._map, parsed_parameters={"tensors": {}}
                ).weights
                yield name, torch.from_numpy(numpy.ascontiguousarray(values))
