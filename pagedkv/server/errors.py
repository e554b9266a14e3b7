"""Errors as the OpenAI API shows them: a status and one JSON object."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from ..engine.checks import shown

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_AFTER_SECONDS = 1
MAX_MESSAGE_CHARS = 2000
MAX_FIELD_CHARS = 100


class APIError(Exception):
    """An answer other than 200. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(message)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def printable(text: str) -> str:
    """`text` as one line that every encoding can carry, at most MAX_MESSAGE_CHARS characters."""
    line = " ".join(text.split())[:MAX_MESSAGE_CHARS]
    return line.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """400."""
    return APIError(400, message, param=param, code=code)


def busy(message: str) -> APIError:
    """429: come back later."""
    return APIError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def unavailable(message: str) -> APIError:
    """503: this server does not take requests now."""
    return APIError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def from_validation(error: ValidationError, value: Any) -> APIError:
    """400 with the first thing pydantic found in `value`: field, rule and what was there."""
    found = [(_path(one, value), one) for one in error.errors(include_url=False)]
    first = found[0][0]
    # of several things a field may be, the one that it nearly is tells most
    path, one = max((each for each in found if each[0][: len(first)] == first), key=lambda each: len(each[0]))
    where = ".".join(map(str, path))
    param = where or None
    what = str(one["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if one["type"] in ("extra_forbidden", "unknown"):
        return bad_request(f"{where}: unknown field", param=param, code="unknown_parameter")
    if one["type"] == "missing":
        return bad_request(f"{where}: is required", param=param, code="missing_required_parameter")
    text = f"{what}, not {shown(one['input'])}" if what.startswith("Input should") else what
    return bad_request(f"{where}: {text}" if where else text, param=param, code="invalid_value")


def _path(one: Any, value: Any) -> list[int | str]:
    """Where in `value` an error is. Its location also names members of unions, which are left out."""
    path: list[int | str] = []
    parts = one["loc"]
    for number, part in enumerate(parts):
        last = number == len(parts) - 1 and one["type"] in ("missing", "extra_forbidden")
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside or last:
            path.append(part)
        if inside:
            value = value[part]
    field = one.get("ctx", {}).get("field")  # of protocol.at()
    if field is not None:
        path.append(printable(field[:MAX_FIELD_CHARS]))
    return path


# What the engine calls by other names than requests do: the first of them that the request has.
ENGINE_NAMES = {
    "prompt": ("prompt", "messages", "input"),
    "prompt_token_ids": ("prompt", "messages", "input"),
    "structured_outputs": ("structured_outputs", "response_format", "tools"),
}


def from_refusal(error: ValueError, params: Iterable[str]) -> APIError:
    """400 for what the engine refused; its message begins with the field, or what it made of one of `params`, the
    fields that the request has."""
    message, known = str(error), set(params)
    first = re.match(r"\w+", message)
    names = ENGINE_NAMES.get(first[0], (first[0],)) if first else ()
    param = next((name for name in names if name in known), None)
    too_long = "longer than the context" in message or "the pool holds" in message
    return bad_request(message, param=param, code="context_length_exceeded" if too_long else "invalid_value")
