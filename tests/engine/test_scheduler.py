"""Order, budget and preemption, one decision at a time."""

import pytest
from fakes import FakeKV, fake_model

from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams


def make(n_pages=100, page_tokens=4, **settings):
    kv = FakeKV(n_pages, page_tokens)
    return LLMEngine(fake_model(stop_token_ids=()), kv, max_model_len=64, enable_prefix_caching=False, **settings)


def add(engine, n_prompt, max_tokens=30, **kwargs):
    return engine.add_request([1] * n_prompt, SamplingParams(max_tokens=max_tokens, seed=1), **kwargs)


def running(engine):
    return [branch.request.request_id for branch in engine.scheduler.running]


def lengths(engine):
    engine.step()
    return engine.model.forward.steps[-1]


def test_prompt_is_computed_in_chunks_of_the_budget():
    engine = make(max_num_batched_tokens=7)
    add(engine, 20)
    assert [lengths(engine) for _ in range(4)] == [[7], [7], [6], [1]]


def test_decodes_come_before_prefill_in_one_budget():
    engine = make(max_num_batched_tokens=8)
    add(engine, 3)
    lengths(engine)
    add(engine, 20)
    assert [lengths(engine) for _ in range(4)] == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_several_prompts_fill_one_step():
    engine = make(max_num_batched_tokens=16)
    for n in (5, 6, 20):
        add(engine, n)
    assert lengths(engine) == [5, 6, 5]


def test_decodes_beyond_the_budget_take_turns():
    engine = make(max_num_batched_tokens=512)
    names = [add(engine, 2) for _ in range(5)]
    engine.step()
    engine.scheduler.max_num_batched_tokens = 2
    served = [sorted(output.request_id for output in engine.step()) for _ in range(5)]
    assert served == [names[0:2], names[2:4], sorted([names[4], names[0]]), names[1:3], sorted([names[3], names[0]])]


def test_slots_are_bounded_and_first_come_first_served():
    engine = make(max_num_seqs=2)
    names = [add(engine, 2, max_tokens=2) for _ in range(3)]
    engine.step()
    assert running(engine) == names[:2] and engine.stats()["waiting"] == 1
    engine.step()
    engine.step()
    assert running(engine) == names[2:]


def test_priority_goes_first_and_takes_the_slot():
    engine = make(max_num_seqs=1)
    low = add(engine, 2, priority=5)
    engine.step()
    high = add(engine, 2, priority=-5)
    engine.step()
    assert running(engine) == [high]
    assert [branch.request.request_id for branch in engine.scheduler.waiting] == [low]
    assert engine.stats()["preemptions"] == 1


@pytest.mark.parametrize("embedding", [False, True])
def test_priority_does_not_wait_for_a_prefill_of_lower_priority(embedding):
    """Which could fill every step to the end of its prompt; one of equal priority does."""
    engine = make(max_num_batched_tokens=10)
    if embedding:
        engine.enqueue(engine.prepare_embedding([1] * 60, priority=1, sink=print), "long")
    else:
        add(engine, 60, priority=1, request_id="long")
    assert lengths(engine) == [10]
    equal = add(engine, 3, priority=1)
    high = add(engine, 3)
    assert sorted(lengths(engine)) == [3, 7]
    assert running(engine) == [high, "long"]
    assert lengths(engine) == [1, 9]
    assert equal not in running(engine)


def test_equal_priority_never_preempts_for_admission():
    engine = make(n_pages=16, page_tokens=1)
    first = add(engine, 14, max_tokens=3)
    engine.step()
    add(engine, 14, max_tokens=3)
    engine.step()
    assert running(engine) == [first] and engine.stats()["preemptions"] == 0


def test_nobody_overtakes_a_large_waiting_request():
    engine = make(n_pages=10, page_tokens=4)
    add(engine, 20, max_tokens=10)
    engine.step()
    large, small = add(engine, 30, max_tokens=2), add(engine, 1, max_tokens=2)
    for _ in range(5):
        engine.step()
        assert large not in running(engine) and small not in running(engine)


def test_youngest_gives_its_pages_back_and_resumes():
    engine = make(n_pages=6, page_tokens=4)
    old, young = add(engine, 4, max_tokens=18), add(engine, 4, max_tokens=18)
    solo = make(n_pages=6, page_tokens=4)
    add(solo, 4, max_tokens=18)
    while solo.has_unfinished():
        (expected,) = solo.step()
    order, done = [], {}
    while engine.has_unfinished():
        for output in engine.step():
            order.append((output.request_id, len(output.outputs[0].token_ids)))
            if output.finished:
                done[output.request_id] = output
    assert engine.stats()["preemptions"] >= 1
    assert next(name for name, _ in order if name in done) == old
    for name in (old, young):
        counts = [n for who, n in order if who == name]
        assert counts == list(range(1, 19))  # each token handed out once, in order
        assert done[name].outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_oldest_is_never_preempted():
    engine = make(n_pages=8, page_tokens=2)
    oldest = add(engine, 2, max_tokens=13)
    for _ in range(4):
        add(engine, 2, max_tokens=13)
    steps = 0
    while oldest in engine._requests:
        engine.step()
        steps += 1
    assert steps == 13 and engine.stats()["preemptions"] > 0


def test_running_prefills_keep_what_they_were_admitted_with():
    """A second prompt is not admitted into pages that the first still has to take."""
    engine = make(n_pages=10, page_tokens=4)
    engine.scheduler.max_prompt_rows = 5  # leaves budget for a second prompt while the first has 6 pages to go
    first = engine.add_request([1] * 30, SamplingParams(max_tokens=4, seed=1, prompt_logprobs=0))
    second = add(engine, 8, max_tokens=4)
    for _ in range(6):
        engine.step()
        assert running(engine) == [first]
    while engine.has_unfinished():
        engine.step()
    assert engine.stats()["preemptions"] == 0 and second != first


@pytest.mark.parametrize("n_slots", [1, 2, 64])
def test_fork_shares_the_prompts_pages(n_slots):
    engine = make(page_tokens=4, max_num_seqs=n_slots)
    engine.add_request([1] * 10, SamplingParams(n=4, max_tokens=5, seed=3))
    engine.step()
    tables = [branch.seq.page_table for branch in engine.scheduler.running]
    assert len(tables) == min(4, n_slots)
    assert all(table == tables[0] for table in tables)
    engine.step()
    tables = [branch.seq.page_table for branch in engine.scheduler.running]
    assert all(table[:2] == tables[0][:2] for table in tables)  # full pages stay shared
    assert len({table[2] for table in tables}) == len(tables)  # the half-filled one was copied for each writer


def test_fork_of_a_half_filled_page_with_no_page_free():
    engine = make(n_pages=3, page_tokens=4)
    engine.add_request([1] * 6, SamplingParams(n=3, max_tokens=6, seed=3, ignore_eos=True))
    while engine.has_unfinished():
        outputs = engine.step()
        assert engine.kv.check() == []
    assert [len(each.token_ids) for each in outputs[0].outputs] == [6, 6, 6]
    assert len({tuple(each.token_ids) for each in outputs[0].outputs}) == 3


def test_prompt_logprobs_rows_are_bounded_per_step():
    engine = make(n_pages=200)
    engine.scheduler.max_prompt_rows = 5
    engine.add_request([1] * 17, SamplingParams(prompt_logprobs=0, max_tokens=1))
    engine.add_request([2] * 9, SamplingParams(max_tokens=1))
    assert [lengths(engine) for _ in range(4)] == [[5, 9], [5], [5], [2]]
