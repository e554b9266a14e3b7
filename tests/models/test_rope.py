"""Rotation tables against those of transformers and mpmath, and the row order of rotation pairs."""

import mpmath
import numpy as np
import pytest
import tiny_models as tiny

from pagedkv.models.huggingface import DirectoryConfig
from pagedkv.models.rope import Rope, half_split_order, inverse_frequencies

EXPECTED = np.load(tiny.HERE / "references.npz")
NAMES = sorted(name for name in tiny.REFERENCES if name.startswith("rope-"))


@pytest.mark.parametrize("context", [100, 10000])
@pytest.mark.parametrize("name", NAMES)
def test_tables_are_those_of_transformers(tmp_path, name, context):
    config = tiny.REFERENCES[name]["config"]
    (tmp_path / "config.json").write_text(tiny.json.dumps(config))
    rope = DirectoryConfig(tmp_path)._ropes(64, config["max_position_embeddings"])[0]
    table, factor = rope.table(context)
    *expected, expected_factor = EXPECTED[f"{name}-{context}"]
    # transformers computes in float32
    assert np.allclose(table, expected, rtol=3e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


def test_contexts_and_methods_differ():
    tables = [EXPECTED[f"{name}-{context}"] for name in NAMES for context in (100, 10000)]
    different = {tuple(table) for table in tables}
    assert len(different) == len(NAMES) + 2  # longrope and dynamic have two each


def test_a_given_attention_factor_wins():
    for kind in ("yarn", "longrope"):
        rope = Rope(1e4, 8, kind, 4.0, 64, 1.5, short=(1.0,) * 4, long=(2.0,) * 4)
        assert rope.table(100)[1] == 1.5
    assert Rope(1e4, 8, "yarn", 4.0, 64).table(1)[1] == pytest.approx(1 + 0.1 * np.log(4))
    assert Rope(1e4, 8, "yarn", 1.0, 64).table(1)[1] == 1.0


@pytest.mark.parametrize(("n_heads", "head_dim", "rope_dim"), [(1, 2, 2), (3, 8, 8), (2, 10, 4), (4, 7, 6)])
def test_half_split_order_turns_adjacent_pairs_into_halves(n_heads, head_dim, rope_dim):
    """Rotating reordered rows as (i, i + rope_dim/2) gives the reordered result of rotating (2i, 2i+1)."""
    order = half_split_order(n_heads, head_dim, rope_dim)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(n_heads * head_dim))
    x = np.random.default_rng(0).standard_normal(n_heads * head_dim)
    angle = np.random.default_rng(1).uniform(-3, 3, rope_dim // 2)
    half = rope_dim // 2
    adjacent, halves = x.copy().reshape(n_heads, head_dim), x[order].reshape(n_heads, head_dim)
    for head in range(n_heads):
        for i, a in enumerate(angle):
            c, s = np.cos(a), np.sin(a)
            one, two = adjacent[head, 2 * i], adjacent[head, 2 * i + 1]
            adjacent[head, 2 * i], adjacent[head, 2 * i + 1] = one * c - two * s, one * s + two * c
            one, two = halves[head, i], halves[head, half + i]
            halves[head, i], halves[head, half + i] = one * c - two * s, one * s + two * c
    assert adjacent.ravel()[order].tobytes() == halves.ravel().tobytes()


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 1e6, 50000.0, 1.0, 2.5, float(np.float32(12345.678))])
@pytest.mark.parametrize("rope_dim", [2, 6, 64, 80, 128, 256])
def test_inverse_frequencies_are_correctly_rounded(theta, rope_dim):
    with mpmath.workprec(300):
        exact = [float(mpmath.mpf(theta) ** (mpmath.mpf(-2 * i) / rope_dim)) for i in range(rope_dim // 2)]
    assert inverse_frequencies(theta, rope_dim).tolist() == exact
