"""What each supported architecture is made of: adding one is an entry in the table below and a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagedkv.models.errors import ModelError

if TYPE_CHECKING:
    from pagedkv.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

# Metadata keys, without the architecture's prefix, that change the arithmetic; each architecture names those it has.
OPTIONAL_KEYS = frozenset({
    "attention.sliding_window", "attention.scale", "embedding_scale", "residual_scale", "logit_scale",
    "attn_logit_softcapping", "final_logit_softcapping",
})  # fmt: skip
REFUSED_KEYS = (
    "attention.clamp_kqv", "attention.max_alibi_bias", "expert_shared_count", "expert_shared_feed_forward_length",
    "expert_weights_scale", "expert_group_count", "leading_dense_block_count", "interleave_moe_layer_step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture` of GGUF: RMSNorm, rotary attention, a gated feed-forward network, and what it adds.

    pre_norms         norms before attention and feed-forward
    post_norms        norms of what attention and feed-forward add to the residual stream
    qk_norm           norms of queries and keys: "head" each head alone, "row" all heads of a token together
    qkv_bias          biases of q, k and v
    fused             q, k, v in one matrix, gate and up in another
    activation        of the gate
    adjacent_pairs    GGUF files keep the two values of a rotation pair side by side, not half a head apart
    scaled_embedding  embeddings times sqrt(hidden size)
    norm_offset       added to norm weights of Hugging Face files; GGUF files hold the sum
    full_every        with a window, each so many-th layer sees everything; 0: none does
    window            default of `attention.sliding_window`
    unrotated_every   each so many-th layer does not rotate; 0: all do
    local_theta       base of the rotation in layers with a window, where it is another one
    softcaps          defaults of the two soft caps, of scores and of logits
    wide_layers       the number of layers of the one model whose scores are scaled by its hidden size per head
    keys              of OPTIONAL_KEYS, those it has
    experts           whether its feed-forward networks are several experts: "always", "sometimes" or "never"
    ignored           tensors that may be present and carry nothing
    """

    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: str | None = None
    qkv_bias: bool = False
    fused: bool = False
    activation: str = "silu"
    adjacent_pairs: bool = False
    scaled_embedding: bool = False
    norm_offset: float = 0.0
    full_every: int = 0
    window: int = 0
    unrotated_every: int = 0
    local_theta: float | None = None
    softcaps: tuple[float, float] = (0.0, 0.0)
    wide_layers: int = 0
    keys: frozenset[str] = frozenset()
    experts: str = "never"
    ignored: frozenset[str] = frozenset()

    def windows(self, window: int, n_layers: int) -> tuple[int, ...]:
        """The window of each layer, 0: none."""
        return tuple(0 if self.full_every and (i + 1) % self.full_every == 0 else window for i in range(n_layers))

    def rotated(self, n_layers: int) -> tuple[bool, ...]:
        """Whether each layer rotates queries and keys."""
        return tuple(not self.unrotated_every or (i + 1) % self.unrotated_every != 0 for i in range(n_layers))

    def layer_shapes(self, config: "ModelConfig", stacked: bool = True) -> Shapes:
        """{tensor name without `blk.N.`: shape in numpy order}; `stacked`: one tensor holds a matrix of all experts."""
        hidden, ffn, head_dim = config.hidden_size, config.ffn_size, config.head_dim
        q, kv = config.n_heads * head_dim, config.n_kv_heads * head_dim
        shapes: Shapes = {"attn_norm.weight": (hidden,)} if self.pre_norms else {}
        if self.fused:
            shapes["attn_qkv.weight"] = (q + 2 * kv, hidden)
        else:
            shapes |= {"attn_q.weight": (q, hidden), "attn_k.weight": (kv, hidden), "attn_v.weight": (kv, hidden)}
        if self.qkv_bias:
            shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if self.qk_norm:
            one = self.qk_norm == "head"
            shapes |= {
                "attn_q_norm.weight": (head_dim if one else q,),
                "attn_k_norm.weight": (head_dim if one else kv,),
            }
        shapes["attn_output.weight"] = (hidden, q)
        if self.post_norms:
            shapes["post_attention_norm.weight"] = (hidden,)
        if self.pre_norms:
            shapes["ffn_norm.weight"] = (hidden,)
        if config.n_experts:
            shapes["ffn_gate_inp.weight"] = (config.n_experts, hidden)
            for name, shape in (("ffn_gate", (ffn, hidden)), ("ffn_up", (ffn, hidden)), ("ffn_down", (hidden, ffn))):
                if stacked:
                    shapes[f"{name}_exps.weight"] = (config.n_experts, *shape)
                else:
                    shapes |= {f"{name}.{i}.weight": shape for i in range(config.n_experts)}
        else:
            if self.fused:
                shapes["ffn_up.weight"] = (2 * ffn, hidden)
            else:
                shapes |= {"ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden)}
            shapes["ffn_down.weight"] = (hidden, ffn)
        if self.post_norms:
            shapes["post_ffw_norm.weight"] = (hidden,)
        return shapes

    def tensor_shapes(self, config: "ModelConfig", stacked: bool = True) -> Shapes:
        """Every tensor the model consists of, in the order of the computation."""
        shapes: Shapes = {
            "token_embd.weight": (config.vocab_size, config.hidden_size),
            "output_norm.weight": (config.hidden_size,),
        }
        if not config.tied:
            shapes["output.weight"] = (config.vocab_size, config.hidden_size)
        layer = self.layer_shapes(config, stacked)
        for i in range(config.n_layers):
            shapes.update({f"blk.{i}.{name}": shape for name, shape in layer.items()})
        return shapes

    def check_tensors(
        self,
        config: "ModelConfig",
        found: Mapping[str, tuple[int, ...]],
        called: Callable[[str], str] = str,
        keys: tuple[str, str] | None = None,
    ) -> None:
        """Raise ModelError unless `found` holds exactly this model's tensors in their shapes.

        called: what messages call a tensor; keys: what they call the numbers of layers and of experts.
        """
        name = config.architecture
        layers_key, experts_key = keys or (f"{name}.block_count", f"{name}.expert_count")
        # n_layers is only a claim of the file: no table of a thousand layers is built for a file without tensors
        if config.n_layers > len(found):
            raise ModelError(f"{layers_key}: {config.n_layers} layers in a file of {len(found)} tensors")
        stacked = "blk.0.ffn_gate_exps.weight" in found
        if not stacked and config.n_experts > len(found):
            raise ModelError(f"{experts_key}: {config.n_experts} experts in a file of {len(found)} tensors")
        wanted = self.tensor_shapes(config, stacked)
        for name, shape in wanted.items():
            if name not in found:
                raise ModelError(f"tensor {called(name)}: missing")
            if found[name] != shape:
                raise ModelError(f"tensor {called(name)}: shape {found[name]}, the metadata asks for {shape}")
        extra = [name for name in found if name not in wanted and name.split(".", 2)[-1] not in self.ignored]
        if extra:
            raise ModelError(f"tensor {called(extra[0])}: not supported by the {config.architecture} architecture")


# the inverse frequencies some old converters wrote: position times these is what the rotation computes anyway
_OLD_TABLES = frozenset({"attn_rot_embd", "attention.rotary_emb.inv_freq"})
_GEMMA = Architecture(activation="gelu", scaled_embedding=True, norm_offset=1.0)
_CAPS = frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        adjacent_pairs=True, keys=frozenset({"attention.sliding_window"}), experts="sometimes", ignored=_OLD_TABLES
    ),
    "smollm3": Architecture(adjacent_pairs=True, unrotated_every=4),
    "granite": Architecture(
        adjacent_pairs=True,
        keys=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    ),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm="head"),
    "qwen3moe": Architecture(qk_norm="head", experts="always"),
    "olmo2": Architecture(pre_norms=False, post_norms=True, qk_norm="row"),
    "phi3": Architecture(fused=True, keys=frozenset({"attention.sliding_window"})),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA, post_norms=True, full_every=2, window=4096, softcaps=(50.0, 30.0), wide_layers=46, keys=_CAPS
    ),
    "gemma3": replace(
        _GEMMA, post_norms=True, qk_norm="head", full_every=6, local_theta=10000.0, wide_layers=62, keys=_CAPS
    ),
}  # fmt: skip
