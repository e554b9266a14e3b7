"""Who computes how many tokens in the next step, and who holds pages.

Branches are ordered by their key (priority, arrival, index): lower goes first. Rules:

1. A step has one budget of tokens. Decodes (one token pending) take from it first, the longest not served first within
   a priority; then prefills in order, in chunks of what is left; then waiting branches are admitted, in order, never
   past one that does not fit.
2. A branch that needs a page when none is free takes the pages of the last branch in the order, if that comes after
   itself; otherwise it keeps its own and sits the step out. So the first branch always advances, and since whatever
   was accepted fits the pool alone, everybody finishes.
3. A preempted branch keeps its tokens and returns to its place in the queue; its K/V is recomputed when it is admitted.
"""

import bisect
from dataclasses import dataclass
from typing import Any

from ..core.errors import PoolExhausted
from .prefix import PrefixCache
from .request import Branch


@dataclass
class Chunk:
    """Work of one branch in one step: the K/V of tokens [start, start + n_tokens), room for which exists."""

    branch: Branch
    start: int
    n_tokens: int

    @property
    def completes(self) -> bool:
        """Whether the chunk ends with the branch's last token, so that its logits give the next one."""
        return self.start + self.n_tokens == len(self.branch.tokens)


def _key(branch: Branch) -> tuple[int, int, int]:
    return branch.key


class Scheduler:
    """Owns the queues and every page table of the engine. Not thread-safe; the engine locks around it.

    max_num_seqs: branches holding pages at a time. max_num_batched_tokens: the budget of a step. max_prompt_rows: rows
    of logits a step may spend on prompt logprobs.
    """

    def __init__(
        self,
        kv: Any,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prompt_rows: int = 64,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prompt_rows = max_prompt_rows
        self.prefix = prefix
        self.waiting: list[Branch] = []
        self.running: list[Branch] = []
        self.n_preemptions = 0
        self.n_steps = 0
        self.n_prefix_hit_tokens = 0
        self.n_prefix_query_tokens = 0
        self._chunks: dict[Branch, Chunk] = {}
        self._budget = 0
        self._prompt_rows = 0

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

    def publish(self, branch: Branch) -> None:
        """Offer the branch's full pages to later prompts; call after the step that filled them."""
        if self.prefix is not None:
            self.prefix.publish(branch)

    def schedule(self) -> list[Chunk]:
        """Plan one step: extends page tables, preempts and admits. Empty when nothing can be computed."""
        self.n_steps += 1
        self._chunks = {}
        self._budget = self.max_num_batched_tokens
        self._prompt_rows = self.max_prompt_rows
        decodes = [branch for branch in self.running if branch.n_pending == 1]
        prefills = [branch for branch in self.running if branch.n_pending > 1]
        decodes.sort(key=lambda branch: (branch.request.priority, branch.last_step, branch.key))
        for branch in (*decodes, *prefills):
            if branch.seq is not None:
                self._advance(branch)
        self._admit()
        return list(self._chunks.values())

    def rollback(self, chunks: list[Chunk]) -> None:
        """Undo the page tables' growth of chunks that were planned but not computed."""
        for chunk in chunks:
            if chunk.branch.seq is not None and len(chunk.branch.seq) > chunk.start:
                chunk.branch.seq.truncate(chunk.start)

    def _pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self.kv.page_tokens)

    def _advance(self, branch: Branch) -> bool:
        """Give a running branch as much of the step as there is; False if it got nothing."""
        n = min(branch.n_pending, self._budget)
        start = len(branch.seq)
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
        self._budget -= n
        self._prompt_rows -= len(rows)
        branch.last_step = self.n_steps
        return True

    def _admit(self) -> None:
        while self.waiting and self._budget > 0 and self._enter(self.waiting[0]):
            branch = self.waiting.pop(0)
            bisect.insort(self.running, branch, key=_key)
            if not self._advance(branch):
                break

    def _enter(self, branch: Branch) -> bool:
        """Give a waiting branch a page table, on a cached prefix if there is one, when a slot is free and so are pages
        for all its tokens and one more, beyond what running prefills still have to take. Branches of lower priority are
        preempted for it. False if it has to wait."""
        while True:
            if len(self.running) < self.max_num_seqs:
                branch.seq = self.kv.sequence()
                n_cached = 0 if self.prefix is None else self.prefix.attach(branch)
                needed = self._pages(len(branch.tokens) + 1) - self._pages(n_cached)
                owed = sum(self._pages(len(other.tokens)) - self._pages(len(other.seq)) for other in self.running)
                if not self.running or needed + owed <= self.kv.n_free + self.kv.n_cached:
                    self._count_prefix(branch, n_cached)
                    return True
                self._release(branch)
            if not self.running or self.running[-1].request.priority <= branch.request.priority:
                return False
            self._preempt(self.running[-1])

    def _count_prefix(self, branch: Branch, n_cached: int) -> None:
        if self.prefix is not None:
            self.n_prefix_query_tokens += len(branch.tokens)
            self.n_prefix_hit_tokens += n_cached
        if branch.request.num_cached_tokens is None:
            branch.request.num_cached_tokens = n_cached

    def _preempt(self, branch: Branch) -> None:
        self.running.remove(branch)
        chunk = self._chunks.pop(branch, None)
        if chunk is not None:
            self._budget += chunk.n_tokens
            self._prompt_rows += len(branch.request.prompt_rows_wanted(chunk.start, chunk.n_tokens))
        self._release(branch)
        self.add(branch)
        self.n_preemptions += 1

    def _release(self, branch: Branch) -> None:
        if branch.seq is not None:
            branch.seq.free()
            branch.seq = None
            branch.n_published = 0
