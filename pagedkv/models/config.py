"""ModelConfig: the shape of a model, read from GGUF metadata with every value checked."""

from dataclasses import dataclass

import numpy as np

from pagedkv.models.architectures import ARCHITECTURES, OPTIONAL_KEYS, REFUSED_KEYS
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf_positions import read_ropes, read_windows
from pagedkv.models.gguf_split import GGUF
from pagedkv.models.metadata import Metadata
from pagedkv.models.rope import Rope

# Control tokens that end a turn or a text, by the names the model families gave them.
END_TOKENS = frozenset({
    "<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|eot|>",
    "<|endofprompt|>", "<EOT>", "<|end_of_turn|>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
_CONTROL = 3


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one model. Counts are plain integers; sizes are numbers of values, not bytes."""

    architecture: str
    name: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rms_eps: float
    ropes: tuple[Rope, ...]  # ways to rotate
    rope_index: tuple[int | None, ...]  # of each layer, None: it does not rotate
    windows: tuple[int, ...]  # of each layer: the last tokens it sees, 0: all
    attention_scale: float
    tied: bool  # the output head is the embedding matrix
    stop_token_ids: tuple[int, ...]  # ascending
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    add_bos: bool
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0  # logits are divided by it
    n_experts: int = 0  # feed-forward networks of a layer, 0: one; ffn_size is that of each
    n_experts_used: int = 0  # by each token
    expert_shares: str = "chosen"  # what the softmax of their shares is over: these, or "all"

    @property
    def rope_theta(self) -> float:
        """Base of the rotation, in layers that see everything."""
        return self.ropes[0].theta

    @property
    def rope_dim(self) -> int:
        """Rotated values of a head."""
        return self.ropes[0].dim

    @classmethod
    def from_gguf(cls, file: GGUF) -> "ModelConfig":
        """The configuration of an open file or set of parts. Reads no tensor data but rotation tables.

        Raises ModelError naming key, value and range.
        """
        read = Metadata(file.metadata)
        name = read.text("general.architecture")
        if name not in ARCHITECTURES:
            raise ModelError(
                f"general.architecture: {name!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        architecture = ARCHITECTURES[name]
        for key in (*REFUSED_KEYS, *sorted(OPTIONAL_KEYS - architecture.keys)):
            read.absent(f"{name}.{key}")

        n_experts, n_used = read_experts(
            read, architecture.experts, f"{name}.expert_count", f"{name}.expert_used_count"
        )
        gating = read.integer(f"{name}.expert_gating_func", 0, 1 << 20, default=1)
        if gating != 1:
            raise ModelError(f"{name}.expert_gating_func: {gating} is not supported, only 1, softmax")
        normed = read.flag(f"{name}.expert_weights_norm", default=True)
        ffn_key = f"{name}.expert_feed_forward_length"
        if not n_experts or ffn_key not in file.metadata:
            ffn_key = f"{name}.feed_forward_length"

        n_layers = read.integer(f"{name}.block_count", 1, 1024)
        hidden_size = read.integer(f"{name}.embedding_length", 1, 1 << 18)
        n_heads = read.per_layer(f"{name}.attention.head_count", 1, 4096)
        n_kv_heads = read.per_layer(f"{name}.attention.head_count_kv", 1, n_heads, default=n_heads)
        if n_heads % n_kv_heads:
            raise ModelError(f"{name}.attention.head_count_kv: {n_kv_heads} does not divide head_count {n_heads}")
        if f"{name}.attention.key_length" not in file.metadata and hidden_size % n_heads:
            raise ModelError(f"{name}.attention.head_count: {n_heads} does not divide embedding_length {hidden_size}")
        head_dim = read.integer(f"{name}.attention.key_length", 2, 4096, default=hidden_size // n_heads)
        value_dim = read.integer(f"{name}.attention.value_length", 2, 4096, default=head_dim)
        if value_dim != head_dim:
            raise ModelError(f"{name}.attention.value_length: {value_dim} differs from key_length {head_dim}")
        context_length = read.integer(f"{name}.context_length", 1, 1 << 27)
        ropes, tables = read_ropes(file, name, architecture, head_dim, context_length)
        windows = read_windows(read, name, architecture, n_layers)
        scale = head_dim if n_layers != architecture.wide_layers else hidden_size // n_heads
        caps = [
            read.softcap(f"{name}.{key}", default) if key in architecture.keys else default
            for key, default in zip(
                ("attn_logit_softcapping", "final_logit_softcapping"), architecture.softcaps, strict=True
            )
        ]

        if "token_embd.weight" not in file.tensors:
            raise ModelError("tensor token_embd.weight: missing")
        shape = file.tensors["token_embd.weight"].shape
        if len(shape) != 2 or shape[1] != hidden_size or not 1 <= shape[0] <= 1 << 24:
            raise ModelError(
                f"tensor token_embd.weight: shape {shape}, must be (vocabulary up to {1 << 24}, {hidden_size})"
            )
        vocab_size = shape[0]
        tokens = read.strings("tokenizer.ggml.tokens")
        if len(tokens) > vocab_size:
            raise ModelError(f"tokenizer.ggml.tokens: {len(tokens)} tokens, token_embd.weight has {vocab_size} rows")

        special = {
            kind: read.integer(f"tokenizer.ggml.{kind}_token_id", 0, vocab_size - 1, default=None)
            for kind in ("bos", "eos", "eot", "eom", "padding")
        }
        stops = {special[kind] for kind in ("eos", "eot", "eom")} - {None}
        types = np.asarray(read.numbers("tokenizer.ggml.token_type", default=()))[: len(tokens)]
        stops.update(i for i in np.flatnonzero(types == _CONTROL).tolist() if tokens[i] in END_TOKENS)
        config = cls(
            architecture=name,
            name=read.text("general.name", default=file.path.stem),
            n_layers=n_layers,
            hidden_size=hidden_size,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_size=read.per_layer(ffn_key, 1, 1 << 20),
            vocab_size=vocab_size,
            context_length=context_length,
            rms_eps=read.real(f"{name}.attention.layer_norm_rms_epsilon", 1e-12, 0.1),
            ropes=ropes,
            rope_index=rope_of_layers(architecture.rotated(n_layers), windows, len(ropes)),
            windows=windows,
            attention_scale=read.real(f"{name}.attention.scale", 1e-6, 1e6, default=scale**-0.5),
            tied="output.weight" not in file.tensors,
            stop_token_ids=tuple(sorted(stops)),
            bos_token_id=special["bos"],
            eos_token_id=special["eos"],
            pad_token_id=special["padding"],
            add_bos=special["bos"] is not None and read.add_bos(),
            attention_softcap=caps[0],
            logit_softcap=caps[1],
            embedding_scale=read.real(
                f"{name}.embedding_scale", 1e-6, 1e6, default=hidden_size**0.5 if architecture.scaled_embedding else 1.0
            ),
            residual_scale=read.real(f"{name}.residual_scale", 1e-6, 1e6, default=1.0),
            logit_scale=read.real(f"{name}.logit_scale", 1e-6, 1e6, default=1.0),
            n_experts=n_experts,
            n_experts_used=n_used,
            expert_shares="chosen" if normed else "all",
        )
        found = {tensor.name: tensor.shape for tensor in file.tensors.values() if tensor.name not in tables}
        architecture.check_tensors(config, found)
        return config


def rope_of_layers(rotated: tuple[bool, ...], windows: tuple[int, ...], n_ropes: int) -> tuple[int | None, ...]:
    """The rotation of each layer: the last one of `n_ropes` where it has a window."""
    return tuple(
        (n_ropes - 1 if window else 0) if rotates else None for rotates, window in zip(rotated, windows, strict=True)
    )


def read_experts(read: Metadata, has: str, count: str, used: str) -> tuple[int, int]:
    """(experts of a layer, experts of each token) under the keys `count` and `used`; 0, 0 without experts."""
    if has == "never":
        read.absent(count)
        return 0, 0
    n = read.integer(count, 0, 4096, default=0)
    if n == 0 and has == "always":
        raise ModelError(f"{count}: no experts")
    return n, read.integer(used, 1, n) if n else 0
