"""Conversion of float weights at load, against the gguf package."""

import gguf
import numpy as np
import pytest

from pagedkv.models.quantise import to_float32, to_q8_0


def raw(x, type_name):
    if type_name == "BF16":
        return memoryview((x.view(np.uint32) >> 16).astype("<u2").tobytes())
    return memoryview(x.astype("<f4" if type_name == "F32" else "<f2").tobytes())


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_q8_0_is_that_of_gguf(monkeypatch, type_name):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((50, 96)) * 10.0 ** rng.integers(-3, 3, (50, 1))).astype(np.float32)
    x[3] = 0
    data = raw(x, type_name)
    exact = to_float32(data, type_name)
    precision = {"F32": 0, "F16": 2**-11, "BF16": 2**-7}[type_name]
    assert np.abs(exact.reshape(x.shape) - x).max() <= np.abs(x).max() * precision
    wanted = gguf.quants.quantize(exact.reshape(x.shape), gguf.GGMLQuantizationType.Q8_0)
    for chunk in (1 << 22, 1000, 1):
        monkeypatch.setattr("pagedkv.models.quantise._CHUNK", chunk)
        blocks = to_q8_0(lambda start, stop: data[start:stop], len(data), type_name, 96)
        found = np.frombuffer(blocks, np.uint8).reshape(wanted.shape)
        scales = slice(0, 102, 34)
        assert np.array_equal(found[:, 0], wanted[:, 0]) and np.array_equal(found[:, scales], wanted[:, scales])
        # gguf multiplies by 1/d where this divides by d: at most one apart, and that rarely
        apart = np.abs(found.astype(np.int16) - wanted) % 255
        assert apart.max() <= 1 and (apart > 0).mean() < 0.01
