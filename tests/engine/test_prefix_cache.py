"""Prefix caching through the engine: what is found, what is computed again, who may find it."""

import pytest
from fakes import paged_model
from reference import expected_output

from pagedkv.core.kvcache import PagedKVCache
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams

P = 16
CONTEXT = 200
PARAMS = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)


def make(n_pages=60, **settings):
    kv = PagedKVCache(1, 1, 16, n_pages=n_pages, format="f32", page_tokens=P, threads=1)
    return LLMEngine(paged_model(context_length=CONTEXT), kv, max_model_len=CONTEXT, **settings)


def prompt(n, first=1):
    return [first, *(1 + i * 7 % 60 for i in range(1, n))]


def finish(engine):
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        assert engine.kv.check(level=3) == []
    assert engine.kv.n_in_use == 0
    return done


def run_one(engine, ids, params=PARAMS, **more):
    name = engine.add_request({"prompt_token_ids": ids, **more}, params)
    output = finish(engine)[name]
    for got in output.outputs:
        assert got.token_ids == expected_output(engine.model, ids, params, got.index, CONTEXT).token_ids
    return output


@pytest.mark.parametrize("n", [1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1])
def test_second_time_uses_full_pages_and_computes_at_least_one_token(n):
    engine = make()
    known = {1: 0, P - 1: 0, P: P - 1, P + 1: P, 2 * P - 1: P, 2 * P: 2 * P - 1, 2 * P + 1: 2 * P}[n]
    assert run_one(engine, prompt(n)).num_cached_tokens == 0
    assert run_one(engine, prompt(n)).num_cached_tokens == known
    computed = [q for step in engine.model.forward.steps for q in step]
    assert computed[3] == n - known
    stats = engine.stats()
    assert stats["prefix_query_tokens"] == 2 * n and stats["prefix_hit_tokens"] == known
    assert engine.kv.check(level=3) == []


def test_the_copy_of_a_last_page_leaves_what_is_cached_behind_it():
    engine = make()
    run_one(engine, prompt(6 * P + 1))
    for _ in range(2):
        assert run_one(engine, prompt(2 * P)).num_cached_tokens == 2 * P - 1
    assert run_one(engine, prompt(6 * P + 1)).num_cached_tokens == 6 * P
    assert engine.stats()["pages_cached"] == 6  # the copies turned out equal and were merged


def test_a_last_page_that_somebody_writes_behind_is_copied():
    """Two requests whose prompts end with the same full page, and a third that still decodes behind it."""
    engine = make()
    names = [engine.add_request(prompt(2 * P), SamplingParams(seed=3, max_tokens=2 * P, ignore_eos=True))]
    engine.step()
    names += [engine.add_request(prompt(2 * P), SamplingParams(seed=s, max_tokens=9, ignore_eos=True)) for s in (4, 5)]
    done = finish(engine)
    for name, seed, n in zip(names, (3, 4, 5), (2 * P, 9, 9), strict=True):
        params = SamplingParams(seed=seed, max_tokens=n, ignore_eos=True)
        expected = expected_output(engine.model, prompt(2 * P), params, 0, CONTEXT)
        assert done[name].outputs[0].token_ids == expected.token_ids
    assert [done[name].num_cached_tokens for name in names] == [0, 2 * P - 1, 2 * P - 1]
    assert engine.kv.check(level=3) == []


def test_without_room_for_a_copy_the_last_page_is_computed():
    engine = make(n_pages=4)
    params = SamplingParams(seed=1, max_tokens=1, ignore_eos=True)
    run_one(engine, prompt(4 * P), params)
    assert run_one(engine, prompt(4 * P), params).num_cached_tokens == 3 * P
    assert engine.kv.check(level=3) == []


def test_switched_off():
    engine = make(enable_prefix_caching=False)
    for _ in range(2):
        assert run_one(engine, prompt(40)).num_cached_tokens == 0
    stats = engine.stats()
    assert stats["prefix_query_tokens"] == stats["prefix_hit_tokens"] == stats["pages_cached"] == 0


def test_outputs_are_cached_too():
    engine = make()
    first = run_one(engine, prompt(20), SamplingParams(seed=1, max_tokens=30, ignore_eos=True))
    grown = first.prompt_token_ids + first.outputs[0].token_ids + [5]
    assert run_one(engine, grown).num_cached_tokens == 48


