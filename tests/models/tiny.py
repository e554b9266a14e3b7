"""A whole tiny llama model as a GGUF file, complete enough for everything that reads models."""

import gguf_writer as w

CHARS = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100))]
ALPHABET = CHARS + [chr(0x100 + i) for i in range(256 - len(CHARS))]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d", "1 2", "Ġ Ġ"]
USER = ["<tool>"]
TOKENS = CONTROL + ALPHABET + [m.replace(" ", "") for m in MERGES] + USER
TYPES = [3] * len(CONTROL) + [1] * (len(ALPHABET) + len(MERGES)) + [4] * len(USER)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2


def entries(**changes) -> list[tuple[str, int, object]]:
    """Metadata of the model as (key, kind, value). `changes`: key with __ for dots -> (kind, value) or None."""
    table = {
        "general.architecture": (w.STRING, "llama"),
        "general.name": (w.STRING, "Tiny"),
        "llama.block_count": (w.U32, LAYERS),
        "llama.context_length": (w.U32, 256),
        "llama.embedding_length": (w.U32, HIDDEN),
        "llama.feed_forward_length": (w.U32, FFN),
        "llama.attention.head_count": (w.U32, HEADS),
        "llama.attention.head_count_kv": (w.U32, KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": (w.F32, 2.0**-17),
        "llama.rope.freq_base": (w.F32, 50000.0),
        "llama.rope.dimension_count": (w.U32, HIDDEN // HEADS),
        "tokenizer.ggml.model": (w.STRING, "gpt2"),
        "tokenizer.ggml.pre": (w.STRING, "smollm"),
        "tokenizer.ggml.tokens": (w.ARRAY, (w.STRING, TOKENS)),
        "tokenizer.ggml.token_type": (w.ARRAY, (w.I32, TYPES)),
        "tokenizer.ggml.merges": (w.ARRAY, (w.STRING, MERGES)),
        "tokenizer.ggml.bos_token_id": (w.U32, 1),
        "tokenizer.ggml.eos_token_id": (w.U32, 2),
        "tokenizer.ggml.padding_token_id": (w.U32, 2),
        "tokenizer.chat_template": (w.STRING, TEMPLATE),
    }
    table.update({key.replace("__", "."): change for key, change in changes.items()})
    return [(key, *item) for key, item in table.items() if item is not None]


def tensors(tied: bool = True, head_dim: int = HIDDEN // HEADS) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {"token_embd.weight": ((len(TOKENS), HIDDEN), "Q8_0"), "output_norm.weight": ((HIDDEN,), "F32")}
    if not tied:
        found["output.weight"] = ((len(TOKENS), HIDDEN), "Q8_0")
    for i in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * head_dim, HIDDEN),
            "attn_k": (KV_HEADS * head_dim, HIDDEN),
            "attn_v": (KV_HEADS * head_dim, HIDDEN),
            "attn_output": (HIDDEN, HEADS * head_dim),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            found[f"blk.{i}.{name}.weight"] = (shape, "F32" if len(shape) == 1 else "Q4_0")
    return found


def model(tied: bool = True, head_dim: int = HIDDEN // HEADS, tensor_changes: dict | None = None, **changes) -> bytes:
    """The file's bytes. `tensor_changes`: name -> (shape, type name), or None to leave the tensor out."""
    table = {**tensors(tied, head_dim), **(tensor_changes or {})}
    return w.model({name: item for name, item in table.items() if item is not None}, entries(**changes))
