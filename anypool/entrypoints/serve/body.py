"""A request's body: read up to a limit, parsed, and checked against its schema."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from anypool.entrypoints.serve.http_errors import HTTPError
from anypool.errors import InvalidParameterError, InvalidRequestError

SchemaT = TypeVar("SchemaT", bound=BaseModel)

# A value that is quoted in a message is cut to this many characters.
_LONGEST_QUOTE = 80


async def read_body(http: Request, limit: int, *, timeout_s: float = 120.0) -> bytes:
    """The body.

    What is over the limit is read and thrown away, up to as much again: a client that is still sending does not see
    the answer.

    Raises:
        HTTPError: It has more bytes than `limit`, or is not all there after `timeout_s` seconds.
    """
    try:
        return await asyncio.wait_for(_read(http, limit), timeout_s)
    except asyncio.TimeoutError:
        raise HTTPError(408, f"the body did not arrive within {timeout_s:g} seconds", code="request_timeout") from None


async def _read(http: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > 2 * limit:
            break
    if size > limit:
        raise HTTPError(
            413, f"the body has more than {limit:,} bytes, the limit: send several requests", code="body_too_large"
        )
    return b"".join(chunks)


def parse_body(body: bytes, schema: type[SchemaT]) -> SchemaT:
    """Parses a JSON object. Invalid UTF-8, lone surrogates, NaN and deep nesting are refused by the parser.

    Raises:
        InvalidRequestError: It is not JSON, or not what the schema says.
    """
    if not body:
        raise InvalidRequestError("the body is empty: send a JSON object")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body is {_quote(value)}: send a JSON object")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _first_complaint(error) from None


def _first_complaint(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, InvalidRequestError):
        return own
    field = ".".join(map(str, first["loc"])) or None
    if first["type"] == "missing":
        return InvalidParameterError(f"the field {field!r} is missing", param=field)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidParameterError(f"{field}={_quote(first['input'])} is not accepted: {message}", param=field)


def _quote(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "…"
