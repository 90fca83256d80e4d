"""From what the user asked for to a pooling model in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from anypool.adapters.colpali_engine import find_wording
from anypool.adapters.facts import ModelFacts
from anypool.adapters.head_choice import Beside, choose_template, find_beside, primary_task, refuse_unread_template
from anypool.adapters.heads import Head
from anypool.adapters.late_interaction import build_token_head
from anypool.adapters.layer_weights import mix_layers
from anypool.adapters.lora import LoRAModel, merge, rank_of
from anypool.adapters.lora_places import Places
from anypool.adapters.module_head import build_head
from anypool.adapters.multi_vector import MultiVector, Vocabulary, serve_token_vectors, token_vector_defaults
from anypool.adapters.opened import OpenedModel, open_model
from anypool.adapters.peft_repository import with_heads
from anypool.adapters.placement import pick_device, pick_dtype
from anypool.adapters.pooling_model import as_pooling_model, score_poolers
from anypool.adapters.quantization import Quantization, quantize, require_int8
from anypool.adapters.recipe import Recipe
from anypool.adapters.rerank_templates import RerankTemplate
from anypool.adapters.settings import Setting, pooling_defaults, resolve_settings
from anypool.adapters.sparse import Backing, SparseHead
from anypool.adapters.task_adapters import read_task_adapters
from anypool.config import EngineConfig, PoolerConfig
from anypool.errors import CheckpointFormatError, ConfigError
from anypool.model_executor.degrees import require_degree
from anypool.model_executor.distributed import ranks
from anypool.model_executor.layers.lora import LoRASlots
from anypool.model_executor.layers.packing import pack_linears
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import is_pooling_model, load_backbone
from anypool.model_executor.registry import ModelRegistry
from anypool.model_executor.stages import keep_stage, require_stages
from anypool.model_executor.weights.checkpoint import Checkpoint, open_checkpoint
from anypool.model_executor.weights.loading import construct
from anypool.model_executor.weights.lora import PeftAdapter
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.methods import PoolingType
from anypool.pooling.plan import PoolingDefaults
from anypool.pooling.pooler import EmbedPooler, Pooler
from anypool.pooling.routed import RoutedEmbedPooler
from anypool.pooling.tasks import PoolingTask


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A pooling model ready to run.

    Attributes:
        model: The pooling model, in memory.
        facts: What is known about it, for those who do not run it.
        config: What config.json says.
        recipe: What the sentence-transformers files say.
        pooler_config: What the user says.
        head: What gives scores; None where there is none.
        sparse: What gives sparse vectors; None where there is none.
        rerank_template: How a query and a document become a prompt, for rerankers that read prompts.
        defaults: What a request gets where it asks for nothing.
        settings: Pooling settings by name, each with who decided it.
        device, dtype: Where and in what the backbone runs.
        quantization: What was quantised and how close it is; None where nothing was.
        multi_vector: How queries and documents are read, where the checkpoint is about token vectors.
        lora: The model as one that takes LoRA adapters; None where requests may name none.
    """

    model: nn.Module
    facts: ModelFacts
    repository: Repository
    config: ModelConfig
    recipe: Recipe
    pooler_config: PoolerConfig
    head: Head | None
    sparse: SparseHead | None
    rerank_template: RerankTemplate | None
    defaults: PoolingDefaults
    settings: Mapping[str, Setting]
    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None = None
    multi_vector: MultiVector | None = None
    lora: LoRAModel | None = None


@dataclass(frozen=True, kw_only=True)
class _Vectors:
    """What follows pooling, down to vectors.

    Attributes:
        types: How rows are pooled.
        dense: What follows them.
        size: Of the vectors.
        multi_vector, token_head: How token vectors are made, and the modules over each, where the checkpoint is about
            these.
        claimed: The backbone's tensors that the modules hold.
    """

    types: tuple[PoolingType, ...]
    dense: nn.Sequential
    size: int
    multi_vector: MultiVector | None = None
    token_head: nn.Module | None = None
    claimed: frozenset[str] = frozenset()


