"""What all routes share: the model, its engine, the settings, and threads for what would hold up the event loop."""

import asyncio
import functools
import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ..engine.async_engine import AsyncEngine
from .errors import APIError
from .settings import ServerSettings

T = TypeVar("T")

WORKERS = 4


class Service:
    """One model behind one server.

    llm: an LLM, or what has its `engine`, `model`, `kv` and `tokenizer`; stays the caller's. Everything is for the
    thread of the event loop.
    """

    def __init__(self, llm: Any, settings: ServerSettings, fingerprint: str) -> None:
        self.llm = llm
        self.settings = settings
        self.fingerprint = fingerprint
        self.engine = AsyncEngine(llm)
        self.tokenizer = llm.tokenizer
        self.names = settings.served_model_names or (default_name(llm),)
        self.created = int(time.time())
        self.max_model_len = llm.engine.max_model_len
        self.draining = False
        self._closing = False
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="pagedkv-server")

    async def offload(self, function: Callable[..., T], *arguments: Any) -> T:
        """function(*arguments) in a worker thread: parsing, templates and tokenization take too long for the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    def model_name(self, asked: str | None) -> str:
        """The name an answer carries. APIError 404 for a model that is not served."""
        if asked is not None and asked not in self.names:
            known = ", ".join(self.names)
            raise APIError(
                404, f"model: {asked[:200]!r} is not served here; served: {known}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return asked or self.names[0]

    @property
    def alive(self) -> bool:
        """Whether the engine can compute."""
        return self.engine.is_running

    @property
    def stopped(self) -> bool:
        """Whether the engine refuses requests because it is ending or has ended."""
        return self.draining or not self.alive

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.llm.model.forward.vocab_size

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of special tokens."""
        tokenizer = self.tokenizer
        return frozenset(tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.special_ids)

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template."""
        return getattr(self.tokenizer, "chat_template", None)

    def warm_up(self) -> None:
        """Do now what would hold up the first requests: structured outputs read the whole vocabulary once. Blocks."""
        if importlib.util.find_spec("llguidance") is not None:
            self.llm.engine.admission.grammars.tokenizer()

    async def close(self) -> None:
        """Give running requests `shutdown_timeout` seconds, cancel the rest and stop the engine's thread. A second call
        returns at once."""
        self.draining = True
        if self._closing:
            return
        self._closing = True
        try:
            await self.engine.drain(self.settings.shutdown_timeout)
        finally:
            await self.engine.close()
            self._workers.shutdown(wait=False, cancel_futures=True)


def default_name(llm: Any) -> str:
    """What a model is called when nobody says: its file's name without what repeats the format."""
    path = getattr(llm.model, "path", None)
    return llm.model.name if path is None else Path(path).name.removesuffix(".gguf")
