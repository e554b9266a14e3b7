"""PagedKVCache: an arena whose pages hold typed keys and values of all layers for page_tokens tokens.

A page is [layer][KV head] tiles (csrc/pkv_kernels.h describes one), so a page is one contiguous range: sharing and copy on write are the
arena's. A KVSequence counts tokens on top of its page table.
"""

import math

import numpy as np

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from pagedkv.core._kernels cimport *
from pagedkv.core.arena cimport *
from pagedkv.core.arguments cimport bounded, integer, shown
from pagedkv.core.attention cimport *
from pagedkv.core.internal cimport unlock
from pagedkv.core.memory cimport pkv_alloc, pkv_release
from pagedkv.core.registry cimport enter_seq
from pagedkv.core.sequence cimport *
from pagedkv.core.structs cimport *

from pagedkv.core.arguments import check_scale, check_softcap
from pagedkv.core.errors import BadInput, PoolExhausted

FORMATS = ("f32", "f16", "int8")  # index: pkv_kvformat
PAGE_TOKENS = (16, 32, 64, 128, 256)


cdef object floats(str name, array):
    """array as C-contiguous float32; BadInput for what is not of real numbers: complex, text, bool, objects."""
    array = np.asarray(array)
    if array.dtype.kind == "b" or not np.can_cast(array.dtype, np.float32, "same_kind"):
        raise BadInput(f"{name}: an array of {array.dtype} is not one of real numbers")
    return np.ascontiguousarray(array, dtype=np.float32)


cdef int64_t checked_page_tokens(value) except -1:
    value = integer("page_tokens", value)
    if value not in PAGE_TOKENS:
        raise BadInput(f"page_tokens: {shown(value)} is not one of {PAGE_TOKENS}")
    return value


def tile_bytes(format, head_dim, page_tokens) -> int:
    """Bytes of one (layer, KV head) tile; a page is n_layers * n_kv_heads of them. BadInput for an unknown format, a head_dim outside
    [1, 8191] or other page_tokens than a cache has.
    """
    if format not in FORMATS:
        raise BadInput(f"format: {shown(format)} is not one of {', '.join(FORMATS)}")
    return pkv_tile_bytes(FORMATS.index(format), bounded("head_dim", head_dim, 1, (1 << 13) - 1), checked_page_tokens(page_tokens))


