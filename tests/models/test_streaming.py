"""Streamed pieces of text join to the decode of all ids, and never show half a character."""

import gguf_writer as w
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.models.gguf import GGUFFile
from pagedkv.models.streaming import StreamDecoder
from pagedkv.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    with GGUFFile(w.write(tmp_path_factory.mktemp("tiny") / "m.gguf", tiny.model())) as file:
        return Tokenizer(file.metadata)


def stream(tokenizer, ids, skip=True):
    decoder = StreamDecoder(tokenizer, skip)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@given(ids=st.lists(st.integers(0, len(tiny.TOKENS) + 3), max_size=40), skip=st.booleans())
def test_pieces_join_to_decode_for_any_ids(tokenizer, ids, skip):
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@given(text=st.text(max_size=30))
def test_pieces_of_any_text_join_to_the_text(tokenizer, text):
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


def test_a_character_appears_only_when_whole(tokenizer):
    ids = tokenizer.encode("a☕b")
    assert len(ids) == 5
    assert stream(tokenizer, ids) == ["a", "", "", "☕", "b", ""]


def test_an_unfinished_character_is_flushed_as_one_replacement(tokenizer):
    ids = tokenizer.encode("☕")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in ids[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(tokenizer.encode("x")[0]) == "x"


def test_a_broken_character_is_replaced_as_soon_as_it_is_known_to_be(tokenizer):
    first, *_ = tokenizer.encode("☕")
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(first) == ""
    assert decoder.push(tokenizer.encode("x")[0]) == "\ufffdx"


def test_special_tokens_do_not_break_a_character(tokenizer):
    a, b, c = tokenizer.encode("☕")
    assert stream(tokenizer, [a, 2, b, 2, c]) == ["", "", "", "", "☕", ""]


def test_real_model(smollm2_path):
    with GGUFFile(smollm2_path) as file:
        tokenizer = Tokenizer(file.metadata)
    text = "Größe: 3½ m² — naïve café ☕, 東京は日本の首都です。 👩‍👩‍👧‍👦 done\n\n  0"
    assert "".join(stream(tokenizer, tokenizer.encode(text))) == text
