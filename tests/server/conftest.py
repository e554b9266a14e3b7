"""Live servers for the tests: the real model, and a tiny one where only what surrounds the model counts."""

import asyncio
import re
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

sys.path.append(str(Path(__file__).parent.parent / "models"))

MODEL = "smollm2"
TINY = "tiny"


class Live:
    """A server on a free loopback port, in a thread of this process.

    url: without a slash at its end. http: an httpx.Client of it. llm, service, server: what it runs on.
    """

    def __init__(self, llm, app, send_buffer=None):
        from pagedkv.server.running import configured

        self.llm, self.service = llm, app.state.service
        listener = socket.socket()
        if send_buffer is not None:  # of every connection
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(configured(app))
        self.loop = None
        self._thread = threading.Thread(target=self._run, args=[listener], name="server")
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def _run(self, listener):
        async def serve():
            self.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[listener])

        asyncio.run(serve())

    def close_service(self):
        """What the first signal does to a server in a process of its own."""
        asyncio.run_coroutine_threadsafe(self.service.close(), self.loop).result(60)

    def client(self, **options):
        """The official client of this server."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=300, max_retries=0, **options)

    def post(self, path, value=None, **options):
        """The response to a JSON body."""
        return self.http.post(path, json=value, **options)

    def metrics(self):
        """{name with labels: value} of /metrics, without the model's name."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        own = ",?" + re.escape(f'model_name="{self.service.names[0]}"') + ",?"
        return {re.sub(own, "", name).replace("{}", ""): float(value) for name, value in pairs}

    def wait_idle(self, seconds=120):
        """Wait until nothing runs or waits, and return the engine's counters."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.llm.engine.stats()
            if not stats["running"] and not stats["waiting"] and not self.llm.engine.has_unfinished():
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)

    def stop(self):
        """End the server; its connections are closed by then or soon."""
        self.http.close()
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"


@contextmanager
def served(llm, send_buffer=None, **settings):
    """A Live server of `llm`, ended behind the block. send_buffer: bytes the system keeps of an unread answer."""
    from pagedkv.server.app import create_app
    from pagedkv.server.settings import ServerSettings

    live = Live(llm, create_app(llm, ServerSettings(**{"shutdown_timeout": 0.0, **settings})), send_buffer)
    try:
        yield live
    finally:
        live.stop()


@pytest.fixture(scope="session")
def real(smollm2_path):
    """The real model behind a server, with a queue as in production."""
    from pagedkv import LLM

    with (
        LLM(smollm2_path, threads=2, kv_pages=1200, max_waiting=1024) as llm,
        served(llm, served_model_names=(MODEL, "alias")) as live,
    ):
        yield live
        live.wait_idle()
        assert live.llm.check() == []


@pytest.fixture(scope="session")
def solo(smollm2_path):
    """The same model in this process, one output at a time and nothing cached: what answers are compared with."""
    from pagedkv import LLM

    with LLM(smollm2_path, threads=1, kv_pages=600, max_num_seqs=1, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A whole model of two layers and bytes for a vocabulary, whose logits are all alike."""
    import gguf_writer
    import tiny

    return gguf_writer.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tiny.model())


@pytest.fixture(scope="session")
def small(tiny_path):
    """The tiny model behind a server with tight limits."""
    from pagedkv import LLM

    with (
        LLM(tiny_path, threads=1, kv_pages=40, max_waiting=32, max_num_seqs=8) as llm,
        served(llm, served_model_names=(TINY,), max_body=200_000, max_prompts=8, max_n=4, max_logprobs=5) as live,
    ):
        yield live
        live.wait_idle()
        assert live.llm.check() == []


@pytest.fixture(scope="session")
def shared_browser(tmp_path_factory):
    """One Chromium for all tests of the page."""
    from browser import chromium

    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser):
    """A tab that must not have complained by the end of the test."""
    shared_browser.expected = []
    yield shared_browser
    assert shared_browser.errors() == []
    shared_browser.driver.get("about:blank")


@pytest.fixture(scope="session")
def crowded(smollm2_path, shared_browser):
    """The real model behind a server with a pool small enough to be crowded."""
    from pagedkv import LLM

    with LLM(smollm2_path, threads=2, kv_pages=256, max_num_seqs=16, max_model_len=1024) as llm, served(llm) as live:
        yield live
        live.wait_idle()
        assert live.llm.check() == []


@pytest.fixture(scope="session")
def locked(smollm2_path):
    """The real model behind a server that asks for the key "right"."""
    from pagedkv import LLM

    with LLM(smollm2_path, threads=1, kv_pages=64, max_model_len=512) as llm, served(llm, api_keys=("right",)) as live:
        yield live


@pytest.fixture(scope="session")
def vast(tiny_path):
    """The tiny model behind a server with a large pool."""
    from pagedkv import LLM

    with LLM(tiny_path, threads=1, kv_pages=20_000, max_model_len=64) as llm, served(llm) as live:
        yield live
