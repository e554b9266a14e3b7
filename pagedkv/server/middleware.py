"""What stands before every route: keys, the state of shutdown, and the size of bodies. Plain ASGI, nothing buffered."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import APIError, unavailable

OPEN_PATHS = frozenset({"/health", "/ready"})
JSON_TYPE = "application/json"


class Authentication:
    """401 unless a request carries one of the keys, as `Bearer KEY` or as the password of HTTP Basic, for which
    browsers ask by themselves. Keys are compared in constant time, all of them each time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._accepts(scope):
            await self._app(scope, receive, send)
            return
        # the page is opened by a person, everything else by programs
        page = scope["path"] == "/" or scope["path"].startswith("/static/")
        headers = {"WWW-Authenticate": 'Basic realm="pagedkv", charset="UTF-8"' if page else "Bearer"}
        error = APIError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key",
                         headers=headers)  # fmt: skip
        await error.response()(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = _key_of(given[0]) if len(given) == 1 else None
        digest = _digest(b"" if key is None else key)
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return key is not None and any(same)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key_of(header: bytes) -> bytes | None:
    scheme, _, rest = header.partition(b" ")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return rest
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except binascii.Error:
            return None
    return None


class RefuseWhileDraining:
    """503 for new work once the server is told to stop; what only reads goes on."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and self._is_draining():
            await unavailable("the server is shutting down").response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def read_json_body(request: Request, limit: int) -> bytes:
    """The body of a request. APIError 415 unless it says it is JSON, 413 as soon as it is known to exceed `limit`."""
    kind = request.headers.get("content-type", "")
    media, _, parameters = kind.partition(";")
    if media.strip().lower() != JSON_TYPE or "charset" in parameters.lower().replace("charset=utf-8", ""):
        raise APIError(415, f"content-type: must be {JSON_TYPE}, not {kind[:100]!r}", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise APIError(415, "content-encoding: bodies must not be compressed", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> APIError:
    return APIError(413, f"body: larger than {limit} bytes", code="body_too_large")
