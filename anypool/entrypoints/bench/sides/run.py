"""Runs a side: `python run.py MODULE` answers commands on stdin until "quit" or the end of the input."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def main() -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # what is started here ends with us
    # The folder above is on the path for one import only: the names in it would hide other packages.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    side = importlib.import_module(f"sides.{sys.argv[1]}")
    del sys.path[0]
    side.main()


if __name__ == "__main__":
    main()
