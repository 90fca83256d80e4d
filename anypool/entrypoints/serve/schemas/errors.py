"""What errors look like, in the shape of each API."""

from __future__ import annotations

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong. `param` is the field at fault, where one is; `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The shape of OpenAI's API, and of every route that is not another API's."""

    error: ErrorDetail


class TEIErrorResponse(BaseModel):
    """The shape of text-embeddings-inference."""

    error: str
    error_type: str


class CohereErrorResponse(BaseModel):
    """The shape of Cohere's API."""

    id: str
    message: str
