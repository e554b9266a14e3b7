"""ModelConfig: what it reads from good metadata, and that bad metadata is refused by name, value and range."""

import re
from pathlib import Path

import gguf_writer as w
import pytest
import tiny

import pagedkv
from pagedkv.models.architectures import ARCHITECTURES
from pagedkv.models.config import ModelConfig
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf import GGUFFile
from pagedkv.models.metadata import Metadata
from pagedkv.models.rope import Rope


def config(tmp_path, **options) -> ModelConfig:
    with GGUFFile(w.write(tmp_path / "m.gguf", tiny.model(**options))) as file:
        return ModelConfig.from_gguf(file)


def refused(tmp_path, **options) -> str:
    with pytest.raises(ModelError) as caught:
        config(tmp_path, **options)
    return str(caught.value)


def test_every_field(tmp_path):
    assert config(tmp_path) == ModelConfig(
        architecture="llama", name="Tiny", n_layers=2, hidden_size=64, n_heads=4, n_kv_heads=2, head_dim=16,
        ffn_size=96, vocab_size=len(tiny.TOKENS), context_length=256, rms_eps=2.0**-17,
        ropes=(Rope(50000.0, 16, original_context=256),), rope_index=(0, 0), windows=(0, 0), attention_scale=0.25,
        tied=True, stop_token_ids=(0, 2), bos_token_id=1, eos_token_id=2, pad_token_id=2, add_bos=False,
    )  # fmt: skip


def test_defaults_of_the_format(tmp_path):
    read = config(
        tmp_path, tied=False, llama__rope__freq_base=None, llama__rope__dimension_count=None, general__name=None,
        tokenizer__ggml__padding_token_id=None, tokenizer__ggml__bos_token_id=None,
    )  # fmt: skip
    assert (read.rope_theta, read.rope_dim, read.tied, read.pad_token_id) == (10000.0, 16, False, None)
    assert (read.bos_token_id, read.add_bos, read.name) == (None, False, "m")


def test_kv_heads_default_to_heads(tmp_path):
    shapes = {f"blk.{i}.attn_{x}.weight": ((64, 64), "Q4_0") for i in range(2) for x in "kv"}
    assert config(tmp_path, tensor_changes=shapes, llama__attention__head_count_kv=None).n_kv_heads == 4


