"""What steps cost by the scheduler's counting, and what that leaves for prefill while somebody reads along."""

import math

import pytest
from fakes import FakeKV, fake_model

from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.pacing import STEP_ROWS, Pacing
from pagedkv.engine.params import SamplingParams

CONTEXT = 4096


def make(n_pages=1000, **settings):
    kv = FakeKV(n_pages, 16)
    model = fake_model(stop_token_ids=(), context_length=CONTEXT)
    model.config.n_heads, model.config.head_dim = 16, 64  # costs of a model of width 1024
    model.forward.run = lambda kv, seqs, token_ids, q_lens, rows, logits: (
        logits.fill(0),
        model.forward.steps.append([int(n) for n in q_lens]),
    )
    return LLMEngine(model, kv, max_model_len=CONTEXT, enable_prefix_caching=False, **settings)


def add(engine, n_prompt, max_tokens=1000, **kwargs):
    return engine.add_request([1] * n_prompt, SamplingParams(max_tokens=max_tokens, temperature=0), **kwargs)


def cost(pacing, rows):
    """Of a step that computes `rows`, a list of (start, n), in rows without context, added up one by one."""
    return STEP_ROWS + sum(
        1 + position / pacing.context_per_row for start, n in rows for position in range(start, start + n)
    )


def step_costs(engine):
    """Run a step: its cost as planned, the cost of its decodes alone, and the rows of prefill in it."""
    starts = {id(branch): len(branch.seq) if branch.seq is not None else 0 for branch in engine.scheduler.running}
    engine.step()
    chunks = list(engine.scheduler._chunks.values())
    decodes = [(chunk.start, 1) for chunk in chunks if chunk.start >= len(chunk.branch.request.prompt_token_ids)]
    others = [
        (chunk.start, chunk.n_tokens) for chunk in chunks if chunk.start < len(chunk.branch.request.prompt_token_ids)
    ]
    assert all(starts.get(id(chunk.branch), 0) <= chunk.start for chunk in chunks)
    pacing = engine.scheduler.pacing
    return cost(pacing, decodes + others), cost(pacing, decodes), sum(n for _, n in others), len(decodes)


@pytest.mark.parametrize("start", [0, 1, 100, 5000])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 300])
def test_the_cost_of_rows_and_how_many_fit(start, n):
    pacing = Pacing(100)
    price = pacing.rows(start, n)
    assert price == sum(pacing.context_per_row + start + i for i in range(n))
    assert pacing.fitting(start, price) == n
    if n:
        assert pacing.fitting(start, price - 1) == n - 1
    assert pacing.fitting(start, price + pacing.rows(start + n, 1) - 1) == n


@pytest.mark.parametrize("n_decodes", [1, 4, 30])
def test_long_prompts_leave_decodes_two_fifths_of_each_step(n_decodes):
    """And no less to the prompts than the bound allows, but for what does not fill a row."""
    engine = make()
    for _ in range(n_decodes):
        add(engine, 10)
    engine.step()
    for _ in range(3):
        add(engine, 4000, max_tokens=2)
    seen = 0
    for _ in range(60):
        whole, alone, rows, decoding = step_costs(engine)
        assert decoding >= n_decodes
        assert whole <= 2.5 * alone
        assert rows >= 1
        if rows < 512 - decoding:
            assert whole > 2.5 * alone - 1 - CONTEXT / engine.scheduler.pacing.context_per_row
        seen += rows
    assert seen > 60 * n_decodes / 2


def test_a_prompt_is_done_in_bounded_time_behind_a_decode():
    """At least 3/5 of the cost of full steps is its own, so 4,000 tokens end after a counted number of steps."""
    engine = make()
    add(engine, 1)
    engine.step()
    long = add(engine, 4000, max_tokens=1)
    pacing = engine.scheduler.pacing
    own = 4000 + 4000 * 3999 / 2 / pacing.context_per_row
    per_step = 1.5 * (STEP_ROWS + 1) - 1 - 4000 / pacing.context_per_row
    steps = 0
    while long in engine._requests:
        engine.step()
        steps += 1
    assert 100 < steps <= math.ceil(own / per_step)


def test_a_prefill_gets_a_row_of_every_step_even_if_one_costs_more_than_the_bound(monkeypatch):
    engine = make()
    add(engine, 1)
    engine.step()
    monkeypatch.setattr(engine.scheduler.pacing, "beside", lambda positions: 0)
    first, second = add(engine, 30, max_tokens=1), add(engine, 20, max_tokens=1)
    done = {}
    for i in range(1, 60):
        engine.step()
        done |= {name: i for name in (first, second) if name not in engine._requests and name not in done}
    assert done == {first: 30, second: 49}  # the last row of a prompt counts as a decode, beside which another begins


def test_full_budget_when_nothing_decodes():
    engine = make(max_num_batched_tokens=300)
    add(engine, 900)
    add(engine, 900)
    sizes = [sum(step) for _ in range(3) if engine.step() or True for step in [engine.model.forward.steps[-1]]]
    assert sizes == [300, 300, 300]


def test_full_budget_when_nobody_reads_along():
    """A caller who waits for the end of everything is served best by full steps."""
    engine = make(max_num_batched_tokens=300)
    params = SamplingParams(max_tokens=50, temperature=0)
    engine.subscribe([1] * 3, params, final_only=True)
    engine.pump()
    engine.subscribe([1] * 2000, params, final_only=True)
    engine.pump()
    assert engine.model.forward.steps[-1] == [1, 299]
    add(engine, 3)  # a reader, who is not decoding yet
    engine.pump()
    assert sum(engine.model.forward.steps[-1]) == 300


def test_nobody_is_overtaken_within_a_priority():
    """A large request waits for pages; small ones that would fit arrive all the time and start after it."""
    engine = make(n_pages=100)
    add(engine, 1000, max_tokens=200)
    engine.step()
    large = add(engine, 1200, max_tokens=10)
    smalls = []
    for _ in range(400):
        smalls.append(add(engine, 1, max_tokens=2))
        engine.step()
        running = [branch.request.request_id for branch in engine.scheduler.running]
        if large in running:
            break
        assert not set(running) & set(smalls)
    assert large in running


def test_what_fills_the_pool_exactly_is_admitted_beside_nobody_else_only():
    """Validation and admission count alike: a prompt of the whole pool with one new token stores no token more."""
    engine = make(n_pages=10)
    add(engine, 16, max_tokens=1)
    exact = add(engine, 9 * 16, max_tokens=1)
    engine.step()
    assert exact not in engine._requests
    exact = add(engine, 10 * 16, max_tokens=1)
    engine.step()
    assert exact not in engine._requests
    with pytest.raises(ValueError, match="needs room for 161 tokens"):
        add(engine, 10 * 16, max_tokens=2)


def test_decodes_never_wait_for_prefill():
    """Every running decode gets its token in every step, whatever arrives."""
    engine = make()
    names = [add(engine, 10) for _ in range(5)]
    engine.step()
    for _ in range(30):
        add(engine, 500, max_tokens=3)
        assert set(names) <= {output.request_id for output in engine.step()}
