"""Embeddings as requests: the same bits however they are computed, cancelled at any moment, and no reader waits."""

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest
from async_helpers import Gate, check_idle, run
from fakes import FakeKV, fake_model, paged_model
from reference import expected_output
from small_model import HIDDEN, small_model

from pagedkv import EmbeddingRequestOutput, LLMEngine, PagedKVCache, PoolExhausted, QueueFull, SamplingParams
from pagedkv.engine.embedding import embed

CONTEXT = 128
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 100, CONTEXT]


def make(n_pages=60, page_tokens=4, **settings):
    settings = {"max_model_len": 64, "enable_prefix_caching": False, **settings}
    return LLMEngine(fake_model(), FakeKV(n_pages, page_tokens), **settings)


def paged(n_pages=60, **settings):
    """Over a real cache, with its prefix index."""
    kv = PagedKVCache(1, 1, 16, n_pages=n_pages, format="f32", page_tokens=16, threads=1)
    return LLMEngine(paged_model(context_length=160), kv, max_model_len=160, **settings)


def sampled(seed=1, length=20, **more):
    return SamplingParams(seed=seed, max_tokens=length, ignore_eos=True, **more)


def ask(engine, ids, found, request_id=None, **options):
    return engine.enqueue(engine.prepare_embedding(ids, sink=found.append, **options), request_id)


def finish(engine):
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            done[output.request_id] = output
    check_idle(engine)
    return done


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(1, 60, n).tolist()


def is_right(engine, output):
    return output.outputs.embedding.tobytes() == engine.model.forward.solo_embedding(output.prompt_token_ids).tobytes()


# The bits


@pytest.fixture(scope="module")
def small():
    return small_model(CONTEXT)


def small_engine(model, n_pages=60, kv_format="f16", **settings):
    kv = PagedKVCache(1, 1, 16, n_pages=n_pages, format=kv_format, page_tokens=16, threads=model.forward.pool)
    return LLMEngine(model, kv, max_model_len=CONTEXT, **settings)


