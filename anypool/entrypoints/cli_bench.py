"""`anypool bench`: our engine beside others on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anypool.entrypoints.bench.driver import Plan, measure
from anypool.entrypoints.bench.report import as_markdown, draw
from anypool.entrypoints.bench.side import KINDS, SideSpec, parse_side
from anypool.entrypoints.bench.texts import SETS, parse_sets
from anypool.errors import InvalidParameterError, MissingDependencyError

_NO_SIDE_RAN = 1


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--side",
        action="append",
        metavar="NAME[:DTYPE][=PYTHON]",
        help=f"{', '.join(KINDS)}; PYTHON is the program of its environment; may be repeated (default: anypool)",
    )
    parser.add_argument(
        "--sets", default="short,mixed,long", metavar="LIST", help=f"of {', '.join(SETS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each side runs (default: 5)")
    parser.add_argument(
        "--texts", dest="count", type=int, default=256, metavar="N", help="texts of a set (default: 256)"
    )
    parser.add_argument("--gguf", metavar="FILE", help="the same model for llama.cpp")
    parser.add_argument("--out", metavar="NAME", help="write the report to NAME.md and a picture to NAME.png")
    parser.add_argument("--profile", action="store_true", help="show where the time of anypool goes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. Whatever is wrong with flags is found before anything is started."""
    plan = _plan(arguments)
    out = _check_out(arguments.out)
    with _exiting_at_sigterm():
        results = measure(plan)
    report = as_markdown(results, _command(arguments))
    sys.stdout.write(report)
    if out is not None:
        Path(f"{out}.md").write_text(report, encoding="utf-8")
        draw(results, Path(f"{out}.png"))
    return 0 if any(side.seconds for side in results.sides) else _NO_SIDE_RAN


@contextmanager
def _exiting_at_sigterm() -> Iterator[None]:
    """Ends as by an exception, so that no side is left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _plan(arguments: argparse.Namespace) -> Plan:
    sides = tuple(map(parse_side, arguments.side or ["anypool"]))
    for flag, number in (("--rounds", arguments.rounds), ("--texts", arguments.count)):
        if number < 1:
            raise InvalidParameterError(f"{flag} {number} is not a positive number")
    _check_gguf(arguments.gguf, sides)
    return Plan(
        model=_absolute(arguments.model),
        gguf=None if arguments.gguf is None else _absolute(arguments.gguf),
        sides=sides,
        sets=parse_sets(arguments.sets),
        rounds=arguments.rounds,
        texts=arguments.count,
        profile=arguments.profile,
    )


def _check_gguf(file: str | None, sides: tuple[SideSpec, ...]) -> None:
    if file is None and any(side.name == "llama.cpp" for side in sides):
        raise InvalidParameterError("--side llama.cpp reads a GGUF file: give --gguf FILE")
    if file is not None and not Path(file).is_file():
        raise InvalidParameterError(f"--gguf {file}: there is no such file")


def _check_out(name: str | None) -> Path | None:
    """The path without its ending; raises where nothing could be written to it."""
    if name is None:
        return None
    path = Path(name)
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(f"--out {path} needs matplotlib: pip install 'anypool[bench]'")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidParameterError(f"--out {path}: {path.parent} is no folder that can be written to")
    return path


def _absolute(model: str) -> str:
    """A path for the sides, which may look at it from elsewhere; hub ids are left alone."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _command(arguments: argparse.Namespace) -> str:
    words = ["anypool", "bench", arguments.model, *(word for side in arguments.side or () for word in ("--side", side))]
    words += ["--sets", arguments.sets, "--rounds", str(arguments.rounds), "--texts", str(arguments.count)]
    words += [
        word for name in ("gguf", "out") if getattr(arguments, name) for word in (f"--{name}", getattr(arguments, name))
    ]
    return shlex.join([*words, *(["--profile"] if arguments.profile else [])])
