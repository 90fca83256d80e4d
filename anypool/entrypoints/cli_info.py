"""`anypool info`: what a model is, how it is pooled and scored, and who says so."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from anypool.adapters.heads import Head, labels_of
from anypool.adapters.load import LoadedModel
from anypool.adapters.multi_vector import MultiVector
from anypool.adapters.quantization import Quantization
from anypool.adapters.rerank_templates import Manifest
from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.engine.replicas import start_engine
from anypool.entrypoints.cli_flags import add_engine_flags, engine_arguments
from anypool.model_executor.models.transformers_backend import Way

# Texts by the values of `is_query`.
_SIDES = {True: "queries", False: "documents", None: "texts of which nothing is said"}


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and prints what came of it."""
    engine = start_engine(EngineConfig.from_kwargs(model=arguments.model, **engine_arguments(arguments)))
    try:
        facts = describe(engine)
    finally:
        engine.close()
    print(json.dumps(facts, indent=2, ensure_ascii=False) if arguments.json else as_text(facts))
    return 0


def describe(engine: Engine) -> dict[str, Any]:
    """What is known about a loaded model, as JSON can hold it."""
    loaded = engine.loaded
    recipe, defaults, known = loaded.recipe, loaded.defaults, loaded.facts
    return {
        "model": loaded.config.name,
        "architecture": loaded.config.architecture,
        "class": known.class_name,
        "runs": known.runs,
        "batches": {"way": known.way.value, "rejected": list(known.rejected)},
        "parameters": known.num_parameters,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "quantization": None if loaded.quantization is None else _quantization(loaded.quantization),
        "tasks": [task.value for task in engine.supported_tasks],
        "modalities": ["text"] if known.image_input is None else ["text", "image"],
        "attention": _attention(loaded),
        "pooling": {
            name: {"value": _plain(setting.value), "source": setting.source}
            for name, setting in loaded.settings.items()
        },
        "modules": [{"type": kind, "path": path, **config} for kind, path, config in _modules(loaded)],
        "multi_vector": None if loaded.multi_vector is None else _multi_vector(loaded.multi_vector, loaded),
        "embedding_size": defaults.size.full,
        "trained_dimensions": None if defaults.size.allowed is None else list(defaults.size.allowed),
        "sparse": _sparse(loaded),
        "head": None if loaded.head is None else _head(loaded.head, loaded),
        "rerank_template": _template_name(loaded, engine.config.chat_template),
        "similarity": recipe.similarity_fn_name or "cosine"
        if loaded.multi_vector is None
        else loaded.multi_vector.recipe.similarity,
        "prompts": dict(recipe.prompts),
        "default_prompt_name": recipe.default_prompt_name,
        "texts_in_chat_template": recipe.message_format is not None and not recipe.is_cross_encoder,
        "max_model_len": engine.max_model_len,
        "enable_chunked_processing": loaded.pooler_config.enable_chunked_processing,
        "vocab_size": loaded.config.vocab_size,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
        "max_num_seqs": engine.config.max_num_seqs,
        "enable_chunked_prefill": engine.config.enable_chunked_prefill,
        "enable_prefix_caching": engine.config.enable_prefix_caching,
    }


