"""The engine: requests in, one batched forward per step, outputs out."""

import functools
import itertools
import secrets
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import PoolExhausted
from ..core.sampler import Sampler, SamplingState
from ..models.streaming import StreamDecoder
from .checks import INT32_MAX, check_int, refuse
from .outputs import FinishReason, Logprob, RequestOutput, TokenLogprobs
from .params import SamplingParams
from .prefix import PrefixCache
from .request import Branch, Request
from .scheduler import Chunk, Scheduler
from .text import OutputText

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLMEngine:
    """Runs any number of requests over one model and one paged cache.

    model: a LoadedModel. kv: a PagedKVCache; the engine owns all its pages. max_model_len: prompt and output together.
    Every method may be called from any thread; a step holds the lock, so others wait for its end.
    A request's outputs depend on the model, its prompt, its parameters and its seed, and on nothing else.
    """

    def __init__(
        self,
        model: Any,
        kv: Any,
        *,
        max_model_len: int,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.model = model
        self.kv = kv
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix=PrefixCache(kv, model.forward.vocab_size) if enable_prefix_caching else None,
        )
        self._sampler = Sampler(model.forward.vocab_size, getattr(model.forward, "pool", None))
        self._logits = np.empty((0, model.forward.vocab_padded), np.float32)
        self._requests: dict[str, Request] = {}
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._unclaimed: list[RequestOutput] = []
        self._n_added = 0
        self._lock = threading.RLock()
        self._token_text = functools.lru_cache(4096)(self._decode_alone)

    # Requests

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request; returns its id (a fresh one if None is given). Computes nothing.

        prompt: a text, token ids, or a mapping with "prompt_token_ids" or "prompt"; with "cache_salt" in it, a text,
        its cached pages are only found by prompts of equal salt. Lower priorities run first.
        Raises ValueError for an empty prompt, ids outside the vocabulary, an id already in use, a prompt longer than
        the context, or a request that could never fit the pool, with the numbers.
        """
        return self._add(prompt, params, request_id, priority, final_only=False, mailbox=False)

    def abort(self, request_id: str) -> bool:
        """End a request now and free its pages; False if there is none of this id. Its last output, with what it had
        and finish_reason "abort", comes with the next step."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                return False
            for branch in request.branches:
                self._finish(branch, "abort")
            self._emit(request)
            return True

    def has_unfinished(self) -> bool:
        """Whether step() has something to compute or to hand out."""
        return bool(self._requests or self._unclaimed)

    def step(self) -> list[RequestOutput]:
        """Compute one batch and return the outputs that changed, one per request. Every request yields exactly one
        output with finished=True. Releases the GIL while computing."""
        with self._lock:
            if not self._unclaimed or self._requests:
                self._run_step()
            outputs, self._unclaimed = self._unclaimed, []
            return outputs

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; see docs/engine.md. Changes nothing."""
        scheduler, kv = self.scheduler, self.kv
        return {
            "pages_total": kv.n_pages,
            "pages_free": kv.n_free,
            "pages_cached": kv.n_cached,
            "pages_in_use": kv.n_in_use,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.n_preemptions,
            "prefix_hit_tokens": scheduler.n_prefix_hit_tokens,
            "prefix_query_tokens": scheduler.n_prefix_query_tokens,
            "steps": scheduler.n_steps,
            "isa": self.model.forward.isa,
            "threads": self.model.forward.n_threads,
        }

    # For LLM: outputs of a subscribed request go to its mailbox instead of to step()

    def subscribe(
        self, prompt: Prompt, params: SamplingParams | None = None, *, final_only: bool = False
    ) -> tuple[str, deque[RequestOutput]]:
        """add_request() whose outputs go into the returned deque, by pump() and step(); final_only: the last alone."""
        request_id = self._add(prompt, params, None, 0, final_only=final_only, mailbox=True)
        return request_id, self._mailboxes[request_id]

    def unsubscribe(self, request_id: str) -> None:
        """Abort the request if it still runs and drop its mailbox. Unknown ids are ignored."""
        with self._lock:
            self.abort(request_id)
            self._mailboxes.pop(request_id, None)

    def pump(self) -> None:
        """One step whose outputs for requests without a mailbox are kept for the next step() call."""
        with self._lock:
            self._run_step()

    def logits(self, token_ids: Iterable[int], *, chunk: int | None = None) -> np.ndarray:
        """Next-token logits at every position: float32 [n, vocab], from one paged prefill in chunks of `chunk` tokens
        (None: the step's budget). Raises ValueError as add_request does, PoolExhausted while requests hold pages."""
        ids = self._checked_ids(token_ids)
        size = self.scheduler.max_num_batched_tokens if chunk is None else check_int("chunk", chunk, 1)
        self._refuse_unfit(len(ids), 0)
        forward = self.model.forward
        out = np.empty((len(ids), forward.vocab_size), np.float32)
        with self._lock:
            seq = self.kv.sequence()
            try:
                for start in range(0, len(ids), size):
                    n = min(size, len(ids) - start)
                    seq.extend(n)
                    rows = out[start : start + n] if forward.vocab_padded == forward.vocab_size else self._rows(n)
                    self._forward([seq], ids[start : start + n], [n], range(n), rows)
                    if rows.base is not out:
                        out[start : start + n] = rows[:, : forward.vocab_size]
            finally:
                seq.free()
        return out

    def close(self) -> None:
        """Abort everything and forget all outputs. Nothing may be added afterwards."""
        with self._lock:
            for request_id in list(self._requests):
                self.abort(request_id)
            self._mailboxes.clear()
            self._unclaimed.clear()

    # Admission

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        *,
        final_only: bool,
        mailbox: bool,
    ) -> str:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise refuse("params", params, "a SamplingParams")
        check_int("priority", priority, -INT32_MAX)
        text, ids = self._tokens_of(prompt)
        salt = prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""
        if not isinstance(salt, str):
            raise refuse("cache_salt", salt, "a text")
        capacity = self._refuse_unfit(len(ids), params.max_tokens)
        with self._lock:
            if request_id is None:
                names = (f"request-{i}" for i in itertools.count(self._n_added))
                request_id = next(name for name in names if name not in self._requests and name not in self._mailboxes)
            elif not isinstance(request_id, str) or request_id in self._requests or request_id in self._mailboxes:
                raise refuse("request_id", request_id, "a text that no unfinished request has")
            stop_ids = frozenset(params.stop_token_ids or ()) | (
                frozenset() if params.ignore_eos else frozenset(self.model.config.stop_token_ids)
            )
            request = Request(
                request_id,
                text,
                ids,
                params,
                max_new_tokens=min(params.max_tokens or INT32_MAX, max(1, capacity - len(ids))),
                stop_ids=stop_ids,
                priority=int(priority),
                arrival=self._n_added,
                salt=salt,
                final_only=final_only,
            )
            request.branches = self._branches(request)
            self._n_added += 1
            self._requests[request_id] = request
            if mailbox:
                self._mailboxes[request_id] = deque()
            self.scheduler.add(request.branches[0])
        return request_id

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
                ),
                OutputText(StreamDecoder(self.model.tokenizer, params.skip_special_tokens), params.stop or ()),
            )
            for index in range(params.n)
        ]

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._checked_ids(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt", prompt)
        if isinstance(prompt, str):
            return prompt, self._checked_ids(self.model.tokenizer.encode(prompt))
        return None, self._checked_ids(prompt)

    def _checked_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, (bytes, Mapping)) or not isinstance(ids, Iterable):
            raise refuse("prompt", ids, 'a text, token ids, or {"prompt_token_ids": [...]}')
        found = [check_int("prompt_token_ids", token, 0, self.model.forward.vocab_size - 1) for token in ids]
        if not found:
            raise ValueError("prompt must hold at least 1 token, and is empty")
        return found

    def _refuse_unfit(self, n_prompt: int, max_tokens: int | None) -> int:
        """Raise ValueError for what can never be computed; returns how many tokens prompt and output may have."""
        if n_prompt > self.max_model_len:
            raise ValueError(f"prompt of {n_prompt} tokens is longer than the context of {self.max_model_len}")
        room = self.kv.n_pages * self.kv.page_tokens
        new = min(max(1, self.max_model_len - n_prompt), 1 if max_tokens is None else max(1, max_tokens))
        needed = n_prompt + new - 1  # the last token's K/V is never stored
        if needed > room:
            raise ValueError(
                f"prompt of {n_prompt} tokens with {new} new ones needs room for {needed} tokens; "
                f"the pool holds {room} ({self.kv.n_pages} pages of {self.kv.page_tokens})"
            )
        return min(self.max_model_len, room + 1)

    # One step

    def _run_step(self) -> None:
        if not self._requests:
            return
        chunks = self.scheduler.schedule()
        if not chunks:
            raise PoolExhausted(
                f"{self.kv.n_in_use} of {self.kv.n_pages} pages are held outside the engine; no request can advance"
            )
        begun: set[Request] = set()
        try:
            self._compute(chunks, begun)
        except BaseException:
            self.scheduler.rollback([chunk for chunk in chunks if chunk.branch.request not in begun])
            for request in begun:  # an interrupt amid the bookkeeping of one request costs that request only
                if request.request_id in self._requests:
                    for branch in request.branches:
                        self._finish(branch, "error", "interrupted")
                    self._emit(request)
            raise

    def _compute(self, chunks: list[Chunk], begun: set[Request]) -> None:
        """Forward, sample and hand out. `begun` holds a request while its state changes."""
        token_ids = array("i")
        wanted: list[int] = []  # rows of token_ids whose logits are wanted
        scored: dict[Request, list[tuple[int, int]]] = {}  # prompt position, row of the logits
        drawn: dict[Request, list[Branch]] = {}
        states: list[SamplingState] = []
        rows: list[int] = []
        work: dict[Request, list[Branch]] = {}
        for chunk in chunks:
            branch, request = chunk.branch, chunk.branch.request
            work.setdefault(request, []).append(branch)
            base = len(token_ids) - chunk.start
            token_ids += branch.tokens[chunk.start : chunk.start + chunk.n_tokens]
            for position in request.prompt_rows_wanted(chunk.start, chunk.n_tokens):
                scored.setdefault(request, []).append((position, len(wanted)))
                wanted.append(base + position)
            if chunk.completes:
                for each in [branch] if request.forked else request.branches:
                    drawn.setdefault(request, []).append(each)
                    states.append(each.state)
                    rows.append(len(wanted))
                wanted.append(len(token_ids) - 1)
        logits = self._rows(len(wanted))
        self._forward([c.branch.seq for c in chunks], token_ids, [c.n_tokens for c in chunks], wanted, logits)
        self._sampler.sample(logits, states, rows)
        for request, branches in work.items():
            begun.add(request)
            for branch in branches:
                self.scheduler.publish(branch)
            for position, row in scored.get(request, ()):
                self._score(request, position, logits, row)
            for branch in drawn.get(request, ()):
                self._accept(branch)
            if request in drawn and not request.forked:
                self._fork(request)
            for branch in drawn.get(request, ()):
                if branch.finish_reason is not None:
                    self.scheduler.remove(branch)
            if request in drawn:
                self._emit(request)
            begun.discard(request)

    def _rows(self, n: int) -> np.ndarray:
        if len(self._logits) < n:
            self._logits = np.empty((max(n, 2 * len(self._logits)), self.model.forward.vocab_padded), np.float32)
        return self._logits[:n]

    def _forward(
        self, seqs: list[Any], token_ids: Sequence[int], q_lens: list[int], rows: Iterable[int], logits: np.ndarray
    ) -> None:
        self.model.forward.run(
            self.kv,
            seqs,
            np.array(token_ids, np.int32),
            np.array(q_lens, np.int32),
            np.array(list(rows), np.int32),
            logits,
        )

    def _accept(self, branch: Branch) -> None:
        """Take the drawn token into the branch and see whether it ends."""
        state, request = branch.state, branch.request
        if not state.ok:
            branch.finish("error", "the logits hold NaN or infinity, or every token is banned")
            return
        token = state.token
        branch.tokens.append(token)
        state.accept(token)
        branch.cumulative_logprob += state.logprob
        if branch.logprobs is not None:
            branch.logprobs.append(self._token_logprobs(token, state.logprob, state.rank, state.top))
        if token in request.stop_ids:
            branch.finish("stop", token)
        elif branch.text.push(token, branch.n_outputs >= request.params.min_tokens):
            branch.finish("stop", branch.text.matched)
        elif branch.n_outputs >= request.max_new_tokens:
            branch.finish("length")

    def _fork(self, request: Request) -> None:
        """The prompt is computed and every branch has its first token: let all but the first run on its pages."""
        request.forked = True
        first, *others = request.branches
        for branch in others:
            if branch.finish_reason is None:
                self.scheduler.fork(first, branch)

    def _score(self, request: Request, position: int, logits: np.ndarray, row: int) -> None:
        """Append the prompt logprobs of the token behind `position`."""
        target = request.prompt_token_ids[position + 1]
        found = self._sampler.score(logits, [row], [target], request.params.prompt_logprobs or 0)[0]
        assert request.prompt_logprobs is not None
        request.prompt_logprobs.append(None if found is None else self._token_logprobs(target, *found))

    def _token_logprobs(self, token: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
        entries = {token: Logprob(logprob, rank, self._token_text(token))}
        for place, (other, value) in enumerate(top, 1):
            entries.setdefault(other, Logprob(value, place, self._token_text(other)))
        return entries

    def _decode_alone(self, token: int) -> str:
        return self.model.tokenizer.decode([token], skip_special_tokens=False)

    def _finish(self, branch: Branch, reason: FinishReason, why: str | None = None) -> None:
        branch.finish(reason, why)
        self.scheduler.remove(branch)

    def _emit(self, request: Request) -> None:
        """Hand out the request's output, and forget the request if this was the last one."""
        finished = request.finished
        if finished:
            del self._requests[request.request_id]
        if request.final_only and not finished:
            return
        mailbox = self._mailboxes.get(request.request_id)
        (self._unclaimed if mailbox is None else mailbox).append(request.output())
