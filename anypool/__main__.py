"""`python -m anypool`."""

from __future__ import annotations

import sys

from anypool.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())
