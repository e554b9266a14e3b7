"""The thread that steps an engine for AsyncEngine: started at first use, asleep while nothing runs, gone at close()."""

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import forks
from .checks import explained
from .delivery import Channel, Mail, notify_all
from .engine import LLMEngine
from .request import Request

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

logger = logging.getLogger("pagedkv.engine")

Command = Callable[[BaseException | None], None]


class EngineDeadError(RuntimeError):
    """The engine could not clean up behind an exception, which the message names; it takes no more requests."""


class EngineThread:
    """Steps `engine` as long as a channel has a request, and carries out commands between steps.

    Every method may be called from any thread and waits for no step, join() excepted.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.draining = False
        self.closed = False
        self._death: str | None = None
        self._start_over()
        forks.watch(self)

    def _start_over(self) -> None:
        self._state = threading.Lock()  # held where the thread starts or ends and where requests come in
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: look up, something changed
        self._thread: threading.Thread | None = None
        # by id of the loop, which lives as long as its mail, as that does while a channel uses it
        self._mails: weakref.WeakValueDictionary[int, Mail] = weakref.WeakValueDictionary()
        self._open: set[Channel] = set()  # whose request has not ended
        self._outbox: list[Channel] = []  # with an output of the running step
        self._when_idle: list[Command] = []

    # Forks. The engine, asked after and told before this, sees to it that no step runs.

    def before_fork(self) -> None:
        """Let the child find everything whole."""
        self._state.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._state.release()

    def after_fork_in_child(self) -> None:
        """The thread and all readers stayed in the parent: end their requests, start afresh at the next use."""
        lost = list(self._open)
        self._start_over()
        _running.discard(self)
        for channel in lost:
            channel.error = RuntimeError("the stream was left behind in the parent process by a fork")
            request = channel.request
            if request is not None:
                request.sink = _forget
                self.engine.doom(request)
        if lost and not self.closed:
            self.engine.settle()

    # From any thread

    def refusal(self) -> RuntimeError | None:
        """Why nothing can be asked for any more; None while it can."""
        if self._death is not None:
            return EngineDeadError(self._death)
        return RuntimeError("the AsyncEngine is closed") if self.closed else None

    def channel(self, loop: "AbstractEventLoop") -> Channel:
        """A channel to a reader on `loop`."""
        with self._state:
            mail = self._mails.get(id(loop))
            if mail is None:
                mail = self._mails[id(loop)] = Mail(loop)
        return Channel(mail, on_post=self._posted, on_end=self._open.discard, on_close=self._abandon)

    def submit(self, channel: Channel, request: Request, request_id: str | None) -> str:
        """Queue the request and step until it ends; its id. Raises what LLMEngine.enqueue() and refusal() say."""
        with self._state:
            if self.draining and not self.closed:
                raise RuntimeError("the AsyncEngine is draining and takes no new requests")
            self._start()
            channel.request = request
            self._open.add(channel)
            try:
                request_id = self.engine.enqueue(request, request_id)
            except BaseException:
                self._open.discard(channel)
                raise
        self.wake()
        return request_id

    def command(self, command: Command) -> None:
        """Call command(None) between two steps, or command(error) if the thread ends before. It must not raise."""
        with self._state:
            self._start()
            self._inbox.put(command)

    def when_idle(self, command: Command) -> None:
        """Like command(), but only once no request is left; on the thread itself."""
        self._when_idle.append(command)

    def wake(self) -> None:
        """Look at the engine again. Takes no lock."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """stop() for finalizers: takes no lock."""
        self._inbox.put(lambda error: self.stop())

    def stop(self) -> None:
        """Take nothing more; when the running step has ended, abort what runs and end the thread."""
        with self._state:
            self.closed = True
        self.wake()

    def join(self) -> None:
        """After stop(): wait for the end of the thread. On the thread itself, return at once."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        error = self.refusal()
        if error is not None:
            raise error
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="pagedkv-engine", daemon=True)
            thread.start()
            self._thread = thread
            _running.add(self)

    def _abandon(self, channel: Channel) -> None:
        request = channel.request
        if request is not None and self.engine.doom(request):
            self.wake()

    # On the thread

    def _run(self) -> None:
        try:
            while not self.closed:
                self._work()
            for channel in list(self._open):
                self._abandon(channel)
            self.engine.settle()
            self._flush()
        except BaseException as error:
            logger.critical("the engine cannot go on", exc_info=True)
            self._death = f"the engine died: {explained(error)}"
        with self._state:
            self.closed = True
        refusal = self.refusal()
        assert refusal is not None
        for channel in list(self._open):
            channel.fail(refusal)
        self._open.clear()
        for command in [*self._when_idle, *self._commands(block=False)]:
            command(refusal)
        _running.discard(self)

    def _work(self) -> None:
        """Commands, then a step if a request waits for one, then outputs to their readers. Sleeps without either."""
        for command in self._commands(block=not self._open):
            command(None)
        if self._open and not self.closed:
            try:
                self.engine.pump()
            except BaseException as error:
                logger.exception("a step failed; the requests in it end with an error")
                self.engine.fail(explained(error))
        self._flush()
        if self._when_idle and not self._open:
            waiting, self._when_idle = self._when_idle, []
            for command in waiting:
                command(None)

    def _commands(self, *, block: bool) -> list[Command]:
        found = []
        try:
            while True:
                command = self._inbox.get(block=block)
                block = False
                if command is not None:
                    found.append(command)
        except queue.Empty:
            return found

    def _posted(self, channel: Channel) -> None:
        if threading.current_thread() is self._thread:
            self._outbox.append(channel)
        else:  # another thread steps the same engine, or aborts
            channel.mail.notify([channel])
            self.wake()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox:
            notify_all(outbox)


def _forget(output: Any) -> None:
    """The sink of a request without a reader."""


_running: set[EngineThread] = set()


@atexit.register
def _end_all() -> None:
    """The interpreter ends: let the running steps end first, since they use memory that is about to go."""
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()
