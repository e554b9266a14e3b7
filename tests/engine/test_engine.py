"""The engine's promises to a caller, over the fake model."""

import math
import pickle

import numpy as np
import pytest
from fakes import FakeKV, fake_model
from reference import expected_output
from scipy import special

from pagedkv.core.errors import PoolExhausted
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.outputs import Logprob
from pagedkv.engine.params import SamplingParams


@pytest.fixture
def engine():
    return make()


def make(n_pages=100, page_tokens=4, max_model_len=64, model=None, **settings):
    settings = {"max_model_len": max_model_len, "enable_prefix_caching": False, **settings}
    return LLMEngine(model or fake_model(), FakeKV(n_pages, page_tokens), **settings)


def finish(engine):
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
    assert engine.kv.n_free == engine.kv.n_pages and engine.kv.check() == []
    return done


def run_one(engine, prompt, params):
    request_id = engine.add_request(prompt, params)
    return finish(engine)[request_id]


# Prompts


def test_prompt_forms(engine):
    params = SamplingParams(seed=1)
    a = run_one(engine, "abc", params)
    b = run_one(engine, [1, 2, 3], params)
    c = run_one(engine, {"prompt_token_ids": np.array([1, 2, 3])}, params)
    d = run_one(engine, {"prompt": "abc"}, params)
    assert a.outputs == b.outputs == c.outputs == d.outputs
    assert (a.prompt, b.prompt, d.prompt) == ("abc", None, "abc")
    assert a.prompt_token_ids == [1, 2, 3] and a.num_cached_tokens == 0


@pytest.mark.parametrize("prompt", ["", [], {"prompt_token_ids": []}, np.array([], np.int32)])
def test_empty_prompt(engine, prompt):
    with pytest.raises(ValueError, match="at least 1 token"):
        engine.add_request(prompt)


@pytest.mark.parametrize("prompt", [[61], [-1], [1.0], [True], ["a"], 5, None, b"abc", {"text": "a"}, [[1]], [10**400]])
def test_bad_prompt(engine, prompt):
    with pytest.raises(ValueError, match="prompt"):
        engine.add_request(prompt)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("params", [{"temperature": 1}, 3, "x"])
def test_bad_params(engine, params):
    with pytest.raises(ValueError, match="params must be a SamplingParams"):
        engine.add_request("a", params)


@pytest.mark.parametrize("priority", [1.5, "high", None, True, 2**31])
def test_bad_priority(engine, priority):
    with pytest.raises(ValueError, match="priority must be an integer"):
        engine.add_request("a", priority=priority)


@pytest.mark.parametrize("params", [{"stop_token_ids": [61]}, {"logit_bias": {61: 1.0}}])
def test_ids_outside_the_vocabulary_are_refused_at_submit(engine, params):
    with pytest.raises(ValueError, match=r"\[0, 61\)"):
        engine.add_request("a", SamplingParams(**params))
    assert not engine.has_unfinished()


def test_request_ids(engine):
    first = engine.add_request("a")
    assert engine.add_request("a", request_id="mine") == "mine"
    for taken in ("mine", first, 5, "", "\ud800"):
        with pytest.raises(ValueError, match="request_id"):
            engine.add_request("a", request_id=taken)
    finish(engine)
    assert engine.add_request("a", request_id="mine") == "mine"
    for nobody in (["mine"], 5, None, "else"):
        assert not engine.abort(nobody) and not engine.abort_soon(nobody)


def test_a_fresh_id_avoids_those_callers_chose(engine):
    engine.add_request("a", request_id="request-1")
    names = {engine.add_request("a") for _ in range(3)}
    assert len(names) == 3 and "request-1" not in names


# Limits


def test_prompt_longer_than_the_context_names_both_numbers(engine):
    with pytest.raises(ValueError, match="prompt of 65 tokens is longer than the context of 64"):
        engine.add_request([1] * 65)


def test_text_longer_than_any_tokens_could_be_is_refused_before_tokenizing(engine, monkeypatch):
    monkeypatch.setattr(engine.model.tokenizer, "encode", lambda text: pytest.fail("tokenized"))
    with pytest.raises(ValueError, match=r"prompt of 769 characters is longer than the context of 64 tokens.* 3 char"):
        engine.add_request("a" * (4 * 3 * 64 + 1))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="prompt of 768 tokens is longer than the context of 64"):
        engine.add_request("a" * (4 * 3 * 64))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [1], "cache_sait": "me"}, "prompt key must be one of .*, not 'cache_sait'"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt key must be one of .*, not 'multi_modal_data'"),
        ({"prompt": 7, "prompt_token_ids": [1]}, "prompt must be a text .*, not 7"),
        ({"cache_salt": "me"}, "prompt must be"),
        ({}, "prompt must be"),
    ],
)
def test_a_misspelt_prompt_is_refused(engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt)


