"""Which model a request names: one of a server's, or one of these with an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anypool.config import require
from anypool.entrypoints.serve.adapters import ServedAdapters
from anypool.entrypoints.serve.http_errors import HTTPError
from anypool.entrypoints.serve.served import ServedModel


class ServedModels:
    """The models of a server, of which the first serves whoever names none.

    Args:
        models: At least one.
        adapter_folders: LoRA adapters in these may be loaded while the server runs.

    Attributes:
        adapters: Their LoRA adapters.

    Raises:
        ConfigError: Two models or adapters have one name.
    """

    def __init__(self, models: Sequence[ServedModel], adapter_folders: Sequence[str] = ()) -> None:
        assert models
        self._models = tuple(models)
        self._by_name = {model.engine.config.model: model for model in reversed(models)}
        self._by_name |= {model.name: model for model in models}
        names = [model.name for model in models]
        require(len(set(names)) == len(names), f"two models have one name: {', '.join(names)}")
        self.adapters = ServedAdapters(models, adapter_folders)
        for model in models:
            model.siblings = self.adapters

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def all(self) -> tuple[ServedModel, ...]:
        """The models, and after them those with each of the adapters."""
        return (*self._models, *self.adapters.all())

    def find(self, name: str | None) -> ServedModel:
        """The model of that name, or the one with the adapter of that name.

        Raises:
            HTTPError: There is none.
        """
        if not name:
            return self._models[0]
        model = self._by_name.get(name) or self.adapters.find(name)
        if model is None:
            served = ", ".join(repr(one.name) for one in self.all())
            raise HTTPError(
                404, f"the model {name!r} is not served here; served: {served}", param="model", code="model_not_found"
            )
        return model
