"""Compute references.npz and references.json: python tests/models/make_references.py

Needs torch and transformers, which the tests do not: they read what is stored here.
"""

import json

import numpy as np
import tiny_models as tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SMALL = {
    "vocab_size": tiny.VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = {"head_dim": 24}
LONG, SHORT = [1 + 0.3 * i for i in range(8)], [1 + 0.05 * i for i in range(8)]


def rope(kind, theta=500.0, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"long_factor": LONG, "short_factor": SHORT}
EXPERTS = WIDE | rope("default") | {"num_local_experts": 6, "num_experts_per_tok": 2}
CASES = {
    "llama": ("llama", WIDE | rope("default")),
    "llama-tied": ("llama", rope("default") | {"tie_word_embeddings": True}),
    "llama-linear": ("llama", WIDE | rope("linear", factor=3.0)),
    "llama-dynamic": ("llama", WIDE | rope("dynamic", factor=2.0)),
    "llama-llama3": ("llama", WIDE | rope("llama3", **LLAMA3)),
    "llama-yarn": ("llama", WIDE | rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("mistral", WIDE | rope("default") | {"sliding_window": tiny.WINDOW}),
    "smollm3": ("smollm3", rope("default") | {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "qwen2": ("qwen2", rope("default")),
    "qwen2-window": ("qwen2", rope("default") | {"num_hidden_layers": 3, "use_sliding_window": True,
                                                 "sliding_window": tiny.WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", WIDE | rope("default")),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 48, "norm_topk_prob": True}),
    "qwen3_moe-all": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 48, "norm_topk_prob": False}),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": tiny.WINDOW}),
    "olmo2": ("olmo2", rope("default")),
    "granite": ("granite", rope("default") | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0,
                                              "residual_multiplier": 0.3, "logits_scaling": 2.5}),
    "phi3": ("phi3", rope("default") | {"sliding_window": tiny.WINDOW}),
    "phi3-short": ("phi3", rope("longrope", **LONGROPE, original_max_position_embeddings=96)
                   | {"sliding_window": None, "original_max_position_embeddings": 96}),
    "phi3-long": ("phi3", rope("longrope", **LONGROPE, original_max_position_embeddings=40)
                  | {"sliding_window": None, "original_max_position_embeddings": 40}),
    "gemma": ("gemma", WIDE | rope("default") | {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", WIDE | rope("default") | {"sliding_window": tiny.WINDOW, "query_pre_attn_scalar": 24,
                                                   "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
                                                   "tie_word_embeddings": True}),
    "gemma3_text": ("gemma3_text", WIDE | {"sliding_window": tiny.WINDOW, "query_pre_attn_scalar": 24,
                                           "num_hidden_layers": 7, "tie_word_embeddings": True, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
}  # fmt: skip
TABLES = {
    "linear": rope("linear", factor=4.0), "llama3": rope("llama3", 500000.0, **(LLAMA3 | {
        "original_max_position_embeddings": 8192})),
    "yarn": rope("yarn", 10000.0, factor=4.0, original_max_position_embeddings=4096),
    "yarn-beta": rope("yarn", 1e6, factor=2.5, original_max_position_embeddings=2048, beta_fast=20.0, beta_slow=2.0,
                      truncate=False),
    "longrope": rope("longrope", 10000.0, original_max_position_embeddings=4096,
                     long_factor=[1 + 0.1 * i for i in range(32)], short_factor=[1 + 0.01 * i for i in range(32)]),
    "dynamic": rope("dynamic", 10000.0, factor=2.0),
}  # fmt: skip


def main():
    arrays, entries = {}, {}
    ids = torch.tensor([tiny.token_ids()])
    for case, (kind, options) in CASES.items():
        config = AutoConfig.for_model(kind, **(SMALL | options))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        shapes = {name: list(x.shape) for name, x in model.state_dict().items()}
        if config.tie_word_embeddings:
            shapes.pop("lm_head.weight", None)
        shapes = tiny.hub_shapes(kind, shapes)
        found = {name: torch.from_numpy(x) for name, x in tiny.fused(tiny.weights(case, shapes)).items()}
        missing, unexpected = model.load_state_dict(found, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, list(tiny.POSITIONS)].numpy()
        arrays[case] = logits
        entries[case] = {"config": json.loads(config.to_json_string(use_diff=False)), "shapes": shapes}
        print(case, logits.shape, float(logits.std()))
    for name, options in TABLES.items():
        # a seq_len of 10000 is past every original context
        config = AutoConfig.for_model("llama", **(SMALL | {"head_dim": 64, "max_position_embeddings": 8192} | options))
        for seq_len in (100, 10000):
            table, factor = ROPE_INIT_FUNCTIONS[name.split("-")[0]](config, "cpu", seq_len=seq_len)
            arrays[f"rope-{name}-{seq_len}"] = np.append(table.double().numpy(), float(factor))
        entries[f"rope-{name}"] = {"config": json.loads(config.to_json_string(use_diff=False))}
    for entry in entries.values():
        drop = ("transformers_version", "dtype", "id2label", "label2id", "_name_or_path")
        entry["config"] = {k: v for k, v in entry["config"].items() if k not in drop and v is not None}
    np.savez_compressed(tiny.HERE / "references.npz", **arrays)
    lines = [f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(entries.items())]
    (tiny.HERE / "references.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
