"""How an AsyncEngine lives and ends: close, drain, several event loops and threads, forks, the interpreter's exit."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import command_line
import pytest
from async_helpers import Gate, check_idle, check_solo, make, read_all, run, sampled

from pagedkv import AsyncEngine

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
    head += "import asyncio, os, threading\nfrom async_helpers import *\n"
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


def test_forks_on_the_real_model(tmp_path, smollm2_path):
    """The pool of compute threads and the pages survive a fork amid the steps, in the parent and in the child."""
    code = f"""
    from pagedkv import LLM
    llm = LLM({str(smollm2_path)!r}, threads=2, kv_pages=60)
    params = [sampled(seed, 16) for seed in range(4)]
    solo = [llm.generate("The sea is", each)[0].outputs for each in params]
    engine = AsyncEngine(llm)

    async def together():
        streams = [await engine.submit("The sea is", each) for each in params]
        started.set()
        return [(await read_all(stream))[-1].outputs for stream in streams]

    def parent():
        results.append(asyncio.run(together()) == solo)

    results, started = [], threading.Event()
    thread = threading.Thread(target=parent)
    thread.start()
    started.wait()
    pid = os.fork()
    if pid == 0:
        try:
            assert llm.generate("The sea is", params[1])[0].outputs == solo[1]
            assert asyncio.run(together()) == solo and llm.check() == []
            os._exit(0)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
    print(os.waitpid(pid, 0)[1])
    thread.join()
    engine.shutdown()
    print(results, llm.check(), llm.engine.stats()["pages_in_use"])
    """
    assert script(tmp_path, code) == "0\n[True] [] 0\n"
