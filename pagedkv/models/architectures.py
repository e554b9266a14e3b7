"""What each supported architecture is made of: adding one is an entry here, a graph in the core and a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.models.errors import ModelError

if TYPE_CHECKING:
    from pagedkv.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture` of GGUF.

    model_shapes, layer_shapes   config -> {tensor name: shape in numpy order}; a layer's names without their `blk.N.`
    ignored                      tensors that may be present and carry nothing (precomputed tables)
    refused_keys                 metadata keys, without the architecture's prefix, that ask for what is not computed
    rope_scalings                accepted values of `rope.scaling.type`
    """

    model_shapes: Callable[["ModelConfig"], Shapes]
    layer_shapes: Callable[["ModelConfig"], Shapes]
    ignored: frozenset[str] = frozenset()
    refused_keys: tuple[str, ...] = ()
    rope_scalings: frozenset[str] = frozenset({"none"})

    def tensor_shapes(self, config: "ModelConfig") -> Shapes:
        """Every tensor the model consists of, in the order of the computation."""
        shapes = self.model_shapes(config)
        layer = self.layer_shapes(config)
        for i in range(config.n_layers):
            shapes.update({f"blk.{i}.{name}": shape for name, shape in layer.items()})
        return shapes

    def check_tensors(self, config: "ModelConfig", found: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError unless `found` holds exactly this model's tensors in their shapes."""
        # n_layers is only a claim of the file: no table of a thousand layers is built for a file without tensors
        if config.n_layers > len(found):
            raise ModelError(
                f"{config.architecture}.block_count: {config.n_layers} layers in a file of {len(found)} tensors"
            )
        wanted = self.tensor_shapes(config)
        for name, shape in wanted.items():
            if name not in found:
                raise ModelError(f"tensor {name}: missing")
            if found[name] != shape:
                raise ModelError(f"tensor {name}: shape {found[name]}, the metadata asks for {shape}")
        extra = [name for name in found if name not in wanted and name.split(".", 2)[-1] not in self.ignored]
        if extra:
            raise ModelError(f"tensor {extra[0]}: not supported by the {config.architecture} architecture")


def _llama_model(config: "ModelConfig") -> Shapes:
    shapes: Shapes = {
        "token_embd.weight": (config.vocab_size, config.hidden_size),
        "output_norm.weight": (config.hidden_size,),
    }
    return shapes if config.tied else shapes | {"output.weight": (config.vocab_size, config.hidden_size)}


def _llama_layer(config: "ModelConfig") -> Shapes:
    hidden, ffn = config.hidden_size, config.ffn_size
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_rows, hidden),
        "attn_k.weight": (kv_rows, hidden),
        "attn_v.weight": (kv_rows, hidden),
        "attn_output.weight": (hidden, q_rows),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_shapes=_llama_model,
        layer_shapes=_llama_layer,
        # the inverse frequencies some old converters wrote: position times these is what RoPE computes anyway
        ignored=frozenset({"attn_rot_embd", "attention.rotary_emb.inv_freq"}),
        refused_keys=("expert_count", "attention.sliding_window", "logit_scale", "residual_scale", "embedding_scale"),
    ),
}
