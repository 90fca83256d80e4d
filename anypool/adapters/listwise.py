"""jina-reranker-v3 (arXiv:2509.25085): one prompt holds a query and all its documents, each with a vector of its own.

The vectors are those of two tokens, which stand behind each document and behind the query, after a projector. Sizes and
wording are those of the code that its authors publish with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from anypool.adapters.multi_vector import MultiVectorRecipe, SideRecipe
from anypool.adapters.recipe import Recipe
from anypool.errors import CheckpointFormatError, ConfigError, UnsupportedArchitectureError
from anypool.model_executor.model_config import SLIDING, ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.pooling.heads import Dense

DOCUMENT_TOKEN, QUERY_TOKEN = "<|embed_token|>", "<|rerank_token|>"
# Longest texts in tokens, and most documents of a prompt.
QUERY_LENGTH, DOCUMENT_LENGTH, MOST_DOCUMENTS = 512, 2048, 125

_FIRST, _SECOND = "projector.0.weight", "projector.2.weight"
_BEFORE = (
    "<|im_start|>system\n"
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking.<|im_end|>\n"
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def with_listwise(recipe: Recipe, config: ModelConfig, *, in_windows: bool) -> Recipe:
    """The recipe of a listwise reranker; any other comes back as it is.

    Raises:
        UnsupportedArchitectureError: It is a later version, of which how long texts may be is not known here.
        ConfigError: Long texts are to be run in windows, and there is no part of a list that could be.
    """
    if config.family is None or not config.family.is_listwise:
        return recipe
    if SLIDING in config.layer_types:
        raise UnsupportedArchitectureError(
            f"{config.name}: a JinaForRanking with sliding layers is a later one than jina-reranker-v3, which is not "
            "supported"
        )
    if in_windows:
        raise ConfigError(
            f"PoolerConfig: enable_chunked_processing is not supported for {config.name}, which reads a list in one "
            "prompt"
        )
    both = SideRecipe()
    tokens = (DOCUMENT_TOKEN, QUERY_TOKEN)
    vectors = MultiVectorRecipe(library="Jina", queries=both, documents=both, only_tokens=tokens, similarity="listwise")
    return replace(recipe, multi_vector=vectors, normalize=False)


def read_projector(checkpoint: Checkpoint, in_features: int, *, name: str) -> tuple[nn.Sequential, int, frozenset[str]]:
    """Two products without bias and a ReLU between them; the size of its vectors; its tensors.

    Raises:
        CheckpointFormatError: A tensor is missing or of another shape.
    """
    stored = set(checkpoint.names())
    shapes = [checkpoint.shape(one) if one in stored else () for one in (_FIRST, _SECOND)]
    fits = all(len(shape) == 2 for shape in shapes) and shapes[0][1] == in_features and shapes[1][1] == shapes[0][0]
    if not fits:
        raise CheckpointFormatError(
            f"{name}: {_FIRST} and {_SECOND} have the shapes {[list(shape) for shape in shapes]}; expected are two "
            f"products, of which the first takes {in_features} numbers"
        )
    tensors = dict(checkpoint.tensors({_FIRST, _SECOND}))
    layers = []
    for tensor, activation in ((tensors[_FIRST], nn.ReLU()), (tensors[_SECOND], nn.Identity())):
        layer = Dense(tensor.shape[1], tensor.shape[0], bias=False, activation=activation)
        layer.linear.load_state_dict({"weight": tensor.float()})
        layers.append(layer)
    return nn.Sequential(*layers).requires_grad_(False), shapes[1][0], frozenset({_FIRST, _SECOND})


def render(query: str, documents: Sequence[str], instruction: str | None = None) -> str:
    """The prompt of a list. The two tokens are taken out of the texts, where they would pass for its own."""
    asked = _bare(query)
    passages = "".join(
        f'<passage id="{number}">\n{_bare(one)}{DOCUMENT_TOKEN}\n</passage>\n' for number, one in enumerate(documents)
    )
    return (
        f"{_BEFORE}I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank "
        f"the passages based on their relevance to query: {asked}\n"
        + (f"<instruct>\n{_bare(instruction)}\n</instruct>\n" if instruction else "")
        + f"{passages}<query>\n{asked}{QUERY_TOKEN}\n</query>{_AFTER}"
    )


def blocks(lengths: Sequence[int], query_length: int, window: int) -> list[range]:
    """Which documents share a prompt, one after the other.

    A prompt is full with 125 documents, or when the longest one that there may be would no longer fit into the window
    beside the query, which stands in it twice.

    Args:
        lengths: Of the documents in tokens.
        query_length: Of the query.
        window: Tokens that the model takes.
    """
    found, first, room = [], 0, window - 2 * query_length
    for index, length in enumerate(lengths):
        room -= length
        if index + 1 - first >= MOST_DOCUMENTS or room <= DOCUMENT_LENGTH:
            found.append(range(first, index + 1))
            first, room = index + 1, window - 2 * query_length
    return [*found, range(first, len(lengths))] if first < len(lengths) else found


def _bare(text: str) -> str:
    while DOCUMENT_TOKEN in text or QUERY_TOKEN in text:  # what is left may be one again
        text = text.replace(QUERY_TOKEN, "").replace(DOCUMENT_TOKEN, "")
    return text
