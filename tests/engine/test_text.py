"""Stop strings and held back text, token by token."""

import random

import pytest

from pagedkv.engine.text import OutputText


class Pieces:
    """A decoder whose tokens are indices into a list of texts."""

    def __init__(self, pieces, rest=""):
        self.pieces, self.rest = pieces, rest

    def push(self, token):
        return self.pieces[token]

    def flush(self):
        return self.rest


def run(pieces, stops, min_tokens=0, rest=""):
    """(text after each token, what matched, final text)"""
    out = OutputText(Pieces(pieces, rest), stops)
    seen = []
    for i in range(len(pieces)):
        hit = out.push(i, i + 1 >= min_tokens)
        seen.append(out.text)
        assert hit == (out.matched is not None)
        if hit:
            break
    out.finish()
    return seen, out.matched, out.text


@pytest.mark.parametrize(
    "pieces, stops, text, matched",
    [
        (["hello", " world"], [], "hello world", None),
        (["hello", " world"], ["wor"], "hello ", "wor"),
        (["he", "ll", "o"], ["ello"], "h", "ello"),  # across token borders
        (["xabcde"], ["bcd", "abcde"], "x", "abcde"),  # leftmost wins, not first listed
        (["xab"], ["ab", "a"], "x", "ab"),  # same place: first listed wins
        (["xab"], ["a", "ab"], "x", "a"),
        (["aab", "c"], ["ab"], "a", "ab"),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["end"], ["end"], "", "end"),
        (["almost en"], ["end"], "almost en", None),
    ],
)
def test_leftmost_match_is_cut_out(pieces, stops, text, matched):
    _, found, final = run(pieces, stops)
    assert (final, found) == (text, matched)


def test_possible_beginnings_are_held_back_and_released():
    seen, matched, final = run(["say e", "n", "o", " en", "d"], ["end"])
    assert seen == ["say ", "say ", "say eno", "say eno ", "say eno "]
    assert (matched, final) == ("end", "say eno ")


def test_longest_beginning_of_any_stop_is_held():
    seen, _, _ = run(["xab"], ["bq", "abq", "zz"])
    assert seen == ["x"]


def test_what_is_held_comes_out_at_the_end():
    assert run(["tail en"], ["end"])[2] == "tail en"
    assert run(["half "], [], rest="\ufffd")[2] == "half \ufffd"


def test_no_stop_before_min_tokens_and_none_reaching_back():
    assert run(["a", "END", "b", "END"], ["END"], min_tokens=3)[1:] == ("END", "aENDb")
    assert run(["EN", "D"], ["END"], min_tokens=2)[1:] == ("END", "")


def test_finish_is_idempotent():
    out = OutputText(Pieces(["a"], rest="!"), [])
    out.push(0, True)
    out.finish()
    out.finish()
    assert out.text == "a!"


@pytest.mark.parametrize("seed", range(300))
def test_random_texts_only_grow_and_are_cut_at_the_first_match(seed):
    rng = random.Random(seed)
    letters = "ab" if seed % 2 else "abc"
    pieces = ["".join(rng.choices(letters, k=rng.randint(0, 3))) for _ in range(rng.randint(1, 12))]
    stops = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
    seen, matched, final = run(pieces, stops)
    for before, after in zip(seen, [*seen[1:], final], strict=True):
        assert after.startswith(before)
    joined = ""
    for piece in pieces:
        joined += piece
        starts = [at for stop in stops if (at := joined.find(stop)) >= 0]
        if starts:
            assert final == joined[: min(starts)] and joined.startswith(matched, min(starts))
            return
    assert matched is None and final == joined
