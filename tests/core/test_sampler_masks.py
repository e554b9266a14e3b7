"""Allowed tokens, typical sampling at its edges, and log-probabilities that stay finite."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from isas import assert_one_result, on_every_isa
from sampling_definition import distribution

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.sampler import Sampler
from pagedkv.core.sampling_state import SamplingState

VOCAB = 1000
F32_MAX = float(np.finfo(np.float32).max)


def rows_of(seed, m=1, spread=3.0, n=VOCAB):
    return np.random.default_rng(seed).normal(0, spread, (m, n)).astype(np.float32)


def draw(logits, mask=None, **params):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    state = SamplingState(logits.shape[1], **params)
    state.set_mask(mask)
    Sampler(logits.shape[1]).sample(logits, [state], [0])
    return state


def mask_of(tokens, vocab=VOCAB):
    """Bit i % 32 of word i // 32 for each token, written out bit by bit."""
    words = [0] * -(-vocab // 32)
    for token in tokens:
        words[token // 32] |= 1 << (token % 32)
    return np.array(words, np.uint32)


# Allowed tokens


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 3}, {"seed": 3, "top_p": 0.5}]
)
def test_both_kinds_of_mask_leave_what_a_smaller_vocabulary_would(vocab, params):
    logits = rows_of(vocab, n=vocab)[0]
    for allowed in ([vocab - 1], range(0, vocab, 2), range(vocab)):
        allowed = list(allowed)
        expected = np.full(vocab, -np.inf, np.float32)
        expected[allowed] = logits[allowed]
        token = draw(expected, **params).token
        assert draw(logits, allowed_token_ids=allowed, **params).token == token
        assert draw(logits, mask_of(allowed, vocab), **params).token == token


def test_both_masks_bans_and_penalties_add_up():
    logits = rows_of(2)[0]
    logits[[10, 11, 12, 13]] = 50, 49, 48, 47
    state = SamplingState(VOCAB, temperature=0, allowed_token_ids=[11, 12, 13, 14], stop_ids=[11], min_tokens=1)
    sampler = Sampler(VOCAB)
    state.set_mask(mask_of([10, 11, 13, 14]))
    sampler.sample(logits[None], [state], [0])
    assert state.token == 13
    state.accept(13)
    sampler.sample(logits[None], [state], [0])  # min_tokens is reached, the mask still holds
    assert state.token == 11
    state.set_mask(None)
    state.accept(11)
    sampler.sample(logits[None], [state], [0])
    assert state.token == 11
    bias = {14: 100.0}
    assert draw(logits, mask_of([13, 14]), temperature=0, logit_bias=bias).token == 14
    assert draw(logits, mask_of([13]), temperature=0, logit_bias=bias).token == 13


def test_bits_behind_the_vocabulary_mean_nothing():
    logits = rows_of(3, n=40)
    mask = np.array([0, 0xFFFFFF00, 0xFFFFFFFF], np.uint32)
    state = draw(logits, mask, seed=1)
    assert not state.ok and state.error == "every token is banned"
    state = draw(logits, mask | np.array([8, 0, 0], np.uint32), seed=1)
    assert state.ok and state.error is None and state.token == 3


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"typical_p": 0.5}, {"top_p": 0.5}])
def test_a_row_without_a_token_left_fails_alone(temperature, cuts):
    logits = rows_of(4, m=3)
    states = [SamplingState(VOCAB, seed=i, temperature=temperature, **cuts) for i in range(3)]
    expected = [draw(logits[i], seed=i, temperature=temperature, **cuts) for i in range(3)]
    states[1].set_mask(mask_of([]))
    Sampler(VOCAB).sample(logits, states, [0, 1, 2])
    assert [state.error for state in states] == [None, "every token is banned", None]
    assert [states[i].token for i in (0, 2)] == [expected[i].token for i in (0, 2)]
    states[1].set_mask(mask_of([7]))
    Sampler(VOCAB).sample(logits, states, [0, 1, 2])
    assert states[1].ok and states[1].token == 7


@pytest.mark.parametrize("how", ["allowed", "mask"])
@pytest.mark.parametrize(
    "value, error", [(-np.inf, "every token is banned"), (np.nan, "the logits hold NaN or infinity")]
)
def test_what_is_allowed_may_itself_be_unusable(how, value, error):
    logits = rows_of(5)[0]
    logits[9] = value
    state = draw(logits, allowed_token_ids=[9]) if how == "allowed" else draw(logits, mask_of([9]))
    assert not state.ok and state.error == error


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_unusable_logits_are_found_behind_a_ban(value):
    logits = rows_of(6)[0]
    logits[9] = value
    assert draw(logits, allowed_token_ids=[8]).error == "the logits hold NaN or infinity"


def test_masked_rows_do_not_influence_others_on_any_isa_or_thread_count():
    logits = rows_of(7, m=48)
    rng = np.random.default_rng(1)
    masks = [mask_of(rng.choice(VOCAB, 1 + i * 20, replace=False)) if i % 3 else None for i in range(48)]
    params = [dict(seed=i, typical_p=1 - i % 4 / 5, top_p=1 - i % 3 / 10, logprobs=2) for i in range(48)]

    def states():
        found = [SamplingState(VOCAB, **each) for each in params]
        for state, mask in zip(found, masks, strict=True):
            state.set_mask(mask)
        return found

    def bits(found):
        return str([(s.ok, s.token, s.logprob.hex(), s.rank, s.top) for s in found]).encode()

    alone = states()
    for i, state in enumerate(alone):
        Sampler(VOCAB).sample(logits, [state], [i])

    def together():
        found = states()
        order = np.random.default_rng(2).permutation(48)
        Sampler(VOCAB, ThreadPool(3)).sample(logits, [found[i] for i in order], list(order))
        return bits(found)

    results = on_every_isa(together)
    assert_one_result(results)
    assert set(results.values()) == {bits(alone)}


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros(31, np.uint32),
        np.zeros(32, np.int32),
        np.zeros(32, np.float32),
        np.zeros(16, np.uint64),
        np.zeros((32, 1), np.uint32),
        np.zeros(64, np.uint32)[::2],
        b"\0" * 128,
    ],
    ids=lambda mask: f"{getattr(mask, 'dtype', type(mask))}-{getattr(mask, 'shape', len(mask))}",
)
def test_bad_masks_are_refused_and_the_old_one_stays(mask):
    state = SamplingState(VOCAB, seed=1)
    state.set_mask(mask_of([3]))
    with pytest.raises((ValueError, BufferError)):
        state.set_mask(mask)
    Sampler(VOCAB).sample(rows_of(8), [state], [0])
    assert state.token == 3


