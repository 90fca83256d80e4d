"""A module of transformers with its weights: which class, which part of it, and the audit of its tensors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch

from anypool.errors import ModelLoadError, UnsupportedArchitectureError, WeightsError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.repository import Repository


class Source(NamedTuple):
    """A class that reads a checkpoint, and what gives the wanted part of it."""

    cls: Any
    part: Callable[[Any], Any]


def load_whole(
    config: ModelConfig,
    repository: Repository,
    cls: str,
    *,
    dtype: torch.dtype,
    claimed: frozenset[str],
    progress: bool,
    **options: Any,
) -> Any:
    """Loads all of a checkpoint with one class of transformers, by its name. Otherwise as `load_module`.

    Its tensors are those of `state_dict` in `options`, where that is given.
    """
    import transformers

    try:
        hf_config = transformers.AutoConfig.for_model(**config.raw)
    except Exception as error:  # configuration classes raise whatever they meet
        raise refusal(config, _raised(error)) from error
    source = Source(getattr(transformers, cls), _all)
    settings: dict[str, Any] = {"dtype": dtype, "claimed": claimed, "progress": progress, **options}
    return _load(config, hf_config, source, repository, **settings)


def load_module(
    config: ModelConfig, repository: Repository, *, dtype: torch.dtype, claimed: frozenset[str], progress: bool
) -> Any:
    """Loads the part of a checkpoint that turns tokens into hidden states.

    It is the base model; of an encoder-decoder the encoder, or the decoder where that was saved by itself as a causal
    LM; and of a model of text and images the whole base model, whose `get_decoder` is the language model.

    Args:
        config: The checkpoint's configuration.
        repository: The checkpoint.
        dtype: Of the weights.
        claimed: Tensors that a head has read already.
        progress: Whether a bar is shown.

    Raises:
        UnsupportedArchitectureError: transformers has no such class, or cannot build or fill it.
        WeightsError: Tensors are missing, have no place or a wrong shape.
    """
    try:
        hf_config = _hf_config(config, repository)
    except Exception as error:  # configuration classes raise whatever they meet
        raise refusal(config, _raised(error)) from error
    sources = _sources(config, hf_config)
    errors: list[ModelLoadError] = []
    for source in sources:
        try:
            return _load(config, hf_config, source, repository, dtype=dtype, claimed=claimed, progress=progress)
        except (UnsupportedArchitectureError, WeightsError) as error:
            errors.append(error)
    raise errors[0]


def _load(
    config: ModelConfig,
    hf_config: Any,
    source: Source,
    repository: Repository,
    *,
    dtype: torch.dtype,
    claimed: frozenset[str],
    progress: bool,
    **options: Any,
) -> Any:
    gguf: dict[str, Any] = {"gguf_file": repository.gguf.name} if repository.gguf is not None else {}
    try:
        with quiet(progress):
            whole, report = source.cls.from_pretrained(
                None if "state_dict" in options else repository.folder,
                config=hf_config,
                dtype=dtype,
                output_loading_info=True,
                trust_remote_code=config.trust_remote_code,
                **gguf,
                **options,
            )
            model = source.part(whole)
    except Exception as error:  # transformers and the modules it builds raise whatever they meet
        raise refusal(config, _raised(error)) from error
    _audit(config, hf_config, report, claimed, _outside(whole, model))
    model.anypool_path = path_in(whole, model)
    return model.eval().requires_grad_(False)


def path_in(whole: Any, part: Any) -> str:
    """What a part of a module is called in it; "" for all of it."""
    return next((name for name, module in whole.named_modules() if module is part), "")


def _raised(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"transformers raises {type(error).__name__}: {lines[0] if lines else 'no message'}"


def refusal(config: ModelConfig, reason: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(
        f"{config.name}: {config.architecture} cannot run through transformers: {reason}"
    )


@contextlib.contextmanager
def quiet(progress: bool = False) -> Iterator[None]:
    """transformers' progress bar as asked, and its report of unused tensors held back: the audit is ours."""
    from transformers.utils import logging

    switches: dict[bool, Any] = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    switches[progress]()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        switches[was_shown]()
        logging.set_verbosity(verbosity)


def _hf_config(config: ModelConfig, repository: Repository) -> Any:
    from transformers import AutoConfig

    if config.trust_remote_code and "auto_map" in config.raw:
        return AutoConfig.from_pretrained(repository.folder, trust_remote_code=True)
    whole = AutoConfig.for_model(**config.raw)
    is_all = (
        whole.is_encoder_decoder
        or _is_encoder_decoder_by_default(whole)
        or config.architecture.endswith("ForConditionalGeneration")
    )
    return whole if is_all else whole.get_text_config()


