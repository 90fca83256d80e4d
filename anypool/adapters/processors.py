"""transformers' processor of a checkpoint: what its images and the text around them go through."""

from __future__ import annotations

from typing import Any

from anypool.errors import CheckpointFormatError, MissingDependencyError
from anypool.model_executor.weights.repository import Repository

_HINT = "images go through transformers' processors: pip install 'anypool[multimodal]'"


def load_processor(repository: Repository, *, cls: str | None = None, trust_remote_code: bool = False) -> Any:
    """The processor of a checkpoint. Where torchvision is not installed its images go through Pillow.

    Args:
        repository: The checkpoint.
        cls: A class of transformers, where it is not the one that the files name.
        trust_remote_code: Whether code that comes with it may be run.

    Raises:
        CheckpointFormatError: There is none, or transformers cannot read it.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401 - transformers finds out later, and says less
        import transformers
    except ImportError as error:
        raise MissingDependencyError(_HINT) from error
    from transformers.utils.import_utils import is_torchvision_available

    try:
        if not is_torchvision_available() and (without := _without_video(repository, cls)) is not None:
            return without
        known = getattr(transformers, cls or "AutoProcessor")
        return known.from_pretrained(repository.folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # processors raise whatever they meet in a file, or where one is missing
        raise CheckpointFormatError(
            f"{repository.name}: transformers cannot load its image processor: {type(error).__name__}: {error}"
        ) from error


def _without_video(repository: Repository, cls: str | None) -> Any:
    """A processor of images and videos without its part for videos, which needs torchvision; None for any other."""
    import transformers

    config = repository.read_object("processor_config.json") or repository.read_object("preprocessor_config.json") or {}
    base: Any = getattr(transformers, cls or str(config.get("processor_class")), None)
    if base is None or "video_processor" not in base.get_attributes():
        return None

    class WithoutVideo(base):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument) if argument is None else super().check_argument_for_proper_class(name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, path: Any, *_: Any, **__: Any) -> list[Any]:
            parts = {
                "image_processor": transformers.AutoImageProcessor.from_pretrained,
                "tokenizer": transformers.AutoTokenizer.from_pretrained,
            }
            return [parts[name](path) if name in parts else None for name in base.get_attributes()]

    WithoutVideo.__name__ = base.__name__
    return WithoutVideo.from_pretrained(repository.folder)
