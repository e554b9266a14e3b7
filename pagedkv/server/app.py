"""The application: routes, what stands before them, and how errors look."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from . import openapi
from .answering import JSONAnswer
from .chat import chat_completions
from .completions import completions
from .embeddings import embeddings
from .errors import APIError
from .fingerprint import fingerprint
from .generation import Disconnected
from .middleware import Authentication, RefuseWhileDraining
from .page import page_routes
from .service import Service
from .settings import ServerSettings
from .status import debug_arena, health, metrics, model, models, ready, show_version
from .tokens import detokenize, tokenize

CLIENT_CLOSED = 499  # seen by nobody


def create_app(llm: Any, settings: ServerSettings | None = None) -> Starlette:
    """The ASGI application that serves `llm`, an LLM that stays the caller's and must outlive it.

    `app.state.service` is the Service. The engine's thread starts with the first request and ends with the
    application's lifespan, when running requests get `settings.shutdown_timeout` seconds. Reads the model's files once,
    for the system fingerprint.
    """
    settings = settings or ServerSettings()
    service = Service(llm, settings, fingerprint(llm))
    app = Starlette(
        routes=_routes(service),
        middleware=_middleware(service),
        exception_handlers={
            APIError: _show_api_error,
            HTTPException: _show_http_error,
            Disconnected: _nobody,
            ClientDisconnect: _nobody,
            Exception: _show_failure,
        },
        lifespan=_lifespan,
    )
    app.state.service = service
    app.router.redirect_slashes = False
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await app.state.service.close()


def _routes(service: Service) -> list[BaseRoute]:
    document = openapi.document(service.settings, service.names)

    async def show_document(request: Request) -> Response:
        return JSONAnswer(document)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/version", show_version),
        Route("/openapi.json", show_document),
        Route("/debug/arena", debug_arena),
        *page_routes(),
    ]


def _middleware(service: Service) -> list[Middleware]:
    """From the outside in: what a page of another origin may read, who may ask, and whether anybody may now."""
    settings = service.settings
    found = []
    if settings.cors_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # clients send many of their own
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if settings.api_keys:
        found.append(Middleware(Authentication, keys=settings.api_keys))
    found.append(Middleware(RefuseWhileDraining, is_draining=lambda: service.draining))
    return found


async def _show_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _show_http_error(request: Request, error: Exception) -> Response:
    """The router's own 404 and 405."""
    assert isinstance(error, HTTPException)
    text = {404: f"no route {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
    headers = dict(error.headers or {})
    return APIError(error.status_code, text.get(error.status_code, error.detail), headers=headers).response()


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _show_failure(request: Request, error: Exception) -> Response:
    """A fault of this server; the traceback goes to the log."""
    return APIError(500, f"internal error, {type(error).__name__}", code="internal_error").response()
