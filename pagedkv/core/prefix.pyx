"""The prefix index: finds full pages by the tokens from the start of the sequence to the end of the page.

A tree over pages: an entry lives at its page's own index and names the page before it. The key is (parent page, tokens
of this page); the chained hash of all tokens so far only chooses the bucket, and every hit compares tokens and parent,
so a hash collision costs time, never a wrong page.

An indexed page whose last holder leaves becomes CACHED and goes to the young end of the LRU list; tables are dropped
last page first, so leaves age before their parents. Eviction takes the oldest CACHED page that has no indexed child.
"""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from pagedkv.core.arena cimport *
from pagedkv.core.arguments cimport bounded, integer, shown
from pagedkv.core.internal cimport *
from pagedkv.core.memory cimport pkv_alloc, pkv_map, pkv_release, pkv_unmap
from pagedkv.core.pages cimport pkv_held_drop, pkv_held_revive, pkv_held_uncache
from pagedkv.core.registry cimport enter, enter_both, enter_prefix, pkv_blame, pkv_blame_arena
from pagedkv.core.sequence cimport Sequence
from pagedkv.core.structs cimport *


# --- the tree, under the lock -----------------------------------------------------------------------------------------

cdef inline int32_t *tokens_of(pkv_prefix *p, uint32_t i) noexcept nogil:
    return p.tokens + i * p.page_tokens


cdef inline uint32_t *bucket_of(pkv_prefix *p, uint64_t hash) noexcept nogil:
    return p.buckets + (hash & <uint64_t>(p.n_buckets - 1))


cdef int64_t find(pkv_prefix *p, uint32_t parent, uint64_t hash, const int32_t *tokens) noexcept nogil:
    """The page with this parent and these tokens, NOT_FOUND, or TAMPER when the chain is damaged."""
    cdef uint32_t i = bucket_of(p, hash)[0]
    cdef int64_t steps = p.n_entries
    while i != PKV_NO_PAGE:
        if i >= p.arena.n_pages or not p.arena.pages[i].indexed or steps == 0:
            return poison(p.arena, PKV_FAULT_PREFIX, -1)
        if (p.entries[i].hash == hash and p.entries[i].parent == parent
                and memcmp(tokens_of(p, i), tokens, p.page_tokens * sizeof(int32_t)) == 0):
            return i
        i = p.entries[i].next_in_bucket
        steps -= 1
    return -PKV_NOT_FOUND


cdef inline bint valid_ref(const pkv_prefix *p, uint32_t i) noexcept nogil:
    return i == PKV_NO_PAGE or (i < p.arena.n_pages and p.arena.pages[i].indexed)


cdef int64_t add(pkv_prefix *p, uint32_t i, uint32_t parent, uint64_t hash, const int32_t *tokens) noexcept nogil:
    cdef pkv_prefix_entry *entry = p.entries + i
    cdef uint32_t *bucket = bucket_of(p, hash)
    if parent != PKV_NO_PAGE and not valid_ref(p, p.entries[parent].first_child):
        return poison(p.arena, PKV_FAULT_PREFIX, parent)
    entry.hash = hash
    entry.parent = parent
    entry.first_child = entry.next_sibling = entry.prev_sibling = PKV_NO_PAGE
    if parent != PKV_NO_PAGE:
        entry.next_sibling = p.entries[parent].first_child
        if entry.next_sibling != PKV_NO_PAGE:
            p.entries[entry.next_sibling].prev_sibling = i
        p.entries[parent].first_child = i
    entry.next_in_bucket = bucket[0]
    bucket[0] = i
    memcpy(tokens_of(p, i), tokens, p.page_tokens * sizeof(int32_t))
    p.arena.pages[i].indexed = 1
    p.n_entries += 1
    return 0


