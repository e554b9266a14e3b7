"""Small random llama models, packed for the core and computed again in float64 from their weights."""

import gguf
import numpy as np

from pagedkv import PagedKVCache
from pagedkv.core.forward import ForwardModel
from pagedkv.core.layer import Layer
from pagedkv.core.matmul import PackedMatrix

EPS = 1e-5
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class TinyLlama:
    """Weights drawn from a seed. `types`: weight type of each matrix by name, "" for the rest."""

    def __init__(self, *, n_layers=2, hidden=48, n_heads=6, n_kv_heads=2, head_dim=8, ffn=50, vocab=75, rope_dim=None,
                 tied=False, types="F32", theta=1000.0, seed=0):  # fmt: skip
        self.rng = np.random.default_rng(seed)
        self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim, self.vocab = (
            n_layers, n_heads, n_kv_heads, head_dim, vocab
        )  # fmt: skip
        self.types = types if isinstance(types, dict) else {"": types}
        self.rope_half = (head_dim // 2 * 2 if rope_dim is None else rope_dim) // 2
        self.inv_freq = theta ** (-np.arange(self.rope_half) / max(self.rope_half, 1))
        q_rows, kv_rows = n_heads * head_dim, n_kv_heads * head_dim
        shapes = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows),
                  "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}  # fmt: skip
        self.raw, self.exact = {}, {}
        self.add("embedding", (vocab, hidden), 1.0)
        if not tied:
            self.add("head", (vocab, hidden), 0.3)
        for layer in range(n_layers):
            for name in MATRICES:
                self.add((layer, name), shapes[name], shapes[name][1] ** -0.5)
        self.norms = {
            name: self.rng.uniform(0.5, 1.5, hidden).astype(np.float32)
            for name in ["head", *((layer, which) for layer in range(n_layers) for which in ("attn", "ffn"))]
        }

    def add(self, name, shape, spread):
        """Draw a matrix, store it as its type keeps it, and remember what that is."""
        type_name = self.types.get(name[1] if isinstance(name, tuple) else name, self.types.get("", "F32"))
        kind = gguf.GGMLQuantizationType[type_name]
        raw = gguf.quants.quantize((self.rng.standard_normal(shape) * spread).astype(np.float32), kind)
        self.raw[name] = type_name, raw, shape
        self.exact[name] = gguf.quants.dequantize(raw, kind).astype(np.float64)

    def forward(self, pool, activations="int8"):
        packed = {name: PackedMatrix.pack(pool, kind, raw, *shape) for name, (kind, raw, shape) in self.raw.items()}
        layers = [
            Layer(
                **{name: packed[i, name] for name in MATRICES},
                attn_norm=self.norms[i, "attn"],
                ffn_norm=self.norms[i, "ffn"],
            )
            for i in range(self.n_layers)
        ]
        return ForwardModel(
            layers=layers, embedding=packed["embedding"], head=packed.get("head", packed["embedding"]),
            head_norm=self.norms["head"], inv_freq=self.inv_freq, n_heads=self.n_heads, n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim, rms_eps=EPS, pool=pool, activations=activations,
        )  # fmt: skip

    def cache(self, n_pages=40, **options):
        options = {"format": "f32", "threads": 1, **options}
        return PagedKVCache(self.n_layers, self.n_kv_heads, self.head_dim, n_pages=n_pages, **options)

    def tokens(self, n, seed=0):
        return np.random.default_rng(1000 + seed).integers(0, self.vocab, n).astype(np.int32)

    # --- the same in float64, straight from the definition ------------------------------------------------------------

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * self.norms[name]

    def rotate(self, x):
        """x [n, heads, head_dim] at positions 0..n: pairs (i, i + half) as complex numbers."""
        half = self.rope_half
        turned = x.copy()
        angle = np.arange(len(x))[:, None, None] * self.inv_freq
        pairs = (x[:, :, :half] + 1j * x[:, :, half : 2 * half]) * np.exp(1j * angle)
        turned[:, :, :half], turned[:, :, half : 2 * half] = pairs.real, pairs.imag
        return turned

    def logits(self, ids):
        """Float64 [n, vocab], and K and V of every layer [n, n_kv_heads, head_dim]."""
        n, group = len(ids), self.n_heads // self.n_kv_heads
        x, kv = self.exact["embedding"][ids], []
        future = np.triu(np.full((n, n), -np.inf), 1)
        for i in range(self.n_layers):
            w = {name: self.exact[i, name] for name in MATRICES}
            h = self.norm(x, (i, "attn"))
            q, k, v = ((h @ w[name].T).reshape(n, -1, self.head_dim) for name in "qkv")
            q, k = self.rotate(q), self.rotate(k)
            kv.append((k, v))
            scores = np.einsum("nhd,thd->hnt", q, k.repeat(group, axis=1)) / np.sqrt(self.head_dim) + future
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            attended = np.einsum("hnt,thd->nhd", weights, v.repeat(group, axis=1))
            x = x + attended.reshape(n, -1) @ w["o"].T
            h = self.norm(x, (i, "ffn"))
            gate = h @ w["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"].T)) @ w["down"].T
        head = self.exact.get("head", self.exact["embedding"])
        return self.norm(x, "head") @ head.T, kv


def step(forward, kv, work, rows=None):
    """One run. work: [(sequence, ids of its new tokens)]; rows: numbers of the batch's rows, default all."""
    for seq, ids in work:
        seq.extend(len(ids))
    ids = np.concatenate([ids for _, ids in work])
    rows = np.arange(len(ids)) if rows is None else np.asarray(rows, np.int32)
    logits = np.full((len(rows), forward.vocab_padded), np.nan, np.float32)
    forward.run(kv, [seq for seq, _ in work], ids, [len(ids) for _, ids in work], rows, logits)
    return logits[:, : forward.vocab_size].copy()
