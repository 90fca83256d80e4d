"""Command line flags from the fields of a dataclass: `EngineConfig`, and the server's options."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from typing import Any, Union

from anypool.config import EngineConfig
from anypool.entrypoints.cli_adapters import by_model, parse_module


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field but `model`, which is positional. Flags that are not given leave no trace."""
    add_flags(parser, EngineConfig, "engine")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], title: str) -> None:
    """Adds a group of flags, one for each field of a dataclass but `model`."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name != "model":
            group.add_argument(f"--{field.name.replace('_', '-')}", **_argument(field, hints[field.name]))


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments that were given, `model` left out."""
    given = arguments_of(arguments, EngineConfig)
    if "lora_modules" in given:
        [given["lora_modules"]] = by_model(given["lora_modules"], (arguments.model,))
    return given


def arguments_of(arguments: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass that were given as flags, `model` left out."""
    names = {field.name for field in dataclasses.fields(cls)} - {"model"}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _argument(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    text = field.metadata["help"].replace("%", "%%")
    kind = _without_none(hint)
    if kind is bool:
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        return {"action": action, "default": argparse.SUPPRESS, "help": text}
    if typing.get_origin(kind) is tuple:
        return {"action": "append", "metavar": "TEXT", "default": argparse.SUPPRESS, "help": text}
    if field.name == "lora_modules":
        taken = {"type": parse_module, "action": "extend", "nargs": "+", "metavar": "NAME=PATH"}
        return {**taken, "default": argparse.SUPPRESS, "help": text}
    if field.default is not None:
        text += f" (default: {field.default})"
    kinds = {int: (int, "N"), float: (float, "X"), str: (str, "TEXT")}
    convert, metavar = kinds.get(kind, (_json_object, "JSON"))
    return {"type": convert, "metavar": metavar, "default": argparse.SUPPRESS, "help": text}


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
