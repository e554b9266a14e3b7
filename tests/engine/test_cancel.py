"""Cancelling at any moment, by every way there is: pages are back after the step, one last output, others untouched.

A failed storm shows its seed; `PAGEDKV_STORM_SEED=<seed>` replays its choices, `PAGEDKV_STORM_RUNS=<n>` runs more.
"""

import asyncio
import os
import random
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from async_helpers import Gate
from fakes import paged_model
from reference import expected_output

from pagedkv import LLM, AsyncEngine, LLMEngine, PagedKVCache, SamplingParams
from pagedkv.engine.delivery import Channel

RUNS = int(os.environ.get("PAGEDKV_STORM_RUNS", "3"))
SEEDS = [int(os.environ["PAGEDKV_STORM_SEED"])] if "PAGEDKV_STORM_SEED" in os.environ else list(range(RUNS))
CONTEXT = 160


def make(n_pages=60, **settings):
    kv = PagedKVCache(1, 1, 16, n_pages=n_pages, format="f32", page_tokens=16, threads=1)
    return LLMEngine(paged_model(context_length=CONTEXT), kv, max_model_len=CONTEXT, **settings)


def sampled(seed=1, length=9, **more):
    return SamplingParams(seed=seed, max_tokens=length, ignore_eos=True, **more)


@pytest.fixture
def ends(monkeypatch):
    """{request id: its last outputs}, as the engine hands them out; nothing may come behind one."""
    found, plain = {}, Channel.post

    def post(self, output):
        assert output.request_id not in found, "an output after the last one"
        if output.finished:
            found[output.request_id] = output
        plain(self, output)

    monkeypatch.setattr(Channel, "post", post)
    return found


# Moments: each brings the victim to a point within a step that waits in its forward, and says how the victim may end.


async def not_taken_in(engine, gate, submit):
    other = await submit("other", [9, 9])
    await gate.begins()
    return [other], await submit("victim", [5] * 20), {"abort"}


async def waiting(engine, gate, submit):
    others = [await submit(f"other{i}", [9, i]) for i in range(3)]  # as many as there are slots
    victim = await submit("victim", [5] * 20)
    await gate.begins()
    await gate.next()
    assert victim.request_id in {branch.request.request_id for branch in engine.scheduler.waiting}
    return others, victim, {"abort"}


async def between_chunks(engine, gate, submit):
    other = await submit("other", [9, 9])
    victim = await submit("victim", [5] * 60)
    await gate.begins()
    await gate.next()
    (branch,) = [branch for branch in engine.scheduler.running if branch.request.request_id == "victim"]
    assert branch.n_outputs == 0 and 0 < len(branch.seq) < 60
    return [other], victim, {"abort"}


async def decoding(engine, gate, submit):
    other = await submit("other", [9, 9])
    victim = await submit("victim", [5] * 3)
    await gate.begins()
    for _ in range(3):
        await gate.next()
    (branch,) = [branch for branch in engine.scheduler.running if branch.request.request_id == "victim"]
    assert branch.n_outputs > 0
    return [other], victim, {"abort"}


async def forked(engine, gate, submit):
    other = await submit("other", [9, 9])
    victim = await submit("victim", [5] * 3, n=3)
    await gate.begins()
    for _ in range(3):
        await gate.next()
    return [other], victim, {"abort"}


async def in_its_last_step(engine, gate, submit):
    other = await submit("other", [9, 9])
    victim = await submit("victim", [5] * 3, length=2)
    await gate.begins()
    await gate.next()
    (branch,) = [branch for branch in engine.scheduler.running if branch.request.request_id == "victim"]
    assert branch.n_outputs == 1
    return [other], victim, {"length"}


async def preempted(engine, gate, submit):
    """The oldest outgrow the pool of 12 pages and take the victim's."""
    others = [await submit(f"other{i}", [9, i] * 20, length=40) for i in range(2)]
    victim = await submit("victim", [5] * 40, length=40)
    await gate.begins()
    while not engine.stats()["preemptions"]:
        await gate.next()
    (branch,) = [branch for branch in engine.scheduler.waiting if branch.request.request_id == "victim"]
    assert branch.n_outputs > 0
    return others, victim, {"abort"}