def test_a_mask_is_kept_alive_and_let_go():
    state = SamplingState(VOCAB, seed=1)
    mask = bytearray(mask_of([3]).tobytes())
    state.set_mask(memoryview(mask).cast("I"))
    Sampler(VOCAB).sample(rows_of(8), [state], [0])
    assert state.token == 3
    with pytest.raises(BufferError):
        mask.clear()
    state.set_mask(None)
    mask.clear()


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31])
def test_allowed_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ValueError, match=rf"allowed_token_ids must be token ids in \[0, {VOCAB}\), not {token}"):
        SamplingState(VOCAB, allowed_token_ids=[1, token])


# Typical sampling


def kept_tokens(logits, n=400, **cuts):
    states = [SamplingState(len(logits), seed=seed, **cuts) for seed in range(n)]
    Sampler(len(logits)).sample(np.asarray(logits, np.float32)[None], states, [0] * n)
    return {state.token for state in states}


def test_the_typical_set_may_leave_out_the_best():
    """Twenty tokens at 0.045 and one at 0.1: the entropy is near the many, so they come first."""
    p = np.array([0.1, *[0.045] * 20])
    assert kept_tokens(np.log(p), typical_p=0.85) == set(range(1, 20))
    assert 0 in kept_tokens(np.log(p), typical_p=0.95)


def test_a_tiny_typical_p_keeps_the_one_nearest_the_entropy():
    for seed in range(20):
        x = rows_of(seed, spread=2.0)[0]
        with mpmath.workdps(50):
            weights = [mpmath.exp(mpmath.mpf(float(value))) for value in x]
            total = mpmath.fsum(weights)
            surprise = [mpmath.log(total) - mpmath.mpf(float(value)) for value in x]
            entropy = mpmath.fsum(w * s for w, s in zip(weights, surprise, strict=True)) / total
            nearest = min(range(VOCAB), key=lambda i: abs(surprise[i] - entropy))
        assert kept_tokens(x, n=20, typical_p=1e-9) == {nearest}


@pytest.mark.parametrize("cuts", [{}, {"top_k": 30}, {"top_p": 0.97}, {"min_p": 0.001}])
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("spread", [0.01, 3.0, 1e4])
def test_typical_draws_stay_inside_their_set(cuts, temperature, spread):
    x = rows_of(11, spread=spread)[0]
    x[::7] = -np.inf
    for typical_p in (1e-9, 0.5, 0.999):
        order, p = distribution(x, temperature=temperature, typical_p=min(1, typical_p + 1e-3), **cuts)
        assert kept_tokens(x, n=60, temperature=temperature, typical_p=typical_p, **cuts) <= set(order[p > 0].tolist())


def test_equal_candidates_are_kept_from_the_middle_outward():
    """All tokens alike: none is more typical than another, and the run grows from the last of them."""
    assert kept_tokens(np.zeros(100), typical_p=0.1) == set(range(90, 100))
    assert kept_tokens(np.zeros(1), typical_p=0.1) == {0}


def test_typical_p_of_1_cuts_nothing():
    x = rows_of(12)
    for seed, top_p in itertools.product(range(100), (1.0, 0.8)):
        states = [draw(x, seed=seed, top_p=top_p, **more) for more in ({}, {"typical_p": 1.0})]
        assert states[0].token == states[1].token


# Log-probabilities


def test_logprobs_are_finite_whatever_the_logits():
    x = np.zeros(VOCAB, np.float32)
    x[:6] = [F32_MAX, F32_MAX / 2, -F32_MAX, -np.inf, -np.inf, 1e38]
    for allowed, expected in ([2], -F32_MAX), ([0], 0.0), ([1, 3], -F32_MAX / 2):
        state = draw(x, allowed_token_ids=allowed, logprobs=5, temperature=0)
        assert state.ok and math.isclose(state.logprob, expected, rel_tol=1e-6)
        assert all(math.isfinite(value) for _, value in state.top)
    assert not draw(x, allowed_token_ids=[3, 4]).ok


def test_banned_tokens_keep_the_logprobs_of_the_raw_logits():
    logits = rows_of(13)[0]
    free = draw(logits, logprobs=5, temperature=0)
    bound = draw(logits, mask_of([17]), logprobs=5, temperature=0)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert bound.token == 17 and bound.top == free.top and abs(bound.logprob - expected[17]) < 4e-6
    assert bound.rank == 1 + int((logits > logits[17]).sum())


def test_a_scored_token_at_minus_infinity_has_no_logprob():
    logits = rows_of(14)
    logits[0, 5] = -np.inf
    impossible, possible = Sampler(VOCAB).score(logits, [0, 0], [5, 6], 3)
    assert impossible is None and all(math.isfinite(value) for value in (possible[0], *dict(possible[2]).values()))
