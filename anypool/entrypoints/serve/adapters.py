"""The LoRA adapters that a server has, each a model of its own to whoever calls it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from anypool.config import LoRARequest, require
from anypool.entrypoints.serve.http_errors import HTTPError
from anypool.entrypoints.serve.served import ServedModel
from anypool.errors import InvalidParameterError, ModelLoadError

# What is known of each takes little memory, and must not take more and more.
MOST_ADAPTERS = 1000
LONGEST_NAME = 200


class ServedAdapters:
    """Adapters by name, those of all models together. Methods may be called from any thread.

    Args:
        models: The models, with the adapters that they were started with.
        folders: Adapters in these may be loaded while the server runs.

    Raises:
        ConfigError: Two adapters have one name, or an adapter has that of a model.
    """

    def __init__(self, models: Sequence[ServedModel], folders: Sequence[str] = ()) -> None:
        self.folders = tuple(Path(folder).resolve() for folder in folders)
        self._taken = {name for model in models for name in (model.name, model.engine.config.model)}
        self._changing = threading.Lock()
        self._by_name: dict[str, ServedModel] = {}  # replaced, never changed: it is read without the lock
        takers = [model for model in models if model.engine.lora is not None and model.engine.lora.takes_more]
        require(not folders or bool(takers), f"lora_dir={list(folders)!r} has no effect without enable_lora")
        for model in takers:
            assert model.engine.lora is not None
            for request in model.engine.lora.requests:
                name = request.lora_name
                require(
                    name not in self._taken and name not in self._by_name,
                    f"the name {name!r} of an adapter of {model.name} is another adapter's, or a model's",
                )
                self._by_name[name] = model.adapted(request)

    def find(self, name: str) -> ServedModel | None:
        """The model with the adapter of that name."""
        return self._by_name.get(name)

    def all(self) -> tuple[ServedModel, ...]:
        """The models with each of the adapters, in the order in which these came."""
        return tuple(self._by_name.values())

    def load(self, model: ServedModel, name: str, path: str, *, in_place: bool = False) -> ServedModel:
        """Reads an adapter, which requests may name from then on.

        Args:
            model: What it is for, with or without another adapter.
            name: What it is called.
            path: A folder inside one of `folders`, from there or from the root.
            in_place: Whether it takes the place of another one of its name. Requests that wait get either.

        Returns:
            The model with the adapter.

        Raises:
            InvalidParameterError: The name is taken, or the adapter cannot be read or does not fit the model.
            HTTPError: There is no such adapter, or there are too many.
        """
        manager = model.engine.lora
        if manager is None or not manager.takes_more:
            raise InvalidParameterError(f"{model.name} was started without enable_lora", param="model")
        self._check_name(name)
        folder = self._folder(path)
        with self._changing:
            before = self._by_name.get(name)
            if before is not None and not in_place:
                raise InvalidParameterError(f"the adapter {name!r} is loaded already", param="lora_name")
            if before is None and len(self._by_name) >= MOST_ADAPTERS:
                raise HTTPError(400, f"there are {MOST_ADAPTERS:,} adapters, the limit: unload one", code="too_many")
            number = 1 + max((request.lora_int_id for request in manager.requests), default=0)
            request = LoRARequest(name, number, str(folder))
            try:
                manager.add(request)
            except ModelLoadError as error:
                raise InvalidParameterError(f"lora_path={path!r}: {error}", param="lora_path") from error
            except OSError as error:
                raise InvalidParameterError(f"lora_path={path!r}: {error.strerror}", param="lora_path") from error
            adapted = (model.parent or model).adapted(request)
            self._by_name = {**self._by_name, name: adapted}
            if before is not None:
                _forget(before)
            return adapted

    def unload(self, name: str) -> None:
        """Forgets an adapter. Requests that run with it end as they would have; those that wait may be refused.

        Raises:
            HTTPError: There is none of that name.
        """
        with self._changing:
            before = self._by_name.get(name)
            if before is None:
                raise HTTPError(
                    404, f"there is no adapter {name!r:.{LONGEST_NAME}}", param="lora_name", code="adapter_not_found"
                )
            self._by_name = {key: view for key, view in self._by_name.items() if key != name}
            _forget(before)

    def _check_name(self, name: str) -> None:
        if not (0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()):
            raise InvalidParameterError(
                f"lora_name={name!r:.{LONGEST_NAME}} is no name: give 1 to {LONGEST_NAME} printable characters",
                param="lora_name",
            )
        if name in self._taken:
            raise InvalidParameterError(f"{name!r} is the name of a model here: give another", param="lora_name")

    def _folder(self, path: str) -> Path:
        """Where an adapter lies. Of what lies outside of the folders, nothing is told, not even whether it is there."""
        for root in self.folders:
            try:
                folder = (root / path).resolve()
                if folder.is_relative_to(root) and (folder / "adapter_config.json").is_file():
                    return folder
            except (OSError, ValueError, RuntimeError):  # no path of this machine, or a link in a circle
                continue
        raise HTTPError(
            404,
            f"lora_path={path!r:.{LONGEST_NAME}} has no adapter_config.json in the folders of --lora-dir, which this "
            "server loads adapters from",
            param="lora_path",
            code="adapter_not_found",
        )


def _forget(view: ServedModel) -> None:
    assert view.lora is not None and view.engine.lora is not None
    view.engine.lora.remove(view.lora.lora_int_id)
