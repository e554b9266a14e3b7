"""Split GGUF models: the parts are one model, and a wrong set is refused by name."""

import gguf
import gguf_writer as w
import numpy as np
import pytest
import tiny_models as tiny

from pagedkv import LLM
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf_split import open_gguf


def part(tmp_path, number, count, tensors, name=None, **keys):
    entries = [("split.no", w.U16, number), ("split.count", w.U16, count), *((k, *v) for k, v in keys.items())]
    path = tmp_path / (name or f"m-{number + 1:05}-of-{count:05}.gguf")
    return w.write(path, w.model({t: ((2, 4), "F32") for t in tensors}, entries, fill=number + 1))


def test_parts_are_one_file(tmp_path):
    first = part(tmp_path, 0, 3, ["a"], **{"split.tensors.count": (w.I32, 4)})
    part(tmp_path, 1, 3, ["b", "c"])
    part(tmp_path, 2, 3, ["d"])
    with open_gguf(first) as parts:
        assert list(parts.tensors) == ["a", "b", "c", "d"]
        assert [bytes(parts.data(name))[0] for name in "abcd"] == [1, 2, 2, 3]
        assert parts.n_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: (p / "m-00002-of-00003.gguf").unlink(), "m-00002-of-00003.gguf: No such file"),
        (lambda p: part(p, 1, 3, ["a"]), "tensor a is in two parts"),
        (lambda p: part(p, 2, 3, ["b"], name="m-00002-of-00003.gguf"), "part 2 of 3, wanted part 1 of 3"),
        (lambda p: part(p, 1, 2, ["b"], name="m-00002-of-00003.gguf"), "part 1 of 2, wanted part 1 of 3"),
        (lambda p: part(p, 1, 3, ["b", "e"]), "split.tensors.count: 3, the 3 parts hold 4 tensors"),
        (lambda p: (p / "m-00002-of-00003.gguf").write_bytes(b"x" * 40), "not a GGUF file"),
    ],
)
def test_wrong_sets(tmp_path, damage, says):
    first = part(tmp_path, 0, 3, ["a"], **{"split.tensors.count": (w.I32, 3)})
    part(tmp_path, 1, 3, ["b"])
    part(tmp_path, 2, 3, ["c"])
    damage(tmp_path)
    with pytest.raises(ModelError) as caught:
        open_gguf(first)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_only_the_first_part_opens_a_model(tmp_path):
    for path in (part(tmp_path, 1, 2, ["b"]), part(tmp_path, 0, 2, ["a"], name="other.gguf")):
        with pytest.raises(ModelError, match="one of 2 parts of a model; give the first one, named NAME-00001"):
            open_gguf(path)
    with pytest.raises(ModelError, match=r"split.count: 60000, at most 1024"):
        open_gguf(part(tmp_path, 0, 60000, ["a"]))


def test_a_split_model_runs(tmp_path):
    """gguf's own writer splits the file."""
    whole = tiny.gguf_file("qwen3", tmp_path / "whole.gguf")
    tiny.gguf_file("qwen3", tmp_path / "m.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2 and len(gguf.GGUFReader(parts[1]).tensors) == 9
    found = []
    for path in (whole, parts[0]):
        with LLM(path, kv_pages=16, max_model_len=96) as llm:
            found.append(llm.logits(tiny.token_ids()))
    assert np.array_equal(*found)
