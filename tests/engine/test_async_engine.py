"""AsyncEngine over the fake model: streams, slow readers, refusals, failures, several loops, forks, ends."""

import asyncio
import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import command_line
import pytest
from fakes import FakeKV, fake_model
from reference import expected_output

import pagedkv
from pagedkv import AsyncEngine, EngineDeadError, LLMEngine, QueueFull, SamplingParams


def make(n_pages=100, page_tokens=4, max_model_len=64, model=None, **settings):
    settings = {"max_model_len": max_model_len, "enable_prefix_caching": False, **settings}
    return LLMEngine(model or fake_model(), FakeKV(n_pages, page_tokens), **settings)


def sampled(seed=1, length=20, **more):
    return SamplingParams(seed=seed, max_tokens=length, ignore_eos=True, **more)


def check_idle(llm_engine):
    stats = llm_engine.stats()
    assert (stats["running"], stats["waiting"], stats["pages_in_use"]) == (0, 0, 0)
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
    """Holds every forward until it is let through: gate.step() lets one through and returns when it has begun."""

    def __init__(self, model):
        self.model = model
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.open = False
        self.plain = model.forward.run
        model.forward.run = self.run

    def run(self, *args):
        if not self.open:
            self.begun.release()
            assert self.go.acquire(timeout=60)
        self.plain(*args)

    async def begins(self):
        """Wait until a forward has begun; it waits at the gate."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=60)

    def lift(self):
        self.open = True
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


# Streams


def test_a_stream_grows_to_the_solo_output():
    async def test(engine, llm_engine):
        params = sampled(length=30)
        outputs = await read_all(engine.generate("abcdefgh", params))
        for before, after in itertools.pairwise(outputs):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert len(after.outputs[0].token_ids) > len(before.outputs[0].token_ids)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].prompt == "abcdefgh"
        check_solo(llm_engine, outputs[-1], params)

    run(test)


def test_many_at_a_time_equal_their_solo_runs():
    async def test(engine, llm_engine):
        params = [sampled(seed, 5 + seed, n=1 + seed % 3, stop=["ab"]) for seed in range(30)]
        streams = [engine.generate([1 + seed, 2, 3], each) for seed, each in enumerate(params)]
        for outputs, each in zip(await asyncio.gather(*map(read_all, streams)), params, strict=True):
            assert sum(output.finished for output in outputs) == 1
            check_solo(llm_engine, outputs[-1], each)

    run(test, n_pages=40, max_num_seqs=7, max_num_batched_tokens=16)


def test_submit_gives_a_stream_with_an_id():
    async def test(engine, _):
        streams = [await engine.submit("abc", sampled(), request_id=name) for name in ("mine", None)]
        assert streams[0].request_id == "mine" and streams[1].request_id not in ("mine", "")
        for stream in streams:
            outputs = await read_all(stream)
            assert {output.request_id for output in outputs} == {stream.request_id}
            assert await read_all(stream) == []

    run(test)


def test_the_last_output_alone():
    async def test(engine, llm_engine):
        for outputs in (
            await read_all(engine.generate("abc", sampled(), final_only=True)),
            await read_all(await engine.submit("abc", sampled(), final_only=True)),
        ):
            (output,) = outputs
            check_solo(llm_engine, output, sampled())

    run(test)


def test_a_slow_reader_gets_the_newest_output_and_the_last():
    async def test(engine, llm_engine):
        stream = await engine.submit("abc", sampled(length=40))
        await engine.run(lambda: None)
        while llm_engine.has_unfinished():  # the reader does not read; its event loop does not even turn
            pass
        outputs = await read_all(stream)
        assert len(outputs) == 1 and outputs[0].finished and len(outputs[0].outputs[0].token_ids) == 40

    run(test)


def test_a_loop_that_does_not_turn_has_one_wake_up_under_way():
    async def test(engine, llm_engine):
        loop = asyncio.get_running_loop()
        calls, plain = [], loop.call_soon_threadsafe
        streams = [await engine.submit("abc", sampled(seed, 40)) for seed in range(10)]
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), plain(*args))[1]
        while llm_engine.has_unfinished():
            pass
        del loop.call_soon_threadsafe
        assert len(calls) <= 1
        for stream in streams:
            assert (await read_all(stream))[-1].finished

    run(test)


def test_priorities_reach_the_scheduler():
    async def test(engine, llm_engine):
        gate = Gate(llm_engine.model)
        first = await engine.submit("abc", sampled())
        await gate.begins()
        low, high = [await engine.submit("abc", sampled(), priority=priority) for priority in (5, 1)]
        ended = []

        async def wait(stream):
            await read_all(stream)
            ended.append(stream)

        gate.lift()
        await asyncio.gather(*map(wait, (first, low, high)))
        assert ended == [first, high, low]

    run(test, max_num_seqs=1)


def test_an_llm_of_any_kind_or_an_engine():
    llm_engine = make()

    class Holder:
        engine = llm_engine

    for given in (llm_engine, Holder()):
        assert AsyncEngine(given).engine is llm_engine
    for given in (None, "model", Holder.__init__):
        with pytest.raises(ValueError, match="llm must be"):
            AsyncEngine(given)


# Refusals


@pytest.mark.parametrize(
    "prompt, params, more, message",
    [
        ("", None, {}, "at least 1 token"),
        ([61], None, {}, "prompt_token_ids must be"),
        ([1] * 65, None, {}, "longer than the context"),
        ([1] * 5000, None, {}, "longer than the context"),
        ("a", 5, {}, "params must be"),
        ("a", None, {"priority": 1.5}, "priority must be"),
        ("a", None, {"timeout": 0}, "timeout must be"),
        ("a", None, {"timeout": float("nan")}, "timeout must be"),
        ("a", None, {"timeout": "1"}, "timeout must be"),
        ("a", None, {"request_id": 7}, "request_id must be"),
    ],
)
def test_a_refusal_comes_first_and_queues_nothing(prompt, params, more, message):
    async def test(engine, llm_engine):
        with pytest.raises(ValueError, match=message):
            await engine.submit(prompt, params, **more)
        assert not llm_engine.has_unfinished()
        with pytest.raises(ValueError, match=message):
            await anext(engine.generate(prompt, params, **more))
        assert not llm_engine.has_unfinished()

    run(test)


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    async def test(engine, llm_engine):
        stream = await engine.submit("abc", sampled(), request_id="a")
        with pytest.raises(ValueError, match="request_id must be"):
            await engine.submit("abc", sampled(), request_id="a")
        await read_all(stream)
        await read_all(await engine.submit("abc", sampled(), request_id="a"))

    run(test)


def test_a_full_queue_is_refused_at_once():
    async def test(engine, llm_engine):
        gate = Gate(llm_engine.model)
        streams = [await engine.submit("abc", sampled())]
        await gate.begins()
        streams += [await engine.submit("abc", sampled()) for _ in range(3)]  # one slot is free
        with pytest.raises(QueueFull, match=r"2 requests are waiting; max_waiting is 2"):
            await engine.submit("abc", sampled())
        assert llm_engine.stats()["waiting"] == 3
        gate.lift()
        for stream in streams:
            await read_all(stream)
        await read_all(await engine.submit("abc", sampled()))

    run(test, max_num_seqs=2, max_waiting=2)


# run()


def test_run_gives_results_and_exceptions_and_comes_between_steps():
    async def test(engine, llm_engine):
        assert await engine.run(lambda a, b: (a + b, threading.current_thread().name), 1, 2) == (3, "pagedkv-engine")
        for error in (KeyError("x"), SystemExit(3)):

            def fail(error=error):
                raise error

            with pytest.raises(type(error)):
                await engine.run(fail)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await engine.run(next, iter(()))
        stream = await engine.submit("abc", sampled(length=30))
        for _ in range(10):
            stats, held = await engine.run(lambda: (llm_engine.stats(), llm_engine.kv.n_in_use))
            assert stats["pages_in_use"] == held
        check_solo(llm_engine, (await read_all(stream))[-1], sampled(length=30))

    run(test)


def test_run_cancelled_before_it_begins_does_not_run():
    async def test(engine, llm_engine):
        gate, ran = Gate(llm_engine.model), []
        stream = await engine.submit("abc", sampled())
        await gate.begins()
        task = asyncio.create_task(engine.run(ran.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.lift()
        await read_all(stream)
        await engine.run(lambda: None)
        assert ran == []

    run(test)


# Exceptions out of a step


def test_an_exception_ends_the_requests_of_its_step_and_no_others():
    async def test(engine, llm_engine):
        forward = llm_engine.model.forward
        plain, gate = forward.run, threading.Event()

        def failing(*args):
            assert gate.wait(60)
            forward.run = plain
            raise OSError("a bad step\nwith more lines")

        forward.run = failing
        streams = [await engine.submit("abc", sampled(seed)) for seed in range(4)]
        gate.set()
        lasts = [(await read_all(stream))[-1] for stream in streams]
        for output in lasts[:2]:
            assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", "OSError: a bad step")
        for seed, output in enumerate(lasts[2:], 2):
            check_solo(llm_engine, output, sampled(seed))
        assert engine.is_running

    run(test, max_num_seqs=2)


def test_pages_held_outside_fail_what_waits_for_them():
    async def test(engine, llm_engine):
        stranger = llm_engine.kv.sequence()
        stranger.extend(36)
        output = (await read_all(await engine.submit("abcdefgh", sampled())))[-1]
        assert output.outputs[0].finish_reason == "error" and "PoolExhausted" in output.outputs[0].stop_reason
        stranger.free()
        check_solo(llm_engine, (await read_all(await engine.submit("abcdefgh", sampled())))[-1], sampled())

    run(test, n_pages=10, max_model_len=40)


def test_an_exception_before_anything_runs_ends_all_that_wait():
    async def test(engine, llm_engine):
        plain = llm_engine.scheduler.schedule

        def failing():
            raise ArithmeticError("no plan")

        llm_engine.scheduler.schedule = failing
        for output in await asyncio.gather(*(read_all(engine.generate("abc", sampled())) for _ in range(3))):
            assert output[-1].outputs[0].stop_reason == "ArithmeticError: no plan"
        llm_engine.scheduler.schedule = plain
        check_solo(llm_engine, (await read_all(engine.generate("abc", sampled())))[-1], sampled())

    run(test)


def test_an_engine_that_cannot_clean_up_dies_loudly(caplog):
    llm_engine = make()

    def broken(*args):
        raise ZeroDivisionError("no way")

    async def main():
        engine = AsyncEngine(llm_engine)
        gate = Gate(llm_engine.model)
        stream = await engine.submit("abc", sampled())
        await gate.begins()
        asked = asyncio.create_task(engine.run(lambda: None))
        await asyncio.sleep(0)
        gate.plain = llm_engine.scheduler.remove = broken
        gate.lift()
        for call in (lambda: anext(stream), lambda: asked, lambda: engine.submit("a"), lambda: engine.run(id, 1)):
            with pytest.raises(EngineDeadError, match="the engine died: ZeroDivisionError: no way"):
                await call()
        assert not engine.is_running
        await engine.close()

    asyncio.run(main())
    assert "the engine cannot go on" in caplog.text


# Ends


def test_close_gives_every_stream_its_last_output():
    async def main():
        llm_engine = make()
        engine = AsyncEngine(llm_engine)
        assert engine.is_running
        streams = [await engine.submit("abc", sampled(length=50)) for _ in range(5)]
        await engine.close()
        await engine.close()
        for stream in streams:
            assert (await read_all(stream))[-1].outputs[0].finish_reason in ("abort", "length")
        check_idle(llm_engine)
        assert not engine.is_running
        for call in (lambda: engine.submit("abc"), lambda: engine.run(id, 1)):
            with pytest.raises(RuntimeError, match="AsyncEngine is closed"):
                await call()
        assert llm_engine.add_request("abc")  # the engine itself is still open

    asyncio.run(main())
    assert "pagedkv-engine" not in [thread.name for thread in threading.enumerate()]


def test_close_before_the_first_request_and_shutdown():
    engine = AsyncEngine(make())
    asyncio.run(engine.close())
    AsyncEngine(make()).shutdown()
    assert not engine.is_running


def test_drain_waits_refuses_and_gives_up():
    async def test(engine, llm_engine):
        gate = Gate(llm_engine.model)
        stream = await engine.submit("abc", sampled())
        await gate.begins()
        assert await engine.drain(0.01) is False
        with pytest.raises(RuntimeError, match="draining"):
            await engine.submit("abc")
        gate.lift()
        assert await engine.drain() is True and not llm_engine.has_unfinished()
        assert (await read_all(stream))[-1].outputs[0].finish_reason == "length"
        assert await engine.drain(60) is True

    run(test)


def test_closing_the_engine_below_ends_the_streams():
    async def test(engine, llm_engine):
        gate = Gate(llm_engine.model)
        stream = await engine.submit("abc", sampled())
        await gate.begins()
        gate.lift()
        await asyncio.to_thread(llm_engine.close)
        assert (await read_all(stream))[-1].finished
        with pytest.raises(RuntimeError, match="engine is closed"):
            await engine.submit("abc")

    run(test)


def test_dropping_the_engine_ends_its_thread():
    async def main():
        engine = AsyncEngine(make())
        assert len(await read_all(engine.generate("abc", sampled()))) > 0
        return engine._thread

    thread = asyncio.run(main())
    gc.collect()
    thread.join()
    assert thread.closed


def test_idle_threads_sleep():
    """Nothing turns around while no request runs: the thread sits in one blocking call."""

    async def test(engine, llm_engine):
        await read_all(engine.generate("abc", sampled()))
        await engine.run(lambda: None)
        thread, calls = engine._thread, []
        plain = thread._work
        thread._work = lambda: (calls.append(1), plain())[1]
        await engine.run(lambda: None)
        await asyncio.sleep(0.2)
        assert len(calls) <= 2

    run(test)


# Several loops, threads, processes


def test_several_event_loops_use_one_engine():
    llm_engine = make(n_pages=40, max_num_batched_tokens=16)
    engine = AsyncEngine(llm_engine)
    results, errors = {}, []

    async def client(seed):
        outputs = await read_all(engine.generate([1 + seed, 5], sampled(seed)))
        results[seed] = outputs[-1]

    def loop(number):
        async def main():
            await asyncio.gather(*(client(seed) for seed in range(number * 10, number * 10 + 10)))

        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    direct = {llm_engine.add_request("abc", sampled(100)): 100}  # a caller who steps the same engine by hand
    done = {}
    while len(done) < 1:
        done.update({output.request_id: output for output in llm_engine.step() if output.finished})
    for thread in threads:
        thread.join()
    engine.shutdown()
    assert errors == [] and sorted(results) == list(range(40)) and done.keys() == direct.keys()
    for seed, output in [*results.items(), (100, *done.values())]:
        check_solo(llm_engine, output, sampled(seed))
    check_idle(llm_engine)


def test_a_stream_belongs_to_its_loop_and_to_one_reader():
    async def test(engine, llm_engine):
        gate = Gate(llm_engine.model)
        stream = await engine.submit("abc", sampled())
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, read_all(stream))
        reader = asyncio.create_task(read_all(stream))
        await gate.begins()
        with pytest.raises(RuntimeError, match="another task is reading"):
            await anext(stream)
        gate.lift()
        check_solo(llm_engine, (await reader)[-1], sampled())

    run(test)


def test_an_engine_keeps_no_loop_and_no_stream_alive():
    engine, kept = AsyncEngine(make()), []

    async def main():
        kept.append(weakref.ref(asyncio.get_running_loop()))
        kept.append(weakref.ref(await engine.submit("abc", sampled())))
        stream = await engine.submit("abc", sampled())
        kept.append(weakref.ref(stream))
        await read_all(stream)
        await engine.run(lambda: None)

    for _ in range(3):
        asyncio.run(main())
    engine.shutdown()  # the requests of dropped streams have ended behind this
    gc.collect()
    assert [reference() for reference in kept] == [None] * 9


def test_closing_lets_a_waiting_reader_go_at_once():
    async def test(engine, llm_engine):
        gate = Gate(llm_engine.model)
        stream = await engine.submit("abc", sampled())
        reader = asyncio.create_task(read_all(stream))
        await gate.begins()
        stream.close()
        assert await reader == []  # while the step still waits
        gate.lift()

    run(test)


def test_a_closed_loop_aborts_what_it_read():
    llm_engine = make()
    engine = AsyncEngine(llm_engine)
    gate = Gate(llm_engine.model)
    kept = []

    async def leave():
        kept.append(await engine.submit("abc", sampled(length=50)))
        await gate.begins()

    asyncio.run(leave())
    gate.lift()

    async def after():
        await engine.drain()

    asyncio.run(after())
    engine.shutdown()
    check_idle(llm_engine)
    assert len(kept[0]._channel.newest[0].outputs[0].token_ids) < 50


def script(tmp_path, code, first=""):
    """Run `first`, and `code` with the helpers of these tests at hand, in a fresh interpreter; its standard output."""
    here = Path(__file__).parent
    head = f"{first}\nimport sys; sys.path[:0] = [{str(here.parent)!r}, {str(here)!r}]\n"
    head += "import asyncio, os, threading\nfrom test_async_engine import *\n"
    result = subprocess.run(
        [sys.executable, "-P", "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env=command_line.environment(),
    )
    assert result.returncode == 0 and result.stderr == "", result.stdout + result.stderr
    return result.stdout


def test_forks_amid_the_traffic(tmp_path):
    """Children find a whole engine without the parent's requests, serve their own and see dead streams refuse."""
    code = """
    llm_engine = make(n_pages=30, max_num_batched_tokens=8)
    engine = AsyncEngine(llm_engine)
    started = threading.Event()
    children = []

    def loop():
        async def main():
            streams = [await engine.submit([1 + seed, 5, 6], sampled(seed, 40)) for seed in range(20)]
            kept.extend(streams)
            started.set()
            for seed, outputs in enumerate(await asyncio.gather(*map(read_all, streams))):
                check_solo(llm_engine, outputs[-1], sampled(seed, 40))
        asyncio.run(main())

    kept = []
    thread = threading.Thread(target=loop)
    thread.start()
    started.wait()
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                check_idle(llm_engine)

                async def main():
                    outputs = await asyncio.gather(*(read_all(engine.generate("abc", sampled(s))) for s in range(5)))
                    for seed, each in enumerate(outputs):
                        check_solo(llm_engine, each[-1], sampled(seed))
                    try:
                        kept[0]._channel.newest.clear()
                        await kept[0]._channel.get()
                    except RuntimeError as error:
                        assert "left behind in the parent process" in str(error)
                    else:
                        assert kept[0]._ended
                asyncio.run(main())
                engine.shutdown()
                check_idle(llm_engine)
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    thread.join()
    engine.shutdown()
    check_idle(llm_engine)
    print("done")
    """
    assert script(tmp_path, code) == "done\n"


def test_the_interpreter_ends_while_requests_run(tmp_path):
    code = """
    llm_engine = make()
    engine = AsyncEngine(llm_engine)

    async def main():
        streams = [await engine.submit("abc", sampled(length=50)) for _ in range(5)]
        await anext(streams[0])
        return streams

    streams = asyncio.run(main())
    """
    first = "import atexit; atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))"
    assert script(tmp_path, code, first) == "['MainThread']\n"  # asked after the package's own exit


def test_public_names():
    assert {"AsyncEngine", "QueueFull", "EngineDeadError"} <= set(pagedkv.__all__)
    assert issubclass(QueueFull, RuntimeError)
