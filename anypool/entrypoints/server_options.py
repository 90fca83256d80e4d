"""What a server is started with, beside its models. Frozen, keyword-only, checked when built."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from anypool.config import from_mapping, is_int, require
from anypool.errors import ConfigError

# Environment variables are these letters and a field's name.
_ENVIRONMENT = "ANYPOOL_SERVE_"
LOG_FORMATS = ("text", "json")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Everything about a server that is not about its model. The flags of `anypool serve` are these fields."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for every network")
    port: int = _option(8000, "port to listen on; 0 for a free one")
    api_key: tuple[str, ...] = _option((), "key that clients must send; may be given several times")
    api_key_file: str | None = _option(None, "file with one key per line, read again when it changes")
    max_body_bytes: int = _option(64 * 1024 * 1024, "largest request body")
    max_inputs: int = _option(16_384, "most inputs in one request")
    max_concurrent_requests: int | None = _option(
        None, "most requests that run a model at once, above which one is answered with 429; by default no limit"
    )
    max_request_tokens: int | None = _option(None, "most tokens in one request; by default only the queue's limit")
    request_timeout: float | None = _option(None, "seconds after which a request is answered with 504")
    body_timeout: float = _option(120.0, "seconds that a request's body may take to arrive")
    allow_origin: tuple[str, ...] = _option((), "origin that browsers may call from, or *; may be given several times")
    trust_request_chat_template: bool = _option(False, "take chat templates from requests, run in a sandbox")
    allow_image_urls: bool = _option(False, "fetch images that requests name by an http or https URL")
    lora_dir: tuple[str, ...] = _option(
        (), "folder that LoRA adapters may be loaded from while the server runs; may be given several times"
    )
    metrics: bool = _option(True, "serve /metrics")
    docs: bool = _option(True, "serve /docs and /openapi.json")
    page: bool = _option(True, "serve a page at / to try the models in a browser")
    access_log: bool = _option(False, "log a line for every request")
    otlp_traces_endpoint: str | None = _option(None, "URL of a collector that takes OpenTelemetry traces over HTTP")
    log_format: str = _option("text", "'text' or 'json', one object per line")
    shutdown_delay: float = _option(0.0, "seconds between not being ready any more and taking no more connections")
    drain_timeout: int = _option(30, "seconds that running requests get to finish after SIGTERM")
    ssl_certfile: str | None = _option(None, "certificate in PEM form, for HTTPS")
    ssl_keyfile: str | None = _option(None, "private key of the certificate")
    ssl_keyfile_password: str | None = _option(None, "password of the private key")
    ssl_ca_certs: str | None = _option(None, "certificates that clients must have one signed by")

    def __post_init__(self) -> None:
        for name in ("api_key", "allow_origin", "lora_dir"):
            value = getattr(self, name)
            listed = (value,) if isinstance(value, str) else tuple(value)
            require(all(isinstance(one, str) and one for one in listed), f"{name}={value!r} is not texts")
            object.__setattr__(self, name, listed)
        for name in ("max_body_bytes", "max_inputs", "max_request_tokens", "max_concurrent_requests", "drain_timeout"):
            value, least = getattr(self, name), 0 if name == "drain_timeout" else 1
            optional = name in ("max_request_tokens", "max_concurrent_requests") and value is None
            require(optional or (is_int(value) and value >= least), f"{name}={value!r} is not a number from {least} on")
        for name in ("request_timeout", "body_timeout", "shutdown_delay"):
            value = getattr(self, name)
            optional = name == "request_timeout" and value is None
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            enough = is_number and (value >= 0 if name == "shutdown_delay" else value > 0)
            require(optional or enough, f"{name}={value!r} is not a number of seconds")
        require(is_int(self.port) and 0 <= self.port <= 65535, f"port={self.port} is not 0 to 65535")
        for folder in self.lora_dir:
            is_folder = os.path.isdir(folder) and os.path.realpath(folder) != os.path.realpath(os.sep)
            require(is_folder, f"lora_dir={folder!r} is not a folder, or all of the machine")
        require(
            self.log_format in LOG_FORMATS,
            f"log_format={self.log_format!r} is unknown; known: {', '.join(LOG_FORMATS)}",
        )
        require(
            self.otlp_traces_endpoint is None or self.otlp_traces_endpoint.startswith(("http://", "https://")),
            f"otlp_traces_endpoint={self.otlp_traces_endpoint!r} is not an http:// or https:// URL, such as "
            "http://127.0.0.1:4318/v1/traces",
        )
        require(
            self.ssl_certfile is not None or not (self.ssl_keyfile or self.ssl_ca_certs),
            "ssl_keyfile and ssl_ca_certs need ssl_certfile",
        )

    @classmethod
    def gather(
        cls, given: Mapping[str, Any], *, path: str | None = None, environment: Mapping[str, str] | None = None
    ) -> ServerOptions:
        """Options from flags, which win over the environment, which wins over a file.

        Args:
            given: Flags by field.
            path: A JSON file with an object of fields.
            environment: Variables; None for those of the process.

        Raises:
            ConfigError: A name or a value is wrong.
        """
        from_file = {} if path is None else _read(path)
        variables = os.environ if environment is None else environment
        from_environment = {
            one.name: _parse(variables[key], one.type, key)
            for one in fields(cls)
            if (key := _ENVIRONMENT + one.name.upper()) in variables
        }
        return from_mapping(cls, {**from_file, **from_environment, **given}, what="server options")


def _read(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    require(isinstance(content, dict), f"{path} holds no JSON object of options")
    return {name.replace("-", "_"): value for name, value in content.items()}


def _parse(text: str, annotation: Any, key: str) -> Any:
    """A variable's text as a field's value; lists are separated by commas."""
    kind = str(annotation).removesuffix(" | None")
    if kind == "str":
        return text
    if kind.startswith("tuple"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind == "bool":
        require(text.lower() in ("0", "1", "false", "true"), f"{key}={text!r} is neither true nor false")
        return text.lower() in ("1", "true")
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        raise ConfigError(f"{key}={text!r} is not a number") from None
