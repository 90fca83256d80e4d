"""What an engine does once: loads its model, in this process or over several, and decides on what was left open."""

from __future__ import annotations

import os
import time
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import torch

from anypool.adapters.load import LoadedModel
from anypool.config import EngineConfig
from anypool.engine import wire
from anypool.engine.executor import Executor, LocalExecutor
from anypool.engine.pieces import KVCache
from anypool.engine.processes import Processes
from anypool.engine.ranks import RanksExecutor, config_of_rank, join, make_rank
from anypool.engine.setup import load, make_cache, plan_gpu_memory, resolve
from anypool.engine.tokenization import Tokenizer
from anypool.errors import ConfigError
from anypool.model_executor import distributed
from anypool.model_executor.cpu import run_apart, set_up_threads
from anypool.model_executor.faults import is_peers_failure
from anypool.model_executor.pooling_model_runner import PoolingModelRunner

# Seconds within which a process that has ended is known to have.
_NEWS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Started:
    """What an engine works with.

    Attributes:
        config: The settings, with nothing left to be chosen.
        tokenizer: None where the user wants none or the checkpoint has none.
        loaded: The model, or rank 0's part of it.
        cache: The key-value cache; None where nothing needs one.
        executor: What runs batches.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None
    loaded: LoadedModel
    cache: KVCache | None
    executor: Executor


def start(config: EngineConfig) -> Started:
    """Loads a model.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint, or ranks of another engine are in this process.
        EngineError: A process of the ranks has ended, or has not started in time.
    """
    set_up_threads()
    if RanksExecutor.open_ranks:
        raise ConfigError(
            f"an engine of this process holds its model with {RanksExecutor.open_ranks} ranks, and such an engine is "
            "the only one of its process: close it first; if it was closed and did not end, start a new process"
        )
    return _start_alone(config) if config.num_ranks == 1 else _start_ranks(config)


def _start_alone(config: EngineConfig) -> Started:
    tokenizer, loaded = run_apart(partial(load, config))
    resolved = resolve(config, loaded, tokenizer)
    slots = None if loaded.lora is None else loaded.lora.slots
    runner = PoolingModelRunner(loaded.model, loaded.device, enforce_eager=config.enforce_eager, lora=slots)
    return _started(resolved, tokenizer, loaded, make_cache(resolved, loaded), LocalExecutor(runner))


def _start_ranks(config: EngineConfig) -> Started:
    configs = [config_of_rank(config, rank) for rank in range(config.num_ranks)]
    all_threads = torch.get_num_threads()
    share = all_threads if "OMP_NUM_THREADS" in os.environ else max(1, all_threads // config.num_ranks)
    processes = Processes(configs, threads=share)
    try:
        processes.wait_ready()
        began = time.monotonic()
        tokenizer, loaded = _load_rank_0(configs[0], processes, share)
        processes.wait_loaded(time.monotonic() - began)
        resolved = resolve(config, loaded, tokenizer)
        cache = make_cache(resolved, loaded)
        if cache is not None:
            processes.send(wire.Store(cache.store.num_blocks, cache.block_size))
        executor = RanksExecutor(resolved, make_rank(loaded), processes, threads=all_threads)
        return _started(resolved, tokenizer, loaded, cache, executor)
    except BaseException:
        run_apart(partial(torch.set_num_threads, all_threads))
        processes.end(at_once=True)
        distributed.stop()
        processes.clean_up()
        raise


def _load_rank_0(config: EngineConfig, processes: Processes, threads: int) -> tuple[Tokenizer | None, LoadedModel]:
    address = processes.address()
    processes.send(wire.Join(address))

    def join_and_load() -> tuple[Tokenizer | None, LoadedModel]:
        torch.set_num_threads(threads)  # of this thread and of those that come, the device thread among them
        join(0, config, address)
        return load(config)

    try:
        return run_apart(join_and_load, unless=processes.death)
    except RuntimeError as error:
        if is_peers_failure(error) and wait([processes.death], _NEWS_S).done:
            processes.death.result()  # the cause
        raise


def _started(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    loaded: LoadedModel,
    cache: KVCache | None,
    executor: LocalExecutor | RanksExecutor,
) -> Started:
    if loaded.device.type == "cuda":
        plan_gpu_memory(config, loaded, cache, graphs=executor.runner.graphs is not None)
    return Started(config=config, tokenizer=tokenizer, loaded=loaded, cache=cache, executor=executor)