def load_pooling_model(
    engine: EngineConfig,
    opened: OpenedModel | None = None,
    *,
    token_id: Callable[[str], int] | None = None,
    encode: Callable[[Sequence[str]], list[list[int]]] | None = None,
    vocabulary: Vocabulary | None = None,
) -> LoadedModel:
    """Loads a checkpoint as a pooling model.

    Args:
        engine: What to load and how.
        opened: The checkpoint, where it has been opened already.
        token_id: The tokenizer's id of a token, for heads made of LM-head rows.
        encode: The tokenizer's ids of texts, for comparing a quantised model with itself before.
        vocabulary: The tokenizer, for checkpoints that name tokens.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint.
    """
    opened = opened or open_model(engine)
    user, config = engine.pooler_config or PoolerConfig(), opened.config
    model_cls = _model_class(engine, opened, user)
    device = pick_device(engine.device)
    dtype = pick_dtype(engine.dtype, config, device, quantized=engine.quantization is not None)
    if engine.quantization is not None:
        require_int8(device, dtype)
    checkpoint = with_heads(open_checkpoint(opened.backbone.base or opened.backbone), opened.adapters)
    beside = Beside() if is_pooling_model(model_cls) else find_beside(engine, opened, checkpoint, user, token_id)
    if beside.bge_m3 is not None and opened.recipe.types is None:
        opened = replace(opened, recipe=replace(opened.recipe, types=(PoolingType.CLS,), normalize=True))
    recipe = opened.recipe
    model = _construct(engine, opened, model_cls, beside)
    elsewhere = keep_stage(model, ranks(), keep_first=beside.sparse is not None)
    settings = resolve_settings(type(model), config, recipe, user, beside.head, is_sparse=beside.sparse is not None)
    vectors = _vectors(opened, settings["pooling_type"].value, checkpoint, vocabulary)
    how: dict[str, Any] = {"device": device, "dtype": dtype, "claimed": beside.claimed | vectors.claimed}
    _fill(model, opened, checkpoint, elsewhere, progress=engine.use_tqdm_on_load, **how)
    if is_pooling_model(model_cls):
        vectors = replace(vectors, size=getattr(model, "embedding_size", config.hidden_size))
    else:
        _install_poolers(model, opened, vectors, beside, settings, user, device=device, dtype=dtype)
    model.eval()
    claimed = beside.claimed | vectors.claimed
    tasks = read_task_adapters(opened.backbone, config, checkpoint)
    lora = _take_adapters(engine, model, opened, beside, claimed, tasks, dtype=dtype, device=device)
    quantization = None
    if engine.quantization is not None:
        compared = (PoolingType.MEAN,) if is_pooling_model(model_cls) else vectors.types
        quantization = _quantize(engine, model, opened, compared, encode)
    defaults = _defaults(model, opened, settings, vectors, beside, user)
    if engine.chat_template is not None:
        refuse_unread_template(model, config, defaults)
    return LoadedModel(
        model=model,
        facts=ModelFacts.of(model, beside.head, device=device, dtype=dtype),
        repository=opened.repository,
        config=config,
        recipe=recipe,
        pooler_config=user,
        head=beside.head,
        sparse=beside.sparse,
        rerank_template=choose_template(engine, opened, beside.head, beside.manifest),
        defaults=defaults,
        settings=settings,
        device=device,
        dtype=dtype,
        quantization=quantization,
        multi_vector=vectors.multi_vector,
        lora=lora,
    )


