"""The engine's side of one HTTP request: its prompts, run together, and dropped when the client is gone."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from ..engine.admission import QueueFull
from ..engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from ..engine.params import SamplingParams
from ..engine.structured import FIELD
from .errors import APIError, bad_request, busy, from_refusal, unavailable
from .service import Service

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What is to be computed: token ids of the prompts with their texts, and how."""

    prompts: Sequence[tuple[str | None, list[int]]]
    params: SamplingParams
    fields: frozenset[str]  # of the request, which a refusal may blame
    priority: int = 0
    timeout: float | None = None
    salt: str | None = None


class Generation:
    """One engine request for each prompt. Aborts whatever still runs when closed."""

    def __init__(self, streams: list[Any]) -> None:
        self._streams = streams

    @classmethod
    async def start(cls, service: Service, work: Work, request_id: str, *, final_only: bool) -> "Generation":
        """Queue all prompts or none. APIError 400 for what the engine refuses, 429 when its queue is full."""

        async def submit(index: int) -> Any:
            text, ids = work.prompts[index]
            prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": ids}
            if work.salt is not None:
                prompt["cache_salt"] = work.salt
            return await service.engine.submit(
                prompt,
                work.params,
                request_id=request_id if len(work.prompts) == 1 else f"{request_id}-{index}",
                priority=work.priority,
                timeout=work.timeout,
                final_only=final_only,
            )

        return await cls.queue(service, len(work.prompts), submit, work.fields)

    @classmethod
    async def queue(
        cls, service: Service, n: int, submit: Callable[[int], Awaitable[Any]], fields: Iterable[str]
    ) -> "Generation":
        """Await submit(i) for each i below n, which queues a request and returns its stream: all of them or none.
        Refusals may blame `fields`; APIError as start() raises it."""
        generation = cls([])
        try:
            for index in range(n):
                if index:
                    await asyncio.sleep(0)  # others have their turn between many prompts
                generation._streams.append(await submit(index))
        except BaseException as error:
            await generation.aclose()
            if isinstance(error, QueueFull):
                raise busy(str(error)) from None
            if isinstance(error, ValueError):
                raise from_refusal(error, fields) from None
            if isinstance(error, RuntimeError) and service.stopped:
                raise unavailable(str(error)) from None
            raise
        return generation

    async def outputs(self) -> AsyncGenerator[tuple[int, Any], None]:
        """(index of the prompt, its newest output), as they come."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index = waiting.pop(task)
                    output = task.result()
                    if output is not None:
                        yield index, output
                        waiting[asyncio.ensure_future(_next(self._streams[index]))] = index
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def finals(self) -> list[Any]:
        """The last output of each prompt."""
        last: dict[int, Any] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                last[index] = output
        return [last[index] for index in range(len(self._streams))]

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()


async def _next(stream: Any) -> RequestOutput | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


def raise_failure(outputs: Iterable[CompletionOutput | EmbeddingOutput]) -> None:
    """APIError if one of them must not pass for an answer: the engine failed it, or was stopped under it."""
    for each in outputs:
        if each.finish_reason == "error":
            _, found, why = str(each.stop_reason).partition(f"{FIELD}: ")
            if found:  # a grammar can turn out to be too large only when it is used
                raise bad_request(f"{FIELD}: {why}", param=FIELD)
            raise APIError(500, f"the model failed: {each.stop_reason}", code="model_error")
        if each.finish_reason == "abort" and each.stop_reason != "timeout":
            raise unavailable("the server stopped before the answer was whole")


class Disconnected(Exception):
    """The client is gone; nobody reads an answer."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled, with Disconnected raised, once the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for each in (gone, task):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
