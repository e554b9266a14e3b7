"""One HTTP connection: bounds on what comes before a body, and clients that have sent all they will send."""

import asyncio
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16  # of request line and headers
PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
STREAM_PROBE = b"3\r\n:\n\n\r\n"  # a chunk that holds a comment, which readers of events skip
PROBE_SECONDS = (0.002, 0.01, 0.05, 0.25)  # from one look at the connection to the next, the last again and again
TCP_CLOSE = 7  # of <netinet/tcp.h>


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's fast HTTP protocol with a bound on what a client may send before its body, and an ear for half-closed
    connections.

    A client that ends its sending may have left, or may wait for its answer; the two look alike until it is sent
    something. So it is sent what a client skips: an interim response, or a comment in a stream of events. The system of
    one that has left refuses that, which ends the connection here. HTTP/1.0 has nothing to skip: there it has left.
    """

    n_head_bytes = 0  # of names, values and path, as they become known
    n_head_received = 0  # of everything that came while the head was incomplete
    in_head = True
    too_large = False
    message_begun = False

    def on_message_begin(self) -> None:
        self.n_head_bytes = self.n_head_received = 0
        self.in_head = self.message_begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()

    def _count(self, n: int) -> None:
        self.n_head_bytes += n
        if self.n_head_bytes > MAX_HEAD_BYTES:
            self.too_large = True
            raise httptools.HttpParserError(self._refusal())

    @staticmethod
    def _refusal() -> str:
        return f"more than {MAX_HEAD_BYTES} bytes before the body"

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._refusal() if self.too_large else msg)

    def data_received(self, data: bytes) -> None:
        in_head, self.message_begun = self.in_head, False
        super().data_received(data)
        if self.in_head and not self.transport.is_closing():
            # a head that begins here may stand behind the body of the request before it
            self.n_head_received += len(data) if in_head or not self.message_begun else 0
            if self.n_head_received > MAX_HEAD_BYTES:
                self.send_400_response(self._refusal())

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the connection for the answers that are still due."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.in_head:
            return None
        if self.scope["http_version"] != "1.1" or self.transport.is_closing():
            return None
        last = self.pipeline[0][0] if self.pipeline else cycle
        last.keep_alive = False
        connection = self.transport.get_extra_info("socket")
        if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if not cycle.response_started:
            self.transport.write(PROBE)
        elif cycle.chunked_encoding:
            self.transport.write(STREAM_PROBE)
        self._look(connection, list(PROBE_SECONDS))
        return True

    def _look(self, connection: Any, waits: list[float]) -> None:
        """End the connection once the client's system has refused what it was sent."""
        if self.transport.is_closing():
            return
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == TCP_CLOSE:
            self.transport.abort()
            return
        asyncio.get_running_loop().call_later(waits[0], self._look, connection, waits[1:] or waits)
