"""GET /openapi.json: every route as it is, made from the models that check requests."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..version import version
from . import answers, protocol
from .settings import ServerSettings

# path, request model, answer model, what it does, whether it can answer as events
POSTS: tuple[tuple[str, type[BaseModel], type[BaseModel], str, bool], ...] = (
    ("/v1/completions", protocol.CompletionRequest, answers.CompletionAnswer, "Continue prompts", True),
    ("/v1/chat/completions", protocol.ChatRequest, answers.ChatAnswer, "Answer a conversation", True),
    ("/v1/embeddings", protocol.EmbeddingRequest, answers.EmbeddingAnswer, "One vector for each input", False),
    ("/tokenize", protocol.TokenizeRequest, answers.TokenizeAnswer, "Token ids of a text or a conversation", False),
    ("/detokenize", protocol.DetokenizeRequest, answers.DetokenizeAnswer, "Text of token ids", False),
)
GETS: tuple[tuple[str, type[BaseModel] | None, str, str], ...] = (
    ("/v1/models", answers.ModelList, "The model, under each of its names", "application/json"),
    ("/v1/models/{model}", answers.ModelAnswer, "One of them", "application/json"),
    ("/health", answers.StatusAnswer, "Whether the engine can compute", "application/json"),
    ("/ready", answers.StatusAnswer, "Whether new requests are taken", "application/json"),
    ("/version", answers.VersionAnswer, "Version, commit and system fingerprint", "application/json"),
    ("/metrics", None, "Metrics for Prometheus", "text/plain"),
    ("/debug/arena", answers.ArenaAnswer, "The page pool between two steps", "application/json"),
    ("/openapi.json", None, "This document", "application/json"),
)
# each event of a stream; data is "[DONE]" or the JSON text of a chunk or an error
EVENT = {"type": "object", "properties": {"data": {"type": "string", "minLength": 1}}, "required": ["data"]}
OPEN = ("/health", "/ready")
REFUSALS = {
    "400": "The request is not understood, or asks for what this server cannot do",
    "401": "No valid API key",
    "404": "No such model",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "429": "The queue is full; come back after Retry-After seconds",
    "500": "The model failed",
    "503": "The server is shutting down",
}


def document(settings: ServerSettings, model_names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with these settings, that serves one model under these names."""
    used = {model for _, asked, answer, _, _ in POSTS for model in (asked, answer)}
    used |= {model for _, model, _, _ in GETS if model is not None} | {answers.ErrorAnswer}
    models = sorted(used, key=lambda model: model.__name__)
    mode = {model: "validation" for model in models}
    names, definitions = models_json_schema(
        [(model, mode[model]) for model in models],  # type: ignore[misc]
        ref_template="#/components/schemas/{model}",
    )
    schemas = {model: schema for (model, _), schema in names.items()}
    _apply_limits(definitions["$defs"], settings, model_names)
    secured = bool(settings.api_keys)
    paths: dict[str, Any] = {}
    for path, asked, answer, text, streams in POSTS:
        content: dict[str, Any] = {"application/json": {"schema": schemas[answer]}}
        if streams:
            content["text/event-stream"] = {"schema": EVENT}
        refusals = [code for code in REFUSALS if code != "401" or secured]
        paths[path] = {
            "post": {
                "operationId": _operation(path),
                "summary": text,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schemas[asked]}}},
                "responses": {"200": {"description": text, "content": content}, **_refusals(refusals)},
            }
        }
    for path, found, text, media in GETS:
        refusals = ["401"] if secured and path not in OPEN else []
        refusals += ["404"] if "{" in path else []
        refusals += ["503"] if path in OPEN else []
        schema = (
            schemas[found] if found is not None else {"type": "object" if media == "application/json" else "string"}
        )
        paths[path] = {
            "get": {
                "operationId": _operation(path),
                "summary": text,
                "responses": {
                    "200": {"description": text, "content": {media: {"schema": schema}}}, **_refusals(refusals)
                },
            }
        }  # fmt: skip
        if "{" in path:
            paths[path]["get"]["parameters"] = [
                {
                    "name": "model",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "enum": list(model_names)},
                }
            ]
        if path in OPEN:
            paths[path]["get"]["security"] = []
    found_document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pagedkv", "version": version(), "description": "OpenAI-compatible; see docs/server.md."},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }
    if secured:
        found_document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic", "description": "Any name; the key is the password."},
        }
        found_document["security"] = [{"bearer": []}, {"basic": []}]
    return found_document


def _operation(path: str) -> str:
    return path.strip("/").replace("{model}", "one").replace("/", "_").replace(".", "_")


def _refusals(codes: list[str]) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ErrorAnswer"}
    return {
        code: {"description": REFUSALS[code], "content": {"application/json": {"schema": schema}}} for code in codes
    }


def _apply_limits(definitions: dict[str, Any], settings: ServerSettings, model_names: Sequence[str]) -> None:
    """Put this server's own bounds in place of those nobody can exceed, and the names it answers to."""
    for _, asked, _, _, _ in POSTS:
        definitions[asked.__name__]["properties"]["model"]["anyOf"][0]["enum"] = list(model_names)
    bounds = {
        "n": settings.max_n,
        "best_of": settings.max_n,
        "logprobs": settings.max_logprobs,
        "top_logprobs": settings.max_logprobs,
        "prompt_logprobs": settings.max_logprobs,
    }
    for name in ("CompletionRequest", "ChatRequest"):
        for field, bound in bounds.items():
            for option in definitions[name]["properties"].get(field, {}).get("anyOf", ()):
                if option.get("type") == "integer":
                    option["maximum"] = min(bound, option["maximum"])
