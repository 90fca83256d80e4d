"""sentence-transformers' `Router`, `Asym` in its older versions: queries and documents each go their own way.

One way is a transformer. Another may be a table of weights by token, which needs no forward pass: the queries of
inference-free SPLADE models (Geng et al., arXiv:2411.04403).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch

from anypool.config import is_number
from anypool.errors import CheckpointFormatError, UnsupportedArchitectureError
from anypool.model_executor.weights.checkpoint import open_checkpoint
from anypool.model_executor.weights.repository import Repository

Modules = list[tuple[str, str]]
# Whether a text is a query; None where nobody says.
Side = bool | None

ROUTERS = ("Router", "Asym")
_STATIC = "SparseStaticEmbedding"
# A side -> the tasks that sentence-transformers has for it, of which the first with a route is taken.
_TASKS: dict[Side, tuple[str | None, ...]] = {
    True: ("query",),
    False: ("document", "doc", "passage", "corpus"),
    None: (None,),
}


@dataclass(frozen=True, kw_only=True)
class RouterRecipe:
    """Which way texts go.

    Attributes:
        looked_up: The sides whose texts are looked up in a table.
        unrouted: The sides that no route is for.
        table: Folder of the table; None where there is none.
        heads: For dense vectors, what follows pooling on each side, where that is not the same on all.
    """

    looked_up: frozenset[Side] = frozenset()
    unrouted: frozenset[Side] = frozenset()
    table: str | None = None
    heads: Mapping[Side, tuple[tuple[str, str, Mapping[str, Any]], ...]] = field(default_factory=dict)


def read_router(repository: Repository, path: str) -> tuple[RouterRecipe, Mapping[Side, Modules]]:
    """The routes, and the modules of each side that has some.

    Raises:
        CheckpointFormatError: The file is missing, or not one of a router.
        UnsupportedArchitectureError: It has other routes than those that are served here.
    """
    where = f"{path}/" if path else ""
    config = repository.read_object(f"{where}router_config.json") or repository.read_object(f"{where}config.json")
    try:
        assert config is not None
        types, parameters = config["types"], config.get("parameters") or {}
        chains = {
            str(route): [(types[name].rsplit(".", 1)[-1], f"{where}{name}") for name in names]
            for route, names in config["structure"].items()
        }
        mappings = {ast.literal_eval(key): route for key, route in (parameters.get("route_mappings") or {}).items()}
        assert chains and all(chains.values())
    except (AssertionError, AttributeError, KeyError, SyntaxError, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"{repository.name}: {where}router_config.json is missing or not a router's: {error!r}"
        ) from error
    for _, folder in (module for chain in chains.values() for module in chain):
        if PurePosixPath(folder).is_absolute() or ".." in PurePosixPath(folder).parts:
            raise CheckpointFormatError(f"{repository.name}: the router names {folder!r}, outside the checkpoint")
    tables = {chain[0][1] for chain in chains.values() if [kind for kind, _ in chain] == [_STATIC]}
    ways = {side: _route(side, chains, mappings, parameters) for side in _TASKS}
    missing = next((route for route in ways.values() if route is not None and route not in chains), None)
    if missing is not None:
        raise CheckpointFormatError(
            f"{repository.name}: {where}router_config.json names the route {missing!r}; there are {', '.join(chains)}"
        )
    static = {route for route, chain in chains.items() if chain[0][0] == _STATIC}
    if len(tables) > 1 or static == set(chains) or not set(chains) <= set(ways.values()):
        routes = "; ".join(f"{route}: {', '.join(kind for kind, _ in chain)}" for route, chain in chains.items())
        raise UnsupportedArchitectureError(
            f"{repository.name}: the router has the routes {routes}. Supported are routes for 'query' and 'document' "
            f"that are computed by one transformer, and for one of them a {_STATIC}"
        )
    recipe = RouterRecipe(
        looked_up=frozenset(side for side, route in ways.items() if route in static),
        unrouted=frozenset(side for side, route in ways.items() if route is None),
        table=next(iter(tables), None),
    )
    return recipe, {side: chains[route] for side, route in ways.items() if route is not None and route not in static}


def _route(
    side: Side, chains: Mapping[str, Any], mappings: Mapping[Any, str], parameters: Mapping[str, Any]
) -> str | None:
    """The name of the route of texts on a side: by task and modality, by task, by modality, or the default one."""
    for task in _TASKS[side]:
        for key in ((task, "text"), (task, None), (None, "text"), (None, None)):
            if key in mappings:
                return mappings[key]
        for name in (task, "text"):
            if name in chains:
                return name
    if side is not None:
        return None
    default: str | None = parameters.get("default_route")
    first_is_default = default is None and parameters.get("allow_empty_key", True)
    return next(iter(chains)) if first_is_default else default


def read_table(
    repository: Repository, path: str, *, size: int, find: Callable[[str], int | None], unknown: int | None
) -> torch.Tensor:
    """The weight of each token, `[V]` float32, from `model.safetensors` or a JSON object of weights by token.

    Args:
        repository: The checkpoint.
        path: Folder of the table.
        size: Size of the vocabulary.
        find: The tokenizer's id of a token.
        unknown: The id that tokens get which it does not have.

    Raises:
        CheckpointFormatError: The file is missing, or holds something else.
    """
    config = repository.read_object(f"{path}/config.json") or {}
    file = config.get("path")
    if isinstance(file, str) and file.endswith(".json"):
        name = PurePosixPath(file).name
        found = (repository.read_object(place) for place in (f"{path}/{name}", name))
        by_token = next((content for content in found if content is not None), None)
        if by_token is None:
            raise CheckpointFormatError(f"{repository.name}: {path}/config.json names {file!r}, which is not there")
        table_V = torch.zeros(size)
        for token, weight in by_token.items():
            if not is_number(weight):
                raise CheckpointFormatError(f"{repository.name}: {file} has the weight {weight!r} for {token!r}")
            number = find(token)
            number = unknown if number is None else number
            if number is not None and number < size:
                table_V[number] = float(weight)
        return table_V
    checkpoint = open_checkpoint(repository, path)
    if checkpoint.names() != ["weight"] or len(shape := checkpoint.shape("weight")) != 1 or shape[0] > size:
        raise CheckpointFormatError(
            f"{repository.name}: {path} holds {', '.join(checkpoint.names())}; expected 'weight', of at most {size:,} "
            "numbers"
        )
    [(_, weight_V)] = checkpoint.tensors({"weight"})
    table_V = torch.zeros(size)
    table_V[: len(weight_V)] = weight_V.float()
    return table_V
