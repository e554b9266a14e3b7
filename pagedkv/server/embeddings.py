"""POST /v1/embeddings."""

import base64
import uuid
from collections.abc import Sequence

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import EmbeddingRequestOutput
from .answering import JSONAnswer, validated
from .completions import prompts_of
from .generation import Generation, raise_failure, unless_disconnected
from .middleware import read_json_body
from .protocol import EmbeddingRequest
from .service import Service


async def embeddings(request: Request) -> Response:
    """One vector for each input."""
    service: Service = request.app.state.service
    raw = await read_json_body(request, service.settings.max_body)
    asked, name, inputs = await service.offload(_prepare, service, raw)
    outputs = await unless_disconnected(request.receive, _compute(service, inputs, asked.priority or 0))
    as_text = asked.encoding_format == "base64"
    n_tokens = sum(map(len, inputs))
    return JSONAnswer(
        {
            "object": "list",
            "model": name,
            "data": [
                {"object": "embedding", "index": index, "embedding": _shown(output.outputs.embedding, as_text)}
                for index, output in enumerate(outputs)
            ],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


def _prepare(service: Service, raw: bytes) -> tuple[EmbeddingRequest, str, list[list[int]]]:
    asked = validated(EmbeddingRequest, raw)
    name = service.model_name(asked.model)
    return asked, name, [ids for _, ids in prompts_of(service, "input", asked.input)]


async def _compute(service: Service, inputs: Sequence[list[int]], priority: int) -> list[EmbeddingRequestOutput]:
    """All inputs as requests of the engine, aborted together if this is cancelled."""
    name = f"embd-{uuid.uuid4().hex}"
    generation = await Generation.queue(
        service,
        len(inputs),
        lambda i: service.engine.submit_embedding(inputs[i], f"{name}-{i}", priority),
        ["input"],
    )
    try:
        outputs = await generation.finals()
    finally:
        await generation.aclose()
    for output in outputs:
        raise_failure([output.outputs])
    return outputs


def _shown(vector: np.ndarray | None, as_text: bool) -> str | list[float]:
    assert vector is not None
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") if as_text else vector.tolist()
