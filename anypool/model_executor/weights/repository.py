"""The files of a checkpoint: a local folder, a hub repository or one GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anypool.errors import CheckpointFormatError, ModelNotFoundError, UnsupportedArchitectureError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer_config.json",
)
# What a hub download fetches beside the weights.
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.metadata", "*_linear.pt")


@dataclass(frozen=True)
class Repository:
    """A checkpoint on disk.

    Attributes:
        name: As the user named it, for messages.
        folder: The folder with its files.
        gguf: The GGUF file, where the checkpoint is one.
        base: What it is an adapter of, where it is one that is merged while loading: config.json is that one's.
    """

    name: str
    folder: Path
    gguf: Path | None = None
    base: Repository | None = None

    @classmethod
    def open(cls, model: str, *, revision: str | None = None, cache_dir: str | None = None) -> Repository:
        """Finds a checkpoint, and fetches it where `model` is a hub id.

        Args:
            model: A folder, a `.gguf` file or a hub id such as `org/name`.
            revision: Branch, tag or commit of a hub repository.
            cache_dir: Where downloads are kept.

        Raises:
            ModelNotFoundError: There is no such folder, file or repository, or it cannot be reached.
        """
        path = Path(model).expanduser()
        if path.is_dir():
            return cls(model, path)
        if path.is_file() and path.suffix == ".gguf":
            return cls(path.stem, path.parent, gguf=path)
        if path.is_file():
            raise ModelNotFoundError(f"{model} is a file; give the checkpoint's folder, or a .gguf file")
        if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.suffix == ".gguf":
            raise ModelNotFoundError(f"{model}: no such folder or .gguf file")
        return cls(model, _download(model, revision, cache_dir))

    def subfolder(self, path: str) -> Repository:
        """The checkpoint in a folder of this one; "" is this one."""
        if path == "":
            return self
        folder = self.folder / path
        if not folder.is_dir():
            raise CheckpointFormatError(f"{self.name}: modules.json names a folder {path!r} that is not there")
        return Repository(self.name, folder)

    def exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def read_json(self, name: str) -> Any:
        """The parsed file, or None where there is none."""
        path = self.folder / name
        if self.gguf is not None or not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"), object_hook=_object_or_float)
        except (ValueError, RecursionError) as error:
            raise CheckpointFormatError(f"{self.name}: {name} is not valid JSON: {error}") from error
        if content is None:  # which must not pass for a file that is not there
            raise CheckpointFormatError(f"{self.name}: {name} holds null")
        return content

    def read_object(self, name: str) -> dict[str, Any] | None:
        """The parsed file, which must hold an object, or None where there is none."""
        content = self.read_json(name)
        if content is not None and not isinstance(content, dict):
            raise CheckpointFormatError(f"{self.name}: {name} is not an object, but {type(content).__name__}")
        return content

    def read_config(self) -> dict[str, Any]:
        """config.json, or what a GGUF file says in its place."""
        if self.gguf is not None:
            from anypool.model_executor.weights.gguf import read_gguf_config

            return read_gguf_config(self.gguf)
        if self.base is not None:
            return self.base.read_config()
        config = self.read_object("config.json")
        if self.exists("adapter_config.json"):
            base = (self.read_object("adapter_config.json") or {}).get("base_model_name_or_path")
            what = "and not a model" if config is None else "whose files lie beside a model that is another without it"
            raise UnsupportedArchitectureError(
                f"{self.name} is a LoRA adapter of {base}, {what}: merge it into that with peft and save the "
                "result, or take a checkpoint in which it is merged (vidore's have -hf in their name)"
            )
        if config is None:
            raise ModelNotFoundError(f"{self.name}: the folder {self.folder} has no config.json")
        return config


def _object_or_float(value: dict[str, Any]) -> Any:
    """An object, or the float that transformers writes as one since JSON has no word for it: infinity or NaN."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _download(model: str, revision: str | None, cache_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, allow_patterns=list(patterns)))

    try:
        folder = fetch(*_SMALL_FILES, "*.safetensors")
        if not any(folder.glob("*.safetensors")):
            folder = fetch("*.bin")
        elif any(folder.glob("[0-9]_*/pytorch_model.bin")) or not any(folder.glob("[0-9]_*/*.safetensors")):
            folder = fetch("[0-9]_*/*.bin")
        return folder
    except HFValidationError as error:
        raise ModelNotFoundError(f"{model}: no such folder, and not a valid hub id") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(
            f"{model}: no such folder, and the hub repository{at} cannot be fetched: {error}"
        ) from error
