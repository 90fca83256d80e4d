"""What a user may set. Frozen, keyword-only, checked when built; "auto" is resolved later into a new object."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from anypool.errors import ConfigError

POOLING_TYPES = ("CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN", "ALL")
SEQUENCE_POOLING_TYPES = tuple(name for name in POOLING_TYPES if name != "ALL")
DTYPES = ("auto", "float32", "bfloat16", "float16")

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


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How pooled vectors are made. Each field that is set wins over the checkpoint's own files.

    Args:
        pooling_type: One of CLS, LAST, MEAN, MAX, WEIGHTED_MEAN, MEAN_SQRT_LEN; upper or lower case.
            Several joined with "+" are concatenated in the given order.
        seq_pooling_type: The same under its longer name; giving both is an error.
        normalize: Whether embeddings are scaled to unit length.
        dimensions: How many leading dimensions of the embedding are kept, before it is scaled.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        require(
            self.pooling_type is None or self.seq_pooling_type is None,
            f"PoolerConfig: pooling_type={self.pooling_type!r} and seq_pooling_type={self.seq_pooling_type!r} "
            "are the same setting: give one of them",
        )
        for name in self.pooling_types or ():
            require(
                name in SEQUENCE_POOLING_TYPES,
                f"PoolerConfig: unknown pooling_type {name!r}; known: {', '.join(SEQUENCE_POOLING_TYPES)}"
                + (" (for per-token vectors ask for the task token_embed)" if name == "ALL" else ""),
            )
        require(
            self.normalize is None or isinstance(self.normalize, bool),
            f"PoolerConfig: normalize={self.normalize!r} is not a bool",
        )
        require(
            self.dimensions is None or (is_int(self.dimensions) and self.dimensions > 0),
            f"PoolerConfig: dimensions={self.dimensions!r} is not a positive integer",
        )

    @property
    def pooling_types(self) -> tuple[str, ...] | None:
        """The pooling types asked for, in upper case, or None where nothing is asked."""
        given = self.pooling_type if self.pooling_type is not None else self.seq_pooling_type
        if given is None:
            return None
        require(isinstance(given, str), f"PoolerConfig: pooling_type={given!r} is not a string")
        return tuple(part.strip().upper() for part in given.split("+"))


# Arguments that users of vLLM pass and that have only their neutral value here.
_NOT_YET: Mapping[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "quantization": None,
    "enable_lora": False,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
}


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
    convert: str = _setting("auto", "'auto', 'none' or 'embed': what a causal LM is turned into")
    dtype: str = _setting("auto", "'auto' (the checkpoint's own), 'float32', 'bfloat16' or 'float16'")
    max_model_len: int | None = _setting(None, "longest prompt in tokens; by default what the checkpoint says")
    pooler_config: PoolerConfig | None = _setting(None, "pooling settings that win over the checkpoint's")
    hf_overrides: Mapping[str, Any] | None = _setting(None, "keys laid over the checkpoint's config.json")
    skip_tokenizer_init: bool = _setting(False, "load no tokenizer: prompts are token ids")
    device: str = _setting("auto", "'auto', 'cpu' or 'cuda'")
    model_impl: str = _setting("auto", "'auto', 'native' or 'transformers': which code runs the backbone")
    max_num_batched_tokens: int | None = _setting(None, "most tokens in one forward pass; by default chosen by device")
    max_num_seqs: int = _setting(256, "most prompts in one forward pass")
    max_queued_tokens: int = _setting(4_000_000, "tokens that may wait before a server refuses more")
    download_dir: str | None = _setting(None, "where hub downloads are kept")
    served_model_name: str | None = _setting(None, "the model's name over HTTP; by default as given")
    enforce_eager: bool = _setting(False, "never capture CUDA graphs")
    use_tqdm_on_load: bool = _setting(True, "show a progress bar while weights load")

    def __post_init__(self) -> None:
        require(isinstance(self.model, str) and self.model != "", f"model={self.model!r} is not a path or a hub id")
        require(
            self.runner in ("auto", "pooling"),
            f"runner={self.runner!r}: this engine pools and does not generate text; use runner='pooling'",
        )
        _one_of("convert", self.convert, ("auto", "none", "embed"))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("model_impl", self.model_impl, ("auto", "native", "transformers"))
        require(
            self.device == "auto" or self.device.split(":")[0] in ("cpu", "cuda"),
            f"device={self.device!r} is unknown; known: auto, cpu, cuda, cuda:N",
        )
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_queued_tokens"):
            value = getattr(self, name)
            require(
                value is None or (is_int(value) and value > 0),
                f"{name}={value!r} is not a positive integer",
            )
        require(
            self.pooler_config is None or isinstance(self.pooler_config, PoolerConfig),
            f"pooler_config={self.pooler_config!r} is not a PoolerConfig",
        )
        require(
            self.hf_overrides is None or isinstance(self.hf_overrides, Mapping),
            f"hf_overrides={self.hf_overrides!r} is not a mapping of config.json keys",
        )

    @classmethod
    def from_kwargs(cls, **values: Any) -> EngineConfig:
        """Builds the config from keyword arguments; a `pooler_config` may be a mapping of its fields."""
        for name, neutral in _NOT_YET.items():
            if name in values:
                given = values.pop(name)
                require(
                    given in (None, neutral),
                    f"{name}={given!r} is not supported by this version; leave it at {neutral!r}",
                )
        pooler = values.get("pooler_config")
        if isinstance(pooler, Mapping):
            values["pooler_config"] = from_mapping(PoolerConfig, pooler, what="pooler_config")
        return from_mapping(cls, values, what="engine arguments")

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{name}={value!r} is unknown; known: {', '.join(allowed)}")
