"""ModelConfig and tensor names of a Hugging Face model directory."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.models.architectures import ARCHITECTURES
from pagedkv.models.config import ModelConfig, read_experts, rope_of_layers
from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata
from pagedkv.models.rope import Rope
from pagedkv.models.safetensors import read_json, read_optional_json

# model_type -> (architecture, default of tie_word_embeddings)
_MODEL_TYPES = {
    "llama": ("llama", False), "mistral": ("llama", False), "smollm3": ("smollm3", True), "granite": ("granite", False),
    "qwen2": ("qwen2", False), "qwen3": ("qwen3", False), "olmo2": ("olmo2", False), "phi3": ("phi3", False),
    "qwen3_moe": ("qwen3moe", False), "mixtral": ("llama", False), "gemma": ("gemma", True), "gemma2": ("gemma2", True),
    "gemma3_text": ("gemma3", True),
}  # fmt: skip
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,4})\.(\w+)")
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
}  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
_KINDS = {
    "default": "none", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn",
    "longrope": "longrope", "su": "longrope",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorNames:
    """GGUF's name of a tensor of a Hugging Face file; None for one that is not needed."""

    post_norms: bool
    tied: bool

    def __call__(self, name: str) -> str | None:
        if name == "lm_head.weight" and self.tied:
            return None
        if name in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[name]
        match = _LAYER.fullmatch(name)
        if match and match[2] == "post_attention_layernorm":
            return f"blk.{int(match[1])}.{'post_attention_norm' if self.post_norms else 'ffn_norm'}.{match[3]}"
        if match and match[2] in _LAYER_NAMES:
            return f"blk.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        if match and (expert := _EXPERT.fullmatch(match[2])) and expert[2] in _EXPERT_NAMES:
            return f"blk.{int(match[1])}.{_EXPERT_NAMES[expert[2]]}.{int(expert[1])}.{match[3]}"
        return None if name.endswith("rotary_emb.inv_freq") else name


