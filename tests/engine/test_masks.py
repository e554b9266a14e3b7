"""The logits_mask hook: a mask for each output from its own tokens, whatever else runs, and faults that stay alone."""

import os
import re
import threading

import numpy as np
import pytest
from fakes import FakeKV, fake_model
from reference import expected_output

from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams

VOCAB = 61


def make_engine(n_pages=64, **settings):
    return LLMEngine(fake_model(), FakeKV(n_pages), max_model_len=64, enable_prefix_caching=False, **settings)


def words(tokens):
    found = [0, 0]
    for token in tokens:
        found[token // 32] |= 1 << token % 32
    return np.array(found, np.uint32)


class Hook:
    """Calls a function; remembers what it was asked and in which threads."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []
        self.threads = set()

    def allowed(self, token_ids):
        self.asked.append(list(token_ids))
        self.threads.add(threading.current_thread())
        return self.answer(token_ids)


def run(engine, prompts, params):
    ids = [engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    done = {}
    while engine.has_unfinished():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
    assert engine.stats()["pages_in_use"] == 0
    return [done[request_id] for request_id in ids]


def test_the_hook_sees_each_output_and_decides_it():
    hook = Hook(lambda token_ids: words([10 + len(token_ids), 30 + len(token_ids)]))
    params = SamplingParams(seed=1, n=3, max_tokens=5, ignore_eos=True, logits_mask=hook, logprobs=2)
    (output,) = run(make_engine(), [[1, 2, 3]], [params])
    for done in output.outputs:
        assert all(token in (10 + i, 30 + i) for i, token in enumerate(done.token_ids))
        assert all(done.token_ids[:i] in hook.asked for i in range(5))
    assert len({tuple(done.token_ids) for done in output.outputs}) > 1
    assert threading.current_thread() not in hook.threads
    assert len(hook.asked) == 15


def test_masked_outputs_equal_their_solo_run_under_preemption_and_forks():
    engine = make_engine(n_pages=16, max_num_batched_tokens=7)
    hook = Hook(lambda ids: words(range(sum(ids) % 5, VOCAB, 2)) if len(ids) % 4 else None)
    params = [
        SamplingParams(seed=i, n=1 + i % 3, max_tokens=20, logits_mask=hook if i % 2 else None, typical_p=0.9)
        for i in range(8)
    ]
    prompts = [list(range(1, 4 + i)) for i in range(8)]
    for prompt, each, output in zip(prompts, params, run(engine, prompts, params), strict=True):
        for index, done in enumerate(output.outputs):
            expected = expected_output(engine.model, prompt, each, index, 64)
            assert (done.token_ids, done.text) == (expected.token_ids, expected.text)
            assert done.finish_reason == expected.finish_reason
    assert engine.stats()["preemptions"] > 0


def broken(token_ids):
    raise RuntimeError("no idea")


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self):
        raise ZeroDivisionError


def mute(token_ids):
    raise Mute


def loud(token_ids):
    raise ValueError("one\ntwo\0\ud800 " + "three " * 999)


@pytest.mark.parametrize(
    "answer, message",
    [
        (broken, "RuntimeError: no idea"),
        (lambda ids: [1, 2], r"logits_mask.allowed\(\) must return None or uint32 \[n >= 2\], not \[1, 2\]"),
        (lambda ids: np.zeros(2, np.int64), r"must return None or uint32 \[n >= 2\], not int64 \(2,\)"),
        (lambda ids: np.zeros(1, np.uint32), r"not uint32 \(1,\)"),
        (lambda ids: np.zeros((2, 2), np.uint32), r"not uint32 \(2, 2\)"),
        (lambda ids: words([]), "^every token is banned$"),
        (lambda ids: exit(), "SystemExit"),
        (mute, "^Mute$"),
        (loud, "^ValueError: one two\ufffd\ufffd three three .{200,280}$"),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_fault_ends_its_own_request_alone(answer, message, after):
    engine = make_engine()
    hook = Hook(lambda ids: None if len(ids) < after else answer(ids))
    params = [
        SamplingParams(seed=i, max_tokens=8, ignore_eos=True, logits_mask=hook if i == 1 else None) for i in range(3)
    ]
    outputs = run(engine, [[5, 6]] * 3, params)
    for i in (0, 2):
        assert outputs[i].outputs[0].token_ids == expected_output(engine.model, [5, 6], params[i], 0, 64).token_ids
    failed = outputs[1].outputs[0]
    assert failed.finish_reason == "error" and len(failed.token_ids) == after
    assert re.search(message, failed.stop_reason)


def test_allowed_ids_alone_need_no_thread():
    before = threading.active_count()
    params = SamplingParams(seed=1, max_tokens=9, ignore_eos=True, allowed_token_ids=[7, 9, 11])
    (output,) = run(make_engine(), [[1, 2]], [params])
    assert set(output.outputs[0].token_ids) <= {7, 9, 11} and len(output.outputs[0].token_ids) == 9
    assert threading.active_count() <= before  # those of earlier tests may end meanwhile


def test_allowed_ids_outside_the_vocabulary_are_refused_at_submission():
    engine = make_engine()
    with pytest.raises(ValueError, match=r"allowed_token_ids must be token ids in \[0, 61\), not 61"):
        engine.add_request([1], SamplingParams(allowed_token_ids=[3, 61]))
    assert not engine.has_unfinished()


def test_only_stop_ids_allowed_and_min_tokens_ends_the_request_with_an_error():
    params = SamplingParams(seed=1, max_tokens=5, min_tokens=2, allowed_token_ids=[0])
    (output,) = run(make_engine(), [[1, 2]], [params])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", "every token is banned")


def test_a_hook_may_hand_out_the_same_array_again_and_write_to_it_later():
    """Masks are copied when they are handed over."""
    shared = np.zeros(2, np.uint32)

    def answer(token_ids):
        shared[:] = words([20 + len(token_ids)])
        return shared

    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, logits_mask=Hook(answer))
    (output,) = run(make_engine(), [[1, 2]], [params])
    assert output.outputs[0].token_ids == [20, 21, 22, 23, 24, 25]


def test_aborted_while_its_mask_is_worked_out():
    go = threading.Event()
    engine = make_engine()
    request_id = engine.add_request([1, 2], SamplingParams(logits_mask=Hook(lambda ids: go.wait(10) and None)))
    assert engine.abort(request_id)
    go.set()
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort" and not engine.has_unfinished()
    engine.close()


def test_a_child_process_works_its_masks_out_itself():
    """The threads stay in the parent; an engine that a fork has copied goes on without them."""
    engine = make_engine()
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, logits_mask=Hook(lambda ids: words([30 + len(ids)])))
    engine.add_request([1, 2], params)
    engine.step()
    child = os.fork()
    if child == 0:
        try:
            outputs = []
            while engine.has_unfinished():
                outputs += engine.step()
            os._exit(0 if outputs[-1].outputs[0].token_ids == [30, 31, 32, 33, 34, 35] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.close()


# Masks that come late


class Slow:
    """Answers only once it is let go on, for outputs of at least `n` tokens."""

    def __init__(self, n=0, answer=None):
        self.go = threading.Event()
        self.n = n
        self.answer = answer

    def allowed(self, token_ids):
        if len(token_ids) >= self.n:
            assert self.go.wait(60)
        return None if self.answer is None else self.answer(token_ids)


def steps_until(engine, done, condition, most=300):
    for _ in range(most):
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        if condition():
            return
    raise AssertionError("it never happened")


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_a_slow_mask_holds_up_its_own_request_alone(after, n):
    engine = make_engine(max_num_seqs=8)
    slow = Slow(after, lambda ids: words(range(len(ids) % 3, VOCAB, 3)))
    params = [
        SamplingParams(
            seed=i, n=n if i == 1 else 1, max_tokens=12, ignore_eos=True, logits_mask=slow if i == 1 else None
        )
        for i in range(4)
    ]
    names = [engine.add_request([5, 6, 7 + i], params[i], request_id=str(i)) for i in range(4)]
    done = {}
    steps_until(engine, done, lambda: len(done) == 3)
    assert set(done) == {"0", "2", "3"}
    slow.go.set()
    steps_until(engine, done, lambda: not engine.has_unfinished())
    for i, name in enumerate(names):
        for output in done[name].outputs:
            expected = expected_output(engine.model, [5, 6, 7 + i], params[i], output.index, 64)
            assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
            assert output.finish_reason == "length" and output.cumulative_logprob == sum(expected.logprobs)
    assert engine.stats()["pages_in_use"] == 0 and engine.kv.check() == []


def test_a_late_request_does_not_wait_for_another_late_one():
    engine, slow, other = make_engine(), Slow(1), Slow(1)
    params = [SamplingParams(seed=i, max_tokens=5, ignore_eos=True, logits_mask=[slow, other][i]) for i in range(2)]
    for i in range(2):
        engine.add_request([5, 6 + i], params[i], request_id=str(i))
    done = {}
    steps_until(engine, done, lambda: len(engine.drawing._late) == 2)
    other.go.set()
    steps_until(engine, done, lambda: "1" in done)
    assert "0" not in done
    slow.go.set()
    steps_until(engine, done, lambda: not engine.has_unfinished())
    for i in range(2):
        assert (
            done[str(i)].outputs[0].token_ids == expected_output(engine.model, [5, 6 + i], params[i], 0, 64).token_ids
        )


def test_late_and_preempted_and_computed_again():
    """While its mask is worked out, a branch loses its pages, waits, and is computed anew, to the same token."""
    engine = make_engine(n_pages=5)
    slow = Slow(2)
    low = SamplingParams(seed=1, max_tokens=8, ignore_eos=True, logits_mask=slow)
    high = SamplingParams(seed=2, max_tokens=11, ignore_eos=True)
    engine.add_request([5, 6, 7], low, request_id="low", priority=1)
    done = {}
    steps_until(engine, done, lambda: engine.drawing._late)
    engine.add_request([8, 9, 10, 11], high, request_id="high")
    steps_until(engine, done, lambda: "high" in done)
    assert engine.stats()["preemptions"] > 0
    for _ in range(3):
        engine.step()
    slow.go.set()
    steps_until(engine, done, lambda: not engine.has_unfinished())
    for name, prompt, params in (("low", [5, 6, 7], low), ("high", [8, 9, 10, 11], high)):
        assert done[name].outputs[0].token_ids == expected_output(engine.model, prompt, params, 0, 64).token_ids


@pytest.mark.parametrize("how", ["abort", "timeout", "close"])
def test_a_late_request_can_be_ended(how):
    engine, slow = make_engine(), Slow(1)
    engine.add_request(
        [5, 6], SamplingParams(logits_mask=slow), request_id="x", timeout=1e9 if how != "timeout" else 0.5
    )
    done = {}
    steps_until(engine, done, lambda: engine.drawing._late)
    if how == "close":
        engine.close()
    else:
        if how == "abort":
            assert engine.abort("x")
        steps_until(engine, done, lambda: not engine.has_unfinished())
        assert done["x"].outputs[0].finish_reason == "abort" and len(done["x"].outputs[0].token_ids) == 1
    assert engine.kv.n_in_use == 0
    slow.go.set()


def test_an_interrupt_forgets_the_rows_of_its_step():
    """The step's forward was undone, so what was kept of it is computed again."""
    engine, slow = make_engine(), Slow()
    params = SamplingParams(seed=3, n=3, max_tokens=6, ignore_eos=True, logits_mask=slow)
    engine.add_request([5, 6, 7], params, request_id="x")
    accept, calls = engine.drawing.draw, []

    def interrupted(*arguments):
        accept(*arguments)
        if not calls:
            calls.append(1)
            raise KeyboardInterrupt

    engine.drawing.draw = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.drawing._late
    slow.go.set()
    done = {}
    steps_until(engine, done, lambda: not engine.has_unfinished())
    for output in done["x"].outputs:
        assert output.token_ids == expected_output(engine.model, [5, 6, 7], params, output.index, 64).token_ids


def test_a_guess_is_not_waited_for():
    """Guessed tokens of an output with a slow mask: its tokens are those without guesses."""
    config = {"method": "ngram", "num_speculative_tokens": 6}
    engine = make_engine(speculative_config=config)
    slow = Slow(3, lambda ids: words([10 + len(ids) % 2]))
    params = SamplingParams(seed=1, max_tokens=16, ignore_eos=True, logits_mask=slow)
    engine.add_request([10, 11] * 5, params, request_id="x")
    done = {}
    steps_until(engine, done, lambda: engine.drawing._late)
    slow.go.set()
    steps_until(engine, done, lambda: not engine.has_unfinished())
    assert done["x"].outputs[0].token_ids == [10, 11] * 8
