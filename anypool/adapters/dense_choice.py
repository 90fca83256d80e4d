"""Checkpoints with a Dense folder for each size of vector, as stella has `2_Dense_256`, `2_Dense_512` and so on.

modules.json names one of them. Each was trained for its size, so a vector of another size is another Dense, not a cut.
"""

from __future__ import annotations

import re
from dataclasses import replace

from anypool.adapters.module_files import module_config
from anypool.adapters.recipe import Recipe
from anypool.errors import ConfigError
from anypool.model_executor.weights.repository import Repository


def dense_folders(repository: Repository, recipe: Recipe) -> dict[int, str]:
    """The Dense folders to choose from, by the size they give; empty where there is one alone.

    These are `PATH_SIZE` for a Dense that modules.json has as `PATH`, or as one of them.
    """
    dense = [(path, config) for kind, path, config in recipe.modules if kind == "Dense"]
    if len(dense) != 1:
        return {}
    [(path, config)] = dense
    stem = re.sub(r"_\d+$", "", path)
    found = {}
    for folder in sorted(repository.folder.glob(f"{stem}_*")):
        size = folder.name.removeprefix(f"{stem}_")
        if size.isdecimal() and (folder / "config.json").is_file():
            found[int(size)] = folder.name
    return {**found, config.get("out_features") or 0: path} if set(found.values()) - {path} else {}


def choose_dense(repository: Repository, recipe: Recipe, folders: dict[int, str], size: int) -> Recipe:
    """The recipe with the Dense of a size.

    Raises:
        ConfigError: There is none.
    """
    if size not in folders:
        sizes = ", ".join(map(str, sorted(folders)))
        raise ConfigError(f"dimensions={size} is not available for {repository.name}: it has a Dense for {sizes}")
    modules = tuple(
        (kind, folders[size], module_config(repository, kind, folders[size]))
        if kind == "Dense"
        else (kind, path, config)
        for kind, path, config in recipe.modules
    )
    return replace(recipe, modules=modules)