class DirectoryConfig:
    """config.json and generation_config.json of a directory. Raises ModelError naming key, value and range."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.entries = {key: value for key, value in read_json(directory / "config.json").items() if value is not None}
        self.read = Metadata(self.entries)
        kind = self.read.text("model_type")
        if kind not in _MODEL_TYPES:
            raise ModelError(f"model_type: {kind!r} is not supported; supported: {', '.join(_MODEL_TYPES)}")
        self.model_type = kind
        self.name, tied = _MODEL_TYPES[kind]
        self.architecture = ARCHITECTURES[self.name]
        self.tied = self.read.flag("tie_word_embeddings", default=tied)
        generation = read_optional_json(directory / "generation_config.json")
        self.generation = {key: value for key, value in generation.items() if value is not None}
        self._refuse()

    @property
    def tensor_names(self) -> TensorNames:
        """How tensors are called."""
        return TensorNames(self.architecture.post_norms, self.tied)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Ids under `key` of generation_config.json, else of config.json: one number, a list, or nothing."""
        value = self.generation.get(key, self.entries.get(key, []))
        values = value if isinstance(value, list) else [value]
        for token in values:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ModelError(f"{key}: {token!r} is not in [0, {vocab_size - 1}]")
        return tuple(sorted(values))

    def model(self, shapes: dict[str, tuple[int, ...]], add_bos: bool, stops: set[int]) -> ModelConfig:
        """The configuration for tensors of these shapes; `stops`: more ids that end a text."""
        read, architecture = self.read, self.architecture
        n_layers = read.integer("num_hidden_layers", 1, 1024)
        hidden = read.integer("hidden_size", 1, 1 << 18)
        n_heads = read.integer("num_attention_heads", 1, 4096)
        n_kv_heads = read.integer("num_key_value_heads", 1, n_heads, default=n_heads)
        if n_heads % n_kv_heads:
            raise ModelError(f"num_key_value_heads: {n_kv_heads} does not divide num_attention_heads {n_heads}")
        if "head_dim" not in self.entries and hidden % n_heads:
            raise ModelError(f"num_attention_heads: {n_heads} does not divide hidden_size {hidden}")
        head_dim = read.integer("head_dim", 2, 4096, default=hidden // n_heads)
        context = read.integer("max_position_embeddings", 1, 1 << 27)
        windows = self._windows(n_layers)
        ropes = self._ropes(head_dim, context)
        if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
            raise ModelError("tensor model.embed_tokens.weight: missing, or no matrix")
        vocab_size = shapes["token_embd.weight"][0]
        scale = head_dim
        if self.name in ("gemma2", "gemma3"):
            scale = read.real("query_pre_attn_scalar", 1e-6, 1e6, default=256)
        caps = (0.0, 0.0)
        if "attn_logit_softcapping" in architecture.keys:
            caps = (read.softcap("attn_logit_softcapping", 0.0), read.softcap("final_logit_softcapping", 0.0))
        granite, (n_experts, n_used, shares) = self.name == "granite", self._experts()

        def multiplier(key: str, default: float = 1.0) -> float:
            return read.real(key, 1e-6, 1e6, default=default) if granite else default

        bos, eos, pad = (self.token_ids(f"{kind}_token_id", vocab_size) for kind in ("bos", "eos", "pad"))
        config = ModelConfig(
            architecture=self.name,
            name=self.directory.resolve().name,
            n_layers=n_layers,
            hidden_size=hidden,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_size=read.integer(
                "moe_intermediate_size" if self.name == "qwen3moe" else "intermediate_size", 1, 1 << 20
            ),
            vocab_size=vocab_size,
            context_length=context,
            rms_eps=read.real("rms_norm_eps", 1e-12, 0.1, default=1e-6),
            ropes=ropes,
            rope_index=rope_of_layers(self._rotated(n_layers), windows, len(ropes)),
            windows=windows,
            attention_scale=multiplier("attention_multiplier", scale**-0.5),
            tied=self.tied,
            stop_token_ids=tuple(sorted({*eos, *stops})),
            bos_token_id=bos[0] if bos else None,
            eos_token_id=eos[0] if eos else None,
            pad_token_id=pad[0] if pad else None,
            add_bos=add_bos,
            attention_softcap=caps[0],
            logit_softcap=caps[1],
            embedding_scale=multiplier("embedding_multiplier", hidden**0.5 if architecture.scaled_embedding else 1.0),
            residual_scale=multiplier("residual_multiplier"),
            logit_scale=multiplier("logits_scaling"),
            n_experts=n_experts,
            n_experts_used=n_used,
            expert_shares=shares,
        )
        architecture.check_tensors(config, shapes)
        return config

    def _refuse(self) -> None:
        """ModelError for what the graph of the architecture does not compute."""
        given = self.read.text("hidden_activation", default=None) or self.read.text("hidden_act", default=None)
        activation = _ACTIVATIONS.get(given or "")
        # Gemma's first files say "gelu" and mean its tanh form
        if self.name == "gemma" and given in ("gelu", None):
            activation = "gelu"
        if given is not None and activation != self.architecture.activation:
            raise ModelError(f"hidden_act: {given!r} is not supported for {self.model_type}")
        for key in ("quantization_config", "use_bidirectional_attention", "mlp_bias"):
            self.read.absent(key)
        if self.model_type not in ("qwen2",):
            self.read.absent("attention_bias")

    def _experts(self) -> tuple[int, int, str]:
        """(experts of a layer, experts of each token, what their shares are over)."""
        if self.model_type not in ("qwen3_moe", "mixtral"):
            self.read.absent("num_local_experts")
            return 0, 0, "chosen"
        if self.entries.get("mlp_only_layers"):
            raise ModelError(
                f"mlp_only_layers: {self.entries['mlp_only_layers']!r}: layers that differ are not supported"
            )
        self.read.integer("decoder_sparse_step", 1, 1, default=1)
        key = "num_experts" if "num_experts" in self.entries else "num_local_experts"
        n_experts, n_used = read_experts(self.read, "always", key, "num_experts_per_tok")
        chosen = self.model_type == "mixtral" or self.read.flag("norm_topk_prob", default=False)
        return n_experts, n_used, "chosen" if chosen else "all"

    def _kinds_of_layers(self, n_layers: int) -> list[str] | None:
        kinds = self.entries.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != n_layers:
            raise ModelError(f"layer_types: not a list of {n_layers}, one for each layer")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"layer_types: {kind!r} is neither 'full_attention' nor 'sliding_attention'")
        return kinds

    def _windows(self, n_layers: int) -> tuple[int, ...]:
        window = self.read.integer("sliding_window", 0, 1 << 27, default=self.architecture.window)
        if not self.read.flag(
            "use_sliding_window", default=self.model_type not in ("qwen2", "qwen3", "qwen3_moe", "smollm3")
        ):
            window = 0
        kinds = self._kinds_of_layers(n_layers)
        if kinds is not None:
            return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
        if self.model_type in ("llama", "granite", "gemma", "olmo2"):
            return (0,) * n_layers
        if "max_window_layers" in self.entries and self.model_type in ("qwen2", "qwen3"):
            first = self.read.integer("max_window_layers", 0, 1 << 20)
            return tuple(window if i >= first else 0 for i in range(n_layers))
        pattern = self.read.integer("sliding_window_pattern", 1, 1024, default=self.architecture.full_every)
        if pattern != self.architecture.full_every:
            return tuple(0 if (i + 1) % pattern == 0 else window for i in range(n_layers))
        return self.architecture.windows(window, n_layers)

    def _rotated(self, n_layers: int) -> tuple[bool, ...]:
        flags = self.entries.get("no_rope_layers")
        if self.name != "smollm3" or flags is None:
            return self.architecture.rotated(n_layers)
        if not isinstance(flags, list) or len(flags) != n_layers or any(flag not in (0, 1) for flag in flags):
            raise ModelError(f"no_rope_layers: not a list of {n_layers} zeros and ones")
        return tuple(flag == 1 for flag in flags)

    def _ropes(self, head_dim: int, context: int) -> tuple[Rope, ...]:
        """The rotation of full layers, and of windowed ones where it is another."""
        parameters = self.entries.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise ModelError("rope_parameters: not a table")
        local = self.architecture.local_theta
        if isinstance(parameters.get("full_attention"), dict):
            kinds = ["full_attention"] if local is None else ["full_attention", "sliding_attention"]
            if not all(isinstance(parameters.get(kind), dict) for kind in kinds):
                raise ModelError(f"rope_parameters: must have {' and '.join(kinds)}")
            return tuple(self._rope(parameters[kind], "rope_theta", head_dim, context) for kind in kinds)
        scaling = self.entries.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise ModelError("rope_scaling: not a table")
        rope = self._rope(parameters or scaling, "rope_theta", head_dim, context)
        if local is None:
            return (rope,)
        theta = self.read.real("rope_local_base_freq", 1.0, 1e12, default=local)
        return (rope, Rope(theta, rope.dim, original_context=rope.original_context))

    def _rope(self, parameters: dict[str, Any], theta_key: str, head_dim: int, context: int) -> Rope:
        table = {key: value for key, value in {**self.entries, **parameters}.items() if value is not None}
        read = Metadata(table)
        given = read.text("rope_type", default=None) or read.text("type", default="default")
        if given not in _KINDS:
            raise ModelError(f"rope_type: {given!r} is not supported; supported: {', '.join(_KINDS)}")
        kind = _KINDS[given]
        default_theta = 1e6 if self.name == "gemma3" else 10000.0
        dim = int(head_dim * read.real("partial_rotary_factor", 0.0, 1.0, default=1.0))
        if dim < 2 or dim % 2:
            raise ModelError(f"partial_rotary_factor: {dim} rotated values of {head_dim}, must be even and at least 2")
        original = read.integer("original_max_position_embeddings", 1, 1 << 27, default=context)
        needed = {} if kind in ("none", "longrope", "yarn") else {"factor": read.real("factor", 1e-3, 1e6)}
        if kind in ("longrope", "yarn"):
            needed = {"factor": read.real("factor", 1e-3, 1e6, default=context / original)}
        if kind == "llama3":
            needed["low_freq_factor"] = read.real("low_freq_factor", 1e-3, 1e6)
            needed["high_freq_factor"] = read.real("high_freq_factor", needed["low_freq_factor"] + 1e-3, 1e6)
        if kind == "yarn":
            for key in ("mscale", "mscale_all_dim"):
                read.absent(key)
            needed["beta_fast"] = read.real("beta_fast", 1e-3, 1e6, default=32.0)
            needed["beta_slow"] = read.real("beta_slow", 1e-3, 1e6, default=1.0)
            needed["truncate"] = read.flag("truncate", default=True)
        if kind == "longrope":
            needed["short"], needed["long"] = (_factors(table, f"{x}_factor", dim // 2) for x in ("short", "long"))
        if kind == "dynamic":
            original = context
        return Rope(
            read.real(theta_key, 1.0, 1e12, default=default_theta),
            dim,
            kind,
            original_context=original,
            attention_factor=read.real("attention_factor", 1e-3, 1e3, default=None) if kind != "none" else None,
            **needed,
        )


def _factors(table: dict[str, Any], key: str, n: int) -> tuple[float, ...]:
    values = table.get(key)
    if not isinstance(values, list) or len(values) != n:
        raise ModelError(f"{key}: not a list of {n} numbers")
    for value in values:
        if type(value) not in (int, float) or not 1e-6 <= value <= 1e6:
            raise ModelError(f"{key}: {value!r} is not in [1e-06, 1e+06]")
    return tuple(float(value) for value in values)
