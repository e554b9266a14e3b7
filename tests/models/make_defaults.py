"""Compute defaults.json: python tests/models/make_defaults.py

What transformers' configuration classes make of a config.json in which one key is missing, null, or of no use to the
model type. Needs transformers, which the tests do not: they read what is stored here.
"""

import json
from pathlib import Path

from transformers import AutoConfig

N_LAYERS, VOCAB = 6, 300_000
BASE = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 80, "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 0.001,
    "bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
}  # fmt: skip
KINDS = ["full_attention", "sliding_attention"] * (N_LAYERS // 2)
SWITCH = {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 2}
CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 100}
NESTED = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 777.0},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 77.0}}}  # fmt: skip
MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
               "attention_multiplier": 0.25}  # fmt: skip
HEAD = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 3, "head_dim": 16}
CASES = {
    "llama": HEAD | {"tie_word_embeddings": True},
    "mistral": HEAD | {"tie_word_embeddings": True, "sliding_window": 24},
    "ministral": HEAD | {"tie_word_embeddings": True, "sliding_window": 24},
    "smollm3": SWITCH | {"tie_word_embeddings": False, "no_rope_layers": [1, 0] * 3, "no_rope_layer_interval": 3},
    "granite": MULTIPLIERS | {"tie_word_embeddings": True},
    "qwen2": SWITCH | {"tie_word_embeddings": True},
    "qwen3": SWITCH | HEAD | {"tie_word_embeddings": True},
    "olmo2": {"tie_word_embeddings": True},
    "phi3": {"tie_word_embeddings": True, "sliding_window": 24, "original_max_position_embeddings": 64},
    "qwen3_moe": EXPERTS | {"tie_word_embeddings": True, "num_experts": 12, "norm_topk_prob": True,
                            "moe_intermediate_size": 48, "sliding_window": 24, "use_sliding_window": True},
    "mixtral": EXPERTS | {"tie_word_embeddings": True, "num_local_experts": 12, "sliding_window": 24},
    "gemma": HEAD | {"tie_word_embeddings": False},
    "gemma2": HEAD | CAPS | {"tie_word_embeddings": False, "sliding_window": 24},
    "gemma3_text": HEAD | CAPS | NESTED | {"tie_word_embeddings": False, "sliding_window": 24,
                                           "sliding_window_pattern": 3},
}  # fmt: skip
LISTED = ("mistral", "ministral", "smollm3", "qwen2", "qwen3", "gemma2", "gemma3_text")
FOREIGN = MULTIPLIERS | CAPS | SWITCH | {
    "layer_types": KINDS, "partial_rotary_factor": 0.5, "no_rope_layers": [0] * N_LAYERS, "no_rope_layer_interval": 2,
    "sliding_window_pattern": 2, "rope_local_base_freq": 5.0, "norm_topk_prob": False,
    "original_max_position_embeddings": 99, "rope_theta": 5.0,
}  # fmt: skip
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
          "num_experts", "num_local_experts", "moe_intermediate_size")  # fmt: skip


def facts(kind: str, config) -> dict:
    """What the model of this kind computes with, from the attributes its code reads."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None) or 0
    rope = config.rope_parameters
    if kind in ("llama", "granite", "olmo2", "gemma"):
        windows = [0] * N_LAYERS
    elif kind in LISTED and config.model_type != "mistral":
        windows = [window if x == "sliding_attention" else 0 for x in config.layer_types]
        if kind == "smollm3" and not config.use_sliding_window:
            windows = [0] * N_LAYERS
    else:
        windows = [window] * N_LAYERS
    scale = head_dim**-0.5
    if kind in ("gemma2", "gemma3_text"):
        scale = config.query_pre_attn_scalar**-0.5
    if kind == "granite":
        scale = config.attention_multiplier
    ropes = [rope["full_attention"], rope["sliding_attention"]] if kind == "gemma3_text" else [rope]
    part = ropes[0].get("partial_rotary_factor", 1.0) if kind == "phi3" else 1.0
    return {
        "rms_eps": config.rms_norm_eps, "n_kv_heads": config.num_key_value_heads, "head_dim": head_dim,
        "context_length": config.max_position_embeddings, "tied": config.tie_word_embeddings, "windows": windows,
        "attention_scale": scale, "thetas": [x["rope_theta"] for x in ropes], "rope_dim": int(head_dim * part),
        "attention_softcap": (config.attn_logit_softcapping or 0.0) if kind == "gemma2" else 0.0,
        "logit_softcap": (config.final_logit_softcapping or 0.0) if kind in ("gemma2", "gemma3_text") else 0.0,
        "embedding_scale": (config.embedding_multiplier if kind == "granite"
                            else config.hidden_size**0.5 if kind.startswith("gemma") else 1.0),
        "residual_scale": config.residual_multiplier if kind == "granite" else 1.0,
        "logit_scale": config.logits_scaling if kind == "granite" else 1.0,
        "rotated": [bool(x) for x in config.no_rope_layers] if kind == "smollm3" else [True] * N_LAYERS,
        "n_experts_used": config.num_experts_per_tok if kind in ("qwen3_moe", "mixtral") else 0,
        "expert_shares": "all" if kind == "qwen3_moe" and not config.norm_topk_prob else "chosen",
        "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id,
    }  # fmt: skip


def main():
    table = {}
    for kind, own in CASES.items():
        base = BASE | own
        bases = {"": base} | ({"listed": base | {"layer_types": KINDS}} if kind in LISTED else {})
        variants = {}
        for label, config in bases.items():
            variants[label or "whole"] = config
            for key in config:
                if key not in NEEDED:
                    variants[f"{label} without {key}".strip()] = {k: v for k, v in config.items() if k != key}
                    variants[f"{label} null {key}".strip()] = config | {key: None}
        for key, value in FOREIGN.items():
            if key not in base:
                variants[f"with {key}"] = base | {key: value}
        found = {}
        for label, config in variants.items():
            try:
                # what AutoConfig does with a file of this kind
                real = "ministral" if kind == "mistral" and "layer_types" in config else kind
                made = AutoConfig.for_model(real, **json.loads(json.dumps(config)))
                values = facts(kind, made)
            except Exception as error:
                print(kind, label, type(error).__name__, str(error).split("\n")[0][:80])
                continue
            if None not in (values["rms_eps"], values["context_length"], values["tied"], values["n_kv_heads"]):
                found[label] = [config, values]
        table[kind] = found
    rows = []
    for kind, found in table.items():
        whole = found["whole"][1]
        entries = {
            # what a variant changes, and the values that change with it
            label: [
                {k: v for k, v in config.items() if k not in found["whole"][0] or found["whole"][0][k] != v},
                [k for k in found["whole"][0] if k not in config],
                {k: v for k, v in values.items() if whole[k] != v},
            ]
            for label, (config, values) in found.items()
        }
        rows.append(f"{json.dumps(kind)}: {json.dumps([found['whole'][0], whole, entries])}")
    Path(__file__).with_name("defaults.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
