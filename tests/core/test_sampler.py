"""The sampler against its definition, written out in NumPy float64."""

import math

import numpy as np
import pytest
from sampling_definition import distribution
from scipy import special, stats

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.sampler import Sampler, philox4x32
from pagedkv.core.sampling_state import SamplingState

VOCAB = 1000
KNOWN_BLOCKS = [  # published known-answer vectors of Philox 4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def rows_of(seed, m=1, spread=3.0, n=VOCAB):
    return np.random.default_rng(seed).normal(0, spread, (m, n)).astype(np.float32)


def sample_one(logits, **params):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    state = SamplingState(logits.shape[1], **params)
    Sampler(logits.shape[1]).sample(logits, [state], [0])
    return state


def uniform(seed, index, position):
    a, b, _, _ = philox4x32((position, index, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return ((a >> 5) * 2**26 + (b >> 6)) / 2**53


CUTS = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400, "temperature": 5.0},
    {"top_p": 0.1},
    {"top_p": 0.9, "temperature": 2.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
]
TYPICAL = [
    {"typical_p": 0.01},
    {"typical_p": 0.3},
    {"typical_p": 0.95, "temperature": 2.0},
    {"typical_p": 0.8, "top_p": 0.9},
    {"typical_p": 0.5, "top_k": 40, "temperature": 4.0},
    {"typical_p": 0.7, "min_p": 0.05},
]


@pytest.mark.parametrize("counter, key, block", KNOWN_BLOCKS)
def test_philox_known_answers(counter, key, block):
    assert philox4x32(counter, key) == block


@pytest.mark.parametrize(
    "spread, cuts",
    [(spread, cuts) for spread in (0.0, 0.01, 3.0, 30.0) for cuts in CUTS + (TYPICAL if spread else [])],
    ids=str,
)
def test_each_draw_is_the_candidate_the_definition_names(spread, cuts):
    logits = rows_of(1, spread=spread)
    order, probabilities = distribution(logits[0], **cuts)
    cumulative = np.cumsum(probabilities)
    sampler = Sampler(VOCAB)
    compared = 0
    for seed in (0, 1, 2**32, 2**64 - 1):
        for index in (0, 3):
            state = SamplingState(VOCAB, seed=seed, index=index, **cuts)
            for position in range(12):
                u = uniform(seed, index, position)
                sampler.sample(logits, [state], [0])
                slot = min(int(np.searchsorted(cumulative, u, side="right")), VOCAB - 1)
                if np.abs(cumulative - u).min() > 1e-5:  # not on a border that rounding may move
                    assert state.token == order[slot]
                    compared += 1
                state.accept(state.token)
    assert compared > 80


def test_positions_and_children_are_independent_streams():
    values = np.array([[uniform(5, index, position) for position in range(60)] for index in range(60)])
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-4
    assert len(np.unique(values)) == values.size


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = np.full((1, 100), -1, np.float32)
    logits[0, [17, 60]] = 4.0
    assert sample_one(logits, temperature=0).token == 17


def test_candidates_order_ties_by_id_and_zero_signs_tie():
    logits = np.full((1, 200), -5, np.float32)
    logits[0, [150, 20]] = 0.0
    logits[0, [30, 160]] = -0.0
    assert {sample_one(logits, top_k=2, seed=s).token for s in range(60)} == {20, 30}
    assert [token for token, _ in sample_one(logits, temperature=0, logprobs=4).top] == [20, 30, 150, 160]


def test_long_tie_runs_are_ordered_by_id():
    logits = np.zeros((1, 5000), np.float32)
    assert max(sample_one(logits, top_k=100, seed=s).token for s in range(800)) == 99
    assert [token for token, _ in sample_one(logits, temperature=0, logprobs=70).top] == list(range(70))


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 33, 5000])
def test_any_vocabulary_size(vocab):
    logits = rows_of(vocab, n=vocab)
    assert sample_one(logits, temperature=0).token == logits[0].argmax()
    assert 0 <= sample_one(logits, seed=4, top_p=0.99).token < vocab


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e6])
def test_extreme_temperatures(temperature):
    logits = rows_of(9)
    tokens = {sample_one(logits, temperature=temperature, seed=s).token for s in range(50)}
    assert tokens == {int(logits[0].argmax())} if temperature < 1 else len(tokens) > 30


