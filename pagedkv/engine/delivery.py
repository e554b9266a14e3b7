"""From the thread that steps to the event loop that reads: the newest output of a request, one wake-up for many."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .outputs import RequestOutput
from .request import Request

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future


class Mail:
    """Wakes the readers of one event loop. At most one wake-up is under way, however slow the loop is."""

    def __init__(self, loop: "AbstractEventLoop") -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._waiting: dict[Channel, None] = {}
        self._under_way = False

    def notify(self, channels: "Iterable[Channel]") -> None:
        """Let the readers of `channels` look; any thread. If the loop is closed, nobody reads them any more."""
        with self._lock:
            self._waiting.update(dict.fromkeys(channels))
            if self._under_way:
                return
            self._under_way = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            for channel in self._take():
                channel.close()

    def _take(self) -> "list[Channel]":
        with self._lock:
            channels, self._waiting = list(self._waiting), {}
            self._under_way = False
            return channels

    def _deliver(self) -> None:
        for channel in self._take():
            if channel.waiter is not None and not channel.waiter.done():
                channel.waiter.set_result(None)


class Channel:
    """One request's way to its reader.

    request: until its last output. newest: the newest output that was not read, or nothing. on_end: called with the
    channel at the last output; on_post: called with it after each; both on the thread that steps or aborts. on_close:
    called with it when the reader is gone.
    """

    def __init__(
        self,
        mail: Mail,
        *,
        on_post: "Callable[[Channel], None]",
        on_end: "Callable[[Channel], None]",
        on_close: "Callable[[Channel], None]",
    ) -> None:
        self.mail = mail
        self.request: Request | None = None
        self.newest: deque[RequestOutput] = deque(maxlen=1)
        self.waiter: Future[None] | None = None
        self.error: BaseException | None = None
        self._on_post, self._on_end, self._on_close = on_post, on_end, on_close

    def post(self, output: RequestOutput) -> None:
        """The request's sink: replaces what was not read yet. Any thread."""
        self.newest.append(output)
        if output.finished:
            self.request = None  # which holds this channel
            self._on_end(self)
        self._on_post(self)

    def fail(self, error: BaseException) -> None:
        """No output will come any more; the reader gets `error` behind what is there. Any thread."""
        self.error = error
        self.mail.notify([self])

    def close(self) -> None:
        """The reader has gone. Takes no lock."""
        self._on_close(self)

    async def get(self) -> RequestOutput:
        """The newest output, waiting for one that was not read; on the loop of `mail`, one caller at a time."""
        while True:
            try:
                return self.newest.popleft()
            except IndexError:
                pass
            if self.error is not None:
                raise self.error
            self.waiter = self.mail.loop.create_future()
            if not self.newest and self.error is None:  # neither came before there was a waiter to wake
                await self.waiter


def notify_all(channels: Iterable[Channel]) -> None:
    """One notify() for each event loop."""
    by_mail: dict[Mail, list[Any]] = {}
    for channel in channels:
        by_mail.setdefault(channel.mail, []).append(channel)
    for mail, readers in by_mail.items():
        mail.notify(readers)
