"""A real model small enough to run thousands of requests in seconds: one layer of random weights, 61 tokens."""

from types import SimpleNamespace

import numpy as np
from fakes import FakeTokenizer, successor

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.forward import ForwardModel
from pagedkv.core.layer import Layer
from pagedkv.core.matmul import PackedMatrix

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 61, 32, 2, 1, 16, 32


def small_model(context_length, echo=1.0, seed=0):
    """What LLMEngine takes as a model. `echo`: how much the last token alone says about the next, which makes outputs
    repeat themselves; 0: it says nothing."""
    rng = np.random.default_rng(seed)
    pool = ThreadPool(1)

    def packed(values):
        values = np.ascontiguousarray(values, np.float32)
        return PackedMatrix.pack(pool, "F32", values.view(np.uint8), *values.shape)

    def drawn(rows, columns, spread=1.0):
        return rng.standard_normal((rows, columns)) * spread * columns**-0.5

    embedding = rng.standard_normal((VOCAB, HIDDEN))
    head = drawn(VOCAB, HIDDEN, 1.5)
    for token in range(VOCAB):
        head[successor(token) % VOCAB] += echo * embedding[token] * HIDDEN**-0.5
    layer = Layer(
        q=packed(drawn(HEADS * HEAD_DIM, HIDDEN, 3.0)),
        k=packed(drawn(KV_HEADS * HEAD_DIM, HIDDEN, 3.0)),
        v=packed(drawn(KV_HEADS * HEAD_DIM, HIDDEN)),
        o=packed(drawn(HIDDEN, HEADS * HEAD_DIM)),
        gate=packed(drawn(FFN, HIDDEN)),
        up=packed(drawn(FFN, HIDDEN)),
        down=packed(drawn(HIDDEN, FFN)),
        attn_norm=np.ones(HIDDEN),
        ffn_norm=np.ones(HIDDEN),
    )
    forward = ForwardModel(
        layers=[layer],
        embedding=packed(embedding),
        head=packed(head),
        head_norm=np.ones(HIDDEN),
        inv_freq=1000.0 ** -np.linspace(0, 1, HEAD_DIM // 2),
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_eps=1e-5,
        pool=pool,
    )
    config = SimpleNamespace(
        context_length=context_length,
        stop_token_ids=(0,),
        n_layers=1,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
    )
    return SimpleNamespace(
        name="small", config=config, tokenizer=FakeTokenizer(VOCAB), forward=forward, close=lambda: None
    )
