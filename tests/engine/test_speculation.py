"""Prompt lookup: what is guessed, when it is computed, and that outputs are those of plain decoding bit for bit."""

import itertools
import random
from array import array

import numpy as np
import pytest
from fakes import FakeKV, fake_model, paged_model, successor

from pagedkv.core.kvcache import PagedKVCache
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.speculation import CANDIDATES, MARGIN, Lookup, SpeculativeConfig

CONTEXT = 200
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}


def make(real=False, n_pages=60, echo=20.0, config=NGRAM, **settings):
    model = (paged_model if real else fake_model)(context_length=CONTEXT, stop_token_ids=())
    model.forward.echo = echo
    kv = PagedKVCache(1, 1, 16, n_pages=n_pages, format="f32", threads=1) if real else FakeKV(n_pages, 16)
    settings = {"enable_prefix_caching": real, **settings}
    return LLMEngine(model, kv, max_model_len=CONTEXT, speculative_config=config, **settings)


def finish(engine):
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        assert engine.kv.check() == []
    assert engine.kv.n_in_use == 0
    return done


def looked_up(tokens, n, shortest, longest):
    """By brute force: what follows the latest of the longest agreeing runs, as a cycle; (match, guess)."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[end - size : end] == tokens[len(tokens) - size :]:
                cycle = tokens[end:]
                return size, [cycle[i % len(cycle)] for i in range(n)]
    return 0, []


@pytest.mark.parametrize("seed", range(60))
def test_guesses_are_those_of_the_definition(seed):
    rng = random.Random(seed)
    longest = rng.randint(1, 6)
    shortest, n = rng.randint(1, longest), rng.randint(1, 9)
    lookup = Lookup(SpeculativeConfig(n, longest, shortest))
    tokens = array("i", [rng.randint(0, 3) for _ in range(rng.randint(0, 12))])
    while len(tokens) < 14:
        match, expected = looked_up(tokens.tolist(), n, shortest, longest)
        assert lookup.guess(tokens).tolist() == expected
        assert lookup._matched == match
        tokens.extend(rng.randint(0, 3) for _ in range(rng.randint(1, 4)))


def test_only_some_earlier_occurrences_are_looked_at():
    lookup = Lookup(SpeculativeConfig(1, 3, 1))
    tokens = array("i", [8, 9, 7, 1] + [5, 7, 2] * CANDIDATES + [8, 9, 7])
    assert lookup.guess(tokens).tolist() == [2]
    shorter = array("i", [8, 9, 7, 1] + [5, 7, 2] * (CANDIDATES - 1) + [8, 9, 7])
    assert Lookup(SpeculativeConfig(1, 3, 1)).guess(shorter).tolist() == [1]


def test_the_chance_follows_what_came():
    lookup = Lookup(SpeculativeConfig(3, 2, 2))
    tokens = array("i", [1, 2, 3] * 3)
    chances = []
    for _ in range(12):  # right every time
        guess = lookup.guess(tokens)
        chances.append(lookup.chance)
        tokens.append(guess[0])
    assert chances == sorted(chances) and chances[-1] > 0.9
    lookup.guess(tokens)
    before = lookup.chance
    tokens.extend([1 + tokens[-1] % 3, 50, 51, 1, 2])  # one right, one wrong, the third is not counted
    lookup.guess(tokens)
    assert lookup.chance == pytest.approx((before + 0.2 * (1 - before)) * 0.8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ngram", "speculative_config must be None or a mapping"),
        ({}, "speculative_config method must be 'ngram', not None"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "speculative_config method must be 'ngram', not 'eagle'"),
        ({"method": "ngram"}, "num_speculative_tokens must be an integer in .1, 64., not None"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 0}, "prompt_lookup_min must be"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 65}, "prompt_lookup_max must be"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            r"prompt_lookup_max must be an integer in \[3, 64\], not 2",
        ),
        ({"method": "ngram", "num_speculative_tokens": 3, "model": "x"}, "speculative_config key must be one of"),
    ],
)
def test_bad_configurations_name_field_value_and_range(config, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.parse(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4, 2)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 9}, (9, 9)),
        ({"prompt_lookup_max": 7}, (7, 2)),
    ],
)
def test_defaults_of_the_configuration(given, expected):
    config = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3, **given})
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == expected
    assert SpeculativeConfig.parse(None) is None


class NoThree:
    """A mask hook that forbids token 3 in every third place of an output."""

    def allowed(self, token_ids):
        mask = np.full(2, 0xFFFFFFFF, np.uint32)
        mask[0] -= (len(token_ids) % 3 == 0) << 3
        return mask


PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9},
    "truncated": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "stop strings": {"stop": ["ab", "q", "e"], "min_tokens": 20},
    "stop ids": {"stop_token_ids": [4, 9, 14], "min_tokens": 9},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "n": {"n": 4, "temperature": 0.8, "logprobs": 0},
    "masks": {"allowed_token_ids": [1, 2, 3, 4, 5, 6, 7, 20, 30, 31], "logits_mask": NoThree(), "typical_p": 0.9},
    "bias": {"logit_bias": {7: 3.0, 2: -100.0}},
}


@pytest.mark.parametrize("real", [False, True], ids=["fake", "paged"])
@pytest.mark.parametrize(("echo", "margin"), [(0.0, 0.0), (6.0, 0.0), (8.0, 1.2), (20.0, 1.2)])
@pytest.mark.parametrize("kind", PARAMS)
def test_outputs_are_those_of_plain_decoding(kind, echo, margin, real):
    """Whole outputs, logprobs and texts included; nearly no guess right, some, most. Margin 0 computes every guess."""
    results, drafted = [], 0
    for config in (None, NGRAM):
        engine = make(real, n_pages=26, echo=echo, config=config)
        if config is not None:
            engine.scheduler.speculation.margin = margin
        for seed in range(6):
            engine.add_request(
                [1 + seed, *range(1, 1 + 5 * seed)], SamplingParams(seed=seed, max_tokens=60, **PARAMS[kind])
            )
        results.append(finish(engine))
        drafted += engine.stats()["spec_draft_tokens"]
    assert results[0] == results[1]
    assert drafted > 0


def test_a_stop_inside_a_guess_ends_the_output_there():
    """The echo goes 1 2 3 4 5 1 2 ...; the rows behind the stop id are computed and forgotten."""
    engine = make()
    engine.scheduler.speculation.margin = 0
    engine.add_request([1, 2, 3, 4, 5] * 4, SamplingParams(temperature=0, max_tokens=50, stop_token_ids=[4]))
    (output,) = finish(engine).values()
    (got,) = output.outputs
    assert (got.token_ids, got.finish_reason, got.stop_reason) == ([1, 2, 3, 4], "stop", 4)
    assert engine.model.forward.steps == [[20], [1 + 6]]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_no_row_is_spent_behind_the_last_token(max_tokens):
    """With r tokens to come a step computes at most r rows: a right guess of r - 1, and the token that ends it."""
    engine = make()
    engine.scheduler.speculation.margin = 0
    engine.add_request([1, 2, 3, 4, 5] * 4, SamplingParams(temperature=0, max_tokens=max_tokens))
    (output,) = finish(engine).values()
    assert len(output.outputs[0].token_ids) == max_tokens
    assert [step for (step,) in engine.model.forward.steps] == [20, *([max_tokens - 1] if max_tokens > 1 else [])]


def test_a_step_hands_out_all_tokens_it_found():
    engine = make()
    engine.add_request([1, 2, 3, 4, 5] * 4, SamplingParams(temperature=0, max_tokens=40))
    counts = []
    while engine.has_unfinished():
        (output,) = engine.step()
        counts.append(len(output.outputs[0].token_ids))
    assert counts == sorted(set(counts)) and counts[-1] == 40
    assert max(b - a for a, b in itertools.pairwise(counts)) == 7  # the guess of six and one more


def test_nothing_is_computed_for_branches_that_do_not_repeat_themselves():
    engine = make(echo=0.0)
    for seed in range(4):
        engine.add_request([1, 2, 3] * 10, SamplingParams(seed=seed, max_tokens=100))
    finish(engine)
    assert engine.stats()["spec_draft_tokens"] < 0.05 * 400


def test_nothing_is_guessed_in_large_batches():
    """Their rows pay for the reading of the weights already."""
    engine = make(n_pages=1000, max_num_seqs=100)
    for seed in range(60):
        engine.add_request([1, 2, 3, 4, 5] * 2, SamplingParams(seed=seed, max_tokens=100))
    while engine.has_unfinished():
        before = engine.stats()["spec_draft_tokens"]
        engine.step()
        chunks = engine.scheduler._chunks.values()
        if MARGIN * len(chunks) >= len(chunks) + 6 + sum(chunk.start for chunk in chunks) / 16:
            assert engine.stats()["spec_draft_tokens"] == before
    assert engine.stats()["spec_draft_tokens"] > 0


def test_guesses_take_no_page_of_anybody_and_no_row_beyond_the_budget():
    """Tiny pools: with guesses on, requests are preempted no more often than without."""
    preemptions = []
    for config in (None, NGRAM):
        engine = make(n_pages=14, config=config, max_num_batched_tokens=8)
        for seed in range(5):
            engine.add_request([1, 2, 3, 4, 5] * 3, SamplingParams(seed=seed, max_tokens=50, temperature=0))
        while engine.has_unfinished():
            engine.step()
            assert sum(engine.model.forward.steps[-1]) <= 8
        preemptions.append(engine.stats()["preemptions"])
    assert preemptions[1] <= preemptions[0]


def test_only_pages_of_drawn_tokens_are_published():
    """The page that a wrong guess would have filled is not to be found."""
    engine = make(real=True, echo=20.0)
    engine.scheduler.speculation.margin = 0
    prompt = [1, 2, 3, 4, 5] * 6
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=6, logit_bias={4: 100.0}))
    (output,) = finish(engine).values()
    assert output.outputs[0].token_ids == [4] * 6
    assert engine.model.forward.steps[1][0] > 1 + 1  # 5 was guessed behind the first 4, and reached the page's end
    index = engine.scheduler.prefix._index
    assert index.lookup([*prompt, 4, 4]) == 2 and index.lookup([*prompt, 4, 5]) == 1


def test_a_branch_admitted_again_within_its_step_gets_no_guess_for_the_chunk_it_lost():
    """An urgent prompt takes the pages of both decodes, needs fewer, and the first of them comes back at once."""
    cycle = [1, 2, 3, 4, 5]
    asked = [(cycle * 10, 8, 0), (cycle * 8, 5, 0), ([*cycle * 9, 6, 7, 8], 4, -1)]  # 4, 3 and 3 of 7 pages
    params = [SamplingParams(temperature=0, max_tokens=n) for _, n, _ in asked]
    alone = []
    for (prompt, _, _), each in zip(asked, params, strict=True):
        plain = make(config=None)
        plain.add_request(prompt, each)
        alone += [output.outputs for output in finish(plain).values()]
    engine = make(n_pages=7)
    engine.scheduler.speculation.margin, engine.scheduler.paced = 0, False
    names = []
    for (prompt, _, priority), each in zip(asked, params, strict=True):
        names.append(engine.add_request(prompt, each, priority=priority))
        if len(names) == 2:
            engine.step()
    scheduled = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: scheduled.append(schedule()) or scheduled[-1]
    outputs = {output.request_id: output for output in engine.step() if output.finished}
    first = {chunk.branch.request.request_id: chunk for chunk in scheduled[0]}
    assert set(first) == {names[0], names[2]} and first[names[0]].start == 0 and not first[names[0]].drafts
    outputs |= finish(engine)
    assert [outputs[name].outputs for name in names] == alone


@pytest.mark.parametrize("real", [False, True], ids=["fake", "paged"])
def test_nothing_is_guessed_before_a_fork(real):
    """The last token of a prompt, computed alone, is no decode yet: its children would inherit a guess of the first."""
    results = []
    for config in (None, NGRAM):
        engine = make(real, config=config, echo=5.0, max_num_batched_tokens=16)
        if config is not None:
            engine.scheduler.speculation.margin = 0
        for seed in range(30):
            engine.add_request([1, 2, 3, 4, 5] * 6 + [1, 2, 3], SamplingParams(n=3, seed=seed, max_tokens=12))
            results.append(finish(engine))
    assert engine.stats()["spec_draft_tokens"] > 0
    assert results[:30] == results[30:]


def test_an_interrupt_undoes_guesses_too():
    engine, plain = make(), make(config=None)
    for each in (engine, plain):
        each.add_request([1, 2, 3, 4, 5] * 4, SamplingParams(temperature=0, max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.model.forward.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.model.forward.steps[-1] != [1]
    (branch,) = engine.scheduler.running
    assert len(branch.seq) == len(branch.tokens) - 1 and engine.kv.check() == []
    assert list(finish(engine).values()) == list(finish(plain).values())


def test_the_echo_of_the_fake_model_runs_in_cycles():
    assert [successor(token) for token in (1, 2, 3, 4, 5, 6, 10, 0)] == [2, 3, 4, 5, 1, 7, 6, 1]
