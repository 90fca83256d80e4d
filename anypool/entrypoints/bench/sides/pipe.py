"""Commands and answers: a line of JSON each, over stdin and stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Any


class Side:
    """An engine that embeds. A command is a method, its fields are the arguments, and what it returns is the answer."""

    def load(self, *, model: str, dtype: str, prompt: str, gguf: str | None) -> dict[str, Any]:
        """Loads the model.

        Args:
            model: A folder, a file or a hub id.
            dtype: What the user wrote: auto, float32, ...
            prompt: What the checkpoint puts before each text, for engines that do not by themselves.
            gguf: The same model as a GGUF file.

        Returns:
            `versions`, by package, and the `dtype` that is computed in.
        """
        raise NotImplementedError

    def vectors(self, texts: list[str]) -> Any:
        """`[N, E]` of the texts, as an array or nested lists."""
        raise NotImplementedError

    def embed(self, *, file: str, keep: str | None = None) -> dict[str, Any]:
        """Embeds the texts in a JSON file; their vectors go to the .npy file `keep`. Answers the seconds it took."""
        import numpy as np

        texts = json.loads(Path(file).read_text(encoding="utf-8"))
        began = time.perf_counter()
        vectors = self.vectors(texts)
        seconds = time.perf_counter() - began
        if keep is not None:
            np.save(keep, np.asarray(vectors, dtype=np.float32))
        return {"seconds": seconds}

    def memory(self) -> dict[str, Any]:
        """The most bytes that the process and its children had in memory; None where the system does not say."""
        return {"bytes": peak_memory()}

    def close(self) -> None:
        """Ends what the side has started."""


def serve(side: Side) -> None:
    """Answers commands until "quit". What libraries print goes to stderr, and they find nothing on stdin."""
    commands, answers = _own_pipes()
    try:
        for line in commands:
            fields = json.loads(line)
            name = fields.pop("command")
            if name == "quit":
                break
            try:
                answer = getattr(side, name)(**fields)
                if name == "load":
                    side.vectors(["one text"])  # whoever asks for the start-up waits for the first result
            except Exception as error:  # of any library; the driver reports it
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        side.close()


def _own_pipes() -> tuple[IO[str], IO[str]]:
    commands, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, answers


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages, and Python's."""
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_memory() -> int | None:
    """The highest resident sizes of this process and of all below it, added up, in bytes; None without /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name, in brackets, may hold spaces; the parent is the second field behind it.
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    sizes = [size for pid in family if (size := _peak(pid)) is not None]
    return sum(sizes) if sizes else None


def _peak(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
