"""`anypool plan`: what embedding a collection takes, before anything is loaded or rented."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch

from anypool.adapters.opened import OpenedModel, open_model
from anypool.adapters.placement import pick_dtype
from anypool.config import EngineConfig
from anypool.engine.setup import load_tokenizer
from anypool.entrypoints.cli_files import read_texts
from anypool.entrypoints.plan.devices import GPUS, Device, Range, find_gpu, this_cpu
from anypool.entrypoints.plan.estimate import Estimate, estimate
from anypool.entrypoints.plan.lengths import Lengths
from anypool.entrypoints.plan.report import as_text
from anypool.entrypoints.plan.storage import index_bytes, vector_bytes
from anypool.errors import InvalidParameterError
from anypool.model_executor.outline import Outline
from anypool.model_executor.weights.stored import stored_bytes

_IGNORED = (
    "heads and modules behind pooling",
    "tokenising, reading and writing, which the CPU does beside a GPU",
    "what devices of a group say to one another",
    "failures, start-up and idle time",
)


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--docs", type=_count, metavar="N", help="how many documents; 1e9 is a number")
    parser.add_argument("--tokens", type=int, metavar="M", help="tokens of a document, special ones included")
    parser.add_argument("--input", metavar="FILE", help="in place of --tokens: documents whose lengths stand for all")
    parser.add_argument("--input-field", default="text", metavar="NAME", help="the field of a .jsonl file to read")
    parser.add_argument("--gpu", metavar="NAME", help=f"the device, one of {', '.join(GPUS)}; else this machine's CPU")
    parser.add_argument("--share", type=_share, metavar="LOW[-HIGH]", help="of the device's peak that is reached")
    parser.add_argument("--price-per-hour", type=_positive, metavar="X", help="of a device; gives the cost")
    parser.add_argument("--days", type=_positive, metavar="X", help="gives the number of devices to be done in them")
    parser.add_argument("--dimensions", type=int, metavar="N", help="of the vectors that are kept")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens of a batch")
    parser.add_argument("--download-dir", metavar="DIR", help="where hub downloads are kept")
    parser.add_argument("--revision", help="branch, tag or commit of a hub repository")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, texts=None)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan. Neither weights are fetched or read, nor a model is loaded."""
    facts = describe(arguments)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if arguments.json else as_text(facts))
    return 0


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan, as JSON can hold it: bytes, seconds, FLOP, and ranges as lists of two."""
    if arguments.docs is None:
        raise InvalidParameterError("say how many documents there are: give --docs")
    engine = EngineConfig(
        model=arguments.model,
        revision=arguments.revision,
        download_dir=arguments.download_dir,
        trust_remote_code=arguments.trust_remote_code,
        dtype=arguments.dtype,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    opened = open_model(engine, weights=False)
    outline = Outline.of(opened.config, opened.backbone)
    on = torch.device("cpu" if arguments.gpu is None else "cuda")
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu)
    dtype = pick_dtype(engine.dtype, opened.config, on)
    lengths = _lengths(arguments, engine, opened)
    device = _with_share(this_cpu(dtype) if gpu is None else gpu, arguments.share)
    found = estimate(
        outline,
        device,
        dtype,
        lengths,
        arguments.docs,
        batched_tokens=engine.max_num_batched_tokens or (4096 if gpu is None else 16384),
        utilization=1.0 if gpu is None else engine.gpu_memory_utilization,
    )
    return {
        "model": opened.config.name,
        "architecture": opened.config.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": outline.parameters,
        "work": _work(outline, lengths, arguments.docs),
        "device": _device(device, dtype),
        "memory": _memory(found, opened),
        "speed": _speed(found, lengths),
        "total": _total(found, arguments),
        "storage": _storage(arguments.docs, _dimensions(opened, arguments.dimensions)),
        "ignored": [
            *_IGNORED,
            *([f"how {outline.unknown_layers} layers mix tokens"] if outline.unknown_layers else []),
        ],
    }


def _work(outline: Outline, lengths: Lengths, documents: int) -> dict[str, Any]:
    flop = lengths.flop(outline)
    return {
        "documents": documents,
        "tokens_per_document": lengths.mean,
        "longest_document": lengths.longest,
        "lengths": f"of {len(lengths.tokens)} documents" if lengths.is_sample else "all alike",
        "tokens": documents * lengths.mean,
        "flop_per_token": flop / lengths.mean,
        "flop_per_token_in_weights": outline.flop_per_token,
        "flop": documents * flop,
    }


def _device(device: Device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "name": device.name,
        "flop_per_s": device.flops[dtype],
        "bytes_per_s": device.bandwidth,
        "source": device.source,
        "share": list(device.share),
        "share_source": device.share_source,
    }


def _memory(found: Estimate, opened: OpenedModel) -> dict[str, Any]:
    memory = found.memory
    return {
        "devices_per_model": found.group,
        "total": memory.total,
        "limit": memory.limit,
        "needed": memory.needed,
        "weights": memory.weights,
        "activations": memory.activations,
        "graphs": memory.graphs,
        "cache": memory.cache,
        "weights_in_files": stored_bytes(opened.backbone),
    }


def _speed(found: Estimate, lengths: Lengths) -> dict[str, Any]:
    rates = [rate / found.group for rate in found.tokens_per_s]
    return {
        "tokens_per_s_per_device": rates,
        "documents_per_s_per_device": [rate / lengths.mean for rate in rates],
    }


def _total(found: Estimate, arguments: argparse.Namespace) -> dict[str, Any]:
    price, days = arguments.price_per_hour, arguments.days
    return {
        "device_hours": list(found.device_hours),
        "price_per_hour": price,
        "cost": None if price is None else list(found.cost(price)),
        "days": days,
        "devices": None if days is None else list(found.devices_for(days)),
    }


def _storage(documents: int, dimensions: int) -> dict[str, Any]:
    return {
        "dimensions": dimensions,
        "vectors": vector_bytes(documents, dimensions),
        "index": index_bytes(documents, dimensions),
    }


def _lengths(arguments: argparse.Namespace, engine: EngineConfig, opened: OpenedModel) -> Lengths:
    if (arguments.tokens is None) == (arguments.input is None):
        raise InvalidParameterError("say how long documents are: give --tokens, or --input with some of them")
    if arguments.tokens is not None:
        limit = opened.config.max_positions
        if not 1 <= arguments.tokens <= limit:
            raise InvalidParameterError(
                f"--tokens {arguments.tokens} is not available: {opened.config.name} takes 1 to {limit:,}",
                param="tokens",
            )
        return Lengths.alike(arguments.tokens)
    tokenizer = load_tokenizer(engine, opened)
    if tokenizer is None:
        raise InvalidParameterError(f"{opened.config.name} has no tokenizer to count --input with: give --tokens")
    counts = [len(ids) for ids in tokenizer.encode(read_texts(arguments, what="plan")) if ids]
    if not counts:
        raise InvalidParameterError(f"{arguments.input} has no text that has a token", param="input")
    stated = (opened.recipe.max_seq_length, tokenizer.max_length, opened.config.max_positions)
    return Lengths.counted(counts, min(one for one in stated if one is not None))


def _dimensions(opened: OpenedModel, asked: int | None) -> int:
    """How many numbers a vector has that is kept."""
    recipe = opened.recipe
    modules = recipe.multi_vector.modules if recipe.multi_vector is not None else recipe.modules
    sizes = [int(config["out_features"]) for kind, _, config in modules if kind == "Dense"]
    full = sizes[-1] if sizes else opened.config.hidden_size * len(recipe.types or (None,))
    if asked is not None and not 1 <= asked <= full:
        raise InvalidParameterError(
            f"dimensions={asked} is not available for {opened.config.name}: it supports 1 to {full}", param="dimensions"
        )
    return asked or min(recipe.truncate_dim or full, full)


def _with_share(device: Device, share: Range | None) -> Device:
    if share is None:
        return device
    return replace(device, share=share, share_source="given with --share")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _count(text: str) -> int:
    number = _number(text)
    if not (number >= 1 and number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(number)


def _positive(text: str) -> float:
    number = _number(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _share(text: str) -> Range:
    low, _, high = text.partition("-")
    share = _number(low), _number(high or low)
    if not 0 < share[0] <= share[1] <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, or two of them, above 0 and up to 1: 0.3-0.5")
    return share
