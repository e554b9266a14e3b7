"""The way into the engine: queue limit, deadlines, names, and that adding waits for no step."""

import threading
from types import SimpleNamespace

import pytest
from fakes import FakeKV, fake_model
from reference import expected_output

from pagedkv import LLMEngine, QueueFull, SamplingParams


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    for module in ("admission", "intake", "metrics"):
        monkeypatch.setattr(f"pagedkv.engine.{module}.time", fake)
    return clock


def make(n_pages=100, **settings):
    return LLMEngine(fake_model(), FakeKV(n_pages), **{"max_model_len": 64, "enable_prefix_caching": False, **settings})


def sampled(length=9, **more):
    return SamplingParams(seed=1, max_tokens=length, ignore_eos=True, **more)


def finish(engine):
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in done, "an output after the last one"
            if output.finished:
                done[output.request_id] = output
    assert engine.kv.n_free == engine.kv.n_pages and engine.kv.check() == []
    return done


def check_prefix_of_solo(engine, output, params):
    for got in output.outputs:
        expected = expected_output(engine.model, output.prompt_token_ids, params, got.index, engine.max_model_len)
        assert got.token_ids == expected.token_ids[: len(got.token_ids)] and expected.text.startswith(got.text)


# The limit


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("max_waiting", [0, 1, 4])
def test_a_burst_on_an_idle_engine_fills_the_slots_and_the_queue(max_waiting, max_num_seqs):
    engine = make(max_waiting=max_waiting, max_num_seqs=max_num_seqs)
    for _ in range(max_num_seqs + max_waiting):
        engine.add_request("abc", sampled())
    with pytest.raises(QueueFull) as caught:
        engine.add_request("abc", sampled())
    assert isinstance(caught.value, RuntimeError)
    expected = f"{max_waiting} requests are waiting, as many as may (max_waiting, --max-queue: {max_waiting})"
    assert str(caught.value) == expected
    engine.step()
    assert (engine.stats()["running"], engine.stats()["waiting"]) == (max_num_seqs, max_waiting)
    with pytest.raises(QueueFull):
        engine.add_request("abc", sampled())
    assert len(finish(engine)) == max_num_seqs + max_waiting
    assert engine.stats()["requests_refused"] == 2
    engine.add_request("abc", sampled())
    assert len(finish(engine)) == 1


def test_free_slots_are_no_room_while_pages_are_short():
    """Two requests fill the pool: the third waits although 62 slots are free, and so would every later one."""
    engine = make(n_pages=8, max_model_len=16, max_waiting=2)
    for _ in range(3):
        engine.add_request([1] * 12, sampled(4))
    engine.step()
    assert (engine.stats()["running"], engine.stats()["waiting"]) == (2, 1)
    engine.add_request([1] * 12, sampled(4))
    with pytest.raises(QueueFull, match="2 requests are waiting, as many as may"):
        engine.add_request([1] * 12, sampled(4))
    assert len(finish(engine)) == 4


def test_a_burst_is_a_burst_also_after_an_abort():
    engine = make(max_waiting=1, max_num_seqs=3)
    for _ in range(3):
        engine.add_request("abc", sampled())
        engine.abort("unknown")
    engine.add_request("abc", sampled())
    with pytest.raises(QueueFull):
        engine.add_request("abc", sampled())
    engine.step()
    assert (engine.stats()["running"], engine.stats()["waiting"]) == (3, 1)
    finish(engine)


def test_a_refused_request_leaves_nothing():
    engine = make(max_waiting=0, max_num_seqs=1)
    engine.add_request("abc", sampled())
    with pytest.raises(QueueFull):
        engine.add_request("abc", sampled(), request_id="mine")
    assert finish(engine).keys() == {"request-0"}
    engine.add_request("abc", sampled(), request_id="mine")
    assert finish(engine).keys() == {"mine"}


def test_aborted_requests_make_room():
    engine = make(max_waiting=1, max_num_seqs=1)
    engine.add_request("abc", sampled())
    engine.step()
    engine.add_request("abc", sampled(), request_id="mine")
    with pytest.raises(QueueFull):
        engine.add_request("abc", sampled())
    engine.abort("mine")
    engine.add_request("abc", sampled())
    assert len(finish(engine)) == 3


