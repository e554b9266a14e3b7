"""What answers hold, for the OpenAPI document. Answers themselves are plain dicts, made where they are sent."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str


class CalledTool(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Answer):
    prompt: str


class ModelAnswer(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelAnswer]


class VersionAnswer(Answer):
    version: str
    commit: str | None
    system_fingerprint: str


class StatusAnswer(Answer):
    status: str


class Holder(Answer):
    request_id: str
    index: int
    tokens: int


class PageHolder(Holder):
    pages: list[int]


class ArenaAnswer(Answer):
    """See docs/server.md."""

    time: float
    pages_total: int
    page_tokens: int
    states: str
    refs: str
    owners: list[PageHolder]
    queue: list[Holder]
    stats: dict[str, Any]
