"""What the server says about its models and itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A served model, or one with a LoRA adapter.

    `root` is its name on the hub, or `id` where it is a folder of the machine; `parent` is the model that an adapter is
    for, and `max_model_len` how many tokens it takes at once.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "anypool"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthResponse(BaseModel):
    """Whether requests are served."""

    status: Literal["ok"] = "ok"


class VersionResponse(BaseModel):
    """The version of anypool."""

    version: str


class InfoResponse(BaseModel):
    """A served model: the fields of text-embeddings-inference, and all that `anypool info` shows under `card`."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None
    card: dict[str, Any]
