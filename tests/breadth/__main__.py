"""Tries architectures and writes docs/architectures.md.

    python -m tests.breadth [--results FILE] [--again OUTCOME] [--page FILE] [NAME ...]

Results are added to a file as they come, and what is there already is not tried again, unless its outcome is named.
NAME is a task, a model type or an architecture. A page is written of what is in the file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    import transformers

    from tests.breadth.page import TASKS, page, share
    from tests.breadth.run import run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--again", action="append", default=[], metavar="OUTCOME")
    parser.add_argument("--page", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    results = list(run(arguments.results, names=arguments.names, again=arguments.again).values())
    for task in TASKS:
        works, tried = share(results, task)
        print(f"{task}: {works} of {tried} work")
    if arguments.page is not None:
        arguments.page.write_text(page(results, transformers.__version__))


if __name__ == "__main__":
    sys.exit(main())
