"""LLM over the fake model where that is enough, and on the real one where it is not."""

import gc
import itertools
import re
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from fakes import paged_model

import pagedkv
from pagedkv import LLM, ModelError, PoolExhausted, SamplingParams
from pagedkv.engine.arena_map import arena_map
from pagedkv.engine.embedding import embed


@pytest.fixture
def llm(monkeypatch):
    """LLM("fake", ...) over a fake model and a real cache."""
    with fake_llm(monkeypatch) as llm:
        yield llm


def fake_llm(monkeypatch, **settings):
    model = paged_model(context_length=200)
    model.forward.pool = None
    monkeypatch.setattr("pagedkv.llm.load_model", lambda *args, **kwargs: model)
    return LLM("fake", **{"kv_format": "f32", "kv_pages": 40, **settings})


def greedy(n=8, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


# Settings


@pytest.mark.parametrize(
    "field, values",
    [
        ("model", ["", 3, None, b"x"]),
        ("threads", [0, -1, 1.5, True, "2", 1025]),
        ("kv_format", ["f8", "", None, 16]),
        ("kv_memory", [0, -5, "lots", 1.5, True, "1 byte"]),
        ("kv_pages", [0, -1, 1.5, True, "8", 2**31]),
        ("page_tokens", [0, 8, 17, 512, True, "16", None, 16.5]),
        ("max_model_len", [0, -1, 1.5, True, 201]),
        ("max_num_seqs", [0, -1, 1.5, True, None]),
        ("max_num_batched_tokens", [0, -1, 1.5, True, None]),
        ("enable_prefix_caching", [0, 1, None, "yes"]),
        ("speculative_config", [0, "ngram", {}, {"method": "eagle"}, {"method": "ngram", "tokens": 3}]),
        ("max_waiting", [-1, 1.5, True, "8", 2**31]),
    ],
)
def test_settings_outside_their_range(monkeypatch, field, values):
    for value in values:
        settings = {"kv_pages": None} if field == "kv_memory" else {}
        with pytest.raises(ValueError) as caught:
            if field == "model":
                LLM(value)
            else:
                fake_llm(monkeypatch, **{**settings, field: value})
        assert str(caught.value).startswith(field) and "\n" not in str(caught.value)


def test_two_bounds_of_the_pool_are_one_too_many(monkeypatch):
    with pytest.raises(ValueError, match="kv_memory and kv_pages"):
        fake_llm(monkeypatch, kv_memory="1MiB", kv_pages=3)


def test_memory_bound(monkeypatch):
    with fake_llm(monkeypatch, kv_pages=None, kv_memory="1MiB") as llm:
        assert llm.kv.n_pages * llm.kv.page_bytes <= 2**20 < (llm.kv.n_pages + 1) * llm.kv.page_bytes
    with pytest.raises(ValueError, match=r"kv_memory must be at least one page of \d+ bytes"):
        fake_llm(monkeypatch, kv_pages=None, kv_memory=100)


@pytest.mark.parametrize(
    "given", [{"kv_memory": "999999TiB"}, {"kv_memory": "65TiB"}, {"kv_memory": 2**62 - 1}, {"kv_pages": 2**31 - 1}]
)
def test_a_pool_too_large_is_refused_under_the_name_it_was_given(monkeypatch, given):
    field, value = next(iter(given.items()))
    with pytest.raises(ValueError) as caught:
        fake_llm(monkeypatch, **{"kv_pages": None, **given})
    assert str(caught.value).startswith(f"{field} must be smaller, not {value!r}: ")
    assert re.search(r"outside \[1, \d+\]|exceeds \d+ bytes", str(caught.value))  # the bound


@pytest.mark.parametrize(
    "given, field", [({}, "kv_memory"), ({"kv_memory": "1MiB"}, "kv_memory"), ({"kv_pages": 9}, "kv_pages")]
)
def test_memory_that_the_system_refuses(monkeypatch, given, field):
    def refuse(*_, **__):
        raise PoolExhausted("the system refused memory for 9 pages of 8 bytes")

    monkeypatch.setattr("pagedkv.llm.PagedKVCache", refuse)
    with pytest.raises(PoolExhausted, match=rf"refused memory for 9 pages of 8 bytes; {field} sets a smaller pool"):
        fake_llm(monkeypatch, **{"kv_pages": None, **given})


def test_default_pool_holds_every_slot_if_memory_allows(monkeypatch):
    with fake_llm(monkeypatch, kv_pages=None, max_num_seqs=3) as llm:
        assert llm.kv.n_pages == 3 * 13
        page_bytes = llm.kv.page_bytes
    monkeypatch.setattr("pagedkv.llm.available_memory", lambda: 4 * 10 * page_bytes)
    with fake_llm(monkeypatch, kv_pages=None, max_num_seqs=3) as llm:
        assert llm.kv.n_pages == 10


def test_a_failed_start_closes_the_model(monkeypatch):
    closed = []
    model = paged_model(context_length=200)
    model.close = lambda: closed.append(True)
    monkeypatch.setattr("pagedkv.llm.load_model", lambda *args, **kwargs: model)
    with pytest.raises(ValueError):
        LLM("fake", max_model_len=1000)
    assert closed == [True]


def test_whatever_is_asked_of_a_closed_engine_says_so(monkeypatch):
    with fake_llm(monkeypatch) as llm:
        engine = llm.engine
    asked = (
        lambda: llm.generate([[1]]), lambda: llm.stream([1]), lambda: llm.logits([1]), llm.check, engine.stats,
        lambda: engine.add_request([1]), lambda: engine.prepare([1]), lambda: embed(engine, [1]),
        lambda: engine.between_steps(print), lambda: arena_map(engine),
    )  # fmt: skip
    for one in asked:
        with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
            one()


# generate


def test_outputs_come_in_input_order(llm):
    prompts = ["abc", [4, 5], {"prompt_token_ids": [9, 9, 9]}, np.array([7, 1])]
    params = [greedy(n) for n in (9, 2, 5, 3)]
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5, 3]
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], [4, 5], [9, 9, 9], [7, 1]]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompt", ["abc", [1, 2, 3], (1, 2, 3), {"prompt_token_ids": [1, 2, 3]}, np.array([1, 2, 3])])
def test_one_prompt_of_any_form(llm, prompt):
    (output,) = llm.generate(prompt, greedy())
    assert output.prompt_token_ids == [1, 2, 3]