cdef int64_t remove_leaf(pkv_prefix *p, uint32_t i) noexcept nogil:
    """Take a childless entry out of tree and bucket; its page becomes FREE if it was CACHED. Or TAMPER, and it stays."""
    cdef pkv_arena *a = p.arena
    cdef pkv_prefix_entry *entry = p.entries + i
    cdef uint32_t *link = bucket_of(p, entry.hash)
    cdef int64_t steps = p.n_entries
    cdef int64_t status
    while link[0] != i:
        if link[0] >= a.n_pages or steps == 0:
            return poison(a, PKV_FAULT_PREFIX, i)
        link = &p.entries[link[0]].next_in_bucket
        steps -= 1
    if not (valid_ref(p, entry.parent) and valid_ref(p, entry.prev_sibling) and valid_ref(p, entry.next_sibling)):
        return poison(a, PKV_FAULT_PREFIX, i)
    if a.pages[i].state == PKV_PAGE_CACHED:
        status = pkv_held_uncache(a, i)
        if status:
            return status
    link[0] = entry.next_in_bucket
    if entry.next_sibling != PKV_NO_PAGE:
        p.entries[entry.next_sibling].prev_sibling = entry.prev_sibling
    if entry.prev_sibling != PKV_NO_PAGE:
        p.entries[entry.prev_sibling].next_sibling = entry.next_sibling
    elif entry.parent != PKV_NO_PAGE:
        p.entries[entry.parent].first_child = entry.next_sibling
    a.pages[i].indexed = 0
    p.n_entries -= 1
    return 0


cdef int64_t remove(pkv_prefix *p, uint32_t top) noexcept nogil:
    """Take an entry and all below it out of the index, children before parents."""
    cdef uint32_t i = top
    cdef uint32_t parent
    cdef int64_t status
    cdef int64_t steps = 2 * p.n_entries
    while True:
        while p.entries[i].first_child != PKV_NO_PAGE:
            i = p.entries[i].first_child
            steps -= 1
            if steps < 0 or not valid_ref(p, i):
                return poison(p.arena, PKV_FAULT_PREFIX, -1)
        parent = p.entries[i].parent
        status = remove_leaf(p, i)
        if status or i == top:
            return status
        if parent == PKV_NO_PAGE:
            return poison(p.arena, PKV_FAULT_PREFIX, i)
        i = parent


cdef void forget(pkv_arena *a, uint32_t i) noexcept nogil:
    """Hook of the arena: the content of page i is about to change."""
    if prefix_whole(a.prefix):
        remove(a.prefix, i)
    else:
        poison(a, PKV_FAULT_PREFIX, -1)


cdef int64_t evict(pkv_arena *a) noexcept nogil:
    """Hook of the arena: free the oldest CACHED page without an indexed child, or, when sequences hold a child of every
    CACHED page, the oldest with all that follow it dropped from the index. At least one page is CACHED."""
    cdef pkv_prefix *p = a.prefix
    cdef uint32_t head = lru_head(a)
    cdef uint32_t oldest = decode(a, head, a.pages[head].next)
    cdef uint32_t i = oldest
    cdef int64_t steps = a.n_cached
    cdef int64_t status
    if not prefix_whole(p):
        return poison(a, PKV_FAULT_PREFIX, -1)
    while i != head:
        if i >= a.n_pages or a.pages[i].state != PKV_PAGE_CACHED or not linked(a, i) or steps == 0:
            return poison(a, PKV_FAULT_LINK, <int64_t>i if i < a.n_pages else -1)
        if p.entries[i].first_child == PKV_NO_PAGE:
            break
        i = decode(a, i, a.pages[i].next)
        steps -= 1
    if i == head:
        i = oldest
        if i == head:
            return poison(a, PKV_FAULT_COUNTS, -1)
    status = remove(p, i)
    if status == 0:
        a.num_evicted += 1
    return status if status else <int64_t>i


# --- the index --------------------------------------------------------------------------------------------------------

