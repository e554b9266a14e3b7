"""What tells about the server: models, health, version, metrics, the page pool."""

import gzip
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.arena_map import arena_map
from ..version import commit, version
from .answering import JSONAnswer
from .errors import APIError
from .metrics import render
from .service import Service

SMALL = 4096  # bytes of an answer that is not worth compressing


async def models(request: Request) -> Response:
    """The model, under each of its names."""
    service: Service = request.app.state.service
    return JSONAnswer({"object": "list", "data": [_model(service, name) for name in service.names]})


async def model(request: Request) -> Response:
    """One of them."""
    service: Service = request.app.state.service
    return JSONAnswer(_model(service, service.model_name(request.path_params["model"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "pagedkv",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
    }


async def health(request: Request) -> Response:
    """200 while the engine can compute."""
    service: Service = request.app.state.service
    if not service.alive:
        raise APIError(503, "the engine has stopped", code="unavailable")
    return JSONAnswer({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 while new requests are taken."""
    service: Service = request.app.state.service
    if service.stopped:
        raise APIError(503, "the server is shutting down", code="unavailable")
    return JSONAnswer({"status": "ready"})


async def show_version(request: Request) -> Response:
    """Which build this is, and what equal answers depend on."""
    service: Service = request.app.state.service
    commit_id = await service.offload(commit)
    return JSONAnswer({"version": version(), "commit": commit_id, "system_fingerprint": service.fingerprint})


async def metrics(request: Request) -> Response:
    """Prometheus text. Counted between two steps, so that what belongs together adds up."""
    service: Service = request.app.state.service
    try:
        stats = await service.engine.run(service.llm.engine.stats)
    except RuntimeError:  # the engine has stopped: what it counted last
        stats = service.llm.engine.stats()
    body, media_type = render(service, stats, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": media_type})


async def debug_arena(request: Request) -> Response:
    """The page pool between two steps; see docs/server.md."""
    service: Service = request.app.state.service
    found = await service.engine.run(arena_map, service.llm.engine)
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    answer = JSONAnswer(found, headers=headers)
    if len(answer.body) > SMALL and "gzip" in request.headers.get("accept-encoding", ""):
        body = await service.offload(gzip.compress, answer.body, 1)
        return Response(body, headers={**headers, "Content-Encoding": "gzip"}, media_type=answer.media_type)
    return answer
