"""From the tensors of a file to a ForwardModel: every matrix is read once, a slice at a time, and packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.forward import ForwardModel
from pagedkv.core.layer import Layer
from pagedkv.core.matmul import WEIGHT_TYPES, PackedMatrix
from pagedkv.core.memory import WeightMemory
from pagedkv.models.architectures import ARCHITECTURES
from pagedkv.models.config import ModelConfig
from pagedkv.models.errors import ModelError
from pagedkv.models.files import ModelFile
from pagedkv.models.gguf import TensorInfo
from pagedkv.models.quantise import FLOATS, to_float32, to_q8_0
from pagedkv.models.rope import half_split_order

QUANTIZATIONS = ("q8_0",)


class TensorSource(Protocol):
    """Tensors under their GGUF names; a TensorInfo has the file's own name for it."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name, shape and type of each."""

    def data(self, name: str) -> bytes:
        """Bytes of one."""

    def file(self, name: str) -> ModelFile:
        """The file it lies in, at TensorInfo.offset."""

    def check_unchanged(self) -> None:
        """Raise ModelError when a file was written into since it was opened."""


class Packer:
    """Packs the tensors of one source for one model.

    adjacent_pairs   rows of q and k come with rotation pairs side by side
    norm_offset      added to every norm weight
    quantization     "q8_0": float matrices become Q8_0, where 32 divides their columns; None: as they are
    done             called after each tensor
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        pool: ThreadPool,
        *,
        adjacent_pairs: bool,
        norm_offset: float = 0.0,
        quantization: str | None = None,
        done: Callable[[], object] = lambda: None,
    ):
        self.source, self.config, self.pool, self.done = source, config, pool, done
        self.architecture = ARCHITECTURES[config.architecture]
        self.memory = WeightMemory()
        self.norm_offset, self.quantization = norm_offset, quantization
        self.orders: dict[int, np.ndarray | None] = {
            n: half_split_order(n, config.head_dim, config.rope_dim) if adjacent_pairs else None
            for n in (config.n_heads, config.n_kv_heads)
        }
        for tensor in source.tensors.values():
            if tensor.type_name not in WEIGHT_TYPES:
                supported = ", ".join(WEIGHT_TYPES)
                raise ModelError(
                    f"tensor {tensor.name}: type {tensor.type_name} is not supported; supported: {supported}"
                )

    def model(self, context: int, activations: str) -> ForwardModel:
        """The whole model, its rotation tables for sequences of up to `context` tokens. ModelError, MemoryError."""
        config = self.config
        tables = [rope.table(context) for rope in config.ropes]
        embedding = self.matrices("token_embd.weight")[0]
        layers = [self.layer(i) for i in range(config.n_layers)]
        return ForwardModel(
            layers=layers,
            embedding=embedding,
            head=embedding if config.tied else self.matrices("output.weight")[0],
            head_norm=self.norm("output_norm.weight") / np.float32(config.logit_scale),
            inv_freq=np.stack([inv_freq for inv_freq, _ in tables]),
            rope_factors=[factor for _, factor in tables],
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_eps=config.rms_eps,
            pool=self.pool,
            activations=activations,
            ffn_activation=self.architecture.activation,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
            embedding_scale=config.embedding_scale,
            residual_scale=config.residual_scale,
            experts_used=config.n_experts_used,
            expert_shares=config.expert_shares,
        )

    def layer(self, i: int) -> Layer:
        """Layer i."""
        config, architecture, blk = self.config, self.architecture, f"blk.{i}."
        q_heads, kv_heads = config.n_heads, config.n_kv_heads
        q_rows, kv_rows = q_heads * config.head_dim, kv_heads * config.head_dim
        if architecture.fused:
            q, k, v = self.matrices(blk + "attn_qkv.weight", q_rows, kv_rows, kv_rows)
        else:
            q = self.matrices(blk + "attn_q.weight", order=self.orders[q_heads])[0]
            k = self.matrices(blk + "attn_k.weight", order=self.orders[kv_heads])[0]
            v = self.matrices(blk + "attn_v.weight")[0]
        o = self.matrices(blk + "attn_output.weight")[0]
        vectors: dict[str, Any] = {}
        if architecture.pre_norms:
            vectors |= {
                "attn_norm": self.norm(blk + "attn_norm.weight"),
                "ffn_norm": self.norm(blk + "ffn_norm.weight"),
            }
        if architecture.post_norms:
            vectors["post_attn_norm"] = self.norm(blk + "post_attention_norm.weight")
            vectors["post_ffn_norm"] = self.norm(blk + "post_ffw_norm.weight")
        if architecture.qk_norm:
            vectors |= {f"{x}_norm": self.norm(f"{blk}attn_{x}_norm.weight") for x in "qk"}
        if architecture.qkv_bias:
            vectors |= {f"{x}_bias": self.vector(f"{blk}attn_{x}.bias") for x in "qkv"}
        return Layer(
            q=q,
            k=k,
            v=v,
            o=o,
            rope=config.rope_index[i],
            window=config.windows[i],
            **self.feed_forward(blk),
            **vectors,
        )

    def feed_forward(self, blk: str) -> dict[str, Any]:
        """Arguments of a Layer: gate, up and down, or router and experts."""
        config, n = self.config, self.config.ffn_size
        if config.n_experts:
            parts = [self.expert_matrices(f"{blk}ffn_{part}") for part in ("gate", "up", "down")]
            # what chooses is kept as exact as the file has it
            router = self.matrices(blk + "ffn_gate_inp.weight", quantise=False)[0]
            return {"router": router, "experts": list(zip(*parts, strict=True))}
        if self.architecture.fused:
            gate, up = self.matrices(blk + "ffn_up.weight", n, n)
        else:
            gate, up = self.matrices(blk + "ffn_gate.weight")[0], self.matrices(blk + "ffn_up.weight")[0]
        return {"gate": gate, "up": up, "down": self.matrices(blk + "ffn_down.weight")[0]}

    def expert_matrices(self, name: str) -> list[PackedMatrix]:
        """A matrix of every expert, from one tensor of all of them or one tensor each."""
        n = self.config.n_experts
        if f"{name}_exps.weight" in self.source.tensors:
            rows = self.source.tensors[f"{name}_exps.weight"].shape[1]
            return self.matrices(f"{name}_exps.weight", *(rows,) * n)
        return [self.matrices(f"{name}.{i}.weight")[0] for i in range(n)]

    def matrices(
        self, name: str, *rows: int, order: np.ndarray | None = None, quantise: bool = True
    ) -> list[PackedMatrix]:
        """Matrix `name`, or a stack of them, cut into matrices of so many rows each, without `rows` as a whole."""
        tensor = self.source.tensors[name]
        n_rows, n_cols = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        row_bytes = tensor.n_bytes // n_rows
        packed, offset = [], tensor.offset
        for n in rows or (n_rows,):
            packed.append(self._matrix(name, offset, n, n_cols, n * row_bytes, order, quantise))
            offset += n * row_bytes
        self.done()
        return packed

    def _matrix(
        self, name: str, offset: int, n_rows: int, n_cols: int, n_bytes: int, order: np.ndarray | None, quantise: bool
    ) -> PackedMatrix:
        """Rows of tensor `name` that lie from `offset` of its file on."""
        kind, file, what = (
            self.source.tensors[name].type_name,
            self.source.file(name),
            f"tensor {self.source.tensors[name].name}",
        )
        if quantise and self.quantization and kind in FLOATS and n_cols % 32 == 0:

            def read(start: int, stop: int) -> bytes:
                return file.read(what, offset + start, stop - start)

            blocks = to_q8_0(read, n_bytes, kind, n_cols)
            return PackedMatrix.pack(self.pool, "Q8_0", blocks, n_rows, n_cols, order, self.memory)
        with file.reading(what, offset, n_bytes):
            return PackedMatrix.read(self.pool, kind, file.fileno(), offset, n_rows, n_cols, order, self.memory)

    def norm(self, name: str) -> np.ndarray:
        """Weights of a norm, float32."""
        return self.vector(name) + np.float32(self.norm_offset)

    def vector(self, name: str) -> np.ndarray:
        """A vector as float32, copied."""
        tensor = self.source.tensors[name]
        if tensor.type_name not in FLOATS:
            supported = ", ".join(FLOATS)
            raise ModelError(
                f"tensor {tensor.name}: type {tensor.type_name} is not supported for a vector; supported: {supported}"
            )
        self.done()
        return to_float32(self.source.data(name), tensor.type_name)
