"""From what the user asked for to a pooling model in memory."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from anypool.adapters.bge_m3 import find_bge_m3
from anypool.adapters.colpali_engine import find_wording, with_base
from anypool.adapters.dense_choice import choose_dense, dense_folders
from anypool.adapters.heads import Head, find_head
from anypool.adapters.late_interaction import build_token_head, read_late_interaction
from anypool.adapters.layer_weights import mix_layers
from anypool.adapters.lm_head_rows import head_from_config, manifest_head, rows_head
from anypool.adapters.lora import LoRAModel, merge
from anypool.adapters.lora_places import Places
from anypool.adapters.multi_vector import MultiVector, Vocabulary, serve_token_vectors, token_vector_defaults
from anypool.adapters.peft_repository import base_of, classifier_of, open_adapter, refuse_another_model, with_heads
from anypool.adapters.pooling_model import as_pooling_model, score_poolers
from anypool.adapters.quantization import Quantization, quantize, require_int8
from anypool.adapters.rerank_templates import (
    ChatTemplate,
    Manifest,
    RerankTemplate,
    find_manifest,
    names_both_roles,
    own_template,
    read_template,
)
from anypool.adapters.sentence_transformers import Recipe, build_head, read_recipe, recipe_of_family, score_head
from anypool.adapters.settings import Setting, pooling_defaults, resolve_settings
from anypool.adapters.sparse import Backing, SparseHead, find_sparse_head
from anypool.config import EngineConfig, PoolerConfig
from anypool.errors import CheckpointFormatError, ConfigError
from anypool.model_executor.layers.lora import LoRASlots
from anypool.model_executor.layers.packing import pack_linears
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import is_pooling_model, load_backbone
from anypool.model_executor.models.static import table_size
from anypool.model_executor.registry import ModelRegistry
from anypool.model_executor.weights.checkpoint import Checkpoint, open_checkpoint
from anypool.model_executor.weights.loading import construct
from anypool.model_executor.weights.lora import CONFIG as ADAPTER
from anypool.model_executor.weights.lora import PeftAdapter
from anypool.model_executor.weights.repository import TOKENIZER_FILES, Repository
from anypool.pooling.methods import PoolingType
from anypool.pooling.plan import PoolingDefaults
from anypool.pooling.pooler import EmbedPooler, Pooler
from anypool.pooling.routed import RoutedEmbedPooler
from anypool.pooling.tasks import PoolingTask

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A pooling model ready to run.

    Attributes:
        model: The pooling model, in memory.
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
class OpenedModel:
    """A checkpoint whose small files have been read, before its weights are.

    Attributes:
        repository: All its files.
        backbone: Those of the transformer, which may lie in a folder of their own.
        config: What config.json says.
        recipe: What the sentence-transformers files say.
        tokenizer: Where the tokenizer is, where the user names no other.
        adapters: LoRA adapters that are merged into it.
    """

    repository: Repository
    backbone: Repository
    config: ModelConfig
    recipe: Recipe
    tokenizer: Repository
    adapters: tuple[PeftAdapter, ...] = ()


def open_model(engine: EngineConfig) -> OpenedModel:
    """Finds a checkpoint, fetches it where it is a hub id, and reads its small files."""
    repository = Repository.open(engine.model, revision=engine.revision, cache_dir=engine.download_dir)
    repository = with_base(repository, cache_dir=engine.download_dir)
    recipe = read_late_interaction(repository) or read_recipe(repository)
    backbone = tokenizer = repository.subfolder(recipe.backbone)
    adapters: list[PeftAdapter] = []
    if backbone.base is None and backbone.exists(ADAPTER):
        adapters.append(PeftAdapter.read(backbone))
        base = base_of(adapters[0], cache_dir=engine.download_dir)
        base_recipe = read_late_interaction(base) or read_recipe(base)
        if not repository.exists("modules.json"):
            repository, recipe = base, base_recipe
        backbone = base.subfolder(base_recipe.backbone)
        refuse_another_model(tokenizer, backbone)
        tokenizer = tokenizer if any(map(tokenizer.exists, TOKENIZER_FILES)) else backbone
    if engine.lora is not None:
        adapters.append(open_adapter(Repository.open(engine.lora, cache_dir=engine.download_dir)))
    overrides = {**classifier_of(adapters, backbone), **(engine.hf_overrides or {})} or None
    if recipe.multi_vector is not None and recipe.multi_vector.projection is not None:
        overrides = {"architectures": [], **(overrides or {})}  # the one there is stands for any backbone
    if recipe.static is not None:
        config = ModelConfig.of_table(repository.name, table_size(backbone), overrides=overrides)
    else:
        config = ModelConfig.from_pretrained(backbone, overrides=overrides, trust_remote_code=engine.trust_remote_code)
    if config.family is not None:
        recipe = recipe_of_family(recipe, config.family)
    folders = dense_folders(repository, recipe)
    if folders:
        config = config.replace(is_matryoshka=False)
        asked = None if engine.pooler_config is None else engine.pooler_config.dimensions
        recipe = recipe if asked is None else choose_dense(repository, recipe, folders, asked)
    return OpenedModel(
        repository=repository,
        backbone=backbone,
        config=config,
        recipe=recipe,
        tokenizer=tokenizer,
        adapters=tuple(adapters),
    )


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
    config, recipe, user = opened.config, opened.recipe, engine.pooler_config or PoolerConfig()
    model_cls: Any = ModelRegistry.resolve_model_cls(config, model_impl=engine.model_impl)
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
    device = pick_device(engine.device)
    dtype = pick_dtype(engine.dtype, config, device, quantized=engine.quantization is not None)
    if engine.quantization is not None:
        require_int8(device, dtype)
    find_wording(config)  # which is an error where it is not known
    checkpoint = with_heads(open_checkpoint(opened.backbone.base or opened.backbone), opened.adapters)
    manifest = find_manifest(config, answers=recipe.answer_ids, token_id=token_id)
    head = None if own_pooler else _head(engine, opened, checkpoint, user, manifest, token_id)
    sparse = None
    if not own_pooler:
        sparse = find_sparse_head(opened.repository, recipe, config, checkpoint, convert=engine.convert)
    bge_m3 = None if own_pooler or engine.convert == "embed" else find_bge_m3(opened.repository, config, token_id)
    if bge_m3 is not None and recipe.types is None:
        recipe = replace(recipe, types=(PoolingType.CLS,), normalize=True)
    claimed = frozenset().union(*(one.tensors for one in (head, sparse) if one is not None))
    if engine.convert == "embed":
        head = None
    task = PoolingTask.TOKEN_EMBED if recipe.multi_vector is not None else _primary_task(head, sparse, engine.convert)
    try:
        pooling_cls: Any = as_pooling_model(model_cls, task)
    except TypeError as error:
        raise ConfigError(f"{config.architecture} cannot be loaded: {error}") from error
    model: Any = construct(lambda: pooling_cls(config) if own_pooler else pooling_cls(config, head))
    settings = resolve_settings(pooling_cls, config, recipe, user, head, is_sparse=sparse is not None)
    types = settings["pooling_type"].value
    dense, size = build_head(opened.repository, recipe.modules, config.hidden_size * len(types))
    multi_vector = None
    if recipe.multi_vector is not None:
        multi_vector = MultiVector.resolve(recipe.multi_vector, vocabulary, name=config.name)
        token_head, size, projection = build_token_head(
            opened.repository, recipe.multi_vector, config.hidden_size, checkpoint, name=config.name
        )
        claimed |= projection
    progress = engine.use_tqdm_on_load
    if hasattr(model, "load"):
        model.load(opened.backbone, device=device, dtype=dtype, claimed=claimed, progress=progress)
    else:
        load_backbone(
            model, checkpoint, name=config.name, device=device, dtype=dtype, claimed=claimed, progress=progress
        )
    pack_linears(model, leave=_heads(model))
    if recipe.layer_weights is not None:
        mix_layers(model, config, opened.repository, recipe.layer_weights, device)
    if own_pooler:
        size = getattr(model, "embedding_size", config.hidden_size)
    elif multi_vector is not None:
        serve_token_vectors(model, multi_vector, token_head.to(device), types=types)
    else:
        model.pooler.install(PoolingTask.EMBED, _embed_pooler(opened, recipe, types, dense, size).to(device))
        if head is not None:
            head.module.to(device)
            for task, pooler in score_poolers(head, types=settings["score_pooling_type"].value).items():
                model.pooler.install(task, pooler)
    if sparse is not None:
        backing = Backing(model=model, types=types, dense=dense, size=size, device=device, dtype=dtype)
        model.pooler.install(PoolingTask.SPARSE_EMBED, sparse.build(backing))
        if sparse.is_alone and user.pooling_types is None:
            model.pooler.remove(PoolingTask.EMBED)
    if bge_m3 is not None:
        for task, pooler in bge_m3.poolers.items():
            model.pooler.install(task, pooler.to(device))
    model.eval()
    lora = None
    if opened.adapters or engine.enable_lora:
        places = Places(model, head=head, recipe=recipe, claimed=claimed)
        if not places.are_linear:
            raise ConfigError(f"{config.name} has no linear layers that LoRA could be added to: leave it out")
        for adapter in opened.adapters:
            merge(places, adapter)
        if engine.enable_lora:
            slots = LoRASlots(engine.max_loras, engine.max_lora_rank, dtype=dtype, device=device)
            lora = LoRAModel(model, places, slots)
    quantization = None
    if engine.quantization is not None:
        quantization = quantize(
            model,
            config,
            leave=_heads(model),
            types=(PoolingType.MEAN,) if own_pooler or PoolingType.ALL in types else types,
            encode=encode,
            minimum=engine.min_quantized_cosine,
        )
    by_sparse = next((one.sparse for one in (bge_m3, sparse) if one is not None), None)
    defaults = pooling_defaults(model, config, settings, size, user, head, by_sparse)
    if recipe.router is not None and recipe.router.heads:
        defaults = replace(defaults, sides=frozenset(recipe.router.heads))
    if multi_vector is not None:
        defaults = replace(defaults, token_vectors=token_vector_defaults(multi_vector, defaults))
    if engine.chat_template is not None:
        _refuse_unread_template(model, config, defaults)
    return LoadedModel(
        model=model,
        repository=opened.repository,
        config=config,
        recipe=recipe,
        pooler_config=user,
        head=head,
        sparse=sparse,
        rerank_template=_rerank_template(engine, opened, head, manifest),
        defaults=defaults,
        settings=settings,
        device=device,
        dtype=dtype,
        quantization=quantization,
        multi_vector=multi_vector,
        lora=lora,
    )


def _embed_pooler(
    opened: OpenedModel, recipe: Recipe, types: tuple[PoolingType, ...], dense: nn.Sequential, size: int
) -> Pooler:
    """The pooler of dense vectors, with a head for each side where the checkpoint's router has several."""
    heads = {} if recipe.router is None else recipe.router.heads
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


