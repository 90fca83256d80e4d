"""The HTTP server. It needs the packages of `anypool[serve]`."""

from __future__ import annotations

import importlib.util

from anypool.errors import MissingDependencyError

_missing = [
    name
    for name in ("fastapi", "orjson", "prometheus_client", "pydantic", "uvicorn")
    if importlib.util.find_spec(name) is None
]
if _missing:
    raise MissingDependencyError(f"the server needs {', '.join(_missing)}: pip install 'anypool[serve]'")
