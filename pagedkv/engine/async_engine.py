"""AsyncEngine: an asyncio stream for each request, over one engine thread."""

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from .admission import Prompt
from .checks import refuse
from .delivery import Channel
from .engine import LLMEngine
from .engine_thread import EngineThread
from .outputs import EmbeddingRequestOutput, RequestOutput
from .params import SamplingParams
from .request import Request

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

# What is longer is prepared beside the event loop.
LONG_TEXT = 2048  # characters
LONG_IDS = 16384


class RequestStream:
    """The outputs of one request, each with all the text so far; the last has finished=True.

    Belongs to the event loop it was made on; one task reads at a time. A slow reader finds the newest output and none
    of those before it. Closing, cancelling a task that waits for an output, and dropping the stream abort the request.
    Raises EngineDeadError if the engine died, RuntimeError in a child of a fork.
    """

    request_id: str

    def __init__(self, owner: "AsyncEngine", channel: Channel) -> None:
        self._owner = owner  # lives as long as its streams
        self._channel = channel
        self._reading = False
        self._ended = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        import asyncio

        if self._ended:
            raise StopAsyncIteration
        if asyncio.get_running_loop() is not self._channel.mail.loop:
            raise RuntimeError(f"the stream of {self.request_id} belongs to another event loop")
        if self._reading:
            raise RuntimeError(f"another task is reading the stream of {self.request_id}")
        self._reading = True
        try:
            output = await self._channel.get()
        except BaseException:
            self.close()
            raise
        finally:
            self._reading = False
        if self._ended:  # closed by another task meanwhile
            raise StopAsyncIteration
        if output.finished:
            self._ended = True
        return output

    def close(self) -> None:
        """Abort the request if it still runs, without waiting for it; nothing more is read, and a task that waits for
        an output goes on at once. Idempotent."""
        if not self._ended:
            self._ended = True
            self._channel.close()
            if self._reading:
                self._channel.fail(StopAsyncIteration())

    async def aclose(self) -> None:
        """close()."""
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncEngine:
    """Streams for asyncio over one LLMEngine.

    llm: an LLM, anything with an `.engine`, or an LLMEngine; it stays the caller's, to close after this. Any number of
    event loops and threads may use one AsyncEngine, beside others who use the LLM. The one thread behind it starts with
    the first request. In the child of a fork the streams of the parent are gone and everything else works afresh.

    An exception out of a step ends the requests in it with finish_reason "error" and the exception in stop_reason;
    others go on. If not even that is possible, every stream and every later call raises EngineDeadError.
    """

    def __init__(self, llm: Any) -> None:
        engine = llm if isinstance(llm, LLMEngine) else getattr(llm, "engine", None)
        if not isinstance(engine, LLMEngine):
            raise refuse("llm", llm, "an LLM or an LLMEngine")
        self.llm = llm
        self.engine = engine
        self._thread = EngineThread(engine)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        *,
        final_only: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request. submit() as one iterator: what that raises, the first __anext__ raises."""
        stream = await self.submit(prompt, sampling_params, request_id, priority, timeout, final_only=final_only)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        *,
        final_only: bool = False,
    ) -> RequestStream:
        """Queue a request and return its stream, without waiting for a step. Arguments are LLMEngine.add_request's;
        final_only: the stream gives the last output alone.

        Raises ValueError and QueueFull as that does, RuntimeError while draining and after close(), EngineDeadError;
        nothing is queued then.
        """

        def prepare(**sink: Any) -> Request:
            options = {"priority": priority, "timeout": timeout, "final_only": final_only}
            return self.engine.prepare(prompt, sampling_params, **options, **sink)

        slow = _is_long(prompt) or getattr(sampling_params, "structured_outputs", None) is not None
        return await self._stream(prepare, slow, request_id)

    async def submit_embedding(
        self, prompt: Prompt, request_id: str | None = None, priority: int = 0, timeout: float | None = None
    ) -> RequestStream:
        """submit() for a prompt's vector: the stream gives one EmbeddingRequestOutput. Raises as submit() does."""

        def prepare(**sink: Any) -> Request:
            return self.engine.prepare_embedding(prompt, priority=priority, timeout=timeout, **sink)

        return await self._stream(prepare, _is_long(prompt), request_id)

    async def embed(
        self, prompt: Prompt, request_id: str | None = None, priority: int = 0, timeout: float | None = None
    ) -> EmbeddingRequestOutput:
        """A prompt's vector, computed in chunks beside other requests; cancelling the task aborts it. An abort or a
        failure shows in `.outputs`. Raises as submit() does."""
        stream = await self.submit_embedding(prompt, request_id, priority, timeout)
        output: Any = await anext(stream)
        return output

    async def _stream(self, prepare: Callable[..., Request], slow: bool, request_id: str | None) -> RequestStream:
        """Queue what prepare(sink=) makes. slow: make it on another thread."""
        import asyncio

        channel = self._thread.channel(asyncio.get_running_loop())
        make = functools.partial(prepare, sink=channel.post)
        request = await asyncio.to_thread(make) if slow else make()
        stream = RequestStream(self, channel)
        stream.request_id = self._thread.submit(channel, request, request_id)
        return stream

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args) on the engine thread while no step runs: its result, or its exception. Requests wait meanwhile.
        Cancelled before fn has begun, it does not run. Raises RuntimeError after close(), EngineDeadError."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: Future[Any] = loop.create_future()

        def command(error: BaseException | None) -> None:
            result = None
            if error is None and not future.cancelled():
                try:
                    result = self.engine.between_steps(fn, *args)
                except StopIteration as stop:  # which no future takes
                    error = RuntimeError(f"{fn!r} raised StopIteration")
                    error.__cause__ = stop
                except BaseException as raised:
                    error = raised
            _resolve(loop, future, result, error)

        self._thread.command(command)
        return await future

    def abort(self, request_id: str) -> bool:
        """End a request after the running step, without waiting; False if there is none of this id or it is being
        aborted. Its stream ends with an output of finish_reason "abort", unless it ended by itself in that step."""
        found = self.engine.abort_soon(request_id)
        if found:
            self._thread.wake()
        return found

    def stats(self) -> dict[str, Any]:
        """LLMEngine.stats()."""
        return self.engine.stats()

    @property
    def is_running(self) -> bool:
        """Whether requests can be served: neither closed nor dead. True before the first one."""
        return self._thread.refusal() is None

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests from now on and wait until all streams have got their last output, `timeout` seconds at
        most (None: as long as it takes). False if some still run; close() aborts them."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: Future[None] = loop.create_future()
        self._thread.draining = True

        def done(error: BaseException | None) -> None:
            _resolve(loop, future, None, error)

        self._thread.command(lambda error: done(error) if error is not None else self._thread.when_idle(done))
        try:
            await asyncio.wait_for(future, timeout)
        except TimeoutError:
            return False
        return True

    def shutdown(self) -> None:
        """close() for callers without an event loop. Blocks until the running step has ended."""
        self._thread.stop()
        self._thread.join()

    async def close(self) -> None:
        """Abort what runs, giving every stream its last output, and end the thread. Idempotent; the LLM stays open."""
        import asyncio

        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        thread = self.__dict__.get("_thread")
        if thread is not None:
            thread.abandon()


def _resolve(loop: "AbstractEventLoop", future: "Future[Any]", result: Any, error: BaseException | None) -> None:
    """Settle `future` from another thread, unless nobody waits for it any more."""

    def settle() -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed
        return


def _is_long(prompt: Any) -> bool:
    """Whether it takes long to make a request of it: texts are tokenized, ids only looked over."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    longest = LONG_TEXT if isinstance(prompt, str) else LONG_IDS
    return isinstance(prompt, Sized) and len(prompt) > longest
