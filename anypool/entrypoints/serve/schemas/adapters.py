"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's fields."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from anypool.engine.async_engine import SMALL
from anypool.entrypoints.serve.schemas.common import CommonFields


class _AdapterFields(CommonFields):
    """Of requests that run no model, and read files or wait for one that does."""

    @property
    def least_size(self) -> int:
        return SMALL


class LoadAdapterRequest(_AdapterFields):
    """A LoRA adapter, which requests name in `model` from then on. `model` is here the served model that it is for."""

    lora_name: str = Field(description="What it will be called.")
    lora_path: str = Field(description="Its folder, inside one of --lora-dir.")
    load_inplace: bool | None = Field(None, description="Whether it takes the place of another one of its name.")


class UnloadAdapterRequest(_AdapterFields):
    """A LoRA adapter that no request will name any more."""

    lora_name: str = Field(description="What it is called.")


class UnloadedAdapter(BaseModel):
    """The name that is free again."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True
