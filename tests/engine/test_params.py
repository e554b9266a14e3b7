"""Every parameter: accepted at its edges, refused beyond them with field, value and range in the message."""

import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.engine.checks import parse_bytes, shown
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.structured import StructuredOutputsParams

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
INT32 = 2**31 - 1


class Everything:
    def allowed(self, token_ids):
        return None


ACCEPTED = [
    ("n", [1, 1024, np.int64(3)]),
    ("max_tokens", [1, INT32, None]),
    ("min_tokens", [0, 16]),
    ("temperature", [0, 0.0, 1e-6, 1, 1e6, np.float32(0.5)]),
    ("top_k", [0, 1, INT32]),
    ("top_p", [1e-9, 1, 1.0]),
    ("min_p", [0, 0.0, 1.0]),
    ("seed", [None, 0, 2**64 - 1]),
    ("stop", [None, "x", ["x", "yz"], ("x",), []]),
    ("stop_token_ids", [None, [], [0, INT32], {3}, np.array([1, 2])]),
    ("ignore_eos", [True, False]),
    ("logprobs", [None, 0, 1024]),
    ("prompt_logprobs", [None, 0, 1024]),
    ("presence_penalty", [-2, 2.0]),
    ("frequency_penalty", [-2, 2.0]),
    ("repetition_penalty", [0.01, 100]),
    ("logit_bias", [None, {}, {0: -100, INT32: 100.0}]),
    ("skip_special_tokens", [True, False]),
    ("typical_p", [1e-9, 0.5, 1, 1.0]),
    ("allowed_token_ids", [None, [0], [0, INT32], {3}, np.array([1, 2]), range(5)]),
    ("logits_mask", [None, Everything()]),
    ("structured_outputs", [None, StructuredOutputsParams(regex="a")]),
]
NOT_A_NUMBER = [NAN, INF, -INF, HUGE, -HUGE, True, "1", b"1", [], 1j]
REFUSED = [
    ("n", [0, -1, 1025, 1.0, None, *NOT_A_NUMBER]),
    ("max_tokens", [0, -1, INT32 + 1, 1.5, *NOT_A_NUMBER]),
    ("min_tokens", [-1, 17, 1.0, None, *NOT_A_NUMBER]),
    ("temperature", [-1, -1e-9, 1e-7, 2e6, None, *NOT_A_NUMBER]),
    ("top_k", [-1, INT32 + 1, 1.0, None, *NOT_A_NUMBER]),
    ("top_p", [0, -0.1, 1.0001, None, *NOT_A_NUMBER]),
    ("min_p", [-0.1, 1.1, None, *NOT_A_NUMBER]),
    ("seed", [-1, 2**64, 1.0, *NOT_A_NUMBER]),
    ("stop", ["", [""], "a\ud800", ["a", "\udc00"], ["a", ""], [1], 3, b"x", {"a"}, ["a"] * 257, NAN]),
    ("stop_token_ids", [[-1], [INT32 + 1], [1.0], [True], ["a"], "12", 5, {1: 2}, NAN]),
    ("ignore_eos", [0, 1, None, "yes"]),
    ("logprobs", [-1, 1025, 1.0, *NOT_A_NUMBER]),
    ("prompt_logprobs", [-1, 1025, 1.0, *NOT_A_NUMBER]),
    ("presence_penalty", [-2.01, 2.01, None, *NOT_A_NUMBER]),
    ("frequency_penalty", [-2.01, 2.01, None, *NOT_A_NUMBER]),
    ("repetition_penalty", [0, -1, 0.001, 101, None, *NOT_A_NUMBER]),
    ("logit_bias", [{-1: 0.0}, {INT32 + 1: 0.0}, {1: 101}, {1: NAN}, {1: "a"}, {"1": 1.0}, {True: 1.0}, [1], 4]),
    ("skip_special_tokens", [0, None, "no"]),
    ("typical_p", [0, -0.1, 1.0001, None, *NOT_A_NUMBER]),
    ("allowed_token_ids", [[], [-1], [INT32 + 1], [1.0], [True], ["a"], "12", 5, {1: 2}, NAN]),
    ("logits_mask", [0, [1], "x", len, SimpleNamespace(allowed=3)]),
    ("structured_outputs", [0, {"regex": "a"}, "a", StructuredOutputsParams]),
]


@pytest.mark.parametrize("field, values", ACCEPTED, ids=[field for field, _ in ACCEPTED])
def test_edges_are_accepted(field, values):
    for value in values:
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field, values in REFUSED for value in values],
    ids=[f"{field}-{shown(value)}" for field, values in REFUSED for value in values],
)
def test_everything_else_is_refused_with_its_name_and_range(field, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field) and " must be " in message and ", not " in message
    assert "\n" not in message and len(message) < 250


def test_message_names_value_and_range():
    with pytest.raises(ValueError, match=r"temperature must be 0 \(greedy\) or a number in \[1e-06, 1e\+06\], not -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match=r"min_tokens must be an integer in \[0, 5\], not 6"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_all_fields_are_covered():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == {field for field, _ in ACCEPTED} == {field for field, _ in REFUSED}


def test_defaults_are_those_of_the_interface():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.min_tokens, params.temperature) == (1, 16, 0, 1.0)
    assert (params.top_k, params.top_p, params.min_p, params.seed) == (0, 1.0, 0.0, None)
    assert not params.stop and not params.stop_token_ids and not params.logit_bias


def test_immutable_equal_replaceable_picklable():
    params = SamplingParams(stop="x", logit_bias={1: 2}, stop_token_ids=[5, 3, 5], allowed_token_ids=(9, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2
    assert params == dataclasses.replace(params) == pickle.loads(pickle.dumps(params))
    assert params.stop == ("x",) and params.stop_token_ids == (3, 5) and params.allowed_token_ids == (4, 9)
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=7)


def test_callers_bias_is_copied():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = float("nan")
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    "text, size",
    [
        (1, 1), ("1", 1), ("512MiB", 512 << 20), ("512 mib", 512 << 20), ("2GB", 2 * 10**9), ("2g", 2 << 30),
        ("1.5KiB", 1536), ("0.5 GiB", 1 << 29), ("7b", 7), ("3TiB", 3 << 40),
    ],
)  # fmt: skip
def test_memory_sizes(text, size):
    assert parse_bytes("kv_memory", text) == size


@pytest.mark.parametrize(
    "text", [0, -1, 1.5, True, None, "", "MiB", "12 parsecs", "-1GB", "1e9", "nan", 2**62, "9" * 19]
)
def test_bad_memory_sizes(text):
    with pytest.raises(ValueError, match=r"^kv_memory must be bytes"):
        parse_bytes("kv_memory", text)
