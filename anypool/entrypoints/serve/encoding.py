"""Results -> bytes."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import torch

from anypool.engine.request import Request


def encode_embeddings(
    requests: Sequence[Request], vectors_E: Sequence[torch.Tensor], *, model: str, encoding_format: str
) -> bytes:
    """The JSON of an `EmbeddingResponse`.

    Args:
        requests: As they were run.
        vectors_E: Their results, float32 on the CPU.
        model: Name of the model that made them.
        encoding_format: "float" or "base64".
    """
    encode = _as_base64 if encoding_format == "base64" else _as_numbers
    body = {
        "object": "list",
        "id": f"embd-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector_E)}
            for index, vector_E in enumerate(vectors_E)
        ],
        "usage": _usage(requests),
    }
    return orjson.dumps(body)


def _as_numbers(vector_E: torch.Tensor) -> orjson.Fragment:
    """Row by row, so that a large response does not keep the interpreter from the other threads."""
    row_E = np.ascontiguousarray(vector_E.numpy())
    return orjson.Fragment(orjson.dumps(row_E, option=orjson.OPT_SERIALIZE_NUMPY))


def _as_base64(vector_E: torch.Tensor) -> str:
    row_E = np.ascontiguousarray(vector_E.numpy(), dtype="<f4")
    return base64.b64encode(row_E.data).decode("ascii")


def _usage(requests: Sequence[Request]) -> dict[str, Any]:
    tokens = sum(map(len, requests))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    truncated = sum(request.num_truncated_tokens for request in requests)
    if truncated:
        usage["truncated_tokens"] = truncated
    split = sum(bool(request.parts) for request in requests)
    if split:
        usage["split_inputs"] = split
    return usage
