"""load_model: a whole file through packing and a model step against float64, and what it refuses."""

import gguf
import gguf_writer as w
import numpy as np
import pytest
import tiny

from pagedkv import PagedKVCache
from pagedkv.core._testing import let_pass
from pagedkv.core.matmul import WEIGHT_TYPES
from pagedkv.models.errors import ModelError
from pagedkv.models.loader import load_model


def write_model(path, types="Q8_0", tied=True, seed=0, **changes):
    """A tiny llama with random weights. types: of every matrix."""
    rng = np.random.default_rng(seed)
    infos, data = [], b""
    for name, (shape, _) in tiny.tensors(tied).items():
        kind = gguf.GGMLQuantizationType[types if len(shape) == 2 else "F32"]
        spread = 1.0 if len(shape) == 1 or "embd" in name else shape[1] ** -0.5
        values = (rng.standard_normal(shape) * spread).astype(np.float32)
        raw = gguf.quants.quantize(values, kind).tobytes()
        infos.append(w.tensor_entry(name, list(reversed(shape)), int(kind), len(data)))
        data += raw + b"\0" * (-len(raw) % 32)
    return w.write(path, w.assemble([w.entry(*e) for e in tiny.entries(**changes)], infos, data))


def reference_logits(path, ids):
    """The llama of a GGUF file in float64: weights by the gguf package, rotation of adjacent pairs (2i, 2i+1)."""
    reader = gguf.GGUFReader(path)
    t = {
        x.name: gguf.quants.dequantize(x.data, x.tensor_type).reshape(x.shape[::-1]).astype(np.float64)
        for x in reader.tensors
    }
    heads, kv_heads, theta, eps, rope = (
        reader.fields[f"llama.{key}"].contents()
        for key in ("attention.head_count", "attention.head_count_kv", "rope.freq_base",
                    "attention.layer_norm_rms_epsilon", "rope.dimension_count")
    )  # fmt: skip
    n = len(ids)
    angle = np.outer(np.arange(n), theta ** (-np.arange(0, rope, 2) / rope))[:, None, :]
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight

    def rotate(x):
        even, odd = x[:, :, 0:rope:2], x[:, :, 1:rope:2]
        turned = x.copy()
        turned[:, :, 0:rope:2], turned[:, :, 1:rope:2] = even * cos - odd * sin, even * sin + odd * cos
        return turned

    x = t["token_embd.weight"][ids]
    for i in range(tiny.LAYERS):
        layer = {name.split(".")[2]: value for name, value in t.items() if name.startswith(f"blk.{i}.")}
        h = norm(x, layer["attn_norm"])
        q, k, v = (
            (h @ layer[name].T).reshape(n, count, -1)
            for name, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads))
        )
        k, v = (a.repeat(heads // kv_heads, axis=1) for a in (rotate(k), v))
        scores = np.einsum("nhd,thd->hnt", rotate(q), k) / np.sqrt(q.shape[2]) + np.triu(np.full((n, n), -np.inf), 1)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        attended = np.einsum("hnt,thd->nhd", weights / weights.sum(axis=2, keepdims=True), v).reshape(n, -1)
        x = x + attended @ layer["attn_output"].T
        h = norm(x, layer["ffn_norm"])
        gate = h @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return norm(x, t["output_norm.weight"]) @ t.get("output.weight", t["token_embd.weight"]).T


def logits(loaded, ids):
    config, forward = loaded.config, loaded.forward
    kv = PagedKVCache(config.n_layers, config.n_kv_heads, config.head_dim, n_pages=16, format="f32", threads=1)
    seq = kv.sequence()
    seq.extend(len(ids))
    out = np.zeros((len(ids), forward.vocab_padded), np.float32)
    forward.run(kv, [seq], ids, [len(ids)], range(len(ids)), out)
    return out[:, : config.vocab_size]


def error(found, expected):
    return np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())


IDS = np.random.default_rng(4).integers(0, len(tiny.TOKENS), 40)
LIMITS = {"F32": 3e-6, "F16": 3e-6, "BF16": 3e-6, "Q4_0": 0.02, "Q4_1": 0.02, "Q5_0": 0.02, "Q5_1": 0.02, "Q8_0": 0.02}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("types", LIMITS)
def test_logits_of_a_file_are_those_of_its_definition(tmp_path, types, tied):
    path = write_model(tmp_path / "tiny.gguf", types, tied)
    loaded = load_model(path, threads=2)
    assert error(logits(loaded, IDS), reference_logits(path, IDS)) < LIMITS[types]


@pytest.mark.parametrize(("rope_dim", "theta"), [(16, 10000.0), (8, 50000.0), (2, 3.0), (14, 1e6)])
def test_partial_rotation_and_base(tmp_path, rope_dim, theta):
    changes = {"llama__rope__dimension_count": (w.U32, rope_dim), "llama__rope__freq_base": (w.F32, theta)}
    path = write_model(tmp_path / "tiny.gguf", "F32", **changes)
    assert error(logits(load_model(path), IDS), reference_logits(path, IDS)) < 3e-6


def test_int12_activations_lose_less(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", "Q8_0")
    expected = reference_logits(path, IDS)
    narrow, wide = (error(logits(load_model(path, activations=a), IDS), expected) for a in ("int8", "int12"))
    assert wide < 0.002 < narrow


def test_what_is_loaded(tmp_path):
    path = write_model(tmp_path / "tiny.gguf")
    loaded = load_model(str(path), threads=3)
    assert (loaded.name, loaded.path) == ("Tiny", path)
    assert (loaded.forward.n_threads, loaded.forward.n_layers) == (3, tiny.LAYERS)
    assert loaded.forward.vocab_size == loaded.config.vocab_size == len(tiny.TOKENS)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello world")) == "hello world"
    loaded.close()
    loaded.close()


def test_nothing_of_the_file_stays_mapped(tmp_path):
    path = write_model(tmp_path / "tiny.gguf")
    loaded = load_model(path)
    expected = logits(loaded, IDS)
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if "tiny.gguf" in line]
    path.write_bytes(b"")
    assert logits(loaded, IDS).tobytes() == expected.tobytes()


def test_who_packs_does_not_matter(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", "Q4_1")
    one, two, eight = (logits(load_model(path, threads=n), IDS).tobytes() for n in (1, 2, 8))
    assert one == two == eight


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "int4"}, "activations: 'int4' is not one of int8, int12"),
        ({"quantization": "q4"}, "quantization: 'q4' is not one of q8_0"),
        ({"threads": 0}, "threads: 0 is outside [1, 1024]"),
    ],
)
def test_bad_options(tmp_path, options, message):
    path = write_model(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError) as refusal:
        load_model(path, **options)
    assert str(refusal.value) == message


