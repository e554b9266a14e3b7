"""How a generation becomes an HTTP answer: whole, or as server-sent events."""

from collections.abc import MutableMapping
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.outputs import RequestOutput
from .errors import APIError, from_validation
from .generation import Disconnected, Generation, Work, raise_failure, unless_disconnected
from .parsing import parse_object
from .service import Service

M = TypeVar("M", bound=BaseModel)
DONE = b"data: [DONE]\n\n"


class Job(Protocol):
    """One request, checked and tokenized.

    head: fields every chunk of a stream begins with. answer(): the whole answer, made of all final outputs. deltas():
    what is new of one prompt's choices since its last call. usage(): of the newest outputs.
    """

    id: str
    work: Work
    stream: bool
    include_usage: bool
    head: dict[str, Any]

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]: ...
    def deltas(self, index: int, output: RequestOutput) -> list[dict[str, Any]]: ...
    def usage(self) -> dict[str, Any]: ...


def validated(model: type[M], raw: bytes) -> M:
    """A request body as a `model`. APIError 400 for the first thing that is wrong with it."""
    value = parse_object(raw)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error, value) from None


def encoded(value: Any) -> bytes:
    """Compact JSON; null for what JSON has no number for."""
    return to_json(value, inf_nan_mode="null")


class JSONAnswer(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


async def answer(service: Service, request: Request, job: Job) -> Response:
    """Run the job. Raises APIError before anything is sent, Disconnected when the client has gone."""
    headers = {"X-Request-Id": job.id}
    if job.stream:
        return EventStream(service, job, headers)
    return JSONAnswer(await unless_disconnected(request.receive, _whole(service, job)), headers=headers)


async def _whole(service: Service, job: Job) -> dict[str, Any]:
    generation = await Generation.start(service, job.work, job.id, final_only=True)
    try:
        outputs = await generation.finals()
    finally:
        await generation.aclose()
    for output in outputs:
        raise_failure(output.outputs)
    return job.answer(outputs)


class EventStream(Response):
    """Deltas as they come, each event sent when the client has room for it: a slow reader gets fewer, longer ones."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, job: Job, headers: dict[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._service = service
        self._job = job
        head = encoded(job.head)[:-1]
        self._before = b"data: " + head + b',"choices":['
        self._after = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the job; refusals are raised before the status line is sent. A client that leaves is no fault."""
        if scope["http_version"] == "1.0":
            send = at_once(send)
        with suppress(Disconnected):
            await unless_disconnected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        job = self._job
        generation = await Generation.start(self._service, job.work, job.id, final_only=False)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                before, after = self._before, self._after
                async with aclosing(generation.outputs()) as outputs:
                    async for index, output in outputs:
                        raise_failure(output.outputs)
                        events = [
                            before + to_json(delta, inf_nan_mode="null") + after for delta in job.deltas(index, output)
                        ]
                        if events:
                            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                last = DONE
                if job.include_usage:
                    last = b"data: " + encoded({**job.head, "choices": [], "usage": job.usage()}) + b"\n\n" + DONE
            except APIError as error:
                last = b"data: " + encoded(error.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await generation.aclose()


def at_once(send: Send) -> Send:
    """`send` for a client to whom a body of unknown length cannot be sent: it gets all parts together at the end."""
    start: dict[str, Any] = {}
    parts: list[bytes] = []

    async def collect(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        parts.append(message["body"])
        if not message["more_body"]:
            body = b"".join(parts)
            await send({**start, "headers": [*start["headers"], (b"content-length", b"%d" % len(body))]})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    return collect


class Counted:
    """Usage of a request, from the newest output of each prompt."""

    def __init__(self, n_outputs: int | None = None) -> None:
        self._newest: dict[int, RequestOutput] = {}
        self._n_outputs = n_outputs

    def see(self, index: int, output: RequestOutput) -> None:
        """Take note of a prompt's newest output."""
        self._newest[index] = output

    def usage(self) -> dict[str, Any]:
        """As answers show it."""
        newest = self._newest.values()
        prompt = sum(len(output.prompt_token_ids) for output in newest)
        cached = sum(output.num_cached_tokens for output in newest)
        made = sum(len(each.token_ids) for output in newest for each in output.outputs)
        if self._n_outputs is not None:
            made = self._n_outputs * len(newest)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
