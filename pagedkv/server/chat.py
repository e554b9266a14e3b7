"""POST /v1/chat/completions."""

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import CompletionOutput, RequestOutput
from .answering import Counted, answer, validated
from .errors import bad_request, from_refusal
from .generation import Work
from .logprobs import chat_logprobs, prompt_logprobs
from .middleware import read_json_body
from .protocol import ChatRequest
from .sampling import check_bound, sampling_params
from .service import Service
from .tools import Call, ToolUse, Written, template_messages, tool_use

# What the template gets from elsewhere.
TAKEN = frozenset({"self", "messages", "add_generation_prompt", "tools", "bos_token", "eos_token"})


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    raw = await read_json_body(request, service.settings.max_body)
    job = await service.offload(ChatJob, service, raw)
    return await answer(service, request, job)


def conversation_ids(service: Service, request: Any, use: ToolUse) -> list[int]:
    """Token ids of the request's messages after the chat template. APIError 400. Blocks: renders and tokenizes."""
    variables = dict(request.chat_template_kwargs or {})
    if taken := TAKEN & variables.keys():
        raise bad_request(f"chat_template_kwargs: {min(taken)!r} is set by the server", param="chat_template_kwargs")
    if use.tools and use.instructions is None:
        variables["tools"] = list(use.tools)
    messages = template_messages(request.messages, use.instructions)
    begin = request.add_generation_prompt is not False
    for message in messages:
        if isinstance(content := message.get("content"), str):
            try:
                service.llm.engine.admission.refuse_long(content)
            except ValueError as error:
                raise from_refusal(ValueError(f"messages: {error}"), ["messages"]) from None
    try:
        ids = service.tokenizer.encode_chat(messages, add_generation_prompt=begin, **variables)
    except ValueError as error:
        raise bad_request(str(error), param="messages") from None
    if not ids:
        raise bad_request("messages: the chat template makes no token of them", param="messages")
    return ids


class ChatJob:
    """A request for a chat answer, checked and tokenized. See answering.Job."""

    def __init__(self, service: Service, raw: bytes) -> None:
        request = validated(ChatRequest, raw)
        settings = service.settings
        self._request = request
        self._tokenizer = service.tokenizer
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.stream = bool(request.stream)
        self.include_usage = request.stream_options is not None and request.stream_options.include_usage
        self.head = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_name(request.model),
            "system_fingerprint": service.fingerprint,
        }
        check_bound("top_logprobs", request.top_logprobs, settings.max_logprobs)
        check_bound("tools", len(request.tools or ()), settings.max_prompts, "their number")
        self._use = tool_use(
            request.tools,
            request.tool_choice,
            service.chat_template,
            service.special_texts,
            one_call=request.parallel_tool_calls is False,
        )
        chosen: dict[str, Any] = {
            "max_tokens": request.max_completion_tokens or request.max_tokens,
            "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        }
        if self._use.structure is not None:
            chosen["structured_outputs"] = self._use.structure
        if self._use.keep_special:
            chosen["skip_special_tokens"] = False
        params = sampling_params(request, settings, **chosen)
        self.work = Work(
            [(None, conversation_ids(service, request, self._use))],
            params,
            frozenset(request.model_fields_set),
            request.priority or 0,
            request.timeout,
            request.cache_salt,
        )
        self._counted = Counted()
        self._choices: dict[int, _Choice] = {}

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        (output,) = outputs
        self._counted.see(0, output)
        body: dict[str, Any] = {
            **self.head,
            "choices": [self._choice(each) for each in output.outputs],
            "usage": self.usage(),
        }
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def usage(self) -> dict[str, Any]:
        """Tokens read and made."""
        return self._counted.usage()

    def deltas(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new in the choices."""
        self._counted.see(index, output)
        return [delta for each in output.outputs for delta in self._deltas(each)]

    def _choice(self, each: CompletionOutput) -> dict[str, Any]:
        written = self._written(each)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": written.content if written.content or not written.calls else None,
            "refusal": None,
        }
        if written.calls:
            message["tool_calls"] = [self._call(each.index, k, call) for k, call in enumerate(written.calls)]
        choice: dict[str, Any] = {
            "index": each.index,
            "message": message,
            "logprobs": self._logprobs(each, 0),
            "finish_reason": self._finish_reason(each, written),
            "stop_reason": each.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = each.token_ids
        return choice

    def _deltas(self, each: CompletionOutput) -> list[dict[str, Any]]:
        state = self._choices.setdefault(each.index, _Choice())
        if state.finished:
            return []
        written = self._written(each)
        parts: list[dict[str, Any]] = []
        if not state.started:
            parts.append({"role": "assistant", "content": ""})
            state.started = True
        if new := written.content[state.n_chars :]:
            parts.append({"content": new})
        if calls := self._new_calls(each.index, written, state):
            parts.append({"tool_calls": calls})
        finished = each.finish_reason is not None
        has_tokens = len(each.token_ids) > state.n_tokens
        if not parts and (finished or (has_tokens and (self._request.logprobs or self._request.return_token_ids))):
            parts.append({})
        deltas: list[dict[str, Any]] = [
            {"index": each.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        if deltas:
            last = deltas[-1]
            last["logprobs"] = self._logprobs(each, state.n_tokens) if has_tokens else None
            if self._request.return_token_ids:
                last["token_ids"] = each.token_ids[state.n_tokens :]
            if finished:
                last["finish_reason"] = self._finish_reason(each, written)
                last["stop_reason"] = each.stop_reason
            state.n_tokens = len(each.token_ids)
        state.n_chars, state.finished = len(written.content), finished
        return deltas

    def _written(self, each: CompletionOutput) -> Written:
        final = each.finish_reason is not None
        if self._use.named is not None:
            return Written("", [(self._use.named, each.text)])
        return Written(each.text) if self._use.parser is None else self._use.parser.split(each.text, final)

    def _new_calls(self, choice: int, written: Written, state: "_Choice") -> list[dict[str, Any]]:
        """Whole calls not handed out yet; of the named function's, the new characters of its arguments."""
        if self._use.named is not None:
            name, arguments = written.calls[0]
            new = arguments[state.n_arguments :]
            first, state.n_calls, state.n_arguments = state.n_calls == 0, 1, len(arguments)
            if first:
                return [{"index": 0, **self._call(choice, 0, (name, new))}]
            return [{"index": 0, "function": {"arguments": new}}] if new else []
        calls = [
            {"index": k, **self._call(choice, k, call)} for k, call in enumerate(written.calls) if k >= state.n_calls
        ]
        state.n_calls = len(written.calls)
        return calls

    def _call(self, choice: int, number: int, call: Call) -> dict[str, Any]:
        name, arguments = call
        return {
            "id": f"call_{self.id[-24:]}{choice:02d}{number:02d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _finish_reason(self, each: CompletionOutput, written: Written) -> str | None:
        called = written.calls and self._use.named is None and each.finish_reason == "stop"
        return "tool_calls" if called else each.finish_reason

    def _logprobs(self, each: CompletionOutput, start: int) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._tokenizer, each, start, self._request.top_logprobs or 0)


class _Choice:
    """How much of a choice was handed out."""

    def __init__(self) -> None:
        self.started = False
        self.finished = False
        self.n_chars = 0
        self.n_tokens = 0
        self.n_calls = 0
        self.n_arguments = 0
