"""The engine: requests in, one batched forward per step, outputs out."""

import contextlib
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import PoolExhausted
from . import forks
from .admission import Admission, Prompt
from .checks import check_int
from .drawing import Drawing
from .embedding import EmbeddingRequest
from .intake import Intake
from .metrics import EngineMetrics
from .outputs import EmbeddingRequestOutput, FinishReason, RequestOutput
from .pacing import Pacing
from .params import SamplingParams
from .prefix import PrefixCache
from .request import Branch, Request
from .scheduler import Chunk, Scheduler
from .speculation import Speculation, SpeculativeConfig


class LLMEngine:
    """Runs any number of requests over one model and one paged cache.

    model: a LoadedModel. kv: a PagedKVCache; the engine owns all its pages. max_model_len: prompt and output together.
    max_waiting: most requests that may wait, None: any number.
    Every method may be called from any thread; add_request() and stats() never wait, the others for the end of a step.
    A fork of the process waits for the end of a step, too; the child has the engine and its requests as they were.
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
        max_waiting: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> None:
        speculation = SpeculativeConfig.parse(speculative_config)
        self.model = model
        self.kv = kv
        self.max_model_len = max_model_len
        self.admission = Admission(model, kv, max_model_len)
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix=PrefixCache(kv, model.forward.vocab_size) if enable_prefix_caching else None,
            pacing=Pacing(model.config.n_heads * model.config.head_dim),
            speculation=None if speculation is None else Speculation(speculation),
        )
        self.drawing = Drawing(model)
        self._logits = np.empty((0, model.forward.vocab_padded), np.float32)
        self.metrics = EngineMetrics()
        self._mailboxes: dict[str, deque[Any]] = {}
        self._unclaimed: list[RequestOutput] = []
        self.intake = Intake(self.scheduler, max_waiting, self._mailboxes)
        self._requests = self.intake.requests
        self._make_locks()
        forks.watch(self)

    # Locks, in the order in which they are taken

    def _make_locks(self) -> None:
        self._turn = threading.RLock()  # held by one who waits for the lock, so that the next step waits for him
        self._lock = threading.RLock()  # held during a step, and for whatever must not see half of one
        self.intake.lock = threading.Lock()
        self.admission.lock = threading.Lock()

    def _in_turn(self) -> contextlib.AbstractContextManager[Any]:
        """What a thread enters before it takes the lock, so that a thread that steps without pause cannot starve it."""
        owned = self._lock._is_owned()  # type: ignore[attr-defined]
        return contextlib.nullcontext() if owned else self._turn

    def before_fork(self) -> None:
        """Wait for the end of the step, so that the child finds the engine between two."""
        with self._in_turn():
            self._lock.acquire()
        self.intake.lock.acquire()
        self.admission.lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self.admission.lock.release()
        self.intake.lock.release()
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Go on with locks that no lost thread waits for."""
        self._make_locks()

    # Requests

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> str:
        """Queue a request; returns its id (a fresh one if None is given). Computes nothing, waits for no step.

        prompt: a text, token ids, or a mapping with "prompt_token_ids" or "prompt"; with "cache_salt" in it, a text,
        its cached pages are only found by prompts of equal salt. Lower priorities run first. timeout: seconds from now;
        the first step after them ends the request, finish_reason "abort", stop_reason "timeout", text so far kept.
        Raises ValueError for an empty prompt, ids outside the vocabulary, an id already in use, a prompt longer than
        the context, or a request that could never fit the pool, with the numbers; QueueFull if max_waiting others wait.
        """
        return self.enqueue(self.prepare(prompt, params, priority=priority, timeout=timeout), request_id)

    def abort(self, request_id: str) -> bool:
        """End a request now and free its pages; False if there is none of this id. Its last output, with what it had
        and finish_reason "abort", comes with the next step."""
        with self._in_turn(), self._lock:
            self._settle()
            request = self._requests.get(request_id) if isinstance(request_id, str) else None
            return request is not None and self._end(request, "abort")

    def abort_soon(self, request_id: str) -> bool:
        """abort() that waits for nothing: carried out before the next step or settle(). False if there is no request of
        this id or its end was asked for before. A request in its last step may still end by itself."""
        request = self._requests.get(request_id) if isinstance(request_id, str) else None
        return request is not None and self.doom(request)

    def doom(self, request: Request) -> bool:
        """abort_soon() of this very request, not of one that has got its id since. Takes no lock: for finalizers."""
        return self.intake.doom(request)

    def has_unfinished(self) -> bool:
        """Whether step() has something to compute or to hand out."""
        return bool(self._requests or self._unclaimed)

    def step(self) -> list[RequestOutput]:
        """Compute one batch and return the outputs that changed, one per request. Every request yields exactly one
        output with finished=True. Releases the GIL while computing."""
        with self._in_turn():
            pass
        with self._lock:
            if not self._unclaimed or self._requests:
                self._run_step()
            outputs, self._unclaimed = self._unclaimed, []
            return outputs

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; see docs/engine.md. Changes nothing. RuntimeError after close()."""
        self.intake.refuse_closed()
        scheduler, kv, metrics = self.scheduler, self.kv, self.metrics
        speculation = scheduler.speculation
        return {
            "pages_total": kv.n_pages,
            "pages_free": kv.n_free,
            "pages_cached": kv.n_cached,
            "pages_in_use": kv.n_in_use,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(self.intake.incoming),
            "preemptions": scheduler.n_preemptions,
            "prefix_hit_tokens": scheduler.n_prefix_hit_tokens,
            "prefix_query_tokens": scheduler.n_prefix_query_tokens,
            "spec_drafts": 0 if speculation is None else speculation.n_drafts,
            "spec_draft_tokens": 0 if speculation is None else speculation.n_drafted,
            "spec_accepted_tokens": 0 if speculation is None else speculation.n_accepted,
            "spec_accepted_tokens_per_pos": [] if speculation is None else list(speculation.n_accepted_at),
            "steps": scheduler.n_steps,
            "isa": self.model.forward.isa,
            "threads": self.model.forward.n_threads,
            "prompt_tokens": metrics.prompt_tokens,
            "generation_tokens": metrics.generation_tokens,
            **{f"requests_{reason}": n for reason, n in metrics.requests.items()},
            "requests_timeout": metrics.timeouts,
            "requests_refused": self.intake.n_refused,
        }

    # For LLM: outputs of a subscribed request go to its mailbox instead of to step()

    def subscribe(
        self, prompt: Prompt, params: SamplingParams | None = None, *, final_only: bool = False
    ) -> tuple[str, deque[RequestOutput]]:
        """add_request() whose outputs go into the returned deque, by pump() and step(); final_only: the last alone.
        max_waiting does not hold for it: who runs the steps himself cannot come back later."""
        box: deque[RequestOutput] = deque()
        return self._subscribed(self.prepare(prompt, params, final_only=final_only, sink=box.append), box), box

    def subscribe_embedding(self, prompt: Prompt) -> tuple[str, deque[EmbeddingRequestOutput]]:
        """subscribe() for a prompt's vector; there is one output, the last."""
        box: deque[EmbeddingRequestOutput] = deque()
        return self._subscribed(self.prepare_embedding(prompt, sink=box.append), box), box

    def _subscribed(self, request: Request, box: deque[Any]) -> str:
        request_id = self.enqueue(request, limited=False)
        self._mailboxes[request_id] = box
        return request_id

    def unsubscribe(self, request_id: str) -> None:
        """Abort the request if it still runs and drop its mailbox. Unknown ids are ignored."""
        with self._in_turn(), self._lock:
            self.abort(request_id)
            self._mailboxes.pop(request_id, None)

    def pump(self) -> None:
        """One step whose outputs for requests without a sink are kept for the next step() call."""
        with self._in_turn():
            pass
        with self._lock:
            self._run_step()

    def settle(self) -> None:
        """What a step does before it computes: queue what came in, carry out aborts and deadlines."""
        with self._in_turn(), self._lock:
            self._settle()

    def between_steps(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args), while no step runs and behind all aborts asked for before; fn may call any method. RuntimeError
        after close()."""
        with self._in_turn(), self._lock:
            self.intake.refuse_closed()
            self._settle()
            return fn(*args)

    def fail(self, why: str) -> None:
        """End the running requests, or if none runs all of them, with finish_reason "error" and this stop_reason; for
        whoever steps and caught an exception, so that the next step is not the same one again."""
        with self._in_turn(), self._lock:
            self._settle()
            running = {branch.request: None for branch in self.scheduler.running}
            for request in running or list(self._requests.values()):
                self._end(request, "error", why)

    def logits(self, token_ids: Iterable[int], *, chunk: int | None = None) -> np.ndarray:
        """Next-token logits at every position: float32 [n, vocab], from one paged prefill in chunks of `chunk` tokens
        (None: the step's budget). Raises ValueError as add_request does, PoolExhausted while requests hold pages."""
        self.intake.refuse_closed()
        ids = self.admission.checked_ids(token_ids)
        size = self.scheduler.max_num_batched_tokens if chunk is None else check_int("chunk", chunk, 1)
        self.admission.refuse_unfit(len(ids), 0)
        forward = self.model.forward
        out = np.empty((len(ids), forward.vocab_size), np.float32)
        with self._in_turn(), self._lock:
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
        """Abort everything and forget all outputs. Nothing can be added afterwards: RuntimeError."""
        self.intake.closed = True
        with self._in_turn(), self._lock:
            for request_id in list(self._requests):
                self.abort(request_id)
            self._mailboxes.clear()
            self._unclaimed.clear()
            self.admission.mask_workers.close()

    # The queue

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """A checked request that enqueue() takes; options as Admission.request has them. Changes nothing, waits for no
        step. Raises ValueError as add_request does."""
        self.intake.refuse_closed()
        return self.admission.request(prompt, params, **options)

    def prepare_embedding(self, prompt: Prompt, **options: Any) -> EmbeddingRequest:
        """prepare() for a prompt's vector; options as Admission.embedding has them. Its sink gets one output."""
        self.intake.refuse_closed()
        return self.admission.embedding(prompt, **options)

    def enqueue(self, request: Request, request_id: str | None = None, *, limited: bool = True) -> str:
        """Queue a prepared request and return its id. Waits for no step. limited: QueueFull if max_waiting requests
        wait already. Raises ValueError for an id in use, RuntimeError after close()."""
        return self.intake.add(request, request_id, limited=limited)

    def _settle(self) -> None:
        """Between steps: queue what came in, end what was asked to end or is past its deadline."""
        self.intake.take_in()
        for request, why in self.intake.due():
            self._end(request, "abort", why)

    def _end(self, request: Request, reason: FinishReason, why: str | None = None) -> bool:
        """End all branches that still run and hand out the last output; False if the request has ended before."""
        if not self.intake.has(request):
            return False
        for branch in request.branches:
            self._finish(branch, reason, why)
        self._emit(request)
        return True

    # One step

    def _run_step(self) -> None:
        self.metrics.begin()
        self._settle()
        chunks: list[Chunk] = []
        begun: set[Request] = set()
        try:
            self._draw_late(begun)
            if not self.scheduler.has_work:  # a request that came in since is not the scheduler's yet
                return
            chunks = self.scheduler.schedule()
            self.intake.scheduled()
            if chunks:
                self._compute(chunks, begun)
            elif not self.drawing.wait_late():
                raise PoolExhausted(
                    f"{self.kv.n_in_use} of {self.kv.n_pages} pages are held outside the engine; no request can advance"
                )
        except BaseException:
            undone = [chunk for chunk in chunks if chunk.branch.request not in begun]
            self.scheduler.rollback(undone)
            for chunk in undone:
                for branch in chunk.drawn:
                    self.drawing.forget(branch)
            for request in begun:  # an interrupt amid the bookkeeping of one request costs that request only
                if request.request_id in self._requests:
                    for branch in request.branches:
                        self._finish(branch, "error", "interrupted")
                    self._emit(request)
            raise

    def _draw_late(self, begun: set[Request]) -> None:
        """Take in the tokens that earlier steps could not wait for."""
        for branch in self.drawing.draw_late():
            request = branch.request
            begun.add(request)
            self.drawing.accept(branch)
            self.metrics.tokens(branch, branch.state.ok)
            if branch.finish_reason is not None:
                self.scheduler.remove(branch)
            self._emit(request)
            begun.discard(request)

    def _compute(self, chunks: list[Chunk], begun: set[Request]) -> None:
        """Forward, sample and hand out. `begun` holds a request while its state changes."""
        chunks = sorted(chunks, key=lambda chunk: chunk.branch.request.pooling)
        token_ids = array("i")
        wanted: list[int] = []  # rows of token_ids whose logits are wanted
        scored: dict[Request, list[tuple[int, int]]] = {}  # prompt position, row of the logits
        drawn: dict[Request, list[tuple[Branch, Chunk, int]]] = {}  # with the first row of logits to draw from
        work: dict[Request, list[Chunk]] = {}
        summed: dict[Request, range] = {}  # rows of the hidden states
        n_logits = 0  # of the rows wanted, the first; behind them hidden states alone are
        for chunk in chunks:
            branch, request = chunk.branch, chunk.branch.request
            work.setdefault(request, []).append(chunk)
            base = len(token_ids) - chunk.start
            token_ids += branch.tokens[chunk.start : chunk.start + chunk.n_tokens]
            for position in request.prompt_rows_wanted(chunk.start, chunk.n_tokens):
                scored.setdefault(request, []).append((position, len(wanted)))
                wanted.append(base + position)
            if isinstance(request, EmbeddingRequest):
                rows = request.hidden_rows_wanted(chunk.start, chunk.n_tokens)
                summed[request] = range(len(wanted), len(wanted) + len(rows))
                wanted.extend(base + position for position in rows)
                continue
            if chunk.completes:
                for each in chunk.drawn:
                    drawn.setdefault(request, []).append((each, chunk, len(wanted)))
                wanted.extend(range(len(token_ids) - 1, len(token_ids) + len(chunk.drafts)))
                token_ids.extend(chunk.drafts)
            n_logits = len(wanted)
        logits = self._rows(n_logits)
        hidden = None
        if len(wanted) > n_logits:
            hidden = np.empty((len(wanted), self.model.forward.hidden_size), np.float32)
        self._forward([c.branch.seq for c in chunks], token_ids, [c.n_rows for c in chunks], wanted, logits, hidden)
        first = [(branch, row) for each in drawn.values() for branch, _, row in each]
        self.drawing.draw([branch for branch, _ in first], logits, [row for _, row in first])
        self.metrics.sampled(chunks)
        for request, parts in work.items():
            begun.add(request)
            for position, row in scored.get(request, ()):
                self.drawing.score(request, position, logits, row)
            n_right = {chunk.branch: 0 for chunk in parts}  # drafts
            for branch, chunk, row in drawn.get(request, ()):
                n_before = branch.n_outputs
                self.drawing.accept(branch)
                if chunk.drafts:
                    n_right[branch] = self.drawing.accept_drafts(branch, chunk.drafts, logits, row)
                self.metrics.tokens(branch, branch.n_outputs - n_before)
            for chunk in parts:
                self.scheduler.settle(chunk, n_right[chunk.branch])
            if hidden is not None and isinstance(request, EmbeddingRequest):
                self._sum(request, hidden[summed[request].start : summed[request].stop])
            if request in drawn:
                if not request.forked:
                    self._fork(request)
                for branch, _, _ in drawn[request]:
                    if branch.finish_reason is not None:
                        self.scheduler.remove(branch)
                self._emit(request)
            begun.discard(request)

    def _sum(self, request: EmbeddingRequest, hidden: np.ndarray) -> None:
        request.add(hidden)
        if request.finished:
            self.metrics.embedded(request)
            self.scheduler.remove(request.branches[0])
            self._emit(request)

    def _rows(self, n: int) -> np.ndarray:
        if len(self._logits) < n:
            self._logits = np.empty((max(n, 2 * len(self._logits)), self.model.forward.vocab_padded), np.float32)
        return self._logits[:n]

    def _forward(
        self,
        seqs: list[Any],
        token_ids: Sequence[int],
        q_lens: list[int],
        rows: Iterable[int],
        logits: np.ndarray,
        hidden: np.ndarray | None = None,
    ) -> None:
        self.model.forward.run(
            self.kv,
            seqs,
            np.array(token_ids, np.int32),
            np.array(q_lens, np.int32),
            np.array(list(rows), np.int32),
            logits,
            *(() if hidden is None else [hidden]),
        )

    def _fork(self, request: Request) -> None:
        """The prompt is computed and every branch has its first token: let all but the first run on its pages."""
        request.forked = True
        first, *others = request.branches
        for branch in others:
            if branch.finish_reason is None:
                self.scheduler.fork(first, branch)

    def _finish(self, branch: Branch, reason: FinishReason, why: str | None = None) -> None:
        branch.finish(reason, why)
        self.scheduler.remove(branch)

    def _emit(self, request: Request) -> None:
        """Hand out the request's output, and forget the request if this was the last one."""
        finished = request.finished
        if finished:
            self.intake.forget(request)
            self.metrics.ended(request)
        if request.final_only and not finished:
            return
        (request.sink or self._unclaimed.append)(request.output())
        if finished:
            request.sink = None  # whoever still holds the request need not hold its reader
