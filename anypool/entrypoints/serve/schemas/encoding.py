"""How vectors are written into a response."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

EmbedDtype = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]


class EncodingFields(BaseModel):
    """In what form numbers are sent."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = Field(
        None, description="JSON numbers, base64 of their bytes, or the bytes alone with or without a description."
    )
    embed_dtype: EmbedDtype | None = Field(None, description="The type of the numbers; float32 by default.")
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="The order of a number's bytes; little by default."
    )