def _head(
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


def _rerank_template(
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


def _refuse_unread_template(model: nn.Module, config: ModelConfig, defaults: PoolingDefaults) -> None:
    scores = defaults.scores.get(PoolingTask.CLASSIFY)
    if scores is None or scores.columns != 1 or getattr(model, "score_type", None) == "late-interaction":
        raise ConfigError(
            f"chat_template has no meaning for {config.name}: it is the prompt of a pair of texts, and this model has "
            "no head of one label that reads one; leave it out"
        )


def _primary_task(head: Head | None, sparse: SparseHead | None, convert: str) -> PoolingTask:
    """The task that the model's class is named after."""
    if sparse is not None and sparse.is_alone:
        return PoolingTask.SPARSE_EMBED
    if head is None:
        return PoolingTask.REWARD if convert == "reward" else PoolingTask.EMBED
    if head.is_reward or convert == "reward":
        return PoolingTask.REWARD
    return PoolingTask.TOKEN_CLASSIFY if head.recipe.token_level else PoolingTask.CLASSIFY


def pick_device(asked: str) -> torch.device:
    """The device asked for; "auto" is a GPU where there is one. A GPU has its number, which much of torch asks for."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={asked!r}: torch sees no GPU here; use device='cpu'")
    number = int(asked.partition(":")[2]) if ":" in asked else torch.cuda.current_device()
    if number >= torch.cuda.device_count():
        raise ConfigError(f"device={asked!r}: torch sees {torch.cuda.device_count()} GPUs here, counted from 0")
    return torch.device("cuda", number)


def pick_dtype(asked: str, config: ModelConfig, device: torch.device, *, quantized: bool = False) -> torch.dtype:
    """The dtype asked for; "auto" is the checkpoint's own, or half precision around quantised layers.

    Gemma's hidden states grow beyond what float16 holds: it runs in bfloat16 in its place, or is refused where float16
    is asked for.

    A CPU multiplies no float16 fast, and bfloat16 only with instructions for it: there a half-precision checkpoint runs
    in bfloat16 where the CPU has them, and in float32 elsewhere.
    """
    own = "bfloat16" if quantized and _cpu_has_bfloat16() else config.dtype or "float32"
    name = own if asked == "auto" else asked
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"{config.name}: config.json has dtype {name!r}; pass dtype= one of {', '.join(known)}")
    if device.type != "cpu" and name == "float16" and config.model_type.startswith("gemma"):
        if asked == "float16":
            raise ConfigError(
                f"dtype='float16': the hidden states of {config.name} ({config.model_type}) grow beyond what float16 "
                "holds; use dtype='bfloat16' or 'float32'"
            )
        return torch.bfloat16
    if device.type != "cpu" or name == "float32":
        return known[name]
    fast = torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    if asked == "bfloat16" and fast is torch.float32:
        logger.warning("this CPU has no bfloat16 instructions: dtype='float32' would be several times faster")
        return torch.bfloat16
    if asked == "float16":
        logger.warning("no CPU computes fast in float16: running in %s", fast)
    return fast


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware: AVX512_BF16 or AMX on x86; Arm's BF16 extension elsewhere."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
