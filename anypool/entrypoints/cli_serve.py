"""`anypool serve`: models over HTTP."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from anypool.config import EngineConfig, require
from anypool.engine.engine import Engine
from anypool.engine.replicas import start_engine
from anypool.entrypoints.cli_flags import add_engine_flags, add_flags, arguments_of, engine_arguments
from anypool.entrypoints.server_options import ServerOptions


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        dest="more_models",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="a further model, which requests name in their field 'model'; may be given several times",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file with server flags by name; flags and the environment win over it"
    )
    add_flags(parser, ServerOptions, "server")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Loads the models and serves them until a signal comes."""
    from anypool.entrypoints.serve.auth import Keys
    from anypool.entrypoints.serve.server import bind, serve  # imports what the extra installs

    options = ServerOptions.gather(arguments_of(arguments, ServerOptions), path=arguments.config)
    Keys(options.api_key, options.api_key_file)  # before a model is loaded
    given = engine_arguments(arguments)
    configs = [EngineConfig.from_kwargs(model=arguments.model, **given)]
    for text in arguments.more_models:
        name, _, model = text.rpartition("=")
        configs.append(EngineConfig.from_kwargs(**{**given, "model": model, "served_model_name": name or None}))
    names = [config.served_model_name or config.model for config in configs]
    require(len(set(names)) == len(names), f"two models have one name: {', '.join(names)}; give --model NAME=MODEL")
    with bind(options.host, options.port) as sock, _ending_by_signal():
        engines: list[Engine] = []
        try:
            for config in configs:
                engines.append(start_engine(config))
            # What is loaded stays. Without this, each full collection would look at all of it, for about 0.1 s.
            gc.collect()
            gc.freeze()
            serve(engines, sock, options)
        finally:
            for engine in engines:
                engine.close()
    return 0


@contextmanager
def _ending_by_signal() -> Iterator[None]:
    """Exits with 0 at SIGTERM. The server drains at it first, and it is raised again when that is done.

    SIGHUP, which a terminal sends that closes, is one more SIGTERM, unless it is ignored, as under nohup.
    """
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
