"""How a checkpoint makes vectors or scores, whatever files say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anypool.adapters.layer_weights import LayerWeights
from anypool.adapters.multi_vector import MultiVectorRecipe
from anypool.adapters.router import RouterRecipe
from anypool.adapters.sparse_recipe import SparseRecipe
from anypool.adapters.static import StaticRecipe
from anypool.model_executor.families import Family, SkipRule
from anypool.pooling.methods import PoolingType


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a checkpoint's vectors or scores are made, as its sentence-transformers files say.

    Attributes:
        is_cross_encoder: Whether it scores pairs of texts.
        backbone: Folder of the transformer inside the checkpoint.
        types: Pooling types; None where no file says.
        include_prompt: Whether tokens of a prompt take part in pooling.
        skip_rule: How many leading tokens a prompt that is not pooled takes.
        modules: (type, path, config) of what follows pooling, the closing Normalize left out.
        normalize: Whether vectors are normalised at the end; None where no file says.
        prompts: Text put before an input, by name.
        default_prompt_name: The prompt used where none is asked for.
        tasks: The checkpoint's own adapter that comes with a prompt, by the name of the prompt.
        max_seq_length: Longest input in tokens, special ones included.
        do_lower_case: Whether text is lower-cased first.
        truncate_dim: How many dimensions are kept by default.
        similarity_fn_name: How vectors are meant to be compared.
        score_activation: Dotted path of the activation that a CrossEncoder was saved with.
        answer_ids: Tokens whose logits give a CrossEncoder's score: false and true, or true alone.
        score_modules: (type, path, config) of what turns a CrossEncoder's pooled row into scores.
        message_format: "flat" or "structured" where texts, or a CrossEncoder's pairs, go through the chat template.
        template_variables: What that template sees beside them.
        router: Which way queries and documents go, where they go different ones.
        sparse: What makes sparse vectors of a SparseEncoder.
        max_active_dims: How many of their weights are kept; None for all, or for what `sparse` says.
        multi_vector: How token vectors are made, where the checkpoint is about these.
        static: How texts are read where the backbone is a table of token vectors.
        layer_weights: Whose hidden states are pooled, where these are not the last layer's alone.
    """

    is_cross_encoder: bool = False
    backbone: str = ""
    types: tuple[PoolingType, ...] | None = None
    include_prompt: bool = True
    skip_rule: SkipRule = "prompt"
    modules: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()
    normalize: bool | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    tasks: Mapping[str, str] = field(default_factory=dict)
    max_seq_length: int | None = None
    do_lower_case: bool = False
    truncate_dim: int | None = None
    similarity_fn_name: str | None = None
    score_activation: str | None = None
    answer_ids: tuple[int, ...] = ()
    score_modules: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()
    message_format: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    router: RouterRecipe | None = None
    sparse: SparseRecipe | None = None
    max_active_dims: int | None = None
    multi_vector: MultiVectorRecipe | None = None
    static: StaticRecipe | None = None
    layer_weights: LayerWeights | None = None


def recipe_of_family(recipe: Recipe, family: Family) -> Recipe:
    """What a family does where its files say nothing. Files that say how to pool are taken at their word."""
    if recipe.types is not None or family.types is None:
        return recipe
    return replace(
        recipe,
        types=family.types,
        include_prompt=family.include_prompt,
        skip_rule=family.skip_rule,
        normalize=family.normalize,
        prompts={**recipe.prompts, **family.prompts},
        default_prompt_name=recipe.default_prompt_name or family.default_prompt_name,
    )
