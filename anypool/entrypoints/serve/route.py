"""What a route is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel
from starlette.responses import Response

from anypool.entrypoints.serve.call import Call
from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.http_errors import ErrorStyle

if TYPE_CHECKING:
    from anypool.entrypoints.serve.state import ServerState


@dataclass(frozen=True, kw_only=True)
class Route:
    """One way to call the server. It has calls, which run a model, or an answer that runs none.

    Attributes:
        paths: Where it is; the first is the one that the documents show. A path may end in `{name}`.
        summary: What it does.
        methods: HTTP methods; HEAD goes with GET.
        calls: The forms of body that it takes.
        answer: What it answers.
        response: The schema of `answer`.
        query: Names that the URL may have after a `?`.
        style: In whose shape errors are before the body is known.
        is_public: Whether it answers without a key.
        is_shown: Whether the OpenAPI document has it.
    """

    paths: tuple[str, ...]
    summary: str
    methods: tuple[str, ...] = ("POST",)
    calls: tuple[Call, ...] = ()
    answer: Callable[[ServerState, Exchange], Response] | None = None
    response: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    style: ErrorStyle = ErrorStyle.OPENAI
    is_public: bool = False
    is_shown: bool = True
