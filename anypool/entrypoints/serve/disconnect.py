"""Work that stops when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

ResultT = TypeVar("ResultT")


async def unless_gone(http: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Awaits `work`, and cancels it when the client goes away first. The body must have been read before.

    Raises:
        ClientDisconnect: The client went away.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
