"""Who computes how many tokens in the next step, and who holds pages.

Branches are ordered by their key (priority, arrival, index): lower goes first. Rules:

1. A step has one budget of tokens. Decodes (one token pending) take from it first, the longest not served first within
   a priority; then prefills in order, in chunks of what is left; then waiting branches are admitted, in order, never
   past one that does not fit: within a priority nobody is overtaken. Who waits goes before prefills of lower
   priority. Guessed tokens take what nobody else wanted.
   While somebody reads along with a decode, everything beside the decodes costs at most 3/2 of them (engine/pacing.py),
   so tokens keep coming; a prefill still gets a row of every step and 3/5 of its cost, so it ends. With nothing to
   decode, or nobody reading, the budget is the only bound.
2. A branch that needs a page when none is free takes the pages of the last branch in the order, if that comes after
   itself; otherwise it keeps its own and sits the step out. So the first branch always advances, and since whatever
   was accepted fits the pool alone, everybody finishes.
3. A preempted branch keeps its tokens and returns to its place in the queue; its K/V is recomputed when it is admitted.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import PoolExhausted
from .pacing import Pacing
from .prefix import PrefixCache
from .request import Branch
from .speculation import Speculation


@dataclass(slots=True)
class Chunk:
    """Work of one branch in one step: the K/V of tokens [start, start + n_tokens) and of the drafts, guesses of the
    tokens behind them. There is room for both."""

    branch: Branch
    start: int
    n_tokens: int
    drafts: Sequence[int] = ()

    @property
    def n_rows(self) -> int:
        """Rows in the step's forward."""
        return self.n_tokens + len(self.drafts)

    @property
    def completes(self) -> bool:
        """Whether the chunk ends with the branch's last token, so that its logits give the next one."""
        return self.start + self.n_tokens == len(self.branch.tokens)

    @property
    def drawn(self) -> list[Branch]:
        """The branches whose next token the chunk's last row gives, if it completes."""
        return [self.branch] if self.branch.request.forked else self.branch.request.branches


def _key(branch: Branch) -> tuple[int, int, int]:
    return branch.key


