"""Running the application under uvicorn, and stopping it well."""

import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .service import Service

LAST_BYTES_SECONDS = 5  # for connections to take what is left once the engine has stopped


class GracefulServer(uvicorn.Server):
    """The first SIGINT or SIGTERM lets the service finish or cancel what runs while everybody else gets 503, then ends
    the server; the second one ends it at once. `received` holds the signals."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task | None = None
        self.received: list[int] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

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


def serve(app: Starlette, listener: socket.socket, *, access_log: bool = False) -> bool:
    """Serve on a bound socket until a signal; whether it was Ctrl-C. Call in the main thread."""
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        ws="none",
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=LAST_BYTES_SECONDS,
    )
    server = GracefulServer(config, app.state.service)
    try:
        server.run(sockets=[listener])
    finally:
        app.state.service.engine.shutdown()  # a second signal leaves no time for the application's own end
    return signal.SIGINT in server.received
