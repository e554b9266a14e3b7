"""Layer: the weights of one layer, and what is particular to it. Arrays of callers in the form a step wants."""

import numpy as np

from libc.stdint cimport int64_t

from pagedkv.core.matmul cimport PackedMatrix

from pagedkv.core.errors import BadInput


cdef object float_array(values):
    """values as a contiguous float32 array, None as None."""
    return None if values is None else np.ascontiguousarray(values, np.float32)


cdef object int32_array(str field, values):
    """values as a contiguous int32 array; BadInput when they are not integers or do not fit."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.min() < -(1 << 31) or array.max() >= 1 << 31):
        raise BadInput(f"{field}: {array.dtype} values that are not integers of 32 bits")
    return np.ascontiguousarray(array, np.int32)


cdef const float *pointer(array):
    """Address of a float32 array's values, NULL for None. The caller keeps the array."""
    if array is None:
        return NULL
    return <const float *><size_t>array.ctypes.data


cdef class Layer:
    """Weights of one layer, and what is particular to it.

    q, k, v, o                        PackedMatrix; rows of q and k ordered so that rotation pairs are (i, i + rope_dim/2) in a head
    gate, up, down                    PackedMatrix of the feed-forward network; None in a layer of experts
    router, experts                   PackedMatrix [experts, hidden], and for each expert its (gate, up, down); None, (): no experts
    attn_norm, ffn_norm               float32 [hidden], before attention and before the feed-forward network; None: no such norm
    post_attn_norm, post_ffn_norm     float32 [hidden], of what each of the two adds to the residual stream
    q_bias, k_bias, v_bias            float32 [rows of q, k, v], all or none
    q_norm, k_norm                    float32 [head_dim], or [rows of q], [rows of k]: all heads together; both or none
    rope                              index of the rotation table; None: this layer does not rotate
    window                            a token sees the last `window` tokens, itself included; 0: all

    Immutable. Shapes are checked by ForwardModel. ValueError for both kinds of feed-forward network, or none.
    """

    def __init__(self, *, PackedMatrix q not None, PackedMatrix k not None, PackedMatrix v not None, PackedMatrix o not None,
                 PackedMatrix gate=None, PackedMatrix up=None, PackedMatrix down=None, PackedMatrix router=None, experts=(),
                 attn_norm=None, ffn_norm=None, post_attn_norm=None, post_ffn_norm=None, q_bias=None, k_bias=None, v_bias=None,
                 q_norm=None, k_norm=None, rope=0, window=0):
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = q, k, v, o, gate, up, down
        self.router, self.experts = router, tuple(tuple(expert) for expert in experts)
        if {part is None for part in (gate, up, down)} != {router is not None} or bool(self.experts) != (router is not None):
            raise ValueError("layer: either gate, up and down, or router and experts")
        if not all(len(expert) == 3 and all(isinstance(m, PackedMatrix) for m in expert) for expert in self.experts):
            raise ValueError("layer: an expert is a gate, an up and a down matrix")
        self.attn_norm, self.ffn_norm = float_array(attn_norm), float_array(ffn_norm)
        self.post_attn_norm, self.post_ffn_norm = float_array(post_attn_norm), float_array(post_ffn_norm)
        self.q_bias, self.k_bias, self.v_bias = float_array(q_bias), float_array(k_bias), float_array(v_bias)
        self.q_norm, self.k_norm = float_array(q_norm), float_array(k_norm)
        self.rope, self.window = rope, window

    @property
    def matrices(self) -> list:
        """Every PackedMatrix of the layer."""
        single = [self.q, self.k, self.v, self.o, self.gate, self.up, self.down, self.router]
        return [m for m in [*single, *(m for expert in self.experts for m in expert)] if m is not None]