def _model_class(engine: EngineConfig, opened: OpenedModel, user: PoolerConfig) -> type[nn.Module]:
    """The backbone's class; an error where what the user asks for contradicts it."""
    config, recipe = opened.config, opened.recipe
    model_cls = ModelRegistry.resolve_model_cls(config, model_impl=engine.model_impl)
    require_degree(model_cls, config, ranks().tp_size)
    require_stages(model_cls, config, ranks().pp_size)
    _refuse_in_stages(engine, recipe)
    own_pooler = is_pooling_model(model_cls)
    if engine.convert == "none" and not own_pooler:
        raise ConfigError(
            f"convert='none': {model_cls.__name__} is not a pooling model; use convert='auto' or convert='embed'"
        )
    if own_pooler and user.pooling_types is not None:
        raise ConfigError(
            f"PoolerConfig: pooling_type={'+'.join(user.pooling_types)!r} has no effect: "
            f"{model_cls.__name__} has a pooler of its own"
        )
    if recipe.multi_vector is not None and engine.convert in ("embed", "reward") and user.pooling_types is None:
        raise ConfigError(
            f"convert={engine.convert!r}: {config.name} gives a vector per token; for one per text say how it is "
            "pooled, pooler_config=PoolerConfig(pooling_type='MEAN')"
        )
    find_wording(config)  # which is an error where it is not known
    return model_cls


def _refuse_in_stages(engine: EngineConfig, recipe: Recipe) -> None:
    """Refuses what needs a whole model, where this process has a stage of it."""
    stages = ranks().pp_size
    if stages > 1 and recipe.layer_weights is not None:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: WeightedLayerPooling needs the hidden states of all layers in one "
            "process; leave it at 1"
        )
    if stages > 1 and engine.quantization is not None:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: quantization={engine.quantization!r} compares a whole model with itself "
            "before; use tensor_parallel_size, or leave quantization out"
        )


def _construct(engine: EngineConfig, opened: OpenedModel, model_cls: type[nn.Module], beside: Beside) -> Any:
    """The pooling model, without weights yet."""
    config = opened.config
    is_multi_vector = opened.recipe.multi_vector is not None
    task = PoolingTask.TOKEN_EMBED if is_multi_vector else primary_task(beside.head, beside.sparse, engine.convert)
    try:
        pooling_cls: Any = as_pooling_model(model_cls, task)
    except TypeError as error:
        raise ConfigError(f"{config.architecture} cannot be loaded: {error}") from error
    arguments = (config,) if is_pooling_model(model_cls) else (config, beside.head)
    return construct(lambda: pooling_cls(*arguments))


def _vectors(
    opened: OpenedModel, types: tuple[PoolingType, ...], checkpoint: Checkpoint, vocabulary: Vocabulary | None
) -> _Vectors:
    """What the recipe puts behind pooling, loaded."""
    repository, config, recipe = opened.repository, opened.config, opened.recipe
    dense, size = build_head(repository, recipe.modules, config.hidden_size * len(types))
    if recipe.multi_vector is None:
        return _Vectors(types=types, dense=dense, size=size)
    multi_vector = MultiVector.resolve(recipe.multi_vector, vocabulary, name=config.name)
    token_head, size, claimed = build_token_head(
        repository, recipe.multi_vector, config.hidden_size, checkpoint, name=config.name
    )
    return _Vectors(
        types=types, dense=dense, size=size, multi_vector=multi_vector, token_head=token_head, claimed=claimed
    )


def _fill(model: Any, opened: OpenedModel, checkpoint: Checkpoint, elsewhere: frozenset[str], **how: Any) -> None:
    """Reads the backbone's weights, and puts them as the device multiplies them best."""
    if hasattr(model, "load"):
        model.load(opened.backbone, **how)
    else:
        load_backbone(model, checkpoint, name=opened.config.name, elsewhere=elsewhere, **how)
    pack_linears(model, leave=_heads(model))
    if opened.recipe.layer_weights is not None:
        mix_layers(model, opened.config, opened.repository, opened.recipe.layer_weights, how["device"])