def test_rows_do_not_influence_each_other():
    logits = rows_of(3, m=30)
    params = [dict(seed=i, temperature=0.5 + i % 3, top_k=i % 5 * 10, top_p=0.9, logprobs=i % 4) for i in range(30)]
    solo = [sample_one(logits[i], **params[i]) for i in range(30)]
    together = [SamplingState(VOCAB, **p) for p in params]
    shuffled = np.random.default_rng(0).permutation(30)
    Sampler(VOCAB).sample(logits, [together[i] for i in shuffled], list(shuffled))
    for a, b in zip(solo, together, strict=True):
        assert (a.token, a.logprob, a.rank, a.top) == (b.token, b.logprob, b.rank, b.top)


@pytest.mark.parametrize("n_threads", [2, 3, 20])
def test_threads_share_rows_without_a_trace(n_threads):
    logits = rows_of(13, m=40)
    alone, shared = ([SamplingState(VOCAB, seed=i, logprobs=3, top_p=0.9) for i in range(40)] for _ in range(2))
    Sampler(VOCAB).sample(logits, alone, range(40))
    Sampler(VOCAB, ThreadPool(n_threads)).sample(logits, shared, range(40))
    assert [(s.token, s.logprob, s.top) for s in alone] == [(s.token, s.logprob, s.top) for s in shared]


def test_columns_behind_the_vocabulary_are_not_read():
    logits = rows_of(4)
    padded = np.full((1, VOCAB + 16), np.nan, np.float32)
    padded[:, :VOCAB] = logits
    state = SamplingState(VOCAB, seed=1)
    Sampler(VOCAB).sample(padded, [state], [0])
    assert state.ok and state.token == sample_one(logits, seed=1).token


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 5, VOCAB - 1])
def test_unusable_logits_fail_their_row_only(poison, where):
    logits = rows_of(5, m=3)
    logits[1, where] = poison
    states = [SamplingState(VOCAB, seed=1) for _ in range(3)]
    sampler = Sampler(VOCAB)
    sampler.sample(logits, states, [0, 1, 2])
    assert [s.ok for s in states] == [True, False, True]
    assert [found is None for found in sampler.score(logits, [0, 1, 2], [1, 1, 1], 2)] == [False, True, False]


def test_minus_infinity_is_a_ban():
    logits = np.full((1, 64), -np.inf, np.float32)
    assert not sample_one(logits, seed=1).ok
    assert not sample_one(logits, temperature=0).ok
    logits[0, 9] = 1
    assert sample_one(logits, seed=1).token == 9
    assert sample_one(logits, seed=1, top_k=5, top_p=0.5).token == 9


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.3}, {"logit_bias": {3: 50.0}}, {"temperature": 0}, {"top_k": 3}]
)
def test_logprob_is_of_the_raw_logits(params):
    logits = rows_of(6)
    expected = special.log_softmax(logits[0].astype(np.float64))
    state = sample_one(logits, seed=8, logprobs=5, **params)
    assert abs(state.logprob - expected[state.token]) < 4e-6
    assert state.rank == 1 + int((logits[0] > logits[0, state.token]).sum())
    best = np.argsort(-logits[0], kind="stable")[:5]
    assert [token for token, _ in state.top] == list(best)
    assert np.abs(np.array([value for _, value in state.top]) - expected[best]).max() < 4e-6
    assert np.float32(state.logprob) == state.logprob


def test_score_gives_the_targets_logprob_and_rank():
    logits = rows_of(7, m=2)
    expected = special.log_softmax(logits.astype(np.float64), axis=1)
    (logprob, rank, top), other = Sampler(VOCAB).score(logits, [1, 0], [123, 4], 3)
    assert abs(logprob - expected[1, 123]) < 4e-6
    assert rank == 1 + int((logits[1] > logits[1, 123]).sum())
    assert len(top) == 3 and abs(other[0] - expected[0, 4]) < 4e-6


def test_rank_of_a_tie_goes_by_id():
    logits = np.zeros((1, 40), np.float32)
    logits[0, 30] = 1
    assert [found[1] for found in Sampler(40).score(logits, [0, 0, 0], [0, 5, 30], 0)] == [2, 7, 1]
    assert sample_one(logits * 0, temperature=0, logprobs=0).rank == 1


