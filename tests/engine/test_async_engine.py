"""AsyncEngine over the fake model: streams, slow readers, refusals, run(), exceptions out of a step."""

import asyncio
import itertools
import threading

import pytest
from async_helpers import Gate, check_solo, make, read_all, run, sampled

import pagedkv
from pagedkv import AsyncEngine, EngineDeadError, QueueFull

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
        ended, plain = [], llm_engine.metrics.ended  # by the engine: a loop held up may read a later end first
        llm_engine.metrics.ended = lambda request: (ended.append(request.request_id), plain(request))
        gate.lift()
        await asyncio.gather(*map(read_all, (first, low, high)))
        assert ended == [first.request_id, high.request_id, low.request_id]

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
        with pytest.raises(QueueFull, match=r"2 requests are waiting, as many as may \(max_waiting, --max-queue: 2\)"):
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
            ended = output.outputs[0]
            assert (ended.finish_reason, ended.stop_reason) == ("error", "OSError: a bad step with more lines")
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


def test_public_names():
    assert {"AsyncEngine", "QueueFull", "EngineDeadError"} <= set(pagedkv.__all__)
    assert issubclass(QueueFull, RuntimeError)
