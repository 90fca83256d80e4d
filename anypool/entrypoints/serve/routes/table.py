"""Every route there is."""

from __future__ import annotations

from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.routes import adapters, cohere, invocations, openai, page, scoring, service, tei, tokens

ROUTES: tuple[Route, ...] = (
    *openai.ROUTES,
    *scoring.ROUTES,
    *cohere.ROUTES,
    *tei.ROUTES,
    *tokens.ROUTES,
    *invocations.ROUTES,
    *adapters.ROUTES,
    *service.ROUTES,
    *page.ROUTES,
)
