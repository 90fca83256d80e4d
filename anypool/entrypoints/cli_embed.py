"""`anypool embed`: a vector per text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anypool.entrypoints.cli_files import (
    ROW_ENDINGS,
    WRITERS,
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
from anypool.pooling.quantize import PRECISIONS, quantize_embeddings

# The precisions that divide a range of values, which has to come from somewhere.
_RANGED = ("int8", "uint8")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_file_flags(parser, texts="a text to embed", metavar="TEXT", endings=tuple(WRITERS))
    parser.add_argument("--dimensions", type=int, metavar="N", help="how many leading dimensions to keep")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="whether vectors are scaled to unit length"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="how each number is stored (default: float32)"
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help=".npy of float vectors that int8 and uint8 take their ranges from"
    )
    parser.add_argument("--sparse", action="store_true", help="sparse vectors: indices and values")
    parser.add_argument(
        "--max-active-dims", type=int, metavar="N", help="how many weights of a sparse vector to keep, the largest"
    )
    add_prompt_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Embeds. Whatever is wrong with files or flags is found before the model is loaded."""
    if arguments.sparse:
        return _run_sparse(arguments)
    if arguments.max_active_dims is not None:
        raise InvalidParameterError("--max-active-dims goes with --sparse")
    params = PoolingParams(dimensions=arguments.dimensions, normalize=arguments.normalize)
    output = check_output(arguments.output, tuple(WRITERS))
    texts = read_texts(arguments, what="embed")
    calibration = _calibration(arguments, len(texts))
    with LLM(arguments.model, **engine_arguments(arguments)) as llm:
        outputs = llm.embed(
            texts,
            params,
            prompt_name=arguments.prompt_name,
            truncate_prompt_tokens=arguments.truncate_prompt_tokens,
            use_tqdm=sys.stderr.isatty(),
        )
        defaults = llm.engine.loaded.defaults
    size = arguments.dimensions or defaults.dimensions or defaults.size.full
    vectors_NE = np.empty((len(outputs), size), np.float32)
    for row_E, one in zip(vectors_NE, outputs, strict=True):
        row_E[:] = one.outputs.numpy()
    stored_NE = quantize_embeddings(vectors_NE, arguments.precision, calibration_embeddings=calibration)
    write(output, {"index": np.arange(len(stored_NE)), "embedding": stored_NE})
    return 0


def _run_sparse(arguments: argparse.Namespace) -> int:
    params = PoolingParams(max_active_dims=arguments.max_active_dims)
    dense = {
        "--dimensions": arguments.dimensions,
        "--normalize": arguments.normalize,
        "--calibration": arguments.calibration,
    }
    given = [flag for flag, value in dense.items() if value is not None]
    if given or arguments.precision != "float32":
        raise InvalidParameterError(
            f"{(*given, '--precision')[0]} is about dense vectors, and does not go with --sparse"
        )
    output = check_output(arguments.output, ROW_ENDINGS)
    texts = read_texts(arguments, what="embed")
    with LLM(arguments.model, **engine_arguments(arguments)) as llm:
        outputs = llm.sparse_embed(
            texts,
            params,
            prompt_name=arguments.prompt_name,
            truncate_prompt_tokens=arguments.truncate_prompt_tokens,
            use_tqdm=sys.stderr.isatty(),
        )
    vectors = [one.outputs for one in outputs]
    columns: dict[str, Any] = {
        "index": np.arange(len(vectors)),
        "indices": [vector.indices.numpy() for vector in vectors],
        "values": [vector.values.numpy() for vector in vectors],
    }
    write(output, columns)
    return 0


def _calibration(arguments: argparse.Namespace, texts: int) -> NDArray[Any] | None:
    """The vectors in `--calibration`; None where the ranges come from the texts, which is said, or where none do."""
    precision, file = arguments.precision, arguments.calibration
    if precision not in _RANGED:
        if file is not None:
            raise InvalidParameterError(
                f"--calibration has no meaning for --precision {precision}; it goes with {' and '.join(_RANGED)}"
            )
        return None
    if file is None:
        if texts < 2:
            raise InvalidParameterError(
                f"--precision {precision} cannot take its ranges from fewer than two texts: "
                "give --calibration FILE, a .npy of float vectors"
            )
        print(
            f"anypool: {precision} takes its ranges from these {texts:,} texts; "
            "give the --calibration of other files to compare with them",
            file=sys.stderr,
        )
        return None
    try:
        with Path(file).open("rb") as opened:
            vectors_NE: NDArray[Any] = np.load(opened, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidParameterError(f"--calibration {file} is not a .npy file: {error}") from error
    if vectors_NE.ndim != 2 or not len(vectors_NE) or not np.issubdtype(vectors_NE.dtype, np.floating):
        raise InvalidParameterError(
            f"--calibration {file} has shape {list(vectors_NE.shape)}, {vectors_NE.dtype}: "
            "it must be a matrix of floats, one vector per row"
        )
    return vectors_NE
