"""POST /tokenize and /detokenize."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .answering import JSONAnswer, validated
from .chat import conversation_ids
from .errors import bad_request, from_refusal
from .middleware import read_json_body
from .protocol import DetokenizeRequest, TokenizeRequest
from .service import Service
from .tools import tool_use


async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation, of any length up to what could fit the context."""
    service: Service = request.app.state.service
    raw = await read_json_body(request, service.settings.max_body)
    return JSONAnswer(await service.offload(_tokenize, service, raw))


async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    service: Service = request.app.state.service
    raw = await read_json_body(request, service.settings.max_body)
    return JSONAnswer(await service.offload(_detokenize, service, raw))


def _tokenize(service: Service, raw: bytes) -> dict[str, Any]:
    asked = validated(TokenizeRequest, raw)
    service.model_name(asked.model)
    if asked.prompt is not None:
        try:
            service.llm.engine.admission.refuse_long(asked.prompt)
        except ValueError as error:
            raise from_refusal(error, ["prompt"]) from None
        ids = service.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    else:
        ids = conversation_ids(service, asked, tool_use(asked.tools, None, service.chat_template))
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = [service.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return found


def _detokenize(service: Service, raw: bytes) -> dict[str, Any]:
    asked = validated(DetokenizeRequest, raw)
    service.model_name(asked.model)
    size = service.vocab_size
    for token in asked.tokens:
        if token >= size:
            raise bad_request(f"tokens must be token ids in [0, {size - 1}], not {token}", param="tokens")
    text = service.tokenizer.decode(asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens))
    return {"prompt": text}