cdef class PagedKVCache(Arena):
    """PagedKVCache(n_layers, n_kv_heads, head_dim, *, n_pages, format='f16', page_tokens=16, max_pages=None, \
threads=None, growth_pages=None, guard=False)\n--\n
    Pages of typed K/V. n_pages pages at once, growing to max_pages (default: n_pages); memory is committed lazily.

    n_layers, n_kv_heads   in [1, 2^16); head_dim in [1, 2^13)
    format                 "f32", "f16" or "int8" (one float32 scale per token and KV head, fixed when the token is written)
    page_tokens            16, 32, 64, 128 or 256
    threads                of `attend`; default as everywhere (docs/engine.md)

    Raises BadInput naming the field, PoolExhausted when the system refuses memory.
    """

    def __init__(self, n_layers, n_kv_heads, head_dim, *, n_pages, format="f16", page_tokens=16, max_pages=None, threads=None,
                 growth_pages=None, guard=False):
        cdef attention_view *v = &self.view
        if self.ptr != NULL:
            raise BadInput("cache is initialised already")
        memset(v, 0, sizeof(attention_view))
        self.n_layers = bounded("n_layers", n_layers, 1, (<int64_t>1 << 16) - 1)
        v.n_kv_heads = bounded("n_kv_heads", n_kv_heads, 1, (<int64_t>1 << 16) - 1)
        v.head_dim = bounded("head_dim", head_dim, 1, (<int64_t>1 << 13) - 1)
        v.page_tokens = checked_page_tokens(page_tokens)
        v.tile_bytes = tile_bytes(format, v.head_dim, v.page_tokens)
        v.format = FORMATS.index(format)
        self.pool = threads if isinstance(threads, ThreadPool) else ThreadPool(threads)
        super().__init__(n_pages, self.n_layers * v.n_kv_heads * v.tile_bytes, max_pages=max_pages, growth_pages=growth_pages, guard=guard)
        v.storage = self.ptr.storage
        v.page_stride = self.ptr.page_stride

    @property
    def n_kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.view.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.view.head_dim

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.view.page_tokens

    @property
    def format(self) -> str:
        """Element format of the pages."""
        return FORMATS[self.view.format]

    def sequence(self, seq_id=0, max_pages=None):
        """A new empty KVSequence of at most max_pages pages (default: all the cache can ever hold)."""
        return KVSequence(self, seq_id, self.max_pages if max_pages is None else max_pages)

    def attend(self, layer, q, seqs, q_lens, *, scale=None, window=None, softcap=None):
        """Causal attention of the last q_lens[i] tokens of seqs[i] over that sequence's pages.

        q        float32 [sum(q_lens), n_heads, head_dim], n_heads a multiple of n_kv_heads
        scale    of the scores, default 1/sqrt(head_dim); 0, or normal in float32
        window   a token sees the last `window` tokens, itself included
        softcap  scores become softcap * tanh(score / softcap); in [2**-10, 1000], 0 or None: they do not
        returns  float32 [sum(q_lens), n_heads, head_dim]

        The bits of a row depend on its sequence and position alone. Releases the GIL. Raises BadInput. The sequences must not be
        changed by other threads meanwhile.
        """
        cdef attention_view v = self.view
        cdef int64_t at = bounded("layer", layer, 0, self.n_layers - 1)
        cdef attention_job job
        cdef int64_t i, n, status, before
        cdef KVSequence seq
        cdef list owners = list(seqs)
        cdef list lens = [bounded("q_lens", x, 0, (<int64_t>1 << 40) - 1) for x in q_lens]
        q = floats("q", q)
        if len(owners) != len(lens):
            raise BadInput(f"q_lens: {len(lens)} lengths for {len(owners)} sequences")
        if q.ndim != 3 or q.shape[0] != sum(lens) or q.shape[2] != v.head_dim or q.shape[1] == 0 or q.shape[1] % v.n_kv_heads:
            raise BadInput(f"q: shape {q.shape} is not ({sum(lens)}, a multiple of {v.n_kv_heads}, {v.head_dim})")
        scale = 1 / math.sqrt(v.head_dim) if scale is None else check_scale("scale", scale)
        softcap = 0.0 if softcap is None else check_softcap("softcap", softcap)
        v.window = 0 if window is None else bounded("window", window, 1, (<int64_t>1 << 40) - 1)
        v.scale, v.softcap = scale, softcap
        v.group = q.shape[1] // v.n_kv_heads
        for i, owner in enumerate(owners):
            if not isinstance(owner, KVSequence) or (<KVSequence>owner).arena is not self:
                raise BadInput(f"seqs: entry {i} is no sequence of this cache")
            (<KVSequence>owner).cache()
            if lens[i] > len(owner):
                raise BadInput(f"q_lens: {lens[i]} queries for entry {i}, a sequence of {len(owner)} tokens")
        out = np.empty_like(q)
        n = len(owners)
        memset(&job, 0, sizeof(job))
        job.v = &v
        job.layer = at
        job.pool = self.pool.ptr
        job.q = <const float *><size_t>q.ctypes.data
        job.out = <float *><size_t>out.ctypes.data
        self.hold()
        try:
            job.scratch = <float *>pkv_alloc(scratch_floats(&v) * sizeof(float) * self.pool.n_threads)
            if job.scratch == NULL or plan_spans(&job.plan, n):
                raise PoolExhausted("attend: the system refused scratch memory")
            row = 0
            for i in range(n):
                seq = owners[i]
                before = seq.ptr.n_tokens - <int64_t>lens[i]
                if before < 0:
                    raise BadInput(f"seqs: another thread cut entry {i} short meanwhile")
                job.plan.spans[i] = attention_span(seq.ptr.page_indices, row, lens[i], before, -1)
                row += lens[i]
            if plan_units(&job.plan, &v):
                raise PoolExhausted("attend: the system refused scratch memory")
            with nogil:
                status = pool_run(job.pool, attention_worker, &job)
            if status:
                raise PoolExhausted("attend: the system refused a worker thread")
        finally:
            plan_release(&job.plan)
            pkv_release(job.scratch)
            self.let_go()
        return out


cdef int64_t make_own(pkv_seq *s, int64_t n_new, int64_t first, int64_t stop) noexcept nogil:
    """Append n_new pages and make the table entries [first, stop) the sequence's own: 0, or a negated verdict.

    Nothing has changed then, unless other threads took the pages between the look and the copies: in that case no length and no content
    has changed, but entries already copied stay the sequence's own.
    """
    cdef int64_t used = pkv_seq_n_pages(s)
    cdef int64_t status = pkv_seq_can_write(s, n_new, first, stop)
    cdef int64_t i
    if status == 0:
        status = pkv_seq_append_pages(s, n_new)
    if status < 0:
        return status
    for i in range(first, stop):
        status = pkv_seq_write_page(s, i)
        if status < 0:
            pkv_seq_truncate_pages(s, used)
            return status
    return 0


