"""What an engine does once, when it starts: load, and decide on limits and what its key-value cache does."""

from __future__ import annotations

import logging

from anypool.adapters.load import LoadedModel, load_pooling_model
from anypool.adapters.opened import OpenedModel, open_model
from anypool.adapters.placement import pick_device
from anypool.config import EngineConfig, LoRARequest
from anypool.engine.known_adapters import KnownAdapters
from anypool.engine.pieces import KVCache, device_memory, num_blocks
from anypool.engine.tokenization import Tokenizer
from anypool.errors import ConfigError
from anypool.model_executor.cuda_graphs import MAX_TOKENS
from anypool.model_executor.gpu_memory import cap_memory, plan_memory
from anypool.model_executor.transfers import make_current
from anypool.model_executor.weights.repository import TOKENIZER_FILES, Repository

logger = logging.getLogger(__name__)


def load(config: EngineConfig) -> tuple[Tokenizer | None, LoadedModel]:
    """The tokenizer, None where the user wants none or the checkpoint has none, and the model."""
    make_current(pick_device(config.device))
    opened = open_model(config)
    tokenizer = load_tokenizer(config, opened)
    token_id = None if tokenizer is None else tokenizer.token_id
    encode = None if tokenizer is None else tokenizer.encode
    return tokenizer, load_pooling_model(config, opened, token_id=token_id, encode=encode, vocabulary=tokenizer)


def load_tokenizer(config: EngineConfig, opened: OpenedModel) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or the user's; None where there is none or none is wanted."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        repository = Repository.open(config.tokenizer, cache_dir=config.download_dir)
    else:
        repository = opened.tokenizer
        if repository.gguf is None and not any(map(repository.exists, TOKENIZER_FILES)):
            logger.warning("%s has no tokenizer: prompts must be token ids", opened.config.name)
            return None
    static = opened.recipe.static
    if static is not None:
        return Tokenizer.load_bare(repository, drops_unknown=static.drops_unknown)
    tokenizer = Tokenizer.load(
        repository, do_lower_case=opened.recipe.do_lower_case, trust_remote_code=config.trust_remote_code
    )
    if opened.config.family is not None and opened.config.family.adds_eos:
        tokenizer.end_with(tokenizer.named_tokens.get("eos_token", "</s>"))
    return tokenizer


def resolve(config: EngineConfig, loaded: LoadedModel, tokenizer: Tokenizer | None) -> EngineConfig:
    """The settings with nothing left to be chosen.

    Raises:
        ConfigError: A setting contradicts the checkpoint.
    """
    takes_prefix = bool(getattr(loaded.model, "takes_prefix", False))
    for name in ("enable_chunked_prefill", "enable_prefix_caching"):
        if getattr(config, name) and not takes_prefix:
            raise ConfigError(
                f"{name}=True: {loaded.config.name} cannot run a prompt in parts, since its tokens see those after "
                "them, or mix otherwise than by attention; leave it unset"
            )
    is_templated_reranker = takes_prefix and loaded.rerank_template is not None
    wanted = config.enable_chunked_prefill, config.enable_prefix_caching
    return config.replace(
        max_model_len=_max_model_len(config, loaded, tokenizer),
        max_num_batched_tokens=config.max_num_batched_tokens or (4096 if loaded.device.type == "cpu" else 16384),
        enable_chunked_prefill=takes_prefix if wanted[0] is None else wanted[0],
        enable_prefix_caching=is_templated_reranker if wanted[1] is None else wanted[1],
        served_model_name=config.served_model_name or config.model,
    )


def make_cache(config: EngineConfig, loaded: LoadedModel) -> KVCache | None:
    """The key-value cache that these settings need: room for one long prompt, or for as many as memory allows."""
    if not (config.enable_chunked_prefill or config.enable_prefix_caching):
        return None
    assert config.max_model_len is not None
    memory = config.kv_cache_memory_fraction * device_memory(loaded.device) if config.enable_prefix_caching else 0.0
    if loaded.device.type == "cpu":  # which the ranks share
        memory /= config.num_ranks
    return KVCache(
        loaded.config,
        device=loaded.device,
        block_size=config.block_size,
        num_blocks=num_blocks(
            loaded.config,
            dtype=loaded.dtype,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            memory=memory,
        ),
        shares_prefixes=bool(config.enable_prefix_caching),
    )


def read_adapters(config: EngineConfig, adapters: KnownAdapters) -> None:
    """Reads the LoRA adapters of `lora_modules`.

    Raises:
        ModelLoadError: One of them cannot be found or read, or does not fit the model.
    """
    for number, (name, path) in enumerate((config.lora_modules or {}).items(), start=1):
        adapters.add(LoRARequest(name, number, path))


def plan_gpu_memory(config: EngineConfig, loaded: LoadedModel, cache: KVCache | None, *, graphs: bool) -> None:
    """Says what a model on a GPU will take of its memory, and sees to it that it takes no more than it may.

    Args:
        config: The resolved settings.
        loaded: The model.
        cache: The key-value cache, where there is one.
        graphs: Whether CUDA graphs are captured.
    """
    assert config.max_num_batched_tokens is not None
    cap_memory(loaded.device, config.gpu_memory_utilization)
    plan = plan_memory(
        loaded.model,
        loaded.config,
        total=device_memory(loaded.device),
        utilization=config.gpu_memory_utilization,
        batched_tokens=config.max_num_batched_tokens,
        adapters=0 if loaded.lora is None else loaded.lora.room_bytes,
        graph_tokens=MAX_TOKENS if graphs else 0,
        cache_tokens=0 if cache is None else cache.store.num_blocks * cache.store.block_size,
        dtype=loaded.dtype,
    )
    if plan.fits:
        logger.info("%s takes about %s", loaded.config.name, plan)
    else:
        logger.warning(
            "%s takes about %s, which is more than gpu_memory_utilization=%g allows: lower max_num_batched_tokens, now "
            "%d, or batches that do not fit will be run in halves",
            loaded.config.name,
            plan,
            config.gpu_memory_utilization,
            config.max_num_batched_tokens,
        )


def _max_model_len(config: EngineConfig, loaded: LoadedModel, tokenizer: Tokenizer | None) -> int:
    """The user's limit, else the checkpoint's; never more than the position embeddings allow.

    The lengths of queries and documents that a multi-vector checkpoint states win over that of its tokenizer: PyLate
    leaves there one token less, or whatever the last text was cut to.
    """
    most = loaded.config.max_positions
    if config.max_model_len is not None:
        if config.max_model_len > most:
            raise ConfigError(
                f"max_model_len={config.max_model_len:,} is more than {loaded.config.name} has positions for, {most:,}"
            )
        return config.max_model_len
    stated = loaded.recipe.max_seq_length
    if stated is None and tokenizer is not None:
        stated = tokenizer.max_length
    if loaded.multi_vector is not None and stated is not None:
        lengths = loaded.multi_vector.lengths
        stated = most if None not in lengths else max(stated, *(length or 0 for length in lengths))
    return most if stated is None else min(stated, most)
