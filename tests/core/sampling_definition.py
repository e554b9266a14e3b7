"""What the sampler should draw, by definition, in NumPy float64: nothing of it comes from the code under test."""

import numpy as np


def adjusted(
    logits, bias=(), presence=0.0, frequency=0.0, repetition=1.0, prompt=(), output=(), banned=(), allowed=None
):
    """Logits after bias, penalties and bans, float64."""
    x = logits.astype(np.float64)
    for token, value in dict(bias).items():
        x[token] += value
    for token in {*prompt, *output} if repetition != 1 else ():
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= frequency * list(output).count(token) + presence
    x[list(banned)] = -np.inf
    if allowed is not None:
        x[[token not in allowed for token in range(len(x))]] = -np.inf
    return x


def distribution(x, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0):
    """Candidate order and probabilities in that order: a full sort, then the four cuts one after another."""
    x = x.astype(np.float64)
    order = np.lexsort((np.arange(len(x)), -x))
    weights = np.exp((x[order] - x.max()) / temperature)
    weights[weights < min_p] = 0
    if top_k:
        weights[top_k:] = 0
    if top_p < 1:
        enough = np.append(np.cumsum(weights), np.inf) >= top_p * weights.sum()
        weights[np.argmax(enough) + 1 :] = 0
    if typical_p < 1:
        weights[~typical_set(weights / weights.sum(), typical_p)] = 0
    return order, weights / weights.sum()


def typical_set(p, typical_p):
    """Locally typical sampling after Meister et al. (2022), eq. 7 on: the smallest set of those nearest the entropy."""
    some = np.flatnonzero(p > 0)
    surprise = -np.log(p[some])
    entropy = (p[some] * surprise).sum()
    nearest = some[np.argsort(np.abs(surprise - entropy), kind="stable")]
    n = np.argmax(np.append(np.cumsum(p[nearest]), np.inf) >= typical_p) + 1
    kept = np.zeros(len(p), bool)
    kept[nearest[:n]] = True
    return kept


def probabilities(x, **cuts):
    """The same by token id."""
    order, sorted_probabilities = distribution(x, **cuts)
    found = np.zeros(len(x))
    found[order] = sorted_probabilities
    return found
