"""POST /v1/completions."""

import re
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import CompletionOutput, RequestOutput
from .answering import Counted, answer, validated
from .errors import from_refusal
from .generation import Work
from .logprobs import CompletionLogprobs, prompt_logprobs
from .middleware import read_json_body
from .protocol import CompletionRequest
from .sampling import check_bound, sampling_params
from .service import Service

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    raw = await read_json_body(request, service.settings.max_body)
    job = await service.offload(CompletionJob, service, raw)
    return await answer(service, request, job)


def prompts_of(service: Service, field: str, value: Any) -> list[tuple[str | None, list[int]]]:
    """Text, if there is one, and token ids of each prompt. APIError 400 naming the field. Blocks: tokenizes."""
    listed = value if isinstance(value, list) and not isinstance(value[0], int) else [value]
    check_bound(field, len(listed), service.settings.max_prompts, "the number of prompts")
    try:
        return [service.llm.engine.admission.tokens_of(one) for one in listed]
    except ValueError as error:
        told = str(error) if field == "prompt" else re.sub("^prompt(_token_ids)?", field, str(error))
        raise from_refusal(ValueError(told), [field]) from None


class CompletionJob:
    """A request for completions, checked and tokenized. See answering.Job."""

    def __init__(self, service: Service, raw: bytes) -> None:
        request = validated(CompletionRequest, raw)
        self._request = request
        self._tokenizer = service.tokenizer
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.stream = bool(request.stream)
        self.include_usage = request.stream_options is not None and request.stream_options.include_usage
        self.head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name(request.model),
            "system_fingerprint": service.fingerprint,
        }
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        check_bound("logprobs", request.logprobs, service.settings.max_logprobs)
        scored = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            scored = max(request.logprobs, scored or 0)
        params = sampling_params(
            request,
            service.settings,
            max_tokens=max(1, max_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=scored,
        )
        self._echo_only = max_tokens == 0
        self._skip_special = params.skip_special_tokens
        self._n = params.n
        prompts = prompts_of(service, "prompt", request.prompt)
        self._texts = [self._shown(*prompt) for prompt in prompts] if request.echo else [""] * len(prompts)
        self.work = Work(
            prompts,
            params,
            frozenset(request.model_fields_set),
            request.priority or 0,
            request.timeout,
            request.cache_salt,
        )
        self._counted = Counted(0 if self._echo_only else None)
        self._choices: dict[int, _Choice] = {}

    def _shown(self, text: str | None, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, False) if text is None else text

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer: all that is new when nothing was handed out before."""
        choices = [delta for index, output in enumerate(outputs) for delta in self.deltas(index, output)]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def deltas(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new in the choices of one prompt."""
        self._counted.see(index, output)
        found = (self._delta(index, output, each) for each in output.outputs)
        return [delta for delta in found if delta is not None]

    def usage(self) -> dict[str, Any]:
        """Tokens read and made."""
        return self._counted.usage()

    def _delta(self, prompt: int, output: RequestOutput, each: CompletionOutput) -> dict[str, Any] | None:
        request = self._request
        number = prompt * self._n + each.index
        state = self._choices.get(number)
        first = state is None
        if state is None:
            top = request.logprobs
            logprobs = None if top is None else CompletionLogprobs(self._tokenizer, top, self._skip_special)
            state = self._choices[number] = _Choice(logprobs)
        if state.finished:
            return None
        shown = self._texts[prompt] if first else ""
        text = "" if self._echo_only else each.text[state.n_chars :]
        ids = [] if self._echo_only else each.token_ids[state.n_tokens :]
        finished = each.finish_reason is not None or self._echo_only
        if not (shown or text or finished or (ids and (state.logprobs or request.return_token_ids))):
            return None
        found = None
        if state.logprobs is not None:
            found = state.logprobs.of_prompt(output, self._texts[prompt]) if first and request.echo else None
            made = None if self._echo_only else state.logprobs.of_output(each, state.n_tokens)
            found = made if found is None else found if made is None else {key: found[key] + made[key] for key in made}
        delta: dict[str, Any] = {
            "index": number,
            "text": shown + text,
            "logprobs": found,
            "finish_reason": "length" if self._echo_only else each.finish_reason,
            "stop_reason": None if self._echo_only else each.stop_reason,
        }
        if first and request.prompt_logprobs is not None:
            delta["prompt_logprobs"] = prompt_logprobs(output)
        if request.return_token_ids:
            delta["token_ids"] = ids
            if first:
                delta["prompt_token_ids"] = output.prompt_token_ids
        state.n_chars, state.n_tokens, state.finished = len(each.text), len(each.token_ids), finished
        return delta


class _Choice:
    """How much of a choice was handed out."""

    def __init__(self, logprobs: CompletionLogprobs | None) -> None:
        self.logprobs = logprobs
        self.n_chars = 0
        self.n_tokens = 0
        self.finished = False
