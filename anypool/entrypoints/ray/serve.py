"""The HTTP server on Ray Serve: replicas of an engine, as many as the tokens that wait need.

serve run anypool.entrypoints.ray.serve:app model=sentence-transformers/all-MiniLM-L6-v2 max_replicas=4
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from anypool.config import EngineConfig
from anypool.engine.replicas import start_engine
from anypool.entrypoints.ray.data import import_ray
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from fastapi import FastAPI


class Replica:
    """One engine, and the application of `anypool serve` over it.

    Args:
        config: What to load and how.
        options: The server's; what is about a socket is Ray's.
    """

    def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        self.engine, self.options = start_engine(config), options

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.engine, self.options)

    def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        health = self.engine.health()
        if health.status in ("dead", "stuck"):
            raise EngineDeadError(health.message)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `TokenPolicy` goes by."""
        health = self.engine.health()
        return {"waiting_tokens": float(health.waiting_tokens), "busy": float(health.status == "busy")}

    def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close()


class TokenPolicy:
    """How many replicas there should be: enough for the tokens that wait, and as many as are busy on the average.

    Args:
        tokens_per_replica: How many may wait for each.
    """

    def __init__(self, tokens_per_replica: int) -> None:
        self.tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and a state that this policy does not need."""
        found = context.aggregated_metrics or {}
        waiting = sum(found.get("waiting_tokens", {}).values())
        busy = sum(found.get("busy", {}).values())
        wanted = max(math.ceil(waiting / self.tokens_per_replica), round(busy))
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, low), high), {}


def build_app(
    model: str,
    *,
    min_replicas: int = 1,
    max_replicas: int = 1,
    tokens_per_replica: int = 100_000,
    max_ongoing_requests: int = 1000,
    num_cpus: float = 1,
    num_gpus: float = 0,
    autoscaling: Mapping[str, Any] | None = None,
    options: ServerOptions | None = None,
    **engine_args: Any,
) -> Any:
    """An application for `ray.serve.run`.

    Args:
        model: A folder, a `.gguf` file or a hub id, which every node can read.
        min_replicas: Fewest engines.
        max_replicas: Most engines.
        tokens_per_replica: How many tokens may wait for each before there is one more.
        max_ongoing_requests: Most requests that a replica is given at a time; the engine puts them in batches.
        num_cpus: Of each replica, and its number of threads.
        num_gpus: Of each replica.
        autoscaling: Further fields of Serve's `AutoscalingConfig`, such as `upscale_delay_s`.
        options: The server's, such as `api_key`; what is about a socket is Ray's.
        **engine_args: The fields of `EngineConfig`.

    Raises:
        ConfigError: A setting is unknown or wrong.
        MissingDependencyError: Ray is not installed.
    """
    import_ray()
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    config = EngineConfig.from_kwargs(model=model, **{"use_tqdm_on_load": False, **engine_args})
    if tokens_per_replica < 1:
        raise ConfigError(f"tokens_per_replica={tokens_per_replica!r} is not a positive number of tokens")
    policy = AutoscalingPolicy(
        policy_function=f"{TokenPolicy.__module__}:{TokenPolicy.__name__}",
        policy_kwargs={"tokens_per_replica": tokens_per_replica},
    )
    scaling = AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        policy=policy,
        **(autoscaling or {}),
    )
    deployment = serve.deployment(
        name="anypool",
        autoscaling_config=scaling,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
    )(serve.ingress()(Replica))
    return deployment.bind(config, options or ServerOptions())


def app(arguments: dict[str, Any]) -> Any:
    """`build_app` for `serve run anypool.entrypoints.ray.serve:app name=value ...` and for Serve's YAML files.

    Values of the command line are texts: what is JSON, such as `4`, `true` or `{"pooling_type": "CLS"}`, is read as it.
    Fields of `ServerOptions` may be given beside the others.
    """
    values = {name: _value(value) for name, value in arguments.items()}
    if "model" not in values:
        raise ConfigError("give a model: model=NAME")
    given = {one.name: values.pop(one.name) for one in fields(ServerOptions) if one.name in values}
    for one in fields(ServerOptions):
        if isinstance(one.default, tuple) and one.name in given:
            given[one.name] = (given[one.name],) if isinstance(given[one.name], str) else tuple(given[one.name])
    return build_app(**values, options=ServerOptions(**given))


def _value(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given