cdef int64_t pkv_prefix_new(pkv_prefix **out, pkv_arena *arena, int64_t page_tokens, uint64_t seed) noexcept nogil:
    """Give an arena its prefix index, for pages of page_tokens tokens; the seed enters the hash.

    BAD_INPUT when page_tokens is out of range or the arena has an index, TAMPER, POOL_EXHAUSTED when memory is refused.
    """
    cdef pkv_prefix *p
    cdef int64_t status
    if out == NULL:
        return -PKV_BAD_INPUT
    out[0] = NULL
    if not pkv_arena_is_valid(arena):
        return -PKV_TAMPER
    if not 0 < page_tokens <= PKV_MAX_STORAGE // 4 // arena.max_pages:
        return -PKV_BAD_INPUT
    p = <pkv_prefix *>pkv_alloc(sizeof(PrefixBlock))
    if p == NULL:
        return -PKV_POOL_EXHAUSTED
    memset(p, 0, sizeof(PrefixBlock))
    p.canary_pre = PKV_PREFIX_CANARY_PRE
    p.canary_post = PKV_PREFIX_CANARY_POST
    p.page_tokens = page_tokens
    p.seed = seed
    p.n_buckets = 16
    while p.n_buckets < arena.max_pages:
        p.n_buckets *= 2
    p.buckets_bytes = p.n_buckets * sizeof(uint32_t)
    p.entries_bytes = arena.max_pages * sizeof(pkv_prefix_entry)
    p.tokens_bytes = arena.max_pages * page_tokens * sizeof(int32_t)
    p.buckets = <uint32_t *>pkv_map(p.buckets_bytes, True)
    p.entries = <pkv_prefix_entry *>pkv_map(p.entries_bytes, True) if p.buckets != NULL else NULL
    p.tokens = <int32_t *>pkv_map(p.tokens_bytes, True) if p.entries != NULL else NULL
    status = -PKV_POOL_EXHAUSTED
    if p.tokens != NULL:
        memset(p.buckets, 0xFF, p.buckets_bytes)
        status = enter(arena)
        if status == 0:
            if not lists_hold(arena):
                status = -PKV_TAMPER
            elif arena.prefix != NULL:
                status = -PKV_BAD_INPUT
            else:
                p.arena = arena
                arena.evict = evict
                arena.forget = forget
                arena.prefix = p
                seal_prefix(p)
                seal_roots(arena)
            unlock(arena)
    if status:
        release(p)
    else:
        out[0] = p
    return status


cdef void release(pkv_prefix *p) noexcept nogil:
    pkv_unmap(p.tokens, p.tokens_bytes)
    pkv_unmap(p.entries, p.entries_bytes)
    pkv_unmap(p.buckets, p.buckets_bytes)
    p.canary_pre = p.canary_post = 0
    pkv_release(p)


cdef int64_t clear(pkv_prefix *p) noexcept nogil:
    """Empty the index; CACHED pages become FREE. The lock is held."""
    cdef pkv_arena *a = p.arena
    cdef uint32_t i
    cdef int64_t status = 0
    for i in range(<uint32_t>a.n_pages):
        if status == 0 and a.pages[i].indexed:
            status = remove(p, i)
    return status


cdef int64_t pkv_prefix_clear(pkv_prefix *p) noexcept nogil:
    """Drop every entry; CACHED pages become FREE, pages in use stay with their holders. 0 or TAMPER."""
    cdef int64_t status = enter_prefix(p)
    if status == 0:
        status = clear(p)
        unlock(p.arena)
    return status


cdef int64_t pkv_prefix_destroy(pkv_prefix *p) noexcept nogil:
    """Clear the index, take it from its arena and release it, also after the arena was closed, poisoned or destroyed.

    A struct that is not whole is left alone: TAMPER. No other thread may be using the index.
    """
    cdef pkv_arena *a
    cdef bint known
    if not prefix_whole(p):
        return pkv_blame(p)
    a = p.arena
    if a != NULL:
        if not canaries_hold(a):
            return pkv_blame_arena(a)
        lock(a)
        known = lists_hold(a) and a.prefix == p
        if known:
            if a.fault == PKV_FAULT_NONE and constants_hold(a) and counts_hold(a):
                clear(p)
            a.evict = NULL
            a.forget = NULL
            a.prefix = NULL
            seal_roots(a)
        unlock(a)
        if not known:
            return -PKV_TAMPER
    release(p)
    return 0


cdef int64_t pkv_prefix_is_valid(pkv_prefix *p) noexcept nogil:
    """1 when the index and its arena pass the level 1 check, else 0."""
    if enter_prefix(p):
        return 0
    unlock(p.arena)
    return 1


