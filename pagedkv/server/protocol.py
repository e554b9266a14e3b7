"""What requests may hold: OpenAI's fields, and vLLM's where they go beyond. Anything else is refused by name.

Strict: no text becomes a number, no number a text. What only pydantic can say is said here; ranges that depend on the
model or on this server's settings are checked where they are used.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)  # fmt: skip
from pydantic_core import PydanticCustomError

from ..engine.checks import shown
from ..engine.params import MAX_N, MAX_STOPS, MAX_TEMPERATURE, SEED_MAX

INT32_MAX = 2**31 - 1
MIN_SEED = -(2**63)
MAX_TOP_LOGPROBS = 1024
MAX_ITEMS = 8192  # of a list whose items are checked one by one

T = TypeVar("T")
# Of a body full of faults the first one of each list or object is told: finding all would hold up everybody else.
Listed = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


def at(field: str, text: str, kind: str = "invalid") -> PydanticCustomError:
    """The error to raise in a validator about a field of its model, or about an entry of its object."""
    return PydanticCustomError(kind, "{text}", {"field": field, "text": text})  # type: ignore[arg-type]


class Strict(BaseModel):
    """Base of everything that comes from a client."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if isinstance(value, dict):
            names = {field.alias or name for name, field in cls.model_fields.items()}
            for key in value:
                if key not in names:
                    raise at(key, "unknown field", "unknown")
        return value


def _numbers(value: Any) -> Any:
    return _mapping(value, lambda entry: isinstance(entry, int | float) and not isinstance(entry, bool), "a number")


def _texts(value: Any) -> Any:
    return _mapping(value, lambda entry: isinstance(entry, str), "a text")


def _mapping(value: Any, fits: Callable[[Any], bool], what: str) -> Any:
    """`value`, refused for its first entry that does not fit."""
    for key, entry in value.items() if isinstance(value, dict) else ():
        if not fits(entry):
            raise at(key, f"must be {what}, not {shown(entry)}")
    return value


def _prompt(value: Any) -> Any:
    """Texts or token ids, one or several; told apart here, so that one bad id among thousands gives one short error."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value) or _all_ids(value):
            return value
        if all(isinstance(item, list) and item and _all_ids(item) for item in value):
            return value
    raise ValueError(
        f"must be a text, a list of texts, a list of token ids in [0, {INT32_MAX}], or a list of such lists; none empty"
    )


def _all_ids(items: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item <= INT32_MAX for item in items)


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}
Prompt = Annotated[
    Any,
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                _IDS_SCHEMA,
                {"type": "array", "minItems": 1, "items": _IDS_SCHEMA},
            ]
        }
    ),
]


class StreamOptions(Strict):
    include_usage: bool = False


class JsonSchema(Strict):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _together(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise at("json_schema", "must be given exactly when type is 'json_schema'")
        return self


FORMS = ("json_", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(Strict):
    """Exactly one of FORMS, and what JSON may look like."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Listed[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        if sum(getattr(self, name) is not None for name in FORMS) != 1:
            raise ValueError("must hold exactly one of json, regex, choice, grammar and json_object")
        return self


class GenerationRequest(Strict):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | Listed[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=MIN_SEED, le=SEED_MAX)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers)] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    ignore_eos: bool | None = None
    stop_token_ids: Listed[TokenId] | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Listed[TokenId] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: str | None = Field(None, min_length=1)
    return_token_ids: bool | None = None
    # this server's own: seconds until the request ends with what it has
    timeout: float | None = Field(None, gt=0, le=1e9)

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > MAX_STOPS or not all(texts):
            raise ValueError(f"must be a non-empty text or at most {MAX_STOPS} of them")
        return value

    @model_validator(mode="after")
    def _compatible(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise at("stream_options", "only with stream=true")
        if self.structured_outputs is not None and self.response_format is not None:
            raise at("structured_outputs", "give this or response_format, not both")
        return self


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    suffix: None = None

    @model_validator(mode="after")
    def _of_completions(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise at("best_of", f"must equal n, {self.n or 1}, or be left out, not {self.best_of}")
        if self.max_tokens == 0 and not self.echo:
            raise at("max_tokens", "0 only with echo=true")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | Annotated[Listed[TextPart], Field(max_length=MAX_ITEMS)]


class FunctionCall(Strict):
    name: str = Field(min_length=1)
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class InputMessage(Strict):
    """system and developer say the same; `name` goes to templates that read it."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Listed[ToolCall] | None = Field(None, max_length=MAX_ITEMS)
    # what clients echo back from answers
    annotations: Listed[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[InputMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest):
    messages: Listed[Message] = Field(min_length=1, max_length=MAX_ITEMS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    tools: Listed[Tool] | None = Field(None, min_length=1, max_length=MAX_ITEMS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    # accepted, without effect on the answer
    metadata: Annotated[dict[str, str], BeforeValidator(_texts)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Listed[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _of_chat(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise at("max_completion_tokens", "give this or max_tokens, not both")
        if self.max_tokens == 0:
            raise at("max_tokens", "must be at least 1, not 0")
        if self.top_logprobs is not None and not self.logprobs:
            raise at("top_logprobs", "only with logprobs=true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise at("tools", "two functions have the same name")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise at("tool_choice", "needs tools")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise at("tool_choice", f"{self.tool_choice.function.name[:60]!r} is none of the tools")
        forced = self.tool_choice not in (None, "none", "auto")
        if forced and (self.structured_outputs or (self.response_format and self.response_format.type != "text")):
            raise at("tool_choice", "a forced call and a response format exclude each other")
        return self


class EmbeddingRequest(Strict):
    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)


class TokenizeRequest(Strict):
    """A prompt, or messages that go through the chat template first."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[Message] | None = Field(None, min_length=1, max_length=MAX_ITEMS)
    tools: Listed[Tool] | None = Field(None, min_length=1, max_length=MAX_ITEMS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise at("prompt", "give exactly one of prompt and messages")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs or self.add_generation_prompt):
            given = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
            raise at(next((name for name in given if given[name]), "add_generation_prompt"), "only with messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise at("add_special_tokens", "only with prompt; the chat template decides")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Listed[TokenId]
    skip_special_tokens: bool | None = None