class Scheduler:
    """Owns the queues and every page table of the engine. Not thread-safe; the engine locks around it.

    max_num_seqs: branches holding pages at a time. max_num_batched_tokens: the budget of a step. max_prompt_rows: rows
    of logits a step may spend on prompt logprobs. paced: whether readers are protected from others' prefills.
    """

    def __init__(
        self,
        kv: Any,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prompt_rows: int = 64,
        prefix: PrefixCache | None = None,
        pacing: Pacing | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prompt_rows = max_prompt_rows
        self.prefix = prefix
        self.pacing = pacing or Pacing()
        self.paced = True
        self.speculation = speculation
        self.waiting: list[Branch] = []
        self.running: list[Branch] = []
        self.n_preemptions = 0
        self.n_steps = 0
        self.n_prefix_hit_tokens = 0
        self.n_prefix_query_tokens = 0
        self._chunks: dict[Branch, Chunk] = {}
        self._budget = 0
        self._prompt_rows = 0
        self._spare: int | None = None  # cost that may still go beside the decodes, None: any
        self._prefilling = False

    @property
    def has_work(self) -> bool:
        """Whether any branch runs or waits."""
        return bool(self.running or self.waiting)

    def add(self, branch: Branch) -> None:
        """Queue a branch at its place in the order."""
        bisect.insort(self.waiting, branch, key=_key)

    def remove(self, branch: Branch) -> None:
        """Forget a branch, wherever it is, and give its pages back. Idempotent."""
        for queue in (self.running, self.waiting):
            at = bisect.bisect_left(queue, branch.key, key=_key)
            if at < len(queue) and queue[at] is branch:
                del queue[at]
        self._release(branch)

    def fork(self, parent: Branch, child: Branch) -> None:
        """Let `child` run on the parent's pages, copied when written to; without a free slot it waits its turn."""
        if len(self.running) < self.max_num_seqs and parent.seq is not None:
            child.seq = parent.seq.snapshot()
            bisect.insort(self.running, child, key=_key)
        else:
            self.add(child)

    def schedule(self) -> list[Chunk]:
        """Plan one step: extends page tables, preempts and admits. Empty when nothing can be computed."""
        self.n_steps += 1
        self._chunks = {}
        self._budget = self.max_num_batched_tokens
        self._prompt_rows = self.max_prompt_rows
        decodes, prefills = [], []
        for branch in self.running:
            if branch.n_pending == 1 and not branch.request.pooling:
                decodes.append(branch)
            elif branch.n_pending > 0:
                prefills.append(branch)
        decodes.sort(key=lambda branch: (branch.request.priority, branch.last_step, branch.key))
        self._spare, self._prefilling = None, False
        for branch in decodes:
            if branch.seq is not None:
                self._advance(branch)
        decoding = list(self._chunks.values())
        if self.paced and any(not chunk.branch.request.final_only for chunk in decoding):
            self._spare = self.pacing.beside([chunk.start for chunk in decoding])
        for branch in prefills:
            self._admit(branch.request.priority)
            if branch.seq is not None:
                self._advance(branch)
        self._admit()
        if self.speculation is not None:
            # a branch may have been preempted since, and admitted again with another chunk; and what several branches
            # draw their next tokens from, a guess of one of them must not follow
            alone = [chunk for chunk in decoding if self._chunks.get(chunk.branch) is chunk and len(chunk.drawn) == 1]
            self._speculate(self.speculation, alone)
        return list(self._chunks.values())

    def settle(self, chunk: Chunk, n_kept: int) -> None:
        """After the step: keep the K/V of the chunk's tokens and of its first n_kept drafts, which turned out right,
        drop the rest, and offer the branch's full pages to later prompts."""
        branch = chunk.branch
        if chunk.drafts and self.speculation is not None:
            self.speculation.count(len(chunk.drafts), n_kept)
        if n_kept < len(chunk.drafts):
            branch.seq.truncate(chunk.start + chunk.n_tokens + n_kept)
        if self.prefix is not None and not branch.request.pooling:
            self.prefix.publish(branch)

    def rollback(self, chunks: list[Chunk]) -> None:
        """Undo the page tables' growth of chunks that were planned but not computed."""
        for chunk in chunks:
            if chunk.branch.seq is not None and len(chunk.branch.seq) > chunk.start:
                chunk.branch.seq.truncate(chunk.start)

    def pages(self, n_tokens: int) -> int:
        """Pages that hold the K/V of n_tokens tokens."""
        return -(-n_tokens // self.kv.page_tokens)

    def _advance(self, branch: Branch) -> bool:
        """Give a running branch as much of the step as there is; False if it got nothing."""
        start = len(branch.seq)
        n = self._bounded(start, branch.n_pending)
        rows = branch.request.prompt_rows_wanted(start, n)
        if len(rows) > self._prompt_rows:
            n = rows[self._prompt_rows] - start
            rows = rows[: self._prompt_rows]
        if n <= 0:
            return False
        while True:
            try:
                branch.seq.extend(n)
                break
            except PoolExhausted:
                if self.running[-1].key <= branch.key:
                    return False
                self._preempt(self.running[-1])
        self._chunks[branch] = Chunk(branch, start, n)
        self._take(start, n)
        self._prompt_rows -= len(rows)
        branch.last_step = self.n_steps
        return True

    def _bounded(self, start: int, n: int) -> int:
        """How many of n rows from position `start` on the step has room for. The first prefill gets one at least."""
        n = min(n, self._budget)
        if self._spare is not None:
            n = min(n, max(self.pacing.fitting(start, self._spare), 0 if self._prefilling else 1))
        return n

    def _take(self, start: int, n: int) -> None:
        """Book n rows beside the decodes, or the decodes themselves while nothing bounds them."""
        self._budget -= n
        if self._spare is not None:
            self._spare -= self.pacing.rows(start, n)
            self._prefilling = True

    def _admit(self, before: int | None = None) -> None:
        """Let waiting branches in, None: all that there is room for, otherwise those that go before this priority."""
        while self.waiting and (before is None or self.waiting[0].request.priority < before):
            if self._bounded(0, 1) <= 0 or not self._enter(self.waiting[0]):
                break
            branch = self.waiting.pop(0)
            bisect.insort(self.running, branch, key=_key)
            if not self._advance(branch):
                break

    def _enter(self, branch: Branch) -> bool:
        """Give a waiting branch a page table, on a cached prefix if there is one, when a slot is free and so are pages
        for all its tokens and one more (as far as it will ever store one), beyond what running prefills still have to
        take. Branches of lower priority are preempted for it. False if it has to wait."""
        while True:
            if len(self.running) < self.max_num_seqs:
                branch.seq = self.kv.sequence()
                n_cached = self._attach(branch)
                n_tokens = min(len(branch.tokens) + 1, branch.request.max_stored_tokens)
                needed = self.pages(n_tokens) - self.pages(n_cached)
                owed = sum(self.pages(len(other.tokens)) - self.pages(len(other.seq)) for other in self.running)
                if not self.running or needed + owed <= self.kv.n_free + self.kv.n_cached:
                    self._count_prefix(branch, n_cached)
                    return True
                self._release(branch)
            if not self.running or self.running[-1].request.priority <= branch.request.priority:
                return False
            self._preempt(self.running[-1])

    def _attach(self, branch: Branch) -> int:
        """How many tokens of the branch the prefix cache has given it."""
        return self.prefix.attach(branch) if self.prefix is not None and not branch.request.pooling else 0

    def _count_prefix(self, branch: Branch, n_cached: int) -> None:
        if self.prefix is not None and not branch.request.pooling:
            self.n_prefix_query_tokens += len(branch.tokens)
            self.n_prefix_hit_tokens += n_cached
        if branch.request.num_cached_tokens is None:
            branch.request.num_cached_tokens = n_cached

    def _preempt(self, branch: Branch) -> None:
        self.running.remove(branch)
        chunk = self._chunks.pop(branch, None)
        if chunk is not None:
            self._budget += chunk.n_tokens
            if self._spare is not None and chunk.n_tokens > 1:
                self._spare += self.pacing.rows(chunk.start, chunk.n_tokens)
            self._prompt_rows += len(branch.request.prompt_rows_wanted(chunk.start, chunk.n_tokens))
        self._release(branch)
        self.add(branch)
        self.n_preemptions += 1
        branch.request.n_preemptions += 1

    def _release(self, branch: Branch) -> None:
        if branch.seq is not None:
            branch.seq.free()
            branch.seq = None
            branch.n_published = 0

    def _speculate(self, speculation: Speculation, decoding: list[Chunk]) -> None:
        """Add guesses to decodes where they pay, in room that is left: nobody gives up a page or a row for them."""
        beside = sum(chunk.n_tokens for chunk in self._chunks.values()) - len(decoding)
        for chunk, drafts in speculation.plan(decoding, beside, self.pacing):
            position = chunk.start + chunk.n_tokens
            del drafts[max(0, self._bounded(position, len(drafts))) :]
            if drafts:
                try:
                    chunk.branch.seq.extend(len(drafts))
                except PoolExhausted:
                    continue
                chunk.drafts = drafts
                self._take(position, len(drafts))
