"""What a GGUF file says about positions: rotations with their scaling, and windows."""

import numpy as np

from pagedkv.models.architectures import Architecture
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf_split import GGUF
from pagedkv.models.metadata import Metadata
from pagedkv.models.rope import Rope, yarn_attention

_TABLE, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_KINDS = ("none", "linear", "yarn", "longrope")


def read_ropes(
    file: GGUF, name: str, architecture: Architecture, head_dim: int, context: int
) -> tuple[tuple[Rope, ...], frozenset[str]]:
    """(the rotation of full layers, and of windowed layers where it is another one; names of the tensors they use).

    Raises ModelError naming key or tensor, value and range.
    """
    read = Metadata(file.metadata)
    key = f"{name}.rope"
    dim = read.integer(f"{key}.dimension_count", 2, head_dim, default=head_dim)
    if dim % 2:
        raise ModelError(f"{key}.dimension_count: {dim} is odd")
    theta = read.real(f"{key}.freq_base", 1.0, 1e12, default=10000.0)
    kind = read.text(f"{key}.scaling.type", default="none")
    if kind not in _KINDS:
        raise ModelError(f"{key}.scaling.type: {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    for unknown in (
        "scaling.yarn_log_multiplier",
        "scaling.yarn_ext_factor",
        "scaling.yarn_attn_factor",
        "scale_linear",
    ):
        read.absent(f"{key}.{unknown}")
    factor = read.real(f"{key}.scaling.factor", 1e-3, 1e6, default=1.0)
    original = read.integer(f"{key}.scaling.original_context_length", 1, 1 << 27, default=context)
    attention = read.real(f"{key}.scaling.attn_factor", 1e-3, 1e3, default=None)
    tables = frozenset({_TABLE, _LONG, _SHORT} & set(file.tensors))
    if tables >= {_LONG, _SHORT} and kind in ("none", "longrope"):
        rope = Rope(theta, dim, "longrope", context / original, original, attention,
                    short=_factors(file, _SHORT, dim), long=_factors(file, _LONG, dim))  # fmt: skip
    elif kind == "longrope" or tables - {_TABLE}:
        raise ModelError(f"{key}.scaling.type: {kind!r} with {sorted(tables)}, longrope needs {_LONG} and {_SHORT}")
    elif tables:
        if kind != "none":
            raise ModelError(f"tensor {_TABLE}: not supported together with {key}.scaling.type {kind!r}")
        rope = Rope(theta, dim, "factors", long=_factors(file, _TABLE, dim))
    elif kind == "yarn":
        attention = None if attention is None else attention * yarn_attention(factor)
        rope = Rope(theta, dim, "yarn", factor, original, attention,
                    beta_fast=read.real(f"{key}.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
                    beta_slow=read.real(f"{key}.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0))  # fmt: skip
    else:
        rope = Rope(theta, dim, kind, factor, original, attention)
    if architecture.local_theta is None:
        return (rope,), tables
    local = read.real(f"{key}.freq_base_swa", 1.0, 1e12, default=architecture.local_theta)
    return (rope, Rope(local, dim)), tables


def _factors(file: GGUF, name: str, dim: int) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.shape != (dim // 2,) or tensor.type_name != "F32":
        raise ModelError(f"tensor {name}: {tensor.type_name} {tensor.shape}, must be F32 ({dim // 2},)")
    values = np.frombuffer(file.data(name), np.float32)
    if not ((values >= 1e-6) & (values <= 1e6)).all():
        raise ModelError(f"tensor {name}: a factor that is not in [1e-06, 1e+06]")
    return tuple(values.tolist())


def read_windows(read: Metadata, name: str, architecture: Architecture, n_layers: int) -> tuple[int, ...]:
    """The window of each layer, 0: none. Raises ModelError for a pattern that is not the architecture's."""
    key = f"{name}.attention.sliding_window"
    if "attention.sliding_window" not in architecture.keys:
        return (0,) * n_layers
    windows = architecture.windows(read.integer(key, 0, 1 << 27, default=architecture.window), n_layers)
    pattern = read.entries.get(f"{key}_pattern")
    if isinstance(pattern, np.ndarray):
        agrees = [bool(x) for x in pattern.tolist()] == [window > 0 for window in windows]
    else:
        agrees = pattern is None or pattern == architecture.full_every
    if not agrees:
        raise ModelError(
            f"{key}_pattern: not the pattern of {name}, where full layers come every {architecture.full_every}"
        )
    return windows
