"""The one way of a request that runs a model: body -> schema -> requests -> results -> bytes.

Routes are plain functions from a schema to `Work`. Everything else is here: limits, deadline, turn, disconnects,
timing.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import torch
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from anypool.engine.async_engine import SMALL, ServingOptions
from anypool.engine.request import Request, leaves
from anypool.entrypoints.serve.encoding import Stamp
from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.http_errors import ErrorStyle, HTTPError
from anypool.entrypoints.serve.schemas.common import CommonFields
from anypool.entrypoints.serve.served import ServedModel
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import DeadlineExceededError, InvalidParameterError, InvalidRequestError

if TYPE_CHECKING:
    from anypool.entrypoints.serve.state import ServerState

# A value that is quoted in a message is cut to this many characters.
_LONGEST_QUOTE = 80
# Smaller bodies are parsed, and fewer numbers encoded, faster than a thread is asked to.
_INLINE_BYTES = 16_384
_INLINE_NUMBERS = 16_384
# Without what `float` takes beside digits, such as "1_0" for 10.
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", re.IGNORECASE)


@dataclass(kw_only=True)
class Work:
    """What a body asks for.

    Attributes:
        requests: What is run.
        encode: Results -> the answer.
        cut: Tokens that were cut off before there were requests.
    """

    requests: list[Request]
    encode: Callable[[list[torch.Tensor], Stamp], Response]
    cut: int = 0


@dataclass(frozen=True)
class Call:
    """One form of body that a route takes.

    Attributes:
        schema: Its fields.
        plan: What it asks for; called on a thread.
        response: The schema of the answer.
        style: In whose shape errors are.
        when: Where a route takes several forms: whether a body is this one. The last takes what no other does.
    """

    schema: type[CommonFields]
    plan: Callable[[Any, ServedModel], Work]
    response: type[BaseModel]
    style: ErrorStyle = ErrorStyle.OPENAI
    when: Callable[[Mapping[str, Any], ServedModel], bool] | None = None


def has(*names: str) -> Callable[[Mapping[str, Any], ServedModel], bool]:
    """Whether a body has all of these fields."""
    return lambda body, model: all(name in body for name in names)


async def serve_call(state: ServerState, exchange: Exchange, calls: Sequence[Call]) -> Response:
    """Serves a request of a route with these forms of body.

    Raises:
        Exception: Whatever there is to be told in place of an answer.
    """
    state.check_turn()
    options = state.options
    timeout_s = _timeout(exchange, options.request_timeout)
    coding = exchange.header("content-encoding")
    if coding is not None and coding.lower() != "identity":
        raise HTTPError(415, f"Content-Encoding: {coding!r:.80} is not taken: send the body as it is")
    body = await _read_body(exchange, options, timeout_s)
    with state.turn():
        return await _serve_body(state, exchange, calls, body, timeout_s)


async def _serve_body(
    state: ServerState, exchange: Exchange, calls: Sequence[Call], body: bytes, timeout_s: float
) -> Response:
    options = state.options
    if len(body) <= _INLINE_BYTES:
        asked, call, model = _parse(state, exchange, body, calls)
    else:
        asked, call, model = await exchange.unless_gone(asyncio.to_thread(_parse, state, exchange, body, calls))
    stamp = Stamp(request_id=asked.request_id or exchange.request_id, model=model.name)
    works: list[Work] = []
    prepare_s = 0.0

    def prepare() -> list[Request]:
        nonlocal prepare_s
        began = time.perf_counter()
        work = call.plan(asked, model)
        _check_tokens(work.requests, options.max_request_tokens)
        works.append(work)
        prepare_s = time.perf_counter() - began
        return work.requests

    left_s = timeout_s - (time.perf_counter() - exchange.began)
    if left_s <= 0:
        raise DeadlineExceededError(f"no result within {timeout_s:g} s")
    serving = ServingOptions(
        priority=asked.priority or 0, timeout_s=None if left_s == math.inf else left_s, cache_salt=asked.cache_salt
    )
    # A template of the request's may run for seconds: by itself, then, and on a thread.
    has_template = getattr(asked, "chat_template", None) is not None
    size = max(len(body), asked.least_size, SMALL if has_template else 0)
    _, results = await exchange.unless_gone(model.async_engine.serve(prepare, serving, size=size))
    [work] = works
    if sum(result.numel() for result in results) <= _INLINE_NUMBERS:
        answer = work.encode(results, stamp)
    else:
        answer = await asyncio.to_thread(work.encode, results, stamp)
    _note(state, exchange, answer, work, prepare_s)
    return answer


def _timeout(exchange: Exchange, most: float | None) -> float:
    """Seconds that a request may take: the server's, or fewer where the client says so."""
    asked = exchange.header("x-request-timeout")
    limit = math.inf if most is None else most
    if asked is None:
        return limit
    seconds = float(asked) if _SECONDS.fullmatch(asked) else math.nan
    if not 0 < seconds < math.inf:
        raise HTTPError(400, f"X-Request-Timeout: {asked!r:.80} is not a number of seconds", param="X-Request-Timeout")
    return min(seconds, limit)


