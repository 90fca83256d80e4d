"""Where the time of our own engine goes.

torch's profiler sees the thread that it runs in. So the engine's parts are put together once more, on this thread: the
same preparation, scheduler, batches and runner. Modules and attention mark what runs inside them; within attention, and
outside of all marks, the names of operations decide.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from anypool.engine.batch import make_batch
from anypool.engine.engine import Engine
from anypool.engine.pieces import Piece
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.request import Request, leaves
from anypool.engine.scheduler import Scheduler
from anypool.model_executor.attention import Attention
from anypool.model_executor.layers.embedding import Embedding
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.layers.norm import LayerNorm, RMSNorm
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.pooling_model_runner import PoolingModelRunner
from anypool.pooling.pooler import Pooler
from anypool.pooling.tasks import PoolingTask

TOKENISING, LINEARS, PRODUCTS, SOFTMAX = "tokenising", "linear layers", "attention: products", "attention: softmax"
COPIES, NORMS, ROTARY, POOLING = "embedding and copies", "norms", "rotary and other elementwise", "pooling"
REST = "Python and the rest"
CATEGORIES = (TOKENISING, LINEARS, PRODUCTS, SOFTMAX, COPIES, NORMS, ROTARY, POOLING, REST)

_REPETITIONS = 3
_ATTENTION = "attention"
_MARK = "anypool: "
_MODULES: dict[type, str] = {
    Linear: LINEARS,
    nn.Linear: LINEARS,
    LayerNorm: NORMS,
    RMSNorm: NORMS,
    nn.LayerNorm: NORMS,
    Embedding: COPIES,
    nn.Embedding: COPIES,
    Pooler: POOLING,
}
# By what an operation's name has in it, the first that fits.
_WORDS = (
    (SOFTMAX, ("softmax", "masked_fill")),
    (PRODUCTS, ("scaled_dot_product", "flash_attention", "bmm", "matmul", "::mm", "einsum")),
    (COPIES, ("copy", "index", "embedding", "cat", "empty", "zeros", "full", "contiguous", "clone", "fill", "arange")),
    (LINEARS, ("linear", "addmm")),
    (NORMS, ("layer_norm", "rms_norm")),
)


def measure_breakdown(engine: Engine, texts: Sequence[str]) -> dict[str, float]:
    """Seconds that texts take, by `CATEGORIES`.

    Operations have the time that the profiler saw in them; what a run without it took longer is Python's. Of several
    runs the fastest counts. It closes the engine: two threads that compute slow each other down even while one of them
    waits, see `run_apart`.
    """
    engine.close()
    _prepare(engine, texts)
    began = time.perf_counter()
    requests = _prepare(engine, texts)
    tokenising = time.perf_counter() - began
    runner = PoolingModelRunner(engine.loaded.model, engine.loaded.device)
    whole = min(_timed(engine, runner, requests) for _ in range(_REPETITIONS))
    with _marks(engine.loaded.model):
        profiles = [_profiled(engine, runner, requests) for _ in range(_REPETITIONS)]
    seconds = min(profiles, key=lambda found: sum(found.values()))
    rest = max(0.0, whole - sum(seconds.values()))
    return {name: seconds[name] for name in CATEGORIES} | {TOKENISING: tokenising, REST: seconds[REST] + rest}


def _prepare(engine: Engine, texts: Sequence[str]) -> list[Request]:
    options = PromptOptions(truncate_prompt_tokens=-1)
    return list(leaves(engine.prepare(list(texts), PoolingTask.EMBED, options=options)))


def _run(engine: Engine, runner: PoolingModelRunner, requests: Sequence[Request]) -> None:
    """Everything between a queue of requests and their results."""
    assert engine.config.max_num_batched_tokens is not None
    scheduler = Scheduler(max_tokens=engine.config.max_num_batched_tokens, max_seqs=engine.config.max_num_seqs)
    scheduler.add(requests)
    while some := scheduler.next_batch():
        pieces = [Piece(request, len(request)) for request in some]
        batch: PackedBatch = make_batch(pieces, engine.loaded.device, pad_token_id=engine.loaded.config.pad_token_id)
        runner.run(batch, [request.plan for request in some])


def _timed(engine: Engine, runner: PoolingModelRunner, requests: Sequence[Request]) -> float:
    began = time.perf_counter()
    _run(engine, runner, requests)
    return time.perf_counter() - began


def _profiled(engine: Engine, runner: PoolingModelRunner, requests: Sequence[Request]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _run(engine, runner, requests)
    return _by_category(profiler.events() or ())


@contextmanager
def _marks(model: nn.Module) -> Iterator[None]:
    """Ranges of the profiler around modules and attention."""
    handles: list[Any] = []
    plain = Attention.__call__

    def attend(self: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        with record_function(_MARK + _ATTENTION):
            return plain(self, *args, **kwargs)

    for module in model.modules():
        category = next((name for kind, name in _MODULES.items() if isinstance(module, kind)), None)
        if category is not None:
            handles += _mark(module, category)
    Attention.__call__ = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        Attention.__call__ = plain  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def _mark(module: nn.Module, category: str) -> list[Any]:
    opened: list[record_function] = []

    def before(*_: Any) -> None:
        opened.append(record_function(_MARK + category))
        opened[-1].__enter__()

    def after(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _by_category(events: Sequence[Any]) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for event in events:
        if not event.name.startswith(_MARK):
            seconds[_category(event)] += event.self_cpu_time_total / 1e6
    return seconds


def _category(event: Any) -> str:
    marks, above = [], event.cpu_parent
    while above is not None:
        if above.name.startswith(_MARK):
            marks.append(above.name.removeprefix(_MARK))
        above = above.cpu_parent
    outermost = POOLING if POOLING in marks else (marks[0] if marks else None)
    if outermost is not None and outermost != _ATTENTION:
        return outermost
    names = []
    while event is not None and not event.name.startswith(_MARK):  # copies inside a product are the product's
        names.append(event.name)
        event = event.cpu_parent
    for category, words in _WORDS:
        if any(word in name for word in words for name in names):
            return category
    return SOFTMAX if outermost == _ATTENTION else ROTARY