MOMENTS = [not_taken_in, waiting, between_chunks, decoding, forked, in_its_last_step, preempted]


# Ways: each asks for the end; true if the stream still gives the last output.


async def abort(engine, stream, reader):
    assert engine.abort(stream.request_id) is True
    assert engine.abort(stream.request_id) is False
    return True


async def abort_from_a_thread(engine, stream, reader):
    assert await asyncio.to_thread(engine.abort, stream.request_id) is True
    assert await asyncio.to_thread(engine.abort, stream.request_id) is False
    return True


async def abort_and_close(engine, stream, reader):
    assert engine.abort(stream.request_id) is True
    reader.cancel()
    await asyncio.sleep(0)
    assert engine.abort(stream.request_id) is False
    return False


async def close(engine, stream, reader):
    stream.close()
    await stream.aclose()
    assert engine.abort(stream.request_id) is False
    return False


async def cancel_the_reader(engine, stream, reader):
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.sleep(0)
    assert engine.abort(stream.request_id) is False
    return False


WAYS = [abort, abort_from_a_thread, abort_and_close, close, cancel_the_reader]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_cancel(moment, way, ends):
    n_pages = 12 if moment is preempted else 60
    llm_engine = make(n_pages=n_pages, max_num_seqs=3, max_num_batched_tokens=48)
    asked = {}

    def between_two_steps():
        running = {branch.request.request_id for branch in llm_engine.scheduler.running}
        counts = [llm_engine.kv.refcount(page) for page in range(n_pages)]
        return set(ends), running, held_pages(llm_engine), counts

    async def main():
        gate = Gate(llm_engine.model)
        async with AsyncEngine(llm_engine) as engine:

            async def submit(name, prompt, length=9, **more):
                asked[name] = (prompt, sampled(len(asked), length, **more))
                return await engine.submit(*asked[name], request_id=name)

            async def read(stream):
                return [output async for output in stream]

            others, victim, reasons = await moment(llm_engine, gate, submit)
            readers = {stream.request_id: asyncio.create_task(read(stream)) for stream in [*others, victim]}
            await asyncio.sleep(0)  # the readers wait
            reader = readers.pop("victim")
            told = await way(engine, victim, reader)
            assert "victim" not in ends  # all ways ask for it; the step that runs is not disturbed
            look = asyncio.create_task(engine.run(between_two_steps))
            await asyncio.sleep(0)
            gate.go.release()
            ended, running, held, counts = await look
            assert "victim" in ended and "victim" not in running and held == counts
            assert {each.finish_reason for each in ends["victim"].outputs} == reasons
            assert engine.abort("victim") is False and engine.abort("unknown") is False
            gate.lift()
            for name, task in readers.items():
                outputs = await task
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                assert outputs[-1] == ends[name]
            if told:
                assert (await reader)[-1] == ends["victim"]
            else:
                await asyncio.wait([reader])
                assert reader.cancelled() or not any(output.finished for output in reader.result())

    asyncio.run(main())
    assert ends.keys() == asked.keys()
    check_outputs(llm_engine, asked, ends, cancelled={"victim"})


def held_pages(llm_engine):
    """How many page tables of running branches hold each page; the checker must find nothing."""
    assert llm_engine.kv.check(level=3) == []
    tables = [branch.seq.page_table for branch in llm_engine.scheduler.running if branch.seq is not None]
    held = Counter(page for table in tables for page in table)
    return [held[page] for page in range(llm_engine.kv.n_pages)]


def check_outputs(llm_engine, asked, ends, cancelled):
    """Nothing is left; who was not cancelled has his solo output, who was has a beginning of it."""
    stats = llm_engine.stats()
    assert (stats["running"], stats["waiting"], stats["pages_in_use"]) == (0, 0, 0)
    assert llm_engine.kv.check(level=3) == [] and not llm_engine.has_unfinished()
    for name, output in ends.items():
        prompt, params = asked[name]
        for got in output.outputs:
            expected = expected_output(llm_engine.model, prompt, params, got.index, CONTEXT)
            if got.finish_reason == "abort":
                assert name in cancelled
                assert got.token_ids == expected.token_ids[: len(got.token_ids)]
                assert got.text == llm_engine.model.tokenizer.decode(got.token_ids)  # what was held back is given out
            else:
                assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
                assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert sum(stats[f"requests_{reason}"] for reason in ("stop", "length", "abort", "error")) == len(ends)