def _sources(config: ModelConfig, hf_config: Any) -> list[Source]:
    """The classes to read the checkpoint with: a second one where transformers converts names for it alone."""
    import transformers

    found = [_source(config, hf_config)]
    own = getattr(transformers, config.architecture, None)
    if own is not None and not config.architecture.endswith("Classification"):
        is_decoder = not hf_config.is_encoder_decoder and config.architecture.endswith("ForCausalLM")
        part = _decoder if is_decoder else attrgetter("base_model")
        found.append(Source(own, methodcaller("get_encoder") if hf_config.is_encoder_decoder else part))
    return found


def _source(config: ModelConfig, hf_config: Any) -> Source:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, MODEL_MAPPING_NAMES

    model_type = hf_config.model_type
    of_its_own = getattr(hf_config, "auto_map", None) or {}
    # An encoder or a decoder that was saved by itself says that it is no encoder-decoder, as its family is.
    is_half = hf_config.is_encoder_decoder or _is_encoder_decoder_by_default(hf_config)
    if config.trust_remote_code and of_its_own:
        by_lm = "AutoModel" not in of_its_own and "AutoModelForCausalLM" in of_its_own
    else:
        by_lm = config.architecture.endswith("ForCausalLM") and (is_half or model_type not in MODEL_MAPPING_NAMES)
    if by_lm:
        return Source(AutoModelForCausalLM, _decoder)
    if is_half and str(MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(model_type, "")).endswith("EncoderModel"):
        return Source(AutoModelForTextEncoding, _all)
    return Source(AutoModel, methodcaller("get_encoder") if is_half else _all)


def _all(whole: Any) -> Any:
    return whole


def _decoder(whole: Any) -> Any:
    """A causal LM without its head. What is called its decoder may be the head."""
    from transformers import PreTrainedModel

    parts = (whole.get_decoder(), whole.base_model, getattr(whole, "model", None))
    return next(part for part in parts if isinstance(part, PreTrainedModel) and part is not whole)


def _is_encoder_decoder_by_default(hf_config: Any) -> bool:
    try:
        return bool(type(hf_config)().is_encoder_decoder)
    except Exception:  # a configuration that cannot be made of nothing
        return False


def _outside(whole: Any, part: Any) -> frozenset[str]:
    """Names of the parameters that only the rest of a model has."""
    kept = {id(parameter) for parameter in part.parameters()}
    named = whole.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) not in kept)


def _tensors_of_class(config: ModelConfig, hf_config: Any) -> set[str]:
    """Names of the tensors that transformers' class of this architecture has, its head's among them."""
    import transformers

    cls = getattr(transformers, config.architecture, None)
    if cls is None:
        return set()
    try:
        with torch.device("meta"):
            return set(cls(hf_config).state_dict())
    except Exception:  # a class that cannot be built without memory, or of another configuration
        return set()


def _audit(
    config: ModelConfig, hf_config: Any, report: dict[str, Any], claimed: frozenset[str], outside: frozenset[str]
) -> None:
    """Every tensor is used and every parameter filled, but for poolers, heads and what is not kept."""
    missing = sorted(name for name in report["missing_keys"] if name not in outside and not re.match(r"pooler\.", name))
    unused = sorted(name for name in report["unexpected_keys"] if name not in claimed and not _is_head(name))
    if unused:
        unused = sorted(set(unused) - _tensors_of_class(config, hf_config))
    wrong = [f"{key[0]} ({list(key[1])}, the model expects {list(key[2])})" for key in report["mismatched_keys"]]
    problems = [
        f"{label}: {', '.join(names[:5])}" + (f", and {len(names) - 5} more" if len(names) > 5 else "")
        for label, names in (("missing", missing), ("no place in the model", unused), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise WeightsError(f"{config.name}: tensors with {'; '.join(problems)}")


HEAD_NAMES = (
    r"^(lm_head|embed_out|cls|predictions|generator_predictions|generator_lm_head|discriminator_predictions|"
    r"vocab_(transform|layer_norm|projector)|head|decoder|qa_outputs|sop_classifier|nsp|output_projection|lm_output)\b",
    r"(^|\.)pooler\.",
    r"rotary_emb\.inv_freq$",
    r"position_ids$",
    r"\.(masked_bias|attn\.bias)$",
)


def _is_head(name: str) -> bool:
    return any(re.search(pattern, name) for pattern in HEAD_NAMES)
