"""Fills the C API struct and publishes it as the capsule that pkv_import() of pagedkv.h reads."""

from cpython.pycapsule cimport PyCapsule_New

from pagedkv.core.arena cimport *
from pagedkv.core.check cimport pkv_check
from pagedkv.core.prefix cimport *
from pagedkv.core.sequence cimport *
from pagedkv.core.structs cimport *
from pagedkv.core.typed cimport *

cdef pkv_api api
api.abi_version = PKV_ABI_VERSION
api.struct_size = sizeof(pkv_api)
api.arena_new = pkv_arena_new
api.arena_close = pkv_arena_close
api.arena_destroy = pkv_arena_destroy
api.arena_is_valid = pkv_arena_is_valid
api.arena_refcount = pkv_arena_refcount
api.arena_page_state = pkv_arena_page_state
api.arena_page = pkv_arena_page
api.arena_n_pages = pkv_arena_n_pages
api.arena_n_free = pkv_arena_n_free
api.arena_n_in_use = pkv_arena_n_in_use
api.arena_n_cached = pkv_arena_n_cached
api.arena_reserve = pkv_arena_reserve
api.arena_trim = pkv_arena_trim
api.seq_new = pkv_seq_new
api.seq_destroy = pkv_seq_destroy
api.seq_is_valid = pkv_seq_is_valid
api.seq_n_pages = pkv_seq_n_pages
api.seq_append_page = pkv_seq_append_page
api.seq_append_pages = pkv_seq_append_pages
api.seq_share_page = pkv_seq_share_page
api.seq_share_pages = pkv_seq_share_pages
api.seq_snapshot = pkv_seq_snapshot
api.seq_write_page = pkv_seq_write_page
api.seq_truncate_pages = pkv_seq_truncate_pages
api.seq_free = pkv_seq_free
api.prefix_new = pkv_prefix_new
api.prefix_destroy = pkv_prefix_destroy
api.prefix_is_valid = pkv_prefix_is_valid
api.prefix_lookup = pkv_prefix_lookup
api.prefix_match = pkv_prefix_match
api.prefix_insert = pkv_prefix_insert
api.prefix_clear = pkv_prefix_clear
api.check = pkv_check
api.kv_page_bytes = pkv_kv_page_bytes
api.kv_write = pkv_kv_write
api.kv_attend = pkv_kv_attend
api.pool_new = pkv_pool_new
api.pool_destroy = pkv_pool_destroy
api.kv_attend_on = pkv_kv_attend_on
api.kv_gather = pkv_kv_gather

_C_API = PyCapsule_New(&api, PKV_CAPSULE_NAME, NULL)