@pytest.fixture(scope="module")
def vectors(small):
    """By prompt: hidden states of one forward, added up one number after the other."""
    found = {}
    for n in LENGTHS:
        ids, engine = prompt(n), small_engine(small)
        hidden = np.empty((n, HIDDEN), np.float32)
        seq = engine.kv.sequence()
        seq.extend(n)
        small.forward.run(engine.kv, [seq], ids, [n], range(n), None, hidden)
        seq.free()
        total = [0.0] * HIDDEN
        for row in hidden.tolist():
            total = [a + b for a, b in zip(total, row, strict=True)]
        mean = [value / n for value in total]
        length = math.sqrt(float(sum(Fraction(value) ** 2 for value in mean)))
        found[tuple(ids)] = np.array([value / length for value in mean], np.float32).tobytes()
    return found


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
@pytest.mark.parametrize("caching", [False, True])
def test_the_bits_do_not_depend_on_chunks(small, vectors, budget, caching):
    engine = small_engine(small, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for ids, expected in vectors.items():
        assert embed(engine, ids).tobytes() == expected
        assert embed(engine, ids).tobytes() == expected
    check_idle(engine)


def test_the_bits_do_not_depend_on_the_batch(small, vectors):
    """Beside each other and beside outputs that start, decode, guess and end, which stay what they are."""
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    prompts = [(prompt(5 + i, i), sampled(i, 5 + 7 * i)) for i in range(9)]
    alone = []
    for ids, params in prompts:
        engine = small_engine(small)
        engine.add_request(ids, params)
        alone += [output.outputs for output in finish(engine).values()]
    engine = small_engine(small, max_num_batched_tokens=23, speculative_config=config)
    names, found, done = [], [], {}
    for i, ids in enumerate([*vectors, *vectors]):
        if i < len(prompts):
            names.append(engine.add_request(*prompts[i]))
        ask(engine, list(ids), found, priority=i % 3)
        done |= {output.request_id: output for output in engine.step()}
    done |= finish(engine)
    assert [done[name].outputs for name in names] == alone
    assert len(found) == 2 * len(vectors)
    for output in found:
        assert output.outputs.embedding.tobytes() == vectors[tuple(output.prompt_token_ids)]


@pytest.mark.parametrize("n_before", range(1, 12))
def test_the_bits_survive_preemption(small, vectors, n_before):
    """At each chunk of ten a request of higher priority takes the pages, and gives them back."""
    engine = small_engine(small, n_pages=8, max_num_batched_tokens=10)
    found = []
    ask(engine, prompt(100), found, priority=1)
    for _ in range(n_before):
        engine.step()
    urgent = engine.add_request(prompt(60, 3), sampled(length=9))
    done = finish(engine)
    assert engine.stats()["preemptions"] == (1 if n_before < 10 else 0)
    assert found[0].outputs.embedding.tobytes() == vectors[tuple(prompt(100))]
    fresh = small_engine(small)
    fresh.add_request(prompt(60, 3), sampled(length=9))
    assert [output.outputs for output in finish(fresh).values()] == [done[urgent].outputs]


@pytest.mark.parametrize("at", range(1, 6))
def test_an_interrupted_step_is_computed_again(at):
    engine, found = make(max_num_batched_tokens=10), []
    ask(engine, prompt(50), found)
    engine.model.forward.interrupt_at = at
    for _ in range(at - 1):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finish(engine)
    assert len(engine.model.forward.steps) == 6
    assert is_right(engine, found[0]) and len(found) == 1


def test_a_prompt_whose_hidden_states_are_no_numbers_fails_alone():
    engine, found = make(), []
    for value in (math.nan, math.inf):
        engine.model.forward.poison = {60: value}
        ask(engine, [5, 60, 5], found)
        ask(engine, [5, 6, 7], found)
        other = engine.add_request([5, 6], sampled())
        assert finish(engine)[other].outputs[0].finish_reason == "length"
        bad, good = (output.outputs for output in sorted(found, key=lambda output: output.request_id))
        assert (bad.embedding, bad.finish_reason) == (None, "error") and "NaN or infinite" in bad.stop_reason
        assert good.finish_reason == "stop"
        with pytest.raises(RuntimeError, match="NaN or infinite"):
            embed(engine, [60])
        found.clear()


# The prefix cache


def test_the_prefix_cache_neither_serves_nor_keeps_an_embedding():
    engine, found = paged(), []
    ids = prompt(100)
    engine.add_request(ids, sampled(length=4))
    finish(engine)
    n_cached, before = engine.kv.n_cached, engine.stats()
    assert n_cached == 6
    ask(engine, ids, found)
    ask(engine, prompt(100, 1), found)
    finish(engine)
    assert all(is_right(engine, output) and output.num_cached_tokens == 0 for output in found) and len(found) == 2
    assert engine.kv.n_cached == n_cached
    for name in ("prefix_hit_tokens", "prefix_query_tokens"):
        assert engine.stats()[name] == before[name]
    engine.add_request(ids, sampled(length=4))
    (again,) = finish(engine).values()
    assert again.num_cached_tokens == 96


# Order, limits, deadlines


def test_readers_get_a_token_in_every_step_and_steps_stay_short():
    """Four inputs of 3,900 tokens beside readers: no step costs more than 5/2 of what the decodes cost alone."""
    from test_pacing import cost

    model = fake_model(stop_token_ids=(), context_length=4096)
    model.config.n_heads, model.config.head_dim = 16, 64
    steps = []

    def forward(kv, seqs, token_ids, q_lens, rows, logits, hidden=None):
        logits.fill(0)
        if hidden is not None:
            hidden.fill(1)
        steps.append([(len(seq) - int(n), int(n)) for seq, n in zip(seqs, q_lens, strict=True)])

    model.forward.run = forward
    engine = LLMEngine(model, FakeKV(2000, 16), max_model_len=4096, enable_prefix_caching=False)
    names = {engine.add_request([1] * 10, SamplingParams(max_tokens=4000, temperature=0)) for _ in range(3)}
    engine.step()
    steps.clear()
    found = []
    for _ in range(4):
        ask(engine, [1] * 3900, found)
    n_steps = 0
    while len(found) < 4:
        n_steps += 1
        assert names == {output.request_id for output in engine.step()}
        decodes = steps[-1][: len(names)]
        assert all(n == 1 for _, n in decodes)
        assert cost(engine.scheduler.pacing, steps[-1]) <= 2.5 * cost(engine.scheduler.pacing, decodes)
    own = 4 * sum(1 + position / engine.scheduler.pacing.context_per_row for position in range(3900))
    assert n_steps <= math.ceil(own / (1.5 * (6 + 3) - 1 - 3900 / 1024))
    for name in names:
        engine.abort(name)
    finish(engine)


def test_embeddings_and_outputs_start_in_the_order_of_their_arrival():
    """One slot: whoever comes first ends first, except for a higher priority."""
    engine, order = make(max_num_seqs=1), []
    asked = []
    for i in range(8):
        if i % 2:
            request = engine.prepare([5, i], sampled(length=1), sink=lambda output: order.append(output.request_id))
        else:
            request = engine.prepare_embedding([5, i], sink=lambda output: order.append(output.request_id))
        asked.append(engine.enqueue(request, f"request {i}"))
    request = engine.prepare_embedding([9] * 9, priority=-1, sink=lambda output: order.append(output.request_id))
    urgent = engine.enqueue(request, "urgent")
    finish(engine)
    assert order == [urgent, *asked]


def test_embeddings_count_in_the_queue():
    engine, found = make(max_num_seqs=2, max_waiting=1), []
    for _ in range(3):
        ask(engine, [5] * 9, found)
    with pytest.raises(QueueFull):
        ask(engine, [5] * 9, found)
    with pytest.raises(QueueFull):
        engine.add_request([5] * 9, sampled())
    assert engine.stats()["requests_refused"] == 2 and engine.stats()["waiting"] == 3
    finish(engine)
    assert all(is_right(engine, output) for output in found) and len(found) == 3


def test_deadlines(monkeypatch):
    from types import SimpleNamespace

    clock = SimpleNamespace(now=1000.0)
    for module in ("admission", "intake", "metrics"):
        monkeypatch.setattr(f"pagedkv.engine.{module}.time", SimpleNamespace(monotonic=lambda: clock.now))
    engine, found = make(max_num_batched_tokens=10), []
    ask(engine, prompt(50), found, "late", timeout=5)
    ask(engine, prompt(9), found, "early", timeout=500)
    for _ in range(3):
        engine.step()
    clock.now += 6
    finish(engine)
    ended = {output.request_id: output.outputs for output in found}
    assert (ended["late"].embedding, ended["late"].finish_reason, ended["late"].stop_reason) == (
        None,
        "abort",
        "timeout",
    )
    assert ended["early"].finish_reason == "stop" and engine.stats()["requests_timeout"] == 1


@pytest.mark.parametrize(("ids", "part"), [
    ([], "at least 1 token"), ([61], "61"), ([-1], "-1"), ([1] * 65, "65 tokens is longer than the context of 64"),
    (None, "prompt"), ([1.5], "1.5"), ({"prompt_token_ids": [1], "dimensions": 3}, "dimensions"),
])  # fmt: skip
def test_what_is_refused(ids, part):
    engine = make()
    with pytest.raises(ValueError, match=part):
        engine.prepare_embedding(ids, sink=print)
    check_idle(engine)


def test_what_fills_the_pool_is_computed_and_what_does_not_fit_is_refused():
    engine = make(n_pages=5)
    with pytest.raises(ValueError, match=r"needs room for 21 tokens; the pool holds 20 \(5 pages of 4\)"):
        engine.prepare_embedding([1] * 21, sink=print)
    assert embed(engine, [1] * 20).tobytes() == engine.model.forward.solo_embedding([1] * 20).tobytes()
    check_idle(engine)


def test_pages_held_outside_the_engine_are_told():
    engine = make(n_pages=5)
    seq = engine.kv.sequence()
    seq.extend(8)
    with pytest.raises(PoolExhausted, match="2 of 5 pages are held outside the engine"):
        embed(engine, [1] * 20)
    seq.free()
    assert embed(engine, [1] * 20).tobytes() == engine.model.forward.solo_embedding([1] * 20).tobytes()
    check_idle(engine)


# Metrics


def test_embeddings_are_counted():
    engine, found = make(max_num_batched_tokens=10), []
    ask(engine, prompt(25), found)
    engine.add_request(prompt(7), sampled(length=3))
    finish(engine)
    metrics, stats = engine.metrics, engine.stats()
    assert (stats["prompt_tokens"], stats["generation_tokens"], stats["requests_stop"]) == (32, 3, 1)
    assert metrics.iteration_tokens_total.sum == 25 + 7 + 2
    assert metrics.request_prompt_tokens.sum == 32
    assert metrics.request_generation_tokens.count == metrics.time_to_first_token_seconds.count == 1
    assert metrics.request_decode_time_seconds.count == 1
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "e2e_request_latency_seconds"):
        assert getattr(metrics, name).count == 2


