"""Architecture name -> class. Modules are imported when a class is first asked for."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec

from torch import nn

from anypool.errors import ConfigError, MissingDependencyError, UnsupportedArchitectureError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import is_encoder_model, is_pooling_model, is_text_generation_model

_MODELS = "anypool.model_executor.models"

_NATIVE: dict[str, str] = {
    "BertForMaskedLM": "bert:BertModel",
    "BertForPreTraining": "bert:BertModel",
    "BertModel": "bert:BertModel",
    "DebertaV2ForMaskedLM": "deberta:DebertaV2Model",
    "DebertaV2Model": "deberta:DebertaV2Model",
    "DistilBertForMaskedLM": "distilbert:DistilBertModel",
    "DistilBertModel": "distilbert:DistilBertModel",
    "Gemma2ForCausalLM": "gemma:Gemma2ForCausalLM",
    "Gemma2Model": "gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "gemma:Gemma3ForCausalLM",
    "Gemma3TextModel": "gemma:Gemma3ForCausalLM",
    "GemmaForCausalLM": "gemma:GemmaForCausalLM",
    "GemmaModel": "gemma:GemmaForCausalLM",
    "JinaEmbeddingsV3ForMaskedLM": "jina:JinaEmbeddingsV3Model",
    "JinaEmbeddingsV3Model": "jina:JinaEmbeddingsV3Model",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "LlamaModel": "llama:LlamaForCausalLM",
    "MPNetForMaskedLM": "mpnet:MPNetModel",
    "MPNetModel": "mpnet:MPNetModel",
    "MistralForCausalLM": "mistral:MistralForCausalLM",
    "MistralModel": "mistral:MistralForCausalLM",
    "ModernBertForMaskedLM": "modernbert:ModernBertModel",
    "ModernBertModel": "modernbert:ModernBertModel",
    "NVEmbedModel": "nv_embed:NVEmbedModel",
    "Qwen2ForCausalLM": "qwen:Qwen2ForCausalLM",
    "Qwen2Model": "qwen:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen:Qwen3ForCausalLM",
    "Qwen3Model": "qwen:Qwen3ForCausalLM",
    "RobertaForMaskedLM": "xlm_roberta:RobertaModel",
    "RobertaModel": "xlm_roberta:RobertaModel",
    "StaticEmbedding": "static:StaticModel",
    "XLMRobertaForMaskedLM": "xlm_roberta:XLMRobertaModel",
    "XLMRobertaModel": "xlm_roberta:XLMRobertaModel",
}

# Models that read images, over transformers' modules.
_WITH_IMAGES: dict[str, str] = {
    "CLIPModel": "two_tower:CLIPModel",
    "ColIdefics3": "colpali_engine:ColPaliEngineModel",
    "ColModernVBertForRetrieval": "vision_language:ColModernVBertForRetrieval",
    "ColPali": "colpali_engine:ColPaliEngineModel",
    "ColPaliForRetrieval": "vision_language:ColPaliForRetrieval",
    "ColQwen2": "colpali_engine:ColPaliEngineModel",
    "ColQwen2ForRetrieval": "vision_language:ColQwen2ForRetrieval",
    "ColQwen2_5": "colpali_engine:ColPaliEngineModel",
    "Siglip2Model": "two_tower:SiglipModel",
    "SiglipModel": "two_tower:SiglipModel",
}
# How the colpali-engine library names its classes; those that are not listed are refused.
_OF_COLPALI_ENGINE = re.compile(r"(Col|Bi)(Pali|Qwen|Idefics|Gemma|ModernVBert)\w*(?<!ForRetrieval)")
_GENERATES_FROM_IMAGES = "vision_language:VisionLanguageForConditionalGeneration"

# Heads that the adapters build over the backbone of the same name.
HEAD_SUFFIXES = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForProcessRewardModel",
    "ForRewardModeling",
    "ForRewardModel",
    "RewardModel",
)
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_MULTIMODAL_SUFFIX = "ForConditionalGeneration"
_BASE_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", "ForTextEncoding")


class _Registry:
    """The known architectures: native ones, users' own, and transformers' for the rest."""

    def __init__(self) -> None:
        self._own: dict[str, type[nn.Module] | str] = {}

    def register_model(self, architecture: str, model_cls: type[nn.Module] | str) -> None:
        """Makes a class of one's own known under an architecture name; it wins over the built-in ones.

        Args:
            architecture: The name that `architectures` in config.json has.
            model_cls: A module class that is built from a `ModelConfig` and has `Backbone.forward`, or
                "package.module:Class", imported on first use.

        Raises:
            ConfigError: It is neither, or the architecture is no name.
        """
        if not isinstance(architecture, str) or not architecture:
            raise ConfigError(f"architecture={architecture!r} is not a name")
        if isinstance(model_cls, str):
            if not re.fullmatch(r"[\w.]+:\w+", model_cls):
                raise ConfigError(f"model_cls={model_cls!r} is not of the form 'package.module:Class'")
        elif not (isinstance(model_cls, type) and issubclass(model_cls, nn.Module)):
            raise ConfigError(f"model_cls={model_cls!r} is neither an nn.Module class nor 'package.module:Class'")
        self._own[architecture] = model_cls

    def registered_paths(self) -> dict[str, str]:
        """What `register_model` was given, as another process can import it.

        Raises:
            ConfigError: It cannot import a class, since that is part of the program that runs here, or is local.
        """
        return {name: own if isinstance(own, str) else _path_of(own) for name, own in self._own.items()}

    def get_supported_archs(self) -> list[str]:
        """Names that need nothing of transformers."""
        return sorted({*_NATIVE, *self._own})

    def resolve_model_cls(self, config: ModelConfig, *, model_impl: str = "auto") -> type[nn.Module]:
        """The class that runs a checkpoint.

        Args:
            config: The checkpoint's configuration.
            model_impl: "native" or "transformers" to insist on one of them, "auto" for native where there is one.

        Raises:
            UnsupportedArchitectureError: There is none; the message lists what is known.
        """
        architecture = config.architecture
        if model_impl != "transformers":
            for name in (architecture, *_backbone_names(architecture)):
                own = self._own.get(name)
                if isinstance(own, type):
                    return own
                path = own or (_native_path(name) if config.not_native is None else None)
                if path is not None:
                    return _import(name, path)
        if model_impl == "native":
            if config.not_native is not None:
                raise UnsupportedArchitectureError(config.not_native)
            raise self._unknown(architecture, "has no native class")
        if (path := _path_with_images(config)) is not None:
            return _import(architecture, f"{_MODELS}.{path}")
        if _OF_COLPALI_ENGINE.fullmatch(architecture):
            raise UnsupportedArchitectureError(
                f"{architecture!r} is a class of colpali-engine that is not supported; those that are: "
                f"{', '.join(name for name in _WITH_IMAGES if _OF_COLPALI_ENGINE.fullmatch(name))}. Or take one "
                f"converted for transformers: {', '.join(name for name in _WITH_IMAGES if 'Retrieval' in name)}"
            )
        return self._transformers_cls(architecture, config)

    def _transformers_cls(self, architecture: str, config: ModelConfig) -> type[nn.Module]:
        if find_spec("transformers") is None:
            raise MissingDependencyError(
                f"{architecture} runs through transformers: pip install 'anypool[transformers]'"
            )
        from anypool.model_executor.models.transformers_backend import (
            TransformersForCausalLM,
            TransformersForConditionalGeneration,
            TransformersModel,
            is_causal_family,
            kind_of,
        )

        kind = kind_of(architecture)
        if kind == "causal" or (kind is None and architecture.endswith(_CAUSAL_SUFFIXES)):
            return TransformersForCausalLM
        if config.is_encoder_decoder:
            return TransformersModel
        if architecture.endswith(_MULTIMODAL_SUFFIX):
            return TransformersForConditionalGeneration
        if architecture.endswith(HEAD_SUFFIXES):
            return TransformersForCausalLM if is_causal_family(config.model_type) else TransformersModel
        if kind == "encoder" or architecture.endswith(_BASE_SUFFIXES):
            return TransformersModel
        raise self._unknown(architecture, "is not known")

    def _unknown(self, architecture: str, what: str) -> UnsupportedArchitectureError:
        return UnsupportedArchitectureError(
            f"architecture {architecture!r} {what}. Native: {', '.join(self.get_supported_archs())}. "
            f"Through transformers: names that end in "
            f"{', '.join((*_CAUSAL_SUFFIXES, _MULTIMODAL_SUFFIX, *_BASE_SUFFIXES, *HEAD_SUFFIXES))}. "
            "Your own: ModelRegistry.register_model"
        )


def _backbone_names(architecture: str) -> tuple[str, ...]:
    """The backbones that a classification or reward architecture may stand on."""
    suffix = next((suffix for suffix in HEAD_SUFFIXES if architecture.endswith(suffix)), None)
    if suffix is None:
        return ()
    stem = architecture.removesuffix(suffix)
    return tuple(stem + ending for ending in ("ForCausalLM", "LMHeadModel", "Model"))


def _path_of(cls: type[nn.Module]) -> str:
    if cls.__module__ == "__main__" or not cls.__qualname__.isidentifier():
        raise ConfigError(
            f"{cls.__qualname__} of {cls.__module__!r} is registered, and the processes that run it cannot "
            "import it: put the class into a module of its own"
        )
    return f"{cls.__module__}:{cls.__name__}"


def _import(architecture: str, path: str) -> type[nn.Module]:
    module, _, class_name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{architecture} is registered as {path!r}, which cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"{architecture} is registered as {path!r}, which is {cls!r} and not an nn.Module class")
    return cls


def _native_path(architecture: str) -> str | None:
    path = _NATIVE.get(architecture)
    return None if path is None else f"{_MODELS}.{path}"


def _path_with_images(config: ModelConfig) -> str | None:
    """The class of a model that reads images; None for one that reads text alone."""
    if config.architecture.endswith("ForConditionalGeneration") and "vision_config" in config.raw:
        return _GENERATES_FROM_IMAGES
    return _WITH_IMAGES.get(config.architecture)


ModelRegistry = _Registry()
register_model = ModelRegistry.register_model

__all__ = [
    "ModelRegistry",
    "is_encoder_model",
    "is_pooling_model",
    "is_text_generation_model",
    "register_model",
]
