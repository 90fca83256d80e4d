"""The routes of text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, RootModel, ValidationInfo, WithJsonSchema

from anypool.entrypoints.serve.schemas.common import (
    CommonFields,
    Inputs,
    LabelFields,
    Texts,
    TokenVectorFields,
    check_count,
    kind_of,
)
from anypool.errors import InvalidParameterError, InvalidPromptError
from anypool.pooling.params import PoolingParams


class EmptyInputError(InvalidPromptError):
    """Nothing was given, which text-embeddings-inference has an answer of its own for."""


class TEIRequest(TokenVectorFields):
    """Inputs that are too long are cut unless `truncate` is false."""

    TRUNCATES: ClassVar[bool] = True

    inputs: Inputs
    dimensions: int | None = Field(None, description="How many leading dimensions to keep, before scaling.")
    max_active_dims: int | None = Field(None, description="Of sparse vectors: how many weights to keep, the largest.")

    def model_post_init(self, context: Any) -> None:
        if not self.inputs:
            raise EmptyInputError("inputs is empty", param="inputs")

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(
            dimensions=self.dimensions,
            max_active_dims=self.max_active_dims,
            normalize=self.normalize,
            activation=self.activation,
            use_activation=self.use_activation,
            is_query=self.is_query,
            pool_factor=self.pool_factor,
            token_pooling=self.token_pooling,
        )


def _as_predictions(value: object, info: ValidationInfo) -> tuple[list[str | list[str]], bool]:
    """Texts and pairs, and whether a single one was given."""
    if isinstance(value, str):
        return [value], True
    if not isinstance(value, list):
        raise InvalidPromptError(f"inputs is {kind_of(value)}; give texts or pairs of texts", param="inputs")
    if not value:
        raise EmptyInputError("inputs is empty", param="inputs")
    if all(isinstance(one, str) for one in value) and len(value) <= 2:
        return [value[0] if len(value) == 1 else value], True
    check_count(value, "inputs", info)
    for index, one in enumerate(value):
        pair = [one] if isinstance(one, str) else one
        if not isinstance(pair, list) or len(pair) not in (1, 2) or not all(isinstance(text, str) for text in pair):
            raise InvalidPromptError(f"inputs[{index}] is neither a text nor a pair of texts", param="inputs")
    return [one[0] if isinstance(one, list) and len(one) == 1 else one for one in value], False


_TEXT_OR_PAIR: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}]
}


class PredictRequest(LabelFields):
    """A text, a pair of texts `[a, b]`, or an array of either, each pair and each text an array of its own."""

    TRUNCATES: ClassVar[bool] = True

    inputs: Annotated[
        tuple[list[str | list[str]], bool],
        PlainValidator(_as_predictions),
        WithJsonSchema({"anyOf": [*_TEXT_OR_PAIR["anyOf"], {"type": "array", "items": _TEXT_OR_PAIR}]}),
    ]


class Prediction(BaseModel):
    """A label and its score."""

    label: str
    score: float


class TEIRerankRequest(CommonFields):
    """A query, and texts that are ordered by how well they fit it."""

    TRUNCATES: ClassVar[bool] = True

    query: str
    texts: Texts
    raw_scores: bool | None = Field(None, description="True for scores before the activation.")
    return_text: bool | None = Field(None, description="Whether the texts are returned.")

    def model_post_init(self, context: Any) -> None:
        if not self.texts:
            raise EmptyInputError("texts is empty", param="texts")


class Rank(BaseModel):
    """A text's place among those given, and its score."""

    index: int
    score: float
    text: str | None = None


class Sentences(BaseModel):
    """What is compared with what."""

    model_config = ConfigDict(strict=True, frozen=True)

    source_sentence: str
    sentences: Texts


class SimilarityParameters(CommonFields):
    """Options of a comparison."""

    TRUNCATES: ClassVar[bool] = True


class SimilarityRequest(CommonFields):
    """A sentence, and those that it is compared with."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None

    def model_post_init(self, context: Any) -> None:
        if not self.inputs.sentences:
            raise EmptyInputError("inputs.sentences is empty", param="inputs")
        if self.parameters is not None and self.parameters.model not in (None, self.model):
            raise InvalidParameterError(
                f"parameters has the model {self.parameters.model!r}: name it beside inputs and parameters",
                param="parameters",
            )


class Vectors(RootModel[list[list[float]]]):
    """A vector per input."""


class TokenVectors(RootModel[list[list[list[float]]]]):
    """A vector per token of each input."""


class SparseWeight(BaseModel):
    """A dimension and its weight."""

    index: int
    value: float


class SparseVectors(RootModel[list[list[SparseWeight]]]):
    """The weights of each input that are not 0, by dimension."""


class Predictions(RootModel[list[Prediction] | list[list[Prediction]]]):
    """The labels of a text, or of each, the highest score first."""


class Ranks(RootModel[list[Rank]]):
    """The texts, best first."""


class Scores(RootModel[list[float]]):
    """A score per sentence."""
