"""The OpenAPI document, from the table of routes and their schemas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

import anypool
from anypool.entrypoints.serve.http_errors import ErrorStyle
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.schemas.errors import CohereErrorResponse, ErrorResponse, TEIErrorResponse

_ERRORS: dict[ErrorStyle, type[BaseModel]] = {
    ErrorStyle.OPENAI: ErrorResponse,
    ErrorStyle.TEI: TEIErrorResponse,
    ErrorStyle.COHERE: CohereErrorResponse,
}
_REFERENCE = "#/components/schemas/{model}"
_TEXT_ANSWERS = {"/metrics": "text/plain"}


def document(routes: Sequence[Route], *, has_keys: bool) -> dict[str, Any]:
    """The document.

    Args:
        routes: What is served.
        has_keys: Whether routes need an API key.
    """
    shown = [route for route in routes if route.is_shown]
    used: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, mode) for mode, models in _schemas(shown) for model in models
    ]
    _, definitions = models_json_schema(list(dict.fromkeys(used)), ref_template=_REFERENCE)
    paths = {
        path: {method.lower(): _operation(route, path, method, has_keys=has_keys) for method in route.methods}
        for route in shown
        for path in route.paths
    }
    components: dict[str, Any] = {"schemas": dict(sorted(definitions["$defs"].items()))}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "anypool", "version": anypool.__version__, "summary": "Pooling models over HTTP"},
        "paths": paths,
        "components": components,
    }


def _schemas(routes: Iterable[Route]) -> Iterable[tuple[JsonSchemaMode, Iterable[type[BaseModel]]]]:
    for route in routes:
        yield "validation", [call.schema for call in route.calls]
        yield "validation", [call.response for call in route.calls]
        yield "validation", [] if route.response is None else [route.response]
        yield "validation", [_ERRORS[style] for style in _styles(route)]


def _operation(route: Route, path: str, method: str, *, has_keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "operationId": f"{method.lower()}{path}"}
    parameters = [(name, "query") for name in route.query]
    if "{" in path:
        parameters.append((path.partition("{")[2][:-1], "path"))
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in parameters
        ]
    if route.calls:
        body = _any_of([call.schema for call in route.calls])
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    errors = {"application/json": {"schema": _any_of([_ERRORS[style] for style in _styles(route)])}}
    operation["responses"] = {
        "200": {"description": "The answer", "content": _answers(route, path)},
        "4XX": {"description": "The request cannot be served as asked", "content": errors},
        "5XX": {"description": "The server failed, or cannot do this now", "content": errors},
    }
    if has_keys and not route.is_public:
        operation["security"] = [{"key": []}]
    return operation


def _answers(route: Route, path: str) -> dict[str, Any]:
    if path in _TEXT_ANSWERS:
        return {_TEXT_ANSWERS[path]: {"schema": {"type": "string"}}}
    models = [call.response for call in route.calls] or ([route.response] if route.response else [])
    answers: dict[str, Any] = {"application/json": {"schema": _any_of(models)}}
    if any("encoding_format" in call.schema.model_fields for call in route.calls):
        answers["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return answers


def _any_of(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    references = [{"$ref": _REFERENCE.format(model=model.__name__)} for model in dict.fromkeys(models)]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _styles(route: Route) -> list[ErrorStyle]:
    return list(dict.fromkeys([route.style, *(call.style for call in route.calls)]))