def test_subscribers_are_never_refused():
    engine = make(max_waiting=0, max_num_seqs=1)
    boxes = [engine.subscribe("abc", sampled(), final_only=True) for _ in range(5)]
    with pytest.raises(QueueFull):
        engine.add_request("abc", sampled())
    while engine.has_unfinished():
        engine.pump()
    assert [len(box) for _, box in boxes] == [1] * 5


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", 2**31])
def test_limits_outside_their_range(value):
    with pytest.raises(ValueError, match=r"max_waiting must be an integer in \[0, 2147483647\]"):
        make(max_waiting=value)


def test_no_limit_by_default():
    engine = make(max_num_seqs=1)
    for _ in range(300):
        engine.add_request("a", sampled(1))
    assert len(finish(engine)) == 300


# Deadlines


def test_the_first_step_at_the_deadline_ends_the_request(clock):
    engine = make()
    params = sampled(40)
    engine.add_request("abc", params, request_id="mine", timeout=10)
    engine.add_request("abc", params, request_id="other")
    last = None
    for now in (1000.0, 1005.0, 1009.999):
        clock.now = now
        last = next(output for output in engine.step() if output.request_id == "mine")
        assert not last.finished
    clock.now = 1010.0
    final = next(output for output in engine.step() if output.request_id == "mine")
    assert final.finished and final.outputs[0].token_ids == last.outputs[0].token_ids
    assert (final.outputs[0].finish_reason, final.outputs[0].stop_reason) == ("abort", "timeout")
    check_prefix_of_solo(engine, final, params)
    done = finish(engine)
    assert done.keys() == {"other"} and len(done["other"].outputs[0].token_ids) == 40


def test_waiting_counts_and_a_late_request_never_runs(clock):
    engine = make(max_num_seqs=1)
    engine.add_request("abc", sampled(40))
    engine.step()
    engine.add_request("xyz", sampled(), request_id="late", timeout=1)
    engine.step()
    clock.now += 2
    final = next(output for output in engine.step() if output.request_id == "late")
    assert final.finished and final.outputs[0].token_ids == [] and final.outputs[0].stop_reason == "timeout"
    finish(engine)


def test_a_deadline_passed_before_the_first_step(clock):
    engine = make()
    engine.add_request("xyz", sampled(), timeout=0.5)
    clock.now += 1
    (final,) = engine.step()
    assert final.outputs[0].stop_reason == "timeout" and engine.model.forward.steps == []
    assert finish(engine) == {}


def test_a_deadline_amid_a_prefill_returns_the_pages(clock):
    engine = make(max_num_batched_tokens=4)
    engine.add_request([1] * 30, sampled(), timeout=5)
    engine.step()
    assert engine.kv.n_in_use > 0
    clock.now += 5
    (final,) = engine.step()
    assert final.finished and engine.kv.n_in_use == 0


def test_outputs_that_ended_before_the_deadline_keep_their_end(clock):
    engine = make()
    engine.add_request("abc", SamplingParams(n=6, seed=4, max_tokens=40, logit_bias={0: 2.0}), timeout=100)
    output = engine.step()[0]
    while not any(each.finish_reason for each in output.outputs):
        output = engine.step()[0]
    ended = [each for each in output.outputs if each.finish_reason]
    clock.now += 100
    final = engine.step()[0]
    assert 0 < len(ended) < 6 and [each for each in final.outputs if each.finish_reason == "stop"] == ended
    rest = [(each.finish_reason, each.stop_reason) for each in final.outputs if each not in ended]
    assert rest == [("abort", "timeout")] * (6 - len(ended))


def test_several_deadlines_pass_in_one_step(clock):
    engine = make()
    for timeout in (3, 1, 2, 50):
        engine.add_request("abc", sampled(40), request_id=f"{timeout}", timeout=timeout)
    engine.step()
    clock.now += 10
    assert {output.request_id for output in engine.step() if output.finished} == {"1", "2", "3"}
    assert finish(engine).keys() == {"50"}


