"""What each `model_type` of a config.json means where the file says nothing: the defaults of transformers 5."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelType:
    """One `model_type`: its architecture, and the value of each key that a config.json may leave out.

    tied, eps, theta, context, head_dim, window    of tie_word_embeddings, rms_norm_eps, rope_theta,
                   max_position_embeddings, head_dim and sliding_window; head_dim None: hidden_size by heads
    n_kv_heads     of num_key_value_heads; None: as many as heads, as everywhere where the file says null
    windows        which layers have a window: "none", "all", or those that layer_types lists; without the list
                   "usually" all, from "max_window_layers" on, each but the "pattern"-th, or the "unrotated" ones
    switched       no layer has one unless use_sliding_window is true
    activation     the key that names the activation of the gate
    softcaps       of attn_logit_softcapping and final_logit_softcapping; None: the key is not used
    scores_scaled  the scale of scores: by "head_dim", "query_pre_attn_scalar" or "attention_multiplier"
    original       of original_max_position_embeddings beside rope_parameters, which then counts before that within
    partial        whether it can rotate a part of each head
    experts        of num_experts or num_local_experts, of num_experts_per_tok, and of norm_topk_prob
    bos, eos, pad  of bos_token_id, eos_token_id and pad_token_id
    """

    architecture: str
    tied: bool = False
    eps: float = 1e-6
    theta: float = 10000.0
    context: int = 2048
    n_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    windows: str = "none"
    switched: bool = False
    activation: str = "hidden_act"
    softcaps: tuple[float | None, float | None] = (None, None)
    scores_scaled: str = "head_dim"
    original: int | None = None
    partial: bool = False
    experts: tuple[int, int, bool] | None = None
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


_GEMMA = {
    "tied": True, "context": 8192, "head_dim": 256, "activation": "hidden_activation", "bos": 2, "eos": 1, "pad": 0,
}  # fmt: skip
_QWEN = {"context": 32768, "switched": True, "window": 4096}
_MISTRAL = ModelType("llama", context=131072, n_kv_heads=8, window=4096, windows="usually", bos=1, eos=2)

MODEL_TYPES: dict[str, ModelType] = {
    "llama": ModelType("llama", bos=1, eos=2),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "smollm3": ModelType("smollm3", tied=True, theta=2e6, context=32768, n_kv_heads=4, windows="unrotated",
                         switched=True, bos=128000, eos=128001, pad=128004),
    "granite": ModelType("granite", scores_scaled="attention_multiplier", bos=1, eos=2),
    "qwen2": ModelType("qwen2", n_kv_heads=32, windows="max_window_layers", **_QWEN),  # type: ignore[arg-type]
    "qwen3": ModelType("qwen3", n_kv_heads=32, head_dim=128, windows="max_window_layers",
                       **_QWEN),  # type: ignore[arg-type]
    "olmo2": ModelType("olmo2", eps=1e-5, eos=50279, pad=1),
    "phi3": ModelType("phi3", eps=1e-5, context=4096, windows="all", original=4096, partial=True, bos=1, eos=32000,
                      pad=32000),
    "qwen3_moe": ModelType("qwen3moe", n_kv_heads=4, windows="all", experts=(128, 8, False),
                           **_QWEN),  # type: ignore[arg-type]
    "mixtral": ModelType("llama", eps=1e-5, theta=1e6, context=131072, n_kv_heads=8, windows="all",
                         experts=(8, 2, True), bos=1, eos=2),
    "gemma": ModelType("gemma", n_kv_heads=16, **(_GEMMA | {"activation": "hidden_act"})),  # type: ignore[arg-type]
    "gemma2": ModelType("gemma2", n_kv_heads=4, window=4096, windows="pattern", softcaps=(50.0, 30.0),
                        scores_scaled="query_pre_attn_scalar", **_GEMMA),  # type: ignore[arg-type]
    "gemma3_text": ModelType("gemma3", theta=1e6, n_kv_heads=4, window=4096, windows="pattern", softcaps=(None, 0.0),
                             scores_scaled="query_pre_attn_scalar",
                             **(_GEMMA | {"context": 131072})),  # type: ignore[arg-type]
}  # fmt: skip
