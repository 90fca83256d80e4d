"""A classifier out of rows of the LM head: yes/no rerankers, and process-reward models that answer with a token.

Only the rows that are asked for are read. The names of keys and methods in config.json are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from anypool.adapters.heads import Head, HeadRecipe
from anypool.adapters.rerank_templates import Manifest
from anypool.errors import CheckpointFormatError, ConfigError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.pooling.heads import LMHeadRows
from anypool.pooling.methods import PoolingType

TWO_WAY_SOFTMAX = "from_2_way_softmax"
NO_POST_PROCESSING = "no_post_processing"
_METHODS = (TWO_WAY_SOFTMAX, NO_POST_PROCESSING)

_LM_HEADS = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight", "output.weight")
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "model.decoder.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    "language_model.model.embed_tokens.weight",
)


def head_from_config(config: ModelConfig, checkpoint: Checkpoint, token_id: Callable[[str], int] | None) -> Head | None:
    """The head that `classifier_from_token` and `method` in config.json or `hf_overrides` describe, or None.

    Raises:
        ConfigError: They contradict each other, a token is unknown, or there is no tokenizer to look tokens up in.
    """
    tokens = config.head.classifier_from_token
    method = config.head.method or (TWO_WAY_SOFTMAX if config.head.is_original_qwen3_reranker else None)
    if not tokens and method is None:
        return None
    if method not in _METHODS:
        raise ConfigError(f"method={method!r} is unknown for classifier_from_token; known: {', '.join(_METHODS)}")
    if not tokens:
        raise ConfigError(f"method={method!r} needs classifier_from_token, the tokens whose rows are the classifier")
    if method == TWO_WAY_SOFTMAX and len(tokens) != 2:
        raise ConfigError(
            f"method={TWO_WAY_SOFTMAX!r} takes two tokens [false, true]; classifier_from_token has {list(tokens)}"
        )
    if token_id is None:
        raise ConfigError("classifier_from_token needs the model's tokenizer, and none is loaded")
    token_ids = [token_id(token) for token in tokens]
    if len(set(token_ids)) < len(token_ids):
        raise ConfigError(
            f"classifier_from_token has {list(tokens)}, which are the tokens {token_ids}: one stands twice"
        )
    return rows_head(config, checkpoint, token_ids, difference=method == TWO_WAY_SOFTMAX)


def manifest_head(
    config: ModelConfig, checkpoint: Checkpoint, manifest: Manifest, token_id: Callable[[str], int]
) -> Head:
    """The head of a known reranker that is saved as a plain causal LM."""
    token_ids = [token_id(token) for token in manifest.tokens]
    head = rows_head(config, checkpoint, token_ids, difference=len(token_ids) == 2)
    return replace(head, activation=manifest.activation)


def rows_head(
    config: ModelConfig,
    checkpoint: Checkpoint,
    token_ids: Sequence[int],
    *,
    difference: bool = False,
    token_level: bool = False,
) -> Head:
    """A head of the LM head's rows for some tokens.

    Args:
        config: The checkpoint's configuration.
        checkpoint: Its tensors.
        token_ids: The tokens, one column each.
        difference: For two tokens [false, true], one column: true minus false.
        token_level: Whether it gives a row per token of the text.

    Raises:
        CheckpointFormatError: The checkpoint has neither an LM head nor an embedding that is tied to one.
        ConfigError: A token id is outside the vocabulary.
    """
    names = set(checkpoint.names())
    stored = next((name for name in _LM_HEADS if name in names), None)
    if stored is None and config.tie_word_embeddings:
        stored = next((name for name in _EMBEDDINGS if name in names), None)
    if stored is None:
        raise CheckpointFormatError(
            f"{config.name}: there is no LM head to take rows from: none of {', '.join(_LM_HEADS)} is there"
            + ("" if config.tie_word_embeddings else ", and the input embedding is not tied to one")
        )
    vocabulary, hidden = checkpoint.shape(stored)
    for token in token_ids:
        if not 0 <= token < vocabulary:
            raise ConfigError(f"{config.name}: the LM head has rows 0 to {vocabulary - 1}, and not {token}")
    bias = stored.removesuffix("weight") + "bias"
    module = LMHeadRows(
        hidden,
        len(token_ids),
        bias=bias in names,
        scale=config.head.logit_scale,
        softcap=config.final_softcap,
        difference=difference,
    )
    with torch.no_grad():
        module.linear.weight.copy_(checkpoint.rows(stored, token_ids))
        if bias in names:
            module.linear.bias.copy_(checkpoint.rows(bias, token_ids))
    return Head(
        module=module.requires_grad_(False),
        recipe=HeadRecipe(layers=(), pooling=PoolingType.LAST, token_level=token_level),
        labels=module.out_features,
    )
