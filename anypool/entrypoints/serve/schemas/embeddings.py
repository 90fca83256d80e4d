"""`POST /v1/embeddings`: OpenAI's fields, vLLM's, Jina's, and those that this engine adds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from anypool.entrypoints.serve.schemas.chat import ChatFields
from anypool.entrypoints.serve.schemas.common import Usage
from anypool.entrypoints.serve.schemas.encoding import EncodingFields
from anypool.errors import InvalidParameterError
from anypool.pooling.params import PoolingParams

# Jina's name of a form -> encoding_format and embed_dtype.
_JINA_TYPES: dict[str, tuple[Literal["float", "base64"], Any]] = {
    "float": ("float", None),
    "base64": ("base64", None),
    "int8": ("float", "int8"),
    "uint8": ("float", "uint8"),
    "binary": ("float", "binary"),
    "ubinary": ("float", "ubinary"),
}


class EmbeddingRequest(ChatFields, EncodingFields):
    """What is embedded, and how."""

    dimensions: int | None = Field(None, description="How many leading dimensions to keep, before scaling.")
    max_active_dims: int | None = Field(None, description="Of sparse vectors: how many weights to keep, the largest.")
    normalized: bool | None = Field(None, description="The same as normalize.")
    embedding_type: Literal["float", "base64", "int8", "uint8", "binary", "ubinary"] | None = Field(
        None, description="encoding_format and embed_dtype in one."
    )
    late_chunking: bool | None = Field(
        None, description="Embed each text of input in the light of all, which are run as one text."
    )
    modality: Literal["text"] | None = Field(None, description="What inputs are, in infinity's words: only text.")
    return_multivector: bool | None = Field(None, description="Not served here: POST /pooling gives vectors per token.")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.return_multivector:
            raise InvalidParameterError(
                "return_multivector=true is not supported here: POST /pooling with task=token_embed",
                param="return_multivector",
            )
        if self.late_chunking and not all(isinstance(one, str) and one for one in self.input or [None]):
            raise InvalidParameterError(
                "late_chunking takes texts in input, none of them empty, and no token ids or messages",
                param="late_chunking",
            )
        for name, others in (("normalized", ("normalize",)), ("embedding_type", ("encoding_format", "embed_dtype"))):
            if getattr(self, name) is not None and any(getattr(self, other) is not None for other in others):
                raise InvalidParameterError(f"{name} and {' and '.join(others)} say the same: give one", param=name)

    @property
    def form(self) -> tuple[str, str]:
        """encoding_format and embed_dtype."""
        if self.embedding_type is not None:
            encoding_format, dtype = _JINA_TYPES[self.embedding_type]
            return encoding_format, dtype or "float32"
        return self.encoding_format or "float", self.embed_dtype or "float32"

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(
            dimensions=self.dimensions,
            max_active_dims=self.max_active_dims,
            normalize=self.normalize if self.normalized is None else self.normalized,
            activation=self.activation,
            use_activation=self.use_activation,
        )


class SparseVector(BaseModel):
    """The dimensions that are not 0, ascending, and the weight of each."""

    indices: list[int]
    values: list[float]


class EmbeddingData(BaseModel):
    """One vector: numbers, base64 of their bytes, or indices and values for a model of sparse vectors."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str | SparseVector


class EmbeddingResponse(BaseModel):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: Usage
