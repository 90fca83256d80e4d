"""Where Ray is not installed, all that needs it says what to install, and before anything is loaded or written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from anypool.entrypoints.cli import main
from anypool.entrypoints.ray import embed_dataset
from anypool.entrypoints.ray.serve import app
from anypool.errors import MissingDependencyError

HINT = "pip install 'anypool[ray]'"


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


def test_command_and_function_say_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out"
    source.write_text("a text\n", encoding="utf-8")
    with pytest.raises(MissingDependencyError, match=re.escape(HINT)):
        embed_dataset("m", source, output)
    assert main(["embed", "m", "--input", str(source), "--output", str(output), "--ray"]) == 2
    assert capsys.readouterr().err.rstrip().endswith(HINT)
    assert not output.exists()


def test_serve_application_says_what_to_install() -> None:
    with pytest.raises(MissingDependencyError, match=re.escape(HINT)):
        app({"model": "m"})
