"""`anypool embed`: texts from the arguments or a file, vectors to stdout or a file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from anypool.entrypoints.cli_flags import add_engine_flags, engine_arguments
from anypool.entrypoints.llm import LLM
from anypool.errors import InvalidParameterError, InvalidPromptError, MissingDependencyError
from anypool.pooling.params import PoolingParams


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="a text to embed; write -- before one that starts with -"
    )
    parser.add_argument("--input", metavar="FILE", help=".jsonl, or lines of text; - for lines from stdin")
    parser.add_argument(
        "--input-field", metavar="NAME", default="text", help="the field of a .jsonl object to embed (default: text)"
    )
    parser.add_argument("--output", metavar="FILE", help=f"{', '.join(_WRITERS)}; without it, JSON lines go to stdout")
    parser.add_argument("--dimensions", type=int, metavar="N", help="how many leading dimensions to keep")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="whether vectors are scaled to unit length"
    )
    parser.add_argument("--prompt-name", metavar="NAME", help="which of the model's prompts to put before each text")
    cut = parser.add_mutually_exclusive_group()
    cut.add_argument(
        "--truncate",
        dest="truncate_prompt_tokens",
        action="store_const",
        const=-1,
        help="cut longer texts to the model's limit",
    )
    cut.add_argument("--truncate-prompt-tokens", type=int, metavar="N", help="cut longer texts to this many tokens")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Embeds. Whatever is wrong with files or flags is found before the model is loaded."""
    params = PoolingParams(dimensions=arguments.dimensions, normalize=arguments.normalize)
    output = None if arguments.output is None else check_output(Path(arguments.output))
    texts = _texts(arguments)
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
    if output is None:
        sys.stdout.writelines(_json_lines(vectors_NE))
        sys.stdout.flush()
    else:
        with atomic_file(output) as file:
            _WRITERS[output.suffix](file, vectors_NE)
    return 0


def _texts(arguments: argparse.Namespace) -> list[str]:
    if arguments.input is None:
        if not arguments.texts:
            raise InvalidParameterError("nothing to embed: give texts, or --input FILE")
        return list(arguments.texts)
    if arguments.texts:
        raise InvalidParameterError("texts and --input were both given: give one of them")
    if arguments.input == "-":
        return list(read_lines(sys.stdin.buffer, "stdin"))
    with Path(arguments.input).open("rb") as file:
        lines = read_lines(file, arguments.input)
        if Path(arguments.input).suffix == ".jsonl":
            return list(_fields(lines, arguments.input, arguments.input_field))
        return list(lines)


def read_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a UTF-8 file, empty ones too: line N is text N."""
    for number, line in enumerate(file, start=1):
        try:
            yield line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidPromptError(f"{name}: line {number} is not UTF-8: {error.reason}") from None


def _fields(lines: Iterable[str], name: str, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidPromptError(f"{name}: line {number} is not JSON: {error}") from None
        text = value.get(field) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise InvalidPromptError(
                f"{name}: line {number} is neither a string nor an object with a string in {field!r}; "
                "--input-field names another field"
            )
        yield text


def check_output(path: Path) -> Path:
    """Raises where nothing could be written to `path`, and returns it."""
    if path.suffix not in _WRITERS:
        raise InvalidParameterError(f"--output {path}: known endings are {', '.join(_WRITERS)}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingDependencyError(f"--output {path} needs pyarrow: pip install 'anypool[parquet]'")
    if not path.parent.is_dir():
        raise InvalidParameterError(f"--output {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidParameterError(f"--output {path}: cannot be written to")
    return path


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is at `path` when it is complete, and never before."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _json_lines(vectors_NE: np.ndarray) -> Iterator[str]:
    for index, row_E in enumerate(vectors_NE):
        yield json.dumps({"index": index, "embedding": row_E.tolist()}, separators=(",", ":")) + "\n"


def _write_jsonl(file: IO[bytes], vectors_NE: np.ndarray) -> None:
    file.writelines(line.encode() for line in _json_lines(vectors_NE))


def _write_npy(file: IO[bytes], vectors_NE: np.ndarray) -> None:
    np.save(file, vectors_NE)


def _write_parquet(file: IO[bytes], vectors_NE: np.ndarray) -> None:
    import pyarrow  # optional
    from pyarrow import parquet

    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors_NE.reshape(-1)), vectors_NE.shape[1])
    indices = pyarrow.array(np.arange(len(vectors_NE)))
    parquet.write_table(pyarrow.table({"index": indices, "embedding": rows}), file)


_WRITERS: Mapping[str, Callable[[IO[bytes], np.ndarray], Any]] = {
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
