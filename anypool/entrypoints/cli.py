"""The command line: `anypool embed`, `classify`, `reward`, `rerank`, `serve`, `info`, `bench` and `plan`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import anypool
from anypool.entrypoints import cli_bench, cli_embed, cli_info, cli_plan, cli_scores, cli_serve
from anypool.errors import AnypoolError

_USERS_ERROR = 2
# What a shell reports for a program that a signal ended: 128 and its number.
_INTERRUPTED = 128 + signal.SIGINT
_BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; argparse alone prints every flag before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USERS_ERROR, f"anypool: error: {message}; see {self.prog} --help\n")


class _CommandParser(_Parser):
    """Takes texts wherever they stand; argparse alone reads a list of them in one place, and here before any flag."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        namespace, unknown = super().parse_known_args(args, namespace)
        end = unknown.index("--") if "--" in unknown else len(unknown)
        texts = [word for word in unknown[:end] if not word.startswith("-")] + unknown[end + 1 :]
        if hasattr(namespace, "texts"):
            namespace.texts = [*(namespace.texts or ()), *texts]
            unknown = [word for word in unknown[:end] if word.startswith("-")]
        if unknown:  # the parser of all commands would name its own --help
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Its arguments; None for those of the process.

    Returns:
        The exit code: 0, 2 for an error of the user's, 130 after an interrupt.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("anypool").setLevel(logging.INFO)
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except BrokenPipeError:  # whoever read our output has had enough
        return _BROKEN_PIPE
    except (AnypoolError, OSError) as error:
        print(f"anypool: error: {_one_line(error)}", file=sys.stderr)
        return _USERS_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = _Parser(prog="anypool", description="Any language model as a pooling model.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"anypool {anypool.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_CommandParser)
    cli_embed.add_command(_command(commands, "embed", "embed texts, from the arguments or a file"))
    cli_scores.add_classify(_command(commands, "classify", "label texts with a classification head"))
    cli_scores.add_reward(_command(commands, "reward", "score texts with a reward model"))
    cli_scores.add_rerank(_command(commands, "rerank", "order documents by relevance to a query"))
    cli_serve.add_command(_command(commands, "serve", "serve models over HTTP, as OpenAI's API and others do"))
    cli_info.add_command(_command(commands, "info", "show what a model is, how it is pooled, and who says so"))
    cli_bench.add_command(_command(commands, "bench", "measure a model's speed beside other engines on this machine"))
    cli_plan.add_command(_command(commands, "plan", "estimate memory, time, cost and storage of a large collection"))
    return parser


def _command(commands: argparse._SubParsersAction[_CommandParser], name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file or a hub id")
    return parser


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