def test_head_dim_from_its_own_key(tmp_path):
    keys = {"llama__attention__key_length": (w.U32, 32), "llama__attention__value_length": (w.U32, 32)}
    read = config(tmp_path, head_dim=32, **keys)
    assert (read.head_dim, read.rope_dim, read.hidden_size // read.n_heads) == (32, 16, 16)


def test_one_number_per_layer(tmp_path):
    equal = {"llama__attention__head_count_kv": (w.ARRAY, (w.I32, [2, 2]))}
    assert config(tmp_path, **equal).n_kv_heads == 2
    unequal = {"llama__attention__head_count_kv": (w.ARRAY, (w.I32, [2, 4]))}
    assert refused(tmp_path, **unequal).startswith("llama.attention.head_count_kv: ")


@pytest.mark.parametrize(
    ("pre", "told", "wanted"),
    [("smollm", None, False), ("smollm", 1, True), ("llama-bpe", None, True), ("llama-bpe", 0, False)],
)
def test_add_bos(tmp_path, pre, told, wanted):
    flag = None if told is None else (w.BOOL, told)
    keys = {"tokenizer__ggml__pre": (w.STRING, pre), "tokenizer__ggml__add_bos_token": flag}
    assert config(tmp_path, **keys).add_bos is wanted


def test_stop_tokens(tmp_path):
    keys = {"tokenizer__ggml__eot_token_id": (w.U32, 7), "tokenizer__ggml__eos_token_id": (w.U32, 9)}
    assert config(tmp_path, **keys).stop_token_ids == (0, 2, 7, 9)


@pytest.mark.parametrize(
    ("key", "kind", "value", "says"),
    [
        ("general.architecture", w.STRING, "mamba", "'mamba' is not supported; supported: "),
        ("general.architecture", w.U32, 5, "5 is not a string"),
        ("llama.block_count", w.U32, 0, "0 is not in [1, 1024]"),
        ("llama.block_count", w.U32, 2**32 - 1, "4294967295 is not in [1, 1024]"),
        ("llama.block_count", w.U32, 1000, "1000 layers in a file of 20 tensors"),
        ("llama.block_count", w.STRING, "30", "'30' is not an integer in [1, 1024]"),
        ("llama.block_count", w.F32, 30.0, "30.0 is not an integer"),
        ("llama.block_count", w.BOOL, 1, "True is not an integer"),
        ("llama.embedding_length", w.U64, 2**63, "9223372036854775808 is not in [1, 262144]"),
        ("llama.embedding_length", w.I32, -64, "-64 is not in [1, 262144]"),
        ("llama.attention.head_count", w.U32, 0, "0 is not in [1, 4096]"),
        ("llama.attention.head_count", w.U32, 6, "6 does not divide embedding_length 64"),
        ("llama.attention.head_count_kv", w.U32, 3, "3 does not divide head_count 4"),
        ("llama.attention.head_count_kv", w.U32, 8, "8 is not in [1, 4]"),
        ("llama.attention.key_length", w.U32, 0, "0 is not in [2, 4096]"),
        ("llama.attention.value_length", w.U32, 8, "8 differs from key_length 16"),
        ("llama.feed_forward_length", w.U32, 0, "0 is not in [1, 1048576]"),
        ("llama.context_length", w.U32, 0, "0 is not in [1, 134217728]"),
        ("llama.attention.layer_norm_rms_epsilon", w.F32, 0.0, "0 is not in [1e-12, 0.1]"),
        ("llama.attention.layer_norm_rms_epsilon", w.F32, float("nan"), "nan is not in [1e-12, 0.1]"),
        ("llama.rope.freq_base", w.F32, float("inf"), "inf is not in [1, 1e+12]"),
        ("llama.rope.freq_base", w.F32, -1.0, "-1 is not in [1, 1e+12]"),
        ("llama.rope.dimension_count", w.U32, 17, "17 is not in [2, 16]"),
        ("llama.rope.dimension_count", w.U32, 15, "15 is odd"),
        ("llama.rope.scaling.type", w.STRING, "spiral", "'spiral' is not supported; supported: none, "),
        ("llama.rope.scaling.type", w.STRING, "longrope", "longrope needs rope_factors_long.weight"),
        ("llama.rope.scaling.factor", w.F32, 0.0, "0 is not in [0.001, 1e+06]"),
        ("llama.expert_count", w.U32, 5000, "5000 is not in [0, 4096]"),
        ("llama.attention.sliding_window", w.I32, -1, "-1 is not in [0, 134217728]"),
        ("llama.embedding_scale", w.F32, 2.0, "2.0 is not supported"),
        ("tokenizer.ggml.bos_token_id", w.U32, 5000, "5000 is not in [0, 270]"),
        ("tokenizer.ggml.eos_token_id", w.I32, -1, "-1 is not in [0, 270]"),
        ("tokenizer.ggml.add_bos_token", w.U8, 1, "1 is not a boolean"),
        ("tokenizer.ggml.tokens", w.STRING, "abc", "'abc' is not an array of strings"),
        ("tokenizer.ggml.tokens", w.ARRAY, (w.STRING, ["x"] * 272), "272 tokens, token_embd.weight has 271 rows"),
        ("tokenizer.ggml.token_type", w.STRING, "x", "'x' is not an array of numbers"),
    ],
)
def test_bad_values(tmp_path, key, kind, value, says):
    message = refused(tmp_path, **{key.replace(".", "__"): (kind, value)})
    assert message.startswith(f"{key}: ") or (key == "llama.block_count" and key in message)
    assert says in message


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (1e4, "10000 is not in [0, 1000]"),
        (-1.0, "-1 is not in [0, 1000]"),
        (float("nan"), "nan is not in [0, 1000]"),
        (2.0**-11, "0.000488281 is not 0 and is below 0.000976562"),
        ("30", "'30' is not a number in [0, 1000]"),
    ],
)
def test_soft_caps_that_float32_does_not_compute_accurately(value, says):
    with pytest.raises(ModelError) as caught:
        Metadata({"cap": value}).softcap("cap", 50.0)
    assert str(caught.value) == f"cap: {says}"


