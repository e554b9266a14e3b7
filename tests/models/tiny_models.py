"""Tiny random models of every architecture: their weights from a seed, as a Hugging Face directory and as GGUF.

What transformers computes with the same weights is kept in references.npz, its configuration and tensor shapes in
references.json; make_references.py writes both.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
VOCAB, N_TOKENS, POSITIONS = 128, 80, (0, 1, 50, 79)
WINDOW = 24
MERGE = "\u4e00 \u4e01"
REFERENCES = json.loads((HERE / "references.json").read_text()) if (HERE / "references.json").exists() else {}
GEMMAS = ("gemma", "gemma2", "gemma3_text")


def token_ids():
    return np.random.default_rng(5).integers(3, VOCAB, N_TOKENS).tolist()


def weights(case: str, shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """float32 arrays by Hugging Face name, drawn in order of names."""
    rng = np.random.default_rng(abs(hash_of(case)))
    found = {}
    for name in sorted(shapes):
        x = rng.standard_normal(shapes[name])
        if name.endswith("bias"):
            x *= 0.5
        elif "norm" in name:
            x = 0.3 * x + (0 if case.split("-")[0] in GEMMAS else 1)
        elif "embed_tokens" in name:
            x *= 0.4
        else:
            x *= 1.5 / np.sqrt(shapes[name][1])
        found[name] = x.astype(np.float32)
    return found


def hub_shapes(kind: str, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Names and shapes as files on the hub have them, from those in memory, where all experts share two tensors."""
    found = {}
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".mlp.")
        block, parts = (
            (f"{layer}.block_sparse_moe", "w1 w3 w2")
            if kind == "mixtral"
            else (f"{layer}.mlp", "gate_proj up_proj down_proj")
        )
        gate, up, down = parts.split()
        if part == "experts.gate_up_proj":
            n, rows, columns = shape
            found |= {f"{block}.experts.{i}.{x}.weight": [rows // 2, columns] for i in range(n) for x in (gate, up)}
        elif part == "experts.down_proj":
            found |= {f"{block}.experts.{i}.{down}.weight": shape[1:] for i in range(shape[0])}
        elif part == "gate.weight":
            found[f"{block}.gate.weight"] = shape
        else:
            found[name] = shape
    return found


def experts_of(tensors: dict[str, np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """{(block, "gate", "up" or "down"): [experts, rows, columns]} of tensors by their names on the hub."""
    kinds = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
    found: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, x in tensors.items():
        block, _, rest = name.partition(".experts.")
        if rest:
            i, kind, _ = rest.split(".")
            found.setdefault((block, kinds[kind]), {})[int(i)] = x
    return {key: np.stack([parts[i] for i in range(len(parts))]) for key, parts in found.items()}


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by their names in the memory of transformers, from those on the hub."""
    found = {name.replace(".block_sparse_moe.", ".mlp."): x for name, x in tensors.items() if ".experts." not in name}
    stacks = experts_of(tensors)
    for block in {block for block, _ in stacks}:
        to = block.replace(".block_sparse_moe", ".mlp")
        gate_up = np.concatenate([stacks[block, "gate"], stacks[block, "up"]], axis=1)
        found |= {f"{to}.experts.gate_up_proj": gate_up, f"{to}.experts.down_proj": stacks[block, "down"]}
    return found


def hash_of(text: str) -> int:
    """A number for a text, the same in every process."""
    return sum((i + 1) * 1009 * ord(c) for i, c in enumerate(text))


def tokenizer_json() -> dict:
    texts = ["<unk>", "<s>", "</s>"] + [chr(0x4E00 + i) for i in range(VOCAB - 4)] + [MERGE.replace(" ", "")]
    added = [
        {"id": i, "content": texts[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(3)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {text: i for i, text in enumerate(texts)}, "merges": [MERGE]},
    }  # fmt: skip


def directory(case: str, path: Path, n_shards: int = 1, **changes) -> Path:
    """The Hugging Face directory of a case in `path`. `changes`: keys of config.json, None leaves one out."""
    entry = REFERENCES[case]
    path.mkdir(exist_ok=True)
    config = {key: value for key, value in (entry["config"] | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    tensors = weights(case, entry["shapes"])
    if n_shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    table = {}
    for i in range(n_shards):
        name = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        part = {key: value for j, (key, value) in enumerate(tensors.items()) if j % n_shards == i}
        save_file(part, path / name)
        table |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return path


ARCH = {
    "llama": "LLAMA", "mistral": "LLAMA", "smollm3": "SMOLLM3", "granite": "GRANITE", "qwen2": "QWEN2",
    "qwen3": "QWEN3", "olmo2": "OLMO2", "phi3": "PHI3", "gemma": "GEMMA", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3",
    "qwen3_moe": "QWEN3MOE", "mixtral": "LLAMA",
}  # fmt: skip
ADJACENT = ("llama", "mistral", "mixtral", "smollm3", "granite")


def gguf_file(case: str, path: Path, stacked: bool = True, **writer) -> Path:
    """The same model as GGUF, written by the gguf package with the names and conventions of llama.cpp's converters.

    stacked: one tensor for a matrix of all experts, not one each as in the oldest files. writer: more arguments of
    GGUFWriter.
    """
    entry = REFERENCES[case]
    config, kind = entry["config"], entry["config"]["model_type"]
    arch = gguf.MODEL_ARCH[ARCH[kind]]
    n_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    out = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], **writer)
    out.add_block_count(n_layers)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    out.add_rope_freq_base(full["rope_theta"])
    rotated = int(head_dim * full.get("partial_rotary_factor", 1.0))
    out.add_rope_dimension_count(rotated)
    scaling = full["rope_type"]
    if scaling in ("linear", "yarn"):
        out.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        out.add_rope_scaling_factor(full["factor"])
    if scaling == "yarn":
        out.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if scaling == "llama3":
        out.add_tensor("rope_freqs.weight", llama3_factors(full, rotated))
    if scaling == "longrope":
        out.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        for x in ("long", "short"):
            out.add_tensor(f"rope_factors_{x}.weight", np.array(full[f"{x}_factor"], np.float32))
    if kind == "gemma3_text":
        out.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if "num_experts_per_tok" in config:
        out.add_expert_count(config["num_local_experts"])
        out.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        out.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("norm_topk_prob") is False:
        out.add_expert_weights_norm(False)
    if kind in ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text") and "sliding_window" in config:
        out.add_sliding_window(config["sliding_window"])
    if kind == "gemma2":
        out.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        out.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "granite":
        out.add_attention_scale(config["attention_multiplier"])
        out.add_embedding_scale(config["embedding_multiplier"])
        out.add_residual_scale(config["residual_multiplier"])
        out.add_logit_scale(config["logits_scaling"])
    texts = list(tokenizer_json()["model"]["vocab"])
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(texts)
    out.add_token_types([3] * 3 + [1] * (VOCAB - 3))
    out.add_token_merges([MERGE])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, n_layers)
    tensors = weights(case, entry["shapes"])
    for (block, part), x in experts_of(tensors).items():
        to = names.get_name(f"{block}.gate").replace("gate_inp", part)
        if stacked:
            out.add_tensor(f"{to}_exps.weight", x)
        for i in range(0 if stacked else len(x)):
            out.add_tensor(f"{to}.{i}.weight", np.ascontiguousarray(x[i]))
    for name, x in tensors.items():
        if ".experts." in name:
            continue
        if kind in ADJACENT and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else config["num_key_value_heads"]
            x = x.reshape(n, 2, head_dim // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if kind in GEMMAS and name.endswith("norm.weight"):
            x = x + 1
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert to is not None, name
        out.add_tensor(to, np.ascontiguousarray(x))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def llama3_factors(rope: dict, dim: int) -> np.ndarray:
    """What llama.cpp's converter writes as rope_freqs.weight."""
    old, low, high = (rope[x] for x in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < old / high:
            factors.append(1)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
