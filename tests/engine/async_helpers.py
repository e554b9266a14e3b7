"""What the tests of AsyncEngine share: engines over the fake model, solo runs, and a gate that holds steps."""

import asyncio
import threading

from fakes import FakeKV, fake_model
from reference import expected_output

from pagedkv import AsyncEngine, LLMEngine, SamplingParams


def make(n_pages=100, page_tokens=4, max_model_len=64, model=None, **settings):
    settings = {"max_model_len": max_model_len, "enable_prefix_caching": False, **settings}
    return LLMEngine(model or fake_model(), FakeKV(n_pages, page_tokens), **settings)


def sampled(seed=1, length=20, **more):
    return SamplingParams(seed=seed, max_tokens=length, ignore_eos=True, **more)


def check_idle(llm_engine):
    scheduler, intake = llm_engine.scheduler, llm_engine.intake  # stats() refuses when the engine is closed
    assert not scheduler.running and not scheduler.waiting and not intake.incoming and llm_engine.kv.n_in_use == 0
    assert llm_engine.kv.check() == [] and not llm_engine.has_unfinished()


def check_solo(llm_engine, output, params):
    for got in output.outputs:
        prompt = output.prompt_token_ids
        expected = expected_output(llm_engine.model, prompt, params, got.index, llm_engine.max_model_len)
        assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
        assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)


async def read_all(stream):
    return [output async for output in stream]


class Gate:
    """Lets the forwards of a model through one by one; each waits before it computes."""

    def __init__(self, model):
        self.plain = model.forward.run
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.lifted = False
        model.forward.run = self.run

    def run(self, *args):
        if not self.lifted:
            self.begun.release()
            assert self.go.acquire(timeout=60)
        self.plain(*args)

    async def begins(self):
        """Wait until a forward waits."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=60)

    async def next(self):
        """Let the forward that waits through, and wait for the next one."""
        self.go.release()
        await self.begins()

    def lift(self):
        """Let all through from now on."""
        self.lifted = True
        self.go.release()


def run(test, llm_engine=None, **settings):
    """Run `await test(async_engine, llm_engine)` on a fresh loop; nothing may be left behind."""
    llm_engine = llm_engine or make(**settings)

    async def main():
        async with AsyncEngine(llm_engine) as engine:
            return await test(engine, llm_engine)

    result = asyncio.run(main())
    check_idle(llm_engine)
    return result
