"""Which heads a model gets beside its backbone, and the template in which a reranker reads pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from anypool.adapters.bge_m3 import BgeM3, find_bge_m3
from anypool.adapters.cross_encoder import score_head
from anypool.adapters.heads import Head, find_head
from anypool.adapters.lm_head_rows import head_from_config, manifest_head, rows_head
from anypool.adapters.opened import OpenedModel
from anypool.adapters.rerank_templates import (
    ChatTemplate,
    Manifest,
    RerankTemplate,
    find_manifest,
    names_both_roles,
    own_template,
    read_template,
)
from anypool.adapters.sparse import SparseHead, find_sparse_head
from anypool.config import EngineConfig, PoolerConfig
from anypool.errors import CheckpointFormatError, ConfigError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.pooling.plan import PoolingDefaults
from anypool.pooling.tasks import PoolingTask


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What a checkpoint has beside its backbone.

    Attributes:
        manifest: Of a known reranker.
        head: What gives scores.
        sparse, bge_m3: What gives sparse vectors; the latter token vectors as well.
        claimed: The backbone's tensors that these hold.
    """

    manifest: Manifest | None = None
    head: Head | None = None
    sparse: SparseHead | None = None
    bge_m3: BgeM3 | None = None
    claimed: frozenset[str] = frozenset()


def find_beside(
    engine: EngineConfig,
    opened: OpenedModel,
    checkpoint: Checkpoint,
    user: PoolerConfig,
    token_id: Callable[[str], int] | None,
) -> Beside:
    """The heads of a checkpoint whose backbone has no pooler of its own."""
    config, recipe, repository = opened.config, opened.recipe, opened.repository
    manifest = find_manifest(config, answers=recipe.answer_ids, token_id=token_id)
    head = _choose_head(engine, opened, checkpoint, user, manifest, token_id)
    sparse = find_sparse_head(repository, recipe, config, checkpoint, convert=engine.convert)
    only_embeds = engine.convert == "embed"
    return Beside(
        manifest=manifest,
        head=None if only_embeds else head,
        sparse=sparse,
        bge_m3=None if only_embeds else find_bge_m3(repository, config, token_id),
        claimed=frozenset().union(*(one.tensors for one in (head, sparse) if one is not None)),
    )


def primary_task(head: Head | None, sparse: SparseHead | None, convert: str) -> PoolingTask:
    """The task that the model's class is named after."""
    if sparse is not None and sparse.is_alone:
        return PoolingTask.SPARSE_EMBED
    if head is None:
        return PoolingTask.REWARD if convert == "reward" else PoolingTask.EMBED
    if head.is_reward or convert == "reward":
        return PoolingTask.REWARD
    return PoolingTask.TOKEN_CLASSIFY if head.recipe.token_level else PoolingTask.CLASSIFY


def _choose_head(
    engine: EngineConfig,
    opened: OpenedModel,
    checkpoint: Checkpoint,
    user: PoolerConfig,
    manifest: Manifest | None,
    token_id: Callable[[str], int] | None,
) -> Head | None:
    """The head of the checkpoint, or one made of LM-head rows where its files or the user ask for that."""
    config, recipe = opened.config, opened.recipe
    head = head_from_config(config, checkpoint, token_id) or find_head(config, checkpoint)
    head = head or score_head(opened.repository, recipe, config, checkpoint)
    if head is None and manifest is not None and token_id is not None and engine.convert != "embed":
        head = manifest_head(config, checkpoint, manifest, token_id)
    if head is None and recipe.is_cross_encoder and engine.convert != "embed":
        raise CheckpointFormatError(
            f"{config.name} is a CrossEncoder, and {config.architecture} has no classification head; name the tokens "
            "whose logits are the score with hf_overrides={'classifier_from_token': [false, true], "
            "'method': 'from_2_way_softmax'}"
        )
    if head is None and user.returned_token_ids is not None:
        head = rows_head(config, checkpoint, user.returned_token_ids, token_level=True)
    if head is None and engine.convert == "classify":
        raise ConfigError(
            f"convert='classify': {config.name} has no classification head. Load a checkpoint saved as "
            "...ForSequenceClassification or ...ForTokenClassification, or make a head from rows of the LM head with "
            "hf_overrides={'classifier_from_token': [...], 'method': 'no_post_processing'}"
        )
    return head


def choose_template(
    engine: EngineConfig, opened: OpenedModel, head: Head | None, manifest: Manifest | None
) -> RerankTemplate | None:
    """The user's template; else, where the model scores texts, its files' own or the known reranker's.

    A chat template that comes with a checkpoint's tokenizer is taken where the checkpoint says that its pairs go
    through it, or where it is made for pairs; any other is about conversations.
    """
    if engine.chat_template is not None:
        return ChatTemplate(engine.chat_template)
    if head is None or head.recipe.token_level:
        return None
    recipe, backbone = opened.recipe, opened.backbone
    if recipe.message_format is not None and recipe.is_cross_encoder:
        in_parts = recipe.message_format == "structured"
        stated = own_template(backbone, in_parts=in_parts, variables=recipe.template_variables)
        if stated is None:
            raise CheckpointFormatError(f"{backbone.name} puts pairs into a chat template, and there is none")
        return stated
    if manifest is not None or head.is_reward or head.labels != 1:
        return manifest
    text = read_template(backbone)
    return own_template(backbone) if text is not None and names_both_roles(text) else None


def refuse_unread_template(model: nn.Module, config: ModelConfig, defaults: PoolingDefaults) -> None:
    scores = defaults.scores.get(PoolingTask.CLASSIFY)
    if scores is None or scores.columns != 1 or getattr(model, "score_type", None) == "late-interaction":
        raise ConfigError(
            f"chat_template has no meaning for {config.name}: it is the prompt of a pair of texts, and this model has "
            "no head of one label that reads one; leave it out"
        )
