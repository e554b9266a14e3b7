"""POST /v1/embeddings."""

import base64

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..engine.embedding import embed
from .answering import JSONAnswer, validated
from .completions import prompts_of
from .errors import from_refusal, unavailable
from .generation import unless_disconnected
from .middleware import read_json_body
from .protocol import EmbeddingRequest
from .service import Service


async def embeddings(request: Request) -> Response:
    """One vector for each input."""
    service: Service = request.app.state.service
    raw = await read_json_body(request, service.settings.max_body)
    asked, name, inputs = await service.offload(_prepare, service, raw)
    try:
        vectors = await unless_disconnected(request.receive, _compute(service, inputs))
    except ValueError as error:
        raise from_refusal(error, ["input"]) from None
    except RuntimeError as error:
        if service.stopped:
            raise unavailable(str(error)) from None
        raise
    as_text = asked.encoding_format == "base64"
    n_tokens = sum(map(len, inputs))
    return JSONAnswer(
        {
            "object": "list",
            "model": name,
            "data": [
                {"object": "embedding", "index": index, "embedding": _base64(vector) if as_text else vector.tolist()}
                for index, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


def _prepare(service: Service, raw: bytes) -> tuple[EmbeddingRequest, str, list[list[int]]]:
    asked = validated(EmbeddingRequest, raw)
    name = service.model_name(asked.model)
    return asked, name, [ids for _, ids in prompts_of(service, "input", asked.input)]


async def _compute(service: Service, inputs: list[list[int]]) -> list[np.ndarray]:
    """Each input between two steps of the engine, so that others go on in between."""
    admission = service.llm.engine.admission
    for ids in inputs:
        admission.refuse_unfit(len(admission.checked_ids(ids)), 0)
    return [await service.engine.run(embed, service.llm.engine, ids) for ids in inputs]


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