def as_text(facts: dict[str, Any]) -> str:
    """The facts in aligned lines."""
    rows = [
        ("model", facts["model"]),
        ("architecture", facts["architecture"]),
        ("class", f"{facts['class']} ({facts['runs']}, in {Way(facts['batches']['way']).label})"),
        *(("not in", reason) for reason in facts["batches"]["rejected"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("dtype", facts["dtype"]),
        ("device", facts["device"]),
        ("quantization", _quantization_line(facts["quantization"])),
        ("tasks", ", ".join(facts["tasks"])),
        ("modalities", ", ".join(facts["modalities"])),
        ("attention", _attention_line(facts["attention"])),
        *((name, _setting(setting)) for name, setting in facts["pooling"].items() if _says_something(name, setting)),
        ("modules", ", ".join(map(_module, facts["modules"])) or "none"),
        *_sides(facts["multi_vector"]),
        ("embedding size", str(facts["embedding_size"])),
        ("sparse vectors", _sparse_line(facts["sparse"])),
        ("trained sizes", ", ".join(map(str, facts["trained_dimensions"] or ())) or "not stated"),
        *_scores(facts),
        *_prompts(facts),
        ("longest input", _longest(facts)),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
        ("batch", _batch(facts)),
        ("prefix caching", "on" if facts["enable_prefix_caching"] else "off"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _sparse(loaded: LoadedModel) -> dict[str, Any] | None:
    defaults = loaded.defaults.sparse
    if defaults is None:
        return None
    return {
        "made_by": "weights of the text's own tokens" if loaded.sparse is None else loaded.sparse.name,
        "size": defaults.size,
        "max_active_dims": defaults.max_active_dims,
        "looked_up": [_SIDES[side] for side in sorted(defaults.looked_up, key=str)],
    }


def _sparse_line(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "none"
    most = "" if facts["max_active_dims"] is None else f", at most {facts['max_active_dims']:,}"
    looked_up = f"; looked up for {', '.join(facts['looked_up'])}" if facts["looked_up"] else ""
    return f"{facts['made_by']}{most}{looked_up}"


def _quantization(quantization: Quantization) -> dict[str, Any]:
    return {
        "layers": len(quantization.layers.quantized),
        "kept_layers": list(quantization.layers.kept),
        "mean_cosine": quantization.mean_cosine,
        "min_cosine": quantization.min_cosine,
    }


def _quantization_line(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "none"
    return (
        f"int8, {facts['layers']} layers, {len(facts['kept_layers'])} kept; cosine with the unquantised model: "
        f"mean {facts['mean_cosine']:.4f}, lowest {facts['min_cosine']:.4f}"
    )


def _longest(facts: dict[str, Any]) -> str:
    windows = "; longer ones in windows" if facts["enable_chunked_processing"] else ""
    return f"{facts['max_model_len']:,} tokens{windows}"


def _batch(facts: dict[str, Any]) -> str:
    longer = "in chunks" if facts["enable_chunked_prefill"] else "whole"
    return (
        f"up to {facts['max_num_batched_tokens']:,} tokens, {facts['max_num_seqs']:,} prompts; longer prompts {longer}"
    )


def _attention(loaded: LoadedModel) -> dict[str, Any]:
    config = loaded.config
    return {
        "causal": config.is_causal and not loaded.facts.is_encoder,
        "sliding_window": config.sliding_window,
        "softcap": config.attention_softcap,
        "layers": dict(loaded.facts.attention),
    }


def _head(head: Head, loaded: LoadedModel) -> dict[str, Any]:
    """A head's layers, labels and calibration. Its pooling type and activation are settings, and stand with them."""
    return {
        "per": "token" if head.recipe.token_level else "text",
        "layers": [dict(layer) for layer in loaded.facts.head_layers],
        "labels": list(labels_of(loaded.config, range(head.labels)).values()),
        "logit_mean": loaded.defaults.logit_mean,
        "logit_sigma": loaded.defaults.logit_sigma,
    }


def _template_name(loaded: LoadedModel, given: str | None) -> str | None:
    template = loaded.rerank_template
    if isinstance(template, Manifest):
        return template.name
    if template is None:
        return None
    return "the checkpoint's chat template" if given is None else "the user's chat template"


def _plain(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, tuple) else value


def _says_something(name: str, setting: dict[str, Any]) -> bool:
    return name != "step_tag_id" or setting["value"] is not None


def _setting(setting: dict[str, Any]) -> str:
    value = setting["value"]
    if isinstance(value, list):
        shown = " + ".join(value)
    elif isinstance(value, bool):
        shown = "yes" if value else "no"
    else:
        shown = "all" if value is None else str(value)
    return f"{shown} (from: {setting['source']})"


def _modules(loaded: LoadedModel) -> Sequence[tuple[str, str, Mapping[str, Any]]]:
    """What follows pooling, or each token's state."""
    multi_vector = loaded.multi_vector
    return loaded.recipe.modules if multi_vector is None else multi_vector.recipe.modules


def _multi_vector(multi_vector: MultiVector, loaded: LoadedModel) -> dict[str, Any]:
    """What a multi-vector checkpoint does to queries and documents."""
    recipe, vectors = multi_vector.recipe, loaded.defaults.token_vectors
    facts: dict[str, Any] = {"library": recipe.library, "dimensions": vectors and vectors.size.full}
    for name, one, side in (
        ("query", recipe.queries, multi_vector.queries),
        ("document", recipe.documents, multi_vector.documents),
    ):
        expansion = one.expansion
        facts[name] = {
            "marker": one.marker,
            "prompt": None if one.prompt_name is None else loaded.recipe.prompts[one.prompt_name],
            "length": one.length,
            "expanded_to": None if expansion is None else expansion.length,
            "expansion_attended": None if expansion is None else expansion.attended,
            "skipped_tokens": len(side.kept.dropped),
        }
    pooling = recipe.token_pooling
    facts["pool_factor"] = None if pooling is None else pooling.factor
    return facts


def _sides(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if facts is None:
        return []
    rows = [("multi-vector", f"{facts['library']}, {facts['dimensions']} dimensions per token")]
    if facts["pool_factor"] is not None:
        rows.append(("token pooling", f"about {facts['pool_factor']:g} tokens of a document become one vector"))
    return [*rows, ("queries", _side(facts["query"])), ("documents", _side(facts["document"]))]


def _side(side: dict[str, Any]) -> str:
    parts = []
    if side["marker"]:
        parts.append(f"marked {side['marker']!r}")
    if side["prompt"]:
        parts.append(f"prompt {side['prompt']!r}")
    if side["expanded_to"] is not None:
        attended = "attended to" if side["expansion_attended"] else "not attended to"
        parts.append(f"expanded to {side['expanded_to']} tokens, {attended}")
    if side["length"] is not None:
        parts.append(f"cut at {side['length']:,} tokens")
    if side["skipped_tokens"]:
        parts.append(f"{side['skipped_tokens']} tokens have no vector")
    return ", ".join(parts) or "as they are"


def _module(module: dict[str, Any]) -> str:
    if "in_features" in module:
        return f"{module['type']} {module['in_features']} -> {module['out_features']}"
    return str(module["type"])


def _attention_line(attention: dict[str, Any]) -> str:
    parts = ["causal" if attention["causal"] else "in both directions"]
    if attention["sliding_window"] is not None:
        parts.append(f"sliding window of {attention['sliding_window']:,} tokens")
    if attention["softcap"] is not None:
        parts.append(f"scores soft-capped at {attention['softcap']:g}")
    ways = ", ".join(f"{count} {way}" for way, count in attention["layers"].items())
    return ", ".join(parts) + (f" (layers: {ways})" if ways else "")


def _scores(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The head, and how `score` and `rerank` read a pair."""
    head = facts["head"]
    if head is None:
        return [("head", "none"), ("similarity", facts["similarity"])]
    rows = [
        ("head", ", ".join(map(_head_layer, head["layers"])) + f", per {head['per']}"),
        ("labels", ", ".join(head["labels"])),
    ]
    if (head["logit_mean"], head["logit_sigma"]) != (0.0, 1.0):
        rows.append(("calibration", f"(score - {head['logit_mean']:g}) / {head['logit_sigma']:g}"))
    return [*rows, ("rerank template", facts["rerank_template"] or "none")]


def _head_layer(layer: dict[str, Any]) -> str:
    activation = "" if layer["activation"] is None else f" {layer['activation']}"
    sizes = "" if layer["in_features"] is None else f" {layer['in_features']} -> {layer['out_features']}"
    return f"{layer['name']}{sizes}{activation}"


def _prompts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts["prompts"]:
        return [("prompts", "none")]
    rows = [("prompts", f"{name}: {text!r}") for name, text in facts["prompts"].items()]
    rows.append(("default prompt", facts["default_prompt_name"] or "none"))
    return [*rows, ("texts", "in the chat template")] if facts["texts_in_chat_template"] else rows
