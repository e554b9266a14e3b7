"""Request bodies that are no JSON, or JSON that must not get further."""

import json
import math

import pytest

from pagedkv.server.errors import APIError
from pagedkv.server.parsing import MAX_DEPTH, MAX_DIGITS, parse_json, parse_object


def refused(raw):
    with pytest.raises(APIError) as caught:
        parse_json(raw)
    assert caught.value.status == 400
    json.dumps(caught.value.body(), allow_nan=False).encode("utf-8")
    return caught.value.message


@pytest.mark.parametrize(
    "raw",
    [
        b"{}", b'{"a": [1, -2.5e3, true, null, "x\\n"]}', b' [1,2]\n', '"é世😀"'.encode(), b'"\\u00e9\\ud83d\\ude00"',
        b"-0", b"1e308", b"9" * MAX_DIGITS, b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
    ],
)  # fmt: skip
def test_json_is_what_the_standard_library_reads(raw):
    assert parse_json(raw) == json.loads(raw)


@pytest.mark.parametrize(
    "raw, part",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1,}', "not JSON"),
        (b"{} {}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'"\x00"', "not JSON"),
        (b'"\n"', "not JSON"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'"\xff"', "not UTF-8 at byte 1"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"NaN", "NaN"),
        (b'{"a": [Infinity]}', "Infinity"),
        (b"-Infinity", "-Infinity"),
        (b"1e309", "too large"),
        (b"1e-400", "too near zero"),
        (b"-0.5E-999", "too near zero"),
        (b"-1e400", "too large"),
        (b"9" * (MAX_DIGITS + 1), "41 digits"),
        (b"1" * 100_000, "100000 digits"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' comes twice"),
        (b'{"x": {"a": 1, "\\u0061": 2}}', "'a' comes twice"),
        (b'"\\ud800"', "U+D800 at index 0"),
        (b'"ab\\udfff"', "U+DFFF at index 2"),
        (b'{"\\ud834x": 1}', "U+D834"),
        (b'"a\\u0000b"', "NUL"),
        (b'{"\\u0000": 1}', "NUL"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "deeper"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "deeper"),
        (b"[" * 2_000_000, ""),
        (b'{"a":[' * 200_000, ""),
    ],
)
def test_everything_else_is_refused(raw, part):
    assert part in refused(raw)


def test_a_body_is_an_object():
    assert parse_object(b'{"a": 1}') == {"a": 1}
    for raw in (b"[]", b'"a"', b"1", b"null", b"true"):
        with pytest.raises(APIError, match="must be a JSON object"):
            parse_object(raw)


def test_the_number_bounds_are_those_of_floats():
    assert parse_json(b"1.7976931348623157e308") == 1.7976931348623157e308
    assert not math.isinf(parse_json(b"9" * MAX_DIGITS) + 0.0)
