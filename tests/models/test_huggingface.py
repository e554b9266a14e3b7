"""Hugging Face directories: tokenizer, end tokens and template are read; what is damaged or not computed is refused."""

import contextlib
import json
import struct
import sys

import numpy as np
import pytest
import tiny_models as tiny
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagedkv.llm import LLM
from pagedkv.models.config import ModelConfig
from pagedkv.models.errors import ModelError
from pagedkv.models.huggingface import DirectoryConfig
from pagedkv.models.source import open_model
from pagedkv.models.tokenizer import Tokenizer as Ours

TEXTS = [
    "", " ", "a", "Hello, world!", "  two  spaces\n\n\tand tabs ", "1234567 + 89", "naïve café", "日本語のテキスト",
    "🙂👍🏽 emoji",
    "<s> is no token here </s>", "<tool>call</tool>", "def f(x):\n    return x ** 2\n", "e\u0301 NFD",
]  # fmt: skip


def config_of(path) -> ModelConfig:
    with open_model(path) as opened:
        return opened.config


def refused(path) -> str:
    with pytest.raises(ModelError) as caught:
        config_of(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("llama", {"model_type": "mamba"}, "model_type: 'mamba' is not supported; supported: llama, "),
        ("llama", {"hidden_act": "relu"}, "hidden_act: 'relu' is not supported for llama"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation: 'silu' is not supported for gemma2"),
        ("llama", {"attention_bias": True}, "attention_bias: True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: "),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers: 0 is not in [1, 1024]"),
        ("llama", {"num_hidden_layers": 1}, "tensor model.layers.1."),
        ("llama", {"num_hidden_layers": 1000}, "num_hidden_layers: 1000 layers in a file of"),
        ("llama", {"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight: missing"),
        ("llama", {"num_attention_heads": "4"}, "num_attention_heads: '4' is not an integer"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ("llama", {"head_dim": 16}, "self_attn.q_proj.weight: shape (96, 64), the metadata asks for (64, 64)"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps: 'x' is not a number"),
        ("llama", {"eos_token_id": [2, 999]}, "eos_token_id: 999 is not in [0, 127]"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type: 'spiral' is not supported; supported: "),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor: missing"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor: 0 is not in [0.001, 1e+06]"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters: not a table"),
        ("llama", {"vocab_size": 127}, "vocab_size: 127, tensor model.embed_tokens.weight has 128 rows"),
        ("llama", {"head_dim": 17}, "head_dim: 17 is odd"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "factor: 3 rotated values of 16, must be even"),
        ("llama-linear", {"partial_rotary_factor": 0.5},
         "partial_rotary_factor: 0.5 is not supported for llama with a scaled rotation"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
         "rope_type: 'linear' is not supported; supported: default, longrope"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "short_factor: not a list of 8 numbers"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters: one for each kind of layer is not"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: must have full_attention or"),
        ("phi3-long", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
         "short_factor: not a list of 8 numbers"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types: not a list of 7"),
        ("gemma3_text", {"layer_types": ["linear_attention"] * 7}, "layer_types: 'linear_attention' is neither"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers: not a list of 4 zeros and ones"),
    ],
)  # fmt: skip
def test_bad_configurations(tmp_path, case, changes, says):
    assert says in refused(tiny.directory(case, tmp_path, **changes))


def test_old_names_of_rope_scaling(tmp_path):
    """Files of transformers before version 5 say rope_theta and rope_scaling."""
    new = config_of(tiny.directory("llama-llama3", tmp_path))
    scaling = {**tiny.REFERENCES["llama-llama3"]["config"]["rope_parameters"]}
    theta = scaling.pop("rope_theta")
    old = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling}
    assert config_of(tiny.directory("llama-llama3", tmp_path, **old)) == new
    scaling["type"] = scaling.pop("rope_type")
    assert config_of(tiny.directory("llama-llama3", tmp_path, **old)) == new
    gemma = config_of(tiny.directory("gemma3_text", tmp_path))
    old = {"rope_parameters": None, "rope_theta": 5000.0, "rope_local_base_freq": 100.0,
           "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "layer_types": None}  # fmt: skip
    assert config_of(tiny.directory("gemma3_text", tmp_path, **old)) == gemma


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", b"{", "config.json: not JSON"),
        ("config.json", b"[" * 100000, "config.json: not JSON"),
        ("config.json", b"[]", "config.json: a JSON list, must be an object"),
        ("config.json", b"{}", "model_type: missing"),
        ("generation_config.json", b"\xff", "generation_config.json: not JSON"),
        ("tokenizer.json", None, "tokenizer.json: No such file"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", b"3", "tokenizer_config.json: a JSON int"),
        ("model.safetensors", None, "neither model.safetensors nor model.safetensors.index.json is there"),
        ("model.safetensors", b"", "model.safetensors: not a sound safetensors file"),
        ("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}", "model.safetensors: not a sound safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../m.safetensors"}}', "'../m.safetensors' is not a"),
        ("model.safetensors.index.json", b'{"weight_map": []}', "weight_map is not a table"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path, file, content, says):
    path = tiny.directory("llama", tmp_path)
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(content)
    assert says in refused(path)


def test_a_tensor_cut_short_and_a_foreign_type(tmp_path):
    path = tiny.directory("llama", tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    assert "not a sound safetensors file" in refused(tmp_path)
    n = struct.unpack("<Q", whole[:8])[0]
    table = json.loads(whole[8 : 8 + n])
    name = next(key for key in table if key.endswith("norm.weight"))
    table[name] |= {"dtype": "I32"}
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + whole[8 + n :])
    assert f"tensor {name}: type I32; supported: F32, F16, BF16" in refused(tmp_path)


def test_end_tokens(tmp_path):
    path = tiny.directory("llama", tmp_path)
    assert config_of(path).stop_token_ids == (2,)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert config_of(path).stop_token_ids == (5, 7)
    table = tiny.tokenizer_json()
    table["added_tokens"][1]["content"] = "<|im_end|>"
    table["model"]["vocab"] = {"<|im_end|>" if k == "<s>" else k: v for k, v in table["model"]["vocab"].items()}
    (path / "tokenizer.json").write_text(json.dumps(table))
    assert config_of(path).stop_token_ids == (1, 5, 7)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False, lstrip=True)])
    return tokenizer


def sentence_piece():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
    pieces += [chr(c) for c in range(33, 127)] + ["lo", "\u2581a", "He", "wor"]
    merges = [("l", "o"), ("\u2581", "a"), ("H", "e"), ("w", "o"), ("wo", "r")]
    vocab = {piece: i for i, piece in enumerate([*pieces, "wo"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("bos", [False, True])
def test_tokenizers_are_those_of_the_library(tmp_path, make, bos):
    theirs = make()
    if bos:
        theirs.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", theirs.token_to_id("<s>"))]
        )
    theirs.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Ours.from_directory(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.token_to_id("<s>"), theirs.token_to_id("</s>"))
    assert ours.add_bos is bos and not ours.add_eos and ours.vocab_size == theirs.get_vocab_size()
    assert ours.special_ids >= {ours.bos_token_id, ours.eos_token_id}
    for text in TEXTS:
        ids = theirs.encode(text).ids
        if "<s>" in text:  # text never makes a control token
            assert not set(ours.encode(text, add_special_tokens=False)) & ours.special_ids
            ids = theirs.encode(text.replace("<", "≺").replace(">", "≻")).ids
            assert ours.encode(text.replace("<", "≺").replace(">", "≻")) == ids
            continue
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids) or make is byte_level, text
        assert ours.decode(ids).strip() == theirs.decode(ids).strip()
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert Ours.from_directory(tmp_path).apply_chat_template([{"role": "user", "content": "x"}]) == "file: x"


WHOLE_WORDS = {"vocab": {"<s>": 0, "</s>": 1, "s": 2, "<": 3, ">": 4, "/": 5, "<unk>": 6}, "unk_token": "<unk>"}


@pytest.mark.parametrize(
    "model",
    [
        models.BPE(vocab=WHOLE_WORDS["vocab"], merges=[], ignore_merges=True),
        models.BPE(vocab={**WHOLE_WORDS["vocab"], "<s": 7}, merges=[("<", "s"), ("<s", ">")]),
        models.Unigram([(text, -1.0) for text in WHOLE_WORDS["vocab"]], 6, False),
    ],
    ids=["whole words", "merges", "unigram"],
)
def test_models_that_know_control_tokens_as_words(tmp_path, model):
    """Text never makes a control token, whatever the model would make of it."""
    theirs = Tokenizer(model)
    theirs.save(str(tmp_path / "tokenizer.json"))
    table = json.loads((tmp_path / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    table["added_tokens"] = [{"id": i, "content": text, **flags} for i, text in enumerate(["<s>", "</s>"])]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    ours = Ours.from_directory(tmp_path)
    assert ours.special_ids >= {0, 1}
    assert theirs.encode("<s>").ids == [0]
    for text in ("<s>", "</s>", "<s><s></s>", "<<s>s>"):
        assert not {0, 1} & set(ours.encode(text)), text
    assert ours.encode("<s>", allow_special=True) == [0]


def test_two_tokens_of_one_id(tmp_path):
    table = tiny.tokenizer_json()
    table["model"]["vocab"]["x"] = 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match=r"tokenizer\.json: id 1 has two tokens, '"):
        Ours.from_directory(tmp_path)


def test_what_the_library_panics_at(tmp_path, capfd):
    """Its panics are no Exceptions in Python."""
    table = tiny.tokenizer_json() | {"normalizer": {"type": "Precompiled"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer of the tokenizers library: Precompiled"):
        Ours.from_directory(tmp_path)
    assert capfd.readouterr().err == ""
    sys.stderr.write("still there")
    assert capfd.readouterr().err == "still there"
    table["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    table["decoder"] = {"type": "Strip", "content": "x", "start": 2**40, "stop": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    assert Ours.from_directory(tmp_path).decode([3]) == chr(0x4E00), "ids become text without the library"


def test_a_post_processor_of_another_kind_is_refused(tmp_path):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    with pytest.raises(ModelError, match="only bos_token and eos_token are supported"):
        Ours.from_directory(tmp_path)


def test_yarn_of_phi3_is_longrope(tmp_path):
    """Its first files call longrope by that name; the factors count, as in transformers."""
    new = config_of(tiny.directory("phi3-long", tmp_path))
    rope = tiny.REFERENCES["phi3-long"]["config"]["rope_parameters"]
    for name in ("yarn", "su"):
        for key in ("rope_type", "type"):
            old = {k: v for k, v in rope.items() if k != "rope_type"} | {key: name}
            assert config_of(tiny.directory("phi3-long", tmp_path, rope_parameters=old)) == new


def test_rope_scaling_counts_before_rope_parameters(tmp_path):
    scaling = {"rope_type": "linear", "factor": 3.0}
    rope = config_of(tiny.directory("llama", tmp_path, rope_scaling=scaling, rope_theta=99.0)).ropes[0]
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 3.0, 99.0)
    rope = config_of(tiny.directory("llama", tmp_path, rope_theta=99.0, factor=7.0)).ropes[0]
    assert (rope.kind, rope.theta) == ("none", 500.0)


def test_mscale_of_yarn(tmp_path):
    """The factors transformers 5.24 gives for a factor of 4."""
    rope = tiny.REFERENCES["llama-yarn"]["config"]["rope_parameters"]

    def factor(**more):
        return config_of(tiny.directory("llama-yarn", tmp_path, rope_parameters=rope | more)).ropes[0].table(64)[1]

    assert factor() == factor(mscale=2.0) == factor(mscale=0.0, mscale_all_dim=1.0) == pytest.approx(1.1386294361119891)
    assert factor(mscale=0.7, mscale_all_dim=1.0) == pytest.approx(0.9634746568860826, rel=1e-12)
    assert factor(mscale=0.7, mscale_all_dim=1.0, attention_factor=2.0) == 2.0


class TestTies:
    """tie_word_embeddings, and an output head in the file: transformers looks whether the two are the same."""

    @staticmethod
    def directory(path, tied, **changes):
        tiny.directory("llama", path, tie_word_embeddings=tied)
        tensors = load_file(path / "model.safetensors")
        for name, change in changes.items():
            name = {"head": "lm_head.weight", "embedding": "model.embed_tokens.weight"}[name]
            if change is None:
                del tensors[name]
            else:
                tensors[name] = change(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    def test_a_different_head_is_used_and_said(self, tmp_path, caplog):
        path = self.directory(tmp_path, True)
        assert not config_of(path).tied
        assert "tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight" in caplog.text
        with load(path) as tied, load(self.directory(tmp_path, False)) as untied:
            assert np.array_equal(logits(tied), logits(untied))

    def test_the_same_head_is_none(self, tmp_path, caplog):
        path = self.directory(tmp_path, True, head=lambda tensors: tensors["model.embed_tokens.weight"].copy())
        assert config_of(path).tied and not caplog.text

    def test_a_head_alone_is_the_embedding(self, tmp_path):
        path = self.directory(tmp_path, True, embedding=None)
        assert config_of(path).tied
        head = self.directory(tmp_path, True, embedding=lambda tensors: tensors["lm_head.weight"].copy())
        with load(path) as alone, load(head) as both:
            assert np.array_equal(logits(alone), logits(both))

    def test_an_untied_head_that_is_missing(self, tmp_path):
        assert "tensor lm_head.weight: missing" in refused(self.directory(tmp_path, False, head=None))


def load(path):
    return contextlib.closing(LLM(path, kv_memory="8MiB", threads=1))


def logits(llm):
    return llm.logits(tiny.token_ids()[:5])


def test_tokens_without_a_row(tmp_path):
    """Files may have tokens for other inputs than text behind those of the embedding; a text with one is refused."""
    path = tiny.directory("llama", tmp_path)
    table = tiny.tokenizer_json()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    table["added_tokens"].append({"id": tiny.VOCAB, "content": "<image>", **flags})
    (path / "tokenizer.json").write_text(json.dumps(table))
    with open_model(path) as opened:
        tokenizer = opened.tokenizer
    assert tokenizer.encode("\u4e00") == [3]
    for special in (False, True):
        with pytest.raises(
            ValueError, match=r"^text: holds '<image>', token 128, which the model of 128 tokens lacks$"
        ):
            tokenizer.encode("\u4e00<image>", add_special_tokens=False, allow_special=special)
    table["post_processor"] = processors_of("<far>", tiny.VOCAB + 1)
    table["added_tokens"].append({"id": tiny.VOCAB + 1, "content": "<far>", **flags, "special": True})
    (path / "tokenizer.json").write_text(json.dumps(table))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<far>"}))
    assert "tokenizer.json: bos_token is id 129, the model has 128 tokens" in refused(path)


def processors_of(text, i):
    step = {"SpecialToken": {"id": text, "type_id": 0}}
    return {
        "type": "TemplateProcessing", "single": [step, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]}},
    }  # fmt: skip


@pytest.mark.parametrize("case", sorted(tiny.REFERENCES))
def test_every_tensor_keeps_its_name(tmp_path, case):
    """What messages call a tensor is what its file calls it."""
    if case.startswith("rope-"):
        return
    path = tiny.directory(case, tmp_path)
    directory = DirectoryConfig(path)
    for name in tiny.REFERENCES[case]["shapes"]:
        assert directory.original(directory.tensor_names(name)) == name


@pytest.mark.parametrize("kind", ["F64", "I8", "F8_E4M3", "U8", "BOOL"])
def test_types_that_are_not_read(tmp_path, kind):
    path = tiny.directory("llama", tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    n = struct.unpack("<Q", whole[:8])[0]
    table = json.loads(whole[8 : 8 + n])
    name = next(key for key in table if key.endswith("norm.weight"))
    table[name] |= {"dtype": kind}
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + whole[8 + n :])
    assert f"model.safetensors: tensor {name}: type {kind}; supported: F32, F16, BF16" in refused(tmp_path)
