"""What the engine counts, under a clock that only the forward moves, so that every value is exact."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
from fakes import FakeKV, fake_model

from pagedkv import LLMEngine, SamplingParams
from pagedkv.engine.metrics import LATENCIES, SIZES, Histogram

STEP = 2.0  # seconds a forward takes


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    for module in ("admission", "intake", "metrics"):
        monkeypatch.setattr(f"pagedkv.engine.{module}.time", fake)
    return clock


def make(clock, n_pages=100, **settings):
    model = fake_model()
    plain = model.forward.run

    def run(*args):
        clock.now += STEP
        plain(*args)

    model.forward.run = run
    return LLMEngine(model, FakeKV(n_pages), **{"max_model_len": 64, "enable_prefix_caching": False, **settings})


def sampled(length, **more):
    return SamplingParams(seed=1, max_tokens=length, ignore_eos=True, **more)


def values(histogram):
    """{bound of the bucket: number}, empty buckets left out."""
    return {bound: n for bound, n in zip((*histogram.bounds, math.inf), histogram.counts, strict=True) if n}


def drive(engine):
    while engine.has_unfinished():
        engine.step()


@pytest.mark.parametrize("times", [1, 3])
def test_histogram(times):
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 4.0, 5.0, 5.5, 100.0):
        histogram.observe(value, times)
    assert histogram.counts == [2 * times, 2 * times, 2 * times, 2 * times]
    assert (histogram.count, histogram.sum) == (8 * times, 119.0 * times)
    assert histogram.cumulative() == [(1.0, 2 * times), (2.0, 4 * times), (5.0, 6 * times), (math.inf, 8 * times)]


def test_buckets_rise_and_cover_what_happens():
    for bounds in (LATENCIES, SIZES):
        assert list(bounds) == sorted(set(bounds))
    assert LATENCIES[:4] == (0.001, 0.0025, 0.005, 0.01) and LATENCIES[-1] == 500.0
    assert (SIZES[0], SIZES[-1]) == (1.0, 16384.0)


def test_one_request(clock):
    engine = make(clock, max_num_batched_tokens=4)
    engine.add_request("abcdefghij", sampled(5))  # 3 chunks, the last gives a token; then 4 decodes
    clock.now += 7
    drive(engine)
    metrics = engine.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (10, 5)
    assert metrics.requests == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert values(metrics.iteration_tokens_total) == {4.0: 2, 2.0: 1, 1.0: 4}
    for histogram, expected in [
        (metrics.request_queue_time_seconds, [7.0]),
        (metrics.time_to_first_token_seconds, [7 + 3 * STEP]),
        (metrics.inter_token_latency_seconds, [STEP] * 4),
        (metrics.request_prefill_time_seconds, [3 * STEP]),
        (metrics.request_decode_time_seconds, [4 * STEP]),
        (metrics.e2e_request_latency_seconds, [7 + 7 * STEP]),
        (metrics.request_prompt_tokens, [10]),
        (metrics.request_generation_tokens, [5]),
    ]:
        assert (histogram.count, histogram.sum) == (len(expected), sum(expected))
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["generation_tokens"], stats["requests_length"]) == (10, 5, 1)


def test_outputs_of_one_request_count_each_their_tokens_and_the_prompt_once(clock):
    engine = make(clock)
    engine.add_request("abc", sampled(4, n=3))
    drive(engine)
    metrics = engine.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens, metrics.time_to_first_token_seconds.count) == (3, 12, 1)
    assert values(metrics.inter_token_latency_seconds) == {2.5: 9}
    assert values(metrics.request_generation_tokens) == {16.0: 1}


def test_a_preempted_request_keeps_its_times_and_its_wait_is_a_gap(clock, caplog):
    caplog.set_level(logging.DEBUG, "pagedkv.engine")
    engine = make(clock, n_pages=5, max_model_len=20)
    engine.add_request("abcdefg", sampled(12), request_id="first")
    engine.add_request("abcdefg", sampled(12), request_id="second")
    drive(engine)
    metrics = engine.metrics
    assert engine.stats()["preemptions"] > 0
    assert metrics.time_to_first_token_seconds.count == metrics.request_queue_time_seconds.count == 2
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (14, 24)
    assert metrics.inter_token_latency_seconds.count == 22
    spans = {record.request["request_id"]: record.request for record in caplog.records}
    assert sum(span["preemptions"] for span in spans.values()) == engine.stats()["preemptions"]
    decoding = sum(span["e2e_s"] - span["ttft_s"] for span in spans.values())
    assert metrics.inter_token_latency_seconds.sum == decoding


def test_several_tokens_of_a_step_share_its_time(clock):
    engine = make(clock)
    engine.add_request("abc", sampled(9))
    branch = engine._requests["request-0"].branches[0]
    metrics = engine.metrics
    for seconds, n in ((1.0, 2), (3.0, 3), (4.0, 1)):
        clock.now += seconds
        metrics.sampled([])
        metrics.tokens(branch, n)
    assert metrics.generation_tokens == 6
    assert values(metrics.inter_token_latency_seconds) == {0.001: 1, 1.0: 3, 5.0: 1}
    assert metrics.inter_token_latency_seconds.sum == 7.0


def test_how_requests_end(clock):
    engine = make(clock)
    model = engine.model
    engine.add_request("abc", sampled(2))
    engine.add_request("abd", SamplingParams(max_tokens=9, temperature=0, logit_bias={7: 100.0}, stop_token_ids=[7]))
    engine.add_request("abe", sampled(9), request_id="gone")
    engine.add_request("abf", sampled(9), timeout=2 * STEP)
    model.forward.poison = {20: math.nan}
    engine.add_request([20], sampled(9))
    engine.step()
    engine.abort("gone")
    drive(engine)
    assert engine.metrics.requests == {"stop": 1, "length": 1, "abort": 2, "error": 1}
    assert engine.metrics.timeouts == 1
    stats, reasons = engine.stats(), ("stop", "length", "abort", "error", "timeout")
    assert [stats[f"requests_{reason}"] for reason in reasons] == [1, 1, 2, 1, 1]


def test_a_request_whose_outputs_ended_differently_counts_once_by_the_gravest(clock):
    engine = make(clock)
    engine.add_request("abc", SamplingParams(n=6, seed=4, max_tokens=40, logit_bias={0: 2.0}), request_id="a")
    while not any(output.finish_reason for output in engine.step()[0].outputs):
        pass
    engine.abort("a")
    assert engine.metrics.requests == {"stop": 0, "length": 0, "abort": 1, "error": 0}


def test_a_request_that_never_ran(clock):
    engine = make(clock)
    engine.add_request("abc", sampled(3), request_id="a")
    clock.now += 3
    engine.abort("a")
    metrics = engine.metrics
    assert metrics.prompt_tokens == 0 and metrics.requests["abort"] == 1
    assert metrics.e2e_request_latency_seconds.sum == 3.0
    for histogram in (metrics.time_to_first_token_seconds, metrics.request_queue_time_seconds):
        assert histogram.count == 0


def test_the_log_line_of_a_request(clock, caplog):
    caplog.set_level(logging.DEBUG, "pagedkv.engine")
    engine = make(clock)
    engine.add_request("abc", sampled(3, n=2), request_id='it\'s "mine"\n', priority=3)
    clock.now += 1.5
    drive(engine)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("pagedkv.engine", logging.DEBUG)
    assert record.request == {
        "request_id": 'it\'s "mine"\n',
        "finish_reason": "length",
        "stop_reason": None,
        "n": 2,
        "priority": 3,
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "generation_tokens": 6,
        "preemptions": 0,
        "queue_s": 1.5,
        "ttft_s": 1.5 + STEP,
        "e2e_s": 1.5 + 3 * STEP,
    }
    assert json.loads(json.dumps(record.request)) == record.request
    line = record.getMessage()
    assert "\n" not in line and "prompt_tokens=3 " in line and line.endswith("e2e_s=7.5")


def test_no_log_line_is_made_unless_somebody_listens(clock, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "pagedkv.engine")
    monkeypatch.setattr("pagedkv.engine.metrics.EngineMetrics._log", None)
    engine = make(clock)
    engine.add_request("abc", sampled(3))
    drive(engine)
    assert caplog.records == []
