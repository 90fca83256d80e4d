"""The page at `/`: files of the package, the same for everybody, so they are answered without a key. They tell nothing
of what is served: that the page asks the other routes, with the key that its user gives it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import Response

from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.route import Route

if TYPE_CHECKING:
    from anypool.entrypoints.serve.state import ServerState

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing written into the page, and no text that is taken for markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again by its tag: an upgrade shows at once
}


@cache
def _files() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Content and headers of each file by name."""
    found = {}
    for file in resources.files("anypool.entrypoints.serve").joinpath("page").iterdir():
        content = file.read_bytes()
        media_type = _TYPES[file.name[file.name.rindex(".") :]]
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[file.name] = content, {**_HEADERS, "Content-Type": media_type, "ETag": tag}
    return found


def page(state: ServerState, exchange: Exchange) -> Response:
    """The page, or one of the files that it is made of."""
    name = exchange.request.path_params.get("file", "index.html")
    if name not in _files():
        raise HTTPException(404)
    content, headers = _files()[name]
    if headers["ETag"] in (exchange.header("if-none-match") or ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)


ROUTES = (
    Route(
        paths=("/", "/page/{file}"),
        summary="A page to try the models in a browser",
        methods=("GET",),
        answer=page,
        is_public=True,
        is_shown=False,
    ),
)
