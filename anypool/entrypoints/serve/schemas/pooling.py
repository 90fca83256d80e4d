"""`POST /pooling`, `/classify` and `/reward`: any task by its name, labels, rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from anypool.entrypoints.serve.schemas.chat import ChatFields
from anypool.entrypoints.serve.schemas.common import LabelFields, TokenVectorFields, Usage
from anypool.entrypoints.serve.schemas.embeddings import SparseVector
from anypool.entrypoints.serve.schemas.encoding import EncodingFields
from anypool.errors import InvalidParameterError
from anypool.pooling.params import PoolingParams


class _StepFields(ChatFields):
    step_tag_id: int | None = Field(None, description="Keep the tokens with this id, of a result per token.")
    returned_token_ids: list[int] | None = Field(None, description="Columns of a score per token to keep.")

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(
            normalize=self.normalize,
            activation=self.activation,
            use_activation=self.use_activation,
            step_tag_id=self.step_tag_id,
            returned_token_ids=self.returned_token_ids,
        )


class PoolingRequest(_StepFields, EncodingFields, TokenVectorFields):
    """What is run, and what it gets.

    `task` is one of embed, sparse_embed, classify, reward, token_embed and token_classify, or an array of them: inputs
    are run once for all.
    """

    task: str | list[str] | None = Field(None, description="The pooling task, or several.")  # type: ignore[assignment]
    max_active_dims: int | None = Field(None, description="Of sparse vectors: how many weights to keep, the largest.")

    dimensions: int | None = Field(None, description="Of vectors: how many leading dimensions to keep.")
    return_token_ids: bool | None = Field(None, description="Whether the ids that were run are returned as well.")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.return_token_ids and self.encoding_format in ("bytes", "bytes_only"):
            raise InvalidParameterError(
                f"encoding_format={self.encoding_format!r} has no place for token ids: ask for float or base64",
                param="return_token_ids",
            )

    @property
    def asked_use(self) -> str | None:
        return None  # here `task` is the pooling task

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(
            dimensions=self.dimensions,
            max_active_dims=self.max_active_dims,
            normalize=self.normalize,
            activation=self.activation,
            use_activation=self.use_activation,
            step_tag_id=self.step_tag_id,
            returned_token_ids=self.returned_token_ids,
            is_query=self.is_query,
            pool_factor=self.pool_factor,
            token_pooling=self.token_pooling,
        )


class ImageGrid(BaseModel):
    """Which rows of a result are the patches of an image: `rows * columns` from `first_row` on, line by line.

    The patches cover the image in equal cells, from its top left corner.
    """

    rows: int
    columns: int
    first_row: int


class PoolingData(BaseModel):
    """One result: a vector or rows of numbers, or base64 of their bytes with their shape.

    A sparse vector is indices and values. Of several tasks it is an object with a result for each.
    `prompt_token_ids` are there where they are asked for: special tokens included, after truncation. Multi-vector
    models have no vector for some: `row_places` says where the token of each row stands, unless rows are clusters.
    `image_grids` are those of the images of a prompt whose tokens are embedded; null where the model cuts images into
    tiles, crops or pads them, so that its patches are no single grid over the image.
    """

    object: Literal["pooling"]
    index: int
    data: list[list[float]] | list[float] | str | SparseVector | dict[str, SparseVector | list[Any]]
    shape: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    row_places: list[int] | None = None
    image_grids: list[ImageGrid] | None = None


class PoolingResponse(BaseModel):
    """The results, in the order of the inputs."""

    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[PoolingData]
    usage: Usage


class ClassifyRequest(ChatFields, LabelFields):
    """What is classified."""


class ClassifyData(BaseModel):
    """The label with the highest score, and the scores of all, in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(BaseModel):
    """The labels, in the order of the inputs."""

    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[ClassifyData]
    usage: Usage


class RewardRequest(_StepFields):
    """What is rewarded."""


class RewardData(BaseModel):
    """A text's reward; one per step for a process-reward model, a row per token for a model without a head."""

    object: Literal["reward"]
    index: int
    reward: float | list[float] | list[list[float]]


class RewardResponse(BaseModel):
    """The rewards, in the order of the inputs."""

    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[RewardData]
    usage: Usage