def test_unknown_and_ended_requests():
    llm_engine = make()

    async def main():
        async with AsyncEngine(llm_engine) as engine:
            assert engine.abort("never") is False
            stream = await engine.submit("abc", sampled())
            outputs = [output async for output in stream]
            assert engine.abort(stream.request_id) is False
            stream.close()
            assert outputs[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_closing_touches_no_later_request_of_the_same_name(ends):
    llm_engine = make()

    async def main():
        async with AsyncEngine(llm_engine) as engine:
            old = await engine.submit([1, 2], sampled(), request_id="a")
            while "a" not in ends:
                await asyncio.sleep(0)
            ends.clear()
            new = await engine.submit([3, 4], sampled(), request_id="a")
            old.close()
            del old
            outputs = [output async for output in new]
            assert outputs[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_a_dropped_stream_is_a_closed_one(ends):
    llm_engine = make()

    async def main():
        gate = Gate(llm_engine.model)
        async with AsyncEngine(llm_engine) as engine:
            stream = await engine.submit([1, 2], sampled(), request_id="dropped")
            generator = engine.generate([1, 2], sampled(), request_id="broken off")
            task = asyncio.create_task(anext(generator))
            await gate.begins()
            del stream
            await gate.next()
            await gate.next()
            await task
            del generator, task
            await asyncio.sleep(0)
            gate.lift()
            while len(ends) < 2:
                await asyncio.sleep(0)

    asyncio.run(main())
    assert {name: output.outputs[0].finish_reason for name, output in ends.items()} == {
        "dropped": "abort",
        "broken off": "abort",
    }


# Storms


class Storm:
    """Many tasks over one small pool; some are cancelled at a moment of their own, in a way of their own."""

    def __init__(self, seed, ends):
        self.rng = rng = random.Random(seed)
        self.ends = ends
        self.llm_engine = make(
            n_pages=rng.choice([10, 11, 14]),
            max_num_seqs=rng.choice([2, 5, 64]),
            max_num_batched_tokens=rng.choice([8, 20, 64]),
            enable_prefix_caching=rng.random() < 0.8,
            speculative_config=rng.choice([None, {"method": "ngram", "num_speculative_tokens": 4}]),
        )
        self.llm_engine.model.forward.echo = rng.choice([0, 8])
        if self.llm_engine.scheduler.speculation is not None:
            self.llm_engine.scheduler.speculation.margin = 0  # whatever can be guessed is computed
        self.engine = AsyncEngine(self.llm_engine)
        self.asked, self.cancelled, self.kept = {}, set(), []
        self.common = [rng.randint(1, 60) for _ in range(48)]
        self.plans = [self.plan(i) for i in range(200)]

    def plan(self, number):
        rng = self.rng
        prompt = self.common[: rng.choice([0, 0, 15, 16, 17, 32, 48])]
        prompt = prompt + [rng.randint(1, 60) for _ in range(rng.randint(1, 12))]
        params = sampled(
            rng.randint(0, 2**64 - 1),
            rng.choice([rng.randint(1, 12), 30]),
            n=rng.choice([1, 1, 1, 2, 3]),
            stop=rng.choice([None, None, ["a", "bc"]]),
        )
        return SimpleNamespace(
            name=f"{number}",
            prompt=prompt,
            params=params,
            priority=rng.choice([0, 0, 0, 1, -1]),
            timeout=rng.choice([None] * 9 + [0.02]),
            fate=rng.choice(["live"] * 3 + ["cancel", "abort", "close", "drop", "break"]),
            delay=rng.randint(0, 60),  # turns of the event loop before the task begins
            patience=rng.choice([0, 1, 2, 5, 30, 100]),  # turns, or outputs, before it is cancelled
        )

    async def request(self, plan):
        for _ in range(plan.delay):
            await asyncio.sleep(0)
        self.asked[plan.name] = (plan.prompt, plan.params)
        if plan.fate != "live" or plan.timeout is not None:
            self.cancelled.add(plan.name)
        more = {"request_id": plan.name, "priority": plan.priority, "timeout": plan.timeout}
        if plan.fate in ("live", "cancel"):
            last = None
            async for output in self.engine.generate(plan.prompt, plan.params, **more):
                assert last is None or not last.finished
                last = output
            assert last is not None and last == self.ends[plan.name]
            return
        stream = await self.engine.submit(plan.prompt, plan.params, **more)
        if plan.fate == "break":
            n = 0
            async for _ in stream:
                n += 1
                if n >= plan.patience:
                    break
            return
        for _ in range(plan.patience):
            await asyncio.sleep(0)
        if plan.fate == "abort":
            self.engine.abort(plan.name)
            outputs = [output async for output in stream]
            assert outputs[-1] == self.ends[plan.name]
        elif plan.fate == "close":
            await stream.aclose()
            await stream.aclose()
        else:
            del stream

    async def loop(self, plans):
        tasks = {plan.name: asyncio.create_task(self.request(plan)) for plan in plans}

        async def canceller(plan):
            for _ in range(plan.delay + plan.patience):
                await asyncio.sleep(0)
            tasks[plan.name].cancel()

        cancellers = [asyncio.create_task(canceller(plan)) for plan in plans if plan.fate == "cancel"]
        checks = 0
        while not all(task.done() for task in tasks.values()):
            held, counts = await self.engine.run(self.snapshot)
            assert held == counts
            checks += 1
            await asyncio.sleep(0.002)
        await asyncio.gather(*cancellers)
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for plan, result in zip(plans, results, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, asyncio.CancelledError) and plan.fate == "cancel", result
        assert checks > 0

    def snapshot(self):
        stats = self.llm_engine.stats()
        assert stats["pages_free"] + stats["pages_cached"] + stats["pages_in_use"] == stats["pages_total"]
        kv = self.llm_engine.kv
        return held_pages(self.llm_engine), [kv.refcount(page) for page in range(kv.n_pages)]

    def run(self, n_loops):
        errors = []

        def loop(plans):
            try:
                asyncio.run(self.loop(plans))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=(self.plans[i::n_loops],)) for i in range(n_loops)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []

        async def drained():
            return await self.engine.drain()

        assert asyncio.run(drained())
        self.engine.shutdown()
        assert self.ends.keys() <= self.asked.keys()
        submitted = {name for name in self.asked if name not in self.cancelled}
        assert submitted <= self.ends.keys()
        check_outputs(self.llm_engine, self.asked, self.ends, self.cancelled)


@pytest.mark.parametrize("n_loops", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_storm(seed, n_loops, ends):
    storm = Storm(seed, ends)
    storm.run(n_loops)
    reasons = Counter(each.finish_reason for output in ends.values() for each in output.outputs)
    assert reasons["abort"] > 10 and reasons["length"] > 30 and len(ends) > 120


def test_the_storms_reach_what_they_are_for(ends):
    preemptions = hits = 0
    for seed in range(2):
        ends.clear()
        storm = Storm(seed + 1000, ends)
        storm.run(1)
        stats = storm.llm_engine.stats()
        preemptions += stats["preemptions"]
        hits += stats["prefix_hit_tokens"]
    assert preemptions > 10 and hits > 1000


def test_cancelled_neighbours_on_the_real_model(smollm2_path):
    """Survivors among cancelled requests give what they give alone."""
    prompts = ["The sea is", "A page table maps", "Once upon a time", "The capital of France is"]
    params = [SamplingParams(seed=i, max_tokens=10, ignore_eos=True) for i in range(4)]

    async def main(llm):
        async with AsyncEngine(llm) as engine:

            async def read(i):
                return [output async for output in engine.generate(prompts[i % 4], params[i % 4])][-1]

            tasks = [asyncio.create_task(read(i)) for i in range(12)]
            for i in range(4, 12):
                await asyncio.sleep(0.03)
                tasks[i].cancel()
            survivors = [await task for task in tasks[:4]]
            await asyncio.wait(tasks)
            return survivors

    with LLM(smollm2_path, threads=2, kv_pages=60, max_num_seqs=6, max_num_batched_tokens=16) as llm:
        alone = [llm.generate(prompt, each)[0].outputs for prompt, each in zip(prompts, params, strict=True)]
        assert [output.outputs for output in asyncio.run(main(llm))] == alone
        assert llm.check() == [] and llm.engine.stats()["pages_in_use"] == 0