def test_no_prompts(llm):
    assert llm.generate([]) == []


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_prompts_of_no_form(llm, prompts):
    with pytest.raises(ValueError, match="prompts must be"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [[greedy()], [greedy()] * 3, "x", [greedy(), 5]])
def test_params_must_match_the_prompts(llm, params):
    with pytest.raises(ValueError, match="params must be"):
        llm.generate(["a", "b"], params)
    assert not llm.engine.has_unfinished()


def test_one_bad_prompt_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="longer than the context of 200"):
        llm.generate(["abc", [1] * 201])
    assert llm.generate("abc", greedy())[0].finished
    stats = llm.engine.stats()
    assert stats["pages_in_use"] == stats["running"] == stats["waiting"] == 0 and llm.check() == []


def test_progress_bar(llm, capsys):
    llm.generate(["abc", "b"], greedy(), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, greedy())
    assert output.prompt == "user. hi." and output.prompt_token_ids == llm.tokenizer.encode("user. hi.")
    assert [o.prompt for o in llm.chat([messages, messages], greedy())] == ["user. hi."] * 2
    for bad in ([], "hi", None):
        with pytest.raises(ValueError, match="messages"):
            llm.chat(bad)


# stream


def test_stream_grows_to_what_generate_gives(llm):
    texts = [output.outputs[0].text for output in llm.stream("abc", greedy())]
    assert len(texts) == 8 and all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert texts[-1] == llm.generate("abc", greedy())[0].outputs[0].text


def test_closing_a_stream_aborts_the_request(llm):
    stream = llm.stream("abc", greedy(100))
    next(stream)
    assert llm.engine.stats()["running"] == 1
    stream.close()
    stream.close()
    stats = llm.engine.stats()
    assert (stats["running"], stats["pages_in_use"]) == (0, 0) and not llm.engine.has_unfinished()
    assert list(stream) == []


def test_dropping_a_stream_that_was_never_read_aborts_it(llm):
    llm.stream("abc", greedy(100))
    gc.collect()
    assert not llm.engine.has_unfinished()


def test_an_interrupted_stream_aborts_it(llm):
    llm.engine.model.forward.interrupt_at = None
    stream = llm.stream("abc", greedy(100))
    next(stream)
    run = llm.model.forward.run

    def interrupted(*args):
        raise KeyboardInterrupt

    llm.model.forward.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    llm.model.forward.run = run
    assert not llm.engine.has_unfinished() and llm.engine.stats()["pages_in_use"] == 0
    assert llm.generate("abc", greedy())[0].finished


