"""What is counted about requests, and all counters in Prometheus' form.

Nothing here costs a request more than a few additions: the text is made when it is asked for, from plain counters.
Every series is there from the start, at zero. Beside our own names are those of text-embeddings-inference (`te_...`)
and vLLM (`vllm:...`) that dashboards exist for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from anypool.engine.metrics import EngineMetrics, Histogram
from anypool.entrypoints.serve.exchange import Exchange
from anypool.entrypoints.serve.http_errors import Failure
from anypool.entrypoints.serve.models import ServedModels
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.served import ServedModel
from anypool.pooling.tasks import PoolingTask

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_OUTCOMES = ("ok", "error", "nan", "cancelled", "expired")

# What text-embeddings-inference calls our failures, by status.
_TEI_FAILURES = ("validation", "overloaded", "inference", "unhealthy", "timeout", "unauthorized")
_TEI_NAME_BY_STATUS = {401: "unauthorized", 429: "overloaded", 503: "unhealthy", 504: "timeout"}

_EMBED_PATHS = {"/v1/embeddings", "/embeddings", "/v2/embed", "/embed", "/embed_all", "/similarity", "/pooling"}
_PREDICT_PATHS = {"/classify", "/reward", "/predict", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}

# Our name, what it says, and the engine's counter.
_ENGINE_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("rejected", "Requests refused because too much was waiting", "rejected"),
    ("truncated_inputs", "Inputs that were cut", "truncated"),
    ("prompt_tokens", "Tokens of inputs", "prompt_tokens"),
    ("computed_tokens", "Tokens that went through the model", "computed_tokens"),
    ("cached_tokens", "Tokens whose keys were read from the prefix cache", "cached_tokens"),
    ("looked_up_tokens", "Tokens that were looked for in the prefix cache", "looked_up_tokens"),
    ("batches", "Forward passes", "batches"),
    ("chunks", "Forward passes that ran a part of a long prompt", "chunks"),
    ("padding_tokens", "Tokens that filled forward passes up to a common size", "padding_tokens"),
    ("failed_batches", "Forward passes that raised", "failed_batches"),
    ("out_of_memory", "Forward passes that ran out of memory", "out_of_memory"),
)
_ENGINE_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("batch_tokens", "Tokens of a forward pass", "batch_tokens"),
    ("batch_sequences", "Inputs of a forward pass", "batch_sequences"),
    ("batch_fill", "Tokens of a forward pass as a share of the budget", "batch_fill"),
    ("queue_seconds", "Between being queued and the first forward pass", "queue_s"),
    ("prepare_seconds", "Checking and tokenising, per call", "prepare_s"),
    ("forward_seconds", "In the backbone, per forward pass", "forward_s"),
    ("pool_seconds", "In the poolers, per forward pass", "pool_s"),
)


def _seconds() -> Histogram:
    return Histogram(_SECONDS)


@dataclass
class _Group:
    """Requests of some routes."""

    count: Counter[str] = field(default_factory=Counter)
    success: Counter[str] = field(default_factory=Counter)
    duration: Histogram = field(default_factory=_seconds)
    tokenization: Histogram = field(default_factory=_seconds)
    queue: Histogram = field(default_factory=_seconds)
    inference: Histogram = field(default_factory=_seconds)


class ServerMetrics:
    """Counts requests; all calls come from the event loop.

    Args:
        models: Whose engines' counters are shown too.
        paths: Of the routes, each of which has its series from the start.
    """

    def __init__(self, models: ServedModels, paths: Sequence[str]) -> None:
        self.models = models
        self.responses: Counter[tuple[str, int]] = Counter({(path, 200): 0 for path in paths})
        self.failures: Counter[str] = Counter(dict.fromkeys(_TEI_FAILURES, 0))
        self.running = 0
        self.input_tokens = Histogram(_TOKENS)
        self.groups = {"request": _Group(), "embed": _Group(), "predict": _Group()}
        self._groups_by_path = {
            path: [
                self.groups["request"],
                *([self.groups["embed"]] if path in _EMBED_PATHS else []),
                *([self.groups["predict"]] if path in _PREDICT_PATHS else []),
            ]
            for path in paths
        }
        self._registry = CollectorRegistry()
        self._registry.register(_Exposition(self))

    def began(self) -> None:
        """A request has come."""
        self.running += 1

    def ran(self, exchange: Exchange) -> None:
        """A request has run on a model."""
        self.input_tokens.observe(exchange.tokens)
        for group in self._groups_by_path.get(exchange.path, ()):
            group.tokenization.observe(exchange.prepare_s)
            group.queue.observe(exchange.queue_s)
            group.inference.observe(exchange.inference_s)

    def failed(self, failure: Failure) -> None:
        """A request is answered with an error."""
        name = _TEI_NAME_BY_STATUS.get(failure.status, "validation" if failure.status < 500 else "inference")
        self.failures[name] += 1

    def ended(self, exchange: Exchange, route: Route | None, status: int) -> None:
        """A request has its answer."""
        self.running -= 1
        path = "" if route is None else (exchange.path if exchange.path in self._groups_by_path else route.paths[0])
        self.responses[path, status] += 1
        if route is None or not route.calls:
            return
        seconds = time.perf_counter() - exchange.began
        method = "single" if exchange.inputs <= 1 else "batch"
        for group in self._groups_by_path.get(exchange.path, ()):
            group.count[method] += 1
            group.success[method] += status < 400
            group.duration.observe(seconds)

    def abandoned(self) -> None:
        """A request will have no answer."""
        self.running -= 1

    def text(self) -> bytes:
        """All counters, in Prometheus' text form."""
        return generate_latest(self._registry)


