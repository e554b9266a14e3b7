"""Draws are distributed as the definition says: chi-square tests on synthetic logits, parameters alone and mixed.

Seeds are fixed, so a test that passes once passes always.
"""

import numpy as np
import pytest
from sampling_definition import adjusted, probabilities
from scipy import stats

from pagedkv.core.sampler import Sampler
from pagedkv.core.sampling_state import SamplingState

DRAWS = 10000
SIZES = {40: 1.5, 3000: 2.5}  # vocabulary: spread of its logits

CUTS = [
    {},
    {"temperature": 0.5},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 33, "temperature": 3.0},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9, "temperature": 2.0},
    {"min_p": 0.02},
    {"min_p": 0.3, "temperature": 1.7},
    {"typical_p": 0.2},
    {"typical_p": 0.6},
    {"typical_p": 0.95, "temperature": 2.0},
    {"typical_p": 0.9, "temperature": 0.5},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.05, "temperature": 1.4},
    {"top_p": 0.9, "typical_p": 0.7},
    {"top_k": 25, "typical_p": 0.5},
    {"min_p": 0.01, "typical_p": 0.8, "temperature": 1.5},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8, "temperature": 1.3},
]
EDGES = [  # the least and the most that SamplingParams takes
    {"temperature": 1e-6},
    {"temperature": 1e6},
    {"top_k": 40},
    {"top_k": 2**31 - 1},
    {"top_p": 5e-324},
    {"top_p": 1 - 2**-53},
    {"min_p": 5e-324},
    {"min_p": 1 - 2**-53},
    {"min_p": 1.0},
    {"typical_p": 5e-324},
    {"typical_p": 1 - 2**-53},
    {"seed": 2**64 - 2, "temperature": 2.0},
]
HISTORY = {"prompt": [0, 1, 1, 2, 20], "output": [2, 3, 3, 3, 4, 21, 21]}
PENALTIES = [
    {"presence": 1.5},
    {"presence": -2.0},
    {"frequency": 0.7},
    {"frequency": -0.5},
    {"repetition": 1.8},
    {"repetition": 0.6},
    {"bias": {3: 4.0, 5: -100.0, 0: -1.5}},
    {"presence": 2.0, "frequency": -2.0},
    {"presence": -2.0, "frequency": 2.0},
    {"repetition": 0.01},
    {"repetition": 100.0},
    {"bias": {3: 100.0, 5: 100.0, 7: 99.0}},
    {"banned": [1, 9]},
    {"allowed": [*range(0, 40, 3)]},
    {"presence": 0.5, "frequency": 0.3, "repetition": 1.3, "bias": {7: 2.0}, "banned": [9], "allowed": [*range(2, 30)]},
]


def logits_of(vocab):
    return np.random.default_rng(vocab).normal(0, SIZES[vocab], vocab).astype(np.float32)


def refuse_unlikely(seen, expected):
    """Assert that the counts `seen` may come from the distribution of counts `expected`, rare tokens taken together."""
    assert not seen[expected == 0].any(), "a token that the definition cuts off was drawn"
    order = np.argsort(-expected)
    order = order[expected[order] > 0]
    _, bins = np.unique(np.cumsum(expected[order]) // 8, return_inverse=True)
    f_obs, f_exp = np.bincount(bins, seen[order]), np.bincount(bins, expected[order])
    if f_exp[-1] < 5 and len(f_exp) > 1:
        f_obs = np.append(f_obs[:-2], f_obs[-2:].sum())
        f_exp = np.append(f_exp[:-2], f_exp[-2:].sum())
    assert len(f_obs) == 1 or stats.chisquare(f_obs, f_exp).pvalue > 1e-4


def draws(logits, state_of, n=DRAWS):
    """How often each token is drawn over n seeds."""
    states = [state_of(seed) for seed in range(n)]
    Sampler(len(logits)).sample(logits[None], states, [0] * n)
    assert all(state.ok for state in states)
    return np.bincount([state.token for state in states], minlength=len(logits))


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_cuts(vocab, cuts):
    logits = logits_of(vocab)
    seen = draws(logits, lambda seed: SamplingState(vocab, seed=seed, **cuts))
    refuse_unlikely(seen, probabilities(logits, **cuts) * DRAWS)


@pytest.mark.parametrize("cuts", [{}, CUTS[-1]], ids=["plain", "all-cuts"])
@pytest.mark.parametrize("changes", PENALTIES, ids=str)
def test_penalties_bias_and_bans(changes, cuts):
    logits = logits_of(40)
    names = {"presence": "presence_penalty", "frequency": "frequency_penalty", "repetition": "repetition_penalty"}
    names |= {"bias": "logit_bias", "banned": "stop_ids", "allowed": "allowed_token_ids"}
    params = {names[name]: value for name, value in changes.items()}

    def state_of(seed):
        state = SamplingState(40, seed=seed, min_tokens=99, prompt_ids=HISTORY["prompt"], **params, **cuts)
        for token in HISTORY["output"]:
            state.accept(token)
        return state

    x = adjusted(logits, **HISTORY, **changes)
    refuse_unlikely(draws(logits, state_of), probabilities(x, **cuts) * DRAWS)


@pytest.mark.parametrize("cuts", EDGES, ids=str)
def test_edges_are_exact(cuts):
    """At its edges, too, a parameter does what its definition says, on logits far apart and with ties."""
    cuts = dict(cuts)
    first = cuts.pop("seed", 0)
    logits = logits_of(40)
    logits[[4, 9]] = logits.max()
    logits[17] = -np.inf
    ties = "typical_p" in cuts  # which of equal candidates are typical is tested apart
    logits[4] -= 0.01 * ties
    logits[logits.argmax()] += 0.01 * ties
    seen = draws(logits, lambda seed: SamplingState(40, seed=(first + seed) % 2**64, **cuts))
    refuse_unlikely(seen, probabilities(logits, **cuts) * DRAWS)


def test_positions_and_outputs_are_as_good_as_seeds():
    """One seed drawn along positions and outputs gives the same distribution."""
    logits, expected = logits_of(40), probabilities(logits_of(40)) * DRAWS
    for along in ("position", "index"):
        seen = np.zeros(40)
        sampler = Sampler(40)
        states = [SamplingState(40, seed=3, index=i if along == "index" else 0) for i in range(100)]
        for _ in range(DRAWS // 100):
            for state in states if along == "index" else states[:1] * 100:
                sampler.sample(logits[None], [state], [0])
                seen[state.token] += 1
                state.accept(state.token)
        refuse_unlikely(seen, expected)


def test_the_test_would_notice():
    """A distribution off by a few per cent in one token is refused."""
    logits = logits_of(40)
    wrong = logits.copy()
    wrong[logits.argmax()] += 0.3
    seen = draws(logits, lambda seed: SamplingState(40, seed=seed))
    with pytest.raises(AssertionError):
        refuse_unlikely(seen, probabilities(wrong) * DRAWS)
