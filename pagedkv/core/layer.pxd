"""What one layer of a model is made of."""

from libc.stdint cimport int64_t

from pagedkv.core.matmul cimport PackedMatrix


cdef class Layer:
    cdef readonly PackedMatrix q, k, v, o, gate, up, down, router
    cdef readonly tuple experts
    cdef readonly object attn_norm, ffn_norm, post_attn_norm, post_ffn_norm, q_bias, k_bias, v_bias, q_norm, k_norm, rope
    cdef readonly int64_t window

cdef object float_array(values)
cdef object int32_array(str field, values)
cdef const float *pointer(array)