async def _read_body(exchange: Exchange, options: ServerOptions, timeout_s: float) -> bytes:
    """The body; the request's time may be up before that of the body is."""
    try:
        return await exchange.read_body(options.max_body_bytes, min(timeout_s, options.body_timeout))
    except TimeoutError:
        if timeout_s < options.body_timeout:
            raise DeadlineExceededError(f"no result within {timeout_s:g} s") from None
        raise HTTPError(
            408, f"the body did not arrive within {options.body_timeout:g} seconds", code="request_timeout"
        ) from None


def _parse(
    state: ServerState, exchange: Exchange, body: bytes, calls: Sequence[Call]
) -> tuple[CommonFields, Call, ServedModel]:
    """Parses a JSON object. Invalid UTF-8, lone surrogates, NaN and deep nesting are refused by the parser.

    Raises:
        HTTPError: It is no JSON object, or asks for a model that is not there.
        InvalidRequestError: It is not what the schema says.
    """
    if not body:
        raise HTTPError(400, "the body is empty: send a JSON object")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HTTPError(400, f"the body is {_quote(value)}: send a JSON object")
    name = value.get("model")
    model = state.models.find(name if isinstance(name, str) else None)
    call = next((one for one in calls if one.when is not None and one.when(value, model)), calls[-1])
    exchange.style, exchange.model = call.style, model.name
    try:
        return call.schema.model_validate(value, context={"max_inputs": state.options.max_inputs}), call, model
    except ValidationError as error:
        raise _first_complaint(error) from None


def _first_complaint(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, InvalidRequestError):
        return own
    field_name = ".".join(map(str, first["loc"])) or None
    if first["type"] == "missing":
        return InvalidParameterError(f"the field {field_name!r} is missing", param=field_name)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidParameterError(f"{field_name}={_quote(first['input'])} is not accepted: {message}", param=field_name)


def _quote(value: object) -> str:
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "…"


def _check_tokens(requests: Sequence[Request], most: int | None) -> None:
    if most is None:
        return
    tokens = sum(map(len, requests))
    if tokens > most:
        raise InvalidRequestError(
            f"the request has {tokens:,} tokens, and this server takes {most:,} at once: send several requests",
            param="input",
        )


def _note(state: ServerState, exchange: Exchange, answer: Response, work: Work, prepare_s: float) -> None:
    """Timing headers as text-embeddings-inference has them, in milliseconds; what was cut; what metrics count."""
    ran = leaves(work.requests)
    exchange.inputs, exchange.tokens = len(work.requests), sum(map(len, ran))
    exchange.prepare_s = prepare_s
    exchange.queue_s = max((one.started - one.submitted for one in ran if one.started), default=0.0)
    started = min((one.started for one in ran if one.started), default=0.0)
    exchange.inference_s = max((one.finished for one in ran), default=0.0) - started if started else 0.0
    truncated = work.cut + sum(request.num_truncated_tokens for request in work.requests)
    headers = answer.headers
    headers["x-compute-tokens"] = str(exchange.tokens)
    headers["x-tokenization-time"] = _milliseconds(prepare_s)
    headers["x-queue-time"] = _milliseconds(exchange.queue_s)
    headers["x-inference-time"] = _milliseconds(exchange.inference_s)
    if truncated:
        headers["x-truncated-tokens"] = str(truncated)
    state.metrics.ran(exchange)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"
