"""On the real model, a request's tokens and logprob bits are those of its solo run, whatever goes on around it.

12 prompts of 1 to 600 tokens, temperature 0.8, seeds 0 to 11, 48 new tokens. One test per dimension, one mixing all.
"""

import os
import random

import numpy as np
import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.core import _kernels

LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 255, 256, 257, 600]
N_NEW = 48
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
ISAS = [name for name in _kernels.isa_names() if name != "scalar"]


def prompts():
    rng = np.random.default_rng(20)
    return [rng.integers(20, 49000, n).tolist() for n in LENGTHS]


def params(seed, n_new=N_NEW):
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=n_new, ignore_eos=True, logprobs=0)


def bits(output):
    """Token ids and the bits of their logprobs."""
    done = output.outputs[0]
    values = [entry[token] for entry, token in zip(done.logprobs, done.token_ids, strict=True)]
    assert done.finish_reason == "length"
    return done.token_ids, np.array(values, np.float32).tobytes()


@pytest.fixture(scope="module")
def open_llm(smollm2_path):
    """LLM(...) on the model, closed after the module; pool and threads small enough to be quick."""
    opened = []

    def make(**settings):
        llm = LLM(smollm2_path, **{"kv_pages": 200, "max_model_len": 1024, "threads": 2, **settings})
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture(scope="module")
def solo(open_llm):
    """Each request alone on an engine without a prefix cache."""
    llm = open_llm(enable_prefix_caching=False)
    return [bits(llm.generate(prompt, params(i))[0]) for i, prompt in enumerate(prompts())]


def together(llm):
    return [bits(output) for output in llm.generate(prompts(), [params(i) for i in range(len(LENGTHS))])]


def staggered(llm, gaps):
    """Request i is added gaps[i] steps after the one before it."""
    names, done = {}, {}
    for i, (prompt, gap) in enumerate(zip(prompts(), gaps, strict=True)):
        for _ in range(gap):
            done |= {output.request_id: output for output in llm.engine.step() if output.finished}
        names[llm.engine.add_request(prompt, params(i))] = i
    while llm.engine.has_unfinished():
        done |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return [bits(done[name]) for name in names]


def test_solo_runs_differ(solo):
    assert len({tuple(tokens) for tokens, _ in solo}) == len(LENGTHS)
    assert all(len(tokens) == N_NEW for tokens, _ in solo)


def test_one_batch(open_llm, solo):
    assert together(open_llm()) == solo


def test_staggered_admission(open_llm, solo):
    assert staggered(open_llm(), [0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]) == solo


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 512])
def test_prefill_chunks(open_llm, solo, chunk):
    assert together(open_llm(max_num_batched_tokens=chunk)) == solo


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(open_llm, solo, threads):
    assert together(open_llm(threads=threads)) == solo


@pytest.fixture
def use_isa():
    """Switch the kernels for one test."""
    before = _kernels.isa()
    yield _kernels._use_isa
    _kernels._use_isa(before)


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa(open_llm, solo, use_isa, isa):
    llm = open_llm()
    use_isa(isa)
    assert llm.engine.stats()["isa"] == isa
    assert together(llm) == solo


def test_scalar_on_a_shorter_set(open_llm, solo, use_isa):
    llm, n_new = open_llm(), 3
    use_isa("scalar")
    outputs = llm.generate(prompts()[:4], [params(i, n_new) for i in range(4)])
    for output, (tokens, logprobs) in zip(outputs, solo, strict=False):
        assert bits(output) == (tokens[:n_new], logprobs[: 4 * n_new])


def test_pool_so_small_that_requests_wait(open_llm, solo):
    llm = open_llm(kv_pages=42)
    assert together(llm) == solo
    assert staggered(llm, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]) == solo
    assert llm.engine.stats()["preemptions"] > 0
    assert llm.check() == []


@pytest.mark.parametrize("slots", [1, 3])
def test_slots(open_llm, solo, slots):
    assert together(open_llm(max_num_seqs=slots)) == solo


@pytest.mark.parametrize("page_tokens", [32, 256])
def test_page_size(open_llm, solo, page_tokens):
    assert together(open_llm(page_tokens=page_tokens, kv_pages=3200 // page_tokens)) == solo


def test_cached_prefixes(open_llm, solo):
    llm = open_llm()
    assert together(llm) == solo
    assert together(llm) == solo
    stats = llm.engine.stats()
    assert stats["prefix_hit_tokens"] == sum(n // 16 * 16 if n % 16 else n - 1 for n in LENGTHS)
    assert any(n % 16 == 0 for n in LENGTHS)
    assert llm.check() == []


@pytest.mark.parametrize("pages", [200, 42])
def test_guesses(open_llm, solo, pages):
    """Whatever can be guessed is computed, nearly all of it wrong."""
    llm = open_llm(speculative_config=NGRAM, kv_pages=pages)
    llm.engine.scheduler.speculation.margin = 0
    assert together(llm) == solo
    assert llm.engine.stats()["spec_draft_tokens"] > 100
    assert llm.check() == []


def test_all_at_once(open_llm, solo, use_isa):
    """Everything mixed from one seed; PAGEDKV_MIX_SEED replays it."""
    seed = int(os.environ.get("PAGEDKV_MIX_SEED", random.SystemRandom().randrange(2**32)))
    rng = random.Random(seed)
    settings = {
        "page_tokens": rng.choice([16, 32, 64]),
        "max_num_batched_tokens": rng.choice([5, 16, 33, 100, 512]),
        "max_num_seqs": rng.choice([2, 5, 64]),
        "threads": rng.choice([1, 2, 3]),
        "enable_prefix_caching": rng.random() < 0.7,
        "speculative_config": rng.choice([None, NGRAM]),
    }
    settings["kv_pages"] = -(-rng.choice([656, 900, 3200]) // settings["page_tokens"])
    isa, gaps = rng.choice(_kernels.isa_names()[:-1] or ["scalar"]), [rng.randint(0, 6) for _ in LENGTHS]
    llm = open_llm(**settings)
    if llm.engine.scheduler.speculation is not None:
        llm.engine.scheduler.speculation.margin = 0
    use_isa(isa)
    names, done, aborted = {}, {}, set()

    def step():
        done.update((output.request_id, output) for output in llm.engine.step() if output.finished)
        assert llm.check() == []

    order = rng.sample(range(len(LENGTHS)), len(LENGTHS))
    for i, gap in zip(order, gaps, strict=True):
        names[llm.engine.add_request(prompts()[i], params(i), priority=rng.choice([0, 0, 1]))] = i
        if rng.random() < 0.4:  # a neighbour that leaves before its time
            aborted.add(llm.engine.add_request(prompts()[i] + [99], params(i), priority=rng.choice([0, 1])))
        for _ in range(gap):
            step()
        if aborted and rng.random() < 0.5:
            llm.engine.abort(aborted.pop())
    while llm.engine.has_unfinished():
        step()
    told = f"PAGEDKV_MIX_SEED={seed} {settings} isa={isa} gaps={gaps}"
    for name, i in names.items():
        assert bits(done[name]) == solo[i], f"prompt {i}: {told}"
    assert llm.engine.stats()["pages_in_use"] == 0
