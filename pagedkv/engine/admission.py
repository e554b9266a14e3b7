"""From what a caller asks to a checked Request: all that can be refused without knowing what else runs."""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from ..core.sampling_state import SamplingState
from ..models.streaming import StreamDecoder
from .checks import INT32_MAX, check_int, check_real, is_text, refuse
from .embedding import EmbeddingRequest
from .masks import MaskWorkers, OutputMask
from .outputs import RequestOutput
from .params import SamplingParams
from .request import Branch, Request, stored_tokens
from .structured import Grammars
from .text import OutputText

Prompt = str | Sequence[int] | Mapping[str, Any]

MAX_TIMEOUT = 1e9  # seconds
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
NORMALISED = 4  # characters of a text that normalisation may make one of


class QueueFull(RuntimeError):
    """`max_waiting` requests wait already. Nothing was queued; the caller may come back later."""


class Admission:
    """Makes requests of one engine. Changes nothing and waits for no step: any thread, also during one."""

    def __init__(self, model: Any, kv: Any, max_model_len: int) -> None:
        self.model = model
        self.kv = kv
        self.max_model_len = max_model_len
        self.mask_workers = MaskWorkers()
        self.grammars = Grammars(model)
        self._arrivals = itertools.count()
        self.lock = threading.Lock()  # held for a moment, to number a request

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        final_only: bool = False,
        sink: Callable[[RequestOutput], None] | None = None,
    ) -> Request:
        """A request without a name, ready to be queued. Raises ValueError as LLMEngine.add_request says."""
        queued = self._queued(priority, timeout)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise refuse("params", params, "a SamplingParams")
        text, ids, salt = self._parts_of(prompt)
        capacity = self.refuse_unfit(len(ids), params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset()
            if params.ignore_eos and params.structured_outputs is None
            else frozenset(self.model.config.stop_token_ids)
        )
        request = Request(
            "",
            text,
            ids,
            params,
            max_new_tokens=min(params.max_tokens or INT32_MAX, max(1, capacity - len(ids))),
            stop_ids=stop_ids,
            salt=salt,
            final_only=final_only,
            sink=sink,
            arrival=self._arrival(),
            **queued,
        )
        request.branches = self._branches(request)
        self._add_masks(request)
        return request

    def embedding(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        timeout: float | None = None,
        sink: Callable[[Any], None],
    ) -> EmbeddingRequest:
        """A request for the prompt's vector, without a name, ready to be queued. Raises as request() does."""
        queued = self._queued(priority, timeout)
        text, ids, _ = self._parts_of(prompt)
        self.refuse_unfit(len(ids), 1)
        request = EmbeddingRequest(
            text, ids, self.model.forward.hidden_size, sink=sink, arrival=self._arrival(), **queued
        )
        nothing = OutputText(StreamDecoder(self.model.tokenizer, True), ())
        request.branches = [Branch(request, 0, None, nothing)]
        return request

    def _queued(self, priority: int, timeout: float | None) -> dict[str, Any]:
        """A request's priority and times."""
        arrival_time = time.monotonic()
        check_int("priority", priority, -INT32_MAX)
        if timeout is not None:
            timeout = check_real("timeout", timeout, 0.0, MAX_TIMEOUT, open_low=True)
        return {
            "priority": int(priority),
            "arrival_time": arrival_time,
            "deadline": None if timeout is None else arrival_time + timeout,
        }

    def _parts_of(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """Text, token ids and salt."""
        text, ids = self.tokens_of(prompt)
        salt = prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""
        if not is_text(salt):
            raise refuse("cache_salt", salt, "a text without lone surrogates")
        return text, ids, salt

    def _arrival(self) -> int:
        with self.lock:  # a number for each, without a GIL too
            return next(self._arrivals)

    def _add_masks(self, request: Request) -> None:
        hook, structured = request.params.logits_mask, request.params.structured_outputs
        hooks = [] if hook is None else [hook]
        grammars: list[Any] = [] if structured is None else self.grammars.masks(structured, len(request.branches))
        allowed = request.params.allowed_token_ids
        if structured is not None and allowed is not None:
            first = grammars[0].allowed([])
            if not any(first[token // 32] >> (token % 32) & 1 for token in allowed):
                kind = structured.kind
                raise refuse(
                    "allowed_token_ids", allowed, f"ids with one that structured_outputs.{kind} can begin with"
                )
        for branch in request.branches if hooks or grammars else ():
            sources = [*hooks, *grammars[branch.index : branch.index + 1]]
            branch.mask = OutputMask(self.mask_workers, sources, self.model.forward.vocab_size)

    def _branches(self, request: Request) -> list[Branch]:
        params = request.params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return [
            Branch(
                request,
                index,
                SamplingState(
                    self.model.forward.vocab_size,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=seed,
                    index=index,
                    min_tokens=params.min_tokens,
                    stop_ids=sorted(request.stop_ids),
                    logit_bias=params.logit_bias,
                    presence_penalty=params.presence_penalty,
                    frequency_penalty=params.frequency_penalty,
                    repetition_penalty=params.repetition_penalty,
                    prompt_ids=request.prompt_token_ids,
                    logprobs=params.logprobs,
                    typical_p=params.typical_p,
                    allowed_token_ids=params.allowed_token_ids,
                ),
                OutputText(
                    StreamDecoder(
                        self.model.tokenizer,
                        params.skip_special_tokens,
                        strip_first_space=params.structured_outputs is None,
                    ),
                    params.stop or (),
                ),
            )
            for index in range(params.n)
        ]

    def tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it is one, and its token ids, checked."""
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in PROMPT_KEYS:
                    raise refuse("prompt key", key, "one of " + ", ".join(PROMPT_KEYS))
            text = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                if not (text is None or isinstance(text, str)):
                    raise refuse("prompt", text, "a text beside its prompt_token_ids")
                return text, self.checked_ids(prompt["prompt_token_ids"])
            prompt = prompt if text is None else text
        if isinstance(prompt, str):
            self.refuse_long(prompt)
            return prompt, self.checked_ids(self.model.tokenizer.encode(prompt))
        return None, self.checked_ids(prompt)

    def checked_ids(self, ids: Any) -> list[int]:
        """`ids` as a list of at least one token of the vocabulary, and of no more than the context has."""
        if isinstance(ids, (bytes, Mapping)) or not isinstance(ids, Iterable):
            raise refuse("prompt", ids, 'a text, token ids, or {"prompt_token_ids": [...]}')
        if isinstance(ids, Sized) and len(ids) > self.max_model_len:
            raise self._too_long(len(ids))
        found, stop = list(ids), self.model.forward.vocab_size
        if not found:
            raise ValueError("prompt must hold at least 1 token, and is empty")
        if set(map(type, found)) == {int} and min(found) >= 0 and max(found) < stop:
            return found
        return [check_int("prompt_token_ids", token, 0, stop - 1) for token in found]

    def _too_long(self, n_prompt: int) -> ValueError:
        return ValueError(f"prompt of {n_prompt} tokens is longer than the context of {self.max_model_len}")

    def refuse_long(self, text: str) -> None:
        """Raise ValueError for a text that is too long whatever its tokens are, before the work of finding them."""
        if len(text) > NORMALISED * self.max_model_len:
            longest = self.model.tokenizer.max_token_chars
            if len(text) > NORMALISED * self.max_model_len * longest:
                raise ValueError(
                    f"prompt of {len(text)} characters is longer than the context of {self.max_model_len} tokens, "
                    f"of which none has more than {longest} characters"
                )

    def refuse_unfit(self, n_prompt: int, max_tokens: int | None) -> int:
        """Raise ValueError for what can never be computed; returns how many tokens prompt and output may have."""
        if n_prompt > self.max_model_len:
            raise self._too_long(n_prompt)
        room = self.kv.n_pages * self.kv.page_tokens
        new = min(max(1, self.max_model_len - n_prompt), 1 if max_tokens is None else max(1, max_tokens))
        needed = stored_tokens(n_prompt, new)
        if needed > room:
            raise ValueError(
                f"prompt of {n_prompt} tokens with {new} new ones needs room for {needed} tokens; "
                f"the pool holds {room} ({self.kv.n_pages} pages of {self.kv.page_tokens})"
            )
        return min(self.max_model_len, room + 1)
