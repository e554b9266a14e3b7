"""`pagedkv info`: what a model file holds and what it will need."""

from collections import Counter

from pagedkv.commands.terminal import on_terminal


def run(model: str) -> None:
    """Print the description of a catalogue name or a file, `name: value` a line. ModelError for what cannot be used."""
    for name, value in describe(model).items():
        print(f"{name + ':':22}{value}")


def describe(model: str) -> dict[str, str]:
    """Name and value of each line. Reads metadata alone, no tensor data."""
    from pagedkv.core.kvcache import FORMATS, PAGE_TOKENS, tile_bytes
    from pagedkv.models.catalogue import resolve
    from pagedkv.models.source import open_model

    with open_model(resolve(model, progress=on_terminal())) as opened:
        config, tokenizer = opened.config, opened.tokenizer
        n_tensors: Counter[str] = Counter()
        n_bytes: Counter[str] = Counter()
        n_weights = 0
        for tensor in opened.tensors.tensors.values():
            n_tensors[tensor.type_name] += 1
            n_bytes[tensor.type_name] += tensor.n_bytes
            product = 1
            for length in tensor.shape:
                product *= length
            n_weights += product
    page = PAGE_TOKENS[0]
    token_bytes = {
        name: config.n_layers * config.n_kv_heads * tile_bytes(name, config.head_dim, page) / page for name in FORMATS
    }
    stops = ", ".join(f"{i} {tokenizer.decode([i], skip_special_tokens=False)!r}" for i in config.stop_token_ids)
    return {
        "model": config.name,
        "file": f"{opened.path} ({opened.container}, {size(opened.n_bytes)})",
        "architecture": config.architecture,
        "parameters": f"{n_weights:,}",
        "layers": str(config.n_layers),
        "hidden size": str(config.hidden_size),
        "feed-forward size": str(config.ffn_size),
        "attention": f"{config.n_heads} heads over {config.n_kv_heads} KV heads of {config.head_dim}",
        "rotary embedding": f"{config.rope_dim} of {config.head_dim} values, base {config.rope_theta:g}",
        "vocabulary": f"{config.vocab_size:,} tokens, output head {'tied' if config.tied else 'of its own'}",
        "context": f"{config.context_length:,} tokens",
        "tokenizer": opened.tokenizer_kind,
        "chat template": "yes" if tokenizer.has_chat_template else "no",
        "stop tokens": stops or "none",
        "types": ", ".join(f"{n_tensors[t]} x {t} ({size(n)})" for t, n in n_bytes.most_common()),
        "memory of weights": size(sum(n_bytes.values())),
        "KV per 1,000 tokens": ", ".join(f"{size(int(1000 * n))} as {name}" for name, n in token_bytes.items()),
    }


def size(n_bytes: int) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes} bytes"
