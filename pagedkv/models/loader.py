"""load_model: from a name or a path to packed weights, configuration and tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.forward import ACTIVATIONS, ForwardModel, Layer
from pagedkv.core.matmul import WEIGHT_TYPES, PackedMatrix
from pagedkv.models.catalogue import resolve
from pagedkv.models.config import ModelConfig
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf import GGUFFile
from pagedkv.models.tokenizer import Tokenizer


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run: `forward` holds the packed weights, nothing of the file stays mapped."""

    name: str
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    forward: ForwardModel

    def close(self) -> None:
        """Free the workspace; the weights go with the last reference."""
        self.forward.close()


def load_model(
    model: str | os.PathLike,
    *,
    threads: int | None = None,
    quantization: str | None = None,
    activations: str = "int8",
    progress: bool = False,
) -> LoadedModel:
    """Load a catalogue name (pulled at first use) or a GGUF file.

    threads: of packing and of every later step (None: see `pagedkv.core.cpus.default_threads`). progress: bars on
    standard error. Raises ModelError or ValueError in one line that names what is wrong. Weights are read once, packed
    and dropped from the page map.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: {activations!r} is not one of {', '.join(ACTIVATIONS)}")
    if quantization is not None:
        raise ValueError(f"quantization: {quantization!r} is not supported; a GGUF file keeps its own types")
    pool = ThreadPool(threads)
    path = resolve(model, progress=progress)
    with GGUFFile(path) as file:
        config = ModelConfig.from_gguf(file)
        for tensor in file.tensors.values():
            if tensor.type_name not in WEIGHT_TYPES:
                supported = ", ".join(WEIGHT_TYPES)
                raise ModelError(
                    f"tensor {tensor.name}: type {tensor.type_name} is not supported; supported: {supported}"
                )
        tokenizer = Tokenizer(file.metadata)
        forward = _pack(file, config, pool, activations, progress)
    return LoadedModel(config.name, path, config, tokenizer, forward)


def inverse_frequencies(theta: float, rope_dim: int) -> np.ndarray:
    """theta ** (-2i / rope_dim) for i in [0, rope_dim/2), float64, correctly rounded, so the same on every machine."""
    with localcontext() as context:
        context.prec = 40
        log = Decimal(theta).ln()
        return np.array([float((-log * 2 * i / rope_dim).exp()) for i in range(rope_dim // 2)], np.float64)


def half_split_order(n_heads: int, head_dim: int, rope_dim: int) -> np.ndarray:
    """Row order that turns a head's adjacent rotation pairs (2i, 2i+1) into (i, i + rope_dim/2).

    int64 [n_heads * head_dim].
    """
    head = np.arange(head_dim)
    head[: rope_dim // 2] = np.arange(0, rope_dim, 2)
    head[rope_dim // 2 : rope_dim] = np.arange(1, rope_dim, 2)
    return (np.arange(n_heads)[:, None] * head_dim + head).ravel().astype(np.int64)


def _pack(file: GGUFFile, config: ModelConfig, pool: ThreadPool, activations: str, progress: bool) -> ForwardModel:
    from tqdm import tqdm

    n = len(file.tensors)
    bar = tqdm(total=n, desc="packing weights", unit="tensor", disable=not progress, leave=False, delay=1)

    def matrix(name: str, row_order: np.ndarray | None = None) -> PackedMatrix:
        tensor = file.tensors[name]
        rows, cols = tensor.shape
        packed = PackedMatrix.pack(pool, tensor.type_name, file.data(name), rows, cols, row_order)
        file.drop(name)
        bar.update()
        return packed

    def vector(name: str) -> np.ndarray:
        tensor = file.tensors[name]
        if tensor.type_name != "F32":
            raise ModelError(f"tensor {name}: type {tensor.type_name} is not supported for a vector; supported: F32")
        bar.update()
        return np.frombuffer(file.data(name), np.float32).copy()

    q_order = half_split_order(config.n_heads, config.head_dim, config.rope_dim)
    k_order = half_split_order(config.n_kv_heads, config.head_dim, config.rope_dim)
    with bar:
        embedding = matrix("token_embd.weight")
        layers = [
            Layer(
                q=matrix(f"blk.{i}.attn_q.weight", q_order),
                k=matrix(f"blk.{i}.attn_k.weight", k_order),
                v=matrix(f"blk.{i}.attn_v.weight"),
                o=matrix(f"blk.{i}.attn_output.weight"),
                gate=matrix(f"blk.{i}.ffn_gate.weight"),
                up=matrix(f"blk.{i}.ffn_up.weight"),
                down=matrix(f"blk.{i}.ffn_down.weight"),
                attn_norm=vector(f"blk.{i}.attn_norm.weight"),
                ffn_norm=vector(f"blk.{i}.ffn_norm.weight"),
            )
            for i in range(config.n_layers)
        ]
        return ForwardModel(
            layers=layers,
            embedding=embedding,
            head=embedding if config.tied else matrix("output.weight"),
            head_norm=vector("output_norm.weight"),
            inv_freq=inverse_frequencies(config.rope_theta, config.rope_dim),
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_eps=config.rms_eps,
            pool=pool,
            activations=activations,
        )
