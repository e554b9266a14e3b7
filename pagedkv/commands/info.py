"""`pagedkv info`: what a model file holds and what it will need."""

import math
from collections import Counter

from pagedkv.process import on_terminal


def run(model: str) -> None:
    """Print the description of a model, `name: value` a line. ModelError for what cannot be used."""
    for name, value in describe(model).items():
        print(f"{name + ':':22}{value}")


def describe(model: str) -> dict[str, str]:
    """Name and value of each line, of a catalogue name, a GGUF file or a Hugging Face directory. Reads no weights."""
    from pagedkv.core.kvcache import FORMATS, PAGE_TOKENS, tile_bytes
    from pagedkv.core.matmul import WEIGHT_TYPES
    from pagedkv.models.catalogue import resolve
    from pagedkv.models.source import open_model

    n_tensors: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    with open_model(resolve(model, progress=on_terminal())) as opened:
        config, tokenizer = opened.config, opened.tokenizer
        n_weights = sum(math.prod(tensor.shape) for tensor in opened.tensors.tensors.values())
        for tensor in opened.tensors.tensors.values():
            n_tensors[tensor.type_name] += 1
            n_bytes[tensor.type_name] += tensor.n_bytes
    page = PAGE_TOKENS[0]
    heads = config.n_layers * config.n_kv_heads
    kv = {name: size(1000 * heads * tile_bytes(name, config.head_dim, page) // page) for name in FORMATS}
    types = (
        f"{n_tensors[kind]} x {kind} ({size(n)}{'' if kind in WEIGHT_TYPES else ', not supported'})"
        for kind, n in n_bytes.most_common()
    )
    scaled = {"none": ""}
    ropes = [f"{r.dim} values, base {r.theta:g}{scaled.get(r.kind, f', {r.kind}')}" for r in config.ropes]
    rotated = sum(index is not None for index in config.rope_index)
    windows = sorted({window for window in config.windows if window})
    stops = ", ".join(f"{i} {tokenizer.decode([i], skip_special_tokens=False)!r}" for i in config.stop_token_ids)
    experts = f" in each of {config.n_experts} experts, {config.n_experts_used} for a token" if config.n_experts else ""
    return {
        "model": config.name,
        "file": f"{opened.path} ({opened.container}, {size(opened.n_bytes)})",
        "architecture": config.architecture,
        "parameters": f"{n_weights:,}",
        "layers": str(config.n_layers),
        "hidden size": str(config.hidden_size),
        "feed-forward size": str(config.ffn_size) + experts,
        "attention": f"{config.n_heads} heads over {config.n_kv_heads} KV heads of {config.head_dim}",
        "windows": ", ".join(f"{config.windows.count(w)} layers see {w:,} tokens" for w in windows) or "none",
        "rotary embedding": "; ".join(ropes) + ("" if rotated == config.n_layers else f"; in {rotated} layers"),
        "vocabulary": f"{config.vocab_size:,} tokens, output head {'tied' if config.tied else 'of its own'}",
        "context": f"{config.context_length:,} tokens",
        "tokenizer": opened.tokenizer_kind,
        "chat template": "yes" if tokenizer.has_chat_template else "no",
        "stop tokens": stops or "none",
        "types": ", ".join(types),
        "memory of weights": size(sum(n_bytes.values())),
        "KV per 1,000 tokens": ", ".join(f"{n} as {name}" for name, n in kv.items()),
    }


def size(n_bytes: int) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes} bytes"