def test_max_tokens_past_the_context_ends_with_length(engine):
    output = run_one(engine, [1] * 60, SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"


def test_prompt_of_exactly_the_context_gives_one_token(engine):
    output = run_one(engine, [1] * 64, SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"


def test_what_never_fits_the_pool_is_refused_with_the_numbers():
    engine = make(n_pages=5)
    message = r"prompt of 10 tokens with 12 new .* 21 tokens; the pool holds 20 \(5 pages of 4"
    with pytest.raises(ValueError, match=message):
        engine.add_request([1] * 10, SamplingParams(max_tokens=12))
    output = run_one(engine, [1] * 10, SamplingParams(max_tokens=11, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 11
    with pytest.raises(ValueError, match="prompt of 21 tokens"):
        engine.add_request([1] * 21, SamplingParams(max_tokens=None))


def test_without_max_tokens_the_pool_or_the_context_ends_it():
    output = run_one(make(n_pages=5), [1] * 10, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 11 and output.outputs[0].finish_reason == "length"
    output = run_one(make(), [1] * 10, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 54


# Stopping and sampling


def test_stop_token_stays_in_ids_and_out_of_text(engine):
    free = run_one(engine, "abc", SamplingParams(seed=3, max_tokens=12, ignore_eos=True)).outputs[0]
    target = free.token_ids[5]
    cut = free.token_ids.index(target) + 1
    got = run_one(engine, "abc", SamplingParams(seed=3, max_tokens=12, ignore_eos=True, stop_token_ids=[target]))
    assert got.outputs[0].token_ids == free.token_ids[:cut]
    assert (got.outputs[0].finish_reason, got.outputs[0].stop_reason) == ("stop", target)
    assert got.outputs[0].text == engine.model.tokenizer.decode(free.token_ids[: cut - 1])


def test_models_stop_id_and_ignore_eos():
    model = fake_model()
    always_end = {0: 100.0}
    stopped = run_one(make(model=model), "abc", SamplingParams(logit_bias=always_end, max_tokens=5)).outputs[0]
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ([0], "", "stop")
    ignored = run_one(make(model=model), "abc", SamplingParams(logit_bias=always_end, max_tokens=5, ignore_eos=True))
    assert ignored.outputs[0].token_ids == [0] * 5 and ignored.outputs[0].finish_reason == "length"


def test_min_tokens_puts_the_stop_off(engine):
    params = SamplingParams(logit_bias={0: 100.0}, max_tokens=9, min_tokens=4, seed=1)
    tokens = run_one(engine, "abc", params).outputs[0].token_ids
    assert 0 not in tokens[:4] and tokens[4:] == [0]


def test_special_tokens_in_text(engine):
    params = {"logit_bias": {0: 100.0}, "max_tokens": 2, "ignore_eos": True}
    assert run_one(engine, "abc", SamplingParams(**params)).outputs[0].text == ""
    shown = run_one(engine, "abc", SamplingParams(**params, skip_special_tokens=False))
    assert shown.outputs[0].text == "<end><end>"


def test_bytes_of_a_split_character_are_held_back(engine):
    half, rest = (engine.model.tokenizer.pieces.index(b) for b in ("é".encode()[:1], "é".encode()[1:]))
    engine.add_request("a", SamplingParams(logit_bias={half: 100.0}, max_tokens=3, ignore_eos=True))
    texts = [engine.step()[0].outputs[0].text for _ in range(3)]
    assert texts[0] == "" and "\ufffd" not in texts[0] and texts[-1].count("\ufffd") >= 1
    state = SamplingParams(logit_bias={half: 100.0, rest: 100.0}, max_tokens=40, temperature=10.0, seed=1)
    engine.add_request("a", state)
    grown = ""
    while engine.has_unfinished():
        for output in engine.step():
            assert output.outputs[0].text.startswith(grown)
            grown = output.outputs[0].text
    assert "é" in grown


def test_seed_decides_and_none_is_fresh(engine):
    def ids(seed):
        return tuple(run_one(engine, "abc", SamplingParams(seed=seed, max_tokens=12)).outputs[0].token_ids)

    assert ids(5) == ids(5) != ids(6)
    assert len({ids(None) for _ in range(5)}) > 1


def test_children_equal_themselves_whatever_n_is(engine):
    four = run_one(engine, "abcd", SamplingParams(n=4, seed=5, max_tokens=10))
    two = run_one(engine, "abcd", SamplingParams(n=2, seed=5, max_tokens=10))
    assert four.outputs[:2] == two.outputs and [each.index for each in four.outputs] == [0, 1, 2, 3]
    assert len({tuple(each.token_ids) for each in four.outputs}) > 1


def test_greedy_children_are_equal(engine):
    output = run_one(engine, "abcd", SamplingParams(n=3, temperature=0, max_tokens=10))
    assert len({tuple(each.token_ids) for each in output.outputs}) == 1


def test_logprobs(engine):
    params = SamplingParams(seed=5, max_tokens=6, logprobs=2, temperature=0.3, ignore_eos=True)
    output = run_one(engine, "abc", params)
    got = output.outputs[0]
    tokens = list(output.prompt_token_ids)
    total = 0.0
    for token, entry in zip(got.token_ids, got.logprobs, strict=True):
        logits = engine.model.forward.solo_logits(tokens).astype(np.float64)
        expected = special.log_softmax(logits)
        order = np.argsort(-logits, kind="stable")
        assert next(iter(entry)) == token and set(entry) == {token, *order[:2].tolist()}
        for other, value in entry.items():
            assert abs(value - expected[other]) < 1e-5
            assert value.rank == 1 + int(np.flatnonzero(order == other)[0])
            assert value.decoded_token == engine.model.tokenizer.decode([other], skip_special_tokens=False)
        total += entry[token].logprob
        tokens.append(token)
    assert got.cumulative_logprob == total


def test_prompt_logprobs(engine):
    output = run_one(engine, "abcab", SamplingParams(prompt_logprobs=1, max_tokens=1))
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 5
    ids = output.prompt_token_ids
    for i in range(1, 5):
        expected = special.log_softmax(engine.model.forward.solo_logits(ids[:i]).astype(np.float64))
        entry = output.prompt_logprobs[i]
        assert abs(entry[ids[i]] - expected[ids[i]]) < 1e-5 and set(entry) == {ids[i], int(expected.argmax())}


def test_logprob_is_a_float_that_knows_more():
    value = Logprob(-0.5, 3, "x")
    assert value == -0.5 and value.logprob == -0.5 and value + 1 == 0.5
    twin = pickle.loads(pickle.dumps(value))
    assert (twin, twin.rank, twin.decoded_token) == (value, 3, "x")


# Faults


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unusable_logits_fail_only_their_request(engine, poison):
    engine.model.forward.poison = {60: poison}
    bad = engine.add_request([1, 60], SamplingParams(seed=1, max_tokens=5))
    good = engine.add_request([1, 2], SamplingParams(seed=1, max_tokens=5, ignore_eos=True, logit_bias={60: -100.0}))
    done = finish(engine)
    failed = done[bad].outputs[0]
    assert (failed.finish_reason, failed.token_ids) == ("error", []) and "NaN" in failed.stop_reason
    expected = expected_output(
        engine.model, [1, 2], SamplingParams(seed=1, max_tokens=5, ignore_eos=True, logit_bias={60: -100.0}), 0, 64
    )
    assert done[good].outputs[0].token_ids == expected.token_ids


def test_every_token_banned_is_an_error():
    model = fake_model(vocab_size=16)
    params = SamplingParams(stop_token_ids=range(16), min_tokens=1, max_tokens=3)
    assert run_one(make(model=model), "abc", params).outputs[0].finish_reason == "error"


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_an_interrupted_step_changes_nothing(at):
    def submit(engine):
        engine.add_request("abcdefgh", SamplingParams(n=2, seed=1, max_tokens=6))
        engine.add_request("xyz", SamplingParams(seed=2, max_tokens=6, prompt_logprobs=1))

    plain, broken = make(max_num_batched_tokens=5), make(max_num_batched_tokens=5)
    submit(plain)
    expected = finish(plain)
    broken.model.forward.interrupt_at = at
    submit(broken)
    with pytest.raises(KeyboardInterrupt):
        while broken.has_unfinished():
            broken.step()
    assert broken.kv.check() == []
    rest = finish(broken)
    assert {k: v for k, v in expected.items() if k in rest} == rest


def test_an_interrupt_amid_the_bookkeeping_costs_one_request(engine, monkeypatch):
    first = engine.add_request("abc", SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    second = engine.add_request("abd", SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    engine.step()
    accept = engine.drawing.accept

    def interrupted(branch):
        if branch.request.request_id == first:
            raise KeyboardInterrupt
        accept(branch)

    monkeypatch.setattr(engine.drawing, "accept", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    done = finish(engine)
    assert done[first].outputs[0].finish_reason == "error"
    expected = expected_output(
        engine.model, [1, 2, 4], SamplingParams(seed=1, max_tokens=4, ignore_eos=True), 0, 64
    )
    assert done[second].outputs[0].token_ids == expected.token_ids


def test_pages_held_by_strangers_are_an_error_not_a_hang():
    engine = make(n_pages=5)
    stranger = engine.kv.sequence()
    stranger.extend(20)
    engine.add_request("abc")
    with pytest.raises(PoolExhausted, match="5 of 5 pages are held outside"):
        engine.step()
    stranger.free()
    assert len(finish(engine)) == 1


# Aborting


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_abort_frees_the_pages_and_ends_once(after):
    engine = make(max_num_batched_tokens=6)
    victim = engine.add_request("abcdefghij", SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True))
    other = engine.add_request("xyz", SamplingParams(seed=2, max_tokens=20, ignore_eos=True))
    last = None
    for _ in range(after):
        for output in engine.step():
            last = output if output.request_id == victim else last
    assert engine.abort(victim) is True
    assert engine.abort(victim) is False
    assert {branch.request.request_id for branch in engine.scheduler.running} <= {other}
    done = finish(engine)
    assert {each.finish_reason for each in done[victim].outputs} == {"abort"}
    if last is not None:
        assert [each.token_ids for each in done[victim].outputs] == [each.token_ids for each in last.outputs]
    assert len(done[other].outputs[0].token_ids) == 20


def test_abort_of_unknown_and_finished(engine):
    name = engine.add_request("a")
    finish(engine)
    assert engine.abort(name) is False and engine.abort("never") is False


def test_abort_of_a_half_finished_fork_keeps_the_finished_child(engine):
    params = SamplingParams(n=6, seed=4, max_tokens=40, logit_bias={0: 2.0})
    name = engine.add_request("abc", params)
    output = engine.step()[0]
    while not any(each.finish_reason for each in output.outputs):
        output = engine.step()[0]
    ended = [each for each in output.outputs if each.finish_reason]
    assert 0 < len(ended) < 6
    engine.abort(name)
    final = finish(engine)[name]
    assert [each for each in final.outputs if each.finish_reason == "stop"] == ended
    assert sum(each.finish_reason == "abort" for each in final.outputs) == 6 - len(ended)


# Outputs, mailboxes, numbers


def test_outputs_are_snapshots(engine):
    engine.add_request("abc", SamplingParams(seed=1, max_tokens=3, ignore_eos=True, logprobs=0))
    first = engine.step()[0]
    kept = (first.outputs[0].text, list(first.outputs[0].token_ids), len(first.outputs[0].logprobs))
    finish(engine)
    assert (first.outputs[0].text, first.outputs[0].token_ids, len(first.outputs[0].logprobs)) == kept


def test_subscribed_outputs_stay_out_of_step(engine):
    name, box = engine.subscribe("abc", SamplingParams(max_tokens=3, ignore_eos=True), final_only=True)
    other = engine.add_request("abc", SamplingParams(max_tokens=5, ignore_eos=True))
    engine.pump()
    engine.pump()
    assert not box
    assert [output.request_id for output in engine.step()] == [other] * 3
    assert len(box) == 1 and box[0].finished
    engine.unsubscribe(name)
    engine.unsubscribe(name)
    finish(engine)


def test_a_request_that_comes_in_amid_a_step_waits_for_the_next(engine, monkeypatch):
    """From another thread, after the step took in what there was and before it looked for work: no full pool."""
    names = []
    draw_late = engine._draw_late

    def late(begun):
        if not names:
            names.append(engine.add_request([1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True)))
        return draw_late(begun)

    monkeypatch.setattr(engine, "_draw_late", late)
    assert engine.step() == []
    assert engine.has_unfinished()
    assert [output.request_id for output in engine.step()] == names


def test_step_without_requests(engine):
    assert engine.step() == [] and not engine.has_unfinished()


def test_stats_names(engine):
    engine.add_request("abcdefgh", SamplingParams(max_tokens=9))
    engine.step()
    stats = engine.stats()
    assert stats["pages_total"] == 100 and stats["pages_in_use"] == 2 and stats["pages_free"] == 98
    assert (stats["running"], stats["waiting"], stats["steps"], stats["preemptions"]) == (1, 0, 1, 0)
    assert stats["isa"] == "fake" and stats["threads"] == 1
    assert {"pages_cached", "prefix_hit_tokens", "prefix_query_tokens"} <= set(stats)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, None])
@pytest.mark.parametrize("vocab", [61, 64])
def test_logits(chunk, vocab):
    engine = make(model=fake_model(vocab_size=vocab))
    ids = [5, 9, 2, 7, 7, 1, 3, 8, 20]
    got = engine.logits(ids, chunk=chunk)
    assert got.shape == (9, vocab) and got.dtype == np.float32
    for i in range(9):
        assert (got[i] == engine.model.forward.solo_logits(ids[: i + 1])).all()
    assert engine.kv.n_free == 100


def test_logits_refuses_what_generate_refuses(engine):
    for ids in ([], [61], [1] * 65):
        with pytest.raises(ValueError):
            engine.logits(ids)
    with pytest.raises(ValueError, match="chunk"):
        engine.logits([1], chunk=0)


def test_close_aborts(engine):
    engine.add_request("abc")
    engine.step()
    engine.close()
    assert not engine.has_unfinished() and engine.kv.n_free == 100
