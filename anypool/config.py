"""What a user may set. Frozen, keyword-only, checked when built; "auto" is resolved later into a new object."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from anypool.errors import ConfigError

SEQUENCE_POOLING_TYPES = ("CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN")
TOKEN_POOLING_TYPES = ("ALL", "STEP")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
ACTIVATIONS = ("none", "sigmoid", "softmax", "tanh", "relu", "gelu", "silu")

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], *, what: str) -> T:
    """Builds the dataclass `cls` from `values`. An unknown key is a `ConfigError` that names the nearest known one."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{what}: unknown argument {key!r}; {hint}")
    return cls(**values)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_int_list(value: object) -> bool:
    """Whether it is a sequence of integers, at least one."""
    return isinstance(value, Sequence) and len(value) > 0 and all(map(is_int, value))


def contradicts(use_activation: bool | None, activation: str | None) -> bool:
    """Whether the two say different things about whether there is an activation."""
    return None not in (use_activation, activation) and use_activation != (activation != "none")


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How results are made. Each field that is set wins over the checkpoint's own files.

    Args:
        pooling_type: CLS, LAST, MEAN, MAX, WEIGHTED_MEAN or MEAN_SQRT_LEN for one result per text, or ALL or STEP for
            one per token; upper or lower case. Several of the first kind joined with "+" are concatenated.
        seq_pooling_type: The same, for one result per text only.
        tok_pooling_type: The same, for one result per token only.
        normalize: Whether embeddings are scaled to unit length.
        dimensions: How many leading dimensions of the embedding are kept, before it is scaled.
        use_activation: False for raw scores, and for embeddings that are not scaled.
        activation: What turns scores into probabilities: one of `ACTIVATIONS`.
        logit_mean: Taken from scores before the activation.
        logit_sigma: Scores are divided by it, after the mean is taken off (Platt scaling).
        step_tag_id: STEP keeps the tokens with this id.
        returned_token_ids: Which columns are kept: labels of a head, or tokens of the LM head where there is no other.
        enable_chunked_processing: Whether a text that is longer than the model takes is run in windows, whose results
            are combined, rather than refused.
        max_embed_len: The longest text in tokens that is run in windows; None for any.
        chunk_overlap: How many of the text's tokens a window shares with the one before it; None for a sixteenth of the
            text that fits into one.
        logit_bias: Old name of `logit_mean`.
        logit_scale: Old form of `logit_sigma`, its inverse.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    activation: str | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    chunk_overlap: int | None = None
    logit_bias: float | None = None
    logit_scale: float | None = None

    def __post_init__(self) -> None:
        self._translate_old_names()
        for name in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
            value = getattr(self, name)
            require(value is None or isinstance(value, str), f"PoolerConfig: {name}={value!r} is not a string")
        for name in ("normalize", "use_activation", "enable_chunked_processing"):
            value = getattr(self, name)
            require(value is None or isinstance(value, bool), f"PoolerConfig: {name}={value!r} is not a bool")
        _check_pooling_types(self)
        require(
            self.dimensions is None or (is_int(self.dimensions) and self.dimensions > 0),
            f"PoolerConfig: dimensions={self.dimensions!r} is not a positive integer",
        )
        _check_windows(self)
        if self.activation is not None:
            require(
                self.activation in ACTIVATIONS,
                f"PoolerConfig: unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}",
            )
            require(
                not contradicts(self.use_activation, self.activation),
                f"PoolerConfig: use_activation={self.use_activation} contradicts activation={self.activation!r}",
            )
        for name in ("logit_mean", "logit_sigma"):
            value = getattr(self, name)
            require(value is None or is_number(value), f"PoolerConfig: {name}={value!r} is not a finite number")
        require(self.logit_sigma != 0, "PoolerConfig: logit_sigma=0 would divide by zero")
        require(
            self.step_tag_id is None or is_int(self.step_tag_id),
            f"PoolerConfig: step_tag_id={self.step_tag_id!r} is not a token id",
        )
        if self.returned_token_ids is not None:
            require(
                is_int_list(self.returned_token_ids),
                f"PoolerConfig: returned_token_ids={self.returned_token_ids!r} is not a list of numbers",
            )
            object.__setattr__(self, "returned_token_ids", tuple(self.returned_token_ids))

    @property
    def pooling_types(self) -> tuple[str, ...] | None:
        """The pooling types for one result per text, in upper case, or None where none is asked."""
        given = self.pooling_type if self.seq_pooling_type is None else self.seq_pooling_type
        parts = _parts(given)
        return None if parts is None or parts[0] in TOKEN_POOLING_TYPES else parts

    @property
    def token_pooling_type(self) -> str | None:
        """The pooling type for one result per token, in upper case, or None where none is asked."""
        given = self.pooling_type if self.tok_pooling_type is None else self.tok_pooling_type
        parts = _parts(given)
        return parts[0] if parts is not None and parts[0] in TOKEN_POOLING_TYPES else None

    def _translate_old_names(self) -> None:
        for old, new in (("logit_bias", "logit_mean"), ("logit_scale", "logit_sigma")):
            given = getattr(self, old)
            if given is None:
                continue
            require(getattr(self, new) is None, f"PoolerConfig: {old} and {new} are the same setting: give {new}")
            require(is_number(given), f"PoolerConfig: {old}={given!r} is not a finite number")
            require(old != "logit_scale" or given != 0, f"PoolerConfig: {old}=0 would make every score the same")
            value = given if old == "logit_bias" else 1 / given
            warnings.warn(f"PoolerConfig({old}=) is old: use {new}={value!r}", DeprecationWarning, stacklevel=4)
            object.__setattr__(self, new, value)
            object.__setattr__(self, old, None)


