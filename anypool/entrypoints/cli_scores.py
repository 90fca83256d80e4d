"""`anypool classify`, `anypool reward`, `anypool rerank`: what heads say about texts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from anypool.config import ACTIVATIONS
from anypool.entrypoints.cli_files import (
    ROW_ENDINGS,
    add_file_flags,
    add_prompt_flags,
    check_output,
    read_texts,
    write,
)
from anypool.entrypoints.cli_flags import add_engine_flags, engine_arguments
from anypool.entrypoints.llm import LLM
from anypool.errors import InvalidParameterError
from anypool.pooling.params import PoolingParams


def add_classify(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `classify`."""
    add_file_flags(parser, texts="a text to classify", metavar="TEXT", endings=ROW_ENDINGS)
    add_prompt_flags(parser)
    _add_activation(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=classify)


def add_reward(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `reward`."""
    add_file_flags(parser, texts="a text to reward", metavar="TEXT", endings=ROW_ENDINGS)
    add_prompt_flags(parser)
    _add_activation(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=reward)


def add_rerank(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `rerank`."""
    parser.add_argument("--query", required=True, metavar="TEXT", help="what the documents are ranked for")
    add_file_flags(parser, texts="a document", metavar="DOC", endings=ROW_ENDINGS)
    parser.add_argument("--top-n", type=int, metavar="N", help="how many documents to print; by default all")
    parser.add_argument("--instruction", metavar="TEXT", help="for rerankers whose template takes one")
    parser.add_argument("--truncate-prompt-tokens", type=int, metavar="N", help="cut longer pairs to this many tokens")
    _add_activation(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=rerank)


def _add_activation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--activation",
        choices=ACTIVATIONS,
        help="what is done to scores; none for raw ones; by default the model's own",
    )


def classify(arguments: argparse.Namespace) -> int:
    """Prints each text's label, and the score of every label."""
    output = check_output(arguments.output, ROW_ENDINGS)
    texts = read_texts(arguments, what="classify")
    with LLM(arguments.model, **engine_arguments(arguments)) as llm:
        outputs = llm.classify(texts, PoolingParams(activation=arguments.activation), **_options(arguments))
    write(
        output,
        {
            "index": list(range(len(outputs))),
            "label": [one.outputs.label for one in outputs],
            "probs": [one.outputs.probs for one in outputs],
        },
    )
    return 0


def reward(arguments: argparse.Namespace) -> int:
    """Prints each text's reward: a number, or one per step."""
    output = check_output(arguments.output, ROW_ENDINGS)
    texts = read_texts(arguments, what="reward")
    with LLM(arguments.model, **engine_arguments(arguments)) as llm:
        outputs = llm.reward(texts, PoolingParams(activation=arguments.activation), **_options(arguments))
    rewards = [one.outputs.data for one in outputs]
    single = [data.squeeze(-1) if data.shape[-1] == 1 else data for data in rewards]
    write(output, {"index": list(range(len(outputs))), "reward": [data.tolist() for data in single]})
    return 0


def rerank(arguments: argparse.Namespace) -> int:
    """Prints the documents, best first."""
    output = check_output(arguments.output, ROW_ENDINGS)
    if arguments.top_n is not None and arguments.top_n < 1:
        raise InvalidParameterError(f"--top-n {arguments.top_n} is not a positive number of documents")
    documents = read_texts(arguments, what="rank")
    options: dict[str, Any] = {"use_tqdm": sys.stderr.isatty()}
    if arguments.truncate_prompt_tokens is not None:
        options["truncate_prompt_tokens"] = arguments.truncate_prompt_tokens
    with LLM(arguments.model, **engine_arguments(arguments)) as llm:
        results = llm.rerank(
            arguments.query,
            documents,
            arguments.top_n,
            pooling_params=PoolingParams(activation=arguments.activation),
            instruction=arguments.instruction,
            **options,
        )
    write(
        output,
        {
            "index": [result.index for result in results],
            "relevance_score": [result.relevance_score for result in results],
            "document": [result.document for result in results],
        },
    )
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompt_name": arguments.prompt_name,
        "truncate_prompt_tokens": arguments.truncate_prompt_tokens,
        "use_tqdm": sys.stderr.isatty(),
    }
