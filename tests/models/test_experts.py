"""Feed-forward networks of several experts: which are chosen, that neighbours change no bit, and what is refused.

What they compute is compared with transformers in test_architectures.py.
"""

import sys
from pathlib import Path

import gguf
import gguf_writer as w
import numpy as np
import pytest
import tiny
import tiny_models

from pagedkv import LLM, PoolExhausted, SamplingParams
from pagedkv.core._kernels import ThreadPool
from pagedkv.core._testing import let_pass
from pagedkv.core.layer import Layer
from pagedkv.core.matmul import PackedMatrix
from pagedkv.models.config import ModelConfig
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf import GGUFFile
from pagedkv.models.huggingface import DirectoryConfig

sys.path.append(str(Path(__file__).parent.parent / "core"))

from isas import assert_one_result, on_every_isa

CASES = ["qwen3_moe", "qwen3_moe-all", "mixtral"]
N_EXPERTS, HIDDEN, FFN = 6, 64, 96
IDS = tiny_models.token_ids()


def logits_of(path, ids=IDS, **options):
    options = {"threads": 2, "kv_format": "f32", "kv_pages": 32, "max_model_len": 96} | options
    with LLM(path, **options) as llm:
        return llm.logits(ids)


def quantised_file(path, kinds, used=2, change=lambda arrays: None, n_experts=N_EXPERTS):
    """A mixtral-type file with matrices of experts quantised as `kinds` says for gate, up and down."""
    rng = np.random.default_rng(11)
    shapes = tiny.tensors()
    arrays = {
        name: rng.standard_normal(shape) * (1.5 / np.sqrt(shape[-1])) if len(shape) == 2 else np.ones(shape)
        for name, (shape, _) in shapes.items()
        if "ffn_" not in name or "norm" in name
    }
    for i in range(tiny.LAYERS):
        arrays[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((n_experts, tiny.HIDDEN))
        for part, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            arrays[f"blk.{i}.ffn_{part}_exps.weight"] = rng.standard_normal((n_experts, *shape)) * 0.2
    change(arrays)
    out = gguf.GGUFWriter(path, "llama")
    scalars = {w.U32: out.add_uint32, w.F32: out.add_float32, w.STRING: out.add_string}
    for key, kind, value in tiny.entries():
        if kind == w.ARRAY:
            out.add_array(key, value[1])
        elif key != "general.architecture":
            scalars[kind](key, value)
    out.add_expert_count(n_experts)
    out.add_expert_used_count(used)
    for name, x in arrays.items():
        kind = kinds.get(name.split(".")[2].removesuffix("_exps"), "F32") if len(x.shape) > 2 else "F32"
        quant = gguf.GGMLQuantizationType[kind]
        data = np.ascontiguousarray(x, np.float32)
        out.add_tensor(name, gguf.quants.quantize(data, quant) if kind != "F32" else data, raw_dtype=quant)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


QUANTISED = {"ffn_gate": "Q4_0", "ffn_up": "Q8_0", "ffn_down": "Q8_0"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return quantised_file(tmp_path_factory.mktemp("experts") / "m.gguf", QUANTISED)


class TestNeighbours:
    """The bits of a row do not depend on which other rows chose its experts, nor on who computes it."""

    @pytest.mark.parametrize("activations", ["int8", "int12"])
    def test_chunks_and_threads(self, path, activations):
        whole = logits_of(path, activations=activations)
        for threads in (1, 3):
            with LLM(path, threads=threads, kv_format="f32", kv_pages=64, activations=activations) as llm:
                for chunk in (1, 2, 17, 80):
                    assert np.array_equal(llm.logits(IDS, chunk=chunk), whole), (threads, chunk)

    @pytest.mark.parametrize("activations", ["int8", "int12"])
    def test_instruction_sets(self, path, activations):
        results = on_every_isa(lambda: logits_of(path, activations=activations).tobytes())
        assert len(results) > 1
        assert_one_result(results)

    def test_batches(self, path):
        """Log-probabilities of a request alone and among sixteen others, token for token the same numbers."""
        rng = np.random.default_rng(3)
        prompts = [IDS[:20], *(rng.integers(3, 100, rng.integers(2, 40)).tolist() for _ in range(16))]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=4)

        def run(prompts, **options):
            with LLM(path, threads=2, kv_pages=256, enable_prefix_caching=False, **options) as llm:
                return [output.outputs[0] for output in llm.generate(prompts, params)]

        together = run(prompts, max_num_batched_tokens=64)
        for prompt, one in zip(prompts, together, strict=True):
            alone = run([prompt])[0]
            assert (alone.token_ids, alone.logprobs) == (one.token_ids, one.logprobs)

    @pytest.mark.parametrize("used", [1, N_EXPERTS])
    def test_one_expert_and_all_of_them(self, tmp_path, used):
        path = quantised_file(tmp_path / "m.gguf", QUANTISED, used)
        with LLM(path, threads=2, kv_format="f32", kv_pages=64) as llm:
            assert np.array_equal(llm.logits(IDS, chunk=3), llm.logits(IDS))

    def test_quantisation_is_near_the_floats(self, tmp_path, path):
        plain, quantised = logits_of(quantised_file(tmp_path / "m.gguf", {})), logits_of(path)
        assert 1e-3 < np.abs(plain - quantised).mean() < 0.2 * plain.std()


class TestChoice:
    def test_of_equal_logits_the_lower_index(self, tmp_path):
        """All experts tie: the first two are used, whatever the others hold."""

        def tie(arrays):
            for name, x in arrays.items():
                if "ffn_gate_inp" in name:
                    x[:] = x[0]

        def spoil(arrays):
            tie(arrays)
            for name, x in arrays.items():
                if "_exps" in name:
                    x[2:] = 7

        def spoil_one(arrays):
            tie(arrays)
            for name, x in arrays.items():
                if "_exps" in name:
                    x[1] = 7

        plain = logits_of(quantised_file(tmp_path / "a.gguf", {}, change=tie))
        assert np.array_equal(logits_of(quantised_file(tmp_path / "b.gguf", {}, change=spoil)), plain)
        assert not np.array_equal(logits_of(quantised_file(tmp_path / "c.gguf", {}, change=spoil_one)), plain)

    def test_a_tie_below_a_later_larger_one(self, tmp_path):
        """Experts 0 and 1 tie where 2 is the largest, and 3 and 4 elsewhere: 1 and 5 are never used."""

        def rank(arrays):
            for name, x in arrays.items():
                if "ffn_gate_inp" in name:
                    x[:] = np.array([1.0, 1.0, 2.0, -3.0, -3.0, -2.0])[:, None] * x[0]

        def spoil(arrays):
            rank(arrays)
            for name, x in arrays.items():
                if "_exps" in name:
                    x[[1, 5]] = 7

        plain = logits_of(quantised_file(tmp_path / "a.gguf", {}, change=rank))
        assert np.array_equal(logits_of(quantised_file(tmp_path / "b.gguf", {}, change=spoil)), plain)

    def test_the_largest_logits(self, tmp_path):
        """With router rows 0, 1, 2, ... times one of them, each token uses the first or the last two experts."""

        def ramp(arrays):
            for name, x in arrays.items():
                if "ffn_gate_inp" in name:
                    x[:] = np.arange(1.0, N_EXPERTS + 1)[:, None] * x[0]

        def spoil(arrays):
            ramp(arrays)
            for name, x in arrays.items():
                if "_exps" in name:
                    x[2:4] = 7

        plain = logits_of(quantised_file(tmp_path / "a.gguf", {}, change=ramp))
        assert np.array_equal(logits_of(quantised_file(tmp_path / "b.gguf", {}, change=spoil)), plain)

    def test_a_lone_expert_is_a_plain_network(self, tmp_path):
        """One expert has the share 1: the bits of the model that has it as its only network."""

        def first(arrays):
            for name in [name for name in arrays if "_exps" in name]:
                arrays[name.replace("_exps", "")] = arrays.pop(name)[0]
            for name in [name for name in arrays if "gate_inp" in name]:
                del arrays[name]

        lone = logits_of(quantised_file(tmp_path / "a.gguf", {}, 1, n_experts=1))
        # an expert count of 0 is no expert
        plain = logits_of(
            quantised_file(tmp_path / "b.gguf", {}, 1, change=lambda x: self.flatten(x, first), n_experts=0)
        )
        assert np.array_equal(lone, plain)

    @staticmethod
    def flatten(arrays, first):
        rng = np.random.default_rng(11)
        # the same numbers as with one expert: drawn again in the same order
        for name in arrays:
            shape = (1, *arrays[name].shape[1:]) if "_exps" in name or "gate_inp" in name else arrays[name].shape
            if len(shape) == 1:
                continue
            scale = 0.2 if "_exps" in name else 1 if "gate_inp" in name else 1.5 / np.sqrt(shape[-1])
            arrays[name] = rng.standard_normal(shape) * scale
        first(arrays)


@pytest.mark.parametrize("case", CASES)
def test_old_files_with_one_tensor_for_each_expert(case, tmp_path):
    stacked = logits_of(tiny_models.gguf_file(case, tmp_path / "a.gguf"))
    apart = logits_of(tiny_models.gguf_file(case, tmp_path / "b.gguf", stacked=False))
    assert np.array_equal(stacked, apart)


def test_the_router_stays_as_the_file_has_it(tmp_path):
    """Quantising at load leaves what chooses alone: with all experts alike, choosing otherwise would not show."""
    path = tiny_models.directory("qwen3_moe", tmp_path)
    plain, quantised = logits_of(path), logits_of(path, quantization="q8_0")
    assert 1e-3 < np.abs(plain - quantised).mean() < 0.2 * plain.std()


def test_refused_memory_is_an_error(tmp_path):
    """Each request for memory in turn, of loading and of the first step."""
    path = quantised_file(tmp_path / "m.gguf", QUANTISED)
    expected, n = logits_of(path, IDS[:9]), 0
    while True:
        let_pass(n)
        try:
            found = logits_of(path, IDS[:9])
            break
        except (MemoryError, PoolExhausted) as refusal:
            assert str(refusal)
        finally:
            let_pass(-1)
        n += 1
    assert n > tiny.LAYERS * 3 * N_EXPERTS and np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("key", "kind", "value", "says"),
    [
        ("expert_count", w.U32, 5000, "llama.expert_count: 5000 is not in [0, 4096]"),
        ("expert_used_count", w.U32, 7, "llama.expert_used_count: 7 is not in [1, 6]"),
        ("expert_used_count", w.U32, 0, "llama.expert_used_count: 0 is not in [1, 6]"),
        ("expert_used_count", None, None, "llama.expert_used_count: missing"),
        ("expert_gating_func", w.U32, 2, "llama.expert_gating_func: 2 is not supported, only 1, softmax"),
        ("expert_shared_count", w.U32, 1, "llama.expert_shared_count: 1 is not supported"),
        ("expert_weights_scale", w.F32, 2.0, "llama.expert_weights_scale: 2.0 is not supported"),
        ("expert_feed_forward_length", w.U32, 64, "tensor blk.0.ffn_gate_exps.weight: shape (6, 96, 64), the metadata"),
        ("expert_count", w.U32, 8, "tensor blk.0.ffn_gate_inp.weight: shape (6, 64), the metadata asks for (8, 64)"),
        ("expert_count", w.U32, 0, "tensor blk.0.ffn_gate.weight: missing"),
    ],
)
def test_bad_metadata(tmp_path, key, kind, value, says):
    shapes = {name: item for name, item in tiny.tensors().items() if "ffn_" not in name or "norm" in name}
    for i in range(tiny.LAYERS):
        shapes[f"blk.{i}.ffn_gate_inp.weight"] = ((N_EXPERTS, HIDDEN), "F32")
        for part, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            shapes[f"blk.{i}.ffn_{part}_exps.weight"] = ((N_EXPERTS, *shape), "F16")
    changes = {"llama__expert_count": (w.U32, N_EXPERTS), "llama__expert_used_count": (w.U32, 2)}
    good = w.model(shapes, tiny.entries(**changes))
    changes[f"llama__{key}"] = None if kind is None else (kind, value)
    bad = w.model(shapes, tiny.entries(**changes))
    with GGUFFile(w.write(tmp_path / "good.gguf", good)) as file:
        assert ModelConfig.from_gguf(file).n_experts == N_EXPERTS
    with GGUFFile(w.write(tmp_path / "bad.gguf", bad)) as file, pytest.raises(ModelError) as caught:
        ModelConfig.from_gguf(file)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mlp_only_layers": [1]}, "mlp_only_layers: [1]: layers that differ are not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not in [1, 1]"),
        ({"num_local_experts": 0}, "num_local_experts: no experts"),
        ({"num_local_experts": None}, "num_experts: 128 experts in a file of"),
        ({"num_experts": 7}, "tensor model.layers.0.mlp.gate.weight: shape (6, 64), the metadata asks for (7, 64)"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is not in [1, 6]"),
    ],
)
def test_bad_configurations(tmp_path, changes, says):
    path = tiny_models.directory("qwen3_moe", tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        logits_of(path)
    assert says in str(caught.value)


def test_another_name_of_the_number_of_experts(tmp_path):
    path = tiny_models.directory("qwen3_moe", tmp_path, num_local_experts=None, num_experts=6)
    assert DirectoryConfig(path)._experts() == (6, 2, "chosen")


def test_a_layer_has_one_kind_of_network():
    matrix = PackedMatrix.pack(ThreadPool(1), "F32", np.zeros((16, 16), np.float32), 16, 16)
    attention = {"q": matrix, "k": matrix, "v": matrix, "o": matrix}
    ffn, expert = {"gate": matrix, "up": matrix, "down": matrix}, (matrix, matrix, matrix)
    for wrong in (
        {},
        {"gate": matrix},
        {**ffn, "router": matrix, "experts": [expert]},
        {"router": matrix},
        {"experts": [expert]},
    ):
        with pytest.raises(ValueError, match="either gate, up and down, or router and experts"):
            Layer(**attention, **wrong)
    with pytest.raises(ValueError, match="a gate, an up and a down matrix"):
        Layer(**attention, router=matrix, experts=[(matrix, matrix)])
    assert len(Layer(**attention, router=matrix, experts=[expert, expert]).matrices) == 11