cdef int64_t set_tokens(pkv_seq *s, int64_t n, int64_t page_tokens) noexcept nogil:
    """n_tokens becomes n, or what the pages hold if that is less: so it is for those who read it, whoever cuts the table
    short meanwhile. The number it has become, or TAMPER."""
    cdef int64_t result = enter_seq(s)
    if result == 0:
        result = min(n, s.n_pages_used * page_tokens)
        s.n_tokens = result
        unlock(s.arena)
    return result


cdef class KVSequence(Sequence):
    """KVSequence(arena, seq_id=0, max_pages=64)\n--\n
    The tokens of one sequence in a PagedKVCache. Made by PagedKVCache.sequence; len() is its number of tokens.
    """

    def __init__(self, PagedKVCache arena not None, seq_id=0, max_pages=64):
        super().__init__(arena, seq_id, max_pages)

    def __len__(self):
        return self.ptr.n_tokens if self.ptr != NULL else 0

    cdef PagedKVCache cache(self):
        """The cache of this sequence; Tampered when either is closed or damaged."""
        if not self.is_valid():
            raise self.refuse(-PKV_TAMPER, "")
        return self.arena

    cdef str cut_short(self, str call, int64_t tokens):
        """Why a call that was right when it began finds no pages to write: between the look and the copies the table became shorter."""
        return (f"{call}: {tokens} tokens exceed the {pkv_seq_n_pages(self.ptr)} pages of {self.cache().view.page_tokens} to which another "
                f"thread cut the sequence meanwhile")

    def extend(self, n) -> int:
        """Room for n more tokens on pages no other sequence holds; returns the position of the first. A shared tail page is copied.

        Raises PoolExhausted or SequenceFull with nothing changed (make_own says what a race may leave), BadInput for a bad n.
        """
        cdef int64_t page_tokens = self.cache().view.page_tokens
        cdef int64_t count = bounded("extend", n, 0, (<int64_t>1 << 40) - 1)
        cdef int64_t tokens = self.ptr.n_tokens
        cdef int64_t used = self.ptr.n_pages_used
        cdef int64_t needed = (tokens + count + page_tokens - 1) // page_tokens
        cdef int64_t code
        with nogil:
            code = make_own(self.ptr, max(needed - used, <int64_t>0), tokens // page_tokens, min(used, needed) if count else 0)
        if code < 0:
            raise self.refuse(code, f"extend: {count} more tokens" if code == -PKV_SEQ_FULL else
                              self.cut_short("extend", tokens) if code == -PKV_BAD_INPUT else "")
        code = set_tokens(self.ptr, tokens + count, page_tokens)
        if code < 0:
            raise self.refuse(code, "")
        if code < tokens + count:
            raise BadInput(f"extend: another thread cut the sequence to {code} tokens meanwhile")
        return tokens

    def truncate(self, n) -> None:
        """Keep the first n tokens and give back the pages behind them. BadInput when n is not in [0, len]."""
        cdef int64_t page_tokens = self.cache().view.page_tokens
        cdef int64_t count = bounded("truncate", n, 0, self.ptr.n_tokens)
        self.truncate_pages((count + page_tokens - 1) // page_tokens)
        set_tokens(self.ptr, count, page_tokens)

    def truncate_pages(self, n) -> None:
        """Keep the first n pages and the tokens on them. BadInput when n is not in [0, n_pages]."""
        cdef int64_t page_tokens = self.cache().view.page_tokens
        Sequence.truncate_pages(self, n)
        set_tokens(self.ptr, self.ptr.n_tokens, page_tokens)

    def share_prefix(self, pages, n_tokens) -> None:
        """Begin this empty sequence with held pages of another: n_tokens tokens in exactly the pages they fill.

        Raises BadInput when the sequence is not empty or the counts do not fit, else as share_pages; nothing changed then.
        """
        cdef list wanted = list(pages)
        cdef int64_t page_tokens = self.cache().view.page_tokens
        cdef int64_t count = bounded("share_prefix", n_tokens, 0, (<int64_t>1 << 40) - 1)
        if self.ptr.n_pages_used or self.ptr.n_tokens:
            raise BadInput(f"share_prefix: the sequence holds {self.ptr.n_tokens} tokens already")
        if (count + page_tokens - 1) // page_tokens != len(wanted):
            raise BadInput(f"share_prefix: {count} tokens do not fill {len(wanted)} pages of {page_tokens}")
        self.share_pages(wanted)
        set_tokens(self.ptr, count, page_tokens)

    def write_kv(self, layer, start, k, v) -> None:
        """Store K and V of one layer for tokens [start, start + n): float32 [n, n_kv_heads, head_dim] each.

        Pages shared with other holders are copied first. f16 rounds to nearest even. int8 refuses inf and NaN with BadInput naming
        token and head. Raises BadInput, PoolExhausted, and has written nothing then.
        """
        cdef PagedKVCache cache = self.cache()
        cdef attention_view *view = &cache.view
        cdef int64_t at = bounded("layer", layer, 0, cache.n_layers - 1)
        cdef int64_t first, n, t, h, code, position
        cdef const float *kp
        cdef const float *vp
        cdef uint64_t mode
        cdef int64_t n_tokens = self.ptr.n_tokens
        k, v = floats("k", k), floats("v", v)
        for name, array in (("k", k), ("v", v)):
            if array.ndim != 3 or array.shape[1] != view.n_kv_heads or array.shape[2] != view.head_dim:
                raise BadInput(f"{name}: shape {array.shape} is not (n, {view.n_kv_heads}, {view.head_dim})")
        if k.shape[0] != v.shape[0]:
            raise BadInput(f"v: {v.shape[0]} tokens, k has {k.shape[0]}")
        n = k.shape[0]
        if n > n_tokens:
            raise BadInput(f"k: {n} tokens, the sequence has {n_tokens}")
        first = bounded("start", start, 0, n_tokens - n)
        if view.format == PKV_KV_INT8:
            for name, array in (("k", k), ("v", v)):
                bad = np.argwhere(~np.isfinite(array).all(axis=2))
                if len(bad):
                    raise BadInput(f"{name}: token {first + int(bad[0][0])}, head {int(bad[0][1])} holds inf or NaN")
        kp = <const float *><size_t>k.ctypes.data
        vp = <const float *><size_t>v.ctypes.data
        cache.hold()
        try:
            with nogil:
                code = make_own(self.ptr, 0, first // view.page_tokens, (first + n + view.page_tokens - 1) // view.page_tokens if n else 0)
                if code >= 0:
                    mode = float_enter()
                    for t in range(n):
                        position = first + t
                        for h in range(view.n_kv_heads):
                            kern.kv_write[view.format](
                                kv_tile(view, self.ptr.page_indices[position // view.page_tokens], at, h),
                                kp + (t * view.n_kv_heads + h) * view.head_dim, vp + (t * view.n_kv_heads + h) * view.head_dim,
                                position % view.page_tokens, view.head_dim, view.page_tokens)
                    float_leave(mode)
        finally:
            cache.let_go()
        if code < 0:
            raise self.refuse(code, self.cut_short("write_kv", first + n) if code == -PKV_BAD_INPUT else "")

    def gather(self, layer):
        """K and V of one layer as two new float32 arrays [len, n_kv_heads, head_dim]. Raises BadInput. Releases the GIL."""
        cdef PagedKVCache cache = self.cache()
        cdef attention_view *view = &cache.view
        cdef int64_t at = bounded("layer", layer, 0, cache.n_layers - 1)
        cdef int64_t n = self.ptr.n_tokens
        cdef int64_t page, h
        cdef uint64_t mode
        cdef float *kp
        cdef float *vp
        k = np.empty((n, view.n_kv_heads, view.head_dim), np.float32)
        v = np.empty_like(k)
        kp = <float *><size_t>k.ctypes.data
        vp = <float *><size_t>v.ctypes.data
        cache.hold()
        try:
            with nogil:
                mode = float_enter()
                for page in range((n + view.page_tokens - 1) // view.page_tokens):
                    for h in range(view.n_kv_heads):
                        kern.kv_read[view.format](
                            kp + (page * view.page_tokens * view.n_kv_heads + h) * view.head_dim,
                            vp + (page * view.page_tokens * view.n_kv_heads + h) * view.head_dim,
                            kv_tile(view, self.ptr.page_indices[page], at, h), 0,
                            min(view.page_tokens, n - page * view.page_tokens), view.head_dim, view.page_tokens,
                            view.n_kv_heads * view.head_dim)
                float_leave(mode)
        finally:
            cache.let_go()
        return k, v