# Cancelling


@pytest.mark.parametrize("how", ["abort", "abort_soon", "close"])
@pytest.mark.parametrize("n_steps", range(7))
def test_cancelling_between_steps_returns_the_pages(how, n_steps):
    engine, found = make(max_num_batched_tokens=10), []
    name = ask(engine, prompt(50), found)
    other = None if how == "close" else engine.add_request(prompt(3), sampled())
    done = {}
    for _ in range(n_steps):
        done |= {output.request_id: output for output in engine.step()}
    alive = not found
    assert alive is (n_steps < 5)
    if how == "close":
        engine.close()
    else:
        assert getattr(engine, how)(name) is alive
        engine.settle()
        assert getattr(engine, how)(name) is False
        assert engine.stats()["pages_in_use"] <= 2  # the other's
        done |= finish(engine)
        expected = expected_output(engine.model, prompt(3), sampled(), 0, 64)
        assert done[other].outputs[0].token_ids == expected.token_ids
    check_idle(engine)
    assert len(found) == 1 and found[0].finished
    assert (found[0].outputs.embedding is None) is alive
    assert found[0].outputs.finish_reason == ("abort" if alive else "stop")


@pytest.mark.parametrize("n_steps", range(7))
def test_cancelling_the_task_amid_a_step_returns_the_pages(n_steps):
    """Also in the last step, and before the first: the step ends, and the pages are back before the next one."""

    async def test(engine, llm_engine):
        gate = Gate(llm_engine.model)
        stream = await engine.submit(prompt(3), sampled(length=40))
        await gate.begins()
        task = asyncio.create_task(engine.embed(prompt(50)))
        await asyncio.sleep(0)
        for _ in range(n_steps):
            await gate.next()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gate.next()  # abandoned before this step was planned
        assert {branch.request.request_id for branch in llm_engine.scheduler.running} == {stream.request_id}
        assert not llm_engine.scheduler.waiting
        gate.lift()
        async for output in stream:
            last = output
        assert (
            last.outputs[0].token_ids
            == expected_output(llm_engine.model, prompt(3), sampled(length=40), 0, 64).token_ids
        )

    run(test, make(max_num_batched_tokens=10))


def test_many_at_once_through_asyncio():
    async def test(engine, llm_engine):
        found = await asyncio.gather(*(engine.embed(prompt(1 + 5 * i, i), priority=i % 2) for i in range(12)))
        for i, output in enumerate(found):
            assert isinstance(output, EmbeddingRequestOutput) and output.prompt_token_ids == prompt(1 + 5 * i, i)
            assert is_right(llm_engine, output)
        with pytest.raises(ValueError, match="longer than the context"):
            await engine.embed([1] * 65)
        late = await engine.embed([1] * 60, timeout=1e-9)
        assert (late.outputs.finish_reason, late.outputs.stop_reason) == ("abort", "timeout")

    run(test, make(n_pages=30, max_num_batched_tokens=10))