def is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _parts(given: str | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(part.strip().upper() for part in given.split("+"))


def _check_pooling_types(config: PoolerConfig) -> None:
    allowed = {
        "pooling_type": SEQUENCE_POOLING_TYPES + TOKEN_POOLING_TYPES,
        "seq_pooling_type": SEQUENCE_POOLING_TYPES,
        "tok_pooling_type": TOKEN_POOLING_TYPES,
    }
    for name, known in allowed.items():
        parts = _parts(getattr(config, name)) or ()
        for part in parts:
            require(part in known, f"PoolerConfig: unknown {name} {part!r}; known: {', '.join(known)}")
        require(
            len(parts) < 2 or not set(parts) & set(TOKEN_POOLING_TYPES),
            f"PoolerConfig: {name}={getattr(config, name)!r}: ALL and STEP cannot be concatenated",
        )
        require(
            name == "pooling_type" or not parts or config.pooling_type is None,
            f"PoolerConfig: pooling_type={config.pooling_type!r} and {name}={getattr(config, name)!r} "
            "are the same setting: give one of them",
        )


def _check_windows(config: PoolerConfig) -> None:
    for name, least in (("max_embed_len", 1), ("chunk_overlap", 0)):
        value = getattr(config, name)
        if value is None:
            continue
        require(is_int(value) and value >= least, f"PoolerConfig: {name}={value!r} is not a number of tokens")
        require(
            config.enable_chunked_processing,
            f"PoolerConfig: {name}={value} has no effect without enable_chunked_processing=True",
        )


@dataclass(frozen=True)
class LoRARequest:
    """A low-rank adapter that a request is run with.

    Args:
        lora_name: What it is called.
        lora_int_id: A number of its own, from 1 on.
        lora_path: Its folder, or its hub id.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            require(isinstance(value, str) and value != "", f"LoRARequest: {name}={value!r} is not a text")
        require(
            is_int(self.lora_int_id) and self.lora_int_id > 0,
            f"LoRARequest: lora_int_id={self.lora_int_id!r} is not a number from 1 on",
        )


# Arguments of vLLM that change no result here, and are accepted so that its users' code runs.
_HARMLESS = ("disable_log_stats", "seed", "swap_space")
_DTYPE_NAMES = {"half": "float16", "float": "float32"}


_CONVERSIONS = ("auto", "none", "embed", "classify", "reward", "sparse")
# The `task=` of older versions of vLLM, and what it means now.
_OLD_TASKS = {
    "auto": "auto",
    "embed": "embed",
    "embedding": "embed",
    "classify": "classify",
    "score": "classify",
    "reward": "reward",
}


# These may be given as `pathlib.Path`s.
_PATHS = ("model", "tokenizer", "download_dir", "lora", "chat_template")
# Checked by annotation; sizes have a check of their own.
_KINDS = {"str": str, "bool": bool}


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is started with. `LLM`'s keyword arguments and the command line's flags are these fields."""

    model: str = field(metadata={"help": "folder, .gguf file or hub id"})
    tokenizer: str | None = _setting(None, "folder or hub id of the tokenizer, where it is not the model's own")
    revision: str | None = _setting(None, "branch, tag or commit of a hub repository")
    trust_remote_code: bool = _setting(False, "run Python code that comes with the checkpoint")
    runner: str = _setting("pooling", "'pooling' or 'auto'; this engine does not generate text")
    convert: str = _setting(
        "auto", "'auto', 'none', 'embed', 'classify', 'reward' or 'sparse': what a model is turned into"
    )
    dtype: str = _setting("auto", "'auto' (the checkpoint's own), 'float32', 'bfloat16' or 'float16'")
    quantization: str | None = _setting(None, "'int8' runs linear layers in eight bits, on the CPU")
    min_quantized_cosine: float = _setting(
        0.98, "mean cosine of built-in texts with the unquantised model, below which loading is refused; 0 takes any"
    )
    max_model_len: int | None = _setting(None, "longest prompt in tokens; by default what the checkpoint says")
    pooler_config: PoolerConfig | None = _setting(None, "pooling settings that win over the checkpoint's")
    hf_overrides: Mapping[str, Any] | None = _setting(None, "keys laid over the checkpoint's config.json")
    skip_tokenizer_init: bool = _setting(False, "load no tokenizer: prompts are token ids")
    device: str = _setting("auto", "'auto', 'cpu' or 'cuda'")
    model_impl: str = _setting("auto", "'auto', 'native' or 'transformers': which code runs the backbone")
    max_num_batched_tokens: int | None = _setting(None, "most tokens in one forward pass; by default chosen by device")
    max_num_seqs: int = _setting(256, "most prompts in one forward pass")
    max_queued_tokens: int = _setting(4_000_000, "tokens that may wait before a server refuses more")
    max_queue_s: float | None = _setting(
        30.0, "seconds until a request would have its turn, at the measured speed, above which a server refuses it"
    )
    enable_chunked_prefill: bool | None = _setting(
        None, "run a prompt longer than max_num_batched_tokens in chunks; by default where the model is causal"
    )
    enable_prefix_caching: bool | None = _setting(
        None, "keep the keys of prompts for others that begin alike; by default for causal rerankers with a template"
    )
    block_size: int = _setting(16, "tokens per block of the key-value cache: prefixes are shared in whole blocks")
    kv_cache_memory_fraction: float = _setting(0.1, "share of the device's memory that the prefix cache may take")
    gpu_memory_utilization: float = _setting(0.9, "most of a GPU's memory that is taken, as a share; none is reserved")
    stuck_after_s: float = _setting(
        120.0,
        "seconds until a forward pass that has not ended is called stuck, and a process that says nothing is ended",
    )
    download_dir: str | None = _setting(None, "where hub downloads are kept")
    lora: str | None = _setting(None, "folder or hub id of a LoRA adapter that is merged into the weights")
    enable_lora: bool = _setting(False, "let each request name a LoRA adapter that it is run with")
    lora_modules: Mapping[str, str] | None = _setting(
        None, "LoRA adapters that are read at the start: folder or hub id by name"
    )
    max_loras: int = _setting(4, "most LoRA adapters in memory, and in one forward pass")
    max_lora_rank: int = _setting(16, "highest rank of a LoRA adapter that requests name")
    served_model_name: str | None = _setting(
        None, "the model's name over HTTP; by default its hub id, or its folder's name"
    )
    chat_template: str | None = _setting(None, "Jinja template of a reranker's prompt, as text or a file's name")
    tensor_parallel_size: int = _setting(1, "processes that hold each layer together")
    pipeline_parallel_size: int = _setting(1, "stages that the layers are cut into, of as many processes each")
    data_parallel_size: int = _setting(
        1, "replicas: processes with an engine each, on CPU cores or GPUs of their own, behind one queue"
    )
    enforce_eager: bool = _setting(False, "never capture CUDA graphs")
    use_tqdm_on_load: bool = _setting(True, "show a progress bar while weights load")

    def __post_init__(self) -> None:
        for name in _PATHS:
            if isinstance(given := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(given))
        require(isinstance(self.model, str) and self.model != "", f"model={self.model!r} is not a path or a hub id")
        for one in fields(self):
            value, kind = getattr(self, one.name), str(one.type).removesuffix(" | None")
            optional = kind != str(one.type)
            if kind in _KINDS and not (optional and value is None):
                require(isinstance(value, _KINDS[kind]), f"{one.name}={value!r} is not a {kind}")
        require(
            self.runner in ("auto", "pooling"),
            f"runner={self.runner!r}: this engine pools and does not generate text; use runner='pooling'",
        )
        _one_of("convert", self.convert, _CONVERSIONS)
        _one_of("dtype", self.dtype, DTYPES)
        require(
            self.quantization in (None, *QUANTIZATIONS),
            f"quantization={self.quantization!r} is not supported; known: {', '.join(QUANTIZATIONS)}, or None",
        )
        require(
            is_number(self.min_quantized_cosine) and 0 <= self.min_quantized_cosine <= 1,
            f"min_quantized_cosine={self.min_quantized_cosine!r} is not a number from 0 to 1",
        )
        _one_of("model_impl", self.model_impl, ("auto", "native", "transformers"))
        require(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None,
            f"device={self.device!r} is unknown; known: auto, cpu, cuda, cuda:N",
        )
        _check_loras(self)
        sizes = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_queued_tokens", "block_size")
        others = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_loras", "max_lora_rank")
        for name in (*sizes, *others):
            value = getattr(self, name)
            require(
                (value is None and name in sizes[:2]) or (is_int(value) and value > 0),
                f"{name}={value!r} is not a positive integer",
            )
        require(
            is_number(self.kv_cache_memory_fraction) and 0 < self.kv_cache_memory_fraction <= 0.9,
            f"kv_cache_memory_fraction={self.kv_cache_memory_fraction!r} is not a number above 0 and up to 0.9",
        )
        require(
            is_number(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization={self.gpu_memory_utilization!r} is not a number above 0 and up to 1",
        )
        require(
            is_number(self.stuck_after_s) and self.stuck_after_s > 0,
            f"stuck_after_s={self.stuck_after_s!r} is not a positive number of seconds",
        )
        require(
            self.max_queue_s is None or (is_number(self.max_queue_s) and self.max_queue_s > 0),
            f"max_queue_s={self.max_queue_s!r} is not a positive number of seconds, or None",
        )
        require(
            self.pooler_config is None or isinstance(self.pooler_config, PoolerConfig),
            f"pooler_config={self.pooler_config!r} is not a PoolerConfig",
        )
        require(
            self.hf_overrides is None or isinstance(self.hf_overrides, Mapping),
            f"hf_overrides={self.hf_overrides!r} is not a mapping of config.json keys",
        )

    @property
    def num_ranks(self) -> int:
        """Processes that hold the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def from_kwargs(cls, **values: Any) -> EngineConfig:
        """Builds the config from keyword arguments; a `pooler_config` may be a mapping of its fields."""
        for name in _HARMLESS:
            values.pop(name, None)
        if "dtype" in values:  # torch.float32 and vLLM's short names
            dtype = str(values["dtype"]).removeprefix("torch.")
            values["dtype"] = _DTYPE_NAMES.get(dtype, dtype)
        if "override_pooler_config" in values:
            warnings.warn("override_pooler_config= is old: use pooler_config=", DeprecationWarning, stacklevel=3)
            old = values.pop("override_pooler_config")
            require(
                values.get("pooler_config") is None,
                "pooler_config and override_pooler_config are the same setting: give pooler_config",
            )
            values["pooler_config"] = old
        if "task" in values:
            task = values.pop("task")
            require(
                isinstance(task, str) and task in _OLD_TASKS,
                f"task={task!r} is unknown, and old: use convert= one of {', '.join(_CONVERSIONS)}",
            )
            convert = _OLD_TASKS[task]
            warnings.warn(f"task={task!r} is old: use convert={convert!r}", DeprecationWarning, stacklevel=3)
            require(
                values.setdefault("convert", convert) == convert,
                f"task={task!r} contradicts convert={values['convert']!r}: give convert",
            )
        pooler = values.get("pooler_config")
        if isinstance(pooler, Mapping):
            values["pooler_config"] = from_mapping(PoolerConfig, pooler, what="pooler_config")
        return from_mapping(cls, values, what="engine arguments")

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


def _check_loras(config: EngineConfig) -> None:
    modules = config.lora_modules
    is_named = isinstance(modules, Mapping) and all(
        isinstance(one, str) and one for pair in modules.items() for one in pair
    )
    require(modules is None or is_named, f"lora_modules={modules!r} is not a mapping of names to folders or hub ids")
    require(
        modules is None or config.enable_lora,
        f"lora_modules={modules!r} has no effect without enable_lora=True; lora= merges a single adapter",
    )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{name}={value!r} is unknown; known: {', '.join(allowed)}")