class _Exposition(Collector):
    """Counters -> families of samples."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._tei()
        for name, text, key in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(f"anypool_{name}", text, labels=["model"])
            for model in self._metrics.models:
                counter.add_metric([model.name], getattr(model.engine.metrics, key))
            yield counter
        for name, text, key in _ENGINE_HISTOGRAMS:
            yield self._histogram(f"anypool_{name}", text, key, label="model")
        yield from self._engines()
        yield from self._vllm()

    def _http(self) -> Iterator[Metric]:
        responses = CounterMetricFamily("anypool_http_requests", "Requests by path and status", labels=["path", "code"])
        for (path, status), count in list(self._metrics.responses.items()):
            responses.add_metric([path, str(status)], count)
        yield responses
        yield GaugeMetricFamily(
            "anypool_http_requests_running", "Requests that have no answer yet", self._metrics.running
        )
        group = self._metrics.groups["request"]
        for name, text, histogram in (
            ("duration", "From a request to its answer", group.duration),
            ("tokenization", "Of it, checking and tokenising", group.tokenization),
            ("queue", "Of it, in the queue", group.queue),
            ("inference", "Of it, in the model", group.inference),
        ):
            yield _family(f"anypool_http_{name}_seconds", text, {(): histogram})

    def _engines(self) -> Iterator[Metric]:
        inputs = CounterMetricFamily("anypool_inputs", "Inputs that have an answer", labels=["model", "outcome"])
        tasks = CounterMetricFamily("anypool_tasks", "Inputs that were queued", labels=["model", "task"])
        waiting = GaugeMetricFamily("anypool_queue_requests", "Inputs that wait", labels=["model"])
        tokens = GaugeMetricFamily("anypool_queue_tokens", "Tokens that wait", labels=["model"])
        adapters = GaugeMetricFamily("anypool_lora_adapters", "LoRA adapters that requests may name", labels=["model"])
        loads = CounterMetricFamily("anypool_lora_loads", "LoRA adapters that were put into a slot", labels=["model"])
        healthy = GaugeMetricFamily("anypool_healthy", "1 while requests are served", labels=["model"])
        replicas = GaugeMetricFamily("anypool_replicas", "Replicas that take inputs", labels=["model"])
        for model in self._metrics.models:
            counts, health = model.engine.metrics, model.engine.health()
            for outcome in _OUTCOMES:
                inputs.add_metric([model.name, outcome], counts.requests[outcome])
            for task in PoolingTask:
                tasks.add_metric([model.name, task.value], counts.tasks[task.value])
            waiting.add_metric([model.name], health.waiting_requests)
            tokens.add_metric([model.name], health.waiting_tokens)
            healthy.add_metric([model.name], health.is_ready)
            lora = model.engine.lora
            adapters.add_metric([model.name], 0 if lora is None else len(lora.requests))
            loads.add_metric([model.name], model.engine.metrics.adapter_loads)
            replicas.add_metric([model.name], health.replicas)
        yield from (inputs, tasks, waiting, tokens, adapters, loads, healthy, replicas)

    def _tei(self) -> Iterator[Metric]:
        """The names of text-embeddings-inference, whose counters do not end in `_total`."""
        for name, group in self._metrics.groups.items():
            count, success = _untyped(f"te_{name}_count"), _untyped(f"te_{name}_success")
            for method in ("single", "batch"):
                count.add_sample(count.name, {"method": method}, group.count[method])
                success.add_sample(success.name, {"method": method}, group.success[method])
            yield from (count, success)
            for part in ("duration", "tokenization", "queue", "inference"):
                full = f"te_{name}_{part}" + ("" if part == "duration" else "_duration")
                yield _family(full, "Seconds", {(): getattr(group, part)})
        failures = _untyped("te_request_failure")
        for kind, number in self._metrics.failures.items():
            failures.add_sample(failures.name, {"err": kind}, number)
        yield failures
        yield _family("te_request_input_length", "Tokens of a request", {(): self._metrics.input_tokens})
        engines = [model.engine for model in self._metrics.models]
        yield _sum("te_batch_next_size", [engine.metrics.batch_sequences for engine in engines])
        yield _sum("te_batch_next_tokens", [engine.metrics.batch_tokens for engine in engines])
        waiting = sum(engine.health().waiting_requests for engine in engines)
        yield GaugeMetricFamily("te_queue_size", "Inputs that wait", waiting)

    def _vllm(self) -> Iterator[Metric]:
        """The names of vLLM."""
        running = GaugeMetricFamily("vllm:num_requests_running", "Inputs that run", labels=["model_name"])
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Inputs that wait", labels=["model_name"])
        for model in self._metrics.models:
            running.add_metric([model.name], _running(model))
            waiting.add_metric([model.name], model.engine.health().waiting_requests)
        yield from (running, waiting)
        for name, key in (
            ("prompt_tokens", "prompt_tokens"),
            ("prefix_cache_queries", "looked_up_tokens"),
            ("prefix_cache_hits", "cached_tokens"),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", "As vLLM has it", labels=["model_name"])
            for model in self._metrics.models:
                counter.add_metric([model.name], getattr(model.engine.metrics, key))
            yield counter
        success = CounterMetricFamily("vllm:request_success", "Answered inputs", labels=["model_name"])
        for model in self._metrics.models:
            success.add_metric([model.name], model.engine.metrics.requests["ok"])
        yield success
        yield self._histogram("vllm:request_queue_time_seconds", "In the queue", "queue_s", label="model_name")
        first = next(iter(self._metrics.models)).name
        group = self._metrics.groups["request"]
        for name, histogram in (
            ("e2e_request_latency_seconds", group.duration),
            ("request_inference_time_seconds", group.inference),
        ):
            yield _family(f"vllm:{name}", "As vLLM has it", {(first,): histogram}, labels=["model_name"])

    def _histogram(self, name: str, text: str, key: str, *, label: str) -> Metric:
        by_model: dict[tuple[str, ...], Histogram] = {
            (model.name,): getattr(model.engine.metrics, key) for model in self._metrics.models
        }
        return _family(name, text, by_model, labels=[label])


def _running(model: ServedModel) -> int:
    counts: EngineMetrics = model.engine.metrics
    unfinished = sum(counts.tasks.values()) - sum(counts.requests.values())
    return max(0, unfinished - model.engine.health().waiting_requests)


def _family(
    name: str, text: str, histograms: Mapping[tuple[str, ...], Histogram], *, labels: Sequence[str] = ()
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    for values, histogram in histograms.items():
        total, buckets = 0, []
        for bound, count in zip((*histogram.bounds, float("inf")), list(histogram.buckets), strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", total))
        family.add_metric(list(values), buckets, histogram.sum)
    return family


def _sum(name: str, histograms: Sequence[Histogram]) -> Metric:
    """Histograms of several models as one."""
    whole = Histogram(histograms[0].bounds)
    for one in histograms:
        whole.buckets = [a + b for a, b in zip(whole.buckets, one.buckets, strict=True)]
        whole.sum += one.sum
    return _family(name, "Of a forward pass", {(): whole})


def _untyped(name: str) -> Metric:
    return Metric(name, "As text-embeddings-inference has it", "unknown")
