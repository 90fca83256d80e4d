"""`--lora-modules`: adapters by name, and which of several models each is for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from anypool.config import require

_FIELDS = ("name", "path", "base_model_name")
_FORM = "give NAME=PATH, or a JSON object with name and path"


class Module(NamedTuple):
    """An adapter that is read at the start; `base` is the served name of its model, None for the first one."""

    name: str
    path: str
    base: str | None = None


def parse_module(text: str) -> Module:
    """One adapter, as vLLM's flag of the same name takes it: `NAME=PATH`, or JSON with `base_model_name` as well."""
    if not text.startswith("{"):
        name, sign, path = text.partition("=")
        if not (name and sign and path):
            raise argparse.ArgumentTypeError(f"{text!r} is no adapter: {_FORM}")
        return Module(name, path)
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    name, path, base = (fields.get(field) for field in _FIELDS)
    if fields.keys() - set(_FIELDS) or not all(isinstance(one, str) and one for one in (name, path, base or "-")):
        raise argparse.ArgumentTypeError(f"{text!r} is no adapter: {_FORM}, and base_model_name")
    return Module(name, path, base)


def by_model(modules: Iterable[Module], models: Sequence[str]) -> list[dict[str, str]]:
    """The adapters of each model: folder or hub id by name.

    Args:
        modules: All of them.
        models: The models' served names. Adapters without a `base` are for the first one.

    Raises:
        ConfigError: Two adapters have one name, or one is for a model that is not there.
    """
    found: dict[str, dict[str, str]] = {model: {} for model in models}
    for name, path, base in modules:
        require(not any(name in one for one in found.values()), f"two adapters have the name {name!r}")
        known = ", ".join(map(repr, models))
        require(base is None or base in found, f"the adapter {name!r} is for {base!r}; the models are {known}")
        found[base or models[0]][name] = path
    return list(found.values())
