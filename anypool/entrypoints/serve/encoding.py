"""Results -> bytes. Rows are written from contiguous buffers, and never become Python lists of floats."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from starlette.responses import Response

from anypool.engine.request import Request, leaves
from anypool.errors import InvalidParameterError
from anypool.pooling.quantize import quantize_embeddings
from anypool.pooling.sparse import unpack_weights

# Rows of one response in the form "bytes", whose description is a header, which clients bound.
_MOST_DESCRIBED = 128


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a response says about itself."""

    request_id: str
    model: str

    def head(self, prefix: str) -> dict[str, Any]:
        """The first fields of a response."""
        return {"object": "list", "id": f"{prefix}-{self.request_id}", "created": int(time.time()), "model": self.model}


@dataclass(frozen=True, kw_only=True)
class Form:
    """In what form numbers are sent.

    Attributes:
        encoding: float, base64, bytes or bytes_only.
        dtype: Type of the numbers.
        endianness: Order of their bytes.
    """

    encoding: str = "float"
    dtype: str = "float32"
    endianness: str = "little"

    def numbers(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """Rows as JSON has them; `bfloat16`, which numpy does not have, as the float32 of the same value."""
        if self.dtype == "bfloat16":
            return torch.from_numpy(rows).bfloat16().float().numpy()
        return _stored(rows, self.dtype)

    def packed(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """Rows whose memory is what is sent."""
        if self.dtype == "bfloat16":
            stored = torch.from_numpy(rows).bfloat16().view(torch.uint16).numpy()
        else:
            stored = _stored(rows, self.dtype)
        order = sys.byteorder if self.endianness == "native" else self.endianness
        return np.ascontiguousarray(stored if order == sys.byteorder else stored.byteswap())


def _stored(rows: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Rows in a type that numpy has.

    int8 and uint8 cut each row's own range, from minus to plus its largest value, into 256 steps: a row says the same
    alone and among others, and cosine similarity is kept.
    """
    if dtype == "float32":
        return rows
    flat = rows.reshape(-1, rows.shape[-1])
    if dtype in ("int8", "uint8"):
        largest = np.abs(flat).max(axis=1, keepdims=True, initial=0.0)
        scaled = (flat / np.where(largest == 0, 1, largest)).astype(np.float32)
        one = np.ones(flat.shape[1], np.float32)
        stored = quantize_embeddings(scaled, dtype, ranges=np.stack([-one, one]))
    else:
        stored = quantize_embeddings(flat, dtype)
    return stored.reshape(*rows.shape[:-1], stored.shape[-1])


def as_array(result: torch.Tensor) -> NDArray[np.float32]:
    """A result's memory as an array, contiguous."""
    return np.ascontiguousarray(result.numpy())


def as_matrix(results: Sequence[torch.Tensor]) -> NDArray[np.float32]:
    """Vectors of one length as one contiguous buffer."""
    if len(results) == 1:
        return as_array(results[0])[None]
    return np.stack([result.numpy() for result in results]) if results else np.zeros((0, 0), np.float32)


def json_of(numbers: Any) -> orjson.Fragment:
    """An array or a number of numpy's as JSON, by itself: a large response must not keep the interpreter."""
    return orjson.Fragment(orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY))


def sparse_of(rows_K2: torch.Tensor) -> dict[str, orjson.Fragment]:
    """A packed sparse vector as JSON has it: indices, ascending, and values."""
    indices_K, values_K = unpack_weights(rows_K2)
    return {"indices": json_of(indices_K.numpy()), "values": json_of(values_K.numpy())}


def pairs_of(rows_K2: torch.Tensor) -> bytes:
    """A packed sparse vector as text-embeddings-inference has it: an object for each weight."""
    indices_K, values_K = unpack_weights(rows_K2)
    values = orjson.loads(orjson.dumps(values_K.numpy(), option=orjson.OPT_SERIALIZE_NUMPY))  # as short as float32 is
    return orjson.dumps([{"index": i, "value": v} for i, v in zip(indices_K.tolist(), values, strict=True)])


def base64_of(row: NDArray[Any]) -> str:
    return base64.b64encode(row.data).decode("ascii")


def json_answer(body: Any) -> Response:
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def rows_answer(
    rows: Sequence[NDArray[np.float32]],
    form: Form,
    head: dict[str, Any],
    usage: dict[str, Any],
    *,
    kind: str,
    key: str,
    shapes: bool = False,
    extras: Sequence[dict[str, Any]] | None = None,
) -> Response:
    """A response with an entry per result.

    Args:
        rows: A result each, `[E]` or `[rows, E]`.
        form: How they are written.
        head: The first fields.
        usage: The last.
        kind: `object` of each entry.
        key: Under which the numbers stand.
        shapes: Whether base64 comes with its shape.
        extras: Further fields of each entry; bytes have no place for them.
    """
    if form.encoding in ("bytes", "bytes_only"):
        return _bytes_answer(rows, form, head, usage)
    if form.encoding == "base64":
        packed = [form.packed(row) for row in rows]
        data = [
            {"object": kind, "index": index, key: base64_of(row), **({"shape": list(row.shape)} if shapes else {})}
            for index, row in enumerate(packed)
        ]
    else:
        data = [
            {"object": kind, "index": index, key: json_of(np.ascontiguousarray(form.numbers(row)))}
            for index, row in enumerate(rows)
        ]
    _add(data, extras)
    return json_answer({**head, "data": data, "usage": usage})


def check_plain(form: Form) -> None:
    """Refuses other forms than JSON numbers, which sparse vectors and results of several tasks do not have."""
    if form != Form():
        raise InvalidParameterError(
            "sparse vectors and results of several tasks are sent as JSON numbers: leave encoding_format, embed_dtype "
            "and endianness out",
            param="encoding_format",
        )


def _add(data: list[dict[str, Any]], extras: Sequence[dict[str, Any]] | None) -> None:
    if extras is not None:
        for entry, more in zip(data, extras, strict=True):
            entry.update(more)


def objects_answer(
    values: Sequence[Any],
    head: dict[str, Any],
    usage: dict[str, Any],
    *,
    kind: str,
    key: str,
    extras: Sequence[dict[str, Any]] | None = None,
) -> Response:
    """A response with an entry per result that is more than numbers: a sparse vector, or several results."""
    data = [{"object": kind, "index": index, key: value} for index, value in enumerate(values)]
    _add(data, extras)
    return json_answer({**head, "data": data, "usage": usage})


def _bytes_answer(
    rows: Sequence[NDArray[np.float32]], form: Form, head: dict[str, Any], usage: dict[str, Any]
) -> Response:
    """All results one after the other; where each lies is in the header `metadata`, as vLLM has it."""
    packed = [form.packed(row) for row in rows]
    body = b"".join(row.tobytes() for row in packed)
    answer = Response(body, media_type="application/octet-stream")
    if form.encoding == "bytes":
        if len(rows) > _MOST_DESCRIBED:
            raise InvalidParameterError(
                f"encoding_format='bytes' describes each of {len(rows):,} results in a header, the limit is "
                f"{_MOST_DESCRIBED}: use bytes_only, or send several requests",
                param="encoding_format",
            )
        # In ASCII: the request's id, which may hold anything, is in it, and headers hold little more.
        answer.headers["metadata"] = json.dumps({**head, "data": list(_places(packed, form)), "usage": usage})
    return answer


def _places(packed: Sequence[NDArray[Any]], form: Form) -> Any:
    start = 0
    for index, row in enumerate(packed):
        yield {
            "index": index,
            "embed_dtype": form.dtype,
            "endianness": form.endianness,
            "start": start,
            "end": start + row.nbytes,
            "shape": list(row.shape),
        }
        start += row.nbytes


def usage_of(requests: Sequence[Request], *, cut: int = 0) -> dict[str, Any]:
    """Tokens that were run. `cut` are those that were cut off before there were requests."""
    tokens = sum(map(len, requests))
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    truncated = cut + sum(request.num_truncated_tokens for request in requests)
    if truncated:
        usage["truncated_tokens"] = truncated
    split = sum(bool(request.parts) for request in requests)
    if split:
        usage["split_inputs"] = split
    cached = sum(request.num_cached_tokens for request in leaves(requests))
    if cached:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
