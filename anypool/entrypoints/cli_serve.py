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
from anypool.entrypoints.cli_adapters import by_model
from anypool.entrypoints.cli_flags import add_engine_flags, add_flags, arguments_of
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
    from anypool.entrypoints.serve.certificates import check_certificates
    from anypool.entrypoints.serve.server import bind, serve  # imports what the extra installs

    options = ServerOptions.gather(arguments_of(arguments, ServerOptions), path=arguments.config)
    Keys(options.api_key, options.api_key_file)  # before a model is loaded, as are the certificates
    check_certificates(options)
    configs = engine_configs(arguments)
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


def engine_configs(arguments: argparse.Namespace) -> list[EngineConfig]:
    """The engines, each with the adapters that are for it."""
    given = arguments_of(arguments, EngineConfig)
    modules = given.pop("lora_modules", ())
    models = [{"model": arguments.model}]
    for text in arguments.more_models:
        name, _, model = text.rpartition("=")
        models.append({"model": model, "served_model_name": name or None})
    configs = [EngineConfig.from_kwargs(**{**given, **model}) for model in models]
    names = [config.served_model_name or config.model for config in configs]
    require(len(set(names)) == len(names), f"two models have one name: {', '.join(names)}; give --model NAME=MODEL")
    adapters = by_model(modules, names)
    return [config.replace(lora_modules=own or None) for config, own in zip(configs, adapters, strict=True)]


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
