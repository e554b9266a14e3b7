"""Running the application under uvicorn, and stopping it well."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .connection import BoundedProtocol
from .service import Service

SWITCH_SECONDS = 0.0005  # the engine must not wait for the event loop to finish a round of sending
KEEP_ALIVE_SECONDS = 75  # longer than load balancers keep idle connections
LAST_BYTES_SECONDS = 5  # for connections to take what is left once the engine has stopped


class GracefulServer(uvicorn.Server):
    """The first SIGINT or SIGTERM lets the service finish or cancel what runs while everybody else gets 503, then ends
    the server; the second one ends it at once. `received` holds the signals. on_ready: called once connections are
    taken."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task | None = None
        self.received: list[int] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.received.append(sig)
        if len(self.received) > 1 or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._service.draining = True
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._stopping = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        try:
            await self._service.close()
        finally:
            self.should_exit = True


def configured(app: Starlette, *, access_log: bool = False) -> uvicorn.Config:
    """How uvicorn is to run the application."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_level="info" if access_log else "error",
        access_log=access_log,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=LAST_BYTES_SECONDS,
    )


def serve(
    app: Starlette,
    listener: socket.socket,
    *,
    access_log: bool = False,
    on_ready: Callable[[], None] | None = None,
) -> bool:
    """Serve on a bound socket until a signal; whether it was Ctrl-C. on_ready: called once connections are taken. Call
    in the main thread."""
    server = GracefulServer(configured(app, access_log=access_log), app.state.service, on_ready)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        server.run(sockets=[listener])
    finally:
        app.state.service.engine.shutdown()  # a second signal leaves no time for the application's own end
    return signal.SIGINT in server.received
