"""The requests that have not ended: how they come in without waiting for a step, and who is to be ended before one."""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Container, Iterator

from .admission import QueueFull
from .checks import check_int, is_text, refuse
from .request import Request
from .scheduler import Scheduler


class Intake:
    """Stands before the scheduler. add() and doom() come from any thread at any time; take_in(), scheduled(), due() and
    forget() from the one that holds the engine's lock.

    max_waiting: most requests that may wait, None: any number. taken: names that no request may have although none of
    `requests` does.
    """

    def __init__(self, scheduler: Scheduler, max_waiting: int | None, taken: Container[str]) -> None:
        self.scheduler = scheduler
        self.max_waiting = None if max_waiting is None else check_int("max_waiting", max_waiting, 0)
        self.requests: dict[str, Request] = {}
        self.closed = False
        self.n_refused = 0
        self.lock = threading.Lock()  # held for a moment, to check the queue and to add to it
        self._taken = taken
        self.incoming: deque[Request] = deque()  # since the last step; the scheduler does not know them
        self._doomed: deque[Request] = deque()
        self._fresh: set[Request] = set()  # in the scheduler's queue, but not at its last step
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap

    def add(self, request: Request, request_id: str | None, *, limited: bool) -> str:
        """Name the request and queue it. limited: heed max_waiting. Raises as LLMEngine.enqueue() says."""
        with self.lock:
            self.refuse_closed()
            if request_id is None:
                names = (f"request-{i}" for i in itertools.count(request.arrival))
                request_id = next(name for name in names if not self._in_use(name))
            elif not is_text(request_id) or not request_id or self._in_use(request_id):
                raise refuse("request_id", request_id, "a text, not empty, that no unfinished request has")
            if limited and self.max_waiting is not None:
                self._refuse_crowd(self.max_waiting)
            request.request_id = request_id
            self.requests[request_id] = request
            self.incoming.append(request)
            try:
                self.refuse_closed()  # by a thread that did not see the request yet
            except RuntimeError:
                self.requests.pop(request_id, None)
                raise
        return request_id

    def doom(self, request: Request) -> bool:
        """Let due() name the request; False if it has ended or is named already. Takes no lock."""
        if request.doomed or not self.has(request):
            return False
        request.doomed = True
        self._doomed.append(request)
        return True

    def has(self, request: Request) -> bool:
        """Whether this very request has not ended, as opposed to another one of its name."""
        return self.requests.get(request.request_id) is request

    def take_in(self) -> None:
        """Give the scheduler what came in."""
        while self.incoming:
            request = self.incoming.popleft()
            if self.has(request):
                for branch in request.branches:
                    if branch.mask is not None:
                        branch.mask.prepare([])
                self.scheduler.add(request.branches[0])
                self._fresh.add(request)
                if request.deadline is not None:
                    heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))

    def scheduled(self) -> None:
        """A step has been planned: whoever waits now was left waiting."""
        self._fresh.clear()

    def due(self) -> Iterator[tuple[Request, str | None]]:
        """Requests to abort now, each with the stop_reason; forget() each before the next."""
        while self._doomed:
            request = self._doomed.popleft()
            if self.has(request):
                yield request, None
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            request = heapq.heappop(self._deadlines)[2]
            if self.has(request):
                yield request, "timeout"

    def forget(self, request: Request) -> None:
        """The request has ended."""
        del self.requests[request.request_id]
        self._fresh.discard(request)
        if len(self._deadlines) > 64 + 2 * len(self.requests):  # mostly of requests that have ended
            self._deadlines = [entry for entry in self._deadlines if self.has(entry[2])]
            heapq.heapify(self._deadlines)

    def _in_use(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self._taken

    def refuse_closed(self) -> None:
        """RuntimeError once the engine is closed."""
        if self.closed:
            raise RuntimeError("the engine is closed")

    def _refuse_crowd(self, most: int) -> None:
        """Raise QueueFull if one more would make more than `most` wait. Those no step has seen yet count only beyond
        the free slots; but where a step left somebody waiting, a free slot is of no use."""
        n_left = max(0, len(self.scheduler.waiting) - len(self._fresh))
        n_new = len(self._fresh) + len(self.incoming)
        n_free = 0 if n_left else self.scheduler.max_num_seqs - len(self.scheduler.running)
        if n_left + max(0, n_new + 1 - n_free) > most:
            self.n_refused += 1
            n = n_left + max(0, n_new - n_free)
            raise QueueFull(f"{n} requests are waiting, as many as may (max_waiting, --max-queue: {most})")