def test_eight_identical_prompts_in_one_step():
    engine = make()
    names = [engine.add_request(prompt(40), PARAMS) for _ in range(8)]
    done = finish(engine)
    assert len({tuple(done[name].outputs[0].token_ids) for name in names}) == 1
    assert run_one(engine, prompt(40)).num_cached_tokens == 32
    assert engine.stats()["pages_cached"] == 2  # equal pages were merged


def test_common_beginning_of_different_prompts():
    engine = make()
    run_one(engine, prompt(70))
    assert run_one(engine, [*prompt(40), 60, 60, 60]).num_cached_tokens == 32
    assert run_one(engine, prompt(70, first=9)).num_cached_tokens == 0


def test_salts_keep_tenants_apart():
    engine = make()
    ids = prompt(50)
    assert run_one(engine, ids, cache_salt="a").num_cached_tokens == 0
    assert run_one(engine, ids, cache_salt="b").num_cached_tokens == 0
    assert run_one(engine, ids).num_cached_tokens == 0
    for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        assert run_one(engine, ids, **salt).num_cached_tokens == 48


@pytest.mark.parametrize("salt", [3, None, b"x", "\ud800", "a\udfff"])
def test_bad_salt(salt):
    with pytest.raises(ValueError, match="cache_salt must be a text"):
        make().add_request({"prompt_token_ids": [1], "cache_salt": salt})


def test_prompt_logprobs_compute_the_whole_prompt():
    engine = make()
    params = SamplingParams(seed=1, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    run_one(engine, prompt(40))
    output = run_one(engine, prompt(40), params)
    assert output.num_cached_tokens == 0 and len(output.prompt_logprobs) == 40


def test_idle_pages_give_way_and_count_as_free():
    engine = make(n_pages=13)
    for first in range(1, 8):
        run_one(engine, prompt(100, first))
    stats = engine.stats()
    assert stats["pages_in_use"] == 0 and stats["pages_cached"] + stats["pages_free"] == 13
    assert engine.kv.stats()["num_evicted"] > 0
    assert run_one(engine, prompt(100, 7)).num_cached_tokens == 96


def test_a_cached_prefix_is_not_counted_free_for_its_own_request():
    """Pool of 8: 6 pages cached, 2 held by a running request; the prompt needs 7, and has to wait for its turn."""
    engine = make(n_pages=8)
    run_one(engine, prompt(97))
    holder = engine.add_request(prompt(17, 9), SamplingParams(seed=1, max_tokens=10, ignore_eos=True))
    engine.step()
    waiter = engine.add_request(prompt(97), SamplingParams(seed=1, max_tokens=20, ignore_eos=True))
    engine.step()
    assert [branch.request.request_id for branch in engine.scheduler.running] == [holder]
    assert engine.kv.n_cached == 6
    done = finish(engine)
    assert done[waiter].num_cached_tokens >= 80 and len(done[waiter].outputs[0].token_ids) == 20
    assert engine.stats()["preemptions"] == 0


def test_pages_computed_again_are_published_again():
    engine = make()
    engine.add_request(prompt(40), SamplingParams(seed=1, max_tokens=3, ignore_eos=True))
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.scheduler.prefix._index.clear()
    finish(engine)
    assert run_one(engine, prompt(40)).num_cached_tokens == 32


def test_a_preempted_request_finds_its_own_pages_again():
    engine = make(n_pages=9)
    names = [engine.add_request(prompt(60, first), SamplingParams(seed=first, max_tokens=40)) for first in (1, 2)]
    low = engine.add_request(prompt(33, 3), SamplingParams(seed=3, max_tokens=4, ignore_eos=True), priority=1)
    done = finish(engine)
    for name, first, n in ((names[0], 1, 60), (names[1], 2, 60)):
        params = SamplingParams(seed=first, max_tokens=40)
        expected = expected_output(engine.model, prompt(n, first), params, 0, CONTEXT)
        assert done[name].outputs[0].token_ids == expected.token_ids
    assert len(done[low].outputs[0].token_ids) == 4
    assert engine.stats()["preemptions"] > 0