def test_a_finished_request_and_the_next_of_its_name_are_two(clock):
    """The deadline of a request that has ended touches nobody who has its id since."""
    engine = make()
    engine.add_request("abc", sampled(1), request_id="a", timeout=5)
    finish(engine)
    engine.add_request("abc", sampled(20), request_id="a")
    clock.now += 6
    assert finish(engine)["a"].outputs[0].finish_reason == "length"


def test_deadlines_of_ended_requests_are_forgotten(clock):
    engine = make()
    for _ in range(1000):
        engine.add_request("a", sampled(1), timeout=1e6)
        finish(engine)
    assert len(engine.intake._deadlines) <= 65


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 2e9, True, "5", 10**400])
def test_timeouts_outside_their_range(value):
    engine = make()
    with pytest.raises(ValueError, match=r"timeout must be a number in \(0, 1e\+09\]"):
        engine.add_request("abc", timeout=value)
    assert not engine.has_unfinished()


# Threads


class HeldStep:
    """A step that waits in its forward until `leave` is called."""

    def __init__(self, engine):
        self.begun, self.go = threading.Event(), threading.Event()
        plain = engine.model.forward.run

        def run(*args):
            engine.model.forward.run = plain
            self.begun.set()
            assert self.go.wait(60)
            plain(*args)

        engine.model.forward.run = run
        self.thread = threading.Thread(target=engine.pump)
        self.thread.start()
        assert self.begun.wait(60)

    def leave(self):
        self.go.set()
        self.thread.join()


def test_adding_and_asking_to_abort_wait_for_no_step():
    engine = make()
    engine.add_request("abc", sampled(), request_id="running")
    step = HeldStep(engine)
    engine.add_request("abc", sampled(), request_id="mine")
    engine.add_request("abc", sampled(), request_id="gone")
    assert engine.stats()["waiting"] == 2
    with pytest.raises(ValueError, match="request_id must be"):
        engine.add_request("abc", request_id="mine")
    assert [engine.abort_soon(name) for name in ("gone", "running", "gone", "unknown")] == [True, True, False, False]
    step.leave()
    done = finish(engine)
    assert done.keys() == {"running", "mine", "gone"}
    assert [len(done[name].outputs[0].token_ids) for name in ("running", "mine", "gone")] == [1, 9, 0]


def test_the_doom_of_a_request_is_not_that_of_the_next_of_its_name():
    engine = make()
    old = engine.prepare("abc", sampled(1))
    engine.enqueue(old, "a")
    finish(engine)
    engine.add_request("abc", sampled(), request_id="a")
    assert engine.doom(old) is False
    assert finish(engine)["a"].outputs[0].finish_reason == "length"


def test_adding_to_a_closed_engine():
    engine = make()
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.add_request("abc")
    assert not engine.has_unfinished()


def test_closing_while_others_add_leaves_no_request():
    engine = make()
    engine.add_request("abc", sampled())
    step = HeldStep(engine)
    adder = threading.Thread(target=lambda: [engine.add_request("abc", sampled()) for _ in range(50)])
    adder.start()
    adder.join()
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine.intake.closed:
        pass
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.add_request("abc")
    step.leave()
    closer.join()
    assert not engine.has_unfinished() and engine.kv.n_in_use == 0


def test_a_thread_that_steps_without_pause_lets_others_in():
    """Who waits while a step runs has his turn right after it, though the stepping thread goes on at once."""
    engine = make()
    plain = engine.model.forward.run
    stop, in_step = threading.Event(), threading.Event()

    def run(*args):
        in_step.set()
        while engine._turn.acquire(blocking=False):  # until somebody waits
            engine._turn.release()
        plain(*args)

    def steps():
        while not stop.is_set() and len(engine.model.forward.steps) < 10000:
            if not engine.has_unfinished():
                engine.add_request("abc", sampled(50))
            engine.pump()

    engine.model.forward.run = run
    engine.add_request("abc", sampled(50))
    thread = threading.Thread(target=steps)
    thread.start()
    waits = []
    for _ in range(50):
        assert in_step.wait(60)
        in_step.clear()
        before = len(engine.model.forward.steps)
        waits.append(engine.between_steps(lambda: len(engine.model.forward.steps)) - before)
    stop.set()
    engine.model.forward.run = plain
    engine.settle()
    thread.join()
    assert waits == [1] * 50
