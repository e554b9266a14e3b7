"""From a request's fields to SamplingParams, and what the server itself bounds."""

from typing import Any

from ..engine.params import SamplingParams
from .errors import bad_request, from_refusal
from .protocol import GenerationRequest
from .settings import ServerSettings

# Fields that mean the same here and there, and go through when they are given.
SAME = (
    "n", "temperature", "top_p", "min_p", "typical_p", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens", "allowed_token_ids",
    "prompt_logprobs",
)  # fmt: skip
SEEDS = 2**64


def sampling_params(request: GenerationRequest, settings: ServerSettings, **chosen: Any) -> SamplingParams:
    """The parameters; `chosen` wins over what the request says. APIError 400 naming field, value and bound."""
    check_bound("n", request.n, settings.max_n)
    check_bound("prompt_logprobs", request.prompt_logprobs, settings.max_logprobs)
    fields: dict[str, Any] = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        fields["top_k"] = max(0, request.top_k)  # vLLM says -1 for all
    if request.seed is not None:
        fields["seed"] = request.seed % SEEDS
    if request.logit_bias is not None:
        fields["logit_bias"] = _biases(request.logit_bias)
    fields["structured_outputs"] = _structure(request)
    fields.update(chosen)
    structure = fields.pop("structured_outputs")
    try:
        if structure is not None:
            from ..engine.structured import StructuredOutputsParams

            fields["structured_outputs"] = StructuredOutputsParams(**structure)
        return SamplingParams(**fields)
    except ImportError as error:
        raise bad_request(str(error), param="response_format", code="not_supported") from None
    except ValueError as error:
        raise from_refusal(error, request.model_fields_set) from None


def check_bound(field: str, value: int | None, bound: int, what: str = "") -> None:
    """APIError 400 for a value above one of this server's limits. what: of the field is bounded, "" for itself."""
    if value is not None and value > bound:
        where = f"{field}: {what}" if what else field
        raise bad_request(f"{where} must be at most {bound} on this server, not {value}", param=field)


def _biases(given: dict[str, float]) -> dict[int, float]:
    """By token id. Two texts may name one id, as "1" and "01" do; which of them counts is for the client to say."""
    found: dict[int, float] = {}
    for key, bias in given.items():
        token = _token_id(key)
        if token in found:
            raise bad_request(f"logit_bias: the token id {token} comes twice, once as {key!r}", param="logit_bias")
        found[token] = bias
    return found


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise bad_request(f"logit_bias: {key[:60]!r} is not a token id", param="logit_bias")
    return int(key)


def _structure(request: GenerationRequest) -> dict[str, Any] | None:
    """Keyword arguments of StructuredOutputsParams, None for free text."""
    if request.structured_outputs is not None:
        given = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        return given
    if request.response_format is None or request.response_format.type == "text":
        return None
    if request.response_format.json_schema is None:
        return {"json_object": True}
    return {"json": request.response_format.json_schema.schema_}
