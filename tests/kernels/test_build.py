"""Every kernel compiles for every kind of GPU that is promised, and its tiles fit there. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that one program may have.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}


@pytest.mark.parametrize("target", SHARED)
def test_every_kernel_compiles(target: str, root: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.build", target]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)
    assert {one["launch"].split("[")[0] for one in built} == {
        file.parent.name for file in (root / "anypool" / "kernels").glob("*/triton.py")
    }
    assert all(one["bytes"] > 0 for one in built)
    too_large = {one["launch"]: one["shared"] for one in built if one["shared"] > SHARED[target]}
    assert too_large == {}
