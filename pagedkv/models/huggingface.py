"""ModelConfig and tensor names of a Hugging Face model directory."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.models.architectures import ARCHITECTURES
from pagedkv.models.config import ModelConfig, read_experts, rope_of_layers
from pagedkv.models.errors import ModelError
from pagedkv.models.metadata import Metadata
from pagedkv.models.model_types import MODEL_TYPES
from pagedkv.models.rope import Rope, yarn_attention
from pagedkv.models.safetensors import SafetensorsFiles, read_json, read_optional_json

_LOGGER = logging.getLogger("pagedkv.models")
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
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)")
_EXPERT_PARTS = {
    "mlp": {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"},
    "block_sparse_moe": {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"},
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
    fused: bool = False

    def __call__(self, name: str) -> str | None:
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

    def original(self, name: str, experts_block: str) -> str:
        """The name in a Hugging Face file of a tensor that GGUF calls `name`."""
        for theirs, ours in _GLOBAL_NAMES.items():
            if name == ours:
                return theirs
        match = _GGUF_LAYER.fullmatch(name)
        if not match:
            return name
        layer, part, expert, end = match.groups()
        prefix = f"model.layers.{layer}."
        if expert:
            return f"{prefix}{experts_block}.experts.{expert}.{_EXPERT_PARTS[experts_block][part]}.{end}"
        if part == "ffn_gate_inp":
            return f"{prefix}{experts_block}.gate.{end}"
        if part == ("post_attention_norm" if self.post_norms else "ffn_norm"):
            return f"{prefix}post_attention_layernorm.{end}"
        fused = part == "ffn_up" and self.fused
        theirs = "mlp.gate_up_proj" if fused else next((x for x, to in _LAYER_NAMES.items() if to == part), part)
        return f"{prefix}{theirs}.{end}"


class DirectoryConfig:
    """config.json and generation_config.json of a directory. Raises ModelError naming key, value and range."""

    def __init__(self, directory: Path):
        self.directory = directory
        given = read_json(directory / "config.json")
        self.entries = {key: value for key, value in given.items() if value is not None}
        self.null = given.keys() - self.entries.keys()
        self.read = Metadata(self.entries)
        kind = self.read.text("model_type")
        if kind not in MODEL_TYPES:
            raise ModelError(f"model_type: {kind!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        self.model_type, self.type = kind, MODEL_TYPES[kind]
        self.name = self.type.architecture
        self.architecture = ARCHITECTURES[self.name]
        self.tied = self.read.flag("tie_word_embeddings", default=self.type.tied)
        generation = read_optional_json(directory / "generation_config.json")
        self.generation = {key: value for key, value in generation.items() if value is not None}
        self._refuse()

    @property
    def tensor_names(self) -> TensorNames:
        """How tensors are called."""
        return TensorNames(self.architecture.post_norms, self.architecture.fused)

    def original(self, name: str) -> str:
        """What the directory calls the tensor with this GGUF name, for messages."""
        return self.tensor_names.original(name, "block_sparse_moe" if self.model_type == "mixtral" else "mlp")

    def default(self, key: str, value: Any, null: Any = None) -> Any:
        """What a key stands for that has no value: `value` where it is missing, `null` where the file says null."""
        return null if key in self.null else value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Ids under `key` of generation_config.json, else of config.json: one number, a list, or nothing."""
        value = self.generation.get(key, self.entries.get(key))
        if value is None:
            usual = self.default(key, getattr(self.type, key.removesuffix("_token_id")))
            return (usual,) if usual is not None and usual < vocab_size else ()
        values = value if isinstance(value, list) else [value]
        for token in values:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ModelError(f"{key}: {token!r} is not in [0, {vocab_size - 1}]")
        return tuple(sorted(values))

    def tie(self, files: SafetensorsFiles) -> None:
        """Take from `files` an output head that is the embedding once more, where the two are said to be one.

        As transformers does: where both are there and differ, both are used, and a warning says so; where only the
        head is there it is the embedding, too. Reads both matrices, as far as they are equal. Raises ModelError.
        """
        head, embedding = "output.weight", "token_embd.weight"
        if not self.tied or head not in files.tensors:
            return
        if embedding not in files.tensors:
            files.rename(head, embedding)
        elif files.equal(head, embedding):
            files.drop(head)
        else:
            _LOGGER.warning(
                "%s: tie_word_embeddings is true, but %s is not %s: the head is not tied",
                self.directory, self.original(head), self.original(embedding),
            )  # fmt: skip

    def model(self, shapes: dict[str, tuple[int, ...]], add_bos: bool, stops: set[int]) -> ModelConfig:
        """The configuration for tensors of these shapes; `stops`: more ids that end a text."""
        read, architecture = self.read, self.architecture
        n_layers = read.integer("num_hidden_layers", 1, 1024)
        hidden = read.integer("hidden_size", 1, 1 << 18)
        n_heads = read.integer("num_attention_heads", 1, 4096)
        usual = self.default("num_key_value_heads", self.type.n_kv_heads)
        n_kv_heads = read.integer("num_key_value_heads", 1, n_heads, default=n_heads if usual is None else usual)
        if n_kv_heads > n_heads or n_heads % n_kv_heads:
            raise ModelError(f"num_key_value_heads: {n_kv_heads} does not divide num_attention_heads {n_heads}")
        head_dim = self._head_dim(hidden, n_heads)
        context = read.integer("max_position_embeddings", 1, 1 << 27, default=self.type.context)
        rotated = self._rotated(n_layers)
        windows = self._windows(n_layers, rotated)
        ropes = self._ropes(head_dim, context)
        if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
            raise ModelError(f"tensor {self.original('token_embd.weight')}: missing, or no matrix")
        vocab_size = shapes["token_embd.weight"][0]
        if read.integer("vocab_size", 1, 1 << 24, default=vocab_size) != vocab_size:
            raise ModelError(
                f"vocab_size: {self.entries['vocab_size']}, "
                f"tensor {self.original('token_embd.weight')} has {vocab_size} rows"
            )
        keys = ("attn_logit_softcapping", "final_logit_softcapping")
        caps = [
            0.0 if usual is None else read.softcap(key, self.default(key, usual, 0.0))
            for key, usual in zip(keys, self.type.softcaps, strict=True)
        ]
        if self.type.scores_scaled == "attention_multiplier":
            scale = read.real("attention_multiplier", 1e-6, 1e6, default=1.0)
        elif self.type.scores_scaled == "query_pre_attn_scalar":
            scale = read.real("query_pre_attn_scalar", 1e-6, 1e6, default=256) ** -0.5
        else:
            scale = head_dim**-0.5
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
            rms_eps=read.real("rms_norm_eps", 1e-12, 0.1, default=self.type.eps),
            ropes=ropes,
            rope_index=rope_of_layers(rotated, windows, len(ropes)),
            windows=windows,
            attention_scale=scale,
            tied=self.tied and "output.weight" not in shapes,
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
        architecture.check_tensors(config, shapes, self.original, ("num_hidden_layers", "num_experts"))
        return config

    def _head_dim(self, hidden: int, n_heads: int) -> int:
        usual = self.default("head_dim", self.type.head_dim)
        if "head_dim" not in self.entries and usual is None and hidden % n_heads:
            raise ModelError(f"num_attention_heads: {n_heads} does not divide hidden_size {hidden}")
        return self.read.integer("head_dim", 2, 4096, default=hidden // n_heads if usual is None else usual)

    def _refuse(self) -> None:
        """ModelError for what the graph of the architecture does not compute."""
        key = self.type.activation
        given = self.read.text(key, default=None)
        activation = _ACTIVATIONS.get(given or "")
        # Gemma's first files say "gelu" and mean its tanh form
        if self.name == "gemma" and given in ("gelu", None):
            activation = "gelu"
        if given is not None and activation != self.architecture.activation:
            raise ModelError(f"{key}: {given!r} is not supported for {self.model_type}")
        for key in ("quantization_config", "use_bidirectional_attention", "mlp_bias"):
            self.read.absent(key)
        if self.model_type not in ("qwen2",):
            self.read.absent("attention_bias")

    def _experts(self) -> tuple[int, int, str]:
        """(experts of a layer, experts of each token, what their shares are over)."""
        if self.type.experts is None:
            self.read.absent("num_local_experts")
            return 0, 0, "chosen"
        if self.entries.get("mlp_only_layers"):
            raise ModelError(
                f"mlp_only_layers: {self.entries['mlp_only_layers']!r}: layers that differ are not supported"
            )
        self.read.integer("decoder_sparse_step", 1, 1, default=1)
        key = "num_experts" if "num_experts" in self.entries else "num_local_experts"
        usual, usual_used, normed = self.type.experts
        read = Metadata({key: usual, "num_experts_per_tok": usual_used} | self.entries)
        n_experts, n_used = read_experts(read, "always", key, "num_experts_per_tok")
        chosen = self.model_type == "mixtral" or self.read.flag("norm_topk_prob", default=normed)
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

    def _windows(self, n_layers: int, rotated: tuple[bool, ...]) -> tuple[int, ...]:
        """The window of each layer, 0: none; keys a model type does not use count for nothing."""
        read, which = self.read, self.type.windows
        switched_off = self.type.switched and not read.flag("use_sliding_window", default=False)
        if which == "none" or switched_off:
            return (0,) * n_layers
        usual = self.default("sliding_window", self.type.window)
        window = read.integer("sliding_window", 0, 1 << 27, default=usual) or 0
        if which == "all":
            return (window,) * n_layers
        kinds = self._kinds_of_layers(n_layers)
        if kinds is not None:
            return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
        if which == "usually":
            return (window,) * n_layers
        if which == "max_window_layers":
            first = read.integer("max_window_layers", 0, 1 << 20, default=28)
            return tuple(window if i >= first else 0 for i in range(n_layers))
        if which == "unrotated":
            return tuple(0 if rotates else window for rotates in rotated)
        every = self.architecture.full_every
        if self.name == "gemma3":
            every = read.integer("sliding_window_pattern", 1, 1024, default=every)
        return tuple(0 if (i + 1) % every == 0 else window for i in range(n_layers))

    def _rotated(self, n_layers: int) -> tuple[bool, ...]:
        if self.name != "smollm3":
            return self.architecture.rotated(n_layers)
        flags = self.entries.get("no_rope_layers")
        if flags is None:
            every = self.read.integer("no_rope_layer_interval", 1, 1024, default=self.architecture.unrotated_every)
            return tuple((i + 1) % every != 0 for i in range(n_layers))
        if not isinstance(flags, list) or len(flags) != n_layers or any(flag not in (0, 1) for flag in flags):
            raise ModelError(f"no_rope_layers: not a list of {n_layers} zeros and ones")
        return tuple(flag == 1 for flag in flags)

    def _ropes(self, head_dim: int, context: int) -> tuple[Rope, ...]:
        """The rotation of full layers, and of windowed ones where it is another."""
        tables = {key: self.entries.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
        for key, table in tables.items():
            if not isinstance(table, dict):
                raise ModelError(f"{key}: not a table")
        parameters, scaling = tables.values()
        kinds = ("full_attention", "sliding_attention")
        nested: dict[str, dict] = {kind: parameters[kind] for kind in kinds if parameters.get(kind) is not None}
        if not all(isinstance(table, dict) for table in nested.values()):
            raise ModelError("rope_parameters: full_attention or sliding_attention is not a table")
        local = self.architecture.local_theta
        if local is None:
            if nested:
                raise ModelError(f"rope_parameters: one for each kind of layer is not supported for {self.model_type}")
            return (self._rope(scaling or parameters, "rope_theta", self.type.theta, head_dim, context),)
        if parameters and not nested:
            raise ModelError(f"rope_parameters: must have {' or '.join(kinds)}")
        full = nested.get("full_attention", {}) | scaling
        return (
            self._rope(full, "rope_theta", self.type.theta, head_dim, context),
            self._rope(nested.get("sliding_attention", {}), "rope_local_base_freq", local, head_dim, context),
        )

    def _rope(self, parameters: dict[str, Any], theta_key: str, theta: float, head_dim: int, context: int) -> Rope:
        """The rotation of one table; `theta_key` is what the base is called outside of it."""
        table = {key: value for key, value in parameters.items() if value is not None}
        read = Metadata(table)
        given = read.text("rope_type", default=None) or read.text("type", default="default")
        # files of Phi-3 call its own scaling by these names
        if self.name == "phi3" and given in ("su", "yarn"):
            given = "longrope"
        if given not in _KINDS or (self.name == "phi3" and given not in ("default", "longrope")):
            supported = ("default", "longrope") if self.name == "phi3" else _KINDS
            raise ModelError(f"rope_type: {given!r} is not supported; supported: {', '.join(supported)}")
        kind = _KINDS[given]
        dim = self._rotated_values(read, kind, head_dim)
        original = read.integer("original_max_position_embeddings", 1, 1 << 27, default=context)
        if self.type.original is not None:
            key = "original_max_position_embeddings"
            original = self.read.integer(key, 1, 1 << 27, default=self.default(key, self.type.original, original))
        attention = read.real("attention_factor", 1e-3, 1e3, default=None) if kind in ("yarn", "longrope") else None
        needed: dict[str, Any] = (
            {} if kind in ("none", "longrope", "yarn") else {"factor": read.real("factor", 1e-3, 1e6)}
        )
        if kind in ("longrope", "yarn"):
            needed = {"factor": read.real("factor", 1e-3, 1e6, default=context / original)}
        if kind == "llama3":
            needed["low_freq_factor"] = read.real("low_freq_factor", 1e-3, 1e6)
            needed["high_freq_factor"] = read.real("high_freq_factor", needed["low_freq_factor"] + 1e-3, 1e6)
        if kind == "yarn":
            needed["beta_fast"] = read.real("beta_fast", 1e-3, 1e6, default=32.0)
            needed["beta_slow"] = read.real("beta_slow", 1e-3, 1e6, default=1.0)
            needed["truncate"] = read.flag("truncate", default=True)
            over, under = (read.real(key, 0.0, 1e3, default=0.0) for key in ("mscale", "mscale_all_dim"))
            if attention is None and over and under:
                attention = yarn_attention(needed["factor"], over) / yarn_attention(needed["factor"], under)
        if kind == "longrope":
            needed["short"], needed["long"] = (_factors(table, f"{x}_factor", dim // 2) for x in ("short", "long"))
        if kind == "dynamic":
            original = context
        base = read.real("rope_theta", 1.0, 1e12, default=None)
        if base is None:
            base = self.read.real(theta_key, 1.0, 1e12, default=theta)
        return Rope(base, dim, kind, original_context=original, attention_factor=attention, **needed)

    def _rotated_values(self, read: Metadata, kind: str, head_dim: int) -> int:
        key = "partial_rotary_factor"
        part = read.real(key, 0.0, 1.0, default=None)
        if part is None:
            part = self.read.real(key, 0.0, 1.0, default=1.0)
        if not self.type.partial:
            # the plain rotation of other model types does not know the key, and with scaled ones it fits no head
            if part != 1.0 and kind != "none":
                raise ModelError(f"{key}: {part:g} is not supported for {self.model_type} with a scaled rotation")
            part = 1.0
        dim = int(head_dim * part)
        if dim < 2 or dim % 2:
            if part == 1.0:
                raise ModelError(f"head_dim: {head_dim} is odd, values rotate in pairs")
            raise ModelError(f"{key}: {dim} rotated values of {head_dim}, must be even and at least 2")
        return dim


def _factors(table: dict[str, Any], key: str, n: int) -> tuple[float, ...]:
    values = table.get(key)
    if not isinstance(values, list) or len(values) != n:
        raise ModelError(f"{key}: not a list of {n} numbers")
    for value in values:
        if type(value) not in (int, float) or not 1e-6 <= value <= 1e6:
            raise ModelError(f"{key}: {value!r} is not in [1e-06, 1e+06]")
    return tuple(float(value) for value in values)