cdef int64_t pkv_prefix_lookup(pkv_prefix *p, const int32_t *tokens, int64_t n_tokens) noexcept nogil:
    """Number of full pages of this token string that the index knows, from the first on; nothing changes. Or TAMPER,
    BAD_INPUT.
    """
    cdef int64_t k, page
    cdef uint32_t parent = PKV_NO_PAGE
    cdef uint64_t hash
    cdef int64_t result
    if n_tokens < 0 or (n_tokens and tokens == NULL):
        return -PKV_BAD_INPUT
    result = enter_prefix(p)
    if result:
        return result
    hash = p.seed
    for k in range(n_tokens // p.page_tokens):
        hash = chain_hash(hash, tokens + k * p.page_tokens, p.page_tokens)
        page = find(p, parent, hash, tokens + k * p.page_tokens)
        if page < 0:
            if page == -PKV_TAMPER:
                result = page
            break
        parent = <uint32_t>page
        result = k + 1
    unlock(p.arena)
    return result


cdef int64_t pkv_prefix_match(pkv_prefix *p, pkv_seq *s, const int32_t *tokens, int64_t n_tokens) noexcept nogil:
    """Share the longest known run of full pages of this token string into an empty sequence; the number of pages.

    Sets s->n_tokens. Stops at the sequence's max_pages. BAD_INPUT when s is not empty, of another arena, or n_tokens is
    negative; TAMPER.
    """
    cdef pkv_arena *a
    cdef int64_t k, page
    cdef uint32_t parent = PKV_NO_PAGE
    cdef uint64_t hash
    cdef int64_t result = enter_both(p, s)
    if result:
        return result
    a = p.arena
    if n_tokens < 0 or (n_tokens and tokens == NULL) or s.n_pages_used:
        unlock(a)
        return -PKV_BAD_INPUT
    p.num_queried += n_tokens
    hash = p.seed
    for k in range(min(n_tokens // p.page_tokens, s.max_pages)):
        hash = chain_hash(hash, tokens + k * p.page_tokens, p.page_tokens)
        page = find(p, parent, hash, tokens + k * p.page_tokens)
        if page >= 0:
            if hold(a, <uint32_t>page):
                page = -PKV_TAMPER
        if page < 0:
            if page == -PKV_TAMPER:
                result = page
            break
        s.page_indices[k] = <uint32_t>page
        s.n_pages_used = k + 1
        parent = <uint32_t>page
        result = k + 1
    s.n_tokens = s.n_pages_used * p.page_tokens
    p.num_hit += s.n_tokens
    unlock(a)
    return result


cdef int64_t hold(pkv_arena *a, uint32_t i) noexcept nogil:
    """One more holder for an indexed page."""
    if a.pages[i].state == PKV_PAGE_CACHED:
        return pkv_held_revive(a, i)
    if not holdable(a, i) or a.pages[i].refcount == <uint32_t>0xFFFFFFFF:
        return poison(a, PKV_FAULT_PAGE, i)
    a.pages[i].refcount += 1
    return 0


cdef int64_t pkv_prefix_insert(pkv_prefix *p, pkv_seq *s, const int32_t *tokens, int64_t n_tokens) noexcept nogil:
    """Make the full pages of s findable by their tokens, tokens[0] being the first token of its first page.

    A page whose content the index knows already under another page is exchanged for that one in the table and dropped:
    equal tokens after equal tokens mean equal content. Returns the number of leading pages of s that are in the index;
    smaller than n_tokens // page_tokens only when a page is indexed under other tokens. BAD_INPUT when s has fewer full
    pages, belongs to another arena, or n_tokens < 0; TAMPER. Pages in the index are read-only from now on; write_page
    takes them out.
    """
    cdef pkv_arena *a
    cdef pkv_prefix_entry *entry
    cdef const int32_t *content
    cdef int64_t k, known
    cdef uint32_t page, cursor
    cdef uint32_t parent = PKV_NO_PAGE
    cdef uint64_t hash
    cdef int64_t result = enter_both(p, s)
    if result:
        return result
    a = p.arena
    if n_tokens < 0 or (n_tokens and tokens == NULL) or n_tokens // p.page_tokens > s.n_pages_used:
        unlock(a)
        return -PKV_BAD_INPUT
    hash = p.seed
    cursor = free_head(a)
    for k in range(n_tokens // p.page_tokens):
        content = tokens + k * p.page_tokens
        page = s.page_indices[k]
        if not holdable(a, page):
            result = poison(a, PKV_FAULT_PAGE, page)
            break
        if a.pages[page].indexed:
            entry = p.entries + page
            if entry.parent != parent or memcmp(tokens_of(p, page), content, p.page_tokens * sizeof(int32_t)):
                break
            hash = entry.hash
        else:
            hash = chain_hash(hash, content, p.page_tokens)
            known = find(p, parent, hash, content)
            if known >= 0 and a.pages[page].refcount == 1 and not guard_holds(a, page):
                known = poison(a, PKV_FAULT_GUARD, page)
            if known == -PKV_NOT_FOUND:
                if add(p, page, parent, hash, content):
                    result = -PKV_TAMPER
                    break
            elif known < 0 or hold(a, <uint32_t>known):
                result = -PKV_TAMPER
                break
            else:
                s.page_indices[k] = <uint32_t>known
                if pkv_held_drop(a, page, &cursor):
                    result = -PKV_TAMPER
                    break
                page = <uint32_t>known
        parent = page
        result = k + 1
    unlock(a)
    return result


# --- Python edge ------------------------------------------------------------------------------------------------------

cdef class TokenBuffer:
    """int32 tokens: a one-dimensional C-contiguous int32 buffer without a copy, else the integers of an array or iterable. BadInput
    names the entry that is none, or does not fit; bytes are no tokens.
    """
    cdef Py_buffer view
    cdef bint held
    cdef int32_t *own
    cdef int64_t n

    def __cinit__(self, tokens):
        cdef list items
        cdef int64_t k
        if isinstance(tokens, (bytes, bytearray, str)):
            raise error(-PKV_BAD_INPUT, NULL, f"token_ids: {shown(tokens)} is {type(tokens).__name__}, not integers")
        if self.borrow(tokens):
            return
        try:
            items = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        except (TypeError, NotImplementedError):
            raise error(-PKV_BAD_INPUT, NULL, f"token_ids: {shown(tokens)} is no sequence of integers") from None
        self.n = len(items)
        self.own = <int32_t *>PyMem_Malloc(max(self.n, 1) * sizeof(int32_t))
        if self.own == NULL:
            raise MemoryError
        for k in range(self.n):
            self.own[k] = <int32_t>bounded_entry(k, items[k])

    cdef bint borrow(self, tokens) except -1:
        """Whether tokens is a buffer to be read as it is."""
        if not PyObject_CheckBuffer(tokens):
            return False
        try:
            PyObject_GetBuffer(tokens, &self.view, PyBUF_ND | PyBUF_FORMAT)
        except (BufferError, ValueError):
            return False
        self.held = (self.view.ndim == 1 and self.view.itemsize == 4 and self.view.format != NULL
                     and self.view.format in (b"i", b"l"))
        if self.held:
            self.own = <int32_t *>self.view.buf
            self.n = self.view.shape[0]
        else:
            PyBuffer_Release(&self.view)
        return self.held

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)
        else:
            PyMem_Free(self.own)

    cdef const int32_t *data(self) noexcept:
        return self.own

    cdef int64_t size(self) noexcept:
        return self.n


cdef int64_t bounded_entry(int64_t k, value) except? -1:
    if type(value) is int and -0x80000000 <= value <= 0x7FFFFFFF:
        return value
    return bounded(f"token_ids: entry {k}", value, -0x80000000, 0x7FFFFFFF)


cdef object refusal(PrefixIndex index, int64_t code, str message):
    """The exception for a negated verdict. Damage the arena did not see itself poisons it from here."""
    cdef pkv_arena *a = index.arena.ptr if index.arena is not None else NULL
    if code == -PKV_TAMPER and index.ptr != NULL and pkv_arena_is_valid(a):
        pkv_arena_poison(a, PKV_FAULT_SEQUENCE if pkv_prefix_is_valid(index.ptr) else PKV_FAULT_PREFIX, -1)
    return error(code, a, message)


@cython.no_gc_clear
cdef class PrefixIndex:
    """PrefixIndex(arena, page_tokens, *, seed=0)\n--\n
    Finds the pages of earlier sequences by their tokens. One per arena; CACHED pages are evicted when the pool needs
    them.

    arena        the pool whose pages are indexed
    page_tokens  tokens a page holds
    seed         enters the hash, 0 <= seed < 2**64

    Raises BadInput when page_tokens or seed is out of range or the arena has an index already, PoolExhausted when the
    system refuses memory. All methods may be called from any thread; they hold the arena's lock while they walk the
    pages named and keep the GIL. Token strings are int32 buffers, read without a copy, or other arrays and iterables of integers that
    fit in int32; only full pages of them count.
    """

    def __init__(self, Arena arena not None, page_tokens, *, seed=0):
        cdef int64_t code
        if self.ptr != NULL:
            raise error(-PKV_BAD_INPUT, NULL, "prefix index is initialised already")
        page_tokens, seed = bounded("page_tokens", page_tokens, 1, PKV_MAX_PAGES), integer("seed", seed)
        if not 0 <= seed < 1 << 64:
            raise error(-PKV_BAD_INPUT, NULL, f"seed: {shown(seed)} is outside [0, 2**64)")
        code = pkv_prefix_new(&self.ptr, arena.ptr, page_tokens, seed)
        self.arena = arena
        if code == -PKV_BAD_INPUT:
            raise error(code, arena.ptr, f"page_tokens: {page_tokens} is too large, or the arena has an index already")
        if code:
            raise error(code, arena.ptr, "the system refused memory for the prefix index")

    def __dealloc__(self):
        if self.ptr != NULL:
            pkv_prefix_destroy(self.ptr)

    @property
    def page_tokens(self):
        """Tokens a page holds."""
        return self.ptr.page_tokens if self.ptr != NULL else 0

    @property
    def n_pages(self):
        """Pages in the index, in use or cached."""
        return self.ptr.n_entries if self.ptr != NULL else 0

    @property
    def address(self):
        """Address of the pkv_prefix struct, for debugging and embedding; 0 before __init__."""
        return <size_t>self.ptr

    def is_valid(self):
        """Level 1 check of the index and its arena. Never raises."""
        return pkv_prefix_is_valid(self.ptr) == 1

    def lookup(self, token_ids):
        """Number of leading full pages of this token string that are known. Changes nothing, not even the eviction
        order.
        """
        cdef TokenBuffer tokens = TokenBuffer(token_ids)
        cdef int64_t code = pkv_prefix_lookup(self.ptr, tokens.data(), tokens.size())
        if code < 0:
            raise refusal(self, code, "")
        return code

    def match(self, Sequence seq not None, token_ids):
        """Share the longest known run of full pages of this token string into the empty sequence `seq`; returns the
        page count.

        Stops at seq.max_pages. To compute at least the last position anew, leave the last token out. BadInput when seq
        is not empty or of another arena.
        """
        cdef TokenBuffer tokens = TokenBuffer(token_ids)
        cdef int64_t code
        with cython.critical_section(seq):
            code = pkv_prefix_match(self.ptr, seq.ptr, tokens.data(), tokens.size())
        if code < 0:
            raise refusal(self, code, f"match: sequence {seq.seq_id} is not an empty sequence of this arena")
        return code

    def insert(self, Sequence seq not None, token_ids):
        """Make the full pages of `seq`, whose tokens are token_ids from its first on, findable; returns how many
        leading pages are.

        A page whose content is known under another index is exchanged for that page in seq's table and dropped. Indexed
        pages are read-only; write_page takes the page and all that follow it out of the index. BadInput when seq has
        fewer full pages than token_ids or is of another arena.
        """
        cdef TokenBuffer tokens = TokenBuffer(token_ids)
        cdef int64_t code
        with cython.critical_section(seq):
            code = pkv_prefix_insert(self.ptr, seq.ptr, tokens.data(), tokens.size())
        if code < 0:
            raise refusal(self, code, f"insert: {tokens.size()} tokens exceed the full pages of sequence {seq.seq_id}, "
                          f"or it is of another arena")
        return code

    def clear(self):
        """Forget everything; cached pages become free."""
        cdef int64_t code = pkv_prefix_clear(self.ptr)
        if code:
            raise refusal(self, code, "")

    def stats(self):
        """Counters as a dict: n_pages indexed, num_queried and num_hit in tokens over the index's life, by match
        only.
        """
        if self.ptr == NULL:
            raise refusal(self, -PKV_TAMPER, "")
        return {"n_pages": self.ptr.n_entries, "num_queried": self.ptr.num_queried, "num_hit": self.ptr.num_hit}
