"""`anypool info`: what a model is, how it is pooled, and who says so."""

from __future__ import annotations

import argparse
import json
from typing import Any

from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.cli_flags import add_engine_flags, engine_arguments

_BUILT_IN = "anypool.model_executor.models."
_THROUGH_TRANSFORMERS = f"{_BUILT_IN}transformers_backend"


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and prints what came of it."""
    engine = Engine(EngineConfig.from_kwargs(model=arguments.model, **engine_arguments(arguments)))
    try:
        facts = describe(engine)
    finally:
        engine.close()
    print(json.dumps(facts, indent=2, ensure_ascii=False) if arguments.json else as_text(facts))
    return 0


def describe(engine: Engine) -> dict[str, Any]:
    """What is known about a loaded model, as JSON can hold it."""
    loaded = engine.loaded
    recipe, defaults = loaded.recipe, loaded.defaults
    return {
        "model": loaded.config.name,
        "architecture": loaded.config.architecture,
        "class": type(loaded.model).__name__,
        "runs": _runs(type(loaded.model)),
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "tasks": [task.value for task in engine.supported_tasks],
        "pooling": {
            name: {"value": _plain(setting.value), "source": setting.source}
            for name, setting in loaded.settings.items()
        },
        "modules": [{"type": kind, "path": path, **config} for kind, path, config in recipe.modules],
        "embedding_size": defaults.size.full,
        "trained_dimensions": None if defaults.size.allowed is None else list(defaults.size.allowed),
        "prompts": dict(recipe.prompts),
        "default_prompt_name": recipe.default_prompt_name,
        "max_model_len": engine.max_model_len,
        "vocab_size": loaded.config.vocab_size,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
        "max_num_seqs": engine.config.max_num_seqs,
    }


def as_text(facts: dict[str, Any]) -> str:
    """The facts in aligned lines."""
    rows = [
        ("model", facts["model"]),
        ("architecture", facts["architecture"]),
        ("class", f"{facts['class']} ({facts['runs']})"),
        ("parameters", f"{facts['parameters']:,}"),
        ("dtype", facts["dtype"]),
        ("device", facts["device"]),
        ("tasks", ", ".join(facts["tasks"])),
        *((name, _setting(setting)) for name, setting in facts["pooling"].items()),
        ("modules", ", ".join(map(_module, facts["modules"])) or "none"),
        ("embedding size", str(facts["embedding_size"])),
        ("trained sizes", ", ".join(map(str, facts["trained_dimensions"] or ())) or "not stated"),
        *_prompts(facts),
        ("longest input", f"{facts['max_model_len']:,} tokens"),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
        ("batch", f"up to {facts['max_num_batched_tokens']:,} tokens, {facts['max_num_seqs']:,} prompts"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _runs(model_cls: type) -> str:
    if model_cls.__module__ == _THROUGH_TRANSFORMERS:
        return "transformers"
    return "native" if model_cls.__module__.startswith(_BUILT_IN) else "registered by the user"


def _plain(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, tuple) else value


def _setting(setting: dict[str, Any]) -> str:
    value = setting["value"]
    if isinstance(value, list):
        shown = " + ".join(value)
    elif isinstance(value, bool):
        shown = "yes" if value else "no"
    else:
        shown = "all" if value is None else str(value)
    return f"{shown} (from: {setting['source']})"


def _module(module: dict[str, Any]) -> str:
    if "in_features" in module:
        return f"{module['type']} {module['in_features']} -> {module['out_features']}"
    return str(module["type"])


def _prompts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts["prompts"]:
        return [("prompts", "none")]
    rows = [("prompts", f"{name}: {text!r}") for name, text in facts["prompts"].items()]
    return [*rows, ("default prompt", facts["default_prompt_name"] or "none")]
