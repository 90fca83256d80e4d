"""`anypool embed`: a vector per text."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from anypool.config import EngineConfig
from anypool.engine.prompt_options import PromptOptions
from anypool.entrypoints.bulk.blocks import Done, Position
from anypool.entrypoints.bulk.identity import engine_identity
from anypool.entrypoints.bulk.job import Job, Output, check_first
from anypool.entrypoints.bulk.sources import Files, Source, Texts, find_files, refuse_output_in_input
from anypool.entrypoints.bulk.storing import Storing
from anypool.entrypoints.bulk.stream import Stream, Work, gather
from anypool.entrypoints.cli_files import (
    ROW_ENDINGS,
    WRITERS,
    add_prompt_flags,
    check_output,
    check_pyarrow,
    json_lines,
    read_lines,
)
from anypool.entrypoints.cli_flags import add_engine_flags, engine_arguments
from anypool.entrypoints.llm import LLM
from anypool.errors import InvalidParameterError
from anypool.pooling.params import PoolingParams
from anypool.pooling.quantize import PRECISIONS
from anypool.pooling.tasks import PoolingTask

_RESULTS = ("index", "embedding", "indices", "values")
# On stdout as soon as they are there; where the first give the ranges, so many are waited for.
_RANGED_ROWS = 10_000


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="a text to embed; write -- before one that starts with -"
    )
    _add_file_flags(parser)
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
    _add_ray_flags(parser)
    add_prompt_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def _add_file_flags(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument(
        "--input",
        action="append",
        metavar="PATH",
        help=".jsonl, .csv, .tsv, .parquet, .arrow, or lines of text; a folder or a quoted pattern of such; - for "
        "lines from stdin; may be given several times",
    )
    files.add_argument(
        "--input-field", metavar="NAME", default="text", help="the column with the texts (default: text)"
    )
    files.add_argument(
        "--keep", action="append", default=[], metavar="NAME", help="a column to carry over; may be given several times"
    )
    files.add_argument(
        "--output",
        metavar="PATH",
        help=f"a file that ends in {', '.join(WRITERS)}, or a folder for parts; without it, JSON lines go to stdout",
    )
    files.add_argument(
        "--output-format", choices=[ending[1:] for ending in WRITERS], help="of parts in a folder (default: parquet)"
    )
    files.add_argument(
        "--rows-per-part",
        type=int,
        metavar="N",
        default=10_000,
        help="rows that are written at a time (default: 10000)",
    )
    files.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do at a text that cannot be run: stop, or leave it out and say so in a file of errors",
    )
    files.add_argument("--overwrite", action="store_true", help="begin anew where --output has the work of another run")


def _add_ray_flags(parser: argparse.ArgumentParser) -> None:
    ray = parser.add_argument_group("Ray")
    ray.add_argument(
        "--ray", action="store_true", help="run on a Ray cluster, a file of the output for each input file"
    )
    ray.add_argument("--ray-actors", type=int, metavar="N", help="how many engines (default: one per GPU, or per node)")
    ray.add_argument("--ray-cpus", type=float, metavar="X", help="CPUs of each (default: the cluster's, shared out)")
    ray.add_argument("--ray-gpus", type=float, metavar="X", help="GPUs of each (default: 1 where there are some)")


def run(arguments: argparse.Namespace) -> int:
    """Embeds. What is wrong with flags, or with the first rows, is found before the model is loaded."""
    work, storing = _work(arguments), Storing(arguments.precision, arguments.calibration)
    output, source = _output(arguments), _source(arguments)
    if output is not None and arguments.input is not None:
        refuse_output_in_input(arguments.input, output.path)
    engine_args = engine_arguments(arguments)
    if arguments.ray:
        return _run_ray(arguments, work, output)
    for name in ("ray_actors", "ray_cpus", "ray_gpus"):
        if getattr(arguments, name) is not None:
            raise InvalidParameterError(f"--{name.replace('_', '-')} goes with --ray")
    load = partial(LLM, arguments.model, **engine_args)
    if output is None:
        check_first(source, work, storing)
        with load() as llm:
            _print(llm, source, work, storing)
        return 0
    EngineConfig.from_kwargs(model=arguments.model, **engine_args)  # checks them
    job = Job(source, work, storing, output, engine_identity(arguments.model, engine_args))
    report = job.run(load, show_bar=sys.stderr.isatty())
    print(f"anypool: {report}", file=sys.stderr)
    return 0


def _run_ray(arguments: argparse.Namespace, work: Work, output: Output | None) -> int:
    if output is None or output.is_file or arguments.input in (None, ["-"]):
        raise InvalidParameterError("--ray takes files, as --input, to a folder, as --output")
    from anypool.entrypoints.ray import embed_dataset  # optional

    report = embed_dataset(
        arguments.model,
        arguments.input,
        output.path,
        field=arguments.input_field,
        keep=arguments.keep,
        output_format=output.ending[1:],
        work=work,
        precision=arguments.precision,
        calibration=arguments.calibration,
        rows_per_part=output.rows_per_part,
        overwrite=output.overwrite,
        actors=arguments.ray_actors,
        cpus_per_actor=arguments.ray_cpus,
        gpus_per_actor=arguments.ray_gpus,
        show_progress=sys.stderr.isatty(),
        **engine_arguments(arguments),
    )
    print(f"anypool: {report}", file=sys.stderr)
    return 0


def _work(arguments: argparse.Namespace) -> Work:
    """What the flags ask for, of a dense vector or a sparse one."""
    options = PromptOptions(prompt_name=arguments.prompt_name, truncate_prompt_tokens=arguments.truncate_prompt_tokens)
    skips = arguments.on_error == "skip"
    if not arguments.sparse:
        if arguments.max_active_dims is not None:
            raise InvalidParameterError("--max-active-dims goes with --sparse")
        params = PoolingParams(dimensions=arguments.dimensions, normalize=arguments.normalize)
        return Work(params=params, options=options, skips_errors=skips)
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
    params = PoolingParams(max_active_dims=arguments.max_active_dims)
    return Work(task=PoolingTask.SPARSE_EMBED, params=params, options=options, skips_errors=skips)


def _source(arguments: argparse.Namespace) -> Source:
    """The texts that were given, as arguments or in files."""
    if arguments.input is None:
        if not arguments.texts:
            raise InvalidParameterError("nothing to embed: give texts, or --input FILE")
        _refuse_keep(arguments, "texts of the command line have")
        return Texts(arguments.texts, "text")
    if arguments.texts:
        raise InvalidParameterError("texts and --input were both given: give one of them, and patterns in quotes")
    if "-" in arguments.input:
        if len(arguments.input) > 1:
            raise InvalidParameterError("--input - is stdin, and does not go with other input")
        _refuse_keep(arguments, "lines from stdin have")
        return Texts(read_lines(sys.stdin.buffer, "stdin"), "stdin: line")
    return Files(find_files(arguments.input), arguments.input_field, tuple(arguments.keep))


def _refuse_keep(arguments: argparse.Namespace, what: str) -> None:
    if arguments.keep:
        raise InvalidParameterError(f"--keep {arguments.keep[0]}: {what} no columns")


def _output(arguments: argparse.Namespace) -> Output | None:
    """Where results go; None for stdout."""
    for name in arguments.keep:
        if name in _RESULTS or arguments.keep.count(name) > 1:
            taken = "is given twice" if arguments.keep.count(name) > 1 else "is a column of results"
            raise InvalidParameterError(f"--keep {name}: the name {taken}")
    if arguments.rows_per_part < 1:
        raise InvalidParameterError(f"--rows-per-part {arguments.rows_per_part} is not a positive number of rows")
    given, form = arguments.output, arguments.output_format
    if given is None:
        return None
    path = Path(given)
    is_folder = given.endswith(("/", os.sep)) or (not path.suffix if not path.exists() else path.is_dir())
    endings = ROW_ENDINGS if arguments.sparse else tuple(WRITERS)
    if is_folder and path.suffix not in endings:
        ending = f".{form or 'parquet'}"
        _check_folder(path, ending)
    else:
        check_output(given, endings)
        ending = path.suffix
        if form not in (None, ending[1:]):
            raise InvalidParameterError(f"--output-format {form} contradicts --output {given}")
    if ending not in endings:
        raise InvalidParameterError(f"--output-format {form}: sparse vectors go to {', '.join(endings)}")
    if ending == ".npy" and arguments.keep:
        raise InvalidParameterError(
            f"--keep {arguments.keep[0]}: a .npy has vectors alone; known: {', '.join(ROW_ENDINGS)}"
        )
    return Output(path=path, ending=ending, rows_per_part=arguments.rows_per_part, overwrite=arguments.overwrite)


def _check_folder(path: Path, ending: str) -> None:
    if ending in (".parquet", ".arrow"):
        check_pyarrow(f"--output {path}")
    if not path.parent.is_dir():
        raise InvalidParameterError(f"--output {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidParameterError(f"--output {path}: cannot be written to")


def _print(llm: LLM, source: Source, work: Work, storing: Storing) -> None:
    """Writes JSON lines to stdout, in UTF-8 whatever the terminal's encoding."""
    done = Stream(llm.engine, source, work).run(Position())
    rows = _RANGED_ROWS if storing.needs_ranges else 1
    for part in gather(done, rows=rows, may_cut=lambda: not storing.needs_ranges):
        _print_part(part, storing)


def _print_part(part: Done, storing: Storing) -> None:
    columns = dict(part.columns)
    if "embedding" in columns:
        columns["embedding"] = storing.store(columns["embedding"])
    for failure in part.failures:
        print(f"anypool: left out: {failure.error}", file=sys.stderr)
    sys.stdout.buffer.writelines(json_lines(columns))
    sys.stdout.flush()