def test_stream_refuses_at_once(llm):
    with pytest.raises(ValueError, match="at least 1 token"):
        llm.stream("")


def test_streams_and_generate_interleave(llm):
    expected = [output.outputs[0].text for output in llm.generate(["abc", "xyz"], greedy())]
    a, b = llm.stream("abc", greedy()), llm.stream("xyz", greedy())
    next(a)
    llm.generate("hello", greedy(3))
    next(b)
    name = llm.engine.add_request("abc", greedy())
    assert [list(a)[-1].outputs[0].text, list(b)[-1].outputs[0].text] == expected
    outputs = []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
    assert outputs[-1].request_id == name and outputs[-1].outputs[0].text == expected[0]


def test_threads_share_one_llm(llm):
    prompts = ["abc", "hello world", "x", "z y x"]
    expected = [output.outputs for output in llm.generate(prompts, greedy(20))]
    found = {}

    def work(i):
        found[i] = llm.generate(prompts[i], greedy(20))[0].outputs

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == expected


def test_close_is_idempotent(monkeypatch):
    with fake_llm(monkeypatch) as llm:
        llm.engine.add_request("abc")
        llm.engine.step()
    llm.close()


# The real model


@pytest.fixture(scope="module")
def real(smollm2_path):
    with LLM(smollm2_path, kv_pages=100, max_model_len=512) as llm:
        yield llm


def test_paris(real):
    output = real.generate("The capital of France is", greedy())[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].text == real.tokenizer.decode(output.outputs[0].token_ids)


def test_chat_ends_by_itself(real):
    messages = [{"role": "user", "content": "Say hello."}]
    done = real.chat(messages, SamplingParams(temperature=0, max_tokens=200))[0].outputs[0]
    assert done.finish_reason == "stop" and done.stop_reason in real.model.config.stop_token_ids
    assert "<|im_end|>" not in done.text and done.token_ids[-1] == done.stop_reason


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_logits_have_one_value_whatever_the_chunk(real, chunk):
    ids = real.tokenizer.encode("The quick brown fox jumps over the lazy dog, and then it sleeps.")
    whole = real.logits(ids)
    assert whole.shape == (len(ids), 49152) and whole.dtype == np.float32
    assert (real.logits(ids, chunk=chunk).view(np.int32) == whole.view(np.int32)).all()


def test_logits_agree_with_generate(real):
    ids = real.tokenizer.encode("One, two, three,")
    logits = real.logits(ids)
    done = real.generate({"prompt_token_ids": ids}, greedy(1, logprobs=0, prompt_logprobs=0))[0]
    assert done.outputs[0].token_ids == [int(logits[-1].argmax())]
    x = logits.astype(np.float64)
    logprobs = x - x.max(1, keepdims=True) - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
    assert abs(done.outputs[0].cumulative_logprob - logprobs[-1].max()) < 3e-6
    for i in range(1, len(ids)):
        assert abs(done.prompt_logprobs[i][ids[i]] - logprobs[i - 1, ids[i]]) < 3e-6


def test_logprob_bits_survive_float32(real):
    done = real.generate("Hello", SamplingParams(seed=2, max_tokens=5, logprobs=1))[0].outputs[0]
    for entry in done.logprobs:
        for value in entry.values():
            assert struct.unpack("f", struct.pack("f", value))[0] == value


def test_check_and_stats_after_work(real):
    real.generate(["a", "b c d"], SamplingParams(n=3, seed=1, max_tokens=30, temperature=1.2))
    assert real.check() == []
    stats = real.engine.stats()
    assert stats["pages_in_use"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] == 100


def test_missing_model_is_one_line(tmp_path):
    with pytest.raises((ModelError, ValueError)) as caught:
        LLM(tmp_path / "none.gguf")
    assert "\n" not in str(caught.value)


# The package


def test_exports_resolve():
    for name in pagedkv.__all__:
        assert getattr(pagedkv, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pagedkv.no_such_name


def test_import_is_light_and_starts_no_thread():
    code = (
        "import sys, threading, os, pagedkv; heavy = [m for m in sys.modules if m.startswith('pagedkv.') or m in"
        " ('numpy', 'tokenizers', 'jinja2')]; assert not heavy, heavy; import pagedkv.llm;"
        " assert len(os.listdir('/proc/self/task')) == 1"
    )
    env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=env)