def test_candidates_exactly_on_the_border_of_a_band_are_kept():
    falls = [0, 3, 6, 9, 13, 20, 50]
    logits = np.full((1, 1100), -1000, np.float32)  # one in each block of the vocabulary
    for i, fall in enumerate(falls):
        logits[0, 150 * i] = 40 - fall
    top = sample_one(logits, temperature=0, logprobs=len(falls)).top
    assert [token for token, _ in top] == [150 * i for i in range(len(falls))]


def test_penalties_by_their_definition():
    logits = rows_of(8)
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.7, "temperature": 0}
    prompt, output = [1, 2, 2, 900], [2, 5, 5, 5, *range(100, 300)]
    state = SamplingState(VOCAB, prompt_ids=prompt, logit_bias={5: 9.0, 7: -3.0}, **params)
    for token in output:
        state.accept(token)
    x = logits[0].copy()
    x[5] += 9
    x[7] -= 3
    for token in set(prompt + output):
        x[token] = x[token] / 1.7 if x[token] > 0 else x[token] * 1.7
    for token in set(output):
        x[token] -= 0.25 * output.count(token) + 0.5
    for _ in range(VOCAB):  # take the winner away each time: the whole order must agree, negative logits included
        Sampler(VOCAB).sample(logits, [state], [0])
        assert state.token == x.argmax()
        logits[0, state.token] = x[state.token] = -1e30


def test_frequency_counts_only_the_output():
    logits = np.zeros((1, 4), np.float32)
    state = SamplingState(4, frequency_penalty=1.0, repetition_penalty=1.1, prompt_ids=[0, 0, 0], temperature=0)
    Sampler(4).sample(logits, [state], [0])
    assert state.token == 0
    state.accept(0)
    Sampler(4).sample(logits, [state], [0])
    assert state.token == 1


def test_stop_ids_are_banned_below_min_tokens():
    logits = np.zeros((1, 30), np.float32)
    logits[0, 3] = 50
    state = SamplingState(30, min_tokens=2, stop_ids=[3], seed=1)
    tokens = []
    for _ in range(3):
        Sampler(30).sample(logits, [state], [0])
        tokens.append(state.token)
        state.accept(state.token)
    assert 3 not in tokens[:2] and tokens[2] == 3


def test_a_buffer_filled_anew_is_read_anew():
    """Nothing remembered of one call's logits is taken for another's at the same address."""
    logits = np.full((1, VOCAB), -50, np.float32)
    sampler, state = Sampler(VOCAB), SamplingState(VOCAB, temperature=0, logprobs=2)
    for best, second in ((3, 400), (900, 500)):
        logits[:] = -50
        logits[0, [best, second]] = 5, 4
        sampler.sample(logits, [state], [0])
        assert [token for token, _ in state.top] == [best, second]
        assert [token for token, _ in sampler.score(logits, [0], [7], 2)[0][2]] == [best, second]


def test_input_is_not_changed():
    logits = rows_of(10)
    before = logits.copy()
    sample_one(logits, seed=1, logit_bias={1: 5.0}, min_tokens=4, stop_ids=[2], logprobs=3)
    assert (logits == before).all()


@pytest.mark.parametrize("field", ["stop_ids", "logit_bias"])
@pytest.mark.parametrize("token", [-1, 50, 2**31])
def test_ids_outside_the_vocabulary_are_refused(field, token):
    value = [token] if field == "stop_ids" else {token: 1.0}
    with pytest.raises(ValueError, match=r"\[0, 50\)"):
        SamplingState(50, **{field: value})


@pytest.mark.parametrize(
    "logits, rows",
    [
        (np.zeros((1, 8), np.float64), [0]),
        (np.zeros(8, np.float32), [0]),
        (np.zeros((1, 7), np.float32), [0]),
        (np.zeros((1, 8), np.float32), [1]),
        (np.zeros((1, 8), np.float32), [-1]),
        (np.zeros((1, 8), np.float32), []),
    ],
)
def test_bad_arguments(logits, rows):
    with pytest.raises(ValueError):
        Sampler(8).sample(logits, [SamplingState(8)], rows)
