"""The parity oracle: random traffic on a real model equals, bit for bit, each request's solo run; no page is ever lost.

Requests are drawn from a set whose solo runs are computed once, so that identical ones and common beginnings meet.
20,000 requests finish by default; PAGEDKV_PARITY_REQUESTS=1000000 runs a million. A failure names its seed:
PAGEDKV_PARITY_SEED=<seed> replays that run alone.
"""

import os
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from small_model import VOCAB, small_model

from pagedkv.core.kvcache import PagedKVCache
from pagedkv.engine.embedding import embed
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams

REQUESTS = int(os.environ.get("PAGEDKV_PARITY_REQUESTS", "20000"))
SEED = os.environ.get("PAGEDKV_PARITY_SEED")
PARTS = 8  # tests
GROUP = 25  # runs that share a model and a set of requests
P, CONTEXT = 16, 128
BORDERS = [1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1, 3 * P, 3 * P + 5, 5 * P]
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}


class Alternating:
    """A hook that allows even and odd ids in turns."""

    def allowed(self, token_ids):
        return np.full(-(-VOCAB // 32), 0x55555555 << len(token_ids) % 2, np.uint32)


def random_params(rng):
    maybe = lambda chance, value, default: value if rng.random() < chance else default  # noqa: E731
    max_tokens = rng.choice([1, 2, 5, 12, 20, 40])
    return SamplingParams(
        n=maybe(0.2, rng.randint(2, 4), 1),
        max_tokens=max_tokens,
        min_tokens=maybe(0.3, rng.randint(0, max_tokens), 0),
        temperature=rng.choice([0, 0, 0.7, 1.0]),
        top_k=maybe(0.3, rng.randint(1, 70), 0),
        top_p=maybe(0.3, 0.8, 1.0),
        min_p=maybe(0.2, 0.05, 0.0),
        typical_p=maybe(0.1, 0.7, 1.0),
        seed=rng.randint(0, 2**64 - 1),
        stop=maybe(0.2, rng.sample(["a", "ab", "bc", "q1", "é", "xyz", "b q"], rng.randint(1, 3)), None),
        stop_token_ids=maybe(0.2, [rng.randint(0, 60)], None),
        ignore_eos=rng.random() < 0.6,
        logprobs=maybe(0.4, rng.randint(0, 3), None),
        prompt_logprobs=maybe(0.1, rng.randint(0, 2), None),
        presence_penalty=maybe(0.2, 0.5, 0.0),
        frequency_penalty=maybe(0.2, 0.3, 0.0),
        repetition_penalty=maybe(0.2, 1.3, 1.0),
        logit_bias=maybe(0.2, {rng.randint(0, 60): 3.0}, None),
        allowed_token_ids=maybe(0.1, rng.sample(range(VOCAB), 20), None),
        logits_mask=maybe(0.03, Alternating(), None),
    )


class Group:
    """A model, and requests with their solo runs: outputs, and K and V of all tokens, as a cache of one gives them."""

    def __init__(self, number):
        rng = random.Random(f"group {number}")
        self.format = rng.choice(["f32", "f16", "int8"])
        self.model = small_model(CONTEXT, echo=rng.choice([0.0, 1.0, 2.0]), seed=number)
        common = [[rng.randint(1, 60) for _ in range(CONTEXT)] for _ in range(3)]
        self.specs = []
        for _ in range(120):
            n = rng.choice(BORDERS)
            prompt = rng.choice(common)[:n] + [rng.randint(1, 60) for _ in range(rng.choice([0, 0, 1, 7]))]
            self.specs.append(self.solo(prompt, random_params(rng)))
        self.vectors = [self.solo_vector(spec.prompt) for spec in self.specs[::4]]

    def cache(self, n_pages):
        return PagedKVCache(
            1, 1, 16, n_pages=n_pages, format=self.format, page_tokens=P, threads=self.model.forward.pool
        )

    def solo(self, prompt, params):
        kv = self.cache(CONTEXT // P)
        engine = LLMEngine(self.model, kv, max_model_len=CONTEXT, enable_prefix_caching=False)
        engine.add_request(prompt, params)
        while engine.has_unfinished():
            for output in engine.step():
                last = output
        assert kv.n_in_use == 0
        tokens = [prompt + each.token_ids for each in last.outputs]
        return SimpleNamespace(
            prompt=prompt, params=params, output=last, tokens=tokens, kv=[self.bits(t) for t in tokens]
        )

    def solo_vector(self, prompt):
        kv = self.cache(CONTEXT // P)
        engine = LLMEngine(self.model, kv, max_model_len=CONTEXT, enable_prefix_caching=False)
        vector = embed(engine, prompt)
        assert kv.n_in_use == 0
        return SimpleNamespace(prompt=prompt, vector=vector, tokens=[], kv=[self.bits(prompt)])

    def bits(self, tokens):
        """K and V of tokens, computed in one go."""
        kv = self.cache(-(-len(tokens) // P))
        seq = kv.sequence()
        seq.extend(len(tokens))
        logits = np.empty((0, self.model.forward.vocab_padded), np.float32)
        none = np.array([], np.int32)
        self.model.forward.run(kv, [seq], np.array(tokens, np.int32), np.array([len(tokens)], np.int32), none, logits)
        return seq.gather(0)


class Run:
    """One engine over a tiny pool, what was asked of it and what came out."""

    def __init__(self, seed, group):
        self.rng = rng = random.Random(seed)
        self.group = group
        self.kv = group.cache(rng.choice([8, 9, 11, 14, 20, 60]))
        self.budget = rng.choice([1, 2, 7, 16, 17, 64, 512])
        self.max_num_seqs = rng.choice([1, 2, 5, 64])
        self.engine = LLMEngine(
            group.model,
            self.kv,
            max_model_len=CONTEXT,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=rng.random() < 0.7,
            speculative_config=rng.choice([None, NGRAM]),
        )
        self.engine.scheduler.paced = rng.random() < 0.7
        schedule, self.engine.scheduler.schedule = self.engine.scheduler.schedule, lambda: self.check_plan(schedule())
        if self.engine.scheduler.speculation is not None:
            self.engine.scheduler.speculation.margin = rng.choice([0, 1.2])
        self.busy = rng.choice([0.1, 0.5, 0.9])  # chance that another request arrives before the next step
        self.asked, self.done, self.aborted, self.n_tokens = {}, {}, set(), {}

    def submit(self):
        rng = self.rng
        if rng.random() < 0.1:
            spec = rng.choice(self.group.vectors)
            request = self.engine.prepare_embedding(
                spec.prompt, priority=rng.choice([0, 0, 0, 1, -1]), sink=self.embedded
            )
            self.asked[self.engine.enqueue(request)] = spec, ""
            return
        spec = rng.choice(self.group.specs)
        salt = rng.choice(["", "", "", "tenant"])
        request_id = self.engine.add_request(
            {"prompt_token_ids": spec.prompt, "cache_salt": salt}, spec.params, priority=rng.choice([0, 0, 0, 1, -1])
        )
        self.asked[request_id] = spec, salt

    def embedded(self, output):
        assert output.finished and output.request_id not in self.done, "an output after the last one"
        self.done[output.request_id] = output
        if output.request_id in self.aborted:
            assert output.outputs.finish_reason == "abort" and output.outputs.embedding is None
        else:
            assert output.outputs.embedding.tobytes() == self.asked[output.request_id][0].vector.tobytes()

    def abort(self):
        request_id = self.rng.choice(list(self.asked))
        alive = request_id not in self.done and request_id not in self.aborted
        if alive:
            self.aborted.add(request_id)
        assert self.engine.abort(request_id) is alive

    def step(self):
        for output in self.engine.step():
            name, spec = output.request_id, self.asked[output.request_id][0]
            assert name not in self.done, "an output after the last one"
            for got, solo in zip(output.outputs, spec.output.outputs, strict=True):
                assert got.token_ids == solo.token_ids[: len(got.token_ids)]
                self.check_text(got, solo)
                assert len(got.token_ids) >= self.n_tokens.get((name, got.index), 0)
                self.n_tokens[name, got.index] = len(got.token_ids)
            if output.finished:
                self.done[name] = output
                self.check_output(output, spec)
        self.check_pages()

    def check_plan(self, chunks):
        """Every page table ends with the rows its branch computes."""
        for chunk in chunks:
            assert len(chunk.branch.seq) == chunk.start + chunk.n_rows
        return chunks

    def check_text(self, got, solo):
        """A beginning of the solo text. An abort also hands out what a character or stop string held back."""
        whole = solo.text
        if got.finish_reason == "abort" and isinstance(solo.stop_reason, str):
            whole += solo.stop_reason
        assert whole.startswith(got.text.removesuffix("\ufffd") if got.finish_reason == "abort" else got.text)

    def check_output(self, output, spec):
        if output.request_id in self.aborted:
            for got, solo in zip(output.outputs, spec.output.outputs, strict=True):
                assert got.finish_reason == "abort" or got == solo
        else:
            assert output.outputs == spec.output.outputs
            assert output.prompt_logprobs == spec.output.prompt_logprobs

    def check_pages(self):
        """Every page is in one state, counted once for each table that holds it, and nothing else is."""
        kv, scheduler = self.kv, self.engine.scheduler
        assert kv.check() == []
        assert kv.n_free + kv.n_cached + kv.n_in_use == kv.n_pages
        assert len(scheduler.running) <= self.max_num_seqs
        held = Counter(page for branch in scheduler.running for page in branch.seq.page_table)
        assert [kv.refcount(page) for page in range(kv.n_pages)] == [held[page] for page in range(kv.n_pages)]
        assert kv.n_in_use == len(held)
        assert all(branch.seq is None for branch in scheduler.waiting)
        for branch in scheduler.running:
            # what was guessed wrong is gone too; a branch that waits for its mask has nothing to compute
            assert len(branch.seq) < len(branch.tokens) + (branch in self.engine.drawing._late)
            assert len(branch.seq.page_table) == -(-len(branch.seq) // P)
        if scheduler.running:
            branch = self.rng.choice(scheduler.running)
            spec = self.asked[branch.request.request_id][0]
            self.same_bits(branch.seq, spec.kv[branch.index])
        if scheduler.prefix is not None and self.rng.random() < 0.02:
            self.check_index()

    def same_bits(self, seq, expected):
        for got, solo in zip(seq.gather(0), expected, strict=True):
            assert got.tobytes() == solo[: len(seq)].tobytes()

    def check_index(self):
        """The index is a bijection: each beginning that is found has a page of its own with the bits of its tokens, and
        there is no other page in it."""
        prefix = self.engine.scheduler.prefix
        found = {}
        for spec, salt in {(id(spec), salt): (spec, salt) for spec, salt in self.asked.values()}.values():
            for index, tokens in enumerate(spec.tokens):
                ids = np.array(tokens, np.int32)
                branch = SimpleNamespace(tokens=ids, request=SimpleNamespace(salt=salt))
                seq = self.kv.sequence()
                n_pages = prefix._index.match(seq, prefix._keys(branch, len(tokens)))
                self.same_bits(seq, spec.kv[index])
                for i, page in enumerate(seq.page_table):
                    assert found.setdefault((salt, *tokens[: (i + 1) * P]), page) == page
                assert len(seq.page_table) == n_pages
                seq.free()
        assert len(set(found.values())) == len(found) == prefix._index.n_pages

    def finish(self):
        """Drive it to its end, with n more requests to come."""
        to_come = self.rng.randint(20, 60)
        for _ in range(20000):
            while to_come and self.rng.random() < self.busy:
                self.submit()
                to_come -= 1
            if self.asked and self.rng.random() < 0.02:
                self.abort()
            if not to_come and not self.engine.has_unfinished():
                break
            self.step()
        assert set(self.done) == set(self.asked) and self.kv.n_in_use == 0
        if self.engine.scheduler.prefix is not None:
            self.check_index()
        return len(self.done) - len(self.aborted)


def group_of(seed):
    return seed // (GROUP * PARTS) * PARTS + seed % PARTS


@pytest.mark.parametrize("part", [int(SEED) % PARTS] if SEED else range(PARTS))
def test_random_traffic_equals_solo_runs(part):
    seeds = [int(SEED)] if SEED else range(part, 10**9, PARTS)
    n_done, totals, groups = 0, Counter(), {}
    for seed in seeds:
        number = group_of(seed)
        if number not in groups:
            groups = {number: Group(number)}
        run = Run(seed, groups[number])
        try:
            n_done += run.finish()
        except BaseException as error:
            error.add_note(f"PAGEDKV_PARITY_SEED={seed}")
            raise
        totals.update({name: value for name, value in run.engine.stats().items() if isinstance(value, int)})
        if n_done >= REQUESTS / PARTS:
            break
    if not SEED and REQUESTS >= 4000:  # the runs reach what they are for
        assert totals["preemptions"] > n_done / 50
        assert totals["prefix_hit_tokens"] > n_done
        assert totals["spec_accepted_tokens"] > n_done / 20
        assert totals["spec_draft_tokens"] - totals["spec_accepted_tokens"] > n_done / 2
