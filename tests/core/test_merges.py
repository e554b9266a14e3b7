"""ScoredMerges alone: what it refuses, and threads. What it makes of text: tests/models/test_sentencepiece.py."""

import threading

import numpy as np
import pytest

from pagedkv.core.merges import MATCHED, MAX_CHARACTERS, PART, WHOLE, ScoredMerges

TEXTS = ["a", "b", "ab", "abab", "<x>"]
ROLES = [PART, PART, PART | WHOLE, PART | WHOLE, PART | MATCHED]


def arguments(texts=TEXTS, **changes):
    found = {
        "text": "".join(texts).encode(),
        "ends": np.cumsum([len(text.encode()) for text in texts]),
        "ranks": np.arange(len(texts)),
        "roles": ROLES[: len(texts)] + [PART] * (len(texts) - len(ROLES)),
    }
    return found | changes


def test_roles():
    merges = ScoredMerges(**arguments())
    assert merges.encode("ababa<x>b", False) == [3, 0, 4, 1]
    assert merges.encode("a c b", False) == [2], "what has no token is left out, and its neighbours meet"
    assert ScoredMerges(**arguments(unknown=4)).encode("acdbc", False) == [0, 4, 1, 4]
    assert merges.encode("", True) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ends": [1, 2, 4, 8]}, "4, 5 and 5"),
        ({"ranks": [0]}, "5, 1 and 5"),
        ({"ends": [1, 2, 4, 3, 11]}, "do not rise to the 11 bytes"),
        ({"ends": [1, 2, 4, 8, 12]}, "do not rise to the 11 bytes"),
        ({"ends": [-1, 2, 4, 8, 11]}, "do not rise to the 11 bytes"),
        ({"ranks": [0, 1, 2, 3, 1 << 21]}, "not all in [0, 2097152)"),
        ({"ranks": [0, 1, 2, 3, -1]}, "not all in"),
        ({"unknown": 5}, "unknown: 5 is not in [-1, 5)"),
        ({"unknown": -2}, "unknown: -2 is not in [-1, 5)"),
        (arguments([*TEXTS, "é" * (MAX_CHARACTERS + 1)]), "tokens[5]: 513 characters, at most 512"),
    ],
)
def test_refused(changes, says):
    with pytest.raises(ValueError) as caught:
        ScoredMerges(**arguments() | changes)
    assert says in str(caught.value)


def test_the_longest_tokens():
    longest = "é" * MAX_CHARACTERS
    texts = ["é" * n for n in range(1, MAX_CHARACTERS + 1)]
    roles = [PART | WHOLE] * len(texts)
    merges = ScoredMerges(**arguments(texts, roles=roles))
    assert sum(token + 1 for token in merges.encode(longest, False)) == MAX_CHARACTERS
    assert ScoredMerges(**arguments(texts, roles=[PART | MATCHED] * len(texts))).encode(longest + "é", False) == [
        MAX_CHARACTERS - 1,
        0,
    ]


def test_threads():
    merges, wrong = ScoredMerges(**arguments()), []

    def work(n):
        for _ in range(300):
            if merges.encode("ab" * n, False) != [3] * (n // 2) + [2] * (n % 2):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 31, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