def _install_poolers(
    model: Any,
    opened: OpenedModel,
    vectors: _Vectors,
    beside: Beside,
    settings: Mapping[str, Setting],
    user: PoolerConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Gives a backbone that has no pooler of its own one for each task that its checkpoint has a head for."""
    types, dense, size, head, sparse = vectors.types, vectors.dense, vectors.size, beside.head, beside.sparse
    if vectors.multi_vector is not None and vectors.token_head is not None:
        serve_token_vectors(model, vectors.multi_vector, vectors.token_head.to(device), types=types)
    else:
        model.pooler.install(PoolingTask.EMBED, _embed_pooler(opened, types, dense, size).to(device))
        if head is not None:
            head.module.to(device)
            for task, pooler in score_poolers(head, types=settings["score_pooling_type"].value).items():
                model.pooler.install(task, pooler)
    if sparse is not None:
        backing = Backing(model=model, types=types, dense=dense, size=size, device=device, dtype=dtype)
        model.pooler.install(PoolingTask.SPARSE_EMBED, sparse.build(backing))
        if sparse.is_alone and user.pooling_types is None:
            model.pooler.remove(PoolingTask.EMBED)
    if beside.bge_m3 is not None:
        for task, pooler in beside.bge_m3.poolers.items():
            model.pooler.install(task, pooler.to(device))


def _take_adapters(
    engine: EngineConfig,
    model: Any,
    opened: OpenedModel,
    beside: Beside,
    claimed: frozenset[str],
    tasks: Mapping[str, PeftAdapter],
    **how: Any,
) -> LoRAModel | None:
    """Merges the adapters of a checkpoint, and makes room for those of its tasks and of requests."""
    if not (opened.adapters or engine.enable_lora or tasks):
        return None
    config = opened.config
    places = Places(model, head=beside.head, recipe=opened.recipe, claimed=claimed)
    if not places.are_linear:
        raise ConfigError(f"{config.name} has no linear layers that LoRA could be added to: leave it out")
    for adapter in opened.adapters:
        merge(places, adapter)
    room, rank = (engine.max_loras, engine.max_lora_rank) if engine.enable_lora else (0, 1)
    if not (room or tasks):
        return None
    lora = LoRAModel(model, places, LoRASlots(len(tasks) + room, max(rank, *map(rank_of, tasks.values()), 0), **how))
    lora.keep(tasks)
    return lora


def _quantize(
    engine: EngineConfig,
    model: Any,
    opened: OpenedModel,
    types: tuple[PoolingType, ...],
    encode: Callable[[Sequence[str]], list[list[int]]] | None,
) -> Quantization:
    """Quantises the linear layers, and compares the pooled states of `types` with those before."""
    return quantize(
        model,
        opened.config,
        leave=_heads(model),
        types=(PoolingType.MEAN,) if PoolingType.ALL in types else types,
        encode=encode,
        minimum=engine.min_quantized_cosine,
    )


def _defaults(
    model: Any,
    opened: OpenedModel,
    settings: Mapping[str, Setting],
    vectors: _Vectors,
    beside: Beside,
    user: PoolerConfig,
) -> PoolingDefaults:
    """What a request gets where it asks for nothing."""
    sparse = next((one.sparse for one in (beside.bge_m3, beside.sparse) if one is not None), None)
    defaults = pooling_defaults(model, opened.config, settings, vectors.size, user, beside.head, sparse)
    router = opened.recipe.router
    if router is not None and router.heads:
        defaults = replace(defaults, sides=frozenset(router.heads))
    if vectors.multi_vector is not None:
        defaults = replace(defaults, token_vectors=token_vector_defaults(vectors.multi_vector, defaults))
    return defaults


def _embed_pooler(opened: OpenedModel, types: tuple[PoolingType, ...], dense: nn.Sequential, size: int) -> Pooler:
    """The pooler of dense vectors, with a head for each side where the checkpoint's router has several."""
    router = opened.recipe.router
    heads = {} if router is None else router.heads
    if not heads:
        return EmbedPooler(types, dense)
    found = {}
    for side, modules in heads.items():
        in_features = opened.config.hidden_size * len(types)
        found[side], out_features = build_head(opened.repository, modules, in_features)
        if out_features != size:
            raise CheckpointFormatError(
                f"{opened.repository.name}: the routes give vectors of {size} and of {out_features} numbers, which "
                "cannot be compared"
            )
    return RoutedEmbedPooler(types, found)


def _heads(model: Any) -> Iterable[nn.Module]:
    """The modules of the pooler, which are computed as they are."""
    return model.pooler.modules() if isinstance(model.pooler, nn.Module) else ()
