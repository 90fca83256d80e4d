"""From what the user asked for to a pooling model in memory."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anypool.adapters.pooling_model import as_pooling_model
from anypool.adapters.sentence_transformers import Recipe, build_head, read_recipe
from anypool.config import EngineConfig, PoolerConfig
from anypool.errors import ConfigError, InvalidParameterError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import is_pooling_model, load_backbone
from anypool.model_executor.registry import ModelRegistry
from anypool.model_executor.weights.checkpoint import open_checkpoint
from anypool.model_executor.weights.loading import construct
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.methods import PoolingType
from anypool.pooling.plan import EmbeddingSize, PoolingDefaults
from anypool.pooling.pooler import EmbedPooler
from anypool.pooling.tasks import PoolingTask

logger = logging.getLogger(__name__)

_USER, _FILES, _CLASS = "user", "sentence-transformers files", "model class"


@dataclass(frozen=True)
class Setting:
    """A resolved setting and who decided it."""

    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A pooling model ready to run.

    Attributes:
        model: The pooling model, in memory.
        config: What config.json says.
        recipe: What the sentence-transformers files say.
        defaults: What a request gets where it asks for nothing.
        settings: Pooling settings by name, each with who decided it.
        device, dtype: Where and in what the backbone runs.
    """

    model: nn.Module
    repository: Repository
    config: ModelConfig
    recipe: Recipe
    defaults: PoolingDefaults
    settings: Mapping[str, Setting]
    device: torch.device
    dtype: torch.dtype


def load_pooling_model(engine: EngineConfig) -> LoadedModel:
    """Loads a checkpoint as a pooling model.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint.
    """
    repository = Repository.open(engine.model, revision=engine.revision, cache_dir=engine.download_dir)
    recipe = read_recipe(repository)
    backbone = repository.subfolder(recipe.backbone)
    config = ModelConfig.from_pretrained(
        backbone, overrides=engine.hf_overrides, trust_remote_code=engine.trust_remote_code
    )
    model_cls = ModelRegistry.resolve_model_cls(config, model_impl=engine.model_impl)
    if engine.convert == "none" and not is_pooling_model(model_cls):
        raise ConfigError(
            f"convert='none': {model_cls.__name__} is not a pooling model; use convert='auto' or convert='embed'"
        )
    device = pick_device(engine.device)
    dtype = pick_dtype(engine.dtype, config, device)
    pooling_cls: Any = as_pooling_model(model_cls, PoolingTask.EMBED)
    model: Any = construct(lambda: pooling_cls(config))
    settings = resolve_settings(pooling_cls, config, recipe, engine.pooler_config or PoolerConfig())
    types = settings["pooling_type"].value
    head, size = build_head(repository, recipe, config.hidden_size * len(types))
    if hasattr(model, "load"):
        model.load(backbone, device=device, dtype=dtype, progress=engine.use_tqdm_on_load)
    else:
        load_backbone(
            model,
            open_checkpoint(backbone),
            name=repository.name,
            device=device,
            dtype=dtype,
            progress=engine.use_tqdm_on_load,
        )
    if isinstance(model.pooler[PoolingTask.EMBED], EmbedPooler):
        model.pooler.install(PoolingTask.EMBED, EmbedPooler(types, head.to(device)))
    model.eval()
    return LoadedModel(
        model=model,
        repository=repository,
        config=config,
        recipe=recipe,
        defaults=_defaults(model, config, settings, size),
        settings=settings,
        device=device,
        dtype=dtype,
    )


def resolve_settings(model_cls: Any, config: ModelConfig, recipe: Recipe, user: PoolerConfig) -> dict[str, Setting]:
    """Each pooling setting from the user, else the sentence-transformers files, else the model class."""
    if user.pooling_types is not None:
        types = Setting(tuple(PoolingType(name) for name in user.pooling_types), _USER)
    elif recipe.types is not None:
        types = Setting(recipe.types, _FILES)
    else:
        types = Setting((_guess(model_cls, config),), _CLASS)
        logger.warning(
            "%s has no modules.json: pooling %s is a guess; set PoolerConfig(pooling_type=...) if it is another",
            config.name,
            types.value[0],
        )
    return {
        "pooling_type": types,
        "normalize": _first(user.normalize, recipe.normalize, getattr(model_cls, "default_normalize", True)),
        "dimensions": _first(user.dimensions, recipe.truncate_dim, None),
    }


def _guess(model_cls: Any, config: ModelConfig) -> PoolingType:
    """The class's own type; MEAN for a decoder that was saved without its LM head, or that attends in both directions.

    So does sentence-transformers since 5.4 with a folder that has no modules.json.
    """
    is_causal_lm = config.is_causal and not config.architecture.endswith("Model")
    if getattr(model_cls, "attn_type", "decoder") == "decoder" and not is_causal_lm:
        return PoolingType.MEAN
    return PoolingType(getattr(model_cls, "default_pooling_type", "LAST"))


def _first(user: Any, files: Any, cls: Any) -> Setting:
    if user is not None:
        return Setting(user, _USER)
    return Setting(files, _FILES) if files is not None else Setting(cls, _CLASS)


def _defaults(model: Any, config: ModelConfig, settings: Mapping[str, Setting], size: int) -> PoolingDefaults:
    allowed = EmbeddingSize(
        model=config.name,
        full=size,
        allowed=config.matryoshka_dimensions,
        cuttable=config.is_matryoshka is not False,
    )
    dimensions = settings["dimensions"].value
    if dimensions is not None:
        try:
            allowed.check(dimensions)
        except InvalidParameterError as error:
            raise ConfigError(str(error)) from error
    return PoolingDefaults(
        tasks=model.pooler.tasks, size=allowed, normalize=settings["normalize"].value, dimensions=dimensions
    )


def pick_device(asked: str) -> torch.device:
    """The device asked for; "auto" is a GPU where there is one."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={asked!r}: torch sees no GPU here; use device='cpu'")
    return torch.device(asked)


def pick_dtype(asked: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype asked for; "auto" is the checkpoint's own.

    A CPU multiplies no float16 fast, and bfloat16 only with instructions for it: there a half-precision checkpoint runs
    in bfloat16 where the CPU has them, and in float32 elsewhere.
    """
    name = asked if asked != "auto" else config.dtype or "float32"
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"{config.name}: config.json has dtype {name!r}; pass dtype= one of {', '.join(known)}")
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
