"""The one shape that every error has, which is OpenAI's."""

from __future__ import annotations

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong. `param` is the field at fault, where one is; `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every response whose status is not 2xx."""

    error: ErrorDetail
