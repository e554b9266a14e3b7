"""Random traffic over a tiny pool: every output equals its solo run and no page is ever lost or written twice.

A failure prints the seed; `PAGEDKV_SIM_SEED=<seed>` replays it and `PAGEDKV_SIM_RUNS=<n>` runs more.
"""

import os
import random
from collections import Counter

import numpy as np
import pytest
from fakes import FakeKV, fake_model, paged_model
from reference import expected_output

from pagedkv.core.kvcache import PagedKVCache
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams

RUNS = int(os.environ.get("PAGEDKV_SIM_RUNS", "120"))
SEEDS = [int(os.environ["PAGEDKV_SIM_SEED"])] if "PAGEDKV_SIM_SEED" in os.environ else list(range(RUNS))

SPECULATION = [
    {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1},
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "ngram", "num_speculative_tokens": 20, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
]


def random_params(rng, longest):
    maybe = lambda chance, value, default: value if rng.random() < chance else default  # noqa: E731
    max_tokens = rng.randint(1, longest)
    return SamplingParams(
        n=maybe(0.3, rng.randint(2, 4), 1),
        max_tokens=max_tokens,
        min_tokens=maybe(0.3, rng.randint(0, max_tokens), 0),
        temperature=rng.choice([0, 0.7, 1.0, 2.0]),
        top_k=maybe(0.3, rng.randint(1, 70), 0),
        top_p=maybe(0.3, 0.8, 1.0),
        min_p=maybe(0.2, 0.05, 0.0),
        seed=rng.randint(0, 2**64 - 1),
        stop=maybe(0.4, rng.sample(["a", "ab", "bc", "q1", "é", "xyz", "b q"], rng.randint(1, 3)), None),
        stop_token_ids=maybe(0.3, [rng.randint(0, 60)], None),
        ignore_eos=rng.random() < 0.3,
        logprobs=maybe(0.5, rng.randint(0, 3), None),
        prompt_logprobs=maybe(0.2, rng.randint(0, 2), None),
        presence_penalty=maybe(0.2, 0.5, 0.0),
        frequency_penalty=maybe(0.2, 0.3, 0.0),
        repetition_penalty=maybe(0.2, 1.3, 1.0),
        logit_bias=maybe(0.2, {rng.randint(0, 60): 3.0}, None),
        skip_special_tokens=rng.random() < 0.7,
        typical_p=maybe(0.2, 0.7, 1.0),
        allowed_token_ids=maybe(0.2, range(0, 61, rng.randint(1, 3)), None),
        logits_mask=maybe(0.3, Rhythm(rng.randint(2, 7)), None),
    )