def test_soft_caps():
    assert [Metadata({"cap": x}).softcap("cap", 5.0) for x in (0, 0.0, 2.0**-10, 30, 1000.0)] == [
        0,
        0,
        2.0**-10,
        30,
        1000,
    ]
    assert Metadata({}).softcap("cap", 50.0) == 50


@pytest.mark.parametrize("reader", ["config.py", "huggingface.py"])
def test_both_containers_read_soft_caps_so(reader):
    source = (Path(pagedkv.__file__).parent / "models" / reader).read_text()
    assert "read.softcap(" in source and not re.search(r"read\.real\([^)]*softcap", source)


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture", "llama.block_count", "llama.context_length", "llama.embedding_length",
        "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
    ],
)  # fmt: skip
def test_missing_keys(tmp_path, key):
    assert refused(tmp_path, **{key.replace(".", "__"): None}) == f"{key}: missing"


def test_unused_keys_that_say_nothing_are_fine(tmp_path):
    config(tmp_path, llama__expert_count=(w.U32, 0), llama__rope__scaling__type=(w.STRING, "none"))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("token_embd.weight", None, "missing"),
        (
            "token_embd.weight",
            ((len(tiny.TOKENS), 96), "Q4_0"),
            "shape (271, 96), must be (vocabulary up to 16777216, 64)",
        ),
        ("token_embd.weight", ((64,), "F32"), "shape (64,), must be"),
        ("output_norm.weight", None, "missing"),
        ("blk.1.ffn_up.weight", None, "missing"),
        ("blk.1.ffn_up.weight", ((64, 96), "Q4_0"), "shape (64, 96), the metadata asks for (96, 64)"),
        ("blk.0.attn_k.weight", ((64, 64), "Q4_0"), "shape (64, 64), the metadata asks for (32, 64)"),
        ("blk.0.attn_norm.weight", ((64, 1), "F32"), "shape (64, 1), the metadata asks for (64,)"),
        ("blk.0.attn_q.bias", ((64,), "F32"), "not supported by the llama architecture"),
        ("rope_freqs.weight", ((8,), "F32"), "a factor that is not in [1e-06, 1e+06]"),
        ("rope_freqs.weight", ((7,), "F32"), "F32 (7,), must be F32 (8,)"),
        ("blk.2.attn_q.weight", ((64, 64), "F32"), "not supported by the llama architecture"),
    ],
)
def test_bad_tensors(tmp_path, name, change, says):
    message = refused(tmp_path, tensor_changes={name: change})
    assert message.startswith(f"tensor {name}: ") and says in message


def test_real_model(smollm2_path):
    with GGUFFile(smollm2_path) as file:
        read = ModelConfig.from_gguf(file)
        assert set(ARCHITECTURES["llama"].tensor_shapes(read)) == set(file.tensors)
    assert (read.n_layers, read.hidden_size, read.n_heads, read.n_kv_heads, read.head_dim) == (30, 576, 9, 3, 64)
    assert (read.ffn_size, read.vocab_size, read.context_length, read.rope_theta) == (1536, 49152, 8192, 100000.0)
    assert read.tied and not read.add_bos and read.stop_token_ids == (0, 2)
    assert read.rms_eps == pytest.approx(1e-5)
