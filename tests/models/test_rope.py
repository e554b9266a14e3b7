"""Rotation tables against those of transformers."""

import numpy as np
import pytest
import tiny_models as tiny

from pagedkv.models.huggingface import DirectoryConfig
from pagedkv.models.rope import Rope, inverse_frequencies

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


def test_frequencies_are_rounded_once():
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        exact = [float(mpmath.mpf(12345.0) ** (mpmath.mpf(-2 * i) / 48)) for i in range(24)]
    assert inverse_frequencies(12345.0, 48).tolist() == exact


def test_a_given_attention_factor_wins():
    for kind in ("yarn", "longrope"):
        rope = Rope(1e4, 8, kind, 4.0, 64, 1.5, short=(1.0,) * 4, long=(2.0,) * 4)
        assert rope.table(100)[1] == 1.5
    assert Rope(1e4, 8, "yarn", 4.0, 64).table(1)[1] == pytest.approx(1 + 0.1 * np.log(4))
    assert Rope(1e4, 8, "yarn", 1.0, 64).table(1)[1] == 1.0