def refused(path, raw):
    with pytest.raises(ModelError) as refusal:
        load_model(w.write(path, raw))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_files_that_are_no_model(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        load_model(tmp_path / "absent.gguf")
    path, raw = tmp_path / "tiny.gguf", write_model(tmp_path / "whole.gguf").read_bytes()
    refused(path, b"")
    refused(path, b"PK\3\4" + raw[4:])
    for cut in (3, 23, 100, len(raw) // 2, len(raw) - 1):
        refused(path, raw[:cut])


def test_an_unsupported_tensor_type_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(w.TYPE_IDS, "Q8_K", (15, 256, 292))
    changes = {"blk.1.attn_v.weight": ((32, 256), "Q8_K")}
    message = refused(tmp_path / "tiny.gguf", tiny.model(tensor_changes=changes))
    assert "blk.1.attn_v.weight" in message
    changes = {name: (shape, "Q8_K") for name, (shape, _) in tiny.tensors().items() if shape[-1] % 256 == 0}
    assert not changes  # so the shape is refused first there; the type is, where it fits
    wide = {"llama__embedding_length": (w.U32, 256), "llama__rope__dimension_count": (w.U32, 64)}
    changes = {
        "token_embd.weight": ((len(tiny.TOKENS), 256), "Q8_0"),
        "output_norm.weight": ((256,), "F32"),
        **{f"blk.{i}.{name}_norm.weight": ((256,), "F32") for i in range(2) for name in ("attn", "ffn")},
        **{f"blk.{i}.attn_q.weight": ((256, 256), "Q8_0") for i in range(2)},
        **{f"blk.{i}.attn_k.weight": ((128, 256), "Q8_0") for i in range(2)},
        **{f"blk.{i}.attn_v.weight": ((128, 256), "Q8_K") for i in range(2)},
        **{f"blk.{i}.attn_output.weight": ((256, 256), "Q8_0") for i in range(2)},
        **{f"blk.{i}.ffn_{name}.weight": ((96, 256), "Q8_0") for i in range(2) for name in ("gate", "up")},
        **{f"blk.{i}.ffn_down.weight": ((256, 96), "Q8_0") for i in range(2)},
    }
    message = refused(tmp_path / "tiny.gguf", tiny.model(tensor_changes=changes, **wide))
    assert message == (
        f"tensor blk.0.attn_v.weight: type Q8_K is not supported; supported: {', '.join(WEIGHT_TYPES)}"
    )


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_norm.weight", "blk.0.ffn_norm.weight"])
def test_a_quantised_vector_is_named(tmp_path, name):
    message = refused(tmp_path / "tiny.gguf", tiny.model(tensor_changes={name: ((tiny.HIDDEN,), "Q8_0")}))
    assert message == f"tensor {name}: type Q8_0 is not supported for a vector; supported: F32, F16, BF16"


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    assert name in refused(tmp_path / "tiny.gguf", tiny.model(tensor_changes={name: None}))


def test_refused_memory_is_an_error(tmp_path):
    """Each request for memory in turn; the file is closed in order every time."""
    path = write_model(tmp_path / "tiny.gguf")
    expected, n = logits(load_model(path), IDS).tobytes(), 0
    while True:
        let_pass(n)
        try:
            loaded = load_model(path)
            break
        except MemoryError as refusal:
            assert str(refusal).startswith("the system refused")
        finally:
            let_pass(-1)
        n += 1
    assert n > 7 * tiny.LAYERS
    assert logits(loaded, IDS).tobytes() == expected