class Rhythm:
    """Allows tokens by their remainder, and which one hangs on every token drawn before."""

    def __init__(self, period):
        self.period = period

    def allowed(self, token_ids):
        turn = (sum(token_ids) + len(token_ids)) % self.period
        words = [0, 0]
        for token in range(61):
            if token % self.period != turn or token < 4:
                words[token // 32] |= 1 << token % 32
        return np.array(words, np.uint32)


class Traffic:
    """One run: its engine, what was asked and what came out so far. real: over a PagedKVCache, maybe with its prefix
    cache; otherwise over a fake one with small odd pages."""

    def __init__(self, seed, real):
        self.rng = rng = random.Random(seed)
        self.real = real
        self.page_tokens = 16 if real else rng.choice([1, 3, 4, 16])
        self.context = rng.choice([100, 160]) if real else rng.choice([40, 64])
        enough = -(-self.context // self.page_tokens)
        n_pages = rng.choice([enough, enough + 1, 2 * enough, 5 * enough])
        if real:
            self.kv = PagedKVCache(1, 1, 16, n_pages=n_pages, format="f32", page_tokens=16, threads=1)
        else:
            self.kv = FakeKV(n_pages, self.page_tokens)
        self.model = (paged_model if real else fake_model)(context_length=self.context)
        self.budget = rng.choice([1, 2, 5, 16, 512])
        self.max_num_seqs = rng.choice([1, 2, 5, 64])
        self.engine = LLMEngine(
            self.model,
            self.kv,
            max_model_len=self.context,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=real and rng.random() < 0.8,
            speculative_config=rng.choice([None, *SPECULATION]),
        )
        self.model.forward.echo = rng.choice([0, 8, 12])
        if self.engine.scheduler.speculation is not None:  # margin 0: whatever can be guessed is computed
            self.engine.scheduler.speculation.margin = rng.choice([0, 1.2])
        self.common = [[rng.randint(1, 60) for _ in range(self.context)] for _ in range(2)]
        self.asked, self.seen, self.done, self.aborted = {}, {}, {}, set()

    def submit(self):
        rng = self.rng
        shared = rng.choice([0, 15, 16, 17, 32, 48, 60]) if self.real else rng.randint(0, 12)
        prompt = rng.choice(self.common)[:shared] + [rng.randint(1, 60) for _ in range(rng.randint(0, 14))] or [1]
        if rng.random() < 0.15:
            request = self.engine.prepare_embedding(prompt, priority=rng.choice([0, 0, 1, -1]), sink=self.embedded)
            self.asked[self.engine.enqueue(request)] = (prompt, None)
            return
        params = random_params(rng, 70 if self.real else 20)
        request_id = self.engine.add_request(
            {"prompt_token_ids": prompt, "cache_salt": rng.choice(["", "", "tenant"])},
            params,
            priority=rng.choice([0, 0, 0, 1, -1]),
        )
        self.asked[request_id] = (prompt, params)

    def embedded(self, output):
        assert output.finished and output.request_id not in self.done, "an output after the last one"
        self.done[output.request_id] = output

    def abort(self):
        request_id = self.rng.choice([*self.asked, "unknown"])
        alive = request_id in self.asked and request_id not in self.done and request_id not in self.aborted
        assert self.engine.abort(request_id) is alive
        if alive and self.asked[request_id][1] is None:
            assert self.done[request_id].outputs.finish_reason == "abort"
        if alive:
            self.aborted.add(request_id)
            assert self.engine.abort(request_id) is False

    def step(self):
        n_before = len(self.model.forward.steps)
        for output in self.engine.step():
            assert output.request_id not in self.done, "an output after the last one"
            before = self.seen.get(output.request_id)
            if before is not None:
                for old, new in zip(before.outputs, output.outputs, strict=True):
                    assert new.token_ids[: len(old.token_ids)] == old.token_ids
                    assert new.text.startswith(old.text)
                    assert old.finish_reason is None or new == old
            self.seen[output.request_id] = output
            if output.finished:
                self.done[output.request_id] = output
        for q_lens in self.model.forward.steps[n_before:]:
            assert sum(q_lens) <= self.budget and len(q_lens) <= self.max_num_seqs
            assert self.engine.scheduler._budget == self.budget - sum(q_lens)  # preemption returns what it took
        self.check_conservation()

    def check_conservation(self):
        scheduler = self.engine.scheduler
        assert self.kv.check() == []
        stats = self.engine.stats()
        assert stats["pages_free"] + stats["pages_cached"] + stats["pages_in_use"] == self.kv.n_pages
        assert len(scheduler.running) <= self.max_num_seqs
        if self.real:
            tables = [branch.seq.page_table for branch in scheduler.running]
            held = Counter(page for table in tables for page in table)
            assert [self.kv.refcount(page) for page in range(self.kv.n_pages)] == [
                held[page] for page in range(self.kv.n_pages)
            ]
        else:
            assert {branch.seq for branch in scheduler.running} == self.kv.live
        assert all(branch.seq is None for branch in scheduler.waiting)
        for branch in scheduler.running:  # what was guessed wrong is gone
            assert len(branch.seq) < len(branch.tokens) + (branch in self.engine.drawing._late)
            assert len(branch.seq.page_table) == -(-len(branch.seq) // self.page_tokens)
        for queue in (scheduler.running, scheduler.waiting):
            assert [b.key for b in queue] == sorted(b.key for b in queue)
        for branch in scheduler.running:
            assert branch.finish_reason is None and branch.n_pending >= (branch not in self.engine.drawing._late)

    def check_outputs(self):
        assert set(self.done) == set(self.asked)
        assert self.kv.n_in_use == 0 and not self.engine.has_unfinished()
        for request_id, (prompt, params) in self.asked.items():
            output = self.done[request_id]
            assert output.prompt_token_ids == prompt
            if params is None:
                self.check_embedding(output, prompt)
                continue
            assert len(output.outputs) == params.n
            for got in output.outputs:
                expected = expected_output(self.model, prompt, params, got.index, self.context)
                if request_id in self.aborted:
                    assert got.finish_reason == "abort" or got.token_ids == expected.token_ids
                    assert got.token_ids == expected.token_ids[: len(got.token_ids)]
                    continue
                assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
                assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
                assert got.cumulative_logprob == sum(expected.logprobs)
                if params.logprobs is not None:
                    values = [entry[token] for entry, token in zip(got.logprobs, got.token_ids, strict=True)]
                    assert values == expected.logprobs
                    assert all(params.logprobs <= len(entry) <= params.logprobs + 1 for entry in got.logprobs)
            if params.prompt_logprobs is not None and request_id not in self.aborted:
                assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None

    def check_embedding(self, output, prompt):
        if output.request_id in self.aborted:
            assert output.outputs.finish_reason == "abort" and output.outputs.embedding is None
        else:
            assert output.outputs.embedding.tobytes() == self.model.forward.solo_embedding(prompt).tobytes()


@pytest.mark.parametrize("real", [False, True], ids=["fake", "paged"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_traffic(seed, real):
    traffic = Traffic(seed, real)
    to_come = traffic.rng.randint(3, 14)
    for _ in range(5000):
        while to_come and traffic.rng.random() < 0.4:
            traffic.submit()
            to_come -= 1
        if traffic.asked and traffic.rng.random() < 0.04:
            traffic.abort()
            traffic.check_conservation()
        if not to_come and not traffic.engine.has_unfinished():
            break
        traffic.step()
    traffic.check_outputs()


@pytest.mark.parametrize("real", [False, True], ids=["fake", "paged"])
def test_the_runs_reach_what_they_are_for(real):
    """Pools are small enough to preempt and evict, forks share, prefixes are found, guesses come true and fail."""
    preemptions, shared, hits, evicted, drafted, accepted = 0, False, 0, 0, 0, 0
    for seed in range(25):
        traffic = Traffic(seed, real)
        for _ in range(10):
            traffic.submit()
        while traffic.engine.has_unfinished():
            traffic.step()
            shared |= any(traffic.kv.refcount(page) > 1 for page in range(traffic.kv.n_pages))
        stats = traffic.engine.stats()
        preemptions += stats["preemptions"]
        hits += stats["prefix_hit_tokens"]
        drafted += stats["spec_draft_tokens"]
        accepted += stats["spec_accepted_tokens"]
        evicted += traffic.kv.stats()["num_evicted"] if real else 0
    assert preemptions > 10 and shared
    assert accepted > 50 and drafted - accepted > 50
    assert not real or (hits > 1000 and evicted > 20)
